"""Averaged weights out of the optimizer: as a state dict, as a file, as tensors to compute with."""

import inspect
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from paceline.optim.sharding import is_sharded, is_writer, local, share_failure, whole
from paceline.optim.weights import Optimizers, averaged_weights, first_overlap, keepers_of

Others = Literal["refuse", "live"]
_PARALLEL = (DistributedDataParallel, nn.DataParallel)


@torch.no_grad()
def averaged_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    dtype: torch.dtype | None = None,
    *,
    others: Others = "refuse",
) -> dict[str, Any]:
    """Return a copy of `model.state_dict()` with every parameter replaced by its average.

    Arguments:
        model: the model; wrappers of `torch.compile` and DistributedDataParallel leave no trace in the names.
        optimizers: one, or all those that train the model.
        dtype: None gives the average as it is kept (float32 next to bfloat16 weights); a floating dtype casts
            all floating entries.
        others: "live" exports trainable parameters that none of the optimizers knows as they are.

    Returns:
        Name → tensor. Buffers and frozen parameters come from the model. Tied parameters share one tensor.
    """

    def copied(value: Tensor) -> Tensor:
        return value.to(_target(value, dtype), copy=True)

    return _averaged_entries(model, optimizers, others, copied)


def _target(value: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"Invalid dtype: {dtype}; allowed: None or a floating dtype")
    return dtype if dtype is not None and value.is_floating_point() else value.dtype


def _averaged_entries(
    model: nn.Module, optimizers: Optimizers, others: Others, change: Callable[[Tensor], Tensor]
) -> "OrderedDict[str, Any]":
    """Return the model's state dict, cleanly named, with averages for parameters, and all tensors changed."""
    keepers = keepers_of(optimizers)
    averages = {p: average for keeper in keepers for p, average in keeper.averages()}
    known = {id(p) for keeper in keepers for group in keeper.groups for p in group["params"]}
    own = model.state_dict(keep_vars=True)  # the parameters themselves, whatever they are called here
    _check_covered(averages, known, model, own, others)
    rename = renamer(model)
    once = {id(value): value for value in own.values() if isinstance(value, Tensor)}  # tied ones stay tied
    # Popped: an average that was decoded for this is free again once it is changed.
    tensors = {key: change(averages.pop(value, value).detach()) for key, value in once.items()}
    entries = OrderedDict((rename(name), tensors.get(id(value), value)) for name, value in own.items())
    # Versions of the modules, by which load_state_dict knows what to migrate; a dict of the user's has none.
    metadata = getattr(own, "_metadata", None)
    if metadata is not None:
        entries._metadata = {rename(path): versions for path, versions in metadata.items()}  # type: ignore[attr-defined]
    return entries


def _check_covered(
    averages: dict[Tensor, Tensor], known: set[int], model: nn.Module, entries: dict[str, Any], others: Others
) -> None:
    """Refuse to export live weights where averages were asked for."""
    named = dict(model.named_parameters())
    if averages and not any(parameter in averages for parameter in named.values()):
        raise ValueError(
            "the optimizer trains none of this model's parameters, so there is no average of them; pass the "
            "model it was built for (copying, sharding or moving a model may replace its parameters)"
        )
    unknown = [name for name, p in named.items() if p.requires_grad and id(p) not in known]
    if unknown and others != "live":
        raise ValueError(
            f"{len(unknown)} trainable parameter(s), first {unknown[0]!r}, belong to none of these "
            "optimizers, so there is no average of them; pass all optimizers of the model, or "
            'others="live" to export these as they are'
        )
    exported = {id(value) for value in entries.values()}
    missing = {id(p) for p in named.values() if p in averages} - exported
    if missing:
        raise ValueError(
            f"{len(missing)} trained parameter(s) do not appear in model.state_dict(keep_vars=True), so "
            "their averages cannot be exported; a hook or an override of state_dict replaces them"
        )
    # As a frozen parameter tied by `.data`: a block shows the average in both, and this would export live.
    trained = {name: p for name, p in named.items() if p in averages}
    taken = {_storage(p) for p in trained.values()} - {None}
    near = {id(v): (name, v) for name, v in entries.items() if v not in averages and _storage(v) in taken}
    whose = {**trained, **dict(near.values())}
    shared = first_overlap([{"params": list(whose.values()), "param_names": list(whose)}])
    if shared is not None:
        raise ValueError(f"{shared}, or use one parameter in both places")


def _storage(value: Any) -> int | None:
    """Return the address of the storage of a tensor; None if it has none of its own."""
    part = local(value.detach()) if isinstance(value, Tensor) and not is_lazy(value) else None
    return (
        part.untyped_storage().data_ptr() if type(part) is Tensor and part.layout == torch.strided else None
    )


def renamer(model: nn.Module) -> Callable[[str], str]:
    """Return a function that removes the parts of names that torch.compile and DDP add."""
    wrapped = {
        f"{path}.module".lstrip(".")
        for path, module in model.named_modules()
        if isinstance(module, _PARALLEL)
    }

    def rename(name: str) -> str:
        parts = name.split(".")
        paths = [".".join(parts[: i + 1]) for i in range(len(parts))]
        pairs = zip(parts, paths, strict=True)
        return ".".join(part for part, path in pairs if part != "_orig_mod" and path not in wrapped)

    return rename


def averaged_tensors(model: nn.Module, optimizers: Optimizers, name: str | None = None) -> dict[str, Tensor]:
    """Return the model's parameters by name, averaged, for `torch.func.functional_call`; nothing is copied.

    The model keeps training on its live weights while the average runs next to it, as a teacher or a
    reference. The tensors stay current until the next `averaged_weights` block or load; those of a `Blend`
    are of now.
    """
    found: dict[Tensor, Tensor] = {}
    known: set[int] = set()
    for keeper in keepers_of(optimizers):
        known |= {id(p) for group in keeper.groups for p in group["params"]}
        if keeper.shown != "live":
            raise RuntimeError("the parameters hold an average at present; leave its block first")
        for _, parameter, state in keeper.remembered():
            if is_sharded(parameter) or "average_residual" in state:
                kind = "sharded" if is_sharded(parameter) else "kept as a residual in few bits"
                raise ValueError(
                    f"averages that are {kind} cannot be shared without a copy; use averaged_weights or "
                    "averaged_state_dict"
                )
        found |= dict(keeper.averages(name))
    if not found:
        raise RuntimeError("no average has begun, and live weights would stay live; take a step first")
    named = dict(model.named_parameters(remove_duplicate=False))
    _check_covered(found, known, model, named, "refuse")
    tensors = {p: found.get(p, p).detach() for p in named.values()}  # tied parameters stay tied
    return {path: tensors[p] for path, p in named.items()}


# --- Saving -----------------------------------------------------------------------------------------------


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside what torch.compile and parallel training put around it."""
    while isinstance(model, _PARALLEL) or [name for name, _ in model.named_children()] == ["_orig_mod"]:
        (model,) = model.children()
    return model


def save_averaged(
    model: nn.Module,
    optimizers: Optimizers,
    path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    *,
    others: Others = "refuse",
) -> Path:
    """Save the returned model: the averaged weights, under the model's own names.

    A Hugging Face model is saved by its `save_pretrained` into the folder `path`. Any other module becomes
    one safetensors file: `path` itself if it ends in .safetensors, otherwise `path`/model.safetensors. The
    file appears whole or not at all. With sharded parameters call it on every rank; rank 0 writes.

    Returns:
        The folder or file that was written.
    """
    inner, path = _unwrapped(model), Path(path)
    save_pretrained = getattr(inner, "save_pretrained", None)  # of transformers, peft and diffusers
    if save_pretrained is None and path.suffix != ".safetensors":
        path = path / "model.safetensors"

    def gather(value: Tensor) -> Tensor:
        # Tensor by tensor, so that no second model stands on the device; on every rank: it is collective.
        tensor = whole(value).to(_target(value, dtype))
        return tensor.cpu() if is_writer() else torch.empty(0)

    full = _averaged_entries(model, optimizers, others, gather)
    failure = None
    if is_writer():
        try:
            if save_pretrained is not None and _saves_what_it_is_given(inner):
                save_pretrained(str(path), state_dict=full)
            elif save_pretrained is not None:
                _save_shown(inner, optimizers, path, dtype)
            else:
                _write_safetensors(full, path)
        except Exception as error:
            failure = error
    share_failure(failure)
    return path


def _saves_what_it_is_given(model: Any) -> bool:
    """Return whether the `save_pretrained` of a model writes the weights that it is given."""
    adapters = getattr(model, "peft_config", None)
    # Of peft it is among further arguments; huggingface_hub's PyTorchModelHubMixin has none.
    if adapters is None and "state_dict" not in inspect.signature(model.save_pretrained).parameters:
        return False
    is_prompt = any(getattr(one, "is_prompt_learning", False) for one in dict(adapters or {}).values())
    return not is_prompt and getattr(model, "hf_quantizer", None) is None


def _save_shown(model: Any, optimizers: Optimizers, path: Path, dtype: torch.dtype | None) -> None:
    """Save a model by its `save_pretrained` while its parameters hold the average."""
    name = type(model).__name__
    if dtype is not None or any(is_sharded(parameter) for parameter in model.parameters()):
        raise ValueError(f"save_pretrained of {name} writes its parameters: give no dtype, and no shards")
    with averaged_weights(optimizers):
        model.save_pretrained(str(path))


def _write_safetensors(weights: dict[str, Any], path: Path) -> None:
    """Write a file that appears whole or not at all."""
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("save_averaged needs safetensors: pip install safetensors") from error
    odd = [name for name, value in weights.items() if not isinstance(value, Tensor)]
    if odd:
        raise ValueError(
            f"cannot save {', '.join(odd)} as safetensors: not tensors; save "
            "averaged_state_dict(model, optimizer) in a format of your own"
        )
    # safetensors refuses shared tensors; tied weights are written under each of their names.
    storages: set[int] = set()
    for name, value in weights.items():
        storage = value.untyped_storage().data_ptr()
        weights[name] = value.contiguous().clone() if storage in storages else value.contiguous()
        storages.add(storage)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        save_file(weights, partial, metadata={"format": "pt", "weights": "average"})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
