"""The pictures of the theory, each with the numbers that it shows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.control import bounds, discrete, family, gains, limits, simulate
from paceline.control.checks import Array, number, positive, whole
from paceline.control.family import right_ratio
from paceline.control.recursion import VARIANTS
from paceline.control.unknown import Seen
from paceline.experiments.report.palette import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _SOFT, _GRID = "#1c1e21", "#5c6067", "#ebebe7"


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture before it is drawn."""

    name: str
    title: str
    rows: tuple[tuple[str, ...], ...]
    """The numbers, as text; the first row says what they are."""
    panels: tuple[Callable[["Axes"], None], ...]

    def draw(self, path: Path) -> None:
        """Into a PNG file."""
        from matplotlib.figure import Figure

        width = 5.4 * len(self.panels) if len(self.panels) > 1 else 8.2
        figure = Figure(figsize=(width, 4.4), dpi=140, layout="constrained", facecolor="white")
        for i, panel in enumerate(self.panels, 1):
            axes = figure.add_subplot(1, len(self.panels), i)
            axes.grid(color=_GRID)
            axes.set_axisbelow(True)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
            axes.tick_params(colors=_SOFT, labelsize=8.5)
            panel(axes)
            axes.legend(frameon=False, fontsize=8.5, labelcolor=_INK)
        figure.savefig(path)

    def text(self) -> list[str]:
        """The numbers as lines of a table."""
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        return [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in self.rows
        ]


def labels(axes: "Axes", title: str, x: str, y: str) -> None:
    """Of a panel and its axes."""
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=_INK)
    axes.set_xlabel(x, fontsize=9, color=_INK)
    axes.set_ylabel(y, fontsize=9, color=_INK)


def line(axes: "Axes", x: Any, y: Any, i: int, label: str, *, solid: bool = False, **more: Any) -> None:
    """A line in the colour and dashes of method i."""
    look = style(i)
    dashes: dict[str, Any] = {"dashes": look.dashes} if look.dashes and not solid else {}
    dashes = {} if "linestyle" in more else dashes
    axes.plot(x, y, color=look.on_light, label=label, linewidth=1.8, **dashes, **more)


def _number(value: float) -> str:
    return f"{value:.4g}"


# --- The controller -----------------------------------------------------------------------------------


def gains_over_time(curvature: float = 1.0, penalty: float = 0.01, horizon: float = 20.0) -> Picture:
    """The exact gain grows until just before the end (E25); the practical one is a constant."""
    positive("curvature", curvature)
    times = np.linspace(0, 1, 400) * positive("horizon", horizon)
    exact = gains.original_gains(curvature, penalty, horizon, times)
    relaxed = gains.relaxed_gain(curvature, penalty, horizon, times)
    practical = float(gains.practical_gain(curvature, penalty, horizon))

    def first(axes: "Axes") -> None:
        line(axes, times / horizon, exact.toward, 3, "exact, k_x", solid=True)
        line(axes, times / horizon, np.full_like(times, practical), 1, "practical, 1/(T(1 + λα²T))")
        axes.set_ylim(bottom=0)
        labels(axes, "Pull toward the optimum", "time t/T", "gain on μ − θ")

    def second(axes: "Axes") -> None:
        line(axes, times / horizon, exact.toward, 3, "returned: the mean of the weights", solid=True)
        line(axes, times / horizon, relaxed, 4, "relaxed: every weight on its own")
        axes.set_yscale("log")
        axes.set_ylim(bottom=float(exact.toward[0]) / 10)  # both end at 0
        labels(axes, "Two objectives, two controllers", "time t/T", "gain on μ − θ")

    rows: list[tuple[str, ...]] = [("t/T", "k_x", "k_y t", "relaxed", "practical")]
    for share in (0.0, 0.25, 0.5, 0.75, 0.9):
        now = gains.original_gains(curvature, penalty, horizon, share * horizon)
        other = gains.relaxed_gain(curvature, penalty, horizon, share * horizon)
        values = (float(now.toward), float(now.balance) * share * horizon, float(other), practical)
        rows.append((f"{share:g}", *map(_number, values)))
    title = f"The best gain over time, α = {curvature:g}, λ = {penalty:g}, T = {horizon:g}"
    return Picture(name="gains", title=title, rows=tuple(rows), panels=(first, second, _as_printed))


def _as_printed(axes: "Axes") -> None:
    """Where the slip of E10 shows: a short horizon and a small penalty."""
    curvature, penalty, horizon = 1.0, 1e-3, 4.0
    times = np.linspace(0.7, 1, 600) * horizon
    exact = gains.original_gains(curvature, penalty, horizon, times).toward
    line(axes, times / horizon, exact, 3, "exact", solid=True)
    line(axes, times / horizon, _printed_gain(curvature, penalty, horizon, times), 5, "as printed (E10)")
    top = 1.6 * float(np.max(exact))
    axes.set_ylim(-top, top)
    axes.axhline(0, color=_SOFT, linewidth=0.8)
    labels(axes, "Printed, it changes sign: α = 1, T = 4, λ = .001", "time t/T", "gain on μ − θ")


def _printed_gain(curvature: float, penalty: float, horizon: float, times: Array) -> Array:
    """The diagonal gain of cor:optimal_control_unknown_mustar as it stands in the paper: it changes sign."""
    left = horizon - times
    spent = -np.expm1(-curvature * left)
    below = curvature * penalty * horizon**2 + left / curvature - 1.5 / curvature**2 * spent
    with np.errstate(divide="ignore", invalid="ignore"):
        printed: Array = spent / below * spent / curvature
    return np.where(np.abs(printed) > 20, np.nan, printed)  # the pole


def practical_range(penalty: float = 1e-6) -> Picture:
    """Where the practical gain is good: αT ≫ 3/2, not T ≫ 1."""
    products = np.geomspace(0.5, 300, 300)
    exact = gains.original_gains(products, penalty, 1.0, 0.0).toward
    ratio = exact / gains.practical_gain(products, penalty, 1.0)
    enough = products > 1.6
    corrected = exact[enough] / gains.original_gain_far(products[enough], penalty, 1.0)

    def panel(axes: "Axes") -> None:
        line(axes, products, ratio, 3, "exact / practical")
        line(axes, products[enough], corrected, 4, "exact / practical with its −3/(2α) kept")
        axes.axhline(1, color=_SOFT, linewidth=0.8)
        axes.set_xscale("log")
        axes.set_ylim(0, 3.2)
        labels(axes, "How far the practical gain is off at t = 0", "curvature × horizon αT", "ratio")

    rows: list[tuple[str, ...]] = [("αT", "exact/practical", "with −3/(2α)")]
    for product in (2.0, 5.0, 10.0, 30.0, 100.0):
        value = float(gains.original_gains(product, penalty, 1.0, 0.0).toward)
        near = value / float(gains.practical_gain(product, penalty, 1.0))
        far = value / float(gains.original_gain_far(product, penalty, 1.0))
        rows.append((f"{product:g}", _number(near), _number(far)))
    return Picture(
        name="practical", title="The practical gain and its range", rows=tuple(rows), panels=(panel,)
    )


def controllers(
    curvature: float = 1.0,
    penalty: float = 0.01,
    horizon: float = 20.0,
    prior: float = 4.0,
    paths: int = 4000,
    steps: int = 400,
    seed: int = 0,
) -> Picture:
    """What controlling brings if the optimum is unknown: little, and the practical control nothing."""
    positive("curvature", curvature)
    problem = simulate.Diffusion(curvature=curvature, penalty=penalty, horizon=horizon)
    rng = np.random.default_rng(whole("seed", seed, 0))
    optima = np.sqrt(positive("prior", prior)) * rng.standard_normal((whole("paths", paths, 2), 1))
    tried: dict[str, simulate.Controller] = {
        "none": simulate.uncontrolled,
        "practical: pull toward the mean": simulate.practical(problem),
        "flat prior: BEMA without control": simulate.bema_estimating(problem),
        "least J: posterior mean": simulate.estimating(problem, [0.0], [[prior]]),
        "knows the optimum": lambda seen: problem.control(seen, optima),
    }
    ended = {
        name: simulate.simulate(problem, control, 0.0, optima, steps=steps, paths=paths, seed=seed + 1)
        for name, control in tried.items()
    }
    floor = simulate.posterior_variance(problem, [[prior]])
    rows: list[tuple[str, ...]] = [("controller", "error²", "change by control", "±", "∫u²", "J")]
    squares = {name: np.sum((ended[name].mean - optima) ** 2, axis=1) for name in tried}
    points = []
    for name, each in squares.items():
        # The same optima and the same noise for all: differences are paired, and far less noisy.
        gain = each - squares["none"]
        spread = float(np.std(gain, ddof=1) / np.sqrt(paths))
        effort = float(np.mean(ended[name].effort))
        values = (float(np.mean(each)), float(np.mean(gain)), spread, effort)
        points.append((name, float(np.mean(gain)), spread))
        rows.append((name, *map(_number, values), _number(float(np.mean(each)) + penalty * effort)))
    rows.append(("least without knowing the optimum", _number(floor), "", "", "", ""))

    def bars(axes: "Axes") -> None:
        for i, (_, gain, spread) in enumerate(points[1:-1]):
            axes.errorbar(gain, i, xerr=2 * spread, fmt="o", color=style(i + 1).on_light, capsize=3)
        least = floor - float(np.mean(squares["none"]))
        axes.axvline(0, color=_SOFT, linewidth=1, label="no control")
        axes.axvline(
            least, color=_SOFT, linewidth=1, linestyle=":", label="least without knowing the optimum"
        )
        axes.set_yticks(range(len(points) - 2), [name.replace(": ", ":\n") for name, _, _ in points[1:-1]])
        axes.set_ylim(len(points) - 1.3, -0.8)
        labels(axes, "What control changes", "squared error less that without control, ± 2 s.e.", "")

    return Picture(
        name="controllers",
        title=f"Controllers of an unknown optimum, α = {curvature:g}, λ = {penalty:g}, T = {horizon:g}",
        rows=tuple(rows),
        panels=(bars, _sample_paths(problem)),
    )


def _sample_paths(problem: simulate.Diffusion) -> Callable[["Axes"], None]:
    """One path with the best control and one without, under the same noise."""
    steps, start, optimum = 400, np.array([3.0]), np.array([0.0])
    times = np.linspace(0, problem.horizon, steps + 1)

    def path(controller: simulate.Controller) -> list[float]:
        seen: list[float] = []

        def watch(now: Seen) -> Array:
            seen.append(float(np.asarray(now.weights)[0, 0]))
            return controller(now)

        ended = simulate.simulate(problem, watch, start, optimum, steps=steps, paths=2, seed=7)
        return [*seen, float(ended.last[0, 0])]

    free, held = path(simulate.uncontrolled), path(simulate.knowing(problem, optimum))

    def panel(axes: "Axes") -> None:
        for i, (name, seen) in enumerate((("no control", free), ("best control, optimum known", held))):
            colour = style(3 * i).on_light  # dashes would be lost in so rough a line
            axes.plot(times, seen, color=colour, linewidth=1.2, label=name)
        axes.axhline(0, color=_SOFT, linewidth=0.8)
        labels(axes, "One path, the same noise", "time t", "weight θ, optimum 0")

    return panel


# --- Quadratics ---------------------------------------------------------------------------------------


def limiting_errors(speed: float = 0.1, rate: float = 0.05) -> Picture:
    """The pull lowers the final error, and slows down: two panels that must be read together."""
    number("speed", speed, "0 < speed < 1", lambda a: (a > 0) & (a < 1))
    pulls = np.linspace(0, 1, 101)

    def errors(axes: "Axes") -> None:
        for i, variant in enumerate(VARIANTS):
            values = [float(limits.limiting_error(speed, rate, c, variant=variant)) for c in pulls]
            line(axes, pulls, values, i + 1, variant)
        axes.axhline(
            float(limits.sgd_error(speed)), color=_SOFT, linewidth=1, linestyle=":", label="SGD, live"
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
        rows.append((f"{c:g}", *map(_number, values)))
    best = float(limits.optimal_pull(speed, rate, clipped=False))
    least = float(limits.least_limiting_error(speed, rate))
    rows.append((f"best {best:.3g}", _number(least), "", "0", *[""] * 4))
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
        axes.axhline(plain, color=_SOFT, linewidth=1, linestyle=":", label="SGD, live")
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
        rows.append((name, _number(float(losses[best])), _number(here), *map(_number, others)))
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
        axes.axhline(0, color=_SOFT, linewidth=0.8)
        axes.axvline(1, color=_SOFT, linewidth=0.8, linestyle=":", label="η*")
        axes.set_xscale("log")
        axes.set_yscale("symlog", linthresh=0.1)
        labels(axes, "Does the next step want a pull?", "learning rate η/η*", "E⟨next gradient, gap⟩ / η")

    rows: list[tuple[str, ...]] = [("η/η*", "R*", "best R")]
    for share, ratio in zip(shares, ratios, strict=True):
        rows.append((f"{share:g}", _number(float(share) - 1), _number(ratio)))
    title = f"R* = η/η* − 1, and the best R: 16 curvatures, {steps:,} steps, β = {rate:g}"
    return Picture(name="right-ratio", title=title, rows=tuple(rows), panels=(first, second))


# --- Convex losses ------------------------------------------------------------------------------------


def convex(rate: float = 0.1, pull: float = 0.3, paths: int = 200, seed: int = 0) -> Picture:
    """The bound, and how far below it runs stay."""
    rng = np.random.default_rng(seed)
    loss = discrete.PiecewiseLinear(slopes=rng.standard_normal((40, 8)), offsets=rng.standard_normal(40))
    start = loss.optimum + 3.0
    distance, least = start - loss.optimum, float(loss.value(loss.optimum))
    counts = (30, 100, 300, 1000, 3000)
    rows: list[tuple[str, ...]] = [("steps", "measured", "tight bound", "loose bound", "measured/tight")]
    measured, tight, loose = [], [], []
    for steps in counts:
        tuned = bounds.convex_bound_tuned(steps, np.full(8, pull), rate, loss.lipschitz, loss.sigma, distance)
        lr = tuned.lr / float(np.sqrt(steps))
        ended = discrete.train(loss, start, lr=lr, pull=pull, rate=rate, steps=steps, paths=paths, seed=seed)
        measured.append(float(np.mean(loss.value(ended.flat))) - least)
        tight.append(tuned.tight)
        loose.append(tuned.loose)
        values = (measured[-1], tight[-1], loose[-1], measured[-1] / tight[-1])
        rows.append((f"{steps}", *map(_number, values)))

    def panel(axes: "Axes") -> None:
        line(axes, counts, measured, 3, "measured, flat mean", marker="o", markersize=4)
        line(axes, counts, tight, 4, "tight bound")
        line(axes, counts, loose, 5, "loose bound, √(2 − β)/β")
        axes.set_xscale("log")
        axes.set_yscale("log")
        labels(axes, f"mean |a·θ − b|, β = {rate:g}, c = {pull:g}", "steps T", "loss over the least")

    title = "Guaranteed for every convex loss, and measured on one"
    return Picture(name="bounds", title=title, rows=tuple(rows), panels=(panel,))


def logistic(steps: int = 1000, rate: float = 0.02, paths: int = 40, seed: int = 0) -> Picture:
    """Real data: logistic regression on a dataset of scikit-learn, over the learning rate."""
    loss = breast_cancer()
    best = float(loss.value(loss.optimum))
    lrs = np.geomspace(0.08, 4.0, 13)
    start = np.zeros(loss.features.shape[1])
    curves: dict[str, list[float]] = {
        "live": [],
        "flat mean": [],
        "EMA": [],
        "PACE, R = 1": [],
        "PACE, R = 4": [],
    }
    for lr in lrs:
        plain = discrete.train(loss, start, lr=lr, pull=0.0, rate=rate, steps=steps, paths=paths, seed=seed)
        for name, weights in (("live", plain.live), ("flat mean", plain.flat), ("EMA", plain.average)):
            curves[name].append(float(np.mean(loss.value(weights))) - best)
        for name, strength in (("PACE, R = 1", 1.0), ("PACE, R = 4", 4.0)):
            ended = discrete.train(
                loss, start, lr=lr, pull=rate * strength, rate=rate, steps=steps, paths=paths, seed=seed
            )
            curves[name].append(float(np.mean(loss.value(ended.average))) - best)

    def panel(axes: "Axes") -> None:
        for i, (name, values) in enumerate(curves.items()):
            line(axes, lrs, values, i, name, marker="o", markersize=3.5)
        axes.set_xscale("log")
        axes.set_yscale("log")
        labels(axes, f"After {steps:,} steps of 8 samples", "learning rate η", "loss over the least")

    rows: list[tuple[str, ...]] = [("lr", *curves)]
    for i, lr in enumerate(lrs):
        rows.append((_number(float(lr)), *(_number(values[i]) for values in curves.values())))
    rows.append(("least", *(_number(min(values)) for values in curves.values())))
    title = "Logistic regression, breast cancer data of scikit-learn"
    return Picture(name="logistic", title=title, rows=tuple(rows), panels=(panel,))


def breast_cancer() -> discrete.Logistic:
    """569 samples of 30 features, scaled to mean 0 and variance 1."""
    try:
        from sklearn.datasets import load_breast_cancer
    except ImportError:
        raise ImportError("the logistic problem needs scikit-learn: pip install scikit-learn") from None
    features, labels = load_breast_cancer(return_X_y=True)
    scaled = (features - features.mean(0)) / features.std(0)
    return discrete.Logistic(features=np.asarray(scaled, float), labels=np.where(labels == 1, 1.0, -1.0))


ALL: Sequence[Callable[[], Picture]] = (
    controllers,
    gains_over_time,
    practical_range,
    limiting_errors,
    equal_speed,
    basin,
    right_ratios,
    convex,
    logistic,
)
