"""Tensors of every kind: empty, 0-dim, strided, sparse, frozen, many."""

import pytest
import torch
from problems import (
    PATHS,
    VARIANTS,
    advance,
    assert_same_bits,
    everything,
    make_gradients,
    make_parameters,
    run,
    set_gradients,
)
from reference import Reference

from paceline import PACE, Averages, PowerLaw, Pullback
from paceline.optim.baselines import AdEMAMix


def strided(kind):
    base = torch.randn(4, 6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    made = {
        "0-dim": base[0, 0, 0],
        "one": base[0, 0, :1],
        "sliced": base[..., 0],
        "transposed": base[..., 0].t(),
        "channels_last": base.reshape(2, 3, 4, 2).to(memory_format=torch.channels_last),
    }
    return made[kind].detach().requires_grad_()


@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("name", ["strong", "uniform", "scaled", "lookahead", "return_power"])
@pytest.mark.parametrize("kind", ["0-dim", "one", "sliced", "transposed", "channels_last"])
def test_any_layout_against_the_reference(kind, name, foreach):
    """N14."""
    parameter = strided(kind)
    strides = parameter.stride()
    reference = Reference(parameter.detach().numpy(), **{"lr": 1e-2, **VARIANTS[name]})
    gradients = [[g[0]] for g in make_gradients(15, shapes=[parameter.shape])]
    optimizer = run([parameter], gradients, foreach=foreach, **VARIANTS[name])
    for (gradient,) in gradients:
        reference.step(gradient.numpy())
    state = optimizer.state[parameter]
    assert torch.allclose(parameter, torch.tensor(reference.live), rtol=1e-12, atol=1e-13)
    assert torch.allclose(state["average"], torch.tensor(reference.average), rtol=1e-12, atol=1e-13)
    assert parameter.stride() == strides
    if kind == "channels_last":
        assert state["average"].is_contiguous(memory_format=torch.channels_last)
    live = parameter.detach().clone()
    optimizer.eval()
    optimizer.train()
    assert torch.equal(parameter, live) and parameter.stride() == strides


@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("name", ["strong", "uniform", "scaled", "lookahead", "return_power"])
def test_empty_tensors_are_carried_along(name, foreach):
    shapes = [(0,), (0, 3), (2, 2)]
    parameters = make_parameters(dtype=torch.float32, shapes=shapes)
    optimizer = run(parameters, make_gradients(5, shapes=shapes), foreach=foreach, **VARIANTS[name])
    assert optimizer.state[parameters[1]]["average"].shape == (0, 3)
    assert optimizer.state[parameters[0]]["step"].item() == 5
    assert parameters[2].isfinite().all()
    optimizer.eval()
    optimizer.train()


@pytest.mark.slow
@pytest.mark.parametrize("foreach", PATHS)
def test_many_tiny_and_one_large(foreach):
    shapes = [(i % 5,) for i in range(300)] + [(2_000_000,)]
    parameters, gradients = make_parameters(shapes=shapes), make_gradients(3, shapes=shapes)
    run(parameters, gradients, pullback_strength=30.0, foreach=foreach)
    fresh = make_parameters(shapes=shapes)
    for i, (parameter, start) in enumerate(zip(parameters, fresh, strict=True)):
        reference = Reference(start.detach().numpy(), lr=1e-2, pullback_strength=30.0)
        for step in gradients:
            reference.step(step[i].numpy())
        assert torch.allclose(parameter, torch.tensor(reference.live), rtol=1e-12, atol=1e-13)


def test_expanded_tensors_are_refused():
    optimizer = PACE([torch.ones(2).requires_grad_()])
    expanded = torch.ones(1, 3).expand(4, 3).requires_grad_()
    with pytest.raises(ValueError, match="parameter 0 of group 1 is an expanded tensor"):
        optimizer.add_param_group({"params": [expanded]})
    assert len(optimizer.param_groups) == 1 and len(optimizer.state) == 1


@pytest.mark.parametrize(
    "make",
    [
        PACE,
        lambda p: Pullback(torch.optim.AdamW(p)),
        lambda p: Averages(torch.optim.SGD(p), {"a": PowerLaw(0.9)}),
        AdEMAMix,
    ],
    ids=["PACE", "Pullback", "Averages", "AdEMAMix"],
)
def test_complex_parameters_are_refused(make):
    parameter = torch.ones(3, dtype=torch.complex64).requires_grad_()
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match=r"torch\.view_as_real of"):
        make([parameter]).step()
    assert torch.equal(parameter, torch.ones_like(parameter))


@pytest.mark.parametrize("foreach", PATHS)
def test_sparse_gradients_are_refused_by_name_and_change_nothing(foreach):
    """N15."""
    embedding, linear = torch.nn.Embedding(5, 2, sparse=True), torch.nn.Linear(2, 1)
    model = torch.nn.Sequential(linear, embedding)
    optimizer = PACE(model.named_parameters(), foreach=foreach)
    linear(embedding(torch.tensor([1, 2]))).sum().backward()
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match=r"sparse gradients: that of parameter '1.weight'.*sparse=False"):
        optimizer.step()
    assert_same_bits(before, everything(optimizer))


@pytest.mark.parametrize("foreach", PATHS)
def test_a_parameter_without_gradient_is_skipped_whole(foreach):
    """N15: weights, moments, average and t stay; its own t is honoured when it comes back."""
    parameters, gradients = make_parameters(), make_gradients(20)
    optimizer = run(parameters, gradients[:5], pullback_strength=30.0, update_every=2, foreach=foreach)
    before = everything(optimizer)
    for step in gradients[5:8]:
        set_gradients(parameters, [step[0], None, *step[2:]])
        optimizer.step()
    after = everything(optimizer)
    assert_same_bits(
        {k: v for k, v in before.items() if k.startswith("1/")},
        {k: v for k, v in after.items() if k.startswith("1/")},
    )
    assert after["0/step"] == 8 and after["1/step"] == 5
    advance(optimizer, parameters, gradients[8:])
    reference = Reference(
        make_parameters()[1].detach().numpy(), lr=1e-2, pullback_strength=30.0, update_every=2
    )
    for t, step in enumerate(gradients):
        reference.step(None if 5 <= t < 8 else step[1].numpy())
    assert torch.allclose(parameters[1], torch.tensor(reference.live), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("foreach", PATHS)
def test_frozen_parameters_have_no_state_until_thawed(foreach):
    parameters = make_parameters()
    parameters[1].requires_grad_(False)
    optimizer = PACE(parameters, lr=1e-2, gain="paper", pullback_strength=30.0, foreach=foreach)
    assert parameters[1] not in optimizer.state
    for step in make_gradients(4):
        set_gradients(parameters, [step[0], None, *step[2:]])
        optimizer.step()
    parameters[1].requires_grad_(True)
    with torch.no_grad():
        parameters[1].add_(1.0)
    start = parameters[1].detach().clone()
    advance(optimizer, parameters, make_gradients(1, seed=3))
    state = optimizer.state[parameters[1]]
    assert state["step"].item() == 1
    reference = Reference(start.numpy(), lr=1e-2, pullback_strength=30.0)
    reference.step(make_gradients(1, seed=3)[0][1].numpy())
    assert torch.allclose(state["average"], torch.tensor(reference.average), rtol=1e-12, atol=1e-13)


def test_a_wrong_shape_is_refused_with_both_shapes():
    parameter = torch.ones(2, 3).requires_grad_()
    optimizer = run([parameter], [[torch.ones(2, 3)]])
    parameter.data = torch.ones(5)
    parameter.grad = torch.ones(5)
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0 has shape \(5,\).*\(2, 3\)"):
        optimizer.step()
