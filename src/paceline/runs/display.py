"""The display of a run: lines, and on a terminal a bar."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.lm.loop import Evaluation, Step
from paceline.runs.run import Event, Notice, Saved, Started
from paceline.runs.terminal import own_rank, printable


class Screen:
    """A line for each evaluation and notice; on a terminal, a bar below them with losses and time left."""

    def __init__(self, console: Any, bar: Any = None, seconds: float = 30.0) -> None:
        self._console, self._bar, self._seconds = console, bar, seconds
        self._pace, self._task = Pace(), None
        self._spoke = time.monotonic()

    def take(self, event: Event) -> None:
        """Move the bar, and print what is worth a line; without a bar, steps too if they are far apart."""
        self._pace.take(event)
        if self._bar is not None and isinstance(event, Started):
            self._task = self._bar.add_task("", total=event.steps, completed=event.step, note="")
        if isinstance(event, Step) and not event.skipped:
            if self._bar is not None:
                self._bar.update(self._task, completed=event.step, note=self._pace.note())
            if self._bar is not None or time.monotonic() - self._spoke < self._seconds:
                return
        if text := describe(event, self._pace):
            self._spoke = time.monotonic()
            self._console.print(printable(text), highlight=False, markup=False, soft_wrap=True)


class Pace:
    """The speed of a run, and its latest losses."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._seconds = 0.0  # a step, smoothed
        self._before: float | None = None  # when the last event came,
        self._at = 0  # and after how many steps
        self._step: Step | None = None
        self._returned: float | None = None

    def take(self, event: Event) -> None:
        """Take an event in."""
        now = time.monotonic()
        match event:
            case Started():
                self._started = event
            case Step():
                if self._before is not None and event.step > self._at:  # some may be missing
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
        """Return the speed of training steps."""
        return self._started.tokens_per_step / self._seconds if self._started and self._seconds else 0.0

    def seconds_left(self) -> float | None:
        """Return the time that the rest of the steps takes; None if it is not known yet."""
        if not (self._seconds and self._started and self._step):
            return None
        return (self._started.steps - self._step.step) * self._seconds

    def note(self) -> str:
        """Return the latest losses, the speed and the time left."""
        parts = [f"loss {self._step.loss:.4f}"] if self._step else []
        if self._returned is not None and self._started is not None:
            parts.append(f"{self._started.returned} {self._returned:.4f}")
        if (left := self.seconds_left()) is not None:
            parts += [f"{self.tokens_per_second():,.0f} tokens/s", f"{left / 60:.0f} min left"]
        return ", ".join(parts)


def describe(event: Event, pace: Pace) -> str | None:
    """Return a line about an event; None if it is not worth one."""
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
def shown() -> Iterator[Screen]:
    """Yield a screen on stdout; of several ranks the first one's, which speaks for all."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(file=sys.stdout, quiet=bool(own_rank()))
    if not console.is_terminal:
        yield Screen(console)
        return
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=console, refresh_per_second=4) as bar:
        yield Screen(console, bar)
