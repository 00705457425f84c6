"""From the numbers of a run to what its strength and its averaging power do."""

from dataclasses import dataclass
from typing import final

import numpy as np

from paceline.control.checks import finite, not_negative, number, one, positive, require, whole
from paceline.control.family import right_ratio, speed_factor
from paceline.control.limits import improvement, spectral_radius

POWERS = (0.3, 0.5, 0.7)
"""Of which advice says how far they look back."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """A run with a pull, at its end."""

    lr: float
    steps: int
    ratio: float
    """R of a typical coordinate: ηc/√v̂ for PACE, the strength itself with gain="uniform"; < 0: a push."""
    ema_power: float = 0.5
    """κ."""
    best_lr: float | None = None
    """Where AdamW with an average is best, if that is known."""
    speeds: tuple[float, float] | None = None
    """Least and largest η · curvature/√v̂, if known: what a step takes of the way to the optimum."""

    def __post_init__(self) -> None:
        one("lr", positive("lr", self.lr))
        whole("steps", self.steps, 1)
        number("ratio", self.ratio, "a finite number > -1", lambda x: x > -1)
        number("ema_power", self.ema_power, "0 <= ema_power <= 1", lambda x: (x >= 0) & (x <= 1))
        if self.best_lr is not None:
            one("best_lr", positive("best_lr", self.best_lr))
        if self.speeds is not None:
            speeds = positive("speeds", self.speeds)
            ok = speeds.shape == (2,) and bool(speeds[0] <= speeds[1])
            require(ok, "speeds", self.speeds, "two numbers, the least first")

    @classmethod
    def of_pace(
        cls,
        *,
        lr: float,
        steps: int,
        root: float,
        strength: float = 3e-3,
        ema_power: float = 0.5,
        best_lr: float | None = None,
        curvature: tuple[float, float] | None = None,
    ) -> "Situation":
        """From PACE's settings, and √v̂ of a typical coordinate: the size of its gradients, noise included."""
        scale = float(one("lr", positive("lr", lr)) / one("root", positive("root", root)))
        speeds = None if curvature is None else finite("curvature", curvature) * scale
        return cls(
            lr=lr,
            steps=steps,
            ratio=scale * one("strength", not_negative("strength", strength)),
            ema_power=ema_power,
            best_lr=best_lr,
            speeds=None if speeds is None else (float(speeds[0]), float(speeds[-1])),
        )

    def rate(self, power: float | None = None) -> float:
        """β at the last step; of another power, if given."""
        return float((1 + self.steps) ** -(self.ema_power if power is None else power))

    @property
    def gain(self) -> float:
        """λ = min(βR, 1)."""
        return min(self.rate() * self.ratio, 1.0)

    @property
    def effective_lr(self) -> float:
        """The learning rate that slow changes see: lr · β/(β + (1 − β)λ), about lr/(1 + R)."""
        return self.lr * float(speed_factor(self.rate(), self.gain))

    @property
    def right_ratio(self) -> float | None:
        """R* = η/η* − 1."""
        return None if self.best_lr is None else float(right_ratio(self.lr, self.best_lr))


def advise(run: Situation) -> list[str]:
    """What that means, in sentences.

    >>> for line in advise(Situation(lr=4e-3, steps=4000, ratio=0.4, best_lr=2e-3)):
    ...     print(line)
    R = 0.4 for a typical coordinate: slow changes see a learning rate of 0.00287, not 0.004.
    The average looks back 63 steps, 1.6 % of the run; with ema_power 0.3 12, with 0.7 332.
    This learning rate is 2 times the best one. Lower it to 0.002; if it must stay, R = 1 makes up for it.
    """
    lines = [
        f"R = {run.ratio:.2g} for a typical coordinate: slow changes see a learning rate of "
        f"{run.effective_lr:.3g}, not {run.lr:g}.",
        _about_power(run),
    ]
    if run.right_ratio is not None and run.best_lr is not None:
        lines.append(_about_rate(run.best_lr, run.right_ratio))
    if run.speeds is not None:
        lines.extend(_about_curvature(run, run.speeds))
    return lines


def _about_power(run: Situation) -> str:
    window = 1 / run.rate()
    others = [f"with {power:g} {1 / run.rate(power):.0f}" for power in POWERS if power != run.ema_power]
    others[0] = others[0].replace("with", "with ema_power", 1)
    share = 100 * window / run.steps
    return f"The average looks back {window:.0f} steps, {share:.2g} % of the run; {', '.join(others)}."


def _about_rate(best: float, right: float) -> str:
    times = f"This learning rate is {1 + right:.2g} times the best one."
    if right > 0.25:
        return f"{times} Lower it to {best:g}; if it must stay, R = {right:.2g} makes up for it."
    if right < -0.2:
        return (
            f"{times} A pull makes it smaller still and cannot help; {best:g} can, or a push "
            f"(R = {right:.2g}, a negative strength with gain uniform)."
        )
    return "This learning rate is about the best one: a pull cannot help here, and a weak one does not hurt."


def _about_curvature(run: Situation, speeds: tuple[float, float]) -> list[str]:
    lines = []
    for name, speed in zip(("flattest", "sharpest"), speeds, strict=True):
        if speed >= 1:
            lines.append(f"Along the {name} direction a step overshoots (η·curvature/√v̂ = {speed:.2g}).")
            continue
        error = float(improvement(speed, run.rate(), run.gain))
        before, after = (spectral_radius(speed, run.rate(), pull) for pull in (0.0, run.gain))
        lines.append(
            f"Along the {name} direction the pull leaves {error:.2g} of the average's final error, and an "
            f"old error lives {np.log(before) / np.log(after):.2g} times as long."
        )
    lines.append("Both come together: at equal speed a smaller learning rate without a pull ends lower.")
    return lines
