"""Averages on quadratics and convex losses: every statement by a second route, every erratum shown to fail.

The second routes are written here from the words of the method: updates literally, Lyapunov's equation by
Kronecker products, impulse responses, spectra, grids, simulation. Names with E4, E13, … are the errata of the
theory; in each, what is printed fails where ours holds.
"""

import itertools

import mpmath
import numpy as np
import pytest
import schedulefree
import torch
from scipy.optimize import minimize_scalar

from paceline import Control, attach, averaged_weights
from paceline.control.bounds import alike_factor, convex_bound, convex_bound_tuned
from paceline.control.discrete import Logistic, Pair, PiecewiseLinear, Quadratic, bema, step, train
from paceline.control.family import (
    Setting,
    balance,
    ema,
    ema_nesterov,
    gpa,
    pace,
    right_ratio,
    schedule_free_error,
    speed_factor,
)
from paceline.control.gains import practical_gain
from paceline.control.limits import (
    ar2_variance,
    error_at_equal_speed,
    finite_time_error,
    improvement,
    large_improvement_bound,
    least_limiting_error,
    limiting_error,
    limiting_error_slope,
    optimal_pull,
    sgd_error,
    spectral_radius,
)
from paceline.control.recursion import VARIANTS, Recursion, stylized
from paceline.optim import baselines

pytestmark = pytest.mark.slow  # half a minute together: not part of `make check`

NAN = float("nan")

# --- The second routes --------------------------------------------------------------------------------


def literal(variant, live, average, move, pull, rate):
    """One update in the words of each reading of Algorithm 1; the optimizer's own step is `move`."""
    raw = live + move
    if variant == "pre":
        new = raw + pull * (average - live)
        return new, (1 - rate) * average + rate * new
    if variant == "post":
        new = (1 - pull) * raw + pull * average
        return new, (1 - rate) * average + rate * new
    if variant == "lookahead":
        ahead = (1 - rate) * average + rate * raw
        return (1 - pull) * raw + pull * ahead, ahead
    return (1 - pull) * raw + pull * average, (1 - rate) * average + rate * raw


def chain(variant, a, beta, c):
    """Transition and kick of (live, average), column by column from the literal update."""
    columns = [literal(variant, x, y, -a * x, c, beta) for x, y in ((1.0, 0.0), (0.0, 1.0))]
    return np.array(columns).T, np.array(literal(variant, 0.0, 0.0, -1.0, c, beta))


def radius(matrix):
    return np.max(np.abs(np.linalg.eigvals(matrix)))


def lyapunov(matrix, kick):
    """S = M S M' + kick kick', as one linear system."""
    n = len(matrix)
    flat = np.linalg.solve(np.eye(n * n) - np.kron(matrix, matrix), np.outer(kick, kick).ravel())
    return flat.reshape(n, n)


def stationary(variant, a, beta, c):
    return lyapunov(*chain(variant, a, beta, c))[1, 1]


def moments(matrix, kick, start, noise, steps):
    """E[state state'] step by step, from a known state."""
    second = np.outer(start, start)
    for _ in range(steps):
        second = matrix @ second @ matrix.T + noise * np.outer(kick, kick)
    return second


def impulse_response(phis, length):
    psi = np.zeros(length)
    psi[0] = 1.0
    for k in range(1, length):
        psi[k] = sum(phi * psi[k - i] for i, phi in enumerate(phis, 1) if k >= i)
    return psi


def yule_walker(phis, noise):
    """γ(0) … γ(p) from γ(j) = Σ φ_i γ(|j − i|) + noise·[j = 0], as a linear system."""
    p = len(phis)
    system = np.eye(p + 1)
    for j, i in itertools.product(range(p + 1), range(1, p + 1)):
        system[j, abs(j - i)] -= phis[i - 1]
    return np.linalg.solve(system, noise * np.eye(p + 1)[0])


def ar2_of(a, beta, c):
    """φ₁ and φ₂ of the average, eq. ar_update."""
    return 2 - a - beta - c * (1 - beta), -(1 - beta) * (1 - a - c)


def causal_pairs(count, seed):
    rng = np.random.default_rng(seed)
    while count:
        phi1, phi2 = rng.uniform(-2, 2), rng.uniform(-1, 1)
        if np.max(np.abs(np.roots([1, -phi1, -phi2]))) < 0.95:
            count -= 1
            yield phi1, phi2


def stable_chains(variant, count, seed, largest=0.995):
    rng = np.random.default_rng(seed)
    found = []
    while len(found) < count:
        a, beta, c = rng.uniform(0.01, 1.9), rng.uniform(0.01, 1.0), rng.uniform(-0.4, 1.2)
        if radius(chain(variant, a, beta, c)[0]) < largest:
            found.append((a, beta, c))
    return np.array(found)


def assert_mean(samples, expected, errors=3.0):
    """The mean is the expected one, within so many standard errors."""
    assert abs(np.mean(samples) - expected) < errors * np.std(samples) / np.sqrt(len(samples))


class Recorded:
    """A quadratic around 0 whose noise is known beforehand, so that two methods can have the same."""

    optimum = np.zeros(1)

    def __init__(self, curvature, noise):
        self.size = len(np.atleast_1d(curvature))
        self.curvature, self.noise, self.calls = np.asarray(curvature, float), noise, 0

    def value(self, weights):
        return 0.5 * np.sum(self.curvature * weights**2, axis=-1)

    def gradient(self, weights, rng=None):
        self.calls += 1
        return self.curvature * weights + self.noise[self.calls - 1]


def path(loss, start, lr, pull, rate, steps, variant="pre"):
    """Live weights and averages of every step, by `discrete.step`."""
    pair = Pair(np.array(start, float), np.array(start, float))
    pairs = [pair]
    for _ in range(steps):
        pair = step(pair, loss.gradient(pair.live), lr, pull, rate, variant)
        pairs.append(pair)
    return np.array([p.live for p in pairs]), np.array([p.average for p in pairs])


# --- Yule and Walker ----------------------------------------------------------------------------------


@pytest.mark.parametrize("phis", [(0.5,), (1.2, -0.6), (0.4, -0.3, 0.5), (0.2, 0.1, -0.4, 0.3)])
def test_yule_walker_equations_of_any_order_hold_for_the_impulse_response(phis):
    psi = impulse_response(phis, 2000)
    assert abs(psi[-1]) < 1e-12
    gammas = [0.7 * psi[: 2000 - j] @ psi[j:] for j in range(len(phis) + 1)]
    np.testing.assert_allclose(yule_walker(phis, 0.7), gammas, rtol=1e-10)


def test_ar2_variance_solves_the_yule_walker_equations():
    for phi1, phi2 in causal_pairs(300, seed=1):
        for padded in ((phi1, phi2), (phi1, phi2, 0.0)):
            np.testing.assert_allclose(ar2_variance(phi1, phi2, 0.8), yule_walker(padded, 0.8)[0], rtol=1e-9)


def test_ar2_variance_is_the_energy_of_the_impulse_response_and_of_the_spectrum():
    turns = np.exp(-2j * np.pi * np.arange(4096) / 4096)
    for phi1, phi2 in causal_pairs(100, seed=2):
        energy = np.sum(impulse_response((phi1, phi2), 600) ** 2)
        spectrum = np.mean(1 / np.abs(1 - phi1 * turns - phi2 * turns**2) ** 2)
        np.testing.assert_allclose(ar2_variance(phi1, phi2, 1.0), energy, rtol=1e-9)
        np.testing.assert_allclose(ar2_variance(phi1, phi2, 1.0), spectrum, rtol=1e-9)


def test_ar2_variance_is_reached_from_any_fixed_start():
    """lem:ar2-limiting-variance, by exact moments from X_1 = 40, X_2 = −7 and by simulation."""
    phi1, phi2, noise = 1.1, -0.5, 0.6
    move, kick = np.array([[phi1, phi2], [1.0, 0.0]]), np.array([1.0, 0.0])
    second = moments(move, kick, (-7.0, 40.0), noise, 300)
    np.testing.assert_allclose(ar2_variance(phi1, phi2, noise), second[0, 0], rtol=1e-10)

    rng = np.random.default_rng(3)
    older, newer = np.full(50_000, 40.0), np.full(50_000, -7.0)
    for _ in range(80):
        shock = np.sqrt(noise) * rng.standard_normal(50_000)
        older, newer = newer, phi1 * newer + phi2 * older + shock
    assert_mean(newer**2, ar2_variance(phi1, phi2, noise))


def test_ar2_variance_refuses_exactly_what_is_not_causal():
    rng = np.random.default_rng(4)
    for phi1, phi2 in rng.uniform(-2.5, 2.5, (400, 2)):
        if np.max(np.abs(np.roots([1, -phi1, -phi2]))) < 1:
            assert ar2_variance(phi1, phi2, 1.0) > 0
        else:
            with pytest.raises(ValueError, match="first, second"):
                ar2_variance(phi1, phi2, 1.0)


def test_E4_the_printed_yule_walker_equation_gives_a_negative_variance():
    phi1, phi2 = ar2_of(0.3, 0.2, 0.4)
    noise = 0.2**2
    printed = np.array([[-phi1, 1, 0], [-phi2, -phi1, 1], [1, -phi1, -phi2]])  # γ(1) = φ₁ γ(0)
    negative = np.linalg.solve(printed, [0, 0, noise])[0]
    true = stationary("pre", 0.3, 0.2, 0.4)
    assert negative == pytest.approx(-0.345, abs=5e-4)
    assert true == pytest.approx(0.4495, abs=5e-5)
    np.testing.assert_allclose(ar2_variance(phi1, phi2, noise), true, rtol=1e-12)


# --- The limiting error -------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_limiting_error_solves_lyapunovs_equation(variant):
    draws = stable_chains(variant, 400, seed=5)
    expected = np.array([2.5 * stationary(variant, *draw) for draw in draws])
    np.testing.assert_allclose(limiting_error(*draws.T, 2.5, variant), expected, rtol=1e-9)
    ours = [stylized(*draw, variant).limiting_error(2.5) for draw in draws]
    np.testing.assert_allclose(ours, expected, rtol=1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_limiting_error_is_refused_exactly_where_the_chain_is_unstable(variant):
    rng = np.random.default_rng(6)
    refused = 0
    for a, beta, c in zip(rng.uniform(0.01, 3, 500), rng.uniform(0.02, 1, 500), rng.uniform(-1, 2, 500)):
        if radius(chain(variant, a, beta, c)[0]) < 1:
            assert limiting_error(a, beta, c, variant=variant) > 0
        else:
            refused += 1
            with pytest.raises(ValueError, match=r"speed, rate, pull.*stable"):
                limiting_error(a, beta, c, variant=variant)
            with pytest.raises(ValueError, match=r"recursion.*radius < 1"):
                stylized(a, beta, c, variant).limiting_error()
    assert 50 < refused < 450


@pytest.mark.parametrize("variant", ["pre", "lookahead", "post_raw"])
def test_every_pull_from_0_to_1_is_stable_below_speed_1(variant):
    grid = np.linspace(0.001, 0.999, 12)
    for a, beta, c in itertools.product(grid, grid, np.linspace(0, 1, 11)):
        assert radius(chain(variant, a, beta, c)[0]) < 1


def test_the_limiting_error_is_that_of_a_simulation():
    a, beta, c, sigma, lr = 0.3, 0.2, 0.4, 1.5, 0.5
    loss = Quadratic(curvature=[a / lr], sigma=sigma)
    for variant in VARIANTS:
        ended = train(loss, [2.0], lr=lr, pull=c, rate=beta, steps=150, paths=20_000, seed=7, variant=variant)
        assert_mean(ended.average[:, 0] ** 2, limiting_error(a, beta, c, (lr * sigma) ** 2, variant))


def test_the_limiting_error_is_eq_gamma_0_as_printed():
    a, beta, c = stable_chains("pre", 200, seed=8).T
    b = 1 - beta
    above = beta * (2 - a - beta + a * beta - c * b)
    below = a * (a + beta - a * beta + c * b) * (4 - 2 * a - 2 * beta + a * beta - 2 * c * b)
    np.testing.assert_allclose(limiting_error(a, beta, c), above / below, rtol=1e-9)


ROWS = {
    0.05: [(3.451, 0.98046), (3.333, 0.98118), (3.508, 0.98002), (3.451, 0.98046)],
    0.5: [(0.874, 0.99562), (0.456, 0.99772), (0.912, 0.99543), (0.874, 0.99562)],
    1.0: [(0.478, 0.99761), (0.0, 1.0), (0.501, 0.99750), (0.478, 0.99761)],
}


@pytest.mark.parametrize(("c", "row"), ROWS.items())
def test_the_four_readings_at_speed_and_rate_a_twentieth(c, row):
    for variant, (error, left) in zip(VARIANTS, row):
        assert limiting_error(0.05, 0.05, c, variant=variant) == pytest.approx(error, abs=5.1e-4)
        assert spectral_radius(0.05, 0.05, c, variant) == pytest.approx(left, abs=5.1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_spectral_radius_is_the_speed_at_which_a_start_is_forgotten(variant):
    for a, beta, c in stable_chains(variant, 100, seed=9):
        matrix, _ = chain(variant, a, beta, c)
        roots = np.abs(np.roots([1, -np.trace(matrix), np.linalg.det(matrix)]))
        np.testing.assert_allclose(spectral_radius(a, beta, c, variant), roots.max(), rtol=1e-7)
        log = 0.0  # of the norm of M^4096, whose 4096th root it is
        for _ in range(12):
            size = np.linalg.norm(matrix, 2)
            matrix, log = matrix @ matrix / size**2, 2 * (log + np.log(size))
        np.testing.assert_allclose(spectral_radius(a, beta, c, variant), np.exp(log / 4096), rtol=5e-3)


def test_the_error_of_sgd_is_a_geometric_sum_and_a_simulation():
    for a in (0.01, 0.3, 1.0, 1.9):
        np.testing.assert_allclose(sgd_error(a, 0.7), 0.7 * np.sum((1 - a) ** (2 * np.arange(5000))))
        np.testing.assert_allclose(sgd_error(a), limiting_error(a, 1.0, 0.3), rtol=1e-12)  # rate 1: live
    loss = Quadratic(curvature=[0.4], sigma=2.0)
    ended = train(loss, [1.0], lr=0.5, pull=0.0, rate=0.1, steps=80, paths=20_000, seed=10)
    assert_mean(ended.live[:, 0] ** 2, sgd_error(0.2, 1.0))


def test_the_slope_of_the_limiting_error_is_its_derivative():
    """Of the solution of Yule and Walker's equations, in 40 digits."""

    def exact(a, beta, c):
        phi1, phi2 = ar2_of(a, beta, c)
        system = mpmath.matrix([[1, -phi1, -phi2], [-phi1, 1 - phi2, 0], [-phi2, -phi1, 1]])
        return mpmath.lu_solve(system, mpmath.matrix([beta**2, 0, 0]))[0]

    with mpmath.workdps(40):
        for draw in stable_chains("pre", 60, seed=11):
            a, beta, c = map(mpmath.mpf, draw)
            h = mpmath.mpf(10) ** -12
            slope = (exact(a, beta, c + h) - exact(a, beta, c - h)) / (2 * h)
            np.testing.assert_allclose(limiting_error_slope(*draw), float(slope), rtol=1e-9)


def test_the_slope_at_no_pull_is_the_printed_one():
    for a, beta in np.random.default_rng(12).uniform(0.01, 0.99, (50, 2)):
        inner = (1 - beta) ** 2 * (1 - a) ** 2 + (1 - beta) * (2 - a) + (1 - a)
        below = a * (2 - a) ** 2 * (2 - beta) ** 2 * (a + beta - a * beta) ** 2
        np.testing.assert_allclose(
            limiting_error_slope(a, beta, 0.0), -2 * beta * (1 - beta) * inner / below, rtol=1e-9
        )


@pytest.mark.parametrize(("a", "beta"), [(0.9, 0.3), (0.1, 0.05), (0.97, 0.6), (0.5, 0.9)])
def test_the_best_pull_is_that_of_a_grid_search(a, beta):
    edge = (2 - a - beta + a * beta / 2) / (1 - beta)  # of stability
    wide = np.linspace(0, edge, 40_002)[1:-1]
    values = 0.3 * ar2_variance(*ar2_of(a, beta, wide), beta**2)
    assert optimal_pull(a, beta, clipped=False) == pytest.approx(wide[np.argmin(values)], abs=2 * wide[0])
    np.testing.assert_allclose(least_limiting_error(a, beta, 0.3), values.min(), rtol=1e-6)

    allowed = np.linspace(0, 1, 4001)
    errors = [stationary("pre", a, beta, c) for c in allowed]
    assert optimal_pull(a, beta) == pytest.approx(allowed[np.argmin(errors)], abs=5e-4)


def test_the_best_pull_is_over_1_up_to_speed_three_quarters():
    a, beta = np.meshgrid(np.linspace(0.001, 0.75, 200), np.linspace(0.001, 0.999, 200))
    assert np.all(optimal_pull(a, beta, clipped=False) >= 1 - 1e-12)
    assert np.all(optimal_pull(a, beta) >= 1 - 1e-12)
    assert optimal_pull(0.9, 0.3) == pytest.approx(0.786, abs=5e-4)
    assert np.any(optimal_pull(0.8, beta) < 1)


# --- After finitely many steps ------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 7, 64, 333])
def test_the_error_after_so_many_steps_follows_the_moments_step_by_step(variant, steps):
    for draw in stable_chains(variant, 20, seed=13, largest=1.02):
        second = moments(*chain(variant, *draw), (1.7, 1.7), 0.3, steps)
        np.testing.assert_allclose(
            finite_time_error(*draw, 1.7, 0.3, steps, variant), second[1, 1], rtol=1e-8
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_error_after_so_many_steps_is_that_of_a_simulation(variant):
    loss = Quadratic(curvature=[0.5], sigma=1.0, center=[4.0])
    ended = train(loss, [7.0], lr=0.2, pull=0.3, rate=0.15, steps=11, paths=40_000, seed=14, variant=variant)
    expected = finite_time_error(0.1, 0.15, 0.3, 3.0, 0.2**2, 11, variant)
    assert_mean((ended.average[:, 0] - 4.0) ** 2, expected)


def test_another_readout_is_another_mixture_of_live_and_average():
    matrix, kick = chain("pre", 0.2, 0.1, 0.3)
    mixed = stylized(0.2, 0.1, 0.3, readout=(0.25, 0.75))
    weights = np.array([0.25, 0.75])
    np.testing.assert_allclose(mixed.limiting_error(), weights @ lyapunov(matrix, kick) @ weights)
    second = moments(matrix, kick, (2.0, 2.0), 0.5, 9)
    np.testing.assert_allclose(mixed.error_after(9, 2.0, 0.5), weights @ second @ weights)


# --- The catch: at equal speed no pull is best ---------------------------------------------------------


def least_error_on_level(rho, c, count=100_001):
    """Least a²γ₀ of all (a, β) with that spectral radius.

    The characteristic polynomial is linear in a: for each β, a follows from a root at ρ, at −ρ, or from a
    complex pair of modulus ρ, and the other root from their product.
    """
    beta = np.append(np.geomspace(1e-6, 1, count), 1 - rho)
    if c == 0:  # the roots are 1 − a and 1 − β: one is at ρ, the other not over it
        over = beta[beta >= 1 - rho]
        legs = [(np.full_like(over, 1 - rho), over), (over, np.full_like(over, 1 - rho))]
    else:
        legs = []
        with np.errstate(divide="ignore", invalid="ignore"):
            linear, constant = 2 - beta - c * (1 - beta), (1 - beta) * (1 - c)
            for z in (rho, -rho):
                a = -(z**2 - linear * z + constant) / (z - (1 - beta))
                inside = (a > 0) & (np.abs((1 - beta) * (1 - a - c) / z) <= rho)
                legs.append((a[inside], beta[inside]))
            a = 1 - c - rho**2 / (1 - beta)
            inside = (a > 0) & (np.abs(linear - a) < 2 * rho)
            legs.append((a[inside], beta[inside]))
    least = np.inf
    for a, rate in legs:
        phi1, phi2 = ar2_of(a, rate, c)
        gamma1 = phi1 / (1 - phi2)
        gamma0 = rate**2 / (1 - phi1 * gamma1 - phi2 * (phi1 * gamma1 + phi2))
        least = min(least, np.min(a**2 * gamma0, initial=np.inf))
    return least


SPEEDS = [
    (0.99, 0.0, 0.002513),
    (0.99, 0.001, 0.003187),
    (0.99, 0.01, 0.004024),
    (0.99, 0.05, 0.004598),
    (0.99, 0.2, 0.004883),
    (0.99, 1.0, 0.005026),
    (0.9, 0.0, 0.02639),
    (0.9, 1.0, 0.05263),
    (0.999, 0.0, 0.000250),
    (0.999, 1.0, 0.000500),
]


@pytest.mark.parametrize(("rho", "c", "known"), SPEEDS)
def test_the_least_error_at_equal_speed_is_that_of_a_dense_scan(rho, c, known):
    ours = error_at_equal_speed(rho, c)
    np.testing.assert_allclose(ours, least_error_on_level(rho, c), rtol=1e-6)
    assert ours == pytest.approx(known, rel=1e-3)


@pytest.mark.parametrize("rho", [0.05, 0.5, 0.9, 0.99, 0.999])
def test_at_equal_speed_a_pull_never_helps(rho):
    pulls = [0.0, 1e-4, 1e-3, 0.01, 0.05, 0.2, 0.5, 1.0]
    errors = [least_error_on_level(rho, c) for c in pulls]
    sgd = (1 - rho) ** 2 * sgd_error(1 - rho)
    assert np.all(np.diff(errors) > -1e-12 * sgd)
    np.testing.assert_allclose([error_at_equal_speed(rho, c) for c in pulls], errors, rtol=1e-5)
    np.testing.assert_allclose(errors[-1], sgd, rtol=1e-6)
    assert errors[0] / sgd == pytest.approx(0.5, abs=0.06) or rho < 0.5


def test_the_least_error_at_equal_speed_needs_small_rates_near_radius_1():
    a, beta, c = 1.34482e-5, 1.29e-5, 1e-6
    assert spectral_radius(a, beta, c) == pytest.approx(0.99999, abs=1e-9)
    assert error_at_equal_speed(0.99999, c) < 1.001 * a**2 * limiting_error(a, beta, c)


def test_the_least_error_at_equal_speed_is_found_without_warnings_at_a_small_radius():
    np.testing.assert_allclose(error_at_equal_speed(0.3, 1.0), least_error_on_level(0.3, 1.0), rtol=1e-6)


# --- The two propositions -----------------------------------------------------------------------------


def test_a_small_pull_beats_the_average_which_beats_sgd():
    """prop:improved_convergence_quadratic, both strict inequalities."""
    for a, beta in np.random.default_rng(15).uniform(0.01, 0.99, (150, 2)):
        plain = stationary("pre", a, beta, 0.0)
        assert stationary("pre", a, beta, 1e-3) < plain < 1 / (1 - (1 - a) ** 2)
        best = float(optimal_pull(a, beta))
        for c in np.linspace(0, best, 9)[1:]:
            ratio = stationary("pre", a, beta, c) / plain
            assert ratio < 1
            np.testing.assert_allclose(improvement(a, beta, c), ratio, rtol=1e-9)


def test_the_same_order_in_three_dimensions_by_simulation():
    loss = Quadratic(curvature=[0.2, 0.5, 1.2], sigma=1.0)
    runs = [
        train(loss, np.zeros(3), lr=0.5, pull=c, rate=0.2, steps=150, paths=4000, seed=16)
        for c in ([0.3, 0.2, 0.4], 0.0)
    ]
    controlled, plain, live = (loss.value(w) for w in (runs[0].average, runs[1].average, runs[1].live))
    for better, worse in ((controlled, plain), (plain, live)):
        gap = worse - better
        assert gap.mean() > 5 * gap.std() / np.sqrt(len(gap))


def test_the_improvement_of_a_full_pull_is_at_most_twice_the_speed():
    """prop:arbitrarily_large_improvement."""
    for a in np.geomspace(1e-4, 0.1249, 30):
        for beta in a * np.array([1e-3, 0.1, 0.5, 0.9, 1 - 1e-9]):
            ratio = stationary("pre", a, beta, 1.0) / stationary("pre", a, beta, 0.0)
            assert ratio <= 2 * a
            assert ratio <= large_improvement_bound(a, beta) <= 8 * a
            np.testing.assert_allclose(improvement(a, beta, 1.0), ratio, rtol=1e-6)
    for epsilon in (1e-1, 1e-3, 1e-5):
        assert improvement(epsilon / 2, epsilon / 4, 1.0) < epsilon


def test_two_is_the_least_constant_of_the_improvement():
    speeds = np.geomspace(1e-5, 0.12, 40)
    worst = [float(improvement(a, a * (1 - 1e-12), 1.0)) / a for a in speeds]
    assert worst[0] == pytest.approx(2, abs=1e-4)
    assert np.all(np.diff(worst) < 0)


def test_E17_the_printed_comparison_is_with_sgd_and_its_constant_is_not_tight():
    a, beta = 0.1, 0.05
    full, plain, sgd = stationary("pre", a, beta, 1.0), stationary("pre", a, beta, 0.0), 1 / (a * (2 - a))
    assert full == pytest.approx(0.229, abs=5e-4)
    assert 8 * a * plain == pytest.approx(1.38, abs=5e-3)
    assert 8 * a * sgd == pytest.approx(4.21, abs=5e-3)
    assert full <= large_improvement_bound(a, beta) * plain < 8 * a * plain < 8 * a * sgd
    # The proof's last step needs a third factor to be over 1 that it does not mention; it is.
    assert 1 <= 2 - a - beta + a * beta < 2
    for a in np.geomspace(1e-4, 0.1249, 40):
        assert improvement(a, a * (1 - 1e-9), 1.0) < 2.00001 * a < 8 * a


def test_E18_the_average_is_of_the_new_weights():
    a, beta, c = 0.1, 0.05, 0.3
    printed = np.array([[1 - a - c, c], [beta, 1 - beta]]), np.array([-1.0, 0.0])  # of θ_k, not θ_{k+1}
    ours = limiting_error(a, beta, c)
    assert lyapunov(*printed)[1, 1] == pytest.approx(0.5627, abs=5e-5)
    assert ours == pytest.approx(0.5823, abs=5e-5)
    loss = Quadratic(curvature=[a], sigma=1.0)
    ended = train(loss, [0.0], lr=1.0, pull=c, rate=beta, steps=400, paths=20_000, seed=17)
    assert_mean(ended.average[:, 0] ** 2, ours)
    at_zero = np.array([[1 - a, 0.0], [beta, 1 - beta]]), np.array([-1.0, 0.0])
    np.testing.assert_allclose(lyapunov(*at_zero)[1, 1], limiting_error(a, beta, 0.0))  # alike without pull


def test_E19_the_stray_zero_would_delete_the_pull_toward_the_average():
    a, beta, c = 0.1, 0.05, 0.3
    live = 1 - a - c  # θ' = (1 − a − c) θ + c · E · 0 − ηξ
    printed = np.array([[live, 0.0], [beta * live, 1 - beta]]), np.array([-1.0, -beta])
    wrong = lyapunov(*printed)[1, 1]
    assert wrong < 0.3 * limiting_error(a, beta, c)
    np.testing.assert_allclose(limiting_error(a, beta, c), stationary("pre", a, beta, c), rtol=1e-12)


# --- Every convex loss --------------------------------------------------------------------------------


def pieces(seed, n=12, d=3):
    rng = np.random.default_rng(seed)
    return PiecewiseLinear(slopes=rng.standard_normal((n, d)), offsets=rng.standard_normal(n))


class Deal:
    """A generator that deals every draw there is, one to each path."""

    def __init__(self, draws):
        self.draws = np.asarray(draws)

    def integers(self, high, size):
        assert self.draws.shape == size
        assert self.draws.max() < high
        return self.draws


def test_the_proofs_auxiliary_point_moves_by_the_gradient_alone():
    """x = E + βB⁻¹(I − C)r moves by −βηB⁻¹g, r by (1 − β)((I − C)r − ηg)."""
    rng = np.random.default_rng(18)
    beta, lr, c = 0.15, 0.3, np.array([0.0, 0.2, 0.7, 1.0])
    whole = beta * np.eye(4) + (1 - beta) * np.diag(c)
    inverse = np.linalg.inv(whole)

    def x_of(pair):
        return pair.average + beta * inverse @ (np.eye(4) - np.diag(c)) @ (pair.live - pair.average)

    pair = Pair(rng.standard_normal(4), rng.standard_normal(4))
    for _ in range(20):
        g = rng.standard_normal(4)
        new = step(pair, g, lr, c, beta)
        np.testing.assert_allclose(x_of(new), x_of(pair) - beta * lr * inverse @ g, atol=1e-13)
        gap = (1 - beta) * ((1 - c) * (pair.live - pair.average) - lr * g)
        np.testing.assert_allclose(new.live - new.average, gap, atol=1e-13)
        pair = new


def constants_of(pull, beta, lipschitz, sigma, distance):
    """D_C² and the factor of Ση², read off the bound at two learning rates."""
    one, two = (2 * lr * convex_bound([lr], pull, beta, lipschitz, sigma, distance) for lr in (1.0, 2.0))
    factor = (two - one) / 3
    return one - factor, factor


def test_the_constants_of_the_convex_bound_are_those_of_the_proof():
    """As operator norms: K_C = |I − βB⁻¹(I − C)|, and the sum of the powers of (1 − β)|I − C|."""
    rng = np.random.default_rng(19)
    for _ in range(100):
        c, beta, way = rng.uniform(0, 1, 3), rng.uniform(0.01, 0.99), rng.standard_normal(3)
        g, sigma = rng.uniform(0.1, 3, 2)
        whole = beta * np.eye(3) + (1 - beta) * np.diag(c)
        k = np.linalg.norm(np.eye(3) - beta * np.linalg.inv(whole) @ (np.eye(3) - np.diag(c)), 2)
        powers = 1 / (1 - (1 - beta) * np.linalg.norm(np.eye(3) - np.diag(c), 2))
        v = np.sqrt(g**2 + sigma**2)
        d2, factor = constants_of(c, beta, g, sigma, way)
        np.testing.assert_allclose(d2, way @ whole @ way / beta, rtol=1e-9)
        np.testing.assert_allclose(factor, v**2 + 2 * g * k * (1 - beta) * v * powers, rtol=1e-9)


def test_the_bound_of_varying_rates_weighs_them_as_the_theorem_says():
    rates = np.array([0.5, 0.3, 0.3, 0.05])
    args = [0.2, 0.6], 0.1, 1.3, 0.4, [1.0, -2.0]
    d2, factor = constants_of(*args)
    expected = (d2 + factor * np.sum(rates**2)) / (2 * np.sum(rates))
    np.testing.assert_allclose(convex_bound(rates, *args), expected, rtol=1e-12)


def test_the_tuned_bound_is_the_least_over_all_learning_rates():
    rng = np.random.default_rng(20)
    for steps in (1, 17, 400):
        c, way = rng.uniform(0, 1, 3), rng.standard_normal(3)
        args = c, rng.uniform(0.02, 0.9), rng.uniform(0.1, 2), rng.uniform(0, 2), way
        found = minimize_scalar(
            lambda log, steps=steps, args=args: convex_bound(np.full(steps, np.exp(log) / steps**0.5), *args),
            bounds=(-12, 8),
            method="bounded",
            options={"xatol": 1e-9},
        )
        tuned = convex_bound_tuned(steps, *args)
        np.testing.assert_allclose(tuned.tight, found.fun, rtol=1e-9)
        np.testing.assert_allclose(tuned.lr, np.exp(found.x), rtol=1e-4)
        np.testing.assert_allclose(
            tuned.tight, convex_bound(np.full(steps, tuned.lr / steps**0.5), *args), rtol=1e-12
        )


def test_the_tight_bound_is_never_over_the_loose_one():
    rng = np.random.default_rng(21)
    closest = 0.0
    for _ in range(500):
        beta, g, sigma = rng.uniform(0.001, 0.999), rng.uniform(0.01, 3), rng.uniform(0, 3)
        c, way = rng.choice([0.0, 1.0, rng.random()], 4), rng.standard_normal(4)
        tight, loose, _ = convex_bound_tuned(9, c, beta, g, sigma, way)
        closest = max(closest, tight / loose)
        v = np.hypot(g, sigma)
        np.testing.assert_allclose(loose, np.sqrt(2 - beta) / beta * np.linalg.norm(way) * v / 3)
    assert closest <= 1
    # Attained where nothing of the proof is given away: one coordinate free, the way along a pulled one.
    worst = convex_bound_tuned(9, [0.0, 1.0], 0.3, 1.0, 0.0, [0.0, 1.0])
    assert worst.tight / worst.loose == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_the_bound_holds_for_random_piecewise_linear_losses(seed):
    """thm:convex_convergence_general, its corollary and tuned form, on the flat mean of a simulation."""
    rng = np.random.default_rng(100 + seed)
    loss = pieces(seed, n=int(rng.integers(3, 20)), d=int(rng.integers(1, 5)))
    d = loss.slopes.shape[1]
    c, beta, start = rng.uniform(0, 1, d), rng.uniform(0.05, 0.6), 3 * rng.standard_normal(d)
    args = c, beta, loss.lipschitz, loss.sigma, start - loss.optimum
    tuned = convex_bound_tuned(120, *args)
    best, first = float(loss.value(loss.optimum)), 0.4
    for lr, bound in (
        (tuned.lr / 120**0.5, tuned.tight),
        (0.1, convex_bound(np.full(120, 0.1), *args)),
        (lambda k: first / k**0.5, convex_bound(first / np.sqrt(np.arange(1, 121)), *args)),
    ):
        ended = train(loss, start, lr=lr, pull=c, rate=beta, steps=120, paths=400, seed=seed)
        excess = loss.value(ended.flat) - best
        slack = (excess.mean() + 3 * excess.std() / 20) / bound
        assert 0 < slack < 1


def test_the_loss_of_pieces_is_what_it_says():
    loss = pieces(22, n=9, d=2)
    rng = np.random.default_rng(23)
    points = rng.standard_normal((50, 2)) * 2
    exact = np.array([np.mean([abs(a @ w - b) for a, b in zip(loss.slopes, loss.offsets)]) for w in points])
    np.testing.assert_allclose(loss.value(points), exact)
    for w in points:
        dealt = loss.gradient(np.tile(w, (9, 1)), Deal(np.arange(9)))
        numeric = [(loss.value(w + h) - loss.value(w - h)) / 2e-7 for h in 1e-7 * np.eye(2)]
        np.testing.assert_allclose(dealt.mean(axis=0), numeric, atol=1e-6)  # unbiased
        assert np.linalg.norm(dealt.mean(axis=0)) <= loss.lipschitz
        assert np.mean(np.sum((dealt - dealt.mean(axis=0)) ** 2, axis=1)) <= loss.sigma**2
    near = loss.optimum + rng.standard_normal((2000, 2)) * np.geomspace(1e-6, 3, 2000)[:, None]
    assert np.all(loss.value(near) >= loss.value(loss.optimum) - 1e-12)
    line = PiecewiseLinear(slopes=np.ones((5, 1)), offsets=np.array([3.0, -1, 8, 2, 40]))
    np.testing.assert_allclose(line.optimum, [3.0])  # the median


def test_E13_no_factor_is_lost_before_d_c():
    """D_C² is the proof's first telescoped term, β⁻¹ x_1'Bx_1 with x_1 = θ_1 − μ, and no multiple of it."""
    beta, c, way = 0.2, np.array([0.1, 0.9]), np.array([1.5, -0.5])
    first = way @ np.diag(beta + (1 - beta) * c) @ way / beta
    d2, _ = constants_of(c, beta, 1.0, 0.5, way)
    printed_matrix = way @ (np.eye(2) + (1 - beta) / beta * np.diag(c)) @ way
    np.testing.assert_allclose([d2, printed_matrix], first, rtol=1e-9)
    for lost in (beta, 1 / beta, 0.5, 2.0):
        assert abs(lost * printed_matrix / first - 1) > 0.4


class Corner:
    """|θ|: convex, 1-Lipschitz, without noise."""

    size = 1
    optimum = np.zeros(1)

    def value(self, weights):
        return np.abs(weights)[..., 0]

    def gradient(self, weights, rng):
        return np.sign(weights)


def test_E15_without_control_the_printed_noise_term_is_too_small():
    beta, lr, steps = 0.1, 1.0, 40
    g = np.array([0.6, -0.8])
    assert beta * g @ np.linalg.inv(beta * np.eye(2)) @ g == pytest.approx(g @ g)  # C = 0; not β |g|²
    # A bound made of β η² V² is broken by the simplest of losses.
    ended = train(Corner(), [lr / 4], lr=lr, pull=0.0, rate=beta, steps=steps)
    reached = Corner().value(ended.flat)[0]
    printed = ((lr / 4) ** 2 + beta * lr**2 * steps) / (2 * lr * steps)
    assert printed < reached < convex_bound(np.full(steps, lr), 0.0, beta, 1.0, 0.0, [lr / 4])


def test_E16_the_mean_begins_with_the_point_from_which_the_distance_is_taken():
    ended = train(Corner(), [1.0], lr=1.0, pull=0.0, rate=0.5, steps=1)
    assert ended.flat == 1.0
    assert ended.live == 0.0
    reached = Corner().value(ended.flat)[0]
    assert reached <= convex_bound([1.0], 0.0, 0.5, 1.0, 0.0, [1.0])
    assert reached > convex_bound([1.0], 0.0, 0.5, 1.0, 0.0, ended.live[0])  # θ_1 of k = 0 … T − 1
    # Σ η_k |r_k| is bounded by sums to k = T, not to T − 1: after one step the printed ones are empty.
    beta, live, average = 0.5, *train(Corner(), [5.0], lr=1.0, pull=0.2, rate=0.5, steps=1)[:2]
    gap = abs(float(live[0, 0] - average[0, 0]))
    printed = sum((1 - beta) * 1.0 for k in range(1, 2) for _ in range(k - 1))
    right = sum((1 - beta) * 1.0 for k in range(1, 3) for _ in range(k - 1))
    assert printed < gap <= right


def test_the_sum_of_the_gaps_is_bounded_as_in_the_proof():
    rng = np.random.default_rng(24)
    beta, c, lrs = 0.2, np.array([0.1, 0.7]), 1 / np.sqrt(np.arange(1, 200))
    pair, total = Pair(np.zeros(2), np.zeros(2)), 0.0
    for lr in lrs:
        total += lr * np.linalg.norm(pair.live - pair.average)
        g = rng.standard_normal(2)
        pair = step(pair, g / np.linalg.norm(g), lr, c, beta)
    assert 0 < total <= (1 - beta) / (beta + (1 - beta) * c.min()) * np.sum(lrs**2)


@pytest.mark.parametrize("c", [0.0, 0.01])
def test_E26_the_theorem_is_false_for_the_returned_average(c):
    beta, lr, steps, start = 0.9, 1.0, 400, 0.97
    ended = train(Corner(), [start], lr=lr, pull=c, rate=beta, steps=steps)
    bound = convex_bound(np.full(steps, lr), c, beta, 1.0, 0.0, [start])
    assert Corner().value(ended.flat)[0] < bound < Corner().value(ended.average)[0]


def test_E27_the_factor_can_be_improved_if_all_coordinates_are_pulled_alike():
    worst = 0.0
    for beta in (0.01, 0.1, 0.5):
        for c in np.linspace(0, 1, 201):
            tuned = convex_bound_tuned(25, np.full(3, c), beta, 2.0, 0.0, [1.0, 2.0, -2.0])
            sgd = 3.0 * 2.0 / 5  # |θ_1 − μ| V/√T
            np.testing.assert_allclose(alike_factor(beta, c), tuned.tight / sgd, rtol=1e-12)
            assert alike_factor(beta, c) <= np.sqrt(3 / beta - 2) + 1e-12
            assert alike_factor(beta, c) < np.sqrt(2 - beta) / beta  # what "cannot be improved"
            noisy = convex_bound_tuned(25, np.full(3, c), beta, 1.2, 1.6, [1.0, 2.0, -2.0])
            assert noisy.tight <= tuned.tight + 1e-12  # the same V
            worst = max(worst, float(alike_factor(beta, c)) if beta == 0.01 else 0.0)
    assert worst**2 == pytest.approx(298, abs=0.5)
    loose = convex_bound_tuned(25, 1.0, 0.01, 2.0, 0.0, [3.0]).loose / (3.0 * 2.0 / 5)
    assert loose**2 == pytest.approx(19900)


# --- The update ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_is_the_literal_update_with_steps_counted_from_1(variant):
    rng = np.random.default_rng(25)
    noise = rng.standard_normal((30, 1, 3))
    curvature, c = np.array([0.3, 1.0, 2.0]), np.array([0.0, 0.5, 0.9])
    start = rng.standard_normal(3)
    ended = train(
        Recorded(curvature, noise),
        start,
        lr=lambda k: 0.5 / k,
        pull=lambda k: c / k,
        rate=lambda k: (1 + k) ** -0.5,
        steps=30,
        variant=variant,
    )
    live, average, flat = start, start, []
    for k in range(1, 31):
        flat.append(live)
        g = curvature * live + noise[k - 1, 0]
        live, average = literal(variant, live, average, -0.5 / k * g, c / k, (1 + k) ** -0.5)
    np.testing.assert_allclose(ended.live[0], live, rtol=1e-12)
    np.testing.assert_allclose(ended.average[0], average, rtol=1e-12)
    np.testing.assert_allclose(ended.flat[0], np.average(flat, axis=0, weights=1 / np.arange(1, 31)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_pull_every_variant_is_sgd_with_an_average_beside_it(variant):
    noise = np.random.default_rng(26).standard_normal((40, 2))
    live, average = path(Recorded([0.5, 1.5], noise), [1.0, -2.0], 0.2, 0.0, 0.1, 40, variant)
    w, mean = np.array([1.0, -2.0]), np.array([1.0, -2.0])
    for k in range(40):
        w = w - 0.2 * (np.array([0.5, 1.5]) * w + noise[k])
        mean = mean + 0.1 * (w - mean)
        np.testing.assert_allclose(live[k + 1], w, rtol=1e-12)
        np.testing.assert_allclose(average[k + 1], mean, rtol=1e-12)


def test_a_pull_of_1_steps_from_the_average_or_to_it_or_not_at_all():
    rng = np.random.default_rng(27)
    here, g = Pair(rng.standard_normal(5), rng.standard_normal(5)), rng.standard_normal(5)
    np.testing.assert_allclose(step(here, g, 0.3, 1.0, 0.2).live, here.average - 0.3 * g, rtol=1e-12)
    ahead = step(here, g, 0.3, 1.0, 0.2, "lookahead")
    np.testing.assert_allclose(ahead.live, ahead.average, rtol=1e-12)
    np.testing.assert_allclose(ahead.average, 0.8 * here.average + 0.2 * (here.live - 0.3 * g), rtol=1e-12)
    noise = rng.standard_normal((50, 5))
    frozen = path(Recorded(np.ones(5), noise), here.live, 0.3, 1.0, 0.2, 50, "post")
    for weights in frozen:
        np.testing.assert_allclose(weights, np.tile(here.live, (51, 1)), atol=1e-12)
    assert limiting_error(0.3, 0.2, 1.0, variant="post") == 0
    assert finite_time_error(0.3, 0.2, 1.0, 2.0, 1.0, 1000, "post") == pytest.approx(4.0)


def test_lookahead_and_post_are_pre_with_other_arguments():
    """As trajectories of the average, under the same noise."""
    noise = np.random.default_rng(28).standard_normal((80, 3))
    curvature, start, lr, beta = np.array([0.2, 0.9, 1.7]), [1.0, 2.0, -1.0], 0.4, 0.15
    c = np.array([0.3, 0.6, 1.0])
    _, ahead = path(Recorded(curvature, noise), start, lr, c, beta, 80, "lookahead")
    _, same = path(Recorded(curvature, noise), start, lr, c * (1 - lr * curvature), beta, 80)
    np.testing.assert_allclose(ahead, same, atol=1e-12)
    post = path(Recorded(curvature, noise), start, lr, 0.3, beta, 80, "post")
    same = path(Recorded(curvature, noise), start, lr * 0.7, 0.3, beta, 80)
    np.testing.assert_allclose(post, same, atol=1e-12)


@pytest.mark.parametrize("variant", ["pre", "lookahead"])
def test_the_returned_point_is_moved_by_heavy_ball(variant):
    """Momentum (1 − β)(1 − c), step βη; the readings differ only in where gradients are taken."""
    noise = np.random.default_rng(29).standard_normal((60, 2))
    curvature, lr, beta, c = np.array([0.4, 1.3]), 0.5, 0.2, 0.35
    _, averages = path(Recorded(curvature, noise), [1.0, -3.0], lr, c, beta, 60, variant)
    returned, q = np.array([1.0, -3.0]), np.zeros(2)
    for k in range(60):
        shown = returned + (1 - beta) * q * (1.0 if variant == "pre" else 1 - c)
        q = (1 - beta) * (1 - c) * q - lr * (curvature * shown + noise[k])
        returned = returned + beta * q
        np.testing.assert_allclose(averages[k + 1], returned, atol=1e-13)


def test_a_quadratic_with_a_full_matrix_is_its_diagonal_in_other_coordinates():
    rng = np.random.default_rng(30)
    turn, _ = np.linalg.qr(rng.standard_normal((3, 3)))
    values, center = np.array([0.3, 0.8, 1.6]), np.array([1.0, -1.0, 2.0])
    full = Quadratic(curvature=(turn * values) @ turn.T, center=turn @ center)
    plain = Quadratic(curvature=values, center=center)
    points = rng.standard_normal((6, 3))
    np.testing.assert_allclose(full.value(points @ turn.T), plain.value(points), rtol=1e-12)
    w = rng.standard_normal(3)
    numeric = [(full.value(w + h) - full.value(w - h)) / 2e-4 for h in 1e-4 * np.eye(3)]
    np.testing.assert_allclose(full.gradient(w, rng), numeric, rtol=1e-7)
    np.testing.assert_allclose(full.optimum, turn @ center)
    assert full.value(full.optimum) == 0
    settings = {"lr": 0.4, "pull": 0.3, "rate": 0.2, "steps": 25}
    for a, b in zip(train(full, turn @ points[0], **settings), train(plain, points[0], **settings)):
        np.testing.assert_allclose(a[0], turn @ b[0], rtol=1e-9)


def test_the_noise_of_a_quadratic_is_as_large_as_said_and_apart_between_paths():
    loss = Quadratic(curvature=[[1.0, 0.5], [0.5, 2.0]], sigma=0.7)
    noise = loss.gradient(np.zeros((40_000, 2)), np.random.default_rng(31))
    assert_mean(noise[:, 0], 0.0)
    np.testing.assert_allclose(np.cov(noise.T), 0.49 * np.eye(2), atol=0.015)


def test_E21_the_paper_describes_three_different_algorithms():
    """At a gain of 1: only under "lookahead" is live the EMA; under "pre" it leaves the segment."""
    noise = np.zeros((30, 1))
    ends = {v: path(Recorded([1.0], noise), [1.0], 0.1, 0.6, 0.2, 30, v)[1][-1, 0] for v in VARIANTS}
    firm = [ends[v] for v in ("pre", "post", "lookahead")]
    assert min(abs(x - y) for x, y in itertools.combinations(firm, 2)) > 1e-3
    here, g = Pair(np.array([1.0]), np.array([0.0])), np.array([5.0])
    raw = here.live - 0.3 * g
    clipped = {v: step(here, g, 0.3, 1.0, 0.25, v) for v in VARIANTS}
    assert clipped["lookahead"].live == clipped["lookahead"].average  # "exactly equal that of the EMA point"
    assert abs(clipped["pre"].live - clipped["pre"].average) > 0.5
    low, high = sorted([raw.item(), here.average.item()])
    assert clipped["pre"].live < low - 0.5  # "always convex combinations"
    assert low <= clipped["post"].live <= high


def test_E29_only_under_lookahead_does_an_infinite_strength_give_lookahead():
    noise = np.random.default_rng(32).standard_normal((40, 2))
    curvature, lr, alpha = np.array([0.5, 1.5]), 0.3, 0.2
    slow = np.array([1.0, -2.0])
    for k in range(40):
        fast = slow - lr * (curvature * slow + noise[k])  # an inner loop of one step, from the slow weights
        slow = slow + alpha * (fast - slow)
    ends = {v: path(Recorded(curvature, noise), [1.0, -2.0], lr, 1.0, alpha, 40, v) for v in VARIANTS}
    for weights in ends["lookahead"]:
        np.testing.assert_allclose(weights[-1], slow, rtol=1e-11)
    for variant in ("pre", "post", "post_raw"):
        assert np.max(np.abs(ends[variant][0][-1] - slow)) > 1e-2
        assert np.max(np.abs(ends[variant][1][-1] - slow)) > 1e-2


# --- Rates that change --------------------------------------------------------------------------------


def test_power_1_averages_uniformly_also_under_a_pull():
    loss = Quadratic(curvature=[0.3, 1.0], sigma=1.0)
    ended = train(
        loss, [1.0, -1.0], lr=0.3, pull=lambda k: 2 / (1 + k), rate=lambda k: 1 / (1 + k), steps=99, paths=3
    )
    np.testing.assert_allclose(ended.average, (99 * ended.flat + ended.live) / 100, rtol=1e-12)


def test_E28_power_1_is_not_uniform_if_the_average_moves_rarely():
    weights = np.random.default_rng(33).standard_normal((1001, 2))
    np.testing.assert_allclose(bema(weights, 1.0, 0.2, offset=1.0)[0][-1], weights.mean(axis=0))
    first = np.zeros((1001, 1))
    first[0] = 1.0
    kept = bema(first, 1.0, 0.2, offset=1.0, every=10)[0][-1, 0]
    assert kept == pytest.approx(0.60, abs=0.005)  # 60 times the uniform share
    by_updates = bema(first, 1.0, 0.2, scale=0.1, offset=1.0, every=10)[0][-1, 0]
    assert by_updates == pytest.approx(1 / 101)
    sampled = bema(weights, 1.0, 0.2, scale=0.1, offset=1.0, every=10)[0][-1]
    np.testing.assert_allclose(sampled, weights[::10].mean(axis=0))


def test_E23_gamma_1_and_rho_0_are_not_the_rates_of_algorithm_1():
    """With (ρ + γt)^−κ they give t^−κ: the first average forgets the start, where (1 + t)^−κ keeps .293."""
    jump = np.array([[0.0], [1.0], [1.0], [1.0]])
    stated = bema(jump, 0.5, 0.2, scale=1.0, offset=0.0)[0][:, 0]
    algorithm = bema(jump, 0.5, 0.2, scale=1.0, offset=1.0)[0][:, 0]
    assert stated[0] == 1.0
    assert algorithm[0] == pytest.approx(2**-0.5)
    left = np.cumprod(1 - np.arange(2, 5) ** -0.5)
    np.testing.assert_allclose(algorithm, 1 - left)
    quadratic = Quadratic(curvature=[1.0])
    ended = train(quadratic, [1.0], lr=0.1, pull=0.0, rate=lambda t: (1 + t) ** -0.5, steps=3)
    live = 0.9 ** np.arange(4)[:, None]
    np.testing.assert_allclose(ended.average[0], bema(live, 0.5, 0.2, offset=1.0)[0][-1])
    assert abs(ended.average[0, 0] - bema(live, 0.5, 0.2, offset=0.0)[0][-1, 0]) > 0.02


@pytest.mark.parametrize("every", [1, 3])
def test_bema_adds_the_way_from_the_start(every):
    weights = np.cumsum(np.random.default_rng(34).standard_normal((20, 2)), axis=0)
    averages, estimates = bema(weights, 0.5, 0.3, scale=2.0, offset=10.0, every=every)
    average = estimate = weights[0]
    for t in range(1, 20):
        if t % every == 0:
            average = average + (10 + 2 * t) ** -0.5 * (weights[t] - average)
            estimate = average + (weights[t] - weights[0]) / (10 + 2 * t) ** 0.3
        np.testing.assert_allclose(averages[t - 1], average, rtol=1e-12)
        np.testing.assert_allclose(estimates[t - 1], estimate, rtol=1e-12)


def way_under(lr, pull, rate, steps):
    """What the last step of many moves both weights by."""
    pair, slope = Pair(np.zeros(1), np.zeros(1)), np.ones(1)
    for _ in range(steps):
        before, pair = pair, step(pair, slope, lr, pull, rate)
    return (before.live - pair.live).item(), (before.average - pair.average).item()


@pytest.mark.parametrize(
    ("rate", "pull"), [(0.01, 0.001), (0.01, 0.01), (0.01, 0.1), (0.3, 0.5), (0.3, -0.1)]
)
def test_the_pull_shortens_the_way_under_a_steady_gradient(rate, pull):
    np.testing.assert_allclose(way_under(1.0, pull, rate, 3000), speed_factor(rate, pull), rtol=1e-9)


@pytest.mark.parametrize("strength", [0.1, 1.0, 10.0])
def test_at_a_small_rate_that_factor_is_one_over_1_plus_strength(strength):
    moved, _ = way_under(1.0, 1e-3 * strength, 1e-3, 12_000)
    assert moved == pytest.approx(1 / (1 + strength), rel=2e-3)


def test_the_right_ratio_makes_every_learning_rate_move_like_the_best_one():
    for lr in (0.05, 0.1, 0.4, 3.0):
        strength = float(right_ratio(lr, 0.1))
        moved, _ = way_under(lr, 5e-3 * strength, 5e-3, 5000)
        assert moved == pytest.approx(0.1, rel=6e-3)
    assert right_ratio(0.1, 0.1) == 0
    assert right_ratio(0.05, 0.1) < 0


def test_E24_the_gain_does_not_fall_inversely_with_curvature_and_horizon():
    """Log-log slopes: −2 and −2 where λA²T is large, 0 and −1 where it is small; never −1 and −1."""

    def slopes(curvature, penalty, horizon):
        at = np.log(practical_gain(curvature, penalty, horizon))
        by_curvature = np.log(practical_gain(curvature * 1.001, penalty, horizon)) - at
        by_horizon = np.log(practical_gain(curvature, penalty, horizon * 1.001)) - at
        return by_curvature / np.log(1.001), by_horizon / np.log(1.001)

    np.testing.assert_allclose(slopes(100.0, 10.0, 100.0), (-2, -2), atol=1e-3)
    np.testing.assert_allclose(slopes(1e-3, 1e-3, 100.0), (0, -1), atol=1e-3)


# --- The family ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mu_x", "mu_y"), [(0.9, 0.7), (0.9967, 0.7), (0.5, 0.0), (0.0, 0.4), (0.8, 0.95)])
def test_gpa_is_pace_with_a_push_step_by_step(mu_x, mu_y):
    noise = np.random.default_rng(35).standard_normal((60, 2))
    curvature, start, lr = np.array([0.4, 1.1]), np.array([2.0, -1.0]), 0.2
    setting = gpa(lr, mu_x, mu_y)
    live, average = path(Recorded(curvature, noise), start, setting.lr, setting.pull, setting.rate, 60)
    z = x = y = start
    for k in range(60):
        z = z - lr * (curvature * y + noise[k])
        x = mu_x * x + (1 - mu_x) * z
        y = mu_y * x + (1 - mu_y) * z
        np.testing.assert_allclose(live[k + 1], y, atol=1e-11)
        np.testing.assert_allclose(average[k + 1], x, atol=1e-11)
    scale = (1 - mu_x) + (1 - mu_y) * mu_x
    same = pace(lr * scale, (1 - mu_x) / scale, -scale * mu_y / (1 - mu_y))
    np.testing.assert_allclose(setting, same, atol=1e-14)


def test_the_error_of_gpa_is_that_of_its_own_recursion():
    lr, mu_x, mu_y, alpha = 0.3, 0.85, 0.6, 1.4
    a = lr * alpha
    z = np.array([1 - a * (1 - mu_y), -a * mu_y])  # of (z, x), y = μ_y x + (1 − μ_y) z
    move = np.array([z, (1 - mu_x) * z + mu_x * np.array([0, 1])])
    kick = np.array([-lr, -(1 - mu_x) * lr])  # of noise ξ, not ηξ
    setting = gpa(lr, mu_x, mu_y)
    ours = setting.on(alpha)
    np.testing.assert_allclose(ours.limiting_error(setting.lr**2), lyapunov(move, kick)[1, 1])
    second = moments(move, kick, (2.0, 2.0), 1.0, 23)
    np.testing.assert_allclose(ours.error_after(23, 2.0, setting.lr**2), second[1, 1])


def test_ema_and_pace_are_the_settings_they_say():
    assert ema(0.2, 0.1) == Setting(0.2, 0.1, 0.0)
    assert pace(0.2, 0.1, 3.0) == pytest.approx((0.2, 0.1, 0.3))
    on = pace(0.2, 0.1, 3.0).on(1.5)
    np.testing.assert_allclose(on.transition, chain("pre", 0.3, 0.1, 0.3)[0])
    np.testing.assert_allclose(ema(0.2, 0.1).on(1.5).limiting_error(), stationary("pre", 0.3, 0.1, 0.0))


def nesterov_moves(lr, decay, push, alpha):
    """Transition and kick of (x, m): x' = y − lr g(y), m' = decay m + (1 − decay)(x' − x), y = x + push m."""
    x = (1 - lr * alpha) * np.array([1.0, push])
    m = decay * np.array([0.0, 1.0]) + (1 - decay) * (x - np.array([1.0, 0.0]))
    return np.array([x, m]), np.array([-1.0, -(1 - decay)])


@pytest.mark.parametrize(("decay", "push"), [(0.9, 0.5), (0.99, 3.0), (0.5, 0.0), (0.3, 0.9)])
def test_ema_nesterov_is_its_own_recursion(decay, push):
    lr, alpha = 0.2, 1.5
    ours, (move, kick) = ema_nesterov(lr, decay, push, alpha), nesterov_moves(lr, decay, push, alpha)
    for steps in (0, 1, 2, 5, 40):
        second = moments(move, kick, (3.0, 0.0), 0.4, steps)
        np.testing.assert_allclose(ours.error_after(steps, 3.0, 0.4), second[0, 0], rtol=1e-9)
    np.testing.assert_allclose(ours.limiting_error(0.4), 0.4 * lyapunov(move, kick)[0, 0], rtol=1e-9)
    np.testing.assert_allclose(ours.radius, radius(move), rtol=1e-9)


def test_ema_nesterov_is_its_own_words_step_by_step():
    lr, decay, push, alpha = 0.2, 0.8, 1.2, 0.9
    recursion = ema_nesterov(lr, decay, push, alpha)
    noise = np.random.default_rng(36).standard_normal(40)
    state = np.array([1.5, 1.5])
    x = y = 1.5
    m = 0.0
    for shock in noise:
        state = recursion.transition @ state + recursion.kick * lr * shock
        new = y - lr * (alpha * y + shock)
        m = decay * m + (1 - decay) * (new - x)
        x = new
        y = x + push * m
        assert state[0] == pytest.approx(y, abs=1e-12)
        assert recursion.readout @ state == pytest.approx(x, abs=1e-12)


def schedule_free_path(lr, beta, alpha, start, shocks):
    """z' = z − lr g((1 − β)z + βx), x' the mean of z_1 … z_t."""
    z = x = np.full(shocks.shape[1:], start)
    moved = []
    for shock in shocks:
        y = (1 - beta) * z + beta * x
        z = z - lr * (alpha * y + shock)
        moved.append(z)
        x = np.mean(moved, axis=0)
    return x


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_schedule_free_is_its_own_words_by_simulation_and_by_sums(beta):
    lr, alpha, start, sigma, steps = 0.3, 0.8, 2.0, 1.5, 25
    expected = schedule_free_error(lr, beta, alpha, start, (lr * sigma) ** 2, steps)
    shocks = sigma * np.random.default_rng(37).standard_normal((steps, 20_000))
    assert_mean(schedule_free_path(lr, beta, alpha, start, shocks) ** 2, expected)
    # Linear in the shocks: E[x²] is the sum of squares of its answers to each of them, and to the start.
    answers = schedule_free_path(lr, beta, alpha, 0.0, sigma * np.eye(steps))
    still = schedule_free_path(lr, beta, alpha, start, np.zeros((steps, 1)))
    np.testing.assert_allclose(expected, np.sum(answers**2) + still.item() ** 2, rtol=1e-10)
    assert schedule_free_error(lr, beta, alpha, start, 1.0, 0) == start**2


def test_schedule_free_is_that_of_its_package():
    parameter = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    optimizer = schedulefree.SGDScheduleFree([parameter], lr=0.3, momentum=0.9)
    for steps in range(1, 21):
        optimizer.train()
        parameter.grad = 0.8 * parameter.detach()
        optimizer.step()
        optimizer.eval()
        expected = schedule_free_error(0.3, 0.9, 0.8, 2.0, 0.0, steps)
        assert parameter.item() ** 2 == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("strength", [-0.4, 0.0, 0.8, 3.0])
@pytest.mark.parametrize("steps", [0, 1, 6, 50])
def test_the_balance_is_the_derivative_of_the_next_loss(strength, steps):
    """∂E F(θ_{k+1})/∂R = −β E⟨g_{k+1}, r_k⟩; only the next step's strength is changed."""
    lr, beta, alpha, start, noise = 0.3, 0.2, 1.2, 2.0, 0.5
    recursion = pace(lr, beta, strength).on(alpha)
    before = moments(*chain("pre", lr * alpha, beta, beta * strength), (start, start), noise, steps)

    def next_loss(r):
        move, kick = chain("pre", lr * alpha, beta, beta * r)
        return alpha / 2 * (move @ before @ move.T + noise * np.outer(kick, kick))[0, 0]

    derivative = (next_loss(strength + 1e-3) - next_loss(strength - 1e-3)) / 2e-3
    ours = -beta * balance(recursion, alpha, start, noise, steps)
    assert ours == pytest.approx(derivative, rel=1e-8, abs=1e-11)


# --- Real data ----------------------------------------------------------------------------------------


def test_the_optimum_of_logistic_regression_has_no_gradient():
    rng = np.random.default_rng(38)
    loss = Logistic(features=rng.standard_normal((40, 3)), labels=rng.choice([-1.0, 1.0], 40), decay=0.01)
    w = loss.optimum
    margins = loss.features @ w * loss.labels
    full = -(loss.features * (loss.labels / (1 + np.exp(margins)))[:, None]).mean(axis=0) + 0.01 * w
    np.testing.assert_allclose(full, 0, atol=1e-14)
    around = w + 0.3 * rng.standard_normal((200, 3))
    assert np.all(loss.value(around) > loss.value(w))


def test_the_gradient_of_logistic_regression_is_unbiased():
    """The mean over all batches of two, against differences of the value."""
    rng = np.random.default_rng(39)
    labels = np.array([1.0, -1, -1, 1, 1])
    loss = Logistic(features=rng.standard_normal((5, 3)), labels=labels, decay=0.05, batch=2)
    w = rng.standard_normal(3)
    batches = list(itertools.product(range(5), repeat=2))
    gradients = loss.gradient(np.tile(w, (25, 1)), Deal(batches))
    numeric = [(loss.value(w + h) - loss.value(w - h)) / 2e-5 for h in 1e-5 * np.eye(3)]
    np.testing.assert_allclose(gradients.mean(axis=0), numeric, atol=1e-9)
    assert np.all(gradients.std(axis=0) > 0.01)
    value = np.mean(np.log(1 + np.exp(-labels * (loss.features @ w)))) + 0.025 * w @ w
    assert loss.value(w) == pytest.approx(value)


def test_on_real_data_the_average_beats_the_last_iterate_and_the_pull_helps():
    from sklearn.datasets import load_breast_cancer  # two seconds, which other tests need not wait

    data, target = load_breast_cancer(return_X_y=True)
    features = (data - data.mean(axis=0)) / data.std(axis=0)
    loss = Logistic(features=features, labels=2.0 * target - 1, decay=0.01)
    best = loss.value(loss.optimum)
    start = np.zeros(30)
    # Too large a learning rate, which the pull makes good.
    ended = {
        c: train(loss, start, lr=2.0, pull=c, rate=0.02, steps=400, paths=40, seed=40) for c in (0.0, 0.2)
    }
    excess = {(c, name): loss.value(getattr(e, name)) - best for c, e in ended.items() for name in e._fields}
    assert min(e.min() for e in excess.values()) > 0
    for worse, better in (
        (excess[0.0, "live"], excess[0.0, "average"]),
        (excess[0.2, "live"], excess[0.2, "average"]),
        (excess[0.0, "average"], excess[0.2, "average"]),
    ):
        gained = worse - better
        assert np.mean(gained > 0) > 0.9
        assert gained.mean() > 3 * gained.std() / np.sqrt(40)
    assert excess[0.2, "average"].mean() < 0.01 * loss.value(start)


# --- The optimizers are these methods ------------------------------------------------------------------

CURVATURE, START = np.array([0.3, 1.0, 2.5]), np.array([1.0, -2.0, 0.5])
NOISE = np.random.default_rng(41).standard_normal((50, 3))


def optimized(make):
    """Live weights and averages of 50 steps of a torch optimizer in float64, on the noisy quadratic."""
    parameter = torch.tensor(START, dtype=torch.float64, requires_grad=True)
    optimizer = make([parameter])
    live, average = [], []
    for noise in NOISE:
        parameter.grad = torch.tensor(CURVATURE * parameter.detach().numpy() + noise)
        optimizer.step()
        live.append(parameter.detach().numpy().copy())
        with averaged_weights(optimizer):
            average.append(parameter.detach().numpy().copy())
    return np.array(live), np.array(average)


@pytest.mark.parametrize("variant", ["pre", "lookahead"])
@pytest.mark.parametrize(
    ("strength", "settings"),
    [
        (0.7, {"power": 0.5}),
        (5.0, {"power": 0.5}),  # clipped in the first 24 steps
        (5.0, {"power": 0.2, "max_gain": 0.4}),
        (-0.5, {"power": 1.0}),
        (2.0, {"power": 0.7, "delay": 3.0, "slope": 2.0}),
    ],
)
def test_a_control_around_sgd_is_the_stylised_update(variant, strength, settings):
    order = {"pre": {}, "lookahead": {"gap": "after", "order": "average, then pull"}}[variant]
    control = Control(strength=strength, sizing="uniform", **order, **settings)
    lives, averages = optimized(lambda p: attach(torch.optim.SGD(p, lr=0.2), control=control))
    slope, delay = settings.get("slope", 1.0), settings.get("delay", 0.0)

    def rate(t):
        return (1 + slope * max(0.0, t - delay)) ** -settings["power"]

    def pull(t):
        return min(rate(t) * strength, settings.get("max_gain", 1.0))

    loss, pair = Recorded(CURVATURE, NOISE), Pair(START, START)
    for t in range(1, 51):
        pair = step(pair, loss.gradient(pair.live), 0.2, pull(t), rate(t), variant)
        np.testing.assert_allclose(lives[t - 1], pair.live, rtol=0, atol=1e-12)
        np.testing.assert_allclose(averages[t - 1], pair.average, rtol=0, atol=1e-12)
    ended = train(Recorded(CURVATURE, NOISE), START, lr=0.2, pull=pull, rate=rate, steps=50, variant=variant)
    np.testing.assert_allclose(ended.live[0], lives[-1], rtol=0, atol=1e-12)
    np.testing.assert_allclose(ended.average[0], averages[-1], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("mu_x", "mu_y"), [(0.9, 0.7), (0.9967, 0.7), (0.6, 0.0)])
def test_gpa_around_sgd_is_the_setting_of_the_family(mu_x, mu_y):
    lives, averages = optimized(lambda p: baselines.gpa(torch.optim.SGD(p, lr=0.2), mu_x=mu_x, mu_y=mu_y))
    setting = gpa(0.2, mu_x, mu_y)
    live, average = path(Recorded(CURVATURE, NOISE), START, setting.lr, setting.pull, setting.rate, 50)
    np.testing.assert_allclose(lives, live[1:], rtol=0, atol=1e-12)
    np.testing.assert_allclose(averages, average[1:], rtol=0, atol=1e-12)


def test_ema_nesterov_around_sgd_is_the_recursion_of_the_family():
    around = baselines.ema_nesterov
    lives, shown = optimized(lambda p: around(torch.optim.SGD(p, lr=0.2), push=0.6, decay=0.8))
    for i, alpha in enumerate(CURVATURE):
        recursion, state = ema_nesterov(0.2, 0.8, 0.6, alpha), np.full(2, START[i])
        for t in range(50):
            state = recursion.transition @ state + recursion.kick * 0.2 * NOISE[t, i]
            assert lives[t, i] == pytest.approx(state[0], abs=1e-12)
            assert shown[t, i] == pytest.approx(recursion.readout @ state, abs=1e-12)


# --- Bad input ----------------------------------------------------------------------------------------

SOME = Quadratic(curvature=[1.0, 2.0])
FIRST = Pair(np.ones(2), np.zeros(2))
RUN = {"lr": 0.1, "pull": 0.1, "rate": 0.1, "steps": 2}
ORDER = "learning rates that do not increase"
RATE, OPEN_RATE = "0 < rate <= 1", "0 < rate < 1"

REFUSED = [
    (lambda: stylized(0.1, 0.0, 0.1), "rate", "0.0", RATE),
    (lambda: stylized(0.1, 1.5, 0.1), "rate", "1.5", RATE),
    (lambda: stylized(0.1, NAN, 0.1), "rate", "nan", RATE),
    (lambda: stylized(0.0, 0.1, 0.1), "speed", "0.0", "> 0"),
    (lambda: stylized(-1.0, 0.1, 0.1), "speed", "-1.0", "> 0"),
    (lambda: stylized(NAN, 0.1, 0.1), "speed", "nan", "finite"),
    (lambda: stylized(0.1, 0.1, NAN), "pull", "nan", "finite"),
    (lambda: stylized(0.1, 0.1, float("inf")), "pull", "inf", "finite"),
    (lambda: stylized(0.1, 0.1, 0.1, "during"), "variant", "'during'", "pre, post, lookahead, post_raw"),
    (lambda: stylized(0.1, 0.1, 0.1).limiting_error(-1.0), "noise", "-1.0", ">= 0"),
    (lambda: stylized(0.1, 0.1, 0.1).error_after(-1, 1.0), "steps", "-1", "an integer >= 0"),
    (lambda: stylized(0.1, 0.1, 0.1).error_after(2.5, 1.0), "steps", "2.5", "an integer >= 0"),
    (lambda: stylized(0.1, 0.1, 0.1).error_after(2, NAN), "start", "nan", "finite"),
    (lambda: stylized(2.5, 0.1, 0.1).limiting_error(), "recursion", "spectral radius 1.59", "radius < 1"),
    (lambda: limiting_error(2.5, 0.1, 0.1), "speed, rate, pull", "(2.5, 0.1, 0.1)", "stable"),
    (lambda: limiting_error([0.1, 2.5], 0.1, 0.1), "speed, rate, pull", "[0.1, 2.5]", "stable"),
    (lambda: limiting_error(0.1, 0.1, 3.0), "speed, rate, pull", "3.0", "radius < 1"),
    (lambda: limiting_error(0.1, 0.1, 1.5, variant="post"), "speed, rate, pull", "1.5", "stable"),
    (lambda: limiting_error(2.5, 0.1, 0.1, variant="post_raw"), "speed, rate, pull", "2.5", "stable"),
    (lambda: limiting_error([0.1, NAN], 0.1, 0.1), "speed", "nan", "finite"),
    (lambda: limiting_error(0.1, [0.1, 1.2], 0.1), "rate", "1.2", RATE),
    (lambda: limiting_error(0.1, 0.1, 0.1, -2.0), "noise", "-2.0", ">= 0"),
    (lambda: limiting_error(0.1, 0.1, 0.1, variant="during"), "variant", "'during'", "lookahead"),
    (lambda: limiting_error_slope(2.5, 0.1, 0.1), "speed, rate, pull", "2.5", "stable"),
    (lambda: finite_time_error(0.1, 0.1, 0.1, 1.0, -1.0, 3), "noise", "-1.0", ">= 0"),
    (lambda: ar2_variance(1.5, 0.2, 1.0), "first, second", "(1.5, 0.2)", "causal"),
    (lambda: ar2_variance(NAN, 0.2, 1.0), "first", "nan", "finite"),
    (lambda: ar2_variance(0.1, 0.2, -1.0), "noise", "-1.0", ">= 0"),
    (lambda: sgd_error(2.0), "speed", "2.0", "0 < speed < 2"),
    (lambda: sgd_error(NAN), "speed", "nan", "0 < speed < 2"),
    (lambda: optimal_pull(1.0, 0.1), "speed", "1.0", "0 < speed < 1"),
    (lambda: optimal_pull(0.1, 1.0), "rate", "1.0", OPEN_RATE),
    (lambda: least_limiting_error(0.1, 0.0), "rate", "0.0", "rate"),
    (lambda: error_at_equal_speed(1.0, 0.1), "radius", "1.0", "0 < radius < 1"),
    (lambda: error_at_equal_speed(0.9, 1.1), "pull", "1.1", "0 <= pull <= 1"),
    (lambda: large_improvement_bound(0.2, 0.1), "speed", "0.2", "speed < 1/8"),
    (lambda: large_improvement_bound(0.1, 0.1), "rate", "0.1", "rate < speed"),
    (lambda: convex_bound([0.1, 0.2], 0.1, 0.1, 1.0, 1.0, [1.0]), "lrs", "[0.1, 0.2]", ORDER),
    (lambda: convex_bound([0.1, 0.0], 0.1, 0.1, 1.0, 1.0, [1.0]), "lrs", "[0.1, 0.0]", "> 0"),
    (lambda: convex_bound([NAN], 0.1, 0.1, 1.0, 1.0, [1.0]), "lrs", "[nan]", "finite"),
    (lambda: convex_bound([0.1], 1.1, 0.1, 1.0, 1.0, [1.0]), "pull", "1.1", "0 <= pull <= 1"),
    (lambda: convex_bound([0.1], -0.1, 0.1, 1.0, 1.0, [1.0]), "pull", "-0.1", "0 <= pull <= 1"),
    (lambda: convex_bound([0.1], 0.1, 1.0, 1.0, 1.0, [1.0]), "rate", "1.0", OPEN_RATE),
    (lambda: convex_bound([0.1], 0.1, 0.1, 0.0, 1.0, [1.0]), "lipschitz", "0.0", "> 0"),
    (lambda: convex_bound([0.1], 0.1, 0.1, 1.0, -1.0, [1.0]), "sigma", "-1.0", ">= 0"),
    (lambda: convex_bound([0.1], [0.1, 0.2], 0.1, 1.0, 1.0, [1.0, 2.0, 3.0]), "distance", "3.0", "as many"),
    (lambda: convex_bound_tuned(0, 0.1, 0.1, 1.0, 1.0, [1.0]), "steps", "0", "an integer >= 1"),
    (lambda: alike_factor(1.0, 0.1), "rate", "1.0", OPEN_RATE),
    (lambda: alike_factor(0.1, 2.0), "pull", "2.0", "0 <= pull <= 1"),
    (lambda: pace(0.0, 0.1, 1.0), "lr", "0.0", "> 0"),
    (lambda: pace(0.1, 2.0, 1.0), "rate", "2.0", RATE),
    (lambda: pace(0.1, 0.1, NAN), "strength", "nan", "finite"),
    (lambda: pace(0.1, 0.1, 1.0).on(0.0), "curvature", "0.0", "> 0"),
    (lambda: gpa(0.1, 1.0, 0.5), "mu_x", "1.0", "0 <= mu_x < 1"),
    (lambda: gpa(0.1, 0.9, 1.0), "mu_y", "1.0", "0 <= mu_y < 1"),
    (lambda: ema_nesterov(0.1, 1.0, 0.5, 1.0), "decay", "1.0", "0 < decay < 1"),
    (lambda: ema_nesterov(0.1, 0.9, -0.5, 1.0), "push", "-0.5", ">= 0"),
    (lambda: schedule_free_error(0.1, 1.0, 1.0, 1.0, 1.0, 3), "beta", "1.0", "0 <= beta < 1"),
    (lambda: schedule_free_error(0.1, 0.9, 1.0, 1.0, 1.0, -3), "steps", "-3", "an integer >= 0"),
    (lambda: speed_factor(0.5, -1.0), "pull", "-1.0", "over -rate/(1 - rate)"),
    (lambda: speed_factor(0.0, 0.1), "rate", "0.0", RATE),
    (lambda: right_ratio(0.1, 0.0), "best_lr", "0.0", "> 0"),
    (lambda: balance(stylized(0.1, 0.1, 0.1), -1.0, 1.0, 1.0, 3), "curvature", "-1.0", "> 0"),
    (lambda: Quadratic(curvature=[1.0, NAN]), "curvature", "nan", "finite"),
    (lambda: Quadratic(curvature=[1.0], sigma=-1.0), "sigma", "-1.0", ">= 0"),
    (lambda: Logistic(features=np.ones((2, 1)), labels=np.array([0.0, 1.0])), "labels", "0.", "-1 and 1"),
    (lambda: Logistic(features=np.ones((1, 1)), labels=np.ones(1), decay=0.0), "decay", "0.0", "> 0"),
    (lambda: Logistic(features=np.ones((1, 1)), labels=np.ones(1), batch=0), "batch", "0", ">= 1"),
    (lambda: train(SOME, [1.0, 1.0], **RUN | {"lr": 0.0}), "lr", "0.0", "> 0"),
    (lambda: train(SOME, [1.0, 1.0], **RUN | {"rate": 1.5}), "rate", "1.5", RATE),
    (lambda: train(SOME, [1.0, 1.0], **RUN | {"rate": lambda k: 2 - k}), "rate", "0", RATE),
    (lambda: train(SOME, [1.0, 1.0], **RUN | {"steps": 0}), "steps", "0", "an integer >= 1"),
    (lambda: train(SOME, [1.0, 1.0], paths=0, **RUN), "paths", "0", "an integer >= 1"),
    (lambda: train(SOME, [1.0, 1.0], variant="during", **RUN), "variant", "'during'", "post_raw"),
    (lambda: least_limiting_error(0.5, 1.0), "rate", "1.0", OPEN_RATE),
    (lambda: convex_bound([0.1], 0.1, 0.1, 1.0, 1.0, [NAN]), "distance", "nan", "finite"),
    (lambda: convex_bound_tuned(5, 0.1, 0.1, 1.0, 1.0, [NAN]), "distance", "nan", "finite"),
    (lambda: convex_bound([], 0.1, 0.1, 1.0, 1.0, [1.0]), "lrs", "[]", "at least one"),
    (lambda: stylized([0.1, 0.2], 0.1, 0.1), "speed", "[0.1, 0.2]", "a single number"),
    (lambda: stylized(0.1, 0.1, 0.1, readout=(1.0, 2.0, 3.0)), "readout", "3.0", "two numbers"),
    (lambda: stylized(0.1, 0.1, 0.1, readout=(1.0, NAN)), "readout", "nan", "finite"),
    (lambda: balance(stylized(0.1, 0.1, 0.1), 1.0, 1.0, 1.0, -3), "steps", "-3", "an integer >= 0"),
    (lambda: balance(stylized(0.1, 0.1, 0.1), 1.0, 1.0, 1.0, 1.5), "steps", "1.5", "an integer >= 0"),
    (lambda: Quadratic(curvature=[1.0], center=NAN), "center", "nan", "finite"),
    (lambda: Quadratic(curvature=[[1.0, 2.0]]), "curvature", "[[1.0, 2.0]]", "square"),
    (lambda: Quadratic(curvature=[[1.0, 2.0], [0.0, 1.0]]), "curvature", "[0.0, 1.0]", "symmetric"),
    (lambda: Logistic(features=np.ones((3, 1)), labels=np.ones(2)), "labels", "1.", "one for each row"),
    (
        lambda: PiecewiseLinear(slopes=np.ones((3, 1)), offsets=np.ones(2)),
        "offsets",
        "1.",
        "one for each row",
    ),
    (lambda: train(SOME, [1.0, NAN], **RUN), "start", "nan", "finite"),
    (lambda: train(SOME, [1.0, 1.0, 1.0], **RUN), "start", "1.0", "2 numbers"),
    (lambda: train(SOME, [1.0, 1.0], **RUN | {"pull": NAN}), "pull", "nan", "finite"),
    (lambda: train(SOME, [1.0, 1.0], **RUN | {"pull": [0.1, 0.1, 0.1]}), "pull", "0.1", "1 or 2 numbers"),
    (lambda: step(FIRST, np.ones(2), 0.1, 0.1, 0.1, "during"), "variant", "'during'", "post_raw"),
    (lambda: bema([[0.0], [1.0]], 0.5, 0.2, every=0), "every", "0", ">= 1"),
    (lambda: bema([[0.0], [1.0]], 0.5, 0.2, offset=-0.5), "offset", "-0.5", "offset >= 0"),
]


@pytest.mark.parametrize(("call", "argument", "value", "allowed"), REFUSED)
def test_bad_input_is_refused_with_argument_value_and_what_is_allowed(call, argument, value, allowed):
    with pytest.raises(ValueError, match=r"^Invalid .*; allowed: ") as caught:
        call()
    what, rest = str(caught.value).removeprefix("Invalid ").split(": ", 1)
    given, may = rest.rsplit("; allowed: ", 1)
    assert what == argument
    assert value in given
    assert allowed in may


def test_a_recursion_without_noise_or_kick_has_no_limiting_error():
    still = Recursion(transition=2 * np.eye(2), kick=np.zeros(2), readout=np.ones(2))
    assert still.limiting_error() == 0
    assert stylized(0.1, 0.1, 0.1).limiting_error(0.0) == 0
