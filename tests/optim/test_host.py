"""The default path on a CPU: torch's fused AdamW steps and, where no gain is at its limit, pulls too."""

import contextlib
import gc
import math

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
    peak_bytes,
    run,
    with_and_without_memory,
)
from reference import distances, of_the_same_state, step_model

from paceline import PACE
from paceline.optim import host

SHAPES = [(33, 7), (16,), (), (17,), (64, 33), (0, 3)]
NAME = "torch's fused AdamW, and foreach"
TAKEN = {
    name: settings
    for name, settings in VARIANTS.items()
    if settings["gain"] in ("paper", "scaled")
    and settings.get("gap") != "lookahead"
    and settings.get("betas", (0.9, 0.999))[0] != 0
    and settings.get("pullback_strength") != 0
}
WAYS = {"asked": (1, host.BLOCK), "cut": (1, 500), "small": (host.FEWEST, host.BLOCK)}


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Tensors with blocks of their own, one each or several, and tensors that are gathered."""
    fewest, block = WAYS[request.param]
    monkeypatch.setattr(host, "FEWEST", fewest)
    monkeypatch.setattr(host, "BLOCK", block)


def refuse(*arguments):
    raise AssertionError("this way was not to be taken")


@pytest.mark.slow
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", TAKEN)
def test_against_the_reference(name):
    """Weights, moments and averages to 1e-6 of the largest, at every one of 25 steps from equal inputs."""
    settings = {"lr": 1e-2, **TAKEN[name]}
    parameters = make_parameters(dtype=torch.float32, shapes=SHAPES)
    optimizer = PACE(parameters, **settings)
    assert NAME in repr(optimizer)
    for t, gradients in enumerate(make_gradients(25, shapes=SHAPES)):
        references = of_the_same_state(optimizer, parameters, t, settings)
        advance(optimizer, parameters, [gradients])
        step_model(references, [g.float().double().numpy() for g in gradients])
        assert max(distances(optimizer, parameters, references).values()) <= 1e-6
        assert all(optimizer.state[p]["step"].item() == t + 1 for p in parameters)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["asked", "small"], indirect=True)
@pytest.mark.parametrize("name", TAKEN)
def test_a_run_ends_where_the_loop_ends(name, way):
    steps = make_gradients(40, shapes=SHAPES)
    for step in steps[10:20]:
        step[1] = None  # a parameter that stands still for a while, and is younger than the others then
    ours, theirs = make_parameters(shapes=SHAPES), make_parameters(shapes=SHAPES)
    found, wanted = (
        everything(run(own, steps, foreach=foreach, **TAKEN[name]))
        for own, foreach in ((ours, None), (theirs, False))
    )
    for key, value in wanted.items():
        assert torch.allclose(found[key], value, rtol=1e-9, atol=1e-9), key


def test_the_pull_is_taken_with_the_step_where_no_gain_is_at_its_limit(monkeypatch):
    monkeypatch.setattr(host, "FEWEST", 1)
    for settings, other in ((TAKEN["usual"], "_step_then_pull_"), (TAKEN["saturated"], "_step_and_pull_")):
        parameters = make_parameters(dtype=torch.float32)
        optimizer = run(parameters, make_gradients(5), **settings)
        with monkeypatch.context() as patch:
            patch.setattr(host, other, refuse)
            if other == "_step_and_pull_":  # of an infinite strength that is known without a look
                patch.setattr(host._Block, "least", refuse)
            advance(optimizer, parameters, make_gradients(5, seed=3))


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.5)])
def test_a_weight_at_its_limit_among_many_that_are_not(betas, monkeypatch):
    """One weight never has a gradient, another has one at first only, so that its v sinks."""
    monkeypatch.setattr(host, "FEWEST", 1)
    steps = make_gradients(40, shapes=[(50,)])
    for t, step in enumerate(steps):
        step[0][3] = 0
        step[0][7] = step[0][7] if t < 3 else 0
    settings = {"gain": "paper", "pullback_strength": 3.0, "weight_decay": 0.1, "betas": betas, "lr": 1e-2}
    ours, theirs = (make_parameters(shapes=[(50,)]) for _ in range(2))
    own, other = PACE(ours, **settings), PACE(theirs, foreach=False, **settings)
    for step in steps:
        advance(own, ours, [step])
        advance(other, theirs, [step])
        assert torch.allclose(ours[0], theirs[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("change", CHANGES_OF_MOMENTS)
@pytest.mark.parametrize("strength", [15.0, 3000.0])
def test_what_is_remembered_of_second_moments_makes_no_difference(strength, change, monkeypatch):
    """To the bit, as a run that is resumed remembers nothing."""
    monkeypatch.setattr(host, "FEWEST", 1)
    shapes = [(40, 40), (2000,), (5,)]
    assert_same_bits(*with_and_without_memory(change, shapes, fused=None, pullback_strength=strength))


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.5)])
@pytest.mark.parametrize("gain", ["paper", "scaled"])
def test_nor_does_it_where_moments_sink_to_the_limit_and_rise_again(gain, betas, monkeypatch):
    monkeypatch.setattr(host, "FEWEST", 1)
    steps = make_gradients(60, shapes=[(50,), (300,)])
    for t, step in enumerate(steps):
        step[0][7] *= 0 if 5 < t < 30 else 1
        step[1][3:9] *= 1e-4 if t < 40 else 1
    settings = {
        "gain": gain,
        "pullback_strength": 0.3 if gain == "paper" else 30.0,
        "betas": betas,
        "lr": 1e-2,
    }
    found = {False: [], True: []}
    ways = set()
    for forgetful, states in found.items():
        parameters = make_parameters(dtype=torch.float32, shapes=[(50,), (300,)])
        optimizer = PACE(parameters, **settings)
        for way in ("_step_and_pull_", "_step_then_pull_"):
            taken = getattr(host, way)
            monkeypatch.setattr(host, way, lambda *own, way=way, taken=taken: (ways.add(way), taken(*own)))
        for step in steps:
            if forgetful:
                optimizer._fits.clear()
            advance(optimizer, parameters, [step])
            states.append(everything(optimizer))
    assert ways == {"_step_and_pull_", "_step_then_pull_"}
    for one, other in zip(*found.values(), strict=True):
        assert_same_bits(one, other)


def test_a_moment_that_sinks_while_their_sum_does_not(monkeypatch):
    monkeypatch.setattr(host, "FEWEST", 1)
    found = []
    for forgetful in (False, True):
        parameters = make_parameters(dtype=torch.float32)
        optimizer = PACE(parameters, lr=1e-2)
        advance(optimizer, parameters, make_gradients(5))
        moments = optimizer.state[parameters[0]]["exp_avg_sq"]
        moments[1, 1] += moments[0, 0]
        moments[0, 0] = 0
        if forgetful:
            optimizer._fits.clear()
        advance(optimizer, parameters, [[1e-6 * gradient for gradient in make_gradients(1)[0]]])
        found.append(everything(optimizer))
    assert_same_bits(*found)


@pytest.mark.parametrize("gain", ["paper", "scaled"])
def test_moments_that_are_set_to_0_behind_torchs_back_are_noticed(gain, monkeypatch):
    """By `.data`, of which torch counts no change; gains would be far above their limit."""
    monkeypatch.setattr(host, "FEWEST", 1)
    strength = 3e-3 if gain == "paper" else 15.0
    parameters = make_parameters(dtype=torch.float32)
    optimizer = PACE(parameters, lr=1e-2, gain=gain, pullback_strength=strength)
    advance(optimizer, parameters, make_gradients(5))
    optimizer.state[parameters[0]]["exp_avg_sq"].data.zero_()  # the others give the scale
    twins = [p.detach().clone().requires_grad_() for p in parameters]
    twin = PACE(twins, lr=1e-2, gain=gain, pullback_strength=strength, foreach=True)
    twin.load_state_dict(optimizer.state_dict())
    gradients = [1e-6 * gradient for gradient in make_gradients(1)[0]]
    advance(optimizer, parameters, [gradients])
    advance(twin, twins, [gradients])
    for one, other in zip(parameters, twins, strict=True):
        assert torch.allclose(one, other, rtol=1e-5)


def test_no_gain_is_taken_for_one_below_its_limit():
    """v may sink by β₂ at a step, and the limit is where √v̂ + ε is the numerator over it."""
    pull = host.Pull(top=1e-3, shift=1e-6, floor=1e-3, share=1.0)
    recipe = PACE([torch.ones(1, requires_grad=True)]).param_groups[0]
    recipe = host.Recipe.of(recipe)
    edge = (1e-3 - 1e-6) ** 2 / 0.999
    assert host._is_below_limit(1.001 * edge, pull, recipe)
    assert not host._is_below_limit(edge, pull, recipe)
    assert not host._is_below_limit(math.nan, pull, recipe)
    assert not host._is_below_limit(0.0, pull, recipe)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_a_bad_gradient_spoils_its_own_coordinate_and_no_other(bad):
    """Of 1e30 only the square overflows: nothing is spoilt, and nothing moves any more."""
    parameters = make_parameters(dtype=torch.float32, shapes=[(40,)])
    steps = make_gradients(6, shapes=[(40,)])
    steps[2][0][7] = bad
    run(parameters, steps)
    expected = [] if bad == 1e30 else [[7]]
    assert (~parameters[0].isfinite()).nonzero().tolist() == expected


def test_an_infinite_strength_takes_the_whole_of_a_small_gap():
    """Of 1e-6 in float32, over whose largest number it would be nearly nothing."""
    parameter = torch.zeros(5, requires_grad=True)
    optimizer = run([parameter], [[torch.ones(5)]], pullback_strength=math.inf, lr=1e-15)
    optimizer.state[parameter]["average"].fill_(1e-6)
    advance(optimizer, [parameter], [[torch.ones(5)]])
    assert torch.allclose(parameter, torch.tensor(1e-6), rtol=1e-6, atol=0)


def test_an_infinite_strength_overflows_nothing():
    """Gaps of 1e12 in float32."""
    parameter = torch.full((5,), 1e12).requires_grad_()
    optimizer = run([parameter], [[torch.ones(5)]] * 2, pullback_strength=math.inf)
    optimizer.state[parameter]["average"].zero_()
    advance(optimizer, [parameter], [[torch.ones(5)]])
    assert parameter.isfinite().all() and parameter.abs().max() <= 1e10 + 1  # what weight decay leaves


def test_strength_0_is_torchs_adamw_as_both_are_by_default():
    ours, theirs, steps = *(make_parameters(dtype=torch.float32) for _ in range(2)), make_gradients(30)
    run(ours, steps, pullback_strength=0.0)
    advance(torch.optim.AdamW(theirs, lr=1e-2), theirs, steps)
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


def test_between_updates_a_step_is_torchs_fused_adamws():
    ours, theirs, steps = *(make_parameters(dtype=torch.float32) for _ in range(2)), make_gradients(30)
    run(ours, steps, update_every=31)
    advance(torch.optim.AdamW(theirs, lr=1e-2, fused=True), theirs, steps)
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.slow
def test_averages_do_not_stop_short_of_live():
    """Along (live − average) they would, by half an ulp / rate; only at large rates is that nothing."""
    parameter = make_parameters(dtype=torch.float32, shapes=[(60,)])[0]
    settings = {"gain": "paper", "pullback_strength": 1e-30, "ema_power": 0.2, "return_power": 0.6}
    optimizer = PACE([parameter], weight_decay=0.0, **settings)
    expected = [parameter.detach().double().clone() for _ in range(2)]
    for t in range(1, 3001):
        parameter.grad = torch.zeros(60)
        optimizer.step()
        for average, power in zip(expected, (0.2, 0.6), strict=True):
            average.lerp_(parameter.detach().double(), (1 + t) ** -power)
        if t == 1000:
            parameter.data += 1e-3
    for average, key in zip(expected, ("average", "returned"), strict=True):
        error = (optimizer.state[parameter][key].double() - average).abs().max()
        assert error <= 1e-6 * average.abs().max(), key


@pytest.mark.parametrize("there, back", [(None, False), (True, None), (None, "fused")])
def test_states_go_from_any_path_to_any_other(there, back):
    steps, settings = make_gradients(20), {"gain": "paper", "pullback_strength": 3.0, "return_power": 0.9}
    straight = run(make_parameters(dtype=torch.float32), steps, foreach=False, **settings)
    first = run(make_parameters(dtype=torch.float32), steps[:9], foreach=there, **settings)
    weights = [p.detach().clone().requires_grad_() for p in first.param_groups[0]["params"]]
    second = PACE(weights, **settings)
    second.load_state_dict(first.state_dict())
    second.param_groups[0].update({"fused": True} if back == "fused" else {"foreach": back})
    advance(second, weights, steps[9:])
    found, wanted = everything(second), everything(straight)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.allclose(found[key].to(value.dtype), value, rtol=1e-5, atol=1e-5), key


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("gain", ["paper", "scaled"])
def test_a_resumed_run_goes_on_to_the_bit(gain):
    steps = make_gradients(20, shapes=SHAPES)
    whole = run(make_parameters(dtype=torch.float32, shapes=SHAPES), steps, gain=gain)
    first = run(make_parameters(dtype=torch.float32, shapes=SHAPES), steps[:9], gain=gain)
    weights = [p.detach().clone().requires_grad_() for p in first.param_groups[0]["params"]]
    second = PACE(weights, lr=1e-2, gain=gain)
    second.load_state_dict(first.state_dict())
    advance(second, weights, steps[9:])
    assert_same_bits(everything(whole), everything(second))


@pytest.mark.parametrize("fewest", [1, 30, 10**6])
def test_blocks_change_no_more_than_the_last_digit(fewest, monkeypatch):
    """Of float64; a matrix among them lies the other way round in memory, and lengths are odd."""

    def ran(block):
        monkeypatch.setattr(host, "BLOCK", block)
        parameters = [p.detach().clone() for p in make_parameters(shapes=[(33, 7), (16,), (5, 41)])]
        parameters[2] = parameters[2].t().contiguous().t()
        parameters = [p.requires_grad_() for p in parameters]
        steps = make_gradients(10, shapes=[(33, 7), (16,), (5, 41)])
        for step in steps:
            step[2] = step[2].t().contiguous().t()
        return everything(run(parameters, steps, gain="scaled"))

    monkeypatch.setattr(host, "FEWEST", fewest)
    whole = ran(10**6)
    for block in (7, 100):
        parts = ran(block)
        for key, value in whole.items():
            assert torch.allclose(parts[key], value, rtol=1e-14, atol=1e-14), key


def test_what_torchs_kernel_cannot_take_goes_as_before():
    """It goes by addresses: a gradient in another order of memory, a view with gaps, a parameter twice."""
    shape, steps = (6, 5), make_gradients(5, shapes=[(6, 5)])

    def stepped(make, **settings):
        parameter = make(make_parameters(dtype=torch.float32, shapes=[shape])[0].detach()).requires_grad_()
        optimizer = PACE([parameter], lr=1e-2, gain="paper", **settings)
        for step in steps:
            parameter.grad = step[0].float().t().contiguous().t()
            optimizer.step()
        return parameter.detach().clone()

    def gappy(values):
        return torch.zeros(6, 10)[:, ::2].copy_(values)

    for make in (torch.clone, gappy):
        assert torch.equal(stepped(make), stepped(make, foreach=True))


@pytest.mark.parametrize("settings", [{}, {"maximize": True}, {"max_grad_norm": 0.1}], ids=str)
@pytest.mark.parametrize("fewest, blocks", [(1, 2), (10**6, 4)], ids=["cut", "gathered"])
def test_temporary_memory(fewest, blocks, settings, monkeypatch):
    """Of a block, of which there are many: two that stay, and gradients that are not taken as they are."""
    monkeypatch.setattr(host, "FEWEST", fewest)
    monkeypatch.setattr(host, "BLOCK", 2**14)
    shapes = [(128, 64)] * 40
    parameters, gradients = (
        make_parameters(dtype=torch.float32, shapes=shapes),
        make_gradients(3, shapes=shapes),
    )
    optimizer = run(parameters, gradients[:2], **settings)
    for p, g in zip(parameters, gradients[2], strict=True):
        p.grad = g.float()
    gc.collect()
    peak, block = peak_bytes(optimizer.step), 4 * 2**14
    assert peak <= blocks * block + 8192, f"{peak / block:.2f} blocks"


@pytest.mark.parametrize(
    "around", [lambda: torch.device("meta"), torch.inference_mode], ids=["device", "mode"]
)
def test_buffers_are_as_good_later_wherever_they_were_first_asked_for(around, monkeypatch):
    monkeypatch.setattr(host, "FEWEST", 1)
    monkeypatch.setattr(host, "_OF_THREAD", host._OfThread())
    ours, theirs, steps = *(make_parameters(dtype=torch.float32) for _ in range(2)), make_gradients(4)
    optimizer, twin = PACE(ours), PACE(theirs)
    advance(twin, theirs, steps)
    for i, gradients in enumerate(steps):
        with around() if i == 0 else contextlib.nullcontext():
            advance(optimizer, ours, [gradients])
    assert_same_bits(everything(twin), everything(optimizer))


def test_all_groups_share_two_buffers(monkeypatch):
    kept = host._OfThread()
    monkeypatch.setattr(host, "_OF_THREAD", kept)
    monkeypatch.setattr(host, "FEWEST", 1)
    parameters = make_parameters(dtype=torch.float32, shapes=[(30, 7)] * 5)
    optimizer = PACE([{"params": [parameter]} for parameter in parameters])
    advance(optimizer, parameters, make_gradients(2, shapes=[(30, 7)] * 5))
    assert [tuple(pair.shape) for pair in kept.whole.values()] == [(2, host.BLOCK)]
