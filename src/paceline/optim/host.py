"""The update on a CPU where nobody chose a path: torch's own fused AdamW steps, and mostly pulls too.

Where no gain is at its limit, step and pull are divided by the same √v̂ + ε:

    live ← (1 − η w) live − η / (1 − β₁ᵗ) · (m + κ · (average − live)) / (√v̂ + ε)

so that AdamW does both if it is given m + κ · (average − live) for m, which itself moves beside it. That
takes fewer passes over memory than AdamW and an EMA in foreach operations, and nothing has to be built.
Tensors in which a gain may be at its limit are stepped first and pulled then.

It goes block by block, so that only the first operation on a block waits for memory, and with two buffers of
a block's size that stay: memory that is asked for anew at each step can take longer to arrive than the step.

Equal to `pace_step_` to a few units in the last place, on weights and state.
"""

import math
import threading
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.optim.foreach import PLAIN, counted, move_averages_, summand
from paceline.optim.members import Ages, Members, is_plain
from paceline.optim.onepass import lie_alike, seed_averages_
from paceline.optim.recipe import Recipe
from paceline.optim.rule import NUMERATORS, At, Scalar, Slot, at_count, gain_limit

BLOCK = 2**20
"""Elements at a time. Fewer fit into smaller caches, but an operation has to wake threads, and that takes
longer than it saves: on two x86 cores a quarter of as many elements takes up to a fifth longer."""

FEWEST = 2**14
"""Elements of a tensor that has blocks of its own; smaller ones are gathered. For those, to ask for the least
second moment costs more than it saves."""


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
    ages = members.ages()
    for part in _parts(members, ages):
        at = at_count(ages.at(part.places[0]), recipe, float(scale))
        if at.t == 1:
            rests = members.rests()
            seed_averages_([rests[i] for i in part.places])
        pull = _pull_at(at, recipe, part.dtype) if at.pulling else None
        # Of an infinite strength no look at second moments tells more.
        all_at_limit = pull is not None and not _is_below_limit(torch.finfo(part.dtype).max, pull, recipe)
        for block in part.blocks:
            own = block.at_step(members.grads)
            if pull is None:
                _adamw_(own, own.exp_avgs, recipe, factor)
            elif not all_at_limit and _is_below_limit(block.least(), pull, recipe):
                _step_and_pull_(own, pull, recipe, factor)
            else:
                _step_then_pull_(own, pull, recipe, factor)
            if at.averaging:
                _move_(own.averages, own.lives, float(at.rate))
                if own.returned:
                    _move_(own.returned, own.lives, float(at.return_rate))


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
    ages = members.ages()
    stepped = [part for part in _parts(members, ages) if ages.at(part.places[0]) > 0]
    energies = []
    for part in stepped:
        correction = 1 - beta2 ** ages.at(part.places[0])
        energies += [total / correction for total in part.second_moments()]
    total = max(math.fsum(filter(math.isfinite, energies)), 0.0)
    return math.sqrt(total / elements) if stepped else None


# --- Blocks: parts of large tensors, and small tensors together ------------------------------------------


class _Block(NamedTuple):
    """Either tensors that are small, or a part of one."""

    places: list[int]  # which of the members they are
    step: Tensor  # how old they are
    first: int  # the element at which a part begins
    lives: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    averages: list[Tensor]
    returned: list[Tensor]  # none, if there is only one average
    length: int  # elements of a part; 0: small tensors, all of them
    grads: list[Tensor]  # of this step
    buffers: tuple[Tensor, Tensor] | None  # of a part's size, for this step; small tensors have none

    @staticmethod
    def of(slots: list[Slot], places: list[int], first: int = 0, length: int = 0) -> "_Block":
        """Of members at these places; so many elements of one, or all of several."""
        own = [slots[i] for i in places]
        lives, _, *state = (_cut_all(column, first, length) for column in list(zip(*own))[:6])
        exp_avgs, exp_avg_sqs, averages, returned = state
        step = own[0].step
        return _Block(places, step, first, lives, exp_avgs, exp_avg_sqs, averages, returned, length, [], None)

    def at_step(self, grads: list[Tensor]) -> "_Block":
        """With the gradients of all members at a step, and with buffers."""
        own = _cut_all([grads[i] for i in self.places], self.first, self.length)
        return self._replace(grads=own, buffers=_buffers(self.lives[0].dtype, self.length))

    def least(self) -> float:
        """Of the second moments of a part; of small tensors 0, as nobody looked."""
        return self.exp_avg_sqs[0].amin().item() if self.length else 0.0


def _cut_all(arrays: Sequence[Tensor | None], first: int, count: int) -> list[Tensor]:
    """So many elements of tensors without gaps, in the order in which they lie there, or all if that is 0; of
    None, nothing."""
    there = [array for array in arrays if array is not None]
    if not count:
        return there
    return [array.as_strided((count,), (1,), array.storage_offset() + first) for array in there]


class _OfThread(threading.local):
    """Buffers of each thread, by precision, and what was cut of them, by size too: cutting takes a while."""

    def __init__(self) -> None:
        self.whole: dict[tuple[torch.dtype, int], Tensor] = {}
        self.cut: dict[tuple[torch.dtype, int, int], tuple[Tensor, Tensor]] = {}


_OF_THREAD = _OfThread()


def _buffers(dtype: torch.dtype, count: int) -> tuple[Tensor, Tensor] | None:
    """Two of so many elements, the same for all of a thread: after a block nobody needs what is in them."""
    if not count:
        return None
    key = dtype, BLOCK, count
    if key not in _OF_THREAD.cut:
        if len(_OF_THREAD.cut) > 1000:  # of models that are no more
            _OF_THREAD.cut.clear()
        with torch.inference_mode(False):  # else no later step could write to them
            if key[:2] not in _OF_THREAD.whole:
                _OF_THREAD.whole[key[:2]] = torch.empty(2, BLOCK, dtype=dtype, device="cpu")
            pair = _OF_THREAD.whole[key[:2]]
            _OF_THREAD.cut[key] = pair[0, :count], pair[1, :count]
    return _OF_THREAD.cut[key]


def _parts(members: Members, ages: Ages) -> "list[_Part]":
    """Members of one age and precision each."""
    if members.memo.get("younger") != ages.younger:
        alike: dict[object, list[int]] = {}
        rests = members.rests()
        for i, slot in enumerate(rests):
            alike.setdefault((slot.live.dtype, ages.at(i)), []).append(i)
        members.memo["younger"] = ages.younger
        members.memo["parts"] = [_Part(rests, places) for places in alike.values()]
    found: list[_Part] = members.memo["parts"]
    return found


class _Part:
    """Which of the members, and their blocks."""

    def __init__(self, slots: list[Slot], places: list[int]) -> None:
        self.places, self.dtype = places, slots[places[0]].live.dtype
        sizes = {i: slots[i].live.numel() for i in places}
        large = [i for i in places if sizes[i] >= FEWEST]
        small = [i for i in places if sizes[i] < FEWEST]
        ends = accumulate(sizes[i] for i in small)
        gathered = groupby(zip(small, ends, strict=True), lambda pair: pair[1] // BLOCK)
        self.blocks = [_Block.of(slots, [i for i, _ in own]) for _, own in gathered]
        for i in large:
            length = math.ceil(sizes[i] / math.ceil(sizes[i] / BLOCK))  # none much shorter than others
            for first in range(0, sizes[i], length):
                self.blocks.append(_Block.of(slots, [i], first, min(length, sizes[i] - first)))

    def second_moments(self) -> list[float]:
        """The sum of each tensor."""
        owners = [i for block in self.blocks for i in block.places]
        sums = [exp_avg_sq.sum() for block in self.blocks for exp_avg_sq in block.exp_avg_sqs]
        totals = dict.fromkeys(self.places, 0.0)
        for i, found in zip(owners, torch.stack(sums).tolist(), strict=True):
            totals[i] += found
        return list(totals.values())


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


def _step_and_pull_(block: _Block, pull: Pull, recipe: Recipe, factor: Scalar) -> None:
    """Where no gain is at its limit."""
    moments = _less(block.exp_avgs, block.lives, pull.share, block)
    torch._foreach_add_(moments, block.averages, alpha=pull.share)
    grads = _adamw_(block, moments, recipe, factor)
    torch._foreach_lerp_(block.exp_avgs, grads, 1 - recipe.betas[0])


def _step_then_pull_(block: _Block, pull: Pull, recipe: Recipe, factor: Scalar) -> None:
    gaps = _less(block.averages, block.lives, 1.0, block)
    _adamw_(block, block.exp_avgs, recipe, factor)
    denominators = _denominators(block, pull.shift)
    torch._foreach_clamp_min_(denominators, pull.floor)
    torch._foreach_addcdiv_(block.lives, gaps, denominators, pull.top)


def _less(some: list[Tensor], others: list[Tensor], times: float, block: _Block) -> list[Tensor]:
    """Some tensors less so many times the others; in the first buffer, if there is one."""
    if block.buffers is None:
        return list(torch._foreach_sub(some, others, alpha=times))
    return [torch.sub(some[0], others[0], alpha=times, out=block.buffers[0])]


def _denominators(block: _Block, shift: float) -> list[Tensor]:
    """√v + shift; in the second buffer, if there is one."""
    if block.buffers is None:
        roots = list(torch._foreach_sqrt(block.exp_avg_sqs))
        torch._foreach_add_(roots, summand(shift, roots))
        return roots
    return [torch.sqrt(block.exp_avg_sqs[0], out=block.buffers[1]).add_(shift)]


def _adamw_(block: _Block, moments: list[Tensor], recipe: Recipe, factor: Scalar) -> list[Tensor]:
    """AdamW's step with these first moments; the gradients that it took."""
    grads = counted(block.grads, recipe, factor)
    torch._fused_adamw_(
        block.lives,
        grads,
        moments,
        block.exp_avg_sqs,
        [],
        [block.step] * len(grads),
        lr=float(recipe.lr),
        beta1=recipe.betas[0],
        beta2=recipe.betas[1],
        weight_decay=recipe.weight_decay,
        eps=recipe.eps,
        amsgrad=False,
        maximize=False,  # they are counted already
    )
    return grads
