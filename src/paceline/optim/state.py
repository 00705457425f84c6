"""What the optimizer remembers of one parameter: keys, shapes and precisions.

step        () float64   this parameter's own optimizer steps
exp_avg     like live    first moment            exp_avg_sq  like live    second moment
average     ≥ float32    control average         returned    ≥ float32    only with return_power
live        like live    only while the parameter shows its average: the weights to go on from

With average_dtype="bfloat16" or "int8", instead of an average, what live has beyond it (storage.py):
average_residual, returned_residual   like live, in that precision
average_scale, returned_scale         (blocks,) float32, only with int8

With betas[0] = 0 the first moment is the gradient, and is not kept.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paceline.optim.recipe import AverageDtype
from paceline.optim.sharded import local, mesh_of, sharded_like, whole
from paceline.optim.storage import SALTS, STORAGES, decode, encode_, scales_of

State = dict[str, Tensor]

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def name_of(group: dict[str, Any], number: int, i: int) -> str:
    names = group.get("param_names")
    return f"parameter '{names[i]}'" if names else f"parameter {i} of group {number}"


def average_dtype(live: Tensor) -> torch.dtype:
    """At least float32: a bfloat16 average stops moving once the averaging rate is below 1/256."""
    return _WIDER.get(live.dtype, live.dtype)


def averages_of(group: dict[str, Any]) -> tuple[str, ...]:
    """The averages that a parameter of this group has."""
    return ("average",) if group["return_power"] is None else ("average", "returned")


def moments_of(group: dict[str, Any]) -> tuple[str, ...]:
    """The moments that a parameter of this group has."""
    return ("exp_avg", "exp_avg_sq") if group["betas"][0] != 0 else ("exp_avg_sq",)


def returned_key(state: State) -> str:
    """Which of the two averages is the one that is evaluated and returned."""
    return "returned" if keeps(state, "returned") else "average"


# --- Averages in any storage ------------------------------------------------------------------------


def residual_key(name: str) -> str:
    return f"{name}_residual"


def scale_key(name: str) -> str:
    return f"{name}_scale"


def parts_of(name: str) -> tuple[str, str, str]:
    """The entries that an average may be kept in: the first alone, or the second, or the second and third."""
    return name, residual_key(name), scale_key(name)


def keeps(state: State, name: str) -> bool:
    """Whether there is such an average, in whatever storage."""
    return name in state or residual_key(name) in state


def storage_of(state: State, name: str) -> AverageDtype:
    """How an average that is there is kept: after a load, not always as its group says."""
    if name in state:
        return "float32"
    return "int8" if state[residual_key(name)].dtype == torch.int8 else "bfloat16"


def average_of(state: State, name: str, live: Tensor) -> Tensor:
    """An average of a parameter with these live weights: the one kept, or made now. At least float32."""
    if name in state:
        return state[name]
    codes, scale = state[residual_key(name)], state.get(scale_key(name))
    if scale is not None and mesh_of(codes) is not None:
        # Loaded from one process into an optimizer that will keep it otherwise: its blocks are of the whole.
        residual = sharded_like(decode(whole(codes), whole(scale)), codes)
    else:
        residual = decode(codes, scale)
    return live.detach() - residual.to(live.device)


def keep_average_(state: State, name: str, live: Tensor, average: Tensor) -> None:
    """Write an average that `average_of` made and a step has moved, beside the live weights it left."""
    codes = local(state[residual_key(name)])
    residual = torch.empty_like(codes, dtype=torch.float32)
    torch.sub(local(live.detach()), local(average), out=residual)
    encode_(codes, state.get(scale_key(name)), residual, state["step"], SALTS[name])


def kept_as(storage: AverageDtype, live: Tensor, state: State, wanted: tuple[str, ...]) -> State:
    """The state with its averages in that storage; itself, if they are."""
    others = [name for name in wanted if keeps(state, name) and not _is_kept_as(storage, live, state, name)]
    if not others:
        return state
    parts = {part for name in others for part in parts_of(name)}
    new = {key: value for key, value in state.items() if key not in parts}
    for name in others:
        average = average_of(state, name, live).to(live.device)
        if storage == "float32":
            new[name] = average
        else:
            new |= seeded(live, name, storage)
            keep_average_(new, name, live, average)
    return {key: new[key] for key in sorted(new)}


def _is_kept_as(storage: AverageDtype, live: Tensor, state: State, name: str) -> bool:
    kept = storage_of(state, name)
    return kept == storage and (kept != "int8" or _lie_alike(state[residual_key(name)], live))


def lost_its_order(live: Tensor, state: State, name: str) -> str | None:
    """Why nobody knows which scale belongs to which int8 code, in words that follow the parameter's name.

    Blocks are neighbours in memory, and some file formats keep no strides: what is contiguous beside a
    parameter that is not may have been otherwise.
    """
    codes = state.get(residual_key(name))
    if codes is None or codes.dtype != torch.int8 or not codes.is_contiguous() or _lie_alike(codes, live):
        return None
    return (
        f"is not contiguous (strides {live.stride()}) but its int8 {residual_key(name)} is, so that its "
        "blocks, which are neighbours in memory, cannot be told; save with torch.save, which keeps strides, "
        "and set the memory format before the first step"
    )


def _lie_alike(codes: Tensor, live: Tensor) -> bool:
    """Whether elements lie in the same order in memory, but for gaps."""
    if codes.stride() == live.stride() or codes.shape != live.shape:
        return True
    dense = torch.empty_like(live, device="meta", memory_format=torch.preserve_format)
    strides = zip(codes.shape, codes.stride(), dense.stride(), strict=True)
    return codes.numel() == 0 or all(a == b for size, a, b in strides if size > 1)


def seeded(live: Tensor, name: str, storage: AverageDtype = "float32") -> State:
    """The entries of an average that is live."""
    live = live.detach()
    if storage == "float32":
        return {name: live.to(average_dtype(live), copy=True)}
    codes = torch.zeros_like(live, dtype=STORAGES[storage].dtype, memory_format=torch.preserve_format)
    if storage == "bfloat16":
        return {residual_key(name): codes}
    scale = torch.zeros(scales_of(live.numel()), dtype=torch.float32, device=live.device)
    return {residual_key(name): codes, scale_key(name): scale}


def storage_refusal(live: Tensor, storage: AverageDtype) -> str | None:
    """Why an average cannot be kept so, in words that follow the parameter's name; None if it can."""
    if live.is_complex():
        return f"is {live.dtype}; complex parameters are not supported: train torch.view_as_real of it"
    if storage == "float32":
        return None
    # Who trains in float64 asked for more digits than a residual keeps.
    if live.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return (
            f"is {live.dtype}; average_dtype={storage!r} is for float32, bfloat16 and float16 parameters; "
            'give it a group with average_dtype="float32"'
        )
    if storage == "int8" and mesh_of(live) is not None:
        return (
            "is sharded over several ranks, which would cut the blocks of average_dtype='int8'; use "
            "average_dtype='bfloat16'"
        )
    return None


# --- The state of a parameter -----------------------------------------------------------------------


def allocate(live: Tensor, group: dict[str, Any]) -> State:
    """All keys at their final shapes; the averages are taken anew at the first step."""
    live = live.detach()
    state = {"step": torch.zeros((), dtype=torch.float64, device=step_device(live, group))}
    for name in moments_of(group):
        state[name] = torch.zeros_like(live)
    for name in averages_of(group):
        state |= seeded(live, name, group["average_dtype"])
    return state


def allocate_averages(
    live: Tensor, group: dict[str, Any], wanted: tuple[str, ...], base: dict[str, Any]
) -> State:
    """The memory of a wrapper for a parameter of whose base optimizer this is the state.

    The count goes on from the base's, where it keeps one: wrapped late, averages begin with live, and
    move at the rate of a run that is that old.
    """
    if reason := storage_refusal(live, "float32"):
        raise ValueError(f"a parameter {reason}")
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
            state[key].copy_(live.detach())
        for part in parts_of(key)[1:]:
            if part in state:
                state[part].zero_()


def conform(live: Tensor, state: State, group: dict[str, Any], number: int, i: int) -> None:
    """Make the state fit a parameter that was moved, cast or replaced, and settings changed, since.

    `number` and `i` say which parameter of which group it is, for messages.
    """
    name = name_of(group, number, i)
    storage: AverageDtype = group["average_dtype"]
    if reason := storage_refusal(live, storage):
        raise RuntimeError(f"{name} {reason}")
    if _is_misfit(live, state, "exp_avg_sq", name):
        for key in ("average", "returned"):
            _drop(state, key)
        state.update(allocate(live, group))
    if not keeps(state, "average"):  # AdamW's state, carried over by hand
        state.update(seeded(live, "average", storage))
    _conform_weights(live, state, group)
    _conform_averages_of_pace(live, state, group, name)


def _conform_averages_of_pace(live: Tensor, state: State, group: dict[str, Any], name: str) -> None:
    names = averages_of(group)
    conform_averages(live, state, group, names, name)
    for key in names:
        if (reason := lost_its_order(live, state, key)) and is_seeded(state):
            raise RuntimeError(f"{name} {reason}")
    kept = kept_as(group["average_dtype"], live, state, names)
    if kept is not state:
        state.clear()
        state.update(kept)
        conform_averages(live, state, group, names, name)


def _conform_weights(live: Tensor, state: State, group: dict[str, Any]) -> None:
    """Make the moments fit what the group says now."""
    if "exp_avg" not in moments_of(group):
        state.pop("exp_avg", None)
    elif "exp_avg" not in state:  # momentum begins now, with what AdamW would have in its place: a gradient
        first = torch.zeros_like(live) if live.grad is None else live.grad
        sign = -1 if group["maximize"] else 1
        state["exp_avg"] = (first.detach() * sign).to(live.dtype)
    for key in moments_of(group):
        _convert(state, key, live.device, live.dtype)


def conform_averages(
    live: Tensor, state: State, group: dict[str, Any], wanted: tuple[str, ...], name: str
) -> None:
    """Likewise for the averages alone, in the storage that they have."""
    if "returned" not in wanted:
        _drop(state, "returned")
    elif not keeps(state, "returned"):
        state.update(copied(state, "average", "returned"))
    for key in wanted:
        storage = storage_of(state, key)
        main = key if storage == "float32" else residual_key(key)
        if _is_misfit(live, state, main, name):
            state.update(seeded(live, key, storage))
        if storage == "float32":
            _convert(state, key, live.device, average_dtype(live))
        else:
            for part in state.keys() & set(parts_of(key)):
                _convert(state, part, live.device, state[part].dtype)
    _convert(state, "step", step_device(live, group), torch.float64)


def copied(state: State, name: str, to: str) -> State:
    """The entries of one average as those of another."""
    pairs = zip(parts_of(name), parts_of(to), strict=True)
    return {new: state[old].clone() for old, new in pairs if old in state}


def _drop(state: State, name: str) -> None:
    for part in parts_of(name):
        state.pop(part, None)


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


def is_expanded(tensor: Tensor) -> bool:
    """Whether several elements share one memory, so that no update in place can be right."""
    return tensor.layout == torch.strided and any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def overlapping(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Return the places of two tensors that share an element of memory; None if there are none."""
    by_storage: dict[int, list[tuple[int, int, int, Tensor]]] = {}
    for place, tensor in enumerate(tensors):
        if is_lazy(tensor) or is_traceable_wrapper_subclass(part := local(tensor.detach())):
            continue
        if part.layout == torch.strided and not part.is_meta and part.numel():
            steps = ((size - 1) * step for size, step in zip(part.shape, part.stride(), strict=True))
            start = part.storage_offset() * part.element_size()
            end = start + (sum(steps) + 1) * part.element_size()
            address = part.untyped_storage().data_ptr()
            by_storage.setdefault(address, []).append((int(start), int(end), place, part))
    for address, members in by_storage.items():
        if address != 0 and len(members) > 1:
            near: list[tuple[int, int, int, Tensor]] = []
            for member in sorted(members, key=lambda member: member[:3]):
                near = [*(known for known in near if known[1] > member[0]), member]
                if len(near) > 1 and (known := _shares(near)) is not None:
                    return known, member[2]
    return None


def _shares(near: "list[tuple[int, int, int, Tensor]]") -> int | None:
    """Return the place of the first tensor that shares a byte with the last; None if they interleave."""
    start, end = min(member[0] for member in near), max(member[1] for member in near)
    used = torch.zeros(end - start, dtype=torch.bool)

    def bytes_of(member: tuple[int, int, int, Tensor]) -> Tensor:
        part, size = member[3], member[3].element_size()
        strides = (*(step * size for step in part.stride()), 1)
        return used.as_strided((*part.shape, size), strides, member[0] - start)

    bytes_of(near[-1]).fill_(True)
    return next((member[2] for member in near[:-1] if bytes_of(member).any()), None)
