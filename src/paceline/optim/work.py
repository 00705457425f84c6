"""What a step has to do for one parameter group; whatever can be refused is refused here, before it."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import _default_to_fused_or_foreach, _get_capturable_supported_devices

from paceline.optim import fused, host, native, packing
from paceline.optim.checks import warn
from paceline.optim.foreach import PLAIN, chunks, foreach_step_
from paceline.optim.members import Fit, Fits, Members, States, count_together, local_slot, slot_of
from paceline.optim.moments import ask_scale
from paceline.optim.recipe import Recipe
from paceline.optim.rule import NUMERATORS, Scalar, Slot, pace_step_
from paceline.optim.sharded import OverRanks, cut_of, local, mesh_of, squares_of
from paceline.optim.state import State, allocate, conform, name_of, real
from paceline.optim.told import Tell


class Whole(NamedTuple):
    """What a step takes from the model as a whole."""

    scale: Scalar = 1.0  # root mean square of √v̂, before the step
    factor: Scalar = 1.0  # how many times the gradient counts
    skip: Tensor | None = None  # () on the device: nothing is to change unless it is 0
    tell: Tell | None = None  # what the step does, if somebody wants to know and its path can tell


Path = Callable[[Members, Recipe, Whole], None]


class Work(NamedTuple):
    group: dict[str, Any]
    members: Members
    path: Path
    anew: bool  # the members were not as at the last step
    held: object  # what must stay in memory until all is done

    def can_skip(self) -> bool:
        """Whether it can be skipped on the device."""
        kinds = self.members.by_device()
        one_pass = self.members.memo["one pass"] and self.group["capturable"]
        return bool(one_pass and all(ONE_PASS[kind].can_skip for kind in kinds))

    def elements(self) -> int:
        """Weights of all its members, on all ranks."""
        memo = self.members.memo
        if "elements" not in memo:
            memo["elements"] = sum(real(parameter).numel() for parameter in self.members.parameters)
        return int(memo["elements"])

    def is_cut_alike(self) -> bool:
        """Whether all parameters are cut over ranks in one way, or none is."""
        memo = self.members.memo
        if "cut alike" not in memo:
            memo["cut alike"] = len(set(map(cut_of, self.members.parameters))) <= 1
        return bool(memo["cut alike"])


def plan_all(states: States, groups: list[dict[str, Any]], fits: Fits) -> list[Work]:
    """The work of a step, a group each. Parameters without a state get one."""
    compiling = torch.compiler.is_compiling()
    if not compiling:
        fits.look(states)
    works = []
    for number, group in enumerate(groups):
        works.append(_plan(states, group, number, fits, compiling))
    return works


def _plan(states: States, group: dict[str, Any], number: int, fits: Fits, compiling: bool) -> Work:
    settings = () if compiling else _settings(group)
    _check_capture(states, group, compiling)
    members = None if compiling else fits.again(number, group["params"], settings)
    if members is not None:
        return Work(group, members, _path(group, members), False, _held(members))
    places = [(i, parameter) for i, parameter in enumerate(group["params"]) if parameter.grad is not None]
    parameters = [parameter for _, parameter in places]
    slots = [_slot(states, parameter, group, number, i) for i, parameter in places]
    one_pass = not compiling and _takes_one_pass(group, number, places, slots)
    if one_pass or (not compiling and _goes_by_parts(group, slots)):
        slots = list(map(local_slot, slots))
    own = [states[parameter] for parameter in parameters]
    fit = bool(own) and not compiling and Fit.can_be(parameters, own, slots)
    memo: dict[str, Any] = {"one pass": one_pass}
    memo["tells"] = one_pass and all(ONE_PASS[slot.live.device.type].can_tell for slot in slots)
    memo["host"] = not (one_pass or compiling) and _fits_host(parameters, slots)
    if (one_pass or memo["host"]) and fit and not group["capturable"]:
        slots, memo["counts"] = count_together(own, slots, quick=one_pass)
    if not one_pass:
        memo["packed"] = any(packing.is_packed(slot, group) for slot in slots)
        for (i, _), slot in zip(places, slots, strict=True):
            if reason := packing.refusal(slot.live, group):
                raise RuntimeError(f"{name_of(group, number, i)} {reason}")
    # One pass makes parts of what it takes from them, and keeps none.
    beside = own if one_pass else [_beside(slot.live, state) for slot, state in zip(slots, own, strict=True)]
    members = Members.of(parameters, beside, slots, one_pass, memo)
    if fit:
        fits.keep(number, Fit(group["params"], members, own, settings), states)
    return Work(group, members, _path(group, members), True, _held(members))


def _held(members: Members) -> object:
    """While C works on what lies at addresses, other threads go on and may replace it. What a GPU works on is
    not given to others before that is done."""
    return members.hold() if members.memo["one pass"] and "cpu" in members.by_device() else None


def _settings(group: dict[str, Any]) -> tuple[object, ...]:
    """Of which another plan comes."""
    return *_SETTINGS(group), group["return_power"] is None, group["betas"][0] == 0


def will_tell(group: dict[str, Any], number: int, fits: Fits) -> bool:
    """Whether the next step of a group can tell what it does, as far as it can be known before it."""
    return fits.tell(number, _settings(group))


def _beside(live: Tensor, state: State) -> State:
    """The state of a parameter, cut as the live weights that a path sees."""
    if mesh_of(live) is not None or all(mesh_of(value) is None for value in state.values()):
        return state
    return {key: local(value) for key, value in state.items()}


def _goes_by_parts(group: dict[str, Any], slots: list[Slot]) -> bool:
    """Whether a rank can update its own parts of parameters as if they were all there is.

    What is done to a weight depends on no other one, but for the mean over a tensor of gain="relative".
    """
    if group["gain"] == "relative" or group["differentiable"]:
        return False
    return all(_is_cut_alike(slot) for slot in slots)


def _is_cut_alike(slot: Slot) -> bool:
    return all(array is None or cut_of(array) == cut_of(slot.live) for array in slot[:6])


# --- The choice of a path ---------------------------------------------------------------------------


def _takes_one_pass(
    group: dict[str, Any], number: int, places: list[tuple[int, Tensor]], slots: list[Slot]
) -> bool:
    """Whether a group goes over memory once: as it says, or by itself on a GPU where it can.

    What the machine lacks is said once, and another path taken; what is not as it should be is refused.
    """
    asked = group["fused"]
    if not slots or not _may_fuse(group):
        return False
    kinds = {slot.live.device.type for slot in slots}
    if asked is None and kinds != {"cuda"}:
        return False  # on a CPU it has to be built first, which nobody asked for
    for kind in kinds:
        lacking = missing(kind)
        if lacking is not None:
            if asked:
                _warn_once(f"fused=True on {_SPOKEN.get(kind, kind)} {lacking}; going on without it")
            return False
    for (i, _), slot in zip(places, slots, strict=True):
        if reason := _refusal(slot):
            if not asked:
                return False
            raise RuntimeError(f"{name_of(group, number, i)} {reason}")
    if asked:
        _refuse_doubles(group, number, places)
    return bool(asked) or len({id(parameter) for _, parameter in places}) == len(places)


def _may_fuse(group: dict[str, Any]) -> bool:
    """Whether nothing that a group says rules one pass out. Whoever chooses about foreach chooses a path."""
    if group["differentiable"] or group["gain"] == "relative":
        return False
    return bool(group["fused"]) or (group["fused"] is None and group["foreach"] is None)


def _may_take_host(group: dict[str, Any]) -> bool:
    """Whether nothing that a group says rules host.py out.

    Without a pull it is not taken, so that strength 0 is torch's AdamW to the bit.
    """
    return (
        group["foreach"] is None
        and group["fused"] is None
        and group["gain"] in NUMERATORS
        and group["gap"] == "pre"
        and group["pullback_strength"] != 0
        and group["betas"][0] != 0
        and not (group["differentiable"] or group["capturable"] or isinstance(group["lr"], Tensor))
        and group["average_dtype"] == "float32"
    )


def _fits_host(parameters: list[Tensor], slots: list[Slot]) -> bool:
    return bool(slots) and all(map(host.fits, slots)) and len(set(map(id, parameters))) == len(parameters)


def _takes_host(group: dict[str, Any], members: Members) -> bool:
    return bool(members.memo["host"] and _may_take_host(group))


_SPOKEN = {"cpu": "a CPU", "cuda": "a GPU"}


def missing(kind: str) -> str | None:
    """Why there is no one pass on this kind of device, in words that follow its name; None if there is."""
    return ONE_PASS[kind].missing() if kind in ONE_PASS else "is not there: only on a CPU or a GPU with CUDA"


_warn_once = cache(warn)


def path_name(group: dict[str, Any]) -> str:
    """Which path the parameters of a group take, as far as it can be known before there are gradients."""
    known = [local(parameter.detach()) for parameter in group["params"] if not is_lazy(parameter)]
    kinds = {parameter.device.type for parameter in known}
    wanted = _may_fuse(group) and (group["fused"] or kinds == {"cuda"})
    able = kinds and wanted and all(missing(kind) is None for kind in kinds)
    if able and all(parameter.dtype in ONE_PASS[parameter.device.type].dtypes for parameter in known):
        return " and ".join(ONE_PASS_NAMES[kind] for kind in sorted(kinds))
    if known and _may_take_host(group) and all(map(host.takes, known)):
        return HOST_NAME
    foreach = group["foreach"] or (group["foreach"] is None and _takes_foreach(group, known))
    return "foreach" if foreach else "tensor by tensor"


HOST_NAME = "torch's fused AdamW, and foreach"
ONE_PASS_NAMES = {"cpu": "one pass, in C", "cuda": "one pass, by Triton"}


def _refuse_doubles(group: dict[str, Any], number: int, places: list[tuple[int, Tensor]]) -> None:
    seen: set[int] = set()
    for i, parameter in places:
        if id(parameter) in seen:
            raise RuntimeError(f"{name_of(group, number, i)} is in its group twice; fused=True needs it once")
        seen.add(id(parameter))


# A change of these asks for a new plan.
_SETTINGS = itemgetter(
    *("average_dtype", "capturable", "foreach", "fused", "differentiable", "gain", "rounding", "offload")
)


def _path(group: dict[str, Any], members: Members) -> Path:
    if members.memo["one pass"]:
        return _one_pass_step_
    if _takes_host(group, members):
        return _host_step_
    path = (
        foreach_step_
        if _takes_foreach(group, [local(slot.live) for slot in members.rests()])
        else _loop_step_
    )
    return partial(_packed_step_, path, group) if members.memo["packed"] else partial(_plain_step_, path)


def _slot(states: States, parameter: Tensor, group: dict[str, Any], number: int, i: int) -> Slot:
    grad = parameter.grad
    assert grad is not None
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"PACE does not support sparse gradients: that of {name_of(group, number, i)} is {grad.layout}; "
            "make it dense (for nn.Embedding: sparse=False)"
        )
    if grad.is_complex() != parameter.is_complex() or not (grad.is_complex() or grad.is_floating_point()):
        raise RuntimeError(
            f"the gradient of {name_of(group, number, i)} is {grad.dtype}, the parameter {parameter.dtype}; "
            "PACE needs a gradient of floating numbers, complex if the parameter is"
        )
    state = states.get(parameter)
    if not state:
        state = states[parameter] = allocate(parameter, group)
    conform(parameter, state, group, number, i)
    return slot_of(parameter, grad, state)


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


def _takes_foreach(group: dict[str, Any], parameters: list[Tensor]) -> bool:
    tensor_lr = isinstance(group["lr"], Tensor) and not group["capturable"]
    if group["foreach"] and tensor_lr:
        raise RuntimeError("lr as a Tensor is not supported for capturable=False and foreach=True")
    if group["foreach"] is not None:
        return bool(group["foreach"])
    if group["differentiable"] or tensor_lr:
        return False
    _, foreach = _default_to_fused_or_foreach(parameters, False, use_fused=False)
    # torch takes it on devices only. On a CPU it is quicker too, and the same to the bit in these precisions.
    return foreach or all(
        type(parameter) in PLAIN
        and parameter.device.type == "cpu"
        and parameter.dtype in (torch.float32, torch.float64)
        for parameter in parameters
    )


class OnePass(NamedTuple):
    """A way over memory in one pass."""

    missing: Callable[[], str | None]
    refusal: Callable[[Slot], str | None]
    step_: Callable[[Members, Recipe, Whole], None]
    """Counts are advanced before."""
    root_of_mean: Callable[[Members, float, int, bool], Scalar | None]
    """Of members, β₂, elements and capturable: the root of the sum of v̂ over all members, without those with
    a NaN or Inf, over so many elements; None if none has stepped."""
    sums_of_gradients: Callable[[Members, bool], list[Tensor]]
    """Of members and capturable: as in sharded.py, of this rank's parts; none if there are none."""
    dtypes: tuple[torch.dtype, ...]
    """Of parameters that it takes."""
    can_skip: bool
    """Whether a step can be skipped on the device."""
    can_tell: bool
    """Whether a step fills `Whole.tell`."""


ONE_PASS = {
    "cpu": OnePass(
        missing=native.missing,
        refusal=native.refusal,
        step_=lambda members, recipe, whole: native.native_step_(members, recipe, whole.scale, whole.factor),
        root_of_mean=native.root_of_mean,
        sums_of_gradients=lambda members, capturable: [squares_of(members.grads)],
        dtypes=(torch.float32,),
        can_skip=False,
        can_tell=False,
    ),
    "cuda": OnePass(
        missing=fused.missing,
        refusal=fused.refusal,
        step_=lambda members, recipe, whole: fused.fused_step_(members, recipe, *whole),
        root_of_mean=fused.root_of_mean,
        sums_of_gradients=fused.sums_of_gradients,
        dtypes=fused.DTYPES,
        can_skip=True,
        can_tell=True,
    ),
}


def _refusal(slot: Slot) -> str | None:
    if not _is_cut_alike(slot):
        return "and its gradient and state are not cut alike over ranks"
    reason: str | None = ONE_PASS[slot.live.device.type].refusal(local_slot(slot))
    return reason


def _one_pass_step_(members: Members, recipe: Recipe, whole: Whole) -> None:
    members.count_step(whole.skip)
    for kind, part in members.by_device().items():
        ONE_PASS[kind].step_(part, recipe, whole)


def _host_step_(members: Members, recipe: Recipe, whole: Whole) -> None:
    members.count_step()
    host.host_step_(members, recipe, whole.scale, whole.factor)


SlotPath = Callable[[list[Slot], Recipe, Scalar, Scalar], None]


def _plain_step_(path: SlotPath, members: Members, recipe: Recipe, whole: Whole) -> None:
    path(members.slots(), recipe, whole.scale, whole.factor)


def _packed_step_(
    path: SlotPath, group: dict[str, Any], members: Members, recipe: Recipe, whole: Whole
) -> None:
    """Any path on weights and state that are kept otherwise: opened for it and closed again, by chunks."""
    for chunk in chunks(zip(members.slots(), members.states, strict=True), lambda pair: (pair[0].live, None)):
        opened = [packing.opened(slot, state, group, whole.factor) for slot, state in chunk]
        path(opened, recipe, whole.scale, 1.0)
        for done, (slot, state) in zip(opened, chunk, strict=True):
            packing.close_(slot, done, state, group)


def _loop_step_(slots: list[Slot], recipe: Recipe, scale: Scalar, factor: Scalar) -> None:
    for slot in slots:
        pace_step_(slot, recipe, scale, factor)


def scale_before(states: States, works: list[Work], over_ranks: OverRanks) -> Callable[[], Scalar]:
    """The root mean square of √v̂ over all that this step will move, if a group asks for it; told once all
    sums over ranks are asked for."""
    if not any(work.group["gain"] == "scaled" and work.group["pullback_strength"] != 0 for work in works):
        return lambda: 1.0
    roots: list[Callable[[], Scalar]] = []
    rest: list[tuple[Tensor, State, dict[str, Any]]] = []
    elements = max(sum(map(Work.elements, works)), 1)
    for work in works:
        parameters, group = work.members.parameters, work.group
        if (work.members.memo["one pass"] or _takes_host(group, work.members)) and work.is_cut_alike():
            roots += _roots(work, elements, over_ranks)
        else:
            rest += [(parameter, states[parameter], group) for parameter in parameters]
    return roots[0] if len(roots) == 1 and not rest else ask_scale(rest, roots, elements, over_ranks)


def _roots(work: Work, elements: int, over_ranks: OverRanks) -> Iterator[Callable[[], Scalar]]:
    like, beta2 = work.members.parameters[0], work.group["betas"][1]
    for kind, part in work.members.by_device().items():
        root: Scalar | None
        if work.members.memo["one pass"]:
            root = ONE_PASS[kind].root_of_mean(part, beta2, elements, work.group["capturable"])
        else:
            root = host.root_of_mean(part, beta2, elements)
        if mesh_of(like) is not None:  # a rank that has nothing of any of them asks as the others do
            number = torch.as_tensor(0.0 if root is None else root, dtype=torch.float64, device=kind)
            yield partial(_root, over_ranks.ask(number.square(), like))
        elif root is not None:
            yield partial(_same, root)


def _root(number: Callable[[], Tensor]) -> Tensor:
    return number().sqrt()


def _same(number: Scalar) -> Scalar:
    return number
