"""Taking in a saved state: PACE's own or torch.optim.AdamW's, checked as a whole, in its own precision."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.optim import recipe
from paceline.optim.state import State, average_dtype, name_of, step_device

_SHAPED = ("exp_avg", "exp_avg_sq", "average", "returned", "live")


def check_loadable(live: Tensor, saved: dict[str, Any], name: str) -> None:
    """Raise ValueError if a saved state cannot belong to this parameter."""
    missing = [key for key in ("step", "exp_avg", "exp_avg_sq") if key not in saved]
    if missing:
        raise ValueError(
            f"the saved state of {name} lacks {', '.join(missing)} (it has: {', '.join(saved)}); "
            "PACE loads its own states and those of torch.optim.AdamW"
        )
    for key in _SHAPED:
        if key in saved and saved[key].shape != live.shape:
            raise ValueError(
                f"the saved {key} of {name} has shape {tuple(saved[key].shape)}, the parameter has "
                f"{tuple(live.shape)}; nothing was loaded"
            )
    step = saved["step"]
    # Above 256 (2048), counting in bfloat16 (float16) stands still: the true step is lost.
    if isinstance(step, Tensor) and step.dtype in (torch.bfloat16, torch.float16) and step >= 256:
        raise ValueError(
            f"the saved step of {name} is {step.item()} in {step.dtype}, a precision in which counting "
            "stops; cannot tell how many steps were taken"
        )


def take_in(live: Tensor, saved: dict[str, Any], group: dict[str, Any]) -> State:
    """The saved values in their saved precision, copied: two optimizers never share a tensor."""
    step = saved["step"]
    count = step.detach() if isinstance(step, Tensor) else torch.tensor(float(step))
    state = {"step": count.to(step_device(live, group), torch.float64, copy=True)}
    for key in ("exp_avg", "exp_avg_sq", "average", "returned"):
        if key in saved:
            state[key] = saved[key].detach().to(live.device, copy=True)
    if "average" not in state:
        state["average"] = live.detach().to(average_dtype(live), copy=True)
    if group["return_power"] is None:
        state.pop("returned", None)
    elif "returned" not in state:
        state["returned"] = state["average"].clone()
    return state


class Saved:
    """A saved state of one parameter, opaque to torch, which would cast a tensor it can see."""

    def __init__(self, entries: dict[str, Any]) -> None:
        self.entries = entries


# Settings of torch.optim.AdamW that PACE has no use for.
_ADAMW_ONLY = {"amsgrad", "fused", "decoupled_weight_decay"}


def admit(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Check a state dict as a whole, fill in settings it lacks, and shield its tensors from casts."""
    groups, state = [], dict(state_dict["state"])
    for number, (own, saved) in enumerate(zip(optimizer.param_groups, state_dict["param_groups"])):
        settings = {k: v for k, v in own.items() if k not in ("params", "param_names")}
        settings |= {k: v for k, v in saved.items() if k not in _ADAMW_ONLY}
        if settings["return_power"] is None:  # a state from before it was asked for does not undo it
            settings["return_power"] = own["return_power"]
        recipe.check(settings)
        groups.append(settings)
        for i, (parameter, key) in enumerate(zip(own["params"], saved["params"])):
            if key not in state:
                continue
            name, entries = name_of(own, number, i), state[key]
            check_loadable(parameter, entries, name)
            if saved.get("parameters_hold") == "average" and entries["step"] > 0 and "live" not in entries:
                raise ValueError(
                    f"this state was saved while the parameters held the average, and the live weights of "
                    f"{name} (its entry 'live') did not come along; nothing was loaded. Save after train() "
                    "or outside averaged_weights, or call eval() before the state is read into a template"
                )
    # What torch refuses next (another number of groups or parameters) must reach it unchanged.
    groups += state_dict["param_groups"][len(groups) :]
    return {
        **state_dict,
        "param_groups": groups,
        "state": {k: Saved(v) if isinstance(v, dict) else v for k, v in state.items()},
    }


def warn_of_missing(without: dict[str, list[str]]) -> None:
    ends = {
        "average": "it starts from the live weights at the next step",
        "returned": "it starts from the control average",
    }
    # Where the control average is missing too, both start from live; one warning is enough.
    without["returned"] = [name for name in without["returned"] if name not in without["average"]]
    for key, names in without.items():
        if names:
            warnings.warn(
                f"the loaded state has no '{key}' average for {len(names)} parameter(s), first "
                f"{names[0]}; {ends[key]}",
                stacklevel=9,
            )
