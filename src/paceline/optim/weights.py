"""Averaged weights in and out: show them for a while, export them, save them.

Live weights sit in the parameters; the average is optimizer state. Nothing here needs a second model.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.optim.sharded import is_writer, same_values, share_failure, whole
from paceline.optim.state import State


@runtime_checkable
class KeepsAverage(Protocol):
    """What this module needs of an optimizer."""

    def returned_averages(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter with its returned average; one whose average is still live is left out."""

    def shows_average(self) -> bool:
        """Whether the parameters hold the average at present."""

    def eval(self) -> None:
        """Put the average into the parameters."""

    def train(self) -> None:
        """Put live back into the parameters."""


def keeper_of(optimizer: object) -> KeepsAverage:
    """The optimizer that keeps an average: this one, or the one inside, of which trainers make a wrapper.

    TypeError in the user's words if there is none.
    """
    inside = innermost(optimizer)
    if not isinstance(inside, KeepsAverage):
        raise TypeError(
            f"{type(inside).__name__} keeps no average of its parameters; pass an optimizer of paceline, "
            "e.g. paceline.PACE(..., pullback_strength=0) for AdamW with an EMA"
        )
    return inside


def innermost(optimizer: object) -> object:
    """The optimizer itself, of which a wrapper may have been given.

    Wrappers of Lightning and Fabric take on the class of what is inside, and as keepers they would note on
    themselves what the optimizer has to know.
    """
    inside = optimizer
    while hasattr(inside, "optimizer"):
        inside = inside.optimizer
    return inside


# --- Showing the average --------------------------------------------------------------------------

_in_block: WeakSet[Any] = WeakSet()


def in_any_block() -> bool:
    """Whether there is any of which `in_block` holds."""
    return len(_in_block) > 0


def in_block(optimizer: object) -> bool:
    """Whether `with averaged_weights(optimizer)` is running."""
    return optimizer in _in_block


@contextmanager
def averaged_weights(optimizer: "torch.optim.Optimizer | KeepsAverage") -> Iterator[None]:
    """Show the averaged weights in the parameters for the length of a with-block.

    Inside the block the model computes with the average and `model.state_dict()` holds it. Leaving,
    also by an exception, puts the live weights back bit for bit. `optimizer.step()` and a second block
    inside raise; `optimizer.state_dict()` stays complete and says what the parameters hold.

    Weights and average of one precision change places tensor by tensor, which needs the memory of the
    largest. For bfloat16 or float16 parameters a copy of live is kept for the block, and the parameters
    show the average rounded to their precision.

    >>> import torch, paceline
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = paceline.PACE(model.parameters(), lr=0.1)
    >>> for _ in range(3):
    ...     model(torch.ones(1, 2)).sum().backward()
    ...     optimizer.step()
    >>> live = model.weight.detach().clone()
    >>> with paceline.averaged_weights(optimizer):
    ...     torch.equal(model.weight, optimizer.state[model.weight]["returned"])
    True
    >>> torch.equal(model.weight, live)
    True
    """
    keeper = keeper_of(optimizer)
    _refuse_copies(optimizer, keeper)
    if in_block(keeper):
        raise RuntimeError("averaged_weights is already active for this optimizer; blocks do not nest")
    was_shown = keeper.shows_average()  # by eval(): the block then leaves it so
    keeper.eval()
    _in_block.add(keeper)
    try:
        yield
    finally:
        _in_block.discard(keeper)
        if not was_shown:
            keeper.train()


def _refuse_copies(optimizer: object, keeper: KeepsAverage) -> None:
    """Raise RuntimeError where the model would stay at live, without a word."""
    inside, is_told = optimizer, getattr(keeper, "after_exchange", None) is not None
    while inside is not keeper and not is_told:
        if type(inside).__module__.split(".")[0] == "deepspeed":
            raise RuntimeError(
                f"DeepSpeed's {type(inside).__name__} trains flat copies of the model's parameters, so that "
                "the model would not hold the average; use DDP or FSDP2, or the Trainer of transformers with "
                "paceline.integrations.huggingface.AveragedModelCallback, for ZeRO stage 1 or 2"
            )
        inside = inside.optimizer  # type: ignore[attr-defined]


def show_average_(parameter: Tensor, state: State, key: str) -> None:
    """Put state[key] into the parameter and keep its live weights as state["live"]."""
    average = state[key]
    if average.dtype == parameter.dtype and average.device == parameter.device:
        _exchange_(parameter, average)
        # The average's storage now holds live, and the parameter is the average.
        state[key], state["live"] = parameter.detach(), average
    else:
        state["live"] = parameter.detach().clone()
        parameter.copy_(average)


def show_live_(parameter: Tensor, state: State, key: str) -> None:
    """Undo `show_average_`, bit for bit, also if the parameter was cast or moved in between."""
    shown, live = state[key], state["live"]
    if shown.dtype == live.dtype and shown.device == live.device:
        _exchange_(shown, live)
        state[key] = live
        parameter.copy_(shown)  # onto itself, unless a cast gave the parameter another storage
    else:
        parameter.copy_(live)
    del state["live"]


def show_computed_(tensor: Tensor, state: State, average: Tensor) -> None:
    """Put an average that is not kept as it is into a tensor; its live weights become state["live"]."""
    state["live"] = tensor.detach().clone()
    tensor.copy_(average)


def show_kept_(tensor: Tensor, state: State) -> None:
    """Undo `show_computed_`, bit for bit."""
    tensor.copy_(state["live"])
    del state["live"]  # only now: whatever interrupts the copy, it is still there


def _exchange_(a: Tensor, b: Tensor) -> None:
    """Exchange contents. By copies, not by arithmetic (inexact) nor `.data` (ignored by FSDP2)."""
    kept = a.detach().clone()
    try:
        a.copy_(b)
        b.copy_(kept)
    except BaseException:  # Ctrl-C between the two copies: leave both as they were
        if same_values(b, kept):
            b.copy_(a)
        a.copy_(kept)
        raise


# --- Exporting ------------------------------------------------------------------------------------


@torch.no_grad()
def averaged_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer | KeepsAverage, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """A copy of `model.state_dict()` with every parameter replaced by its average.

    Arguments:
        model: the model whose parameters the optimizer trains; `torch.compile` and
            DistributedDataParallel wrappers leave no trace in the names.
        optimizer: a `PACE`.
        dtype: None gives the average as it is kept (float32 beside bfloat16 weights); a floating dtype
            casts all floating entries, as `model.to(dtype)` would.

    Returns:
        Name → tensor. Buffers and parameters that were never trained come from the model. Tied
        parameters share one tensor. Sharded parameters stay sharded.

    >>> import torch, paceline
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = paceline.PACE(model.parameters())
    >>> fresh = torch.nn.Linear(2, 1)
    >>> fresh.load_state_dict(paceline.averaged_state_dict(model, optimizer))
    <All keys matched successfully>
    """
    entries = _averaged_entries(model, optimizer)
    copies: dict[int, Tensor] = {}  # tied parameters stay tied
    for name, value in entries.items():
        if isinstance(value, Tensor):
            if id(value) not in copies:
                copies[id(value)] = value.to(_target(value, dtype), copy=True)
            entries[name] = copies[id(value)]
    return entries


def _target(value: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"Invalid dtype: {dtype}; allowed: None or a floating dtype")
    return dtype if dtype is not None and value.is_floating_point() else value.dtype


def _averaged_entries(
    model: nn.Module, optimizer: torch.optim.Optimizer | KeepsAverage
) -> "OrderedDict[str, Any]":
    """The model's state dict, cleanly named, its parameters replaced by their averages (not copied)."""
    averages = dict(keeper_of(optimizer).returned_averages())
    own = model.state_dict(keep_vars=True)  # the parameters themselves, whatever they are called here
    _check_covered(averages, model, own)
    rename = renamer(model)
    tensors = {id(v): averages.get(v, v).detach() for v in own.values() if isinstance(v, Tensor)}
    entries = OrderedDict((rename(name), tensors.get(id(value), value)) for name, value in own.items())
    # Versions of the modules, by which load_state_dict knows what to migrate; a dict of the user's has none.
    metadata = getattr(own, "_metadata", None)
    if metadata is not None:
        entries._metadata = {rename(path): versions for path, versions in metadata.items()}  # type: ignore[attr-defined]
    return entries


def _check_covered(averages: dict[Tensor, Tensor], model: nn.Module, entries: dict[str, Any]) -> None:
    """Refuse to export live weights where averages were asked for."""
    trained = {id(parameter) for parameter in model.parameters() if parameter in averages}
    if averages and not trained:
        raise ValueError(
            "the optimizer trains none of this model's parameters, so there is no average of them; pass the "
            "model it was built for (copying, sharding or moving a model may replace its parameters)"
        )
    missing = len(trained - {id(value) for value in entries.values()})
    if missing:
        raise ValueError(
            f"{missing} trained parameter(s) do not appear in model.state_dict(keep_vars=True), so their "
            "averages cannot be exported; a hook or an override of state_dict replaces them"
        )


def renamer(model: nn.Module) -> Callable[[str], str]:
    """Names without the parts that wrappers add: torch.compile's and DistributedDataParallel's."""
    wrapped = {
        f"{path}.module".lstrip(".")
        for path, module in model.named_modules()
        if isinstance(module, DistributedDataParallel | nn.DataParallel)
    }

    def rename(name: str) -> str:
        parts = name.split(".")
        kept = [
            part
            for i, part in enumerate(parts)
            if part != "_orig_mod" and ".".join(parts[: i + 1]) not in wrapped
        ]
        return ".".join(kept)

    return rename


def _unwrapped(model: nn.Module) -> nn.Module:
    while True:
        children = dict(model.named_children())
        if isinstance(model, DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif list(children) == ["_orig_mod"]:
            model = children["_orig_mod"]
        else:
            return model


@runtime_checkable
class _SavesPretrained(Protocol):
    """A Hugging Face model (transformers, peft, diffusers)."""

    def save_pretrained(self, save_directory: str, *, state_dict: dict[str, Tensor]) -> Any: ...


def save_averaged(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | KeepsAverage,
    path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
) -> Path:
    """Save the returned model: the averaged weights, under the model's own names.

    A Hugging Face model is saved by its `save_pretrained` into the folder `path`, and `from_pretrained`
    loads the average. Any other module becomes one safetensors file: `path` itself if it ends in
    .safetensors, otherwise `path`/model.safetensors; load it with
    `model.load_state_dict(safetensors.torch.load_file(file))`. The file appears whole or not at all.

    With sharded parameters call it on every rank; rank 0 writes. `dtype` as in `averaged_state_dict`.

    Returns:
        The folder or file that was written.
    """
    inner = _unwrapped(model)
    path = Path(path)
    if not isinstance(inner, _SavesPretrained) and path.suffix != ".safetensors":
        path = path / "model.safetensors"
    full: dict[str, Any] = {}
    gathered: dict[int, Tensor] = {}
    for name, value in _averaged_entries(model, optimizer).items():
        if isinstance(value, Tensor) and id(value) not in gathered:
            # Tensor by tensor, so that no second model stands on the device; on every rank: it is collective.
            tensor = whole(value).to(_target(value, dtype))
            gathered[id(value)] = tensor.cpu() if is_writer() else torch.empty(0)
        full[name] = gathered[id(value)] if isinstance(value, Tensor) else value
    failure = None
    if is_writer():
        try:
            if isinstance(inner, _SavesPretrained):
                inner.save_pretrained(str(path), state_dict=full)
            else:
                _write_safetensors(full, path)
        except Exception as error:
            failure = error
    share_failure(failure)
    return path


def _write_safetensors(weights: dict[str, Any], path: Path) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("save_averaged needs safetensors: pip install 'paceline[save]'") from error
    odd = [name for name, value in weights.items() if not isinstance(value, Tensor)]
    if odd:
        raise ValueError(
            f"cannot save {', '.join(odd)} as safetensors: not tensors; save "
            "averaged_state_dict(model, optimizer) in a format of your own"
        )
    # safetensors refuses shared tensors; tied weights are written under each of their names, so that
    # plain load_state_dict works.
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, value in weights.items():
        storage = value.untyped_storage().data_ptr()
        tensors[name] = value.contiguous().clone() if storage in storages else value.contiguous()
        storages.add(storage)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        save_file(tensors, partial, metadata={"format": "pt", "weights": "average"})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
