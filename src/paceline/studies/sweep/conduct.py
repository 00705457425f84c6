"""A sweep in its folder: cells are claimed, run, and written down; it goes on where it was.

.. code-block:: text

    FOLDER/cells/NAME/     each run: records.jsonl, timing.jsonl    FOLDER/results.jsonl   a line a cell
    FOLDER/claims/NAME/    who does it                              FOLDER/timing.jsonl    how long each took

A cell whose run has a fork NAME@STEP of another cell is a branch of that one: it waits for the end of it, and
the checkpoint stays until it is done.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.runs.config import ConfigError, Run
from paceline.runs.run import drop_checkpoints, has_checkpoint, is_finished
from paceline.studies import pool
from paceline.studies.live import Elsewhere, Shown
from paceline.studies.sweep.claims import Claim, Claims
from paceline.studies.sweep.divergence import Divergence
from paceline.studies.sweep.results import Line, Results, diverged_before

Engine = Callable[[Iterable[pool.Cell | None]], Iterator[pool.Told]]
"""Does cells, several at once: `pool.run_all`, or the same on a cluster."""

LOOK_EVERY = 1.0  # seconds between looks at what other machines do


@dataclass(frozen=True, kw_only=True, slots=True)
class Swept:
    """The sweep is at its end."""

    lines: tuple[Line, ...]
    failed: tuple[str, ...]
    """Cells that could not be done, and why."""


def cells_of(runs: Mapping[str, Run], folder: Path, margin: float | None) -> tuple[pool.Cell, ...]:
    """Each run in a folder of its name, and with what ends it early, unless the margin is None."""
    return tuple(
        pool.Cell(
            run=run,
            folder=folder / "cells" / name,
            watch=None if margin is None else Divergence(margin=margin, warmup=run.warmup),
        )
        for name, run in runs.items()
    )


def sweep(
    cells: Sequence[pool.Cell],
    folder: Path,
    engine: Engine,
    *,
    heart_seconds: float,
    keep_models: bool,
    later: Sequence[pool.Cell] = (),
) -> Iterator[Shown | Swept]:
    """Do all cells that are not done, here or wherever the folder is seen; yields what happens.

    Those of `later` are not done now; but checkpoints that they will go on from stay.
    """
    try:
        (folder / "cells").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from None
    names = [cell.folder.name for cell in cells]
    results = Results(folder, cells)
    branches: dict[Path, list[tuple[int, Path]]] = {cell.folder: [] for cell in cells}
    for cell in (*cells, *later):
        if cell.after is not None and cell.after[0] in branches:
            branches[cell.after[0]].append((cell.after[1], cell.folder))

    def clean(*ended: Path) -> None:
        """Drop checkpoints that nothing goes on from any more."""
        for one in ended:
            if not keep_models and is_finished(one):
                drop_checkpoints(one, {step for step, branch in branches[one] if not is_finished(branch)})

    with Claims(folder / "claims", names, heart_seconds) as claims:
        results.write(claims)
        board = _Board(cells, claims)
        while board.left:  # once more if a cell of ours was taken over by another machine
            for told in engine(board.orders()):
                match told:
                    case (cell, pool.Ended() as ended):
                        board.settle(cell, ended)
                        results.write(claims)
                        clean(cell.folder)
                        if cell.after is not None and cell.after[0] in branches:
                            clean(cell.after[0])
                yield told
                while board.news:
                    news = board.news.popleft()
                    if isinstance(news[1], pool.Ended):
                        results.write(claims)
                    yield news
        lines = results.write(claims)
        clean(*branches)  # killed before its checkpoints went
        failed = tuple(
            f"{line.result['cell']}: {line.timing['text']}"
            for line in lines
            if line.result["outcome"] == "failed"
        )
        yield Swept(lines=tuple(lines), failed=failed)


class _Board:
    """Which cells are left, which are ours, and which another machine does."""

    def __init__(self, cells: Sequence[pool.Cell], claims: Claims) -> None:
        self._claims = claims
        self._folders = {cell.folder for cell in cells}
        self.left = [cell for cell in cells if not is_finished(cell.folder)]
        self.news: deque[tuple[pool.Cell, pool.Ended | Elsewhere]] = deque()
        self._elsewhere: set[Path] = set()

    def orders(self) -> Iterator[pool.Cell | None]:
        """Cells to do now, claimed; None while all that are left are done elsewhere, or wait for others."""
        ours: set[Path] = set()
        while waiting := [cell for cell in self.left if cell.folder not in ours]:
            left = self.left
            for cell in waiting:
                if self._has_ended(cell) or not self._may_begin(cell):
                    continue
                if (claim := self._claim(cell)) is None:
                    continue
                ours.add(cell.folder)
                yield replace(cell, may_go_on=claim.holds)
                if self.left is not left:  # something has ended: what waited for it comes first
                    break
            else:
                looked = time.monotonic()
                while time.monotonic() - looked < LOOK_EVERY:
                    yield None

    def _may_begin(self, cell: pool.Cell) -> bool:
        """Whether what a branch goes on from is there; if it never will be, the branch has ended."""
        if cell.after is None or cell.after[0] not in self._folders:
            return True
        folder, step = cell.after
        if not is_finished(folder):
            state = self._claims.state(folder.name)
            if state.how == "failed":
                self._give_up(cell, f"{folder.name}, which it goes on from, failed: {state.text}")
            return False
        if has_checkpoint(folder, step):
            return True
        if (text := diverged_before(cell)) is not None:
            self.news.append((cell, pool.Ended(how="diverged", text=text)))
            self._drop(cell)
        else:
            gone = f"{folder.name}, which it goes on from, has no checkpoint of step {step} any more"
            self._give_up(cell, f"{gone}; move {folder} away to have that done again")
        return False

    def _give_up(self, cell: pool.Cell, why: str) -> None:
        """Have a cell that cannot be done count as failed, for all machines, until the next command."""
        state = self._claims.state(cell.folder.name)
        if state.how == "free" and self._claims.take(cell.folder.name, state) is not None:
            self._claims.let_go(cell.folder.name, why)
            self.news.append((cell, pool.Ended(how="failed", text=why)))
            self._drop(cell)

    def _claim(self, cell: pool.Cell) -> Claim | None:
        name = cell.folder.name
        state = self._claims.state(name)
        if state.how == "free" and (claim := self._claims.take(name, state)) is not None:
            if not self._has_ended(cell):  # by another machine, between two looks
                return claim
            self._claims.let_go(name)
        elif state.how == "held" and cell.folder not in self._elsewhere:
            self._elsewhere.add(cell.folder)
            self.news.append((cell, Elsewhere(host=state.host)))
        return None

    def _has_ended(self, cell: pool.Cell) -> bool:
        """Whether another machine has done it, or failed to; then it is left no more."""
        state = self._claims.state(cell.folder.name)
        if is_finished(cell.folder):
            self.news.append((cell, pool.Ended(how="finished")))
        elif state.how == "failed":
            self.news.append((cell, pool.Ended(how="failed", text=state.text)))
        else:
            return False
        self._drop(cell)
        return True

    def settle(self, cell: pool.Cell, ended: pool.Ended) -> None:
        """A cell of ours has ended; if another machine has taken it over, it is left to that one."""
        name = cell.folder.name
        failed = ended.text if ended.how in ("failed", "refused") else None
        ours = self._claims.let_go(name, failed)
        if is_finished(cell.folder) or (ours and failed is not None):
            self._drop(cell)

    def _drop(self, cell: pool.Cell) -> None:
        self.left = [other for other in self.left if other.folder != cell.folder]
