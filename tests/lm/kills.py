"""Trainers killed with SIGKILL again and again: what comes out must be what an undisturbed run gives.

Every trial is a real process with the real trainer in it, forked from one that has imported torch already.
A kill comes after a random time, or inside a save: at the n-th call that changes the disk.

    python tests/lm/kills.py --kills 1000 --jobs 2 --record records/DATE-kills.json
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from paceline.lm import checkpoint, files
from paceline.runs import records
from paceline.runs.config import Run
from paceline.runs.run import execute


@dataclass
class Tally:
    """What became of the trials."""

    runs: int = 0
    kills: int = 0
    inside_save: int = 0
    differences: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(Tally)))


def train_to_the_end(run: Run, folder: Path) -> None:
    for _ in execute(run, folder, lambda text: None):
        pass


def undisturbed(run: Run, folder: Path) -> float:
    """The run that all others must equal; how long it took, in seconds."""
    began = time.monotonic()
    assert in_a_child(lambda: train_to_the_end(run, folder)) == 0
    return time.monotonic() - began


def in_a_child(work: Callable[[], None], kill_after: float | None = None) -> int:
    """Do it in a process of its own, perhaps killed; 0 if it came to its end, else what ended it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            os._exit(code)
    deadline = None if kill_after is None else time.monotonic() + kill_after
    while True:
        done, status = os.waitpid(child, os.WNOHANG if deadline is not None else 0)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -signal.SIGKILL
        time.sleep(0.001)


def die_inside_a_save(which: int) -> None:
    """From here on, this process kills itself at the n-th call of a save that touches the disk."""
    left = which
    saving = False

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if saving:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return replacement

    for owner, name in (
        (os, "open"),
        (os, "fsync"),
        (os, "replace"),
        (os, "rename"),
        (os, "unlink"),
        (os, "rmdir"),
        (os, "mkdir"),
        (Path, "write_text"),
        (Path, "chmod"),
    ):
        setattr(owner, name, counted(getattr(owner, name)))
    save, prune = checkpoint.save, checkpoint.prune

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            nonlocal saving
            saving = True
            try:
                return call(*args, **kwargs)
            finally:
                saving = False

        return replacement

    checkpoint.save, checkpoint.prune = watched(save), watched(prune)


def save_naively(root: Path, step: int, state: Any, facts: Any) -> Path:
    """How many trainers save: straight into the final folder, file by file, manifest and all first."""
    final = root / f"step-{step:08d}"
    keep, files.os.replace = files.os.replace, lambda a, b: (shutil.rmtree(b, True), shutil.copytree(a, b))
    try:
        _SAVE(root, step, state, facts)
    finally:
        files.os.replace = keep
    return final


_SAVE = checkpoint.save
_CHECK = checkpoint.check


def naive() -> None:
    """The broken twin: no rename commits a checkpoint, and none is checked when it is loaded."""
    checkpoint.save = save_naively
    checkpoint.check = lambda folder: {}


def differences(folder: Path, expected: Path) -> list[str]:
    """Files of the final state that are not the same to the byte; timing is left out."""
    found = []
    names = sorted(
        p.relative_to(expected)
        for p in expected.rglob("*")
        if p.is_file() and p.name not in ("lock", "timing.jsonl")
    )
    for name in names:
        ours = folder / name
        if not ours.is_file() or ours.read_bytes() != (expected / name).read_bytes():
            found.append(str(name))
    extra = {p.relative_to(folder) for p in folder.rglob("*") if p.is_file()} - {
        *names,
        Path("lock"),
        Path("timing.jsonl"),
    }
    return found + [f"{name} should not be there" for name in sorted(extra)]


def trial(
    run: Run,
    expected: Path,
    took: float,
    chance: random.Random,
    tally: Tally,
    prepare: Callable[[], None],
    aimed_share: float,
) -> None:
    """One run, killed several times on its way."""
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    try:
        tally.runs += 1
        for _ in range(1000):
            aimed = chance.random() < aimed_share
            kills = chance.random() < 0.85

            def work(aimed: bool = aimed and kills, which: int = chance.randint(1, 60)) -> None:
                prepare()
                if aimed:
                    die_inside_a_save(which)
                train_to_the_end(run, folder)

            code = in_a_child(
                work, kill_after=chance.uniform(0.02, 0.7 * took) if kills and not aimed else None
            )
            if code == -signal.SIGKILL:
                tally.kills += 1
                tally.inside_save += aimed
            elif code:
                tally.errors.append(f"exit code {code} with {folder}")
                return
            else:
                break
        tally.differences += [f"{name} in run {tally.runs}" for name in differences(folder, expected)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def campaign(
    runs: dict[str, Run],
    kills: int,
    seed: int,
    *,
    prepare: Callable[[], None] = lambda: None,
    aimed: float = 0.2,
    say: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Trials of all runs in turn until there were that many kills; `say` hears of each trial."""
    torch.set_num_threads(1)  # a pool of threads would not survive a fork
    records.environment()  # known to all children from here on, though somebody may commit meanwhile
    chance, tally = random.Random(seed), Tally()
    with tempfile.TemporaryDirectory() as room:
        expected = {}
        for name, run in runs.items():
            undisturbed(run, Path(room) / f"{name} to prepare the data")
            folder = Path(room) / name
            expected[name] = folder, undisturbed(run, folder)
        while tally.kills < kills:
            for name, run in runs.items():
                trial(run, *expected[name], chance, tally, prepare, aimed)
                say(tally)
                if tally.errors or tally.kills >= kills:
                    break
            if tally.errors:
                break
    return tally


def campaigns(kills: int, seed: int, jobs: int, say: Callable[[Tally], None]) -> Tally:
    """Several at once, each with a room, a share of the kills and a seed of its own; `say` hears of all."""
    fork = multiprocessing.get_context("fork")
    news = fork.SimpleQueue()

    def work(which: int) -> None:
        share = kills // jobs + (which < kills % jobs)
        try:
            with tempfile.TemporaryDirectory() as room:
                told = campaign(runs_in(Path(room)), share, seed + which, say=lambda t: news.put((which, t)))
                news.put((which, told))
        finally:
            news.put((which, None))

    workers = [fork.Process(target=work, args=(which,)) for which in range(jobs)]
    for worker in workers:
        worker.start()
    tallies, working = [Tally() for _ in workers], jobs
    while working:
        which, tally = news.get()
        if tally is None:
            working -= 1
        else:
            tallies[which] = tally
            say(sum(tallies, Tally()))
    for worker in workers:
        worker.join()
    broken = [f"a campaign ended with exit code {worker.exitcode}" for worker in workers if worker.exitcode]
    return sum(tallies, Tally(errors=broken))


def runs_in(room: Path) -> dict[str, Run]:
    """A pretraining and a fine-tuning run, seconds long, with all that must survive: dropout, averages,
    accumulation, several epochs, evaluations between checkpoints."""
    from tiny import write_chats, write_model, write_text

    os.environ["PACELINE_CACHE"] = str(room / "cache")
    text = str(write_text(room / "text.txt"))
    chats, model = str(write_chats(room / "chats.jsonl")), str(write_model(room / "model"))
    common: dict[str, Any] = {
        "batch_size": 4,
        "micro_batch_size": 2,
        "checkpoint_every": 2,
        "evaluate_every": 5,
        "warmup": 3,
        "device": "cpu",
        "held_out_samples": 2,
    }
    pretrain = Run(
        data=(text,),
        model="gpt:0.3m",
        tokenizer="bpe:300",
        length=32,
        dropout=0.1,
        steps=14,
        method="adamw+push:every=2,return_power=0.8",
        averages=("power:0.5", "bema:0.5"),
        schedule="wsd",
        telemetry_every=4,
        **common,
    )
    sft = Run(task="sft", data=(chats,), model=model, length=64, epochs=1.5, method="pace", **common)
    return {"pretrain": pretrain, "sft": sft}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="each job adds its number")
    parser.add_argument("--jobs", type=int, default=1, help="trainers at once (1)")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    if options.kills < 1 or options.jobs < 1:
        parser.error("--kills and --jobs must be at least 1")
    began = time.monotonic()
    tally = campaigns(
        options.kills,
        options.seed,
        options.jobs,
        lambda tally: print(f"\r{tally.kills} of {options.kills} kills", end="", file=sys.stderr),
    )
    print(file=sys.stderr)
    result = {
        "what": "SIGKILLs of trainers at random moments; final files compared to the byte",
        "date": time.strftime("%F"),
        "seed": options.seed,
        "jobs": options.jobs,
        "runs": tally.runs,
        "kills": tally.kills,
        "inside_save": tally.inside_save,
        "differences": tally.differences,
        "errors": tally.errors,
        "manual_clean_ups": 0,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "torch": torch.__version__,
    }
    print(json.dumps(result, indent=1))
    if options.record:
        options.record.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if tally.differences or tally.errors else 0


if __name__ == "__main__":
    sys.exit(main())
