"""Taking in a saved state: PACE's own or torch.optim.AdamW's, checked as a whole, in its own precision."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.optim import recipe
from paceline.optim.state import average_dtype, name_of, step_device

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


def take_in(live: Tensor, saved: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """The saved values in their saved precision, copied: two optimizers never share a tensor."""
    state = {
        key: value.detach().to(live.device, copy=True) if isinstance(value, Tensor) else value
        for key, value in saved.items()
        if key not in ("step", "live", *_ADAMW_ONLY_STATE)
    }
    step = saved["step"]
    count = step.detach() if isinstance(step, Tensor) else torch.tensor(float(step), dtype=torch.float64)
    state["step"] = count.to(step_device(live, group), torch.float64, copy=True)
    if "average" not in state:
        state["average"] = live.detach().to(average_dtype(live), copy=True)
        state["unseeded"] = torch.tensor(True)
    if group["return_power"] is None:
        state.pop("returned", None)
    elif "returned" not in state:
        state["returned"] = state["average"].clone()
    return state


class Saved:
    """A saved state of one parameter, opaque to torch, which would cast a tensor it can see."""

    def __init__(self, entries: dict[str, Any]) -> None:
        self.entries = entries


# Of torch.optim.AdamW, and of no use here.
_ADAMW_ONLY_SETTINGS = {"amsgrad", "fused", "decoupled_weight_decay"}
_ADAMW_ONLY_STATE = {"max_exp_avg_sq"}


def admit(notes: list[str], optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Check a state dict as a whole, fill in settings it lacks, and shield its tensors from casts.

    Adds to `notes` what the user should hear once the state is in.
    """
    groups, state = [], dict(state_dict["state"])
    without: dict[str, list[str]] = {"average": [], "returned": []}
    for number, (own, saved) in enumerate(zip(optimizer.param_groups, state_dict["param_groups"])):
        settings = {k: v for k, v in own.items() if k not in ("params", "param_names")}
        settings |= {k: v for k, v in saved.items() if k not in _ADAMW_ONLY_SETTINGS}
        if settings["return_power"] is None:  # a state from before it was asked for does not undo it
            settings["return_power"] = own["return_power"]
        recipe.check(settings)
        groups.append(settings)
        _note_of_other_updates(notes, saved)
        for i, (parameter, key) in enumerate(zip(own["params"], saved["params"])):
            if key in state:
                state[key] = _without_leftovers(state[key], saved)
                name, entries = name_of(own, number, i), state[key]
                check_loadable(parameter, entries, name)
                _check_live(entries, saved, optimizer.state.get(parameter, {}), name)
                if entries["step"] > 0:
                    for average in _wanted(settings) - entries.keys():
                        without[average].append(name)
    _note_of_missing(notes, without)
    # What torch refuses next (another number of groups or parameters) must reach it unchanged.
    groups += state_dict["param_groups"][len(groups) :]
    return {
        **state_dict,
        "param_groups": groups,
        "state": {k: Saved(v) if isinstance(v, dict) else v for k, v in state.items()},
    }


def _without_leftovers(entries: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Only what the checkpoint had. torch.distributed.checkpoint may fill keys of ours that it lacks,
    with our own values (full_state_dict) or with an empty dict (flattened); its groups tell."""
    never = set()
    if saved.get("parameters_hold") == "live":
        never.add("live")
    if "return_power" in saved and saved["return_power"] is None:
        never.add("returned")
    return {k: v for k, v in entries.items() if k not in never and not (isinstance(v, dict) and not v)}


def _wanted(settings: dict[str, Any]) -> set[str]:
    return {"average"} if settings["return_power"] is None else {"average", "returned"}


def _check_live(entries: dict[str, Any], saved: dict[str, Any], own: dict[str, Any], name: str) -> None:
    """Refuse what would make training go on from the average, or from weights of another time."""
    if "live" in entries:
        return
    if saved.get("parameters_hold") == "average" and entries["step"] > 0:
        raise ValueError(
            f"this state was saved while the parameters held the average, and the live weights of {name} "
            "(its entry 'live') did not come along; nothing was loaded. Save after train() or outside "
            "averaged_weights, or call eval() before the state is read into a template"
        )
    if "live" in own:
        raise ValueError(
            f"the parameters hold the average now ({name} does), and this state has no live weights to go "
            "with it; nothing was loaded. Call train() or leave averaged_weights, then load weights and state"
        )


def _note_of_other_updates(notes: list[str], saved: dict[str, Any]) -> None:
    if saved.get("amsgrad"):
        notes.append("the loaded state is of AMSGrad; PACE goes on without its running maximum")
    if saved.get("decoupled_weight_decay") is False and saved.get("weight_decay"):
        notes.append(
            "the loaded state is of Adam with weight decay in the gradient; PACE decouples it as AdamW does"
        )


def _note_of_missing(notes: list[str], without: dict[str, list[str]]) -> None:
    ends = {
        "average": "it starts from the live weights at the next step",
        "returned": "it starts from the control average",
    }
    # Where the control average is missing too, both start from live; one note is enough.
    without["returned"] = [name for name in without["returned"] if name not in without["average"]]
    for key, names in without.items():
        if names:
            whose = f"{len(names)} parameter(s), first {names[0]}"
            notes.append(f"the loaded state has no '{key}' for {whose}; {ends[key]}")
