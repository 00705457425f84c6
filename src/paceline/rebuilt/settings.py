"""What a user may set: how training is steered, and which average is returned."""

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


def _between(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: is_number(value) and low <= value <= high


def _one_of(choices: tuple[object, ...]) -> Callable[[Any], bool]:
    return lambda value: any(value is choice or value == choice for choice in choices)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_LARGEST = 1e308
_SWITCH = (_one_of((None, True, False)), "None, True or False")
ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (_between(0.0, _LARGEST), "0 <= lr < inf, a number or a 1-element Tensor"),
    "eps": (_between(0.0, _LARGEST), ">= 0 and finite"),
    "weight_decay": (_between(0.0, _LARGEST), ">= 0 and finite"),
    "maximize": (lambda value: isinstance(value, bool), "True or False"),
    "foreach": _SWITCH,
    "fused": _SWITCH,
    "average_dtype": (_one_of(get_args(AverageDtype)), ", ".join(map(repr, get_args(AverageDtype)))),
    "sizing": (_one_of(get_args(Sizing)), ", ".join(map(repr, get_args(Sizing)))),
    "gap": (_one_of(get_args(Gap)), ", ".join(map(repr, get_args(Gap)))),
    "order": (_one_of(get_args(Order)), ", ".join(map(repr, get_args(Order)))),
    "power": (_between(0.0, 1.0), "0 <= power <= 1"),
    "return_power": (lambda v: v is None or _between(0.0, 1.0)(v), "None, or 0 <= return_power <= 1"),
    "step": (lambda v: is_number(v) and 0 < v <= _LARGEST, "> 0 and finite"),
    "every": (_is_count, "an integer >= 1"),
    "pull_every": (lambda v: v is None or _is_count(v), "None, or an integer >= 1"),
    "slope": (_between(0.0, _LARGEST), ">= 0 and finite"),
    "delay": (_between(0.0, _LARGEST), ">= 0 and finite"),
    "least_rate": (_between(0.0, 1.0), "0 <= least_rate <= 1"),
    "max_gain": (lambda v: is_number(v) and v > 0, "> 0 (inf: unclipped)"),
}
"""Each setting's check, and what a message says is allowed."""


def check(settings: Mapping[str, Any]) -> None:
    """Raise ValueError for the first setting that is out of range."""
    for name, value in settings.items():
        if name == "betas":
            _check_betas(value)
        elif name in ALLOWED:
            if isinstance(value, Tensor) and value.numel() == 1:
                value = value.item()
            ok, allowed = ALLOWED[name]
            require(ok(value), name, value, allowed)


def _check_betas(betas: Any) -> None:
    require(isinstance(betas, tuple | list) and len(betas) == 2, "betas", betas, "two floats")
    for i, beta in enumerate(betas):
        require(is_number(beta) and 0.0 <= beta < 1.0, f"betas[{i}]", beta, "0 <= beta < 1")


# --- The control --------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """How training is steered for the average, and which average is returned.

    Make one with `paper`, `push`, `pull` or `none`. A field that is left out means Algorithm 1 of the paper.

    ============================  ==========================================================
    the paper's letter            field
    ============================  ==========================================================
    c                             strength, with sizing="paper"
    κ                             power
    uf (update frequency)         every
    γ, ρ of (1 + γ (t − ρ))^−κ    slope, delay
    β_min                         least_rate
    the clip of the gain λ at 1   max_gain
    ============================  ==========================================================

    >>> Control.push().strength, Control.push().step
    (-0.5, 0.5)
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
        check({field.name: getattr(self, field.name) for field in fields(self)})
        if self.sizing == "paper":
            ok = is_number(self.strength) and self.strength >= 0
            require(ok, "strength", self.strength, '>= 0 with sizing="paper" (inf: every gain at its limit)')
        else:
            ok = is_number(self.strength) and self.strength > -1
            require(ok, "strength", self.strength, '> -1 with sizing="uniform"; below 0 it pushes')

    @classmethod
    def paper(cls, c: float = 3e-3, power: float = 0.5, **further: Any) -> "Control":
        """Return Algorithm 1 of the paper: a pull of c · lr/(√v̂ + eps) toward the average that is
        returned."""
        return cls(strength=c, sizing="paper", power=power, **further)

    @classmethod
    def push(
        cls, strength: float = 0.5, power: float = 0.6, return_power: float | None = 0.7, **further: Any
    ) -> "Control":
        """Return a push away from the average. A strength of .5 halves the noise of steps and keeps their
        drift.

        EMA-Nesterov, GPA and SNOO push in other forms.
        """
        require(
            is_number(strength) and 0 <= strength < 1, "strength", strength, "0 <= strength < 1 of a push"
        )
        own = {"step": 1 - strength, **further}
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

    def rate(self, t: float, power: float) -> float:
        """Return the rate of an average of this power at step t = 1, 2, …

        >>> Control.paper(power=0.5).rate(3, 0.5)
        0.5
        """
        decayed: float = (1.0 + self.slope * max(0.0, t - self.delay)) ** -power
        return max(decayed, self.least_rate)

    @property
    def averages(self) -> tuple[str, ...]:
        """The names of the averages that are kept; the last one is returned."""
        second = self.return_power is not None and not (
            self.strength != 0 and self.return_power == self.power
        )
        return ("average", "returned") if second and self.strength != 0 else ("average",)

    @property
    def returned(self) -> str:
        """The name of the average that is returned."""
        return self.averages[-1]


# --- In param_groups ----------------------------------------------------------------------------------

PREFIX = "control_"
_CONTROL = tuple(field.name for field in fields(Control))


def flat(control: Control) -> dict[str, Any]:
    """Return a control as plain values for `param_groups`, which weights-only loading takes."""
    return {PREFIX + name: getattr(control, name) for name in _CONTROL}


def control_of(group: Mapping[str, Any]) -> Control:
    """Return the control of a parameter group, checked."""
    return Control(**{name: group[PREFIX + name] for name in _CONTROL})


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the step of one parameter group needs to know."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    maximize: bool
    control: Control

    @staticmethod
    def of(group: Mapping[str, Any]) -> "Settings":
        """Return the settings of a group; a learning rate that is a tensor is read here."""
        plain = {name: group[name] for name in ("betas", "eps", "weight_decay", "maximize")}
        return Settings(lr=float(group["lr"]), control=control_of(group), **plain)
