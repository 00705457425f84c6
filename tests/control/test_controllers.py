"""Every statement about control by a second route, and every erratum where the printed formula fails.

The second routes: Riccati equations integrated here, dynamic programming on the Euler chain, the algebraic
Riccati equation, exact moments of any linear feedback, least squares over all affine policies, conditioning
of a joint Gaussian, 60 digits, and Monte Carlo.
"""

import itertools

import mpmath
import numpy as np
import pytest
from scipy.integrate import quad_vec, solve_ivp
from scipy.linalg import expm, solve_continuous_are

from paceline.control import gains, simulate
from paceline.control.gains import (
    Gains,
    original_cost,
    original_gain_far,
    original_gains,
    original_gains_matrix,
    original_riccati,
    original_riccati_matrix,
    practical_gain,
    relaxed_gain,
    relaxed_gain_far,
)
from paceline.control.lqg import LQG, scalar_riccati
from paceline.control.simulate import Diffusion
from paceline.control.unknown import Seen, certainty_equivalent_control, posterior

pytestmark = pytest.mark.slow  # a quarter of a minute together: not part of `make check`

# A scalar problem on which many controllers are compared; its best cost is 0.0694755.
ALPHA, PENALTY, HORIZON, START, VARIANCE = 0.8, 0.05, 4.0, 1.3, 0.49


SKEWED = {
    1: np.array([[0.7]]),
    2: np.array([[1.0, 0.8], [-0.3, 0.4]]),
    3: np.array([[0.9, 0.5, -0.2], [0.0, 1.4, 0.6], [0.3, -0.7, 0.2]]),
    4: np.array([[0.5, 1.0, 0.0, 0.2], [0.0, 0.5, 1.0, 0.0], [0.0, 0.0, 0.5, 1.0], [-0.4, 0.0, 0.0, 0.5]]),
}


# --- Second routes -------------------------------------------------------------------------------------


def general_problem(n, m, horizon=1.5):
    """All matrices different from the identity, input and noise not square."""
    rng = np.random.default_rng(10 * n + m)
    half_q, half_f, half_r = rng.normal(size=(n, n)), rng.normal(size=(n, n)), rng.normal(size=(m, m))
    return {
        "drift": rng.normal(size=(n, n)),
        "input": rng.normal(size=(n, m)),
        "noise": rng.normal(size=(n, n + 1)) / 2,
        "running_cost": half_q @ half_q.T / n,
        "final_cost": half_f @ half_f.T / n,
        "control_cost": half_r @ half_r.T / m + 0.5 * np.eye(m),
        "horizon": horizon,
    }


SIZES = [(1, 1), (2, 1), (3, 2), (4, 4)]


def lqg(*, noise, **given):
    return LQG(**given)


def backward(slope, end, horizon, times):
    """Integrate −dP/dt = slope(P) from P(T) = end; P at these times."""
    shape = np.shape(end)
    found = solve_ivp(
        lambda _, p: slope(p.reshape(shape)).reshape(-1),
        (0.0, horizon),
        np.reshape(end, -1),
        "DOP853",
        dense_output=True,
        rtol=1e-12,
        atol=1e-15,
    )
    return np.array([found.sol(horizon - t).reshape(shape) for t in times])


def riccati_slope(p, *, drift, input, running_cost, control_cost, **_):
    gain = np.linalg.solve(control_cost, input.T @ p)
    return drift.T @ p + p @ drift - p @ input @ gain + running_cost


def feedback_cost(gain, start, compared=None, *, drift, input, noise, running_cost, final_cost, **others):
    """J of u = −gain(t) x from the moments of the state, whatever the gain is.

    With `compared`, also ∫ E (u − u*)' R (u − u*) dt, where u* = −compared(t) x.
    """
    r, horizon, n = others["control_cost"], others["horizon"], len(drift)

    def slope(t, state):
        k, s = gain(t), state[: n * n].reshape(n, n)
        closed = drift - input @ k
        change = closed @ s + s @ closed.T + noise @ noise.T
        off = np.zeros_like(k) if compared is None else k - compared(t)
        running = np.trace((running_cost + k.T @ r @ k) @ s)
        return np.concatenate([change.reshape(-1), [running, np.trace(off.T @ r @ off @ s)]])

    begin = np.concatenate([np.outer(start, start).reshape(-1), [0.0, 0.0]])
    found = solve_ivp(slope, (0.0, horizon), begin, "DOP853", rtol=1e-10, atol=1e-13)
    last = found.y[:, -1]
    cost = np.trace(final_cost @ last[: n * n].reshape(n, n)) + last[-2]
    return cost if compared is None else (cost, last[-1])


def returned_mean_problem(a, penalty, horizon, root):
    """Of the state (θ − μ, ∫ θ − μ), as thm:original_objective writes it."""
    d = len(a)
    one, none = np.eye(d), np.zeros((d, d))
    return {
        "drift": np.block([[-a, none], [one, none]]),
        "input": np.vstack([one, none]),
        "noise": np.vstack([root, none]),
        "running_cost": np.zeros((2 * d, 2 * d)),
        "final_cost": np.block([[none, none], [none, one / horizon**2]]),
        "control_cost": penalty * one,
        "horizon": horizon,
    }


def scalar_feedback_cost(pull, *, start=START, alpha=ALPHA, penalty=PENALTY, horizon=HORIZON, var=VARIANCE):
    """J of u = k_x (μ − θ) + k_y (t μ − ∫ θ) for any pair of gains."""
    problem = returned_mean_problem(np.array([[alpha]]), penalty, horizon, np.array([[np.sqrt(var)]]))
    return feedback_cost(lambda t: np.array([pull(t)]), np.array([start, 0.0]), **problem)


def chain_gains(steps, *, drift, input, running_cost, final_cost, control_cost, horizon, **_):
    """Dynamic programming on the Euler chain: K_0, ..., K_(steps−1), exact for the chain."""
    dt = horizon / steps
    move, push = np.eye(len(drift)) + dt * drift, dt * input
    value, found = final_cost, []
    for _step in range(steps):
        k = np.linalg.solve(dt * control_cost + push.T @ value @ push, push.T @ value @ move)
        value = dt * running_cost + move.T @ value @ (move - push @ k)
        found.append(k)
    return found[::-1]


class Impulses:
    """In place of random numbers: each path gets one unit kick, or its negative, and the first gets none.

    What is quadratic in the kicks has an exact mean then, so a simulation needs no sampling.
    """

    def __init__(self, first, count):
        self.next, self.count = first, count

    def standard_normal(self, shape):
        drawn = np.zeros(shape)
        here = np.arange(shape[1])
        drawn[self.next + here, here], drawn[self.next + self.count + here, here] = 1.0, -1.0
        self.next += shape[1]
        return drawn


def impulse_responses(problem, controller, start, mean, root, steps):
    """The paths of `simulate` from unit kicks of noise and prior, and μ of each path."""
    d = len(problem.matrix)
    count = d + 2 * d * steps
    optimum = np.tile(np.asarray(mean, float), (1 + 2 * count, 1))
    optimum[1 : 1 + d] += np.asarray(root, float).T
    optimum[1 + count : 1 + count + d] -= np.asarray(root, float).T
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np.random, "default_rng", lambda seed: Impulses(1 + d, count))
        paths = simulate.simulate(problem, controller, start, optimum, steps=steps, paths=len(optimum))
    return paths, optimum


def mean_over_kicks(each):
    """The exact mean of what is quadratic in the kicks."""
    plus, minus = np.split(each[1:], 2)
    return each[0] + np.sum((plus + minus) / 2 - each[0])


def exact_cost(problem, controller, start, mean, root, steps, penalty):
    paths, optimum = impulse_responses(problem, controller, start, mean, root, steps)
    return mean_over_kicks(np.sum((paths.mean - optimum) ** 2, axis=1) + penalty * paths.effort)


def chain_costs(problem, controller, start, mean, root, steps):
    """Exact costs of a controller on the Euler chain: of the squared mean, and of the mean of squares."""
    d, dt = len(problem.matrix), problem.horizon / steps
    count = d * (1 + steps)
    kicks = (
        np.eye(count).reshape(count, 1 + steps, d).swapaxes(0, 1)
    )  # each path gets one: μ's first, then noise
    kicks = np.concatenate([np.zeros((1 + steps, 1, d)), kicks, -kicks], axis=1)
    optimum = np.asarray(mean) + kicks[0] @ np.asarray(root).T
    begin = weights = np.tile(np.broadcast_to(np.asarray(start, float), d), (1 + 2 * count, 1))
    integral, control, effort, squares = 0 * weights, 0 * weights, 0.0, 0.0
    for k in range(steps):
        u = controller(Seen(time=k * dt, start=begin, weights=weights, integral=integral, control=control))
        squares = squares + np.sum((weights - optimum) ** 2, axis=1) / steps
        integral, control, effort = (
            integral + dt * weights,
            control + dt * u,
            effort + dt * np.sum(u**2, axis=1),
        )
        noise = kicks[1 + k] @ np.linalg.cholesky(problem.noise * dt).T
        weights = weights + dt * ((optimum - weights) @ problem.matrix.T + u) + noise
    returned = np.sum((integral / problem.horizon - optimum) ** 2, axis=1)
    return tuple(mean_over_kicks(each + problem.penalty * effort) for each in (returned, squares))


def relative(ours, reference):
    """The largest deviation, relative to the largest entry."""
    reference = np.asarray(reference, float)
    return np.max(np.abs(ours - reference)) / np.max(np.abs(reference))


def digits(ours, reference):
    """Relative error of each number against one of many digits; below the smallest normal, absolutely."""
    reference = [mpmath.mpf(value) for value in reference]
    return max(
        float(abs(mpmath.mpf(float(x)) - y) / max(abs(y), mpmath.mpf(10) ** -290))
        for x, y in zip(np.ravel(ours), reference, strict=True)
    )


# --- thm:lqg -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "m"), SIZES)
def test_riccati_is_what_backward_integration_finds(n, m):
    given = general_problem(n, m)
    problem = lqg(**given)
    times = [0.9, 0.0, 1.5, 0.3]
    expected = backward(lambda p: riccati_slope(p, **given), given["final_cost"], 1.5, times)
    assert relative(np.array([problem.riccati(t) for t in times]), expected) < 1e-9


@pytest.mark.parametrize(("n", "m"), SIZES)
def test_a_long_horizon_gives_the_algebraic_riccati_equation(n, m):
    given = general_problem(n, m, horizon=60.0)
    names = ("drift", "input", "running_cost", "control_cost")
    steady = solve_continuous_are(*(given[name] for name in names))
    assert relative(lqg(**given).riccati(0.0), steady) < 1e-9


@pytest.mark.parametrize(("n", "m"), [(1, 1), (3, 2)])
def test_any_other_gain_costs_more_by_the_square_of_the_difference(n, m):
    """J(u) − J* = E ∫ (u − u*)' R (u − u*), which is 0 for u* only."""
    given = general_problem(n, m)
    problem, start = lqg(**given), np.linspace(-1.0, 2.0, n)
    aside, best = np.random.default_rng(0).normal(size=(m, n)), feedback_cost(problem.gain, start, **given)
    for other in (
        lambda t: 0.8 * problem.gain(t),
        lambda t: problem.gain(t) + 0.3 * np.sin(3 * t) * aside,
    ):
        cost, more = feedback_cost(other, start, problem.gain, **given)
        assert more > 1e-4
        assert cost - best == pytest.approx(more, rel=1e-6)


@pytest.mark.parametrize("d", [1, 2, 3, 4])
def test_final_cost_corollary(d):
    """Without a running cost P⁻¹ follows a linear equation, whose solution is an integral."""
    a, q, r, one = -SKEWED[d], 0.7, 0.4, np.eye(d)
    problem = LQG(drift=a, horizon=2.0, final_cost=q * one, control_cost=r * one)
    for left in (2.0, 1.2, 0.0):
        grown = quad_vec(lambda s: expm(-a * s) @ expm(-a.T * s), 0.0, left, epsabs=1e-12)[0] / r
        inverse = expm(-a * left) @ expm(-a.T * left) / q + grown
        assert relative(problem.gain(2.0 - left), np.linalg.inv(inverse) / r) < 1e-10


def test_E1_noise_enters_as_an_increment():
    """With C W dt in place of C dW the end would have variance c² T³/3, not c² T."""
    problem = Diffusion(curvature=1e-9, horizon=5.0, covariance=0.3**2)
    paths, _ = impulse_responses(problem, simulate.uncontrolled, 0.0, [0.0], [[0.0]], 4)
    variance = mean_over_kicks(paths.last[:, 0] ** 2)
    assert variance == pytest.approx(0.3**2 * 5.0, rel=1e-7)
    assert variance != pytest.approx(0.3**2 * 5.0**3 / 3, rel=0.5)


def test_E2_the_printed_sign_of_the_final_cost_equation_is_wrong():
    a, q, r, end, one = SKEWED[2], 0.3, 0.5, 2.0, np.eye(2)
    given = {"drift": a, "input": one, "noise": one, "running_cost": 0 * one}
    given |= {"final_cost": q * one, "control_cost": r * one, "horizon": end}
    problem, start, times = lqg(**given), np.array([1.0, -1.0]), np.linspace(0.0, end, 41)
    printed = backward(lambda p: -(a.T @ p + p @ a - p @ p / r), q * one, end, times)

    def printed_gain(t):
        return np.array([[np.interp(t, times, printed[:, i, j]) for j in (0, 1)] for i in (0, 1)]) / r

    ours = feedback_cost(problem.gain, start, **given)
    assert feedback_cost(printed_gain, start, **given) > 1.2 * ours


def test_E3_a_semidefinite_control_cost_is_refused():
    flat = np.diag([1.0, 0.0])
    with pytest.raises(ValueError, match=r"^Invalid control_cost: "):
        LQG(drift=np.eye(2), horizon=1.0, control_cost=flat)
    assert LQG(drift=np.eye(2), horizon=1.0, control_cost=np.eye(2), running_cost=flat).gain(0.0).any()


# --- lem:scalar-riccati-solution -----------------------------------------------------------------------


def test_scalar_riccati_stays_at_its_fixed_points():
    a, q, r = 0.6, 0.5, 0.4
    upper = r * (a + np.sqrt(a**2 + q / r))
    assert np.allclose(scalar_riccati(a, q, r, upper, 3.0, [0.0, 1.0, 2.9]), upper, rtol=1e-14)
    # q_f = β₋ = 0, where the printed form divides by 0.
    assert np.array_equal(scalar_riccati(a, 0.0, r, 0.0, 3.0, [0.0, 1.0]), [0.0, 0.0])
    assert scalar_riccati(1000.0, 0.0, 1.0, 0.0, 1.0, 0.0) == 0.0  # also where e^(2aT) overflows


# --- thm:optimal_control_relaxed -----------------------------------------------------------------------


def printed_relaxed_gain(alpha, lam, end, time):
    """eq. optimal_control_relaxed_diagonal, in as many digits as are in use."""
    alpha, lam, left, end = (mpmath.mpf(float(x)) for x in (alpha, lam, end - time, end))
    omega = mpmath.sqrt(alpha**2 + 1 / (lam * end))
    e = mpmath.exp(-2 * omega * left)
    return (1 - e) / ((omega + alpha) + (omega - alpha) * e) / (lam * end)


@pytest.mark.parametrize("alpha", [-1.2, -0.1, 0.0, 1e-9, 0.7, 6.0])
@pytest.mark.parametrize("lam", [0.01, 0.4])
def test_relaxed_gain_solves_the_printed_equation(alpha, lam):
    end, times = 5.0, np.array([0.0, 2.7, 4.9])
    found = backward(lambda p: -(2 * alpha * p + p**2 / lam - 1 / end), np.array([0.0]), end, times)[:, 0]
    ours = relaxed_gain(alpha, lam, end, times)
    assert np.allclose(ours, found / lam, rtol=1e-9)
    assert np.allclose(ours, [float(printed_relaxed_gain(alpha, lam, end, t)) for t in times], rtol=1e-12)


def test_E5_the_printed_riccati_solution_has_the_wrong_sign():
    alpha, lam, end, left = 0.7, 0.4, 5.0, 2.3
    omega = np.sqrt(alpha**2 + 1 / (lam * end))
    e = np.exp(-2 * omega * left)
    printed = -lam * (omega - alpha) * (1 - e) / (1 + (omega - alpha) / (omega + alpha) * e)
    ours = lam * relaxed_gain(alpha, lam, end, end - left)
    true = backward(
        lambda p: -2 * alpha * p - p**2 / lam + 1 / end, np.array([0.0]), end, [end - left]
    ).item()
    assert true == pytest.approx(0.116573, abs=1e-6)
    assert ours == pytest.approx(true, rel=1e-10)
    assert printed == pytest.approx(-true, rel=1e-10)


def test_E6_the_gain_needs_its_factor():
    """As printed, the control would not see where the weights are; it would push also at the optimum."""
    problem = Diffusion(curvature=0.5, horizon=10.0, penalty=0.2, covariance=0.1)
    gain = relaxed_gain_far(0.5, 0.2, 10.0)
    with_factor = lambda seen: -gain * seen.weights  # noqa: E731
    as_printed = lambda seen: np.full_like(seen.weights, gain)  # noqa: E731
    none = np.zeros((1, 1))
    for start in (0.0, 2.0):
        right, printed = (
            chain_costs(problem, control, start, [0.0], none, 200)[0] for control in (with_factor, as_printed)
        )
        assert right < 0.6 * printed


def test_E7_the_scale_on_which_the_exponential_vanishes_is_at_most_one_over_two_alpha():
    alpha, lam, end = 0.1, 0.01, 20.0
    scale = 1 / (2 * np.sqrt(alpha**2 + 1 / (lam * end)))
    assert scale == pytest.approx(0.223, abs=1e-3)
    assert not scale >= 1 / (2 * alpha)  # as printed
    # The horizon is 90 such scales, which suffices for the relaxed gain and not for the practical one.
    assert relaxed_gain(alpha, lam, end, 0.0) == pytest.approx(relaxed_gain_far(alpha, lam, end), rel=1e-12)
    assert np.exp(-alpha * end) == pytest.approx(0.135, abs=1e-3)
    exact = original_gains(alpha, lam, end, 0.0).toward
    assert exact / practical_gain(alpha, lam, end) == pytest.approx(1.96, abs=0.01)


def test_E7b_only_one_of_the_two_gains_leads_to_the_algorithm():
    alpha, lam, end = 0.7, 0.3, 50.0
    assert relaxed_gain_far(alpha, lam, end) == pytest.approx(0.0461, abs=5e-5)
    assert practical_gain(alpha, lam, end) == pytest.approx(0.0024, abs=5e-5)
    assert original_gains(alpha, lam, end, 0.0).toward == pytest.approx(0.0024, abs=5e-5)


# --- thm:original_objective and thm:optimal_control_solution -------------------------------------------


def mns_slope(blocks, a, lam):
    """The three printed equations."""
    m, n, s = blocks
    return np.array(
        [
            -a.T @ m - m @ a + n + n.T - m @ m / lam,
            -a.T @ n + s - m @ n / lam,
            -n.T @ n / lam,
        ]
    )


def mns_backward(a, lam, end, times):
    zero = np.zeros_like(a)
    return backward(
        lambda p: mns_slope(p, a, lam), np.array([zero, zero, np.eye(len(a)) / end**2]), end, times
    )


MATRICES = {
    **{f"skewed_{d}": a for d, a in SKEWED.items()},
    "symmetric": np.array([[1.0, 0.4], [0.4, 0.3]]),
    "indefinite": np.array([[0.3, 1.0], [1.0, -0.5]]),
    "nilpotent": np.array([[0.0, 1.0], [0.0, 0.0]]),
    "zero": np.zeros((3, 3)),
    "jordan": np.array([[0.6, 2.0], [0.0, 0.6]]),
    "rotation": np.array([[0.0, -3.0], [3.0, 0.0]]),
    "diagonal": np.diag([0.0, 1e-9, 2.0, -0.7]),
}


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("lam", [0.003, 0.5])
def test_matrix_riccati_is_what_backward_integration_finds(name, lam):
    a, end, times = MATRICES[name], 3.0, [0.0, 1.1, 2.6]
    for time, expected in zip(times, mns_backward(a, lam, end, times), strict=True):
        ours = original_riccati_matrix(a, lam, end, time)
        gain = original_gains_matrix(a, lam, end, time)
        assert max(relative(block, true) for block, true in zip(ours, expected, strict=True)) < 1e-9
        assert relative(gain.toward, expected[0] / lam) < 1e-9
        assert relative(gain.balance, expected[1] / lam) < 1e-9


def test_a_diagonal_matrix_has_the_gains_of_its_entries_which_broadcast():
    alphas = np.array([0.0, 1e-8, 0.3, 2.0, -0.4])
    matrix, apart = (
        original_gains_matrix(np.diag(alphas), 0.02, 5.0, 1.5),
        original_gains(alphas, 0.02, 5.0, 1.5),
    )
    assert np.allclose(matrix.toward, np.diag(apart.toward), rtol=0, atol=1e-14)
    assert np.allclose(matrix.balance, np.diag(apart.balance), rtol=0, atol=1e-14)
    tilted = np.diag(alphas)
    tilted[0, 4] = 1e-13  # a trace of asymmetry takes the way of general matrices
    general = original_gains_matrix(tilted, 0.02, 5.0, 1.5)
    assert np.allclose(general.toward, matrix.toward, rtol=0, atol=1e-12)
    together = original_gains(alphas[:, None], 0.02, 5.0, np.array([0.0, 1.5]))
    assert np.array_equal(together.toward[:, 1], apart.toward)
    assert np.array_equal(together.balance[:, 1], apart.balance)


def test_the_best_cost_of_the_mean_is_that_of_the_moments_and_other_gains_cost_more():
    cost = original_cost(START, ALPHA, PENALTY, HORIZON, VARIANCE)
    assert cost == pytest.approx(0.0694755, abs=5e-8)

    def times(toward, balance):
        def pull(t):
            now = original_gains(ALPHA, PENALTY, HORIZON, min(t, HORIZON))
            return toward * now.toward, balance * now.balance

        return scalar_feedback_cost(pull)

    assert times(1.0, 1.0) == pytest.approx(cost, rel=1e-8)
    assert times(0.8, 0.8) == pytest.approx(0.0717, abs=5e-5)
    assert times(1.2, 1.2) == pytest.approx(0.0709, abs=5e-5)
    for toward, balance in ((0.8, 1.0), (1.2, 1.0), (1.0, 0.8), (1.0, 1.2), (0.0, 0.0)):
        assert times(toward, balance) > 1.003 * cost


def test_best_cost_does_not_depend_on_what_else_is_in_the_array():
    alone = original_cost(0.0, 1.0, 1e8, 1e-3, 1.0)
    assert original_cost(0.0, [1.0, -1.0], 1e8, 1e-3, 1.0)[0] == pytest.approx(alone, rel=1e-12)


# --- Errata of the original objective ------------------------------------------------------------------


def corrected_below(alpha, lam, end, left):
    """αλT² + τ/α − (2/α²)(1 − e) + (1 − e²)/(2α²), eq. optimal_controller_diagonal_nonzero."""
    e = np.exp(-alpha * left)
    return (
        alpha * lam * end**2
        + left / alpha
        - 2 / alpha**2 * (1 - e)
        + (1 - np.exp(-2 * alpha * left)) / (2 * alpha**2)
    )


def cost_with_below(below, lam):
    """J of the printed shape (1 − e)/below · ((1 − e)/α (μ − θ) + ∫ μ − θ)."""

    def pull(t):
        lost = 1 - np.exp(-ALPHA * (HORIZON - t))
        share = lost / below(HORIZON - t)
        return share * lost / ALPHA, share

    return scalar_feedback_cost(pull, penalty=lam)


@pytest.mark.parametrize("lam", [0.001, 0.05])
def test_the_corrected_denominator_is_ours(lam):
    times = np.array([0.0, 1.0, 3.5])
    lost = 1 - np.exp(-ALPHA * (HORIZON - times))
    below = corrected_below(ALPHA, lam, HORIZON, HORIZON - times)
    ours = original_gains(ALPHA, lam, HORIZON, times)
    assert np.allclose(ours.toward, lost**2 / ALPHA / below, rtol=1e-12)
    assert np.allclose(ours.balance, lost / below, rtol=1e-12)
    best = original_cost(START, ALPHA, lam, HORIZON, VARIANCE)
    cost = cost_with_below(lambda left: corrected_below(ALPHA, lam, HORIZON, left), lam)
    assert cost == pytest.approx(best, rel=1e-7)


def test_E8_the_printed_integral_of_h_squared_is_too_large():
    alpha, lam, left = ALPHA, 0.001, 2.5
    e = np.exp(-alpha * left)
    true = quad_vec(lambda s: ((1 - np.exp(-alpha * s)) / alpha) ** 2, 0.0, left)[0]
    printed = left / alpha**2 - 2 * (1 - e) / (2 * alpha**3) + (1 - e**2) / (2 * alpha**3)
    h, g, shrink = gains.integrals(alpha, left)
    assert (h, g, shrink) == pytest.approx(((1 - e) / alpha, true, 1.0), rel=1e-12)
    assert printed - true == pytest.approx((1 - e) / alpha**3, rel=1e-12)
    # S⁻¹ = T² + g/λ: with the printed g its own equation −dS/dt = −N²/λ fails.
    s = original_riccati(alpha, lam, HORIZON, HORIZON - left).s
    assert s == pytest.approx(1 / (HORIZON**2 + true / lam), rel=1e-12)
    assert s != pytest.approx(1 / (HORIZON**2 + printed / lam), rel=0.1)

    def printed_below(left):
        e = np.exp(-alpha * left)
        return alpha * lam * HORIZON**2 + left / alpha - (1 - e) / alpha**2 + (1 - e**2) / (2 * alpha**2)

    assert original_cost(START, alpha, lam, HORIZON, VARIANCE) == pytest.approx(0.0033, abs=5e-5)
    assert cost_with_below(printed_below, lam) == pytest.approx(0.0380, abs=5e-5)


def test_E9_the_printed_penalty_lacks_a_square_of_the_horizon():
    def printed_below(left):
        return corrected_below(ALPHA, PENALTY, HORIZON, left) - ALPHA * PENALTY * (HORIZON**2 - HORIZON)

    assert original_cost(START, ALPHA, PENALTY, HORIZON, VARIANCE) == pytest.approx(0.0695, abs=5e-5)
    assert cost_with_below(printed_below, PENALTY) == pytest.approx(0.0856, abs=5e-5)


def test_E10_the_printed_gain_for_an_unknown_optimum_pushes_away_near_the_end():
    alpha, lam, end, left = 1.0, 1e-3, 4.0, 0.5
    e = np.exp(-alpha * left)
    printed = alpha * lam * end**2 + left / alpha - 3 / (2 * alpha**2) * (1 - e)
    our_below = (1 - e) / original_gains(alpha, lam, end, end - left).balance
    assert (our_below, printed) == pytest.approx((0.045, -0.074), abs=5e-4)
    assert our_below - printed == pytest.approx(e * (1 - e) / (2 * alpha**2), rel=1e-10)


def test_E25_the_exact_gain_grows_until_just_before_the_end():
    """ "Most impactful in the early stages" would have it fall."""
    times = np.linspace(0.0, 20.0, 2001)
    toward, _ = original_gains(1.0, 0.01, 20.0, times)
    assert np.allclose(toward[[0, 500, 1000, 1500, 1800]], [0.044, 0.057, 0.080, 0.131, 0.157], atol=6e-4)
    assert times[np.argmax(toward)] > 0.8 * 20.0
    assert np.all(np.diff(toward[: np.argmax(toward)]) > 0)
    assert toward[-1] == 0.0


# --- Practical control ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lam", "horizon", "ratios"),
    [
        # As λ → 0, the ratio is 1/(1 − 3/(2αT)) but for the exponential.
        (1e-12, 0.5, [1.9636, 1.4040, 1.1764, 1.0526, 1.0152]),
        (1e-12, 20.0, [1.9636, 1.4040, 1.1764, 1.0526, 1.0152]),
        # The penalty is larger than the 3/(2αT) that is dropped, in the end.
        (0.01, 20.0, [1.96, 1.40, 1.17, 1.036, 1.0025]),
    ],
)
def test_practical_gain_needs_many_time_constants(lam, horizon, ratios):
    alpha = np.array([2.0, 5.0, 10.0, 30.0, 100.0]) / horizon
    exact = original_gains(alpha, lam, horizon, 0.0).toward
    assert np.allclose(exact / practical_gain(alpha, lam, horizon), ratios, rtol=0, atol=4e-3)
    assert (exact / practical_gain(alpha, lam, horizon))[-1] == pytest.approx(ratios[-1], abs=5e-5)
    far = exact / original_gain_far(alpha, lam, horizon)
    assert np.allclose(far[1:], [0.983, 0.9999, 1.0, 1.0], rtol=0, atol=5e-4)
    assert far[0] < 0.52  # at αT = 2 what it keeps, 1/2, is too little


@pytest.mark.parametrize("lam", [0.001, 0.3])
def test_original_gain_far_drops_the_exponential_and_nothing_else(lam):
    alpha, end = 0.7, 60.0
    for time in (0.0, 20.0, 40.0):
        left = end - time
        exact = original_gains(alpha, lam, end, time).toward
        e = np.exp(-alpha * left)
        assert original_gain_far(alpha, lam, end, time) == pytest.approx(exact, rel=3 * e + 1e-13)
    assert original_gain_far(alpha, lam, end) == original_gain_far(alpha, lam, end, 0.0)
    shifted = 1 / original_gain_far(alpha, lam, end) + 3 / (2 * alpha)
    assert 1 / shifted == pytest.approx(practical_gain(alpha, lam, end), rel=1e-12)
    assert practical_gain(alpha, lam, end) == pytest.approx(1 / (end + lam * (alpha * end) ** 2), rel=1e-14)


def test_practical_control_pulls_toward_the_mean_so_far():
    problem = Diffusion(curvature=np.diag([0.5, 2.0]), horizon=8.0, penalty=0.1)
    control = simulate.practical(problem)
    weights, integral = np.array([[1.0, 2.0], [0.0, -1.0]]), np.array([[6.0, 2.0], [4.0, 4.0]])
    seen = Seen(time=2.0, start=weights, weights=weights, integral=integral, control=weights)
    matrix = np.linalg.inv(np.eye(2) + 0.1 * problem.matrix @ problem.matrix * 8.0) / 8.0
    assert np.allclose(control(seen), (integral / 2.0 - weights) @ matrix.T, rtol=1e-13)
    now = Seen(time=0.0, start=weights, weights=weights, integral=0 * weights, control=0 * weights)
    assert np.array_equal(control(now), np.zeros((2, 2)))


def test_the_mean_so_far_in_place_of_the_estimate_does_not_help_in_the_model_it_comes_from():
    """The squared error of the returned mean, μ ~ N(0, 4), θ_0 = 3; posterior variance is the least."""
    problem = Diffusion(curvature=1.0, horizon=20.0, penalty=0.01)
    controllers = {
        "none": simulate.uncontrolled,
        "practical": simulate.practical(problem),
        "optimal": simulate.estimating(problem, 0.0, 4.0),
    }
    errors = {
        name: exact_cost(problem, control, 3.0, [0.0], [[2.0]], 400, 0.0)
        for name, control in controllers.items()
    }
    least = simulate.posterior_variance(problem, 4.0)
    assert least == pytest.approx(1 / (1 / 4 + 20), rel=1e-12)
    assert errors["none"] == pytest.approx(0.0785, abs=2e-3)
    assert errors["practical"] == pytest.approx(0.0852, abs=2e-3)
    assert errors["optimal"] == pytest.approx(0.0517, abs=2e-3)
    assert least < errors["optimal"] < errors["none"] < errors["practical"]


# --- The unknown optimum -------------------------------------------------------------------------------


NOISE_2 = np.array([[0.5, 0.3], [0.3, 0.4]])
PRIORS = {
    "full": np.array([[1.0, 0.3], [0.3, 0.5]]),
    "singular": np.outer([1.0, -2.0], [1.0, -2.0]),
    "certain": np.zeros((2, 2)),
}


def some_path(seed):
    start, weights, integral, control = np.random.default_rng(seed).normal(size=(4, 2))
    return Seen(time=1.7, start=start, weights=weights, integral=integral, control=control)


def conditioned(seen, a, noise, mean, prior):
    """μ given Z = A μ t + noise of covariance Σ t, as a joint Gaussian."""
    across, t = seen.time * prior @ a.T, seen.time
    share = across @ np.linalg.inv(t * a @ across + t * noise)
    z = seen.weights - seen.start + a @ seen.integral - seen.control
    return mean + share @ (z - t * a @ mean), prior - share @ across.T


@pytest.mark.parametrize("prior", PRIORS)
def test_E12_the_posterior_in_closed_form_is_the_conditioning_of_a_joint_gaussian(prior):
    """The paper says that there is none. That it is the best estimate of a path: see the affine policies."""
    mean, seen = np.array([0.4, -1.0]), some_path(1)
    ours = posterior(seen, SKEWED[2], NOISE_2, mean, PRIORS[prior])
    expected, spread = conditioned(seen, SKEWED[2], NOISE_2, mean, PRIORS[prior])
    assert np.allclose(ours.mean, expected, rtol=0, atol=1e-12)
    assert np.allclose(ours.covariance, spread, rtol=0, atol=1e-12)


def test_E11_the_estimate_sees_the_noise_off_its_diagonal():
    """The gains do not: no function of them takes a covariance."""
    a, correlated, zero = np.diag([1.0, 0.5]), np.array([[1.0, 0.8], [0.8, 1.0]]), np.zeros(2)
    seen = Seen(time=1.0, start=zero, weights=np.array([1.5, 0.05]), integral=zero, control=zero)
    expected, _ = conditioned(seen, a, correlated, zero, np.eye(2))
    assert np.allclose(posterior(seen, a, correlated, zero, np.eye(2)).mean, expected, rtol=1e-12)
    assert np.allclose(expected, [0.987, -0.296], atol=1e-3)
    assert np.allclose(posterior(seen, a, np.eye(2), zero, np.eye(2)).mean, [0.75, 0.02], rtol=1e-12)


def best_affine_cost(a, noise, penalty, horizon, start, mean, root, steps, relaxed):
    """The least J of all policies that are affine in the weights seen so far, on the Euler chain.

    Affine in the weights is affine in what they would be without control, in which J is a convex quadratic:
    one least-squares problem.
    """
    d, dt = len(a), horizon / steps
    size = d * (1 + steps) + 1  # z = (prior, kicks), and the constant
    mu, theta, kick_root = np.eye(d, size), np.zeros((d, size)), np.linalg.cholesky(noise * dt)
    mu[:, :d], mu[:, -1], theta[:, -1] = root, mean, start
    free = [theta]
    for k in range(steps):
        kick = np.zeros((d, size))
        kick[:, d * (1 + k) : d * (2 + k)] = kick_root
        free.append(free[-1] + dt * a @ (mu - free[-1]) + kick)
    move = np.eye(d) - dt * a
    # What u_k does to θ_j, j > k.
    reach = {
        (j, k): dt * np.linalg.matrix_power(move, j - 1 - k)
        for k in range(steps)
        for j in range(k + 1, steps)
    }
    gaps = [free[j] - mu for j in range(steps)]
    zero = np.zeros((d, d))
    if relaxed:
        weight = np.sqrt(dt / horizon)
        target = weight * np.vstack(gaps)
        push = [weight * np.vstack([reach.get((j, k), zero) for j in range(steps)]) for k in range(steps)]
    else:
        target = dt / horizon * sum(gaps)
        push = [
            dt / horizon * sum((reach.get((j, k), zero) for j in range(steps)), zero) for k in range(steps)
        ]
    columns = []
    for k in range(steps):
        effort = np.zeros((steps * d, d))
        effort[k * d : (k + 1) * d] = np.sqrt(penalty * dt) * np.eye(d)
        does = np.vstack([push[k], effort])
        # The weights at time 0 are the constant start.
        known = [np.eye(1, size, size - 1)] + [free[j] for j in range(1, k + 1)]
        for row in np.vstack(known):
            columns.extend(np.outer(does[:, i], row).reshape(-1) for i in range(d))
    wanted = -np.vstack([target, np.zeros((steps * d, size))]).reshape(-1)
    design = np.array(columns).T
    found = np.linalg.lstsq(design, wanted, rcond=None)[0]
    return np.sum((design @ found - wanted) ** 2)


def certainty_equivalent(a, noise, mean, prior, chain):
    """Of the chain: its own gains from dynamic programming, and the estimate of the package."""

    def control(seen, dt):
        k = chain[round(seen.time / dt)]
        balance = k[:, len(a) :] if k.shape[1] > len(a) else np.zeros_like(a)
        guess = posterior(seen, a, noise, mean, prior).mean
        return certainty_equivalent_control(seen, guess, Gains(toward=k[:, : len(a)], balance=balance))

    return control


UNKNOWN = {
    "scalar": (np.array([[1.0]]), np.array([[0.5]]), [2.0], [0.3], np.array([[1.2]]), 8),
    "longer": (np.array([[1.0]]), np.array([[0.5]]), [2.0], [0.3], np.array([[1.2]]), 16),
    "matrix": (SKEWED[2], NOISE_2, [2.0, -1.0], [0.3, 0.5], np.linalg.cholesky(PRIORS["full"]), 5),
    "singular": (SKEWED[2], NOISE_2, [2.0, -1.0], [0.3, 0.5], np.array([[1.0, 0.0], [-2.0, 0.0]]), 5),
}


@pytest.mark.parametrize("relaxed", [False, True])
@pytest.mark.parametrize("case", UNKNOWN)
def test_certainty_equivalence_is_the_best_of_all_affine_policies(case, relaxed):
    """thm:separation_principle for both objectives, cor:optimal_control_unknown_mustar."""
    a, noise, start, mean, root, steps = UNKNOWN[case]
    lam, end, one = 0.05, 2.0, np.eye(len(a))
    problem = Diffusion(curvature=a, horizon=end, penalty=lam, covariance=noise)
    given = {"drift": -a, "input": one, "running_cost": one / end, "final_cost": 0 * one}
    given |= {"control_cost": lam * one, "horizon": end}
    chain = chain_gains(steps, **(given if relaxed else returned_mean_problem(a, lam, end, one)))
    control = certainty_equivalent(a, noise, mean, root @ root.T, chain)
    best = best_affine_cost(a, noise, lam, end, start, mean, root, steps, relaxed=relaxed)
    for factor in (0.8, 1.0, 1.2):
        cost = chain_costs(
            problem, lambda s, f=factor: f * control(s, end / steps), start, mean, root, steps
        )[relaxed]
        assert cost == pytest.approx(best, rel=1e-10) if factor == 1.0 else cost > 1.001 * best


def test_the_estimate_of_bema_is_the_wide_prior():
    problem = Diffusion(curvature=SKEWED[2], horizon=2.0, penalty=0.05, covariance=NOISE_2)
    bema, wide = (
        simulate.bema_estimating(problem),
        simulate.estimating(problem, [0.0, 0.0], 1e9 * np.eye(2)),
    )
    rng = np.random.default_rng(1)
    start, weights, integral, control = rng.normal(size=(4, 3, 2))
    seen = Seen(time=0.7, start=start, weights=weights, integral=integral, control=control)
    assert np.allclose(bema(seen), wide(seen), rtol=1e-6)
    begin = Seen(time=0.0, start=start, weights=start, integral=0 * start, control=0 * start)
    assert np.array_equal(bema(begin), np.zeros((3, 2)))


# --- The simulation ------------------------------------------------------------------------------------


def law_of_weights_and_integral(a, noise, length):
    """Mean map and covariance of (θ − μ, ∫ θ − μ), integrated."""
    d = len(a)
    flow = np.block([[-a, np.zeros((d, d))], [np.eye(d), np.zeros((d, d))]])
    source = np.zeros((2 * d, 2 * d))
    source[:d, :d] = noise
    spread = backward(lambda s: flow @ s + s @ flow.T + source, np.zeros((2 * d, 2 * d)), length, [0.0])[0]
    return backward(lambda p: flow @ p, np.eye(2 * d), length, [0.0])[0][:, :d], spread


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("steps", [1, 7])
def test_exact_steps_have_the_law_of_the_diffusion_whatever_their_number(d, steps):
    a, length = SKEWED[d], 1.7
    half = np.random.default_rng(d).normal(size=(d, d))
    noise = half @ half.T + 0.1 * np.eye(d)
    problem = Diffusion(curvature=a, horizon=length, covariance=noise)
    start, mu = np.linspace(1.0, 2.0, d), np.linspace(-1.0, 0.5, d)
    paths, _ = impulse_responses(problem, simulate.uncontrolled, start, mu, np.zeros((d, d)), steps)
    reached = np.hstack([paths.last - mu, (paths.mean - mu) * length])
    carried, spread = law_of_weights_and_integral(a, noise, length)
    assert np.allclose(reached[0], carried @ (start - mu), rtol=0, atol=1e-9)
    kicks = reached[1 : 1 + (len(reached) - 1) // 2] - reached[0]
    assert np.allclose(kicks.T @ kicks, spread, rtol=0, atol=1e-9)


@pytest.mark.parametrize("steps", [1, 9])
def test_a_constant_control_is_another_optimum(steps):
    a, mu, start, push = SKEWED[2], np.array([0.3, -0.6]), np.array([2.0, 1.0]), np.array([0.5, -0.2])
    problem = Diffusion(curvature=a, horizon=2.0, covariance=NOISE_2)
    pushed, moved = (
        simulate.simulate(problem, control, start, optimum, steps=steps, paths=3)
        for control, optimum in (
            (lambda seen: np.tile(push, (3, 1)), mu),
            (simulate.uncontrolled, mu + np.linalg.solve(a, push)),
        )
    )
    assert np.allclose(pushed.last, moved.last, rtol=1e-10)
    assert np.allclose(pushed.mean, moved.mean, rtol=1e-10)
    assert np.allclose(pushed.effort, 2.0 * push @ push, rtol=1e-10)
    assert not np.any(moved.effort)


def test_the_controller_sees_the_time_the_start_and_what_was_done():
    problem = Diffusion(curvature=0.7, horizon=2.0)
    times, spent = [], np.zeros((3, 1))

    def control(seen):
        times.append(seen.time)
        assert np.array_equal(seen.start, np.full((3, 1), 1.5))
        assert np.allclose(seen.control, spent)
        u = 0.1 * np.asarray(seen.weights) + seen.time
        spent[:] += 0.25 * u
        return u

    simulate.simulate(problem, control, 1.5, 0.0, steps=8, paths=3)
    assert np.allclose(times, 0.25 * np.arange(8))


@pytest.mark.parametrize("steps", [30, 1])
@pytest.mark.parametrize("alpha", [1.0, 1e3, 1e5])
def test_exact_steps_may_be_as_long_as_the_run(alpha, steps):
    """Without control weights and mean have a known law, however coarse the steps."""
    problem, paths = Diffusion(curvature=alpha, horizon=3.0), 4000
    ended = simulate.simulate(problem, simulate.uncontrolled, 0.0, 0.0, steps=steps, paths=paths, seed=3)
    whole = alpha * 3.0
    spent, twice = -np.expm1(-whole), -np.expm1(-2 * whole)
    last = twice / (2 * alpha)
    mean = (3.0 - 2 * spent / alpha + twice / (2 * alpha)) / (alpha * 3.0) ** 2
    for found, expected in ((ended.last, last), (ended.mean, mean)):
        assert np.var(found) == pytest.approx(expected, rel=4 * np.sqrt(2 / paths))


def test_a_seed_repeats_and_another_does_not():
    problem = Diffusion(curvature=1.0, horizon=2.0)
    one, same, other = (
        simulate.simulate(problem, simulate.uncontrolled, 1.0, 0.0, steps=5, paths=4, seed=seed)
        for seed in (1, 1, 2)
    )
    assert np.array_equal(one.last, same.last)
    assert not np.any(one.last == other.last)
    assert len(np.unique(one.last)) == 4


# --- Accuracy ------------------------------------------------------------------------------------------


SCALES = [1e-12, 1e-9, 1e-6, 1e-3, 2e-3, 0.01, 0.1, 0.49999, 0.5, 0.50001, 1.0, 7.0, 40.0, 800.0, 1e4, 1e6]
BELOW_ZERO = [-x for x in SCALES if x < 800] + [-300.0, -360.0, -700.0, -750.0, -1000.0]
GRID = list(
    itertools.product([*SCALES, *BELOW_ZERO, 0.0], [1e-8, 0.02, 1e3], [1e-3, 1.0, 1e4], [0.0, 0.3, 0.999])
)


def mp_parts(alpha, left):
    """h and g as the paper's integrals, for α ≠ 0 with the corrected factor of E8."""
    alpha, left = mpmath.mpf(float(alpha)), mpmath.mpf(float(left))
    if alpha == 0:
        return left, left**3 / 3
    lost = -mpmath.expm1(-alpha * left)
    lost_twice = -mpmath.expm1(-2 * alpha * left)
    return lost / alpha, (left - 2 * lost / alpha + lost_twice / (2 * alpha)) / alpha**2


def on_grid(reference):
    """Arguments of every row of the grid, and the reference in 60 digits and more."""
    rows = [(scale / end, lam, end, share * end) for scale, lam, end, share in GRID]
    with mpmath.workdps(100):
        expected = [reference(*row) for row in rows]
    return [np.array(column) for column in zip(*rows, strict=True)], expected


def mp_riccati(alpha, lam, end, time):
    h, g = mp_parts(alpha, end - time)
    lam, end = mpmath.mpf(lam), mpmath.mpf(end)
    below = end**2 + g / lam
    return h**2 / below, h / below, 1 / below


def test_original_riccati_and_gains_have_twelve_digits_for_every_curvature():
    (alpha, lam, end, time), expected = on_grid(mp_riccati)
    ours, pull = original_riccati(alpha, lam, end, time), original_gains(alpha, lam, end, time)
    for i, block in enumerate(ours):
        assert np.all(np.isfinite(block))
        assert digits(block, [row[i] for row in expected]) < 1e-12
    for i, gain in enumerate(pull):
        assert np.all(np.isfinite(gain))
        with mpmath.workdps(60):
            wanted = [row[i] / mpmath.mpf(penalty) for row, penalty in zip(expected, lam, strict=True)]
        assert digits(gain, wanted) < 1e-12


def test_relaxed_gains_have_twelve_digits_for_every_curvature():
    def far(alpha, lam, end, _):
        alpha, share = mpmath.mpf(float(alpha)), 1 / (mpmath.mpf(lam) * mpmath.mpf(end))
        return mpmath.sqrt(alpha**2 + share) - alpha

    (alpha, lam, end, time), expected = on_grid(printed_relaxed_gain)
    assert digits(relaxed_gain(alpha, lam, end, time), expected) < 1e-12
    assert digits(relaxed_gain_far(alpha, lam, end), on_grid(far)[1]) < 1e-12


def mp_cost(start, alpha, lam, end, variance):
    h, g = mp_parts(alpha, end)
    lam, end = mpmath.mpf(lam), mpmath.mpf(end)
    noise = lam * mpmath.log1p(g / (lam * end**2))
    return mpmath.mpf(start) ** 2 * h**2 / (end**2 + g / lam) + mpmath.mpf(variance) * noise


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("start", [0.0, 1.3])
def test_original_cost_has_nine_digits_for_every_curvature(sign, start):
    rows = [(s / end, lam, end) for s, lam, end, share in GRID if share == 0 and np.sign(s) in (0, sign)]
    with mpmath.workdps(100):
        expected = [mp_cost(start, *row, 0.49) for row in rows]
    ours = original_cost(start, *(np.array(column) for column in zip(*rows, strict=True)), 0.49)
    assert np.all(np.isfinite(ours))
    assert digits(ours, expected) < 1e-9


def mp_sheared_riccati(scale, rates, vectors, lam, end, time):
    """M, N, S of V diag(rates · scale) V⁻¹: in the coordinates of V all integrals are of exponentials."""
    left, d = mpmath.mpf(float(end - time)), len(rates)
    v = mpmath.matrix(vectors)
    inverse = v**-1
    alphas = [mpmath.mpf(scale) * mpmath.mpf(rate) for rate in rates]
    h = v * mpmath.diag([-mpmath.expm1(-x * left) / x for x in alphas]) * inverse
    mixed, core = inverse * inverse.T, mpmath.matrix(d, d)
    for i, j in np.ndindex(d, d):
        a, b = alphas[i], alphas[j]
        ends = [-mpmath.expm1(-x * left) / x for x in (a, b, a + b)]
        core[i, j] = mixed[i, j] * (left - ends[0] - ends[1] + ends[2]) / (a * b)
    below = mpmath.mpf(end) ** 2 * mpmath.eye(d) + v * core * v.T / mpmath.mpf(lam)
    s = below**-1
    return h.T * s * h, h.T * s, s


# Neither symmetric nor normal: eigenvalues over the first, the vectors, and scales of the eigenvalues.
DECAYING = [1e-12, 1e-6, 0.01, 0.5, 7.0, 800.0, 1e6, -0.3, -2.0]
SHEARS = {
    "triangular": ([1, 2], [[1, 1], [0, 1]], DECAYING),
    "steep": ([1, 0.01], [[1, 3], [2, -1]], DECAYING),
    "full": ([1, 0.5, 3], [[1, 0, 2], [1, 1, 0], [0, -1, 1]], DECAYING),
    # Between the largest and the smallest eigenvalue of T² I + G/λ there are up to 800 digits.
    "saddle": ([-1, 0.9], [[1, 3], [2, -1]], [3.0, 12.0, 30.0, 1000.0]),
}


@pytest.mark.parametrize("name", SHEARS)
def test_a_matrix_that_is_not_symmetric_has_nine_digits(name):
    rates, vectors, scales = SHEARS[name]
    v = np.array(vectors, float)
    for scale, (lam, end) in itertools.product(scales, ((1e-4, 2.0), (1.0, 30.0))):
        a = v @ np.diag(np.array(rates) * scale / end) @ np.linalg.inv(v)
        ours = original_riccati_matrix(a, lam, end, 0.25 * end)
        with mpmath.workdps(1000 if name == "saddle" else 100):
            expected = mp_sheared_riccati(scale / end, rates, vectors, lam, end, 0.25 * end)
        for block, true in zip(ours, expected, strict=True):
            assert relative(block, np.array(true.tolist(), float)) < 1e-9


def test_scalar_riccati_has_nine_digits_also_where_the_printed_form_cancels():
    def printed(a, q, r, qf, left):
        a, q, r, qf, left = (mpmath.mpf(float(x)) for x in (a, q, r, qf, left))
        omega = mpmath.sqrt(a**2 + q / r)
        if omega == 0:
            return qf / (1 + qf * left / r)
        upper, lower = r * (a + omega), r * (a - omega)
        if qf == lower:  # a fixed point, by which the printed form divides
            return qf
        kappa = (qf - upper) / (qf - lower) * mpmath.exp(-2 * omega * left)
        return (upper - kappa * lower) / (1 - kappa)

    drifts = [0.0, *SCALES, *(-x for x in SCALES)]
    rows = [
        row
        for row in itertools.product(
            drifts, [0.0, 1e-20, 1e-3, 1.0], [1e-3, 1.0], [0.0, 1e-9, 2.0], [1.0, 1e-3]
        )
        # Nothing costs anything: a test of its own.
        if row[1] or row[3]
    ]
    with mpmath.workdps(140):
        expected = [printed(*row) for row in rows]
    a, q, r, qf, left = (np.array(column) for column in zip(*rows, strict=True))
    ours = scalar_riccati(a, q, r, qf, left, 0.0)
    assert np.all(np.isfinite(ours))
    assert digits(ours, expected) < 1e-9


@pytest.mark.parametrize("time", [0.0, 4e5])
def test_a_long_way_takes_no_longer_than_a_short_one(time):
    """Doubling: pieces of a fixed length would be a million here, or 10^10 in the second."""
    horizon = 1e6
    found = gains.original_problem(1.0, 0.01, horizon).riccati(time)
    exact = original_riccati(1.0, 0.01, horizon, time)
    expected = np.array([[exact.m, exact.n], [exact.n, exact.s]])
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    matrix = np.array([[1.0, 0.5], [0.0, 1e-4]])
    m = original_riccati_matrix(matrix, 1e-6, 1e4, 0.0).m
    assert np.all(np.isfinite(m)) and np.linalg.eigvalsh(m)[0] > 0
