"""Which program of a launch does what: tables that depend on sizes alone, and not on addresses.

They are kept by their contents, and found again by another launch.
"""

from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

WIDTH = 8192
"""Sums of chunks that one program adds: no tensor is so large that others wait for it."""

TOTALS = 4096
"""Sums of those that are added at a time, by one program for all tensors."""


@lru_cache(maxsize=64)
def chunks(device: torch.device, sizes: tuple[int, ...], block: int) -> Tensor:
    """A row for each program: a tensor, and its first element."""
    counts = torch.tensor([-(-size // block) for size in sizes], dtype=torch.int64)
    tensors = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    places = torch.arange(len(tensors)) - (counts.cumsum(0) - counts)[tensors]
    return torch.stack([tensors, places * block], dim=1).to(device)


class Segments(NamedTuple):
    """Sums of chunks, cut into segments that are added up by a program each."""

    places: Tensor  # (segments, 2) int64: the first of its sums, and that after its last
    starts: Tensor  # int64: the first segment of each tensor
    shape: dict[str, int]  # as `mean` of kernel_before.py takes them


@lru_cache(maxsize=64)
def segments(device: torch.device, sizes: tuple[int, ...], block: int, parts: int) -> Segments:
    """Of tensors of these sizes, whose chunks have so many sums each."""
    places, starts, first = list[tuple[int, int]](), [0], 0
    for size in sizes:
        last = first + -(-size // block) * parts
        places += [(at, min(at + WIDTH, last)) for at in range(first, last, WIDTH)]
        starts.append(len(places))
        first = last
    most = _power_of_2(max(after - before for before, after in pairwise(starts)))
    at_once = min(max(TOTALS // most, 1), _power_of_2(len(sizes)))
    blocks = -(-len(sizes) // at_once)
    starts += [len(places)] * (blocks * at_once - len(sizes))
    shape = {"BLOCKS": blocks, "TENSORS": at_once, "SEGMENTS": most}
    there, begins = (torch.tensor(own, dtype=torch.int64).to(device) for own in (places, starts))
    return Segments(there, begins, shape)


AT_ONCE = (1, 8, 64, 512, 4096)
"""Tensors that one program may add up the sums of, each of as many as TOTALS has room for: few kinds, as each
is a kernel of its own to compile."""


class Few(NamedTuple):
    """Sums of chunks that are so few that one program adds them all up."""

    starts: Tensor  # int64: the first sum of each tensor
    shape: tuple[int, int]  # TENSORS and PARTS of `leave_root` in kernel.py


@lru_cache(maxsize=64)
def few(device: torch.device, sizes: tuple[int, ...], block: int, parts: int) -> Few | None:
    """As `segments`; None if they are not few."""
    counts = [-(-size // block) * parts for size in sizes]
    tensors = next((most for most in AT_ONCE if len(sizes) <= most <= TOTALS), 0)
    if not tensors or max(counts) > TOTALS // tensors:
        return None
    starts = list(accumulate(counts, initial=0))
    starts += starts[-1:] * (tensors - len(sizes))
    return Few(torch.tensor(starts, dtype=torch.int64).to(device), (tensors, TOTALS // tensors))


def _power_of_2(number: int) -> int:
    """The least that is not below it."""
    return 1 << (number - 1).bit_length()
