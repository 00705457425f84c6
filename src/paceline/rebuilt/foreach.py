"""The update for lists of tensors: `pace_step_` in torch's foreach operations, bit for bit."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.rebuilt.rule import Slot, StepScalars, shares, step_scalars
from paceline.rebuilt.settings import Settings
from paceline.rebuilt.sharding import layout_of

# 64 MiB of float32: launches do not count, and two temporaries of that size are small beside a model.
CHUNK_ELEMENTS = 2**24

T = TypeVar("T")


def chunks(items: Iterable[T], key: Callable[[T], tuple[Tensor, object]]) -> Iterator[list[T]]:
    """Yield items that one foreach call can take together, in chunks of limited size.

    `key` returns an item's tensor, which decides by device, dtype and mesh, and whatever else must agree.
    """
    alike: dict[object, list[tuple[T, int]]] = {}
    for item in items:
        tensor, rest = key(item)
        kind = (tensor.device, tensor.dtype, layout_of(tensor), rest)
        alike.setdefault(kind, []).append((item, tensor.numel()))
    for group in alike.values():
        chunk: list[T] = []
        size = 0
        for item, elements in group:
            if chunk and size + elements > CHUNK_ELEMENTS:
                yield chunk
                chunk, size = [], 0
            chunk.append(item)
            size += elements
        yield chunk


def foreach_step_(slots: Sequence[Slot], settings: Settings, t: int) -> None:
    """Take step t for slots of one device, dtype and mesh, in place."""
    lives, grads, exp_avgs, exp_avg_sqs, averages = (list(column) for column in list(zip(*slots))[:5])
    returned = [slot.returned for slot in slots if slot.returned is not None]
    control, (beta1, beta2) = settings.control, settings.betas
    at = step_scalars(t, settings)
    if t == 1:
        for mean, live in zip([*averages, *returned], [*lives, *lives], strict=False):
            mean.copy_(live)
    gaps = torch._foreach_sub(averages, lives) if at.pulling and control.gap == "before" else None

    if settings.maximize:
        grads = list(torch._foreach_neg(grads))
    if settings.weight_decay != 0:
        torch._foreach_mul_(lives, number(at.decay, lives))
    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, number(beta2, exp_avg_sqs))
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    del grads
    denominators = list(torch._foreach_sqrt(exp_avg_sqs))
    # A list of floats on a GPU, as torch's AdamW has it: by one float torch would multiply by its inverse.
    roots = number(at.root_correction, denominators)
    torch._foreach_div_(denominators, [roots] * len(lives) if isinstance(roots, float) else roots)
    torch._foreach_add_(denominators, settings.eps)
    torch._foreach_addcdiv_(lives, exp_avgs, denominators, at.step_size)

    if control.order == "average, then pull":
        move_averages_(averages, lives, at.rate)
    if at.pulling:
        gaps = torch._foreach_sub(averages, lives) if gaps is None else gaps
        _pull_(lives, list(gaps), _gains_(denominators, averages, at))
    del gaps, denominators  # before the averages' own temporaries
    if control.order == "pull, then average":
        move_averages_(averages, lives, at.rate)
    if returned:
        move_averages_(returned, lives, at.return_rate)


def _gains_(denominators: list[Tensor], averages: list[Tensor], at: StepScalars) -> list[Tensor]:
    """Return the gains, written over `denominators` where the precision allows."""
    gains = denominators
    for i, average in enumerate(averages):
        if gains[i].dtype != average.dtype:
            gains[i] = gains[i].to(average.dtype)
    largest = torch.finfo(gains[0].dtype).max
    if at.over_root:
        torch._foreach_reciprocal_(gains)
        torch._foreach_mul_(gains, number(min(at.numerator, largest), gains))
    else:
        for gain in gains:
            gain.fill_(at.numerator)
    torch._foreach_clamp_max_(gains, min(at.limit, largest))
    return gains


def _pull_(lives: list[Tensor], gaps: list[Tensor], gains: list[Tensor]) -> None:
    """Move lives along the gaps: `pull_` of rule.py for many."""
    if lives[0].dtype == gaps[0].dtype:
        torch._foreach_addcmul_(lives, gaps, gains)
    else:
        torch._foreach_mul_(gaps, gains)
        torch._foreach_add_(lives, gaps)


def move_averages_(averages: list[Tensor], lives: list[Tensor], rate: float) -> None:
    """Move averages toward lives: `move_average_` of rule.py for many."""
    keep, move = shares(rate, averages[0].dtype)
    if keep == 0:
        for average, live in zip(averages, lives, strict=True):
            average.copy_(live)
    elif move != 0:
        torch._foreach_mul_(averages, number(keep, averages))
        torch._foreach_add_(averages, lives, alpha=move)


def number(value: float, tensors: list[Tensor]) -> Any:
    """Return a float in the form in which an operation on these tensors takes it quickest.

    On a CPU torch makes a tensor of a float for each of them, which takes longer than a small operation. In
    low precision such a tensor would not be rounded as they are, so the float stays.
    """
    first = tensors[0]
    plain = type(first) in (Tensor, torch.nn.Parameter) and first.dtype in (torch.float32, torch.float64)
    if first.device.type != "cpu" or not plain:
        return value
    return torch.tensor(value, dtype=first.dtype, device=first.device)
