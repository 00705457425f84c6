"""State dicts that keep every precision, say which weights the parameters held, and load all or nothing."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.optim.settings import Control, check
from paceline.optim.sharding import any_nonzero, sharded_like, whole
from paceline.optim.state import State, name_of
from paceline.optim.storage import RESIDUALS, scale_count
from paceline.optim.weights import HOLD, Keeper

KEPT_ON_LOAD = ("average_dtype", "foreach", "fused")
"""Settings that say how to compute, not what: a load leaves them."""

# --- Saving -----------------------------------------------------------------------------------------------


def pairs(optimizer: Optimizer, state_dict: dict[str, Any]) -> Iterator[tuple[int, int, Tensor, Any]]:
    """Yield group number, place in it, parameter, and its key in a state dict of the same structure."""
    groups = zip(optimizer.param_groups, state_dict["param_groups"], strict=False)
    for number, (group, packed) in enumerate(groups):
        for i, (parameter, key) in enumerate(zip(group["params"], packed["params"], strict=False)):
            yield number, i, parameter, key


def plain_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups of a state dict with controls as plain values, which weights-only loading takes."""
    for group in groups:
        check({name: group[name] for name in ("control",) if group.get(name) is not None})
    return [
        {**group, "control": asdict(group["control"])} if group.get("control") is not None else group
        for group in groups
    ]


# --- Loading ----------------------------------------------------------------------------------------------


Loaded = tuple[dict[Tensor, State], list[str]]
"""What of a saved state is ours, checked, and what the user should hear once it is in."""


def read(
    optimizer: Optimizer,
    keeper: Keeper,
    state_dict: dict[str, Any],
    required: tuple[str, ...],
    prefix: str = "",
) -> Loaded:
    """Check a state dict as a whole and return our part of it. Raise ValueError before anything changes."""
    _check_names(optimizer, state_dict)
    was_shown = any(group.get(HOLD, "live") != "live" for group in state_dict["param_groups"])
    if keeper.in_block and not was_shown:  # one saved while the average was shown brings live along
        raise ValueError(
            "load_state_dict() inside averaged_weights: leave the block first; nothing was loaded"
        )
    states: dict[Tensor, State] = {}
    without = 0
    for number, i, parameter, key in pairs(optimizer, state_dict):
        entries = state_dict["state"].get(key)
        if not isinstance(entries, dict):
            continue
        own = _own(entries, prefix, with_live=was_shown)
        if own:
            name = name_of(optimizer.param_groups[number], number, i)
            _check_saved(parameter, own, name, required, was_shown)
            states[parameter] = own
        elif was_shown and "live" in entries:
            raise ValueError(
                "this is a state of PACE, saved while the parameters held the average, and attach() "
                "cannot put its live weights back; nothing was loaded. Save after train() or outside "
                "averaged_weights"
            )
        has_begun = own["step"] > 0 if own else bool(entries)
        needed = _needed(keeper, optimizer.param_groups[number], state_dict["param_groups"][number])
        lacks = any(not any(entry.startswith(name) for entry in own) for name in needed)
        without += bool(has_begun and lacks)
    holders = [parameter for _, parameter, state in keeper.remembered() if "live" in state]
    if keeper.shown != "live":
        holders += states
    if not all("live" in states.get(parameter, {}) for parameter in holders):
        raise ValueError(
            "the parameters hold the average now, and this state has no live weights for all of them; "
            "nothing was loaded. Call train() or leave averaged_weights, then load weights and state"
        )
    note = (
        f"the loaded state has no average, or not all of them, of {without} parameter(s); what is missing "
        "begins as the live weights, or as the average that is there, at the next step"
    )
    return states, [note] if without else []


def merged_groups(
    ours: Iterable[dict[str, Any]], state_dict: dict[str, Any], check: Callable[[dict[str, Any]], object]
) -> list[dict[str, Any]]:
    """Return saved groups as they are loaded: checked, and with our settings where they lack them."""
    saved: list[dict[str, Any]] = state_dict["param_groups"]
    groups = []
    for own, its in zip(ours, saved, strict=False):
        group = {**own, **its, **{name: own[name] for name in KEPT_ON_LOAD if name in own}}
        if "control" in group:
            group["control"] = _loaded_control(own, its)
        check(group)
        groups.append(group)
    # What torch refuses next (another number of groups or parameters) must reach it unchanged.
    return groups + saved[len(groups) :]


def _needed(keeper: Keeper, own: dict[str, Any], saved: dict[str, Any]) -> tuple[str, ...]:
    """Return what the names of the averages begin with that a group keeps after a load."""
    control = _loaded_control(own, saved)
    if "control" not in own or control is None:
        return keeper.rule.kept
    return (*keeper.rule.kept, *control.averages)


def _loaded_control(own: dict[str, Any], saved: dict[str, Any]) -> Control | None:
    """Return the control that a group has after a load: the saved one, or else its own."""
    control = saved.get("control") or own.get("control")
    return Control(**control) if isinstance(control, Mapping) else control


def _own(entries: dict[str, Any], prefix: str, with_live: bool) -> dict[str, Any]:
    """Return the entries of ours that have a value."""
    own = {name.removeprefix(prefix): value for name, value in entries.items() if name.startswith(prefix)}
    # torch.distributed.checkpoint may fill entries that a checkpoint lacks with an empty dict.
    own = {name: value for name, value in own.items() if isinstance(value, Tensor) or name == "step"}
    return _without_unset({name: value for name, value in own.items() if with_live or name != "live"})


def _check_names(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Refuse a state of parameters in another order, where both sides have names."""
    for own, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        ours, theirs = own.get("param_names"), saved.get("param_names")
        if ours and theirs and len(ours) == len(theirs):
            for here, there in zip(ours, theirs, strict=True):
                if here != there:
                    raise ValueError(
                        f"the saved state has parameter '{there}' in the place of '{here}': its parameters "
                        "are in another order or of another model; nothing was loaded"
                    )


def _check_saved(
    live: Tensor, saved: dict[str, Any], name: str, required: tuple[str, ...], was_shown: bool
) -> None:
    """Raise ValueError if a saved state cannot belong to this parameter."""
    missing = [key for key in required if key not in saved]
    if missing:
        raise ValueError(f"the saved state of {name} lacks {', '.join(missing)} (it has: {', '.join(saved)})")
    if was_shown and "live" not in saved and saved["step"] > 0:
        raise ValueError(
            f"this state was saved while the parameters held the average, and the live weights of {name} "
            "(its entry 'live') did not come along; nothing was loaded. By torch.distributed.checkpoint "
            "load it inside averaged_weights, where a state has that entry: dcp.load reads only what its "
            "template has"
        )
    for key, value in saved.items():
        if key == "step" or key.endswith("_scale"):
            continue
        found, expected = tuple(value.shape), tuple(live.shape)
        if found != expected:
            raise ValueError(
                f"the saved {key} of {name} has shape {found}, the parameter has {expected}; nothing was "
                "loaded"
            )
        if key.endswith("_residual"):
            scale, blocks = saved.get(key.replace("_residual", "_scale")), (scale_count(live.numel()),)
            scales = None if scale is None else tuple(scale.shape)
            known = [(each.dtype, blocks if each.has_scale else None) for each in RESIDUALS.values()]
            if (value.dtype, scales) not in known:
                raise ValueError(
                    f"the saved {key} of {name} is {value.dtype} with scales of shape {scales}; expected one "
                    f"of {known}; nothing was loaded"
                )
    step = saved.get("step")
    if isinstance(step, Tensor) and step.dtype in (torch.bfloat16, torch.float16) and step >= 256:
        raise ValueError(
            f"the saved step of {name} is {step.item()} in {step.dtype}, a precision in which counting "
            "stops; the true count is lost"
        )


@torch.inference_mode(False)  # in which new tensors could not be written to later
@torch.no_grad()
def put_in(states: dict[Tensor, State], keeper: Keeper) -> None:
    """Put checked states in, copied, in their saved precision: two optimizers never share a tensor."""
    keeper.drop_copies()
    keeper.loaded_live = {}
    for parameter, own in states.items():
        state: dict[str, Any] = {}
        for name, value in own.items():
            if name == "step":
                state[name] = torch.as_tensor(value, dtype=torch.float64).to("cpu", copy=True)
            else:
                tensor = value.detach().to(parameter.device, copy=True)
                state[name] = sharded_like(tensor, parameter) if value.shape == parameter.shape else tensor
        live = state.pop("live", None)
        if live is not None:
            parameter.copy_(live)
            keeper.loaded_live[parameter] = live
        keeper.memory[parameter] = {key: state[key] for key in sorted(state)}
    for group in keeper.groups:
        group[HOLD] = "live"
    if keeper.in_block:
        keeper.show(*keeper.asked)  # what follows in the block computes with the average


# --- What torch.distributed.checkpoint leaves -------------------------------------------------------------

_NO_AVERAGE = ("step", "exp_avg", "exp_avg_sq", "live")


def is_dummy_step(groups: list[dict[str, Any]]) -> bool:
    """Return whether torch.distributed.checkpoint makes this step, to learn the entries of a state."""
    if any(float(group.get("lr", 1.0)) != 0 for group in groups):
        return False
    return not any_nonzero(parameter.grad for group in groups for parameter in group["params"])


def unset_(state: State) -> None:
    """Mark averages as without a value, by NaN.

    A step of torch.distributed.checkpoint has made them. Where the state that it then loads lacks them (it is
    AdamW's, or has them in another storage) it leaves ours, on some ranks or all, and in the same memory.
    """
    for key, value in state.items():
        if key not in _NO_AVERAGE and value.is_floating_point():
            value.fill_(torch.nan)


def _without_unset(saved: dict[str, Any]) -> dict[str, Any]:
    """Return saved entries without averages that have no value; on all ranks alike."""
    unset = {
        key
        for key, value in saved.items()
        if key not in _NO_AVERAGE and value.is_floating_point() and value.numel()
        if bool(whole(value.detach().isnan().all()))
    }
    # Codes that are integers cannot be NaN; their scale is.
    unset |= {key for key in saved if key.replace("_residual", "_scale") in unset}
    return {key: value for key, value in saved.items() if key not in unset}
