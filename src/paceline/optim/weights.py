"""Averaged weights in and out: show them for a while, export them, save them.

Live weights sit in the parameters; the average is optimizer state. Nothing here needs a second model.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.optim.sharded import drop_gathered, is_writer, local, share_failure, whole
from paceline.optim.state import State


@runtime_checkable
class KeepsAverage(Protocol):
    """What this module needs of an optimizer."""

    def returned_averages(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter with its returned average; one whose average is still live is left out."""

    def shows_average(self) -> bool:
        """Whether the parameters hold the average at present."""

    def eval(self, model: nn.Module | None = None) -> None:
        """Put the average into the parameters of that model, which sharded parameters need."""

    def train(self) -> None:
        """Put live back into the parameters."""


Optimizers = torch.optim.Optimizer | KeepsAverage | Sequence[torch.optim.Optimizer | KeepsAverage]
"""One optimizer, or those that train a model together."""

Others = Literal["refuse", "live"]
"""What happens to trainable parameters that no optimizer knows."""


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

# The blocks that run: each optimizer with all that were entered together, and whether they showed it before.
_blocks: WeakKeyDictionary[Any, dict[KeepsAverage, bool]] = WeakKeyDictionary()


def in_any_block() -> bool:
    """Whether there is any of which `in_block` holds."""
    return len(_blocks) > 0


def in_block(optimizer: object) -> bool:
    """Whether `with averaged_weights(optimizer)` is running."""
    return optimizer in _blocks


def abandon_block(optimizer: object) -> None:
    """End a block that an interrupt left open; leaving it later changes nothing for this optimizer."""
    entered = _blocks.pop(optimizer, None)
    if entered is not None:
        entered.pop(optimizer, None)  # type: ignore[call-overload]


@contextmanager
def averaged_weights(
    optimizer: Optimizers,
    model: nn.Module | None = None,
    *,
    others: Others = "refuse",
) -> Iterator[None]:
    """Show the averaged weights in the parameters for the length of a with-block.

    Inside the block the model computes with the average and `model.state_dict()` holds it. Leaving,
    also by an exception, puts the live weights back bit for bit. `optimizer.step()` and a second block
    inside raise; `optimizer.state_dict()` stays complete and says what the parameters hold.

    Weights and average of one precision change places tensor by tensor, which needs the memory of the
    largest. For bfloat16 or float16 parameters a copy of live is kept for the block, and the parameters
    show the average rounded to their precision.

    Arguments:
        optimizer: a `PACE`, or a list of several optimizers that train the model together.
        model: the model that they train. Sharded parameters need it: FSDP2 keeps gathered copies of
            weights, which are dropped when the block begins and ends.
        others: what happens to trainable parameters of the model that no optimizer knows. "refuse" raises
            ValueError with their names; "live" leaves them as they are.

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
    keepers = _keepers_of(optimizer)
    for given, keeper in zip(_listed(optimizer), keepers, strict=True):
        _refuse_copies(given, keeper)
    if any(map(in_block, keepers)):
        raise RuntimeError("averaged_weights is already active for this optimizer; blocks do not nest")
    if model is not None:
        drop_gathered(model)  # which replaces parameters: those of the optimizer come back
        _check_known(keepers, model, others)
    entered: dict[KeepsAverage, bool] = {}
    try:
        for keeper in keepers:
            entered[keeper] = keeper.shows_average()  # by eval(): the block then leaves it so
            _blocks[keeper] = entered
            if model is None:
                keeper.eval()
            else:
                keeper.eval(model)
        yield
    finally:
        try:
            _leave(entered)
        finally:  # again: an interrupt may have come in the middle, and doing it twice changes nothing
            _leave(entered)


def _leave(entered: dict[KeepsAverage, bool]) -> None:
    """Put live back, the last optimizer first."""
    for keeper, was_shown in reversed(list(entered.items())):
        _blocks.pop(keeper, None)
        if not was_shown and keeper.shows_average():
            keeper.train()


def _listed(optimizer: Any) -> list[Any]:
    """The optimizers that were given, one or several."""
    return list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]


def _keepers_of(optimizer: Any) -> list[KeepsAverage]:
    """Return what keeps the averages of one optimizer, or of each of several, which share no parameter."""
    keepers = [keeper_of(one) for one in _listed(optimizer)]
    seen: set[int] = set()
    for keeper in keepers if len(keepers) > 1 else ():
        known = known_parameters(keeper)
        if known & seen or not known:
            raise ValueError(
                f"{type(keeper).__name__} trains parameters of another optimizer in the list, or none; give "
                "each parameter's average once"
            )
        seen |= known
    if not keepers:
        raise ValueError("give at least one optimizer")
    return keepers


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


# Everywhere below an interrupt may come between any two lines. After each of them live is state["live"], or
# where there is none the parameter, and the average is state[key]; so what is half done can be undone.


def show_average_(parameter: Tensor, state: State, key: str) -> None:
    """Put state[key] into the parameter and keep its live weights as state["live"]."""
    average, live = state[key], parameter.detach().clone()
    state["live"] = live
    parameter.copy_(average)
    alike = average.dtype == parameter.dtype and average.device == parameter.device
    if alike and not _is_lent(average):
        # Two tensors hold the average now: the parameter keeps it, and the other takes live.
        state[key] = parameter.detach()
        average.copy_(live)
        state["live"] = average


def show_live_(parameter: Tensor, state: State, key: str) -> None:
    """Undo `show_average_`, bit for bit, also if the parameter was cast or moved in between."""
    average, live = state[key], state["live"]
    if not _is_one_memory(average, parameter):
        parameter.copy_(live)
        del state["live"]
        return
    kept = average.clone()
    state[key] = kept
    parameter.copy_(live)
    del state["live"]
    # The average goes back to where it was before the block.
    live.copy_(kept)
    state[key] = live


def _is_one_memory(average: Tensor, parameter: Tensor) -> bool:
    """Whether the average lies in the parameter, which shows it."""
    a, b = local(average), local(parameter.detach())
    return a.dtype == b.dtype and a.device == b.device and a.data_ptr() == b.data_ptr()


# By address: what state dicts that somebody still has refer to. A lent tensor keeps its memory.
_lent: WeakValueDictionary[int, Tensor] = WeakValueDictionary()


def lend(tensor: Tensor) -> Tensor:
    """Return the tensor under another name; while somebody has that, no block writes live into its memory."""
    address = local(tensor).data_ptr()
    known = _lent.get(address)
    if known is not None and known.shape == tensor.shape and known.dtype == tensor.dtype:
        return known
    alias = tensor.detach()
    if address:  # an empty tensor has none
        _lent[address] = alias
    return alias


def _is_lent(tensor: Tensor) -> bool:
    return len(_lent) > 0 and local(tensor).data_ptr() in _lent


def show_computed_(tensor: Tensor, state: State, average: Tensor) -> None:
    """Put an average that is not kept as it is into a tensor; its live weights become state["live"]."""
    state["live"] = tensor.detach().clone()
    tensor.copy_(average)


def show_kept_(tensor: Tensor, state: State) -> None:
    """Undo `show_computed_`, bit for bit."""
    tensor.copy_(state["live"])
    del state["live"]  # only now: whatever interrupts the copy, it is still there


# --- Exporting ------------------------------------------------------------------------------------


@torch.no_grad()
def averaged_state_dict(
    model: nn.Module,
    optimizer: Optimizers,
    dtype: torch.dtype | None = None,
    *,
    others: Others = "refuse",
) -> dict[str, Any]:
    """A copy of `model.state_dict()` with every parameter replaced by its average.

    Arguments:
        model: the model whose parameters the optimizer trains; `torch.compile` and
            DistributedDataParallel wrappers leave no trace in the names.
        optimizer: a `PACE`, or a list of several optimizers that train the model together.
        dtype: None gives the average as it is kept (float32 beside bfloat16 weights); a floating dtype
            casts all floating entries, as `model.to(dtype)` would.
        others: what happens to trainable parameters of the model that no optimizer knows. "refuse" raises
            ValueError with their names; "live" exports them as they are in the model.

    Returns:
        Name → tensor. Buffers and frozen parameters come from the model. Tied parameters share one
        tensor. Sharded parameters stay sharded.

    >>> import torch, paceline
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = paceline.PACE(model.parameters())
    >>> fresh = torch.nn.Linear(2, 1)
    >>> fresh.load_state_dict(paceline.averaged_state_dict(model, optimizer))
    <All keys matched successfully>
    """
    entries = _averaged_entries(model, optimizer, others)
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


def _averaged_entries(model: nn.Module, optimizer: Any, others: Others) -> "OrderedDict[str, Any]":
    """The model's state dict, cleanly named, its parameters replaced by their averages (not copied)."""
    keepers = _keepers_of(optimizer)
    averages = {tensor: average for keeper in keepers for tensor, average in keeper.returned_averages()}
    drop_gathered(model)
    own = model.state_dict(keep_vars=True)  # the parameters themselves, whatever they are called here
    _check_covered(averages, model, own)
    _check_known(keepers, model, others)
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


def known_parameters(keeper: KeepsAverage) -> set[int]:
    """The ids of the parameters that an optimizer trains; of a foreign one, of those that have an average."""
    groups = getattr(keeper, "param_groups", None)
    if groups is None:
        return {id(tensor) for tensor, _ in keeper.returned_averages()}
    return {id(parameter) for group in groups for parameter in group["params"]}


def unknown_parameters(keepers: Sequence[KeepsAverage], model: nn.Module) -> list[str]:
    """The names of the model's trainable parameters that no optimizer knows."""
    known = set().union(*map(known_parameters, keepers))
    rename = renamer(model)
    return [rename(n) for n, p in model.named_parameters() if p.requires_grad and id(p) not in known]


def _check_known(keepers: Sequence[KeepsAverage], model: nn.Module, others: Others) -> None:
    """Refuse a model of which a part would stay live without a word."""
    if others not in ("refuse", "live"):
        raise ValueError(f"Invalid others: {others!r}; allowed: 'refuse', 'live'")
    unknown = unknown_parameters(keepers, model) if others == "refuse" else []
    if unknown:
        raise ValueError(
            f"no optimizer given here trains {len(unknown)} trainable parameter(s) of the model, first "
            f"'{unknown[0]}', so there is no average of them. Give all optimizers of the model as a list; "
            'others="live" takes these parameters as they are'
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
    optimizer: Optimizers,
    path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    *,
    others: Others = "refuse",
) -> Path:
    """Save the returned model: the averaged weights, under the model's own names.

    A Hugging Face model is saved by its `save_pretrained` into the folder `path`, and `from_pretrained`
    loads the average. Any other module becomes one safetensors file: `path` itself if it ends in
    .safetensors, otherwise `path`/model.safetensors; load it with
    `model.load_state_dict(safetensors.torch.load_file(file))`. The file appears whole or not at all.

    With sharded parameters call it on every rank; rank 0 writes. `optimizer`, `dtype` and `others` as in
    `averaged_state_dict`.

    Returns:
        The folder or file that was written.
    """
    inner = _unwrapped(model)
    path = Path(path)
    if not isinstance(inner, _SavesPretrained) and path.suffix != ".safetensors":
        path = path / "model.safetensors"
    full: dict[str, Any] = {}
    gathered: dict[int, Tensor] = {}
    for name, value in _averaged_entries(model, optimizer, others).items():
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
