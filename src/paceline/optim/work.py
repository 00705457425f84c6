"""What a step has to do for one parameter group; whatever can be refused is refused here, before it."""

from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import _default_to_fused_or_foreach, _get_capturable_supported_devices

from paceline.optim import fused, native
from paceline.optim.foreach import chunks, foreach_step_
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

States = MutableMapping[Tensor, State]


Path = Callable[[list[Slot], Recipe, Scalar], None]


class Work(NamedTuple):
    group: dict[str, Any]
    parameters: list[Tensor]  # those with a gradient
    slots: list[Slot]  # one for each
    path: Path


class Fit(NamedTuple):
    """A parameter that was fit for a step. While all of this is the same, it still is."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    state: State
    entries: int  # of the state
    addresses: tuple[int, ...]  # of live and of what is kept of it
    settings: tuple[object, ...]  # of the group, as far as they have a say


Fits = dict[int, list[Fit | None]]
"""Group → one for each of its parameters. Most steps are like the last, and to look at everything anew takes
longer than to update a small tensor."""


def plan(states: States, group: dict[str, Any], number: int, fits: Fits) -> Work:
    """The work of a step for group `number`. Parameters without a state get one."""
    members = [(i, parameter) for i, parameter in enumerate(group["params"]) if parameter.grad is not None]
    parameters = [parameter for _, parameter in members]
    _check_capture(states, group, parameters)
    compiling = torch.compiler.is_compiling()
    # A compiler cannot look into C; it makes one pass of the foreach path itself.
    one_pass = group["fused"] and not compiling
    known = fits.get(number, [])
    if compiling or len(known) != len(group["params"]):
        known = [None] * len(group["params"])
    settings = (group["return_power"] is None, group["capturable"], one_pass, group["average_dtype"])
    slots = []
    for i, parameter in members:
        slot = _slot_again(states, parameter, settings, known[i])
        if slot is None:
            slot = _slot(states, parameter, group, number, i)
            if one_pass and (reason := _refusal(slot)):
                raise RuntimeError(f"{name_of(group, number, i)} {reason}")
            known[i] = None if compiling else _fit(parameter, slot, states[parameter], settings)
        slots.append(slot)
    if not compiling:
        fits[number] = known
    path: Path
    if one_pass:
        path = _one_pass_step_
    else:
        path = foreach_step_ if _takes_foreach(group, parameters) else _loop_step_
        if group["average_dtype"] != "float32":
            path = partial(_residual_step_, path, [states[parameter] for parameter in parameters])
    return Work(group, parameters, slots, path)


_KEPT = ("exp_avg", "exp_avg_sq", "average", "returned", "step")


def _slot_again(
    states: States, parameter: Tensor, settings: tuple[object, ...], fit: Fit | None
) -> Slot | None:
    """The slot of a parameter that is as it was, with its new gradient; None if something is not."""
    if fit is None or fit.settings != settings:
        return None
    grad, state = parameter.grad, states.get(parameter)
    if (
        state is not fit.state
        or len(state) != fit.entries
        or grad is None
        or grad.layout != torch.strided
        or grad.dtype != fit.dtype
        or parameter.dtype != fit.dtype
        or parameter.shape != fit.shape
        or parameter.stride() != fit.stride
        or grad.stride() != fit.stride
    ):
        return None
    kept = tuple(map(state.get, _KEPT))
    # Also the same tensor may have been given other memory, on another device.
    if _addresses(parameter, kept) != fit.addresses:
        return None
    return Slot(parameter, grad, *kept)  # type: ignore[arg-type]


def _fit(parameter: Tensor, slot: Slot, state: State, settings: tuple[object, ...]) -> Fit | None:
    """What to remember; nothing of a parameter that is not plain, or whose gradient lies otherwise."""
    plain = type(parameter.data) is Tensor and not parameter.is_complex() and not parameter.is_meta
    plain = plain and "average" in state
    if not plain or parameter.numel() == 0 or slot.grad.stride() != parameter.stride():
        return None
    kept = tuple(map(state.get, _KEPT))
    return Fit(
        shape=parameter.shape,
        stride=parameter.stride(),
        dtype=parameter.dtype,
        state=state,
        entries=len(state),
        addresses=_addresses(parameter, kept),
        settings=settings,
    )


def _addresses(parameter: Tensor, kept: tuple[Tensor | None, ...]) -> tuple[int, ...]:
    return (parameter.data_ptr(), *[0 if tensor is None else tensor.data_ptr() for tensor in kept])


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


def _check_capture(states: States, group: dict[str, Any], parameters: list[Tensor]) -> None:
    if torch.compiler.is_compiling():
        return
    supported = _get_capturable_supported_devices()
    devices = {parameter.device.type for parameter in parameters}
    if group["capturable"] and not devices <= set(supported):
        raise RuntimeError(f"capturable=True needs parameters on one of {supported}; some are on {devices}")
    # No stream captures before CUDA is initialized, and asking would initialize it.
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        if not group["capturable"]:
            raise RuntimeError("capturing step() in a CUDA graph needs capturable=True in all groups")
        if any("unseeded" in states.get(parameter, ("unseeded",)) for parameter in parameters):
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
    step_: Path
    sums_of: Callable[[list[Slot]], list[float]] | None = None  # of second moments, where they cost no pass


ONE_PASS = {
    "cpu": OnePass(native.refusal, native.native_step_, native.sums_of),
    "cuda": OnePass(fused.refusal, fused.fused_step_),
}


def _refusal(slot: Slot) -> str | None:
    kind = slot.live.device.type
    if slot.average.dtype in (torch.int8, torch.bfloat16):
        return (
            f"has an average that is kept as a residual in {slot.average.dtype}, which fused=True does not "
            'support yet; leave fused out, or use average_dtype="float32"'
        )
    if kind not in ONE_PASS:
        return f"is on {slot.live.device}; fused=True is for parameters on a CPU or a GPU with CUDA"
    return ONE_PASS[kind].refusal(slot)


def _one_pass_step_(slots: list[Slot], settings: Recipe, scale: Scalar) -> None:
    by_kind: dict[str, list[Slot]] = {}
    for slot in slots:
        by_kind.setdefault(slot.live.device.type, []).append(slot)
    for kind, members in by_kind.items():
        ONE_PASS[kind].step_(members, settings, scale)


def _loop_step_(slots: list[Slot], settings: Recipe, scale: Scalar) -> None:
    for slot in slots:
        pace_step_(slot, settings, scale)


def _residual_step_(
    path: Path, states: list[State], slots: list[Slot], settings: Recipe, scale: Scalar
) -> None:
    """Any path on averages that are kept as residuals: decoded for it and encoded again, chunk by chunk."""
    for chunk in chunks(zip(slots, states, strict=True), lambda pair: (pair[0].live, None)):
        opened = []
        for slot, state in chunk:
            average = average_of(state, "average", slot.live)
            returned = None if slot.returned is None else average_of(state, "returned", slot.live)
            opened.append(slot._replace(average=average, returned=returned))
        path(opened, settings, scale)
        for slot, (_, state) in zip(opened, chunk, strict=True):
            keep_average_(state, "average", slot.live, slot.average)
            if slot.returned is not None:
                keep_average_(state, "returned", slot.live, slot.returned)


def scale_before(states: States, works: list[Work]) -> Scalar:
    """The root mean square of √v̂ over all that this step will move, if a group asks for it."""
    if not any(work.group["gain"] == "scaled" and work.group["pullback_strength"] != 0 for work in works):
        return 1.0
    known: dict[Tensor, float] = {}
    for work in works:
        if work.path is _one_pass_step_:
            known |= _known_sums(work)
    members = [(parameter, states[parameter], work.group) for work in works for parameter in work.parameters]
    return model_scale(members, known)


def _known_sums(work: Work) -> dict[Tensor, float]:
    """Parameter → the sum of its second moment."""
    found: dict[Tensor, float] = {}
    for kind, way in ONE_PASS.items():
        pairs = [(p, s) for p, s in zip(work.parameters, work.slots, strict=True) if p.device.type == kind]
        if way.sums_of is not None and pairs:
            found |= dict(zip([p for p, _ in pairs], way.sums_of([slot for _, slot in pairs]), strict=True))
    return found
