"""Bad input is refused by a ValueError with the argument, its value and what is allowed."""

import numpy as np
import pytest

from paceline.control import family, gains, limits, lqg, recursion, simulate, unknown
from paceline.control.bounds import convex_bound, convex_bound_tuned
from paceline.control.discrete import Logistic, PiecewiseLinear, train
from paceline.control.recursion import stylized
from paceline.control.simulate import Diffusion
from paceline.control.unknown import Seen

NAN, INF = float("nan"), float("inf")
TWO, ZERO = np.eye(2), np.zeros(2)
WIDE, HOLED, LOPSIDED, DOWNWARD = (
    np.ones((2, 3)),
    np.diag([1.0, NAN]),
    np.array([[1.0, 0.5], [0.0, 1.0]]),
    -TWO,
)


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

PROBLEM = {"curvature": 1.0, "penalty": 0.1, "horizon": 2.0}
FOUR = PROBLEM | {"time": 0.5}
SCALAR = {
    "drift": 1.0,
    "running_cost": 0.1,
    "control_cost": 0.5,
    "final_cost": 1.0,
    "horizon": 2.0,
    "time": 0.5,
}
FUNCTIONS = [
    (gains.original_gains, FOUR),
    (gains.original_riccati, FOUR),
    (gains.relaxed_gain, FOUR),
    (gains.relaxed_gain_far, PROBLEM),
    (gains.original_gain_far, FOUR | {"curvature": 9.0}),
    (gains.practical_gain, PROBLEM),
    (gains.original_gains_matrix, FOUR),
    (gains.original_problem, PROBLEM),
    (gains.relaxed_problem, PROBLEM),
    (gains.original_cost, PROBLEM | {"start": 1.0, "variance": 0.5}),
    (lqg.scalar_riccati, SCALAR),
    (Diffusion, PROBLEM),
]
BAD = {
    "curvature": [NAN, INF],
    "drift": [NAN, -INF],
    "start": [NAN, INF],
    "penalty": [0.0, -0.1, NAN, INF],
    "horizon": [0.0, -2.0, NAN, INF],
    "time": [-1e-9, 2.001, NAN],
    "variance": [0.0, -1.0, NAN],
    "running_cost": [-1e-9, NAN],
    "final_cost": [-1e-9, NAN],
    "control_cost": [0.0, -1.0, NAN],
}


@pytest.mark.parametrize(("function", "given"), FUNCTIONS)
def test_a_bad_number_is_refused_by_name(function, given):
    function(**given)
    for argument in given:
        for value in BAD[argument]:
            refused(lambda a=argument, v=value: function(**given | {a: v}), argument, repr(value))


PAIR = recursion.Pair(np.ones(2), np.zeros(2))
LINE = PiecewiseLinear(slopes=TWO, offsets=np.ones(2))
RUN = {"lr": 0.1, "pull": 0.1, "rate": 0.1, "steps": 2}
BOUND = {"lrs": [0.1], "pull": 0.1, "rate": 0.1, "lipschitz": 1.0, "sigma": 1.0, "distance": [1.0]}
TUNED = {"steps": 3} | {name: value for name, value in BOUND.items() if name != "lrs"}
RATE, PART = "0 < rate <= 1", "0 <= pull <= 1"


def seen(**other):
    return Seen(**{"time": 1.0, "start": ZERO, "weights": ZERO, "integral": ZERO, "control": 0.0} | other)


def logistic(**other):
    return Logistic(**{"features": np.ones((2, 1)), "labels": np.array([-1.0, 1.0])} | other)


def run(**other):
    return train(LINE, other.pop("start", [1.0, 1.0]), **RUN | other)


def drawn(**other):
    return simulate.simulate(
        Diffusion(curvature=1.0, horizon=1.0),
        simulate.uncontrolled,
        **{"start": 0.0, "optimum": 0.0, "steps": 2, "paths": 2} | other,
    )


REFUSED = [
    (lambda: gains.original_gains(1.0, [0.1, -0.1], 2.0, 0.0), "penalty", "[0.1, -0.1]"),
    (lambda: gains.original_gains(1.0, 0.1, 2.0, 2.5), "time", "0 <= time <= horizon = 2"),
    (lambda: gains.original_gain_far(1.0, 0.1, 1.5), "curvature", "1.0", "> 1.5"),
    (lambda: gains.original_riccati_matrix(TWO, 0.1, 1.0, [0.1, 0.2]), "time", "a single number"),
    (lambda: stylized(0.1, 0.0, 0.1), "rate", "0.0", RATE),
    (lambda: stylized(0.1, 1.5, 0.1), "rate", "1.5", RATE),
    (lambda: stylized(0.0, 0.1, 0.1), "speed", "0.0", "> 0"),
    (lambda: stylized([0.1, 0.2], 0.1, 0.1), "speed", "[0.1, 0.2]", "a single number"),
    (lambda: stylized(0.1, 0.1, INF), "pull", "inf", "finite"),
    (lambda: stylized(0.1, 0.1, 0.1, "during"), "variant", "'during'", "pre, post, lookahead, post_raw"),
    (lambda: stylized(0.1, 0.1, 0.1, readout=(1.0, 2.0, 3.0)), "readout", "3.0", "two numbers"),
    (lambda: stylized(0.1, 0.1, 0.1).error_after(-1, 1.0), "steps", "-1", "an integer >= 0"),
    (lambda: stylized(0.1, 0.1, 0.1).error_after(2.5, 1.0), "steps", "2.5", "an integer >= 0"),
    (lambda: stylized(0.1, 0.1, 0.1).error_after(2, NAN), "start", "nan", "finite"),
    (lambda: stylized(0.1, 0.1, 0.1).error_after(2, 1.0, -1.0), "noise", "-1.0", ">= 0"),
    (lambda: recursion.step(PAIR, np.ones(2), 0.1, 0.1, 0.1, "during"), "variant", "'during'", "post_raw"),
    (lambda: recursion.step(PAIR, np.ones(2), 0.1, 0.1, 1.1), "rate", "1.1", RATE),
    (lambda: limits.limiting_error([0.1, 2.5], 0.1, 0.1), "speed, rate, pull", "[0.1, 2.5]", "stable"),
    (lambda: limits.limiting_error(0.1, 0.1, 1.5, variant="post"), "speed, rate, pull", "1.5", "stable"),
    (lambda: limits.limiting_error(2.5, 0.1, 0.1, variant="post_raw"), "speed, rate, pull", "2.5", "stable"),
    (lambda: limits.limiting_error([0.1, NAN], 0.1, 0.1), "speed", "nan", "finite"),
    (lambda: limits.limiting_error(0.1, 0.1, 0.1, -2.0), "noise", "-2.0", ">= 0"),
    (lambda: limits.limiting_error(0.1, 0.1, 0.1, variant="during"), "variant", "'during'", "lookahead"),
    (lambda: limits.limiting_error_slope(2.5, 0.1, 0.1), "speed, rate, pull", "2.5", "stable"),
    (lambda: limits.ar2_variance(NAN, 0.2, 1.0), "first", "nan", "finite"),
    (lambda: limits.ar2_variance(0.1, 0.2, -1.0), "noise", "-1.0", ">= 0"),
    (lambda: limits.sgd_error(2.0), "speed", "2.0", "0 < speed < 2"),
    (lambda: limits.optimal_pull(1.0, 0.1), "speed", "1.0", "0 < speed < 1"),
    (lambda: limits.optimal_pull(0.1, 1.0), "rate", "1.0", "0 < rate < 1"),
    (lambda: limits.least_limiting_error(0.5, 1.0), "rate", "1.0", "0 < rate < 1"),
    (lambda: limits.error_at_equal_speed(1.0, 0.1), "radius", "1.0", "0 < radius < 1"),
    (lambda: limits.error_at_equal_speed(0.9, 1.1), "pull", "1.1", PART),
    (lambda: convex_bound(**BOUND | {"lrs": [0.1, 0.2]}), "lrs", "[0.1, 0.2]", "rates that do not increase"),
    (lambda: convex_bound(**BOUND | {"lrs": [0.1, 0.0]}), "lrs", "[0.1, 0.0]", "> 0"),
    (lambda: convex_bound(**BOUND | {"lrs": []}), "lrs", "[]", "at least one"),
    (lambda: convex_bound(**BOUND | {"pull": 1.1}), "pull", "1.1", PART),
    (lambda: convex_bound(**BOUND | {"pull": -0.1}), "pull", "-0.1", PART),
    (lambda: convex_bound(**BOUND | {"rate": 1.0}), "rate", "1.0", "0 < rate < 1"),
    (lambda: convex_bound(**BOUND | {"lipschitz": 0.0}), "lipschitz", "0.0", "> 0"),
    (lambda: convex_bound(**BOUND | {"sigma": -1.0}), "sigma", "-1.0", ">= 0"),
    (lambda: convex_bound(**BOUND | {"pull": [0.1, 0.2], "distance": [1.0] * 3}), "distance", "as many"),
    (lambda: convex_bound(**BOUND | {"distance": [NAN]}), "distance", "nan", "finite"),
    (lambda: convex_bound_tuned(**TUNED | {"steps": 0}), "steps", "0", "an integer >= 1"),
    (lambda: family.pace(0.0, 0.1, 1.0), "lr", "0.0", "> 0"),
    (lambda: family.pace(0.1, 2.0, 1.0), "rate", "2.0", RATE),
    (lambda: family.pace(0.1, 0.1, NAN), "strength", "nan", "finite"),
    (lambda: family.pace(0.1, 0.1, 1.0).on(0.0), "curvature", "0.0", "> 0"),
    (lambda: family.gpa(0.1, 1.0, 0.5), "mu_x", "1.0", "0 <= mu_x < 1"),
    (lambda: family.gpa(0.1, 0.9, 1.0), "mu_y", "1.0", "0 <= mu_y < 1"),
    (lambda: family.ema_nesterov(0.1, 1.0, 0.5, 1.0), "decay", "1.0", "0 < decay < 1"),
    (lambda: family.ema_nesterov(0.1, 0.9, -0.5, 1.0), "push", "-0.5", ">= 0"),
    (lambda: family.schedule_free_error(0.1, 1.0, 1.0, 1.0, 1.0, 3), "beta", "1.0", "0 <= beta < 1"),
    (lambda: family.schedule_free_error(0.1, 0.9, 1.0, 1.0, 1.0, -3), "steps", "-3", "an integer >= 0"),
    (lambda: family.speed_factor(0.5, -1.0), "pull", "-1.0", "over -rate/(1 - rate)"),
    (lambda: family.right_ratio(0.1, 0.0), "best_lr", "0.0", "> 0"),
    (lambda: family.balance(stylized(0.1, 0.1, 0.1), -1.0, 1.0, 1.0, 3), "curvature", "-1.0", "> 0"),
    (lambda: family.balance(stylized(0.1, 0.1, 0.1), 1.0, 1.0, 1.0, 1.5), "steps", "1.5", "an integer >= 0"),
    (lambda: logistic(labels=np.array([0.0, 1.0])), "labels", "0.", "-1 and 1"),
    (lambda: logistic(labels=np.ones(3)), "labels", "1.", "one for each row"),
    (lambda: logistic(decay=0.0), "decay", "0.0", "> 0"),
    (lambda: logistic(batch=0), "batch", "0", ">= 1"),
    (
        lambda: PiecewiseLinear(slopes=np.ones((3, 1)), offsets=np.ones(2)),
        "offsets",
        "1.",
        "one for each row",
    ),
    (lambda: run(lr=0.0), "lr", "0.0", "> 0"),
    (lambda: run(rate=lambda k: 2 - k), "rate", "0", RATE),
    (lambda: run(steps=0), "steps", "0", "an integer >= 1"),
    (lambda: run(paths=0), "paths", "0", "an integer >= 1"),
    (lambda: run(seed=-1), "seed", "-1", "an integer >= 0"),
    (lambda: run(variant="during"), "variant", "'during'", "post_raw"),
    (lambda: run(start=[1.0, NAN]), "start", "nan", "finite"),
    (lambda: run(start=[1.0] * 3), "start", "1.0", "2 numbers"),
    (lambda: run(pull=NAN), "pull", "nan", "finite"),
    (lambda: run(pull=[0.1, 0.1, 0.1]), "pull", "0.1", "1 or 2 numbers"),
    (lambda: drawn(start=NAN), "start", "nan", "finite"),
    (lambda: drawn(optimum=NAN), "optimum", "nan", "finite"),
    (lambda: drawn(start=[0.0, 0.0]), "start", "shape (1,)"),
    (lambda: drawn(steps=1.5), "steps", "1.5", "an integer >= 1"),
    (lambda: drawn(paths=1), "paths", "1", "an integer >= 2"),
    (
        lambda: simulate.practical(Diffusion(curvature=LOPSIDED, horizon=1.0)),
        "curvature",
        "a diagonal matrix",
    ),
    (lambda: seen(time=-1.0), "time", "-1.0", ">= 0"),
    (lambda: seen(time=INF), "time", "inf", "finite"),
    (lambda: seen(start=[0.0, NAN]), "start", "nan", "finite"),
    (lambda: seen(control=np.zeros(3)), "start, weights, integral, control", "equal shapes"),
    (lambda: unknown.flat_prior_estimate(seen(time=0.0), TWO), "time", "0.0", "> 0"),
    (lambda: unknown.flat_prior_estimate(seen(), np.ones((2, 2))), "curvature", "an invertible matrix"),
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
        (lambda m: gains.relaxed_problem(m, 0.1, 1.0), "curvature", [WIDE, HOLED]),
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
