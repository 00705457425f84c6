"""The foreach path equals the loop bit for bit, and needs little memory beside the model."""

import gc
from itertools import product

import pytest
import torch
from problems import (
    VARIANTS,
    advance,
    assert_same_bits,
    everything,
    make_gradients,
    make_parameters,
    peak_bytes,
    run,
)

from paceline import PACE
from paceline.optim import foreach as foreach_path

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", VARIANTS)
def test_foreach_is_the_loop_bit_for_bit(name, dtype):
    """N2: every variant, 30 steps, weights and state, with parameters that pause."""
    gradients = make_gradients(30)
    for t in (4, 9, 10):
        gradients[t][1] = None  # its step count now differs from the others'
    loop, lists = (
        run(make_parameters(dtype=dtype), gradients, foreach=f, **VARIANTS[name]) for f in (False, True)
    )
    assert_same_bits(everything(loop), everything(lists))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", VARIANTS)
def test_foreach_is_close_to_the_loop_in_low_precision(name, dtype):
    """Not to the bit: torch's own AdamW, which each path equals, rounds differently in the two."""
    settings = {"eps": 1e-3, **VARIANTS[name]}
    loop, lists = (
        run(make_parameters(dtype=dtype), make_gradients(30), foreach=f, **settings) for f in (False, True)
    )
    ours, theirs = everything(loop), everything(lists)
    for key in ours:
        assert torch.allclose(ours[key].double(), theirs[key].double(), rtol=0.02, atol=0.02), key


@pytest.mark.slow
@pytest.mark.parametrize(
    "gain, gap, every, power, maximize, decay",
    list(
        product(
            ["paper", "uniform", "scaled"],
            ["pre", "lookahead"],
            [1, 3],
            [None, 0.8],
            [False, True],
            [0, 0.1],
        )
    ),
)
def test_foreach_is_the_loop_for_all_combinations(gain, gap, every, power, maximize, decay):
    """N2: 96 combinations in float32."""
    settings = {
        "gain": gain,
        "gap": gap,
        "update_every": every,
        "return_power": power,
        "maximize": maximize,
        "weight_decay": decay,
        "pullback_strength": 0.8,
    }
    loop, lists = (
        run(make_parameters(dtype=torch.float32), make_gradients(12), foreach=f, **settings)
        for f in (False, True)
    )
    assert_same_bits(everything(loop), everything(lists))


def test_chunks_do_not_change_a_bit(monkeypatch):
    gradients = make_gradients(10)
    whole = run(make_parameters(), gradients, foreach=True, pullback_strength=30.0)
    monkeypatch.setattr(foreach_path, "CHUNK_ELEMENTS", 6)
    parts = run(make_parameters(), gradients, foreach=True, pullback_strength=30.0)
    assert_same_bits(everything(whole), everything(parts))


def test_mixed_precisions_in_one_group_are_as_if_alone():
    def mixed():
        return [p.detach().to(d).requires_grad_() for p, d in zip(make_parameters(), DTYPES, strict=True)]

    together = run(mixed(), make_gradients(10), foreach=True, eps=1e-3, pullback_strength=3.0)
    flat = everything(together)
    for i, parameter in enumerate(mixed()):
        gradients = [[step[i]] for step in make_gradients(10)]
        alone = everything(run([parameter], gradients, foreach=True, eps=1e-3, pullback_strength=3.0))
        assert_same_bits(
            {k[2:]: v for k, v in flat.items() if k.startswith(f"{i}/")}, {k[2:]: v for k, v in alone.items()}
        )


@pytest.mark.parametrize("there, back", [(False, True), (True, False)])
def test_state_moves_between_paths(there, back):
    """S2: a state of one path goes on in the other as if nothing had happened."""
    gradients = make_gradients(40)
    settings = {"gain": "paper", "pullback_strength": 30.0, "return_power": 0.9}
    straight = run(make_parameters(dtype=torch.float32), gradients, foreach=there, **settings)
    first = run(make_parameters(dtype=torch.float32), gradients[:17], foreach=there, **settings)
    weights = [p.detach().clone().requires_grad_() for p in first.param_groups[0]["params"]]
    second = PACE(weights, foreach=back, **settings)
    second.load_state_dict(first.state_dict())
    second.param_groups[0]["foreach"] = back
    advance(second, weights, gradients[17:])
    assert_same_bits(everything(straight), everything(second))


@pytest.mark.parametrize("name", ["strong", "uniform", "lookahead", "maximize", "return_power", "scaled"])
@pytest.mark.slow
@pytest.mark.parametrize("shapes", [[(256, 256)] * 8, [(512, 1024)]])
def test_temporary_memory_of_a_foreach_step(name, shapes):
    """At most two model-sized temporaries."""
    parameters = make_parameters(dtype=torch.float32, shapes=shapes)
    gradients = make_gradients(2, shapes=shapes)
    optimizer = run(parameters, gradients[:1], foreach=True, **VARIANTS[name])
    for p, g in zip(parameters, gradients[1], strict=True):
        p.grad = g.float()
    gc.collect()
    peak = peak_bytes(optimizer.step)
    model = sum(p.numel() * 4 for p in parameters)
    assert peak <= 2 * model + 4096, f"{peak / model:.2f} model sizes"


@pytest.mark.slow
def test_temporary_memory_is_bounded_by_the_chunk(monkeypatch):
    monkeypatch.setattr(foreach_path, "CHUNK_ELEMENTS", 2 * 256 * 256)
    shapes = [(256, 256)] * 8
    parameters = make_parameters(dtype=torch.float32, shapes=shapes)
    optimizer = run(parameters, make_gradients(1, shapes=shapes), foreach=True, pullback_strength=30.0)
    for p, g in zip(parameters, make_gradients(1, shapes=shapes)[0], strict=True):
        p.grad = g.float()
    gc.collect()
    peak = peak_bytes(optimizer.step)
    model = sum(p.numel() * 4 for p in parameters)
    assert peak <= 0.5 * model + 4096, f"{peak / model:.2f} model sizes"


def test_many_small_tensors_cost_few_tensors_of_numbers():
    """On a CPU torch makes a tensor of a float for each of the tensors that an operation is on."""
    shapes = [(3,)] * 40
    parameters = make_parameters(dtype=torch.float32, shapes=shapes)
    optimizer = run(parameters, make_gradients(2, shapes=shapes), foreach=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["aten::mul_"] >= 4 * len(shapes), "the step was not seen"
    assert counts.get("aten::_to_copy", 0) < len(shapes)


@pytest.mark.parametrize(
    "dtype, settings, path",
    [
        (torch.float32, {}, "foreach"),
        (torch.float64, {}, "foreach"),
        (torch.float32, {"fused": False}, "foreach"),
        (torch.float32, {"foreach": True}, "foreach"),
        (torch.float32, {"pullback_strength": 0.0}, "foreach"),
        (torch.float32, {"gap": "lookahead"}, "foreach"),
        (torch.float32, {"betas": (0.0, 0.99)}, "foreach"),
        (torch.float32, {"average_dtype": "bfloat16"}, "foreach"),
        (torch.float32, {"gain": "uniform", "pullback_strength": 1.0}, "foreach"),
        (torch.bfloat16, {}, "tensor by tensor"),
        (torch.float32, {"foreach": False}, "tensor by tensor"),
    ],
    ids=str,
)
def test_the_path_that_is_taken_is_said(dtype, settings, path):
    optimizer = PACE(make_parameters(dtype=dtype), lr=1e-2, **settings)
    assert f"    step of group 0: {path}\n)" in repr(optimizer)
