"""A quadratic whose optimum drifts: when to push away from the average, and when to pull toward it.

.. code-block:: text

    live'     = live − η (α (live − o) + σξ) + R β_t (average − live)      η = lr (1 + R), R > −1
    average'  = average + β_t (live' − average)                            β_t = max(floor, (1 + t)^−κ)
    returned' = returned + γ_t (live' − returned)                          γ_t: with a power of its own
    o'        = o + velocity + wander ζ

R > 0 pulls, R < 0 pushes. EMA-Nesterov (arXiv 2605.25395), GPA (2512.17131) and SNOO (2510.15830) push;
EASGD (1412.6651), BELAY (2310.13854) and FOCUS (2501.12243) pull. What this model explains:

* At a given η and averaging rate, drift and noise decide the sign of the best R: `breakeven_noise`.
* At a given lr, R cancels as the averaging rate falls: `steady`. Without drift a push ties with a tuned EMA.
* Behind a ramp, with lr and powers tuned, a push wins a few percent of the loss. The average that steers is
  then longer than the returned one, so that slow directions move with lr and others with η.
* A push wins more where the EMA's best lr is at its limit of stability, 2/α. It also wins more where noise is
  proportional to curvature and grows with the loss of the live weights (`growth`). It then needs a higher lr
  than the EMA.

What it does not explain: in a small GPT a push of −½ gains about a tenth of the reducible loss over AdamW's
best EMA. It does so with κ of .5 to .6, at AdamW's best lr. Models with the GPT's basin in lr, its returned
power and its noise of the live weights gain a third of that at most, with κ near 1. They lose at the GPT's κ
and lr.
"""

from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
from numpy.typing import ArrayLike

from paceline.control import checks
from paceline.control.checks import Array, checked_rate, finite, not_negative, positive
from paceline.control.limits import limiting_error, limiting_error_slope
from paceline.control.lqg import LQG

# --- Exact moments, step by step -------------------------------------------------------------------------


class Losses(NamedTuple):
    """The expected losses above the moving optimum, one for each setting."""

    bias: Array  # of the returned average: ½ Σ α lag²
    variance: Array  # of the returned average: ½ Σ α variance
    live: Array  # of the live weights, both parts

    @property
    def returned(self) -> Array:
        """The loss of the returned average; infinite if it diverged."""
        loss = self.bias + self.variance
        return np.where(np.isfinite(loss) & (self.variance >= 0), loss, np.inf)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Drifting:
    """The loss ½ Σ α (θ − o)² of independent coordinates whose optimum o moves."""

    curvature: ArrayLike  # α, (d,)
    sigma: ArrayLike = 1.0  # the standard deviation of a gradient's noise
    velocity: ArrayLike = 0.0  # the optimum's ramp, per step
    wander: ArrayLike = 0.0  # the standard deviation of the optimum's random step
    start: ArrayLike = 0.0  # weights − optimum before the first step
    growth: float = 0.0  # the noise's variance is σ² (1 + growth · loss of the live weights)
    floor: float = 0.0  # averaging rates do not fall below this

    def losses(
        self, lr: ArrayLike, strength: ArrayLike, power: ArrayLike, returned: ArrayLike, steps: int
    ) -> Losses:
        """Return the exact losses after `steps`; settings broadcast to a vector.

        A strength R steps with η = lr (1 + R), so that lr is how fast slow directions move.
        """
        alpha, sigma = np.atleast_1d(positive("curvature", self.curvature)), not_negative("sigma", self.sigma)
        ramp, walk = finite("velocity", self.velocity), not_negative("wander", self.wander) ** 2
        growth, floor = not_negative("growth", self.growth), not_negative("floor", self.floor)
        gains = checks.number("strength", strength, "a finite number > -1", lambda x: x > -1)
        settings = positive("lr", lr), gains, not_negative("power", power), not_negative("returned", returned)
        rate, gain, kappa, late = (np.atleast_1d(v)[:, None] for v in np.broadcast_arrays(*settings))
        eta = rate * (1 + gain)
        begin = np.broadcast_to(finite("start", self.start), (len(eta), len(alpha)))
        mean, spread = np.array([begin] * 3), np.zeros((3, 3, *begin.shape))
        with np.errstate(all="ignore"):
            for t in range(1, checks.whole("steps", steps, 0) + 1):
                beta, gamma = (np.maximum(floor, (1.0 + t) ** -p) for p in (kappa, late))

                def move(x: Array, beta: Array = beta, gamma: Array = gamma) -> Array:
                    live = (1 - eta * alpha) * x[0] + gain * beta * (x[1] - x[0])
                    return np.stack([live, x[1] + beta * (live - x[1]), x[2] + gamma * (live - x[2])])

                excess = 0.5 * np.sum(alpha * (spread[0, 0] + mean[0] ** 2), axis=1, keepdims=True)
                kick = np.stack([np.ones_like(beta), beta, gamma]) * eta * sigma
                kicks = kick[:, None] * kick * (1 + growth * excess)
                mean = move(mean) - ramp
                spread = move(move(spread).swapaxes(0, 1)) + kicks + walk
            bias, variance = mean**2 @ alpha / 2, np.einsum("iisd,d->is", spread, alpha) / 2
        return Losses(bias=bias[2], variance=variance[2], live=bias[0] + variance[0])


# --- Closed forms at a constant averaging rate -----------------------------------------------------------


class Steady(NamedTuple):
    """The long run of one coordinate, relative to its optimum."""

    live_lag: Array
    lag: Array  # of the average
    variance: Array  # of the average


def steady(
    speed: ArrayLike,
    rate: ArrayLike,
    pull: ArrayLike,
    velocity: ArrayLike = 0.0,
    noise: ArrayLike = 1.0,
    wander: ArrayLike = 0.0,
) -> Steady:
    """Return the lags behind a ramp and the average's variance; a = ηα, c = βR, noise is η²σ².

    .. code-block:: text

        s = β + (1 − β)(a + c)        N = 2 − s        lag = −velocity · s/(aβ)
        variance = βη²σ² N/(a s (2N − aβ)) + wander² (N s² + 2aβ(N − 1))/(aβ s (2N − aβ))

    Without wander, lag² + variance = velocity²/(αk)² + (kσ²/2α)/(1 − aβ/2N), where k = βη/s is all that R
    changes but for aβ/2N: 1/k = (1 + (1 − β)R)/η + (1 − β)α/β. At η = lr (1 + R), R cancels as β → 0.
    """
    a, beta, c = positive("speed", speed), checked_rate(rate), finite("pull", pull)
    ramp, walk = finite("velocity", velocity), not_negative("wander", wander) ** 2
    by_noise = limiting_error(a, beta, c, noise)
    slow, loop = beta + (1 - beta) * (a + c), a * beta
    n = 2 - slow
    by_walk = walk * (n * slow**2 + 2 * loop * (n - 1)) / (loop * slow * (2 * n - loop))
    lag = -ramp * slow / loop
    return Steady(live_lag=lag + ramp * (1 - beta) / beta, lag=lag, variance=by_noise + by_walk)


def breakeven_noise(
    speed: ArrayLike, rate: ArrayLike, velocity: ArrayLike = 0.0, wander: ArrayLike = 0.0
) -> Array:
    """Return the noise η²σ² below which the best R is negative and above which it is positive.

    Learning rate and averaging rate are given. The steady error is convex in R, so that its slope at R = 0
    decides. For small a and β the result is 4 velocity² (1 + a/β)³/a, or wander² (a² + aβ + β²)/β².
    """
    a, beta = positive("speed", speed), checked_rate(rate)
    slow, loop = beta + (1 - beta) * a, a * beta
    n = 2 - slow
    above, below = n * slow**2 + 2 * loop * (n - 1), slow * (2 * n - loop)
    by_walk = (2 * n * slow - slow**2 - 2 * loop) / below - above * (2 * n - loop - 2 * slow) / below**2
    ramp, walk = finite("velocity", velocity) ** 2, not_negative("wander", wander) ** 2
    lost = (1 - beta) * (2 * ramp * slow / loop**2 + walk * by_walk / loop)
    gained = -limiting_error_slope(a, beta, 0.0)  # for noise 1
    return np.where(gained > 0, lost / np.where(gained > 0, gained, 1.0), np.inf)


# --- The best control ------------------------------------------------------------------------------------


def feed_forward(problem: LQG, time: float, entry: ArrayLike | None = None) -> Array:
    """Return F of the best control u = −K x + F v of dx = (A x + B u − entry · v) dt + C dW, v known.

    The problem is solved for the state (x, v). Without `entry`, each coordinate has a velocity of its own.
    """
    enters = np.eye(len(problem.drift)) if entry is None else np.atleast_2d(finite("entry", entry))
    n, m = enters.shape
    both = LQG(
        drift=np.block([[problem.drift, -enters], [np.zeros((m, n + m))]]),
        input=np.pad(problem.input, ((0, m), (0, 0))),
        running_cost=np.pad(problem.running_cost, (0, m)),
        final_cost=np.pad(problem.final_cost, (0, m)),
        control_cost=problem.control_cost,
        horizon=problem.horizon,
    )
    return -both.gain(time)[:, n:]


def relaxed_feed_forward(
    curvature: ArrayLike, penalty: ArrayLike, horizon: ArrayLike, time: ArrayLike
) -> Array:
    """Return F of u = k (o − θ) + F v, which minimises E[ (1/T) ∫ |θ − o|² + λ ∫ |u|² ]; o moves by v dt.

    With ω = √(α² + 1/λT), e = e^(−ω(T − t)) and the k of `gains.relaxed_gain`

    .. code-block:: text

        F = (ω² − α²)(1 − e)² / ( ω ((ω + α) + (ω − α) e²) )        long before T: F = 1 − α/ω = k/(k + α)

    Behind a ramp live − average = v (1 − β)/β, so that this term is a push with R = −F/(1 − β).

    >>> round(relaxed_feed_forward(0.5, 0.01, 400.0, 0.0).item(), 6)
    0.292893
    """
    alpha, lam, end = (
        positive("curvature", curvature),
        positive("penalty", penalty),
        positive("horizon", horizon),
    )
    omega = np.hypot(alpha, np.sqrt(1 / (lam * end)))
    e = np.exp(-omega * (end - checks.time_in(time, end)))
    share: Array = (1 - e) ** 2 / (lam * end * omega * ((omega + alpha) + (omega - alpha) * e**2))
    return share
