"""Simulation of the controlled diffusion dθ = [A(μ − θ) + u] dt + √Σ dW, many paths in parallel.

A controller computes u from the path so far. The mean of the weights over the horizon is returned.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
from numpy.typing import ArrayLike
from scipy.linalg import expm

from paceline.control import gains, unknown
from paceline.control.checks import Array, broadcast, one, positive, require, square, symmetric, whole
from paceline.control.unknown import Seen

Controller = Callable[[Seen], Array]
"""A function from the path so far to u: (paths, d)."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Diffusion:
    """The settings of a diffusion, without a controller."""

    curvature: ArrayLike  # A, (d, d) or a number
    horizon: float
    covariance: ArrayLike | None = None  # Σ; none: the identity
    penalty: float = 0.01  # λ

    def __post_init__(self) -> None:
        one("horizon", positive("horizon", self.horizon))
        one("penalty", positive("penalty", self.penalty))
        alike = self.noise.shape == self.matrix.shape
        require(alike, "covariance", self.noise.shape, "the shape of curvature")

    @property
    def matrix(self) -> Array:
        """The curvature A as a matrix."""
        return square("curvature", self.curvature)

    @property
    def noise(self) -> Array:
        """The covariance Σ of the noise as a matrix."""
        if self.covariance is None:
            return np.eye(len(self.matrix))
        return symmetric("covariance", self.covariance, definite=True)

    def control(self, seen: Seen, estimate: ArrayLike) -> Array:
        """Return the best control if the estimate were the optimum."""
        now = gains.original_gains_matrix(self.matrix, self.penalty, self.horizon, seen.time)
        return unknown.certainty_equivalent_control(seen, estimate, now)


class Paths(NamedTuple):
    """The results of a simulation."""

    mean: Array  # (paths, d): the mean of the weights over the horizon, which is returned
    last: Array  # (paths, d): the weights at the end
    effort: Array  # (paths,): ∫ |u|² dt


def simulate(
    problem: Diffusion,
    controller: Controller,
    start: ArrayLike,
    optimum: ArrayLike,
    *,
    steps: int,
    paths: int,
    seed: int = 0,
) -> Paths:
    """Simulate paths under a controller. `optimum` is one for all paths, or (paths, d).

    u is constant over a step. There is no other error: the weights and their integral are drawn from their
    joint Gaussian distribution.
    """
    whole("steps", steps, 1)
    whole("paths", paths, 2)
    a, dt, d = problem.matrix, problem.horizon / steps, len(problem.matrix)
    rng = np.random.default_rng(whole("seed", seed, 0))
    weights = np.tile(broadcast("start", start, (d,)), (paths, 1))
    begin, target = weights.copy(), broadcast("optimum", optimum, (paths, d))
    integral, control, effort = np.zeros_like(weights), np.zeros_like(weights), np.zeros(paths)
    move = _Move.of(a, problem.noise, dt)
    for k in range(steps):
        seen = Seen(time=k * dt, start=begin, weights=weights, integral=integral, control=control)
        u = controller(seen)
        require(np.shape(u) == (paths, d), "control", np.shape(u), f"of shape {(paths, d)}")
        weights, integral = move(weights, integral, target, u, rng)
        control = control + dt * u
        effort = effort + dt * np.einsum("pd,pd->p", u, u)
    return Paths(mean=integral / problem.horizon, last=weights, effort=effort)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class _Move:
    decay: Array  # e^(−A dt)
    h: Array  # ∫ e^(−As) ds
    k: Array  # ∫ H ds
    root: Array  # (2d, 2d): square root of the joint covariance of the noise in weights and integral
    dt: float

    @classmethod
    def of(cls, a: Array, noise: Array, dt: float) -> "_Move":
        d = len(a)
        one, none = np.eye(d), np.zeros_like(a)
        flow = np.block([[-a, none], [one, none]])  # of (θ − μ, ∫ θ − μ)
        whole = expm(np.block([[flow, np.vstack([one, none])], [np.zeros((d, 3 * d))]]) * dt)
        # The covariance over a short piece, by Van Loan's exponential, is doubled up to the whole step. Over
        # the whole step that exponential would contain e^(+A dt), and the rest would be lost in rounding.
        doublings = max(0, int(np.ceil(np.log2(max(2 * float(np.linalg.norm(flow, 2)) * dt, 1.0)))))
        piece = dt / 2**doublings
        source = np.block([[noise, none], [none, none]])
        joint = expm(np.block([[-flow, source], [np.zeros_like(flow), flow.T]]) * piece)
        across = joint[2 * d :, 2 * d :].T
        spread = across @ joint[: 2 * d, 2 * d :]
        for _ in range(doublings):
            spread, across = spread + across @ spread @ across.T, across @ across
        values, vectors = np.linalg.eigh((spread + spread.T) / 2)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        return cls(decay=whole[:d, :d], h=whole[:d, 2 * d :], k=whole[d : 2 * d, 2 * d :], root=root, dt=dt)

    def __call__(
        self, weights: Array, integral: Array, optimum: Array, u: Array, rng: np.random.Generator
    ) -> tuple[Array, Array]:
        d = weights.shape[1]
        kick = rng.standard_normal((len(weights), 2 * d)) @ self.root.T
        gap = weights - optimum
        moved = optimum + gap @ self.decay.T + u @ self.h.T + kick[:, :d]
        return moved, integral + self.dt * optimum + gap @ self.h.T + u @ self.k.T + kick[:, d:]


# --- Controllers --------------------------------------------------------------------------------------


def uncontrolled(seen: Seen) -> Array:
    """Return u = 0: the paths are Ornstein–Uhlenbeck processes."""
    return np.zeros_like(np.asarray(seen.weights, float))


def knowing(problem: Diffusion, optimum: ArrayLike) -> Controller:
    """Return the best controller for a known μ."""
    target = np.asarray(optimum, float)
    return lambda seen: problem.control(seen, np.broadcast_to(target, np.shape(seen.weights)))


def estimating(problem: Diffusion, prior_mean: ArrayLike, prior_covariance: ArrayLike) -> Controller:
    """Return the best controller for a Gaussian prior of μ, by certainty equivalence."""

    def control(seen: Seen) -> Array:
        guess = unknown.posterior(seen, problem.matrix, problem.noise, prior_mean, prior_covariance)
        return problem.control(seen, guess.mean)

    return control


def practical(problem: Diffusion) -> Controller:
    """Return the controller of eq. practical_control_strategy, for diagonal A.

    It is u = (1/T)(I + λA²T)⁻¹ (mean so far − θ).
    """
    a = np.diag(problem.matrix)
    require(bool(np.all(problem.matrix == np.diag(a))), "curvature", problem.matrix, "a diagonal matrix")
    gain = gains.practical_gain(a, problem.penalty, problem.horizon)

    def control(seen: Seen) -> Array:
        weights, integral = np.asarray(seen.weights, float), np.asarray(seen.integral, float)
        if seen.time == 0:
            return np.zeros_like(weights)
        pull: Array = gain * (integral / seen.time - weights)
        return pull

    return control


def bema_estimating(problem: Diffusion) -> Controller:
    """Return the certainty-equivalent controller for a flat prior.

    Its estimate of μ is BEMA's, with the effect of the control removed.
    """

    def control(seen: Seen) -> Array:
        if seen.time == 0:
            return uncontrolled(seen)
        return problem.control(seen, unknown.flat_prior_estimate(seen, problem.matrix))

    return control


def posterior_variance(problem: Diffusion, prior_covariance: ArrayLike) -> float:
    """Return tr P_T, the least mean squared error of any estimate of μ from a path, controlled or not."""
    zero = np.zeros(len(problem.matrix))
    seen = Seen(time=problem.horizon, start=zero, weights=zero, integral=zero, control=zero)
    found = unknown.posterior(seen, problem.matrix, problem.noise, zero, prior_covariance)
    return float(np.trace(found.covariance))
