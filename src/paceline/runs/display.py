"""The display of runs: lines, and how far they are, on a terminal as a bar, elsewhere as a note."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

from paceline.lm.loop import Evaluation, Step
from paceline.runs.run import Event, Notice, Saved, Started
from paceline.runs.terminal import own_rank, printable

SECONDS = 30.0
"""How long nothing may be said where there is no bar."""


@final
class Display:
    """Lines, and a note on how far everything is, in a console with or without a bar."""

    def __init__(self, console: Any, bar: Any = None) -> None:
        self._console, self._bar = console, bar
        self._task = None if bar is None else bar.add_task("", total=1.0, note="")
        self._spoke = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line."""
        self._spoke = time.monotonic()
        self._console.print(printable(text), highlight=False, markup=False, soft_wrap=True)

    def show(self, share: float, note: str) -> None:
        """Move the bar; without one, print the note if nothing was said for a while."""
        if self._bar is not None:
            self._bar.update(self._task, completed=share, note=note)
        elif time.monotonic() - self._spoke > SECONDS:
            self.say(note)


@contextmanager
def opened() -> Iterator[Display]:
    """Yield a display on stdout; of several ranks the first one's, which speaks for all."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(file=sys.stdout, quiet=bool(own_rank()))
    if not console.is_terminal:
        yield Display(console)
        return
    columns = (BarColumn(bar_width=24), TextColumn("{task.fields[note]}", markup=False))
    with Progress(*columns, console=console, refresh_per_second=4) as bar:
        yield Display(console, bar)


# --- One run --------------------------------------------------------------------------------------------


@final
class Screen:
    """The events of one run, on a display, with its speed and its latest losses."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._started: Started | None = None
        self._seconds = 0.0  # a step, smoothed
        self._before: float | None = None  # when the last event came,
        self._at = 0  # and after how many steps
        self._returned: float | None = None

    def take(self, event: Event) -> None:
        """Show an event."""
        self._measure(event)
        if isinstance(event, Step) and not event.skipped and self._started is not None:
            self._display.show(event.step / max(1, self._started.steps), self._note(event))
        elif text := describe(event):
            self._display.say(text)

    def _measure(self, event: Event) -> None:
        now = time.monotonic()
        match event:
            case Started():
                self._started = event
            case Step(step=step) if self._before is not None and step > self._at:  # some may be missing
                share = 0.1 if self._seconds else 1.0
                self._seconds += share * ((now - self._before) / (step - self._at) - self._seconds)
            case Evaluation() if self._started is not None:
                self._returned = next(iter(event.losses.values()))[self._started.returned]
        # Time spent on evaluations and checkpoints is not a step's.
        self._before = now
        if not isinstance(event, Notice):
            self._at = event.step

    def _note(self, step: Step) -> str:
        """Return the latest losses, the speed and the time left."""
        assert self._started is not None
        parts = [f"step {step.step}/{self._started.steps}: loss {step.loss:.4f}"]
        if self._returned is not None:
            parts.append(f"{self._started.returned} {self._returned:.4f}")
        if self._seconds:
            speed = self._started.tokens_per_step / self._seconds
            left = (self._started.steps - step.step) * self._seconds / 60
            parts += [f"{speed:,.0f} tokens/s", f"{left:.0f} min left"]
        return ", ".join(parts)


def describe(event: Event) -> str | None:
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
        case Step() | Saved():
            return None
