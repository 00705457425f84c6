"""The display of many runs: a row for each on a terminal, plain lines anywhere else."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from paceline.lm.loop import Evaluation, Step
from paceline.runs.display import Pace
from paceline.runs.run import Notice, Started
from paceline.runs.terminal import printable
from paceline.studies.engine import Message, is_done
from paceline.studies.pool import Ended
from paceline.studies.runs import Named
from paceline.studies.runs import text as text_of

_ORDER = ("running", "failed", "refused", "diverged", "done", "stopped", "waiting")
"""States of runs, in the order of the screen."""


class Row:
    """One run, as far as it is known."""

    def __init__(self, one: Named, folder: Path, label: Sequence[str]) -> None:
        self.label, self.pace = label, Pace()
        self.state = "done" if is_done(folder, one.name) else "waiting"
        self.step, self.steps = 0, one.run.steps or 0
        self.losses: dict[str, float] = {}

    def take(self, event: Any) -> None:
        """Learn from an event."""
        match event:
            case Ended(how=how):
                self.state = "done" if how == "finished" else how
                return
            case Started(step=step, steps=steps):
                self.state, self.step, self.steps = "running", step, steps
            case Step(step=step):
                self.step = step
            case Evaluation(losses=losses):
                self.losses = dict(next(iter(losses.values())))
        self.pace.take(event)

    def share(self) -> float:
        """Return the part of the run that is behind it."""
        return self.step / max(self.steps, 1) if self.state in ("running", "waiting") else 1.0

    def cells(self) -> list[str]:
        """Return the row of a table."""
        averages = [loss for name, loss in self.losses.items() if name != "live"]
        running = self.state == "running"
        speed, left = (self.pace.tokens_per_second(), self.pace.seconds_left()) if running else (0, None)
        bar = "█" * round(10 * self.share()) + "░" * (10 - round(10 * self.share()))
        return [
            *map(printable, self.label),
            f"{bar} {self.step}/{self.steps}" if running else self.state,
            f"{self.losses['live']:.4f}" if "live" in self.losses else "",
            f"{min(averages):.4f}" if averages else "",
            f"{speed:,.0f}" if speed else "",
            "" if left is None else f"{left:.0f} s",
        ]


class Rows:
    """The runs by name, and how much of them is done."""

    def __init__(self, runs: Sequence[Named], folder: Path, by: Sequence[str] | None = None) -> None:
        by = tuple(runs[0].tags) if by is None else by
        self.titles, self._began = tuple(by) or ("run",), time.monotonic()
        labels = {one.name: [text_of(one.tags[tag]) for tag in by] or [one.name] for one in runs}
        self.by_name = {one.name: Row(one, folder, labels[one.name]) for one in runs}
        self._share_before = self._share()

    def _share(self) -> float:
        return sum(row.share() for row in self.by_name.values()) / len(self.by_name)

    def take(self, message: Message) -> None:
        """Hand an event to the row of its run."""
        if message is not None:
            self.by_name[message[0].name].take(message[1])

    def name(self, one: Named) -> str:
        """Return a run in words."""
        labels = zip(self.titles, self.by_name[one.name].label, strict=True)
        return ", ".join(f"{title} {text}" for title, text in labels)

    def counts(self) -> str:
        """Return how many runs are done, and the time that the others take at the speed so far."""
        done = sum(row.state in ("done", "diverged") for row in self.by_name.values())
        now, elapsed = self._share(), time.monotonic() - self._began
        left = ""
        if now - self._share_before > 0.03:
            minutes = elapsed * (1 - now) / (now - self._share_before) / 60
            left = f", about {minutes:.0f} min left"
        return f"{done} of {len(self.by_name)} runs done{left}"


class Lines:
    """A line for each run that ends, and one on the whole now and then."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._say(rows.counts())

    def take(self, message: Message) -> None:
        """Say it, if it is worth a line."""
        self._rows.take(message)
        match message:
            case (one, Ended(how=how, text=text)):
                losses = self._rows.by_name[one.name].losses
                ended = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
                # A run that was stopped after its last evaluation has no losses here.
                said = (ended or how) if how == "finished" else f"{how}: {text}"
                self._say(f"{self._rows.name(one)}: {said} ({self._rows.counts()})")
            case (_, Notice(text=text)):
                self._say(text)
            case _ if time.monotonic() - self._spoke > 30:
                self._say(self._rows.counts())

    def _say(self, text: str) -> None:
        self._spoke = time.monotonic()
        print(printable(text), file=sys.stdout, flush=True)


class Live:
    """A table that moves."""

    def __init__(self, rows: Rows, live: Any) -> None:
        self._rows, self._live = rows, live
        self._drawn = 0.0

    def take(self, message: Message) -> None:
        """Draw it again, a few times a second."""
        self._rows.take(message)
        match message:
            case (_, Notice(text=text)):
                self._print(text)
            case (one, Ended(how="failed" | "refused" | "diverged" as how, text=text)):
                self._print(f"{one.name} {how}: {text}")
        if time.monotonic() - self._drawn > 0.25 or (message and isinstance(message[1], Ended)):
            self._drawn = time.monotonic()
            self._live.update(self.draw(), refresh=True)

    def _print(self, text: str) -> None:
        self._live.console.print(printable(text), highlight=False, markup=False)

    def draw(self) -> Any:
        """Return the rows that fit the screen: what runs first, then what waits or is done."""
        from rich.table import Table as RichTable

        rows = sorted(self._rows.by_name.values(), key=lambda row: _ORDER.index(row.state))
        room = max(3, self._live.console.height - 5)
        table = RichTable(box=None, pad_edge=False, caption=self._rows.counts(), caption_justify="left")
        for title in (*map(printable, self._rows.titles), "progress"):
            table.add_column(title, no_wrap=True)
        for title in ("live", "average", "tokens/s", "left"):
            table.add_column(title, justify="right", no_wrap=True)
        for row in rows[:room]:
            table.add_row(*row.cells(), style="dim" if row.state in ("waiting", "done") else "")
        if len(rows) > room:
            table.add_row(f"… {len(rows) - room} more", style="dim")
        return table


def shown(
    messages: Iterable[Message], runs: Sequence[Named], folder: Path, by: Sequence[str] | None = None
) -> Iterator[Message]:
    """Yield what happens to runs, and show it: a table that moves on a terminal, lines anywhere else.

    Arguments:
        messages: those of the engine.
        runs: those of the study.
        folder: that of the study.
        by: the tags that tell runs apart. None: all; without any, runs go by their names.
    """
    from rich.console import Console
    from rich.live import Live as RichLive

    rows, console = Rows(runs, folder, by), Console()
    moving = RichLive(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
    with moving or nullcontext():
        screen = Live(rows, moving) if moving else Lines(rows)
        for message in messages:
            screen.take(message)
            yield message
