"""Bad input is refused by a ValueError with the argument, its value and what is allowed."""

import numpy as np
import pytest

from paceline.control import family, gains, limits, lqg, recursion, simulate, unknown
from paceline.control.advice import Situation
from paceline.control.bounds import convex_bound, convex_bound_tuned
from paceline.control.discrete import Logistic, PiecewiseLinear, train
from paceline.control.recursion import stylized
from paceline.control.simulate import Diffusion
from paceline.control.unknown import Seen

NAN, INF = float("nan"), float("inf")
TWO, ZERO = np.eye(2), np.zeros(2)
WIDE, HOLED, LOPSIDED = np.ones((2, 3)), np.diag([1.0, NAN]), np.array([[1.0, 0.5], [0.0, 1.0]])
DOWNWARD = -TWO


def refused(call, argument, *inside):
    """Check that a call is refused for an argument, with these texts in its message."""
    with pytest.raises(ValueError) as caught:
        call()
    what, rest = str(caught.value).removeprefix("Invalid ").split(": ", 1)
    assert what == argument
    assert rest.rsplit("; allowed: ", 1)[1].strip()
    for text in inside:
        assert text in rest


# --- Numbers ------------------------------------------------------------------------------------------

LINE = PiecewiseLinear(slopes=TWO, offsets=np.ones(2))
PROBLEM = {"curvature": 1.0, "penalty": 0.1, "horizon": 2.0}
FOUR = PROBLEM | {"time": 0.5}
BOUND = {"pull": 0.1, "rate": 0.1, "lipschitz": 1.0, "sigma": 1.0, "distance": [1.0]}
RUN = {"start": [1.0, 1.0], "lr": 0.1, "pull": 0.1, "rate": 0.1, "steps": 2, "paths": 1, "seed": 0}
CHAIN = {"speed": 0.1, "rate": 0.1, "pull": 0.1}
FREE = {"lr": 0.1, "beta": 0.9, "curvature": 1.0, "start": 1.0, "noise": 1.0, "steps": 3}


def logistic(**other):
    return Logistic(**{"features": np.ones((2, 1)), "labels": np.array([-1.0, 1.0])} | other)


def run(**other):
    return train(LINE, other.pop("start"), **other)


def drawn(**other):
    problem = Diffusion(curvature=1.0, horizon=1.0)
    return simulate.simulate(
        problem, simulate.uncontrolled, **{"start": 0.0, "optimum": 0.0, "steps": 2, "paths": 2} | other
    )


def seen(**other):
    return Seen(**{"time": 1.0, "start": ZERO, "weights": ZERO, "integral": ZERO, "control": 0.0} | other)


def step(**other):
    return recursion.step(recursion.Pair(np.ones(2), np.zeros(2)), np.ones(2), 0.1, 0.1, **other)


def after(steps, start, noise):
    return stylized(0.1, 0.1, 0.1).error_after(steps, start, noise)


def balance(**other):
    return family.balance(stylized(0.1, 0.1, 0.1), **other)


FUNCTIONS = [
    (gains.original_gains, FOUR),
    (gains.original_riccati, FOUR),
    (gains.relaxed_gain, FOUR),
    (gains.relaxed_gain_far, PROBLEM),
    (gains.original_gain_far, FOUR | {"curvature": 9.0}),
    (gains.practical_gain, PROBLEM),
    (gains.original_gains_matrix, FOUR),
    (gains.original_problem, PROBLEM),
    (gains.original_cost, PROBLEM | {"start": 1.0, "variance": 0.5}),
    (lqg.scalar_riccati, {"drift": 1.0, "running_cost": 0.1, "control_cost": 0.5, "final_cost": 1.0}
     | {"horizon": 2.0, "time": 0.5}),
    (Diffusion, PROBLEM),
    (stylized, CHAIN | {"variant": "pre"}),
    (after, {"steps": 2, "start": 1.0, "noise": 1.0}),
    (step, {"rate": 0.1, "variant": "pre"}),
    (limits.limiting_error, CHAIN | {"noise": 1.0, "variant": "pre"}),
    (limits.limiting_error_slope, CHAIN),
    (limits.ar2_variance, {"first": 0.1, "second": 0.2, "noise": 1.0}),
    (limits.sgd_error, {"speed": 0.1}),
    (limits.optimal_pull, {"speed": 0.5, "rate": 0.1}),
    (limits.least_limiting_error, {"speed": 0.5, "rate": 0.1}),
    (limits.error_at_equal_speed, {"radius": 0.9, "pull": 0.1}),
    (convex_bound, BOUND | {"lrs": [0.1]}),
    (convex_bound_tuned, BOUND | {"steps": 3}),
    (family.pace, {"lr": 0.1, "rate": 0.1, "strength": 1.0}),
    (family.gpa, {"lr": 0.1, "mu_x": 0.9, "mu_y": 0.5}),
    (family.ema_nesterov, {"lr": 0.1, "decay": 0.9, "push": 0.5, "curvature": 1.0}),
    (family.schedule_free_error, FREE),
    (family.speed_factor, {"rate": 0.1, "pull": 0.1}),
    (family.right_ratio, {"lr": 0.1, "best_lr": 0.1}),
    (balance, {"curvature": 1.0, "start": 1.0, "noise": 1.0, "steps": 3}),
    (logistic, {"batch": 8}),
    (run, RUN | {"variant": "pre"}),
    (drawn, {"start": 0.0, "optimum": 0.0, "steps": 2}),
    (Situation, {"lr": 1e-3, "steps": 10, "ratio": 0.1, "power": 0.5, "step": 1.0, "best_lr": 1e-3}),
]  # fmt: skip
BAD = {
    "curvature": [NAN, INF], "drift": [NAN, -INF], "start": [NAN, INF], "penalty": [0.0, -0.1, NAN, INF],
    "horizon": [0.0, -2.0, NAN, INF], "time": [-1e-9, 2.001, NAN], "variance": [0.0, -1.0, NAN],
    "running_cost": [-1e-9, NAN], "final_cost": [-1e-9, NAN], "control_cost": [0.0, -1.0, NAN],
    "speed": [0.0, NAN], "rate": [0.0, 1.5, NAN], "pull": [INF, NAN], "noise": [-1.0, NAN],
    "variant": ["during"], "steps": [-1, 2.5], "paths": [0, 1.5], "seed": [-1], "lr": [0.0, NAN],
    "strength": [NAN], "lipschitz": [0.0], "sigma": [-1.0], "distance": [NAN], "lrs": [0.0],
    "first": [NAN], "second": [NAN], "radius": [1.0], "mu_x": [1.0], "mu_y": [1.0], "decay": [1.0],
    "push": [-0.5], "beta": [1.0], "best_lr": [0.0], "batch": [0], "optimum": [NAN], "ratio": [-1.0, INF],
    "power": [2.0], "step": [0.0],
}  # fmt: skip


@pytest.mark.parametrize(("function", "given"), FUNCTIONS)
def test_a_bad_number_is_refused_by_name(function, given):
    function(**given)
    for argument in given:
        for value in BAD[argument]:
            refused(lambda a=argument, v=value: function(**given | {a: v}), argument, repr(value))


SHAKY = "speed, rate, pull"
REFUSED = [
    (lambda: gains.original_gains(1.0, [0.1, -0.1], 2.0, 0.0), "penalty", "[0.1, -0.1]"),
    (lambda: gains.original_gains(1.0, 0.1, 2.0, 2.5), "time", "0 <= time <= horizon = 2"),
    (lambda: gains.original_gain_far(1.0, 0.1, 1.5), "curvature", "1.0", "> 1.5"),
    (lambda: gains.original_riccati_matrix(TWO, 0.1, 1.0, [0.1, 0.2]), "time", "a single number"),
    (lambda: stylized([0.1, 0.2], 0.1, 0.1), "speed", "[0.1, 0.2]", "a single number"),
    (lambda: stylized(0.1, 0.1, 0.1, readout=(1.0, 2.0, 3.0)), "readout", "3.0", "two numbers"),
    (lambda: limits.limiting_error([0.1, 2.5], 0.1, 0.1), SHAKY, "[0.1, 2.5]", "stable"),
    (lambda: limits.limiting_error(0.1, 0.1, 1.5, variant="post"), SHAKY, "1.5", "stable"),
    (lambda: limits.limiting_error(2.5, 0.1, 0.1, variant="post_raw"), SHAKY, "2.5", "stable"),
    (lambda: limits.limiting_error_slope(2.5, 0.1, 0.1), SHAKY, "2.5", "stable"),
    (lambda: limits.ar2_variance(1.0, 0.2, 1.0), "first, second", "radius < 1"),
    (lambda: limits.sgd_error(2.0), "speed", "2.0", "0 < speed < 2"),
    (lambda: limits.optimal_pull(1.0, 0.1), "speed", "1.0", "0 < speed < 1"),
    (lambda: limits.least_limiting_error(0.5, 1.0), "rate", "1.0", "0 < rate < 1"),
    (lambda: limits.error_at_equal_speed(0.9, 1.1), "pull", "1.1", "0 <= pull <= 1"),
    (lambda: convex_bound([0.1, 0.2], **BOUND), "lrs", "[0.1, 0.2]", "rates that do not increase"),
    (lambda: convex_bound([], **BOUND), "lrs", "[]", "at least one"),
    (lambda: convex_bound([0.1], **BOUND | {"pull": -0.1}), "pull", "-0.1", "0 <= pull <= 1"),
    (lambda: convex_bound([0.1], **BOUND | {"rate": 1.0}), "rate", "1.0", "0 < rate < 1"),
    (lambda: convex_bound([0.1], **BOUND | {"pull": ZERO, "distance": [1.0] * 3}), "distance", "as many"),
    (lambda: family.pace(0.1, 0.1, 1.0).on(0.0), "curvature", "0.0", "> 0"),
    (lambda: family.speed_factor(0.5, -1.0), "pull", "-1.0", "over -rate/(1 - rate)"),
    (lambda: logistic(labels=np.array([0.0, 1.0])), "labels", "0.", "-1 and 1"),
    (lambda: logistic(labels=np.ones(3)), "labels", "1.", "one for each row"),
    (lambda: PiecewiseLinear(slopes=np.ones((3, 1)), offsets=ZERO), "offsets", "0.", "one for each row"),
    (lambda: run(**RUN | {"rate": lambda k: 2 - k}), "rate", "0", "0 < rate <= 1"),
    (lambda: run(**RUN | {"start": [1.0] * 3}), "start", "1.0", "2 numbers"),
    (lambda: run(**RUN | {"pull": [0.1, 0.1, 0.1]}), "pull", "0.1", "1 or 2 numbers"),
    (lambda: drawn(start=[0.0, 0.0]), "start", "shape (1,)"),
    (lambda: drawn(paths=1), "paths", "1", "an integer >= 2"),
    (lambda: simulate.practical(Diffusion(curvature=LOPSIDED, horizon=1.0)), "curvature", "a diagonal"),
    (lambda: seen(time=-1.0), "time", "-1.0", ">= 0"),
    (lambda: seen(start=[0.0, NAN]), "start", "nan", "finite"),
    (lambda: seen(control=np.zeros(3)), "start, weights, integral, control", "equal shapes"),
    (lambda: unknown.flat_prior_estimate(seen(time=0.0), TWO), "time", "0.0", "> 0"),
    (lambda: unknown.flat_prior_estimate(seen(), np.ones((2, 2))), "curvature", "an invertible matrix"),
    (lambda: Situation(lr="fast", steps=10, ratio=0.1), "lr", "fast"),
]


@pytest.mark.parametrize(
    ("call", "argument", "inside"), [(call, name, rest) for call, name, *rest in REFUSED]
)
def test_bad_input_is_refused_with_argument_value_and_what_is_allowed(call, argument, inside):
    refused(call, argument, *inside)


# --- Matrices -----------------------------------------------------------------------------------------

PLAIN = {"drift": TWO, "horizon": 1.0, "control_cost": TWO}


def diffusion(**other):
    return Diffusion(**{"curvature": TWO, "horizon": 1.0} | other)


def posterior(**other):
    given = {"curvature": TWO, "covariance": TWO, "prior_mean": ZERO, "prior_covariance": TWO} | other
    return unknown.posterior(seen(), **given)


@pytest.mark.parametrize(
    ("call", "argument", "matrices"),
    [
        (
            lambda m: gains.original_gains_matrix(m, 0.1, 1.0, 0.0),
            "curvature",
            [WIDE, HOLED, np.ones((2, 2, 2))],
        ),
        (lambda m: diffusion(curvature=m), "curvature", [WIDE, HOLED]),
        (lambda m: unknown.flat_prior_estimate(seen(), m), "curvature", [HOLED]),
        (lambda m: lqg.LQG(**PLAIN | {"drift": m}), "drift", [WIDE, HOLED]),
        (lambda m: lqg.LQG(**PLAIN | {"control_cost": m}), "control_cost", [WIDE, HOLED, LOPSIDED, DOWNWARD]),
        (lambda m: lqg.LQG(**PLAIN, running_cost=m), "running_cost", [HOLED, LOPSIDED, DOWNWARD, np.eye(3)]),
        (lambda m: lqg.LQG(**PLAIN, final_cost=m), "final_cost", [HOLED, LOPSIDED, DOWNWARD, np.eye(3)]),
        (lambda m: lqg.LQG(**PLAIN, input=m), "input", [HOLED, np.eye(3)]),
        (
            lambda m: diffusion(covariance=m),
            "covariance",
            [DOWNWARD, 0 * TWO, LOPSIDED, HOLED, WIDE, np.eye(3)],
        ),
        (lambda m: posterior(covariance=m), "covariance", [DOWNWARD, 0 * TWO, LOPSIDED, HOLED, np.eye(3)]),
        (lambda m: posterior(prior_covariance=m), "prior_covariance", [DOWNWARD, LOPSIDED, HOLED, np.eye(3)]),
        (lambda m: posterior(prior_mean=m), "prior_mean", [np.zeros(3), np.array([0.0, NAN])]),
        (lambda t: lqg.LQG(**PLAIN).riccati(t), "time", [-0.1, 1.1, NAN]),
    ],
)
def test_a_matrix_that_cannot_be_is_refused(call, argument, matrices):
    for matrix in matrices:
        refused(lambda m=matrix: call(m), argument)


def test_what_was_seen_may_be_of_many_paths():
    seen(weights=np.zeros((5, 2)), integral=np.zeros((5, 2)))
    posterior(prior_covariance=0 * TWO)  # certain, which is allowed
