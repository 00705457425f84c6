"""What the optimizer remembers of one parameter: keys, shapes and precisions.

step        () float64   this parameter's own optimizer steps
exp_avg     like live    first moment            exp_avg_sq  like live    second moment
average     ≥ float32    control average         returned    ≥ float32    only with return_power
live        like live    only while the parameter shows its average: the weights to go on from
"""

from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


def name_of(group: dict[str, Any], number: int, i: int) -> str:
    names = group.get("param_names")
    return f"parameter '{names[i]}'" if names else f"parameter {i} of group {number}"


def average_dtype(live: Tensor) -> torch.dtype:
    """At least float32: a bfloat16 average stops moving once the averaging rate is below 1/256."""
    return _WIDER.get(live.dtype, live.dtype)


def averages_of(group: dict[str, Any]) -> tuple[str, ...]:
    """The averages that a parameter of this group has."""
    return ("average",) if group["return_power"] is None else ("average", "returned")


def returned_key(state: State) -> str:
    """Which of the two averages is the one that is evaluated and returned."""
    return "returned" if "returned" in state else "average"


def allocate(live: Tensor, group: dict[str, Any]) -> State:
    """All keys at their final shapes; the averages are taken anew at the first step."""
    live = live.detach()
    state = {
        "step": torch.zeros((), dtype=torch.float64, device=step_device(live, group)),
        "exp_avg": torch.zeros_like(live, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(live, memory_format=torch.preserve_format),
        "average": live.to(average_dtype(live), copy=True),
    }
    if group["return_power"] is not None:
        state["returned"] = state["average"].clone()
    return state


def allocate_averages(
    live: Tensor, group: dict[str, Any], wanted: tuple[str, ...], base: dict[str, Any]
) -> State:
    """The memory of a wrapper for a parameter of whose base optimizer this is the state.

    The count goes on from the base's, where it keeps one: wrapped late, averages begin with live, and
    move at the rate of a run that is that old.
    """
    taken = base.get("step", 0)
    step = torch.tensor(float(taken), dtype=torch.float64, device=step_device(live, group))
    state = {"step": step, **{key: live.detach().to(average_dtype(live), copy=True) for key in wanted}}
    return state if taken == 0 else {**state, "unseeded": torch.tensor(True)}


def is_seeded(state: State) -> bool:
    """Whether the averages have values of their own. Until then a parameter's average is live."""
    return "unseeded" not in state and state["step"].item() > 0


def take_averages(live: Tensor, state: State, keys: tuple[str, ...]) -> None:
    """Let the averages be live."""
    for key in keys:
        if key in state and state[key].shape == live.shape and not state[key].is_meta:
            state[key].copy_(live)


def conform(live: Tensor, state: State, group: dict[str, Any], number: int, i: int) -> None:
    """Make the state fit a parameter that was moved, cast or replaced, and a return_power set, since.

    `number` and `i` say which parameter of which group it is, for messages.
    """
    name = name_of(group, number, i)
    if _is_misfit(live, state, "exp_avg", name):
        state.update(allocate(live, group))
    if "average" not in state:  # AdamW's state, carried over by hand
        state["average"] = live.detach().to(average_dtype(live), copy=True)
    for key in ("exp_avg", "exp_avg_sq"):
        _convert(state, key, live.device, live.dtype)
    conform_averages(live, state, group, averages_of(group), name)


def conform_averages(
    live: Tensor, state: State, group: dict[str, Any], wanted: tuple[str, ...], name: str
) -> None:
    """Likewise for the averages alone."""
    if "returned" not in wanted:
        state.pop("returned", None)
    elif "returned" not in state:
        state["returned"] = state["average"].clone()
    for key in wanted:
        if _is_misfit(live, state, key, name):
            state[key] = live.detach().to(average_dtype(live), copy=True)
        _convert(state, key, live.device, average_dtype(live))
    _convert(state, "step", step_device(live, group), torch.float64)


def _is_misfit(live: Tensor, state: State, key: str, name: str) -> bool:
    """Whether an entry has to be made anew for a parameter that changed before its first step."""
    misshapen = state[key].shape != live.shape
    if not misshapen and (not state[key].is_meta or live.is_meta):
        return False
    if state["step"].is_meta or state["step"].item() != 0:
        kind = f"shape {tuple(state[key].shape)}" if misshapen else "no values (meta device)"
        raise RuntimeError(
            f"{name} has shape {tuple(live.shape)} but its optimizer state has {kind}; reload the state "
            "or build a new optimizer"
        )
    return True


def _convert(state: State, key: str, device: torch.device, dtype: torch.dtype) -> None:
    if state[key].dtype != dtype or state[key].device != device:
        state[key] = state[key].to(device, dtype)


def step_device(live: Tensor, group: dict[str, Any]) -> torch.device:
    # A counter on the GPU would cost a launch and a read a step; only graph capture needs it there.
    return live.device if group.get("capturable") else torch.device("cpu")


def real(tensor: Tensor) -> Tensor:
    """A complex parameter is a pair of reals to AdamW, and so to PACE."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def is_expanded(tensor: Tensor) -> bool:
    """Whether several elements share one memory, so that no update in place can be right."""
    return tensor.layout == torch.strided and any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
