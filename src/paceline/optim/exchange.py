"""An average in one parameter for a while, with its live weights put away."""

import torch
from torch import Tensor

from paceline.optim.sharding import local
from paceline.optim.state import State

Sum = tuple[torch.dtype, Tensor]
"""The dtype of a parameter, and a sum of its bits, wherever they lie."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def show_(parameter: Tensor, state: State, average: Tensor | None, *, in_place: bool) -> Sum | None:
    """Put an average into a parameter, and keep its live weights as state["live"]. None: it shows live.

    Whatever interrupts it, `hide_` restores everything. No tensor that a state dict may hold is written to.
    What is returned tells `hide_` whether the parameter was changed.
    """
    state["live"] = parameter.detach().clone()
    if average is not None:
        parameter.copy_(average)
    for key, kept in state.items():
        if kept is average and _is_same_kind(kept, parameter) and not in_place:
            state[key] = parameter.detach()  # the average is the parameter now; its own memory is free again
    return _sum_of_bits(parameter)


def hide_(parameter: Tensor, state: State, shown: Sum | None) -> bool:
    """Undo `show_`, bit for bit, and return whether the parameter was changed since.

    It may have been cast or moved, and `show_` or another `hide_` may have been interrupted.
    """
    was_changed = _was_changed(parameter, shown)
    state.update(settled(state, parameter))
    parameter.copy_(state["live"])
    del state["live"]  # only now: whatever interrupts the copy, live is still there
    return was_changed


def _is_same_kind(kept: Tensor, parameter: Tensor) -> bool:
    return (kept.shape, kept.dtype, kept.device) == (parameter.shape, parameter.dtype, parameter.device)


def settled(state: State, parameter: Tensor) -> State:
    """Return a state whose averages do not share memory with a parameter that shows one of them."""
    held = local(parameter.detach())
    if "live" not in state or not held.numel():
        return dict(state)
    return {k: v.clone() if local(v).data_ptr() == held.data_ptr() else v for k, v in state.items()}


def _sum_of_bits(parameter: Tensor) -> Sum | None:
    """Return what tells whether a parameter was changed; its version does not see what goes by `.data`."""
    part = local(parameter.detach())
    if type(part) is not Tensor or part.element_size() not in _INTEGERS or part.is_meta:
        return None
    bits = part.view(_INTEGERS[part.element_size()])
    # Times its neighbour's upper half: a plain sum stays as it is where many weights are doubled or negated.
    mixed = bits.roll(1).bitwise_right_shift_(4 * part.element_size()).mul_(bits)
    # Without a dtype torch would sum a copy of 8 bytes an element.
    dtype = torch.promote_types(bits.dtype, torch.int32)
    return part.dtype, bits.sum(dtype=dtype) + 3 * mixed.sum(dtype=dtype)


def _was_changed(parameter: Tensor, before: Sum | None) -> bool:
    """Return whether a parameter has changed; a cast or a move is no change."""
    now = _sum_of_bits(parameter)
    if before is None or now is None or before[0] != now[0]:
        return False
    return not torch.equal(before[1], now[1].to(before[1].device))
