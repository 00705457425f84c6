"""Averages and a control beside any torch optimizer, by its own hooks.

The base stays what it is: its class, schedulers, GradScaler and checkpoints. What is kept here is joined to
its state dict under names of our own, and taken out again before the base loads one.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol, TypeVar, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from paceline.rebuilt import checkpoint
from paceline.rebuilt.averages import Average
from paceline.rebuilt.foreach import chunks, move_averages_
from paceline.rebuilt.rule import step_scalars
from paceline.rebuilt.settings import AverageDtype, Control, Settings, check, control_of, flat
from paceline.rebuilt.sharding import any_nonzero, local
from paceline.rebuilt.state import (
    Entry,
    State,
    average_dtype,
    average_of,
    expected,
    follow_,
    keep_average_,
    name_of,
    unset_,
    unsupported_storage,
)
from paceline.rebuilt.weights import HOLD, Keeper, has_keeper, register

PREFIX = "paceline_"
"""Of our entries in the base's state dict."""
MARK = "paceline_attached"
"""The group entry by which a copy of an attached optimizer, which has lost its hooks, is recognised."""

Base = TypeVar("Base", bound=Optimizer)


def attach(
    optimizer: Base,
    *,
    control: Control = Control.none(),  # noqa: B008  a frozen value
    averages: Mapping[str, Average] | None = None,
    average_dtype: AverageDtype = "float32",
) -> Base:
    """Keep averages beside an optimizer, and steer it if a control is given. Return the same optimizer.

    Without a control training stays unchanged, bit for bit. A group may have a "control" of its own. Attach
    before a state is loaded; a copy or an unpickled optimizer must be attached again.

    Arguments:
        optimizer: any torch optimizer that keeps no average of its own.
        control: `Control.push()`, `Control.pull()` or `Control.none()`.
        averages: name → further averages, which never influence training.
        average_dtype: how the averages of the control are kept, as in `PACE`.

    >>> import torch, paceline
    """
    if isinstance(optimizer, Optimizer) and any("train_mode" in group for group in optimizer.param_groups):
        raise ValueError(
            f"{type(optimizer).__name__} keeps its parameters between two averages of its own; use "
            "paceline.optim.baselines.ScheduleFree to evaluate it"
        )
    _check_names(averages or {})
    Attachment(optimizer, _Averaging(control, dict(averages or {}), average_dtype))
    return optimizer


def _check_names(averages: Mapping[str, Average]) -> None:
    for name, average in averages.items():
        if not name.isidentifier() or name in ("live", "average", "returned", "step"):
            raise ValueError(f"Invalid name of an average: {name!r}; allowed: an identifier other than live")
        if not isinstance(average, Average):
            raise TypeError(
                f"the average {name!r} is {average!r}; use PowerLaw, HalfLife, BEMA or another of averages.py"
            )


@dataclass(slots=True)
class Work:
    """What one step of the base means for one parameter."""

    live: Tensor
    state: State
    group: dict[str, Any]
    held: list[Tensor] = field(default_factory=list)
    """Tensors that a rule keeps from before the base's step until after it."""


class Rule(Protocol):
    """What happens around the step of a base."""

    settings: dict[str, Any]
    """Entries of every parameter group."""
    kept: tuple[str, ...]
    """Entries that are averages or begin as one, besides "returned"."""
    moves_live: bool
    """Whether `before_` changes live, where a closure takes its gradient."""

    def entries(self, live: Tensor, group: dict[str, Any]) -> dict[str, Entry]:
        """Return what is kept of a parameter; averages begin as live before its first step."""

    def before_(self, work: Work) -> None:
        """Prepare a parameter for the base's step."""

    def after_(self, works: list[Work], t: int) -> None:
        """Finish step t of parameters of one group, device and dtype, which the base has moved."""

    def undo_(self, work: Work) -> None:
        """Undo `before_`, after a step that was broken off."""

    def factor(self, group: dict[str, Any]) -> float:
        """Return the factor on the base's learning rate."""

    def returned(self, group: dict[str, Any]) -> str:
        """Return the name of the average that is returned."""

    def value(self, name: str, parameter: Tensor, state: State, live: Tensor) -> Tensor:
        """Return an average of this name, next to these live weights."""

    def check(self, group: dict[str, Any]) -> None:
        """Raise ValueError if a setting of a group is out of range."""


@final
class Attachment:
    """The averages of one optimizer, and the hooks that keep them."""

    def __init__(self, optimizer: Optimizer, rule: Rule) -> None:
        _check_base(optimizer)
        for group in optimizer.param_groups:
            settings = {**rule.settings, HOLD: "live", MARK: True}
            if "control" in group:
                settings |= flat(group.pop("control"))
            rule.check({**group, **settings})
            group.update(settings)
        optimizer.defaults.update({**rule.settings, HOLD: "live", MARK: True})  # for groups added later
        self.rule = rule
        self.memory: dict[Tensor, State] = {}
        self.keeper = Keeper(optimizer, lambda: self.memory, rule.returned, rule.value, rule.kept)
        register(optimizer, self.keeper)
        self._call: FrameType | None = None  # of the step that is being taken
        self._rates: list[tuple[dict[str, Any], Any, Any]] = []  # group, its lr, and the scaled one
        self._works: list[Work] = []
        self._in_closure = False
        self._loaded = checkpoint.Loaded()
        optimizer.register_step_pre_hook(self._before_step)
        handle = optimizer.register_step_post_hook(self._after_step)
        # Before the user's own, which may clear gradients, step a scheduler or save.
        optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
        optimizer.register_state_dict_pre_hook(self._before_save)
        optimizer.register_state_dict_post_hook(self._join)
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_load_state_dict_post_hook(self._after_load)
        _ATTACHED[optimizer] = self

    # --- The step
    # ---------------------------------------------------------------------------------------------

    def _before_step(self, base: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        frame = inspect.currentframe()
        caller = frame.f_back if frame is not None else None
        if self._is_stepping():
            return None  # step() of a subclass calls super().step(), whose hooks are these again
        self._give_up()
        self.keeper.make_ready_to_step()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self._plan(base, closure is not None)
        self._scale_rates(base)
        self._call = caller
        if closure is None:
            return None
        guarded = self._guarded(base, closure)
        return (
            ((args[0], guarded, *args[2:]), kwargs)
            if len(args) > 1
            else (args, {**kwargs, "closure": guarded})
        )

    def _guarded(self, base: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that finds live weights and the user's lr, and after whose errors nothing is
        left."""
        calls = 0

        def guarded() -> Any:
            nonlocal calls
            calls += 1
            if self.rule.moves_live and calls > 1:
                raise RuntimeError(
                    f"{type(base).__name__} calls its closure twice a step; it cannot be steered so"
                )
            try:
                self._restore_rates()
                if self.rule.moves_live:
                    self._for_all(self.rule.undo_)
                self._in_closure = True
                loss = closure()
                self.keeper.hide()  # a closure that evaluates may end with the average shown
                if self.rule.moves_live:
                    self._for_all(self.rule.before_)
                self._scale_rates(base)
            except BaseException:  # hooks have no `finally`
                self._give_up()
                raise
            finally:
                self._in_closure = False
            return loss

        return guarded

    @torch.no_grad()
    def _for_all(self, change: Callable[[Work], None]) -> None:
        for work in self._works:
            change(work)

    def _is_stepping(self) -> bool:
        return self._call is not None and _is_running(self._call)

    def _before_save(self, base: Optimizer) -> None:
        """Undo what a broken step has left; a state in the middle of a step would be of no time at all."""
        if not self._is_stepping():
            self._give_up()
        elif not self._in_closure:
            raise RuntimeError("state_dict() in the middle of step(); call it before or after the step")

    @torch.no_grad()
    def _give_up(self) -> None:
        """Undo what a step that was broken off has left."""
        self._restore_rates()
        self._for_all(self.rule.undo_)
        self._works, self._call = [], None

    def _scale_rates(self, base: Optimizer) -> None:
        for group in base.param_groups:
            factor = self.rule.factor(group)
            if factor == 1 or "lr" not in group:
                continue
            # A new tensor for a tensor: groups may share theirs, and a graph may read it.
            rate, scaled = group["lr"], group["lr"] * factor
            self._rates.append((group, rate, scaled))
            group["lr"] = scaled

    def _restore_rates(self) -> None:
        while self._rates:
            group, rate, scaled = self._rates[-1]
            changed = group["lr"] is not scaled or (isinstance(scaled, Tensor) and scaled._version > 0)
            if not changed:
                group["lr"] = rate
            lr = group["lr"]
            self._rates.pop()  # only now: whatever interrupts this, nothing is forgotten
            if changed and lr is not rate:
                warnings.warn(
                    f"lr was changed from {float(rate):g} to {float(lr):g} within a step, or after one that "
                    "raised, while it was scaled by control.step; set group['lr'] again, and call "
                    "scheduler.step() after optimizer.step()",
                    stacklevel=2,
                )

    @torch.no_grad()
    def _plan(self, base: Optimizer, has_closure: bool) -> None:
        """Note the work of a step; whatever can be refused is refused before a rule changes anything."""
        works = []
        for number, group in enumerate(base.param_groups):
            if "control" in group:  # of a group that was added later
                group.update(flat(group.pop("control")))
                self.rule.check(group)
            for i, live in enumerate(group["params"]):
                # With a closure gradients are made later.
                if live.grad is None and not (has_closure and live.requires_grad):
                    continue
                name = name_of(group, number, i)
                reason = unsupported_storage(live, group.get("average_dtype", "float32"))
                if reason is not None:
                    raise RuntimeError(f"{name} {reason}")
                works.append(Work(live, self._state_of(live, group, name, base), group))
                if base.state.get(live) and not _without_ours(base.state[live]):
                    del base.state[live]  # a base may ask whether it has a state
        for work in works:
            self._works.append(work)
            self.rule.before_(work)

    def _state_of(self, live: Tensor, group: dict[str, Any], name: str, base: Optimizer) -> State:
        entries = self.rule.entries(live, group)
        state = self.memory.get(live)
        if state is None:
            taken = base.state.get(live, {}).get("step", 0)
            state = self.memory[live] = {"step": torch.tensor(float(taken), dtype=torch.float64)}
        follow_(live, state, entries, ("average", "returned"), group.get("average_dtype", "float32"), name)
        if state["step"] == 0:  # averages begin as the weights before the first step
            for key, entry in entries.items():
                if entry.is_average:
                    state[key].copy_(live.detach())
                elif key != "step":
                    state[key].zero_()
        return state

    def _after_step(self, base: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
        frame = inspect.currentframe()
        if self._call is None or frame is None or frame.f_back is not self._call:
            return
        found = getattr(
            base, "found_inf", None
        )  # GradScaler calls step() of a fused base on skipped steps too
        is_dummy = self._is_dummy(base)
        if is_dummy or (found is not None and float(found) > 0):
            self._give_up()
            self._announce(base)
            for state in self.memory.values() if is_dummy else ():
                unset_(state)
            return
        works = self._works
        self._restore_rates()
        self._works, self._call = [], None
        self._announce(base)
        moved = [work for work in works if work.live.grad is not None]
        with torch.no_grad():
            for work in works:
                if work.live.grad is None:
                    self.rule.undo_(work)
                else:
                    work.state["step"] += 1.0
            for chunk in chunks(moved, lambda work: (work.live, (id(work.group), work.state["step"].item()))):
                self.rule.after_(chunk, int(chunk[0].state["step"].item()))

    def _is_dummy(self, base: Optimizer) -> bool:
        """Return whether torch.distributed.checkpoint makes this step, to learn the entries of a state."""
        if any(state["step"] > 0 for state in self.memory.values()):
            return False
        if any(float(group.get("lr", 1.0)) != 0 for group in base.param_groups):
            return False
        grads = (work.live.grad for work in self._works)
        return not any_nonzero(grads)

    # --- Saving and loading
    # -----------------------------------------------------------------------------------

    def _announce(self, base: Optimizer) -> None:
        """Put the names of our entries, and nothing else, into the base's state.

        Of a flattened state torch.distributed.checkpoint reads only the entries whose names it finds there.
        """
        for live, own in self.memory.items():
            state = base.state[live]
            if PREFIX + "step" not in state:
                state.update(dict.fromkeys(PREFIX + name for name in (*own, "live")))

    def _join(self, base: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the base's state dict with our entries in it."""
        self.keeper.notice_stale_load()
        state = {key: _without_ours(entries) for key, entries in state_dict["state"].items()}
        for _, _, parameter, key in checkpoint.pairs(base, state_dict):
            own = self.memory.get(parameter)
            if own:
                entries = checkpoint.settled(own, parameter)
                state[key] = {
                    **state.get(key, {}),
                    **{PREFIX + name: value for name, value in entries.items()},
                }
        return {**state_dict, "state": state}

    def _before_load(self, base: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Take our entries out, which torch would cast to the precision of the parameters."""
        if self._is_stepping():
            raise RuntimeError("load_state_dict() in the middle of step(); call it before or after the step")
        self._give_up()
        self._loaded = checkpoint.read(base, self.keeper, state_dict, ("step",), PREFIX)
        state = {}
        for key, entries in state_dict["state"].items():
            entries = _without_ours(entries)
            if entries or not isinstance(entries, dict):
                state[key] = entries
        groups = []
        for own, saved in zip(base.param_groups, state_dict["param_groups"], strict=False):
            ours = {name: own[name] for name in (*self.rule.settings, HOLD, MARK)}
            merged = {**ours, **saved, **{name: own[name] for name in ("average_dtype",) if name in own}}
            self.rule.check(merged)
            groups.append(merged)
        groups += state_dict["param_groups"][len(groups) :]
        return {**state_dict, "state": state, "param_groups": groups}

    def _after_load(self, base: Optimizer) -> None:
        loaded, self._loaded = self._loaded, checkpoint.Loaded()
        self.memory.clear()
        checkpoint.put_in(loaded, self.keeper, self.memory)
        self._announce(base)
        for note in loaded.notes:
            warnings.warn(note, stacklevel=4)


def _without_ours(entries: Any) -> Any:
    """Return the base's entries of a parameter."""
    if not isinstance(entries, dict):
        return entries
    return {name: value for name, value in entries.items() if not str(name).startswith(PREFIX)}


def _check_base(optimizer: Optimizer) -> None:
    """Raise for an optimizer that cannot keep averages."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"averages are kept beside a torch.optim.Optimizer; got {type(optimizer).__name__}")
    if any(HOLD in group for group in optimizer.param_groups):
        raise ValueError(f"this {type(optimizer).__name__} keeps averages already; make a new one")
    if any(str(key).startswith(PREFIX) for state in optimizer.state.values() for key in state):
        raise ValueError("this optimizer has loaded a state with averages; attach first, then load")


# --- Averages, and a control that is the same for all coordinates
# ---------------------------------------------


@final
class _Averaging:
    """The rule of `attach`."""

    moves_live = False

    def __init__(self, control: Control, further: dict[str, Average], average_dtype: AverageDtype) -> None:
        self.settings: dict[str, Any] = {**flat(control), "average_dtype": average_dtype}
        self.further = further
        self.kept = ("average", *(f"{name}_{part}" for name, rule in further.items() for part in rule.parts))

    def check(self, group: dict[str, Any]) -> None:
        check({"average_dtype": group["average_dtype"]})
        control = control_of(group)
        if control.strength != 0 and control.sizing == "paper":
            raise ValueError(
                "Control.paper() is sized by the second moments of AdamW: use PACE, or Control.push() and "
                "Control.pull() with other optimizers"
            )

    def factor(self, group: dict[str, Any]) -> float:
        return control_of(group).step

    def returned(self, group: dict[str, Any]) -> str:
        return control_of(group).returned

    def entries(self, live: Tensor, group: dict[str, Any]) -> dict[str, Entry]:
        entries = expected(live, control_of(group).averages, group["average_dtype"], moments=False)
        for name, average in self.further.items():
            like = Entry(average_dtype(live), is_average=True)
            entries |= {f"{name}_{part}": like for part in average.parts}
        return entries

    def before_(self, work: Work) -> None:
        """Keep the averages, and the gap if it is read before the step."""
        control, live = control_of(work.group), work.live.detach()
        work.held = [local(average_of(work.state, name, live)) for name in control.averages]
        if control.strength != 0 and control.gap == "before":
            work.held.append(work.held[0] - local(live))

    def undo_(self, work: Work) -> None:
        """Undo nothing: nothing was changed."""

    def after_(self, works: list[Work], t: int) -> None:
        """Steer live and move the averages."""
        group = works[0].group
        control, rate = control_of(group), float(group.get("lr", 1.0))
        at = step_scalars(
            t, Settings(lr=rate, betas=(0.0, 0.0), eps=0, weight_decay=0, maximize=False, control=control)
        )
        lives = [local(work.live.detach()) for work in works]
        steering = [work.held[0] for work in works]
        if control.order == "average, then pull":
            move_averages_(steering, lives, at.rate)
        if at.pulling:
            before = control.gap == "before"
            pairs = zip(works, lives, steering, strict=True)
            gaps = [work.held[-1] if before else average - live for work, live, average in pairs]
            torch._foreach_mul_(gaps, min(at.numerator, at.limit))
            torch._foreach_add_(lives, gaps)
        if control.order == "pull, then average":
            move_averages_(steering, lives, at.rate)
        if len(control.averages) > 1:
            move_averages_([work.held[1] for work in works], lives, at.return_rate)
        for name, average in self.further.items():
            parts = {part: [local(work.state[f"{name}_{part}"]) for work in works] for part in average.parts}
            average.move_(parts, lives, t)
        if group["average_dtype"] != "float32":
            for work in works:
                for name, value in zip(control.averages, work.held, strict=False):
                    keep_average_(work.state, name, work.live, value)

    def value(self, name: str, parameter: Tensor, state: State, live: Tensor) -> Tensor:
        if name in self.further:
            average = self.further[name]
            return average.returned({part: state[f"{name}_{part}"] for part in average.parts}, live)
        if name not in ("average", "returned"):
            raise KeyError(f"no average is called {name!r}; there are: average, {', '.join(self.further)}")
        return average_of(state, name, live)


def _is_running(frame: FrameType) -> bool:
    """Return whether a function has not returned yet."""
    current = inspect.currentframe()
    while current is not None:
        if current is frame:
            return True
        current = current.f_back
    return False


_ATTACHED: "WeakKeyDictionary[Optimizer, Attachment]" = WeakKeyDictionary()


def _refuse_copies(optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
    """Refuse a step of a copy, which has the settings of an attached optimizer and not its hooks."""
    if type(optimizer).__module__.startswith("paceline.optim."):
        return  # until this package takes its place, it has the same entries and rules of its own
    name = type(optimizer).__name__
    shown = any(group.get(HOLD, "live") != "live" for group in optimizer.param_groups)
    if shown and not has_keeper(optimizer):
        raise RuntimeError(
            f"this {name} has loaded a state that was saved while the parameters held the average; load it "
            "into the optimizer that saved it, which puts the live weights back"
        )
    if any(MARK in group for group in optimizer.param_groups) and optimizer not in _ATTACHED:
        raise RuntimeError(
            f"this {name} is a copy of an attached optimizer, or has loaded the state of one; a copy keeps "
            "no averages. Make a new one, call attach() on it, and load the state then"
        )


register_optimizer_step_pre_hook(_refuse_copies)
