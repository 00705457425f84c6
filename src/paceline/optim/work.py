"""What a step has to do for one parameter group; whatever can be refused is refused here, before it."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import _default_to_fused_or_foreach, _get_capturable_supported_devices

from paceline.optim import fused, native
from paceline.optim.foreach import chunks, foreach_step_
from paceline.optim.members import Fit, Fits, Members, States, count_together
from paceline.optim.moments import model_scale
from paceline.optim.recipe import Recipe
from paceline.optim.rule import Scalar, Slot, pace_step_
from paceline.optim.sharded import whole
from paceline.optim.state import (
    State,
    allocate,
    average_of,
    conform,
    keep_average_,
    keeps,
    name_of,
    real,
    residual_key,
)

Path = Callable[[Members, Recipe, Scalar], None]


class Work(NamedTuple):
    group: dict[str, Any]
    members: Members
    path: Path
    anew: bool  # the members were not as at the last step


def plan_all(states: States, groups: list[dict[str, Any]], fits: Fits) -> list[Work]:
    """The work of a step, a group each. Parameters without a state get one."""
    fits.look(states)
    return [_plan(states, group, number, fits) for number, group in enumerate(groups)]


def _plan(states: States, group: dict[str, Any], number: int, fits: Fits) -> Work:
    compiling = torch.compiler.is_compiling()
    # A compiler cannot look into C; it makes one pass of the foreach path itself.
    one_pass = bool(group["fused"]) and not compiling
    settings = (group["return_power"] is None, *[group[name] for name in _SETTINGS], one_pass)
    _check_capture(states, group, compiling)
    members = None if compiling else fits.again(number, group["params"], settings)
    if members is not None:
        return Work(group, members, _path(group, members.parameters, one_pass), anew=False)
    places = [(i, parameter) for i, parameter in enumerate(group["params"]) if parameter.grad is not None]
    parameters = [parameter for _, parameter in places]
    slots = [_slot(states, parameter, group, number, i) for i, parameter in places]
    if one_pass:
        _refuse_doubles(group, number, places)
        for (i, _), slot in zip(places, slots, strict=True):
            if reason := _refusal(slot):
                raise RuntimeError(f"{name_of(group, number, i)} {reason}")
    memo: dict[str, Any] = {}
    own = [states[parameter] for parameter in parameters]
    fit = bool(own) and not compiling and Fit.can_be(parameters, own, slots)
    if fit and one_pass and not group["capturable"]:
        slots, memo["counts"] = count_together(own, slots)
    members = Members.of(parameters, own, slots, one_pass, memo)
    if fit:
        fits.keep(number, Fit(group["params"], members, settings), states)
    return Work(group, members, _path(group, parameters, one_pass), anew=True)


def _refuse_doubles(group: dict[str, Any], number: int, places: list[tuple[int, Tensor]]) -> None:
    seen: set[int] = set()
    for i, parameter in places:
        if id(parameter) in seen:
            raise RuntimeError(f"{name_of(group, number, i)} is in its group twice; fused=True needs it once")
        seen.add(id(parameter))


_SETTINGS = ("average_dtype", "capturable", "foreach", "differentiable")


def _path(group: dict[str, Any], parameters: list[Tensor], one_pass: bool) -> Path:
    if one_pass:
        return _one_pass_step_
    path = foreach_step_ if _takes_foreach(group, parameters) else _loop_step_
    return partial(_plain_step_ if group["average_dtype"] == "float32" else _residual_step_, path)


def _slot(states: States, parameter: Tensor, group: dict[str, Any], number: int, i: int) -> Slot:
    grad = parameter.grad
    assert grad is not None
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"PACE does not support sparse gradients: that of {name_of(group, number, i)} is {grad.layout}; "
            "make it dense (for nn.Embedding: sparse=False)"
        )
    if grad.dtype != parameter.dtype:
        raise RuntimeError(
            f"the gradient of {name_of(group, number, i)} is {grad.dtype}, the parameter {parameter.dtype}; "
            "PACE needs them alike"
        )
    state = states.get(parameter)
    if not state:
        state = states[parameter] = allocate(parameter, group)
    conform(parameter, state, group, number, i)
    return Slot(
        live=real(parameter),
        grad=real(grad),
        exp_avg=real(state["exp_avg"]),
        exp_avg_sq=real(state["exp_avg_sq"]),
        average=_held(state, "average"),
        returned=_held(state, "returned") if keeps(state, "returned") else None,
        step=state["step"],
    )


def _held(state: State, name: str) -> Tensor:
    """An average, or the code that stands for it until `_residual_step_` comes to it."""
    return real(state[name]) if name in state else state[residual_key(name)]


def _check_capture(states: States, group: dict[str, Any], compiling: bool) -> None:
    if compiling:
        return
    if group["capturable"]:
        supported = _get_capturable_supported_devices()
        devices = {parameter.device.type for parameter in group["params"] if parameter.grad is not None}
        if not devices <= set(supported):
            raise RuntimeError(
                f"capturable=True needs parameters on one of {supported}; some are on {devices}"
            )
    # No stream captures before CUDA is initialized, and asking would initialize it.
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        if not group["capturable"]:
            raise RuntimeError("capturing step() in a CUDA graph needs capturable=True in all groups")
        moving = [parameter for parameter in group["params"] if parameter.grad is not None]
        if any("unseeded" in states.get(parameter, ("unseeded",)) for parameter in moving):
            raise RuntimeError("take one step before you capture: some averages are not taken yet")


def all_finite(grads: list[Tensor]) -> bool:
    """Whether no gradient has a NaN or Inf, on any rank."""
    # 0 · g is NaN where g is not finite, and a NaN survives the sum over elements, tensors and ranks;
    # a maximum over ranks may lose it, and a plain sum may overflow.
    sums = [whole((grad * 0).sum()).to("cpu", torch.float32) for grad in grads]
    return not sums or bool(torch.stack(sums).sum() == 0)


def _takes_foreach(group: dict[str, Any], parameters: list[Tensor]) -> bool:
    tensor_lr = isinstance(group["lr"], Tensor) and not group["capturable"]
    if group["foreach"] and tensor_lr:
        raise RuntimeError("lr as a Tensor is not supported for capturable=False and foreach=True")
    if group["foreach"] is not None:
        return bool(group["foreach"])
    _, foreach = _default_to_fused_or_foreach(parameters, group["differentiable"], use_fused=False)
    return foreach and not tensor_lr


class OnePass(NamedTuple):
    """A way over memory in one pass."""

    refusal: Callable[[Slot], str | None]
    step_: Callable[[Members, Recipe, Scalar], None]
    """Counts are advanced before."""
    energy_of: Callable[[Members, float, bool], Scalar | None]
    """Of members, β₂ and capturable: the sum of v̂ over all of them, without those with a NaN or Inf;
    None if none has stepped."""


ONE_PASS = {
    "cpu": OnePass(native.refusal, native.native_step_, native.energy_of),
    "cuda": OnePass(fused.refusal, fused.fused_step_, fused.energy_of),
}


def _refusal(slot: Slot) -> str | None:
    kind = slot.live.device.type
    if kind not in ONE_PASS:
        return f"is on {slot.live.device}; fused=True is for parameters on a CPU or a GPU with CUDA"
    return ONE_PASS[kind].refusal(slot)


def _one_pass_step_(members: Members, recipe: Recipe, scale: Scalar) -> None:
    members.count_step()
    for kind, part in members.by_device().items():
        ONE_PASS[kind].step_(part, recipe, scale)


SlotPath = Callable[[list[Slot], Recipe, Scalar], None]


def _plain_step_(path: SlotPath, members: Members, recipe: Recipe, scale: Scalar) -> None:
    path(members.slots(), recipe, scale)


def _residual_step_(path: SlotPath, members: Members, recipe: Recipe, scale: Scalar) -> None:
    """Any path on averages that are kept as residuals: decoded for it and encoded again, chunk by chunk."""
    for chunk in chunks(zip(members.slots(), members.states, strict=True), lambda pair: (pair[0].live, None)):
        opened = []
        for slot, state in chunk:
            average = average_of(state, "average", slot.live)
            returned = None if slot.returned is None else average_of(state, "returned", slot.live)
            opened.append(slot._replace(average=average, returned=returned))
        path(opened, recipe, scale)
        for slot, (_, state) in zip(opened, chunk, strict=True):
            keep_average_(state, "average", slot.live, slot.average)
            if slot.returned is not None:
                keep_average_(state, "returned", slot.live, slot.returned)


def _loop_step_(slots: list[Slot], recipe: Recipe, scale: Scalar) -> None:
    for slot in slots:
        pace_step_(slot, recipe, scale)


def scale_before(states: States, works: list[Work]) -> Scalar:
    """The root mean square of √v̂ over all that this step will move, if a group asks for it."""
    if not any(work.group["gain"] == "scaled" and work.group["pullback_strength"] != 0 for work in works):
        return 1.0
    energies: list[Scalar] = []
    rest: list[tuple[Tensor, State, dict[str, Any]]] = []
    elements = 0
    for work in works:
        parameters, group = work.members.parameters, work.group
        elements += sum(map(Tensor.numel, (slot.live for slot in work.members.rests)))
        if work.path is _one_pass_step_:
            for kind, part in work.members.by_device().items():
                energy = ONE_PASS[kind].energy_of(part, group["betas"][1], group["capturable"])
                if energy is not None:
                    energies.append(energy)
        else:
            rest += [(parameter, states[parameter], group) for parameter in parameters]
    return model_scale(rest, energies, elements)
