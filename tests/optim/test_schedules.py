"""Learning-rate schedules: their values, their ends, their states."""

import copy
import io
import math
import pickle
from dataclasses import FrozenInstanceError
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.optim import AdamW, lr_scheduler

from paceline import PACE
from paceline.optim.schedules import WSD, Constant, Cosine, InverseSqrt, constant, cosine, inverse_sqrt, wsd

# Written from the descriptions, step by step, not from the code.
HAND = [
    (Constant(), [1, 1, 1, 1]),
    (Constant(warmup=1), [1, 1, 1]),
    (Constant(warmup=4), [1 / 4, 2 / 4, 3 / 4, 1, 1, 1]),
    (InverseSqrt(), [1, 2**-0.5, 3**-0.5, 4**-0.5, 5**-0.5]),
    (InverseSqrt(timescale=2.0), [1, (2 / 3) ** 0.5, (2 / 4) ** 0.5, (2 / 5) ** 0.5]),
    (InverseSqrt(warmup=3), [1 / 3, 2 / 3, 1, 1, (3 / 4) ** 0.5, (3 / 5) ** 0.5]),
    (InverseSqrt(warmup=2, timescale=0.5), [0.5, 1, 1, (1 / 3) ** 0.5, (1 / 5) ** 0.5]),
    (Cosine(steps=1), [1, 0, 0]),
    (Cosine(steps=2), [1, 0.5, 0, 0]),
    (Cosine(steps=3), [1, 0.75, 0.25, 0]),
    (Cosine(steps=5, warmup=2), [0.5, 1, 1, 0.75, 0.25, 0, 0]),
    (Cosine(steps=3, warmup=2), [0.5, 1, 1, 0]),
    (WSD(steps=1), [1, 0]),
    (WSD(steps=5), [1, 1, 1, 1, 1, 0, 0]),
    (WSD(steps=10), [1, 1, 1, 1, 1, 1, 1, 1, 1, 0.5, 0, 0]),
    (WSD(steps=10, decay=0.4, warmup=2), [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]),
    (WSD(steps=4, decay=1.0), [1, 0.75, 0.5, 0.25, 0]),
    (WSD(steps=4, decay=1e-9), [1, 1, 1, 1, 0]),
    (WSD(steps=5, decay=0.4, warmup=3), [1 / 3, 2 / 3, 1, 1, 0.5, 0]),
]
ENDING = [Cosine, WSD]

# The functions with arguments under which every phase passes in 12 steps, and the same as a factor.
SCHEDULES = {
    "constant": (constant, {"warmup": 3}, Constant),
    "inverse_sqrt": (inverse_sqrt, {"warmup": 3, "timescale": 2.5}, InverseSqrt),
    "cosine": (cosine, {"steps": 10, "warmup": 3}, Cosine),
    "wsd": (wsd, {"steps": 10, "warmup": 3, "decay": 0.4}, WSD),
}


def make_optimizer(lr=0.3, kind=PACE):
    return kind([torch.ones(2).requires_grad_()], lr=lr)


def rates(optimizer, scheduler, steps):
    """Per optimizer step, the rates of all groups."""
    seen = []
    for _ in range(steps):
        seen.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize("factor, expected", HAND, ids=repr)
def test_factors_are_those_written_by_hand(factor, expected):
    assert [factor(k) for k in range(len(expected))] == pytest.approx(expected, rel=1e-15, abs=0)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [1, 2, 7])
def test_warm_up_starts_at_its_fraction_and_ends_at_one(name, warmup):
    _, arguments, factor = SCHEDULES[name]
    warming = factor(**{**arguments, **({"steps": 20} if factor in ENDING else {}), "warmup": warmup})
    ramp = [warming(k) for k in range(warmup)]
    assert ramp == [(k + 1) / warmup for k in range(warmup)]
    assert ramp[0] > 0 and ramp[-1] == 1 == warming(warmup)


@pytest.mark.parametrize("factor", ENDING)
@pytest.mark.parametrize("steps", [1, 2, 3, 10, 1000, 10**6, 10**10])
def test_zero_comes_after_the_last_step_and_not_before(factor, steps):
    schedule = factor(steps=steps)
    assert schedule(0) == 1
    assert 0 < schedule(steps - 1) <= 1
    assert [schedule(k) for k in (steps, steps + 1, 2 * steps, 10**15)] == [0, 0, 0, 0]


@pytest.mark.parametrize("name", SCHEDULES)
def test_factors_stay_between_zero_and_one_and_never_rise_after_the_warm_up(name):
    _, arguments, factor = SCHEDULES[name]
    values = [factor(**arguments)(k) for k in range(3, 40)]
    assert all(0 <= later <= earlier <= 1 for earlier, later in pairwise(values))


def test_the_timescale_is_where_the_rate_has_fallen_by_root_two():
    for warmup in (0, 5):
        schedule = InverseSqrt(warmup=warmup, timescale=100)
        assert schedule(warmup + 100) == pytest.approx(0.5**0.5)
    assert InverseSqrt(warmup=10)(1000) == pytest.approx((10 / 1000) ** 0.5)
    assert InverseSqrt()(10**12) == pytest.approx(1e-6)


# --- As schedulers --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [PACE, AdamW])
@pytest.mark.parametrize("name", SCHEDULES)
def test_step_k_runs_at_its_factor_of_each_groups_rate(name, kind):
    schedule, arguments, factor = SCHEDULES[name]
    groups = [{"params": [torch.ones(1).requires_grad_()], "lr": lr} for lr in (0.3, 0.001)]
    optimizer = kind(groups)
    scheduler = schedule(optimizer, **arguments)
    assert isinstance(scheduler, lr_scheduler.LRScheduler)
    factors = [factor(**arguments)(k) for k in range(12)]
    assert rates(optimizer, scheduler, 12) == [[0.3 * f, 0.001 * f] for f in factors]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_tensor_rate_is_filled_in_place(name):
    schedule, arguments, factor = SCHEDULES[name]
    rate = torch.tensor(0.25, dtype=torch.float64)
    optimizer = make_optimizer(rate)
    seen = rates(optimizer, schedule(optimizer, **arguments), 12)
    assert seen == [[0.25 * factor(**arguments)(k)] for k in range(12)]
    assert optimizer.param_groups[0]["lr"] is rate


class Wrapper(torch.optim.Optimizer):
    """As trainers wrap: an Optimizer in name, everything else the inner one's."""

    def __init__(self, inner):
        self.inner = inner

    @property
    def param_groups(self):
        return self.inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_wrapped_optimizer_is_scheduled_too(name):
    schedule, arguments, _ = SCHEDULES[name]
    plain, wrapped = make_optimizer(), Wrapper(make_optimizer())
    expected = rates(plain, schedule(plain, **arguments), 12)
    assert rates(wrapped, schedule(wrapped, **arguments), 12) == expected


TORCHS = {
    "cosine": (lambda o: cosine(o, steps=20), lambda o: lr_scheduler.CosineAnnealingLR(o, 20)),
    "linear": (lambda o: wsd(o, steps=20, decay=1.0), lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, 20)),
    "warm-up": (
        lambda o: constant(o, warmup=8),
        lambda o: lr_scheduler.LinearLR(o, 1 / 8, total_iters=7),
    ),
    "wsd": (
        lambda o: wsd(o, steps=20, decay=0.5, warmup=4),
        lambda o: lr_scheduler.SequentialLR(
            o,
            [lr_scheduler.LinearLR(o, 1 / 4, total_iters=3), lr_scheduler.LinearLR(o, 1.0, 0.0, 10)],
            milestones=[10],
        ),
    ),
}


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")  # SequentialLR's own
def test_where_torch_has_the_same_schedule_the_rates_are_the_same(name):
    ours, theirs = TORCHS[name]
    a, b = make_optimizer(), make_optimizer()
    expected = rates(b, theirs(b), 21)
    assert np.allclose(rates(a, ours(a), 21), expected, rtol=1e-12, atol=1e-16)


# --- States ---------------------------------------------------------------------------------------


def stored(state):
    """Through a file, as a checkpoint goes."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("lr", [0.3, torch.tensor(0.3)], ids=["float", "tensor"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_resumed_at_any_step_has_the_same_rates(name, lr):
    schedule, arguments, _ = SCHEDULES[name]
    whole = make_optimizer(copy.deepcopy(lr))
    expected = rates(whole, schedule(whole, **arguments), 12)
    for at in range(12):
        first = make_optimizer(copy.deepcopy(lr))
        scheduler = schedule(first, **arguments)
        rates(first, scheduler, at)
        states = stored([first.state_dict(), scheduler.state_dict()])
        second = make_optimizer(copy.deepcopy(lr))
        resumed = schedule(second, **arguments)
        second.load_state_dict(states[0])
        resumed.load_state_dict(states[1])
        assert resumed.last_epoch == at
        assert rates(second, resumed, 12 - at) == expected[at:]


def test_a_loaded_state_brings_its_settings():
    first, second = make_optimizer(), make_optimizer()
    scheduler, resumed = wsd(first, steps=10, decay=0.4, warmup=3), wsd(second, steps=1000)
    resumed.load_state_dict(stored(scheduler.state_dict()))
    assert scheduler.state_dict()["lr_lambdas"] == [{"steps": 10, "decay": 0.4, "warmup": 3}]
    assert resumed.lr_lambdas == [WSD(steps=10, decay=0.4, warmup=3)]
    rates(first, scheduler, 8)
    rates(second, resumed, 8)
    assert second.param_groups[0]["lr"] == first.param_groups[0]["lr"] < 0.3


def test_numbers_of_other_libraries_are_numbers():
    """A sweep hands over NumPy scalars; the state stays loadable."""
    optimizer = make_optimizer()
    scheduler = wsd(optimizer, steps=np.int64(10), decay=np.float32(0.5), warmup=np.int32(2))
    assert scheduler.lr_lambdas == [WSD(steps=10, decay=0.5, warmup=2)]
    stored(scheduler.state_dict())
    stored(inverse_sqrt(make_optimizer(), timescale=np.float64(3)).state_dict())


@pytest.mark.parametrize("name", SCHEDULES)
def test_factors_and_schedulers_can_be_copied_and_pickled(name):
    schedule, arguments, factor = SCHEDULES[name]
    original = factor(**arguments)
    assert pickle.loads(pickle.dumps(original)) == original == copy.deepcopy(original)
    scheduler = schedule(make_optimizer(), **arguments)
    twin = pickle.loads(pickle.dumps(scheduler))
    assert twin.state_dict() == scheduler.state_dict()


def test_factors_do_not_change():
    with pytest.raises(FrozenInstanceError):
        Cosine(steps=10).steps = 20


# --- What is refused ------------------------------------------------------------------------------

REFUSED = [
    (constant, {"warmup": -1}, "warmup value: -1", "an integer >= 0"),
    (constant, {"warmup": 2.5}, "warmup value: 2.5", "an integer >= 0"),
    (constant, {"warmup": True}, "warmup value: True", "an integer >= 0"),
    (constant, {"warmup": None}, "warmup value: None", "an integer >= 0"),
    (inverse_sqrt, {"warmup": -1}, "warmup value: -1", "an integer >= 0"),
    (inverse_sqrt, {"timescale": 0}, "timescale value: 0", "> 0 and finite"),
    (inverse_sqrt, {"timescale": math.nan}, "timescale value: nan", "> 0 and finite"),
    (inverse_sqrt, {"timescale": math.inf}, "timescale value: inf", "> 0 and finite"),
    (inverse_sqrt, {"timescale": "long"}, "timescale value: 'long'", "> 0 and finite"),
    (cosine, {"steps": 0}, "steps value: 0", "an integer >= 1"),
    (cosine, {"steps": 10.0}, "steps value: 10.0", "an integer >= 1"),
    (cosine, {"steps": 10, "warmup": 10}, "warmup value: 10", "< steps = 10"),
    (cosine, {"steps": 10, "warmup": -1}, "warmup value: -1", "an integer >= 0"),
    (wsd, {"steps": -5}, "steps value: -5", "an integer >= 1"),
    (wsd, {"steps": "10"}, "steps value: '10'", "an integer >= 1"),
    (wsd, {"steps": 10, "decay": 0.0}, "decay value: 0.0", "0 < decay <= 1"),
    (wsd, {"steps": 10, "decay": 1.1}, "decay value: 1.1", "0 < decay <= 1"),
    (wsd, {"steps": 10, "decay": math.nan}, "decay value: nan", "0 < decay <= 1"),
    (wsd, {"steps": 10, "decay": 0.5, "warmup": 6}, "warmup value: 6", "<= 5, where decay begins"),
    (wsd, {"steps": 10, "warmup": -1}, "warmup value: -1", "an integer >= 0"),
]


@pytest.mark.parametrize("schedule, arguments, value, allowed", REFUSED)
def test_out_of_range_arguments_are_refused_with_name_value_and_range(schedule, arguments, value, allowed):
    optimizer = make_optimizer()
    with pytest.raises(ValueError) as refusal:
        schedule(optimizer, **arguments)
    assert f"Invalid {value}" in str(refusal.value) and allowed in str(refusal.value)
    assert optimizer.param_groups[0]["lr"] == 0.3 and "initial_lr" not in optimizer.param_groups[0]


@pytest.mark.parametrize("thing", [[], None, torch.ones(1)])
def test_only_an_optimizer_is_scheduled(thing):
    with pytest.raises(TypeError, match=f"{type(thing).__name__} is not an Optimizer"):
        constant(thing)
