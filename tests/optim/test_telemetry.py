"""Telemetry: every figure against float64 NumPy; asking changes nothing."""

import math

import numpy as np
import pytest
import torch
from problems import (
    BESIDE,
    CONTROLS,
    advance,
    assert_same_bits,
    everything,
    make_gradients,
    make_parameters,
    run,
)
from reference import Reference, SGDReference, references

from paceline import PACE, Control, PowerLaw, attach, averaged_weights, pull_statistics, reset_average
from paceline.optim.telemetry import SAMPLE, sample_stride

FAST = {"lr": 1e-2}


def spread(name, values):
    """Return mean and quantiles; the share q is reached at the smallest value with q of all at or below."""
    ordered = np.sort(values)
    ranks = {f"{name}/q{10 * tenths}": ordered[-(-tenths * values.size // 10) - 1] for tenths in (1, 5, 9)}
    return {f"{name}/mean": values.mean(), **ranks}


def ratio_of(r):
    """Return R, by which the rate is multiplied, of a reference that has taken a step."""
    control = r.control
    if r.t % (control.pull_every or control.every) or 0 in (r.lr, control.strength):
        return np.zeros_like(r.live)
    strength = min(r.strength, 1e300)
    return r.lr * strength / (r.root + r.eps) if control.sizing == "paper" else np.full_like(r.root, strength)


def figures_of(tensors):
    """Return the figures of some references together."""
    flat = lambda of: np.concatenate([np.ravel(of(r)) for r in tensors])  # noqa: E731
    rate = lambda r: np.full_like(r.live, r.rate(r.control.powers[0]))  # noqa: E731
    gain = lambda r: np.minimum(rate(r) * ratio_of(r), r.control.max_gain)  # noqa: E731
    steering = lambda r: r.average if r.control.strength else r.evaluated  # noqa: E731
    return {
        "saturated": flat(lambda r: (gain(r) >= r.control.max_gain) & (ratio_of(r) != 0)).mean(),
        **spread("gain", flat(gain)),
        **spread("ratio", flat(ratio_of)),
        "gap_rms": np.sqrt(np.mean(flat(lambda r: steering(r) - r.live) ** 2)),
        "t": max(r.t for r in tensors),
        "lr": flat(lambda r: np.full_like(r.live, r.lr)).mean(),
        "rate": flat(rate).mean(),
    }


def check(ours, named):
    """Compare the figures of all tensors and of each with those of the references of these names."""
    expected = figures_of(list(named.values()))
    for name, reference in named.items():
        expected |= {f"{name}/{key}": value for key, value in figures_of([reference]).items()}
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        both_huge = min(value, ours[key]) > 1e30  # the largest number stands for an infinite strength
        assert both_huge or math.isclose(ours[key], value, rel_tol=1e-9, abs_tol=1e-14), key


def step_both(optimizer, parameters, expected, gradients):
    advance(optimizer, parameters, [gradients])
    for reference, gradient in zip(expected, gradients, strict=True):
        reference.step(gradient)


def momentum(parameters, control):
    return attach(torch.optim.SGD(parameters, **FAST, momentum=0.9), control=control)


MAKERS = {
    "PACE": (lambda p, control: PACE(p, **FAST, control=control), Reference, CONTROLS),
    "SGD": (momentum, SGDReference, BESIDE),
}


@pytest.mark.parametrize(
    ("maker", "name"), [(maker, name) for maker, row in MAKERS.items() for name in row[2]]
)
def test_the_figures_of_every_step_are_the_references(maker, name):
    make, kind, controls = MAKERS[maker]
    parameters = make_parameters()
    expected = references(parameters, controls[name], kind, **FAST)
    optimizer = make(parameters, controls[name])
    for gradients in make_gradients(6):
        step_both(optimizer, parameters, expected, gradients)
        check(pull_statistics(optimizer, tensors=True), {f"0.{i}": r for i, r in enumerate(expected)})


def test_groups_have_their_settings_tensors_their_names_and_counts():
    """One group is not pulled, and has a name of the other; some tensors lag behind, or have not stepped."""
    parameters = make_parameters()
    pulled, plain = {"lr": 3e-2, "control": Control.paper(30.0)}, {"lr": 1e-3, "control": Control.none(0.8)}
    named = list(zip("abac", parameters, strict=True))
    optimizer = PACE([{"params": named[:2], **pulled}, {"params": named[2:], **plain}])
    expected = [*references(parameters[:2], **pulled), *references(parameters[2:], **plain)]
    for t, gradients in enumerate(make_gradients(4)):
        gradients = [None if (i, t) in {(0, 0), (2, 0), (1, 3)} else g for i, g in enumerate(gradients)]
        step_both(optimizer, parameters, expected, gradients)
        seen = {name: r for name, r in zip(("a", "b", "1.a", "c"), expected, strict=True) if r.t}
        check(pull_statistics(optimizer, tensors=True), seen)


def test_large_tensors_are_sampled_for_quantiles_and_weighted_by_their_size():
    shapes = [(210, 128), (3000,)]
    parameters, (gradients,) = make_parameters(shapes=shapes), make_gradients(1, shapes=shapes)
    expected = references(parameters, Control.paper(30.0), **FAST)
    optimizer = run(parameters, [], Control.paper(30.0))
    step_both(optimizer, parameters, expected, gradients)
    ratios, ours = [ratio_of(r) for r in expected], pull_statistics(optimizer, tensors=True)
    stride = sample_stride(210 * 128)
    sample = ratios[0].flatten()[::stride]
    assert 0.55 * SAMPLE < sample.size <= SAMPLE and math.gcd(stride, 210 * 128) == 1 == sample_stride(SAMPLE)
    for key, value in {**spread("ratio", sample), "ratio/mean": ratios[0].mean()}.items():
        assert ours[f"0.0/{key}"] == pytest.approx(value, rel=1e-9)
    everyone = np.concatenate([np.repeat(sample, stride), ratios[1]])
    assert ours["ratio/q90"] == pytest.approx(spread("ratio", everyone)["ratio/q90"], rel=1e-9)


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
def test_asking_changes_nothing_shown_or_not_and_a_reset_average_has_no_gap(storage):
    found = []
    for asks in (False, True):
        parameters = make_parameters(dtype=torch.float32)
        optimizer = run(parameters, make_gradients(3), CONTROLS["paper"], average_dtype=storage)
        if asks:
            outside = pull_statistics(optimizer)
            with averaged_weights(optimizer):
                assert outside == pull_statistics(optimizer)
        found.append(everything(optimizer))
    assert_same_bits(*found)
    reset_average(optimizer)
    assert pull_statistics(optimizer) == {**outside, "gap_rms": 0.0}


def test_what_has_no_pull_is_refused():
    parameters = make_parameters()
    optimizer = PACE(parameters, 0.0)
    advance(optimizer, parameters, [[torch.zeros_like(p) for p in parameters]])  # torch makes a state so
    with pytest.raises(RuntimeError, match="before the first step"):
        pull_statistics(optimizer)
    beside = attach(torch.optim.SGD(parameters, 0.1), averages={"a": PowerLaw(0.5)})
    advance(beside, parameters, make_gradients(1))
    with pytest.raises(TypeError, match="SGD has no control to report; parameter 0 of group 0"):
        pull_statistics(beside)
