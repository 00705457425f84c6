"""Results asked by cell: what it came to, its curves, and what is missing."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any, final

from paceline.paper.cells import Cell, Reading, readings
from paceline.runs.config import Run, as_mapping
from paceline.studies.lines import Result

DECISIVE = (
    "task", "length", "batch_size", "steps", "optimizer", "lr", "schedule", "warmup", "averages", "clip_norm",
    "dropout", "seed",
)  # fmt: skip
"""What has to be as in the cell. Not where data and model lie, nor what a machine needs (micro batches,
device), nor whether a decayed run was forked: done from its first step it is the same."""

Point = tuple[float, float]
Curve = list[Point]


def differences(run: Run, config: Mapping[str, Any]) -> list[str]:
    """In what a record is not of this run."""
    now = as_mapping(run)
    return [
        f"{name}: {config.get(name)!r}, not {now[name]!r}"
        for name in DECISIVE
        if config.get(name) != now[name]
    ]


@final
@dataclass(frozen=True, kw_only=True)
class Book:
    """The cells of a label, and the results that there are of them."""

    cells: tuple[Cell, ...]
    results: Mapping[str, Result]
    odd: tuple[str, ...] = ()
    """Results under the name of a cell that are of another run; they count as missing."""
    readings: tuple[Reading, ...] = field(init=False)

    def __post_init__(self) -> None:
        found = tuple(reading for cell in self.cells for reading in readings(cell))
        object.__setattr__(self, "readings", found)

    @staticmethod
    def of(cells: tuple[Cell, ...], results: Mapping[str, Result]) -> "Book":
        """Take those results that are of these cells."""
        odd = {
            cell.name: f"{cell.name}: {'; '.join(found)}"
            for cell in cells
            if cell.name in results and (found := differences(cell.run, results[cell.name].config))
        }
        names = {cell.name for cell in cells} - odd.keys()
        kept = {name: result for name, result in results.items() if name in names}
        for cell in cells:
            if cell.name not in results and (before := _diverged_before(cell, kept)) is not None:
                kept[cell.name] = before
        return Book(cells=cells, results=kept, odd=tuple(odd.values()))

    @property
    def names(self) -> set[str]:
        """Of the runs that are wanted."""
        return {cell.name for cell in self.cells}

    @property
    def missing(self) -> set[str]:
        """Of the runs that there is no result of."""
        return self.names - self.results.keys()

    def where(self, **wanted: Any) -> list[Reading]:
        """The readings with these values; of several, where a tuple is given."""
        return [
            reading
            for reading in self.readings
            if all(
                getattr(reading, name) in value
                if isinstance(value, tuple)
                else getattr(reading, name) == value
                for name, value in wanted.items()
            )
        ]

    # --- Of one reading ---

    def loss(self, reading: Reading) -> float | None:
        """At the end; infinite if it diverged, None if it is missing."""
        result = self.results.get(reading.cell.name)
        if result is None:
            return None
        if result.diverged:
            return math.inf
        curve = result.curve(reading.view)
        return curve[-1][1] if curve else None

    def curve(self, reading: Reading) -> Curve:
        """Along the run, with that of the run that it goes on from before."""
        return self._joined(reading.cell, lambda result: result.curve(reading.view))

    def train(self, reading: Reading) -> Curve:
        """Training loss along the run."""
        return self._joined(reading.cell, lambda result: result.train)

    def pull(self, reading: Reading, name: str) -> Curve:
        """A figure of the pull along the run."""
        return self._joined(
            reading.cell, lambda result: [(step, said.get(name)) for step, said in result.pull]
        )

    def _joined(self, cell: Cell, take: Callable[[Result], Iterable[tuple[int, float | None]]]) -> Curve:
        result = self.results.get(cell.name)
        if result is None:
            return []
        own = [(step, y) for step, y in take(result) if y is not None]
        if cell.run.after is not None and (before := self.results.get(cell.run.after[0])) is not None:
            first = min((step for step, _ in own), default=0)
            own = [(step, y) for step, y in take(before) if y is not None and step < first] + own
        return [(float(step), float(y)) for step, y in own]

    # --- Of several ---

    def best(self, among: Sequence[Reading]) -> Reading | None:
        """The one that ends lowest; None if no result is a number."""
        known = [(loss, i) for i, one in enumerate(among) if (loss := self.loss(one)) is not None]
        known = [found for found in known if math.isfinite(found[0])]
        return among[min(known)[1]] if known else None

    def mean(self, among: Sequence[Reading]) -> tuple[float | None, float]:
        """Mean and deviation of the losses that there are, e.g. over seeds."""
        losses = [loss for one in among if (loss := self.loss(one)) is not None]
        if not losses:
            return None, 0.0
        finite = all(map(math.isfinite, losses))
        return fmean(losses), stdev(losses) if len(losses) > 1 and finite else 0.0


def _diverged_before(cell: Cell, results: Mapping[str, Result]) -> Result | None:
    """What a branch that was never begun would have come to: the run that it goes on from diverged before it
    came there, and until there the two are one."""
    before = results.get(cell.run.after[0]) if cell.run.after is not None else None
    if cell.run.after is None or before is None or not before.diverged:
        return None
    last = max((series[-1][0] for series in (before.train, before.evaluations) if series), default=0)
    return replace(before, name=cell.name) if last <= cell.run.after[1] else None


def at(curve: Curve, x: float) -> float | None:
    """A curve at a place between its points, on the line from one to the next.

    >>> at([(10, 4.0), (20, 3.0)], 15)
    3.5
    """
    for (left, low), (right, high) in pairwise(curve):
        if left <= x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return curve[-1][1] if curve and curve[-1][0] == x else None
