"""Averages kept as residuals, live − average in bfloat16 or int8: rounding, steps, and who reads them."""

import copy
import io
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from problems import (
    PATHS,
    SETTINGS,
    VARIANTS,
    Net,
    advance,
    assert_same_bits,
    everything,
    make_gradients,
    make_parameters,
    peak_bytes,
    run,
    set_gradients,
)
from reference import Reference
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from paceline import (
    PACE,
    Averages,
    PowerLaw,
    averaged_state_dict,
    averaged_weights,
    reset_average,
    save_averaged,
)
from paceline.optim import foreach as foreach_path
from paceline.optim import storage
from paceline.optim.state import average_of, conform, kept_as, storage_of, storage_refusal
from paceline.optim.storage import BLOCK, STORAGES, decode, encode_, hashes
from paceline.optim.telemetry import pull_statistics

RESIDUALS = ["bfloat16", "int8"]
ALL = ["float32", *RESIDUALS]
# Below a block, a block, two and a part of one, many, none, no dimension.
SIZES = [(5,), (128,), (9, 33), (40, 61), (0, 3), ()]
CPU = torch.device("cpu")
KEYS = {
    "float32": ["average", "returned"],
    "bfloat16": ["average_residual", "returned_residual"],
    "int8": ["average_residual", "average_scale", "returned_residual", "returned_scale"],
}

kinds = pytest.mark.parametrize("kind", RESIDUALS)
paths = pytest.mark.parametrize("foreach", PATHS)


def encoded(residual, kind, t=1, salt=0):
    """The codes and the scale of a residual."""
    codes = torch.zeros_like(residual, dtype=STORAGES[kind].dtype)
    scale = torch.zeros(storage.scales_of(residual.numel())) if kind == "int8" else None
    used_up = torch.empty_like(codes, dtype=torch.float32).copy_(residual)
    encode_(codes, scale, used_up, torch.tensor(float(t), dtype=torch.float64), salt)
    return codes, scale


def rounded(residual, kind, t=1, salt=0):
    return decode(*encoded(residual, kind, t, salt))


def averages(optimizer):
    """All averages of all parameters, by name and place."""
    found = {}
    for i, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        state = optimizer.state[parameter]
        live = state.get("live", parameter.detach())
        for name in ("average", "returned"):
            if name in state or f"{name}_residual" in state:
                found[i, name] = average_of(state, name, live)
    return found


def rms(values):
    return float(np.sqrt(np.mean(np.square(values))))


# --- The hash and the roundings, against their formulas -----------------------------------------------


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
    """As a kernel would compute them, element by element."""
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
def test_the_codes_do_not_depend_on_how_many_are_made_at_once(kind, monkeypatch):
    residual = torch.randn(1000)
    whole = encoded(residual, kind)
    monkeypatch.setattr(storage, "_PIECE", 2 * BLOCK)
    for one, other in zip(whole, encoded(residual, kind), strict=True):
        assert one is other is None or torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("value", [1.0039, 1.9999, 3.3e-7, -1.25e-3, -77.7])
def test_bfloat16_is_right_on_the_mean(value):
    """100,000 draws at one place: over 100 neighbours and 1,000 steps."""
    residual = torch.full((100,), value)
    draws = torch.stack([rounded(residual, "bfloat16", t) for t in range(1, 1001)]).double()
    exact = residual[0].double().item()
    assert abs(draws.mean().item() / exact - 1) < 3e-5
    # At every place by itself as well: what differs from step to step is not only where the noise lies.
    spread = draws.std() / math.sqrt(1000)
    assert ((draws.mean(0) - exact).abs() < 5 * spread).all()


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.001, -0.5, 0.777])
def test_int8_is_right_on_the_mean(share):
    residual = torch.full((101,), share)
    residual[0] = 1.0  # gives the block its scale
    draws = torch.stack([rounded(residual, "int8", t)[1:] for t in range(1, 1001)]).double()
    exact = residual[1].double().item()
    assert abs(draws.mean().item() - exact) < 3e-5
    spread = draws.std() / math.sqrt(1000)
    assert ((draws.mean(0) - exact).abs() < 5 * spread).all()


@kinds
def test_the_two_averages_and_all_steps_round_apart(kind):
    residual = torch.full((2000,), 1 + 2.0**-8 if kind == "bfloat16" else 0.5 / 127)  # half of them go up
    residual[::BLOCK] = 1.0
    first = rounded(residual, kind, t=1, salt=0) > residual
    for t, salt in ((1, 1), (2, 0), (1000, 0)):
        same = (first == (rounded(residual, kind, t, salt) > residual)).double().mean().item()
        assert abs(same - 0.5) < 0.06  # five times its standard deviation


@pytest.mark.parametrize("shape", [*SIZES, (2, 3, 5, 7)])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_a_round_trip_is_off_by_less_than_a_unit(shape, size):
    residual = torch.randn(shape) * size
    if len(shape) == 4:
        residual = residual.contiguous(memory_format=torch.channels_last)
    again = rounded(residual, "bfloat16")
    assert again.stride() == residual.stride()
    assert ((again - residual).abs() <= 2.0**-7 * residual.abs()).all()  # a unit in the last of 8 bits

    codes, scale = encoded(residual, "int8")
    assert codes.shape == residual.shape and codes.stride() == residual.stride()
    assert scale.shape == (-(-residual.numel() // 128),)
    flat, again = (x.as_strided((x.numel(),), (1,)) for x in (residual, decode(codes, scale)))
    for block, part in enumerate(flat.split(128)):
        # Neighbours in memory, also of a tensor that lies otherwise than it is indexed.
        if part.numel():
            assert scale[block] == part.abs().max() / 127
            assert ((again[128 * block :][:128] - part).abs() <= scale[block] * (1 + 1e-5)).all()


@kinds
def test_zeros_stay_zeros(kind):
    codes, scale = encoded(torch.zeros(300), kind)
    assert not codes.any() and (scale is None or not scale.any())
    assert torch.equal(decode(codes, scale), torch.zeros(300))
    # So small that the scale underflows.
    assert encoded(torch.full((3,), 1e-45), "int8")[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("t", range(1, 20))
def test_what_is_not_finite_stays_so_and_what_is_finite_too(t):
    largest = torch.finfo(torch.float32).max
    residual = torch.tensor([math.nan, math.inf, -math.inf, largest, -largest, -math.nan])
    again = rounded(residual, "bfloat16", t)
    assert again[[0, 5]].isnan().all() and again[1:3].tolist() == [math.inf, -math.inf]
    assert again[3:5].tolist() == [torch.finfo(torch.bfloat16).max, -torch.finfo(torch.bfloat16).max]

    for bad in (math.nan, math.inf, -math.inf):
        residual = torch.ones(300)
        residual[130] = bad
        codes, scale = encoded(residual, "int8", t)
        assert scale[1].isnan() and scale[[0, 2]].isfinite().all()
        again = decode(codes, scale)
        assert again[128:256].isnan().all()
        assert torch.allclose(again[:128], residual[:128]) and torch.allclose(again[256:], residual[256:])


# --- Steps ------------------------------------------------------------------------------------------


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_is_the_float32_step_on_the_decoded_average(name, kind):
    """The semantics, step by step: decode with live before, the usual rule, encode with live after."""
    assert_steps_are_those_of_float32(kind, torch.float32, {"foreach": True, **VARIANTS[name]})


@kinds
@paths
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_of_half_precision_weights_likewise(dtype, foreach, kind):
    assert_steps_are_those_of_float32(kind, dtype, {"foreach": foreach, "eps": 1e-4})


def assert_steps_are_those_of_float32(kind, dtype, settings):
    settings = {"lr": 1e-2, **settings}
    shapes = [(4, 3), (300,), (), (1100,)]
    parameters, twins = (make_parameters(dtype=dtype, shapes=shapes) for _ in range(2))
    optimizer, twin = PACE(parameters, average_dtype=kind, **settings), PACE(twins, **settings)
    for t, gradients in enumerate(make_gradients(7, shapes=shapes), start=1):
        for (i, key), average in averages(optimizer).items():
            twin.state[twins[i]][key].copy_(average)
        advance(optimizer, parameters, [gradients])
        advance(twin, twins, [gradients])
        for parameter, other in zip(parameters, twins, strict=True):
            assert torch.equal(parameter, other)
            for salt, key in enumerate(("average", "returned")):
                if key in twin.state[other]:
                    codes, scale = encoded(other.detach() - twin.state[other][key], kind, t, salt)
                    assert torch.equal(optimizer.state[parameter][f"{key}_residual"], codes)
                    assert scale is None or torch.equal(optimizer.state[parameter][f"{key}_scale"], scale)


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["usual", "uniform", "return_power_lookahead_every_2"])
def test_foreach_is_the_loop_bit_for_bit(name, dtype, kind, monkeypatch):
    """Also where the parameters of a group are taken in several chunks."""
    shapes = [(4, 3), (300,), (), (0, 2), (2, 3, 2), (150,)]
    gradients = make_gradients(12, shapes=shapes)
    found = []
    for foreach, elements in ((False, 2**24), (True, 2**24), (True, 100)):
        monkeypatch.setattr(foreach_path, "CHUNK_ELEMENTS", elements)
        parameters = make_parameters(dtype=dtype, shapes=shapes)
        optimizer = run(parameters, gradients, foreach=foreach, average_dtype=kind, **VARIANTS[name])
        found.append(everything(optimizer))
    assert_same_bits(found[0], found[1])
    assert_same_bits(found[0], found[2])
    assert all(average.dtype == torch.float32 for average in averages(optimizer).values())


@pytest.mark.slow
@kinds
@paths
@pytest.mark.parametrize("name", ["usual", "every_3"])
def test_steps_counted_on_the_device_give_the_same(name, kind, foreach, monkeypatch):
    """Rates are then in another precision: the residual may round otherwise, and is as close as ever."""
    monkeypatch.setattr("paceline.optim.work._get_capturable_supported_devices", lambda: ["cpu"])
    settings = {"foreach": foreach, "average_dtype": kind, **VARIANTS[name]}
    host, device = (
        run(make_parameters(dtype=torch.float32), make_gradients(12), capturable=on, **settings)
        for on in (False, True)
    )
    expected = averages(host)
    for key, average in averages(device).items():
        assert torch.allclose(average, expected[key], rtol=0, atol=2e-3)


@kinds
def test_channels_last_weights_are_as_good_as_contiguous_ones(kind):
    """Blocks and hashes go by memory; weights that lie alike in memory have the same codes."""
    gradients = [torch.randn(6, 5, 4, 9) for _ in range(9)]
    start = torch.randn(6, 5, 4, 9)

    def trained(order):
        parameter = start.permute(order).contiguous().permute(*np.argsort(order).tolist()).requires_grad_()
        other = start.permute(order).contiguous().requires_grad_()
        found = []
        for p, back in ((parameter, order), (other, (0, 1, 2, 3))):
            optimizer = PACE([p], lr=1e-2, average_dtype=kind)
            for gradient in gradients:
                p.grad = gradient if p is parameter else gradient.permute(order).contiguous()
                optimizer.step()
            assert optimizer.state[p]["average_residual"].stride() == p.stride()
            state = {k: v if v.ndim < 4 else v.permute(back) for k, v in optimizer.state[p].items()}
            found.append({"weights": p.detach().permute(back), **state})
        assert_same_bits(*found)

    trained((0, 2, 3, 1))


ERRORS = {"bfloat16": 0.02, "int8": 0.04}
"""Of the average, as shares of the rms of live − average: twice what docs/storage.md has, or a bit less."""


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("power", [0.3, 0.5, 0.7])
def test_after_300_steps_the_averages_are_those_of_the_reference(power, kind):
    shapes = [(33, 64)]
    settings = {
        "lr": 1e-2,
        "gain": "paper",
        "pullback_strength": 0.3,
        "ema_power": power,
        "return_power": 0.8,
    }
    parameters = make_parameters(dtype=torch.float32, shapes=shapes)
    optimizer = PACE(parameters, average_dtype=kind, **settings)
    reference = Reference(parameters[0].detach().double().numpy(), **settings)
    for gradients in make_gradients(300, shapes=shapes):
        set_gradients(parameters, gradients)
        optimizer.step()
        reference.step(parameters[0].grad.double().numpy())
    expected = {"average": reference.average, "returned": reference.returned}
    for (_, name), average in averages(optimizer).items():
        error = rms(average.double().numpy() - expected[name]) / rms(reference.live - expected[name])
        assert error < ERRORS[kind], (name, error)
        # Rounding at random, it must be there.
        assert error > ERRORS[kind] / 100
    live = parameters[0].detach().double().numpy()
    assert rms(live - reference.live) < 1e-3 * rms(reference.live - reference.average)


@pytest.mark.slow
@kinds
def test_the_average_of_weights_that_stand_still_does_not_stall(kind):
    """A jump, and 2,000 steps of no motion at a rate down to 1e-3: to nearest, it would stop early."""
    gaps = {}
    for each in ("float32", kind):
        parameter = torch.randn(500, generator=torch.Generator().manual_seed(0)).requires_grad_()
        start = parameter.detach().clone()
        settings = {"pullback_strength": 0.0, "ema_power": 0.9, "weight_decay": 0.0}
        optimizer = PACE([parameter], lr=1.0, average_dtype=each, **settings)
        for t in range(2001):
            parameter.grad = torch.ones_like(parameter) if t == 100 else torch.zeros_like(parameter)
            optimizer.param_groups[0]["lr"] = 1.0 if t == 100 else 0.0
            optimizer.step()
        assert (parameter - start).abs().min() > 0.1
        gaps[each] = (parameter - averages(optimizer)[0, "average"]).detach().double().mean().item()
    assert abs(gaps[kind] / gaps["float32"] - 1) < 0.05


def test_to_nearest_it_would_have_stalled():
    """What the test above is about: near the end, a step of the average is less than half a unit."""
    residual, rate = torch.tensor(0.0123).bfloat16().float(), 1001.0**-0.9
    assert (residual * (1 - rate)).bfloat16().float() == residual


@kinds
def test_weights_changed_from_outside_take_their_average_along(kind):
    parameters = make_parameters(dtype=torch.float32)
    optimizer = run(parameters, make_gradients(5), average_dtype=kind)
    before = averages(optimizer)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(1.0)
    for key, average in averages(optimizer).items():
        assert torch.allclose(average, before[key] + 1.0, atol=1e-6)


def test_bytes_of_state_are_those_of_the_table():
    for kind, (_, size) in STORAGES.items():
        parameter = torch.zeros(128 * 50, requires_grad=True)
        state = PACE([parameter], average_dtype=kind).state[parameter]
        taken = sum(state[key].nbytes for key in KEYS[kind])
        assert taken == 2 * size * parameter.numel()


@pytest.mark.slow
@kinds
def test_temporaries_of_a_step_do_not_grow_with_the_model(kind, monkeypatch):
    monkeypatch.setattr(foreach_path, "CHUNK_ELEMENTS", 2**14)
    peaks = []
    for count in (2, 8):
        parameters = make_parameters(dtype=torch.float32, shapes=[(2**14,)] * count)
        optimizer = run(parameters, make_gradients(2, shapes=[(2**14,)] * count), average_dtype=kind)
        peaks.append(peak_bytes(optimizer.step))
    assert peaks[1] < 1.1 * peaks[0] < 40 * 4 * 2**14


# --- What reads averages ------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shown_it_is_the_average_and_hidden_live_is_back_to_the_bit(kind, dtype):
    parameters = make_parameters(dtype=dtype)
    optimizer = run(parameters, make_gradients(7), average_dtype=kind, return_power=0.8)
    before, expected = everything(optimizer), averages(optimizer)
    for enter in (averaged_weights(optimizer),):
        with enter:
            for i, parameter in enumerate(parameters):
                assert torch.equal(parameter, expected[i, "returned"].to(dtype))
                assert torch.equal(dict(optimizer.returned_averages())[parameter], expected[i, "returned"])
            for key, average in averages(optimizer).items():
                assert torch.equal(average, expected[key])
    assert_same_bits(before, everything(optimizer))
    optimizer.eval()
    optimizer.train()
    assert_same_bits(before, everything(optimizer))


@kinds
def test_exports_are_the_average(kind, tmp_path):
    from safetensors.torch import load_file

    model = Net()
    optimizer = run(list(model.parameters()), make_gradients(7), average_dtype=kind, return_power=0.8)
    expected = {f"p{i}": average for (i, name), average in averages(optimizer).items() if name == "returned"}
    file = save_averaged(model, optimizer, tmp_path)
    for exported in (averaged_state_dict(model, optimizer), load_file(file)):
        assert exported.keys() == expected.keys()
        assert all(torch.equal(exported[name], expected[name]) for name in expected)
        assert any(not torch.equal(exported[name], value) for name, value in model.state_dict().items())


@kinds
def test_a_reset_average_is_live(kind):
    parameters = make_parameters(dtype=torch.float32)
    optimizer = run(parameters, make_gradients(5), average_dtype=kind)
    reset_average(optimizer)
    assert list(optimizer.returned_averages()) == []
    saved = optimizer.state_dict()["state"]
    assert all(not entries["average_residual"].any() for entries in saved.values())
    live = [p.detach().clone() for p in parameters]
    advance(optimizer, parameters, make_gradients(1))
    rate = 7**-0.5
    for (i, _), average in averages(optimizer).items():
        expected = live[i] + rate * (parameters[i].detach() - live[i])
        assert torch.allclose(average, expected, atol=2e-4)


@kinds
def test_telemetry_sees_the_same_gap(kind):
    figures = {}
    for each in ("float32", kind):
        for gap in ("pre", "lookahead"):
            parameters = make_parameters(dtype=torch.float32, shapes=[(40, 9)])
            settings = {"gain": "paper", "pullback_strength": 30.0, "gap": gap}
            optimizer = PACE(parameters, lr=1e-2, average_dtype=each, **settings)
            advance(optimizer, parameters, make_gradients(20, shapes=[(40, 9)]))
            figures[each, gap] = pull_statistics(optimizer)
    for gap in ("pre", "lookahead"):
        ours, exact = figures[kind, gap], figures["float32", gap]
        for name in ("gap_rms", "gain/mean", "saturated"):
            assert math.isclose(ours[name], exact[name], rel_tol=0.02), (gap, name)
    assert exact["gap_rms"] > 0


@kinds
def test_inside_a_wrapper_that_shows_another_average_ours_is_the_same(kind):
    """The parameters hold the wrapper's average then, and our residual is one of live."""
    parameters = make_parameters(dtype=torch.float32)
    inner = PACE(parameters, lr=1e-2, average_dtype=kind)
    optimizer = Averages(inner, {"long": PowerLaw(1.0)})
    advance(optimizer, parameters, make_gradients(6))
    expected = [average.clone() for _, average in inner.returned_averages()]
    with averaged_weights(optimizer["long"]):
        for (_, average), before in zip(inner.returned_averages(), expected, strict=True):
            assert torch.equal(average, before)


@kinds
def test_copies_and_pickles_go_on_alike(kind):
    model = Net()
    optimizer = PACE(model.parameters(), lr=1e-2, average_dtype=kind)
    advance(optimizer, list(model.parameters()), make_gradients(5))
    for twin_model, twin in (
        copy.deepcopy((model, optimizer)),
        pickle.loads(pickle.dumps((model, optimizer))),
    ):
        assert_same_bits(everything(optimizer), everything(twin))
        advance(twin, list(twin_model.parameters()), make_gradients(3, seed=3))
        taken = everything(twin)
    advance(optimizer, list(model.parameters()), make_gradients(3, seed=3))
    assert_same_bits(everything(optimizer), taken)


# --- Saving and loading -------------------------------------------------------------------------------


def by_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("path", [{"foreach": foreach} for foreach in PATHS])
@pytest.mark.parametrize("shown", [False, True])
def test_a_resumed_run_ends_in_the_same_bits(kind, path, shown):
    """Odd sizes and channels-last weights among them; saved while live or the average is shown."""
    shapes = [(40, 7), (3,), (4, 5, 6, 7)]

    def fresh(seed):
        parameters = make_parameters(seed=seed, dtype=torch.float32, shapes=shapes)
        if "foreach" in path:  # gradients are contiguous
            parameters[2] = parameters[2].detach().to(memory_format=torch.channels_last).requires_grad_()
        return parameters, PACE(parameters, lr=1e-2, average_dtype=kind, **path)

    parameters, optimizer = fresh(0)
    advance(optimizer, parameters, make_gradients(10, shapes=shapes))
    if shown:
        optimizer.eval()
    saved = by_file({"weights": [p.detach() for p in parameters], "optimizer": optimizer.state_dict()})
    again, resumed = fresh(5)
    with torch.no_grad():
        for parameter, value in zip(again, saved["weights"], strict=True):
            parameter.copy_(value)
    resumed.load_state_dict(saved["optimizer"])
    optimizer.train()
    assert_same_bits(everything(optimizer), everything(resumed))
    advance(optimizer, parameters, make_gradients(10, seed=4, shapes=shapes))
    advance(resumed, again, make_gradients(10, seed=4, shapes=shapes))
    assert_same_bits(everything(optimizer), everything(resumed))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("weights_after_state", [False, True])
@pytest.mark.parametrize("new", ALL)
@pytest.mark.parametrize("old", ALL)
def test_every_storage_loads_into_every_other(old, new, weights_after_state, count):
    """The optimizer at hand says how averages are kept; in between they are right as well."""
    settings = {"gain": "paper", "return_power": None if count == 1 else 0.8}
    model, again = Net(), Net(seed=5)
    parameters, others = list(model.parameters()), list(again.parameters())
    optimizer = run(parameters, make_gradients(8), average_dtype=old, **settings)
    expected = averages(optimizer)
    resumed = PACE(others, lr=1e-2, average_dtype=new, **settings)
    if not weights_after_state:
        again.load_state_dict(model.state_dict())
    resumed.load_state_dict(by_file(optimizer.state_dict()))
    if weights_after_state:
        again.load_state_dict(model.state_dict())
    assert resumed.param_groups[0]["average_dtype"] == new
    for key, average in averages(resumed).items():
        assert torch.equal(average, expected[key])
    with averaged_weights(resumed):
        for i, parameter in enumerate(others):
            assert torch.equal(parameter, expected[i, "average" if count == 1 else "returned"])

    before = {
        key: rms((model_p - expected[key]).detach().numpy())
        for key in expected
        for model_p in [parameters[key[0]]]
    }
    advance(resumed, others, make_gradients(1, seed=3))
    names = sorted(key for key in KEYS[new] if count == 2 or key.startswith("average"))
    wanted = {"step", "exp_avg", "exp_avg_sq", *names}
    assert all(resumed.state[parameter].keys() == wanted for parameter in others)
    # One more step of each moves the average alike, up to one rounding of the residual.
    twin = PACE(parameters, lr=1e-2, **settings)
    twin.load_state_dict(optimizer.state_dict())
    advance(twin, parameters, make_gradients(1, seed=3))
    for key, average in averages(twin).items():
        assert torch.allclose(averages(resumed)[key], average, rtol=0, atol=0.03 * before[key] + 1e-6)


@pytest.mark.parametrize("new", ALL)
@pytest.mark.parametrize("old", ALL)
def test_a_state_saved_before_any_step_is_of_the_storage_asked_for(old, new):
    """Loaded, and saved again at once: what is in the file is what its groups say, and goes on alike."""
    parameters = make_parameters(dtype=torch.float32, shapes=[(9, 33)])
    optimizer = run(parameters, make_gradients(8, shapes=[(9, 33)]), average_dtype=old, return_power=0.8)
    loaded, twin = (PACE(parameters, average_dtype=new, gain="paper", return_power=0.8) for _ in range(2))
    loaded.load_state_dict(optimizer.state_dict())
    in_between = everything(loaded)
    saved = copy.deepcopy(loaded.state_dict())
    assert_same_bits(in_between, everything(loaded))
    assert sorted(key for key in saved["state"][0] if key.startswith(("average", "returned"))) == KEYS[new]
    twin.load_state_dict(saved)
    start = parameters[0].detach().clone()
    advance(loaded, parameters, make_gradients(1, seed=2, shapes=[(9, 33)]))
    with torch.no_grad():
        parameters[0].copy_(start)
    advance(twin, parameters, make_gradients(1, seed=2, shapes=[(9, 33)]))
    assert_same_bits(everything(loaded), everything(twin))


@kinds
def test_a_storage_set_in_mid_run(kind):
    parameters = make_parameters(dtype=torch.float32)
    optimizer = PACE(parameters, lr=1e-2)
    for each in (kind, "float32"):
        advance(optimizer, parameters, make_gradients(4))
        before = averages(optimizer)
        optimizer.param_groups[0]["average_dtype"] = each
        optimizer.param_groups[0]["lr"] = 0.0
        advance(optimizer, parameters, make_gradients(1))
        for parameter in parameters:
            assert storage_of(optimizer.state[parameter], "returned") == each
            kept = [key for key in optimizer.state[parameter] if key.startswith(("average", "returned"))]
            assert sorted(kept) == KEYS[each]
        for (i, name), average in averages(optimizer).items():
            live, rate = (
                parameters[i].detach(),
                (1 + optimizer.state[parameters[i]]["step"].item()) ** -(0.2 if name == "average" else 0.7),
            )
            expected = before[i, name] + rate * (live - before[i, name])
            size = (live - before[i, name]).abs().max()
            assert torch.allclose(average, expected, rtol=0, atol=0.02 * size + 1e-6)
        optimizer.param_groups[0]["lr"] = 1e-2


@kinds
def test_groups_may_differ_and_states_of_adamw_load(kind):
    first, second = (make_parameters(seed=seed, dtype=torch.float32) for seed in (0, 1))
    adamw = torch.optim.AdamW([{"params": first}, {"params": second}], lr=1e-2)
    advance(
        adamw, [*first, *second], [[*g, *h] for g, h in zip(make_gradients(3), make_gradients(3, seed=2))]
    )
    groups = [{"params": first, "average_dtype": kind}, {"params": second}]
    optimizer = PACE(groups, lr=1e-2)
    with pytest.warns(UserWarning, match="no 'average' for 8"):
        optimizer.load_state_dict(adamw.state_dict())
    for parameter in first:
        assert (
            set(KEYS[kind]) < optimizer.state[parameter].keys()
            and "average" not in optimizer.state[parameter]
        )
    assert all("average" in optimizer.state[parameter] for parameter in second)
    live = [p.detach().clone() for p in first]
    set_gradients([*first, *second], [*make_gradients(1)[0], *make_gradients(1)[0]])
    optimizer.step()
    for i, parameter in enumerate(first):
        expected = live[i] + 5**-0.2 * (parameter.detach() - live[i])
        assert torch.allclose(averages(optimizer)[i, "average"], expected, atol=2e-4)


OPTIONS = [
    StateDictOptions(),
    StateDictOptions(flatten_optimizer_state_dict=True),
    StateDictOptions(full_state_dict=True),
    StateDictOptions(cpu_offload=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shown", [False, True])
@kinds
def test_dcp_states_of_each_storage(kind, shown, options):
    by_name = options.flatten_optimizer_state_dict or options.full_state_dict
    model = Net()
    optimizer = PACE(model.parameters(), lr=1e-2, average_dtype=kind)
    advance(optimizer, list(model.parameters()), make_gradients(5))
    optimizer.zero_grad()
    if shown:
        optimizer.eval()
    weights, state = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    again = Net(seed=5)
    resumed = PACE(again.parameters(), average_dtype=kind)
    if shown and by_name:  # only what the optimizer at hand has is read: it must have a `live`, too
        advance(resumed, list(again.parameters()), make_gradients(1))
        resumed.zero_grad()
        resumed.eval()
    set_state_dict(again, resumed, model_state_dict=weights, optim_state_dict=state, options=options)
    optimizer.train()
    resumed.train()
    assert_same_bits(everything(optimizer), everything(resumed))


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("new", ALL)
@pytest.mark.parametrize("old", ALL)
def test_dcp_between_two_storages(old, new, options):
    """full_state_dict fills what a checkpoint lacks with the values at hand: they are not taken for its own.

    A flat one is read only as far as the optimizer at hand has such entries: with a warning, or refused.
    """

    def trained(seed, kind):
        torch.manual_seed(seed)
        model = nn.Linear(20, 10)  # without a 0-dim parameter, of which full_state_dict loses entries
        optimizer = PACE(model.parameters(), lr=1e-2, average_dtype=kind)
        advance(optimizer, list(model.parameters()), make_gradients(5, shapes=[(10, 20), (10,)]))
        optimizer.zero_grad()
        return model, optimizer

    model, optimizer = trained(0, old)
    weights, state = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    again, resumed = trained(1, new)
    again.load_state_dict(weights)
    if options.flatten_optimizer_state_dict and not set(KEYS[old]) <= set(KEYS[new]):
        with pytest.raises((UserWarning, ValueError), match=r"no 'average' for 2|of shape None"):
            set_optimizer_state_dict(again, resumed, state, options=options)
        return
    set_optimizer_state_dict(again, resumed, state, options=options)
    expected = averages(optimizer)
    assert averages(resumed).keys() == expected.keys()
    for key, average in averages(resumed).items():
        assert torch.equal(average, expected[key]), key


@kinds
def test_a_state_of_two_averages_in_an_optimizer_of_one_and_back(kind):
    parameters = make_parameters(dtype=torch.float32)
    optimizer = run(parameters, make_gradients(4), average_dtype=kind, return_power=0.9)
    optimizer.param_groups[0]["return_power"] = None
    advance(optimizer, parameters, make_gradients(1))
    assert all(name == "average" for _, name in averages(optimizer))
    saved = copy.deepcopy(optimizer.state_dict())
    wider = PACE(parameters, gain="paper", return_power=0.9, average_dtype=kind)
    with pytest.warns(UserWarning, match="no 'returned' for 4"):
        wider.load_state_dict(saved)
    found = averages(wider)
    assert len(found) == 8
    assert all(torch.equal(found[i, "returned"], found[i, "average"]) for i in range(4))


def test_a_pace_state_of_int8_goes_on_in_adamw():
    parameters = make_parameters(dtype=torch.float32)
    optimizer = run(parameters, make_gradients(4), average_dtype="int8")
    adamw = torch.optim.AdamW(parameters, lr=1e-2)
    adamw.load_state_dict(optimizer.state_dict())
    advance(adamw, parameters, make_gradients(1))
    assert all(adamw.state[p]["step"].item() == 5 for p in parameters)


# --- What is as it was, and what is refused -----------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"gain": "paper"}, SETTINGS])
def test_by_default_a_state_has_what_it_always_had(settings):
    parameters = make_parameters(dtype=torch.float32)
    optimizer = run(parameters, make_gradients(3), **{"gain": None, **settings})
    names = ["average"] if settings == {"gain": "paper"} else ["average", "returned"]
    for entries in optimizer.state_dict()["state"].values():
        assert list(entries) == ["step", "exp_avg", "exp_avg_sq", *names]
        assert all(entries[name].dtype == torch.float32 for name in names)


@pytest.mark.parametrize("value", ["bf16", None, torch.bfloat16, 8])
def test_an_unknown_storage_is_refused(value):
    with pytest.raises(ValueError, match=r"Invalid average_dtype value: .*'float32', 'bfloat16', 'int8'"):
        PACE(make_parameters(), average_dtype=value)
    with pytest.raises(ValueError, match="Invalid average_dtype value"):
        PACE([{"params": make_parameters(), "average_dtype": value}])


@kinds
def test_weights_of_another_precision_are_refused(kind):
    parameter = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(
        ValueError, match=f"parameter 0 of group 0 is torch.float64; average_dtype='{kind}' is for"
    ):
        PACE([parameter], average_dtype=kind)


@kinds
def test_a_model_cast_to_float64_later_is_refused_at_its_step(kind):
    cast = nn.Linear(2, 2)
    optimizer = PACE(cast.parameters(), average_dtype=kind)
    cast.double()
    for p in cast.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="is for float32, bfloat16 and float16"):
        optimizer.step()


def test_a_sharded_parameter_keeps_no_int8(tmp_path):
    """One process is enough to have a DTensor; two of them are in test_distributed.py."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/sync", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        start, gradients = torch.randn(40, 9), [torch.randn(40, 9) for _ in range(6)]
        cut = lambda value: distribute_tensor(value.clone(), mesh, [Shard(0)])  # noqa: E731
        with pytest.raises(ValueError, match=r"sharded over several ranks.*average_dtype='bfloat16'"):
            PACE([nn.Parameter(cut(start))], average_dtype="int8")
        for foreach in PATHS:
            plain, sharded = nn.Parameter(start.clone()), nn.Parameter(cut(start))
            pair = [PACE([p], lr=1e-2, average_dtype="bfloat16", foreach=foreach) for p in (plain, sharded)]
            for gradient in gradients:
                plain.grad, sharded.grad = gradient.clone(), cut(gradient)
                for optimizer in pair:
                    optimizer.step()
            for key, value in pair[0].state[plain].items():
                ours = pair[1].state[sharded][key]
                assert torch.equal(ours.full_tensor() if key != "step" else ours, value), key
            before = sharded.full_tensor().detach().clone()
            with averaged_weights(pair[0]), averaged_weights(pair[1], nn.ParameterList([sharded])):
                assert torch.equal(sharded.full_tensor(), plain)
            assert torch.equal(sharded.full_tensor(), before)
            assert torch.equal(before, plain)
    finally:
        dist.destroy_process_group()


def spoil_scale(entries):
    entries["average_scale"] = entries["average_scale"][:-1]


def lose_scale(entries):
    del entries["average_scale"]


def cast(entries):
    entries["average_residual"] = entries["average_residual"].to(torch.int16)


def cut_codes(entries):
    entries["average_residual"] = entries["average_residual"][:-1]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_scale, r"a average_scale of shape \(2,\); PACE keeps .* one of shape \(3,\)"),
        (lose_scale, "with a average_scale of shape None"),
        (cast, r"average_residual of parameter 0 of group 0 is torch\.int16"),
        (cut_codes, r"saved average_residual of parameter 0 of group 0 has shape \(8, 33\)"),
    ],
)
def test_codes_that_do_not_fit_change_nothing(spoil, message):
    parameters = make_parameters(dtype=torch.float32, shapes=[(9, 33)])
    optimizer = run(parameters, make_gradients(4, shapes=[(9, 33)]), average_dtype="int8")
    saved = copy.deepcopy(optimizer.state_dict())
    spoil(saved["state"][0])
    before = everything(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert_same_bits(before, everything(optimizer))


def test_codes_that_lost_their_strides_are_refused():
    """Blocks are neighbours in memory: of codes without strides nobody knows whose scale is whose."""
    start = torch.randn(4, 5, 6, 7).to(memory_format=torch.channels_last)

    def fresh(value):
        return PACE([value.clone().requires_grad_()], lr=1e-2, average_dtype="int8")

    def step(optimizer):
        parameter = optimizer.param_groups[0]["params"][0]
        parameter.grad = torch.randn(4, 5, 6, 7)
        optimizer.step()
        return parameter

    optimizer = fresh(start)
    parameter = step(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    expected = averages(optimizer)[0, "returned"]
    # Their strides tell: weights that lie otherwise now get codes that do, too.
    other = fresh(start.contiguous())
    other.load_state_dict(saved)
    with torch.no_grad():
        other.param_groups[0]["params"][0].copy_(parameter)
    assert torch.equal(averages(other)[0, "returned"], expected)
    moved = step(other)
    assert other.state[moved]["average_residual"].is_contiguous()

    for key, value in saved["state"][0].items():
        saved["state"][0][key] = value.contiguous()
    before = everything(optimizer)
    with pytest.raises(ValueError, match=r"is not contiguous .* cannot be told.*nothing was loaded"):
        optimizer.load_state_dict(saved)
    assert_same_bits(before, everything(optimizer))


def test_helpers_say_what_they_would_do():
    live = torch.randn(300)
    optimizer = PACE([live.requires_grad_()], average_dtype="int8")
    state = optimizer.state[live]
    assert kept_as("int8", live, state, ("average", "returned")) is state
    assert storage_refusal(live, "int8") is None and storage_refusal(live.double(), "float32") is None
    # A parameter replaced before its first step gets a state of its own shape.
    shorter = torch.randn(7)
    group = dict(optimizer.param_groups[0])
    conform(shorter, state, group, 0, 0)
    assert state["average_residual"].shape == (7,) and state["returned_scale"].shape == (1,)


@kinds
def test_a_nan_in_live_is_seen_in_the_average(kind):
    parameter = torch.zeros(300, requires_grad=True)
    optimizer = PACE([parameter], lr=1e-2, average_dtype=kind)
    for t in range(4):
        parameter.grad = torch.ones(300)
        parameter.grad[5] = math.nan if t == 2 else 1.0
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        average = averages(optimizer)[0, "returned"]
    assert average[5].isnan() and average[BLOCK:].isfinite().all()
