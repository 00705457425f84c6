"""What all optimizers that keep an average share: which weights the parameters hold, saving, loading."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from paceline.optim import weights
from paceline.optim.checks import warn
from paceline.optim.loading import Format, Saved, admit
from paceline.optim.sharded import drop_gathered, is_any_sharded, same_values, sharded_like
from paceline.optim.state import State, is_seeded, name_of, overlapping, take_averages

_REQUIRES_GRAD = attrgetter("requires_grad")


class Averaging(Optimizer, ABC):
    """An optimizer whose parameters hold live weights and whose memory holds their average. Abstract."""

    format: Format
    # Not as attributes of the class: wrappers of trainers take on our class and look up the rest in us.
    _returned_name: str
    """Which weights `eval()` shows, in the group entry that says what the parameters hold."""
    _views: tuple[weights.KeepsAverage, ...]
    """What else `averaged_weights` may be given to show one of our averages."""
    _inner: "Averaging | None"
    """An optimizer of this kind underneath: only one of the two may show an average."""
    _outer: "Averaging | None"
    """Likewise, around this one."""
    _model: nn.Module | None
    """The model in which the average is shown, where `eval` was told."""
    after_exchange: Callable[[], None] | None
    """For whoever computes with copies of our parameters: called when those changed places with averages."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._complete()
        # Live weights that came with a loaded state, until the first step after it, and the name of
        # the average that was shown when it was saved.
        self._loaded_live: dict[Tensor, Tensor] = {}
        self._loaded_name = self._returned_name
        # Not a setting: every checkpoint says which weights the parameters held when it was made.
        self._built = False
        super().__init__(params, {**defaults, self.format.hold: "live"})
        self._refuse_shared_memory()
        self._built = True

    def _complete(self) -> None:
        """What a kind of optimizer does not say itself, and what is not pickled."""
        usual = {"_returned_name": "average", "_views": (), "_built": True}
        for name, value in {
            **usual,
            "_inner": None,
            "_outer": None,
            "_model": None,
            "after_exchange": None,
        }.items():
            self.__dict__.setdefault(name, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does; parameters that share memory with others are refused."""
        super().add_param_group(param_group)
        if self._built:
            try:
                self._refuse_shared_memory()
            except ValueError:
                self.param_groups.pop()
                raise

    def _refuse_shared_memory(self) -> None:
        """Raise ValueError with both names if an update of one parameter would change another."""
        names: dict[Tensor, str] = {}  # one that is listed twice is one, as to torch
        for number, group in enumerate(self.param_groups):
            for i, parameter in enumerate(group["params"]):
                names.setdefault(parameter, name_of(group, number, i))
        if (pair := overlapping(list(names))) is not None:
            first, second = (list(names.values())[place] for place in pair)
            raise ValueError(
                f"{first} and {second} lie in the same memory, so each would be moved and "
                "averaged twice; use one Parameter in both places (tied weights), or clone one of them"
            )

    # --- What a kind of optimizer has to say ------------------------------------------------------

    @property
    @abstractmethod
    def _memory(self) -> MutableMapping[Tensor, State]:
        """What is remembered of each parameter; `live` only while its average is shown."""

    @_memory.setter
    @abstractmethod
    def _memory(self, memory: dict[Tensor, State]) -> None: ...

    @abstractmethod
    def _average(self, name: str, parameter: Tensor, state: State, live: Tensor) -> Tensor:
        """The average of that name, of a parameter with this memory and these live weights."""

    @abstractmethod
    def _show(self, name: str, parameter: Tensor, state: State) -> None:
        """Put the average of that name into the parameter and keep live as state["live"]."""

    @abstractmethod
    def _hide(self, parameter: Tensor, state: State) -> None:
        """Undo `_show`, bit for bit."""

    @abstractmethod
    def _take_groups(self, saved: dict[Any, Any], groups: list[dict[str, Any]]) -> None:
        """Take in loaded groups, and what of the loaded state is not ours."""

    @abstractmethod
    def _take_in(self, parameter: Tensor, saved: Saved | None, group: dict[str, Any]) -> State | None:
        """What to remember of a parameter after a load; None: nothing yet."""

    # --- Which weights the parameters hold --------------------------------------------------------

    def _members(self) -> Iterator[Tensor]:
        """Each parameter once."""
        yield from dict.fromkeys(parameter for group in self.param_groups for parameter in group["params"])

    def _remembered(self) -> Iterator[tuple[Tensor, State]]:
        """Yield each parameter that is averaged, with its memory."""
        for parameter in self._members():
            state = self._memory.get(parameter)
            if state:
                yield parameter, state

    def returned_averages(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter with its returned average; one whose average is still live is left out."""
        yield from self._averages_named(self._returned_name)

    def _averages_named(self, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        self._notice_stale_load()
        for tensor, state in self._remembered():
            if is_seeded(state):
                yield tensor, self._average(name, tensor, state, self._live(tensor, state))

    def _live(self, tensor: Tensor, state: State) -> Tensor:
        """Where the live weights are: in the parameter, or set aside by us or by what is around us."""
        if "live" in state:
            return state["live"]
        if self._outer is not None:
            return self._outer._live(tensor, self._outer._memory.get(tensor, {}))
        return tensor.detach()

    def live_weights(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All that is averaged with its live weights, wherever they are at present."""
        self._notice_stale_load()
        for tensor, state in self._remembered():
            yield tensor, self._live(tensor, state)

    def shows_average(self) -> bool:
        """Whether the parameters hold the average at present."""
        return bool(self.param_groups[0][self.format.hold] != "live")

    def _enter(self, model: nn.Module | None) -> None:
        """Take note of the model whose gathered copies of weights are dropped at every exchange.

        Raises RuntimeError for sharded parameters without it, and ValueError for a model of other ones.
        """
        if is_any_sharded(self._members()):
            if model is None:
                raise RuntimeError(
                    "the parameters are sharded, and FSDP2 may keep gathered copies of them that hold other "
                    "weights; name the model: averaged_weights(optimizer, model=model), or "
                    "optimizer.eval(model) and optimizer.train(model)"
                )
            drop_gathered(model)  # gathered weights take the place of parameters
            own = {id(parameter) for parameter in model.parameters()}
            lost = sum(id(parameter) not in own for parameter in self._members())
            if lost:
                raise ValueError(
                    f"{lost} parameter(s) of the {type(self).__name__} are not of the model given; pass the "
                    "whole model that it trains (of several parts, torch.nn.ModuleList(parts))"
                )
        self._model = model

    def _drop_copies(self) -> None:
        """Drop what torch keeps of the weights: gathered ones, and autocast's of lower precision."""
        torch.clear_autocast_cache()
        if self._model is not None:
            drop_gathered(self._model)

    def _in_block(self) -> bool:
        keepers = self._keepers() if weights.in_any_block() else ()
        return any(map(weights.in_block, keepers))

    def _keepers(self) -> tuple[object, ...]:
        """Return what `averaged_weights` may know this optimizer by."""
        return weights.innermost(self), *self._views

    def eval(self, model: nn.Module | None = None) -> None:
        """Put the average into the parameters, until `train()` or the next `step()`.

        Sharded parameters need the model: what FSDP2 has gathered of it is dropped.
        """
        self._notice_stale_load()
        if not self.shows_average():
            self._enter(model)
            self._show_all(self._returned_name)

    # Evaluation often runs in inference mode, where new tensors could not be written to later.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _show_all(self, name: str) -> None:
        self._refuse_behind_outer()
        if self._inner is not None:
            self._inner.train()  # what is set aside must be live
        try:
            self._mark(name)
            self._drop_copies()
            for tensor, state in list(self._remembered()):
                if is_seeded(state):
                    self._show(name, tensor, state)
            if self.after_exchange is not None:
                self.after_exchange()
        except BaseException:
            self._put_live_back()
            raise

    def train(self, model: nn.Module | None = None, *, force: bool = False) -> None:
        """Put the live weights back into the parameters; nothing happens if they are there.

        `model` is only needed for sharded parameters, where `eval(model)` did not show the average but a
        load did. `force=True` also ends a block of `averaged_weights` that an interrupt has left open.
        """
        self._notice_stale_load()
        if self.shows_average():
            if force:
                for keeper in self._keepers():
                    weights.abandon_block(keeper)
            if self._in_block():
                raise RuntimeError(
                    "train() inside averaged_weights: leave the block instead. If an interrupt has left it "
                    "open, call train(force=True)"
                )
            if model is not None or self._model is None:
                self._enter(model)
        self._put_live_back()

    def _refuse_behind_outer(self) -> None:
        if self._outer is not None and self._outer.shows_average():
            raise RuntimeError(
                f"the parameters hold an average of the {type(self._outer).__name__} around this "
                f"{type(self).__name__}; leave its block or call its train() first"
            )

    def _put_live_back(self) -> None:
        self._notice_stale_load()
        if self.shows_average():
            try:
                self._restore_live()
            except BaseException:  # an interrupt: what is restored already is passed over
                self._restore_live()
                raise

    @torch.inference_mode(False)
    @torch.no_grad()
    def _restore_live(self) -> None:
        self._drop_copies()
        for tensor, state in list(self._remembered()):
            if "live" in state:
                self._hide(tensor, state)
        if self.after_exchange is not None:
            self.after_exchange()
        self._mark("live")
        self._model = None

    def _notice_stale_load(self) -> bool:
        """Whether a model checkpoint made of the average was loaded over live weights that came with ours.

        A checkpoint taken while the average was shown has the average in the model's part and live in
        the optimizer's; torch's set_state_dict loads the model's last. The average is then shown again.
        """
        if not self._loaded_live:
            return False
        stale = False
        for parameter, live in self._loaded_live.items():
            state = self._memory.get(parameter)
            if not state:
                continue
            average = self._average(self._loaded_name, parameter, state, live)
            held = parameter.detach()
            if same_values(held, average.to(parameter)) and not same_values(held, live.to(parameter)):
                state["live"] = live
                stale = True
        if stale:
            self._mark(self._loaded_name)
        self._loaded_live.clear()  # last: whatever interrupts this, it is noticed again
        return stale

    def _mark(self, held: str) -> None:
        # The first group tells what is shown: the first to be marked, and the last to be cleared.
        for group in self.param_groups if held != "live" else reversed(self.param_groups):
            group[self.format.hold] = held

    def make_ready_to_step(self) -> None:
        """Refuse a step inside a block; put live back after a forgotten `eval()`."""
        if self._in_block():
            raise RuntimeError(
                "step() inside averaged_weights: the parameters hold the average; step outside"
            )
        if self._notice_stale_load():
            warn(
                "the model was loaded after the optimizer, from a checkpoint of the average; this gradient "
                "was taken at the average. Call optimizer.train() after loading, or load the model first"
            )
        self._refuse_behind_outer()
        self._put_live_back()
        if self._inner is not None:
            self._inner.train()
        if not torch.compiler.is_compiling() and self._seems_to_have_others():
            self._follow_groups()

    def _seems_to_have_others(self) -> bool:
        """Whoever replaces parameters replaces all of a group. Frozen ones have no state to begin with."""
        memory = self._memory
        for group in self.param_groups:
            first = next(filter(_REQUIRES_GRAD, group["params"]), None)
            if first is not None and first not in memory:
                return True
        return False

    @torch.inference_mode(False)
    @torch.no_grad()
    def _follow_groups(self) -> None:
        """Give state to parameters put into the groups in place of others, which sharding a model does.

        Of those others all that was allocated is dropped, and with it the last that keeps them alive; but
        what steps were taken with stays, for the user may put them back.
        """
        members = dict.fromkeys(self._members())
        for parameter in [key for key in self._memory if isinstance(key, Tensor) and key not in members]:
            if not _has_stepped(self._memory[parameter]):
                del self._memory[parameter]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in self._memory:
                    entry = self._take_in(parameter, None, group)
                    if entry is not None:
                        self._memory[parameter] = entry

    def _seed_again(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Take averages anew where a reset or a load asked for it."""
        for parameter in parameters:
            state = self._memory[parameter]
            if "unseeded" in state:
                take_averages(parameter, state, self.format.wanted(group))
                del state["unseeded"]

    # --- Saving and loading -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch's. While the parameters hold the average, it also has the `live` weights."""
        self._notice_stale_load()
        if self._inner is not None:
            self._inner._notice_stale_load()
        self._follow_groups()
        self._refuse_replaced_parameters()
        with self.register_state_dict_post_hook(_settle, prepend=True):
            self._refresh_unseeded()
            return super().state_dict()

    def _refuse_replaced_parameters(self) -> None:
        """Say what has happened where torch would say KeyError and a number."""
        own = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        lost = sum(isinstance(key, Tensor) and id(key) not in own for key in self.state)
        if lost:
            raise RuntimeError(
                f"{type(self).__name__} has taken steps with {lost} parameter(s) that are in none of its "
                "groups now: they have been replaced or removed. Shard or move a model before the first "
                "step, or put them back"
            )

    def with_live(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Our `state_dict()` as it is while the parameters hold the average, to be saved beside that.

        Whoever loads both has live weights in the parameters then, in whichever order they are loaded.
        """
        if self.shows_average():
            return state_dict
        prefix, state = self.format.prefix, dict(state_dict["state"])
        groups = [{**group, self.format.hold: self._returned_name} for group in state_dict["param_groups"]]
        for group, packed in zip(self.param_groups, groups, strict=True):
            for parameter, key in zip(group["params"], packed["params"], strict=True):
                if any(name.startswith(prefix) for name in state.get(key, {})):
                    live = self._live(parameter, self._memory[parameter])
                    state[key] = {prefix + "live": live, **state[key]}
        return {**state_dict, "param_groups": groups, "state": state}

    @torch.no_grad()
    def _refresh_unseeded(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self._memory.get(parameter)
                if state and not is_seeded(state):
                    take_averages(parameter, state, self.format.wanted(group))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state; every tensor keeps its precision.

        A state without averages (that of the optimizer underneath alone) seeds them from the live
        weights of the next step, with a warning. A state saved while the parameters held the average
        puts its live weights back into them. If anything does not fit, ValueError says what, and
        nothing is changed.
        """
        notes: list[str] = []
        # Last of all pre-hooks: torch would cast what it sees to the parameter's precision.
        with self.register_load_state_dict_pre_hook(partial(admit, notes, self.format, self._memory)):
            super().load_state_dict(state_dict)
        for note in notes:
            warnings.warn(note, stacklevel=2)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "defaults" not in state:  # from load_state_dict; otherwise unpickled or copied
            self._adopt(**state)
            state = {}
        else:
            self._complete()
        super().__setstate__(state)
        if self._inner is not None:
            self._inner._outer = self

    @torch.inference_mode(False)
    @torch.no_grad()
    def _adopt(self, state: dict[Any, Any], param_groups: list[dict[str, Any]]) -> None:
        """Take in a state that `admit` let pass and torch mapped to our parameters."""
        held = self.param_groups[0][self.format.hold]
        # A fresh optimizer in eval mode shows nothing yet; what is loaded next is live.
        showed, model = any("live" in entry for entry in self._memory.values()), self._model
        self._put_live_back()
        try:
            self._take_groups(state, param_groups)
        except BaseException:
            if showed:
                self._model = model
                self._show_all(held)
            raise
        self._loaded_name = self.param_groups[0][self.format.hold]
        self._mark("live")
        adopted: dict[Any, Any] = {k: v for k, v in state.items() if not isinstance(v, Saved)}
        for group in self.param_groups:
            for parameter in group["params"]:
                self._memory.pop(parameter, None)  # its room first
                saved = state.get(parameter)
                entry = self._take_in(parameter, saved, group)
                if entry is not None:
                    adopted[parameter] = entry
                if saved is not None and "live" in saved.own:
                    parameter.copy_(sharded_like(saved.own["live"], parameter))
                    if entry and is_seeded(entry):
                        self._loaded_live[parameter] = parameter.detach().clone()
        self._memory = adopted
        if showed:
            self._loaded_live.clear()
            self._model = model
            self._show_all(held)


def reset_average(optimizer: Optimizer) -> None:
    """Start the averages anew from the live weights, e.g. for a second phase of training.

    Until its next step a parameter's average is again its live weight, so weights may still be loaded.
    Moments and step counts stay, and with them the averaging rate.

    If the model was loaded after the optimizer, from a checkpoint of the average, live weights come back
    with a warning.

    >>> import torch, paceline
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = paceline.PACE(model.parameters())
    >>> paceline.reset_average(optimizer)
    """
    keeper = weights.keeper_of(optimizer)
    if isinstance(keeper, Averaging) and keeper._notice_stale_load():
        warn(
            "the model was loaded after the optimizer, from a checkpoint of the average; live weights come "
            "back now, and averages start from them. Load the model first, or call optimizer.train() after "
            "loading; to start from the average, load it after that"
        )
    keeper.train()
    if not isinstance(keeper, Averaging):
        raise TypeError(f"reset_average takes the optimizer itself, not {type(keeper).__name__}")
    for _, state in keeper._remembered():
        state["unseeded"] = torch.tensor(True)


def _has_stepped(state: State) -> bool:
    """Whether moments are of steps that were taken, also where the average begins anew. Looking at the state
    of a parameter that has none leaves an empty one."""
    return bool(state) and state["step"].item() > 0


def _settle(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """While averages are shown, copy what changes places when live comes back, and give all of them live."""
    assert isinstance(optimizer, Averaging)
    if optimizer._inner is not None:
        _settle(optimizer._inner, state_dict)
    prefix, packed_by = optimizer.format.prefix, optimizer.format.packed
    moving = [prefix + key for key in ("live", "average", "returned")]
    for group, packed in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for parameter, key in zip(group["params"], packed["params"], strict=True):
            entries = state_dict["state"].get(key, {})
            if not any(name.startswith(prefix) for name in entries):
                continue
            if packed[optimizer.format.hold] != "live":
                entries = {moving[0]: parameter.detach(), **entries}
                copies = {k: entries[k].clone() for k in moving if k in entries}
                entries = {**entries, **copies}
            else:  # a block that begins later leaves them as they are
                lent = {k: weights.lend(entries[k]) for k in moving if k in entries}
                entries = {**entries, **lent}
            if packed_by is not None:
                entries = packed_by(optimizer._live(parameter, entries), entries, group)
            state_dict["state"][key] = entries
