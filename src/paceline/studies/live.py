"""What many runs show while they are done: one row a run on a terminal, lines that stay anywhere else."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from paceline.lm.loop import Evaluation, Step
from paceline.runs.display import Pace
from paceline.runs.run import Notice, Started, is_finished
from paceline.runs.terminal import printable
from paceline.studies.engine import Message
from paceline.studies.pool import Ended
from paceline.studies.runs import Named, folder_of
from paceline.studies.runs import text as text_of


class Row:
    """One run, as far as it is known."""

    def __init__(self, one: Named, folder: Path, label: Sequence[str]) -> None:
        self.label, self.pace = label, Pace()
        self.state = "done" if is_finished(folder_of(folder, one.name)) else "waiting"
        self.step, self.steps = 0, one.run.steps or 0
        self.losses: dict[str, float] = {}

    def take(self, event: Any) -> None:
        """Learn from an event."""
        match event:
            case Ended(how=how):
                self.state = "done" if how == "finished" else how
            case Started(step=step, steps=steps):
                self.state, self.step, self.steps = "running", step, steps
            case Step(step=step):
                self.step = step
            case Evaluation(losses=losses):
                self.losses = dict(next(iter(losses.values())))
        if not isinstance(event, Ended):
            self.pace.take(event)

    def average(self) -> float | None:
        """The lowest loss of an average that it keeps."""
        return min((loss for name, loss in self.losses.items() if name != "live"), default=None)

    def seconds_left(self) -> float | None:
        """To its end, by the speed so far."""
        return None if self.state != "running" else self.pace.seconds_left()


class Rows:
    """All of them by name, and how long all take, if that is known."""

    def __init__(
        self,
        runs: Sequence[Named],
        folder: Path,
        seconds: float | None = None,
        by: Sequence[str] | None = None,
    ) -> None:
        by = tuple(runs[0].tags) if by is None else by
        self.titles, self.seconds, self.began = tuple(by) or ("run",), seconds, time.monotonic()
        labels = {one.name: [text_of(one.tags[tag]) for tag in by] or [one.name] for one in runs}
        self.by_name = {one.name: Row(one, folder, labels[one.name]) for one in runs}
        self._work_before = self._work()

    def take(self, message: Message) -> Row | None:
        """Hand an event to the row of its run, which is returned."""
        if message is None:
            return None
        row = self.by_name[message[0].name]
        row.take(message[1])
        return row

    def _work(self) -> float:
        """Runs done so far, with parts of runs."""
        ended = ("done", "diverged", "failed", "refused", "stopped")
        rows = self.by_name.values()
        return sum(1.0 if row.state in ended else row.step / max(row.steps, 1) for row in rows)

    def name(self, row: Row) -> str:
        """A run in words."""
        return ", ".join(f"{title} {text}" for title, text in zip(self.titles, row.label, strict=True))

    def minutes_left(self) -> float | None:
        """Of everything: as was planned at first, then by what was done since; None if nobody knows."""
        done = self._work()
        share = (done - self._work_before) / max(len(self.by_name) - self._work_before, 1e-9)
        elapsed = time.monotonic() - self.began
        if share < 0.03:
            left = 1 - self._work_before / len(self.by_name)
            return None if self.seconds is None else max(0.0, self.seconds * left - elapsed) / 60
        return elapsed * (1 / share - 1) / 60

    def counts(self) -> str:
        """How many are done."""
        done = sum(row.state in ("done", "diverged") for row in self.by_name.values())
        minutes = self.minutes_left()
        left = "" if minutes is None else f", about {minutes:.0f} min left"
        return f"{done} of {len(self.by_name)} runs done{left}"


class Screen(Protocol):
    """Shows events."""

    def take(self, message: Message) -> None: ...


class Lines:
    """A line for each run that ends, and one on the whole now and then."""

    def __init__(self, rows: Rows, stream: Any, seconds: float = 30.0) -> None:
        self._rows, self._stream, self._seconds = rows, stream, seconds
        self._say(rows.counts())

    def take(self, message: Message) -> None:
        """Say it, if it is worth a line."""
        row = self._rows.take(message)
        match message:
            case (_, Ended(how=how, text=text)) if row is not None:
                ended = ", ".join(f"{name} {loss:.4f}" for name, loss in row.losses.items())
                # Of one that was stopped after its last evaluation no losses are told.
                said = (ended or how) if how == "finished" else f"{how}: {text}"
                self._say(f"{self._rows.name(row)}: {said} ({self._rows.counts()})")
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

    def take(self, message: Message) -> None:
        """Draw it anew, a few times a second."""
        self._rows.take(message)
        match message:
            case (_, Notice(text=text)):
                self._live.console.print(printable(text), highlight=False, markup=False)
            case (one, Ended(how="failed" | "refused" | "diverged" as how, text=text)):
                said = printable(f"{one.name} {how}: {text}")
                self._live.console.print(said, highlight=False, markup=False)
        if time.monotonic() - self._drawn > 0.25 or (message and isinstance(message[1], Ended)):
            self._drawn = time.monotonic()
            self._live.update(self.draw(), refresh=True)

    def draw(self) -> Any:
        """The rows that fit the screen: what runs first, then what waits or is done."""
        from rich.table import Table as RichTable

        order = {
            "running": 0,
            "failed": 1,
            "refused": 1,
            "diverged": 1,
            "done": 2,
            "stopped": 2,
            "waiting": 3,
        }
        rows = sorted(self._rows.by_name.values(), key=lambda row: order[row.state])
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
def shown(
    runs: Sequence[Named],
    folder: Path,
    seconds: float | None = None,
    by: Sequence[str] | None = None,
) -> Iterator[Screen]:
    """Show runs while they are done: a table that moves on a terminal, lines anywhere else.

    Arguments:
        runs: those of a study.
        folder: that of the study.
        seconds: how long all of them take, if that is known.
        by: the tags that tell them apart. None: all; without any, runs go by their names.
    """
    from rich.console import Console
    from rich.live import Live as RichLive

    rows, console = Rows(runs, folder, seconds, by), Console()
    if not console.is_terminal:
        yield Lines(rows, sys.stdout)
        return
    with RichLive(console=console, auto_refresh=False, transient=True) as live:
        yield Live(rows, live)
