"""Gradients as a whole: clipped by their norm, unscaled, and steps that are skipped for them."""

import copy
import math

import pytest
import torch
import torch._dynamo.testing
from problems import (
    PATHS,
    advance,
    assert_same_bits,
    everything,
    make_gradients,
    make_parameters,
    set_gradients,
)

from paceline import PACE
from paceline.optim import work

SETTINGS = {"lr": 1e-2, "gain": "scaled"}


def clipped(parameters, limit):
    return torch.nn.utils.clip_grad_norm_(parameters, limit)


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("limit", [0.5, 5.0, 1e6])
def test_max_grad_norm_is_torchs_clip_grad_norm(options, limit):
    """To rounding, on weights and state; gradients themselves are left as they are."""
    ours, theirs = (make_parameters(dtype=torch.float32) for _ in range(2))
    own = PACE(ours, max_grad_norm=limit, **options, **SETTINGS)
    other = PACE(theirs, **options, **SETTINGS)
    for step in make_gradients(5):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        given = [p.grad.clone() for p in ours]
        norm = clipped(theirs, limit)
        own.step()
        other.step()
        assert own.grad_norm is not None and math.isclose(own.grad_norm.item(), norm.item(), rel_tol=1e-6)
        assert all(torch.equal(p.grad, g) for p, g in zip(ours, given, strict=True))
    for key, value in everything(own).items():
        assert torch.allclose(value, everything(other)[key], rtol=2e-5, atol=1e-7), key


def test_the_norm_is_over_all_groups_and_each_has_its_own_limit():
    first, second = (torch.zeros(1).requires_grad_() for _ in range(2))
    groups = [{"params": [first], "max_grad_norm": 1.0}, {"params": [second]}]
    optimizer = PACE(groups, lr=1.0, betas=(0.5, 0.5), eps=0.0, weight_decay=0.0, gain="paper")
    first.grad, second.grad = torch.full((1,), 3.0), torch.full((1,), 4.0)
    optimizer.step()
    assert optimizer.grad_norm.item() == 5.0
    assert math.isclose(optimizer.state[first]["exp_avg"].item(), 3.0 / 5 / 2, rel_tol=1e-6)
    assert optimizer.state[second]["exp_avg"].item() == 2.0


def test_without_a_limit_no_norm_is_taken():
    parameters = make_parameters()
    optimizer = PACE(parameters, lr=1e-2)
    advance(optimizer, parameters, make_gradients(1))
    assert optimizer.grad_norm is None


@pytest.mark.parametrize("foreach", PATHS)
def test_clipping_and_maximizing(foreach):
    """Clipped before the sign is turned: the same as with gradients of the other sign."""
    up, down = make_parameters(), make_parameters()
    one = PACE(up, lr=1e-2, maximize=True, max_grad_norm=0.3, foreach=foreach)
    other = PACE(down, lr=1e-2, max_grad_norm=0.3, foreach=foreach)
    for step in make_gradients(3):
        advance(one, up, [step])
        advance(other, down, [[-g for g in step]])
    assert_same_bits(everything(one), everything(other))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_norm_spoils_all_or_skips_all(bad):
    """As torch's clip_grad_norm_ spoils them; with skip_nonfinite nothing moves."""
    for skip in (False, True):
        parameters, steps = make_parameters(dtype=torch.float32), make_gradients(2)
        optimizer = PACE(parameters, lr=1e-2, gain="paper", max_grad_norm=1.0, skip_nonfinite=skip)
        advance(optimizer, parameters, steps[:1])
        before = everything(optimizer)
        steps[1][1][0] = bad
        advance(optimizer, parameters, steps[1:])
        if skip:
            assert_same_bits(before, everything(optimizer))
        else:
            assert not all(p.isfinite().all() for p in parameters)


def test_skipping_on_the_device_needs_a_path_that_can(monkeypatch):
    monkeypatch.setattr(work, "_get_capturable_supported_devices", lambda: ["cpu"])
    parameters = make_parameters(dtype=torch.float32)
    optimizer = PACE(parameters, lr=1e-2, skip_nonfinite=True, capturable=True)
    before = everything(optimizer)
    set_gradients(parameters, make_gradients(1)[0])
    with pytest.raises(RuntimeError, match="skipped on the device"):
        optimizer.step()
    assert_same_bits(before, everything(optimizer))


def test_a_scaler_skips_by_itself_where_step_does_not():
    optimizer = PACE(make_parameters(dtype=torch.float32), lr=1e-2)
    assert not optimizer._step_supports_amp_scaling


def test_a_norm_goes_along_with_a_copy():
    parameters = make_parameters()
    optimizer = PACE(parameters, lr=1e-2, max_grad_norm=1.0)
    advance(optimizer, parameters, make_gradients(1))
    again = copy.deepcopy(optimizer)
    assert again.grad_norm == optimizer.grad_norm


@pytest.mark.slow
def test_a_compiled_step_that_clips_is_one_graph():
    """The factor stays a tensor there: as a number it would be another at every step."""
    parameters, eager = make_parameters(dtype=torch.float32), make_parameters(dtype=torch.float32)
    optimizer, other = (PACE(ps, lr=1e-2, gain="paper", max_grad_norm=0.3) for ps in (parameters, eager))
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    step = torch.compile(optimizer.step, backend=counter)
    for gradients in make_gradients(6):
        set_gradients(parameters, gradients)
        step()
        advance(other, eager, [gradients])
    assert counter.frame_count <= 2
    assert all(torch.allclose(p, q, rtol=1e-5) for p, q in zip(parameters, eager, strict=True))
