"""Two numbers that move linearly under noise: one coordinate of a quadratic, trained and averaged.

.. code-block:: text

    state' = transition · state + kick · ηξ          error = (readout · state)²        state = (live, average)

The optimum is 0, a = η · curvature is called `speed`, and ξ has variance σ². The theory of PACE and related
methods on quadratics is about such recursions.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, final

import numpy as np
from numpy.typing import ArrayLike

from paceline.control import checks
from paceline.control.checks import Array

Variant = Literal["pre", "post", "lookahead", "post_raw"]
VARIANTS: tuple[Variant, ...] = ("pre", "post", "lookahead", "post_raw")
"""Variants of Algorithm 1, which can be read in several ways (E21). pre: pull by the gap before the step, as
in the theorems and in `paceline.PACE`. post: pull the new iterate toward the old average. lookahead: average
first, then pull. post_raw: pull the new iterate, and average the iterate before the pull."""


# --- The update ---------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """The live weights and their average."""

    live: Array
    average: Array


def step(
    pair: Pair, gradient: Array, lr: float, pull: ArrayLike, rate: float, variant: Variant = "pre"
) -> Pair:
    """Return the weights after one update. The pull is a number, or one for each coordinate.

    >>> import numpy as np
    >>> here = Pair(np.array([1.0]), np.array([0.0]))
    >>> step(here, np.array([2.0]), lr=0.1, pull=0.5, rate=0.25)
    Pair(live=array([0.3]), average=array([0.075]))
    """
    checks.require(variant in VARIANTS, "variant", variant, ", ".join(VARIANTS))
    checks.checked_rate(rate)
    live, average = pair
    raw, strength = live - lr * gradient, np.asarray(pull, dtype=np.float64)
    if variant == "pre":
        new = raw + strength * (average - live)
        return Pair(new, (1 - rate) * average + rate * new)
    if variant == "post":
        new = raw + strength * (average - raw)
        return Pair(new, (1 - rate) * average + rate * new)
    moved = (1 - rate) * average + rate * raw
    return Pair(raw + strength * ((moved if variant == "lookahead" else average) - raw), moved)


# --- As a recursion -----------------------------------------------------------------------------------


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

    def moments(self, steps: int, start: float, noise: float = 1.0) -> tuple[Array, Array]:
        """Return mean and covariance of the state after `steps` from live = average = start, by doubling.

        `noise` is η²σ².
        """
        steps = checks.whole("steps", steps, 0)
        variance = float(checks.not_negative("noise", noise))
        power, spread = self.transition, np.outer(self.kick, self.kick)  # of 2^i steps
        mean, total = np.full(2, float(checks.finite("start", start))), np.zeros((2, 2))
        while steps:
            if steps & 1:
                mean, total = power @ mean, power @ total @ power.T + spread
            spread = spread + power @ spread @ power.T
            power, steps = power @ power, steps >> 1
        return mean, variance * total

    def error_after(self, steps: int, start: float, noise: float = 1.0) -> float:
        """Return E[returned²] after `steps` from live = average = start; noise is η²σ²."""
        mean, total = self.moments(steps, start, noise)
        return float((self.readout @ mean) ** 2 + self.readout @ total @ self.readout)


def stylized(
    speed: float, rate: float, pull: float, variant: Variant = "pre", readout: ArrayLike = (0.0, 1.0)
) -> Recursion:
    """Return the recursion of eq. stylized_update for one coordinate: live weight θ and its average E.

    Speed is a = ηα, rate β, pull c. A negative pull is a push.
    """
    a, c = (
        checks.one("speed", checks.positive("speed", speed)),
        checks.one("pull", checks.finite("pull", pull)),
    )
    beta, shown = checks.one("rate", checks.checked_rate(rate)), checks.finite("readout", readout)
    checks.require(shown.shape == (2,), "readout", readout, "two numbers")
    live, average, kick = np.eye(3)  # the update is linear in these
    moved = np.array(step(Pair(live, average), a * live + kick, 1.0, c, beta, variant))
    return Recursion(transition=moved[:, :2], kick=moved[:, 2], readout=shown)
