"""What the control does to the weights, computed from the state that a step leaves."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.rebuilt.rule import gain_, step_scalars
from paceline.rebuilt.settings import Settings, control_of
from paceline.rebuilt.sharding import local
from paceline.rebuilt.state import average_dtype, average_of, name_of
from paceline.rebuilt.weights import keeper_of

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
    scalars: tuple[float, float, float]  # t, lr, rate


@torch.no_grad()
def pull_statistics(optimizer: Optimizer, *, tensors: bool = False) -> dict[str, float]:
    """Return what the last step did to the weights, by name. Call it after the step.

    - "saturated": the fraction of coordinates whose gain is at max_gain;
    - "gain/mean", "gain/q10", "gain/q50", "gain/q90": how much of the gap was closed, λ in the paper;
    - "ratio/mean" and its quantiles: R, the dimensionless strength. Where nothing is pulled, all are 0;
    - "gap_rms": the root mean square of average − live, as the next step finds it;
    - "t", "lr", "rate": steps taken, learning rate, averaging rate. Of all tensors together, t is that of the
      oldest, and the others are means over coordinates.

    Of sharded parameters the figures are of this rank's part. It waits for the device.

    Arguments:
        optimizer: a `PACE`, or an optimizer that `attach` was called on, which has taken a step.
        tensors: whether to add the same for each tensor, as "NAME/gain/mean".

    >>> import torch, paceline
    """
    found = list(_find(optimizer))
    if not found:
        raise RuntimeError("there is nothing to report before the first step")
    rows = [_row(each) for each in found]
    elements = [each.elements for each in found]
    total = sum(elements)
    sums = [sum(column) for column in zip(*(row[:4] for row in rows), strict=True)]
    scalars = [each.scalars for each in found]
    means = [sum(n * s[i] for n, s in zip(elements, scalars, strict=True)) / total for i in (1, 2)]
    figures = _named(sums, _together(found), total, (max(s[0] for s in scalars), *means))
    if tensors:
        for each, row in zip(found, rows, strict=True):
            own = _named(row[:4], row[4:], each.elements, each.scalars)
            figures |= {f"{each.name}/{name}": value for name, value in own.items()}
    return figures


def _named(sums: Any, quantiles: Any, elements: int, scalars: Any) -> dict[str, float]:
    saturated, gain, ratio, square = (each / elements for each in sums)
    values = (saturated, gain, *quantiles[:3], ratio, *quantiles[3:], math.sqrt(square))
    return dict(zip((*_NAMES, "t", "lr", "rate"), (*values, *scalars), strict=True))


def _find(optimizer: Optimizer) -> Iterator[_Found]:
    """Yield the numbers of each tensor that has taken a step."""
    keeper, names = keeper_of(optimizer), set[str]()
    places = {id(p): (n, i) for n, group in enumerate(keeper.groups) for i, p in enumerate(group["params"])}
    for group, parameter, state in keeper.remembered():
        number, i = places[id(parameter)]
        known = group.get("param_names")
        name = known[i] if known and known[i] not in names else f"{number}.{known[i] if known else i}"
        names.add(name)
        if not local(parameter.detach()).numel() or state["step"].item() == 0:
            continue
        if "control_strength" not in group or not any(key.startswith("average") for key in state):
            raise TypeError(
                f"{type(optimizer).__name__} has no control to report; {name_of(group, number, i)}"
            )
        live = state.get("live", parameter.detach())
        control, t = control_of(group), int(state["step"].item())
        gap = local(average_of(state, "average", live)) - local(live).to(average_dtype(live))
        betas = group.get("betas", (0.0, 0.0))
        lr = float(group.get("lr", 1.0))
        settings = Settings(lr=lr, betas=betas, eps=group.get("eps", 0.0), weight_decay=0.0, maximize=False,
                            control=control)  # fmt: skip
        at = step_scalars(t, settings)
        denominator = torch.ones_like(gap)
        if at.over_root:
            denominator = local(state["exp_avg_sq"]).sqrt() / at.root_correction + settings.eps
        gain = gain_(denominator.to(gap.dtype, copy=True), at) if at.pulling else torch.zeros_like(gap)
        # Without the clip: the ratio is the gain before it, over the rate.
        rate = control.rate(t, control.power)
        ratio = (
            gain_(denominator.to(gap.dtype, copy=True), at._replace(limit=math.inf)) / rate
            if at.pulling
            else gain
        )
        stride = sample_stride(gap.numel())
        sample = torch.stack([gain.flatten()[::stride], ratio.flatten()[::stride]])
        saturated = (gain >= at.limit).sum() if at.pulling else gap.new_zeros(())
        wide = [x.double() for x in (saturated, gain.sum(), ratio.sum(), gap.double().square().sum())]
        yield _Found(name, gap.numel(), torch.stack(wide), sample, stride, (t, lr, rate))


def sample_stride(size: int) -> int:
    """Return how far apart the coordinates of a sample are."""
    stride = max(1, -(-size // SAMPLE))
    while math.gcd(stride, size) > 1:  # with a common factor some rows or columns would be left out
        stride += 1
    return stride


def _row(each: _Found) -> list[float]:
    """Return the sums and the quantiles of one tensor."""
    ordered = each.sample.sort().values.double()
    ranks = [(tenths * ordered.shape[-1] - 1) // 10 for tenths in _TENTHS]
    found: list[float] = torch.cat([each.sums, ordered[:, ranks].flatten()]).tolist()
    return found


def _together(found: list[_Found]) -> list[float]:
    """Return the quantiles of all tensors, each coordinate weighted by those it stands for."""
    weights = torch.cat([torch.full((each.sample.shape[1],), each.stride) for each in found])
    ordered, order = torch.cat([each.sample.to("cpu", torch.float64) for each in found], 1).sort()
    reached, total = weights[order].cumsum(1), int(weights.sum())
    # The first whose weight, with that of all below it, makes up the share: in integers, so exactly.
    ranks = [(reached < -(-tenths * total // 10)).sum(1, keepdim=True) for tenths in _TENTHS]
    return [float(ordered[row, int(rank[row])]) for row in range(2) for rank in ranks]
