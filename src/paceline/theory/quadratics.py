"""The update on quadratics: where it ends, how fast, and what pull and push do to the learning rate."""

from collections.abc import Callable
from functools import partial

import numpy as np

from paceline.control import family, limits
from paceline.control.recursion import VARIANTS
from paceline.theory.picture import DOTS, DOTTED, SOLID, Curve, Picture, panel, row

RATE = "learning rate η"


def limiting_errors() -> Picture:
    """Show that the pull lowers the final error, and slows down: panels that must be read together."""
    speed, rate, pulls = 0.1, 0.05, np.linspace(0, 1, 101)
    sgd, least = float(limits.sgd_error(speed)), float(limits.least_limiting_error(speed, rate))
    errors: list[Curve] = []
    lives: list[Curve] = []
    for i, variant in enumerate(VARIANTS, 1):
        errors.append((i, variant, pulls, limits.limiting_error(speed, rate, pulls, variant=variant)))
        radii = np.array([limits.spectral_radius(speed, rate, c, variant) for c in pulls])
        with np.errstate(divide="ignore"):
            lives.append((i, variant, pulls, -1 / np.log(np.minimum(radii, 1 - 1e-6))))
    errors.append((0, "SGD, live", [0, 1], [sgd, sgd], DOTTED))
    functions = limits.limiting_error, limits.improvement, limits.limiting_error_slope, limits.spectral_radius
    rows = []
    for c in (0.0, 0.05, 0.1, 0.3, 0.5, 1.0):
        others = (limits.limiting_error(speed, rate, c, variant=other) for other in VARIANTS[1:])
        rows.append(row(f"{c:g}", *(function(speed, rate, c) for function in functions), *others))
    best = float(limits.optimal_pull(speed, rate, clipped=False))
    rows.append(row(f"best {best:.3g}", least, "", "0", *[""] * 4))
    x, y, floor = "pull c", "E[average²] / η²σ²", (least / 3, None)
    return Picture(
        "limits",
        f"Limiting errors, a = ηα = {speed:g}, β = {rate:g}",
        ("c", "pre", "/ EMA's", "slope", "radius", *VARIANTS[1:]),
        rows,
        panel("Final error of the average", x, y, *errors, log="y", y_range=floor),
        panel("How long an old error lives", x, "steps to fall by a factor e", *lives, log="y"),
    )


def equal_speed() -> Picture:
    """Show that at equal speed the pull never helps."""
    radius, pulls = 0.99, [0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0]
    values = [limits.error_at_equal_speed(radius, c) for c in pulls]
    sgd = (1 - radius) ** 2 * float(limits.sgd_error(1 - radius))
    rows = [(f"{c:g}", f"{value:.6f}") for c, value in zip(pulls, values, strict=True)]
    rows.append(("SGD, live", f"{sgd:.6f}"))
    least = (3, "least error over η and β", pulls, values, SOLID | DOTS)
    live = (0, "SGD, live", [0, 1], [sgd, sgd], DOTTED)
    x, y = "pull c (0 is drawn at the left edge)", "E[average²] in σ²/α²"
    shown = panel(
        f"Spectral radius {radius:g}", x, y, least, live, symlog=("x", 1e-3), y_range=(0, 1.15 * sgd)
    )
    return Picture("equal-speed", "At equal speed a pull never helps", ("c", "least error"), rows, shown)


SPECTRUM = np.geomspace(0.01, 1.0, 16)
"""Curvatures of the quadratic on which the family is compared."""
STEPS, BETA = 1000, 0.02


def _expected_loss(errors: Callable[[float], float]) -> float:
    """Return the loss of a quadratic with those curvatures, from the error of each coordinate."""
    return float(sum(alpha / 2 * errors(float(alpha)) for alpha in SPECTRUM))


def basin() -> Picture:
    """Show the loss over the learning rate: a pull moves the basin to the right, a push to the left."""
    lrs = np.geomspace(0.003, 0.95, 24)

    def of(setting: Callable[[float], family.Setting]) -> Callable[[float], float]:
        return lambda lr: _expected_loss(lambda alpha: setting(lr).error_after(STEPS, alpha, 1.0, 1.0))

    def nesterov(lr: float, alpha: float) -> float:
        return family.ema_nesterov(lr, 1 - BETA, 0.5, alpha).error_after(STEPS, 1.0, lr**2)

    def free(lr: float, alpha: float) -> float:
        return family.schedule_free_error(lr, 0.9, alpha, 1.0, lr**2, STEPS)

    methods: dict[str, Callable[[float], float]] = {
        "EMA": of(lambda lr: family.ema(lr, BETA)),
        "PACE, R = 1": of(lambda lr: family.pace(lr, BETA, 1.0)),
        "PACE, R = 3": of(lambda lr: family.pace(lr, BETA, 3.0)),
        "push, R = −0.5": of(lambda lr: family.pace(lr, BETA, -0.5)),
        "EMA-Nesterov, .5 (returns x)": lambda lr: _expected_loss(partial(nesterov, lr)),
        "GPA, μ = .98, .7": of(lambda lr: family.gpa(lr, 0.98, 0.7)),
        "Schedule-Free, β = .9": lambda lr: _expected_loss(partial(free, lr)),
    }
    rows, curves = [], []
    for i, (name, method) in enumerate(methods.items()):
        losses = np.array([method(float(lr)) for lr in lrs])
        curves.append((i, name, lrs, losses))
        best = int(np.nanargmin(losses))
        here = float(lrs[best])
        rows.append(row(name, losses[best], here, method(min(3 * here, 0.95)), method(here / 3)))
    title, y = f"After {STEPS:,} steps on 16 curvatures", "expected loss of what is returned"
    return Picture(
        "basin",
        "One family: what pull and push do to the basin of learning rates",
        ("method", "least loss", "at lr", "at 3x that lr", "at a third"),
        rows,
        panel(title, RATE, y, *curves, log="xy"),
    )


def right_ratios() -> Picture:
    """Show R* = η/η* − 1 next to the R that is best, and the balance of gradient and gap."""
    from scipy.optimize import minimize_scalar

    def loss(lr: float, ratio: float) -> float:
        setting = family.pace(lr, BETA, ratio)
        return _expected_loss(lambda alpha: setting.error_after(STEPS, alpha, 1.0, 1.0))

    def best(function: Callable[[float], float], low: float, high: float) -> float:
        found = minimize_scalar(function, bounds=(low, high), method="bounded", options={"xatol": 1e-4})
        return float(found.x)

    def balance(lr: float) -> float:
        plain = family.ema(lr, BETA)
        each = (family.balance(plain.on(float(a)), float(a), 1.0, lr**2, 300) for a in SPECTRUM)
        return float(sum(each)) / lr

    best_lr = float(np.exp(best(lambda x: loss(float(np.exp(x)), 0.0), np.log(1e-3), np.log(0.5))))
    shares, around = np.array([0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0]), np.geomspace(0.25, 16, 13)
    ratios = np.array([best(partial(loss, float(lr)), -0.95, 40.0) for lr in shares * best_lr])
    balances = [balance(float(lr)) for lr in around * best_lr]
    right = (0, "1 + R*", shares, 1 + family.right_ratio(shares, 1.0))
    found = (3, "1 + best R", shares, 1 + ratios, DOTS | {"linestyle": "none"})
    wanted = (4, "after 300 steps, no pull", around, balances, SOLID | DOTS)
    there = (0, "η*", [1, 1], [min(balances), max(balances)], DOTTED)
    x, y = f"{RATE}/η*", "E⟨next gradient, gap⟩ / η"
    return Picture(
        "right-ratio",
        f"R* = η/η* − 1, and the best R: 16 curvatures, {STEPS:,} steps, β = {BETA:g}",
        ("η/η*", "R*", "best R"),
        [row(f"{share:g}", share - 1, ratio) for share, ratio in zip(shares, ratios, strict=True)],
        panel("The strength that is right", x, "1 + R", right, found, log="xy"),
        panel("Does the next step want a pull?", x, y, wanted, there, log="x", symlog=("y", 0.1), level=0),
    )
