"""Control for an unknown optimum: estimate it from the path so far, and use the estimate as if it were true.

For a Gaussian prior on μ the estimate has a closed form; the paper says that it has none (E12). The diffusion
dθ = [A(μ − θ) + u] dt + √Σ dW implies that Z_t = θ_t − θ_0 + A ∫ θ − ∫ u is A μ t plus noise of covariance
Σ t. So the posterior is that of a linear regression. It depends on all of Σ, though the gains do not (E11).
"""

from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
from numpy.typing import ArrayLike

from paceline.control.checks import Array, finite, not_negative, one, positive, require, square, symmetric
from paceline.control.gains import Gains


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Seen:
    """The data about a path up to a time that an estimate needs; vectors are (d,) or (paths, d)."""

    time: float
    start: ArrayLike  # θ_0
    weights: ArrayLike  # θ_t
    integral: ArrayLike  # ∫ θ
    control: ArrayLike  # ∫ u

    def __post_init__(self) -> None:
        one("time", not_negative("time", self.time))
        names = ("start", "weights", "integral", "control")
        shapes = [finite(name, getattr(self, name)).shape for name in names]
        ok = all(shape in ((), (1,), shapes[1], shapes[1][-1:]) for shape in shapes)
        require(ok, ", ".join(names), shapes, "equal shapes")

    def evidence(self, curvature: Array) -> Array:
        """Return Z_t = θ_t − θ_0 + A ∫ θ − ∫ u, which is A μ t + noise."""
        start, weights, integral, control = (
            np.asarray(value, dtype=np.float64)
            for value in (self.start, self.weights, self.integral, self.control)
        )
        evidence: Array = weights - start + integral @ curvature.T - control
        return evidence


class Posterior(NamedTuple):
    """The posterior distribution of the optimum."""

    mean: Array  # (d,) or (paths, d)
    covariance: Array  # (d, d)


def posterior(
    seen: Seen,
    curvature: ArrayLike,
    covariance: ArrayLike,
    prior_mean: ArrayLike,
    prior_covariance: ArrayLike,
) -> Posterior:
    """Return the Kalman–Bucy estimate of μ for a Gaussian prior: P⁻¹ = P_0⁻¹ + t A'Σ⁻¹A, in closed form.

    P_0 need not be invertible: the prior may be certain in some directions.
    """
    time = float(not_negative("time", seen.time))
    a, sigma = square("curvature", curvature), symmetric("covariance", covariance, definite=True)
    start = symmetric("prior_covariance", prior_covariance, definite=False)
    mean = np.atleast_1d(finite("prior_mean", prior_mean))
    for name, value, shape in (
        ("covariance", sigma, a.shape),
        ("prior_covariance", start, a.shape),
        ("prior_mean", mean, a.shape[:1]),
    ):
        require(value.shape == shape, name, value.tolist(), f"of shape {shape}, to match curvature")
    weight = np.linalg.solve(sigma, a)  # Σ⁻¹ A
    spread = np.linalg.solve(np.eye(len(a)) + time * start @ a.T @ weight, start)
    surprise = seen.evidence(a) - time * mean @ a.T
    spread = (spread + spread.T) / 2
    return Posterior(mean=mean + surprise @ weight @ spread, covariance=spread)


def flat_prior_estimate(seen: Seen, curvature: ArrayLike) -> Array:
    """Return the estimate of μ without a prior: the mean of the weights + A⁻¹ (θ_t − θ_0 − ∫ u)/t.

    It is BEMA's estimate, with the effect of the control removed. A must be invertible.
    """
    time = float(positive("time", seen.time))
    a = square("curvature", curvature)
    require(float(np.linalg.cond(a)) < 1e15, "curvature", curvature, "an invertible matrix")
    return np.asarray(np.linalg.solve(a, seen.evidence(a).T).T / time, dtype=np.float64)


def certainty_equivalent_control(seen: Seen, estimate: ArrayLike, gains: Gains) -> Array:
    """Return u = k_x (μ̂ − θ) + k_y (t μ̂ − ∫ θ) for an estimate μ̂ of the optimum.

    With μ̂ = E[μ | θ up to t] it is the best of all controls that depend only on the path
    (thm:separation_principle, cor:optimal_control_unknown_mustar). `gains` are those of
    `original_gains_matrix` at this time.
    """
    guess, weights, integral = (
        np.asarray(value, dtype=np.float64) for value in (estimate, seen.weights, seen.integral)
    )
    toward, balance = guess - weights, seen.time * guess - integral
    return np.asarray(toward @ gains.toward.T + balance @ gains.balance.T)
