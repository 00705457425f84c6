"""What tests of the optimizer share: the kernel on parameters of a CPU, where there is no GPU."""

import pytest
import torch


@pytest.fixture
def kernel(monkeypatch):
    """Return the device on which fused=True is taken: a GPU, or the CPU in Triton's interpreter."""
    pytest.importorskip("triton")
    from paceline.optim import fused, triton_kernel

    if torch.cuda.is_available():
        return "cuda"
    monkeypatch.setattr(fused, "DEVICES", ("cuda", "cpu"))
    # Small tiles: the interpreter computes whole ones, and these tensors have several chunks then.
    monkeypatch.setattr(triton_kernel, "TILES", dict.fromkeys(triton_kernel.TILES, (128, 4)))
    return "cpu"
