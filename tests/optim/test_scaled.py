"""gain="scaled": the pull is sized by gradients beside those of the whole model."""

import copy

import numpy as np
import pytest
import torch
from problems import PATHS, advance, assert_same_bits, everything, make_gradients, make_parameters, run
from reference import Reference, step_model

from paceline import PACE, Pullback

SCALED = {"gain": "scaled", "pullback_strength": 60.0}


@pytest.mark.slow
@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("factor", [1000.0, 1e-3])
def test_the_scale_of_the_loss_makes_no_difference(factor, foreach):
    """Gradients times a factor, eps along with them: the same trajectory to rounding, 100 steps."""
    one, other, steps = make_parameters(), make_parameters(), make_gradients(100)
    run(one, steps, foreach=foreach, eps=1e-6, **SCALED)
    scaled = [[gradient * factor for gradient in step] for step in steps]
    run(other, scaled, foreach=foreach, eps=1e-6 * factor, **SCALED)
    for a, b in zip(one, other, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=0)
    paper = make_parameters()
    run(paper, scaled, foreach=foreach, eps=1e-6 * factor, gain="paper", pullback_strength=60.0)
    assert not torch.allclose(paper[0], one[0], rtol=1e-3)


@pytest.mark.parametrize("foreach", PATHS)
def test_small_gradients_are_pulled_more_than_large_ones_of_other_tensors(foreach):
    """Two tensors whose gradients differ by a factor: alone each would be pulled alike."""
    small, large = (torch.zeros(50, dtype=torch.float64).requires_grad_() for _ in range(2))
    optimizer = PACE([small, large], lr=1e-2, foreach=foreach, ema_power=0.5, **SCALED)
    for gradients in make_gradients(100, shapes=[(50,)]):
        advance(optimizer, [small, large], [[gradients[0] * 0.01, gradients[0]]])
    assert small.abs().mean() < 0.3 * large.abs().mean()


@pytest.mark.parametrize("foreach", PATHS)
def test_the_scale_is_that_of_all_groups_and_of_those_that_take_part(foreach):
    """Two groups with settings of their own, a tensor without a gradient at times: the reference."""
    parameters, steps = make_parameters(), make_gradients(40)
    for t, step in enumerate(steps):
        if t % 3 == 1:
            step[2] = None
    own = [{"betas": (0.9, 0.999), "lr": 1e-2}, {"betas": (0.8, 0.95), "lr": 3e-2}]
    groups = [{"params": parameters[:2], **own[0]}, {"params": parameters[2:], **own[1]}]
    references = [Reference(p.detach().numpy(), **own[i // 2], **SCALED) for i, p in enumerate(parameters)]
    optimizer = PACE(groups, foreach=foreach, **SCALED)
    for step in steps:
        advance(optimizer, parameters, [step])
        step_model(references, [None if gradient is None else gradient.numpy() for gradient in step])
    for parameter, reference in zip(parameters, references, strict=True):
        assert np.abs(parameter.detach().numpy() - reference.live).max() <= 1e-12


@pytest.mark.parametrize("foreach", [*PATHS, None])
@pytest.mark.parametrize("in_one_group", [True, False])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_precisions_of_any_order_have_one_scale(dtypes, in_one_group, foreach):
    parameters = [p.detach().to(dtype).requires_grad_() for p, dtype in zip(make_parameters(), dtypes)]
    references = [Reference(p.detach().double().numpy(), lr=1e-2, **SCALED) for p in parameters]
    groups = parameters if in_one_group else [{"params": [parameter]} for parameter in parameters]
    optimizer = PACE(groups, lr=1e-2, foreach=foreach, **SCALED)
    for step in make_gradients(5):
        given = [gradient.to(dtype) for gradient, dtype in zip(step, dtypes)]
        advance(optimizer, parameters, [given])
        step_model(references, [gradient.double().numpy() for gradient in given])
    for parameter, reference in zip(parameters, references, strict=True):
        assert np.abs(parameter.detach().numpy() - reference.live).max() <= 3e-6


@pytest.mark.parametrize("foreach", PATHS)
def test_pullback_of_adamw_is_the_same_to_the_bit(foreach):
    ours, theirs, steps = make_parameters(), make_parameters(), make_gradients(20)
    run(ours, steps, foreach=foreach, **SCALED)
    base = torch.optim.AdamW(theirs, lr=1e-2, foreach=foreach)
    advance(Pullback(base, **SCALED), theirs, steps)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("foreach", PATHS)
def test_a_resumed_run_goes_on_to_the_bit(foreach):
    """The scale is a function of the state: nothing is kept beside it."""
    parameters, steps = make_parameters(dtype=torch.float32), make_gradients(20)
    optimizer = run(parameters, steps[:10], foreach=foreach, **SCALED)
    again = [parameter.detach().clone().requires_grad_() for parameter in parameters]
    resumed = PACE(again, lr=1e-2, foreach=foreach, **SCALED)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    advance(optimizer, parameters, steps[10:])
    advance(resumed, again, steps[10:])
    assert_same_bits(everything(optimizer), everything(resumed))


def test_a_tensor_that_is_not_finite_spares_the_rest():
    """Its sum is left out of the scale; the pull of the others goes on."""
    parameters, steps = make_parameters(), make_gradients(10)
    steps[3][0][0, 0] = torch.nan
    run(parameters, steps, **SCALED)
    assert [bool(p.isfinite().all()) for p in parameters] == [False, True, True, True]
    rest, without = make_parameters(), [step[1:] for step in steps]
    run(rest[1:], without, **SCALED)
    assert not torch.equal(parameters[1], rest[1])  # before the NaN, the first tensor had its share
