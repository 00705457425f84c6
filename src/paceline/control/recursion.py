"""Two numbers that move linearly under noise: one coordinate of a quadratic, trained and averaged.

.. code-block:: text

    state' = transition · state + kick · ηξ          error = (readout · state)²        state = (live, average)

The optimum is 0, a = η · curvature is called `speed`, and ξ has variance σ². The theory of PACE and related
methods on quadratics is about such recursions.
"""

from dataclasses import dataclass
from typing import Literal, final

import numpy as np
from numpy.typing import ArrayLike
from scipy.linalg import solve_discrete_lyapunov

from paceline.control.checks import Array, checked_rate, finite, not_negative, one, positive, require, whole

Variant = Literal["pre", "post", "lookahead", "post_raw"]
VARIANTS: tuple[Variant, ...] = ("pre", "post", "lookahead", "post_raw")
"""Variants of Algorithm 1, which can be read in several ways (E21). pre: pull by the gap before the step, as
in the theorems and in `paceline.PACE`. post: pull the new iterate toward the old average. lookahead: average
first, then pull. post_raw: pull the new iterate, and average the iterate before the pull."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Recursion:
    """A method on one coordinate of a quadratic."""

    transition: Array  # (2, 2)
    kick: Array  # (2,): the effect of noise of size 1
    readout: Array  # (2,): the weights of live and average in the returned number

    @property
    def radius(self) -> float:
        """The spectral radius: the factor by which an error shrinks per step in the long run."""
        return float(np.max(np.abs(np.linalg.eigvals(self.transition))))

    def limiting_error(self, noise: float = 1.0) -> float:
        """Return E[returned²] after infinitely many steps, by Lyapunov's equation; noise is η²σ²."""
        variance = float(not_negative("noise", noise))
        if not np.any(self.kick) or variance == 0:
            return 0.0
        require(self.radius < 1, "recursion", f"one of spectral radius {self.radius:.6g}", "radius < 1")
        spread = solve_discrete_lyapunov(self.transition, np.outer(self.kick, self.kick))
        return float(self.readout @ spread @ self.readout) * variance

    def error_after(self, steps: int, start: float, noise: float = 1.0) -> float:
        """Return E[returned²] after `steps` from live = average = start, by doubling; noise is η²σ²."""
        steps = whole("steps", steps, 0)
        variance = float(not_negative("noise", noise))
        power, spread = self.transition, np.outer(self.kick, self.kick)  # of 2^i steps
        mean, total = np.full(2, float(finite("start", start))), np.zeros((2, 2))
        while steps:
            if steps & 1:
                mean, total = power @ mean, power @ total @ power.T + spread
            spread = spread + power @ spread @ power.T
            power, steps = power @ power, steps >> 1
        return float((self.readout @ mean) ** 2 + variance * (self.readout @ total @ self.readout))


def stylized(
    speed: float, rate: float, pull: float, variant: Variant = "pre", readout: ArrayLike = (0.0, 1.0)
) -> Recursion:
    """Return the recursion of eq. stylized_update for one coordinate: live weight θ and its average E.

    Speed is a = ηα, rate β, pull c. A negative pull is a push.
    """
    a, beta = one("speed", positive("speed", speed)), one("rate", checked_rate(rate))
    c, shown = one("pull", finite("pull", pull)), finite("readout", readout)
    require(shown.shape == (2,), "readout", readout, "two numbers")
    require(variant in VARIANTS, "variant", variant, ", ".join(VARIANTS))
    step = np.array([1 - a, 0.0])  # raw = step · (θ, E) − ηξ
    kick = np.array([-1.0, 0.0])
    average = np.array([0.0, 1.0])
    if variant == "pre":
        live = step + c * (average - np.array([1.0, 0.0]))
        averaged = (1 - beta) * average + beta * live
        kicks = kick[0], beta * kick[0]
    elif variant == "post":
        live = (1 - c) * step + c * average
        averaged = (1 - beta) * average + beta * live
        kicks = (1 - c) * kick[0], beta * (1 - c) * kick[0]
    else:
        averaged = (1 - beta) * average + beta * step
        target, move = (averaged, beta * kick[0]) if variant == "lookahead" else (average, 0.0)
        live = (1 - c) * step + c * target
        kicks = (1 - c) * kick[0] + c * move, beta * kick[0]
    return Recursion(
        transition=np.array([live, averaged]),
        kick=np.array(kicks),
        readout=shown,
    )
