"""The update on a GPU in one pass over memory: one launch of kernel.py for all tensors of a kind."""

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from paceline.optim.onepass import (
    NOT_ALIKE,
    averages_that_move,
    lie_alike,
    numbers_of,
    row_of,
    seed_averages_,
)
from paceline.optim.recipe import Recipe
from paceline.optim.rule import NUMERATORS, At, Scalar, Slot, at_step
from paceline.optim.sharded import mesh_of

BLOCK = 1024
"""Elements of a program: eight for each of its threads, two loads of 16 bytes in float32."""
WARPS = 4

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refusal(slot: Slot) -> str | None:
    """Why a parameter cannot take this path, in words that follow its name; None if it can."""
    live = slot.live
    if mesh_of(live) is not None:
        return "is sharded over several ranks, which fused=True does not support"
    if live.dtype not in DTYPES:
        return f"is {live.dtype}; fused=True on a GPU is for float32, bfloat16 and float16"
    if slot.average.dtype != torch.float32 or not slot.exp_avg.dtype == slot.exp_avg_sq.dtype == live.dtype:
        return f"is {live.dtype} and its state is of another precision than PACE gave it"
    if not lie_alike(slot):
        return NOT_ALIKE
    if find_spec("triton") is None:
        return f"is on {live.device}, where fused=True needs Triton, which is not installed; leave fused out"
    return None


def fused_step_(slots: Sequence[Slot], recipe: Recipe, scale: Scalar = 1.0) -> None:
    """One step for all slots of a parameter group, in place; `scale` as in `pace_step_`."""
    torch._foreach_add_([slot.step for slot in slots], 1)
    alike: dict[tuple[object, ...], list[Slot]] = {}
    for slot in slots:
        if slot.live.numel():
            key = (slot.live.device, slot.live.dtype, slot.step.item(), _is_aligned(slot))
            alike.setdefault(key, []).append(slot)
    for group in alike.values():
        at = at_step(group[0].step, recipe)
        seed_averages_(group, at)
        _launch(group, at, recipe, scale)


def _is_aligned(slot: Slot) -> bool:
    return all(array.data_ptr() % 16 == 0 for array in slot[:6] if array is not None)


def _launch(slots: list[Slot], at: At, recipe: Recipe, scale: Scalar) -> None:
    import triton.language as tl

    from paceline.optim import kernel

    live = slots[0].live
    table = _table(live.device, tuple(number for slot in slots for number in row_of(slot)))
    chunks = _chunks(live.device, tuple(slot.live.numel() for slot in slots), BLOCK)
    averages = averages_that_move(slots, at)
    pull = "none" if not at.pulling else "over" if recipe.gain in NUMERATORS else "uniform"
    if recipe.gain != "scaled":
        scale = 1.0
    # It stays on the device: to read it would be to wait for all that was asked of the device before.
    factor = scale if isinstance(scale, Tensor) else torch.full((), scale, device=live.device)
    kinds = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    with torch.cuda.device(live.device if live.is_cuda else -1):
        kernel.step[(len(chunks),)](
            table, chunks, factor.to(live.device, torch.float32), *numbers_of(at, recipe, 1.0),
            OF=kinds[live.dtype], PULL=pull, LOOKAHEAD=recipe.gap == "lookahead" and pull != "none",
            AVERAGES=averages, ALIGNED=_is_aligned(slots[0]), BLOCK=BLOCK,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip


# Weights and state stay where they are, and gradients often come back to where they were, so that there is
# mostly nothing to send. The keys are the contents: what they find is never out of date.


@lru_cache(maxsize=64)
def _table(device: torch.device, numbers: tuple[int, ...]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64).view(-1, 7).to(device)


@lru_cache(maxsize=64)
def _chunks(device: torch.device, sizes: tuple[int, ...], block: int) -> Tensor:
    """A row for each program: a tensor, and its first element."""
    counts = torch.tensor([-(-size // block) for size in sizes], dtype=torch.int64)
    tensors = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    places = torch.arange(len(tensors)) - (counts.cumsum(0) - counts)[tensors]
    return torch.stack([tensors, places * block], dim=1).to(device)
