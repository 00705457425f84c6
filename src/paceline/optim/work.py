"""What a step has to do for one parameter group; whatever can be refused is refused here, before it."""

from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import _default_to_fused_or_foreach, _get_capturable_supported_devices

from paceline.optim import fused, packing
from paceline.optim.foreach import PLAIN, chunks, foreach_step_
from paceline.optim.moments import ask_scale
from paceline.optim.recipe import Recipe
from paceline.optim.rule import Scalar, Slot, pace_step_
from paceline.optim.sharded import OverRanks, cut_of, local, mesh_of
from paceline.optim.state import State, allocate, conform, keeps, name_of, residual_key

States = MutableMapping[Tensor, State]
SlotPath = Callable[[list[Slot], Recipe, Scalar], None]
ONE_PASS_NAME = "one pass, by Triton"


class Work(NamedTuple):
    """The parameters of a group that have a gradient, and how they are stepped."""

    group: dict[str, Any]
    parameters: list[Tensor]
    states: list[State]
    slots: list[Slot]
    path: SlotPath
    table: fused.Table | None
    """Of the one pass over memory, which is taken instead; None if it is not."""

    def step_(self, scale: Scalar) -> None:
        """Take the step, with the scale of the model for gain="scaled"."""
        if not self.slots:
            return
        recipe = Recipe.of(self.group)
        if self.table is not None:
            torch._foreach_add_([slot.step for slot in self.slots], 1)
            self.table.step_(self.slots, recipe, scale)
            return
        if any(packing.is_packed(slot, self.group) for slot in self.slots):
            _packed_step_(self, recipe, scale)
        else:
            self.path(self.slots, recipe, scale)


def plan_all(states: States, groups: list[dict[str, Any]], tables: dict[int, fused.Table]) -> list[Work]:
    """Return the work of a step, one entry for each group. Parameters without a state get one."""
    compiling = torch.compiler.is_compiling()
    works = []
    for number, group in enumerate(groups):
        _check_capture(states, group, compiling)
        works.append(_plan(states, group, number, tables, compiling))
    return works


def _plan(
    states: States, group: dict[str, Any], number: int, tables: dict[int, fused.Table], compiling: bool
) -> Work:
    places = [(i, parameter) for i, parameter in enumerate(group["params"]) if parameter.grad is not None]
    parameters = [parameter for _, parameter in places]
    slots = [_slot(states, parameter, group, number, i) for i, parameter in places]
    own = [states[parameter] for parameter in parameters]
    one_pass = not compiling and _takes_one_pass(group, number, places, slots)
    if one_pass or (not compiling and _goes_by_parts(slots)):
        slots = [_local_slot(slot) for slot in slots]
        own = [{key: local(value) for key, value in state.items()} for state in own]
    if one_pass:
        table = tables.setdefault(number, fused.Table())
        table.update(slots, own, group["capturable"])
        return Work(group, parameters, own, slots, _loop_step_, table)
    takes_foreach = _takes_foreach(group, [local(slot.live) for slot in slots])
    return Work(group, parameters, own, slots, foreach_step_ if takes_foreach else _loop_step_, None)


def _slot(states: States, parameter: Tensor, group: dict[str, Any], number: int, i: int) -> Slot:
    grad = parameter.grad
    assert grad is not None
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"PACE does not support sparse gradients: that of {name_of(group, number, i)} is {grad.layout}; "
            "make it dense (for nn.Embedding: sparse=False)"
        )
    if not grad.is_floating_point():
        raise RuntimeError(
            f"the gradient of {name_of(group, number, i)} is {grad.dtype}, the parameter {parameter.dtype}; "
            "PACE needs a gradient of real floating numbers"
        )
    state = states.get(parameter)
    if not state:
        state = states[parameter] = allocate(parameter, group)
    conform(parameter, state, group, number, i)

    def held(name: str) -> Tensor:
        """The average, or the code that stands for it until it is opened."""
        return state[name] if name in state else state[residual_key(name)]

    return Slot(
        live=parameter,
        grad=grad,
        exp_avg=state.get("exp_avg", None),
        exp_avg_sq=state["exp_avg_sq"],
        average=held("average"),
        returned=held("returned") if keeps(state, "returned") else None,
        step=state["step"],
    )


def _local_slot(slot: Slot) -> Slot:
    """The part of a slot that this rank has."""
    return Slot(*(None if array is None else local(array) for array in slot))  # type: ignore[arg-type]


def _goes_by_parts(slots: list[Slot]) -> bool:
    """Whether a rank can update its own parts of parameters as if they were all there is."""
    return all(_is_cut_alike(slot) for slot in slots)


def _is_cut_alike(slot: Slot) -> bool:
    return all(array is None or cut_of(array) == cut_of(slot.live) for array in slot[:6])


# --- The choice of a path ---------------------------------------------------------------------------


def _takes_one_pass(
    group: dict[str, Any], number: int, places: list[tuple[int, Tensor]], slots: list[Slot]
) -> bool:
    """Whether a group goes over memory once: as it says, or by itself on a GPU where it can.

    Where it is asked for and cannot be taken, RuntimeError says why.
    """
    asked = group["fused"]
    if not slots or not _may_fuse(group):
        return False
    for (i, _), slot in zip(places, slots, strict=True):
        if reason := _refusal(slot):
            if not asked:
                return False
            raise RuntimeError(f"{name_of(group, number, i)} {reason}")
    seen: set[int] = set()
    for i, parameter in places:
        if id(parameter) in seen and asked:
            raise RuntimeError(f"{name_of(group, number, i)} is in its group twice; fused=True needs it once")
        seen.add(id(parameter))
    return len(seen) == len(places)


def _refusal(slot: Slot) -> str | None:
    if not _is_cut_alike(slot):
        return "and its gradient and state are not cut alike over ranks"
    return fused.refusal(_local_slot(slot))


def _may_fuse(group: dict[str, Any]) -> bool:
    """Whether nothing that a group says rules one pass out. Whoever chooses about foreach chooses a path."""
    return bool(group["fused"]) or (group["fused"] is None and group["foreach"] is None)


def path_name(group: dict[str, Any]) -> str:
    """Return which path the parameters of a group take, as far as it is known before there are gradients."""
    known = [local(parameter.detach()) for parameter in group["params"] if not is_lazy(parameter)]
    able = known and _may_fuse(group) and all(fused.missing(p.device.type) is None for p in known)
    if able and all(parameter.dtype in fused.DTYPES for parameter in known):
        return ONE_PASS_NAME
    foreach = group["foreach"] or (group["foreach"] is None and _takes_foreach(group, known))
    return "foreach" if foreach else "tensor by tensor"


def _takes_foreach(group: dict[str, Any], parameters: list[Tensor]) -> bool:
    tensor_lr = isinstance(group["lr"], Tensor) and not group["capturable"]
    if group["foreach"] and tensor_lr:
        raise RuntimeError("lr as a Tensor is not supported for capturable=False and foreach=True")
    if group["foreach"] is not None:
        return bool(group["foreach"])
    if tensor_lr:
        return False
    _, foreach = _default_to_fused_or_foreach(parameters, False, use_fused=False)
    # torch takes it on devices only. On a CPU it is quicker too, and the same to the bit in these precisions.
    return foreach or all(
        type(parameter) in PLAIN
        and parameter.device.type == "cpu"
        and parameter.dtype in (torch.float32, torch.float64)
        for parameter in parameters
    )


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


# --- The other paths ----------------------------------------------------------------------------------


def _loop_step_(slots: list[Slot], recipe: Recipe, scale: Scalar) -> None:
    for slot in slots:
        pace_step_(slot, recipe, scale)


def _packed_step_(work: Work, recipe: Recipe, scale: Scalar) -> None:
    """Open what is kept otherwise for a path that knows none of it, chunk by chunk, and close it again."""
    for chunk in chunks(zip(work.slots, work.states, strict=True), lambda pair: (pair[0].live, None)):
        opened = [packing.opened(slot, state) for slot, state in chunk]
        work.path(opened, recipe, scale)
        for done, (slot, state) in zip(opened, chunk, strict=True):
            packing.close_(slot, done, state)


# --- The scale of the model, for gain="scaled" ----------------------------------------------------------


def scale_before(states: States, works: list[Work]) -> Scalar:
    """Return the root mean square of √v̂ over all that this step will move, if a group asks for it."""
    if not any(work.group["gain"] == "scaled" and work.group["pullback_strength"] != 0 for work in works):
        return 1.0
    over_ranks = OverRanks()
    roots: list[Callable[[], Scalar]] = []
    rest: list[tuple[Tensor, State, dict[str, Any]]] = []
    elements = max(sum(parameter.numel() for work in works for parameter in work.parameters), 1)
    for work in works:
        if work.table is not None and len(set(map(cut_of, work.parameters))) == 1:
            root = work.table.root_of_mean(work.slots, Recipe.of(work.group), elements)
            like = work.parameters[0]
            if mesh_of(like) is not None:  # a rank that has nothing of any of them asks as the others do
                number = torch.as_tensor(
                    0.0 if root is None else root, dtype=torch.float64, device=local(like).device
                )
                roots.append(partial(_root, over_ranks.ask(number.square(), like)))
            elif root is not None:
                roots.append(partial(_same, root))
        else:
            rest += [(parameter, states[parameter], work.group) for parameter in work.parameters]
    return roots[0]() if len(roots) == 1 and not rest else ask_scale(rest, roots, elements, over_ranks)()


def _root(number: Callable[[], Tensor]) -> Tensor:
    return number().sqrt()


def _same(number: Scalar) -> Scalar:
    return number
