"""Averages against their definitions: explicit weights over all iterates, in float64."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from problems import copies, make_gradients, make_parameters, same, set_gradients
from torch import optim

from paceline import (
    BEMA,
    Blend,
    Control,
    FixedDecay,
    HalfLife,
    Polynomial,
    PowerLaw,
    attach,
    averaged_weights,
)
from paceline.optim.weights import keeper_of

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "golden_bema.json").read_text())


def walk(averages, iterates):
    """Return an optimizer that has walked through given weights, its parameter, and what it keeps."""
    parameter = torch.tensor(iterates[0], dtype=torch.float64).requires_grad_()
    optimizer = attach(optim.SGD([parameter], lr=1.0), averages=averages)
    for target in iterates[1:]:
        parameter.grad = parameter.detach() - torch.tensor(target, dtype=torch.float64)
        optimizer.step()
    return optimizer, parameter, keeper_of(optimizer).memory[parameter]


def iterates(steps):
    return np.cumsum(np.random.default_rng(0).standard_normal((steps + 1, 3)), axis=0)


def by_rates(points, rate):
    """Return the weighted mean in which step t has rate(t) times what later steps leave of it."""
    weights = np.array([1.0] + [rate(t) for t in range(1, len(points))])
    for t in range(1, len(points)):
        weights[:t] *= 1 - rate(t)
    assert weights.sum() == pytest.approx(1.0)
    return weights @ points


def by_age(points, decay):
    """Return the mean with weights (1 − decay) · decay^age, and all that is left over on the first."""
    ages = np.arange(len(points) - 1, -1, -1)
    weights = (1 - decay) * decay**ages
    weights[0] = decay ** ages[0]
    return weights @ points


def by_power(points, power):
    """Return the mean of all points but the first, with weights Γ(s + power)/Γ(s)."""
    weights = [math.exp(math.lgamma(s + power) - math.lgamma(s)) for s in range(1, len(points))]
    return np.average(points[1:], axis=0, weights=weights)


DEFINITIONS = {
    "power law": (PowerLaw(0.6), lambda x: by_rates(x, lambda t: (1 + t) ** -0.6)),
    "uniform": (PowerLaw(1.0), lambda x: x.mean(axis=0)),
    "live": (PowerLaw(0.0), lambda x: x[-1]),
    "polynomial 0": (Polynomial(0), lambda x: x[1:].mean(axis=0)),
    "polynomial 1": (Polynomial(1), lambda x: np.average(x[1:], axis=0, weights=np.arange(1, len(x)))),
    "polynomial 3.5": (Polynomial(3.5), lambda x: by_power(x, 3.5)),
    "fixed": (FixedDecay(0.9), lambda x: by_age(x, 0.9)),
    "fixed from 20": (FixedDecay(0.9, start=20), lambda x: by_age(x[20:], 0.9)),
    "half-life": (HalfLife(0.1), lambda x: by_rates(x, lambda t: 1 - 0.5 ** (1 / (0.1 * t)))),
    "blend": (Blend(PowerLaw(1.0), share=0.6), lambda x: 0.4 * x[-1] + 0.6 * x.mean(axis=0)),
    # BEMA's powers are 0: its ema is live, and live − live_0 is added whole.
    "blend of BEMA": (Blend(BEMA(0.0, 0.0, every=1), share=0.25), lambda x: x[-1] + 0.25 * (x[-1] - x[0])),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_each_average_is_its_definition(name):
    average, definition = DEFINITIONS[name]
    points = iterates(50)
    optimizer, parameter, _ = walk({"it": average}, points)
    with averaged_weights(optimizer):
        assert np.abs(parameter.detach().numpy() - definition(points)).max() <= 1e-12 * np.abs(points).max()


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"uf{case['in']['uf']}-kappa{case['in']['kappa']}")
def test_bema_against_golden_values(case):
    given, (emas, returned) = case["in"], case["out"]
    bema = BEMA(given["kappa"], given["eta"], given["rho"], given["gamma"], given["uf"])
    for t in range(1, len(given["thetas"])):
        kept = walk({"bema": bema}, given["thetas"][: t + 1])[2]
        assert np.allclose(kept["bema_ema"].numpy(), emas[t - 1], rtol=1e-12, atol=1e-12)
        assert np.allclose(kept["bema_average"].numpy(), returned[t - 1], rtol=1e-12, atol=1e-12)


def test_bema_begins_after_its_burn_in():
    """It is live until then, and afterwards that of a run from there, at the rates of its own steps."""
    points = [np.array([float(x)]) for x in (5, 1, 4, 2, 8)]
    burnt = BEMA(every=1, burn_in=2)
    returned = [walk({"it": burnt}, points[: t + 1])[2]["it_average"].numpy() for t in range(1, 5)]
    assert [value.item() for value in returned[:2]] == [1, 4]
    ema = start = 4.0
    for t, live, found in ((3, 2.0, returned[2]), (4, 8.0, returned[3])):
        ema += (10 + t) ** -0.5 * (live - ema)
        assert found.item() == pytest.approx(ema + (10 + t) ** -0.2 * (live - start))


def test_bema_has_the_published_defaults_and_a_floor():
    assert BEMA() == BEMA(
        power=0.5, bias_power=0.2, offset=10.0, scale=1.0, every=400, min_rate=0.0, burn_in=0
    )
    points = iterates(30)
    kept = walk({"it": BEMA(every=1, min_rate=0.29)}, points)[2]  # reached at t = 2
    expected = by_rates(points, lambda t: max((10 + t) ** -0.5, 0.29))
    assert np.allclose(kept["it_ema"].numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averages_beside_a_control_are_of_the_steered_weights_and_leave_them(dtype):
    """In a precision of float32 at least; of the same power as the control's own, they are the same."""
    gradients = make_gradients(20)
    averages = {"same": PowerLaw(0.7), "bema": BEMA(every=3), "tail": Blend(HalfLife(0.2), 0.5)}
    found = []
    for further in ({}, averages):
        parameters = make_parameters(dtype=dtype)
        optimizer = attach(optim.AdamW(parameters, lr=1e-2), control=Control.push(), averages=further)
        for each in gradients:
            set_gradients(parameters, each)
            optimizer.step()
        found.append(copies(parameters))
        kept = [keeper_of(optimizer).memory[parameter] for parameter in parameters]
    assert same(*found)
    assert same([own["same_average"] for own in kept], [own["returned"] for own in kept])
    assert {value.dtype for own in kept for key, value in own.items() if key != "step"} == {torch.float32}


REFUSED = [
    (lambda: PowerLaw(1.5), "Invalid power value: 1.5; allowed: between 0 and 1"),
    (lambda: Polynomial(-1), "power value: -1"),
    (lambda: FixedDecay(1.1), "decay value: 1.1"),
    (lambda: FixedDecay(0.9, start=-1), "start value: -1"),
    (lambda: HalfLife(0), "fraction value: 0"),
    (lambda: HalfLife(math.inf), "> 0 and finite"),
    (lambda: BEMA(every=0), "every value: 0"),
    (lambda: BEMA(power=2), "power value: 2"),
    (lambda: BEMA(bias_power=-1), "bias_power value: -1"),
    (lambda: BEMA(offset=0.2, scale=0.2), ">= 1, both >= 0"),
    (lambda: BEMA(offset=-1.0, scale=5.0), ">= 1, both >= 0"),
    (lambda: BEMA(min_rate=2), "min_rate value: 2"),
    (lambda: Blend(PowerLaw(0.5), share=1.5), "share value: 1.5"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_settings_out_of_range_are_refused(make, words):
    with pytest.raises(ValueError) as refusal:
        make()
    assert words in str(refusal.value)
