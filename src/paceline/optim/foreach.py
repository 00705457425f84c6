"""The update for many tensors at once: `pace_step_` in torch's foreach operations, bit for bit.

A step holds at most two temporaries of one chunk's size; chunks have at most `CHUNK_ELEMENTS` elements
unless one tensor alone has more.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from paceline.optim.recipe import Recipe
from paceline.optim.rule import (
    NUMERATORS,
    RATIOS,
    At,
    Scalar,
    Slot,
    Terms,
    at_step,
    gain_limit,
    numerator_of,
    on_device_of,
    seed_average_,
    shares,
    stays_on_device,
)
from paceline.optim.sharded import mesh_of

# 64 MiB of float32: large enough that launches do not count, small beside any model worth the path.
CHUNK_ELEMENTS = 2**24

T = TypeVar("T")


class Lists(NamedTuple):
    """What the control of one chunk touches, a list entry a tensor."""

    lives: list[Tensor]  # modified
    averages: list[Tensor]  # modified
    returned: list[Tensor]  # modified; empty without return_power
    gaps: list[Tensor]  # average − live before the base step; empty under "lookahead"; used up
    denominators: list[Tensor]  # √v̂ + ε; used up


def foreach_step_(slots: Sequence[Slot], recipe: Recipe, scale: Scalar = 1.0) -> None:
    """Take one step for all slots of a parameter group, in place; `scale` as in `pace_step_`."""
    on_device = stays_on_device(recipe)
    count_step_(slots)
    for chunk in chunks(slots, lambda slot: (slot.live, None if on_device else slot.step.item())):
        _step_chunk_(chunk, recipe, on_device_of(chunk[0].live, scale))


def count_step_(slots: Sequence[Slot]) -> None:
    """Advance the count of each by one."""
    steps = [slot.step for slot in slots]
    torch._foreach_add_(steps, summand(1.0, steps))


def chunks(items: Iterable[T], key: Callable[[T], tuple[Tensor, object]]) -> Iterator[list[T]]:
    """Items that one foreach call can take together, and not too many at once.

    `key` gives an item's tensor, which decides by device, dtype and mesh, and whatever else must agree.
    """
    alike: dict[object, list[tuple[T, int]]] = {}
    for item in items:
        tensor, rest = key(item)
        kind = (tensor.device, tensor.dtype, mesh_of(tensor), rest)
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


def _step_chunk_(chunk: list[Slot], recipe: Recipe, scale: Scalar) -> None:
    lives, grads, exp_avgs, exp_avg_sqs, averages = (list(column) for column in list(zip(*chunk))[:5])
    at = at_step(chunk[0].step, recipe, scale)
    # On the host all steps of a chunk are equal; on the device nobody knows.
    on_device = stays_on_device(recipe)
    ats = [at_step(slot.step, recipe, scale) for slot in chunk] if on_device else [at] * len(chunk)
    beta1, beta2 = recipe.betas
    seed_averages_(chunk, ats)
    gaps = gaps_of(averages, lives, ats, recipe)

    if recipe.maximize:
        grads = list(torch._foreach_neg(grads))
    if recipe.weight_decay != 0:
        torch._foreach_mul_(lives, _number(at.decay, lives))
    if exp_avgs[0] is None:  # without momentum the first moment is the gradient
        exp_avgs = grads
    else:
        torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, _number(beta2, exp_avg_sqs))
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    del grads
    denominators = denominators_of(exp_avg_sqs, ats, recipe.eps)
    if isinstance(at.step_size, Tensor):
        scaled = torch._foreach_div(denominators, _each(ats, "step_size"))
        torch._foreach_addcdiv_(lives, exp_avgs, scaled)
        del scaled
    else:
        torch._foreach_addcdiv_(lives, exp_avgs, denominators, at.step_size)

    if at.averaging is not False:
        returned = [slot.returned for slot in chunk if slot.returned is not None]
        control_(Lists(lives, averages, returned, gaps, denominators), ats, recipe)


def gaps_of(averages: list[Tensor], lives: list[Tensor], ats: list[At], recipe: Recipe) -> list[Tensor]:
    """Average − live before the base step, where the pull will need it."""
    if ats[0].pulling is False or recipe.gap == "lookahead":
        return []
    return list(torch._foreach_sub(averages, lives))


def denominators_of(exp_avg_sqs: list[Tensor], ats: list[At], eps: float) -> list[Tensor]:
    """√v̂ + ε."""
    denominators = list(torch._foreach_sqrt(exp_avg_sqs))
    roots: Any = _each(ats, "root_correction")
    first = _number(roots[0], denominators)
    if first is not roots[0] and len(set(roots)) == 1:
        roots = first
    # A list of floats on a GPU, as torch's AdamW has it: by one float torch would multiply by its inverse.
    torch._foreach_div_(denominators, roots)
    torch._foreach_add_(denominators, summand(eps, denominators))
    return denominators


def control_(lists: Lists, ats: list[At], recipe: Recipe) -> None:
    """What follows the base step: pull live, which holds the raw step by now, and move the averages."""
    lives, averages, returned, gaps, denominators = lists
    lookahead = recipe.gap == "lookahead"
    if lookahead:
        move_averages_(averages, lives, _each(ats, "rate"))
    if ats[0].pulling is not False:
        gains = _gains_(denominators, averages, ats, recipe)
        if lookahead:
            _lerp_lives_(lives, averages, gains)
        else:
            _pull_(lives, gaps, gains)
        del gains
    # Freed before the averages' own temporaries.
    gaps.clear()
    denominators.clear()
    if not lookahead:
        move_averages_(averages, lives, _each(ats, "rate"))
    if returned:
        move_averages_(returned, lives, _each(ats, "return_rate"))


def seed_averages_(chunk: list[Slot], ats: list[At]) -> None:
    """At a first step."""
    if not isinstance(ats[0].t, Tensor) and ats[0].t != 1:
        return
    for slot, at in zip(chunk, ats, strict=True):
        seed_average_(slot.average, slot.live, at.t)
        if slot.returned is not None:
            seed_average_(slot.returned, slot.live, at.t)


def _number(value: Any, tensors: list[Tensor]) -> Any:
    """A float in the form in which an operation on these takes it quickest.

    On a CPU torch makes a tensor of a float for each of them, which takes longer than the operation on a
    small one. In low precision that tensor is not rounded as they are, so the float stays.
    """
    first = tensors[0]
    if not isinstance(value, float) or first.device.type != "cpu" or torch.compiler.is_compiling():
        return value
    if type(first) not in PLAIN or first.dtype not in (torch.float32, torch.float64):
        return value
    return torch.tensor(value, dtype=first.dtype, device=first.device)  # not on a default device


def summand(value: float, tensors: list[Tensor]) -> Any:
    """Likewise for operations that add, which take a list: of one tensor torch would make a float again."""
    number = _number(value, tensors)
    return number if number is value else [number] * len(tensors)


PLAIN = (Tensor, torch.nn.Parameter)


def _each(ats: list[At], name: str) -> list[Any]:
    """One scalar a tensor: all floats or all 0-dim tensors, whose overload torch picks itself."""
    return [getattr(at, name) for at in ats]


def _gains_(
    denominators: list[Tensor],
    averages: list[Tensor],
    ats: list[At],
    recipe: Recipe,
) -> list[Tensor]:
    """The gain of every coordinate, written over `denominators` where the precision allows."""
    if denominators[0].dtype != averages[0].dtype:
        for i, average in enumerate(averages):
            denominators[i] = denominators[i].to(average.dtype)  # one by one: the narrow one is freed at once

    def terms(i: int) -> Terms:
        at, out = ats[i], denominators[i]
        strength = float(recipe.pullback_strength) * at.rate
        return Terms(out, at.lr, strength, out=out, scale=at.scale)

    if recipe.gain in NUMERATORS:
        gains = denominators
        torch._foreach_reciprocal_(gains)
        numbers: Any = numerator_of(recipe.gain, terms(0))  # on the host the same for a whole chunk
        if isinstance(numbers, Tensor):
            own = numbers
            numbers = [
                own if at is ats[0] else numerator_of(recipe.gain, terms(i)) for i, at in enumerate(ats)
            ]
        torch._foreach_mul_(gains, _number(numbers, gains))
    else:
        gains = [RATIOS[recipe.gain](terms(i)) for i in range(len(ats))]
    torch._foreach_clamp_max_(gains, gain_limit(recipe, gains[0].dtype))
    if isinstance(ats[0].pulling, Tensor):
        gains = [torch.where(on, gain, 0.0) for gain, on in zip(gains, _each(ats, "pulling"), strict=True)]
    return gains


def _pull_(lives: list[Tensor], gaps: list[Tensor], gains: list[Tensor]) -> None:
    """`pull_` for many."""
    if lives[0].dtype == gaps[0].dtype:
        torch._foreach_addcmul_(lives, gaps, gains)
    else:
        torch._foreach_mul_(gaps, gains)
        torch._foreach_add_(lives, gaps)


def _lerp_lives_(lives: list[Tensor], averages: list[Tensor], gains: list[Tensor]) -> None:
    if lives[0].dtype == averages[0].dtype:
        torch._foreach_lerp_(lives, averages, gains)
    else:
        wide = [live.to(average.dtype) for live, average in zip(lives, averages, strict=True)]
        torch._foreach_lerp_(wide, averages, gains)
        for live, value in zip(lives, wide, strict=True):  # sharded tensors have no copy of lists
            live.copy_(value)


def move_averages_(averages: list[Tensor], lives: list[Tensor], rates: list[Any]) -> None:
    """`move_average_` for many: one rate on the host, one each on the device."""
    if isinstance(rates[0], Tensor):
        keeps, moves = (list(column) for column in zip(*(shares(rate, averages[0].dtype) for rate in rates)))
        wide = [live.to(average.dtype) for live, average in zip(lives, averages, strict=True)]
        torch._foreach_mul_(averages, keeps)
        torch._foreach_add_(averages, torch._foreach_mul(wide, moves))
    else:
        keep, move = shares(rates[0], averages[0].dtype)
        if keep == 0:  # as `move_average_` does
            for average, live in zip(averages, lives, strict=True):
                average.copy_(live)
            return
        torch._foreach_mul_(averages, _number(keep, averages))
        torch._foreach_add_(averages, lives, alpha=float(move))
