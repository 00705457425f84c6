"""Ways to average the live weights, for `attach(optimizer, averages={"long": HalfLife(0.1)})`."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

import torch
from torch import Tensor

from paceline.optim.foreach import move_averages_
from paceline.optim.settings import COUNT, FROM_0, NOT_NEGATIVE, SHARE, Allowed, check, is_number, require

Parts = dict[str, list[Tensor]]

_ALLOWED: dict[str, Allowed] = {
    "power": SHARE,
    "decay": SHARE,
    "start": FROM_0,
    "fraction": (lambda v: is_number(v) and 0 < v < math.inf, "> 0 and finite"),
    "bias_power": NOT_NEGATIVE,
    "every": COUNT,
    "min_rate": SHARE,
    "burn_in": FROM_0,
    "share": SHARE,
}


@runtime_checkable
class Average(Protocol):
    """One way to average. It keeps a few tensors (parts) like each parameter, which begin as live."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts."""

    def move_(self, parts: Parts, lives: list[Tensor], t: int) -> None:
        """Take in the live weights after step t = 1, 2, …; a list has an entry for each parameter."""

    def returned(self, parts: Mapping[str, Tensor], live: Tensor) -> Tensor:
        """Return the average of one parameter."""


class _Checked:
    """Settings that are refused where they are out of range."""

    def __post_init__(self) -> None:
        check(vars(self), _ALLOWED)


class _ByRate(_Checked, ABC):
    """An average that moves by a rate(t): average ← (1 − rate) · average + rate · live."""

    parts = ("average",)

    @abstractmethod
    def rate(self, t: int) -> float: ...

    def move_(self, parts: Parts, lives: list[Tensor], t: int) -> None:
        move_averages_(parts["average"], lives, self.rate(t))

    def returned(self, parts: Mapping[str, Tensor], live: Tensor) -> Tensor:
        return parts["average"]


@final
@dataclass(frozen=True)
class PowerLaw(_ByRate):
    """The average of PACE: its rate is (1 + t)^-power, from power 0 (live) to 1 (all steps alike).

    >>> PowerLaw(0.5).rate(3)
    0.5
    """

    power: float

    def rate(self, t: int) -> float:
        return float((1 + t) ** -self.power)


@final
@dataclass(frozen=True)
class Polynomial(_ByRate):
    """The mean of steps 1 … t with weights that grow like s^power.

    Power 0 is the uniform mean; for large powers the last 1/power of the run counts. The weights are
    Γ(s + power)/Γ(s), whose sums need no memory.

    >>> Polynomial(1).rate(2) == 2 / (1 + 2)
    True
    """

    power: float

    def __post_init__(self) -> None:
        require(is_number(self.power) and 0 <= self.power <= 30, "power", self.power, "0 <= power <= 30")

    def rate(self, t: int) -> float:
        return (self.power + 1) / (self.power + t)


@final
@dataclass(frozen=True)
class FixedDecay(_ByRate):
    """An EMA of fixed decay: average ← decay · average + (1 − decay) · live.

    Up to step `start` the average is live.

    >>> FixedDecay(0.75, start=10).rate(10), FixedDecay(0.75, start=10).rate(11)
    (1.0, 0.25)
    """

    decay: float
    start: int = 0

    def rate(self, t: int) -> float:
        return 1.0 if t <= self.start else 1 - self.decay


@final
@dataclass(frozen=True)
class HalfLife(_ByRate):
    """An EMA whose half-life is a fraction of the steps taken so far, so that it needs no length of a run.

    >>> round(HalfLife(0.1).rate(10), 12)  # half-life 1
    0.5
    """

    fraction: float

    def rate(self, t: int) -> float:
        return -math.expm1(-math.log(2) / (self.fraction * t))


@final
@dataclass(frozen=True)
class BEMA(_Checked):
    """The bias-corrected EMA (Block & Zhang, arXiv 2508.00180).

    Every `every` steps the EMA moves to live by max((offset + scale · t)^-power, min_rate). It returns
    ema + (offset + scale · t)^-bias_power · (live − live_0). Up to step `burn_in` it returns live, and
    live_0 is live after that step.
    """

    power: float = 0.5
    bias_power: float = 0.2
    offset: float = 10.0
    scale: float = 1.0
    every: int = 400
    min_rate: float = 0.0
    burn_in: int = 0

    parts = ("average", "ema", "start")

    def __post_init__(self) -> None:
        super().__post_init__()
        first = self.offset + self.scale
        require(min(self.offset, self.scale) >= 0 and first >= 1, "offset + scale", first, ">= 1, both >= 0")

    def move_(self, parts: Parts, lives: list[Tensor], t: int) -> None:
        if t <= self.burn_in:
            for part in self.parts:
                torch._foreach_copy_(parts[part], lives)
            return
        if (t - self.burn_in) % self.every:
            return
        now = self.offset + self.scale * t
        move_averages_(parts["ema"], lives, max(now**-self.power, self.min_rate))
        drifts = torch._foreach_neg(parts["start"])
        torch._foreach_add_(drifts, lives)
        torch._foreach_copy_(parts["average"], parts["ema"])
        torch._foreach_add_(parts["average"], drifts, alpha=now**-self.bias_power)

    def returned(self, parts: Mapping[str, Tensor], live: Tensor) -> Tensor:
        return parts["average"]


@final
@dataclass(frozen=True)
class Blend(_Checked):
    """A mean of live and another average: (1 − share) · live + share · average."""

    average: Average
    share: float

    @property
    def parts(self) -> tuple[str, ...]:
        return self.average.parts

    def move_(self, parts: Parts, lives: list[Tensor], t: int) -> None:
        self.average.move_(parts, lives, t)

    def returned(self, parts: Mapping[str, Tensor], live: Tensor) -> Tensor:
        average = self.average.returned(parts, live)
        return torch.lerp(live.to(average.dtype), average, self.share)
