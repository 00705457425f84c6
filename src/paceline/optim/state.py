"""The tensors that are kept of each parameter, and how they follow when it is cast, moved or replaced.

.. code-block:: text

    step           () float64              this parameter's own count of steps
    exp_avg        like the parameter      first moment
    exp_avg_sq     like the parameter      second moment
    average        its shape, ≥ float32    the average that the control pulls to, or pushes away from
    returned       its shape, ≥ float32    a second one to return instead, with Control.return_power
    live           like the parameter      the live weights, only while the parameter holds an average

With average_dtype="bfloat16" or "int8", live − average is kept instead of an average (storage.py):

    average_residual, returned_residual    its shape, in that precision
    average_scale, returned_scale          (blocks,) float32, with int8 only

An average whose entries are missing begins as live at the next step. A residual of 0 says the same.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from paceline.optim.settings import AverageDtype
from paceline.optim.sharding import is_sharded, local, sharded_like, whole
from paceline.optim.storage import RESIDUALS, SALTS, decode, encode_, scale_count, unsupported_storage

State = dict[str, Tensor]


class Entry(NamedTuple):
    """One entry of the state of a parameter."""

    dtype: torch.dtype
    shape: tuple[int, ...] | None = None  # None: the parameter's, with its strides and its sharding
    begins_as_live: bool = False  # and not as 0
    on_cpu: bool = False  # also where the parameter is elsewhere; for entries with a shape of their own

    def make(self, live: Tensor) -> Tensor:
        """Return the entry as it begins, for these live weights."""
        live = live.detach()
        if self.begins_as_live:
            return live.to(self.dtype, copy=True)
        if self.shape is None:
            return torch.zeros_like(live, dtype=self.dtype)
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device(live))

    def device(self, live: Tensor) -> torch.device:
        """Return where the entry belongs."""
        return torch.device("cpu") if self.on_cpu else live.device


STEP = Entry(torch.float64, (), on_cpu=True)


def least_float32(live: Tensor) -> torch.dtype:
    """Return the dtype of a whole average: bfloat16 would round away every move at a rate below 1/256."""
    return torch.promote_types(live.dtype, torch.float32)


def average_entry(live: Tensor) -> Entry:
    """Return the entry of an average that is kept whole."""
    return Entry(least_float32(live), begins_as_live=True)


def entries_of_average(name: str, live: Tensor, storage: AverageDtype) -> dict[str, Entry]:
    """Return the entries in which an average of this name is kept."""
    if storage == "float32":
        return {name: average_entry(live)}
    entries = {f"{name}_residual": Entry(RESIDUALS[storage].dtype)}
    if RESIDUALS[storage].has_scale:
        entries[f"{name}_scale"] = Entry(torch.float32, (scale_count(local(live).numel()),))
    return entries


def name_of(group: dict[str, Any], number: int, i: int) -> str:
    """Return what messages call a parameter: its name where the group has names."""
    names = group.get("param_names")
    return f"parameter '{names[i]}'" if names else f"parameter {i} of group {number}"


def named_parameters(group: dict[str, Any], number: int) -> list[tuple[str, Tensor]]:
    """Return the parameters of a group, but for lazy ones, with what messages call them."""
    return [(name_of(group, number, i), p) for i, p in enumerate(group["params"]) if not is_lazy(p)]


def unsupported_averages(groups: list[dict[str, Any]]) -> str | None:
    """Return a message about the first parameter whose average cannot be kept as its group asks, or None."""
    for number, group in enumerate(groups):
        for name, parameter in named_parameters(group, number):
            reason = unsupported_storage(parameter, group.get("average_dtype", "float32"))
            if reason is not None:
                return f"{name} {reason}"
    return None


# --- Averages in any storage ----------------------------------------------------------------------------


def storage_of(state: State, name: str) -> AverageDtype | None:
    """Return how an average is kept; None if it is not there."""
    if name in state:
        return "float32"
    codes = state.get(f"{name}_residual")
    if codes is None:
        return None
    return next(storage for storage, residual in RESIDUALS.items() if residual.dtype == codes.dtype)


def average_of(state: State, name: str, live: Tensor) -> Tensor:
    """Return an average, given the live weights it belongs to.

    One that is kept whole is returned itself. Of a residual a new tensor is made: whoever moves that calls
    `keep_average_` then.
    """
    kept = state[name if name in state else f"{name}_residual"]
    if kept.shape != live.shape:
        raise RuntimeError(
            f"a parameter has shape {tuple(live.shape)} and its average {tuple(kept.shape)}; it was resized: "
            "reload the state or build a new optimizer"
        )
    if name in state:
        return kept
    scale = state.get(f"{name}_scale")
    if scale is not None and is_sharded(kept):
        # Sharded parameters keep no scales, so this was loaded from one process: its blocks are those of
        # the whole tensor, and it is about to be converted.
        residual = sharded_like(decode(whole(kept), whole(scale)), kept)
    else:
        residual = decode(kept, scale)
    return live.detach() - residual.to(live.device)


def keep_average_(state: State, name: str, live: Tensor, average: Tensor) -> None:
    """Keep an average that `average_of` made, as a residual from the live weights of now.

    Call it after the step is counted: the count seeds the random rounding.
    """
    codes = local(state[f"{name}_residual"])
    residual = torch.empty_like(codes, dtype=torch.float32)
    torch.sub(local(live.detach()), local(average), out=residual)
    encode_(codes, state.get(f"{name}_scale"), residual, state["step"], SALTS[name])


def _convert_average(state: State, name: str, live: Tensor, storage: AverageDtype) -> None:
    """Keep an average in another storage, or in another memory layout."""
    average = average_of(state, name, live).to(live.device, least_float32(live))
    for key in (name, f"{name}_residual", f"{name}_scale"):
        state.pop(key, None)
    if storage == "float32":
        state[name] = average
    else:
        state.update(
            {key: entry.make(live) for key, entry in entries_of_average(name, live, storage).items()}
        )
        keep_average_(state, name, live, average)


# --- A state that matches its parameter -------------------------------------------------------------------


def follow_(live: Tensor, state: State, entries: dict[str, Entry], storage: AverageDtype, name: str) -> None:
    """Make a state match its settings and its parameter, which may be new, or have been cast or moved.

    Raise RuntimeError if steps were taken with weights of another shape, or on the meta device.
    """
    for average in SALTS:
        codes = state.get(f"{average}_residual")
        # Blocks and random bits go by the order in memory: new strides mean to encode again.
        restrided = codes is not None and codes.shape == live.shape and not _lies_like(codes, live)
        if restrided or storage_of(state, average) not in (None, storage):
            _convert_average(state, average, live, storage)
    _carry_over(state, entries)
    for key in state.keys() - entries.keys() - {"live"}:
        del state[key]
    for key, entry in entries.items():  # "step" comes first
        kept = state.get(key)
        shape = live.shape if entry.shape is None else entry.shape
        is_on_meta = kept is not None and kept.is_meta and not live.is_meta
        if kept is not None and (is_on_meta or kept.shape != shape):
            if state["step"].is_meta or state["step"].item() != 0:
                found = "no values (meta device)" if is_on_meta else f"shape {tuple(kept.shape)}"
                raise RuntimeError(
                    f"{name} has shape {tuple(live.shape)} but its {key} has {found}; reload the state or "
                    "build a new optimizer"
                )
            kept = None
        if kept is None:
            state[key] = entry.make(live)
            continue
        is_alike = (kept.dtype, kept.device) == (entry.dtype, entry.device(live))
        if not is_alike or (entry.shape is None and not _lies_like(kept, live)):
            state[key] = entry.make(live).copy_(kept)


def _carry_over(state: State, entries: Mapping[str, Entry]) -> None:
    """Keep the returned average where a control has one average more than the one before it, or one less."""
    had, has = (any(key.startswith("returned") for key in kept) for kept in (state, entries))
    if has and not had:
        own = {key: value for key, value in state.items() if key.startswith("average")}
        state.update({key.replace("average", "returned", 1): value.clone() for key, value in own.items()})
    elif had and not has and any(key.startswith("average") for key in entries):
        for key in [key for key in state if key.startswith("returned")]:
            state[key.replace("returned", "average", 1)] = state.pop(key)


def _lies_like(tensor: Tensor, live: Tensor) -> bool:
    """Return whether an entry has the strides it would be made with: a kernel walks both in memory order."""
    if tensor.stride() == live.stride():
        return True
    return tensor.stride() == torch.empty_like(live.detach(), device="meta").stride()
