"""What is kept of each parameter, as one table: allocate, follow a cast or move, check a load.

.. code-block:: text

    step         () float64        this parameter's own count of steps
    exp_avg      like live         first moment        exp_avg_sq   like live   second moment
    average      ≥ float32         steers              returned     ≥ float32   if a second average is
    returned live         like live         only while the parameter shows an average: the weights to
    continue from

With average_dtype="bfloat16" or "int8", live − average instead of an average (storage.py):

    average_residual, returned_residual    like live, in that precision
    average_scale, returned_scale          (blocks,) float32, with int8 only

An average whose entries are missing begins as live at the next step.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.rebuilt.settings import AverageDtype
from paceline.rebuilt.sharding import is_sharded, local, sharded_like, whole
from paceline.rebuilt.storage import SALTS, STORAGES, decode, encode_, scales_of

State = dict[str, Tensor]

_NO_AVERAGE = ("step", "exp_avg", "exp_avg_sq", "live")


class Entry(NamedTuple):
    """One entry of the state of a parameter."""

    dtype: torch.dtype
    shape: tuple[int, ...] | None = None
    """None: the parameter's, with its strides and its sharding."""
    is_average: bool = False
    """Whether it begins as live and not as 0."""
    on_host: bool = False
    """Whether it stays in the host's memory."""

    def of(self, live: Tensor) -> Tensor:
        """Return the entry as it begins, beside these live weights."""
        live = live.detach()
        if self.is_average:
            return live.to(self.dtype, copy=True)
        if self.shape is None:
            return torch.zeros_like(live, dtype=self.dtype, memory_format=torch.preserve_format)
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device(live))

    def device(self, live: Tensor) -> torch.device:
        """Return where the entry is kept."""
        return torch.device("cpu") if self.on_host else live.device


def average_dtype(live: Tensor) -> torch.dtype:
    """Return at least float32: an average in bfloat16 stops once its rate is below 1/256."""
    return torch.promote_types(live.dtype, torch.float32)


def entries_of_average(name: str, live: Tensor, storage: AverageDtype) -> dict[str, Entry]:
    """Return the entries in which an average of this name is kept."""
    if storage == "float32":
        return {name: Entry(average_dtype(live), is_average=True)}
    residual = {f"{name}_residual": Entry(STORAGES[storage].dtype)}
    if storage == "bfloat16":
        return residual
    return {**residual, f"{name}_scale": Entry(torch.float32, (scales_of(local(live).numel()),))}


def expected(
    live: Tensor, averages: tuple[str, ...], storage: AverageDtype, *, moments: bool, on_device: bool = False
) -> dict[str, Entry]:
    """Return all entries of a parameter's state; `on_device`: steps are counted on the device."""
    entries = {"step": Entry(torch.float64, (), on_host=not on_device)}
    if moments:
        entries |= {"exp_avg": Entry(live.dtype), "exp_avg_sq": Entry(live.dtype)}
    for name in averages:
        entries |= entries_of_average(name, live, storage)
    return entries


def name_of(group: dict[str, Any], number: int, i: int) -> str:
    """Return what messages call a parameter: its name where the group has names."""
    names = group.get("param_names")
    return f"parameter '{names[i]}'" if names else f"parameter {i} of group {number}"


def unsupported_storage(live: Tensor, storage: AverageDtype) -> str | None:
    """Return why an average of these weights cannot be kept so, or None."""
    if storage == "float32":
        return None
    if live.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return (
            f"is {live.dtype}; average_dtype={storage!r} is for float32, bfloat16 and float16 parameters; "
            'give it a group with average_dtype="float32"'
        )
    if storage == "int8" and is_sharded(live):
        return (
            "is sharded over several ranks, which would cut the blocks of average_dtype='int8'; use "
            "average_dtype='bfloat16'"
        )
    return None


# --- Averages in any storage ----------------------------------------------------------------------------


def storage_of(state: State, name: str) -> AverageDtype | None:
    """Return how an average is kept; None if it is not there."""
    if name in state:
        return "float32"
    codes = state.get(f"{name}_residual")
    return None if codes is None else "int8" if codes.dtype == torch.int8 else "bfloat16"


def is_begun(state: State, name: str) -> bool:
    """Return whether an average has a value of its own; until then it is live."""
    return storage_of(state, name) is not None and state["step"].item() > 0


def average_of(state: State, name: str, live: Tensor) -> Tensor:
    """Return an average next to these live weights: the one that is kept, or a new tensor."""
    kept = state[name if name in state else f"{name}_residual"]
    if kept.shape != live.shape:
        raise RuntimeError(
            f"a parameter has shape {tuple(live.shape)} and its average {tuple(kept.shape)}; it was resized: "
            "reload the state or build a new optimizer"
        )
    if name in state:
        return kept
    codes, scale = state[f"{name}_residual"], state.get(f"{name}_scale")
    if scale is not None and is_sharded(codes):
        # Loaded from one process into an optimizer that will keep it otherwise: its blocks are of the whole.
        residual = sharded_like(decode(whole(codes), whole(scale)), codes)
    else:
        residual = decode(codes, scale)
    return live.detach() - residual.to(live.device)


def keep_average_(state: State, name: str, live: Tensor, average: Tensor) -> None:
    """Write an average that `average_of` made and a step has moved, next to the live weights it left."""
    codes = local(state[f"{name}_residual"])
    residual = torch.empty_like(codes, dtype=torch.float32)
    torch.sub(local(live.detach()), local(average), out=residual)
    encode_(codes, state.get(f"{name}_scale"), residual, state["step"], SALTS[name])


def _convert_average(state: State, name: str, live: Tensor, storage: AverageDtype) -> None:
    """Keep an average in another storage."""
    average = average_of(state, name, live).to(live.device, average_dtype(live))
    for key in (name, f"{name}_residual", f"{name}_scale"):
        state.pop(key, None)
    if storage == "float32":
        state[name] = average
    else:
        state.update({key: entry.of(live) for key, entry in entries_of_average(name, live, storage).items()})
        keep_average_(state, name, live, average)


# --- The three loops over the table -----------------------------------------------------------------------


def allocate(live: Tensor, entries: dict[str, Entry]) -> State:
    """Return the state of a parameter before its first step."""
    return {key: entry.of(live) for key, entry in entries.items()}


def follow_(
    live: Tensor, state: State, entries: dict[str, Entry], averages: tuple[str, ...], storage: AverageDtype,
    name: str,
) -> None:  # fmt: skip
    """Make a state match its parameter, which may have been cast or moved, and its settings.

    Raise RuntimeError if steps were taken with weights of another shape.
    """
    for average in averages:
        codes = state.get(f"{average}_residual")
        moved = codes is not None and codes.shape == live.shape and not _lies_like(codes, live)
        if moved or storage_of(state, average) not in (None, storage):
            _convert_average(state, average, live, storage)
    for key in state.keys() - entries.keys() - {"live"}:
        del state[key]
    for key, entry in entries.items():
        shape = live.shape if entry.shape is None else entry.shape
        tensor = state.get(key)
        if tensor is None:
            state[key] = entry.of(live)
        elif tensor.shape != shape or (tensor.is_meta and not live.is_meta):
            if state["step"].is_meta or state["step"].item() != 0:
                found = "no values (meta device)" if tensor.is_meta else f"shape {tuple(tensor.shape)}"
                raise RuntimeError(
                    f"{name} has shape {tuple(live.shape)} but its {key} has {found}; reload the state or "
                    "build a new optimizer"
                )
            state[key] = entry.of(live)
        else:
            if tensor.dtype != entry.dtype or tensor.device != entry.device(live):
                state[key] = tensor = tensor.to(entry.device(live), entry.dtype)
            if entry.shape is None and not _lies_like(tensor, live):
                state[key] = torch.empty_like(live.detach(), dtype=entry.dtype).copy_(tensor)


def _lies_like(tensor: Tensor, live: Tensor) -> bool:
    """Return whether an entry has the order in memory that it would be made with: a kernel goes by
    addresses."""
    if tensor.stride() == live.stride():
        return True
    return tensor.stride() == torch.empty_like(live.detach(), device="meta").stride()


def unset_(state: State) -> None:
    """Mark averages as without a value, by NaN.

    A step of torch.distributed.checkpoint has made them. Where the state that it then loads lacks them (it is
    AdamW's, or has them in another storage) it leaves ours, on some ranks or all, and in the same memory.
    """
    for key, value in state.items():
        if key not in _NO_AVERAGE and value.is_floating_point():
            value.fill_(torch.nan)


def without_unset(saved: dict[str, Any]) -> dict[str, Any]:
    """Return saved entries without averages that have no value; on all ranks alike."""
    unset = {
        key
        for key, value in saved.items()
        if key not in _NO_AVERAGE and isinstance(value, Tensor) and value.is_floating_point()
        if value.numel() and bool(whole(value.detach().isnan().all()))
    }
    for key in [key for key in unset if key.endswith("_scale")]:
        codes = key.replace("_scale", "_residual")
        if codes in saved and saved[codes].dtype == torch.int8:
            unset.add(codes)
    return {key: value for key, value in saved.items() if key not in unset}


def check_saved(live: Tensor, saved: dict[str, Any], name: str, required: tuple[str, ...]) -> None:
    """Raise ValueError if a saved state cannot belong to this parameter."""
    missing = [key for key in required if key not in saved]
    if missing:
        raise ValueError(f"the saved state of {name} lacks {', '.join(missing)} (it has: {', '.join(saved)})")
    for key, value in saved.items():
        if key in ("step", "average_scale", "returned_scale") or not isinstance(value, Tensor):
            continue
        if value.shape != live.shape:
            raise ValueError(
                f"the saved {key} of {name} has shape {tuple(value.shape)}, the parameter has "
                f"{tuple(live.shape)}; nothing was loaded"
            )
    for average in ("average", "returned"):
        codes, scale = saved.get(f"{average}_residual"), saved.get(f"{average}_scale")
        if codes is None:
            continue
        blocks = (scales_of(live.numel()),) if codes.dtype == torch.int8 else None
        found = None if scale is None else tuple(scale.shape)
        if codes.dtype not in (torch.int8, torch.bfloat16) or found != blocks:
            raise ValueError(
                f"the saved {average}_residual of {name} is {codes.dtype} with a scale of shape {found}; "
                f"expected bfloat16 without one, or int8 with {(scales_of(live.numel()),)}; nothing was "
                f"loaded"
            )
    step = saved.get("step")
    if isinstance(step, Tensor) and step.dtype in (torch.bfloat16, torch.float16) and step >= 256:
        raise ValueError(
            f"the saved step of {name} is {step.item()} in {step.dtype}, a precision in which counting "
            "stops; the true count is lost"
        )
