"""Averaged weights in and out: show them for a while, export them, save them.

Live weights sit in the parameters; the average is optimizer state. Nothing here needs a second model.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.optim.sharded import is_writer, wait_for_all, whole
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


def _keeper(optimizer: object) -> KeepsAverage:
    if not isinstance(optimizer, KeepsAverage):
        raise TypeError(
            f"{type(optimizer).__name__} keeps no average of its parameters; pass the paceline optimizer "
            "itself (of a wrapper, usually its .optimizer), e.g. paceline.PACE(..., pullback_strength=0) "
            "for AdamW with an EMA"
        )
    return optimizer


# --- Showing the average --------------------------------------------------------------------------

_in_block: WeakSet[Any] = WeakSet()


def in_block(optimizer: object) -> bool:
    """Whether `with averaged_weights(optimizer)` is running."""
    return optimizer in _in_block


@contextmanager
def averaged_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
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
    ...     torch.equal(model.weight, optimizer.state[model.weight]["average"])
    True
    >>> torch.equal(model.weight, live)
    True
    """
    keeper = _keeper(optimizer)
    if in_block(optimizer):
        raise RuntimeError("averaged_weights is already active for this optimizer; blocks do not nest")
    was_shown = keeper.shows_average()  # by eval(): the block then leaves it so
    keeper.eval()
    _in_block.add(optimizer)
    try:
        yield
    finally:
        _in_block.discard(optimizer)
        if not was_shown:
            keeper.train()


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
    """Undo `show_average_`, bit for bit."""
    live = state["live"]
    if state[key].dtype == parameter.dtype and state[key].device == parameter.device:
        _exchange_(parameter, live)
        state[key] = live
    else:
        parameter.copy_(live)
    del state["live"]


def _exchange_(a: Tensor, b: Tensor) -> None:
    """Exchange contents. By copies, not by arithmetic (inexact) nor `.data` (ignored by FSDP2)."""
    kept = a.detach().clone()
    try:
        a.copy_(b)
        b.copy_(kept)
    except BaseException:  # Ctrl-C between the two copies: leave both as they were
        if torch.equal(b, kept):
            b.copy_(a)
        a.copy_(kept)
        raise


# --- Exporting ------------------------------------------------------------------------------------


@torch.no_grad()
def averaged_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """A copy of `model.state_dict()` with every parameter replaced by its average.

    Arguments:
        model: the model whose parameters the optimizer trains; `torch.compile` and
            DistributedDataParallel wrappers leave no trace in the names.
        optimizer: a `PACE`.
        dtype: None gives the average as it is kept (float32 beside bfloat16 weights); a floating dtype
            casts all floating entries, as `model.to(dtype)` would.

    Returns:
        Name → tensor. Buffers, frozen parameters and parameters that were never stepped come from the
        model. Tied parameters share one tensor. Sharded parameters stay sharded.

    >>> import torch, paceline
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = paceline.PACE(model.parameters())
    >>> fresh = torch.nn.Linear(2, 1)
    >>> fresh.load_state_dict(paceline.averaged_state_dict(model, optimizer))
    <All keys matched successfully>
    """
    averages = dict(_keeper(optimizer).returned_averages())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if averages and averages.keys().isdisjoint(parameters.values()):
        raise ValueError(
            "the optimizer trains none of this model's parameters, so there is no average of them; pass the "
            "model it was built for (copying, sharding or moving a model may replace its parameters)"
        )
    copies: dict[Tensor, Tensor] = {}
    result: dict[str, Any] = {}
    rename = _renamer(model)
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            result[rename(name)] = value
            continue
        source = parameters.get(name, value)
        if source not in copies:
            kept = averages.get(source, value)
            copies[source] = kept.detach().to(dtype if _casts(kept, dtype) else kept.dtype, copy=True)
        result[rename(name)] = copies[source]
    return result


def _casts(value: Tensor, dtype: torch.dtype | None) -> bool:
    return dtype is not None and value.is_floating_point()


def _renamer(model: nn.Module) -> Any:
    """Names without the parts that wrappers add: torch.compile's and DistributedDataParallel's."""
    wrapped = {
        f"{path}.module".lstrip(".")
        for path, module in model.named_modules()
        if isinstance(module, DistributedDataParallel)
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
        if isinstance(model, DistributedDataParallel):
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
    optimizer: torch.optim.Optimizer,
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
    full: dict[str, Any] = {}
    for name, value in averaged_state_dict(model, optimizer, dtype).items():
        gathered = whole(value) if isinstance(value, Tensor) else value  # on every rank: it is collective
        if is_writer():
            full[name] = gathered.cpu() if isinstance(gathered, Tensor) else gathered
    if isinstance(inner, _SavesPretrained):
        if is_writer():
            inner.save_pretrained(str(path), state_dict=full)
    else:
        path = path if path.suffix == ".safetensors" else path / "model.safetensors"
        if is_writer():
            _write_safetensors(full, path)
    wait_for_all()
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
    for name, value in weights.items():
        shared = any(value is other for other in tensors.values())
        tensors[name] = value.clone() if shared else value.contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        save_file(tensors, partial, metadata={"format": "pt", "weights": "average"})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
