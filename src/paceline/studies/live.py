"""The display of many runs: a line for each that ends, and a note on how far all of them are."""

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import final

from paceline.lm.loop import Evaluation, Step
from paceline.runs import display
from paceline.runs.run import Notice, Started
from paceline.studies.engine import Message, is_done
from paceline.studies.pool import Ended
from paceline.studies.runs import Named
from paceline.studies.runs import text as text_of


@final
class _Whole:
    """The runs of a study, as far as they are."""

    def __init__(self, runs: Sequence[Named], folder: Path) -> None:
        self._shares = {one.name: float(is_done(folder, one.name)) for one in runs}
        self._done = sum(self._shares.values())
        self._steps = {one.name: one.run.steps or 0 for one in runs}
        self.losses: dict[str, dict[str, float]] = {}
        """The latest, by run."""
        self._began, self._before = time.monotonic(), self.share()

    def share(self) -> float:
        """Return the part of all steps that is behind them, each run counted alike."""
        return fmean(self._shares.values())

    def take(self, message: Message) -> None:
        """Learn from a message of the engine."""
        match message:
            case (one, Ended(how=how)):
                self._shares[one.name] = 1.0
                self._done += how in ("finished", "diverged")
            case (one, Started(step=step, steps=steps)):
                self._steps[one.name] = steps
                self._shares[one.name] = step / max(1, steps)
            case (one, Step(step=step)):
                self._shares[one.name] = step / max(1, self._steps[one.name])
            case (one, Evaluation(losses=losses)):
                self.losses[one.name] = dict(next(iter(losses.values())))

    def note(self) -> str:
        """Return how many runs are done, and the time that the others take at the speed so far."""
        now, left = self.share(), ""
        if now - self._before > 0.03 and now < 1:
            minutes = (time.monotonic() - self._began) * (1 - now) / (now - self._before) / 60
            left = f", about {minutes:.0f} min left"
        return f"{self._done:.0f} of {len(self._shares)} runs done{left}"


def shown(
    messages: Iterable[Message], runs: Sequence[Named], folder: Path, by: Sequence[str]
) -> Iterator[Message]:
    """Yield what happens to runs, and show it.

    Arguments:
        messages: those of the engine.
        runs: those of the study.
        folder: that of the study.
        by: the tags that tell runs apart; without any, runs go by their names.
    """
    whole = _Whole(runs, folder)
    with display.opened() as screen:
        screen.say(whole.note())
        for message in messages:
            whole.take(message)
            match message:
                case (one, Ended(how=how, text=text)):
                    losses = whole.losses.get(one.name, {})
                    ended = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
                    # A run that was stopped after its last evaluation has no losses here.
                    said = (ended or how) if how == "finished" else f"{how}: {text}"
                    name = ", ".join(f"{tag} {text_of(one.tags[tag])}" for tag in by) or one.name
                    screen.say(f"{name}: {said} ({whole.note()})")
                case (_, Notice(text=text)):
                    screen.say(text)
            screen.show(whole.share(), whole.note())
            yield message
