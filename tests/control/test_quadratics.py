"""Averages on quadratics and convex losses: every statement by a second route, every erratum shown to fail.

The second routes are written here from the words of the method: updates literally, Lyapunov's equation by
Kronecker products, impulse responses, grids, simulation. Names with E4, E13, … are the errata of the
theory; in each, what is printed fails where ours holds.
"""

import itertools

import mpmath
import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from test_golden_theory import bema

from paceline import Control, attach, averaged_weights
from paceline.control.bounds import convex_bound, convex_bound_tuned
from paceline.control.discrete import Logistic, PiecewiseLinear, train
from paceline.control.family import (
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
    improvement,
    least_limiting_error,
    limiting_error,
    limiting_error_slope,
    optimal_pull,
    sgd_error,
    spectral_radius,
)
from paceline.control.recursion import VARIANTS, Pair, step, stylized
from paceline.optim import baselines

pytestmark = pytest.mark.slow  # a quarter of a minute together: not part of `make check`


# --- The second routes ---------------------------------------------------------------------------------


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


# --- The limiting error --------------------------------------------------------------------------------


def test_ar2_variance_is_the_energy_of_the_impulse_response_reached_from_any_start():
    """lem:ar2-limiting-variance; the start is X_1 = 40, X_2 = −7."""
    for phi1, phi2 in causal_pairs(100, seed=2):
        energy = np.sum(impulse_response((phi1, phi2), 600) ** 2)
        np.testing.assert_allclose(ar2_variance(phi1, phi2, 0.8), 0.8 * energy, rtol=1e-9)
    second = moments(np.array([[1.1, -0.5], [1.0, 0.0]]), np.array([1.0, 0.0]), (-7.0, 40.0), 0.6, 300)
    np.testing.assert_allclose(ar2_variance(1.1, -0.5, 0.6), second[0, 0], rtol=1e-10)


def test_E4_the_printed_yule_walker_equation_gives_a_negative_variance():
    phi1, phi2 = ar2_of(0.3, 0.2, 0.4)
    noise = 0.2**2
    printed = np.array([[-phi1, 1, 0], [-phi2, -phi1, 1], [1, -phi1, -phi2]])  # γ(1) = φ₁ γ(0)
    negative = np.linalg.solve(printed, [0, 0, noise])[0]
    true = stationary("pre", 0.3, 0.2, 0.4)
    assert negative == pytest.approx(-0.345, abs=5e-4)
    assert true == pytest.approx(0.4495, abs=5e-5)
    np.testing.assert_allclose(ar2_variance(phi1, phi2, noise), true, rtol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_limiting_error_solves_lyapunovs_equation(variant):
    draws = stable_chains(variant, 400, seed=5)
    expected = np.array([2.5 * stationary(variant, *draw) for draw in draws])
    np.testing.assert_allclose(limiting_error(*draws.T, 2.5, variant), expected, rtol=1e-9)


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
    assert 50 < refused < 450


def test_the_limiting_error_is_eq_gamma_0_as_printed():
    a, beta, c = stable_chains("pre", 200, seed=8).T
    b = 1 - beta
    above = beta * (2 - a - beta + a * beta - c * b)
    below = a * (a + beta - a * beta + c * b) * (4 - 2 * a - 2 * beta + a * beta - 2 * c * b)
    np.testing.assert_allclose(limiting_error(a, beta, c), above / below, rtol=1e-9)


@pytest.mark.parametrize("variant", ["pre", "lookahead", "post_raw"])
def test_every_pull_from_0_to_1_is_stable_below_speed_1(variant):
    grid = np.linspace(0.001, 0.999, 12)
    assert np.all(limiting_error(*np.meshgrid(grid, grid, np.linspace(0, 1, 11)), variant=variant) >= 0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_spectral_radius_is_the_largest_root(variant):
    for a, beta, c in stable_chains(variant, 100, seed=9):
        matrix, _ = chain(variant, a, beta, c)
        roots = np.abs(np.roots([1, -np.trace(matrix), np.linalg.det(matrix)]))
        np.testing.assert_allclose(spectral_radius(a, beta, c, variant), roots.max(), rtol=1e-7)


def test_the_error_of_sgd_is_a_geometric_sum():
    for a in (0.01, 0.3, 1.0, 1.9):
        np.testing.assert_allclose(sgd_error(a, 0.7), 0.7 * np.sum((1 - a) ** (2 * np.arange(5000))))
        np.testing.assert_allclose(sgd_error(a), limiting_error(a, 1.0, 0.3), rtol=1e-12)  # rate 1: live


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


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("steps", [0, 1, 7, 333])
def test_the_error_after_so_many_steps_follows_the_moments_step_by_step(variant, steps):
    for draw in stable_chains(variant, 20, seed=13, largest=1.02):
        second = moments(*chain(variant, *draw), (1.7, 1.7), 0.3, steps)
        ours = stylized(*draw, variant).error_after(steps, 1.7, 0.3)
        np.testing.assert_allclose(ours, second[1, 1], rtol=1e-8)


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


@pytest.mark.parametrize("rho", [0.05, 0.3, 0.9, 0.99])
def test_at_equal_speed_a_pull_never_helps(rho):
    pulls = [0.0, 1e-4, 0.01, 0.2, 1.0]
    errors = [least_error_on_level(rho, c) for c in pulls]
    sgd = (1 - rho) ** 2 * sgd_error(1 - rho)
    assert np.all(np.diff(errors) > -1e-12 * sgd)
    np.testing.assert_allclose([error_at_equal_speed(rho, c) for c in pulls], errors, rtol=1e-5)
    np.testing.assert_allclose(errors[-1], sgd, rtol=1e-6)
    assert errors[0] / sgd == pytest.approx(0.5, abs=0.06) or rho < 0.5


def test_the_least_errors_at_equal_speed_are_known():
    known = {(0.99, 0.001): 0.003187, (0.99, 0.05): 0.004598, (0.9, 0.0): 0.02639, (0.999, 1.0): 0.0005}
    found = [error_at_equal_speed(*case) for case in known]
    np.testing.assert_allclose(found, list(known.values()), rtol=1e-3)


def test_the_least_error_at_equal_speed_needs_small_rates_near_radius_1():
    a, beta, c = 1.34482e-5, 1.29e-5, 1e-6
    assert spectral_radius(a, beta, c) == pytest.approx(0.99999, abs=1e-9)
    assert error_at_equal_speed(0.99999, c) < 1.001 * a**2 * limiting_error(a, beta, c)


# --- The two propositions ------------------------------------------------------------------------------


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


def test_E17_the_improvement_is_at_most_twice_the_speed_and_not_against_sgd():
    """prop:arbitrarily_large_improvement, whose printed constant is 8, of SGD's error; 2 is the least one."""
    for a in np.geomspace(1e-4, 0.1249, 30):
        for beta in a * np.array([1e-3, 0.5, 1 - 1e-9]):
            ratio = stationary("pre", a, beta, 1.0) / stationary("pre", a, beta, 0.0)
            assert ratio <= 2 * a
            np.testing.assert_allclose(improvement(a, beta, 1.0), ratio, rtol=1e-6)
    speeds = np.geomspace(1e-5, 0.12, 40)
    worst = [float(improvement(a, a * (1 - 1e-12), 1.0)) / a for a in speeds]
    assert worst[0] == pytest.approx(2, abs=1e-4)
    assert np.all(np.diff(worst) < 0)
    full, plain, sgd = limiting_error(0.1, 0.05, 1.0), limiting_error(0.1, 0.05, 0.0), sgd_error(0.1)
    assert (full, 0.8 * plain, 0.8 * sgd) == pytest.approx((0.229, 1.38, 4.21), abs=5e-3)
    assert full <= 0.2 * plain < 0.8 * plain < 0.8 * sgd


def test_E18_the_average_is_of_the_new_weights():
    a, beta, c = 0.1, 0.05, 0.3
    printed = np.array([[1 - a - c, c], [beta, 1 - beta]]), np.array([-1.0, 0.0])  # of θ_k, not θ_{k+1}
    ours = limiting_error(a, beta, c)
    assert lyapunov(*printed)[1, 1] == pytest.approx(0.5627, abs=5e-5)
    assert ours == pytest.approx(0.5823, abs=5e-5)
    assert ours == pytest.approx(stationary("pre", a, beta, c), rel=1e-9)
    at_zero = np.array([[1 - a, 0.0], [beta, 1 - beta]]), np.array([-1.0, 0.0])
    np.testing.assert_allclose(lyapunov(*at_zero)[1, 1], limiting_error(a, beta, 0.0))  # alike without pull


def test_E19_the_stray_zero_would_delete_the_pull_toward_the_average():
    a, beta, c = 0.1, 0.05, 0.3
    live = 1 - a - c  # θ' = (1 − a − c) θ + c · E · 0 − ηξ
    printed = np.array([[live, 0.0], [beta * live, 1 - beta]]), np.array([-1.0, -beta])
    wrong = lyapunov(*printed)[1, 1]
    assert wrong < 0.3 * limiting_error(a, beta, c)
    np.testing.assert_allclose(limiting_error(a, beta, c), stationary("pre", a, beta, c), rtol=1e-12)


# --- Every convex loss ---------------------------------------------------------------------------------


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


@pytest.mark.parametrize("seed", range(4))
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


@pytest.mark.parametrize("c", [0.0, 0.01])
def test_E26_the_theorem_is_false_for_the_returned_average(c):
    beta, lr, steps, start = 0.9, 1.0, 400, 0.97
    ended = train(Corner(), [start], lr=lr, pull=c, rate=beta, steps=steps)
    bound = convex_bound(np.full(steps, lr), c, beta, 1.0, 0.0, [start])
    assert Corner().value(ended.flat)[0] < bound < Corner().value(ended.average)[0]


def test_E27_the_factor_can_be_improved_if_all_coordinates_are_pulled_alike():
    """The tight bound is √(B/β + 2/β − 2/B) times SGD's, B = β + (1 − β)c: at most √(3/β − 2)."""
    sgd = 3.0 * 2.0 / 5  # |θ_1 − μ| V/√T
    for beta in (0.01, 0.1, 0.5):
        for c in np.linspace(0, 1, 51):
            tuned, b = (
                convex_bound_tuned(25, np.full(3, c), beta, 2.0, 0.0, [1.0, 2.0, -2.0]),
                beta + (1 - beta) * c,
            )
            np.testing.assert_allclose((tuned.tight / sgd) ** 2, b / beta + 2 / beta - 2 / b, rtol=1e-12)
            assert tuned.tight / sgd <= np.sqrt(3 / beta - 2) + 1e-12
            assert tuned.tight / sgd < np.sqrt(2 - beta) / beta  # what "cannot be improved"
            noisy = convex_bound_tuned(25, np.full(3, c), beta, 1.2, 1.6, [1.0, 2.0, -2.0])
            assert noisy.tight <= tuned.tight + 1e-12  # the same V
    worst = convex_bound_tuned(25, 1.0, 0.01, 2.0, 0.0, [3.0])
    assert (worst.tight / sgd) ** 2 == pytest.approx(298)
    assert (worst.loose / sgd) ** 2 == pytest.approx(19900)


# --- The update ----------------------------------------------------------------------------------------


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


def test_a_pull_of_1_freezes_the_reading_post():
    assert limiting_error(0.3, 0.2, 1.0, variant="post") == 0
    assert stylized(0.3, 0.2, 1.0, "post").error_after(1000, 2.0) == pytest.approx(4.0)


def test_E21_the_paper_describes_three_different_algorithms():
    """At a gain of 1: only under "lookahead" is live the EMA; under "pre" it leaves the segment."""
    here, g = Pair(np.array([1.0]), np.array([0.0])), np.array([5.0])
    clipped = {v: step(here, g, 0.3, 1.0, 0.25, v) for v in VARIANTS}
    assert clipped["lookahead"].live == clipped["lookahead"].average  # "exactly equal that of the EMA point"
    assert abs(clipped["pre"].live - clipped["pre"].average) > 0.5
    raw = here.live - 0.3 * g
    assert clipped["pre"].live < raw - 0.5  # not "always convex combinations" of this and the average, 0
    assert raw <= clipped["post"].live <= here.average


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


# --- Rates that change ---------------------------------------------------------------------------------


def averages(path, power, rho, gamma=1.0, every=1):
    """The average of a trajectory of one number; it moves at every so many-th step."""
    return bema(np.reshape(path, (-1, 1)), power, 0.2, gamma, rho, every)[0][:, 0]


def test_E28_power_1_is_not_uniform_if_the_average_moves_rarely():
    weights = np.random.default_rng(33).standard_normal(1001)
    assert averages(weights, 1.0, 1.0)[-1] == pytest.approx(weights.mean())
    first = np.eye(1, 1001)
    assert averages(first, 1.0, 1.0, every=10)[-1] == pytest.approx(0.60, abs=0.005)  # 60 times its share
    assert averages(weights, 1.0, 1.0, 0.1, every=10)[-1] == pytest.approx(weights[::10].mean())


def test_E23_gamma_1_and_rho_0_are_not_the_rates_of_algorithm_1():
    """With (ρ + γt)^−κ they give t^−κ: the first average forgets the start, where (1 + t)^−κ keeps .293."""
    live = 0.9 ** np.arange(4)
    ended = train(
        Recorded([1.0], np.zeros((3, 1))), [1.0], lr=0.1, pull=0.0, rate=lambda t: (1 + t) ** -0.5, steps=3
    )
    assert ended.average.item() == pytest.approx(averages(live, 0.5, 1.0)[-1], rel=1e-12)
    assert abs(ended.average.item() - averages(live, 0.5, 0.0)[-1]) > 0.02
    assert averages([0, 1, 1, 1], 0.5, 0.0)[0] == 1.0
    assert averages([0, 1, 1, 1], 0.5, 1.0)[0] == pytest.approx(2**-0.5)


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


# --- The family ----------------------------------------------------------------------------------------


def test_a_setting_has_the_error_of_its_recursion():
    assert ema(0.2, 0.1) == pytest.approx((0.2, 0.1, 0.0))
    setting = pace(0.2, 0.1, 3.0)
    assert setting == pytest.approx((0.2, 0.1, 0.3))
    second = moments(*chain("pre", 0.3, 0.1, 0.3), (2.0, 2.0), (0.2 * 0.7) ** 2, 23)
    np.testing.assert_allclose(setting.error_after(23, 1.5, 2.0, 0.7), second[1, 1])


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
def test_schedule_free_is_its_own_words(beta):
    """Linear in the shocks: E[x²] is the sum of squares of its answers to each of them, and to the start."""
    lr, alpha, start, sigma, steps = 0.3, 0.8, 2.0, 1.5, 25
    expected = schedule_free_error(lr, beta, alpha, start, (lr * sigma) ** 2, steps)
    answers = schedule_free_path(lr, beta, alpha, 0.0, sigma * np.eye(steps))
    still = schedule_free_path(lr, beta, alpha, start, np.zeros((steps, 1)))
    np.testing.assert_allclose(expected, np.sum(answers**2) + still.item() ** 2, rtol=1e-10)
    assert schedule_free_error(lr, beta, alpha, start, 1.0, 0) == start**2


@pytest.mark.parametrize("strength", [-0.4, 0.0, 3.0])
@pytest.mark.parametrize("steps", [0, 1, 50])
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


# --- Real data -----------------------------------------------------------------------------------------


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
