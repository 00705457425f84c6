"""What the paths that make one pass over memory share: the scalars of a step as plain numbers."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.optim.recipe import Recipe
from paceline.optim.rule import NUMERATORS, At, Scalar, Slot, gain_limit, shares

_LARGEST = torch.finfo(torch.float32).max


class Numbers(NamedTuple):
    """Of one step, for float32; in this order they are arguments of kernel.py. Floats, or
    tensors of several steps on a device."""

    sign: Scalar  # of the gradient: −1 to maximize
    shrink: Scalar  # η · weight decay; 1 less it would lose its last digits in float32
    new_m: Scalar  # 1 − β₁, which in float32 would be off by 1e-5 if β₁ were rounded first
    old_v: Scalar  # β₂
    new_v: Scalar  # 1 − β₂
    root_factor: Scalar  # 1 / √(1 − β₂ᵗ)
    eps: Scalar
    step_size: Scalar  # −η / (1 − β₁ᵗ)
    numerator: Scalar  # of the ratio R
    rate: Scalar
    limit: Scalar  # the gain is min(rate · R, limit)
    keep: Scalar  # of the average
    move: Scalar  # their sum is 1
    keep_returned: Scalar
    move_returned: Scalar


def numbers_of(at: At, recipe: Recipe, scale: float) -> Numbers:
    """Return the numbers of a step; `scale` as in `pace_step_`, or 1 where it is multiplied in later."""
    strength = recipe.pullback_strength
    numerator: Scalar = strength
    if recipe.gain in NUMERATORS:
        numerator = NUMERATORS[recipe.gain](float(at.lr), strength, scale)
    # At a step that averages nothing they rest; residuals have to be written all the same.
    keep, move = shares(at.rate, torch.float32) if at.averaging else (1.0, 0.0)
    keep_returned, move_returned = shares(at.return_rate, torch.float32) if at.averaging else (1.0, 0.0)
    # A user's 1 may be an integer, which Triton would build into a kernel that is kept for other numbers too.
    beta1, beta2 = map(float, recipe.betas)
    return Numbers(
        sign=-1.0 if recipe.maximize else 1.0,
        shrink=1 - float(at.decay),
        new_m=1 - beta1,
        old_v=beta2,
        new_v=1 - beta2,
        root_factor=float(1 / at.root_correction),
        eps=float(recipe.eps),
        step_size=float(at.step_size),
        numerator=min(float(numerator), _LARGEST),
        rate=float(at.rate),
        limit=float(gain_limit(recipe, torch.float32)),
        keep=float(keep),
        move=float(move),
        keep_returned=float(keep_returned),
        move_returned=float(move_returned),
    )


class Steady(NamedTuple):
    """What numbers that are found on the device are found from: arguments of `numbers` in kernel.py."""

    sign: float
    lr: float  # 0, if it is on the device too
    weight_decay: float
    beta1: float
    log_beta1: float
    beta2: float
    log_beta2: float
    eps: float
    strength: float
    limit: float
    power: float
    return_power: float
    offset: float
    scale: float


def steady_of(recipe: Recipe) -> Steady:
    """Those of a group. To read an lr that is on a device would be to wait for it."""
    lr, (beta1, beta2) = recipe.lr, recipe.betas
    second = recipe.ema_power if recipe.return_power is None else recipe.return_power
    return Steady(
        sign=-1.0 if recipe.maximize else 1.0,
        lr=0.0 if is_on_gpu(lr) else float(lr),
        weight_decay=float(recipe.weight_decay),
        beta1=float(beta1),
        log_beta1=log_of(beta1),
        beta2=float(beta2),
        log_beta2=log_of(beta2),
        eps=float(recipe.eps),
        strength=float(recipe.pullback_strength),
        limit=float(gain_limit(recipe, torch.float32)),
        power=float(recipe.ema_power),
        return_power=float(second),
        offset=float(recipe.ema_offset),
        scale=float(recipe.ema_scale),
    )


def is_on_gpu(number: Scalar) -> bool:
    """Whether it is a tensor there."""
    return isinstance(number, Tensor) and number.is_cuda


def log_of(beta: float) -> float:
    """By which t steps are a power of it, exp(t · log β)."""
    return math.log(beta) if beta else -math.inf


def averages_of(slot: Slot) -> int:
    """How many a parameter has."""
    return 1 if slot.returned is None else 2


def row_of(slot: Slot) -> tuple[int, ...]:
    """The first part of a row in the table of kernel.py: six addresses, and how many elements."""
    live, grad, exp_avg, exp_avg_sq, average, returned, _ = slot
    second = average if returned is None else returned
    moments = 0 if exp_avg is None else exp_avg.data_ptr(), exp_avg_sq.data_ptr()
    return live.data_ptr(), grad.data_ptr(), *moments, average.data_ptr(), second.data_ptr(), live.numel()


def lie_alike(slot: Slot) -> bool:
    """Whether all arrays of a slot lie in memory without gaps and in the same order."""
    arrays = [array for array in slot[:6] if array is not None]
    if all(array.is_contiguous() for array in arrays):
        return True
    dense = torch.ops.aten.is_non_overlapping_and_dense(slot.live)
    return bool(dense and all(array.stride() == slot.live.stride() for array in arrays))


NOT_ALIKE = "and its gradient and state do not lie alike in memory, without gaps; make them contiguous"
