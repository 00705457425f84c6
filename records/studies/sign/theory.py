"""Draw the theory's figure: the least loss of each strength on drifting quadratics, everything else tuned.

    python records/studies/sign/theory.py theory.png

It also prints the tuned settings, and closed forms next to what they must equal.
"""

import sys
from itertools import product

import matplotlib.pyplot as plt
import numpy as np

from paceline.control.drift import Drifting, breakeven_noise, feed_forward, relaxed_feed_forward, steady
from paceline.control.gains import relaxed_problem

STEPS, ALPHA = 400, np.logspace(-3, 0, 7)
STRENGTHS = np.array([-0.8, -0.65, -0.5, -0.35, -0.2, 0.0, 0.25, 0.5, 1.0])
EMA, PUSH = 5, 2  # their places among the strengths
START = -np.sqrt(2) * ALPHA**-0.1  # each coordinate begins with a loss of α^.8, and the ramp leads away


def tuned(problem: Drifting) -> tuple[np.ndarray, np.ndarray]:
    """Return each strength's least loss over lr and both powers, and these: (strengths, 3).

    A grid comes first, then a pattern search whose steps halve when none of 26 neighbours is better.
    """
    grid = list(product(np.log(2.0) * np.arange(-9, 5), (0.5, 0.7), (0.3, 0.6, 0.9)))
    points, each = np.tile(np.array(grid), (len(STRENGTHS), 1, 1)), np.arange(len(STRENGTHS))
    around, width = np.array(list(product((0, 1, -1), repeat=3))), np.tile([0.35, 0.1, 0.1], (len(each), 1))
    for turn in range(12):
        lr, power, returned = points.reshape(-1, 3).T
        found = problem.losses(np.exp(lr), np.repeat(STRENGTHS, points.shape[1]), power, returned, STEPS)
        loss = found.returned.reshape(points.shape[:2])
        best = np.argmin(loss, axis=1)  # of equals the first, which is the centre
        least, centre = loss[each, best], points[each, best]
        width = np.where((best == 0)[:, None] & (turn > 0), width / 2, width)
        points = centre[:, None] + around * width[:, None]
        points[..., 1:] = np.clip(points[..., 1:], 0.0, 1.0)
    return least, np.column_stack([np.exp(centre[:, 0]), centre[:, 1:]])


def panel(axes: plt.Axes, title: str, meaning: str, problems: dict[float, Drifting]) -> None:
    """Draw one line for each problem, relative to its tuned EMA, and print its settings."""
    print(f"\n{title}: EMA's lr κ' live lr/2 2lr; push −.5: tuned lr κ κ'; EMA's lr and κ .6\n{meaning}")
    for (value, problem), color in zip(problems.items(), plt.get_cmap("viridis")(np.linspace(0, 0.9, 6))):
        loss, best = tuned(problem)
        label = f"{value:g}" + (", EMA's lr near its limit" if best[EMA, 0] > 1.5 else "")
        axes.plot(STRENGTHS, loss / loss[EMA], "o-", color=color, label=label, markersize=3.5)
        lrs, fixed, late = best[EMA, 0] * np.array([1, 0.5, 2, 1]), [0, 0, 0, -0.5], np.linspace(0, 1, 41)
        near = problem.losses(np.repeat(lrs, 41), np.repeat(fixed, 41), 0.6, np.tile(late, 4), STEPS)
        other = near.returned.reshape(4, 41).min(axis=1)
        numbers = *best[EMA, ::2], *(np.array([near.live[0], *other[1:3], loss[PUSH]]) / loss[EMA])
        numbers = *numbers, *best[PUSH], other[3] / loss[EMA]
        print(f"{value:6g}:", *(f"{number:8.3g}" for number in numbers))
    axes.axhline(1.0, color="0.7", linewidth=0.8, zorder=0)
    axes.axvline(0.0, color="0.7", linewidth=0.8, zorder=0)
    axes.set(title=title, xlabel="strength R (below 0: a push)", ylim=(0.83, 1.09))
    axes.legend(frameon=False, fontsize=9, title=meaning, loc="lower right")


def compare() -> None:
    """Print closed forms next to the recursion and to the Riccati equation."""
    problem = Drifting(curvature=0.2, velocity=0.03, sigma=0.7, wander=0.2, floor=0.05)
    run, form = problem.losses(2.0, -0.5, 50, 50, 4000), steady(0.2, 0.05, -0.025, 0.03, 0.7**2, 0.2)
    print("bias:", run.bias.item(), 0.1 * form.lag**2, " variance:", run.variance.item(), 0.1 * form.variance)
    control = feed_forward(relaxed_problem(0.7, 0.3, 5), 1.0).item(), relaxed_feed_forward(0.7, 0.3, 5, 1.0)
    print("feed-forward:", *control, " breakeven noise:", breakeven_noise(0.1, 0.01, 1e-3))


if __name__ == "__main__":
    compare()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    shared = {"curvature": ALPHA, "sigma": 0.5, "start": START}
    drifting = {v: Drifting(**shared, velocity=v / 2) for v in (0, 0.002, 0.01, 0.03, 0.1, 0.3)}
    panel(left, "An optimum that moves", "drift per step / noise", drifting)
    growing = {g: Drifting(**shared | {"sigma": 3 * ALPHA**0.5}, growth=g) for g in (0, 0.3, 1, 3)}
    panel(right, "No drift, noise ∝ curvature", "growth with live loss", growing)
    left.set_ylabel("least loss / that of the tuned EMA")
    figure.savefig(sys.argv[1], dpi=150)
