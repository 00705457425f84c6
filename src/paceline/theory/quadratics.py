"""The update on quadratics: where it ends, how fast, and what pull and push do to the learning rate."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from paceline.control import family, limits
from paceline.control.checks import number
from paceline.control.family import right_ratio
from paceline.control.recursion import VARIANTS
from paceline.theory.picture import SOFT, Picture, labels, line, number_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def limiting_errors(speed: float = 0.1, rate: float = 0.05) -> Picture:
    """The pull lowers the final error, and slows down: two panels that must be read together."""
    number("speed", speed, "0 < speed < 1", lambda a: (a > 0) & (a < 1))
    pulls = np.linspace(0, 1, 101)

    def errors(axes: "Axes") -> None:
        for i, variant in enumerate(VARIANTS):
            values = [float(limits.limiting_error(speed, rate, c, variant=variant)) for c in pulls]
            line(axes, pulls, values, i + 1, variant)
        axes.axhline(
            float(limits.sgd_error(speed)), color=SOFT, linewidth=1, linestyle=":", label="SGD, live"
        )
        axes.set_yscale("log")
        axes.set_ylim(bottom=float(limits.least_limiting_error(speed, rate)) / 3)
        labels(axes, "Final error of the average", "pull c", "E[average²] / η²σ²")

    def speeds(axes: "Axes") -> None:
        for i, variant in enumerate(VARIANTS):
            radii = np.array([limits.spectral_radius(speed, rate, c, variant) for c in pulls])
            with np.errstate(divide="ignore"):
                line(axes, pulls, -1 / np.log(np.minimum(radii, 1 - 1e-6)), i + 1, variant)
        axes.set_yscale("log")
        labels(axes, "How long an old error lives", "pull c", "steps to fall by a factor e")

    rows: list[tuple[str, ...]] = [("c", "pre", "/ EMA's", "slope", "radius", *VARIANTS[1:])]
    for c in (0.0, 0.05, 0.1, 0.3, 0.5, 1.0):
        values = (
            float(limits.limiting_error(speed, rate, c)),
            float(limits.improvement(speed, rate, c)),
            float(limits.limiting_error_slope(speed, rate, c)),
            limits.spectral_radius(speed, rate, c),
            *(float(limits.limiting_error(speed, rate, c, variant=other)) for other in VARIANTS[1:]),
        )
        rows.append((f"{c:g}", *map(number_text, values)))
    best = float(limits.optimal_pull(speed, rate, clipped=False))
    least = float(limits.least_limiting_error(speed, rate))
    rows.append((f"best {best:.3g}", number_text(least), "", "0", *[""] * 4))
    title = f"Limiting errors, a = ηα = {speed:g}, β = {rate:g}"
    return Picture(name="limits", title=title, rows=tuple(rows), panels=(errors, speeds))


def equal_speed(radius: float = 0.99) -> Picture:
    """At equal speed the pull never helps."""
    pulls = [0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0]
    values = [limits.error_at_equal_speed(radius, c) for c in pulls]
    a = 1 - radius
    plain = a**2 * float(limits.sgd_error(a))

    def panel(axes: "Axes") -> None:
        line(axes, pulls, values, 3, "least error over η and β", solid=True, marker="o", markersize=4)
        axes.axhline(plain, color=SOFT, linewidth=1, linestyle=":", label="SGD, live")
        axes.set_xscale("symlog", linthresh=1e-3)
        axes.set_ylim(0, 1.15 * plain)
        labels(
            axes,
            f"Spectral radius {radius:g}",
            "pull c (0 is drawn at the left edge)",
            "E[average²] in σ²/α²",
        )

    rows: list[tuple[str, ...]] = [("c", "least error")]
    rows += [(f"{c:g}", f"{value:.6f}") for c, value in zip(pulls, values, strict=True)]
    rows.append(("SGD, live", f"{plain:.6f}"))
    return Picture(
        name="equal-speed", title="At equal speed a pull never helps", rows=tuple(rows), panels=(panel,)
    )


SPECTRUM = np.geomspace(0.01, 1.0, 16)
"""Curvatures of the quadratic on which the family is compared."""


def _expected_loss(errors: Callable[[float], float]) -> float:
    """Of a quadratic with those curvatures, from the error of each coordinate."""
    return float(sum(alpha / 2 * errors(float(alpha)) for alpha in SPECTRUM))


def basin(steps: int = 1000, rate: float = 0.02, sigma: float = 1.0, start: float = 1.0) -> Picture:
    """Loss over the learning rate: a pull moves the basin to the right, a push to the left."""
    lrs = np.geomspace(0.003, 0.95, 24)

    def loss(setting: family.Setting) -> float:
        return _expected_loss(lambda alpha: setting.error_after(steps, alpha, start, sigma))

    def nesterov(lr: float) -> float:
        noise = (lr * sigma) ** 2
        return _expected_loss(
            lambda alpha: family.ema_nesterov(lr, 1 - rate, 0.5, alpha).error_after(steps, start, noise)
        )

    def free(lr: float) -> float:
        noise = (lr * sigma) ** 2
        return _expected_loss(lambda alpha: family.schedule_free_error(lr, 0.9, alpha, start, noise, steps))

    methods: dict[str, Callable[[float], float]] = {
        "EMA": lambda lr: loss(family.ema(lr, rate)),
        "PACE, R = 1": lambda lr: loss(family.pace(lr, rate, 1.0)),
        "PACE, R = 3": lambda lr: loss(family.pace(lr, rate, 3.0)),
        "push, R = −0.5": lambda lr: loss(family.pace(lr, rate, -0.5)),
        "EMA-Nesterov, .5 (returns x)": nesterov,
        "GPA, μ = .98, .7": lambda lr: loss(family.gpa(lr, 0.98, 0.7)),
        "Schedule-Free, β = .9": free,
    }
    values = {name: np.array([method(float(lr)) for lr in lrs]) for name, method in methods.items()}

    def panel(axes: "Axes") -> None:
        for i, (name, losses) in enumerate(values.items()):
            line(axes, lrs, losses, i, name)
        axes.set_xscale("log")
        axes.set_yscale("log")
        title = f"After {steps:,} steps on 16 curvatures"
        labels(axes, title, "learning rate η", "expected loss of what is returned")

    rows: list[tuple[str, ...]] = [("method", "least loss", "at lr", "at 3x that lr", "at a third")]
    for name, losses in values.items():
        best = int(np.nanargmin(losses))
        here = float(lrs[best])
        others = (methods[name](min(3 * here, 0.95)), methods[name](here / 3))
        rows.append((name, number_text(float(losses[best])), number_text(here), *map(number_text, others)))
    title = "One family: what pull and push do to the basin of learning rates"
    return Picture(name="basin", title=title, rows=tuple(rows), panels=(panel,))


def right_ratios(steps: int = 1000, rate: float = 0.02, sigma: float = 1.0, start: float = 1.0) -> Picture:
    """R* = η/η* − 1 beside the R that is best, and the balance of gradient and gap."""
    from scipy.optimize import minimize_scalar

    def loss(lr: float, ratio: float) -> float:
        setting = family.pace(lr, rate, ratio)
        return _expected_loss(lambda alpha: setting.error_after(steps, alpha, start, sigma))

    def best(function: Callable[[float], float], low: float, high: float) -> float:
        found = minimize_scalar(function, bounds=(low, high), method="bounded", options={"xatol": 1e-4})
        return float(found.x)

    best_lr = float(np.exp(best(lambda x: loss(float(np.exp(x)), 0.0), np.log(1e-3), np.log(0.5))))
    shares = np.array([0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0])
    ratios = [best(partial(loss, float(lr)), -0.95, 40.0) for lr in shares * best_lr]

    def balance(lr: float) -> float:
        noise = (lr * sigma) ** 2
        each = (
            family.balance(family.ema(lr, rate).on(float(alpha)), float(alpha), start, noise, 300)
            for alpha in SPECTRUM
        )
        return float(sum(each)) / lr

    lrs = np.geomspace(0.25, 16, 13) * best_lr
    balances = [balance(float(lr)) for lr in lrs]

    def first(axes: "Axes") -> None:
        line(axes, shares, 1 + right_ratio(shares, 1.0), 0, "1 + R*", solid=True)
        line(axes, shares, 1 + np.array(ratios), 3, "1 + best R", marker="o", markersize=5, linestyle="none")
        axes.set_xscale("log")
        axes.set_yscale("log")
        labels(axes, "The strength that is right", "learning rate η/η*", "1 + R")

    def second(axes: "Axes") -> None:
        line(
            axes, lrs / best_lr, balances, 4, "after 300 steps, no pull", solid=True, marker="o", markersize=4
        )
        axes.axhline(0, color=SOFT, linewidth=0.8)
        axes.axvline(1, color=SOFT, linewidth=0.8, linestyle=":", label="η*")
        axes.set_xscale("log")
        axes.set_yscale("symlog", linthresh=0.1)
        labels(axes, "Does the next step want a pull?", "learning rate η/η*", "E⟨next gradient, gap⟩ / η")

    rows: list[tuple[str, ...]] = [("η/η*", "R*", "best R")]
    for share, ratio in zip(shares, ratios, strict=True):
        rows.append((f"{share:g}", number_text(float(share) - 1), number_text(ratio)))
    title = f"R* = η/η* − 1, and the best R: 16 curvatures, {steps:,} steps, β = {rate:g}"
    return Picture(name="right-ratio", title=title, rows=tuple(rows), panels=(first, second))
