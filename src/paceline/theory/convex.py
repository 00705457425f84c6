"""The update on other convex losses, and on real data."""

from typing import Any

import numpy as np

from paceline.control import bounds, discrete
from paceline.theory.picture import DOTS, Picture, panel, row


def convex() -> Picture:
    """Show the bound, and how far below it runs stay."""
    rate, pull, rng = 0.1, 0.3, np.random.default_rng(0)
    loss = discrete.PiecewiseLinear(slopes=rng.standard_normal((40, 8)), offsets=rng.standard_normal(40))
    start = loss.optimum + 3.0
    distance, least = start - loss.optimum, float(loss.value(loss.optimum))
    counts, found = (30, 100, 300, 1000, 3000), []
    for steps in counts:
        tuned = bounds.convex_bound_tuned(steps, np.full(8, pull), rate, loss.lipschitz, loss.sigma, distance)
        lr = tuned.lr / float(np.sqrt(steps))
        ended = discrete.train(loss, start, lr=lr, pull=pull, rate=rate, steps=steps, paths=200)
        found.append((float(np.mean(loss.value(ended.flat))) - least, tuned.tight, tuned.loose))
    rows = [row(f"{steps}", *each, each[0] / each[1]) for steps, each in zip(counts, found, strict=True)]
    names = ("measured, flat mean", "tight bound", "loose bound, √(2 − β)/β")
    looks: list[tuple[int, dict[str, Any]]] = [(3, DOTS), (4, {}), (5, {})]
    curves = [(i, n, counts, y, s) for (i, s), n, y in zip(looks, names, zip(*found), strict=True)]
    title = f"mean |a·θ − b|, β = {rate:g}, c = {pull:g}"
    return Picture(
        "bounds",
        "Guaranteed for every convex loss, and measured on one",
        ("steps", "measured", "tight bound", "loose bound", "measured/tight"),
        rows,
        panel(title, "steps T", "loss over the least", *curves, log="xy"),
    )


def logistic() -> Picture:
    """Show real data: logistic regression on a dataset of scikit-learn, over the learning rate."""
    loss, rate, steps = breast_cancer(), 0.02, 1000
    best, start = float(loss.value(loss.optimum)), np.zeros(loss.features.shape[1])
    lrs, found = np.geomspace(0.08, 4.0, 13), []
    for lr in lrs:
        plain, *pulled = (
            discrete.train(loss, start, lr=lr, pull=rate * r, rate=rate, steps=steps, paths=40)
            for r in (0.0, 1.0, 4.0)
        )
        shown = plain.live, plain.flat, *(ended.average for ended in (plain, *pulled))
        found.append([float(np.mean(loss.value(weights))) - best for weights in shown])
    names = ("live", "flat mean", "EMA", "PACE, R = 1", "PACE, R = 4")
    methods = list(zip(*found, strict=True))
    rows = [row(f"{lr:.4g}", *losses) for lr, losses in zip(lrs, found, strict=True)]
    curves = [(i, name, lrs, y, DOTS) for i, (name, y) in enumerate(zip(names, methods, strict=True))]
    title, x = f"After {steps:,} steps of 8 samples", "learning rate η"
    return Picture(
        "logistic",
        "Logistic regression, breast cancer data of scikit-learn",
        ("lr", *names),
        [*rows, row("least", *map(min, methods))],
        panel(title, x, "loss over the least", *curves, log="xy"),
    )


def breast_cancer() -> discrete.Logistic:
    """Return the loss on 569 samples of 30 features, scaled to mean 0 and variance 1."""
    try:
        from sklearn.datasets import load_breast_cancer
    except ImportError:
        raise ImportError("the logistic problem needs scikit-learn: pip install scikit-learn") from None
    features, labels = load_breast_cancer(return_X_y=True)
    scaled = (features - features.mean(0)) / features.std(0)
    return discrete.Logistic(features=np.asarray(scaled, float), labels=np.where(labels == 1, 1.0, -1.0))
