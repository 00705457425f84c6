"""Averaged weights in and out: show them for a while, export them, save them, compute with them.

Live weights sit in the parameters and averages in the optimizer. Nothing here needs a second model.
"""

import os
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol, final, runtime_checkable
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline.rebuilt.sharding import is_sharded, is_writer, local, same_values, share_failure, whole
from paceline.rebuilt.state import State, average_of, is_begun

STALE = (
    "the model was loaded after the optimizer, from a checkpoint of the average; load the model first, or "
    "call "
    "optimizer.train() after loading"
)
HOLD = "parameters_hold"
"""The group entry that says which weights the parameters hold: "live", or the name of an average."""


# --- One parameter --------------------------------------------------------------------------------------


def show_(parameter: Tensor, state: State, key: str) -> None:
    """Put an average into a parameter and keep its live weights as state["live"].

    Whatever interrupts it, `hide_` restores everything. No tensor that a state dict may hold is written to.
    """
    kept = state.get(key)
    if kept is not None and (kept.shape, kept.dtype, kept.device) == (
        parameter.shape,
        parameter.dtype,
        parameter.device,
    ):
        state["live"] = parameter.detach().clone()
        parameter.copy_(kept)
        state[key] = parameter.detach()  # the average is the parameter now; its own memory is free again
    else:
        live = parameter.detach().clone()
        state["live"] = live
        parameter.copy_(average_of(state, key, live))


def show_value_(parameter: Tensor, state: State, average: Tensor) -> None:
    """Put an average that is computed when it is asked for into a parameter."""
    state["live"] = parameter.detach().clone()
    parameter.copy_(average)


def hide_(parameter: Tensor, state: State) -> None:
    """Undo `show_`, bit for bit, also after an interrupt or if the parameter was cast or moved in between."""
    for key, value in state.items():
        if key != "live" and _is_alias(value, parameter):
            state[key] = value.clone()
    parameter.copy_(state["live"])
    del state["live"]  # only now: whatever interrupts the copy, live is still there


def _is_alias(value: Tensor, parameter: Tensor) -> bool:
    ours, theirs = local(value), local(parameter.detach())
    return ours.shape == theirs.shape and ours.numel() > 0 and ours.data_ptr() == theirs.data_ptr()


_Sum = tuple[int, torch.dtype, Tensor]
"""Where a parameter is, its dtype, and the sum of its bits."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sum_of_bits(parameter: Tensor) -> _Sum | None:
    """Return what tells whether a parameter was changed; its version does not see what goes by `.data`."""
    part = local(parameter.detach())
    if type(part) is not Tensor or part.element_size() not in _INTEGERS or part.is_meta:
        return None
    return part.data_ptr(), part.dtype, part.view(_INTEGERS[part.element_size()]).sum()


def _was_changed(parameter: Tensor, before: _Sum | None) -> bool:
    """Return whether a parameter has changed in place; a cast or a move is no change."""
    now = _sum_of_bits(parameter)
    if before is None or now is None or before[:2] != now[:2]:
        return False
    return not torch.equal(before[2], now[2])


# --- One optimizer --------------------------------------------------------------------------------------


@final
class Keeper:
    """The averages that an optimizer keeps, and which weights its parameters hold.

    Arguments:
        optimizer: the owner of the parameters.
        memory: returns the state of each parameter that has averages.
        returned: returns the name of the average that a group returns.
        value: returns an average of this name, of a parameter with this state and these live weights. None:
        the
            one that is kept under that name.
        kept: entries of a state that are averages, or begin as one, besides "returned".
    """

    def __init__(
        self,
        optimizer: Optimizer,
        memory: Callable[[], MutableMapping[Tensor, State]],
        returned: Callable[[dict[str, Any]], str],
        value: Callable[[str, Tensor, State, Tensor], Tensor] | None = None,
        kept: tuple[str, ...] = ("average",),
    ) -> None:
        self._optimizer = ref(optimizer)  # an attached optimizer must not be kept alive by its keeper
        self._memory, self._returned, self._value = memory, returned, value or _kept
        self.kept = kept
        self.in_block = False
        self._sums: dict[int, _Sum | None] = {}  # of the parameters, as they were shown
        self._copies: list[Any] = []  # modules that may hold copies of what is shown
        self.loaded_live: dict[Tensor, Tensor] = {}
        """Live weights that came with a loaded state, until the first step after it."""
        self.loaded_name = "live"

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer."""
        optimizer = self._optimizer()
        if optimizer is None:
            raise RuntimeError("the optimizer of these averages is gone")
        return optimizer.param_groups

    @property
    def shown(self) -> str:
        """The weights that the parameters hold: "live", or the name of an average."""
        held = {str(group.get(HOLD, "live")) for group in self.groups}
        return min(held - {"live"}, default="live")

    def remembered(self) -> Iterator[tuple[dict[str, Any], Tensor, State]]:
        """Yield each parameter that has a state, once, with its group."""
        memory, seen = self._memory(), set[int]()
        for group in self.groups:
            for parameter in group["params"]:
                state = memory.get(parameter)
                if state and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield group, parameter, state

    def averages(self, name: str | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter with its average; one whose average is still live is left out."""
        self.notice_stale_load()
        for group, parameter, state in self.remembered():
            key = self._key(name, group)
            if self._is_begun(state, key):
                yield parameter, self._value(key, parameter, state, state.get("live", parameter.detach()))

    def live_weights(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter with its live weights, wherever they are at present."""
        self.notice_stale_load()
        for _, parameter, state in self.remembered():
            yield parameter, state.get("live", parameter.detach())

    def _is_begun(self, state: State, key: str) -> bool:
        if key in ("average", "returned"):
            return is_begun(state, key)
        parts = [part for part in self.kept if part.startswith(f"{key}_")]
        return state["step"].item() > 0 and all(part in state for part in parts)

    # Evaluation often runs in inference mode, where new tensors could not be written to later.
    @torch.inference_mode(False)
    @torch.no_grad()
    def show(self, name: str | None = None, model: nn.Module | None = None) -> None:
        """Put the averages into the parameters; nothing is shown if that cannot be done."""
        self.notice_stale_load()
        if self.shown != "live":
            if name is not None and any(group.get(HOLD) != name for group in self.groups):
                raise RuntimeError(
                    f"the parameters hold {self.shown!r} at present; call train() before {name!r}"
                )
            return
        self._refuse_others()
        modules = _gathering_modules(model)
        _drop_copies(modules)  # of live; nothing computes with the weights until all are shown
        _check_sharded(model, self.remembered())
        self._copies = modules
        try:
            for group in self.groups:
                group[HOLD] = self._key(name, group)
            for group, parameter, state in self.remembered():
                key = self._key(name, group)
                if not self._is_begun(
                    state, key
                ):  # it is live; a saved state then has the same entries for all
                    show_value_(parameter, state, parameter.detach())
                elif key in ("average", "returned"):
                    show_(parameter, state, key)
                else:
                    show_value_(parameter, state, self._value(key, parameter, state, parameter.detach()))
                self._sums[id(parameter)] = _sum_of_bits(parameter)
        except BaseException:
            self.hide(model)
            raise

    @torch.inference_mode(False)
    @torch.no_grad()
    def hide(self, model: nn.Module | None = None) -> None:
        """Put the live weights back; nothing happens if they are there."""
        if self.shown == "live":
            return
        self.drop_copies(model)
        changed = 0
        for parameter, state in self._memory().items():  # also those that were taken out of their group
            if "live" in state:
                changed += _was_changed(parameter, self._sums.pop(id(parameter), None))
                hide_(parameter, state)
        for group in self.groups:
            group[HOLD] = "live"
        if changed:
            warnings.warn(
                f"{changed} parameter(s) were changed while they held the average, as by load_state_dict, "
                "Embedding(max_norm) or a LoRA layer that merges on eval(): their averages may have changed "
                "with "
                "them, and their live weights are put back over the change; undo it (model.train() in the "
                "block), "
                "or change weights outside",
                stacklevel=3,
            )

    def drop_copies(self, model: nn.Module | None = None) -> None:
        """Drop copies of the weights, of the model that they were shown in and of this one."""
        _drop_copies([*self._copies, *_gathering_modules(model)])

    def _key(self, name: str | None, group: dict[str, Any]) -> str:
        """Return the name of the average of a group that is asked for."""
        key = self._returned(group)
        if name == "returned" != key:
            raise KeyError(f"no average is called 'returned'; {key!r} is the one that is returned")
        return name or key

    def _refuse_others(self) -> None:
        """Refuse to touch parameters that show the average of another optimizer."""
        others = [keeper for keeper in _KEEPERS.values() if keeper is not self and keeper.shown != "live"]
        shown = {id(p) for keeper in others for _, p, state in keeper.remembered() if "live" in state}
        if shown and any(id(p) in shown for group in self.groups for p in group["params"]):
            raise RuntimeError(
                "these parameters hold the average of another optimizer at present; call its train(), or "
                "leave "
                "its averaged_weights, first"
            )

    def make_ready_to_step(self) -> None:
        """Refuse a step inside a block, and put live back after a forgotten `eval()`."""
        if self.in_block:
            raise RuntimeError(
                "step() inside averaged_weights: the parameters hold the average; step outside"
            )
        self._refuse_others()
        if self.notice_stale_load():
            warnings.warn(f"{STALE}; this gradient was taken at the average", stacklevel=4)
        self.hide()

    def notice_stale_load(self) -> bool:
        """Return whether a model checkpoint of the average was loaded over the live weights of our state.

        A checkpoint made while the average was shown has the average in the model and live in the optimizer.
        If the model is loaded last, the parameters hold the average, and that is noted here.
        """
        if not self.loaded_live:
            return False
        loaded, self.loaded_live = self.loaded_live, {}
        stale = False
        for group, parameter, state in self.remembered():
            live = loaded.get(parameter)
            held = parameter.detach()
            if live is None or "live" in state or same_values(held, live.to(parameter)):
                continue
            known = ("average", "returned", *(part.rpartition("_")[0] for part in self.kept))
            for key in {self._returned(group), *({self.loaded_name} & {*known})}:
                if self._is_begun(state, key):
                    average = self._value(key, parameter, state, live)
                    if same_values(held, average.to(parameter)):
                        state["live"] = live
                        stale = True
        if stale:
            for group in self.groups:
                group[HOLD] = self.loaded_name
        return stale


def _kept(name: str, parameter: Tensor, state: State, live: Tensor) -> Tensor:
    if name not in ("average", "returned"):
        raise KeyError(
            f"no average is called {name!r}; there are 'average' and, with a return_power, 'returned'"
        )
    return average_of(state, name, live)


_KEEPERS: "WeakKeyDictionary[Optimizer, Keeper]" = WeakKeyDictionary()


def register(optimizer: Optimizer, keeper: Keeper) -> None:
    """Note the keeper of an optimizer, so that `averaged_weights` finds it."""
    _KEEPERS[optimizer] = keeper


def has_keeper(optimizer: Optimizer) -> bool:
    """Return whether an optimizer keeps an average."""
    return optimizer in _KEEPERS


def keeper_of(optimizer: object) -> Keeper:
    """Return the keeper of an optimizer, or of the one inside a trainer's wrapper. Raise TypeError without
    one."""
    inside = optimizer
    while hasattr(inside, "optimizer"):
        if type(inside).__module__.split(".")[0] == "deepspeed":
            raise RuntimeError(
                f"DeepSpeed's {type(inside).__name__} trains flat copies of the parameters, so that the "
                "model would not hold the average; use DDP or FSDP2, or the Trainer of transformers with "
                "paceline.integrations.huggingface.AveragedModelCallback"
            )
        inside = inside.optimizer
    keeper = _KEEPERS.get(inside) if isinstance(inside, Optimizer) else None
    if keeper is None:
        raise TypeError(
            f"{type(inside).__name__} keeps no average of its parameters; use paceline.PACE, or "
            "paceline.attach(optimizer) to keep one"
        )
    return keeper


def keepers_of(optimizers: object) -> list[Keeper]:
    """Return the keepers of one optimizer or of a sequence of them."""
    many = optimizers if isinstance(optimizers, Sequence) else [optimizers]
    if not many:
        raise ValueError("no optimizer was given")
    return [keeper_of(optimizer) for optimizer in many]


# --- Copies of weights that others keep -------------------------------------------------------------------


def _gathering_modules(model: nn.Module | None) -> list[Any]:
    """Return the modules that may hold gathered copies of sharded weights."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # before its import no module is of its kind
    if model is None or fsdp is None:
        return []
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def _check_sharded(model: nn.Module | None, remembered: Any) -> None:
    """Refuse sharded parameters of which gathered copies may be unknown."""
    sharded = {id(parameter) for _, parameter, _ in remembered if is_sharded(parameter)}
    if sharded and model is None:
        raise RuntimeError(
            "these parameters are sharded, and FSDP2 may still hold gathered copies of their live weights; "
            "write averaged_weights(optimizer, model=model), so that they are dropped"
        )
    if model is not None and not sharded <= {id(parameter) for parameter in model.parameters()}:
        raise RuntimeError("model= lacks sharded parameters of this optimizer; pass the whole model")


def _drop_copies(modules: list[Any]) -> None:
    """Drop copies of weights before they are exchanged; an interrupt here is followed by another `hide`."""
    torch.clear_autocast_cache()
    for module in modules:
        module.reshard()


# --- Showing ----------------------------------------------------------------------------------------------


@contextmanager
def averaged_weights(
    optimizers: Optimizer | Sequence[Optimizer], name: str | None = None, *, model: nn.Module | None = None
) -> Iterator[None]:
    """Show the averaged weights in the parameters for the length of a with-block.

    Inside the block the model computes with the average, and `model.state_dict()` holds it. Leaving, also by
    an exception, puts the live weights back bit for bit. `optimizer.step()` and a second block inside raise.

    Arguments:
        optimizers: one, or all those that train the model.
        name: a further average of `attach`; None: the one that is returned.
        model: required under FSDP2, whose modules may hold gathered copies of weights.

    >>> import torch, paceline
    """
    keepers = keepers_of(optimizers)
    if any(keeper.in_block for keeper in keepers):
        raise RuntimeError("averaged_weights is already active for this optimizer; blocks do not nest")
    with ExitStack() as stack:
        for keeper in keepers:
            stack.enter_context(_block(keeper, name, model))
        yield


@contextmanager
def _block(keeper: Keeper, name: str | None, model: nn.Module | None) -> Iterator[None]:
    was_shown = keeper.shown != "live"  # by eval(): the block then leaves it so
    try:
        keeper.show(name, model)
        keeper.in_block = True
        yield
    finally:
        keeper.in_block = False
        if not was_shown:
            try:
                keeper.hide(model)
            except BaseException:  # a second Ctrl-C: what is left can still be put back
                keeper.hide(model)
                raise


def reset_average(optimizers: Optimizer | Sequence[Optimizer]) -> None:
    """Start the averages again from the live weights, for example for a second phase of training.

    Until its next step a parameter's average is its live weight. Moments and step counts stay, and with them
    the averaging rate.
    """
    keepers = keepers_of(optimizers)
    if any(keeper.in_block for keeper in keepers):
        raise RuntimeError("reset_average inside averaged_weights: leave the block first")
    if not all(keeper.kept for keeper in keepers):
        raise TypeError("this optimizer computes its average from its own state, and cannot start it again")
    for keeper in keepers:
        if keeper.notice_stale_load():
            warnings.warn(STALE, stacklevel=2)
        keeper.hide()
        for _, _, state in keeper.remembered():
            for key in [key for key in state if key.startswith((*keeper.kept, "returned"))]:
                del state[key]


# --- Exporting --------------------------------------------------------------------------------------------

Others = Literal["refuse", "live"]


@torch.no_grad()
def averaged_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
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
    entries = _averaged_entries(model, optimizers, others)
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


def _averaged_entries(model: nn.Module, optimizers: Any, others: Others) -> "OrderedDict[str, Any]":
    """Return the model's state dict, cleanly named, its parameters replaced by their averages (not
    copied)."""
    keepers = keepers_of(optimizers)
    averages = {p: average for keeper in keepers for p, average in keeper.averages()}
    known = {id(p) for keeper in keepers for group in keeper.groups for p in group["params"]}
    own = model.state_dict(keep_vars=True)  # the parameters themselves, whatever they are called here
    _check_covered(averages, known, model, own, others)
    rename = renamer(model)
    tensors = {id(v): averages.get(v, v).detach() for v in own.values() if isinstance(v, Tensor)}
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
            f"optimizers, so "
            'there is no average of them; pass all optimizers of the model, or others="live" to export these '
            "as they are"
        )
    missing = len(
        {id(p) for p in named.values() if p in averages} - {id(value) for value in entries.values()}
    )
    if missing:
        raise ValueError(
            f"{missing} trained parameter(s) do not appear in model.state_dict(keep_vars=True), so their "
            "averages cannot be exported; a hook or an override of state_dict replaces them"
        )


def renamer(model: nn.Module) -> Callable[[str], str]:
    """Return a function that removes the parts of names that torch.compile and DDP add."""
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


def averaged_tensors(
    model: nn.Module, optimizers: Optimizer | Sequence[Optimizer], name: str | None = None
) -> dict[str, Tensor]:
    """Return the model's parameters by name, averaged, for `torch.func.functional_call`; nothing is copied.

    The model keeps training on its live weights while the average runs next to it, as a teacher or a
    reference. The tensors stay current until the next `averaged_weights` block or load; those of a `Blend`
    are of now.
    """
    found: dict[Tensor, Tensor] = {}
    for keeper in keepers_of(optimizers):
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
    return {path: found.get(p, p).detach() for path, p in model.named_parameters(remove_duplicate=False)}


# --- Saving -----------------------------------------------------------------------------------------------


@runtime_checkable
class _SavesPretrained(Protocol):
    """A Hugging Face model (transformers, peft, diffusers)."""

    def save_pretrained(self, save_directory: str, *, state_dict: dict[str, Tensor]) -> Any: ...


def _unwrapped(model: nn.Module) -> nn.Module:
    while True:
        children = dict(model.named_children())
        if isinstance(model, DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif list(children) == ["_orig_mod"]:
            model = children["_orig_mod"]
        else:
            return model


def save_averaged(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
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
    inner = _unwrapped(model)
    path = Path(path)
    if not isinstance(inner, _SavesPretrained) and path.suffix != ".safetensors":
        path = path / "model.safetensors"
    full: dict[str, Any] = {}
    gathered: dict[int, Tensor] = {}
    for name, value in _averaged_entries(model, optimizers, others).items():
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
    """Write a file that appears whole or not at all."""
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
    # safetensors refuses shared tensors; tied weights are written under each of their names.
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
