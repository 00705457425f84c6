"""State dicts that keep every precision, say which weights the parameters held, and load all or nothing."""

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.rebuilt.sharding import local, sharded_like
from paceline.rebuilt.state import State, check_saved, name_of, without_unset
from paceline.rebuilt.weights import HOLD, Keeper

# --- Saving -----------------------------------------------------------------------------------------------


def pairs(optimizer: Optimizer, state_dict: dict[str, Any]) -> Iterator[tuple[int, int, Tensor, Any]]:
    """Yield group number, place in it, parameter, and its key in a state dict of the same structure."""
    groups = zip(optimizer.param_groups, state_dict["param_groups"], strict=False)
    for number, (group, packed) in enumerate(groups):
        for i, (parameter, key) in enumerate(zip(group["params"], packed["params"], strict=False)):
            yield number, i, parameter, key


def settled(state: State, parameter: Tensor) -> State:
    """Return a state whose averages do not share memory with a parameter that shows one of them."""
    if "live" not in state:
        return dict(state)
    held = local(parameter.detach())
    shares = {
        key: isinstance(value, Tensor) and local(value).data_ptr() == held.data_ptr() and held.numel() > 0
        for key, value in state.items()
    }
    return {key: value.clone() if shares[key] else value for key, value in state.items()}


def with_live(optimizer: Optimizer, keeper: Keeper, state_dict: dict[str, Any], prefix: str = "") -> Any:
    """Return a state dict to be saved next to a model that holds the average, wherever live is now.

    Whoever loads both has live weights in the parameters then, in whichever order they are loaded.
    """
    if keeper.shown != "live":
        return state_dict
    live = {id(parameter): weights for parameter, weights in keeper.live_weights()}
    state = dict(state_dict["state"])
    for _, _, parameter, key in pairs(optimizer, state_dict):
        if id(parameter) in live and key in state:
            state[key] = {**state[key], f"{prefix}live": live[id(parameter)]}
    groups = [{**group, HOLD: "average"} for group in state_dict["param_groups"]]
    return {**state_dict, "state": state, "param_groups": groups}


# --- Loading ----------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Loaded:
    """What of a saved state is ours, checked and not yet put in."""

    states: dict[Tensor, dict[str, Any]] = field(default_factory=dict)
    hold: str = "live"
    notes: list[str] = field(default_factory=list)
    """What the user should hear once the state is in."""


def read(
    optimizer: Optimizer,
    keeper: Keeper,
    state_dict: dict[str, Any],
    required: tuple[str, ...],
    prefix: str = "",
) -> Loaded:
    """Check a state dict as a whole and return our part of it. Raise ValueError before anything changes."""
    _check_names(optimizer, state_dict)
    groups = state_dict["param_groups"]
    loaded = Loaded(hold=next((group[HOLD] for group in groups if HOLD in group), "live"))
    if keeper.in_block and loaded.hold == "live":  # one saved while the average was shown brings live along
        raise ValueError(
            "load_state_dict() inside averaged_weights: leave the block first; nothing was loaded"
        )
    without = 0
    for number, i, parameter, key in pairs(optimizer, state_dict):
        entries = state_dict["state"].get(key)
        if not isinstance(entries, dict):
            continue
        own = {name[len(prefix) :]: value for name, value in entries.items() if name.startswith(prefix)}
        # torch.distributed.checkpoint may fill entries that a checkpoint lacks with an empty dict.
        own = {name: value for name, value in own.items() if not (isinstance(value, dict) and not value)}
        own = without_unset(own)
        if loaded.hold == "live":
            own.pop("live", None)
        missing = [name for name in keeper.kept if not any(entry.startswith(name) for entry in own)]
        if not own:
            if loaded.hold != "live" and "live" in entries:
                raise ValueError(
                    "this is a state of PACE, saved while the parameters held the average, and attach() "
                    "cannot "
                    "put its live weights back; nothing was loaded. Save after train() or outside "
                    "averaged_weights"
                )
            without += bool(missing and entries)
            continue
        called = name_of(optimizer.param_groups[number], number, i)
        check_saved(parameter, own, called, required)
        _check_live(own, loaded.hold, keeper, parameter, called)
        without += bool(missing and own.get("step", 0) > 0)
        loaded.states[parameter] = own
    for _, parameter, state in keeper.remembered():
        if "live" in state and "live" not in loaded.states.get(parameter, {}):
            raise ValueError(
                "the parameters hold the average now, and this state has no live weights for all of them; "
                "nothing "
                "was loaded. Call train() first"
            )
    if without:
        loaded.notes.append(
            f"the loaded state has no average, or not all of them, of {without} parameter(s); what is "
            "missing begins as the live weights at the next step"
        )
    return loaded


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


def _check_live(own: dict[str, Any], hold: str, keeper: Keeper, parameter: Tensor, name: str) -> None:
    """Refuse what would make training continue from the average, or from weights of another time."""
    if "live" in own:
        return
    if hold != "live" and own.get("step", 0) > 0:
        raise ValueError(
            f"this state was saved while the parameters held the average, and the live weights of {name} "
            f"(its "
            "entry 'live') did not come along; nothing was loaded. By torch.distributed.checkpoint load it "
            "inside "
            "averaged_weights, where a state has that entry: dcp.load reads only what its template has"
        )
    if keeper.shown != "live":
        raise ValueError(
            f"the parameters hold the average now ({name} does), and this state has no live weights to go "
            "with it; nothing was loaded. Call train() or leave averaged_weights, then load weights and state"
        )


@torch.no_grad()
def put_in(loaded: Loaded, keeper: Keeper, memory: MutableMapping[Tensor, State]) -> None:
    """Put a checked state in, copied, in its saved precision: two optimizers never share a tensor."""
    keeper.drop_copies()
    keeper.loaded_live = {}
    keeper.loaded_name = loaded.hold
    for parameter, own in loaded.states.items():
        state: dict[str, Any] = {}
        for name, value in own.items():
            if name == "step":
                count = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
                state[name] = count.to("cpu", torch.float64, copy=True)
            elif name == "live":
                live = value.detach().to(parameter.device, copy=True)
                live = sharded_like(live, parameter)
                parameter.copy_(live)
                keeper.loaded_live[parameter] = live
            elif isinstance(value, Tensor):
                tensor = value.detach().to(parameter.device, copy=True)
                state[name] = sharded_like(tensor, parameter) if value.shape == parameter.shape else tensor
            else:
                state[name] = value
        memory[parameter] = {key: state[key] for key in sorted(state)}
    for group in keeper.groups:
        group[HOLD] = "live"
