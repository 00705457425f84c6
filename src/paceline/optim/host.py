"""The update on a CPU where nobody chose a path: torch's own fused AdamW steps, and mostly pulls too.

Where no gain is at its limit, step and pull are divided by the same √v̂ + ε:

    live ← (1 − η w) live − η / (1 − β₁ᵗ) · (m + κ · (average − live)) / (√v̂ + ε)

so that AdamW does both if it is given m + κ · (average − live) for m, which itself moves beside it. That
takes fewer passes over memory than AdamW and an EMA in foreach operations, and nothing has to be built.
Tensors in which a gain may be at its limit are stepped first and pulled then.

Equal to `pace_step_` to a few units in the last place, on weights and state. A step holds at most two
temporaries of one chunk's size.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.optim.foreach import PLAIN, chunks, counted, move_averages_, summand
from paceline.optim.members import Members, is_plain
from paceline.optim.onepass import lie_alike, seed_averages_
from paceline.optim.recipe import Recipe
from paceline.optim.rule import NUMERATORS, At, Scalar, Slot, at_count, gain_limit

FEWEST = 2**14
"""Elements of a tensor. With fewer, to ask for the least second moment costs more than it saves."""


def takes(live: Tensor) -> bool:
    """Whether weights are of a kind that this path is for."""
    known = type(live) in PLAIN and live.device.type == "cpu"
    return known and live.dtype in (torch.float32, torch.float64)


def fits(slot: Slot) -> bool:
    """Whether torch's fused AdamW, which goes by addresses and asks nothing, can step this."""
    arrays = [array for array in slot[:6] if array is not None]
    return (
        takes(slot.live)
        and slot.exp_avg is not None
        and all(array.dtype == slot.live.dtype for array in arrays)
        and all(map(is_plain, arrays))
        and lie_alike(slot)
    )


def host_step_(members: Members, recipe: Recipe, scale: Scalar = 1.0, factor: Scalar = 1.0) -> None:
    """One step for all members, in place, whose counts are advanced already; the rest as in `pace_step_`."""
    counts, slots = members.counts(), members.slots()
    for part in _parts(members, counts):
        own = [slots[i] for i in part.places]
        at = at_count(counts[part.places[0]], recipe, float(scale))
        seed_averages_(own, at)
        if at.pulling:
            pull = _pull_at(at, recipe, own[0].live.dtype)
            below = [_is_below_limit(least, pull, recipe) for least in part.take_least()]
            for way_, wanted in ((_step_and_pull_, True), (_step_then_pull_, False)):
                taken = [slot for slot, found in zip(own, below, strict=True) if found is wanted]
                if taken:
                    way_(taken, pull, recipe, factor)
        else:
            _adamw_(own, [slot.exp_avg for slot in own], recipe, factor)
        if at.averaging:
            lives = [slot.live for slot in own]
            _move_([slot.average for slot in own], lives, float(at.rate))
            returned = [slot.returned for slot in own if slot.returned is not None]
            if returned:
                _move_(returned, lives, float(at.return_rate))


def _move_(averages: list[Tensor], lives: list[Tensor], rate: float) -> None:
    """`move_average_` for many; while the rate is large, along (live − average), in one pass instead of two.

    That stops half an ulp / rate short of live: by 5e-7 of it at most, and by more at smaller rates. So would
    every other way that rounds once, e.g. `addr_`.
    """
    if 1 / 16 <= rate < 1:
        torch._foreach_lerp_(averages, lives, rate)
    else:
        move_averages_(averages, lives, [rate])


def root_of_mean(members: Members, beta2: float, elements: int) -> float | None:
    """The root of the sum of v̂ over all members, without those with a NaN or Inf, over so many elements; None
    if none has stepped."""
    counts = members.counts()
    stepped = [part for part in _parts(members, counts) if counts[part.places[0]] > 0]
    energies = []
    for part in stepped:
        correction = 1 - beta2 ** counts[part.places[0]]
        energies += [total / correction for total in part.second_moments()]
    total = max(math.fsum(filter(math.isfinite, energies)), 0.0)
    return math.sqrt(total / elements) if stepped else None


# --- Members that are stepped together ----------------------------------------------------------------


def _parts(members: Members, counts: list[float]) -> "list[_Part]":
    """Members of one age and precision each, and not too many at once."""
    younger = [counts[0] - count for count in counts]
    if members.memo.get("younger") != younger:
        slots = members.rests
        alike = chunks(range(len(slots)), lambda i: (slots[i].live, counts[i]))
        members.memo["younger"] = younger
        members.memo["parts"] = [_Part(places, [slots[i].exp_avg_sq for i in places]) for places in alike]
    found: list[_Part] = members.memo["parts"]
    return found


class _Part:
    """Which of the members, and what is known of their second moments before a step."""

    def __init__(self, places: list[int], exp_avg_sqs: list[Tensor]) -> None:
        self.places = places
        self._exp_avg_sqs = exp_avg_sqs
        self._least: list[float] = []

    def second_moments(self) -> list[float]:
        """The sum of each. One right after the other, the least costs half of what it does later."""
        sums, least = [], []
        for exp_avg_sq in self._exp_avg_sqs:
            sums.append(exp_avg_sq.sum())
            least.append(_least(exp_avg_sq))
        self._least = least
        return torch.stack(sums).tolist()

    def take_least(self) -> list[float]:
        """The least of each, 0 where it was not looked for; as the sums have found it, or found now."""
        found, self._least = self._least, []
        return found or list(map(_least, self._exp_avg_sqs))


def _least(exp_avg_sq: Tensor) -> float:
    return exp_avg_sq.amin().item() if exp_avg_sq.numel() >= FEWEST else 0.0


# --- Step and pull ------------------------------------------------------------------------------------


class Pull(NamedTuple):
    """The scalars of one step: gain · gap = top · gap / max(√v + shift, floor)."""

    top: float  # rate · numerator · √(1 − β₂ᵗ)
    shift: float  # ε · √(1 − β₂ᵗ)
    floor: float  # top / limit: below it the gain is at its limit
    share: float  # κ / β₁, as AdamW takes β₁ of what it is given for m


def _pull_at(at: At, recipe: Recipe, dtype: torch.dtype) -> Pull:
    largest, limit = torch.finfo(dtype).max, gain_limit(recipe, dtype)
    correction = float(at.root_correction)
    strength = float(recipe.pullback_strength) * float(at.rate)
    numerator = min(float(NUMERATORS[recipe.gain](at.lr, strength, at.scale)), largest)
    top, shift = numerator * correction, recipe.eps * correction
    # No √v is as large: at a higher floor all gains would be at their limit too, and products overflow.
    floor = min(top / limit, 2 * (math.sqrt(largest) + shift))
    return Pull(min(top, floor * limit), shift, floor, numerator / float(at.step_size) / recipe.betas[0])


def _is_below_limit(least: float, pull: Pull, recipe: Recipe) -> bool:
    """Whether no gain can be at its limit after this step, by the least v before it.

    v is then at least β₂ times that, but for rounding. A NaN is not.
    """
    return 0.9999 * math.sqrt(recipe.betas[1] * least) + pull.shift >= pull.floor


def _step_and_pull_(slots: list[Slot], pull: Pull, recipe: Recipe, factor: Scalar) -> None:
    """Where no gain is at its limit."""
    exp_avgs: list[Any] = [slot.exp_avg for slot in slots]
    moments = list(torch._foreach_sub(exp_avgs, [slot.live for slot in slots], alpha=pull.share))
    torch._foreach_add_(moments, [slot.average for slot in slots], alpha=pull.share)
    grads = _adamw_(slots, moments, recipe, factor)
    torch._foreach_lerp_(exp_avgs, grads, 1 - recipe.betas[0])


def _step_then_pull_(slots: list[Slot], pull: Pull, recipe: Recipe, factor: Scalar) -> None:
    lives = [slot.live for slot in slots]
    gaps = torch._foreach_sub([slot.average for slot in slots], lives)
    _adamw_(slots, [slot.exp_avg for slot in slots], recipe, factor)
    denominators = list(torch._foreach_sqrt([slot.exp_avg_sq for slot in slots]))
    torch._foreach_add_(denominators, summand(pull.shift, denominators))
    torch._foreach_clamp_min_(denominators, pull.floor)
    torch._foreach_addcdiv_(lives, gaps, denominators, pull.top)


def _adamw_(slots: list[Slot], moments: list[Any], recipe: Recipe, factor: Scalar) -> list[Tensor]:
    """AdamW's step with these first moments; the gradients that it took."""
    lives, grads, _, exp_avg_sqs = (list(column) for column in list(zip(*slots))[:4])
    grads = counted(grads, recipe, factor)
    torch._fused_adamw_(
        lives,
        grads,
        moments,
        exp_avg_sqs,
        [],
        [slots[0].step] * len(slots),
        lr=float(recipe.lr),
        beta1=recipe.betas[0],
        beta2=recipe.betas[1],
        weight_decay=recipe.weight_decay,
        eps=recipe.eps,
        amsgrad=False,
        maximize=False,  # they are counted already
    )
    return grads
