"""The update on other convex losses, and on real data."""

from typing import TYPE_CHECKING

import numpy as np

from paceline.control import bounds, discrete
from paceline.theory.picture import Picture, labels, line, number_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
        rows.append((f"{steps}", *map(number_text, values)))

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
        rows.append((number_text(float(lr)), *(number_text(values[i]) for values in curves.values())))
    rows.append(("least", *(number_text(min(values)) for values in curves.values())))
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
