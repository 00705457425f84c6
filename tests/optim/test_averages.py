"""Passive averages against their definitions: explicit weights over all iterates, in float64."""

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from problems import Tied, advance, assert_same_bits, everything, make_gradients, make_parameters, train
from torch import nn, optim

from paceline import (
    BEMA,
    PACE,
    Averages,
    Blend,
    FixedDecay,
    HalfLife,
    Polynomial,
    PowerLaw,
    averaged_state_dict,
    averaged_weights,
    save_averaged,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "golden_bema.json").read_text())


def walk(averages, iterates):
    """Averages after a walk through given weights: a base that is told where to go."""
    parameter = nn.Parameter(torch.tensor(iterates[0], dtype=torch.float64))
    optimizer = Averages(optim.SGD([parameter], lr=1.0), averages)
    for t in range(1, len(iterates)):
        parameter.grad = parameter.detach() - torch.tensor(iterates[t], dtype=torch.float64)
        optimizer.step()
        with torch.no_grad():  # exactly there: the difference rounds
            parameter.copy_(torch.tensor(iterates[t], dtype=torch.float64))
    return optimizer, parameter


def iterates(steps, seed=0):
    noise = np.random.default_rng(seed)
    return np.cumsum(noise.standard_normal((steps + 1, 3)), axis=0)


def by_rates(points, rate):
    """What average ← (1 − rate_t) average + rate_t live gives, as explicit weights over the iterates."""
    weights = np.zeros(len(points))
    weights[0] = 1.0
    for t in range(1, len(points)):
        weights *= 1 - rate(t)
        weights[t] += rate(t)
    assert weights.sum() == pytest.approx(1.0)
    return weights @ points


def geometric(points, decay):
    """Weights (1 − decay) · decay^age, and all that is left over on the first."""
    ages = np.arange(len(points) - 1, -1, -1)
    weights = (1 - decay) * decay**ages
    weights[0] = decay ** ages[0]
    return weights @ points


DEFINITIONS = {
    "power law": (PowerLaw(0.6), lambda x: by_rates(x, lambda t: (1 + t) ** -0.6)),
    "power law, offset": (PowerLaw(0.5, 10.0, 2.0), lambda x: by_rates(x, lambda t: (10 + 2 * t) ** -0.5)),
    "power law, every 5th": (
        PowerLaw(0.6, every=5),
        lambda x: by_rates(x, lambda t: 0.0 if t % 5 else (1 + t) ** -0.6),
    ),
    "uniform": (PowerLaw(1.0), lambda x: x.mean(axis=0)),
    "live": (PowerLaw(0.0), lambda x: x[-1]),
    "t^0": (Polynomial(0), lambda x: x[1:].mean(axis=0)),
    "t^3": (Polynomial(3), lambda x: np.average(x[1:], axis=0, weights=np.arange(1, len(x)) ** 3.0)),
    "t^12": (Polynomial(12), lambda x: np.average(x[1:], axis=0, weights=np.arange(1, len(x)) ** 12.0)),
    "t^0.5": (Polynomial(0.5), lambda x: np.average(x[1:], axis=0, weights=np.arange(1, len(x)) ** 0.5)),
    "fixed": (FixedDecay(0.9), lambda x: geometric(x, 0.9)),
    "fixed from 20": (FixedDecay(0.9, start=20), lambda x: geometric(x[20:], 0.9)),
    "half-life": (HalfLife(0.1), lambda x: by_rates(x, lambda t: 1 - 0.5 ** (1 / (0.1 * t)))),
    "blend": (Blend(PowerLaw(1.0), share=0.6), lambda x: 0.4 * x[-1] + 0.6 * x.mean(axis=0)),
    "blend of BEMA": (
        Blend(BEMA(every=1, bias_power=0.0, power=0.0), share=0.25),
        # power 0: ema is live; bias power 0: live − live_0 is added whole.
        lambda x: 0.75 * x[-1] + 0.25 * (x[-1] + x[-1] - x[0]),
    ),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_each_average_is_its_definition(name):
    average, definition = DEFINITIONS[name]
    points = iterates(50)
    optimizer, parameter = walk({"it": average}, points)
    ((_, ours),) = optimizer.returned_averages()
    assert np.abs(ours.numpy() - definition(points)).max() <= 1e-12 * np.abs(points).max()
    with averaged_weights(optimizer["it"]):
        assert torch.equal(parameter, ours)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"uf{case['in']['uf']}-kappa{case['in']['kappa']}")
def test_bema_against_golden_values(case):
    given, (emas, returned) = case["in"], case["out"]
    bema = BEMA(given["kappa"], given["eta"], given["rho"], given["gamma"], given["uf"])
    for t in range(1, len(given["thetas"])):
        optimizer, parameter = walk({"bema": bema}, given["thetas"][: t + 1])
        state = optimizer.state[parameter]
        assert np.allclose(state["averages_bema_ema"].numpy(), emas[t - 1], rtol=1e-12, atol=1e-12)
        assert np.allclose(state["averages_bema_average"].numpy(), returned[t - 1], rtol=1e-12, atol=1e-12)


def test_bema_has_the_published_defaults_and_a_floor():
    assert BEMA() == BEMA(power=0.5, bias_power=0.2, offset=10.0, scale=1.0, every=400, min_rate=0.0)
    points = iterates(30)
    floored, parameter = walk({"it": BEMA(every=1, min_rate=0.5)}, points)
    expected = by_rates(points, lambda t: max((10 + t) ** -0.5, 0.5))
    assert np.allclose(floored.state[parameter]["averages_it_ema"].numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PowerLaw(1.5), "Invalid power value: 1.5; allowed: 0 <= power <= 1"),
        (lambda: PowerLaw(0.5, offset=0.2, scale=0.2), ">= 1, both >= 0"),
        (lambda: PowerLaw(0.5, every=0), "Invalid every value: 0; allowed: an integer >= 1"),
        (lambda: PowerLaw(0.5, every=2.0), "Invalid every value: 2.0; allowed: an integer >= 1"),
        (lambda: Polynomial(-1), "power value: -1"),
        (lambda: FixedDecay(1.1), "decay value: 1.1"),
        (lambda: FixedDecay(0.9, start=-1), "start value: -1"),
        (lambda: HalfLife(0), "fraction value: 0"),
        (lambda: HalfLife(math.inf), "> 0 and finite"),
        (lambda: BEMA(every=0), "every value: 0"),
        (lambda: BEMA(power=2), "power value: 2"),
        (lambda: BEMA(bias_power=-1), "bias_power value: -1"),
        (lambda: BEMA(min_rate=2), "min_rate value: 2"),
        (lambda: Blend(PowerLaw(0.5), share=1.5), "share value: 1.5"),
    ],
)
def test_settings_out_of_range_are_refused(make, words):
    with pytest.raises(ValueError) as caught:
        make()
    assert words in str(caught.value)


# --- Beside an optimizer --------------------------------------------------------------------------

SEVERAL = {
    "short": PowerLaw(0.3),
    "long": PowerLaw(0.9),
    "bema": BEMA(every=3),
    "tail": Blend(HalfLife(0.2), 0.5),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_is_not_changed_by_averages(dtype):
    alone, beside = make_parameters(dtype=dtype), make_parameters(dtype=dtype)
    base, optimizer = optim.AdamW(alone, lr=1e-2), Averages(optim.AdamW(beside, lr=1e-2), SEVERAL)
    advance(base, alone, make_gradients(20))
    advance(optimizer, beside, make_gradients(20))
    assert all(torch.equal(p, q) for p, q in zip(alone, beside, strict=True))


def test_averages_beside_pace_are_those_of_its_live_weights():
    """And PACE's own average is still there, in the optimizer underneath."""
    parameters, others = make_parameters(), make_parameters()
    settings = {"lr": 1e-2, "gain": "paper", "pullback_strength": 3.0, "ema_power": 0.3, "foreach": True}
    pace = PACE(others, return_power=0.9, **settings)
    optimizer = Averages(
        PACE(parameters, **settings),
        {"same": PowerLaw(0.3), "returned": PowerLaw(0.9)},
    )
    advance(pace, others, make_gradients(20))
    advance(optimizer, parameters, make_gradients(20))
    for p, q in zip(parameters, others, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(optimizer.state[p]["averages_same_average"], pace.state[q]["average"])
        assert torch.equal(optimizer.state[p]["averages_returned_average"], pace.state[q]["returned"])
    with averaged_weights(optimizer.base):
        assert all(torch.equal(p, pace.state[q]["average"]) for p, q in zip(parameters, others, strict=True))


def test_views_stand_for_one_average_each(tmp_path):
    torch.manual_seed(0)
    model = Tied()
    optimizer = Averages(optim.AdamW(model.parameters(), lr=3e-2), SEVERAL)
    train(model, optimizer)
    assert list(optimizer) == list(SEVERAL)
    live = copy.deepcopy(model.state_dict())
    seen = set()
    for name in optimizer:
        exported = averaged_state_dict(model, optimizer[name])
        with averaged_weights(optimizer[name]):
            assert optimizer[name].shows_average() and optimizer.shows_average()
            for key, value in model.state_dict().items():
                assert torch.equal(value, exported[key]), key
            with pytest.raises(RuntimeError, match="step outside"):
                optimizer.step()
            with pytest.raises(RuntimeError, match="the parameters hold another average"):
                optimizer["long" if name != "long" else "short"].eval()
        seen.add(exported["embed.weight"].sum().item())
        save_averaged(model, optimizer[name], tmp_path / f"{name}.safetensors")
    assert len(seen) == len(SEVERAL)
    for key, value in model.state_dict().items():
        assert torch.equal(value, live[key])
    with averaged_weights(optimizer):
        assert optimizer["short"].shows_average()  # the first stands for the optimizer
    optimizer["long"].eval()
    with pytest.raises(RuntimeError, match="call train"), averaged_weights(optimizer["bema"]):
        pass
    assert optimizer["long"].shows_average()  # as it was
    optimizer.train()
    assert torch.equal(model.embed.weight, live["embed.weight"])
    with pytest.raises(KeyError, match="no average is called 'wide'; there are: short, long, bema, tail"):
        optimizer["wide"]


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_a_checkpoint_of_any_shown_average_goes_on_from_live(order):
    def make(seed):
        parameters = make_parameters(seed=seed)
        model = nn.ParameterList(parameters)
        return model, Averages(optim.AdamW(model.parameters(), lr=1e-2), SEVERAL)

    for name in SEVERAL:
        model, optimizer = make(0)
        advance(optimizer, list(model), make_gradients(5))
        before = everything(optimizer)
        with averaged_weights(optimizer[name]):
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        fresh, other = make(1)
        if order == "model first":
            fresh.load_state_dict(saved[0])
        other.load_state_dict(saved[1])
        if order == "optimizer first":
            fresh.load_state_dict(saved[0])
            other.train()
        assert_same_bits(everything(other), before)


def test_a_state_from_before_an_average_was_added():
    parameters, others = make_parameters(), make_parameters()
    old = Averages(optim.AdamW(parameters, lr=1e-2), {"a": PowerLaw(0.5)})
    advance(old, parameters, make_gradients(5))
    new = Averages(optim.AdamW(others, lr=1e-2), {"a": PowerLaw(0.5), "b": PowerLaw(0.9)})
    with pytest.warns(UserWarning, match="no 'b_average' for 4 parameter"):
        new.load_state_dict(old.state_dict())
