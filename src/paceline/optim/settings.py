"""The settings of a user: how training is steered, and which average is returned."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, Literal, final, get_args

from torch import Tensor

Sizing = Literal["paper", "uniform"]
Gap = Literal["before", "after"]
Order = Literal["pull, then average", "average, then pull"]
AverageDtype = Literal["float32", "bfloat16", "int8"]


# --- What is allowed ----------------------------------------------------------------------------------


def is_number(value: object) -> bool:
    """Return whether a value is a real number; True and False are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def require(ok: bool, what: str, value: object, allowed: str) -> None:
    """Raise ValueError, naming value and allowed range, unless `ok`."""
    if not ok:
        raise ValueError(f"Invalid {what} value: {value!r}; allowed: {allowed}")


Allowed = tuple[Callable[[Any], bool], str]
"""A check, and what a message says is allowed."""


def _one_of(*choices: object) -> Allowed:
    return lambda value: value in choices, ", ".join(map(repr, choices))


def or_none(allowed: Allowed) -> Allowed:
    """Return what is allowed, and None with it."""
    return lambda value: value is None or allowed[0](value), f"None, or {allowed[1]}"


def _is_rate(value: Any) -> bool:
    return NOT_NEGATIVE[0](value.item() if isinstance(value, Tensor) and value.numel() == 1 else value)


def _is_betas(value: Any) -> bool:
    is_pair = isinstance(value, tuple | list) and len(value) == 2
    return is_pair and all(is_number(beta) and 0 <= beta < 1 for beta in value)


# Up to 1e308, not below inf: an int may be larger than any float.
NOT_NEGATIVE: Allowed = (lambda v: is_number(v) and 0 <= v <= 1e308, ">= 0 and finite")
COUNT: Allowed = (lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 1, "an integer >= 1")
FROM_0: Allowed = (lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 0, "an integer >= 0")
SHARE: Allowed = (lambda v: is_number(v) and 0 <= v <= 1, "between 0 and 1")

ALLOWED: dict[str, Allowed] = {
    "lr": (_is_rate, ">= 0 and finite, a number or a 1-element Tensor"),
    "betas": (_is_betas, "two numbers, each >= 0 and < 1"),
    "eps": NOT_NEGATIVE,
    "weight_decay": NOT_NEGATIVE,
    "maximize": _one_of(True, False),
    "foreach": _one_of(None, True, False),
    "fused": _one_of(None, True, False),
    "average_dtype": _one_of(*get_args(AverageDtype)),
    "control": (lambda v: isinstance(v, Control), "a Control, such as Control.push()"),
    "sizing": _one_of(*get_args(Sizing)),
    "gap": _one_of(*get_args(Gap)),
    "order": _one_of(*get_args(Order)),
    "power": SHARE,
    "return_power": or_none(SHARE),
    "step": (lambda v: is_number(v) and 0 < v <= 1e308, "> 0 and finite"),
    "grow": FROM_0,
    "every": COUNT,
    "pull_every": or_none(COUNT),
    "slope": NOT_NEGATIVE,
    "delay": NOT_NEGATIVE,
    "least_rate": SHARE,
    "max_gain": (lambda v: is_number(v) and v > 0, "> 0 (inf: unclipped)"),
}
_STRENGTHS: dict[Sizing, Allowed] = {
    "paper": (lambda v: is_number(v) and v >= 0, '>= 0 with sizing="paper" (inf: every gain at its limit)'),
    "uniform": (lambda v: is_number(v) and v > -1, '> -1 with sizing="uniform"; below 0 it pushes'),
}


def check(settings: Mapping[str, Any], table: Mapping[str, Allowed] = ALLOWED) -> None:
    """Raise ValueError for the first setting that is out of range."""
    for name, (is_allowed, allowed) in table.items():
        if name in settings:
            require(is_allowed(settings[name]), name, settings[name], allowed)


# --- The control --------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Control:
    """A setting of how training is steered for the average, and of which average is returned.

    Make one with `paper`, `push`, `pull` or `none`. A field that is left out means Algorithm 1 of the paper.

    .. code-block:: text

        the paper's letter            field
        c                             strength, with sizing="paper"
        κ                             power
        uf, the update frequency      every
        γ, ρ, β_min of the rate       slope, delay, least_rate
        the limit of the gain λ, 1    max_gain

    >>> Control.push().strength, Control.push().step
    (-0.5, 0.5)
    >>> Control.push(0.3, every=2)
    Control.push(0.3, every=2)
    """

    strength: float
    """How hard to pull live toward the average. Below 0: how hard to push it away (sizing="uniform")."""
    sizing: Sizing
    """What the strength is multiplied by: "paper": lr/(√v̂ + eps) of each coordinate; "uniform": nothing."""
    power: float
    """The averaging rate at step t is t^−power: 1 averages all steps alike, 0 makes the average live."""
    return_power: float | None = None
    """The power of a second average, which is returned and never steers. None: the first one is returned."""
    step: float = 1.0
    """The factor on the base's learning rate. A push or pull of R has 1 + R, so that lr keeps its meaning."""
    grow: int = 0
    """The step at which a growing strength is full, usually the last one. 0: it is always full."""
    every: int = 1
    """Averages move at every n-th step."""
    pull_every: int | None = None
    """Live is pulled at every n-th step. None: whenever averages move."""
    slope: float = 1.0
    delay: float = 0.0
    least_rate: float = 0.0
    """The averaging rate is max(least_rate, (1 + slope · max(0, t − delay))^−power)."""
    max_gain: float = 1.0
    """The clip of the gain; inf for none."""
    gap: Gap = "before"
    """Whether the gap between average and live is read before or after the base's step."""
    order: Order = "pull, then average"
    """Whether the average moves after the pull, or before it."""

    def __post_init__(self) -> None:
        check({name: getattr(self, name) for name in _FIELDS})
        check({"strength": self.strength}, {"strength": _STRENGTHS[self.sizing]})
        require(math.isfinite(self.strength) or not self.grow, "strength", self.strength, "finite, to grow")

    def __repr__(self) -> str:
        uniform = "push" if self.strength < 0 else "pull" if self.strength > 0 else "none"
        kind = "paper" if self.sizing == "paper" else uniform
        make = getattr(Control, kind)
        size = [] if self.strength == make(grow=self.grow).strength else [abs(self.strength)]
        usual = make(*size, grow=self.grow)  # which says the step, too
        odd = [n for n in _FIELDS if getattr(self, n) != getattr(usual, n) or (n == "grow" and self.grow)]
        others = [f"{name}={getattr(self, name)!r}" for name in odd]
        return f"Control.{kind}({', '.join([*map(str, size), *others])})"

    @classmethod
    def paper(cls, c: float = 3e-3, power: float = 0.5, **further: Any) -> "Control":
        """Return Algorithm 1 of the paper: a pull of c · lr/(√v̂ + eps) toward the returned average."""
        return cls(strength=c, sizing="paper", power=power, **further)

    @classmethod
    def push(
        cls,
        strength: float | None = None,
        power: float = 0.6,
        return_power: float | None = 0.7,
        *,
        grow: int = 0,
        **further: Any,
    ) -> "Control":
        """Return a push away from the average, as EMA-Nesterov, GPA and SNOO have it in other forms.

        Arguments:
            strength: how hard, from 0 to below 1. None: .75 if it grows, .5 if it does not.
            power: how short the average is that steers.
            return_power: how long the average is that is returned; None returns the one that steers.
            grow: the steps of the run (recommended). The noise of steps is kept, and drift gains speed
                evenly, up to 1/(1 − strength) times. 0: from the first step on the noise is 1 − strength
                times as large, and drift keeps its speed.
            further: other fields of `Control`.
        """
        strength = (0.75 if grow else 0.5) if strength is None else strength
        ok = is_number(strength) and 0 <= strength < 1
        require(ok, "strength", strength, "0 <= strength < 1 of a push")
        own = {"step": 1.0 if grow else 1 - strength, "grow": grow, **further}
        return cls(strength=-strength, sizing="uniform", power=power, return_power=return_power, **own)

    @classmethod
    def pull(
        cls, strength: float = 1.0, power: float = 0.2, return_power: float | None = 0.7, **further: Any
    ) -> "Control":
        """Return a pull toward the average, the same for all coordinates."""
        require(is_number(strength) and strength >= 0, "strength", strength, ">= 0")
        own = {"step": 1 + strength if math.isfinite(strength) else 1.0, **further}
        return cls(strength=strength, sizing="uniform", power=power, return_power=return_power, **own)

    @classmethod
    def none(cls, power: float = 0.7, **further: Any) -> "Control":
        """Return no control: training is the base's, bit for bit, and an average is kept beside it."""
        return cls(strength=0.0, sizing="uniform", power=power, **further)

    def rate(self, t: int, power: float) -> float:
        """Return the rate of an average of this power at step t = 1, 2, …

        >>> Control.paper().rate(3, power=0.5)
        0.5
        """
        decayed: float = (1.0 + self.slope * max(0.0, t - self.delay)) ** -power
        return max(decayed, self.least_rate)

    def strength_at(self, t: int) -> float:
        """Return the strength at step t = 1, 2, …

        >>> [round(Control.push(0.5, grow=4).strength_at(t), 2) for t in (1, 2, 4, 5)]
        [-0.2, -0.33, -0.5, -0.5]
        """
        left = 1 - t / self.grow if t < self.grow else 0.0
        return self.strength * (1 - left) / (1 + self.strength * left) if left else self.strength

    @property
    def powers(self) -> tuple[float, float]:
        """The powers of the averages that are kept: where nothing is steered, both are the returned one's."""
        returned = self.power if self.return_power is None else self.return_power
        return (self.power if self.strength != 0 else returned), returned

    @property
    def averages(self) -> tuple[str, ...]:
        """The names of the averages that are kept: the one that steers, and the last is returned."""
        has_two = self.strength != 0 and self.return_power not in (None, self.power)
        return ("average", "returned") if has_two else ("average",)


_FIELDS = tuple(field.name for field in fields(Control))


# --- Of a parameter group -----------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of one parameter group's step."""

    lr: float | Tensor
    """A tensor stays one: torch's AdamW rounds what it computes from it to its precision."""
    control: Control
    betas: tuple[float, float] = (0.0, 0.0)
    eps: float = 0.0
    weight_decay: float = 0.0
    maximize: bool = False

    @staticmethod
    def of(group: Mapping[str, Any]) -> "Settings":
        """Return the settings of a parameter group, checked."""
        check(group)
        return Settings(**{field.name: group[field.name] for field in fields(Settings)})
