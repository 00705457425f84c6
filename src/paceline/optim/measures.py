"""What a step did to the weights, found from copies taken before it and the state it left behind.

Everything stays on the device, and nothing here waits for it.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.optim.foreach import chunks, denominators_of
from paceline.optim.moments import model_scale, second_moment
from paceline.optim.pace import PACE
from paceline.optim.pullback import Pullback, recipe_of
from paceline.optim.readings import Found, sample_stride
from paceline.optim.recipe import Recipe
from paceline.optim.rule import (
    RATIOS,
    At,
    Scalar,
    Terms,
    at_step,
    averaging_rate,
    gain_limit,
    on_device_of,
    stays_on_device,
)
from paceline.optim.sharded import local
from paceline.optim.state import average_dtype, average_of

# --- Before the step ------------------------------------------------------------------------------


class Member(NamedTuple):
    """A parameter and what the optimizer knows of it."""

    optimizer: PACE | Pullback
    name: str
    parameter: Tensor
    group: dict[str, Any]
    state: dict[str, Any]

    def own(self, key: str) -> Tensor | None:
        """What the averaging keeps of it under that key."""
        return self.state.get(self.optimizer.format.prefix + key)

    def average(self) -> Tensor | None:
        """The control average, in whatever way it is kept."""
        average, residual = self.own("average"), self.own("average_residual")
        if average is not None:
            return average if average.is_meta else average.to(self.parameter.device)
        if residual is None or residual.shape != self.parameter.shape:
            return None
        return average_of(self.state, "average", self.parameter)

    def live(self) -> Tensor:
        return local(self.parameter.detach())


class Before(NamedTuple):
    """A parameter before the step; copies."""

    live: Tensor
    average: Tensor  # at least float32
    taken: float | None  # steps; None where only the device knows
    scale: Scalar  # root mean square of √v̂ over the model; for gain="scaled"


class Watched(NamedTuple):
    """A parameter at a probed step."""

    member: Member
    before: Before


class Slope(NamedTuple):
    """What the gradient says; 0-dim."""

    product: Tensor  # gradient · gap
    gradient: Tensor  # its length


def members(optimizer: PACE | Pullback) -> Iterator[Member]:
    state, names = optimizer.state, set()
    for number, group in enumerate(optimizer.param_groups):
        known = group.get("param_names")
        for i, parameter in enumerate(group["params"]):
            name = known[i] if known and known[i] not in names else f"{number}.{known[i] if known else i}"
            names.add(name)
            yield Member(optimizer, name, parameter, group, state.get(parameter, {}))


def scale_of(found: list[Member]) -> Scalar:
    """The scale that the next step will take for gain="scaled"."""
    if all(member.group["gain"] != "scaled" for member in found):
        return 1.0
    return model_scale([(member.parameter, member.state, member.group) for member in found])


def look(member: Member, scale: Scalar) -> Before:
    live, step = member.live().clone(), member.own("step")
    taken = 0.0 if step is None else step.item() if step.device.type == "cpu" else None
    average = live if taken == 0 else _average(member, live)
    if step is not None and taken is None:
        average = torch.where(step == 0, live, average)
    return Before(live, average.to(average_dtype(live)), taken, on_device_of(live, scale))


def _average(member: Member, live: Tensor) -> Tensor:
    """A copy of the average that the step will start from."""
    average = member.average()
    # The step will make an average that does not fit anew, or refuse it.
    if average is None or average.shape != member.parameter.shape or average.is_meta:
        return live
    if member.own("unseeded") is not None:
        return live
    return local(average).to(live.device, copy=True)


def slopes_of(watched: Iterable[Watched]) -> dict[Tensor, Slope]:
    slopes = {}
    for chunk in chunks(watched, lambda entry: (entry.member.parameter, None)):
        products = _gaps(chunk)
        gradients = [_gradient(member).to(before.average.dtype) for member, before in chunk]
        torch._foreach_mul_(products, gradients)
        for entry, product, length in zip(chunk, products, _lengths(gradients)):
            slopes[entry.member.parameter] = Slope(product.sum(), length)
    return slopes


def _gradient(member: Member) -> Tensor:
    assert member.parameter.grad is not None
    gradient = local(member.parameter.grad)
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def _gaps(chunk: list[Watched]) -> list[Tensor]:
    return list(torch._foreach_sub([e.before.average for e in chunk], [e.before.live for e in chunk]))


def _lengths(tensors: list[Tensor]) -> list[Tensor]:
    if tensors[0].device.type == "cpu":
        # Its norms add up in sequence: in float32 they are 0.5 % off after 40M elements. Its sums do not.
        return [tensor.square().sum().sqrt() for tensor in tensors]
    return list(torch._foreach_norm(tensors))


# --- After the step -------------------------------------------------------------------------------


class _Pull(NamedTuple):
    """What was added to live beyond the step of the optimizer alone."""

    moved: Tensor
    saturated: Tensor  # () sums over coordinates, as the next two
    gain: Tensor
    ratio: Tensor
    sample: Tensor  # (2, n) gains and ratios
    stride: int


def has_moved(member: Member, before: Before) -> bool:
    step = member.own("step")
    if member.parameter.grad is None or step is None:
        return False
    return before.taken is None or step.item() != before.taken  # equal where it was skipped


def measure(watched: list[Watched], slopes: dict[Tensor, Slope]) -> list[Found]:
    """The figures of all of them, in their order, but those of which this rank has nothing."""
    found = {}

    def key(entry: Watched) -> tuple[Tensor, object]:
        return entry.member.parameter, (id(entry.member.group), entry.before.taken)

    for chunk in chunks(watched, key):
        found.update({entry.name: entry for entry in _measure_chunk(chunk, slopes)})
    return [found[member.name] for member, _ in watched if found[member.name].elements]


def _measure_chunk(chunk: list[Watched], slopes: dict[Tensor, Slope]) -> Iterator[Found]:
    recipe = _recipe(chunk[0].member)
    ats = _ats(chunk, recipe)
    lives = [member.live().to(before.average.dtype) for member, before in chunk]
    steps = list(torch._foreach_sub(lives, [entry.before.live for entry in chunk]))
    del lives
    gaps = _gaps(chunk)
    gap_lengths = _lengths(gaps)
    if ats[0].pulling is False:
        pulls = _no_pulls(gaps)
    else:
        pulls = _pulls_(gaps, chunk, ats, recipe)
        torch._foreach_sub_(steps, [pull.moved for pull in pulls])
    pull_lengths, step_lengths = _lengths([pull.moved for pull in pulls]), _lengths(steps)
    for i, ((member, _), pull) in enumerate(zip(chunk, pulls)):
        product, gradient = slopes[member.parameter]
        lengths = (pull_lengths[i], step_lengths[i], gap_lengths[i], gradient)
        # In the order of readings.Sums.
        sums = torch.stack([pull.saturated, pull.gain, pull.ratio, product, *lengths])
        scalars = (ats[i].t, ats[i].lr, _rate(ats[i], recipe))
        yield Found(member.name, gaps[i].numel(), sums, pull.sample, pull.stride, scalars)


def _recipe(member: Member) -> Recipe:
    return Recipe.of(member.group) if isinstance(member.optimizer, PACE) else recipe_of(member.group)


def _ats(chunk: list[Watched], recipe: Recipe) -> list[At]:
    counts = [count for member, _ in chunk if (count := member.own("step")) is not None]
    if stays_on_device(recipe):
        return [at_step(count, recipe, chunk[0].before.scale) for count in counts]
    return [at_step(counts[0], recipe, chunk[0].before.scale)] * len(counts)


def _rate(at: At, recipe: Recipe) -> Scalar:
    # Not at.rate, which is 0 where the device finds that no average moves.
    power = recipe.ema_power
    return averaging_rate(at.t, power, recipe.ema_offset, recipe.ema_scale) if power else 1.0


def _no_pulls(gaps: list[Tensor]) -> list[_Pull]:
    none = gaps[0].new_zeros(())
    return [_Pull(none, none, none, none, none.expand(2, 1), stride=gap.numel()) for gap in gaps]


def _pulls_(gaps: list[Tensor], chunk: list[Watched], ats: list[At], recipe: Recipe) -> list[_Pull]:
    """The pulls, with ratio and gain as the step had them. Under gap="pre" written over the gaps."""
    ratios = _ratios(chunk, ats, recipe)
    limit = gain_limit(recipe, ratios[0].dtype)
    rates: list[Any] = [at.rate for at in ats]
    gains = list(torch._foreach_mul(ratios, rates))
    torch._foreach_clamp_max_(gains, limit)
    if recipe.gap == "pre":
        torch._foreach_mul_(gaps, gains)
        moved = gaps
    else:
        moved = [_lookahead(entry, gain, rate) for entry, gain, rate in zip(chunk, gains, rates)]
    pulls = []
    for gain, ratio, pull in zip(gains, ratios, moved):
        stride = sample_stride(gain.numel())
        sample = torch.stack([gain.flatten()[::stride], ratio.flatten()[::stride]])
        pulls.append(_Pull(pull, (gain >= limit).sum(), gain.sum(), ratio.sum(), sample, stride))
    return pulls


def _ratios(chunk: list[Watched], ats: list[At], recipe: Recipe) -> list[Tensor]:
    averages = [entry.before.average for entry in chunk]
    if recipe.gain == "uniform":
        denominators = [torch.empty_like(average) for average in averages]
    else:
        known = [moment for m, _ in chunk if (moment := second_moment(m.state, m.group)) is not None]
        ats = [at._replace(root_correction=moment.root_correction) for at, moment in zip(ats, known)]
        denominators = denominators_of([moment.value for moment in known], ats, known[0].eps)
    ratios = []
    for average, denominator, at in zip(averages, denominators, ats, strict=True):
        wide = denominator.to(average.dtype)
        terms = Terms(wide, at.lr, recipe.pullback_strength, out=wide, scale=at.scale)
        ratio = local(RATIOS[recipe.gain](terms))
        ratios.append(torch.where(at.pulling, ratio, 0.0) if isinstance(at.pulling, Tensor) else ratio)
    return ratios


def _lookahead(entry: Watched, gain: Tensor, rate: Scalar) -> Tensor:
    """gain · (new average − raw), where raw, the step without the pull, is no longer to be had.

    From live = raw + gain · (new − raw) follows new − live = (1 − gain)(new − raw), which says nothing
    at gain 1. From new = (1 − rate) · old + rate · raw follows new − raw = (1/rate − 1)(old − new), but
    with a rounding error that grows as 1/rate.
    """
    average, old = entry.member.average(), entry.before.average
    assert average is not None
    new, live = local(average), entry.member.live()
    return torch.where(gain < 0.5, gain / (1 - gain) * (new - live), gain * (1 / rate - 1) * (old - new))
