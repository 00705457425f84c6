"""Averages in few bits, and gradients of another precision, opened for a path in plain precision.

What one pass over memory reads and writes as it is kept, other paths get chunk by chunk; after the step it is
put back.
"""

from typing import Any

from torch import Tensor

from paceline.optim.rule import Slot
from paceline.optim.state import State, average_of, keep_average_


def is_packed(slot: Slot, group: dict[str, Any]) -> bool:
    """Whether anything of a slot has to be opened."""
    return group["average_dtype"] != "float32" or slot.grad.dtype != slot.live.dtype


def opened(slot: Slot, state: State) -> Slot:
    """Return a slot whose arrays are as precise as the update is made."""
    return slot._replace(
        grad=slot.grad.to(slot.live.dtype),
        average=_average(slot.average, "average", slot, state),
        returned=None if slot.returned is None else _average(slot.returned, "returned", slot, state),
    )


def _average(held: Tensor, name: str, slot: Slot, state: State) -> Tensor:
    return held if name in state else average_of(state, name, slot.live)


def close_(slot: Slot, done: Slot, state: State) -> None:
    """Put the averages that a step has moved back where they are kept."""
    for name, average in (("average", done.average), ("returned", done.returned)):
        if average is not None and name not in state:
            keep_average_(state, name, slot.live, average)
