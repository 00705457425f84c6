"""Doing the runs of studies by the sweep engine, with those left out that records have already."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.experiments import pool
from paceline.experiments.config import Run
from paceline.experiments.cost.hardware import HARDWARE
from paceline.experiments.cost.price import of_run
from paceline.experiments.cost.price import together as in_all
from paceline.experiments.evidence.studies import ROOMS, STUDIES, Room, Trial, branches, together
from paceline.experiments.live import Rows, shown
from paceline.experiments.paper import lines
from paceline.experiments.paper.lines import Result
from paceline.experiments.run import end_of, has_checkpoint
from paceline.experiments.sweep.command import local_engine
from paceline.experiments.sweep.conduct import Swept, cells_of, sweep

Say = Callable[[str], None]
FULL = 0.85
"""The share of a GPU's memory that runs at once may take, by an estimate of each."""
AGAIN = "again"
"""Folder of runs that were done again."""
MARGIN = 1.0
"""Nats above the first loss: a run that stays there has diverged."""


def work(
    studies: Iterable[str],
    room: Room,
    out: Path,
    records: Iterable[Path],
    keep: Path,
    jobs: int,
    say: Say,
) -> list[str]:
    """Do studies one after the other: what one chooses from, another may have found. Why runs failed.

    Arguments:
        records: files with results of earlier days, whose runs are not done again.
        keep: a file that gets a line for each run that is done here, as soon as it is.
        jobs: runs at once.
    """
    known, failed = lines.read(records), []
    done = _Lines((out / AGAIN, out / "cells"), keep, known)
    for name in studies:
        trials = list(STUDIES[name](room, known | done.results()))
        later = list(branches(trials, room))
        wanted = left(together(trials, later), known)
        say(f"{name}: {len(wanted)} of {len(trials)} runs to do")
        if not wanted:
            continue
        # As they are usually called: of a folder's model, or a prepared text's vocabulary, nothing is known.
        usual = together(STUDIES[name](ROOMS[room.name], known | done.results()))
        fit = fitting([usual[one].run for one in wanted], _memory())
        if fit is not None and fit < jobs:
            say(f"{fit} at once, not {jobs}: more would not fit into the GPU's memory")
        at_once = jobs if fit is None else min(jobs, fit)
        _move_away(wanted.values(), out)
        failed += _swept(wanted, [one for one in later if one.name not in wanted], out, at_once, done, say)
    return failed


def fitting(runs: Iterable[Run], memory: list[int]) -> int | None:
    """How many of the largest of these runs fit at once into GPUs with so many bytes each, one at least; None
    if that is not known."""
    prices = [of_run(run, HARDWARE["h200"]) for run in runs]
    largest = in_all([price for price in prices if price is not None]).memory
    if not memory or not largest or None in prices:
        return None
    return sum(max(1, int(FULL * own // largest)) for own in memory)


def _memory() -> list[int]:
    """Bytes of each GPU."""
    import torch

    return [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]


def left(trials: Mapping[str, Trial], known: Mapping[str, Result]) -> dict[str, Trial]:
    """Those that no record has, and what they go on from: a record has no checkpoints. (The sweep does not do
    again what it finds in its folder.)"""
    found = {name: one for name, one in trials.items() if name not in known}
    for one in list(found.values()):
        if one.run.after is not None and one.run.after[0] not in found:
            found[one.run.after[0]] = trials[one.run.after[0]]
    return {name: one for name, one in trials.items() if name in found}


def _move_away(trials: Iterable[Trial], out: Path) -> None:
    """Runs that are finished but have no checkpoint any more that one of these goes on from: they are done
    again."""
    for one in trials:
        if one.run.after is None or lines.is_ended(out / "cells" / one.name):
            continue
        name, step = one.run.after
        folder, away = out / "cells" / name, out / AGAIN / name
        end = end_of(folder)
        finished = end is not None and end["outcome"] == "finished"
        if finished and not has_checkpoint(folder, step) and not away.exists():
            away.parent.mkdir(exist_ok=True)
            folder.rename(away)


def _swept(
    wanted: Mapping[str, Trial],
    later: list[Trial],
    out: Path,
    jobs: int,
    done: "_Lines",
    say: Say,
) -> list[str]:
    cells = cells_of({name: one.run for name, one in wanted.items()}, out, MARGIN)
    waiting = cells_of({one.name: one.run for one in later}, out, MARGIN)
    rows = Rows(cells, ("run",), [(cell.folder.name,) for cell in cells])
    say(rows.counts())
    failed: tuple[str, ...] = ()
    engine = local_engine([cell.run for cell in cells], jobs)
    events = sweep(cells, out, engine, heart_seconds=60, keep_models=False, later=waiting)
    with shown(rows) as screen:
        for event in events:
            if isinstance(event, Swept):
                failed = event.failed
                continue
            screen.take(event)
            if event is not None and isinstance(event[1], pool.Ended):
                done.write()
    done.write()
    for text in failed:
        say(text)
    return list(failed)


class _Lines:
    """The lines of all runs in folders that have ended, in a file: each read once. Of a run that was done
    again the first: settings were chosen by it."""

    def __init__(self, folders: Iterable[Path], keep: Path, known: Mapping[str, Result]) -> None:
        self._folders, self._keep, self._known = tuple(folders), keep, known
        self._lines: dict[str, dict[str, Any]] = {}

    def write(self) -> None:
        """Add those that have ended since, and that no record has."""
        for folder in (
            one for all_of in self._folders if all_of.is_dir() for one in sorted(all_of.iterdir())
        ):
            new = folder.name not in self._lines and folder.name not in self._known
            if new and folder.is_dir() and lines.is_ended(folder):
                self._lines[folder.name] = lines.line_of(folder)
        lines.write(self._lines.values(), self._keep)

    def results(self) -> dict[str, Result]:
        """What they say."""
        self.write()
        return lines.read([self._keep])
