"""Learning-rate schedules: their values, torch's where it has the same, their states, what is refused."""

import copy
import io
import math

import numpy as np
import pytest
import torch
from torch.optim import AdamW, lr_scheduler

from paceline import PACE
from paceline.schedules import WSD, Constant, Cosine, InverseSqrt, constant, cosine, inverse_sqrt, wsd

# Written from the descriptions, step by step, not from the code.
BY_HAND = [
    (Constant(), [1, 1, 1, 1]),
    (Constant(warmup=1), [1, 1, 1]),
    (Constant(warmup=4), [1 / 4, 2 / 4, 3 / 4, 1, 1, 1]),
    (InverseSqrt(), [1, 2**-0.5, 3**-0.5, 4**-0.5, 5**-0.5]),
    (InverseSqrt(timescale=2.0), [1, (2 / 3) ** 0.5, (2 / 4) ** 0.5, (2 / 5) ** 0.5]),
    (InverseSqrt(warmup=3), [1 / 3, 2 / 3, 1, 1, (3 / 4) ** 0.5, (3 / 5) ** 0.5]),
    (InverseSqrt(warmup=2, timescale=0.5), [0.5, 1, 1, (1 / 3) ** 0.5, (1 / 5) ** 0.5]),
    (Cosine(steps=1), [1, 0, 0]),
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
# With arguments under which every phase passes in 12 steps.
SCHEDULES = {
    "constant": (constant, Constant, {"warmup": 3}),
    "inverse_sqrt": (inverse_sqrt, InverseSqrt, {"warmup": 3, "timescale": 2.5}),
    "cosine": (cosine, Cosine, {"steps": 10, "warmup": 3}),
    "wsd": (wsd, WSD, {"steps": 10, "warmup": 3, "decay": 0.4}),
}
schedules = pytest.mark.parametrize("name", SCHEDULES)


def make_optimizer(lr=0.3, kind=PACE):
    return kind([{"params": [torch.ones(1).requires_grad_()], "lr": lr}])


def rates(optimizer, scheduler, steps):
    """Return the rate of each step of the optimizer."""
    seen = []
    for _ in range(steps):
        seen.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize(("factor", "expected"), BY_HAND, ids=repr)
def test_factors_are_those_written_by_hand(factor, expected):
    assert [factor(k) for k in range(len(expected))] == pytest.approx(expected, rel=1e-15, abs=0)


@pytest.mark.parametrize("kind", [Cosine, WSD])
@pytest.mark.parametrize("steps", [1, 2, 1000, 10**10])
def test_zero_comes_after_the_last_step_and_not_before(kind, steps):
    schedule = kind(steps=steps)
    assert schedule(0) == 1 and 0 < schedule(steps - 1) <= 1
    assert [schedule(k) for k in (steps, steps + 1, 10**15)] == [0, 0, 0]


@schedules
@pytest.mark.parametrize("lr", [0.25, torch.tensor(0.25)], ids=["float", "tensor"])
@pytest.mark.parametrize("kind", [PACE, AdamW])
def test_step_k_runs_at_its_factor_of_the_rate(name, kind, lr):
    schedule, factor, settings = SCHEDULES[name]
    given = copy.deepcopy(lr)
    optimizer = make_optimizer(given, kind)
    found = rates(optimizer, schedule(optimizer, **settings), 12)
    assert found == pytest.approx([0.25 * factor(**settings)(k) for k in range(12)], rel=1e-6, abs=0)
    assert not isinstance(lr, torch.Tensor) or optimizer.param_groups[0]["lr"] is given


TORCHS = {
    "cosine": (lambda o: cosine(o, steps=20), lambda o: lr_scheduler.CosineAnnealingLR(o, 20)),
    "linear": (lambda o: wsd(o, steps=20, decay=1.0), lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, 20)),
    "warm-up": (lambda o: constant(o, warmup=8), lambda o: lr_scheduler.LinearLR(o, 1 / 8, total_iters=7)),
}


@pytest.mark.parametrize("name", TORCHS)
def test_where_torch_has_the_same_schedule_the_rates_are_the_same(name):
    ours, theirs = (
        rates(o, make(o), 21) for o, make in zip((make_optimizer(), make_optimizer()), TORCHS[name])
    )
    assert np.allclose(ours, theirs, rtol=1e-12, atol=1e-16)


def stored(state):
    """Return a state that went through a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@schedules
@pytest.mark.parametrize("at", [0, 2, 5, 9])
def test_a_resumed_run_has_the_same_rates_and_the_settings_of_its_state(name, at):
    schedule, _, settings = SCHEDULES[name]
    first, second = make_optimizer(), make_optimizer()
    scheduler = schedule(first, **settings)
    rates(first, scheduler, at)
    resumed = schedule(second, **({"steps": 1000} if "steps" in settings else {}))
    second.load_state_dict(stored(first.state_dict()))
    resumed.load_state_dict(stored(scheduler.state_dict()))
    assert rates(second, resumed, 12 - at) == rates(first, scheduler, 12 - at)


def test_numbers_of_other_libraries_are_plain_in_the_state():
    scheduler = wsd(make_optimizer(), steps=np.int64(10), decay=np.float32(0.5), warmup=np.int32(2))
    assert stored(scheduler.state_dict())["lr_lambdas"] == [{"steps": 10, "decay": 0.5, "warmup": 2}]


REFUSED = [
    (constant, {"warmup": -1}, "warmup value: -1", "an integer >= 0"),
    (constant, {"warmup": 2.5}, "warmup value: 2.5", "an integer >= 0"),
    (constant, {"warmup": True}, "warmup value: True", "an integer >= 0"),
    (inverse_sqrt, {"timescale": 0}, "timescale value: 0", "> 0 and finite"),
    (inverse_sqrt, {"timescale": math.inf}, "timescale value: inf", "> 0 and finite"),
    (cosine, {"steps": 0}, "steps value: 0", "an integer >= 1"),
    (cosine, {"steps": 10, "warmup": 10}, "warmup value: 10", "< steps = 10"),
    (wsd, {"steps": "10"}, "steps value: '10'", "an integer >= 1"),
    (wsd, {"steps": 10, "decay": 0.0}, "decay value: 0.0", "0 < decay <= 1"),
    (wsd, {"steps": 10, "decay": math.nan}, "decay value: nan", "0 < decay <= 1"),
    (wsd, {"steps": 10, "decay": 0.5, "warmup": 6}, "warmup value: 6", "<= 5, where decay begins"),
]


@pytest.mark.parametrize(("schedule", "settings", "value", "allowed"), REFUSED)
def test_what_is_out_of_range_is_refused_and_changes_nothing(schedule, settings, value, allowed):
    optimizer = make_optimizer()
    with pytest.raises(ValueError) as refusal:
        schedule(optimizer, **settings)
    assert f"Invalid {value}" in str(refusal.value) and allowed in str(refusal.value)
    assert optimizer.param_groups[0]["lr"] == 0.3 and "initial_lr" not in optimizer.param_groups[0]
    with pytest.raises(TypeError, match="list is not an Optimizer"):
        constant([])
