"""Guarantees for every convex loss, about the flat mean of the live weights, at a constant pull and rate.

They do not hold for the average that PACE returns, though the paper's introduction says so (E26). The loss is
convex and G-Lipschitz. Gradients are unbiased, with variance σ² at most. V² = G² + σ², C = diag(pull).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from paceline.control import checks


class Tuned(NamedTuple):
    """The bound at the best learning rate, after T steps of lr/√T."""

    tight: float  # D_C √(V² + 2G(1−β)K_C V/(β + (1−β)c_min)) / √T
    loose: float  # √(2 − β)/β · |θ_1 − μ| V/√T: independent of the pull
    lr: float  # η of the steps η/√T


def _constants(
    pull: ArrayLike, rate: float, lipschitz: float, sigma: float, distance: ArrayLike
) -> tuple[float, float, float, float, float]:
    c = np.atleast_1d(checks.number("pull", pull, "0 <= pull <= 1", lambda x: (x >= 0) & (x <= 1)))
    beta = float(checks.fraction("rate", rate))
    g, noise = float(checks.positive("lipschitz", lipschitz)), float(checks.not_negative("sigma", sigma))
    way = np.atleast_1d(checks.finite("distance", distance))
    checks.require(way.shape == c.shape or c.size == 1, "distance", distance, "as many numbers as pull")
    v = float(np.hypot(g, noise))
    b = beta + (1 - beta) * c  # B
    d2 = float(np.sum(way**2 * b) / beta)  # D_C²; the \\cdot in print is a stray one (E13)
    k = float(np.max(c / b))  # K_C
    return d2, v**2 + 2 * g * (1 - beta) * k * v / float(np.min(b)), v, float(np.linalg.norm(way)), beta


def convex_bound(
    lrs: ArrayLike, pull: ArrayLike, rate: float, lipschitz: float, sigma: float, distance: ArrayLike
) -> float:
    """Return the bound on E[F(mean θ) − F(μ)] of thm:convex_convergence_general.

    `lrs` are the learning rates of all steps, which must not increase. The mean weighs each θ_k by its rate.
    `distance` is θ_1 − μ, for each coordinate.
    """
    etas = np.atleast_1d(checks.positive("lrs", lrs))
    checks.require(etas.size > 0, "lrs", lrs, "at least one")
    checks.require(bool(np.all(np.diff(etas) <= 0)), "lrs", lrs, "learning rates that do not increase")
    d2, factor, *_ = _constants(pull, rate, lipschitz, sigma, distance)
    return float((d2 + factor * np.sum(etas**2)) / (2 * np.sum(etas)))


def convex_bound_tuned(
    steps: int, pull: ArrayLike, rate: float, lipschitz: float, sigma: float, distance: ArrayLike
) -> Tuned:
    """Return the bounds at the best constant learning rate, and that rate.

    They are cor:convex_convergence_fixed_lr and thm:convex_convergence. `distance` is θ_1 − μ, for each
    coordinate. The paper says that the loose one's 1/β "likely cannot be improved", which is wrong (E27):
    with one pull for all coordinates, the tight bound is at most √(3/β − 2) times SGD's.
    """
    checks.whole("steps", steps, 1)
    d2, factor, v, distance_norm, beta = _constants(pull, rate, lipschitz, sigma, distance)
    root = np.sqrt(steps)
    return Tuned(
        tight=float(np.sqrt(d2 * factor) / root),
        loose=float(np.sqrt(2 - beta) / beta * distance_norm * v / root),
        lr=float(np.sqrt(d2 / factor)),
    )
