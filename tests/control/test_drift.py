"""A drifting quadratic: exact moments, their long run, the sign of the best strength, the feed-forward."""

from itertools import pairwise

import numpy as np
import pytest

from paceline.control.drift import Drifting, breakeven_noise, feed_forward, relaxed_feed_forward, steady
from paceline.control.gains import original_gains, original_problem, relaxed_gain, relaxed_problem
from paceline.control.recursion import stylized


def test_a_fixed_optimum_is_the_stylized_recursion():
    problem = Drifting(curvature=0.3, sigma=0.5, start=2.0, floor=0.1)
    for strength in (-0.5, 0.0, 4.0):
        eta = 0.2 * (1 + strength)
        expected = stylized(0.3 * eta, 0.1, 0.1 * strength).error_after(40, 2.0, (eta * 0.5) ** 2)
        found = problem.losses(0.2, strength, 50, 50, 40)
        np.testing.assert_allclose(found.returned, 0.15 * expected, rtol=1e-12)


def test_moments_are_those_of_simulated_paths():
    alpha, sigma, ramp = np.array([1.0, 0.1]), np.array([0.5, 1.0]), np.array([0.02, -0.05])
    lr, strength, power, returned, steps, shape = 0.4, -0.5, 0.5, 0.7, 100, (10_000, 2)
    rng = np.random.default_rng(0)
    live, average, late, optimum = (np.full(shape, start) for start in (1.0, 1.0, 1.0, 0.0))
    for t in range(1, steps + 1):
        growth = 1 + 0.7 * (0.5 * (live - optimum) ** 2 @ alpha)
        gradient = alpha * (live - optimum) + sigma * rng.normal(size=shape) * np.sqrt(growth)[:, None]
        pull = strength * (average - live) / (1 + t) ** power
        live = live - lr * (1 + strength) * gradient + pull
        average = average + (live - average) / (1 + t) ** power
        late = late + (live - late) / (1 + t) ** returned
        optimum = optimum + ramp + 0.1 * rng.normal(size=shape)
    problem = Drifting(curvature=alpha, sigma=sigma, velocity=ramp, wander=0.1, start=1.0, growth=0.7)
    found = problem.losses(lr, strength, power, returned, steps)
    lag, error, excess = (late - optimum).mean(axis=0), late - optimum, 0.5 * (live - optimum) ** 2 @ alpha
    around = 0.5 * (error - lag) ** 2 @ alpha
    assert abs(around.mean() - found.variance[0]) < 4 * around.std() / 100
    assert abs(excess.mean() - found.live[0]) < 4 * excess.std() / 100
    np.testing.assert_allclose(0.5 * lag**2 @ alpha, found.bias[0], rtol=0.05)


CASES = [(0.1, 0.05, -0.9), (0.3, 0.03, 0.8), (1.2, 0.1, -0.5), (0.1, 0.2, 3.0)]


@pytest.mark.parametrize(("speed", "rate", "strength"), CASES)
def test_the_recursion_ends_in_the_closed_form(speed, rate, strength):
    problem = Drifting(curvature=speed, sigma=0.7, velocity=0.03, wander=0.2, floor=rate)
    found = problem.losses(1 / (1 + strength), strength, 50, 50, 1200)
    form = steady(speed, rate, rate * strength, 0.03, 0.49, 0.2)
    np.testing.assert_allclose(found.bias, speed / 2 * form.lag**2, rtol=1e-10)
    np.testing.assert_allclose(found.variance, speed / 2 * form.variance, rtol=1e-10)
    n = 2 - rate - (1 - rate) * (speed + rate * strength)
    k = 1 / (1 + (1 - rate) * strength + (1 / rate - 1) * speed)
    error = (0.03 / (speed * k)) ** 2 + 0.49 * k / (2 * speed) / (1 - speed * rate / (2 * n))
    still = steady(speed, rate, rate * strength, 0.03, 0.49)
    np.testing.assert_allclose(still.lag**2 + still.variance, error, rtol=1e-12)


def test_at_a_given_lr_the_strength_cancels_for_long_averages():
    strengths = np.array([0.0, -0.5, -0.9, 1.0])
    for rate in (0.02, 0.005, 0.001):
        form = steady(0.2 * (1 + strengths), rate, rate * strengths, 0.01, (1 + strengths) ** 2)
        error = form.lag**2 + form.variance
        assert np.all(abs(error / error[0] - 1) < rate)


@pytest.mark.parametrize(("velocity", "wander"), [(0.3, 0.0), (0.0, 0.4), (0.2, 0.1)])
@pytest.mark.parametrize(("speed", "rate"), [(0.01, 0.02), (0.1, 0.05), (0.7, 0.2), (1.1, 0.1)])
def test_the_best_strength_is_a_push_below_the_breakeven_noise_and_a_pull_above(
    speed, rate, velocity, wander
):
    strengths, level = np.linspace(-0.99, 3.0, 400), breakeven_noise(speed, rate, velocity, wander)
    for factor, sign in ((0.9, -1), (1.1, 1)):
        form = steady(speed, rate, rate * strengths, velocity, level * factor, wander)
        error = form.lag**2 + form.variance
        assert np.sign(strengths[np.argmin(error)]) == sign
        assert np.all(np.diff(error, 2) > 0)
    assert breakeven_noise(speed, rate) == 0  # without drift a pull is best at any noise
    small = breakeven_noise(2e-4, 1e-4, velocity, wander)
    np.testing.assert_allclose(small, 4 * velocity**2 * 27 / 2e-4 + 7 * wander**2, rtol=2e-3)


@pytest.mark.parametrize(("velocity", "low", "high"), [(0, 0.99, 1.02), (0.01, 0.93, 0.97), (0.3, 0.5, 0.8)])
def test_with_everything_tuned_a_push_ties_without_drift_and_wins_with_enough(velocity, low, high):
    problem = Drifting(curvature=np.logspace(-3, 0, 5), velocity=velocity, start=-np.logspace(0.3, 0, 5))
    grid = np.meshgrid(2.0 ** np.arange(-5, 2.1, 0.5), [0.3, 0.6, 0.8], np.arange(0.1, 1, 0.1))
    lr, power, returned = (values.ravel() for values in grid)
    push, ema = (problem.losses(lr, r, power, returned, 200).returned.min() for r in (-0.5, 0.0))
    assert low < push / ema < high


def by_dynamic_programming(a, entry, running, final, penalty, dt, steps):
    """The gain at time 0 of the Euler chain whose state holds the velocity; control enters the first."""
    n = len(a)
    move, push = np.eye(n + 1), dt * np.eye(n + 1)[:, :1]
    move[:n] += dt * np.hstack([a, -np.array(entry)])
    value, running = np.diag([*final, 0.0]), dt * np.diag([*running, 0.0])
    for _ in range(steps):
        gain = push.T @ value @ move / (dt * penalty + push.T @ value @ push)
        value = running + move.T @ value @ (move - push @ gain)
    return gain[0]


@pytest.mark.parametrize(("alpha", "penalty", "horizon"), [(0.7, 0.3, 3), (0.1, 0.05, 2), (2.0, 0.5, 2)])
def test_feedback_and_feed_forward_by_dynamic_programming(alpha, penalty, horizon):
    share, of = relaxed_feed_forward(alpha, penalty, horizon, 0.0), (alpha, penalty, horizon)
    relaxed = ([[-alpha]], [[1.0]], [1 / horizon], [0.0]), [relaxed_gain(*of, 0.0)], relaxed_problem(*of)
    mean = [[-alpha, 0.0], [1.0, 0.0]], [[1.0], [0.0]], [0.0, 0.0], [0.0, horizon**-2]
    for parts, feedback, problem in (relaxed, (mean, original_gains(*of, 0.0), original_problem(*of))):
        chain = [by_dynamic_programming(*parts, penalty, horizon / n, n) for n in 50 * 2 ** np.arange(6)]
        for order in range(1, 6):  # Richardson: the chain's error is a series in dt
            chain = [(2**order * fine - rough) / (2**order - 1) for rough, fine in pairwise(chain)]
        np.testing.assert_allclose(chain[0][:-1], np.array(feedback), rtol=1e-8)
        np.testing.assert_allclose(feed_forward(problem, 0.0, parts[1]), [[-chain[0][-1]]], rtol=1e-8)
    np.testing.assert_allclose(feed_forward(relaxed[2], 0.0), [[share]], rtol=1e-10)
    form = steady(alpha * 0.1, 0.02, -0.02 * share / 0.98, 0.3)  # the push that equals the feed-forward
    np.testing.assert_allclose(form.live_lag, -0.3 * (1 - share) / (alpha * 0.1), rtol=1e-12)
