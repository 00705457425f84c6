"""fused=True on a GPU: one launch for all tensors. Without a GPU, the same kernel in Triton's interpreter."""

import copy
import math
import os
import subprocess
import sys
import weakref
from array import array
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from problems import (
    CHANGES_OF_MOMENTS,
    VARIANTS,
    advance,
    assert_same_bits,
    everything,
    make_gradients,
    make_parameters,
    set_gradients,
    with_and_without_memory,
)
from reference import distances, of_the_same_state, step_model

from paceline import PACE, averaged_weights
from paceline.optim import chunking, fused, work
from paceline.optim.onepass import Numbers, numbers_of
from paceline.optim.recipe import Recipe
from paceline.optim.rule import at_count
from paceline.optim.storage import decode

pytest.importorskip("triton")

# The interpreter is NumPy, which warns of what a GPU does in silence.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")]

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
OFFERED = VARIANTS
# Below, at and above a chunk of BLOCK elements; odd ones; none.
SHAPES = [(33, 7), (16,), (), (128,), (129,), (0, 3)]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Without a GPU: chunks of 128 elements, and parameters on the CPU take this path too."""
    if CUDA:
        return
    from paceline.optim import kernel

    assert type(kernel.step).__name__ == "InterpretedFunction"
    tiles = {kind: (256 if kind == (torch.int8, 2) else 128, 4) for kind in fused.TILES}
    monkeypatch.setattr(fused, "TILES", tiles)
    monkeypatch.setattr(fused, "DEVICES", ("cuda", "cpu"))


def parameters_of(dtype=torch.float32, shapes=SHAPES, seed=0):
    made = make_parameters(seed, dtype, shapes)
    return [p.detach().to(DEVICE).requires_grad_() for p in made]


def gradients_of(steps, shapes=SHAPES, seed=1):
    return [[g.to(DEVICE) for g in step] for step in make_gradients(steps, seed, shapes)]


def trained(steps, dtype=torch.float32, shapes=SHAPES, **settings):
    parameters = parameters_of(dtype, shapes)
    optimizer = PACE(parameters, **{"lr": 1e-2, "fused": True, **settings})
    advance(optimizer, parameters, gradients_of(steps, shapes))
    return optimizer


@pytest.mark.parametrize("counted", ["host", pytest.param("device", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", OFFERED)
def test_against_the_reference(name, counted, monkeypatch):
    """Weights, moments and averages to 1e-6 of the largest, at every one of 4 steps from equal inputs."""
    settings = {"lr": 1e-2, **OFFERED[name]}
    parameters = parameters_of()
    if counted == "device":
        monkeypatch.setattr(work, "_get_capturable_supported_devices", lambda: ["cuda", "cpu"])
    optimizer = PACE(parameters, fused=True, capturable=counted == "device", **settings)
    for t, gradients in enumerate(gradients_of(4)):
        references = of_the_same_state(optimizer, parameters, t, settings)
        advance(optimizer, parameters, [gradients])
        step_model(references, [g.float().double().cpu().numpy() for g in gradients])
        assert max(distances(optimizer, parameters, references).values()) <= 1e-6
        assert all(optimizer.state[p]["step"].item() == t + 1 for p in parameters)


def unit_of(codes, scale, live):
    """A step of its rounding, by which a residual may be off, and what the rounding of weights adds."""
    steps = codes.float().abs() * 2**-7
    if scale is not None:
        steps = scale.repeat_interleave(128)[: codes.numel()].view(codes.shape)
    return 1.01 * steps + 4e-7 * live.detach().float().abs()


RESIDUAL_VARIANTS = ("default", "strong", "scaled", "lookahead", "every_3", "return_power", "strength_0")


@pytest.mark.parametrize("counted", ["host", pytest.param("device", marks=pytest.mark.long)])
@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", RESIDUAL_VARIANTS)
def test_residuals_are_those_of_the_other_paths(name, storage, counted, monkeypatch):
    """At every one of 3 steps, from equal inputs: weights to rounding, residuals but for a step of a few."""
    monkeypatch.setattr(work, "_get_capturable_supported_devices", lambda: ["cuda", "cpu"])
    settings = {"lr": 1e-2, "average_dtype": storage, "capturable": counted == "device", **VARIANTS[name]}
    parameters = parameters_of()
    optimizer = PACE(parameters, fused=True, **settings)
    different = all_codes = 0
    for gradients in gradients_of(3):
        twins = [p.detach().clone().requires_grad_() for p in parameters]
        other = PACE(twins, foreach=True, **settings)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        advance(optimizer, parameters, [gradients])
        advance(other, twins, [gradients])
        for p, q in zip(parameters, twins, strict=True):
            ours, theirs = optimizer.state[p], other.state[q]
            assert ours.keys() == theirs.keys()
            assert torch.allclose(p, q, rtol=2e-6, atol=1e-6)
            for key in [key for key in ours if key.endswith("_residual")]:
                scales = [state.get(key.replace("residual", "scale")) for state in (ours, theirs)]
                a, b = (decode(s[key], c) for s, c in zip((ours, theirs), scales, strict=True))
                unit = unit_of(theirs[key], scales[1], q)
                assert ((a - b).abs() <= unit).all()
                different += int(((a - b).abs() > unit / 2).sum())
                all_codes += a.numel()
    assert different <= 0.01 * all_codes + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
def test_residuals_of_low_precision_are_of_the_weights_as_they_are_stored(storage, dtype):
    parameters = parameters_of(dtype)
    optimizer = PACE(parameters, lr=1e-2, gain="paper", fused=True, average_dtype=storage)
    averages = [p.detach().float() for p in parameters]
    for t, gradients in enumerate(gradients_of(6)):
        advance(optimizer, parameters, [gradients])
        for i, p in enumerate(parameters):
            rate, state = (2 + t) ** -0.5, optimizer.state[p]
            expected = (1 - rate) * averages[i] + rate * p.detach().float()
            codes, scale = state["average_residual"], state.get("average_scale")
            averages[i] = p.detach().float() - decode(codes, scale)
            assert ((averages[i] - expected).abs() <= unit_of(codes, scale, p)).all()


@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_weight_spoils_its_residual_and_no_other_block(storage, bad):
    parameters, steps = parameters_of(shapes=[(300,)]), gradients_of(3, [(300,)])
    steps[1][0][140] = bad
    optimizer = PACE(parameters, lr=1e-2, gain="paper", fused=True, average_dtype=storage)
    advance(optimizer, parameters, steps)
    with averaged_weights(optimizer):
        broken = (~parameters[0].isfinite()).nonzero().flatten().tolist()
    assert broken == ([140] if storage == "bfloat16" else list(range(128, 256)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype):
    """Weights and moments are within a unit in the last place of float64 results; averages are float32."""
    settings = {"lr": 1e-2, "eps": 1e-3, "gain": "scaled"}
    powers = {"average": 0.2, "returned": 0.7}
    parameters = parameters_of(dtype)
    optimizer = PACE(parameters, fused=True, **settings)
    unit, least = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    for t, gradients in enumerate(gradients_of(6)):
        references = of_the_same_state(optimizer, parameters, t, settings)
        before = [{key: optimizer.state[p][key].double() for key in powers} for p in parameters]
        advance(optimizer, parameters, [gradients])
        step_model(references, [g.to(dtype).double().cpu().numpy() for g in gradients])
        for p, r, old in zip(parameters, references, before, strict=True):
            state = optimizer.state[p]
            for ours, theirs in ((p, r.live), (state["exp_avg"], r.m), (state["exp_avg_sq"], r.v)):
                apart = np.abs(ours.detach().cpu().double().numpy() - theirs)
                assert (apart <= unit * np.maximum(np.abs(theirs), least) + 1e-8).all()  # what cancels
            for key, power in powers.items():  # of the weights as they are stored
                rate = (2 + t) ** -power
                expected = (1 - rate) * old[key] + rate * p.detach().double()
                assert torch.allclose(state[key].double(), expected, rtol=1e-6, atol=1e-6)


def test_strength_0_is_torchs_adamw_to_an_ulp_a_step():
    """On a GPU the one that torch makes of lists of tensors: its fused one has 1 − β₂ from a β₂ in float32
    there, which puts v off by 1e-5, and 1 − β₁ likewise."""
    shapes = [(200,)]
    ours, theirs = (parameters_of(shapes=shapes) for _ in range(2))
    own = PACE(ours, lr=1e-3, fused=True, pullback_strength=0.0)
    other = torch.optim.AdamW(theirs, lr=1e-3, fused=not CUDA, foreach=CUDA)
    for gradients in gradients_of(10, shapes):
        with torch.no_grad():
            ours[0].copy_(theirs[0])
            for key in ("exp_avg", "exp_avg_sq") if other.state[theirs[0]] else ():
                own.state[ours[0]][key].copy_(other.state[theirs[0]][key])
        advance(own, ours, [gradients])
        advance(other, theirs, [gradients])
        a, b = ours[0].detach().cpu().numpy(), theirs[0].detach().cpu().numpy()
        ulps = 2.01 if CUDA else 1.01  # foreach rounds more often on its way
        assert (np.abs(a - b) <= ulps * np.spacing(np.maximum(np.abs(a), np.float32(1e-2)))).all()


@pytest.mark.parametrize("mixed", ["dtypes", "ages", "groups"])
def test_what_is_not_alike_is_as_if_alone(mixed):
    """Precisions, step counts and settings may differ within one model."""

    def made():
        parameters = parameters_of(shapes=[(40,), (70,), (9,)])
        if mixed == "dtypes":
            parameters[1] = parameters[1].detach().bfloat16().requires_grad_()
        return parameters

    steps = gradients_of(4, [(40,), (70,), (9,)])
    if mixed == "ages":
        steps[0][1] = None
    own = [{"weight_decay": 0.1}, {"ema_power": 0.9}, {}] if mixed == "groups" else [{}] * 3
    settings = {"lr": 1e-2, "gain": "paper", "pullback_strength": 30.0, "fused": True}
    together = made()
    advance(
        PACE([{"params": [p], **o} for p, o in zip(together, own, strict=True)], **settings)
        if mixed == "groups"
        else PACE(together, **settings),
        together,
        steps,
    )
    for i, alone in enumerate(made()):
        advance(PACE([{"params": [alone], **own[i]}], **settings), [alone], [[step[i]] for step in steps])
        assert torch.equal(alone, together[i])


@pytest.mark.parametrize("settings", [{"max_gain": 1}, {"eps": 1}, {"betas": (0.9, 0)}, {"betas": (0, 0.9)}])
def test_an_integer_is_a_number_like_any_other(settings, monkeypatch):
    """Triton builds a 1 into its kernel, which is kept and would be launched for other numbers too."""
    launched, run = [], fused._Launch._run
    monkeypatch.setattr(
        fused._Launch,
        "_run",
        lambda self, *given, **more: (launched.append(given), run(self, *given, **more)),
    )
    trained(1, **settings)
    count = len(Numbers._fields) + 1  # and whether it is a first step
    (numbers,) = [arguments[-count:] for _, arguments in launched if len(arguments) > count]
    assert {type(number) for number in numbers} == {float}


def test_nothing_outside_a_tensor_is_touched():
    """Views at odd places of a poisoned room: neighbours keep their poison, and a view is written whole."""
    room = torch.full((5, 200), torch.nan, device=DEVICE)
    parameters = [room[i, 3 + i : 3 + i + 70 + i].requires_grad_() for i in range(5)]
    with torch.no_grad():
        for p in parameters:
            p.fill_(1.0)
    optimizer = PACE(parameters, lr=1e-2, fused=True)
    advance(optimizer, parameters, [[torch.ones_like(p) for p in parameters]] * 3)
    inside = torch.zeros_like(room, dtype=torch.bool)
    for i in range(5):
        inside[i, 3 + i : 3 + i + 70 + i] = True
    assert torch.equal(room.isfinite(), inside) and (room[inside] < 1).all()


def test_other_orders_of_memory():
    shapes = [(3, 4, 2, 5)]
    plain, steps = parameters_of(shapes=shapes), gradients_of(3, shapes)
    advance(PACE(plain, lr=1e-2, fused=True), plain, steps)
    last = parameters_of(shapes=shapes)[0].detach().to(memory_format=torch.channels_last).requires_grad_()
    optimizer = PACE([last], lr=1e-2, fused=True)
    for (gradient,) in steps:
        last.grad = gradient.float().to(memory_format=torch.channels_last)
        optimizer.step()
    assert torch.equal(last, plain[0])


def test_gradients_that_move_are_found():
    """The addresses of a step are looked up, and must be of this step."""
    parameters, steps = parameters_of(), gradients_of(6)
    kept = []
    optimizer = PACE(parameters, lr=1e-2, fused=True)
    for step in steps:
        set_gradients(parameters, [g.clone() for g in step])
        kept.append([p.grad for p in parameters])  # so that their memory is not given out again
        optimizer.step()
    assert_same_bits(everything(optimizer), everything(trained(6)))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_gradient_spoils_its_own_coordinate_and_no_other(bad):
    parameters, steps = parameters_of(shapes=[(80,)]), gradients_of(3, [(80,)])
    steps[1][0][7] = bad
    advance(PACE(parameters, lr=1e-2, gain="paper", fused=True), parameters, steps)
    assert (~parameters[0].isfinite()).nonzero().tolist() == [[7]]


def test_averages_begin_at_a_first_step_that_moves_none():
    """As the weights that it starts from, which may have been loaded after the optimizer was made."""
    found = []
    for path in ({"fused": True}, {"foreach": True}):
        parameters = [torch.zeros(3, device=DEVICE).requires_grad_()]
        optimizer = PACE(parameters, lr=1e-2, gain="paper", pullback_strength=3.0, update_every=2, **path)
        parameters[0].data.add_(1)
        advance(optimizer, parameters, [[torch.ones(3, device=DEVICE)]] * 2)
        found.append([parameters[0].detach(), optimizer.state[parameters[0]]["average"]])
    assert all(torch.allclose(ours, theirs, atol=1e-6) for ours, theirs in zip(*found, strict=True))


@pytest.mark.parametrize("counted", ["host", "device"])
def test_what_averages_held_before_the_first_step_makes_no_difference(counted, monkeypatch):
    parameters = parameters_of()
    monkeypatch.setattr(work, "_get_capturable_supported_devices", lambda: ["cuda", "cpu"])
    optimizer = PACE(parameters, lr=1e-2, fused=True, capturable=counted == "device")
    for p in parameters:
        optimizer.state[p]["average"].fill_(torch.nan)
        optimizer.state[p]["returned"].fill_(torch.inf)
    advance(optimizer, parameters, gradients_of(2))
    assert all(value.isfinite().all() for value in everything(optimizer).values())


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("change", CHANGES_OF_MOMENTS)
def test_sums_of_second_moments_are_of_the_moments_as_they_are(change, few, monkeypatch):
    """A step leaves them for the next. Who changes a moment in between changes its sum, by whatever way."""
    if not few:
        monkeypatch.setattr(chunking, "TOTALS", 1)
    clear_chunking()
    assert_same_bits(*with_and_without_memory(change, [(10, 10), (200,), (5,)], DEVICE))
    clear_chunking()


def test_what_is_kept_in_cache_changes_no_bit(monkeypatch):
    ended = []
    for large in (0, 2**40):
        monkeypatch.setattr(fused, "LARGE", large)
        parameters, steps = parameters_of(shapes=[(40, 40), (5,)]), gradients_of(4, [(40, 40), (5,)])
        optimizer = PACE(parameters, lr=1e-2, fused=True, average_dtype="int8")
        advance(optimizer, parameters, steps)
        ended.append(everything(optimizer))
    assert_same_bits(*ended)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize(
    "bad, counted", [(None, "host"), (torch.nan, "host"), (None, "device"), (torch.inf, "device")]
)
def test_sums_of_many_chunks_and_of_many_tensors(bad, counted, few, monkeypatch):
    """Cut into more segments and blocks than a test has sums for, or added up by one program. One bad
    element: a whole tensor is left out, also what other segments have of it."""
    monkeypatch.setattr(work, "_get_capturable_supported_devices", lambda: ["cuda", "cpu"])
    if not few:
        monkeypatch.setattr(chunking, "WIDTH", 2)
        monkeypatch.setattr(chunking, "TOTALS", 8)
    clear_chunking()
    shapes = [(9000,), (5,), (130,), (3, 3), (2000,), (1,)]  # of 1,024 elements or 128: up to 71 sums
    if not CUDA:
        shapes[0], shapes[4] = (900,), (600,)
    found = []
    for settings in ({"fused": True, "capturable": counted == "device"}, {"foreach": False}):
        parameters, steps = parameters_of(shapes=shapes), gradients_of(4, shapes)
        for step in steps[1:]:
            step[4] *= 100  # which one is left out makes a difference
        optimizer = PACE(parameters, lr=1e-2, **settings)
        advance(optimizer, parameters, steps[:2])
        if bad is not None:
            optimizer.state[parameters[0]]["exp_avg_sq"][3] = bad
        advance(optimizer, parameters, steps[2:])
        found.append(parameters)
    clear_chunking()
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6, equal_nan=True)


def clear_chunking():
    chunking.segments.cache_clear()
    chunking.few.cache_clear()


@pytest.mark.parametrize("change", ["another tensor begins", "another beta", "another group"])
def test_the_mean_that_a_step_leaves_is_not_that_of_another_step(change):
    """It is for the weights and β₂ of the next step as they were at this one; and a launch for tensors of
    another age reads what the first launch of its step has read, not what that has left."""
    found = []
    for path in ({"fused": True}, {"foreach": False}):
        one, other = parameters_of(shapes=[(40,), (300,)])
        groups = [[one], [other]] if change == "another group" else [[one, other]]
        optimizer = PACE([{"params": group} for group in groups], lr=1e-2, **path)
        for t, (grad, second) in enumerate(gradients_of(8, [(40,), (300,)])):
            begins = change == "another beta" or t > 2
            set_gradients([one, other], [grad.float() * 3**t, second.float() if begins else None])
            if change == "another beta" and t == 3:
                optimizer.param_groups[0]["betas"] = (0.9, 0.9)
            optimizer.step()
        found.append([one.detach(), other.detach()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_few_sums_and_many_have_the_same_mean(monkeypatch):
    """To the bit here, where all sums are of integers, which no order of addition rounds."""
    found = []
    for totals in (4096, 1):
        monkeypatch.setattr(chunking, "TOTALS", totals)
        clear_chunking()
        shapes = [(300,), (5,), (40, 8)]
        parameters = parameters_of(shapes=shapes)
        optimizer = PACE(parameters, lr=1e-2, betas=(0.9, 0.5), fused=True)
        whole = [[(g * 8).round() for g in step] for step in gradients_of(4, shapes)]
        advance(optimizer, parameters, whole)
        found.append(everything(optimizer))
    clear_chunking()
    assert_same_bits(*found)


def test_states_go_from_any_path_to_any_other():
    parameters, steps = parameters_of(), gradients_of(8)
    optimizer = PACE(parameters, lr=1e-2, fused=True)
    advance(optimizer, parameters, steps[:4])
    again, back = ([p.detach().clone().requires_grad_() for p in parameters] for _ in range(2))
    other, same = PACE(again, lr=1e-2, foreach=True), PACE(back, lr=1e-2, fused=True)
    other.load_state_dict(optimizer.state_dict())
    same.load_state_dict(other.state_dict())
    for one, own in ((optimizer, parameters), (other, again), (same, back)):
        advance(one, own, steps[4:])
    assert_same_bits(everything(optimizer), everything(same))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(parameters, again, strict=True))


def test_the_average_is_shown_and_hidden_as_on_any_path():
    optimizer = trained(3)
    parameters = optimizer.param_groups[0]["params"]
    live = [p.detach().clone() for p in parameters]
    with averaged_weights(optimizer):
        assert not torch.equal(parameters[0], live[0])
    assert all(torch.equal(p, before) for p, before in zip(parameters, live, strict=True))


def test_parameters_that_cannot_take_it_are_named():
    parameters = parameters_of(torch.float64)
    optimizer = PACE(parameters, fused=True)
    set_gradients(parameters, gradients_of(1)[0])
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0 is torch.float64; fused=True is for"):
        optimizer.step()


def test_sharded_parameters_take_it_by_their_parts():
    """All of a tensor may be one rank's part; then they are as if nobody had cut them."""
    from torch import distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    own_group = not dist.is_initialized()
    if own_group:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(DEVICE, (1,))
        shapes = [(33, 7), (16,), (128,)]
        plain = parameters_of(shapes=shapes)
        cut = [distribute_tensor(p.detach(), mesh, [Shard(0)]).requires_grad_() for p in plain]
        settings = {"lr": 1e-2, "gain": "paper", "fused": True}
        one, other = PACE(plain, **settings), PACE(cut, **settings)
        for step in gradients_of(4, shapes):
            set_gradients(plain, step)
            for p, g in zip(cut, step, strict=True):
                p.grad = distribute_tensor(g.float(), mesh, [Shard(0)])
            one.step()
            other.step()
        for p, q in zip(plain, cut, strict=True):
            ours = {
                "live": q.to_local(),
                **{k: getattr(v, "to_local", lambda v=v: v)() for k, v in other.state[q].items()},
            }
            theirs = {"live": p.detach(), **one.state[p]}
            assert ours.keys() == theirs.keys()
            assert all(torch.allclose(ours[k], theirs[k], rtol=1e-5, atol=1e-7) for k in ours)
        # A trainer may move a state elsewhere, to make room: nothing here keeps it.
        for key in ("exp_avg", "exp_avg_sq", "average"):
            there = weakref.ref(other.state[cut[0]][key]._local_tensor)
            other.state[cut[0]][key] = other.state[cut[0]][key].clone()
            assert there() is None
    finally:
        if own_group:
            dist.destroy_process_group()


# --- Gradients --------------------------------------------------------------------------------------


def test_gradients_of_other_precisions_in_one_group():
    """As if they had been cast first."""
    kinds = [torch.bfloat16, torch.float32, torch.float16, torch.bfloat16, torch.float32, torch.float16]
    parameters, twins = parameters_of(), parameters_of()
    one, other = (PACE(ps, lr=1e-2, fused=True) for ps in (parameters, twins))
    for step in gradients_of(3):
        for p, q, g, kind in zip(parameters, twins, step, kinds, strict=True):
            p.grad_dtype, p.grad, q.grad = kind, g.to(kind), g.to(kind).float()
        one.step()
        other.step()
    assert_same_bits(everything(one), everything(other))


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_a_step_that_a_scaler_skips_is_none():
    """It unscales and skips by itself, wherever steps are counted."""
    ends = {}
    for capturable in (True, False):
        parameters = parameters_of()
        optimizer = PACE(parameters, lr=1e-2, fused=True, capturable=capturable)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12)
        for t in range(4):
            optimizer.zero_grad()
            loss = sum((p * (p + 1)).sum() for p in parameters) * (torch.inf if t == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.state[parameters[0]]["step"].item() == 3
        assert scaler.get_scale() == 2.0**11
        ends[capturable] = everything(optimizer)
    for key, value in ends[True].items():
        assert torch.allclose(value.cpu(), ends[False][key].cpu(), rtol=1e-5, atol=1e-6), key


# --- The choice of a path ---------------------------------------------------------------------------


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_on_a_gpu_one_pass_is_taken_where_it_can_be():
    for settings, dtype, name in (
        ({}, torch.float32, "one pass, by Triton"),
        ({"foreach": True}, torch.float32, "foreach"),
        ({"fused": False, "foreach": False}, torch.float32, "tensor by tensor"),
    ):
        parameters = parameters_of(dtype)
        optimizer = PACE(parameters, lr=1e-2, **settings)
        assert f"step of group 0: {name}" in repr(optimizer)
        advance(optimizer, parameters, gradients_of(2))
        taken = work.plan_all(optimizer.state, optimizer.param_groups, optimizer._tables)[0]
        assert (taken.table is not None) is (name == "one pass, by Triton")
    parameters = parameters_of(torch.float64)
    optimizer = PACE(parameters, lr=1e-2)
    advance(optimizer, parameters, gradients_of(2))
    assert optimizer.state[parameters[0]]["step"].item() == 2


COMPILE = """
import re
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from paceline.optim import kernel, kernel_before

names = kernel.step.arg_names
# Six arrays, two loads of four float32 each; residuals in bfloat16 take one, those in int8 a narrower one.
for of, stored, wide in (
    (tl.float32, tl.float32, 6 * 2),
    (tl.bfloat16, tl.float32, 4 + 2 * 2),
    (tl.float32, tl.bfloat16, 4 * 2 + 2),
    (tl.float32, tl.int8, 4 * 2),
):
    settings = {"OF": of, "GRAD": of, "STORAGE": stored, "PULL": "over", "LOOKAHEAD": False, "AVERAGES": 2}
    settings |= {"SUMS": 1, "ROOT": True, "TENSORS": 512, "PARTS": 8, "ON_DEVICE": False}
    settings |= {"ALIGNED": True, "GRAD_ALIGNED": True}
    settings |= {"MOMENTS": of, "MOMENTUM": True, "KEPT": "", "BLOCK": 1024}
    types = dict.fromkeys(names, "fp32") | dict.fromkeys(("table", "grads", "chunks"), "*i64")
    pointers = dict.fromkeys(("sums", "numbers"), "*fp32")
    types |= pointers | {"scale": "*fp32", "ages": "*i64", "t": "i64"}
    types |= {"starts": "*i64", "arrived": "*i32", "root": "*fp32", "share": "fp64"}
    types |= dict.fromkeys(settings, "constexpr")
    options = {"num_warps": 4, "enable_fp_fusion": False}
    for kept in ("evict_last", ""):
        settings |= {"KEPT": kept}
        source = ASTSource(kernel.step, types, {(names.index(k),): v for k, v in settings.items()})
        code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
        said = r"\\.L1::evict_last(\\.L2::cache_hint)?" if kept else ""
        assert len(re.findall(rf"ld\\.global{said}\\.v4\\.b32", code)) == wide, code

types = {"sums": "*fp32", "segments": "*i64", "found": "*fp64", "done": "*i32", "starts": "*i64"}
types |= {"result": "*fp32", "counts": "*i64", "lr_at": "*fp32", "table": "*fp32", "ages": "*i64"}
types |= {"tensors": "i32", "every": "i32"}
for function, settings in (
    (kernel_before.mean, {"ON_DEVICE": False, "WIDTH": 8192, "BLOCKS": 2, "TENSORS": 128, "SEGMENTS": 32}),
    (kernel_before.mean, {"ON_DEVICE": True, "WIDTH": 8192, "BLOCKS": 1, "TENSORS": 1, "SEGMENTS": 1}),
    (kernel_before.numbers, {"ON_DEVICE": False, "LR": tl.float32, "OVER": True, "BLOCK": 32}),
    (kernel_before.numbers, {"ON_DEVICE": True, "LR": None, "OVER": False, "BLOCK": 32}),
):
    names = function.arg_names
    given = {name: types.get(name, "fp64") for name in names} | dict.fromkeys(settings, "constexpr")
    source = ASTSource(function, given, {(names.index(k),): v for k, v in settings.items()})
    warps = 1 if function is kernel_before.numbers else 16
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
"""


@pytest.mark.long
def test_it_compiles_to_loads_of_16_bytes(tmp_path):
    """For an H100 and its kin, without one: all but the last chunk of a tensor, in both precisions."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    (tmp_path / "compile_it.py").write_text(COMPILE)
    command = [sys.executable, str(tmp_path / "compile_it.py")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]


@pytest.mark.parametrize("lr", ["number", "tensor", "zero"])
@pytest.mark.parametrize("name", OFFERED)
def test_numbers_that_are_found_on_the_device(name, lr, monkeypatch):
    """They are those of the host, to one unit of float32, at any age."""
    monkeypatch.setattr(work, "_get_capturable_supported_devices", lambda: ["cuda", "cpu"])
    shapes = [(1,)] * 5
    parameters = parameters_of(shapes=shapes)
    settings = {"lr": 1e-2, **OFFERED[name], "fused": True, "capturable": True}
    if lr != "number":
        settings["lr"] = torch.tensor(float(lr == "tensor") / 100, dtype=torch.float64, device=DEVICE)
    optimizer = PACE(parameters, **settings)
    advance(optimizer, parameters, gradients_of(1, shapes))
    recipe = Recipe.of(optimizer.param_groups[0])
    (launch,) = optimizer._tables[0]._launches
    counts = [1.0, 2.0, 3.0, 1000.0, 123_456_789.0]
    for parameter, count in zip(parameters, counts, strict=True):
        optimizer.state[parameter]["step"].fill_(count)
    table, ages = launch._numbers_on_device(math.nan, recipe)
    assert ages.tolist() == counts
    for row, count in zip(table.tolist(), counts, strict=True):
        on_host = replace(recipe, lr=float(recipe.lr))
        at = at_count(count, on_host)
        expected = numbers_of(at, on_host, 1.0)
        if not at.averaging:  # as the host does not launch what moves them
            expected = expected._replace(rate=0.0)
        if not at.pulling:
            expected = expected._replace(numerator=0.0)
        assert row == pytest.approx([*expected, float(count == 1)], rel=1.2e-7, abs=0)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("settings", [{}, {"capturable": True}])
def test_the_default_precision_makes_no_difference(settings, default, monkeypatch):
    """What is handed to the kernel is of the precision that it was compiled for, also inside of torch's
    set_default_dtype."""
    monkeypatch.setattr(work, "_get_capturable_supported_devices", lambda: ["cuda", "cpu"])
    ends = []
    for dtype in (torch.float32, default):
        parameters, steps = parameters_of(shapes=[(40,)]), gradients_of(3, [(40,)])
        optimizer = PACE(parameters, lr=1e-2, fused=True, **settings)
        torch.set_default_dtype(dtype)
        try:
            advance(optimizer, parameters, steps)
        finally:
            torch.set_default_dtype(torch.float32)
        ends.append(everything(optimizer))
    assert_same_bits(*ends)


def test_a_group_of_float64_beside_it_that_begins_late():
    """Of the scale that is found on the device it takes the same digits."""
    ends = []
    for first in ({"fused": True}, {"foreach": True}):
        one, late = parameters_of(shapes=[(40,)])[0], parameters_of(torch.float64, [(5,)])[0]
        optimizer = PACE([{"params": [one], **first}, {"params": [late], "foreach": True}], lr=1e-2)
        for t, (grad, other) in enumerate(gradients_of(4, [(40,), (5,)])):
            set_gradients([one, late], [grad.float(), other.double() if t > 1 else None])
            optimizer.step()
        ends.append(late.detach())
    assert torch.allclose(*ends, rtol=1e-6, atol=1e-7)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("every", [np.int64(2), np.int32(3)])
def test_a_number_of_numpy(every):
    parameters = parameters_of()
    optimizer = PACE(parameters, lr=1e-2, fused=True, capturable=True, update_every=every)
    advance(optimizer, parameters, gradients_of(2))


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_more_elements_than_an_int32_counts():
    parameter = torch.zeros(2**31 + 1000, device="cuda", dtype=torch.bfloat16).requires_grad_()
    optimizer = PACE([parameter], lr=1e-2, fused=True, pullback_strength=0.0)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert parameter[0] < 0 and parameter.min() == parameter.max()


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_nothing_waits_for_the_device_and_nothing_is_allocated():
    shapes = [(1000, 1000)] * 3
    parameters = parameters_of(shapes=shapes)
    optimizer = PACE(parameters, lr=1e-2, fused=True)
    set_gradients(parameters, gradients_of(1, shapes)[0])
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < 100_000


def test_addresses_are_aligned_if_all_of_them_are():
    assert fused._are_aligned(array("q", [0, 16, 2**40, 2**47 + 32]))
    for place, last in product(range(3), (1, 2, 4, 8)):
        addresses = array("q", [16, 2**47 + 48, 2**30])
        addresses[place] += last
        assert not fused._are_aligned(addresses)
