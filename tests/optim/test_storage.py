"""Averages kept as residuals, live − average in bfloat16 or int8: rounding, steps, and who reads them."""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from problems import (
    BYTES,
    CONTROLS,
    advance,
    assert_same_bits,
    copies,
    everything,
    make_gradients,
    make_parameters,
    parameters_of,
    run,
    same,
)
from reference import Reference, array, averages_of

from paceline import PACE, Control
from paceline.optim import storage
from paceline.optim.storage import BLOCK, RESIDUALS, decode, encode_, hashes

kinds = pytest.mark.parametrize("kind", RESIDUALS)
CPU = torch.device("cpu")


def encoded(residual, kind, t=1, salt=0):
    """Return the codes and the scale of a residual."""
    codes = torch.zeros_like(residual, dtype=RESIDUALS[kind].dtype)
    scale = torch.zeros(storage.scale_count(residual.numel())) if kind == "int8" else None
    used_up = torch.empty_like(codes, dtype=torch.float32).copy_(residual)
    encode_(codes, scale, used_up, torch.tensor(float(t), dtype=torch.float64), salt)
    return codes, scale


def rounded(residual, kind, t=1, salt=0):
    return decode(*encoded(residual, kind, t, salt))


def averages(optimizer, parameters):
    found = (averages_of(optimizer, p) for p in parameters)
    return {(i, name): value for i, own in enumerate(found) for name, value in own.items()}


# --- The hash and the roundings, against their formulas ---------------------------------------------------


def mix(x):
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def hashes_in_uint32(index, t, salt):
    seed = mix(np.array([(2 * t + salt) % 2**32], dtype=np.uint32))
    return mix((np.asarray(index) % 2**32).astype(np.uint32) ^ seed)


@pytest.mark.parametrize("start", [0, 2**31 - 3, 2**32 - 5])
@pytest.mark.parametrize(("t", "salt"), [(1, 0), (77, 1), (2**31 + 5, 0)])
def test_the_hash_is_its_formula_in_uint32(start, t, salt):
    ours = hashes(start, 1000, torch.tensor(float(t), dtype=torch.float64), salt, CPU)
    assert (ours.numpy().view(np.uint32) == hashes_in_uint32(np.arange(start, start + 1000), t, salt)).all()


def test_the_codes_are_their_formulas():
    residual = torch.randn(300) * 10.0 ** torch.randint(-6, 3, (300,))
    noise = hashes_in_uint32(np.arange(300), 9, 1)
    codes, _ = encoded(residual, "bfloat16", t=9, salt=1)
    bits = (residual.numpy().view(np.uint32) + (noise & np.uint32(0xFFFF))) & np.uint32(0xFFFF0000)
    assert (codes.float().numpy().view(np.uint32) == bits).all()
    codes, scale = encoded(residual, "int8", t=9, salt=1)
    for block in range(3):
        part = slice(BLOCK * block, BLOCK * (block + 1))
        r = residual.numpy()[part]
        size = np.abs(r).max() / np.float32(127)
        chance = (noise[part] >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)
        assert scale[block].item() == size
        assert (codes.numpy()[part] == np.clip(np.floor(r / size + chance), -127, 127)).all()


@kinds
def test_the_codes_do_not_depend_on_how_many_are_made_together(kind, monkeypatch):
    residual = torch.randn(1000)
    whole = encoded(residual, kind)
    monkeypatch.setattr(storage, "_PIECE", 2 * BLOCK)
    for one, other in zip(whole, encoded(residual, kind), strict=True):
        assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize(
    ("kind", "value"),
    [("bfloat16", x) for x in (1.0039, 3.3e-7, -77.7)] + [("int8", x) for x in (0.001, -0.5, 0.777)],
)
def test_rounding_is_right_on_average(kind, value):
    """100,000 draws, over 100 neighbours and 1,000 steps, and at each place by itself as well."""
    residual = torch.full((101,), value)
    residual[0] = 1.0  # gives an int8 block its scale
    draws = torch.stack([rounded(residual, kind, t)[1:] for t in range(1, 1001)]).double()
    exact = residual[1].double().item()
    assert abs(draws.mean().item() - exact) < 3e-5 * max(1.0, abs(exact))
    spread = draws.std() / math.sqrt(1000)
    assert ((draws.mean(0) - exact).abs() < 5 * spread).all()


@kinds
def test_the_two_averages_and_all_steps_round_apart(kind):
    residual = torch.full((2000,), 1 + 2.0**-8 if kind == "bfloat16" else 0.5 / 127)  # half of them go up
    residual[::BLOCK] = 1.0
    first = rounded(residual, kind, t=1, salt=0) > residual
    for t, salt in ((1, 1), (2, 0), (1000, 0)):
        alike = (first == (rounded(residual, kind, t, salt) > residual)).double().mean().item()
        assert abs(alike - 0.5) < 0.06  # five times its standard deviation


@pytest.mark.parametrize("shape", [(5,), (128,), (9, 33), (0, 3), (), (2, 3, 5, 7)])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_a_round_trip_is_off_by_less_than_a_unit(shape, size):
    residual = torch.randn(shape) * size
    if len(shape) == 4:
        residual = residual.contiguous(memory_format=torch.channels_last)
    again = rounded(residual, "bfloat16")
    assert again.stride() == residual.stride()
    assert ((again - residual).abs() <= 2.0**-7 * residual.abs()).all()  # a unit in the last of 8 bits
    codes, scale = encoded(residual, "int8")
    assert codes.stride() == residual.stride() and scale.shape == (-(-residual.numel() // 128),)
    in_memory, again = (x.as_strided((x.numel(),), (1,)) for x in (residual, decode(codes, scale)))
    for block, part in enumerate(in_memory.split(128)):  # neighbours in memory
        if part.numel():
            assert scale[block] == part.abs().max() / 127
            assert ((again[128 * block :][:128] - part).abs() <= scale[block] * (1 + 1e-5)).all()


@kinds
@pytest.mark.parametrize("t", range(1, 6))
def test_what_is_not_finite_stays_so_and_what_is_finite_too(kind, t):
    assert torch.equal(rounded(torch.zeros(300), kind, t), torch.zeros(300))
    largest = torch.finfo(torch.float32).max
    if kind == "bfloat16":
        again = rounded(torch.tensor([math.nan, math.inf, -math.inf, largest, -largest]), kind, t)
        assert again[0].isnan() and again[1:3].tolist() == [math.inf, -math.inf]
        assert again[3:].tolist() == [torch.finfo(torch.bfloat16).max, -torch.finfo(torch.bfloat16).max]
        return
    for bad in (math.nan, math.inf, -math.inf):
        residual = torch.ones(300)
        residual[130] = bad
        codes, scale = encoded(residual, kind, t)
        assert scale[1].isnan() and scale[[0, 2]].isfinite().all()
        again = decode(codes, scale)
        assert again[128:256].isnan().all() and torch.allclose(again[:128], residual[:128])


# --- Steps ------------------------------------------------------------------------------------------------

LARGE = [(4, 3), (300,), (), (1100,)]


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["paper", "two averages", "push", "every 3", "lookahead", "none"])
def test_a_step_is_the_float32_step_on_the_decoded_average(name, dtype, kind):
    """Decode next to live before, take the usual step, encode next to live after: to the bit."""
    parameters, twins = (make_parameters(dtype=dtype, shapes=LARGE) for _ in range(2))
    own = {"control": CONTROLS[name], "eps": 1e-4}
    optimizer, twin = PACE(parameters, average_dtype=kind, **own), PACE(twins, **own)
    for t, gradients in enumerate(make_gradients(5, shapes=LARGE), start=1):
        for (i, key), average in averages(optimizer, parameters).items():
            twin.state[twins[i]][key].copy_(average)
        advance(optimizer, parameters, [gradients])
        advance(twin, twins, [gradients])
        assert same(parameters, twins)
        for parameter, other in zip(parameters, twins, strict=True):
            for salt, key in enumerate(CONTROLS[name].averages):
                codes, scale = encoded(other.detach() - twin.state[other][key], kind, t, salt)
                assert torch.equal(optimizer.state[parameter][f"{key}_residual"], codes)
                assert scale is None or torch.equal(optimizer.state[parameter][f"{key}_scale"], scale)


@kinds
@pytest.mark.parametrize("foreach", [False, True])
def test_after_300_steps_the_averages_are_those_of_the_reference(foreach, kind):
    """Off by what rounding at random makes, of the size of live − average, and it must be there."""
    control, bound = Control.paper(0.3, return_power=0.8), {"bfloat16": 0.02, "int8": 0.04}[kind]
    parameters = make_parameters(dtype=torch.float32, shapes=[(33, 64)])
    reference = Reference(array(parameters[0]), control, lr=1e-2)
    optimizer = run(parameters, [], control, average_dtype=kind, foreach=foreach)
    for gradients in make_gradients(300, shapes=[(33, 64)]):
        advance(optimizer, parameters, [gradients])
        reference.step(array(gradients[0].float()))
    size = lambda x: float(np.sqrt(np.mean(np.square(x))))  # noqa: E731
    for name, average in averages_of(optimizer, parameters[0]).items():
        expected = getattr(reference, name)
        assert bound / 100 < size(array(average) - expected) / size(reference.live - expected) < bound, name
    gap = size(reference.live - reference.average)
    assert size(array(parameters[0]) - reference.live) < 1e-3 * gap


@kinds
def test_the_average_of_weights_that_stand_still_does_not_stall(kind):
    """A jump, then 1,500 steps without motion at a rate down to 1e-3: to nearest, it would stop early."""
    gaps = {}
    for each in ("float32", kind):
        parameter = torch.randn(500, generator=torch.Generator().manual_seed(0)).requires_grad_()
        own = {"control": Control.none(power=0.9), "weight_decay": 0.0, "average_dtype": each}
        optimizer = PACE([parameter], lr=1.0, **own)
        for t in range(1501):
            parameter.grad = torch.ones_like(parameter) if t == 100 else torch.zeros_like(parameter)
            optimizer.param_groups[0]["lr"] = 1.0 if t == 100 else 0.0
            optimizer.step()
        (average,) = averages_of(optimizer, parameter).values()
        gaps[each] = (parameter - average).double().mean().item()
    assert abs(gaps[kind] / gaps["float32"] - 1) < 0.05
    residual, rate = torch.tensor(0.0123).bfloat16().float(), 1001.0**-0.9
    assert (residual * (1 - rate)).bfloat16().float() == residual  # this is what would have stalled


@kinds
def test_weights_changed_from_outside_take_their_average_along(kind):
    parameters = make_parameters(dtype=torch.float32)
    optimizer = run(parameters, make_gradients(5), average_dtype=kind)
    before = averages(optimizer, parameters)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(1.0)
    for key, average in averages(optimizer, parameters).items():
        assert torch.allclose(average, before[key] + 1.0, atol=1e-6)


@kinds
def test_weights_that_are_laid_out_anew_keep_their_average(kind):
    """Blocks of scales are neighbours in memory, here of very different sizes."""
    shape = (2, 3, 8, 8)
    optimizer = run(make_parameters(dtype=torch.float32, shapes=[shape]), [], average_dtype=kind)
    (parameter,) = parameters_of(optimizer)
    sizes = torch.tensor([1e-3, 1.0, 1e-6]).view(1, 3, 1, 1).expand(shape)
    advance(optimizer, [parameter], [[torch.zeros(shape)]])
    with torch.no_grad():
        state, residual = optimizer.state[parameter], sizes * torch.rand(shape)
        encode_(state["average_residual"], state.get("average_scale"), residual.clone(), state["step"], 0)
        expected = averages(optimizer, [parameter])[0, "average"]
        parameter.data = parameter.data.to(memory_format=torch.channels_last)
        optimizer.param_groups[0].update(lr=0.0, control=Control.paper(every=10))
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    average = averages(optimizer, [parameter])[0, "average"]
    assert state["average_residual"].stride() == parameter.stride()
    assert (average - expected).abs().max() <= 2.0**-7 * sizes.max()
    assert not torch.equal(average, parameter)


@pytest.mark.parametrize("old", BYTES)
@pytest.mark.parametrize("new", BYTES)
def test_a_state_of_one_storage_continues_in_another(old, new):
    """By a load, and by a setting of the group that is changed; what was float32 is rounded once."""
    parameters, others = (make_parameters(dtype=torch.float32) for _ in range(2))
    optimizer = run(parameters, make_gradients(6), Control.push(), average_dtype=old)
    other = PACE(others, lr=1e-2, control=Control.push(), average_dtype=new)
    with torch.no_grad():
        torch._foreach_copy_(others, parameters)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    kept = averages(optimizer, parameters)
    for key, average in averages(other, others).items():
        assert torch.equal(average, kept[key])  # as it was saved, until a step
    live, twin = copies(parameters), copy.deepcopy(optimizer)
    optimizer.param_groups[0]["average_dtype"] = new
    for each, own in ((optimizer, parameters), (other, others)):
        advance(each, own, make_gradients(1, seed=9))
        (codes,) = {key for key in each.state[own[0]] if key.startswith("returned") and "scale" not in key}
        assert codes == ("returned" if new == "float32" else "returned_residual")
    assert_same_bits(everything(optimizer), everything(other))
    advance(twin, twin.param_groups[0]["params"], make_gradients(1, seed=9))
    for key, average in averages(twin, twin.param_groups[0]["params"]).items():
        gap = (live[key[0]] - kept[key]).abs().max()
        assert (averages(other, others)[key] - average).abs().max() <= 0.03 * gap + 1e-6


def test_an_average_takes_as_many_bytes_as_documented():
    for kind, size in BYTES.items():
        parameter = torch.zeros(128 * 50, requires_grad=True)
        optimizer = PACE([parameter], control=Control.push(), average_dtype=kind)
        advance(optimizer, [parameter], [[torch.ones(128 * 50)]])
        state = optimizer.state[parameter]
        taken = sum(v.nbytes for k, v in state.items() if k.startswith(("average", "returned")))
        assert taken == 2 * size * parameter.numel()


@pytest.mark.parametrize(
    "spoil", [{"average_scale": None}, {"average_scale": torch.ones(9)}, {"average_residual": torch.ones(7)}]
)
def test_codes_that_cannot_be_read_are_refused_and_nothing_is_loaded(spoil):
    parameters = make_parameters(dtype=torch.float32)
    optimizer = run(parameters, make_gradients(3), average_dtype="int8")
    before, saved = everything(optimizer), copy.deepcopy(optimizer.state_dict())
    for key, value in spoil.items():
        saved["state"][1].pop(key) if value is None else saved["state"][1].update({key: value})
    with pytest.raises(ValueError, match=r"average_residual of parameter 1 of group 0 .*nothing was loaded"):
        optimizer.load_state_dict(saved)
    assert_same_bits(before, everything(optimizer))
