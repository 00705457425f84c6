"""What all wrappers share: the base optimizer's groups, a memory of their own, one step around its step."""

import inspect
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, MutableMapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paceline.optim.averaging import Averaging
from paceline.optim.loading import Saved, take_in
from paceline.optim.state import State, allocate_averages, conform_averages, name_of


class Wrapper(Averaging):
    """An optimizer around another one, which schedulers, scalers and checkpoints take for one. Abstract.

    Groups are the base's own, with our settings beside its own, so a learning rate set in one is set in
    both. State is kept apart: the base never sees an entry of ours. In `state` and `state_dict()` both
    appear together, ours under names that begin with `format.prefix`.
    """

    def __init__(self, base: Optimizer, settings: dict[str, Any]) -> None:
        _check_base(base, type(self).__name__)
        self.base = base
        self._own: dict[Tensor, State] = {}
        self._settings = settings
        self._needs_closure = _needs_closure(base)
        super().__init__(base.param_groups, {**base.defaults, **settings})

    # --- What a kind of wrapper has to say --------------------------------------------------------

    @abstractmethod
    def _prepare(self, group: dict[str, Any], parameters: list[Tensor]) -> Any:
        """What to do before the base's step; the result is handed to `_finish` or `_abandon`."""

    @abstractmethod
    def _finish(self, group: dict[str, Any], moved: list[Tensor], prepared: Any) -> None:
        """What to do after it, for those of the parameters that had a gradient."""

    @abstractmethod
    def _abandon(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Undo `_prepare`: the base's step failed."""

    # --- Groups and state -------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        # torch's constructor starts from an empty list and adds groups; ours exist.
        if groups:
            self.base.param_groups = groups

    @property
    def state(self) -> defaultdict[Any, Any]:
        """The base's state and ours, to look at; what is assigned here is lost."""
        joined: defaultdict[Any, Any] = defaultdict(
            dict, {key: dict(entries) for key, entries in self.base.state.items()}
        )
        for parameter, entries in self._memory.items():
            joined[parameter] |= {self.format.prefix + key: value for key, value in entries.items()}
        if self._buffer_memory:
            joined[self.format.prefix + "buffers"] = dict(self._buffer_memory)
        return joined

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
            param_group = self.base.param_groups[-1]
        self._complete(param_group)
        for parameter in param_group["params"]:
            self._remember_beside_base(parameter, param_group)

    def _remember_beside_base(self, parameter: Tensor, group: dict[str, Any]) -> State | None:
        """Have a memory where the base has a state, and nowhere else.

        torch.distributed.checkpoint takes an optimizer without state through a dummy step, to learn its
        entries; one that has a part of them loses the rest on loading.
        """
        base = self.base.state.get(parameter)
        if base and parameter.requires_grad:
            wanted = self.format.wanted(group)
            self._memory[parameter] = allocate_averages(parameter, group, wanted, base)
        return self._memory.get(parameter)

    def _complete(self, group: dict[str, Any]) -> None:
        """Give a group the settings it lacks: also one that was added to the base behind our back."""
        held = self.param_groups[0].get(self.format.hold, "live")
        for name, value in {**self._settings, self.format.hold: held}.items():
            group.setdefault(name, value)

    def __getstate__(self) -> dict[str, Any]:
        names = (
            "defaults",
            "base",
            "_own",
            "_settings",
            "_needs_closure",
            "_loaded_live",
            "_loaded_name",
            "_buffer_memory",
        )
        return {name: getattr(self, name) for name in names}

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
        for group in self.param_groups:
            self._complete(group)

        members = [self._ready(group, number, closure) for number, group in enumerate(self.param_groups)]
        work = []
        try:
            for group, parameters in zip(self.param_groups, members, strict=True):
                work.append(self._prepare(group, parameters))
            if closure is not None:
                loss = self.base.step(closure)
            elif isinstance(self.base, _StepsByLoss):
                self.base.step_func(_known(loss, self.base))
            else:
                self.base.step()
        except BaseException:
            for group, parameters, _ in zip(self.param_groups, members, work):
                self._abandon(group, parameters)
            raise
        for group, parameters, prepared in zip(self.param_groups, members, work, strict=True):
            moved = [parameter for parameter in parameters if parameter.grad is not None]
            self._finish(group, moved, prepared)
        return loss

    def _ready(self, group: dict[str, Any], number: int, closure: object) -> list[Tensor]:
        """The parameters that this step may move, each with a memory that fits it."""
        wanted, parameters = self.format.wanted(group), []
        for i, parameter in enumerate(group["params"]):
            # A base that calls the closure itself makes its gradients only then.
            if not (parameter.requires_grad if closure else parameter.grad is not None):
                continue
            state = self._memory.get(parameter)
            if not state:
                state = allocate_averages(parameter, group, wanted, self.base.state.get(parameter, {}))
                self._memory[parameter] = state
            conform_averages(parameter, state, group, wanted, name_of(group, number, i))
            parameters.append(parameter)
        self._seed_again(parameters, group)
        return parameters

    # --- Loading ----------------------------------------------------------------------------------

    def _take_groups(self, saved: dict[Any, Any], groups: list[dict[str, Any]]) -> None:
        """Hand the base its part, by its own way of loading."""
        number = {parameter: i for i, parameter in enumerate(self._members())}
        packed = [{**group, "params": [number[p] for p in group["params"]]} for group in groups]
        state: dict[Any, Any] = {}
        buffers = self.format.prefix + "buffers"
        if buffers in saved and self._buffered is None:
            raise ValueError("this state has averages of buffers; give their module as buffers=, as then")
        for key, entries in saved.items():
            if key == buffers:
                continue
            if not isinstance(entries, Saved):
                state[key] = entries
            elif entries.base:
                # Copied: torch's loading keeps the very tensors it is given.
                state[number[key]] = {k: _copy(v) for k, v in entries.base.items()}
        self.base.load_state_dict({"state": state, "param_groups": packed})
        self._take_buffers(saved.pop(buffers, {}))

    def _take_buffers(self, saved: dict[str, State]) -> None:
        self._buffer_memory.clear()
        for name, buffer in self._buffers():
            if name in saved:
                self._buffer_memory[name] = take_in(buffer, saved[name], {}, self.format.wanted({}))
                if "live" in saved[name]:
                    buffer.copy_(saved[name]["live"])

    def _take_in(self, parameter: Tensor, saved: Saved | None, group: dict[str, Any]) -> State | None:
        if saved is None or not saved.own:
            return self._remember_beside_base(parameter, group)
        return take_in(parameter, saved.own, group, self.format.wanted(group))


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


def _check_base(base: object, name: str) -> None:
    if not isinstance(base, Optimizer):
        raise TypeError(
            f"{name} wraps a torch.optim.Optimizer, e.g. {name}(torch.optim.SGD(parameters, lr=0.1)); "
            f"got {type(base).__name__}"
        )
    if any(group.get("differentiable") for group in base.param_groups):
        raise ValueError(f"{name} cannot wrap an optimizer with differentiable=True; PACE offers it")


def refuse_averaging_base(base: object, name: str) -> None:
    """Raise ValueError for a base that moves weights toward or away from an average of its own."""
    if isinstance(base, Averaging):
        raise ValueError(
            f"{name} cannot wrap {type(base).__name__}, which moves live by an average of its own already; "
            "wrap the optimizer underneath, or keep further averages beside it with Averages"
        )
    if isinstance(base, Optimizer) and any("train_mode" in group for group in base.param_groups):
        raise ValueError(
            f"{name} cannot wrap {type(base).__name__}: a Schedule-Free optimizer keeps its parameters "
            "between its own average and its fast weights and recovers one from the other, which a pull "
            "would break; it returns an average without one (paceline.optim.baselines.schedule_free)"
        )
