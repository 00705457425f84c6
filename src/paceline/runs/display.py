"""What a run shows while it goes on: a line that moves on a terminal, lines that stay anywhere else."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from paceline.lm.loop import Evaluation, Step
from paceline.runs.run import Event, Notice, Saved, Started
from paceline.runs.terminal import printable


class Sink(Protocol):
    """Takes events in."""

    def take(self, event: Event) -> None: ...


class Lines:
    """One line for each evaluation and notice; steps only if they are far between."""

    def __init__(self, stream: Any = None, seconds: float = 30.0) -> None:
        self._stream, self._seconds = stream or sys.stdout, seconds
        self._pace = Pace()
        self._spoke = time.monotonic()

    def take(self, event: Event) -> None:
        """Say it, if it is worth a line."""
        self._pace.take(event)
        if isinstance(event, Step) and not event.skipped and time.monotonic() - self._spoke < self._seconds:
            return
        text = describe(event, self._pace)
        if text:
            self._spoke = time.monotonic()
            print(printable(text), file=self._stream, flush=True)


class Bar:
    """A bar with losses, speed and time left, and lines above it for what should stay."""

    def __init__(self, progress: Any) -> None:
        self._progress, self._task = progress, None
        self._pace = Pace()

    def take(self, event: Event) -> None:
        """Move the bar, or say it above."""
        self._pace.take(event)
        if isinstance(event, Started):
            self._task = self._progress.add_task("", total=event.steps, completed=event.step, note="")
        if isinstance(event, Step):
            self._progress.update(self._task, completed=event.step, note=self._pace.note())
        if isinstance(event, Step) and not event.skipped:
            return
        if text := describe(event, self._pace):
            self._progress.console.print(printable(text), highlight=False, markup=False)


class Pace:
    """How fast a run is, and its latest losses."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._seconds = 0.0  # a step, smoothed
        self._before: float | None = None  # when the last event came,
        self._at = 0  # and after how many steps
        self._step: Step | None = None
        self._returned: float | None = None

    def take(self, event: Event) -> None:
        """Learn from an event."""
        now = time.monotonic()
        match event:
            case Started():
                self._started = event
            case Step():
                if self._before is not None and event.step > self._at:  # some may not have been told
                    share = 0.1 if self._seconds else 1.0
                    self._seconds += share * ((now - self._before) / (event.step - self._at) - self._seconds)
                self._step = event
            case Evaluation() if self._started is not None:
                self._returned = next(iter(event.losses.values()))[self._started.returned]
        # Time spent on evaluations and checkpoints is not a step's.
        self._before = now
        if not isinstance(event, Notice):
            self._at = event.step

    def tokens_per_second(self) -> float:
        """Of training steps alone."""
        return self._started.tokens_per_step / self._seconds if self._started and self._seconds else 0.0

    def seconds_left(self) -> float | None:
        """Of training steps; None if that is not known yet."""
        if not (self._seconds and self._started and self._step):
            return None
        return (self._started.steps - self._step.step) * self._seconds

    def note(self) -> str:
        """The state of things in a few words."""
        parts = [f"loss {self._step.loss:.4f}"] if self._step else []
        if self._returned is not None and self._started is not None:
            parts.append(f"{self._started.returned} {self._returned:.4f}")
        if (left := self.seconds_left()) is not None:
            parts += [f"{self.tokens_per_second():,.0f} tokens/s", f"{left / 60:.0f} min left"]
        return ", ".join(parts)


def describe(event: Event, pace: Pace) -> str | None:
    """An event in one line, None for what need not be said."""
    match event:
        case Started(step=step, steps=steps, parameters=parameters, tokens_per_step=tokens):
            at = f" from step {step}" if step else ""
            return f"{parameters:,} parameters, {steps} steps of {tokens:,} tokens{at}"
        case Notice(text=text):
            return text
        case Evaluation(step=step, losses=losses):
            return f"step {step}: " + "; ".join(
                f"{name}: " + ", ".join(f"{view} {loss:.4f}" for view, loss in by_view.items())
                for name, by_view in losses.items()
            )
        case Step(step=step, skipped=True):
            return f"step {step} was left out: loss or gradient is not finite"
        case Step(step=step):
            return f"step {step}: {pace.note()}"
        case Saved():
            return None


@contextmanager
def shown(stream: Any = None) -> Iterator[Sink]:
    """A bar if the stream is a terminal and rich is installed, lines if not."""
    stream = stream or sys.stdout
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    except ImportError:
        yield Lines(stream)
        return
    console = Console(file=stream)
    if not console.is_terminal:
        yield Lines(stream)
        return
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        yield Bar(progress)


def drive(events: Iterable[Event], sinks: Iterable[Sink]) -> None:
    """Hand every event to every sink."""
    sinks = list(sinks)
    for event in events:
        for sink in sinks:
            sink.take(event)
