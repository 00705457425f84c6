"""Closed forms of PACE's final error on a quadratic, and of the effect of its strength on it.

One coordinate: speed a = ηα, averaging rate β, pull c, noise η²σ² (see recursion.py). Arguments broadcast
where an array is returned.
"""

import numpy as np
from numpy.typing import ArrayLike

from paceline.control import checks
from paceline.control.checks import Array
from paceline.control.recursion import VARIANTS, Variant, stylized

_STABLE = "those of a stable chain, radius < 1"


def ar2_variance(first: ArrayLike, second: ArrayLike, noise: ArrayLike) -> Array:
    """Return the variance of X_k = φ₁ X_{k−1} + φ₂ X_{k−2} + noise (lem:ar2-limiting-variance).

    It follows from the Yule–Walker equations. The paper prints γ(1) = φ₁ γ(0), without the term φ₂ γ(1) (E4),
    from which variances would be negative.

    >>> round(ar2_variance(0.5, 0.2, 0.8).item(), 6)
    1.367521
    """
    phi1, phi2 = checks.finite("first", first), checks.finite("second", second)
    s2 = checks.not_negative("noise", noise)
    causal = (np.abs(phi2) < 1) & (phi1 + phi2 < 1) & (phi2 - phi1 < 1)
    allowed = "those of a causal process, radius < 1"
    checks.require(bool(np.all(causal)), "first, second", (first, second), allowed)
    variance: Array = s2 * (1 - phi2) / ((1 + phi2) * (1 - phi1 - phi2) * (1 + phi1 - phi2))
    return variance


def _terms(speed: ArrayLike, rate: ArrayLike, pull: ArrayLike) -> tuple[Array, Array, Array, Array]:
    """Return a, β, c and N = 1 + (1 − β)(1 − a − c)."""
    a, beta, c = checks.positive("speed", speed), checks.checked_rate(rate), checks.finite("pull", pull)
    return a, beta, c, 1 + (1 - beta) * (1 - a - c)


def limiting_error(
    speed: ArrayLike, rate: ArrayLike, pull: ArrayLike, noise: ArrayLike = 1.0, variant: Variant = "pre"
) -> Array:
    """Return lim E[returned²] = βη²σ² N/(a(2 − N)(2N − aβ)), N = 1 + (1 − β)(1 − a − c).

    This is eq. gamma_0, simplified. Two other variants are this one with other arguments:
    lookahead(c) = pre(c(1 − a)), post(a, η, c) = pre(a(1 − c), η(1 − c), c). The recursion is stable for
    0 < a < 1 and every c from 0 to 1, not only for small c as in the paper's proof.

    >>> round(limiting_error(0.1, 0.05, 0.3).item(), 6)
    0.582323
    """
    checks.require(variant in VARIANTS, "variant", variant, ", ".join(VARIANTS))
    a, beta, c, _ = _terms(speed, rate, pull)
    variance = checks.not_negative("noise", noise)
    if variant == "post_raw":
        return _post_raw(a, beta, c, variance)
    if variant == "lookahead":
        c = c * (1 - a)
    if variant == "post":
        a, variance = a * (1 - c), variance * (1 - c) ** 2
    frozen = (a == 0) & (variance == 0)  # post with c = 1: no weight ever changes
    safe = np.where(frozen, 1.0, a)
    n = 1 + (1 - beta) * (1 - safe - c)
    slow, fast = beta + (1 - beta) * (safe + c), 2 * n - safe * beta  # 2 − N, and the other edge of stability
    stable = frozen | ((slow > 0) & (fast > 0) & (safe > 0))
    checks.require(bool(np.all(stable)), "speed, rate, pull", (speed, rate, pull), _STABLE)
    error: Array = np.where(frozen, 0.0, beta * variance * n / (safe * slow * fast))
    return error


def _post_raw(a: Array, beta: Array, c: Array, variance: Array) -> Array:
    """Return the limiting error of the variant post_raw."""
    # The average is an AR(2) process with 1 − φ₁ − φ₂ = aβ.
    phi1 = (1 - beta) + (1 - a) * (1 - c)
    above = a + (1 - a) * (c + beta)  # 1 + φ₂
    phi2 = above - 1
    ok = (above > 0) & (phi2 < 1) & (1 + phi1 - phi2 > 0)
    checks.require(bool(np.all(ok)), "speed, rate, pull", (a, beta, c), _STABLE)
    error: Array = beta * variance * (1 - phi2) / (above * a * (1 + phi1 - phi2))
    return error


def sgd_error(speed: ArrayLike, noise: ArrayLike = 1.0) -> Array:
    """Return lim E[θ²] of the live weights without a pull: η²σ²/(a(2 − a))."""
    a = checks.number("speed", speed, "0 < speed < 2", lambda x: (x > 0) & (x < 2))
    error: Array = checks.not_negative("noise", noise) / (a * (2 - a))
    return error


def limiting_error_slope(speed: ArrayLike, rate: ArrayLike, pull: ArrayLike, noise: ArrayLike = 1.0) -> Array:
    """Return d/dc of `limiting_error`: −2β(1 − β)η²σ² (N² − aβ)/(a(2 − N)²(2N − aβ)²)."""
    limiting_error(speed, rate, pull, noise)  # raises if the recursion is not stable
    a, beta, c, n = _terms(speed, rate, pull)
    slow = beta + (1 - beta) * (a + c)
    slope: Array = (
        -2 * beta * (1 - beta) * checks.not_negative("noise", noise) * (n**2 - a * beta)
        / (a * slow**2 * (2 * n - a * beta) ** 2)
    )  # fmt: skip
    return slope


def optimal_pull(speed: ArrayLike, rate: ArrayLike, *, clipped: bool = True) -> Array:
    """Return the c of the least limiting error: 1 − a + (1 − √(aβ))/(1 − β), at least 1 for a ≤ 3/4.

    It depends neither on the noise nor, given a, on the learning rate. Such a large pull has a price: the
    error is small because the recursion is slow, see `error_at_equal_speed`.
    """
    a = checks.fraction("speed", speed)
    beta = checks.fraction("rate", rate)
    best: Array = 1 - a + (1 - np.sqrt(a * beta)) / (1 - beta)
    return np.clip(best, 0.0, 1.0) if clipped else best


def least_limiting_error(speed: ArrayLike, rate: ArrayLike, noise: ArrayLike = 1.0) -> Array:
    """Return the limiting error at `optimal_pull(clipped=False)`: βη²σ²/(a(2 − √(aβ))²)."""
    a, beta = checks.positive("speed", speed), checks.fraction("rate", rate)
    error: Array = beta * checks.not_negative("noise", noise) / (a * (2 - np.sqrt(a * beta)) ** 2)
    return error


def spectral_radius(speed: float, rate: float, pull: float, variant: Variant = "pre") -> float:
    """Return the factor by which an error shrinks per step in the long run: the spectral radius."""
    return stylized(speed, rate, pull, variant).radius


def error_at_equal_speed(radius: float, pull: float) -> float:
    """Return the least limiting error of all learning rates and rates at one spectral radius, in σ²/α².

    At an equal spectral radius a pull never helps, because this error rises with c. Near radius 1 it is half
    of plain SGD's at c = 0, and equal to SGD's at c = 1.
    """
    rho = checks.one("radius", checks.fraction("radius", radius))
    c = checks.one("pull", checks.number("pull", pull, "0 <= pull <= 1", lambda x: (x >= 0) & (x <= 1)))
    if c == 0:  # radius = max(1 − a, 1 − β), and the error grows with both a and β
        a = 1 - rho
        return float(a**2 * limiting_error(a, a, 0.0))
    low, high, best = np.log((1 - rho) / 100), 0.0, np.inf
    for _ in range(12):  # β on a grid, then on finer grids around the best
        grid = np.linspace(low, high, 81)
        errors = _errors_on_level(np.exp(grid), c, rho)
        place = int(np.argmin(errors))
        best = min(best, float(errors[place]))
        low, high = grid[max(place - 2, 0)], grid[min(place + 2, len(grid) - 1)]
    allowed = "those that some learning rate reaches"
    checks.require(bool(np.isfinite(best)), "radius, pull", (radius, pull), allowed)
    return best


def _errors_on_level(rates: Array, c: float, rho: float) -> Array:
    """Return a²γ₀(a, β, c) at the least a of radius rho, for each β; inf if no a has it. (rates,)"""
    speeds = np.geomspace((1 - rho) / 100, 1 - 1e-12, 400)
    below = _radius(speeds[None, :], rates[:, None], c) <= rho
    known, first = below.any(1), np.argmax(below, 1)
    low, high = speeds[np.maximum(first - 1, 0)], speeds[first]
    for _ in range(60):
        middle = (low + high) / 2
        inside = _radius(middle, rates, c) <= rho
        low, high = np.where(inside, low, middle), np.where(inside, middle, high)
    return np.where(known, high**2 * limiting_error(high, rates, c), np.inf)


def _radius(a: Array, beta: Array, c: float) -> Array:
    """Return the largest absolute value of the roots of z² − φ₁z − φ₂."""
    phi1, phi2 = 2 - a - beta - c * (1 - beta), -(1 - beta) * (1 - a - c)
    inside = phi1**2 + 4 * phi2
    real = (np.abs(phi1) + np.sqrt(np.maximum(inside, 0))) / 2
    return np.where(inside >= 0, real, np.sqrt(np.maximum(-phi2, 0)))


# --- The two propositions -----------------------------------------------------------------------------


def improvement(speed: ArrayLike, rate: ArrayLike, pull: ArrayLike) -> Array:
    """Return the ratio of the limiting error with the pull to that without, γ₀(c)/γ₀(0).

    By prop:improved_convergence_quadratic it is below 1 for small c. In fact it is so for every c up to the
    best one. It holds for averages of the new weights, E_{k+1} = (1 − β)E_k + βθ_{k+1}, not of the old ones
    as printed (E18). For β < a < 1/8 and c = 1 it is at most 2a (prop:arbitrarily_large_improvement). The
    paper proves 8a, and states the ratio to SGD's error (E17).
    """
    ratio: Array = limiting_error(speed, rate, pull) / limiting_error(speed, rate, 0.0)
    return ratio
