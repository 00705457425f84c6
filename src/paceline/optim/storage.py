"""Ways to keep an average: as it is, or as live − average in few bits.

The residual r = live − average is small next to the weights, so a few bits of it are many of the average. It
is rounded up or down at random, so that it is right on average. Rounded to the nearest, (1 − rate) · r would
be r again once the rate is small, and the average would stand still.

The chance is a hash of where and when, in uint32 arithmetic, the same on every device and path:

    mix(x):  x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16
    hash   = mix(index ^ mix(2 · t + salt))

with the element's index in memory order (of a sharded tensor, in this rank's part), the parameter's own
step t, and a salt for each array. From it, with r in float32:

    bfloat16:  code  = (bits of r + (hash & 0xFFFF)) & 0xFFFF0000, its upper half
               a finite r stays finite (the largest bfloat16 at most), NaN and ±Inf stay as they are
    int8:      scale = max |r| / 127 over 128 neighbours in memory, divided and rounded to nearest in float32
               code  = clamp(floor(r / scale + (hash >> 8) · 2^-24), −127, 127), and 0 unless scale > 0
               a block with a NaN or ±Inf has scale NaN
    average  = live − code  or  live − code · scale, in float32
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.optim.settings import AverageDtype
from paceline.optim.sharding import is_sharded

BLOCK = 128
"""Elements next to each other in memory that share a scale."""

SALTS = {"average": 0, "returned": 1}


class Residual(NamedTuple):
    """The tensors in which live − average is kept."""

    dtype: torch.dtype
    has_scale: bool  # a float32 for each BLOCK


RESIDUALS: dict[AverageDtype, Residual] = {
    "bfloat16": Residual(torch.bfloat16, has_scale=False),
    "int8": Residual(torch.int8, has_scale=True),
}

# Elements that are encoded at once, so that temporaries have 16 MiB at most. A multiple of BLOCK.
_PIECE = 2**22
_LARGEST = torch.finfo(torch.bfloat16).max


def scale_count(elements: int) -> int:
    """Return how many scales the int8 codes of `elements` weights have."""
    return -(-elements // BLOCK)


def unsupported_storage(live: Tensor, storage: AverageDtype) -> str | None:
    """Return why an average of these weights cannot be kept so, or None."""
    if storage != "float32" and live.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return (
            f"is {live.dtype}; average_dtype={storage!r} is for float32, bfloat16 and float16 parameters; "
            'give it a group with average_dtype="float32"'
        )
    if storage == "int8" and is_sharded(live):
        return (
            "is sharded over several ranks, which would cut the blocks of average_dtype='int8'; use "
            "average_dtype='bfloat16'"
        )
    return None


# --- The hash ---------------------------------------------------------------------------------------


def _signed(number: int) -> int:
    """Return a uint32 as the int32 with the same bits."""
    return (number & 0xFFFFFFFF) - (1 << 32 if number & 0x80000000 else 0)


def _mix_(x: Tensor) -> Tensor:
    """Apply `mix` in int32, where products wrap like those of uint32, and shifts copy the sign bit."""
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(0x846CA68B)
    x ^= (x >> 16) & 0xFFFF
    return x


def hashes(start: int, count: int, step: Tensor, salt: int, device: torch.device) -> Tensor:
    """Return the hash of elements start, start + 1, … at a step: (count,) int32, with the bits of a uint32.

    >>> hashes(0, 3, torch.tensor(1.0), salt=0, device=torch.device("cpu")).tolist()
    [911671261, 305810056, -238177609]
    """
    # 0-dim: where the step is counted on the host it goes along as a number.
    seed = _mix_((2 * step.to(torch.int64) + salt).to(torch.int32))
    index = torch.arange(count, dtype=torch.int32, device=device)
    return _mix_(index.add_(_signed(start)).bitwise_xor_(seed))


# --- Encoding ---------------------------------------------------------------------------------------


def encode_(codes: Tensor, scale: Tensor | None, residual: Tensor, step: Tensor, salt: int) -> None:
    """Round a residual into codes: bfloat16 without a scale, int8 with one.

    Arguments:
        codes: dense in memory (modified).
        scale: (blocks,) float32 (modified).
        residual: float32, with the shape and the strides of the codes (used up).
        step: () the parameter's own count, this step included.
        salt: of the average, as in `SALTS`.

    >>> codes, scale = torch.zeros(3, dtype=torch.int8), torch.zeros(1)
    >>> encode_(codes, scale, torch.tensor([-12.7, 0.0, 6.35]), step=torch.tensor(1.0), salt=0)
    >>> codes.tolist(), round(scale.item(), 4)
    ([-127, 0, 64], 0.1)
    """
    flat, values = _in_memory_order(codes), _in_memory_order(residual)
    for start in range(0, values.numel(), _PIECE):
        target, piece = (vector[start : start + _PIECE] for vector in (flat, values))
        noise = hashes(start, piece.numel(), step, salt, piece.device)
        if scale is None:
            _round_to_bfloat16_(target, piece, noise)
        else:
            for part, width in _blocks(piece.numel()):
                rows = [vector[part].view(-1, width) for vector in (target, piece, noise)]
                _round_to_int8_(scale[(start + part.start) // BLOCK :][: len(rows[0])], *rows)


def _round_to_bfloat16_(codes: Tensor, residual: Tensor, noise: Tensor) -> None:
    finite = residual.isfinite()
    rounded = noise.bitwise_and_(0xFFFF).add_(residual.view(torch.int32)).bitwise_and_(-0x10000)
    rounded = rounded.view(torch.float32).clamp_(-_LARGEST, _LARGEST)
    codes.copy_(torch.where(finite, rounded, residual))


def _round_to_int8_(scale: Tensor, codes: Tensor, residual: Tensor, noise: Tensor) -> None:
    """Round blocks, which are the rows."""
    torch.div(residual.abs().amax(1), 127, out=scale)
    scale.masked_fill_(~scale.isfinite(), torch.nan)
    chance = noise.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).to(torch.float32).mul_(2.0**-24)
    rounded = residual.div_(scale.unsqueeze(1)).add_(chance).floor_().clamp_(-127, 127)
    # Also where it is NaN: what an int8 makes of that depends on the device.
    codes.copy_(rounded.masked_fill_(~(scale > 0).unsqueeze(1), 0))


def decode(codes: Tensor, scale: Tensor | None) -> Tensor:
    """Return the residual that codes stand for: float32, with their shape and strides.

    >>> decode(torch.tensor([-127, 0, 64], dtype=torch.int8), torch.tensor([0.5]))
    tensor([-63.5000,   0.0000,  32.0000])
    """
    residual = codes.to(torch.float32)
    if scale is not None:
        flat = _in_memory_order(residual)
        for part, width in _blocks(flat.numel()):
            rows = flat[part].view(-1, width)
            rows.mul_(scale[part.start // BLOCK :][: len(rows)].unsqueeze(1))
    return residual


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Return a dense tensor as a vector, in the order of its memory."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def _blocks(elements: int) -> Iterator[tuple[slice, int]]:
    """Yield slices of blocks of the same width, and the width: the last block may be short."""
    whole = elements - elements % BLOCK
    if whole:
        yield slice(0, whole), BLOCK
    if whole < elements:
        yield slice(whole, elements), elements - whole
