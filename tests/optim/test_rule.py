"""The update against an independent float64 transcription, and properties that any reading must have."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import PATHS, SHAPES, VARIANTS, advance, make_gradients, make_parameters, run
from reference import Reference, step_model

from paceline import PACE
from paceline.optim.rule import RATIOS, Terms, averaging_rate

numbers = st.floats(-3, 3)
options = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.0, 1e-4, 1e-2, 0.3]),
        "betas": st.tuples(st.sampled_from([0.0, 0.8, 0.95]), st.sampled_from([0.9, 0.999])),
        "eps": st.sampled_from([1e-8, 1e-3]),
        "weight_decay": st.sampled_from([0.0, 0.01, 0.3]),
        "ema_power": st.floats(0, 1),
        "update_every": st.integers(1, 4),
        "ema_offset": st.sampled_from([0.0, 1.0, 10.0]),
        "ema_scale": st.sampled_from([1.0, 2.5]),
        "max_gain": st.sampled_from([0.3, 1.0]),
        "gap": st.sampled_from(["pre", "lookahead"]),
        "return_power": st.sampled_from([None, 0.0, 0.7, 1.0]),
        "maximize": st.booleans(),
    }
)
strengths = st.one_of(
    st.tuples(st.just("paper"), st.sampled_from([0.0, 1e-3, 1.0, 60.0, 1e9])),
    st.tuples(st.just("scaled"), st.sampled_from([0.0, 1e-3, 15.0, 60.0, 1e9])),
    st.tuples(st.just("uniform"), st.sampled_from([-0.9, -0.2, 0.0, 0.7, 5.0])),
)


def relative_error(ours, reference):
    reference = np.asarray(reference)
    scale = max(np.abs(reference).max(), 1e-300)
    return np.abs(ours.detach().double().numpy() - reference).max() / scale


@pytest.mark.slow
@given(data=st.data(), options=options, strength=strengths, foreach=st.booleans())
@settings(max_examples=500, deadline=None)
def test_against_the_reference_in_float64(data, options, strength, foreach):
    """N1: 500 cases of 12 steps, some of them without a gradient, weights and state to 1e-12."""
    gain, c = strength
    start = data.draw(st.lists(numbers, min_size=1, max_size=4))
    reference = Reference(start, gain=gain, pullback_strength=c, **options)
    parameter = torch.tensor(start, dtype=torch.float64).requires_grad_()
    optimizer = PACE([parameter], gain=gain, pullback_strength=c, foreach=foreach, **options)
    seed = data.draw(st.integers(0, 2**31))
    noise = np.random.default_rng(seed)
    for _ in range(12):
        gradient = None if noise.random() < 0.1 else 0.3 + noise.standard_normal(len(start))
        parameter.grad = None if gradient is None else torch.tensor(gradient)
        optimizer.step()
        reference.step(gradient)
    # A weight near 0 is the difference of larger ones: errors are relative to what was added up.
    state, size = optimizer.state[parameter], 1 + np.abs(start).max()
    for ours, theirs in (
        (parameter, reference.live),
        (state["average"], reference.average),
        *([(state["exp_avg"], reference.m)] if "exp_avg" in state else []),  # not without momentum
        (state["exp_avg_sq"], reference.v),
        (
            state.get("returned", state["average"]),
            reference.returned if "returned" in state else reference.average,
        ),
    ):
        assert np.abs(ours.detach().numpy() - theirs).max() <= 1e-12 * size
    assert state["step"].item() == reference.t


@pytest.mark.slow
@pytest.mark.parametrize("foreach", [False, None], ids=["per tensor", "by itself"])
@pytest.mark.parametrize("name", VARIANTS)
def test_against_the_reference_over_200_steps(name, foreach):
    """N1: a long float64 run of every variant, to 1e-12."""
    parameters, gradients = make_parameters(), make_gradients(200)
    references = [Reference(p.detach().numpy(), **{"lr": 1e-2, **VARIANTS[name]}) for p in parameters]
    optimizer = run(parameters, gradients, foreach=foreach, **VARIANTS[name])
    for step_gradients in gradients:
        step_model(references, [gradient.numpy() for gradient in step_gradients])
    for parameter, reference in zip(parameters, references, strict=True):
        assert relative_error(parameter, reference.live) <= 1e-12
        assert relative_error(optimizer.state[parameter]["average"], reference.average) <= 1e-12


@pytest.mark.parametrize("name", ["default", "strong", "scaled", "lookahead", "half_gain"])
def test_one_float32_step_is_within_ulps_of_the_reference(name):
    """N1: from equal inputs, 99.9 % of the elements within 4 ulp, and the same clip decisions."""
    shape, torch_settings = (4000,), {"lr": 1e-2, **VARIANTS[name]}
    parameters = make_parameters(dtype=torch.float32, shapes=[shape])
    optimizer = run(parameters, make_gradients(30, shapes=[shape]), **VARIANTS[name])
    (parameter,) = parameters
    state = optimizer.state[parameter]
    reference = Reference(parameter.detach().double().numpy(), **torch_settings)
    reference.m, reference.v = state["exp_avg"].double().numpy(), state["exp_avg_sq"].double().numpy()
    reference.average, reference.t = state["average"].double().numpy(), 30
    reference.root = np.sqrt(reference.v / (1 - 0.999**30))
    gradient = make_gradients(1, seed=7, shapes=[shape])[0][0].float()
    advance(optimizer, parameters, [[gradient]])
    reference.step(gradient.double().numpy())
    for ours, theirs in ((parameter, reference.live), (state["average"], reference.average)):
        ours = ours.detach().numpy()
        # One ulp of the larger of the numbers that were added: live, step and pull.
        ulps = np.abs(ours - theirs) / np.spacing(np.maximum(np.abs(theirs), 0.05).astype(np.float32))
        assert (ulps <= 4).mean() >= 0.999
    # A clip decided differently would show as a jump of the gain to or from its limit.
    near = np.abs(reference.gain - torch_settings.get("max_gain", 1.0)) < 1e-6
    off = np.abs(parameter.detach().numpy() - reference.live) > 1e-4
    assert not (off & ~near).any()


def test_averaging_rate_is_the_papers():
    assert averaging_rate(3, 0.5) == 0.5
    assert averaging_rate(1, 0.5, offset=0.0) == 1.0
    assert averaging_rate(7, 1.0, offset=10.0, scale=2.0) == 1 / 24
    assert averaging_rate(10**9, 0.0) == 1.0


@pytest.mark.parametrize("gain", RATIOS)
def test_ratios_write_into_out_what_they_return_without_it(gain):
    denominator = torch.rand(50, dtype=torch.float64) + 0.01
    pure = RATIOS[gain](Terms(denominator.clone(), 1e-2, 0.7, out=None))
    reused = denominator.clone()
    written = RATIOS[gain](Terms(reused, 1e-2, 0.7, out=reused))
    assert written is reused and torch.equal(written, pure)


@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("strength", [1e30, math.inf])
def test_infinite_strength_moves_live_by_the_whole_gap(strength, foreach):
    """N5: the gain is 1 everywhere, live is AdamW's plus (average − old live), exactly."""
    gradients = make_gradients(10)
    parameters = make_parameters()
    optimizer = PACE(parameters, lr=1e-2, gain="paper", pullback_strength=strength, foreach=foreach)
    for step_gradients in gradients:
        old = [p.detach().clone() for p in parameters]
        average = [optimizer.state[p]["average"].clone() for p in parameters]
        twins = [p.clone().requires_grad_() for p in old]
        adamw = torch.optim.AdamW(twins, lr=1e-2, foreach=foreach)
        for p, q in zip(parameters, twins, strict=True):
            adamw.state[q] = {k: optimizer.state[p][k].clone() for k in ("step", "exp_avg", "exp_avg_sq")}
        advance(adamw, twins, [step_gradients])
        advance(optimizer, parameters, [step_gradients])
        for p, q, a, o in zip(parameters, twins, average, old, strict=True):
            assert torch.equal(p, q + (a - o))


@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_infinite_lookahead_lands_on_the_new_average(dtype, foreach):
    parameters = make_parameters(dtype=dtype)
    optimizer = run(
        parameters, make_gradients(10), gap="lookahead", pullback_strength=math.inf, foreach=foreach
    )
    for p in parameters:
        assert torch.equal(p, optimizer.state[p]["average"].to(dtype))


@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)])
@pytest.mark.parametrize("name", ["strong", "saturated", "scaled", "lookahead_saturated"])
def test_learning_rate_0_leaves_live_and_still_averages(lr, name, foreach):
    """N5, N12: also for an infinite strength, where 0 · inf would be NaN."""
    if foreach and isinstance(lr, torch.Tensor):
        pytest.skip("torch refuses a tensor lr with foreach")
    parameters = make_parameters(dtype=torch.float32)
    optimizer = run(parameters, make_gradients(5), foreach=foreach, **VARIANTS[name])
    before = [(p.detach().clone(), optimizer.state[p]["average"].clone()) for p in parameters]
    optimizer.param_groups[0]["lr"] = lr
    advance(optimizer, parameters, make_gradients(1, seed=5))
    rate = 7 ** -(0.2 if name == "scaled" else 0.5)
    for p, (live, average) in zip(parameters, before, strict=True):
        assert torch.equal(p, live)
        expected = (1 - rate) * average.double() + rate * live.double()
        assert (optimizer.state[p]["average"].double() - expected).abs().max() < 1e-6


@pytest.mark.parametrize("foreach", PATHS)
def test_power_0_makes_the_average_live(foreach):
    """N11."""
    parameters = make_parameters(dtype=torch.float32)
    optimizer = run(parameters, make_gradients(50), ema_power=0.0, pullback_strength=30.0, foreach=foreach)
    for p in parameters:
        assert torch.equal(p, optimizer.state[p]["average"])


@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("power", [1e-6, 0.2, 0.5, 0.7, pytest.param(1.0, marks=pytest.mark.slow)])
def test_average_against_an_independent_one(power, foreach):
    """N11: power 1 is the running mean of all iterates, start included; others the weighted one."""
    parameter = torch.tensor([0.3, -2.0, 5.0], dtype=torch.float64).requires_grad_()
    optimizer = PACE([parameter], lr=1e-2, ema_power=power, pullback_strength=0.0, foreach=foreach)
    iterates = [parameter.detach().clone()]
    noise = torch.Generator().manual_seed(0)
    for _ in range(2000 if power == 1.0 else 200):
        parameter.grad = torch.randn(3, generator=noise, dtype=torch.float64)
        optimizer.step()
        iterates.append(parameter.detach().clone())
    if power == 1.0:
        expected = torch.stack(iterates).mean(0)
    else:
        expected = iterates[0]
        for t, iterate in enumerate(iterates[1:], 1):
            expected = expected + (1 + t) ** -power * (iterate - expected)
    assert torch.allclose(optimizer.state[parameter]["average"], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("foreach", PATHS)
def test_constant_weights_stay_their_own_average_to_the_bit(foreach):
    parameters = make_parameters(dtype=torch.float32)
    zeros = [[torch.zeros(shape) for shape in SHAPES]] * 300
    optimizer = run(parameters, zeros, weight_decay=0.0, foreach=foreach)
    for p in parameters:
        assert torch.equal(p, optimizer.state[p]["average"])


@pytest.mark.parametrize("start", [2**8 - 2, 2**24 - 2, 2**31 - 2])
@pytest.mark.parametrize("foreach", PATHS)
def test_step_counts_stay_exact_for_ever(start, foreach):
    """N13: t advances by exactly 1, bias corrections are exactly 1, the rate is right to 1e-12."""
    parameter = torch.ones(3).requires_grad_()
    optimizer = PACE([parameter], lr=1e-2, pullback_strength=0.0, ema_power=0.5, foreach=foreach)
    advance(optimizer, [parameter], [[torch.ones(3)]])
    state = optimizer.state[parameter]
    state["step"].fill_(start)
    for i in range(1, 5):
        state["average"].zero_()
        advance(optimizer, [parameter], [[torch.ones(3)]])
        assert state["step"].dtype == torch.float64
        assert state["step"].item() == start + i
        rate = (1 + start + i) ** -0.5
        assert torch.allclose(state["average"] / parameter.detach(), torch.full((3,), rate), rtol=1e-6)


@pytest.mark.parametrize("start", [2**24 - 2, 2**31 - 2])
def test_bias_corrections_end_at_exactly_1(start):
    parameter = torch.ones(3, dtype=torch.float64).requires_grad_()
    optimizer = PACE([parameter], lr=1e-2, pullback_strength=0.0, weight_decay=0.0)
    state = optimizer.state[parameter]
    state["step"].fill_(start)
    advance(optimizer, [parameter], [[torch.full((3,), 2.0)]])
    m, v = 0.1 * 2.0, (1 - 0.999) * 4.0
    assert torch.allclose(
        parameter.detach(), torch.full((3,), 1 - 1e-2 * m / (v**0.5 + 1e-8)).double(), rtol=1e-14
    )


@pytest.mark.slow
@given(
    live=st.lists(st.floats(-10, 10, width=32), min_size=40, max_size=40),
    average=st.lists(st.floats(-10, 10, width=32), min_size=40, max_size=40),
    strength=st.sampled_from([1e-3, 1.0, 30.0, 1e6, math.inf]),
    gap=st.sampled_from(["pre", "lookahead"]),
)
@settings(max_examples=250, deadline=None)
def test_every_coordinate_stays_between_step_and_full_pull(live, average, strength, gap):
    """N17: 10,000 coordinates; a pulled weight lies between AdamW's and the one at gain 1."""

    def stepped(c):
        parameter = torch.tensor(live).requires_grad_()
        settings = {
            "gain": "paper",
            "gap": gap,
            "foreach": True,
        }  # whose steps with and without a pull are one
        optimizer = PACE([parameter], lr=1e-2, pullback_strength=c, **settings)
        optimizer.state[parameter]["step"].fill_(3)
        optimizer.state[parameter]["average"].copy_(torch.tensor(average))
        advance(optimizer, [parameter], [[torch.linspace(-2, 2, 40)]])
        return parameter.detach()

    raw, pulled, full = stepped(0.0), stepped(strength), stepped(math.inf)
    low, high = torch.minimum(raw, full), torch.maximum(raw, full)
    ulp = torch.from_numpy(np.spacing(np.maximum(np.abs(raw.numpy()), np.abs(full.numpy()))))
    assert (pulled >= low - ulp).all() and (pulled <= high + ulp).all()
