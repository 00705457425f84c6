"""Statistics of what the control does, computed from the state that a step leaves."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.optim.rule import gain_, step_scalars
from paceline.optim.settings import Settings
from paceline.optim.sharding import local
from paceline.optim.state import State, average_of, least_float32, name_of, storage_of
from paceline.optim.weights import keeper_of

SAMPLE = 2**12
"""Coordinates of a tensor that its quantiles are taken from; all of them in a smaller one."""
_TENTHS = (1, 5, 9)
_SPREADS = [f"{of}/{part}" for of in ("gain", "ratio") for part in ("mean", "q10", "q50", "q90")]
_NAMES = ("saturated", *_SPREADS, "gap_rms", "t", "lr", "rate")


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
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = paceline.PACE(model.parameters())
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> optimizer.step()
    >>> paceline.pull_statistics(optimizer)["t"]
    1
    """
    found = list(_find(optimizer))
    if not found:
        raise RuntimeError("there is nothing to report before the first step")
    elements, scalars = [each.elements for each in found], [each.scalars for each in found]
    total, rows = sum(elements), [_row(each) for each in found]
    sums = [sum(column) for column in zip(*(row[:4] for row in rows), strict=True)]
    lr, rate = (sum(n * s[i] for n, s in zip(elements, scalars, strict=True)) / total for i in (1, 2))
    figures = _named(sums, _together(found), total, (max(t for t, _, _ in scalars), lr, rate))
    if tensors:
        for each, row in zip(found, rows, strict=True):
            own = _named(row[:4], row[4:], each.elements, each.scalars)
            figures |= {f"{each.name}/{name}": value for name, value in own.items()}
    return figures


def _named(sums: Any, quantiles: Any, elements: int, scalars: Any) -> dict[str, float]:
    saturated, gain, ratio, square = (each / elements for each in sums)
    values = (saturated, gain, *quantiles[:3], ratio, *quantiles[3:], math.sqrt(square), *scalars)
    return dict(zip(_NAMES, values, strict=True))


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
        if group.get("control") is None:
            raise TypeError(
                f"{type(optimizer).__name__} has no control to report; {name_of(group, number, i)}"
            )
        yield _figures_of(name, group, state.get("live", parameter.detach()), state)


def _figures_of(name: str, group: dict[str, Any], live: Tensor, state: State) -> _Found:
    """Return the numbers of one tensor."""
    control, t, lr = group["control"], int(state["step"].item()), float(group.get("lr", 1.0))
    # Right after reset_average, or a load of AdamW's state, the average is live.
    average = live if storage_of(state, "average") is None else average_of(state, "average", live)
    gap = local(average) - local(live).to(least_float32(live))
    betas, eps = group.get("betas", (0.0, 0.0)), group.get("eps", 0.0)
    at = step_scalars(t, Settings(lr=lr, betas=betas, eps=eps, control=control))
    rate = control.rate(t, control.powers[0])
    gain = ratio = torch.zeros_like(gap)
    if at.pulling:
        denominator = torch.ones_like(gap)
        if at.over_root:
            denominator.copy_(local(state["exp_avg_sq"]).sqrt() / at.root_correction + eps)
        gain = gain_(denominator.clone(), at)
        ratio = gain_(denominator, at._replace(limit=math.inf)) / rate  # without the clip
    stride = sample_stride(gap.numel())
    sample = torch.stack([gain.flatten()[::stride], ratio.flatten()[::stride]])
    sums = ((gain >= at.limit).sum(), gain.sum(), ratio.sum(), gap.double().square().sum())
    wide = torch.stack([each.double() for each in sums])
    return _Found(name, gap.numel(), wide, sample, stride, (t, lr, rate))


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
