"""The control problem: its best gains, and what controllers make of an unknown optimum."""

from typing import TYPE_CHECKING

import numpy as np

from paceline.control import gains, simulate
from paceline.control.checks import Array
from paceline.control.unknown import Seen
from paceline.studies.looks import SOFT, frame, look
from paceline.theory.picture import SOLID, Panel, Picture, panel, row

if TYPE_CHECKING:
    from matplotlib.axes import Axes


CURVATURE, PENALTY, HORIZON = 1.0, 0.01, 20.0
PROBLEM = f"α = {CURVATURE:g}, λ = {PENALTY:g}, T = {HORIZON:g}"


def gains_over_time() -> Picture:
    """Show that the exact gain grows until just before the end (E25); the practical one is a constant."""
    shares, chosen = np.linspace(0, 1, 400), np.array([0.0, 0.25, 0.5, 0.75, 0.9])
    times = shares * HORIZON, chosen * HORIZON
    exact, now = (gains.original_gains(CURVATURE, PENALTY, HORIZON, t) for t in times)
    relaxed, other = (gains.relaxed_gain(CURVATURE, PENALTY, HORIZON, t) for t in times)
    practical = gains.practical_gain(CURVATURE, PENALTY, HORIZON)
    each = zip(chosen, now.toward, now.balance * times[1], other, strict=True)
    rows = [row(f"{share:g}", *values, practical) for share, *values in each]
    x, y = "time t/T", "gain on μ − θ"
    flat = (1, "practical, 1/(T(1 + λα²T))", shares, np.full_like(shares, practical))
    mean = (3, "returned: the mean of the weights", shares, exact.toward, SOLID)
    alone = (4, "relaxed: every weight on its own", shares, relaxed)
    pull = (3, "exact, k_x", shares, exact.toward, SOLID)
    least = float(exact.toward[0]) / 10  # both end at 0
    return Picture(
        "gains",
        f"The best gain over time, {PROBLEM}",
        ("t/T", "k_x", "k_y t", "relaxed", "practical"),
        rows,
        panel("Pull toward the optimum", x, y, pull, flat, y_range=(0, None)),
        panel("Two objectives, two controllers", x, y, mean, alone, log="y", y_range=(least, None)),
        _as_printed(x, y),
    )


def _as_printed(x: str, y: str) -> Panel:
    """Return a panel in which the slip of E10 shows: a short horizon and a small penalty."""
    penalty, horizon, shares = 1e-3, 4.0, np.linspace(0.7, 1, 600)
    exact = gains.original_gains(1.0, penalty, horizon, shares * horizon).toward
    left, top = (1 - shares) * horizon, 1.6 * float(np.max(exact))
    spent = -np.expm1(-left)
    with np.errstate(divide="ignore", invalid="ignore"):
        printed = spent**2 / (penalty * horizon**2 + left - 1.5 * spent)
    printed = np.where(np.abs(printed) > 20, np.nan, printed)  # the pole
    curves = (3, "exact", shares, exact, SOLID), (5, "as printed (E10)", shares, printed)
    title = "Printed, it changes sign (T = 4, λ = .001)"
    return panel(title, x, y, *curves, level=0, y_range=(-top, top))


def practical_range() -> Picture:
    """Show where the practical gain is good: αT ≫ 3/2, not T ≫ 1."""
    penalty = 1e-6

    def ratios(products: Array) -> tuple[Array, Array]:
        exact, enough = gains.original_gains(products, penalty, 1.0, 0.0).toward, products > 1.6
        far = gains.original_gain_far(np.where(enough, products, 2.0), penalty, 1.0)
        return exact / gains.practical_gain(products, penalty, 1.0), np.where(enough, exact / far, np.nan)

    products, chosen = np.geomspace(0.5, 300, 300), np.array([2.0, 5.0, 10.0, 30.0, 100.0])
    near, corrected = ratios(products)
    rows = [row(f"{product:g}", *pair) for product, *pair in zip(chosen, *ratios(chosen), strict=True)]
    curves = (
        (3, "exact / practical", products, near),
        (4, "exact / practical with its −3/(2α) kept", products, corrected),
    )
    title, x = "How far the practical gain is off at t = 0", "curvature × horizon αT"
    shown = panel(title, x, "ratio", *curves, log="x", level=1, y_range=(0, 3.2))
    columns = ("αT", "exact/practical", "with −3/(2α)")
    return Picture("practical", "The practical gain and its range", columns, rows, shown)


def controllers() -> Picture:
    """Show what control brings if the optimum is unknown: little, and the practical control nothing."""
    prior, paths = 4.0, 4000
    problem = simulate.Diffusion(curvature=CURVATURE, penalty=PENALTY, horizon=HORIZON)
    optima = np.sqrt(prior) * np.random.default_rng(0).standard_normal((paths, 1))
    tried: dict[str, simulate.Controller] = {
        "none": simulate.uncontrolled,
        "practical: pull toward the mean": simulate.practical(problem),
        "flat prior: BEMA without control": simulate.bema_estimating(problem),
        "least J: posterior mean": simulate.estimating(problem, [0.0], [[prior]]),
        "knows the optimum": lambda seen: problem.control(seen, optima),
    }
    squares, rows, changes = [], [], []
    for name, control in tried.items():
        ended = simulate.simulate(problem, control, 0.0, optima, steps=400, paths=paths, seed=1)
        squares.append(np.sum((ended.mean - optima) ** 2, axis=1))
        # The same optima and the same noise for all: differences are paired, and far less noisy.
        change = squares[-1] - squares[0]
        changes.append((name, float(np.mean(change)), float(np.std(change, ddof=1) / np.sqrt(paths))))
        error, effort = np.mean(squares[-1]), np.mean(ended.effort)
        rows.append(row(name, error, *changes[-1][1:], effort, error + PENALTY * effort))
    floor = simulate.posterior_variance(problem, [[prior]])
    rows.append(row("least without knowing the optimum", floor, *[""] * 4))

    def bars(axes: "Axes") -> None:
        shown = changes[1:-1]
        for i, (_, change, error) in enumerate(shown):
            axes.errorbar(change, i, xerr=2 * error, fmt="o", color=look(i + 1).colour, capsize=3)
        least = floor - float(np.mean(squares[0]))
        axes.axvline(0, color=SOFT, linewidth=1, label="no control")
        axes.axvline(least, color=SOFT, linewidth=1, linestyle=":", label="least without knowing the optimum")
        frame(axes, "What control changes", "squared error less that without control, ± 2 s.e.", "")
        axes.set_yticks(range(len(shown)), [name.replace(": ", ":\n") for name, *_ in shown])
        axes.set_ylim(len(shown) - 0.3, -0.8)

    title = f"Controllers of an unknown optimum, {PROBLEM}"
    columns = ("controller", "error²", "change by control", "±", "∫u²", "J")
    return Picture("controllers", title, columns, rows, bars, _sample_paths(problem))


def _sample_paths(problem: simulate.Diffusion) -> Panel:
    """Return a panel of one path with the best control and one without, under the same noise."""
    start, optimum, times = np.array([3.0]), np.array([0.0]), np.linspace(0, problem.horizon, 401)

    def path(controller: simulate.Controller) -> list[float]:
        visited: list[float] = []

        def watch(now: Seen) -> Array:
            visited.append(float(np.asarray(now.weights)[0, 0]))
            return controller(now)

        ended = simulate.simulate(problem, watch, start, optimum, steps=400, paths=2, seed=7)
        return [*visited, float(ended.last[0, 0])]

    thin = SOLID | {"linewidth": 1.2}  # dashes would be lost in so rough a line
    free = (0, "no control", times, path(simulate.uncontrolled), thin)
    held = (3, "best control, optimum known", times, path(simulate.knowing(problem, optimum)), thin)
    return panel("One path, the same noise", "time t", "weight θ, optimum 0", free, held, level=0)
