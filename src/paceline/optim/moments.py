"""The second moment that another optimizer keeps, read from its state."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paceline.optim.rule import Scalar
from paceline.optim.sharded import OverRanks, layout_of, mesh_of, sums_of


class SecondMoment(NamedTuple):
    """√value / root_correction + eps is what the optimizer divides its step by."""

    value: Tensor  # v, real, same shape as the parameter
    root_correction: Scalar  # √(1 − β₂ᵗ), or 1 where the optimizer corrects nothing
    eps: float
    is_fresh: bool  # whether the value was made for the caller, who may write over it


def second_moment(state: Mapping[str, Any], group: Mapping[str, Any]) -> SecondMoment | None:
    """The second moment of one parameter, or None if its optimizer keeps none (SGD, Muon, Lion).

    Known are the layouts of torch (Adam and its kin, with AMSGrad its maximum; RMSprop, Adadelta,
    Adagrad; Adafactor, factored or not), of torchao's low-bit optimizers (Adam's) and of bitsandbytes
    (32 and 8 bit). Whatever keeps `exp_avg_sq` beside `betas` is taken for Adam's kin.
    """
    found = _adam_value(state)
    if found is not None and "betas" in group:
        value, is_fresh = found
        return SecondMoment(value, _root_correction(state, group), float(group["eps"]), is_fresh)
    for key in ("square_avg", "sum"):  # RMSprop and Adadelta; Adagrad
        if isinstance(state.get(key), Tensor):
            value, is_fresh = state[key], False
            if isinstance(state.get("grad_avg"), Tensor):  # RMSprop, centered
                value, is_fresh = (value - state["grad_avg"].square()).clamp_(min=0), True
            return SecondMoment(value, 1.0, float(group["eps"]), is_fresh)
    found = _adafactor_value(state)
    if found is not None:
        value, is_fresh = found
        floor = group["eps"][0]
        return SecondMoment(value, 1.0, torch.finfo(value.dtype).eps if floor is None else floor, is_fresh)
    return None


Members = Sequence[tuple[Tensor, Mapping[str, Any], Mapping[str, Any]]]
"""Parameters, their states and groups."""


def model_scale(members: Members) -> Scalar:
    """The root mean square of √v̂ over all of these. () and ≥ float32, or a float if it can be.

    Of parameters that have not stepped yet nothing is known, they count as 0. So does a tensor with a NaN or
    Inf: it spoils itself, and must not spoil the rest.
    """
    elements = sum(parameter.numel() for parameter, _, _ in members)
    return ask_scale(members, (), elements, OverRanks())()


def ask_scale(
    members: Members, roots: Sequence[Callable[[], Scalar]], elements: int, over_ranks: OverRanks
) -> Callable[[], Scalar]:
    """Likewise, once all sums over ranks are asked for.

    Of others the root of the sum of v̂ over `elements`, which counts all, may be known already: the `roots`.
    """
    elements = max(elements, 1)
    alike: dict[object, list[SecondMoment]] = {}
    for _, state, group in members:
        moment = second_moment(state, group)
        if moment is None:
            continue
        if moment.is_fresh and mesh_of(moment.value) is None:  # its sum will do: not all of them at once
            moment = moment._replace(value=sums_of([moment.value]))
        root = moment.root_correction
        if isinstance(root, Tensor):
            alike.setdefault((layout_of(moment.value), None), []).append(moment)
        elif root != 0:
            alike.setdefault((layout_of(moment.value), root), []).append(moment)
    asked = []
    for moments in alike.values():
        values = [moment.value for moment in moments]
        asked.append((moments, over_ranks.ask(sums_of(values), values[0])))

    def scale() -> Scalar:
        if len(roots) == 1 and not asked:
            return roots[0]()
        mean = _sum([*(_square(root()) for root in roots), *(_energy(*own) / elements for own in asked)])
        if not isinstance(mean, Tensor):
            return math.sqrt(max(mean, 0.0))
        # At least the smallest number, whose root has a derivative.
        return mean.clamp(min=torch.finfo(mean.dtype).tiny).sqrt()

    return scale


def _energy(moments: list[SecondMoment], sums: Callable[[], Tensor]) -> Tensor:
    """The sum of v̂ over some tensors, of sums of v."""
    found, roots = sums(), [moment.root_correction for moment in moments]
    tensors = [root for root in roots if isinstance(root, Tensor)]
    squares = torch.stack(tensors).to(found).square() if tensors else roots[0] ** 2
    return finite_sum(found / squares)


def _square(number: Scalar) -> Scalar:
    return number.double().square() if isinstance(number, Tensor) else number * number


def _sum(parts: list[Scalar]) -> Scalar:
    total = parts[0] if parts else 0.0
    for part in parts[1:]:
        # Not of its precision: one of float64 may follow one of float32.
        if isinstance(part, Tensor) and isinstance(total, Tensor):
            part = part.to(total.device)
        total = total + part
    return total


def finite_sum(sums: Tensor) -> Tensor:
    """The sum of those that are finite."""
    return torch.nan_to_num(sums, nan=0.0, posinf=0.0, neginf=0.0).sum()


def _adam_value(state: Mapping[str, Any]) -> tuple[Tensor, bool] | None:
    """The value, and whether it is fresh."""
    for key in ("max_exp_avg_sq", "exp_avg_sq"):
        if isinstance(state.get(key), Tensor):
            value: Tensor = state[key]
            # A low-bit subclass of torchao gives its values; torch's own kinds of tensor are values.
            if type(value) is Tensor or type(value).__module__.split(".")[0] == "torch":
                return value, False
            return _torchao_value(value), True
    if isinstance(state.get("state2"), Tensor):
        codes: Tensor = state["state2"]
        if codes.dtype != torch.uint8:
            return codes, False
        scales: Tensor = state["absmax2"]
        block = -(-codes.numel() // scales.numel())
        block = 1 << (block - 1).bit_length()  # blocks are powers of two; the last one may be short
        return _looked_up(codes, state["qmap2"], scales, block), True
    return None


def _torchao_value(value: Any) -> Tensor:
    parts = value.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(value) else ()
    if "qmap" in parts and value.codes.shape == value.shape:  # one code a byte
        return _looked_up(value.codes, value.qmap, value.scale, value.block_size)
    dequantized: Tensor = value.dequantize()
    return dequantized


def _looked_up(codes: Tensor, table: Tensor, scales: Tensor, block: int) -> Tensor:
    """The values of 8-bit codes: those of a table of 256, times the scale of their block.

    The same bits as torchao's dequantize(), in a quarter of its time on a CPU, where table[codes] is slow.
    """
    values = torch.index_select(table, 0, codes.flatten().int())
    whole = values.numel() // block
    values[: whole * block].view(whole, block).mul_(scales[:whole, None])
    values[whole * block :].mul_(scales[whole:])
    return values.view(codes.shape)


def _root_correction(state: Mapping[str, Any], group: Mapping[str, Any]) -> Scalar:
    step, beta2 = state["step"], group["betas"][1]
    if isinstance(step, Tensor):
        # Not read on the host: that would wait for the device, and a compiler would stop at it.
        if step.device.type != "cpu" or torch.compiler.is_compiling():
            correction: Tensor = (1 - beta2 ** step.double()) ** 0.5
            return correction
        step = step.item()
    return float((1 - beta2**step) ** 0.5)


def _adafactor_value(state: Mapping[str, Any]) -> tuple[Tensor, bool] | None:
    """The value, and whether it is fresh."""
    if isinstance(state.get("variance"), Tensor):
        return state["variance"], False
    if isinstance(state.get("row_var"), Tensor):
        rows: Tensor = state["row_var"]  # (…, n, 1)
        columns: Tensor = state["col_var"]  # (…, 1, m)
        means = rows.mean(dim=-2, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
        return rows @ columns / means, True
    return None
