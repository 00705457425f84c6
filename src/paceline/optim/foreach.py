"""The update for lists of tensors: `pace_step_` in torch's foreach operations, bit for bit."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.optim.rule import Slot, StepScalars, shares, step_scalars
from paceline.optim.settings import Settings
from paceline.optim.sharding import layout_of

CHUNK_ELEMENTS = {"cuda": 2**24, "cpu": 2**18}
"""Elements of a chunk: on a GPU so many that launches do not count, and temporaries are small next to a
model; on a CPU as many as its cache holds with their state, which halves the time of a step."""

T = TypeVar("T")
Tensors = list[Tensor]


def chunks(items: Iterable[T], key: Callable[[T], tuple[Tensor, object]]) -> Iterator[list[T]]:
    """Yield items that one foreach call can take together, in chunks of limited size.

    `key` returns an item's tensor, which decides by device, dtype and mesh, and whatever else must agree.
    """
    growing: dict[object, tuple[list[T], int]] = {}
    for item in items:
        tensor, rest = key(item)
        kind = (tensor.device, tensor.dtype, layout_of(tensor), rest)
        chunk, size = growing.get(kind, ([], 0))
        if chunk and size + tensor.numel() > CHUNK_ELEMENTS.get(tensor.device.type, 2**24):
            yield chunk
            chunk, size = [], 0
        chunk.append(item)
        growing[kind] = chunk, size + tensor.numel()
    yield from (chunk for chunk, _ in growing.values())


def foreach_step_(slots: Sequence[Slot], settings: Settings, t: int) -> None:
    """Take step t for slots of one device, dtype and mesh, in place."""
    lives, grads, exp_avgs, exp_avg_sqs, averages = (list(column) for column in list(zip(*slots))[:5])
    returned = [slot.returned for slot in slots if slot.returned is not None]
    control = settings.control
    at = step_scalars(t, settings)
    if t == 1:
        for mean, live in zip(averages + returned, lives + lives):
            mean.copy_(live)
    gaps = torch._foreach_sub(averages, lives) if at.pulling and control.gap == "before" else None

    if settings.maximize:
        grads = list(torch._foreach_neg(grads))
    if settings.weight_decay != 0:
        torch._foreach_mul_(lives, number(at.decay, lives))
    denominators = take_gradients_(grads, exp_avgs, exp_avg_sqs, settings.betas, t, settings.eps)
    del grads
    torch._foreach_addcdiv_(lives, exp_avgs, denominators, at.step_size)

    if control.order == "average, then pull":
        move_averages_(averages, lives, at.rate)
    if at.pulling:
        gaps = torch._foreach_sub(averages, lives) if gaps is None else gaps
        _pull_(lives, list(gaps), denominators, at)
    del gaps, denominators  # before the averages' own temporaries
    if control.order == "pull, then average":
        move_averages_(averages, lives, at.rate)
    if returned:
        move_averages_(returned, lives, at.return_rate)


def take_gradients_(
    grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, betas: tuple[float, float], t: int, eps: float
) -> Tensors:
    """Take gradients into both moments at step t, and return the denominators √v̂ + ε, all as AdamW."""
    beta1, beta2 = betas
    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, number(beta2, exp_avg_sqs))
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    denominators = list(torch._foreach_sqrt(exp_avg_sqs))
    # A list of floats on a GPU, as torch's AdamW has it: by one float torch would multiply by its inverse.
    root = number((1 - beta2**t) ** 0.5, denominators)
    torch._foreach_div_(denominators, [root] * len(denominators) if isinstance(root, float) else root)
    torch._foreach_add_(denominators, eps)
    return denominators


def _pull_(lives: list[Tensor], gaps: list[Tensor], denominators: list[Tensor], at: StepScalars) -> None:
    """Move lives along their gaps by `gain_` of rule.py. The gaps and the denominators are used up."""
    gains = [denominator.to(gap.dtype) for denominator, gap in zip(denominators, gaps, strict=True)]
    largest = torch.finfo(gains[0].dtype).max
    if at.over_root:
        torch._foreach_reciprocal_(gains)
        torch._foreach_mul_(gains, number(min(at.numerator, largest), gains))
    else:
        for gain in gains:
            gain.fill_(at.numerator)
    torch._foreach_clamp_max_(gains, min(at.limit, largest))
    if lives[0].dtype == gaps[0].dtype:
        torch._foreach_addcmul_(lives, gaps, gains)
    else:
        torch._foreach_mul_(gaps, gains)
        torch._foreach_add_(lives, gaps)


def move_averages_(averages: list[Tensor], lives: list[Tensor], rate: float) -> None:
    """Move averages toward lives: `move_average_` of rule.py for many."""
    keep, move = shares(rate, averages[0].dtype)
    if keep == 0:
        torch._foreach_copy_(averages, lives)
    elif move != 0:
        torch._foreach_mul_(averages, number(keep, averages))
        torch._foreach_add_(averages, lives, alpha=move)


def number(value: float, tensors: list[Tensor]) -> Any:
    """Return a factor as foreach operations should take it.

    On a CPU torch rounds a float to the precision of the tensors, .999 to 1 for bfloat16, which operations on
    one tensor do not. It also makes a tensor of it for each of them, which takes longer than a small step.
    """
    first = tensors[0]
    if first.device.type != "cpu" or type(first) not in (Tensor, torch.nn.Parameter):
        return value
    return torch.tensor(value, dtype=torch.promote_types(first.dtype, torch.float32))
