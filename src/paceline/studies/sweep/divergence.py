"""When a run is given up: its training loss has been worse than at its first step, for long."""

from dataclasses import dataclass

SHARE = 0.1  # of the run that it has to last
LEAST = 20  # steps, of short runs
SMOOTHING = 0.1  # the share of a new loss in the mean


@dataclass(kw_only=True, slots=True)
class Divergence:
    """The smoothed loss above the first one by more than a margin, in all of a tenth of the run.

    Counted after the warm-up, from losses alone, so that a run that was killed ends at the same step.
    """

    margin: float
    """Nats."""
    warmup: int
    first: float | None = None
    smoothed: float = 0.0
    above: int = 0

    def take(self, step: int, steps: int, loss: float | None) -> str | None:
        """Look at the loss of the next step; why the run should end, or None.

        >>> watch = Divergence(margin=1.0, warmup=0)
        >>> [step for step in range(1, 100) if watch.take(step, 100, 3.0 if step < 50 else 9.0)][0]
        75
        """
        if loss is None:  # a step that was left out
            return None
        if self.first is None:
            self.first = self.smoothed = loss
        # Cut off, so that one enormous loss is not remembered for longer than a high one.
        self.smoothed += SMOOTHING * (min(loss, self.first + 2 * self.margin) - self.smoothed)
        high = self.smoothed > self.first + self.margin and step > min(self.warmup, steps // 10)
        self.above = self.above + 1 if high else 0
        if self.above < max(LEAST, SHARE * steps):
            return None
        return (
            f"training loss {loss:.2f} at step {step}; smoothed, it has been more than {self.margin:g} above "
            f"that of the first step, {self.first:.2f}, for {self.above} steps"
        )
