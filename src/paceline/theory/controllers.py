"""The control problem: its best gains, and what controllers make of an unknown optimum."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from paceline.control import gains, simulate
from paceline.control.checks import Array, positive, whole
from paceline.control.unknown import Seen
from paceline.studies.report.palette import style
from paceline.theory.picture import SOFT, Picture, labels, line, number_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
        rows.append((f"{share:g}", *map(number_text, values)))
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
    axes.axhline(0, color=SOFT, linewidth=0.8)
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
        axes.axhline(1, color=SOFT, linewidth=0.8)
        axes.set_xscale("log")
        axes.set_ylim(0, 3.2)
        labels(axes, "How far the practical gain is off at t = 0", "curvature × horizon αT", "ratio")

    rows: list[tuple[str, ...]] = [("αT", "exact/practical", "with −3/(2α)")]
    for product in (2.0, 5.0, 10.0, 30.0, 100.0):
        value = float(gains.original_gains(product, penalty, 1.0, 0.0).toward)
        near = value / float(gains.practical_gain(product, penalty, 1.0))
        far = value / float(gains.original_gain_far(product, penalty, 1.0))
        rows.append((f"{product:g}", number_text(near), number_text(far)))
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
        rows.append((name, *map(number_text, values), number_text(float(np.mean(each)) + penalty * effort)))
    rows.append(("least without knowing the optimum", number_text(floor), "", "", "", ""))

    def bars(axes: "Axes") -> None:
        for i, (_, gain, spread) in enumerate(points[1:-1]):
            axes.errorbar(gain, i, xerr=2 * spread, fmt="o", color=style(i + 1).on_light, capsize=3)
        least = floor - float(np.mean(squares["none"]))
        axes.axvline(0, color=SOFT, linewidth=1, label="no control")
        axes.axvline(least, color=SOFT, linewidth=1, linestyle=":", label="least without knowing the optimum")
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
        axes.axhline(0, color=SOFT, linewidth=0.8)
        labels(axes, "One path, the same noise", "time t", "weight θ, optimum 0")

    return panel
