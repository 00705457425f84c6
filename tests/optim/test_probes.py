"""Telemetry: every figure against float64 NumPy, and that looking changes nothing."""

import math
import socket
import warnings
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import pytest
import torch
from problems import (
    PATHS,
    VARIANTS,
    Net,
    advance,
    assert_same_bits,
    everything,
    make_gradients,
    make_parameters,
    set_gradients,
    train,
    trained,
)
from reference import Reference, SGDReference, rms_of
from torch.utils._python_dispatch import TorchDispatchMode

from paceline import PACE, Pullback, averaged_weights, reset_average
from paceline.optim import probes
from paceline.optim.probes import probe
from paceline.optim.readings import SAMPLE, Figures, Spread, sample_stride

pytestmark = pytest.mark.slow

# --- What a reading must be -----------------------------------------------------------------------


@dataclass
class Seen:
    """One step of one tensor in NumPy: what its figures are made of."""

    live: np.ndarray
    average: np.ndarray
    raw: np.ndarray
    pull: np.ndarray
    gradient: np.ndarray
    gain: np.ndarray
    ratio: np.ndarray
    max_gain: float
    t: int
    lr: float
    rate: float


def see(reference, gradient, scale=None):
    """Let the reference take a step."""
    live, average = reference.live.copy(), reference.average.copy()
    gradient = np.asarray(gradient, dtype=np.float64)
    reference.step(gradient, scale)
    r = reference
    ratio = np.zeros_like(live)
    if r.t % r.every == 0 and r.lr != 0 and r.strength != 0:
        root = np.sqrt(r.v / (1 - r.betas[1] ** r.t))
        ratio = {
            "paper": r.lr * r.strength / (root + r.eps),
            "uniform": np.full_like(root, r.strength),
            "scaled": r.lr * min(r.strength, 1e9) * r.scale_before / (root + r.eps),
        }[r.gain_name]
    rate = (r.offset + r.scale * r.t) ** -r.power
    gain = np.where(ratio == 0, 0.0, r.gain)
    pull = gain * (average - live if r.gap == "pre" else r.average - r.raw)
    assert np.allclose(r.raw + pull, r.live, rtol=1e-13)
    return Seen(live, average, r.raw, pull, gradient, gain, ratio, r.max_gain, r.t, r.lr, rate)


def spread(values):
    ranks = [-(-tenths * values.size // 10) - 1 for tenths in (1, 5, 9)]
    return Spread(values.mean(), *np.sort(values)[ranks])


def figures_of(*seen):
    """The figures of these tensors taken together."""

    def all_of(function):
        return np.concatenate([np.ravel(function(s)) for s in seen])

    gap, gradient = all_of(lambda s: s.average - s.live), all_of(lambda s: s.gradient)
    pull, step = all_of(lambda s: s.pull), all_of(lambda s: s.raw - s.live)
    norm = np.linalg.norm
    has_gap = norm(gap) > 1e-15  # a saturated lookahead leaves none but rounding errors
    return Figures(
        saturated=all_of(lambda s: s.gain >= s.max_gain).mean(),
        gain=spread(all_of(lambda s: s.gain)),
        ratio=spread(all_of(lambda s: s.ratio)),
        pull_to_step=norm(pull) / norm(step) if norm(pull) else 0.0,
        gap_rms=np.sqrt(np.mean(gap**2)),
        cosine=gap @ gradient / (norm(gap) * norm(gradient)) if has_gap else 0.0,
        t=max(s.t for s in seen),
        lr=all_of(lambda s: np.full(s.live.shape, s.lr)).mean(),
        rate=all_of(lambda s: np.full(s.live.shape, s.rate)).mean(),
    )


def assert_close(ours, expected, tolerance):
    ours, expected = ours.flat(), expected.flat()
    assert ours.keys() == expected.keys()
    for key in ours:
        # A sum of terms that cancel, such as a cosine, is as exact as its terms, which are of order 1.
        slack = tolerance if key == "cosine" else 1e-15
        if math.isinf(expected[key]):
            assert ours[key] > 1e37, key  # the largest number stands for an infinite strength
        else:
            close = math.isclose(ours[key], expected[key], rel_tol=tolerance, abs_tol=slack)
            assert close, (key, ours[key], expected[key])


def assert_reading(reading, seen, tolerance=1e-10):
    """`seen` by name."""
    assert list(reading.tensors) == list(seen)
    for name, tensor in seen.items():
        assert_close(reading.tensors[name], figures_of(tensor), tolerance)
    assert_close(reading.overall, figures_of(*seen.values()), tolerance)


def pace(parameters, foreach=False, **settings):
    return PACE(parameters, foreach=foreach, **{"lr": 1e-2, "gain": "paper", **settings})


def pullback(parameters, foreach=False, **settings):
    own = {k: settings.pop(k) for k in ("betas", "eps", "weight_decay", "maximize") if k in settings}
    base = torch.optim.AdamW(parameters, lr=settings.pop("lr", 1e-2), foreach=foreach, **own)
    return Pullback(base, **settings)


MAKERS = [pace, pullback]


def assert_all_readings(make, name, steps=6, **options):
    parameters = make_parameters()
    references = [Reference(p.detach().numpy(), **{"lr": 1e-2, **VARIANTS[name]}) for p in parameters]
    optimizer = make(parameters, **options, **VARIANTS[name])
    with probe(optimizer, every=1) as telemetry:
        for gradients in make_gradients(steps):
            advance(optimizer, parameters, [gradients])
            scale, pairs = rms_of(references), zip(references, gradients, strict=True)
            assert_reading(telemetry.last, {f"0.{i}": see(*pair, scale) for i, pair in enumerate(pairs)})
    assert [reading.t for reading in telemetry.history] == list(range(1, steps + 1))


@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("name", VARIANTS)
def test_figures_of_pace(name, foreach):
    """All gains, both gaps, clipped or not, with steps between updates: every step, to 1e-10."""
    assert_all_readings(pace, name, foreach=foreach)


@pytest.mark.parametrize("name", VARIANTS)
def test_figures_of_pullback_around_adamw(name):
    assert_all_readings(pullback, name)


@pytest.mark.parametrize("gap", ["pre", "lookahead"])
@pytest.mark.parametrize("strength", [0.5, 3.0, -0.5])
def test_figures_of_pullback_around_sgd(strength, gap):
    parameters = make_parameters()
    settings = {"pullback_strength": strength, "gain": "uniform", "gap": gap}
    references = [SGDReference(p.detach().numpy(), lr=0.1, **settings) for p in parameters]
    optimizer = Pullback(torch.optim.SGD(parameters, lr=0.1, momentum=0.9), **settings)
    telemetry = probe(optimizer, every=1)
    for gradients in make_gradients(6):
        advance(optimizer, parameters, [gradients])
        seen = {f"0.{i}": see(r, g) for i, (r, g) in enumerate(zip(references, gradients))}
        assert_reading(telemetry.last, seen)
    if strength == 3.0:
        assert telemetry.history[0].overall.saturated == 1


@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize(
    "name", ["strong", "saturated", "uniform", "push", "lookahead", "lookahead_saturated", "half_gain"]
)
def test_figures_in_float32(name, foreach):
    """One step from equal inputs, to 1e-5."""
    shapes = [(64, 33), (50,)]
    parameters = make_parameters(dtype=torch.float32, shapes=shapes)
    optimizer = pace(parameters, foreach, lr=0.1, **VARIANTS[name])
    advance(optimizer, parameters, make_gradients(20, shapes=shapes))
    gradients = [g.float() for g in make_gradients(1, seed=7, shapes=shapes)[0]]
    seen = {}
    for i, (parameter, gradient) in enumerate(zip(parameters, gradients)):
        reference = Reference(parameter.detach().numpy(), lr=0.1, **VARIANTS[name])
        state = optimizer.state[parameter]
        reference.m, reference.v = state["exp_avg"].double().numpy(), state["exp_avg_sq"].double().numpy()
        reference.average, reference.t = state["average"].double().numpy(), 20
        seen[f"0.{i}"] = see(reference, gradient.numpy())
    telemetry = probe(optimizer, every=1)
    advance(optimizer, parameters, [gradients])
    assert_reading(telemetry.last, seen, tolerance=1e-5)


def test_the_pull_of_lookahead_is_exact_late_in_a_run():
    """In float32, when the average moves by a thousandth of the way and its move is mostly rounding."""
    (gradients,) = make_gradients(1, seed=7, shapes=[(1000,)])
    figures = []
    for dtype in (torch.float64, torch.float32):
        parameters = make_parameters(dtype=dtype, shapes=[(1000,)])
        optimizer = pace(parameters, gap="lookahead", gain="uniform", pullback_strength=100.0, lr=1e-3)
        advance(optimizer, parameters, make_gradients(1, shapes=[(1000,)]))
        optimizer.state[parameters[0]]["step"].fill_(1e6)
        telemetry = probe(optimizer, every=1)
        advance(optimizer, parameters, [gradients])
        figures.append(telemetry.last.overall)
    assert 0.05 < figures[0].gain.mean < 0.2
    assert figures[1].pull_to_step == pytest.approx(figures[0].pull_to_step, rel=3e-4)


@pytest.mark.parametrize("make", MAKERS)
def test_groups_names_and_missing_gradients(make):
    """Groups with settings of their own, one not pulled; tensors that lag behind or were not moved."""
    parameters = make_parameters()
    own = [{"lr": 3e-2, "pullback_strength": 30.0}, {"lr": 1e-3, "pullback_strength": 0.0, "ema_power": 0.8}]
    named = [(f"p{i}", p) for i, p in enumerate(parameters)]
    groups = [{"params": named[:2], **own[0]}, {"params": named[2:], **own[1]}]
    optimizer = make(groups)
    telemetry = probe(optimizer, every=2)
    references = [Reference(p.detach().numpy(), **own[i // 2]) for i, p in enumerate(parameters)]
    for t, gradients in enumerate(make_gradients(6), 1):
        given = [g if (i, t) not in {(0, 1), (2, 1), (1, 6)} else None for i, g in enumerate(gradients)]
        advance(optimizer, parameters, [given])
        pairs = zip(references, given, strict=True)
        seen = {f"p{i}": see(r, g) for i, (r, g) in enumerate(pairs) if g is not None}
        if t % 2 == 0:
            assert telemetry.last.t == t
            assert_reading(telemetry.last, seen)
    assert list(telemetry.last.tensors) == ["p0", "p2", "p3"]
    assert telemetry.last.tensors["p3"].ratio == Spread(0, 0, 0, 0)
    assert len(telemetry.history) == 3


def test_one_name_in_two_groups_is_told_apart():
    a, b = make_parameters(shapes=[(2,), (3,)])
    optimizer = PACE([{"params": [("w", a)]}, {"params": [("w", b)]}])
    telemetry = probe(optimizer, every=1)
    advance(optimizer, [a, b], make_gradients(1, shapes=[(2,), (3,)]))
    assert list(telemetry.last.tensors) == ["w", "1.w"]


@pytest.mark.parametrize("make", MAKERS)
def test_between_updates_nothing_is_pulled(make):
    parameters = make_parameters()
    optimizer = make(parameters, update_every=3, pullback_strength=30.0)
    telemetry = probe(optimizer, every=1)
    advance(optimizer, parameters, make_gradients(6))
    for reading in telemetry.history:
        assert (reading.overall.gain.mean > 0) == (reading.t % 3 == 0)
        if reading.t % 3:
            assert reading.overall.ratio == reading.overall.gain == Spread(0, 0, 0, 0)
            assert reading.overall.saturated == reading.overall.pull_to_step == 0
        assert reading.overall.rate == pytest.approx((1 + reading.t) ** -0.5)


def test_learning_rate_0_pulls_nothing():
    parameters = make_parameters()
    optimizer = pace(parameters, lr=0.0, pullback_strength=math.inf)
    telemetry = probe(optimizer, every=1)
    advance(optimizer, parameters, make_gradients(2))
    assert not any(value for key, value in telemetry.last.flat().items() if key not in ("t", "rate"))


@pytest.mark.parametrize("make", MAKERS)
def test_closure(make):
    """Its gradients are not there yet when the step begins."""
    readings = []
    for with_closure in (False, True):
        parameters = make_parameters()
        optimizer = make(parameters, pullback_strength=30.0)
        telemetry = probe(optimizer, every=1)
        for gradients in make_gradients(4):
            optimizer.zero_grad()
            given = gradients if len(telemetry.history) != 2 else [*gradients[:3], None]
            closure = partial(set_gradients, parameters, given)
            optimizer.step(closure if with_closure else closure())
        readings.append([reading.flat(tensors=True) for reading in telemetry.history])
    assert readings[0] == readings[1]
    assert "0.3/gain/mean" in readings[0][1] and "0.3/gain/mean" not in readings[0][2]


class Overwriting(torch.optim.SGD):
    """Writes its update over the gradient, as some optimizers do."""

    def step(self, closure=None):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.zero_()


def test_gradient_is_looked_at_before_the_step():
    cosines = []
    for base in (torch.optim.SGD, Overwriting):
        parameters = make_parameters()
        optimizer = Pullback(base(parameters, lr=0.1))
        telemetry = probe(optimizer, every=1)
        advance(optimizer, parameters, make_gradients(3))
        cosines.append(telemetry.last.overall.cosine)
    assert cosines[0] == cosines[1] != 0


def test_sparse_gradients():
    readings = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Embedding(6, 3, sparse=sparse)
        optimizer = Pullback(torch.optim.SGD(model.parameters(), lr=0.1))
        telemetry = probe(optimizer, every=1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.tensor([1, 1, 4])).square().sum().backward()
            optimizer.step()
        readings.append(telemetry.last.flat())
    assert readings[1] == pytest.approx(readings[0], rel=1e-6) and readings[0]["cosine"] != 0


@pytest.mark.parametrize("make", MAKERS)
def test_bfloat16_is_read_in_float32(make):
    parameters, twins = make_parameters(dtype=torch.bfloat16), make_parameters(dtype=torch.bfloat16)
    optimizer = make(parameters, pullback_strength=30.0)
    telemetry = probe(optimizer, every=1)
    advance(optimizer, parameters, make_gradients(20))
    advance(make(twins, pullback_strength=30.0), twins, make_gradients(20))
    assert all(torch.equal(p, q) for p, q in zip(parameters, twins))
    overall = telemetry.last.overall
    assert 0 < overall.gain.q10 < overall.gain.q50 < overall.gain.q90 <= 1
    assert 0 < overall.pull_to_step < 1 and 0 < overall.gap_rms < 1
    assert overall.gap_rms != float(torch.tensor(overall.gap_rms).bfloat16())


def test_large_tensors_are_sampled():
    """Quantiles of a strided sample, exact means, and overall the weights of the sizes."""
    shapes = [(200, 128), (30,)]
    parameters = make_parameters(shapes=shapes)
    references = [Reference(p.detach().numpy(), lr=1e-2, pullback_strength=30.0) for p in parameters]
    optimizer = pace(parameters, pullback_strength=30.0)
    telemetry = probe(optimizer, every=1)
    (gradients,) = make_gradients(1, shapes=shapes)
    advance(optimizer, parameters, [gradients])
    seen = [see(*pair) for pair in zip(references, gradients)]
    stride = sample_stride(200 * 128)
    sample = seen[0].ratio.flatten()[::stride]
    assert 0.85 * SAMPLE < sample.size <= SAMPLE
    mean = seen[0].ratio.mean()
    expected = replace(figures_of(seen[0]), ratio=replace(spread(sample), mean=mean)).flat()
    ours = telemetry.last.tensors["0.0"].flat()
    for key in ("ratio/mean", "ratio/q10", "ratio/q50", "ratio/q90", "gain/mean", "gap_rms"):
        assert ours[key] == pytest.approx(expected[key], rel=1e-10)
    rank = (seen[0].ratio < ours["ratio/q50"]).mean()
    assert abs(rank - 0.5) < 0.03
    every_one = np.concatenate([np.repeat(sample, stride), seen[1].ratio])
    assert telemetry.last.overall.ratio.q90 == pytest.approx(spread(every_one).q90, rel=1e-10)
    mean = np.concatenate([s.ratio.ravel() for s in seen]).mean()
    assert telemetry.last.overall.ratio.mean == pytest.approx(mean, rel=1e-10)


@pytest.mark.parametrize("size", [1, 7, SAMPLE, SAMPLE + 1, 768 * 768, 50257 * 768, 2**31])
def test_samples_are_small_and_favour_no_column(size):
    stride = sample_stride(size)
    assert -(-size // stride) <= SAMPLE and math.gcd(stride, size) == 1
    assert (stride == 1) == (size <= SAMPLE)


# --- Looking changes nothing ----------------------------------------------------------------------


@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", VARIANTS)
def test_training_is_the_same_to_the_bit(name, make, foreach):
    runs = []
    for every in (None, 2):
        parameters = make_parameters(dtype=torch.float32)
        optimizer = make(parameters, foreach, **VARIANTS[name])
        if every:
            probe(optimizer, every=every)
        advance(optimizer, parameters, make_gradients(5))
        runs.append(everything(optimizer))
    assert_same_bits(*runs)


class Operations(TorchDispatchMode):
    """What is dispatched inside the block: names, and what was read on the host."""

    def __init__(self):
        super().__init__()
        self.names, self.reads = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace != "profiler":  # of torch's wrapper, where there are hooks
            self.names.append(str(function))
        if function is torch.ops.aten._local_scalar_dense.default:
            self.reads.append(args[0].data_ptr())
        return function(*args, **(kwargs or {}))


def operations_of_a_step(optimizer, parameters, seed=3):
    (gradients,) = make_gradients(1, seed=seed)
    set_gradients(parameters, gradients)
    with Operations() as operations:
        optimizer.step()
    return operations


@pytest.mark.parametrize("foreach", PATHS)
@pytest.mark.parametrize("make, settings", [(pace, {}), (pullback, {})])
def test_steps_that_are_not_due_dispatch_nothing_more(make, settings, foreach):
    parameters = make_parameters()
    optimizer = make(parameters, foreach, **settings)
    advance(optimizer, parameters, make_gradients(2))
    unprobed = operations_of_a_step(optimizer, parameters)  # 3
    telemetry = probe(optimizer, every=5)
    not_due = operations_of_a_step(optimizer, parameters)  # 4
    due = operations_of_a_step(optimizer, parameters)  # 5
    after = operations_of_a_step(optimizer, parameters)
    assert not_due.names == unprobed.names == after.names
    assert len(due.names) > len(unprobed.names) and telemetry.last.t == 5
    telemetry.close()
    advance(optimizer, parameters, make_gradients(3))
    assert operations_of_a_step(optimizer, parameters).names == unprobed.names  # 10


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", ["strong", "scaled", "lookahead", "strength_0"])
def test_a_probed_step_reads_no_tensor_but_the_counts(name, make):
    """Anything else read on the host would wait for a GPU."""
    parameters = make_parameters()
    optimizer = make(parameters, **VARIANTS[name])
    advance(optimizer, parameters, make_gradients(3))
    counts = {v.data_ptr() for s in optimizer.state.values() for k, v in s.items() if k.endswith("step")}
    unprobed = operations_of_a_step(optimizer, parameters)
    telemetry = probe(optimizer, every=1)
    probed = operations_of_a_step(optimizer, parameters)
    others = [[read for read in step.reads if read not in counts] for step in (unprobed, probed)]
    assert len(others[0]) == len(others[1]) and len(telemetry.history) == 1


def test_readings_are_lazy_and_do_not_change():
    """Read at once or after more training, they are the same."""
    readings = []
    for at_once in (True, False):
        parameters = make_parameters()
        optimizer = pace(parameters, pullback_strength=30.0)
        telemetry = probe(optimizer, every=2)
        for gradients in make_gradients(8):
            advance(optimizer, parameters, [gradients])
            if at_once:
                assert telemetry.last is None or telemetry.last.tensors
        readings.append([reading.flat(tensors=True) for reading in telemetry.history])
    assert readings[0] == readings[1]
    assert len({reading["gap_rms"] for reading in readings[0]}) == 4
    assert telemetry.last is telemetry.history[-1]


def test_history_is_bounded():
    parameters = make_parameters()
    optimizer = pace(parameters)
    telemetry = probe(optimizer, every=1, keep=4)
    advance(optimizer, parameters, make_gradients(9))
    assert [reading.t for reading in telemetry.history] == [6, 7, 8, 9]


def test_a_forgotten_eval_is_put_right():
    readings = []
    for forget in (False, True):
        model, optimizer = trained(return_power=0.9)
        telemetry = probe(optimizer, every=1)
        train(model, optimizer, steps=1)
        if forget:
            gradients = [p.grad for p in model.parameters()]
            optimizer.eval()
            assert optimizer.shows_average()
            for p, g in zip(model.parameters(), gradients):
                p.grad = g
        optimizer.step()
        readings.append(telemetry.last.flat())
    assert readings[0] == readings[1] and readings[0]["gap_rms"] > 0


def test_inside_a_block_the_step_itself_says_no():
    model, optimizer = trained()
    telemetry = probe(optimizer, every=1)
    with averaged_weights(optimizer), pytest.raises(RuntimeError, match=r"step\(\) inside averaged_weights"):
        optimizer.step()
    assert telemetry.last is None
    train(model, optimizer, steps=1)
    assert telemetry.last.t == 11


def test_a_model_loaded_after_the_optimizer_is_noticed_as_without_a_probe():
    model, optimizer = trained()
    with averaged_weights(optimizer):
        saved = {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()
    train(model, optimizer, steps=1)
    optimizer.load_state_dict(saved[1])
    model.load_state_dict(saved[0])
    telemetry = probe(optimizer, every=1)
    with pytest.warns(UserWarning, match="loaded after the optimizer") as caught:
        optimizer.step()
    assert caught[0].filename == __file__
    assert telemetry.last.overall.gap_rms > 0


def test_a_reset_average_has_no_gap():
    parameters = make_parameters()
    optimizer = pace(parameters)
    telemetry = probe(optimizer, every=1)
    advance(optimizer, parameters, make_gradients(3))
    reset_average(optimizer)
    advance(optimizer, parameters, make_gradients(2, seed=2))
    gaps = [reading.overall.gap_rms for reading in telemetry.history]
    assert [gap == 0 for gap in gaps] == [True, False, False, True, False]


@pytest.mark.parametrize("make", MAKERS)
def test_weights_loaded_before_the_first_step_have_no_gap(make):
    parameters = make_parameters()
    optimizer = make(parameters)
    telemetry = probe(optimizer, every=1)
    with torch.no_grad():
        parameters[0].add_(1.0)
    advance(optimizer, parameters, make_gradients(1))
    assert telemetry.last.overall.gap_rms == 0


def test_a_failed_step_leaves_nothing_behind():
    parameters = make_parameters()
    optimizer = pace(parameters)
    telemetry = probe(optimizer, every=2)
    advance(optimizer, parameters, make_gradients(1))

    def fail():
        raise KeyError("data")

    with pytest.raises(KeyError):
        optimizer.step(fail)
    assert telemetry.last is None
    advance(optimizer, parameters, make_gradients(3))
    assert [reading.t for reading in telemetry.history] == [2, 4]


# --- Resume, close, errors ------------------------------------------------------------------------


@pytest.mark.parametrize("attach_first", [True, False])
@pytest.mark.parametrize("make", MAKERS)
def test_a_resumed_run_is_probed_at_the_same_steps(make, attach_first):
    gradients = make_gradients(10)
    parameters = make_parameters()
    optimizer = make(parameters, pullback_strength=30.0)
    whole = probe(optimizer, every=5)
    advance(optimizer, parameters, gradients[:7])
    state, live = optimizer.state_dict(), [p.detach().clone() for p in parameters]
    again = [p.requires_grad_() for p in live]
    resumed = make(again, pullback_strength=30.0)
    telemetry = probe(resumed, every=5) if attach_first else None
    resumed.load_state_dict(state)
    telemetry = telemetry or probe(resumed, every=5)
    advance(resumed, again, gradients[7:])
    advance(optimizer, parameters, gradients[7:])
    assert [reading.t for reading in telemetry.history] == [10]
    assert telemetry.last.flat(tensors=True) == whole.last.flat(tensors=True)


def test_a_base_that_has_run_before_is_counted_on():
    parameters = make_parameters()
    base = torch.optim.AdamW(parameters, lr=1e-2)
    advance(base, parameters, make_gradients(3))
    optimizer = Pullback(base)
    telemetry = probe(optimizer, every=5)
    advance(optimizer, parameters, make_gradients(3))
    assert [reading.t for reading in telemetry.history] == [5]
    assert telemetry.last.overall.t == 5


def test_a_state_of_the_base_alone_is_counted_on():
    parameters = make_parameters()
    base = torch.optim.AdamW(parameters, lr=1e-2)
    advance(base, parameters, make_gradients(3))
    optimizer = pullback(parameters)
    telemetry = probe(optimizer, every=5)
    with pytest.warns(UserWarning, match="average"):
        optimizer.load_state_dict(base.state_dict())
    advance(optimizer, parameters, make_gradients(3))
    assert [(reading.t, reading.overall.t) for reading in telemetry.history] == [(5, 5)]


def test_close_and_block():
    parameters = make_parameters()
    optimizer = pace(parameters)
    with probe(optimizer, every=1) as telemetry:
        advance(optimizer, parameters, make_gradients(2))
    advance(optimizer, parameters, make_gradients(2))
    telemetry.close()
    assert [reading.t for reading in telemetry.history] == [1, 2]
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def test_two_probes_at_once():
    parameters = make_parameters()
    optimizer = pace(parameters)
    often, rarely = probe(optimizer, every=1), probe(optimizer, every=3)
    advance(optimizer, parameters, make_gradients(6))
    assert often.history[2].flat() == rarely.history[0].flat() and len(rarely.history) == 2


def test_flat_names():
    model = Net()
    optimizer = PACE(model.named_parameters())
    telemetry = probe(optimizer, every=1)
    advance(optimizer, list(model.parameters()), make_gradients(1))
    flat = telemetry.last.flat(tensors=True)
    assert flat["p1/gain/q50"] == telemetry.last.tensors["p1"].gain.q50
    assert flat["saturated"] == telemetry.last.overall.saturated
    assert all(type(value) is float for value in flat.values())
    names = ["mean", "q10", "q50", "q90"]
    plain = ["pull_to_step", "gap_rms", "cosine", "t", "lr", "rate"]
    spreads = [f"{quantity}/{name}" for quantity in ("gain", "ratio") for name in names]
    assert list(telemetry.last.flat()) == ["saturated", *spreads, *plain]
    assert {entry.name for entry in fields(Figures)} == {"saturated", "gain", "ratio", *plain}


@pytest.mark.parametrize("name", ["every", "keep"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "10", None])
def test_every_and_keep_are_checked(name, value):
    with pytest.raises(ValueError, match=rf"Invalid {name} value: .*; allowed: an integer >= 1"):
        probe(PACE(make_parameters()), **{name: value})


def test_other_optimizers_are_refused():
    with pytest.raises(TypeError, match=r"PACE or Pullback.*Got SGD"):
        probe(torch.optim.SGD(make_parameters()), every=10)


# --- The alarm ------------------------------------------------------------------------------------


def caught(action):
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        action()
    return notes


def test_a_blow_up_warns_once_per_excursion():
    parameters, gradients = make_parameters(), make_gradients(200)
    optimizer = pace(parameters)
    telemetry = probe(optimizer, every=1)

    def run(steps, lr):
        optimizer.param_groups[0]["lr"] = lr
        return caught(lambda: advance(optimizer, parameters, gradients[:steps]))

    assert not run(60, lr=1e-3)
    (note,) = run(40, lr=0.1)
    t, gap, median = (telemetry.history[i] for i in (60, 62, 30))
    text = str(note.message)
    assert "median" in text and "Lower the learning rate" in text and "flipped sign" in text
    assert note.filename.endswith("problems.py")  # where step() is called
    assert t.overall.gap_rms < gap.overall.gap_rms and gap.overall.gap_rms > 3 * median.overall.gap_rms
    reset_average(optimizer)
    assert not run(60, lr=1e-3)
    assert len(run(40, lr=0.3)) == 1


def test_the_warning_states_both_numbers():
    parameters = make_parameters(shapes=[(4,)])
    optimizer = Pullback(torch.optim.SGD(parameters, lr=1e-2), pullback_strength=0.0)
    telemetry = probe(optimizer, every=1)
    gradients = make_gradients(30, shapes=[(4,)])
    advance(optimizer, parameters, gradients)
    with torch.no_grad():
        parameters[0].add_(5.0)
    (note,) = caught(lambda: advance(optimizer, parameters, gradients[:3]))
    gaps = [reading.overall.gap_rms for reading in telemetry.history]
    assert gaps[30] > 10 * np.median(gaps[:30]) > 10 * gaps[1]
    assert f"at step 31 the live weights were {gaps[30]:.3g} (RMS)" in str(note.message)
    assert f"the last 30 readings, {np.median(gaps[:30]):.3g}" in str(note.message)


def test_a_nan_is_beyond_any_median():
    parameters = make_parameters()
    optimizer = pace(parameters)
    probe(optimizer, every=1)
    advance(optimizer, parameters, make_gradients(25))
    bad = [[torch.full(p.shape, math.nan) for p in parameters]] * 4
    (note,) = caught(lambda: advance(optimizer, parameters, bad))
    assert "were nan (RMS)" in str(note.message)


def test_the_alarm_waits_for_20_readings():
    parameters = make_parameters()
    optimizer = pace(parameters)
    probe(optimizer, every=1)
    advance(optimizer, parameters, make_gradients(15))
    with torch.no_grad():
        parameters[0].add_(100.0)
    assert not caught(lambda: advance(optimizer, parameters, make_gradients(4)))


def test_the_alarm_looks_back_1000_steps_or_20_readings():
    assert probes._Alarm(1)._gaps.maxlen == 1000
    assert probes._Alarm(10)._gaps.maxlen == 100
    assert probes._Alarm(100)._gaps.maxlen == 20


def test_normal_training_does_not_warn():
    """With warm-up and decay, as every test here: warnings are errors."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = PACE(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min(1, (t + 1) / 50) * (1 + math.cos(math.pi * t / 200)) / 2
    )
    telemetry = probe(optimizer, every=1)
    for _ in range(200):
        x = torch.randn(16, 4)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True).sin()).square().mean().backward()
        optimizer.step()
        schedule.step()
    assert len(telemetry.history) == 200
    assert telemetry.history[10].overall.lr == pytest.approx(1e-2 * 11 / 50, rel=0.01)


# --- Elsewhere ------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", ["strong", "scaled", "lookahead", "every_3", "strength_0"])
def test_a_gpu_is_not_waited_for(name, make):
    """Nor does the place change the figures."""
    readings = []
    for device in ("cpu", "cuda"):
        parameters = [p.detach().to(device).requires_grad_() for p in make_parameters()]
        optimizer = make(parameters, True, **VARIANTS[name])
        telemetry = probe(optimizer, every=1)
        gradients = [[g.to(device) for g in step] for step in make_gradients(6)]
        advance(optimizer, parameters, gradients[:1])
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            advance(optimizer, parameters, gradients[1:])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        readings.append([reading.flat(tensors=True) for reading in telemetry.history])
    for ours, expected in zip(*readings, strict=True):
        assert ours == pytest.approx(expected, rel=1e-9)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["strong", "scaled", "lookahead", "every_3", "strength_0"])
def test_counts_on_a_gpu(name):
    readings = []
    for capturable in (False, True):
        parameters = [p.detach().cuda().requires_grad_() for p in make_parameters()]
        optimizer = pace(parameters, True, capturable=capturable, **VARIANTS[name])
        telemetry = probe(optimizer, every=2)
        gradients = [[*(g.cuda() for g in step[:3]), None] for step in make_gradients(6)]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for given in gradients:
                optimizer.step(partial(set_gradients, parameters, given))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        readings.append([reading.flat(tensors=True) for reading in telemetry.history])
    assert len(readings[1]) == 3 and "0.3/lr" not in readings[1][0]
    for ours, expected in zip(*readings, strict=True):
        assert ours == pytest.approx(expected, rel=1e-9)


def reading_of(place, settings):
    """The last reading of a run whose tensors were put somewhere."""
    shapes = [(5, 3), (4,), (1,)]  # of two ranks, one has nothing of the last
    parameters = [place(p.detach()).requires_grad_() for p in make_parameters(shapes=shapes)]
    optimizer = pace(parameters, True, **settings)
    telemetry = probe(optimizer, every=1)
    for gradients in make_gradients(4, shapes=shapes):
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = place(gradient)
        optimizer.step()
    return telemetry.last


def sharded_rank(rank, port):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for settings in ({"pullback_strength": 30.0}, {"gain": "scaled", "pullback_strength": 60.0}):
        whole = reading_of(lambda tensor: tensor, settings)
        copies = reading_of(lambda tensor: distribute_tensor(tensor, mesh, [Replicate()]), settings)
        assert copies.flat(tensors=True) == pytest.approx(whole.flat(tensors=True), rel=1e-12)
        parts = reading_of(lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)]), settings)
        assert list(parts.tensors) == ["0.0", "0.1", "0.2"][: 3 - rank]
        # The mean over both parts is that of the whole tensor.
        sums = torch.tensor([parts.tensors["0.0"].ratio.mean * (9, 6)[rank]], dtype=torch.float64)
        torch.distributed.all_reduce(sums)
        assert sums.item() / 15 == pytest.approx(whole.tensors["0.0"].ratio.mean, rel=1e-12)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_sharded_figures_are_of_this_ranks_part():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(sharded_rank, (port,), nprocs=2)
