"""The stylised update on convex losses and on real data, many paths in parallel.

.. code-block:: text

    θ' = θ − η g + c (E − θ)        E' = (1 − β) E + β θ'          eq. stylized_update

Weights are (d,) or (paths, d). A run returns the live weights θ, their EMA E, which PACE returns, and their
flat mean, which the convex theorem is about.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, final

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import linprog, minimize
from scipy.special import expit

from paceline.control import checks
from paceline.control.checks import Array
from paceline.control.recursion import Pair, Variant, step

# --- Losses -------------------------------------------------------------------------------------------


class Loss(Protocol):
    """A convex function of weights (…, d)."""

    @property
    def size(self) -> int: ...  # d
    @property
    def optimum(self) -> Array: ...
    def value(self, weights: Array) -> Array: ...
    def gradient(self, weights: Array, rng: np.random.Generator) -> Array: ...


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class PiecewiseLinear:
    """The loss mean_i |a_i · θ − b_i|: convex, Lipschitz, not smooth. A gradient is that of a random term."""

    slopes: Array  # (n, d)
    offsets: Array  # (n,)

    def __post_init__(self) -> None:
        checks.require(checks.finite("slopes", self.slopes).ndim == 2, "slopes", self.slopes, "a matrix")
        ok = checks.finite("offsets", self.offsets).shape == self.slopes.shape[:1]
        checks.require(ok, "offsets", self.offsets, f"{len(self.slopes)} numbers, one for each row of slopes")

    @property
    def size(self) -> int:
        return int(self.slopes.shape[1])

    @property
    def optimum(self) -> Array:
        """The optimum, by linear programming."""
        n, d = self.slopes.shape
        cost = np.concatenate([np.zeros(d), np.ones(n) / n])
        sides = np.block([[self.slopes, -np.eye(n)], [-self.slopes, -np.eye(n)]])
        found = linprog(cost, sides, np.concatenate([self.offsets, -self.offsets]), bounds=(None, None))
        best: Array = found.x[:d]
        return best

    @property
    def lipschitz(self) -> float:
        """The Lipschitz constant G of the mean of all terms."""
        return float(np.linalg.norm(self.slopes, 2) / np.sqrt(len(self.slopes)))

    @property
    def sigma(self) -> float:
        """A bound on the gradients' standard deviation: E|g − Eg|² ≤ E|g|², the mean of |a_i|²."""
        return float(np.sqrt(np.mean(np.sum(self.slopes**2, axis=1))))

    def value(self, weights: Array) -> Array:
        values: Array = np.mean(np.abs(weights @ self.slopes.T - self.offsets), axis=-1)
        return values

    def gradient(self, weights: Array, rng: np.random.Generator) -> Array:
        drawn = rng.integers(len(self.slopes), size=weights.shape[:-1])
        rows = self.slopes[drawn]
        signs = np.sign(np.sum(rows * weights, axis=-1) - self.offsets[drawn])
        gradient: Array = signs[..., None] * rows
        return gradient


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Logistic:
    """Logistic regression with weight decay, on any data. A gradient is that of a random batch."""

    features: Array  # (n, d)
    labels: Array  # (n,) of −1 and 1
    decay: float = 1e-3
    batch: int = 8

    def __post_init__(self) -> None:
        features = checks.finite("features", self.features)
        checks.require(features.ndim == 2, "features", self.features, "a matrix")
        ok = np.shape(self.labels) == self.features.shape[:1] and set(np.unique(self.labels)) <= {-1.0, 1.0}
        checks.require(ok, "labels", self.labels, "-1 and 1, one for each row of features")
        checks.positive("decay", self.decay)
        checks.whole("batch", self.batch, 1)

    @property
    def size(self) -> int:
        return int(self.features.shape[1])

    @property
    def optimum(self) -> Array:
        """The optimum, by Newton's method, exact to rounding."""
        d = self.features.shape[1]
        signed = self.features * self.labels[:, None]

        def slope(w: Array) -> Array:
            total: Array = -signed.T @ expit(-signed @ w) / len(signed) + self.decay * w
            return total

        def curvature(w: Array) -> Array:
            share = expit(signed @ w)
            total: Array = (signed.T * (share * (1 - share))) @ signed / len(signed) + self.decay * np.eye(d)
            return total

        w: Array = minimize(lambda w: float(self.value(w)), np.zeros(d), jac=slope, method="BFGS").x
        for _ in range(20):
            w = w - np.linalg.solve(curvature(w), slope(w))
        return w

    def value(self, weights: Array) -> Array:
        margins = weights @ (self.features * self.labels[:, None]).T
        values: Array = np.mean(np.logaddexp(0, -margins), axis=-1) + self.decay / 2 * np.sum(
            weights**2, axis=-1
        )
        return values

    def gradient(self, weights: Array, rng: np.random.Generator) -> Array:
        drawn = rng.integers(len(self.labels), size=(*weights.shape[:-1], self.batch))
        rows = self.features[drawn] * self.labels[drawn][..., None]  # (…, batch, d)
        margins = np.einsum("...bd,...d->...b", rows, weights)
        mean = -np.einsum("...bd,...b->...d", rows, expit(-margins)) / self.batch
        gradient: Array = mean + self.decay * weights
        return gradient


# --- Runs ---------------------------------------------------------------------------------------------


class Ended(NamedTuple):
    """The weights at the end of all paths: (paths, d) each."""

    live: Array  # θ_T
    average: Array  # E_T
    flat: Array  # the mean of θ_0 … θ_{T−1}, weighted by their learning rates


def train(
    loss: Loss,
    start: ArrayLike,
    *,
    lr: float | Callable[[int], float],
    pull: ArrayLike | Callable[[int], ArrayLike],
    rate: float | Callable[[int], float],
    steps: int,
    paths: int = 1,
    seed: int = 0,
    variant: Variant = "pre",
) -> Ended:
    """Run the update from live = average = start, and return the weights at the end.

    lr, pull and rates are constants or functions of the step, which counts from 1.
    """
    checks.whole("steps", steps, 1)
    checks.whole("paths", paths, 1)
    rng = np.random.default_rng(checks.whole("seed", seed, 0))
    begin = np.atleast_1d(checks.finite("start", start))
    checks.require(begin.shape == (loss.size,), "start", start, f"{loss.size} numbers")
    pair = Pair(np.tile(begin, (paths, 1)), np.tile(begin, (paths, 1)))
    flat, weight = np.zeros_like(pair.live), 0.0
    for k in range(1, steps + 1):
        eta = float(checks.positive("lr", lr(k) if callable(lr) else lr))
        beta = rate(k) if callable(rate) else rate
        flat, weight = flat + eta * pair.live, weight + eta
        gradient = loss.gradient(pair.live, rng)
        strength = checks.finite("pull", pull(k) if callable(pull) else pull)
        checks.require(
            strength.shape in ((), (1,), begin.shape), "pull", strength.tolist(), f"1 or {loss.size} numbers"
        )
        pair = step(pair, gradient, eta, strength, beta, variant)
    return Ended(pair.live, pair.average, flat / weight)
