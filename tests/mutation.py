"""Break the library on purpose, one place at a time: a test has to notice. Part of `make test-all`.

    python tests/mutation.py                        all of mutants.py, two at a time
    python tests/mutation.py --only rule-gap-sign   some of them, by name
    python tests/mutation.py --list                 what there is
    python tests/mutation.py --record FILE.json     the result as JSON

Each job works in a copy of the repository of its own. A mutant is killed if one of the tests named for it
fails or hangs; one that survives those is tried on the whole suite before it counts as survived.
"""

import argparse
import json
import os
import platform
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[1]
SOURCE = Path("src/paceline/optim")
NOT_COPIED = (".venv", ".git", "__pycache__", ".*_cache", ".hypothesis", "demo-output", "build", "dist")
# Compares the source with mutants.py, so it would kill each of them.
NOT_A_KILLER = "tests/test_mutants.py"
LIMIT_S = 300  # of the tests named for one mutant, which take seconds
SUITE_LIMIT_S = 3600
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


class Stopped(Exception):
    """By Ctrl-C, or because another job found that the run makes no sense."""


class Unusable(Exception):
    """The tests cannot be run, or fail on the library as it is; the message says more."""


# --- Running tests --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    code: int | None  # None: it took too long
    output: str

    def passed(self) -> bool:
        """False for a test that failed (1), a crash (a signal's negative number) and a hang."""
        if self.code is not None and self.code > 1:  # e.g. no such test, which says nothing of a mutant
            raise Unusable(f"exit code {self.code}:\n{self.output[-3000:]}")
        return self.code == 0

    def failure(self) -> str:
        """The first test that failed."""
        if self.code is None:
            return "(hangs)"
        found = FAILED.search(self.output)
        return found[1] if found else f"(exit code {self.code})"


class Forks:
    """A process of forking.py in a folder, which has torch already, and the fork of it that runs tests."""

    def __init__(self, folder: Path, environment: dict[str, str], output: Path) -> None:
        self._output, self._lock, self._stopped = output, threading.Lock(), False
        self._fork: int | None = None
        self._process = subprocess.Popen(
            [sys.executable, str(folder / "tests" / "forking.py")],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.imported = self._answer()
        """Where tests would import the library from."""

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        if self._stopped:
            raise Stopped
        if not answer:
            raise Unusable(f"tests/forking.py ended with {self._process.wait()}")
        return answer

    def pytest(self, arguments: Sequence[str], limit_s: float) -> Run:
        assert self._process.stdin is not None
        self._output.write_bytes(b"")
        with suppress(BrokenPipeError):  # then there is no answer
            self._process.stdin.write(json.dumps([arguments, str(self._output)]) + "\n")
            self._process.stdin.flush()
        with self._lock:
            self._fork = int(self._answer())
        late = threading.Event()
        limit = threading.Timer(limit_s, lambda: (late.set(), self._end_fork()))
        limit.start()
        try:
            code = int(self._answer())
        finally:
            limit.cancel()
            self._end_fork()  # also what tests have left running
        return Run(None if late.is_set() else code, self._output.read_text(errors="replace"))

    def _end_fork(self) -> None:
        with self._lock:
            if self._fork is not None:
                _end(self._fork)
            self._fork = None

    def stop(self) -> None:
        self._stopped = True
        _end(self._process.pid)
        self._end_fork()
        self._process.wait()


def _end(leader: int) -> None:
    """With all of its session's group: tests start processes too."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


class Copy:
    """A copy of the repository, in which one job breaks the library and runs tests."""

    def __init__(self, original: Path, folder: Path) -> None:
        shutil.copytree(original, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))
        self.folder = folder
        temporary = folder.with_name(f"{folder.name}-temporary")
        temporary.mkdir()
        environment = {
            **os.environ,
            "PYTHONPATH": str(folder / "src"),
            # A mutant may have the size and the second of the file it replaces, and by these Python
            # decides whether a compiled one is up to date.
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(temporary),
        }
        self._forks = Forks(folder, environment, temporary / "output")
        # The environment may have the original installed, editable.
        found = self._forks.imported
        if not Path(found).is_relative_to(folder / "src"):
            self.stop()
            raise Unusable(f"the tests would import {found}, not the copy in {folder}")

    def stop(self) -> None:
        self._forks.stop()

    def source(self, mutant: Mutant) -> Path:
        return self.folder / SOURCE / mutant.file

    def pytest(self, *arguments: str, limit_s: float = LIMIT_S) -> Run:
        # The longest tests too: some mutants are for them.
        options = ("-x", "-q", "-m", "", "--tb=no", "-rfE", "-p", "no:cacheprovider", "--hypothesis-seed=0")
        return self._forks.pytest([*options, *arguments], limit_s)

    @contextmanager
    def broken(self, mutant: Mutant) -> Iterator[None]:
        text = self.source(mutant).read_text()
        self.source(mutant).write_text(mutant.applied_to(text))
        try:
            yield
        finally:
            self.source(mutant).write_text(text)


# --- Judging a mutant -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    verdict: str  # killed, hangs (counts as killed), survived
    by: str  # the test that failed
    seconds: float


def judge(copy: Copy, mutant: Mutant, whole_suite: bool) -> Outcome:
    start = time.monotonic()
    with copy.broken(mutant):
        run = copy.pytest(*mutant.killers)
    verdict, by = "killed", "" if run.passed() else run.failure()
    if run.code is None:
        verdict = "hangs"
    elif not by and whole_suite:
        by = failure_of_the_suite(copy, mutant)
        # Worth knowing: the mutant should name that test.
        by = by and f"{by} (not among its killers)"
    return Outcome(mutant, verdict if by else "survived", by, round(time.monotonic() - start, 1))


def failure_of_the_suite(copy: Copy, mutant: Mutant) -> str:
    """The first test of the whole suite that fails for the mutant and for nothing else, or nothing."""
    others: list[str] = []
    while True:
        deselected = [f"--deselect={test}" for test in others]
        with copy.broken(mutant):
            suite = ("-m", "not long", f"--ignore={NOT_A_KILLER}")
            run = copy.pytest(*suite, *deselected, limit_s=SUITE_LIMIT_S)
        # A suite that is out of time has not decided anything.
        if run.code is None or run.passed():
            return ""
        test = run.failure()
        if copy.pytest(test).code == 0:
            return test
        others.append(test)  # fails on the library as it is, too


def check_places(copy: Copy, mutants: list[Mutant]) -> None:
    """Each mutant finds the one place that it changes."""
    messages = []
    for mutant in mutants:
        try:
            mutant.applied_to(copy.source(mutant).read_text())
        except (ValueError, OSError) as error:
            messages.append(f"{mutant.name}: {error}")
    if messages:
        raise Unusable("\n".join(messages))


def check_unchanged(copy: Copy, killers: list[str]) -> None:
    """They pass on the library as it is; otherwise everything would count as killed."""
    run = copy.pytest(*killers, limit_s=SUITE_LIMIT_S)
    if not run.passed():
        raise Unusable(f"fails without any mutant: {run.failure()}\n{run.output[-3000:]}")


# --- All of them ----------------------------------------------------------------------------------


def run_all(mutants: list[Mutant], jobs: int, whole_suite: bool) -> list[Outcome]:
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in mutants:
        waiting.put(mutant)
    outcomes: list[Outcome] = []

    def work(copy: Copy) -> None:
        with suppress(queue.Empty, Stopped):
            while True:
                outcome = judge(copy, waiting.get_nowait(), whole_suite)
                outcomes.append(outcome)
                show(outcome, len(outcomes), len(mutants))

    killers = list(dict.fromkeys(killer for mutant in mutants for killer in mutant.killers))
    jobs = min(jobs, len(killers))  # one that has none to check would run the whole suite
    copies: list[Copy] = []
    with temporary_folder() as folder, ThreadPoolExecutor(jobs) as pool:

        def all_do(work: Callable[[Copy], None]) -> None:
            working = [pool.submit(work, copy) for copy in copies]
            wait(working, return_when=FIRST_EXCEPTION)
            for job in working:
                if job.done():
                    job.result()

        try:
            copies.append(Copy(ROOT, folder / "0"))
            check_places(copies[0], mutants)
            # From the first copy, so that all are alike even if somebody is editing.
            copies.extend(Copy(copies[0].folder, folder / str(i)) for i in range(1, jobs))
            print(f"unchanged, over all killers of {len(mutants)} mutants …", flush=True)
            # In turns, as those of one file, which take alike, are beside each other.
            all_do(lambda copy: check_unchanged(copy, killers[copies.index(copy) :: jobs]))
            all_do(work)
        finally:
            for copy in copies:
                copy.stop()
    order = {mutant.name: i for i, mutant in enumerate(mutants)}
    return sorted(outcomes, key=lambda outcome: order[outcome.mutant.name])


@contextmanager
def temporary_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="paceline-mutation-"))
    try:
        yield folder
    finally:
        for _ in range(50):  # a process that was just ended may still be writing
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.1)


def show(outcome: Outcome, done: int, total: int) -> None:
    verdict = outcome.verdict.upper() if outcome.verdict != "killed" else "killed"
    line = f"{done:>4}/{total}  {outcome.seconds:6.1f} s  {verdict:<8}  {outcome.mutant.name}"
    print(f"{line}  by {outcome.by}" if outcome.by else line, flush=True)


# --- The record -----------------------------------------------------------------------------------


def write_record(path: Path, outcomes: list[Outcome], seconds: float, of: str | None) -> None:
    """`of` is the commit at the start: what is committed meanwhile was not tried."""
    counts = Counter(outcome.verdict for outcome in outcomes)
    head = {
        "date": date.today().isoformat(),
        "commit": of,
        "python": platform.python_version(),
        "torch": version("torch"),
        "cpu_cores": os.cpu_count(),
        "seconds": round(seconds),
        "mutants": len(outcomes),
        "killed": counts["killed"] + counts["hangs"],
        "of which hang": counts["hangs"],
        "survived": counts["survived"],
    }
    rows = [
        {"name": o.mutant.name, "file": o.mutant.file, "verdict": o.verdict, "by": o.by, "seconds": o.seconds}
        for o in outcomes
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**head, "results": rows}, indent=1, ensure_ascii=False) + "\n")


def commit() -> str | None:
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


# --- The command ----------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (2)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants")
    parser.add_argument("--killers-only", action="store_true", help="spare survivors the whole suite")
    parser.add_argument("--record", type=Path, metavar="FILE.json", help="write the result")
    parser.add_argument("--list", action="store_true", help="name the mutants and do nothing")
    arguments = parser.parse_args()
    names = {mutant.name for mutant in MUTANTS}
    if unknown := set(arguments.only or ()) - names:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}; see --list")
    mutants = [mutant for mutant in MUTANTS if not arguments.only or mutant.name in arguments.only]
    if arguments.list:
        print("\n".join(f"{mutant.file:28} {mutant.name}" for mutant in mutants))
        return 0

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C, and cleans up
    start, of = time.monotonic(), commit()
    try:
        outcomes = run_all(mutants, arguments.jobs, not arguments.killers_only)
    except KeyboardInterrupt:
        print("stopped")
        return 130
    except Unusable as error:
        print(error)
        return 1
    seconds = time.monotonic() - start
    if arguments.record:
        write_record(arguments.record, outcomes, seconds, of)
    survived = [outcome.mutant for outcome in outcomes if outcome.verdict == "survived"]
    killed = len(outcomes) - len(survived)
    print(f"\n{killed} of {len(outcomes)} mutants killed in {seconds / 60:.1f} minutes")
    for mutant in survived:
        print(f"survived: {mutant.name} ({mutant.file})\n{mutant.difference()}")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
