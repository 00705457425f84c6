"""The update, stated once, for one tensor. Every fast path must equal `pace_step_` on weights and state.

Two sets of weights: `live` is where gradients are taken, `average` is what is evaluated and returned.
Scalars that depend on the step are floats, or 0-dim tensors where the step must not leave the device.
"""

import ctypes
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.optim.recipe import Gain, Recipe

Scalar = float | Tensor


def averaging_rate(t: Scalar, power: float, offset: float = 1.0, scale: float = 1.0) -> Scalar:
    """How far the average moves toward live at step t: β_t in Algorithm 1, κ = power.

    >>> averaging_rate(3, power=0.5)
    0.5
    """
    return (offset + scale * t) ** -power


# --- The gain -------------------------------------------------------------------------------------
# One coordinate is pulled by gain = min(rate · ratio, max_gain), λ_{t,i} in Algorithm 1. The functions
# below are the dimensionless ratio R_i, or its numerator. Another gain is one more of them.


class Terms(NamedTuple):
    """What a ratio may be made of."""

    denominator: Tensor  # √v̂ + ε, at least float32
    lr: Scalar  # η in force at this step
    strength: Scalar  # every ratio is proportional to it
    out: Tensor | None  # where to write the ratio, shaped like denominator and perhaps denominator itself
    scale: Scalar = 1.0  # root mean square of √v̂ over the whole model, before this step


def paper_numerator(lr: Scalar, strength: Scalar, scale: Scalar) -> Scalar:
    """R_i = η c / (√v̂_i + ε): the paper's, with c in units of curvature."""
    return lr * strength


def scaled_numerator(lr: Scalar, strength: Scalar, scale: Scalar) -> Scalar:
    """R_i = η c · rms(√v̂) / (√v̂_i + ε): the paper's, with c in units of the model's own gradients.

    The mean is over all weights of the model and of the step before, so that no second pass over them is
    needed. It makes no difference at a first step, where there is no gap.
    """
    return lr * strength * scale


NUMERATORS: dict[Gain, Callable[[Scalar, Scalar, Scalar], Scalar]] = {
    "paper": paper_numerator,
    "scaled": scaled_numerator,
}
"""Of the ratios that are a number over √v̂ + ε."""


def numerator_of(gain: Gain, terms: Terms) -> Scalar:
    """Finite also for c = inf: inf · 0 would be NaN where v̂ has overflowed. The gain is clipped anyway."""
    numerator = NUMERATORS[gain](terms.lr, terms.strength, terms.scale)
    limit = torch.finfo(terms.denominator.dtype).max
    if not isinstance(numerator, Tensor):
        return min(float(numerator), limit)
    if torch.finfo(numerator.dtype).max < limit:  # of a model of several precisions
        numerator = numerator.to(terms.denominator.dtype)
    return numerator.clamp(max=limit)


def _over_denominator(gain: Gain, terms: Terms) -> Tensor:
    inverse = torch.reciprocal(terms.denominator, out=terms.out)
    return torch.mul(inverse, numerator_of(gain, terms), out=terms.out)


def uniform_ratio(terms: Terms) -> Tensor:
    """R_i = R: the stylised update, and the only form for a base without second moments."""
    out = torch.empty_like(terms.denominator) if terms.out is None else terms.out
    return out.fill_(terms.strength)


RATIOS: dict[Gain, Callable[[Terms], Tensor]] = {
    **{gain: partial(_over_denominator, gain) for gain in NUMERATORS},
    "uniform": uniform_ratio,
}


def gain_limit(recipe: Recipe, dtype: torch.dtype) -> float:
    """The clip of the gain, finite even when unclipped: an infinite gain times a gap of 0 is NaN."""
    return min(recipe.max_gain, _LARGEST[dtype])


_LARGEST = {
    dtype: torch.finfo(dtype).max for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}  # which are asked for at every step, and torch makes an object for each answer


# --- The step -------------------------------------------------------------------------------------


class Slot(NamedTuple):
    """All that the update of one parameter touches; real tensors, everything but grad is modified."""

    live: Tensor  # the parameter
    grad: Tensor  # same shape and dtype as live; never modified
    exp_avg: Tensor | None  # first moment, same shape and dtype as live; None with β₁ = 0: it is the gradient
    exp_avg_sq: Tensor  # second moment, same shape and dtype as live
    average: Tensor  # same shape, at least float32: the target of the pull
    returned: Tensor | None  # same as average: what is returned instead of it, with return_power
    step: Tensor  # () float64, this parameter's own count


class At(NamedTuple):
    """The scalars of one step."""

    t: Scalar  # 1 at the first step
    lr: Scalar  # η in force at this step
    decay: Scalar  # 1 − η · weight decay
    step_size: Scalar  # −η / (1 − β₁ᵗ)
    root_correction: Scalar  # √(1 − β₂ᵗ)
    rate: Scalar  # β_t of the control average; 0 on a device step that updates no average
    return_rate: Scalar  # β_t of the returned average, likewise
    averaging: bool | Tensor  # whether averages move at this step
    pulling: bool | Tensor  # whether live is pulled at this step
    scale: Scalar  # root mean square of √v̂ over the model, before this step; for gain="scaled"


def stays_on_device(recipe: Recipe) -> bool:
    """Whether the step must not be read on the host, where a graph capture or a compiler would stumble."""
    return recipe.capturable or torch.compiler.is_compiling()


def at_step(step: Tensor, recipe: Recipe, scale: Scalar = 1.0) -> At:
    """The scalars of the step that `step` counts (already advanced)."""
    return at_count(step if stays_on_device(recipe) else step.item(), recipe, scale)


def pulls_ever(recipe: Recipe) -> bool:
    """Whether any of its steps may pull; of an lr that is a tensor nothing is known here."""
    return recipe.pullback_strength != 0 and (isinstance(recipe.lr, Tensor) or recipe.lr != 0)


def at_count(t: Scalar, recipe: Recipe, scale: Scalar = 1.0) -> At:
    """The scalars of the t-th step; of several, if t is a tensor of them."""
    on_device = isinstance(t, Tensor)
    lr = recipe.lr.reshape(()) if isinstance(recipe.lr, Tensor) else recipe.lr
    beta1, beta2 = recipe.betas

    step_size = lr / (1 - beta1**t) * -1
    if isinstance(step_size, Tensor) and not on_device:
        step_size = step_size.item()

    averaging: bool | Tensor = True if recipe.update_every == 1 else t % recipe.update_every == 0
    pulling: bool | Tensor = averaging
    if not pulls_ever(recipe):
        pulling = False
    elif isinstance(lr, Tensor):
        pulling = averaging & (lr != 0) if on_device else bool(averaging and lr != 0)

    rates = []
    for power in (recipe.ema_power, recipe.ema_power if recipe.return_power is None else recipe.return_power):
        rate = averaging_rate(t, power, recipe.ema_offset, recipe.ema_scale) if power else 1.0
        rates.append(torch.where(averaging, rate, 0.0) if isinstance(averaging, Tensor) else rate)

    return At(
        t=t,
        lr=lr,
        decay=1 - lr * recipe.weight_decay,
        step_size=step_size,
        root_correction=(1 - beta2**t) ** 0.5,
        rate=rates[0],
        return_rate=rates[1],
        averaging=averaging,
        pulling=pulling,
        scale=scale,
    )


def on_device_of(tensor: Tensor, scalar: Scalar) -> Scalar:
    """A scalar where a tensor is."""
    return scalar.to(tensor.device) if isinstance(scalar, Tensor) else scalar


def shares(rate: Scalar, dtype: torch.dtype) -> tuple[Scalar, Scalar]:
    """1 − rate and rate, rounded to the average's precision so that they sum to exactly 1.

    Rounded one by one they do not, and their excess, the same for many steps, adds up: weights that
    never move would drift away with their average, by 2e-4 after 20,000 steps. As a move along
    (live − average) the sum would not matter, but the average would stop half an ulp / rate short.
    """
    if isinstance(rate, Tensor):
        keep: Scalar = (1 - rate).to(dtype)
    elif dtype == torch.float32:  # as a tensor rounds it, which takes as long to make as a small step
        keep = ctypes.c_float(1 - rate).value
    else:
        keep = torch.tensor(1 - rate, dtype=dtype).item()
    return keep, 1 - keep


def move_average_(average: Tensor, live: Tensor, rate: Scalar) -> None:
    """average ← (1 − rate) · average + rate · live, in the average's precision.

    In float32 a rate below 2^-24 is 0: with power 1, after 16 million steps the average stands.
    """
    keep, move = shares(rate, average.dtype)
    if not isinstance(keep, Tensor) and keep == 0:  # 0 · average would be NaN at an infinite one
        average.copy_(live)
    elif isinstance(move, Tensor):
        average.mul_(keep).add_(live.to(average.dtype) * move)
    else:
        average.mul_(keep).add_(live, alpha=move)


def seed_average_(average: Tensor, live: Tensor, t: Scalar) -> None:
    """Before the first step the average is live, whatever it held: average_0 = live_0."""
    if isinstance(t, Tensor):
        average.copy_(torch.where(t == 1, live, average))
    elif t == 1:
        average.copy_(live)


def pace_step_(slot: Slot, recipe: Recipe, scale: Scalar = 1.0) -> None:
    """One step of Algorithm 1 for one parameter, in place. The reference.

    `scale` is for gain="scaled": the root mean square of √v̂ over the model, before this step.

    The AdamW part follows torch's foreach order of operations, so that strength 0 equals
    `torch.optim.AdamW` bit for bit.
    """
    live, grad, exp_avg, exp_avg_sq, average, returned, step = slot
    beta1, beta2 = recipe.betas
    step += 1
    at = at_step(step, recipe, on_device_of(live, scale))
    if recipe.maximize:
        grad = -grad
    seed_average_(average, live, at.t)
    if returned is not None:
        seed_average_(returned, live, at.t)
    gap = None if at.pulling is False or recipe.gap == "lookahead" else average - live

    if recipe.weight_decay != 0:
        live.mul_(at.decay)
    m = grad if exp_avg is None else exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = exp_avg_sq.sqrt() / at.root_correction + recipe.eps
    if isinstance(at.step_size, Tensor):
        live.addcdiv_(m, denominator / at.step_size)
    else:
        live.addcdiv_(m, denominator, value=at.step_size)

    if at.averaging is not False:
        control_(slot, gap, denominator, at, recipe)


def control_(slot: Slot, gap: Tensor | None, denominator: Tensor, at: At, recipe: Recipe) -> None:
    """What follows the base step: pull live, which holds the raw step by now, and move the averages."""
    live, average = slot.live, slot.average
    lookahead = recipe.gap == "lookahead"
    if lookahead:
        move_average_(average, live, at.rate)
    if at.pulling is not False:
        gain = _gain(denominator.to(average.dtype), at, recipe)
        if gap is not None:
            pull_(live, gap, gain)
        else:
            start = live.to(average.dtype)
            live.copy_(torch.lerp(start, average, gain))
    if not lookahead:
        move_average_(average, live, at.rate)
    if slot.returned is not None:
        move_average_(slot.returned, live, at.return_rate)


def pull_(live: Tensor, gap: Tensor, gain: Tensor) -> None:
    """live ← live + gain · gap, in the precision of the gap."""
    if live.dtype == gap.dtype:
        live.addcmul_(gap, gain)
    else:
        live.add_(gap * gain)


def _gain(denominator: Tensor, at: At, recipe: Recipe) -> Tensor:
    """λ_{t,i} = min(β_t R_i, max_gain), 0 on a device step that pulls nothing."""
    strength = float(recipe.pullback_strength) * at.rate
    terms = Terms(denominator, at.lr, strength, out=None, scale=at.scale)
    gain = RATIOS[recipe.gain](terms)
    gain = gain.clamp(max=gain_limit(recipe, gain.dtype))
    return torch.where(at.pulling, gain, 0.0) if isinstance(at.pulling, Tensor) else gain
