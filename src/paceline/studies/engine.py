"""The engine of a study: does its runs in parallel, each once, saved when stopped, and resumed.

.. code-block:: text

    FOLDER/runs/NAME/      each run: records.jsonl, timing.jsonl, and checkpoints while they are needed
    FOLDER/lock            which process works here, while it does

A run whose fork is NAME@STEP of another run of the study waits for the end of that one, whose checkpoint
stays until it has been used.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from paceline.lm.files import BusyError, locked, remove_temporary
from paceline.lm.loop import Step
from paceline.runs.config import ConfigError, Run
from paceline.runs.run import (
    Event,
    Notice,
    drop_checkpoints,
    end_of,
    execute,
    has_checkpoint,
    is_finished,
)
from paceline.studies import pool
from paceline.studies.pool import Ended, Target
from paceline.studies.runs import Named, folder_of

Message = tuple[Named, Event | Ended] | None
"""What happens to which run; None now and then when nothing does."""

Workers = Callable[[Target, Iterable[Named | None]], Iterator[Any]]
"""Calls a function with each run, several in parallel, as `pool.do_all` does."""

AT_ONCE = 4  # runs on CPUs, if nothing else is said


def local(runs: Sequence[Run], jobs: int | None = None) -> Workers:
    """Return the workers of this machine, which share its cores.

    Arguments:
        runs: those to be done; runs that name a GPU get that one, others share all GPUs.
        jobs: how many in parallel. None: one a GPU; without a GPU one a core, at most 4.
    """
    import torch

    named = any(run.device not in ("auto", "cuda") for run in runs)
    gpus = [] if named else _gpus(torch.cuda.device_count())
    cores = count_cores()
    jobs = max(1, min(jobs or len(gpus) or min(cores, AT_ONCE), len(runs)))
    return partial(pool.do_all, jobs=jobs, threads=threads_of(cores // jobs), gpus=gpus)


def threads_of(share: int) -> int:
    """Return the threads of a run: OMP_NUM_THREADS if it is set, else its share of the cores."""
    word = os.environ.get("OMP_NUM_THREADS", "")
    return int(word) if word.isdigit() and int(word) else max(1, share)


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus(count: int) -> list[str]:
    """Return the name of each GPU that this process sees."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return (visible or [str(number) for number in range(count)])[:count]


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep all other processes out of the folder of a study, which is made if it is not there.

    Raises:
        ConfigError: the folder cannot be written.
        BusyError: another process works in it.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder))
        except OSError as error:
            raise ConfigError(f"cannot write to {folder}: {error.strerror}") from None
        remove_temporary(folder)
        yield


def do(
    runs: Sequence[Named], folder: Path, workers: Workers, later: Sequence[Named] = ()
) -> Iterator[Message]:
    """Do all runs that are not done, and yield what happens to each.

    Arguments:
        runs: the study; names are different.
        folder: that of the study, which the caller holds (`held`).
        workers: who does the runs, e.g. `local(…)`.
        later: runs that are not done now; checkpoints that they will continue stay.
    """
    board = _Board(runs, folder, later)
    for message in workers(partial(train, folder), board.orders()):
        if message is not None and isinstance(message[1], Ended):
            board.settle(*message)
        yield message
        yield from board.news()
    yield from board.news()
    board.clean(*(one.name for one in runs))  # killed before its checkpoints went


def is_done(folder: Path, name: str) -> bool:
    """Return whether a run of the study in a folder has nothing left to do, and its records are there."""
    run, place = folder_of(folder, name), folder_of(folder, name) / "records.jsonl"
    return place.exists() and place.stat().st_size > 0 and is_finished(run)


def train(folder: Path, one: Named, send: Callable[[object], None]) -> None:
    """Do one run, or the rest of it, and send what happens: of its steps a few a second."""
    run = folder_of(folder, one.name)
    if is_finished(run) and not is_done(folder, one.name):
        send(Notice(text=f"{one.name} has lost its records, and is done again"))
        (run / "timing.jsonl").unlink()
    watch = Divergence(warmup=one.run.warmup)
    for attempt in range(100):
        try:
            spoke = 0.0
            for event in execute(one.run, run, lambda text: send(Notice(text=text)), watch):
                if not isinstance(event, Step) or time.monotonic() - spoke > 0.25:
                    spoke = time.monotonic()
                    send(event)
            return
        except BusyError:  # the process of a parent that was killed may need a moment to end
            if attempt == 99:
                raise
            time.sleep(0.2)


class _Board:
    """The state of a study: runs that wait, runs that failed, and checkpoints that others still need."""

    def __init__(self, runs: Sequence[Named], folder: Path, later: Sequence[Named]) -> None:
        self._folder = folder
        self._names = {one.name for one in runs}
        self._continued = dict[str, list[Named]]()
        for one in (*runs, *later):
            if one.run.after is not None:
                self._continued.setdefault(one.run.after[0], []).append(one)
        self._waiting = [one for one in runs if not self._is_done(one.name)]
        self._at_work = set[str]()
        self._failed = dict[str, str]()
        self._news = deque[tuple[Named, Ended]]()

    def _is_done(self, name: str) -> bool:
        return is_done(self._folder, name)

    def orders(self) -> Iterator[Named | None]:
        """Yield the first run that can begin; None while those that wait need others that are at work."""
        while self._waiting or self._at_work:
            # From the start each time: what waited for a run that has ended comes before later ones.
            one = next((one for one in list(self._waiting) if self._may_begin(one)), None)
            if one is not None:
                self._waiting.remove(one)
                self._at_work.add(one.name)
            yield one

    def _may_begin(self, one: Named) -> bool:
        """Return whether what a run continues is there; if it never will be, the run has ended."""
        if one.run.after is None or one.run.after[0] not in self._names:
            return True
        name, step = one.run.after
        if name in self._failed:
            self._give_up(one, "failed", f"{name}, which it continues, failed: {self._failed[name]}")
        elif (end := end_of(folder_of(self._folder, name))) is None:
            return False
        elif has_checkpoint(folder_of(self._folder, name), step):
            return True
        elif end["outcome"] == "diverged" and end["step"] <= step:
            # Done from its first step, it would have diverged at the same one: until there they are one run.
            before = f"{name}, which it continues after step {step}, diverged after {end['step']}"
            self._give_up(one, "diverged", f"not done: {before}")
        else:
            gone = f"{name}, which it continues, has no checkpoint of step {step} any more"
            again = f"move {folder_of(self._folder, name)} away to have that done again"
            self._give_up(one, "failed", f"{gone}; {again}")
        return False

    def _give_up(self, one: Named, how: Literal["failed", "diverged"], text: str) -> None:
        self._waiting.remove(one)
        if how == "failed":
            self._failed[one.name] = text
        self._news.append((one, Ended(how=how, text=text)))

    def news(self) -> Iterator[tuple[Named, Ended]]:
        """Yield runs that have ended without being begun."""
        while self._news:
            yield self._news.popleft()

    def settle(self, one: Named, ended: Ended) -> None:
        """Take note of the end of a run that was at work."""
        self._at_work.remove(one.name)
        if ended.how == "stopped":  # by somebody else than us, who is done with asking
            self._waiting.insert(0, one)
        elif not self._is_done(one.name):
            self._failed[one.name] = ended.text
        self.clean(one.name, *([one.run.after[0]] if one.run.after is not None else []))

    def clean(self, *names: str) -> None:
        """Drop checkpoints that no run of the study needs any more."""
        for name in names:
            if name in self._names and self._is_done(name):
                others = [one for one in self._continued.get(name, []) if not self._is_done(one.name)]
                drop_checkpoints(
                    folder_of(self._folder, name), {one.run.after[1] for one in others if one.run.after}
                )


MARGIN = 1.0  # nats
SHARE = 0.1  # of the run that it has to last
LEAST = 20  # steps, of short runs
SMOOTHING = 0.1  # the share of a new loss in the mean


@dataclass(kw_only=True, slots=True)
class Divergence:
    """The smoothed training loss above the first one by more than a nat, in all of a tenth of the run.

    Counted after the warm-up, from losses alone, so that a run that was killed ends at the same step.
    """

    warmup: int
    first: float | None = None
    smoothed: float = 0.0
    above: int = 0

    def take(self, step: int, steps: int, loss: float | None) -> str | None:
        """Take the loss of the next step; return why the run should end, or None.

        >>> watch = Divergence(warmup=0)
        >>> [step for step in range(1, 100) if watch.take(step, 100, 3.0 if step < 50 else 9.0)][0]
        75
        """
        if loss is None:  # a step that was left out
            return None
        if self.first is None:
            self.first = self.smoothed = loss
        # Cut off, so that one enormous loss is not remembered for longer than a high one.
        self.smoothed += SMOOTHING * (min(loss, self.first + 2 * MARGIN) - self.smoothed)
        high = self.smoothed > self.first + MARGIN and step > min(self.warmup, steps // 10)
        self.above = self.above + 1 if high else 0
        if self.above < max(LEAST, SHARE * steps):
            return None
        return (
            f"training loss {loss:.2f} at step {step}; smoothed, it has been more than {MARGIN:g} above "
            f"that of the first step, {self.first:.2f}, for {self.above} steps"
        )
