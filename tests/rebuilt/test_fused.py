"""The fused path next to the loop in float64: on a GPU, or without one in Triton's interpreter."""

import os

import pytest
import torch

from rebuilt.test_core import CONTROLS, problem, train

pytest.importorskip("triton")
from paceline.rebuilt import fused
from paceline.rebuilt.pace import PACE
from paceline.rebuilt.settings import Control
from paceline.rebuilt.state import average_of

CUDA = torch.cuda.is_available()
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Without a GPU let parameters on the CPU take this path, in chunks of 128 elements."""
    if not CUDA:
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("without a GPU these tests need TRITON_INTERPRET=1")
        monkeypatch.setattr(fused, "DEVICES", ("cuda", "cpu"))
        monkeypatch.setattr(fused, "TILES", dict.fromkeys(fused.TILES, (256, 4)))


def run(dtype, storage, control, fused_, steps=6):
    live, _ = problem(torch.float32)
    live = [p.detach().to(dtype, copy=True).to("cuda" if CUDA else "cpu").requires_grad_() for p in live]
    settings = {"fused": True} if fused_ else {"foreach": False}
    optimizer = PACE(live, 1e-2, weight_decay=0.1, control=control, average_dtype=storage, **settings)
    for t in range(1, steps + 1):
        own = torch.Generator().manual_seed(t)
        for p in live:
            p.grad = torch.randn(p.shape, generator=own).to(p)
        optimizer.step()
    names = control.averages
    averages = [average_of(optimizer.state[p], name, p).double() for p in live for name in names]
    return [p.detach().double() for p in live], averages, optimizer


@pytest.mark.parametrize("name", [*CONTROLS, "after", "average first"])
def test_equals_the_loop_in_float64(name):
    extra = {"after": Control.push(gap="after"), "average first": Control.pull(order="average, then pull")}
    control = {**CONTROLS, **extra}[name]
    ours, averages, optimizer = run(torch.float32, "float32", control, True)
    theirs, expected, _ = run(torch.float64, "float32", control, False)
    assert "path: fused" in repr(optimizer)
    for a, b in zip([*ours, *averages], [*theirs, *expected], strict=True):
        assert torch.allclose(a, b.to(a), rtol=3e-6, atol=3e-6), (a - b.to(a)).abs().max()


@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["push", "paper", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_bits_are_those_of_the_loop(name, storage, dtype):
    steps = 6 if dtype == torch.float32 else 1  # weights in bfloat16 are rounded once here, twice in the loop
    ours, averages, _ = run(dtype, storage, CONTROLS[name], True, steps)
    theirs, expected, _ = run(dtype, storage, CONTROLS[name], False, steps)
    tolerance = 3e-6 if dtype == torch.float32 else 2e-2
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance)
    for a, b in zip(averages, expected, strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=2e-3 if dtype == torch.float32 else 2e-2)


def test_states_move_between_paths():
    live, gradients = problem()
    optimizer = PACE(live, 1e-2, control=Control.push(), foreach=True)
    train(optimizer, gradients, 3)
    optimizer.param_groups[0].update(foreach=None, fused=True)
    train(optimizer, gradients, 3, 4)
    optimizer.param_groups[0].update(foreach=True, fused=None)
    train(optimizer, gradients, 3, 7)
    other, others = problem()
    fresh = PACE(other, 1e-2, control=Control.push(), foreach=True)
    train(fresh, others, 9)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(live, other, strict=True))
    assert all(optimizer.state[p]["step"] == 9 for p in live)
