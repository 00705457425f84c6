"""The gains of the best controller toward the optimum, and the approximations that lead to PACE.

The weights follow dθ = [A(μ − θ) + u] dt + √Σ dW, and their mean over the horizon is returned:

.. code-block:: text

    J(u) = E[ |mean θ − μ|² + λ ∫ |u|² dt ]          u = k_x (μ − θ) + k_y (t μ − ∫ θ)

Curvature is α or A, penalty λ, horizon T. If curvature is a number or an array of numbers, coordinates are
independent (A is diagonal). Functions named `*_matrix` take any square A. Arguments broadcast.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from paceline.control.checks import Array, finite, one, positive, require, square, time_in
from paceline.control.lqg import LQG, scalar_riccati


class Gains(NamedTuple):
    """The gains of the control u = toward · (μ − θ) + balance · (t μ − ∫ θ)."""

    toward: Array  # k_x: pulls the weights toward the optimum
    balance: Array  # k_y: corrects the mean of the weights so far


class Riccati(NamedTuple):
    """The blocks M, N and S of P_t, for the state (θ − μ, ∫ θ − μ)."""

    m: Array
    n: Array
    s: Array


# --- The objective that is returned: the mean ---------------------------------------------------------


def original_gains(curvature: ArrayLike, penalty: ArrayLike, horizon: ArrayLike, time: ArrayLike) -> Gains:
    """Return the gains of the best control for diagonal A (thm:optimal_control_solution).

    k_x = h²/(λT² + g), k_y = h/(λT² + g) with h = ∫ e^(−αs) ds and g = ∫ h² ds over the remaining time. This
    printed gain is right, also for α = 0, α → 0 and α < 0. The paper repeats g wrongly in
    lem:original_objective_solution_scalar (E8). It repeats the whole gain wrongly there (E9) and in
    cor:optimal_control_unknown_mustar (E10).

    >>> gains = original_gains(1.0, 0.1, 5.0, 0.0)
    >>> round(float(gains.toward), 6), round(float(gains.balance), 6)
    (0.16406, 0.165173)
    """
    h, _, shrink, _, below = _parts(curvature, penalty, horizon, time)
    return Gains(toward=h**2 / below, balance=h * shrink / below)


def original_riccati(
    curvature: ArrayLike, penalty: ArrayLike, horizon: ArrayLike, time: ArrayLike
) -> Riccati:
    """Return M, N and S of lem:original_objective_solution_scalar: λ k_x, λ k_y, λ/(λT² + g)."""
    h, _, shrink, lam, below = _parts(curvature, penalty, horizon, time)
    return Riccati(m=lam * h**2 / below, n=lam * h * shrink / below, s=lam * shrink**2 / below)


def original_cost(
    start: ArrayLike, curvature: ArrayLike, penalty: ArrayLike, horizon: ArrayLike, variance: ArrayLike
) -> Array:
    """Return J of the best control: M_0 x_0² + σ² λ log(1 + g/λT²).

    `start` is x_0 = θ_0 − μ, and `variance` is σ², that of the noise. The integral of M has a closed form
    because g' = h².
    """
    h, g, shrink, lam, below = _parts(curvature, penalty, horizon, 0.0)
    noise, end = positive("variance", variance), positive("horizon", horizon)
    growth = np.minimum(finite("curvature", curvature) * end, 0.0)  # log of shrink, which may be 0
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        near, far = np.log1p(g / (lam * (end * shrink) ** 2)), np.log(below / (lam * end**2)) - 2 * growth
    spread = np.where(growth > -300, near, far)
    cost: Array = finite("start", start) ** 2 * lam * h**2 / below + noise * lam * spread
    return cost


def original_riccati_matrix(curvature: ArrayLike, penalty: float, horizon: float, time: float) -> Riccati:
    """Return M, N and S of thm:original_objective for any square A, symmetric or not, in closed form.

    The paper has an ODE for them. With H = ∫ e^(−As) ds, G = ∫ H H' ds, D = T² I + G/λ:
    M = H' D⁻¹ H, N = H' D⁻¹, S = D⁻¹. If A is not symmetric, they are blocks of the doubled problem's P:
    D cannot be inverted where only some directions grow by many orders of magnitude.
    """
    a = square("curvature", curvature)
    if np.array_equal(a, a.T):
        values, vectors = np.linalg.eigh(a)
        apart = original_riccati(values, penalty, horizon, one("time", finite("time", time)))
        return Riccati(*((vectors * block) @ vectors.T for block in apart))
    p, n = original_problem(a, penalty, horizon).riccati(time), len(a)
    return Riccati(m=p[:n, :n], n=p[:n, n:], s=p[n:, n:])


def original_gains_matrix(curvature: ArrayLike, penalty: float, horizon: float, time: float) -> Gains:
    """Return the gains of the best control for any square A, as matrices."""
    riccati = original_riccati_matrix(curvature, penalty, horizon, time)
    return Gains(toward=riccati.m / penalty, balance=riccati.n / penalty)


def original_problem(curvature: ArrayLike, penalty: float, horizon: float) -> LQG:
    """Return the problem of the returned mean as an LQG problem in the state (θ − μ, ∫ θ − μ)."""
    a = square("curvature", curvature)
    unit, none = np.eye(len(a)), np.zeros_like(a)
    return LQG(
        drift=np.block([[-a, none], [unit, none]]),
        input=np.vstack([unit, none]),
        final_cost=np.block([[none, none], [none, unit / positive("horizon", horizon) ** 2]]),
        control_cost=positive("penalty", penalty) * unit,
        horizon=horizon,
    )


# --- The relaxed objective: the mean of squares instead of the square of the mean ----------------------


def relaxed_gain(curvature: ArrayLike, penalty: ArrayLike, horizon: ArrayLike, time: ArrayLike) -> Array:
    """Return k of u = k (μ − θ) that minimises E[ (1/T) ∫ |θ − μ|² + λ ∫ |u|² ].

    This is thm:optimal_control_relaxed: p/λ of the scalar Riccati equation with a = −α, q = 1/T, r = λ. Its
    sign in the proof is wrong (E5).
    """
    lam, end = positive("penalty", penalty), positive("horizon", horizon)
    return scalar_riccati(-finite("curvature", curvature), 1 / end, lam, 0.0, end, time) / lam


def relaxed_problem(curvature: ArrayLike, penalty: float, horizon: float) -> LQG:
    """Return the relaxed problem for any square A, as an LQG problem in θ − μ."""
    a = square("curvature", curvature)
    unit, end = np.eye(len(a)), positive("horizon", horizon)
    costs = {"running_cost": unit / end, "control_cost": positive("penalty", penalty) * unit}
    return LQG(drift=-a, horizon=horizon, **costs)


# --- Approximations -----------------------------------------------------------------------------------


def relaxed_gain_far(curvature: ArrayLike, penalty: ArrayLike, horizon: ArrayLike) -> Array:
    """Return the limit of `relaxed_gain` long before the end: (1/λT)/(√(α² + 1/λT) + α).

    This is eq. approx-optimal-control, whose factor μ − θ is missing in print (E6). It needs
    T − t ≫ 1/(2√(α² + 1/λT)), which is at most 1/(2α), not at least as printed (E7). PACE does not come from
    this gain, though the paper says so (E7b).
    """
    alpha, lam, end = _checked(curvature, penalty, horizon)
    share = 1 / (lam * end)
    omega = np.hypot(alpha, np.sqrt(share))
    gain: Array = np.where(alpha >= 0, share / (omega + np.abs(alpha)), omega + np.abs(alpha))
    return gain


def original_gain_far(
    curvature: ArrayLike, penalty: ArrayLike, horizon: ArrayLike, time: ArrayLike = 0.0
) -> Array:
    """Return k_x without its terms in e^(−α(T−t)): 1/(λα²T² + T − t − 3/(2α)). It needs α(T − t) > 3/2."""
    alpha, lam, end = _checked(curvature, penalty, horizon)
    left = end - time_in(time, end)
    require(bool(np.all(alpha * left > 1.5)), "curvature", curvature, "curvature * (horizon - time) > 1.5")
    gain: Array = 1 / (lam * alpha**2 * end**2 + left - 1.5 / alpha)
    return gain


def practical_gain(curvature: ArrayLike, penalty: ArrayLike, horizon: ArrayLike) -> Array:
    """Return 1/(T(1 + λα²T)), the gain of eq. practical_control_strategy, from which PACE is made.

    It is `original_gain_far` at t = 0 without the term −3/(2α). So it needs αT ≫ 3/2, not only T ≫ 1. For
    λ → 0 the exact gain exceeds it by these factors:

    .. code-block:: text

        αT        2     5     10    30    100
        factor    1.96  1.40  1.18  1.05  1.02

    >>> practical_gain(1.0, 0.1, 5.0).item()
    0.13333333333333333
    """
    alpha, lam, end = _checked(curvature, penalty, horizon)
    gain: Array = 1 / (end * (1 + lam * alpha**2 * end))
    return gain


# --- Integrals ------------------------------------------------------------------------------------------


def _checked(curvature: ArrayLike, penalty: ArrayLike, horizon: ArrayLike) -> tuple[Array, Array, Array]:
    return finite("curvature", curvature), positive("penalty", penalty), positive("horizon", horizon)


def _parts(
    curvature: ArrayLike, penalty: ArrayLike, horizon: ArrayLike, time: ArrayLike
) -> tuple[Array, Array, Array, Array, Array]:
    """Return h·s, g·s², s, λ and (λT² + g)·s², with the s of `integrals`."""
    alpha, lam, end = _checked(curvature, penalty, horizon)
    h, g, shrink = integrals(alpha, end - time_in(time, end))
    return h, g, shrink, lam, lam * (end * shrink) ** 2 + g


def integrals(curvature: ArrayLike, length: ArrayLike) -> tuple[Array, Array, Array]:
    """Return h·s, g·s² and s, with h = ∫₀^τ e^(−αs) ds, g = ∫₀^τ h² ds and s = e^(min(ατ, 0)).

    The factor s prevents overflow. With x = ατ and E = 1 − e^(−x), g = τ³ (x − E − E²/2)/x³. For small x the
    numerator, about x³/3, would cancel, and the series Σ (−1)^(n+1) (2^(n−1) − 2) x^(n−3)/n!, n ≥ 3, is
    summed instead.
    """
    alpha, tau = np.broadcast_arrays(np.asarray(curvature, float), np.asarray(length, float))
    x = alpha * tau
    shrink = np.exp(np.minimum(x, 0.0))
    safe = np.where(x == 0, 1.0, x)
    h = np.where(x == 0, 1.0, -np.expm1(-np.abs(safe)) / np.abs(safe)) * tau
    near = np.abs(x) < 0.5
    series, power, factorial = np.zeros_like(x), np.ones_like(x), 6.0
    for n in range(3, 30):
        series = series + (-1) ** (n + 1) * (2.0 ** (n - 1) - 2) / factorial * power
        power, factorial = power * np.where(near, x, 0.0), factorial * (n + 1)
    far = np.where(near, 1.0, x)
    spent = -np.expm1(-np.abs(far))  # 1 − e^(−|x|)
    down = far - spent - spent**2 / 2  # x > 0
    up = far * shrink**2 + spent * shrink - spent**2 / 2  # x < 0, times s²: E s = e^x − 1 = −spent
    g = np.where(near, series * shrink**2, np.where(far > 0, down, up) / far**3) * tau**3
    return h, g, shrink
