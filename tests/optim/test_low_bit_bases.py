"""Around the 8-bit optimizers of torchao and bitsandbytes, where they are installed."""

import pytest
import torch
from problems import advance, make_gradients, make_parameters
from torch import nn

from paceline import Pullback, averaged_weights
from paceline.optim.moments import model_scale, second_moment

SHAPES = [(7,), (64, 128), (100, 50)]

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # the packages' own warnings


def torchao_8bit(parameters):
    low_bit = pytest.importorskip("torchao.optim")
    return low_bit.AdamW8bit(parameters, lr=1e-2)


def bitsandbytes_8bit(parameters):
    bnb = pytest.importorskip("bitsandbytes")
    return bnb.optim.AdamW8bit(parameters, lr=1e-2, min_8bit_size=16)


def bitsandbytes_32bit(parameters):
    bnb = pytest.importorskip("bitsandbytes")
    return bnb.optim.AdamW(parameters, lr=1e-2)


def bitsandbytes_lion(parameters):
    bnb = pytest.importorskip("bitsandbytes")
    return bnb.optim.Lion8bit(parameters, lr=1e-2, min_8bit_size=16)


BASES = [torchao_8bit, bitsandbytes_8bit, bitsandbytes_32bit, bitsandbytes_lion]


def parameters_of(seed=0):
    return [nn.Parameter(p.detach()) for p in make_parameters(seed, torch.float32, SHAPES)]


@pytest.mark.parametrize("make", BASES)
def test_strength_0_is_the_base_with_an_average(make):
    alone, wrapped = parameters_of(), parameters_of()
    base, optimizer = make(alone), Pullback(make(wrapped), pullback_strength=0.0)
    for gradients in make_gradients(5, shapes=SHAPES):
        advance(base, alone, [gradients])
        advance(optimizer, wrapped, [gradients])
    assert all(torch.equal(p, q) for p, q in zip(alone, wrapped, strict=True))
    with averaged_weights(optimizer):
        assert not any(torch.equal(p, q) for p, q in zip(alone, wrapped, strict=True))


@pytest.mark.parametrize("make", BASES[:3])
def test_the_pull_is_sized_by_the_second_moment_behind_the_codes(make):
    low, full, raw = parameters_of(), parameters_of(), parameters_of()
    optimizer, base = Pullback(make(low), pullback_strength=0.0), make(raw)
    adamw = torch.optim.AdamW(full, lr=1e-2)
    for gradients in make_gradients(5, shapes=SHAPES):
        for each, parameters in ((optimizer, low), (base, raw), (adamw, full)):
            advance(each, parameters, [gradients])
    assert optimizer.param_groups[0]["gain"] == "paper"
    for p, q in zip(low, full, strict=True):
        moment = second_moment(optimizer.base.state[p], optimizer.param_groups[0])
        exact = adamw.state[q]["exp_avg_sq"]
        assert moment.value.shape == p.shape
        assert moment.root_correction == pytest.approx((1 - 0.999**5) ** 0.5)
        assert (moment.value - exact).abs().max() < 0.05 * exact.abs().max()

    live = [p.detach().clone() for p in low]
    averages = [optimizer.state[p]["pullback_average"].clone() for p in low]
    optimizer.param_groups[0]["pullback_strength"] = 3.0
    (gradients,) = make_gradients(1, seed=4, shapes=SHAPES)
    advance(optimizer, low, [gradients])
    advance(base, raw, [gradients])
    for p, r, old, average in zip(low, raw, live, averages, strict=True):
        moment = second_moment(base.state[r], base.param_groups[0])
        gain = 1e-2 * 3.0 * 7**-0.5 / (moment.value.sqrt() / moment.root_correction + 1e-8)
        assert torch.allclose(p, r + gain.clamp(max=1) * (average - old), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block", [256, 192])
def test_codes_are_looked_up_as_by_their_package(block):
    """To the bit, though in another way; also where the last block is short, as only bitsandbytes has it."""
    low_bit = pytest.importorskip("torchao.optim.subclass_8bit")
    group = {"betas": (0.9, 0.999), "eps": 1e-8}
    value = low_bit.OptimState8bit.zeros((96, 2 * block), signed=False, block_size=block)
    value.copy_(torch.randn(value.shape).square())
    moment = second_moment({"step": 3, "exp_avg_sq": value}, group)
    assert moment.is_fresh and torch.equal(moment.value, value.dequantize())

    bnb = pytest.importorskip("bitsandbytes")
    codes, scales = torch.randint(256, (100, 50), dtype=torch.uint8), torch.rand(20)  # 19.5 blocks of 256
    table = bnb.functional.create_dynamic_map(signed=False)
    exact = bnb.functional.dequantize_blockwise(codes, absmax=scales, code=table, blocksize=256)
    moment = second_moment({"step": 3, "state2": codes, "qmap2": table, "absmax2": scales}, group)
    assert torch.equal(moment.value, exact)


@pytest.mark.parametrize("make", BASES[:2])
def test_the_scale_is_of_the_values_behind_the_codes(make):
    parameters = parameters_of()
    base = make(parameters)
    advance(base, parameters, make_gradients(3, shapes=SHAPES))
    group = base.param_groups[0]
    moments = [second_moment(base.state[p], group) for p in parameters]
    values = torch.cat([moment.value.flatten().double() for moment in moments])
    scale = model_scale([(p, base.state[p], group) for p in parameters])
    assert scale.item() == pytest.approx(values.mean().sqrt().item() / moments[0].root_correction)


@pytest.mark.parametrize("make", BASES)
def test_state_round_trip(make):
    """By the base's own way of loading, which keeps its codes from being cast."""
    parameters, fresh = parameters_of(), parameters_of(seed=5)
    optimizer = Pullback(make(parameters), pullback_strength=0.3)
    advance(optimizer, parameters, make_gradients(4, shapes=SHAPES))
    other = Pullback(make(fresh), pullback_strength=0.3)
    with torch.no_grad():
        for p, q in zip(fresh, parameters, strict=True):
            p.copy_(q)
    other.load_state_dict(optimizer.state_dict())
    for o, mine in ((optimizer, parameters), (other, fresh)):
        advance(o, mine, make_gradients(3, seed=6, shapes=SHAPES))
    assert all(torch.equal(p, q) for p, q in zip(parameters, fresh, strict=True))
    for p, q in zip(parameters, fresh, strict=True):
        assert torch.equal(optimizer.state[p]["pullback_average"], other.state[q]["pullback_average"])
