"""The update for one tensor. Read this first: every fast path must equal `pace_step_`.

Two sets of weights: `live` is where gradients are taken, `average` is what is evaluated and returned.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.optim.settings import Settings


class Slot(NamedTuple):
    """The tensors that the update of one parameter touches. All but `grad` are modified."""

    live: Tensor  # the parameter
    grad: Tensor  # same shape and dtype as live
    exp_avg: Tensor  # first moment, same shape and dtype as live
    exp_avg_sq: Tensor  # second moment, same shape and dtype as live
    average: Tensor  # steers; same shape, at least float32
    returned: Tensor | None = None  # shape and dtype of average; None: `average` is returned


class StepScalars(NamedTuple):
    """The numbers of one step."""

    decay: float  # 1 − η · weight decay
    step_size: float  # −η / (1 − β₁ᵗ)
    root_correction: float  # √(1 − β₂ᵗ)
    rate: float  # of the average that steers; 0 where averages rest
    return_rate: float  # of the returned average
    numerator: float  # the gain is numerator/(√v̂ + ε) if over_root, and numerator itself if not
    over_root: bool
    limit: float  # of the gain
    pulling: bool  # whether live is pulled at this step


def step_scalars(t: int, settings: Settings) -> StepScalars:
    """Return the numbers of a parameter's step t = 1, 2, …"""
    control, (beta1, beta2) = settings.control, settings.betas
    lr = settings.lr * control.step
    averaging = t % control.every == 0
    pull_every = control.pull_every or control.every
    # Where lr is 0 nothing may move, and 0 times a strength of inf would be NaN.
    pulling = t % pull_every == 0 and control.strength != 0 and float(settings.lr) != 0
    power, return_power = control.powers
    rate = control.rate(t, power)
    over_root = control.sizing == "paper"
    strength = control.strength_at(t) * rate if pulling else 0.0
    return StepScalars(
        decay=float(1 - lr * settings.weight_decay),
        step_size=float(lr / (1 - beta1**t) * -1),
        root_correction=(1 - beta2**t) ** 0.5,
        rate=rate if averaging else 0.0,
        return_rate=control.rate(t, return_power) if averaging else 0.0,
        numerator=float(settings.lr) * strength if over_root else strength,
        over_root=over_root,
        limit=control.max_gain,
        pulling=pulling,
    )


def shares(rate: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return 1 − rate and rate, rounded to the average's precision so that they sum to exactly 1.

    Rounded one by one they do not, and their excess adds up over steps: weights that never move would drift
    away with their average, by 2e-4 after 20,000 steps.
    """
    keep: float = torch.tensor(1 - rate, dtype=dtype).item()
    return keep, 1 - keep


def move_average_(average: Tensor, live: Tensor, rate: float) -> None:
    """Move an average toward live: average ← (1 − rate) · average + rate · live."""
    keep, move = shares(rate, average.dtype)
    if keep == 0:  # 0 · average would be NaN at an infinite one
        average.copy_(live)
    elif move != 0:
        average.mul_(keep).add_(live, alpha=move)


def gain_(denominator: Tensor, at: StepScalars) -> Tensor:
    """Return the gain of every coordinate, min(β_t R_i, max_gain), written over `denominator`."""
    largest = torch.finfo(denominator.dtype).max  # an infinite gain times a gap of 0 would be NaN
    if at.over_root:
        denominator.reciprocal_().mul_(min(at.numerator, largest))
    else:
        denominator.fill_(at.numerator)
    return denominator.clamp_(max=min(at.limit, largest))


def pace_step_(slot: Slot, settings: Settings, t: int) -> None:
    """Take step t = 1, 2, … for one parameter, in place. The reference.

    The AdamW part has torch's order of operations, so that a control of strength 0 equals
    `torch.optim.AdamW` bit for bit.
    """
    live, grad, exp_avg, exp_avg_sq, average, returned = slot
    control, (beta1, beta2) = settings.control, settings.betas
    at = step_scalars(t, settings)
    if settings.maximize:
        grad = -grad
    if t == 1:  # the average begins as the weights before the first step
        for mean in (average, returned):
            if mean is not None:
                mean.copy_(live)
    gap = average - live if at.pulling and control.gap == "before" else None

    if settings.weight_decay != 0:
        live.mul_(at.decay)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = exp_avg_sq.sqrt() / at.root_correction + settings.eps
    live.addcdiv_(exp_avg, denominator, value=at.step_size)

    if control.order == "average, then pull":
        move_average_(average, live, at.rate)
    if at.pulling:
        gap = average - live if gap is None else gap
        gain = gain_(denominator.to(gap.dtype), at)
        if live.dtype == gap.dtype:
            live.addcmul_(gap, gain)
        else:  # in the precision of the gap
            live.add_(gap * gain)
    if control.order == "pull, then average":
        move_average_(average, live, at.rate)
    if returned is not None:
        move_average_(returned, live, at.return_rate)
