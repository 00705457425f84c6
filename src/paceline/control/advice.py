"""From the numbers of a run to what its strength and its averaging power do."""

from dataclasses import dataclass
from typing import final

import numpy as np

from paceline.control.checks import number, positive, require, whole
from paceline.control.family import right_strength, speed_factor
from paceline.control.limits import improvement, spectral_radius


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """A run with PACE, at its end."""

    lr: float
    steps: int
    root: float
    """√v̂ of a typical coordinate: the size of its gradients, noise included."""
    strength: float = 3e-3
    """pullback_strength, c in the paper."""
    ema_power: float = 0.5
    """κ."""
    best_lr: float | None = None
    """Where AdamW with an average is best, if that is known."""
    curvature: tuple[float, float] | None = None
    """Least and largest curvature of the loss, if known."""

    def __post_init__(self) -> None:
        for name in ("lr", "root", *(("best_lr",) if self.best_lr is not None else ())):
            positive(name, getattr(self, name))
        whole("steps", self.steps, 1)
        number("strength", self.strength, "a finite number >= 0", lambda x: x >= 0)
        number("ema_power", self.ema_power, "0 <= ema_power <= 1", lambda x: (x >= 0) & (x <= 1))
        if self.curvature is not None:
            low, high = positive("curvature", self.curvature)
            require(low <= high, "curvature", self.curvature, "the least first")

    @property
    def rate(self) -> float:
        """β at the last step."""
        return float((1 + self.steps) ** -self.ema_power)

    @property
    def window(self) -> float:
        """Steps that the average looks back, 1/β."""
        return 1 / self.rate

    @property
    def ratio(self) -> float:
        """R = ηc/√v̂: how strongly a typical coordinate is pulled."""
        return self.lr * self.strength / self.root

    @property
    def gain(self) -> float:
        """λ = min(βR, 1)."""
        return min(self.rate * self.ratio, 1.0)

    @property
    def effective_lr(self) -> float:
        """The learning rate that slow changes see: lr · β/(β + (1 − β)λ), about lr/(1 + R)."""
        return self.lr * float(speed_factor(self.rate, self.gain))

    @property
    def saturated_below(self) -> float:
        """Coordinates with a smaller √v̂ than this are held at the average entirely: λ = 1."""
        return self.rate * self.lr * self.strength

    @property
    def right_ratio(self) -> float | None:
        """R* = η/η* − 1."""
        return None if self.best_lr is None else float(right_strength(self.lr, self.best_lr))

    @property
    def right_strength(self) -> float | None:
        """The c that gives R* to a typical coordinate; 0 where R* is not positive."""
        return None if self.right_ratio is None else max(self.right_ratio, 0.0) * self.root / self.lr


def advise(run: Situation) -> list[str]:
    """What that means, in sentences.

    >>> for line in advise(Situation(lr=4e-3, steps=4000, root=1e-5, best_lr=2e-3)):
    ...     print(line)
    R = 1.2 for a typical coordinate: slow changes see a learning rate of 0.00183 instead of 0.004.
    The average looks back 63 steps, 1.6 % of the run.
    Coordinates with a gradient scale below 1.9e-07 do not leave the average at all.
    This learning rate is 2 times the best one, so R = 1 would make up for it: strength 0.0025.
    """
    lines = [
        f"R = {run.ratio:.2g} for a typical coordinate: slow changes see a learning rate of "
        f"{run.effective_lr:.3g} instead of {run.lr:g}.",
        f"The average looks back {run.window:.0f} steps, {100 * run.window / run.steps:.2g} % of the run.",
    ]
    if run.strength:
        lines.append(
            f"Coordinates with a gradient scale below {run.saturated_below:.2g} do not leave the average "
            "at all."
        )
    if run.right_ratio is not None and run.right_strength is not None:
        lines.append(_about_rate(run.lr, run.right_ratio, run.right_strength))
    if run.curvature is not None:
        lines.extend(_about_curvature(run, run.curvature))
    return lines


def _about_rate(lr: float, right: float, strength: float) -> str:
    times = 1 + right
    if right > 0.25:
        return (
            f"This learning rate is {times:.2g} times the best one, so R = {right:.2g} would make up for it: "
            f"strength {strength:.2g}."
        )
    if right < -0.2:
        return (
            f"This learning rate is {times:.2g} times the best one: a pull makes it smaller still and cannot "
            "help; a larger learning rate can, or a push (a negative strength, gain uniform or relative)."
        )
    return "This learning rate is about the best one: a pull cannot help here, and a weak one does not hurt."


def _about_curvature(run: Situation, curvature: tuple[float, float]) -> list[str]:
    lines = []
    for name, alpha in zip(("flattest", "sharpest"), curvature, strict=True):
        speed = run.lr / run.root * alpha  # of the preconditioned step
        if not 0 < speed < 1:
            lines.append(
                f"Along the {name} direction a step overshoots (η·curvature/√v̂ = {speed:.2g}, over 1)."
            )
            continue
        error = float(improvement(speed, run.rate, run.gain))
        before, after = (spectral_radius(speed, run.rate, pull) for pull in (0.0, run.gain))
        lines.append(
            f"Along the {name} direction the pull leaves {error:.2g} of the average's final error, and an "
            f"old error lives {np.log(before) / np.log(after):.2g} times as long."
        )
    lines.append("Both come together: at equal speed a smaller learning rate without a pull ends lower.")
    return lines
