"""What the control does to the weights, computed from the state that a step leaves."""

import math
from collections.abc import Iterator
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from paceline.optim.foreach import denominators_of
from paceline.optim.moments import model_scale, second_moment
from paceline.optim.pace import PACE
from paceline.optim.pullback import Pullback, recipe_of
from paceline.optim.recipe import Recipe
from paceline.optim.rule import RATIOS, At, Scalar, Terms, at_step, averaging_rate, gain_limit, on_device_of
from paceline.optim.sharded import local
from paceline.optim.state import average_dtype, average_of

SAMPLE = 2**12
"""Coordinates of a tensor that its quantiles are taken from; all of them in a smaller one."""

_TENTHS = (1, 5, 9)
_SPREAD = ("mean", *(f"q{10 * tenths}" for tenths in _TENTHS))
_NAMES = ("saturated", *(f"{of}/{part}" for of in ("gain", "ratio") for part in _SPREAD), "gap_rms")


class _Found(NamedTuple):
    """The numbers of one tensor, on its device."""

    name: str
    elements: int
    sums: Tensor  # (4,) float64: saturated coordinates, gains, ratios, squares of the gap
    sample: Tensor  # (2, n) gains and ratios of some coordinates
    stride: int  # how many coordinates each of the sample stands for
    scalars: tuple[Scalar, Scalar, Scalar]  # t, lr, rate


@torch.no_grad()
def pull_statistics(optimizer: Optimizer, *, tensors: bool = False) -> dict[str, float]:
    """Return what the last step did to the weights, by name; call it after the step, as often as you like.

    - "saturated": the fraction of coordinates whose gain is at max_gain;
    - "gain/mean", "gain/q10", "gain/q50", "gain/q90": how much of the gap was closed, λ in the paper;
    - "ratio/…": R, the dimensionless strength of the pull, likewise. Where nothing is pulled, all are 0;
    - "gap_rms": the root mean square of average − live, as the next step finds it;
    - "t", "lr", "rate": steps taken, learning rate, averaging rate. Of all tensors together, t is that of the
      oldest, the others are means over coordinates.

    With gain="scaled" the scale is that of the next step. Of sharded parameters (DTensor) the figures are
    of this rank's part, and all ranks call it. It waits for the device.

    Arguments:
        optimizer: a `PACE` or a `Pullback` that has taken a step.
        tensors: whether to add the same for each tensor, as "NAME/gain/mean".

    >>> import torch, paceline
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = paceline.PACE(model.named_parameters(), lr=0.1, gain="paper")
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> figures = paceline.pull_statistics(optimizer)
    >>> figures["t"], figures["saturated"]
    (1.0, 0.0)
    """
    if not isinstance(optimizer, PACE | Pullback):
        raise TypeError(
            "pull_statistics looks at the pull of PACE or Pullback; pass the paceline optimizer itself (of a "
            f"wrapper, usually its .optimizer). Got {type(optimizer).__name__}, which pulls nothing"
        )
    found = list(_find(optimizer))
    if not found:
        raise RuntimeError("there is nothing to look at before the first step")
    home = next((each.sums.device for each in found if each.sums.device.type != "cpu"), torch.device("cpu"))
    rows = torch.cat([_rows(found, home), torch.stack([_scalars(each, home) for each in found])], 1).tolist()
    elements = [each.elements for each in found]
    whole = [sum(column) for column in zip(*(row[:4] for row in rows))]
    ts, lrs, rates = ([row[i] for row in rows] for i in (-3, -2, -1))
    means = [sum(map(mul, elements, values)) / sum(elements) for values in (lrs, rates)]
    figures = _named(whole, _together(found, home), sum(elements), (max(ts), *means))
    if tensors:
        for each, row in zip(found, rows, strict=True):
            own = _named(row[:4], row[4:10], each.elements, row[10:])
            figures |= {f"{each.name}/{name}": value for name, value in own.items()}
    return figures


def steps_taken(optimizer: PACE | Pullback) -> int:
    """Return the count of the parameter that has taken most steps."""
    key = optimizer.format.prefix + "step"
    return int(max((state[key].item() for state in optimizer.state.values() if key in state), default=0))


def _named(sums: Any, quantiles: Any, elements: int, scalars: Any) -> dict[str, float]:
    saturated, gain, ratio, square = (each / elements for each in sums)
    values = (saturated, gain, *quantiles[:3], ratio, *quantiles[3:], math.sqrt(square))
    return dict(zip((*_NAMES, "t", "lr", "rate"), (*values, *scalars), strict=True))


# --- One tensor -------------------------------------------------------------------------------------


def _find(optimizer: PACE | Pullback) -> Iterator[_Found]:
    prefix, names, states = optimizer.format.prefix, set[str](), optimizer.state
    scale: Scalar = 1.0
    if any(group["gain"] == "scaled" for group in optimizer.param_groups):
        all_of = [(p, states.get(p, {}), group) for group in optimizer.param_groups for p in group["params"]]
        scale = model_scale(all_of)
    for number, group in enumerate(optimizer.param_groups):
        known = group.get("param_names")
        recipe = Recipe.of(group) if isinstance(optimizer, PACE) else recipe_of(group)
        for i, parameter in enumerate(group["params"]):
            name = known[i] if known and known[i] not in names else f"{number}.{known[i] if known else i}"
            names.add(name)
            state = states.get(parameter, {})
            own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            # Of a tensor that has not stepped, or of which this rank has nothing, there is nothing to say.
            if "step" not in own or not local(parameter).numel() or own["step"].item() == 0:
                continue
            live = optimizer._live(parameter, own)
            gap = local(average_of(own, "average", live)) - local(live).to(average_dtype(live))
            if "unseeded" in own:
                gap = torch.zeros_like(gap)
            at = at_step(own["step"], recipe, on_device_of(gap, scale))
            gain, ratio = _gain_and_ratio(gap, state, group, at, recipe)
            stride = sample_stride(gap.numel())
            sample = torch.stack([gain.flatten()[::stride], ratio.flatten()[::stride]])
            at_limit = (
                (gain >= gain_limit(recipe, gain.dtype)).sum()
                if at.pulling is not False
                else gap.new_zeros(())
            )
            wide = [
                number.double() for number in (at_limit, gain.sum(), ratio.sum(), gap.double().square().sum())
            ]
            # Not at.rate, which is 0 where the device finds that no average moves.
            power = recipe.ema_power
            rate = averaging_rate(at.t, power, recipe.ema_offset, recipe.ema_scale) if power else 1.0
            yield _Found(name, gap.numel(), torch.stack(wide), sample, stride, (at.t, at.lr, rate))


def _gain_and_ratio(
    gap: Tensor, state: dict[str, Any], group: dict[str, Any], at: At, recipe: Recipe
) -> tuple[Tensor, Tensor]:
    """Return the gain and the ratio of each coordinate, as the step had them."""
    moment = None if recipe.gain == "uniform" else second_moment(state, group)
    if at.pulling is False or (moment is None and recipe.gain != "uniform"):
        return torch.zeros_like(gap), torch.zeros_like(gap)
    denominator = gap
    if moment is not None:
        own = at._replace(root_correction=moment.root_correction)
        denominator = local(denominators_of([moment.value], [own], moment.eps)[0]).to(gap.dtype)
    ratio = RATIOS[recipe.gain](Terms(denominator, at.lr, recipe.pullback_strength, out=None, scale=at.scale))
    if isinstance(at.pulling, Tensor):
        ratio = torch.where(at.pulling, ratio, 0.0)
    return (ratio * at.rate).clamp(max=gain_limit(recipe, ratio.dtype)), ratio


def sample_stride(size: int) -> int:
    """Return how far apart the coordinates of a sample are."""
    stride = max(1, -(-size // SAMPLE))
    while math.gcd(stride, size) > 1:  # with a common factor some rows or columns would be left out
        stride += 1
    return stride


# --- All of them --------------------------------------------------------------------------------------


def _rows(found: list[_Found], home: torch.device) -> Tensor:
    """Return the sums and the quantiles of each tensor: (tensors, 10) float64."""
    rows = []
    for each in found:
        ordered = each.sample.sort().values.double()
        ranks = [(tenths * ordered.shape[-1] - 1) // 10 for tenths in _TENTHS]
        rows.append(torch.cat([each.sums, ordered[:, ranks].flatten()]).to(home))
    return torch.stack(rows)


def _scalars(each: _Found, home: torch.device) -> Tensor:
    return torch.stack([torch.as_tensor(value, dtype=torch.float64).to(home) for value in each.scalars])


def _together(found: list[_Found], home: torch.device) -> list[float]:
    """Return the quantiles of all tensors together, each coordinate weighted by those it stands for."""
    weights = [torch.full((each.sample.shape[1],), each.stride, device=home) for each in found]
    samples = torch.cat([each.sample.to(home, torch.float64) for each in found], 1)
    ordered, order = samples.sort()
    reached = torch.cat(weights)[order].cumsum(1)
    total = sum(each.sample.shape[1] * each.stride for each in found)
    # The first whose weight, with that of all below it, makes up the share: in integers, so exactly.
    ranks = [(reached < -(-tenths * total // 10)).sum(1) for tenths in _TENTHS]
    quantiles: list[float] = ordered.gather(1, torch.stack(ranks, 1)).flatten().tolist()
    return quantiles
