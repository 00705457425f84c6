"""PACE as a torch optimizer: settings, groups, state, choice of path. The update itself is in rule.py."""

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, ParamsT

from paceline.rebuilt import checkpoint
from paceline.rebuilt.foreach import chunks, foreach_step_
from paceline.rebuilt.fused import Member, Table, unsupported_reason
from paceline.rebuilt.rule import Slot, pace_step_
from paceline.rebuilt.settings import AverageDtype, Control, Settings, check, control_of, flat
from paceline.rebuilt.sharding import any_nonzero, layout_of, local
from paceline.rebuilt.state import (
    average_of,
    expected,
    follow_,
    keep_average_,
    name_of,
    unset_,
    unsupported_storage,
)
from paceline.rebuilt.weights import HOLD, Keeper, register

_ADAMW_ONLY = ("amsgrad", "decoupled_weight_decay", "capturable", "differentiable")


Path = Literal["fused", "foreach", "loop"]


class _Work(NamedTuple):
    """What a step has to do for one group."""

    members: list[Member]
    path: Path
    settings: Settings


@final
class PACE(Optimizer):
    r"""AdamW plus a clipped, per-coordinate pull of the live weights toward their average.

    `PACE(params, lr)` is Algorithm 1 of *Training for the Model You Return* (Au & Block). At every step t of
    a parameter

    .. code-block:: text

        rate     = (1 + t)^-power
        raw      = AdamW(live)
        gain     = min(rate · lr · c / (√v̂ + eps), 1)
        live'    = raw + gain · (average − live)
        average' = (1 − rate) · average + rate · live'

    What we recommend for pretraining is `PACE(params, lr, control=Control.push())`. The parameters always
    hold the live weights; averages are optimizer state. Evaluate the returned one with `averaged_weights`,
    export it with `averaged_state_dict` or `save_averaged`.

    Arguments:
        params: parameters or parameter groups; any setting below may differ between groups.
        lr: learning rate, float or 1-element Tensor.
        betas, eps, weight_decay: AdamW's.
        control: how training is steered for the average, and which average is returned.
        average_dtype: how averages are kept: "float32" takes 4 bytes a weight; "bfloat16" (2) and "int8"
        (1.03)
            keep live − average, rounded at random. Whoever then changes live weights moves their averages
            along.
        foreach, maximize: as in torch.optim.AdamW. foreach=True and False are the same to the bit.
        fused: one pass over GPU memory. None: wherever it can be taken. True: refused elsewhere.

    >>> import torch, paceline
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
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            **flat(control),
            "average_dtype": average_dtype,
            "foreach": foreach,
            "fused": fused,
            "maximize": maximize,
            HOLD: "live",
        }
        check(defaults)
        self._tables: dict[int, Table] = {}
        self._register()
        super().__init__(params, defaults)

    def _register(self) -> None:
        keeper = Keeper(self, lambda: self.state, lambda group: control_of(group).returned)
        self._keeper = keeper
        register(self, keeper)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "loaded_live": (self._keeper.loaded_live, self._keeper.loaded_name)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        loaded = state.pop("loaded_live", ({}, "live"))
        super().__setstate__(state)
        self._tables = {}
        self._register()
        self._keeper.loaded_live, self._keeper.loaded_name = loaded

    def __repr__(self) -> str:
        lines = []
        for i, group in enumerate(self.param_groups):
            named = [(name_of(group, i, j), p) for j, p in enumerate(group["params"]) if p.grad is not None]
            path = self._path(group, named) if named else "chosen at the first step"
            lines.append(f"    group {i}: {control_of(group)}, path: {path}")
        return "\n".join([super().__repr__().removesuffix(")").rstrip(), *lines, ")"])

    # --- Groups
    # -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose settings are checked. State is made at the first step."""
        if isinstance(param_group, dict):
            if "control" in param_group:
                param_group.update(flat(param_group.pop("control")))
            settings = {**self.defaults, **param_group}
            check(settings)
            control_of(settings)
        super().add_param_group(param_group)
        group, number = self.param_groups[-1], len(self.param_groups) - 1
        group[HOLD] = self.param_groups[0][HOLD]
        for i, parameter in enumerate(group["params"]):
            reason = None if is_lazy(parameter) else _unsupported(parameter, group["average_dtype"])
            if reason is not None:
                self.param_groups.pop()
                raise ValueError(f"{name_of(group, number, i)} {reason}")
        shared = _first_overlap(self.param_groups)
        if shared is not None:
            self.param_groups.pop()
            raise ValueError(f"{shared[0]} and {shared[1]} share memory; give the optimizer one of them")

    # --- The step
    # ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step on the live weights and update the averages.

        After a forgotten `eval()` the live weights are put back first.
        """
        self._keeper.make_ready_to_step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self._keeper.hide()  # a closure that evaluates may end in eval()
        is_dummy = self._is_dummy()
        # Whatever can be refused is refused here, before any weight moves.
        works = [self._plan(group, number) for number, group in enumerate(self.param_groups)]
        if is_dummy:
            for state in self.state.values():
                unset_(state)
            return loss
        for number, work in enumerate(works):
            if not work.members:
                continue
            if work.path == "fused":
                lr = self.param_groups[number]["lr"]
                self._tables.setdefault(number, Table()).step_(work.members, work.settings, lr)
            else:
                _step_group_(work, self.param_groups[number]["average_dtype"])
        return loss

    def _is_dummy(self) -> bool:
        """Return whether torch.distributed.checkpoint makes this step, to learn the entries of a state."""
        if self.state or any(float(group["lr"]) != 0 for group in self.param_groups):
            return False
        grads = (p.grad for group in self.param_groups for p in group["params"])
        return not any_nonzero(grads)

    def _plan(self, group: dict[str, Any], number: int) -> "_Work":
        """Return the parameters of a group that have a gradient, with states that match them."""
        if "control" in group:  # set since
            group.update(flat(group.pop("control")))
        control, storage = control_of(group), group["average_dtype"]
        named = [(name_of(group, number, i), p) for i, p in enumerate(group["params"]) if p.grad is not None]
        for name, parameter in named:
            reason = _unsupported(parameter, storage) or _unsupported_gradient(parameter)
            if reason is not None:
                raise RuntimeError(f"{name} {reason}")
        path = self._path(group, named)
        members = []
        for name, parameter in named:
            entries = expected(parameter, control.averages, storage, moments=True, on_device=path == "fused")
            state = self.state[parameter]
            if not state:
                state["step"] = entries["step"].of(parameter)
            follow_(parameter, state, entries, control.averages, storage, name)
            members.append(Member(parameter, state))
        # A rate that is a tensor on the device is not read on the host for the fused path.
        on_device = path == "fused" and isinstance(group["lr"], Tensor) and group["lr"].is_cuda
        return _Work(members, path, Settings.of({**group, "lr": 0.0} if on_device else group))

    def _path(self, group: dict[str, Any], named: list[tuple[str, Tensor]]) -> Path:
        """Return the path of a group's step; raise RuntimeError if fused=True cannot be had."""
        if group["fused"] or (group["fused"] is None and group["foreach"] is None):
            reasons = ((name, unsupported_reason(parameter)) for name, parameter in named)
            refused = next(((name, reason) for name, reason in reasons if reason is not None), None)
            if refused is None:
                return "fused"
            if group["fused"]:
                raise RuntimeError(" ".join(refused))
        return "loop" if group["foreach"] is False else "foreach"

    # --- Which weights the parameters hold
    # --------------------------------------------------------------------

    def eval(self, model: nn.Module | None = None) -> None:
        """Put the average into the parameters, until `train()` or the next `step()`."""
        self._keeper.show(None, model)

    def train(self, model: nn.Module | None = None) -> None:
        """Put the live weights back into the parameters; nothing happens if they are there."""
        if self._keeper.in_block:
            raise RuntimeError("train() inside averaged_weights: leave the block instead")
        self._keeper.hide(model)

    # --- Saving and loading
    # -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict; while the parameters hold the average, it also has the live weights."""
        self._keeper.notice_stale_load()
        packed = super().state_dict()
        for _, _, parameter, key in checkpoint.pairs(self, packed):
            if key in packed["state"]:
                packed["state"][key] = checkpoint.settled(packed["state"][key], parameter)
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of PACE or of torch.optim.AdamW, in its precision: all of it, or nothing."""
        required = ("step", "exp_avg", "exp_avg_sq")
        loaded = checkpoint.read(self, self._keeper, state_dict, required)
        groups = []
        for own, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            kept = {k: v for k, v in own.items() if k not in ("params", "param_names")}
            kept |= {
                k: v for k, v in saved.items() if k not in (*_ADAMW_ONLY, "average_dtype", "foreach", "fused")
            }
            check(kept)
            control_of(kept)
            groups.append(kept)
            if saved.get("amsgrad"):
                loaded.notes.append(
                    "the loaded state is of AMSGrad; PACE continues without its running maximum"
                )
        # What torch refuses next (another number of groups or parameters) must reach it unchanged.
        groups += state_dict["param_groups"][len(groups) :]
        super().load_state_dict({**state_dict, "param_groups": groups, "state": {}})
        checkpoint.put_in(loaded, self._keeper, self.state)
        for note in loaded.notes:
            warnings.warn(note, stacklevel=2)


# --- One chunk
# ------------------------------------------------------------------------------------------------


def _step_group_(work: "_Work", storage: AverageDtype) -> None:
    """Take the step of a group by the loop or by foreach."""
    counted = [(member, int(member.state["step"].item()) + 1) for member in work.members]
    names = work.settings.control.averages
    for chunk in chunks(counted, lambda item: (item[0].live, item[1])):
        t = chunk[0][1]
        slots = [_slot(member, names) for member, _ in chunk]
        for member, _ in chunk:
            member.state["step"] += 1
        if work.path == "loop":
            for slot in slots:
                pace_step_(slot, work.settings, t)
        else:
            foreach_step_(slots, work.settings, t)
        if storage != "float32":
            for (member, _), slot in zip(chunk, slots, strict=True):
                for name, average in zip(names, (slot.average, slot.returned), strict=False):
                    assert average is not None
                    keep_average_(member.state, name, member.live, average)


def _slot(member: Member, names: tuple[str, ...]) -> Slot:
    """Return what the update of a parameter touches; averages in few bits are made whole for the step."""
    live, state = member
    assert live.grad is not None
    averages = [local(average_of(state, name, live)) for name in names]
    return Slot(
        live=local(live.detach()),
        grad=local(live.grad),
        exp_avg=local(state["exp_avg"]),
        exp_avg_sq=local(state["exp_avg_sq"]),
        average=averages[0],
        returned=averages[1] if len(averages) > 1 else None,
    )


# --- What is refused
# ------------------------------------------------------------------------------------------


def _unsupported(parameter: Tensor, storage: AverageDtype) -> str | None:
    """Return why a parameter cannot be trained, or None."""
    if parameter.is_complex():
        return "is complex; train its real view (torch.view_as_real) instead"
    strides = zip(parameter.shape, parameter.stride(), strict=True)
    if parameter.layout == torch.strided and any(size > 1 and stride == 0 for size, stride in strides):
        return (
            f"is an expanded tensor (strides {parameter.stride()}): several elements share one memory; "
            "clone it first"
        )
    return unsupported_storage(parameter, storage)


def _unsupported_gradient(parameter: Tensor) -> str | None:
    """Return why a gradient cannot be used, or None."""
    grad = parameter.grad
    assert grad is not None
    if grad.layout != torch.strided:
        return f"has a gradient of layout {grad.layout}; make it dense (for nn.Embedding: sparse=False)"
    if grad.dtype != parameter.dtype:
        return f"is {parameter.dtype} and its gradient {grad.dtype}; cast one of them"
    if layout_of(grad) != layout_of(parameter):
        return "is sharded in another way than its gradient"
    return None


def _first_overlap(groups: list[dict[str, Any]]) -> tuple[str, str] | None:
    """Return the names of two parameters that share memory, or None."""
    spans = []
    for number, group in enumerate(groups):
        for i, parameter in enumerate(group["params"]):
            if is_lazy(parameter) or parameter.is_meta or parameter.numel() == 0:
                continue
            part = local(parameter.detach())
            if part.numel() == 0 or part.layout != torch.strided:
                continue
            reach = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
            start = part.data_ptr()
            last = start + reach * part.element_size()
            spans.append((str(part.device), start, last, name_of(group, number, i)))
    spans.sort()
    for (device, _, last, name), (other, start, _, after) in pairwise(spans):
        if device == other and start <= last:
            return name, after
    return None
