"""What all wrappers share: the base optimizer's groups, a memory of their own, one step around its step."""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paceline.optim.averaging import Averaging
from paceline.optim.loading import Format, Saved, take_in
from paceline.optim.state import State, allocate_averages, conform_averages, name_of


class Wrapper(Averaging):
    """An optimizer around another one, which schedulers, scalers and checkpoints take for one. Abstract.

    Groups are the base's own, with our settings beside its own, so a learning rate set in one is set in
    both. State is kept apart: the base never sees an entry of ours. In `state` and `state_dict()` both
    appear together, ours under names that begin with `format.prefix`.
    """

    def __init__(self, base: Optimizer, settings: dict[str, Any]) -> None:
        _check_base(base, type(self).__name__)
        for group in base.param_groups:  # all of them, before anything is written into one
            _check_unwrapped(base, group, self.format)
            self.format.check({**settings, **group})
        self.base = base
        self._own: dict[Tensor, State] = {}
        self._settings = settings
        self._needs_closure = _needs_closure(base)
        super().__init__(base.param_groups, {**base.defaults, **settings})
        if isinstance(base, Averaging):
            self._inner, base._outer = base, self

    # --- What a kind of wrapper has to say --------------------------------------------------------

    @abstractmethod
    def _prepare(self, group: dict[str, Any], parameters: list[Tensor]) -> Any:
        """What to do before the base's step; the result is handed to `_finish`."""

    @abstractmethod
    def _finish(self, group: dict[str, Any], moved: list[Tensor], prepared: Any) -> None:
        """What to do after it, for those of the parameters that had a gradient."""

    @abstractmethod
    def _abandon(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Undo `_prepare`, or what was done of it: the step failed, or was skipped."""

    # --- Groups and state -------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The base's. Those that came to it behind our back get what they lack of our settings."""
        groups: list[dict[str, Any]] = self.base.param_groups
        hold = self.format.hold
        if any(hold not in group for group in groups):
            known = [group[hold] for group in groups if hold in group]
            if not known and any("live" in entries for entries in self._own.values()):
                known = [self._returned_name]
            for group in groups:
                for name, value in {**self._settings, hold: (*known, "live")[0]}.items():
                    group.setdefault(name, value)
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        # torch's constructor starts from an empty list and adds groups; ours exist.
        if groups:
            self.base.param_groups = groups

    @property  # type: ignore[override]
    def state(self) -> "Joined":
        """The base's state and ours, to look at."""
        return Joined(self)

    @state.setter
    def state(self, state: object) -> None:
        """torch's constructor assigns an empty one."""

    @property
    def _memory(self) -> MutableMapping[Tensor, State]:
        return self._own

    @_memory.setter
    def _memory(self, memory: dict[Tensor, State]) -> None:
        self._own = memory

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base; it may carry settings of ours."""
        self.format.check({**self._settings, **param_group})
        if not any(param_group is known for known in self.base.param_groups):
            self.base.add_param_group(param_group)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in self._own:
                    self._remember_beside_base(parameter, group)

    def _remember_beside_base(self, parameter: Tensor, group: dict[str, Any]) -> State | None:
        """Have a memory where the base has a state, and nowhere else.

        torch.distributed.checkpoint takes an optimizer without state through a dummy step, to learn its
        entries; one that has a part of them loses the rest on loading.
        """
        base = self.base.state.get(parameter)
        if base and parameter.requires_grad:
            self._memory[parameter] = self._allocate(parameter, group, base)
        return self._memory.get(parameter)

    def _allocate(self, live: Tensor, group: dict[str, Any], base: dict[str, Any]) -> State:
        scalars = {name: torch.zeros((), dtype=torch.float64) for name in self.format.scalars}
        averages = allocate_averages(live, self._counter(group), self.format.wanted(group), base)
        return {**averages, **scalars}

    def _counter(self, group: dict[str, Any]) -> dict[str, Any]:
        """What says where the steps of a group are counted."""
        return group if self.format.on_device else {}

    def __getstate__(self) -> dict[str, Any]:
        own = ("defaults", "base", "_inner", "_own", "_settings", "_needs_closure")
        shared = ("_loaded_live", "_loaded_name")
        return {name: getattr(self, name) for name in (*own, *shared)}

    # --- The step ---------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of the base optimizer on the live weights, and ours around it.

        After a forgotten `eval()` the live weights are put back first.
        """
        self.make_ready_to_step()
        loss = None
        if closure is not None and not self._needs_closure:
            with torch.enable_grad():
                loss = closure()
            self._put_live_back()  # a closure that evaluates may end in eval()
            closure = None

        members = [self._ready(group, number, closure) for number, group in enumerate(self.param_groups)]
        if closure is None and self._is_dummy(members):
            self._step_base(loss)
            return loss
        prepared = []
        try:
            for group, parameters in zip(self.param_groups, members, strict=True):
                prepared.append(self._prepare(group, parameters))
            if closure is not None:
                loss = self.base.step(closure)
            else:
                self._step_base(loss)
        except BaseException:
            self._abandon_all(members)
            raise
        for group, parameters, work in zip(self.param_groups, members, prepared, strict=True):
            # Without a closure all had a gradient, which the base may have cleared by now.
            self._finish(group, [p for p in parameters if closure is None or p.grad is not None], work)
        return loss

    def _abandon_all(self, members: list[list[Tensor]]) -> None:
        for group, parameters in zip(self.param_groups, members, strict=True):
            self._abandon(group, parameters)

    def _step_base(self, loss: Any) -> None:
        if isinstance(self.base, _StepsByLoss):
            self.base.step_func(_known(loss, self.base))
        else:
            self.base.step()

    def _ready(self, group: dict[str, Any], number: int, closure: object) -> list[Tensor]:
        """The parameters that this step may move, each with a memory that fits it."""
        _check_capture(self.format, group, type(self).__name__)
        wanted, parameters = self.format.wanted(group), []
        for i, parameter in enumerate(group["params"]):
            # A base that calls the closure itself makes its gradients only then.
            if not (parameter.requires_grad if closure else parameter.grad is not None):
                continue
            state = self._memory.get(parameter)
            if not state:
                state = self._allocate(parameter, group, self.base.state.get(parameter, {}))
                self._memory[parameter] = state
            conform_averages(parameter, state, self._counter(group), wanted, name_of(group, number, i))
            parameters.append(parameter)
        self._seed_again(parameters, group)
        return parameters

    def _is_dummy(self, members: list[list[Tensor]]) -> bool:
        """Whether this is the step by which torch.distributed.checkpoint learns a fresh optimizer's state.

        It has rate 0 and gradients 0. Weights may still be loaded after it: averages must not begin yet.
        """
        if any(isinstance(rate := group.get("lr", 1.0), float) and rate != 0 for group in self.param_groups):
            return False
        parameters = [parameter for group in members for parameter in group if parameter.numel()]
        steps = [self._memory[parameter]["step"] for parameter in parameters]
        # A count on the device is not read: that would wait for it at every step.
        if not steps or any(step.device.type != "cpu" or step.item() for step in steps):
            return False
        rates = (float(group.get("lr", 1.0)) for group in self.param_groups)
        gradients = (parameter.grad for parameter in parameters)
        return not any(rates) and not any(g is not None and _has_values(g) for g in gradients)

    # --- Loading ----------------------------------------------------------------------------------

    def _take_groups(self, saved: dict[Any, Any], groups: list[dict[str, Any]]) -> None:
        """Hand the base its part, by its own way of loading."""
        number = {parameter: i for i, parameter in enumerate(self._members())}
        packed = [{**group, "params": [number[p] for p in group["params"]]} for group in groups]
        state: dict[Any, Any] = {}
        for key, entries in saved.items():
            if isinstance(entries, Saved):
                if entries.base:
                    # Copied: torch's loading keeps the very tensors it is given.
                    state[number[key]] = {k: _copy(v) for k, v in entries.base.items()}
            else:
                state[key] = entries
        self.base.load_state_dict({"state": state, "param_groups": packed})

    def _take_in(self, parameter: Tensor, saved: Saved | None, group: dict[str, Any]) -> State | None:
        if saved is None or not saved.own:
            return self._remember_beside_base(parameter, group)
        return take_in(parameter, saved.own, group, self.format)


class Joined(Mapping[Any, dict[str, Any]]):
    """The state of a base and the memory around it, looked up when asked for; not to be changed.

    As an optimizer's own state does, it gives an empty dict for a parameter it does not know.
    """

    def __init__(self, wrapper: Wrapper) -> None:
        self._wrapper = wrapper

    def __getitem__(self, key: Any) -> dict[str, Any]:
        wrapper, prefix = self._wrapper, self._wrapper.format.prefix
        own = wrapper._memory.get(key, {})
        return {**wrapper.base.state.get(key, {}), **{prefix + name: value for name, value in own.items()}}

    def __iter__(self) -> Iterator[Any]:
        wrapper = self._wrapper
        # Of a parameter that was replaced since, nothing is left to save.
        own = (parameter for parameter in wrapper._members() if wrapper._memory.get(parameter))
        # An empty entry is none: some optimizers touch the state of parameters that have none yet.
        base = (key for key, entries in wrapper.base.state.items() if entries)
        yield from dict.fromkeys((*base, *own))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        return bool(self[key])


@runtime_checkable
class _StepsByLoss(Protocol):
    """ScheduleFree+, whose step takes the loss and sizes itself by it."""

    def step_func(self, function_value: Any) -> Any: ...


def _known(loss: Any, base: object) -> Any:
    if loss is None:
        raise RuntimeError(
            f"{type(base).__name__} sizes its step by the loss: call step(closure), with a closure that "
            "computes gradients and returns the loss"
        )
    return loss


def _has_values(gradient: Tensor) -> bool:
    dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
    return bool(dense.count_nonzero() > 0)


def _copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if is_traceable_wrapper_subclass(value):  # sharded or low-bit: not all of them can be cloned
        names, context = value.__tensor_flatten__()
        parts = {name: _copy(getattr(value, name)) for name in names}
        return type(value).__tensor_unflatten__(parts, context, value.size(), value.stride())
    return value.detach().clone()


def _needs_closure(base: Optimizer) -> bool:
    """Whether step() cannot be called without a closure, as LBFGS's cannot."""
    closure = inspect.signature(base.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


# --- What is refused --------------------------------------------------------------------------------


def _check_base(base: object, name: str) -> None:
    if not isinstance(base, Optimizer):
        raise TypeError(
            f"{name} wraps a torch.optim.Optimizer, e.g. {name}(torch.optim.SGD(parameters, lr=0.1)); "
            f"got {type(base).__name__}"
        )
    if any(group.get("differentiable") for group in base.param_groups):
        raise ValueError(f"{name} cannot wrap an optimizer with differentiable=True")


def _check_unwrapped(base: Optimizer, group: dict[str, Any], format: Format) -> None:
    if format.hold in group:
        raise ValueError(
            f"this {type(base).__name__} is wrapped already: its groups have the settings of another "
            f"wrapper of this kind ({format.hold!r} is there); make a new one to wrap"
        )


def _check_capture(format: Format, group: dict[str, Any], name: str) -> None:
    # No stream captures before CUDA is initialized, and asking would initialize it.
    if not torch.cuda.is_initialized() or not torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        return
    if not format.on_device:
        raise RuntimeError(f"{name} counts its steps on the host and cannot be captured in a CUDA graph")
    if not group.get("capturable"):
        raise RuntimeError("capturing step() in a CUDA graph needs a base with capturable=True in all groups")


def refuse_averaging_base(base: object, name: str) -> None:
    """Raise ValueError for a base that moves weights toward or away from an average of its own."""
    if isinstance(base, Averaging):
        raise ValueError(
            f"{name} cannot wrap {type(base).__name__}, which moves live by an average of its own already; "
            "wrap the optimizer underneath, or keep further averages beside it with Averages"
        )
    if is_schedule_free(base):
        raise ValueError(
            f"{name} cannot wrap {type(base).__name__}: a Schedule-Free optimizer keeps its parameters "
            "between its own average and its fast weights and recovers one from the other, which a pull "
            "would break; it returns an average without one (paceline.optim.baselines.ScheduleFree)"
        )


def is_schedule_free(base: object) -> bool:
    """Whether a base is of the schedulefree package, or like those has a mode in its groups."""
    if not isinstance(base, Optimizer) or isinstance(base, Averaging):
        return False
    packaged = type(base).__module__.split(".")[0] == "schedulefree"
    return packaged or any("train_mode" in group for group in base.param_groups)
