"""Telemetry by the pass that takes the step: as good as what copies from before and after it show."""

import pytest
import torch
from problems import VARIANTS, advance, assert_same_bits, everything, make_gradients, make_parameters

from paceline import PACE
from paceline.optim import fused, probes, told, work
from paceline.optim.probes import probe

pytest.importorskip("triton")

# The interpreter is NumPy, which warns of what a GPU does in silence.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")]

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
STEPS = 4
SHAPES = [(33, 7), (16,), (), (128,), (129,), (0, 3)]
OFFERED = {name: settings for name, settings in VARIANTS.items() if settings.get("gain") != "relative"}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Without a GPU: chunks of 128 elements, and parameters on the CPU take this path instead of native.c."""
    monkeypatch.setattr(work, "_get_capturable_supported_devices", lambda: ["cuda", "cpu"])
    if not CUDA:
        tiles = {kind: (256 if kind == (torch.int8, 2) else 128, 4) for kind in fused.TILES}
        monkeypatch.setattr(fused, "TILES", tiles)
        monkeypatch.setitem(work.ONE_PASS, "cpu", work.ONE_PASS["cuda"])


def probed(settings, tells, shapes, dtype):
    """Readings of every step, told by the kernel or found from copies; and the optimizer."""
    parameters = [p.detach().to(DEVICE).requires_grad_() for p in make_parameters(0, dtype, shapes)]
    optimizer = PACE(parameters, **{"lr": 1e-2, "fused": True, **settings})
    with probe(optimizer, every=1) as telemetry, pytest.MonkeyPatch.context() as patch:
        if not tells:
            patch.setattr(PACE, "will_tell", lambda self, number: False)
        for gradients in make_gradients(STEPS, 1, shapes):
            advance(optimizer, parameters, [[gradient.to(DEVICE) for gradient in gradients]])
            if tells:  # from the second step on, when it is known which path is taken
                patch.setattr(probes, "look", _refuse)
        return telemetry.history, optimizer


def _refuse(*arguments):
    raise AssertionError("a copy was taken")


def assert_told(settings, shapes=SHAPES, dtype=torch.float32):
    ours, optimizer = probed(settings, True, shapes, dtype)
    copied, other = probed(settings, False, shapes, dtype)
    assert len(ours) == len(copied) == STEPS and optimizer.telling is None
    # From copies a pull that looks ahead is found by way of differences of what was rounded, and a gain from
    # a moment that is.
    close = 1e-2 if dtype == torch.bfloat16 else 2e-4 if settings.get("gap") == "lookahead" else 2e-5
    for one, other_one in zip(ours, copied, strict=True):
        flat, expected = one.flat(tensors=True), other_one.flat(tensors=True)
        assert one.t == other_one.t and flat.keys() == expected.keys()
        for key in flat:
            assert flat[key] == pytest.approx(expected[key], rel=close, abs=2e-6), (one.t, key)
    assert_same_bits(everything(optimizer), everything(other))
    return ours


@pytest.mark.parametrize("name", OFFERED)
def test_what_is_told_is_what_copies_show(name):
    assert_told(OFFERED[name])


@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["default", "strong", "every_3", "strength_0"])
def test_of_averages_in_few_bits(name, storage):
    assert_told({"average_dtype": storage, **OFFERED[name]})


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "master"])
def test_of_weights_in_bfloat16(rounding):
    assert_told({"rounding": rounding, **OFFERED["strong"]}, dtype=torch.bfloat16)


@pytest.mark.parametrize("more", [{"max_grad_norm": 0.1}, {"maximize": True}, {"betas": (0.0, 0.99)}])
def test_of_other_gradients_and_moments(more):
    assert_told({**OFFERED["strong"], **more})


@pytest.mark.parametrize("name", ["strong", "scaled", "every_3"])
def test_of_steps_that_are_counted_on_the_device(name):
    assert_told({"capturable": True, **OFFERED[name]})


def test_of_tensors_that_are_sampled(monkeypatch):
    monkeypatch.setattr(told, "SAMPLE", 64)
    readings = assert_told(OFFERED["strong"], shapes=[(69,), (3, 64), (7,), (300,)])
    assert readings[-1].overall.gain.q10 < readings[-1].overall.gain.q90


def test_groups_of_both_kinds_are_in_one_reading():
    """One that tells, and one that is copied."""
    parameters = [
        p.detach().to(DEVICE).requires_grad_() for p in make_parameters(0, torch.float32, [(9,), (5,)])
    ]
    groups = [{"params": [parameters[0]], "foreach": True}, {"params": [parameters[1]], "fused": True}]
    optimizer = PACE(groups, lr=1e-2)
    telemetry = probe(optimizer, every=1)
    for gradients in make_gradients(3, 1, [(9,), (5,)]):
        advance(optimizer, parameters, [[gradient.to(DEVICE) for gradient in gradients]])
    assert [optimizer.will_tell(number) for number in (0, 1)] == [False, True]
    assert list(telemetry.last.tensors) == ["0.0", "1.0"]
    assert all(figures.gap_rms > 0 for figures in telemetry.last.tensors.values())


def test_complex_weights_beside_others():
    """Which are pairs of numbers."""
    made = [torch.ones(9, device=DEVICE), torch.ones(5, dtype=torch.complex64, device=DEVICE)]
    readings = []
    for tells in (True, False):
        parameters = [one.clone().requires_grad_() for one in made]
        optimizer = PACE([{"params": [one]} for one in parameters], lr=1e-2, fused=True)
        with probe(optimizer, every=1) as telemetry, pytest.MonkeyPatch.context() as patch:
            if not tells:
                patch.setattr(PACE, "will_tell", lambda self, number: False)
            advance(optimizer, parameters, [made] * 3)
            readings.append(telemetry.last.flat(tensors=True))
    assert readings[0] == pytest.approx(readings[1], rel=2e-5)


def test_another_path_is_read_by_copies():
    parameters = [p.detach().to(DEVICE).requires_grad_() for p in make_parameters(0, torch.float32, [(9,)])]
    optimizer = PACE(parameters, lr=1e-2, fused=True)
    telemetry = probe(optimizer, every=1)
    advance(optimizer, parameters, [[torch.ones(9, device=DEVICE)]] * 2)
    optimizer.param_groups[0].update(fused=None, foreach=True)
    advance(optimizer, parameters, [[torch.ones(9, device=DEVICE)]] * 2)
    assert [reading.t for reading in telemetry.history] == [1, 2, 3, 4]


def test_half_a_reading_is_none(monkeypatch):
    """Where a step takes a path that cannot tell, although the last one could."""
    shapes = [(9,), (5,)]
    parameters = [p.detach().to(DEVICE).requires_grad_() for p in make_parameters(0, torch.float32, shapes)]
    optimizer = PACE([{"params": [p]} for p in parameters], lr=1e-2, fused=True)
    telemetry, step_ = probe(optimizer, every=1), fused.fused_step_
    advance(optimizer, parameters, [[torch.ones(9, device=DEVICE), torch.ones(5, device=DEVICE)]] * 2)

    def deaf(members, recipe, scale, factor, skip, tell):
        heard = tell if members.parameters[0] is parameters[0] else None
        step_(members, recipe, scale, factor, skip, heard)

    monkeypatch.setattr(fused, "fused_step_", deaf)
    advance(optimizer, parameters, [[torch.ones(9, device=DEVICE), torch.ones(5, device=DEVICE)]])
    assert [reading.t for reading in telemetry.history] == [1, 2]


def test_a_step_that_is_skipped_on_the_device_is_not_read():
    parameters = [p.detach().to(DEVICE).requires_grad_() for p in make_parameters(0, torch.float32, [(9,)])]
    optimizer = PACE(parameters, lr=1e-2, fused=True, skip_nonfinite=True, capturable=True)
    telemetry = probe(optimizer, every=1)
    good, bad = torch.ones(9, device=DEVICE), torch.full((9,), float("nan"), device=DEVICE)
    advance(optimizer, parameters, [[good], [good], [bad], [good]])
    assert [reading.t for reading in telemetry.history] == [1, 2, 3]
    assert telemetry.last.overall.gap_rms > 0


def test_two_probes_hear_the_same():
    parameters = [p.detach().to(DEVICE).requires_grad_() for p in make_parameters(0, torch.float32, SHAPES)]
    optimizer = PACE(parameters, lr=1e-2, fused=True)
    often, seldom = probe(optimizer, every=1), probe(optimizer, every=2)
    for gradients in make_gradients(4, 1, SHAPES):
        advance(optimizer, parameters, [[gradient.to(DEVICE) for gradient in gradients]])
    assert [reading.t for reading in seldom.history] == [2, 4]
    assert seldom.last.flat(tensors=True) == often.last.flat(tensors=True)


def test_a_step_that_fails_or_is_skipped_tells_nothing():
    parameters = [p.detach().to(DEVICE).requires_grad_() for p in make_parameters(0, torch.float32, [(9,)])]
    optimizer = PACE(parameters, lr=1e-2, fused=True, skip_nonfinite=True)
    telemetry = probe(optimizer, every=1)
    good, bad = torch.ones(9, device=DEVICE), torch.full((9,), float("nan"), device=DEVICE)
    advance(optimizer, parameters, [[good], [good], [bad]])
    assert [reading.t for reading in telemetry.history] == [1, 2]
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert optimizer.telling is None
    advance(optimizer, parameters, [[good]])
    assert [reading.t for reading in telemetry.history] == [1, 2, 3]
