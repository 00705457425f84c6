"""PACE as a torch optimizer: groups, state, and the plan of a step. The update itself is in rule.py."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from paceline.optim import checkpoint
from paceline.optim.foreach import chunks, foreach_step_
from paceline.optim.fused import Launch, is_capturing, launches_of, unsupported_reason
from paceline.optim.rule import Slot, pace_step_
from paceline.optim.settings import (
    AverageDtype,
    Control,
    Settings,
    check,
)
from paceline.optim.sharding import layout_of, local
from paceline.optim.state import (
    STEP,
    Entry,
    State,
    average_of,
    entries_of_average,
    follow_,
    keep_average_,
    named_parameters,
)
from paceline.optim.storage import unsupported_storage
from paceline.optim.weights import HOLD, AverageRule, Keeper, first_overlap, settled

Path = Literal["fused", "foreach", "loop"]
_ADAMW_ONLY = ("amsgrad", "decoupled_weight_decay", "capturable", "differentiable")  # mean nothing here


@final
class PACE(Optimizer):
    r"""AdamW plus a clipped, per-coordinate pull of the live weights toward their average.

    `PACE(params, lr)` is Algorithm 1 of *Training for the Model You Return* (Au & Block). At each step t:

    .. code-block:: text

        rate     = (1 + t)^-power
        raw      = AdamW(live)
        gain     = min(rate · lr · c / (√v̂ + eps), 1)
        live'    = raw + gain · (average − live)
        average' = (1 − rate) · average + rate · live'

    What we recommend for pretraining is `PACE(params, lr, control=Control.push(grow=steps))`, with the steps
    of the run: another gain, which is negative and grows, and a second average to return. The parameters hold
    the live weights, but for `eval()` and blocks of `averaged_weights`; averages are optimizer state.
    Evaluate the returned one with `averaged_weights`, export it with `averaged_state_dict` or
    `save_averaged`.

    Arguments:
        params: parameters or parameter groups; any setting below may differ between groups.
        lr: learning rate, float or 1-element Tensor.
        betas, eps, weight_decay: AdamW's.
        control: how training is steered for the average, and which average is returned.
        average_dtype: how averages are kept: "float32" takes 4 bytes a weight. "bfloat16" (2) and "int8"
            (1.03) keep live − average, rounded at random; who changes live weights moves averages along.
        foreach, maximize: as in torch.optim.AdamW. foreach=True and False are the same to the bit.
        fused: one pass over GPU memory. None: wherever it can be taken. True: refused elsewhere.

    >>> import torch, paceline
    >>> model = torch.nn.Linear(2, 1)
    >>> paceline.PACE(model.parameters(), lr=1e-3, control=paceline.Control.push(grow=1000))
    PACE(
        group 0: lr 0.001, weight_decay 0.01, Control.push(grow=1000), path: chosen at the first step
    )
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        control: Control = Control.paper(),  # noqa: B008  a frozen value
        average_dtype: AverageDtype = "float32",
        foreach: bool | None = None,
        fused: bool | None = None,
        maximize: bool = False,
    ) -> None:
        adamw = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        paths = {"foreach": foreach, "fused": fused}
        defaults = {**adamw, "control": control, "average_dtype": average_dtype, **paths, HOLD: "live"}
        check(defaults)
        super().__init__(params, defaults)
        self._begin()  # only now: a keeper registers its optimizer, which must be a valid one

    def _begin(self) -> None:
        """Make what is not part of a copy or a pickle."""
        self._keeper = Keeper(self, AverageRule())
        self._plans: list[_Plan] = []
        self._facts: list[object] | None = None  # what the plans were made from
        self._captured: list[Launch] = []  # kept alive, because CUDA graphs read their memory

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "loaded_live": self._keeper.loaded_live}

    def __setstate__(self, state: dict[str, Any]) -> None:
        loaded_live = state.pop("loaded_live", {})
        super().__setstate__(state)
        if "_keeper" not in self.__dict__:  # this is a copy; torch calls it at a load, too
            self._begin()
        self._keeper.loaded_live = loaded_live

    def __repr__(self) -> str:
        lines = []
        for i, group in enumerate(self.param_groups):
            path = self._plans[i].path if i < len(self._plans) else "chosen at the first step"
            plain = f"lr {float(group['lr']):g}, weight_decay {group['weight_decay']:g}"
            lines.append(f"    group {i}: {plain}, {group['control']}, path: {path}")
        return "\n".join(["PACE(", *lines, ")"])

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose settings are checked. State is made at the first step."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        named = named_parameters(group, len(self.param_groups) - 1)
        try:
            Settings.of(group)  # raises
            refused = _first_refusal(named, lambda p: _unsupported(p, group["average_dtype"]))
            refused = refused or first_overlap(self.param_groups)
            if refused is not None:
                raise ValueError(refused)
        except Exception:
            self.param_groups.pop()
            raise
        group[HOLD] = self.param_groups[0][HOLD]

    # --- The step ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step on the live weights and update the averages.

        If `eval()` was not followed by `train()`, the live weights are put back first.
        """
        self._keeper.make_ready_to_step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self._keeper.hide()  # a closure that evaluates may end in eval()
        is_dummy = not self.state and checkpoint.is_dummy_step(self.param_groups)  # plans make the state
        if self._facts != facts(self.param_groups, self.state):
            self._make_plans()
        if is_dummy:
            for state in self.state.values():
                checkpoint.unset_(state)
            return loss
        for group, plan in zip(self.param_groups, self._plans, strict=True):
            for launch in plan.launches:
                launch.step_(group["lr"])
                self._keeper.keeps_addresses |= bool(launch.captured)
            for chunk in plan.chunks:
                self._step_chunk(chunk, plan, group)
        return loss

    def _make_plans(self) -> None:
        """Plan the step of all groups. Whatever can be refused is refused here, before any weight moves."""
        if is_capturing():
            raise RuntimeError(
                "take one step before you capture a graph: the first step, and the first after a change of "
                "parameters, state or settings, tells the device of it"
            )
        self._facts = None  # if this raises, the next step plans again
        self._captured += [each for plan in self._plans for each in plan.launches if each.captured]
        self._plans = [self._plan(group, number) for number, group in enumerate(self.param_groups)]
        self._facts = facts(self.param_groups, self.state)

    def _plan(self, group: dict[str, Any], number: int) -> "_Plan":
        """Make the states of the parameters with a gradient match them, and return how they are stepped."""
        settings = Settings.of({**group, "lr": 0.0})  # lr is read at each step, and may be on a GPU
        storage: AverageDtype = group["average_dtype"]
        named = [(name, p) for name, p in named_parameters(group, number) if p.grad is not None]
        refused = _first_refusal(named, lambda p: _unsupported(p, storage, p.grad))
        if refused is not None:
            raise RuntimeError(refused)
        path = _path(group, named)
        for name, parameter in named:
            entries = {"step": STEP._replace(on_cpu=path != "fused")}
            entries |= dict.fromkeys(("exp_avg", "exp_avg_sq"), Entry(parameter.dtype))
            for average_name in settings.control.averages:
                entries |= entries_of_average(average_name, parameter, storage)
            follow_(parameter, self.state[parameter], entries, storage, name)
        lives = [parameter for _, parameter in named]
        if path != "fused":
            return _Plan(path, settings, list(chunks(lives, key=lambda live: (live, None))), [])
        return _Plan(path, settings, [], launches_of(lives, [self.state[live] for live in lives], settings))

    def _step_chunk(self, lives: list[Tensor], plan: "_Plan", group: dict[str, Any]) -> None:
        """Take the step of parameters of one device and dtype, by foreach or the loop."""
        if lives[0].is_cuda and is_capturing():
            raise RuntimeError("only fused=True can be captured: other paths count their steps on the host")
        lr = group["lr"]
        settings = replace(plan.settings, lr=lr.reshape(()) if isinstance(lr, Tensor) else float(lr))
        names = settings.control.averages
        by_count: dict[int, list[tuple[Tensor, State]]] = {}
        for live in lives:
            state = self.state[live]
            by_count.setdefault(int(state["step"].item()) + 1, []).append((live, state))
        for t, members in by_count.items():
            slots = [_slot(live, state, names) for live, state in members]
            for _, state in members:
                state["step"] += 1  # before averages are kept: it seeds their rounding
            if plan.path == "foreach":
                foreach_step_(slots, settings, t)
            else:
                for slot in slots:
                    pace_step_(slot, settings, t)
            if group["average_dtype"] != "float32":
                for (live, state), slot in zip(members, slots, strict=True):
                    for name, average in zip(names, (slot.average, slot.returned)):
                        if average is not None:
                            keep_average_(state, name, live, average)

    # --- Which weights the parameters hold --------------------------------------------------------------

    def eval(self, model: nn.Module | None = None) -> None:
        """Put the returned average into the parameters, until `train()` or the next `step()`."""
        self._keeper.show(None, model)

    def train(self, model: nn.Module | None = None) -> None:
        """Put the live weights back into the parameters; nothing happens if they are there."""
        if self._keeper.in_block:
            raise RuntimeError("train() inside averaged_weights: leave the block instead")
        self._keeper.hide(model)

    # --- Saving and loading -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, with the live weights in it while the parameters hold the average."""
        self._keeper.notice_stale_load()
        packed = super().state_dict()
        packed["param_groups"] = checkpoint.plain_groups(packed["param_groups"])
        for _, _, parameter, key in checkpoint.pairs(self, packed):
            if key in packed["state"]:
                packed["state"][key] = settled(packed["state"][key], parameter)
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of PACE or of torch.optim.AdamW, in its own precision: all of it, or nothing."""
        states, notes = checkpoint.read(self, self._keeper, state_dict, ("step", "exp_avg", "exp_avg_sq"))
        groups = checkpoint.merged_groups(self.param_groups, state_dict, Settings.of)
        if any(group.get("amsgrad") for group in groups):
            notes.append("the loaded state is of AMSGrad; PACE continues without its running maximum")
        groups = [{k: v for k, v in group.items() if k not in _ADAMW_ONLY} for group in groups]
        super().load_state_dict({**state_dict, "param_groups": groups, "state": {}})
        checkpoint.put_in(states, self._keeper)
        self._facts = None
        for note in notes:
            warnings.warn(note, stacklevel=2)


# --- The plan of a step ---------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """A plan of one group's step, valid as long as `facts` returns the same."""

    path: Path
    settings: Settings  # but for the learning rate
    chunks: list[list[Tensor]]  # parameters that foreach or the loop steps
    launches: list[Launch]  # of parameters that the fused kernel steps


_PLAIN = {Tensor, nn.Parameter}
_settings_of_plan = itemgetter("control", "eps", "weight_decay", "maximize", *checkpoint.KEPT_ON_LOAD)


def facts(groups: list[dict[str, Any]], memory: Mapping[Tensor, State]) -> list[object]:
    """Return all that plans depend on, as plain values: settings, and where and how every tensor lies.

    Learning rates, values of step counts and addresses of gradients are read at every step instead.
    """
    lives = [p for group in groups for p in group["params"]]
    grads = [p.grad for p in lives]
    given = [grad for grad in grads if grad is not None]
    kept = [value for state in memory.values() for value in state.values()]
    # By `map` of functions in C, which is quick: this runs at every step, for every tensor. Of the state an
    # address is enough: memory of another dtype or shape is elsewhere. Strides and a size are a shape.
    found: list[object] = [*(grad is None for grad in grads), *map(id, chain(lives, memory, kept))]
    found += map(type, given)
    try:
        found += [(len(group["params"]), *group["betas"], *_settings_of_plan(group)) for group in groups]
        if not {*map(type, lives)} <= _PLAIN:
            found += map(layout_of, chain(lives, given))
            lives, given, kept = ([local(tensor) for tensor in each] for each in (lives, given, kept))
        found += map(Tensor.data_ptr, chain(lives, kept))
        for read in (attrgetter("dtype"), Tensor.numel, Tensor.stride, Tensor.is_neg):
            found += map(read, chain(lives, given))
    except (AttributeError, KeyError, RuntimeError, TypeError):
        # A sparse gradient, or a state that is no tensor. An object equals no other: the next plan decides.
        found.append(object())
    return found


def _path(group: dict[str, Any], named: list[tuple[str, Tensor]]) -> Path:
    """Return the path of a group's step; raise RuntimeError if fused=True cannot be had."""
    if group["fused"] or (group["fused"] is None and group["foreach"] is None):
        refused = _first_refusal(named, unsupported_reason)
        if refused is None:
            return "fused"
        if group["fused"]:
            raise RuntimeError(refused)
    return "loop" if group["foreach"] is False else "foreach"


def _slot(live: Tensor, state: State, names: tuple[str, ...]) -> Slot:
    """Return what the update of a parameter touches; averages in few bits are decoded for the step."""
    averages = [state[name] if name in state else average_of(state, name, live) for name in names]
    tensors: Any = (live, live.grad, state["exp_avg"], state["exp_avg_sq"], *averages)
    if type(live) not in _PLAIN:
        tensors = tuple(local(tensor) for tensor in tensors)
    return Slot(*tensors)


# --- What is refused ------------------------------------------------------------------------------------


def _first_refusal(named: list[tuple[str, Tensor]], reason_of: Callable[[Tensor], str | None]) -> str | None:
    """Return a message about the first parameter that `reason_of` has something against, or None."""
    return next((f"{name} {reason}" for name, p in named if (reason := reason_of(p)) is not None), None)


def _unsupported(parameter: Tensor, storage: AverageDtype, grad: Tensor | None = None) -> str | None:
    """Return the end of a sentence on why a parameter or its gradient cannot be taken; None if it can."""
    if parameter.is_complex():
        return "is complex; train its real view (torch.view_as_real) instead"
    if parameter.layout != torch.strided:
        return f"has layout {parameter.layout}; make it dense"
    strides = parameter.stride()
    if any(size > 1 and stride == 0 for size, stride in zip(parameter.shape, strides, strict=True)):
        return f"is an expanded tensor (strides {strides}): several elements share one memory; clone it first"
    reason = unsupported_storage(parameter, storage)
    if reason is not None or grad is None:
        return reason
    if grad.layout != torch.strided:
        return f"has a gradient of layout {grad.layout}; make it dense (for nn.Embedding: sparse=False)"
    if (grad.dtype, grad.shape) != (parameter.dtype, parameter.shape):
        mine, its = (f"{t.dtype} of shape {tuple(t.shape)}" for t in (parameter, grad))
        return f"is {mine} and its gradient {its}; cast or resize one of them"
    if layout_of(grad) != layout_of(parameter):
        return "is sharded in another way than its gradient"
    return None
