"""Advice: the effects of strength and averaging power on a run, in sentences."""

from dataclasses import dataclass
from typing import final

from paceline.control import checks
from paceline.control.family import right_ratio, speed_factor

POWERS = (0.3, 0.5, 0.7)
"""The averaging powers that `advise` compares."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """The settings of a run with a pull, and its state at the last step."""

    lr: float
    steps: int
    ratio: float
    """R of a typical coordinate: ηc/√v̂ for PACE, the strength itself with sizing="uniform"; < 0: a push."""
    power: float = 0.5
    """κ, the power of the averaging rate."""
    step: float = 1.0
    """The factor on lr of the base's step, as in `Control`; 1 + R keeps the meaning of lr."""
    best_lr: float | None = None
    """The best learning rate of AdamW with an average; None if unknown."""

    def __post_init__(self) -> None:
        checks.one("lr", checks.positive("lr", self.lr))
        checks.whole("steps", self.steps, 1)
        checks.number("ratio", self.ratio, "a finite number > -1", lambda x: x > -1)
        checks.number("power", self.power, "0 <= power <= 1", lambda x: (x >= 0) & (x <= 1))
        checks.one("step", checks.positive("step", self.step))
        if self.best_lr is not None:
            checks.one("best_lr", checks.positive("best_lr", self.best_lr))

    def rate(self, power: float | None = None) -> float:
        """Return β at the last step, for another power than `self.power` if one is given."""
        return float((1 + self.steps) ** -(self.power if power is None else power))

    @property
    def gain(self) -> float:
        """The gain at the last step, λ = min(βR, 1)."""
        return min(self.rate() * self.ratio, 1.0)

    @property
    def effective_lr(self) -> float:
        """The learning rate for slow changes: step · lr · β/(β + (1 − β)λ), about step · lr/(1 + R)."""
        return self.step * self.lr * float(speed_factor(self.rate(), self.gain))

    @property
    def right_ratio(self) -> float | None:
        """The best ratio, R* = η/η* − 1 with η = step · lr and η* = best_lr; None if best_lr is unknown."""
        return None if self.best_lr is None else float(right_ratio(self.step * self.lr, self.best_lr))


def advise(run: Situation) -> list[str]:
    """Return sentences about what the settings of a run do.

    >>> for line in advise(Situation(lr=4e-3, steps=4000, ratio=0.4, best_lr=2e-3)):
    ...     print(line)
    R = 0.4 for a typical coordinate: slow changes see a learning rate of 0.00287, not 0.004.
    The average looks back 63 steps, 1.6 % of the run; with power 0.3 12, with 0.7 332.
    This learning rate is 2 times the best one. Lower it to 0.002; if it must stay, R = 1 makes up for it.
    """
    lines = [
        f"R = {run.ratio:.2g} for a typical coordinate: slow changes see a learning rate of "
        f"{run.effective_lr:.3g}, not {run.lr:g}.",
        _about_power(run),
    ]
    if run.right_ratio is not None and run.best_lr is not None:
        about = _about_rate(run.best_lr, run.right_ratio)
        lines.append(about if run.step == 1 else _about_kept_rate(run, run.best_lr))
    return lines


def _about_power(run: Situation) -> str:
    window = 1 / run.rate()
    others = [f"with {power:g} {1 / run.rate(power):.0f}" for power in POWERS if power != run.power]
    others[0] = others[0].replace("with", "with power", 1)
    share = 100 * window / run.steps
    return f"The average looks back {window:.0f} steps, {share:.2g} % of the run; {', '.join(others)}."


def _about_rate(best: float, right: float) -> str:
    times = f"This learning rate is {1 + right:.2g} times the best one."
    if right > 0.25:
        return f"{times} Lower it to {best:g}; if it must stay, R = {right:.2g} makes up for it."
    if right < -0.2:
        return (
            f"{times} A pull makes it smaller still and cannot help; {best:g} can, or a push "
            f"(R = {right:.2g}: Control.push({-right:.2g}))."
        )
    return "This learning rate is about the best one: a pull cannot help here, and a weak one does not hurt."


def _about_kept_rate(run: Situation, best: float) -> str:
    """Return advice about lr for a control that also scales the base's step."""
    times = run.effective_lr / best
    if 0.8 < times < 1.25:
        return "That is about the best one."
    return f"That is {times:.2g} times the best one: with this control lr {run.lr / times:.3g} is right."
