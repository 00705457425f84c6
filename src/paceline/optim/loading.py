"""Taking in a saved state, checked as a whole, in its own precision."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.optim.recipe import USUAL, AverageDtype
from paceline.optim.state import (
    State,
    copied,
    keeps,
    lost_its_order,
    name_of,
    parts_of,
    residual_key,
    scale_key,
    seeded,
    step_device,
)
from paceline.optim.storage import scales_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """What one kind of optimizer saves, and what it takes in."""

    prefix: str = ""
    """Of its own entries in the state of a parameter; the others belong to the optimizer underneath."""
    required: tuple[str, ...] = ("step",)
    """Own entries without which a parameter's state cannot be used."""
    reads: str
    """Whose states it loads, for messages."""
    check: Callable[[dict[str, Any]], None]
    """Raises ValueError if a setting of a group is out of range."""
    wanted: Callable[[dict[str, Any]], tuple[str, ...]]
    """The averages that a parameter of a group with these settings must have, in an order that is the same
    on all ranks: what is gathered over ranks is matched by place."""
    scalars: tuple[str, ...] = ()
    """Further own entries, not shaped like the parameter."""
    on_device: bool = True
    """Whether steps may be counted on the device, for capture in a CUDA graph."""
    ignored: frozenset[str] = frozenset()
    """Settings that are not taken from a saved state."""
    packed: Callable[[Tensor, State, dict[str, Any]], State] | None = None
    """The state of a parameter with these live weights as it is saved; None: as it is."""

    @property
    def hold(self) -> str:
        """The group entry that says which weights the parameters held: "live" or not."""
        return f"{self.prefix}parameters_hold"


class Saved:
    """A saved state of one parameter, opaque to torch, which would cast a tensor it can see."""

    def __init__(self, entries: dict[str, Any], prefix: str) -> None:
        self.own = {k[len(prefix) :]: v for k, v in entries.items() if k.startswith(prefix)}
        self.base = {k: v for k, v in entries.items() if not k.startswith(prefix)}


def admit(
    notes: list[str],
    format: Format,
    memory: Mapping[Tensor, State],
    optimizer: Optimizer,
    state_dict: dict[str, Any],
) -> dict[str, Any]:
    """Check a state dict as a whole, fill in settings it lacks, and shield its tensors from casts.

    Adds to `notes` what the user should hear once the state is in.
    """
    groups, state = [], dict(state_dict["state"])
    # Only what belongs to a parameter: what others keep under names of their own passes through.
    for key in (key for saved in state_dict["param_groups"] for key in saved["params"]):
        if isinstance(state.get(key), dict):
            state[key] = Saved(state[key], format.prefix)
    without: dict[str, list[str]] = {}
    _check_order(optimizer.param_groups, state_dict["param_groups"])
    for number, (own, saved) in enumerate(zip(optimizer.param_groups, state_dict["param_groups"])):
        settings = {k: v for k, v in own.items() if k not in ("params", "param_names")}
        settings |= {k: v for k, v in saved.items() if k not in format.ignored}
        if "param_names" in own and _is_matched_by_name(saved):
            settings["param_names"] = own["param_names"]  # the saved ones are in the saved order
        if settings.get("return_power") is None and _asked_to_return(own, optimizer.defaults):
            settings["return_power"] = own["return_power"]  # a state from before it was asked for
        format.check(settings)
        groups.append(settings)
        wanted = format.wanted(settings)
        both = ("average", "returned")
        shaped = {*format.required, *wanted, *both, *map(residual_key, both)} - {"step"}
        shaped |= {"live", "exp_avg"}
        if format.ignored:
            _note_of_other_updates(notes, saved)
        for i, (parameter, key) in enumerate(zip(own["params"], saved["params"])):
            if isinstance(state.get(key), Saved):
                name, entry = name_of(own, number, i), state[key]
                entry.own = _without_leftovers(entry.own, saved, format)
                # Nothing of ours: the state of the optimizer underneath, alone.
                if entry.own or not format.prefix:
                    check_loadable(parameter, entry.own, name, format, shaped)
                    _check_live(entry.own, saved, memory.get(parameter, {}), name, format)
                if parameter.requires_grad and (not entry.own or entry.own["step"] > 0):
                    for average in (key for key in wanted if not keeps(entry.own, key)):
                        without.setdefault(average, []).append(name)
    _note_of_missing(notes, without)
    # What torch refuses next (another number of groups or parameters) must reach it unchanged.
    groups += state_dict["param_groups"][len(groups) :]
    return {**state_dict, "param_groups": groups, "state": state}


def _check_order(own: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Raise ValueError if parameters of the same names stand in another order in the saved groups.

    A state says by their place which parameter is which. Names that the other side does not have at all
    are taken for new names of the same parameters.
    """
    if any(map(_is_matched_by_name, saved)):
        return
    ours, theirs = (
        [
            (f"{i} of group {n}", _plain(x))
            for n, g in enumerate(groups)
            for i, x in enumerate(g["param_names"])
        ]
        if all("param_names" in group for group in groups)
        else []
        for groups in (own, saved)
    )
    both = {name for _, name in ours} & {name for _, name in theirs}
    for (place, name), (_, other) in zip(ours, theirs):
        if name != other and (name in both or other in both):
            raise ValueError(
                f"parameter {place} is '{name}', and in the saved state '{other}'; nothing was loaded. Build "
                "the optimizer with its parameters in the saved order. If only names have changed, take "
                "'param_names' out of the state's groups: parameters are then matched by place"
            )


def _is_matched_by_name(saved: dict[str, Any]) -> bool:
    """Return whether torch.distributed.checkpoint has put a saved group into our order, by names."""
    return any(isinstance(key, str) for key in saved["params"])


def _plain(name: str) -> str:
    """Return a name without what wrappers add to it (torch.compile, DataParallel, checkpointing)."""
    added = ("_orig_mod", "_checkpoint_wrapped_module", "module")
    return ".".join(part for part in name.split(".") if part not in added)


def _asked_to_return(own: dict[str, Any], said: dict[str, Any]) -> bool:
    """Whether a user gave return_power. What suits a gain by itself asks a state for no more than it has."""
    power = own.get("return_power")
    if power is None:
        return False
    return said.get("return_power") is not None or power != USUAL[own["gain"] or "paper"].get("return_power")


def check_loadable(live: Tensor, saved: dict[str, Any], name: str, format: Format, shaped: set[str]) -> None:
    """Raise ValueError if a saved state cannot belong to this parameter."""
    missing = [key for key in format.required if key not in saved]
    if missing:
        raise ValueError(
            f"the saved state of {name} lacks {', '.join(missing)} (it has: {', '.join(saved)}); "
            f"{format.reads}"
        )
    for key in shaped:
        if key in saved and saved[key].shape != live.shape:
            raise ValueError(
                f"the saved {key} of {name} has shape {tuple(saved[key].shape)}, the parameter has "
                f"{tuple(live.shape)}; nothing was loaded"
            )
    for key in ("average", "returned"):
        _check_residual(live, saved, key, name)
    step = saved["step"]
    # Above 256 (2048), counting in bfloat16 (float16) stands still: the true step is lost.
    if isinstance(step, Tensor) and step.dtype in (torch.bfloat16, torch.float16) and step >= 256:
        raise ValueError(
            f"the saved step of {name} is {step.item()} in {step.dtype}, a precision in which counting "
            "stops; cannot tell how many steps were taken"
        )


def _check_residual(live: Tensor, saved: dict[str, Any], key: str, name: str) -> None:
    codes, scale = saved.get(residual_key(key)), saved.get(scale_key(key))
    if codes is None:
        return
    found = None if scale is None else tuple(scale.shape)
    expected = (scales_of(live.numel()),) if codes.dtype == torch.int8 else None
    if codes.dtype not in (torch.int8, torch.bfloat16) or found != expected:
        raise ValueError(
            f"the saved {residual_key(key)} of {name} is {codes.dtype}, with a {scale_key(key)} of shape "
            f"{found}; PACE keeps bfloat16 without one, or int8 with one of shape "
            f"({scales_of(live.numel())},). Nothing was loaded"
        )
    if (reason := lost_its_order(live, saved, key)) and saved["step"] > 0:
        raise ValueError(f"{name} {reason}; nothing was loaded")


def take_in(
    live: Tensor,
    own: dict[str, Any],
    group: dict[str, Any],
    format: Format,
    storage: AverageDtype = "float32",
) -> dict[str, Any]:
    """The saved values in their saved precision, copied: two optimizers never share a tensor.

    They also keep their storage until the next step, for the live weights may not be loaded yet. `storage`
    is for averages that the saved state lacks.
    """
    wanted = format.wanted(group)
    # In a namespace of its own, what is not wanted is of an average that is no longer kept.
    ours = (*wanted, *format.scalars, "unseeded") if format.prefix else own
    state = {
        key: value.detach().to(live.device, copy=True) if isinstance(value, Tensor) else value
        for key, value in own.items()
        if key in ours and key not in ("step", "live", *_ADAMW_ONLY_STATE)
    }
    step = own["step"]
    count = step.detach() if isinstance(step, Tensor) else torch.tensor(float(step), dtype=torch.float64)
    device = step_device(live, group if format.on_device else {})
    state["step"] = count.to(device, torch.float64, copy=True)
    if "returned" in wanted and not keeps(state, "returned") and keeps(state, "average"):
        state.update(copied(state, "average", "returned"))
    for key in wanted:
        if not keeps(state, key):
            state.update(seeded(live, key, storage))
            state["unseeded"] = torch.tensor(True)
    return {key: state[key] for key in sorted(state)}


# Of torch.optim.AdamW, and of no use here.
ADAMW_ONLY_SETTINGS = frozenset({"amsgrad", "fused", "decoupled_weight_decay"})
_ADAMW_ONLY_STATE = {"max_exp_avg_sq"}


def _without_leftovers(own: dict[str, Any], saved: dict[str, Any], format: Format) -> dict[str, Any]:
    """Only what the checkpoint had. torch.distributed.checkpoint may fill keys of ours that it lacks,
    with our own values (full_state_dict) or with an empty dict (flattened); its groups tell."""
    never = set()
    if saved.get(format.hold) == "live":
        never.add("live")
    if "return_power" in saved and saved["return_power"] is None:
        never.update(parts_of("returned"))
    kept = {k: v for k, v in own.items() if k not in never and not (isinstance(v, dict) and not v)}
    # Of two storages, the one that its group names; a state that is saved has no other.
    for name in ("average", "returned"):
        plain, *packed = parts_of(name)
        if plain in kept and packed[0] in kept:
            for key in packed if saved.get("average_dtype", "float32") == "float32" else (plain,):
                kept.pop(key, None)
        # int8 codes and their scale in the place of bfloat16, or the other way round, are told by the codes.
        if packed[0] in kept and kept[packed[0]].dtype != torch.int8:
            kept.pop(packed[1], None)
    return kept


def _check_live(
    entries: dict[str, Any], saved: dict[str, Any], memory: dict[str, Any], name: str, format: Format
) -> None:
    """Refuse what would make training go on from the average, or from weights of another time."""
    if "live" in entries:
        return
    if saved.get(format.hold, "live") != "live" and entries["step"] > 0:
        raise ValueError(
            f"this state was saved while the parameters held the average, and the live weights of {name} "
            "(its entry 'live') did not come along; nothing was loaded. Save after train() or outside "
            "averaged_weights, or call eval() before the state is read into a template"
        )
    if "live" in memory:
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
    # Where the control average is missing too, both start from live; one note is enough.
    if "average" in without:
        without["returned"] = [n for n in without.get("returned", []) if n not in without["average"]]
    for key, names in without.items():
        if names:
            start = "the control average" if key == "returned" else "the live weights at the next step"
            whose = f"{len(names)} parameter(s), first {names[0]}"
            notes.append(f"the loaded state has no '{key}' for {whose}; it starts from {start}")
