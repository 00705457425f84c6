"""The numbers of one probed step: what they mean, and their way from the device to whoever reads them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from operator import mul
from typing import NamedTuple, final

import torch
from torch import Tensor

from paceline.optim.rule import Scalar

_TENTHS = (1, 5, 9)

SAMPLE = 2**12
"""Coordinates of a tensor that its quantiles are taken from; all of them in a smaller one. The rank of a
quantile is then right to 1 % or so, and sorting costs less than the step."""


class Sums(NamedTuple):
    """Sums over the coordinates of one tensor; on the device a tensor has them in this order."""

    saturated: float
    gain: float
    ratio: float
    product: float  # gradient · gap
    pull: float  # a length, as all below: the root of a sum of squares
    step: float
    gap: float
    gradient: float


LENGTHS = slice(Sums._fields.index("pull"), None)


def sample_stride(size: int) -> int:
    """Return how far apart the coordinates of a sample are."""
    stride = max(1, -(-size // SAMPLE))
    while math.gcd(stride, size) > 1:  # with a common factor some rows or columns would be left out
        stride += 1
    return stride


# --- What is read ---------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Spread:
    """How a quantity is spread over coordinates: its mean and three quantiles.

    A quantile is the smallest value that at least 10, 50 or 90 % of the coordinates do not exceed. In a
    tensor of more than `SAMPLE` coordinates they are those of a fixed, evenly strided sample.
    """

    mean: float
    q10: float
    q50: float
    q90: float


@final
@dataclass(frozen=True, slots=True)
class Figures:
    """What one step did, to one tensor or to all together. Where nothing is pulled, the first four are 0."""

    saturated: float
    """Fraction of coordinates whose gain hit max_gain."""
    gain: Spread
    """How much of the gap was closed: min(rate · ratio, max_gain), λ in the paper."""
    ratio: Spread
    """R, the dimensionless strength of the pull: slow motion is held back to 1 / (1 + R) of its speed."""
    pull_to_step: float
    """Length of the pull over that of the step which the optimizer would have taken without it."""
    gap_rms: float
    """RMS of average − live before the step."""
    cosine: float
    """Of the gradient and the gap; positive: the pull goes uphill. 0 where either is 0."""
    t: float
    """Steps taken, this one included; overall, those of the tensor that has taken most."""
    lr: float
    """Learning rate in force; overall, the mean over coordinates."""
    rate: float
    """Averaging rate β; overall, the mean over coordinates."""

    def flat(self) -> dict[str, float]:
        """All figures by name, those of a spread as e.g. "gain/mean" and "gain/q50"."""
        flat: dict[str, float] = {}
        for name in (entry.name for entry in fields(self)):
            value = getattr(self, name)
            if isinstance(value, Spread):
                flat |= {f"{name}/{part.name}": getattr(value, part.name) for part in fields(value)}
            else:
                flat[name] = value
        return flat


@final
@dataclass(frozen=True)
class Reading:
    """The figures of one step. `tensors` has those of every tensor that the step moved, by name."""

    t: int
    overall: Figures
    _table: "_Table" = field(repr=False, compare=False)

    # Made when asked for: in a thousand readings of a thousand tensors they would fill a gigabyte.
    @cached_property
    def tensors(self) -> dict[str, Figures]:
        return dict(zip(self._table.names, self._table.figures()))

    def flat(self, tensors: bool = False) -> dict[str, float]:
        """Names and numbers for a logger: the overall figures, and each tensor's as "NAME/gain/mean"."""
        flat = self.overall.flat()
        if tensors:
            for name, figures in self.tensors.items():
                flat |= {f"{name}/{key}": value for key, value in figures.flat().items()}
        return flat


# --- On the device --------------------------------------------------------------------------------


class Found(NamedTuple):
    """What a step did to one tensor, on the device."""

    name: str
    elements: int
    sums: Tensor  # (8,) in the order of Sums
    sample: Tensor  # (2, n) gains and ratios of some coordinates
    stride: int  # how many coordinates each of the sample stands for
    scalars: tuple[Scalar, Scalar, Scalar]  # t, lr, rate


# --- The way to the host --------------------------------------------------------------------------


class _Table(NamedTuple):
    """Numbers of one probed step on the host, or still on their way to it."""

    names: list[str]
    elements: list[int]
    rows: Tensor  # (tensors + 1, 14) sums, quantiles of gain and ratio; the last row is of all together
    scalars: Tensor  # (tensors, 3) t, lr, rate

    def overall(self) -> Figures:
        total = sum(self.elements)
        ts, lrs, rates = zip(*self.scalars.tolist())
        lr, rate = (sum(map(mul, self.elements, values)) / total for values in (lrs, rates))
        return _figures(self.rows[-1].tolist(), total, (max(ts), lr, rate))

    def figures(self) -> list[Figures]:
        return list(map(_figures, self.rows.tolist(), self.elements, self.scalars.tolist()))


def _figures(row: Sequence[float], elements: int, scalars: Sequence[float]) -> Figures:
    sums, gains, ratios = Sums(*row[:8]), row[8:11], row[11:]
    return Figures(
        saturated=sums.saturated / elements,
        gain=Spread(sums.gain / elements, *gains),
        ratio=Spread(sums.ratio / elements, *ratios),
        pull_to_step=_quotient(sums.pull, sums.step),
        gap_rms=sums.gap / elements**0.5,
        cosine=_quotient(sums.product, sums.gap * sums.gradient),
        t=scalars[0],
        lr=scalars[1],
        rate=scalars[2],
    )


def _quotient(a: float, b: float) -> float:
    """a / b; 0 / 0 is 0."""
    return 0.0 if a == 0 else math.copysign(math.inf, a) if b == 0 else a / b


class Record:
    """One probed step, of which a `Reading` is made when it is asked for."""

    def __init__(self, t: int, found: list[Found]) -> None:
        self.t = t
        devices = [entry.sample.device for entry in found]
        home = next((device for device in devices if device.type != "cpu"), devices[0])
        rows, scalars = (
            numbers.to("cpu", non_blocking=True) for numbers in (_rows(found, home), _scalars(found, home))
        )
        self._table = _Table([e.name for e in found], [e.elements for e in found], rows, scalars)
        self._arrival: torch.Event | None = None
        if home.type != "cpu":
            self._arrival = torch.Event(home)
            self._arrival.record()

    def has_arrived(self) -> bool:
        return self._arrival is None or self._arrival.query()

    @cached_property
    def reading(self) -> Reading:
        if self._arrival is not None:
            self._arrival.synchronize()
        return Reading(self.t, self._table.overall(), self._table)


def _width(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # which Apple's GPUs do not have


def _rows(found: list[Found], home: torch.device) -> Tensor:
    """The sums and the quantiles of every tensor, and in a last row those of all."""

    def stacked(tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack([tensor.to(home, non_blocking=True) for tensor in tensors]).to(_width(home))

    sums = stacked([entry.sums for entry in found])
    squares = sums.clone()
    squares[:, LENGTHS].square_()
    added = squares.sum(0)
    added[LENGTHS].sqrt_()
    quantiles = stacked([*_quantiles(found), _overall_quantiles(found, home)])
    return torch.cat([torch.cat([sums, added.unsqueeze(0)]), quantiles], 1)


def _scalars(found: list[Found], home: torch.device) -> Tensor:
    values = [value for entry in found for value in entry.scalars]
    if not any(isinstance(value, Tensor) for value in values):
        return torch.tensor(values, dtype=torch.float64).view(-1, 3)
    # Filled, not copied, where they are numbers: a copy to the device would wait for it.
    filled = [
        value.reshape(()).to(home, _width(home), non_blocking=True)
        if isinstance(value, Tensor)
        else torch.full((), value, dtype=_width(home), device=home)
        for value in values
    ]
    return torch.stack(filled).view(-1, 3)


def _quantiles(found: list[Found]) -> list[Tensor]:
    """Of each tensor those of its gains, then of its ratios; samples of one size are sorted together."""
    groups: dict[object, list[int]] = {}
    for i, entry in enumerate(found):
        groups.setdefault((entry.sample.device, entry.sample.dtype, entry.sample.shape), []).append(i)
    quantiles: dict[int, Tensor] = {}
    for alike in groups.values():
        ordered = torch.stack([found[i].sample for i in alike]).sort().values
        ranks = [(tenths * ordered.shape[-1] - 1) // 10 for tenths in _TENTHS]
        quantiles |= zip(alike, torch.stack([ordered[..., rank] for rank in ranks], -1).flatten(1))
    return [quantiles[i] for i in range(len(found))]


def _overall_quantiles(found: list[Found], home: torch.device) -> Tensor:
    """Likewise of all tensors together, each coordinate with the weight of those it stands for."""
    sizes = [(entry.sample.shape[1], entry.stride) for entry in found]
    weights = {(n, stride): torch.full((n,), stride, device=home) for n, stride in set(sizes)}
    weight = torch.cat([weights[size] for size in sizes])
    samples = torch.cat([entry.sample.to(home, non_blocking=True) for entry in found], 1)
    ordered, order = samples.sort()
    reached = weight[order].cumsum(1)
    total = sum(n * stride for n, stride in sizes)
    # The first whose weight, with that of all below it, makes up the share: in integers, so exactly.
    ranks = [(reached < -(-tenths * total // 10)).sum(1) for tenths in _TENTHS]
    return ordered.gather(1, torch.stack(ranks, 1)).flatten()
