"""What many runs show while they go on: one row a run on a terminal, lines that stay anywhere else."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.lm.loop import Evaluation, Step
from paceline.runs.display import Pace
from paceline.runs.run import Event, Notice, Started, is_finished
from paceline.runs.terminal import printable
from paceline.studies import pool
from paceline.studies.report.content import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Elsewhere:
    """A run is done by another machine."""

    host: str


Shown = tuple[pool.Cell, Event | pool.Ended | Elsewhere] | None


class Row:
    """One run, as far as it is known."""

    def __init__(self, cell: pool.Cell, label: Sequence[str]) -> None:
        self.cell, self.label, self.pace = cell, label, Pace()
        self.state = "done" if is_finished(cell.folder) else "waiting"
        self.step, self.steps = 0, cell.run.steps or 0
        self.losses: dict[str, float] = {}

    def take(self, event: Any) -> None:
        """Learn from an event."""
        match event:
            case pool.Ended(how=how):
                self.state = "done" if how == "finished" else how
            case Elsewhere():
                self.state = "elsewhere"
            case Started(step=step, steps=steps):
                self.state, self.step, self.steps = "running", step, steps
            case Step(step=step):
                self.step = step
            case Evaluation(losses=losses):
                self.losses = dict(next(iter(losses.values())))
        if not isinstance(event, pool.Ended | Elsewhere):
            self.pace.take(event)

    def average(self) -> float | None:
        """The lowest loss of an average that it keeps."""
        return min((loss for name, loss in self.losses.items() if name != "live"), default=None)

    def seconds_left(self) -> float | None:
        """To its end, by the speed so far."""
        return None if self.state != "running" else self.pace.seconds_left()


class Rows:
    """All of them: what each is called, under these titles, and how long all take, if that is known."""

    def __init__(
        self,
        cells: Sequence[pool.Cell],
        titles: Sequence[str],
        labels: Sequence[Sequence[str]],
        seconds: float | None = None,
    ) -> None:
        self.titles, self.seconds, self.began = titles, seconds, time.monotonic()
        self.by_folder = {cell.folder: Row(cell, label) for cell, label in zip(cells, labels, strict=True)}
        self._work_before = self._work()

    def take(self, told: Shown) -> Row | None:
        """Hand an event to the row of its run, which is returned."""
        if told is None:
            return None
        row = self.by_folder[told[0].folder]
        row.take(told[1])
        return row

    def _work(self) -> float:
        """Runs done so far, with parts of runs."""
        ended = ("done", "diverged", "failed", "refused", "stopped")
        rows = self.by_folder.values()
        return sum(1.0 if row.state in ended else row.step / max(row.steps, 1) for row in rows)

    def name(self, row: Row) -> str:
        """A run in words."""
        return ", ".join(f"{title} {text}" for title, text in zip(self.titles, row.label, strict=True))

    def minutes_left(self) -> float | None:
        """Of everything: as was planned at first, then by what was done since; None if nobody knows."""
        done = self._work()
        share = (done - self._work_before) / max(len(self.by_folder) - self._work_before, 1e-9)
        elapsed = time.monotonic() - self.began
        if share < 0.03:
            left = 1 - self._work_before / len(self.by_folder)
            return None if self.seconds is None else max(0.0, self.seconds * left - elapsed) / 60
        return elapsed * (1 / share - 1) / 60

    def counts(self) -> str:
        """How many are done."""
        done = sum(row.state in ("done", "diverged") for row in self.by_folder.values())
        minutes = self.minutes_left()
        left = "" if minutes is None else f", about {minutes:.0f} min left"
        return f"{done} of {len(self.by_folder)} runs done{left}"


class Screen(Protocol):
    """Shows events."""

    def take(self, told: Shown) -> None: ...


class Lines:
    """A line for each run that ends, and one on the whole now and then."""

    def __init__(self, rows: Rows, stream: Any, seconds: float = 30.0) -> None:
        self._rows, self._stream, self._seconds = rows, stream, seconds
        self._spoke = time.monotonic()

    def take(self, told: Shown) -> None:
        """Say it, if it is worth a line."""
        row = self._rows.take(told)
        match told:
            case (_, pool.Ended(how=how, text=text)) if row is not None:
                ended = ", ".join(f"{name} {loss:.4f}" for name, loss in row.losses.items())
                # Of one that was stopped after its last evaluation no losses are told.
                said = (ended or how) if how == "finished" else f"{how}: {text}"
                self._say(f"{self._rows.name(row)}: {said} ({self._rows.counts()})")
            case (_, Elsewhere(host=host)) if row is not None:
                self._say(f"{self._rows.name(row)}: done by {host}")
            case (_, Notice(text=text)):
                self._say(text)
            case _ if time.monotonic() - self._spoke > self._seconds:
                self._say(self._rows.counts())

    def _say(self, text: str) -> None:
        self._spoke = time.monotonic()
        print(printable(text), file=self._stream, flush=True)


class Live:
    """A table that moves."""

    def __init__(self, rows: Rows, live: Any) -> None:
        self._rows, self._live = rows, live
        self._drawn = 0.0

    def take(self, told: Shown) -> None:
        """Draw it anew, a few times a second."""
        self._rows.take(told)
        match told:
            case (_, Notice(text=text)):
                self._live.console.print(printable(text), highlight=False, markup=False)
            case (cell, pool.Ended(how="failed" | "refused" | "diverged" as how, text=text)):
                said = printable(f"{cell.folder.name} {how}: {text}")
                self._live.console.print(said, highlight=False, markup=False)
        if time.monotonic() - self._drawn > 0.25 or (told and isinstance(told[1], pool.Ended)):
            self._drawn = time.monotonic()
            self._live.update(self.draw(), refresh=True)

    def draw(self) -> Any:
        """The rows that fit the screen: what runs first, then what waits or is done."""
        from rich.table import Table as RichTable

        order = {
            "running": 0,
            "elsewhere": 1,
            "failed": 1,
            "refused": 1,
            "diverged": 1,
            "done": 2,
            "stopped": 2,
            "waiting": 3,
        }
        rows = sorted(self._rows.by_folder.values(), key=lambda row: order[row.state])
        room = max(3, self._live.console.height - 5)
        table = RichTable(box=None, pad_edge=False, caption=self._rows.counts(), caption_justify="left")
        for title in (*map(printable, self._rows.titles), "progress"):
            table.add_column(title, no_wrap=True)
        for title in ("live", "average", "tokens/s", "left"):
            table.add_column(title, justify="right", no_wrap=True)
        for row in rows[:room]:
            table.add_row(*_cells(row), style="dim" if row.state in ("waiting", "done") else "")
        if len(rows) > room:
            table.add_row(f"… {len(rows) - room} more", style="dim")
        return table


def _cells(row: Row) -> list[str]:
    average, left = row.average(), row.seconds_left()
    share = row.step / max(row.steps, 1)
    bar = "█" * round(10 * share) + "░" * (10 - round(10 * share))
    live = row.losses.get("live")
    speed = row.pace.tokens_per_second() if row.state == "running" else 0.0
    return [
        *map(printable, row.label),
        f"{bar} {row.step}/{row.steps}" if row.state == "running" else row.state,
        "" if live is None else f"{live:.4f}",
        "" if average is None else f"{average:.4f}",
        f"{speed:,.0f}" if speed else "",
        "" if left is None else f"{left:.0f} s",
    ]


@contextmanager
def shown(rows: Rows, stream: Any = None) -> Iterator[Screen]:
    """A table that moves if the stream is a terminal and rich is installed, lines if not."""
    stream = stream or sys.stdout
    try:
        from rich.console import Console
        from rich.live import Live as RichLive
    except ImportError:
        yield Lines(rows, stream)
        return
    console = Console(file=stream)
    if not console.is_terminal:
        yield Lines(rows, stream)
        return
    with RichLive(console=console, auto_refresh=False, transient=True) as live:
        yield Live(rows, live)


def as_text(table: Table) -> str:
    """A table for a terminal.

    >>> rows = (("x", "1"), ("yy", "20"))
    >>> print(as_text(Table(key="", title="", columns=("a", "b"), rows=rows, numeric=(False, True))))
    a    b
    x    1
    yy  20
    """
    numeric = table.numeric or (False,) * len(table.columns)
    lines = [table.columns, *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.columns))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    )
