"""PACE, EMA, EMA-Nesterov, GPA and Schedule-Free on a quadratic, as settings of one recursion.

Each method keeps two sets of weights: gradients are taken at one, and the other is returned. On a quadratic
each method is linear. GPA is exactly PACE with a negative pull, a larger rate and a smaller learning rate.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from paceline.control import checks
from paceline.control.checks import Array
from paceline.control.recursion import Recursion, stylized


class Setting(NamedTuple):
    """The settings of eq. stylized_update, which stand for a method of the family."""

    lr: float
    rate: float  # β
    pull: float  # c; negative: a push

    def on(self, curvature: float) -> Recursion:
        """Return the recursion of one coordinate of this curvature."""
        return stylized(self.lr * float(checks.positive("curvature", curvature)), self.rate, self.pull)

    def error_after(self, steps: int, curvature: float, start: float, sigma: float) -> float:
        """Return E[returned²] of a coordinate; sigma is that of the gradient noise."""
        return self.on(curvature).error_after(steps, start, (self.lr * sigma) ** 2)


def pace(lr: float, rate: float, strength: float) -> Setting:
    """Return PACE of strength R with sizing="uniform": c = βR.

    R = 0 is SGD with an EMA, and R < 0 pushes away from the average (see drift.py).
    """
    beta = checks.one("rate", checks.checked_rate(rate))
    gain = beta * checks.one("strength", checks.finite("strength", strength))
    return Setting(checks.one("lr", checks.positive("lr", lr)), beta, gain)


def ema(lr: float, rate: float) -> Setting:
    """Return SGD with an average that does not steer it."""
    return pace(lr, rate, 0.0)


def gpa(lr: float, mu_x: float, mu_y: float) -> Setting:
    """Return Generalized Primal Averaging as a setting of PACE.

    With β = 1 − μ_x and s = β + (1 − μ_y)(1 − β),

    .. code-block:: text

        lr → s · lr        rate → β/s        pull → −β μ_y/(1 − μ_y)

    The live weights are GPA's y, the average its x. So GPA pushes, with R = −s μ_y/(1 − μ_y).
    """
    beta = 1 - float(checks.number("mu_x", mu_x, "0 <= mu_x < 1", lambda x: (x >= 0) & (x < 1)))
    share = 1 - float(checks.number("mu_y", mu_y, "0 <= mu_y < 1", lambda x: (x >= 0) & (x < 1)))
    scale = beta + share * (1 - beta)
    return Setting(float(checks.positive("lr", lr)) * scale, beta / scale, -beta * (1 - share) / share)


def ema_nesterov(lr: float, decay: float, push: float, curvature: float) -> Recursion:
    """Return EMA-Nesterov: gradients are taken at y = x + push · m, and x is returned.

    m is an EMA of the changes of x. It is (1 − decay)/decay · (x − E), where E is the EMA of x. So this is
    the variant "lookahead" with a push.
    """
    gamma = float(checks.fraction("decay", decay))
    c = -float(checks.not_negative("push", push)) * (1 - gamma) / gamma
    a = float(checks.positive("lr", lr)) * float(checks.positive("curvature", curvature))
    # y = x + c(E − x), so x = (y − cE)/(1 − c).
    return stylized(a, 1 - gamma, c, "lookahead", readout=np.array([1.0, -c]) / (1 - c))


def schedule_free_error(
    lr: float, beta: float, curvature: float, start: float, noise: float, steps: int
) -> float:
    """Return E[x²] of Schedule-Free SGD after `steps`: y = (1 − β)z + βx, x is the mean of all z.

    `noise` is η²σ². The method is GPA with μ_x = 1 − 1/t, so that the recursion changes with every step.
    """
    share = 1 - float(checks.number("beta", beta, "0 <= beta < 1", lambda x: (x >= 0) & (x < 1)))
    a = float(checks.positive("lr", lr)) * float(checks.positive("curvature", curvature))
    checks.whole("steps", steps, 0)
    own, other = 1 - a * share, -a * (1 - share)  # z' = own · z + other · x − ηξ
    z = x = checks.one("start", checks.finite("start", start))
    zz = zx = xx = 0.0  # covariances, in η²σ²
    for t in range(1, steps + 1):
        weight = 1 / t
        z = own * z + other * x
        x += weight * (z - x)
        across = own * zx + other * xx  # of the new z and the old x
        zz = own**2 * zz + 2 * own * other * zx + other**2 * xx + 1
        xx = (1 - weight) ** 2 * xx + 2 * weight * (1 - weight) * across + weight**2 * zz
        zx = (1 - weight) * across + weight * zz
    return x**2 + checks.one("noise", checks.not_negative("noise", noise)) * xx


# --- What the pull does to the learning rate -----------------------------------------------------------


def speed_factor(rate: ArrayLike, pull: ArrayLike) -> Array:
    """Return the factor of the pull on the speed under a constant gradient: β/(β + (1 − β)c).

    With c = βR this is 1/(1 + (1 − β)R), so about 1/(1 + R).
    """
    beta, c = checks.checked_rate(rate), checks.finite("pull", pull)
    b = beta + (1 - beta) * c
    checks.require(bool(np.all(b > 0)), "pull", pull, "over -rate/(1 - rate)")
    factor: Array = beta / b
    return factor


def right_ratio(lr: ArrayLike, best_lr: ArrayLike) -> Array:
    """Return R*(η) = η/η* − 1, the strength that corrects a learning rate η to the best one, η*.

    It is a push, and negative, if η is below η*. It holds for long averages (small β). The page of
    `paceline theory figures` compares it with the true best.
    """
    strength: Array = checks.positive("lr", lr) / checks.positive("best_lr", best_lr) - 1
    return strength


def balance(recursion: Recursion, curvature: float, start: float, noise: float, steps: int) -> float:
    """Return E⟨g_{k+1}, r_k⟩ after `steps`: the gradient at the new live weights, the gap before.

    If this is positive, a stronger pull lowers the next loss: ∂F(θ_{k+1})/∂R = −β E⟨g_{k+1}, r_k⟩ exactly.
    Where it is 0, no other R improves one more step, but another R may improve the whole run.
    """
    alpha = float(checks.positive("curvature", curvature))
    mean, spread = recursion.moments(steps, start, noise)
    second = spread + np.outer(mean, mean)
    return float(alpha * recursion.transition[0] @ second @ np.array([1.0, -1.0]))
