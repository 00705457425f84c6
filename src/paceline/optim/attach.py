"""Averages and a control beside any torch optimizer, by its own hooks.

The base stays what it is: its class, schedulers, GradScaler and checkpoints. Our state is kept apart from the
base's, which would be cast at a load and seen by the base. Only in state dicts the two are joined.

A step: `_before_step` plans it, lets the rule prepare the weights (`before_`) and scales lr; the base steps;
`_after_step` puts lr back, counts, and lets the rule finish (`after_`). A closure runs in between with
everything undone (`undo_`) and then done again. A step that raises has no hook: whatever comes next undoes
what it has left.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, TypeVar, final

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from paceline.optim import checkpoint
from paceline.optim.averages import Average
from paceline.optim.foreach import chunks
from paceline.optim.fused import is_capturing
from paceline.optim.settings import AverageDtype, Control
from paceline.optim.state import State, follow_, name_of
from paceline.optim.steering import Rule, Steering, Work
from paceline.optim.storage import unsupported_storage
from paceline.optim.weights import ATTACHED, HOLD, Keeper, first_overlap, settled

PREFIX = "paceline_"
"""The beginning of the names of our entries in the base's state dict."""

Base = TypeVar("Base", bound=Optimizer)


def attach(
    optimizer: Base,
    *,
    control: Control | None = None,
    averages: Mapping[str, Average] | None = None,
    average_dtype: AverageDtype = "float32",
) -> Base:
    """Keep averages beside an optimizer, and steer it if a control is given. Return the same optimizer.

    Without a control training stays unchanged, bit for bit. A group may have a "control" of its own. Attach
    before a state is loaded; a copy or an unpickled optimizer must be attached again.

    Arguments:
        optimizer: any torch optimizer that keeps no average of its own.
        control: `Control.push()`, `Control.pull()` or `Control.none()`, each with an average. None: only the
            averages of `averages` are kept; if there are none either, that of `Control.none()`.
        averages: name → average, which never influences training. Without a control the first one is shown
            by `averaged_weights`.
        average_dtype: how the averages of the control are kept, as in `PACE`.

    >>> import torch, paceline
    >>> parameter = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = paceline.attach(torch.optim.SGD([parameter], lr=0.1), control=paceline.Control.push())
    >>> type(optimizer).__name__
    'SGD'
    """
    if isinstance(optimizer, Optimizer) and any("train_mode" in group for group in optimizer.param_groups):
        raise ValueError(
            f"{type(optimizer).__name__} keeps its parameters between two averages of its own; use "
            "paceline.optim.baselines.schedule_free to evaluate it"
        )
    averages = averages or {}
    _check_averages(averages)
    if control is None and not averages:
        control = Control.none()
    if control is None and average_dtype != "float32":
        raise ValueError(
            f"average_dtype={average_dtype!r} is for the averages of a control, and there is none; those of "
            "averages= are kept in float32"
        )
    Attachment(optimizer, Steering(control, averages, average_dtype))
    return optimizer


@final
class Attachment:
    """The averages of one optimizer, and the hooks that keep them."""

    def __init__(self, optimizer: Optimizer, rule: Rule) -> None:
        _check_base(optimizer)
        defaults = {**rule.settings, HOLD: "live", ATTACHED: True}
        own = [
            {**defaults, "control": group["control"]} if "control" in group else defaults
            for group in optimizer.param_groups
        ]
        for group, its in zip(optimizer.param_groups, own, strict=True):
            rule.check({**group, **its})
        self._checked_count = 0  # parameters that were checked for overlaps
        self._refuse_overlap(optimizer)
        for group, its in zip(optimizer.param_groups, own, strict=True):
            group.update(its)
        optimizer.defaults.update(defaults)  # for groups added later
        self._rule = rule
        self._memory: dict[Tensor, State] = {}
        self._keeper = Keeper(optimizer, rule, self._memory)
        # The call of step() that is being served. A frame, not a flag: a flag would stay set after an error.
        self._call: FrameType | None = None
        self._rates: list[tuple[dict[str, Any], Any, Any, float]] = []  # group, lr, scaled lr, factor
        self._works: list[Work] = []
        self._in_closure = False
        self._loaded: checkpoint.Loaded = ({}, [])  # read, and not yet put in
        optimizer.register_step_pre_hook(self._before_step)
        # Before the user's own, which may clear gradients, step a scheduler or save.
        handle = optimizer.register_step_post_hook(self._after_step)
        hooks = handle.hooks_dict_ref()
        assert hooks is not None  # the optimizer is alive
        hooks.move_to_end(handle.id, last=False)
        optimizer.register_state_dict_pre_hook(self._before_save)
        optimizer.register_state_dict_post_hook(self._join)
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_load_state_dict_post_hook(self._after_load)

    # --- The step ---------------------------------------------------------------------------------------

    def _before_step(self, base: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """Prepare weights and lr for the base's step; return its arguments where the closure is replaced."""
        if self._is_stepping():
            return None  # step() of a subclass calls super().step(), and torch calls the hooks of both
        if is_capturing():
            raise RuntimeError(
                "averages beside an optimizer count their steps on the host; capture PACE instead"
            )
        self._undo_unfinished()
        self._keeper.make_ready_to_step()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the base
        self._begin_works(base, closure is not None)
        self._scale_rates(base)
        self._call = _caller()
        if closure is None:
            return None
        guarded = self._guarded(base, closure)
        if len(args) > 1:
            return (args[0], guarded, *args[2:]), kwargs
        return args, {**kwargs, "closure": guarded}

    def _guarded(self, base: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that finds live weights and the user's lr, and undoes the step if it raises."""
        calls = 0

        def guarded() -> Any:
            nonlocal calls
            calls += 1
            try:
                if self._rule.moves_live and calls > 1:  # live is in the middle of the base's step
                    raise RuntimeError(
                        f"{type(base).__name__} calls its closure twice a step; it cannot be steered so"
                    )
                self._restore_rates()
                if self._rule.moves_live:
                    self._for_all(self._rule.undo_)
                self._in_closure = True
                loss = closure()
                self._keeper.hide()  # a closure that evaluates may end with the average shown
                if self._rule.moves_live:
                    self._for_all(self._rule.before_)
                self._scale_rates(base)
            except BaseException:  # torch will not call the hook after the step
                self._undo_unfinished()
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
        """Return whether the call of step() that was begun is still running."""
        frame = inspect.currentframe()
        while frame is not None and frame is not self._call:
            frame = frame.f_back
        return frame is not None

    def _undo_unfinished(self) -> None:
        """Undo what a step that raised, or was skipped, has left; nothing happens after a finished one."""
        self._restore_rates()
        self._for_all(self._rule.undo_)
        self._works, self._call = [], None

    def _scale_rates(self, base: Optimizer) -> None:
        for group in base.param_groups:
            factor = self._rule.factor(group)
            if factor != 1 and "lr" in group:
                # An lr that is a tensor is replaced, not changed: groups may share it, a graph may read it.
                rate, scaled = group["lr"], group["lr"] * factor
                self._rates.append((group, rate, scaled, factor))
                group["lr"] = scaled

    def _restore_rates(self) -> None:
        while self._rates:
            group, rate, scaled, factor = self._rates[-1]
            # Another object was put in, or the tensor was changed in place.
            changed = group["lr"] is not scaled or bool(scaled != rate * factor)
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
    def _begin_works(self, base: Optimizer, has_closure: bool) -> None:
        """Prepare every parameter for the base's step; what can be refused is refused before any of them."""
        self._refuse_overlap(base)
        works = []
        for number, group in enumerate(base.param_groups):
            self._rule.check(group)
            storage = group.get("average_dtype", "float32")
            for i, live in enumerate(group["params"]):
                # With a closure gradients are made later.
                if live.grad is not None or (has_closure and live.requires_grad):
                    name = name_of(group, number, i)
                    reason = unsupported_storage(live, storage)
                    if reason is not None:
                        raise RuntimeError(f"{name} {reason}")
                    works.append(Work(live, self._state_of(live, group, name, base), group))
        for work in works:
            self._works.append(work)  # first, so that an interrupted `before_` is undone
            self._rule.before_(work)

    def _refuse_overlap(self, base: Optimizer) -> None:
        """Raise for parameters that share memory, if their number has changed."""
        count = sum(len(group["params"]) for group in base.param_groups)
        shared = first_overlap(base.param_groups) if count != self._checked_count else None
        if shared is not None:
            raise ValueError(shared)
        self._checked_count = count

    def _state_of(self, live: Tensor, group: dict[str, Any], name: str, base: Optimizer) -> State:
        """Return our state of a parameter, made where it is new and matched to it where it was cast."""
        entries = self._rule.entries(live, group)
        base_state = _without_ours(base.state.get(live, {}))
        if not base_state:
            base.state.pop(live, None)  # which a base would take for a state of its own
        if live not in self._memory:
            self._memory[live] = {"step": torch.tensor(float(base_state.get("step", 0)), dtype=torch.float64)}
        state = self._memory[live]
        follow_(live, state, entries, group.get("average_dtype", "float32"), name)
        if state["step"] == 0:  # weights may have been loaded since these were made
            for key, entry in entries.items():
                if key != "step":
                    state[key].copy_(entry.make(live))
        return state

    def _after_step(self, base: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
        """Put lr back, count the step and finish it; undo it if the base has not moved."""
        if self._call is None or _caller() is not self._call:
            return
        found = getattr(base, "found_inf", None)  # of GradScaler, which calls a fused base on skipped steps
        is_first = not any(state["step"] > 0 for state in self._memory.values())
        is_dummy = is_first and checkpoint.is_dummy_step(base.param_groups)
        if is_dummy or (found is not None and float(found) > 0):
            self._undo_unfinished()
            self._announce(base)
            if is_dummy:
                for state in self._memory.values():
                    checkpoint.unset_(state)
            return
        works = self._works
        self._restore_rates()
        self._works, self._call = [], None
        self._announce(base)
        with torch.no_grad():
            for work in works:
                if work.live.grad is None:
                    self._rule.undo_(work)
                else:
                    work.state["step"] += 1.0
            moved = [work for work in works if work.live.grad is not None]
            for chunk in chunks(moved, lambda work: (work.live, (id(work.group), work.state["step"].item()))):
                self._rule.after_(chunk, int(chunk[0].state["step"].item()))

    # --- Saving and loading -----------------------------------------------------------------------------

    def _announce(self, base: Optimizer) -> None:
        """Put the names of our entries, and nothing else, into the base's state.

        torch.distributed.checkpoint, when it loads a flattened state, reads the entries named there and no
        others.
        """
        for live, own in self._memory.items():
            state = base.state[live]
            if PREFIX + "step" not in state:
                state.update(dict.fromkeys(PREFIX + name for name in (*own, "live")))

    def _before_save(self, base: Optimizer) -> None:
        """Undo what a step that raised has left, and refuse to save in the middle of one."""
        if not self._is_stepping():
            self._undo_unfinished()
        elif not self._in_closure:
            raise RuntimeError("state_dict() in the middle of step(); call it before or after the step")

    def _join(self, base: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the base's state dict with our entries in it."""
        self._keeper.notice_stale_load()
        state = {key: _without_ours(entries) for key, entries in state_dict["state"].items()}
        for _, _, parameter, key in checkpoint.pairs(base, state_dict):
            own = self._memory.get(parameter)
            if own:
                named = {PREFIX + name: v for name, v in settled(own, parameter).items()}
                state[key] = {**state.get(key, {}), **named}
        groups = checkpoint.plain_groups(state_dict["param_groups"])
        return {**state_dict, "state": state, "param_groups": groups}

    def _before_load(self, base: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Take our entries out, which torch would cast to the precision of the parameters."""
        if self._is_stepping():
            raise RuntimeError("load_state_dict() in the middle of step(); call it before or after the step")
        self._undo_unfinished()
        self._loaded = checkpoint.read(base, self._keeper, state_dict, ("step",), PREFIX)
        state = {key: _without_ours(entries) for key, entries in state_dict["state"].items()}
        names = (*self._rule.settings, HOLD, ATTACHED)
        ours = [{name: group[name] for name in names} for group in base.param_groups]
        groups = checkpoint.merged_groups(ours, state_dict, self._rule.check)
        return {**state_dict, "state": {k: v for k, v in state.items() if v != {}}, "param_groups": groups}

    def _after_load(self, base: Optimizer) -> None:
        (states, notes), self._loaded = self._loaded, ({}, [])
        self._memory.clear()
        checkpoint.put_in(states, self._keeper)
        self._announce(base)
        for note in notes:
            warnings.warn(note, stacklevel=4)


def _caller() -> FrameType | None:
    """Return the frame of torch's wrapper of step(). Only for a hook itself: it goes two calls up."""
    frame = inspect.currentframe()
    for _ in range(2):
        frame = None if frame is None else frame.f_back
    return frame


def _without_ours(entries: Any) -> Any:
    """Return the base's entries of a parameter."""
    if not isinstance(entries, dict):
        return entries
    return {name: value for name, value in entries.items() if not str(name).startswith(PREFIX)}


def _check_averages(averages: Mapping[str, Average]) -> None:
    """Raise for a name or an average that cannot be kept."""
    for name, average in averages.items():
        if not name.isidentifier() or name in ("live", "average", "returned", "step"):
            raise ValueError(
                f"Invalid name of an average: {name!r}; allowed: an identifier other than live, average, "
                "returned and step"
            )
        if not isinstance(average, Average):
            raise TypeError(
                f"the average {name!r} is {average!r}; use PowerLaw, HalfLife, BEMA or another of averages.py"
            )


def _check_base(optimizer: Optimizer) -> None:
    """Raise for an optimizer that cannot keep averages."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"averages are kept beside a torch.optim.Optimizer; got {type(optimizer).__name__}")
    if any(HOLD in group for group in optimizer.param_groups):
        raise ValueError(f"this {type(optimizer).__name__} keeps averages already; make a new one")
    if any(str(key).startswith(PREFIX) for state in optimizer.state.values() for key in state):
        raise ValueError("this optimizer has loaded a state with averages; attach first, then load")
