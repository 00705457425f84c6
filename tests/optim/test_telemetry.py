"""Telemetry: every figure against float64 NumPy, from the state after a step; asking changes nothing."""

import math
import socket

import numpy as np
import pytest
import torch
from problems import PATHS, VARIANTS, advance, assert_same_bits, everything, make_gradients, make_parameters
from reference import Reference, SGDReference, rms_of

from paceline import PACE, Averages, PowerLaw, Pullback, averaged_weights, pull_statistics, reset_average
from paceline.optim import fused
from paceline.optim.telemetry import SAMPLE, sample_stride, steps_taken

pytestmark = pytest.mark.slow


def spread(name, values):
    ordered = np.sort(values)
    ranks = {f"{name}/q{10 * tenths}": ordered[-(-tenths * values.size // 10) - 1] for tenths in (1, 5, 9)}
    return {f"{name}/mean": values.mean(), **ranks}


def ratio_of(reference, scale):
    r = reference
    if r.t % r.every or r.lr == 0 or r.strength == 0:
        return np.zeros_like(r.live)
    root = r.root if r.gain_name == "uniform" else np.sqrt(r.v / (1 - r.betas[1] ** r.t))
    return {
        "paper": lambda: r.lr * min(r.strength, 1e300) / (root + r.eps),
        "uniform": lambda: np.full_like(root, r.strength),
        "scaled": lambda: r.lr * r.strength * scale / (root + r.eps),
    }[r.gain_name]()


def figures_of(references, scale):
    """The figures of these tensors taken together; `scale` as the next step would have it."""
    flat = lambda arrays: np.concatenate([np.ravel(array) for array in arrays])  # noqa: E731
    ratios = [ratio_of(r, scale) for r in references]
    rates = [(r.offset + r.scale * r.t) ** -r.power for r in references]
    gains = [np.minimum(ratio * rate, r.max_gain) for ratio, rate, r in zip(ratios, rates, references)]
    at_limit = [(gain >= r.max_gain) & (ratio != 0) for gain, ratio, r in zip(gains, ratios, references)]
    sizes = [r.live.size for r in references]
    return {
        "saturated": flat(at_limit).mean(),
        **spread("gain", flat(gains)),
        **spread("ratio", flat(ratios)),
        "gap_rms": np.sqrt(np.mean(flat([r.average - r.live for r in references]) ** 2)),
        "t": max(r.t for r in references),
        "lr": np.average([r.lr for r in references], weights=sizes),
        "rate": np.average(rates, weights=sizes),
    }


def assert_figures(ours, references, tolerance=1e-6):
    """`references` by name."""
    scale = rms_of(list(references.values()))
    expected = figures_of(list(references.values()), scale)
    for name, reference in references.items():
        expected |= {f"{name}/{key}": value for key, value in figures_of([reference], scale).items()}
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        if value > 1e30:
            assert ours[key] > 1e30, key  # the largest number stands for an infinite strength
        else:
            assert math.isclose(ours[key], value, rel_tol=tolerance, abs_tol=1e-14), (key, ours[key], value)


def pace(parameters, foreach=False, **settings):
    return PACE(parameters, foreach=foreach, **{"lr": 1e-2, "gain": "paper", **settings})


def pullback(parameters, foreach=False, **settings):
    own = {k: settings.pop(k) for k in ("betas", "eps", "weight_decay", "maximize") if k in settings}
    base = torch.optim.AdamW(parameters, lr=settings.pop("lr", 1e-2), foreach=foreach, **own)
    return Pullback(base, **settings)


MAKERS = [pace, pullback]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", VARIANTS)
def test_figures_of_every_step(make, name):
    """All gains, both gaps, clipped or not, with steps between updates."""
    parameters = make_parameters()
    references = [Reference(p.detach().numpy(), **{"lr": 1e-2, **VARIANTS[name]}) for p in parameters]
    optimizer = make(parameters, **VARIANTS[name])
    for gradients in make_gradients(6):
        advance(optimizer, parameters, [gradients])
        scale = rms_of(references)
        for reference, gradient in zip(references, gradients, strict=True):
            reference.step(gradient, scale)
        assert_figures(
            pull_statistics(optimizer, tensors=True), {f"0.{i}": r for i, r in enumerate(references)}
        )


@pytest.mark.parametrize("gap", ["pre", "lookahead"])
@pytest.mark.parametrize("strength", [0.5, 3.0, -0.5])
def test_figures_of_pullback_around_sgd(strength, gap):
    parameters = make_parameters()
    settings = {"pullback_strength": strength, "gain": "uniform", "gap": gap}
    references = [SGDReference(p.detach().numpy(), lr=0.1, **settings) for p in parameters]
    optimizer = Pullback(torch.optim.SGD(parameters, lr=0.1, momentum=0.9), **settings)
    for gradients in make_gradients(6):
        advance(optimizer, parameters, [gradients])
        for reference, gradient in zip(references, gradients, strict=True):
            reference.step(gradient)
        assert_figures(
            pull_statistics(optimizer, tensors=True), {f"0.{i}": r for i, r in enumerate(references)}
        )


@pytest.mark.parametrize("make", MAKERS)
def test_groups_names_and_missing_gradients(make):
    """Groups with settings of their own, one not pulled; tensors that lag behind, or have not stepped."""
    parameters = make_parameters()
    own = [{"lr": 3e-2, "pullback_strength": 30.0}, {"lr": 1e-3, "pullback_strength": 0.0, "ema_power": 0.8}]
    named = [(f"p{i}", p) for i, p in enumerate(parameters)]
    optimizer = make([{"params": named[:2], **own[0]}, {"params": named[2:], **own[1]}])
    references = [Reference(p.detach().numpy(), **own[i // 2]) for i, p in enumerate(parameters)]
    for t, gradients in enumerate(make_gradients(6), 1):
        given = [g if (i, t) not in {(0, 1), (2, 1), (1, 6)} else None for i, g in enumerate(gradients)]
        advance(optimizer, parameters, [given])
        for reference, gradient in zip(references, given, strict=True):
            reference.step(gradient)
        seen = {f"p{i}": r for i, r in enumerate(references) if r.t}
        assert_figures(pull_statistics(optimizer, tensors=True), seen)
    assert steps_taken(optimizer) == 6


def test_one_name_in_two_groups_is_told_apart():
    a, b = make_parameters(shapes=[(2,), (3,)])
    optimizer = PACE([{"params": [("w", a)]}, {"params": [("w", b)]}])
    advance(optimizer, [a, b], make_gradients(1, shapes=[(2,), (3,)]))
    assert {"w/gap_rms", "1.w/gap_rms"} < pull_statistics(optimizer, tensors=True).keys()


def test_large_tensors_are_sampled():
    """Quantiles of a strided sample, exact means, and overall the weights of the sizes."""
    shapes = [(200, 128), (30,)]
    parameters = make_parameters(shapes=shapes)
    references = [Reference(p.detach().numpy(), lr=1e-2, pullback_strength=30.0) for p in parameters]
    optimizer = pace(parameters, pullback_strength=30.0)
    (gradients,) = make_gradients(1, shapes=shapes)
    advance(optimizer, parameters, [gradients])
    for reference, gradient in zip(references, gradients, strict=True):
        reference.step(gradient)
    ratios, ours = [ratio_of(r, 1.0) for r in references], pull_statistics(optimizer, tensors=True)
    stride = sample_stride(200 * 128)
    sample = ratios[0].flatten()[::stride]
    assert 0.85 * SAMPLE < sample.size <= SAMPLE
    for key, value in {**spread("ratio", sample), "ratio/mean": ratios[0].mean()}.items():
        assert ours[f"0.0/{key}"] == pytest.approx(value, rel=1e-10)
    assert abs((ratios[0] < ours["0.0/ratio/q50"]).mean() - 0.5) < 0.03
    every_one = np.concatenate([np.repeat(sample, stride), ratios[1]])
    assert ours["ratio/q90"] == pytest.approx(spread("ratio", every_one)["ratio/q90"], rel=1e-10)
    assert ours["ratio/mean"] == pytest.approx(np.concatenate([r.ravel() for r in ratios]).mean(), rel=1e-10)


@pytest.mark.parametrize("size", [1, 7, SAMPLE, SAMPLE + 1, 768 * 768, 50257 * 768, 2**31])
def test_samples_are_small_and_favour_no_column(size):
    stride = sample_stride(size)
    assert -(-size // stride) <= SAMPLE and math.gcd(stride, size) == 1
    assert (stride == 1) == (size <= SAMPLE)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-3), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("foreach", PATHS)
def test_low_precision_is_read_in_float32(dtype, tolerance, foreach):
    figures = []
    for kind in (torch.float64, dtype):
        parameters = make_parameters(dtype=kind, shapes=[(64, 33)])
        optimizer = pace(parameters, foreach, pullback_strength=30.0, lr=0.1)
        advance(optimizer, parameters, make_gradients(20, shapes=[(64, 33)]))
        figures.append(pull_statistics(optimizer))
    for key in ("gain/mean", "gain/q50", "ratio/mean", "gap_rms", "rate"):
        assert figures[1][key] == pytest.approx(figures[0][key], rel=tolerance), key


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # the interpreter is NumPy
@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_the_kernel_leaves_what_the_loop_leaves(storage, monkeypatch):
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    monkeypatch.setattr(fused, "DEVICES", ("cuda", "cpu"))
    figures = []
    for path in ({"fused": True}, {"foreach": False}):
        parameters = [p.detach().to(device).requires_grad_() for p in make_parameters(dtype=torch.float32)]
        optimizer = PACE(parameters, lr=1e-2, average_dtype=storage, **path)
        for gradients in make_gradients(3):
            advance(optimizer, parameters, [[g.to(device) for g in gradients]])
        figures.append(pull_statistics(optimizer, tensors=True))
    assert figures[0] == pytest.approx(figures[1], rel=1e-2, abs=1e-6)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", VARIANTS)
def test_asking_changes_nothing(make, name):
    found = []
    for asks in (False, True):
        parameters = make_parameters(dtype=torch.float32)
        optimizer = make(parameters, **VARIANTS[name])
        for gradients in make_gradients(5):
            advance(optimizer, parameters, [gradients])
            if asks:
                assert pull_statistics(optimizer) == pull_statistics(optimizer)
        found.append(everything(optimizer))
    assert_same_bits(*found)


def test_the_figures_are_the_same_while_the_average_is_shown():
    parameters = make_parameters()
    optimizer = pace(parameters, pullback_strength=30.0)
    advance(optimizer, parameters, make_gradients(3))
    outside = pull_statistics(optimizer)
    with averaged_weights(optimizer):
        assert pull_statistics(optimizer) == outside
    reset_average(optimizer)
    assert pull_statistics(optimizer)["gap_rms"] == 0


def test_what_has_no_pull_is_refused():
    parameters = make_parameters()
    around = Averages(torch.optim.AdamW(parameters), {"a": PowerLaw(0.5)})
    for optimizer in (torch.optim.AdamW(parameters), around):
        with pytest.raises(TypeError, match=f"Got {type(optimizer).__name__}, which pulls nothing"):
            pull_statistics(optimizer)
    with pytest.raises(RuntimeError, match="before the first step"):
        pull_statistics(PACE(parameters))
    assert steps_taken(PACE(parameters)) == 0


# --- Sharded ----------------------------------------------------------------------------------------


def figures_where(place, settings):
    """The figures of a run whose tensors were put somewhere."""
    shapes = [(5, 3), (4,), (1,)]  # of two ranks, one has nothing of the last
    parameters = [place(p.detach()).requires_grad_() for p in make_parameters(shapes=shapes)]
    optimizer = pace(parameters, True, **settings)
    for gradients in make_gradients(4, shapes=shapes):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = place(gradient)
        optimizer.step()
    return pull_statistics(optimizer, tensors=True)


def sharded_rank(rank, port):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for settings in ({"pullback_strength": 30.0}, {"gain": "scaled", "pullback_strength": 60.0}):
        whole = figures_where(lambda tensor: tensor, settings)
        copies = figures_where(lambda tensor: distribute_tensor(tensor, mesh, [Replicate()]), settings)
        assert copies == pytest.approx(whole, rel=1e-12)
        parts = figures_where(lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)]), settings)
        assert ("0.2/gap_rms" in parts) == (rank == 0)
        # The mean over both parts is that of the whole tensor.
        sums = torch.tensor([parts["0.0/ratio/mean"] * (9, 6)[rank]], dtype=torch.float64)
        torch.distributed.all_reduce(sums)
        assert sums.item() / 15 == pytest.approx(whole["0.0/ratio/mean"], rel=1e-12)
    torch.distributed.destroy_process_group()


def test_sharded_figures_are_of_this_ranks_part():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(sharded_rank, (port,), nprocs=2)
