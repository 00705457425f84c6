"""Bad numbers: zeros, extremes, NaN and Inf never spread, and can be skipped."""

import math

import pytest
import torch
from problems import PATHS, assert_same_bits, everything, make_gradients, make_parameters, run, set_gradients

from paceline import PACE

GAINS = [
    ("paper", 3e-3),
    ("paper", 1e6),
    ("paper", math.inf),
    ("uniform", 0.7),
    ("scaled", 15.0),
]


def stepped(optimizer_class, gradient, steps, **settings):
    parameter = torch.tensor([1.0, -2.0, 0.5, 3.0]).requires_grad_()
    optimizer = optimizer_class([parameter], lr=1e-3, **settings)
    for _ in range(steps):
        parameter.grad = torch.as_tensor(gradient, dtype=torch.float32).expand(4).clone()
        optimizer.step()
    return parameter.detach(), optimizer


@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-38])
@pytest.mark.parametrize("gain, strength", [*GAINS, ("paper", 0.0), ("paper", 0.1)])
@pytest.mark.parametrize("max_gain", [1.0, math.inf])
def test_zero_gradients_give_no_nan_where_adamw_gives_none(gain, strength, eps, max_gain, foreach):
    """N6: v = 0, at the first step and later."""
    if eps == 0.0:
        theirs, _ = stepped(torch.optim.AdamW, 0.0, 3, eps=eps)
        assert theirs.isnan().all()  # 0/0 in AdamW itself
        return
    # Unclipped, a gain of 1e38 throws any weight with a gap away, as it should; one without must stay.
    decay = 1e-2 if max_gain == 1.0 else 0.0
    settings = {"gain": gain, "pullback_strength": strength, "max_gain": max_gain, "weight_decay": decay}
    ours, optimizer = stepped(PACE, 0.0, 3, eps=eps, foreach=foreach, **settings)
    assert ours.isfinite().all()
    assert next(iter(optimizer.state.values()))["average"].isfinite().all()


SIZES = [0.0, -0.0, 1e-45, 1e-30, 1.0, 1e10, 1e18, 1e19, 1e38]


@pytest.mark.slow
@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("gain, strength", GAINS)
@pytest.mark.parametrize("gap", ["pre", "lookahead"])
def test_extreme_gradients_stay_finite_where_adamw_does(size, gain, strength, gap, foreach):
    """N7: finite in, finite out; at 1e19 the second moment overflows float32, and AdamW survives that."""
    theirs, _ = stepped(torch.optim.AdamW, size, 5, foreach=foreach)
    ours, optimizer = stepped(PACE, size, 5, gain=gain, pullback_strength=strength, gap=gap, foreach=foreach)
    assert theirs.isfinite().all() or size > 1e18
    assert torch.equal(ours.isfinite(), theirs.isfinite())
    assert torch.equal(next(iter(optimizer.state.values()))["average"].isfinite(), theirs.isfinite())


@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("lr, strength", [(2.0, math.inf), (10.0, 1e38), (torch.tensor(2.0), math.inf)])
def test_an_infinite_strength_stays_finite_where_the_second_moment_overflows(lr, strength, foreach):
    parameter = torch.ones(2).requires_grad_()
    foreach = foreach and not isinstance(lr, torch.Tensor)
    optimizer = PACE([parameter], lr=lr, gain="paper", pullback_strength=strength, foreach=foreach)
    for _ in range(2):
        parameter.grad = torch.full((2,), 1e25)
        optimizer.step()
    assert parameter.isfinite().all()


@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("gain, strength", GAINS)
@pytest.mark.parametrize("gap", ["pre", "lookahead"])
def test_a_bad_gradient_spoils_its_own_coordinate_and_no_other(bad, gain, strength, gap, foreach):
    """N7: the same elements as in AdamW become non-finite and no other changes."""
    clean = torch.tensor([0.1, -0.2, 0.3, 0.4])
    dirty = torch.tensor([0.1, -0.2, bad, 0.4])
    settings = {"gain": gain, "pullback_strength": strength, "gap": gap, "foreach": foreach}
    theirs, _ = stepped(torch.optim.AdamW, dirty, 4, foreach=foreach)
    good, _ = stepped(PACE, clean, 4, **settings)
    ours, optimizer = stepped(PACE, dirty, 4, **settings)
    state = next(iter(optimizer.state.values()))
    assert theirs.isfinite().tolist() == [True, True, False, True]
    assert torch.equal(ours.isfinite(), theirs.isfinite())
    assert torch.equal(state["average"].isfinite(), theirs.isfinite())
    others = [0, 1, 3]
    if gain == "scaled":  # all enter a mean: the others see that one is missing
        assert torch.allclose(ours[others], good[others], atol=1e-3)
    else:
        assert torch.equal(ours[others], good[others])


def test_what_is_refused_is_refused_before_any_update():
    """A bad second group, or a gradient of another kind, leaves the first untouched."""
    first, second = torch.ones(2).requires_grad_(), torch.ones(2).requires_grad_()
    optimizer = PACE([{"params": [first]}, {"params": [second]}], foreach=True)
    first.grad = second.grad = torch.ones(2)
    optimizer.param_groups[1]["lr"] = torch.tensor(1e-3)
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match="lr as a Tensor is not supported"):
        optimizer.step()
    assert_same_bits(before, everything(optimizer))
    optimizer.param_groups[1]["lr"] = 1e-3
    second.data = second.data.double()
    second.grad = torch.ones(2, dtype=torch.float64)
    second.data = second.data.to(torch.complex64)
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 1 is torch.complex64; complex parameters"):
        optimizer.step()
    assert torch.equal(first, torch.ones(2))


def test_a_step_that_grad_scaler_skips_advances_nothing():
    parameters = make_parameters(dtype=torch.float32)
    optimizer = run(parameters, make_gradients(3), pullback_strength=30.0)
    before = everything(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for bad in (True, False):
        optimizer.zero_grad()
        loss = sum((p * p).sum() for p in parameters) * (math.inf if bad else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if bad:
            assert_same_bits(before, everything(optimizer))
    assert optimizer.state[parameters[0]]["step"].item() == 4


@pytest.mark.parametrize("foreach", PATHS)
def test_gradients_are_never_modified(foreach):
    parameters = make_parameters(dtype=torch.float32)
    optimizer = PACE(parameters, maximize=True, gain="paper", pullback_strength=30.0, foreach=foreach)
    set_gradients(parameters, make_gradients(1)[0])
    before = [(p.grad.clone(), p.grad._version) for p in parameters]
    optimizer.step()
    for p, (gradient, version) in zip(parameters, before, strict=True):
        assert torch.equal(p.grad, gradient) and p.grad._version == version


@pytest.mark.parametrize("foreach", PATHS)
def test_four_small_batches_are_one_large(foreach):
    """Accumulation: t and the averages advance per step, not per backward pass."""
    torch.manual_seed(0)
    data, target = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, dtype=torch.float64)

    def train(parts):
        weight = torch.ones(4, dtype=torch.float64).requires_grad_()
        optimizer = PACE([weight], lr=0.1, gain="paper", pullback_strength=1.0, foreach=foreach)
        for _ in range(10):
            optimizer.zero_grad()
            for x, y in zip(data.chunk(parts), target.chunk(parts), strict=True):
                (((x @ weight - y) ** 2).sum() / 8).backward()
            optimizer.step()
        return everything(optimizer)

    once, accumulated = train(1), train(4)
    assert once["0/step"] == accumulated["0/step"] == 10
    for key in once:
        assert torch.allclose(once[key], accumulated[key], rtol=1e-12)
