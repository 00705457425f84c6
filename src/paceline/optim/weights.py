"""Averaged weights in the parameters for a while, and who keeps them.

Live weights sit in the parameters and averages in the optimizer. Nothing here needs a second model.
"""

import sys
import warnings
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, final
from weakref import WeakKeyDictionary, proxy

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from paceline.optim.settings import Control
from paceline.optim.sharding import is_sharded, local, same_values
from paceline.optim.state import State, average_of, named_parameters, storage_of

STALE = (
    "the model was loaded after the optimizer, from a checkpoint of the average; load the model first, or "
    "call optimizer.train() after loading"
)
HOLD = "parameters_hold"
"""The group entry that says which weights the parameters hold: "live", or the name of an average."""
ATTACHED = "paceline_attached"
"""The group entry by which a copy of an attached optimizer, which has lost its hooks, is recognised."""

Optimizers = Optimizer | Sequence[Optimizer]


# --- One parameter --------------------------------------------------------------------------------------

_Sum = tuple[torch.dtype, Tensor]
"""The dtype of a parameter, and a sum of its bits, wherever they lie."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def show_(parameter: Tensor, state: State, average: Tensor | None, *, in_place: bool) -> _Sum | None:
    """Put an average into a parameter, and keep its live weights as state["live"]. None: it shows live.

    Whatever interrupts it, `hide_` restores everything. No tensor that a state dict may hold is written to.
    What is returned tells `hide_` whether the parameter was changed.
    """
    state["live"] = parameter.detach().clone()
    if average is not None:
        parameter.copy_(average)
    kind = (parameter.shape, parameter.dtype, parameter.device)
    for key, kept in state.items():
        if kept is average and (kept.shape, kept.dtype, kept.device) == kind and not in_place:
            state[key] = parameter.detach()  # the average is the parameter now; its own memory is free again
    return _sum_of_bits(parameter)


def hide_(parameter: Tensor, state: State, shown: _Sum | None) -> bool:
    """Undo `show_`, bit for bit, and return whether the parameter was changed since.

    It may have been cast or moved, and `show_` or another `hide_` may have been interrupted.
    """
    was_changed = _was_changed(parameter, shown)
    state.update(settled(state, parameter))
    parameter.copy_(state["live"])
    del state["live"]  # only now: whatever interrupts the copy, live is still there
    return was_changed


def settled(state: State, parameter: Tensor) -> State:
    """Return a state whose averages do not share memory with a parameter that shows one of them."""
    held = local(parameter.detach())
    if "live" not in state or not held.numel():
        return dict(state)
    return {k: v.clone() if local(v).data_ptr() == held.data_ptr() else v for k, v in state.items()}


def _sum_of_bits(parameter: Tensor) -> _Sum | None:
    """Return what tells whether a parameter was changed; its version does not see what goes by `.data`."""
    part = local(parameter.detach())
    if type(part) is not Tensor or part.element_size() not in _INTEGERS or part.is_meta:
        return None
    bits = part.view(_INTEGERS[part.element_size()])
    # Times its neighbour's upper half: a plain sum stays as it is where many weights are doubled or negated.
    mixed = bits.roll(1).bitwise_right_shift_(4 * part.element_size()).mul_(bits)
    # Without a dtype torch would sum a copy of 8 bytes an element.
    dtype = torch.promote_types(bits.dtype, torch.int32)
    return part.dtype, bits.sum(dtype=dtype) + 3 * mixed.sum(dtype=dtype)


def _was_changed(parameter: Tensor, before: _Sum | None) -> bool:
    """Return whether a parameter has changed; a cast or a move is no change."""
    now = _sum_of_bits(parameter)
    if before is None or now is None or before[0] != now[0]:
        return False
    return not torch.equal(before[1], now[1].to(before[1].device))


# --- One optimizer --------------------------------------------------------------------------------------


class AverageRule:
    """The rule of which averages are kept of each parameter: those of the control in its group."""

    kept: tuple[str, ...] = ("average",)
    """What the names of entries begin with that are averages, or begin as one."""

    def names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the averages of a group; the first is returned."""
        control: Control = group["control"]
        return control.averages[::-1]

    def value(self, name: str, parameter: Tensor, state: State, live: Tensor) -> Tensor | None:
        """Return an average next to these live weights; None if it has not begun, and is live."""
        if name == "returned" and storage_of(state, name) is None:
            name = "average"  # a control of one average was changed for one of two; the next step makes it
        if storage_of(state, name) is None or state["step"].item() == 0:
            return None
        return average_of(state, name, live)


@final
class Keeper:
    """The averages that an optimizer keeps, and which weights its parameters hold.

    Arguments:
        optimizer: the owner of the parameters.
        rule: which averages there are, and what they are.
        memory: the state of each parameter that has averages; None: the optimizer's own.
    """

    def __init__(
        self, optimizer: Optimizer, rule: AverageRule, memory: MutableMapping[Tensor, State] | None = None
    ) -> None:
        # Neither the optimizer nor what holds it: nothing here may keep it alive.
        self._optimizer, self._memory, self.rule = proxy(optimizer), memory, rule
        self.in_block = False
        self.keeps_addresses = False
        """Whether a captured graph goes by the addresses of averages, which must not move then."""
        self.loaded_live: dict[Tensor, Tensor] = {}
        """Live weights that came with a loaded state, until the first step after it."""
        self._sums: dict[int, _Sum | None] = {}  # of the parameters, as they were shown
        self.asked: tuple[str | None, nn.Module | None] = (None, None)
        """The name and the model that the present averages were asked for with."""
        _KEEPERS[optimizer] = self

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        return groups

    @property
    def memory(self) -> MutableMapping[Tensor, State]:
        """The state of each parameter that has averages."""
        return self._optimizer.state if self._memory is None else self._memory

    @property
    def shown(self) -> str:
        """The weights that the parameters hold: "live", or the name of an average."""
        held = {str(group.get(HOLD, "live")) for group in self.groups}
        return min(held - {"live"}, default="live")

    def remembered(self) -> Iterator[tuple[dict[str, Any], Tensor, State]]:
        """Yield each parameter that has a state, with its group."""
        memory = self.memory
        for group in self.groups:
            for parameter in group["params"]:
                state = memory.get(parameter)
                if state:
                    yield group, parameter, state

    def averages(self, name: str | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter with its average; one whose average is still live is left out."""
        self._refuse_others()
        self.notice_stale_load()
        for group, parameter, state in self.remembered():
            live = state.get("live", parameter.detach())
            average = self.rule.value(self._key(name, group), parameter, state, live)
            if average is not None:
                yield parameter, average

    def live_weights(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter with its live weights, wherever they are at present."""
        self.notice_stale_load()
        for _, parameter, state in self.remembered():
            yield parameter, state.get("live", parameter.detach())

    def _key(self, name: str | None, group: dict[str, Any]) -> str:
        """Return the name of the average of a group that is asked for; None: the one that is returned."""
        names = self.rule.names(group)
        if name is not None and name not in names:
            raise KeyError(f"no average is called {name!r}; there are: {', '.join(sorted(names))}")
        return name or names[0]

    # Evaluation often runs in inference mode, where new tensors could not be written to later.
    @torch.inference_mode(False)
    @torch.no_grad()
    def show(self, name: str | None = None, model: nn.Module | None = None) -> None:
        """Put the averages into the parameters; nothing is shown if that cannot be done."""
        self.notice_stale_load()
        keys = [self._key(name, group) for group in self.groups]
        if self.shown != "live":
            if name is not None and any(group.get(HOLD) != name for group in self.groups):
                raise RuntimeError(
                    f"the parameters hold {self.shown!r} at present; call train() before {name!r}"
                )
            if all(id(parameter) in self._sums for _, parameter, _ in self.remembered()):
                return
            self.hide(model)  # an interrupted `hide` has put some live weights back
        self._refuse_others()
        self.asked = (name, model)
        self.drop_copies()  # of live; nothing computes with the weights until all are shown
        _check_sharded(model, self.remembered())  # now: a model that is gathered has other parameters
        try:
            for group, key in zip(self.groups, keys, strict=True):
                group[HOLD] = key
            for group, parameter, state in self.remembered():
                average = self.rule.value(group[HOLD], parameter, state, parameter.detach())
                # Also where it is live: a saved state then has the same entries for all.
                self._sums[id(parameter)] = show_(parameter, state, average, in_place=self.keeps_addresses)
        except BaseException:
            self.hide(model)
            raise

    @torch.inference_mode(False)
    @torch.no_grad()
    def hide(self, model: nn.Module | None = None) -> None:
        """Put the live weights back; nothing happens if they are there."""
        self.notice_stale_load()
        if self.shown == "live":
            return
        self.drop_copies(model)
        changed = 0
        for parameter, state in self.memory.items():  # also those that were taken out of their group
            if "live" in state:
                changed += hide_(parameter, state, self._sums.pop(id(parameter), None))
        for group in self.groups:
            group[HOLD] = "live"
        self.asked = (None, None)
        if changed:
            warnings.warn(
                f"{changed} parameter(s) were changed while they held the average, as by load_state_dict, "
                "Embedding(max_norm) or a LoRA layer that merges on eval(): their averages may have changed "
                "with them, and their live weights are put back over the change; undo it (model.train() in "
                "the block), or change weights outside",
                stacklevel=3,
            )

    def was_changed(self) -> bool:
        """Return whether a parameter was changed since it shows an average."""
        shown = self._sums
        return any(_was_changed(p, shown[id(p)]) for _, p, _ in self.remembered() if id(p) in shown)

    def drop_copies(self, model: nn.Module | None = None) -> None:
        """Drop copies of the weights, of the model that they were shown in and of this one.

        An interrupt here is followed by another `hide`.
        """
        torch.clear_autocast_cache()
        for module in [*_gathering_modules(self.asked[1]), *_gathering_modules(model)]:
            module.reshard()

    def _refuse_others(self) -> None:
        """Refuse to touch parameters that show the average of another optimizer."""
        others = [keeper for keeper in _KEEPERS.values() if keeper is not self and keeper.shown != "live"]
        shown = {id(p) for keeper in others for _, p, state in keeper.remembered() if "live" in state}
        if shown and any(id(p) in shown for group in self.groups for p in group["params"]):
            raise RuntimeError(
                "these parameters hold the average of another optimizer at present; call its train(), or "
                "leave its averaged_weights, first"
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
        self.loaded_live = {}  # only now: the model may be loaded after a train() or a block, too

    def notice_stale_load(self) -> bool:
        """Return whether a model checkpoint of the average was loaded over the live weights of our state.

        A checkpoint made while the average was shown has the average in the model and live in the optimizer.
        If the model is loaded last, the parameters hold the average, and that is noted here.
        """
        found = None
        alike: list[tuple[State, Tensor]] = []
        for group, parameter, state in self.remembered() if self.loaded_live else ():
            live, held = self.loaded_live.get(parameter), parameter.detach()
            if live is None or "live" in state:
                continue
            if same_values(held, live.to(parameter)):
                alike.append((state, live))
                continue
            for name in self.rule.names(group):
                average = self.rule.value(name, parameter, state, live)
                # The model's checkpoint was in the precision of its live weights.
                if average is not None and same_values(held, average.to(live.dtype).to(parameter)):
                    state["live"], found = live, name
        if found is not None:
            for state, live in alike:  # where average and live are equal: a state that is saved now has all
                state["live"] = live
            for group in self.groups:
                group[HOLD] = found
        return found is not None


_KEEPERS: "WeakKeyDictionary[Optimizer, Keeper]" = WeakKeyDictionary()


def has_keeper(optimizer: Optimizer) -> bool:
    """Return whether an optimizer keeps an average."""
    return optimizer in _KEEPERS


def _refuse_copies(optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
    """Refuse a step of a copy, which has the settings of an optimizer with averages and keeps none."""
    if has_keeper(optimizer):
        return
    name = type(optimizer).__name__
    if any(group.get(HOLD, "live") != "live" for group in optimizer.param_groups):
        raise RuntimeError(
            f"this {name} has loaded a state that was saved while the parameters held the average; load it "
            "into the optimizer that saved it, which puts the live weights back"
        )
    if any(ATTACHED in group for group in optimizer.param_groups):
        raise RuntimeError(
            f"this {name} is a copy of an attached optimizer, or has loaded the state of one; a copy keeps "
            "no averages. Make a new one, call attach() on it, and load the state then"
        )


register_optimizer_step_pre_hook(_refuse_copies)


def keeper_of(optimizer: object) -> Keeper:
    """Return the keeper of an optimizer, or of the one in a trainer's wrapper. Raise TypeError without it."""
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


def first_overlap(groups: list[dict[str, Any]]) -> str | None:
    """Return a message about two parameters whose memory overlaps, or None.

    Only one of them could be shown and put back.
    """
    spans = []
    for number, group in enumerate(groups):
        for name, parameter in named_parameters(group, number):
            part = local(parameter.detach())
            if part.is_meta or part.layout != torch.strided or not part.numel():
                continue
            reach = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
            start = part.data_ptr()
            spans.append((str(part.device), start, start + reach * part.element_size(), name))
    spans.sort()  # by where they begin: the first two that overlap are neighbours
    for (device, _, end, name), (next_device, start, _, next_name) in pairwise(spans):
        if device == next_device and start <= end:
            return f"{name} and {next_name} share memory; give the optimizer one of them"
    return None


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


# --- Showing ----------------------------------------------------------------------------------------------


@contextmanager
def averaged_weights(
    optimizers: Optimizers, name: str | None = None, *, model: nn.Module | None = None
) -> Iterator[None]:
    """Show the averaged weights in the parameters for the length of a with-block.

    Inside the block the model computes with the average, and `model.state_dict()` holds it. Leaving, also by
    an exception, puts the live weights back bit for bit. `optimizer.step()` and a second block inside raise.

    Arguments:
        optimizers: one, or all those that train the model.
        name: a further average of `attach`; None: the one that is returned.
        model: required under FSDP2, whose modules may hold gathered copies of weights.

    >>> import torch, paceline
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = paceline.PACE(model.parameters(), lr=0.1)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> with paceline.averaged_weights(optimizer):
    ...     _ = model(torch.ones(1, 2))  # of the average
    """
    keepers = keepers_of(optimizers)
    if any(keeper.in_block for keeper in keepers):
        raise RuntimeError("averaged_weights is already active for this optimizer; blocks do not nest")
    if len(keepers) > 1:  # the second would keep the first's average as its live weights
        shared = first_overlap([group for keeper in dict.fromkeys(keepers) for group in keeper.groups])
        if shared is not None:
            raise ValueError(shared)
    hidden = [keeper for keeper in keepers if keeper.shown == "live"]  # what eval() has shown stays so
    try:
        try:
            for keeper in keepers:
                keeper.show(name, model)
                keeper.in_block = True
            yield
        finally:
            _leave(keepers, hidden, model)
    except BaseException:  # Ctrl-C while it was left: what remains is done now
        _leave(keepers, hidden, model)
        raise


def _leave(keepers: list[Keeper], hidden: list[Keeper], model: nn.Module | None) -> None:
    for keeper in keepers:
        keeper.in_block = False
    if hidden:
        try:
            hidden[-1].hide(model)
        finally:  # one that cannot be put back keeps none of the others
            _leave(keepers, hidden[:-1], model)


def reset_average(optimizers: Optimizers) -> None:
    """Start the averages again from the live weights, for example for a second phase of training.

    Until its next step a parameter's average is its live weight. Moments and step counts stay, and with them
    the averaging rate.
    """
    keepers = keepers_of(optimizers)
    if any(keeper.in_block for keeper in keepers):
        raise RuntimeError("reset_average inside averaged_weights: leave the block first")
    if not all(keeper.rule.kept for keeper in keepers):
        raise TypeError("this optimizer computes its average from its own state, and cannot start it again")
    for keeper in keepers:
        if keeper.notice_stale_load():
            warnings.warn(STALE, stacklevel=2)
        keeper.hide()
        dropped = (*keeper.rule.kept, "average", "returned")  # and begin again as live
        for _, _, state in keeper.remembered():
            for key in [key for key in state if key.startswith(dropped)]:
                del state[key]
