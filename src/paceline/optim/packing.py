"""Weights and state that are kept in few bits or elsewhere, opened for a path that knows none of it.

What one pass over memory reads and writes as it is kept, other paths get in plain precision, chunk by chunk;
after the step it is put back.
"""

from typing import Any

import torch
from torch import Tensor

from paceline.optim.rule import Slot
from paceline.optim.sharded import mesh_of
from paceline.optim.state import State, average_of, in_full, is_split, keep_average_
from paceline.optim.storage import SALTS, encode_, split_


def is_packed(slot: Slot, group: dict[str, Any]) -> bool:
    """Whether anything of a slot has to be opened."""
    kept_plainly = group["average_dtype"] == "float32" and slot.average.device == slot.live.device
    return not kept_plainly or is_rounded(slot.live, group) or slot.grad.dtype != slot.live.dtype


def is_rounded(live: Tensor, group: dict[str, Any]) -> bool:
    """Whether weights are stepped in float32 and kept in bfloat16."""
    return live.dtype == torch.bfloat16 and group["rounding"] != "nearest"


def refusal(live: Tensor, group: dict[str, Any]) -> str | None:
    """Why a parameter cannot be opened, in words that follow its name; None if it can."""
    if is_rounded(live, group) and mesh_of(live) is not None:
        return (
            "is sharded over several ranks, and the step needs more of it than a rank's part "
            '(gain="relative", or a gradient that is cut in another way), which rounding='
            f'{group["rounding"]!r} excludes; use gain="scaled" or rounding="nearest"'
        )
    return None


def opened(slot: Slot, state: State, group: dict[str, Any]) -> Slot:
    """A slot whose arrays are as precise as the update is made."""
    live, grad = slot.live, slot.grad
    if is_rounded(live, group):
        live = in_full(live, state).to(torch.float32)
    return Slot(
        live=live,
        grad=grad.to(live.dtype),
        exp_avg=None if slot.exp_avg is None else slot.exp_avg.to(live.dtype),
        exp_avg_sq=slot.exp_avg_sq.to(live.dtype),
        average=_average(slot.average, "average", slot, state),
        returned=None if slot.returned is None else _average(slot.returned, "returned", slot, state),
        step=slot.step,
    )


def _average(held: Tensor, name: str, slot: Slot, state: State) -> Tensor:
    return held.to(slot.live.device) if name in state else average_of(state, name, slot.live)


def close_(slot: Slot, done: Slot, state: State, group: dict[str, Any]) -> None:
    """Put what a step made of an opened slot back where it is kept."""
    if is_split(slot.live, group):
        split_(slot.live.detach(), state["live_rest"], done.live)
    elif is_rounded(slot.live, group):
        for name in ("live", "exp_avg", "exp_avg_sq"):
            kept, value = getattr(slot, name), getattr(done, name)
            if kept is not None:
                rounded = torch.empty_like(value, dtype=torch.bfloat16)  # kept may have gaps
                encode_(rounded, None, value, slot.step, SALTS[name])
                kept.detach().copy_(rounded)
    for name, held, average in (
        ("average", slot.average, done.average),
        ("returned", slot.returned, done.returned),
    ):
        if held is None or average is None or average is held:
            continue
        if name in state:
            held.copy_(average)
        else:
            keep_average_(state, name, slot.live, average)
