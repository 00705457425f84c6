"""What one pass over memory tells of a tensor that it steps: the raw numbers of telemetry, on the device."""

import math
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

# Coordinates of a tensor that its quantiles are taken from; all of them in a smaller one. The rank of a
# quantile is then right to 1 % or so, and sorting costs less than the step.
SAMPLE = 2**12


class Sums(NamedTuple):
    """Sums over the coordinates of one tensor; on the device a tensor has them in this order."""

    saturated: float
    gain: float
    ratio: float
    product: float  # gradient · gap
    pull: float  # a length, as all below: the root of a sum of squares
    step: float
    gap: float
    gradient: float


LENGTHS = slice(Sums._fields.index("pull"), None)


class Told(NamedTuple):
    """Of one tensor."""

    sums: Tensor  # (8,) float64, in the order of Sums
    sample: Tensor  # (2, n) gains and ratios of some coordinates, in the order of memory
    stride: int  # how many coordinates each of the sample stands for


Tell = dict[Tensor, Told]
"""What a step is asked to tell, by parameter: it begins empty."""


def sample_stride(size: int) -> int:
    """How far apart the coordinates of a sample are."""
    stride = max(1, -(-size // SAMPLE))
    while math.gcd(stride, size) > 1:  # with a common factor some rows or columns would be left out
        stride += 1
    return stride


class Teller:
    """Room for what the kernel tells of tensors of these sizes, by chunks of so many elements."""

    def __init__(self, device: torch.device, sizes: tuple[int, ...], block: int) -> None:
        self._chunks = [-(-size // block) for size in sizes]
        self._strides = [sample_stride(size) for size in sizes]
        self._picked = [-(-size // stride) for size, stride in zip(sizes, self._strides, strict=True)]
        # Of a step that is skipped on the device nothing is told.
        rows = torch.zeros((sum(self._chunks), len(Sums._fields)), dtype=torch.float32, device=device)
        sample = torch.zeros((sum(self._picked), 2), dtype=torch.float32, device=device)
        self.arrays = rows, _picked(device, tuple(self._strides), tuple(self._picked)), sample

    def told(self) -> list[Told]:
        """Of each tensor: with few operations, of which a host does thousands a step if each has its own."""
        rows, _, sample = self.arrays
        each = rows.split_with_sizes(self._chunks)
        sums = torch.stack([own.sum(0, dtype=torch.float64) for own in each])
        sums[:, LENGTHS].sqrt_()  # squares until here
        samples = sample.t().split_with_sizes(self._picked, 1)
        return list(map(Told, sums.unbind(), samples, self._strides))


@lru_cache(maxsize=64)
def _picked(device: torch.device, strides: tuple[int, ...], counts: tuple[int, ...]) -> Tensor:
    """A row for each tensor: how far apart the elements of its sample are, and where that begins."""
    starts = accumulate(counts, initial=0)
    return torch.tensor(list(zip(strides, starts, strict=False)), dtype=torch.int64).to(device)
