"""Passive averages beside any optimizer: several at once, for evaluation and as baselines."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from paceline.optim.checks import is_number, require
from paceline.optim.foreach import chunks, move_averages_
from paceline.optim.loading import Format
from paceline.optim.rule import averaging_rate
from paceline.optim.state import State, take_averages
from paceline.optim.weights import show_computed_, show_kept_
from paceline.optim.wrapper import Wrapper, is_schedule_free

Parts = dict[str, list[Tensor]]


@runtime_checkable
class Average(Protocol):
    """One way to average. A tensor's memory is a few `parts` like it, all live before the first step."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of what is kept."""

    def move_(self, parts: Parts, lives: list[Tensor], t: int) -> None:
        """Take in the live weights after step t = 1, 2, …; a list entry a tensor."""

    def returned(self, parts: Mapping[str, Tensor], live: Tensor) -> Tensor:
        """The average itself, for one tensor."""


class _ByRate:
    """average ← (1 − rate) · average + rate · live at every step; `rate(t)` is all there is to say."""

    parts = ("average",)

    def rate(self, t: int) -> float:
        raise NotImplementedError

    def move_(self, parts: Parts, lives: list[Tensor], t: int) -> None:
        move_averages_(parts["average"], lives, [self.rate(t)] * len(lives))

    def returned(self, parts: Mapping[str, Tensor], live: Tensor) -> Tensor:
        return parts["average"]


@final
@dataclass(frozen=True)
class PowerLaw(_ByRate):
    """The average of PACE: rate (offset + scale · t)^-power, power κ from 0 (live) to 1 (uniform).

    With every = n it takes in the weights of every n-th step only, as PACE does with update_every = n.

    >>> PowerLaw(0.5).rate(3)
    0.5
    >>> [PowerLaw(0.5, every=3).rate(t) for t in (1, 2, 3)]
    [0.0, 0.0, 0.5]
    """

    power: float
    offset: float = 1.0
    scale: float = 1.0
    every: int = 1

    def __post_init__(self) -> None:
        require(is_number(self.power) and 0 <= self.power <= 1, "power value", self.power, "0 <= power <= 1")
        first = self.offset + self.scale
        require(min(self.offset, self.scale) >= 0 and first >= 1, "offset + scale", first, ">= 1, both >= 0")
        whole = isinstance(self.every, int) and not isinstance(self.every, bool)
        require(whole and self.every >= 1, "every value", self.every, "an integer >= 1")

    def rate(self, t: int) -> float:
        return 0.0 if t % self.every else float(averaging_rate(t, self.power, self.offset, self.scale))


@final
@dataclass(frozen=True)
class Polynomial(_ByRate):
    """The mean of the iterates 1 … t with weights ∝ s^power: a window that grows with the run.

    power 0 is the uniform mean; for large powers the last 1/power of the run counts.

    >>> Polynomial(1).rate(2) == 2 / (1 + 2)
    True
    """

    power: float

    def __post_init__(self) -> None:
        ok = is_number(self.power) and 0 <= self.power <= 30
        require(ok, "power value", self.power, "0 <= power <= 30")

    def rate(self, t: int) -> float:
        return float(t**self.power / _power_sum(t, self.power))


_sums: dict[float, dict[int, float]] = {}


def _power_sum(t: int, power: float) -> float:
    """1^power + … + t^power, added in this order also when it goes on from an earlier call.

    The last few sums are kept: parameters may be of different ages.
    """
    known = _sums.setdefault(power, {})
    start = max((s for s in known if s <= t), default=0)
    total = known.pop(start, 0.0)
    for s in range(start + 1, t + 1):
        total += s**power
    known[t] = total
    if len(known) > 64:
        known.pop(next(iter(known)))
    return total


@final
@dataclass(frozen=True)
class FixedDecay(_ByRate):
    """An EMA of fixed decay: average ← decay · average + (1 − decay) · live.

    Up to step `start` the average is live; it begins there, without a bias to correct.

    >>> FixedDecay(0.75, start=10).rate(10), FixedDecay(0.75, start=10).rate(11)
    (1.0, 0.25)
    """

    decay: float
    start: int = 0

    def __post_init__(self) -> None:
        ok = is_number(self.decay) and 0 <= self.decay <= 1
        require(ok, "decay value", self.decay, "0 <= decay <= 1")
        require(isinstance(self.start, int) and self.start >= 0, "start value", self.start, "an integer >= 0")

    def rate(self, t: int) -> float:
        return 1.0 if t <= self.start else 1 - self.decay


@final
@dataclass(frozen=True)
class HalfLife(_ByRate):
    """An EMA whose half-life is a fraction of the steps taken so far: the anytime average.

    After t steps an iterate loses half its weight in fraction · t further ones.

    >>> round(HalfLife(0.1).rate(10), 12)  # half-life 1
    0.5
    """

    fraction: float

    def __post_init__(self) -> None:
        ok = is_number(self.fraction) and 0 < self.fraction < math.inf
        require(ok, "fraction value", self.fraction, "> 0 and finite")

    def rate(self, t: int) -> float:
        return float(-math.expm1(-math.log(2) / (self.fraction * t)))


@final
@dataclass(frozen=True)
class BEMA:
    """Bias-corrected EMA (Block & Zhang, arXiv 2508.00180), with the settings of its paper.

    Every `every` steps: rate = max((offset + scale · t)^-power, min_rate); ema moves to live by it, and
    what is returned is ema + (offset + scale · t)^-bias_power · (live − live_0). Keeps three tensors.
    """

    power: float = 0.5  # κ
    bias_power: float = 0.2  # η
    offset: float = 10.0  # ρ
    scale: float = 1.0  # γ
    every: int = 400
    min_rate: float = 0.0

    parts = ("average", "ema", "start")

    def __post_init__(self) -> None:
        require(is_number(self.power) and 0 <= self.power <= 1, "power value", self.power, "0 <= power <= 1")
        ok = is_number(self.bias_power) and 0 <= self.bias_power < math.inf
        require(ok, "bias_power value", self.bias_power, ">= 0 and finite")
        require(isinstance(self.every, int) and self.every >= 1, "every value", self.every, "an integer >= 1")
        first = self.offset + self.scale
        require(min(self.offset, self.scale) >= 0 and first >= 1, "offset + scale", first, ">= 1, both >= 0")
        require(0 <= self.min_rate <= 1, "min_rate value", self.min_rate, "0 <= min_rate <= 1")

    def move_(self, parts: Parts, lives: list[Tensor], t: int) -> None:
        if t % self.every:
            return
        rate = max(float(averaging_rate(t, self.power, self.offset, self.scale)), self.min_rate)
        move_averages_(parts["ema"], lives, [rate] * len(lives))
        correction = float(averaging_rate(t, self.bias_power, self.offset, self.scale))
        drifts = torch._foreach_neg(parts["start"])
        torch._foreach_add_(drifts, lives)
        for average, ema in zip(parts["average"], parts["ema"], strict=True):
            average.copy_(ema)  # sharded tensors have no copy of lists
        torch._foreach_add_(parts["average"], drifts, alpha=correction)

    def returned(self, parts: Mapping[str, Tensor], live: Tensor) -> Tensor:
        return parts["average"]


@final
@dataclass(frozen=True)
class Blend:
    """(1 − share) · live + share · another average: the tail blend used after a learning-rate decay.

    E.g. Blend(FixedDecay(1 - 1 / 150, start=2400), share=0.6), modded-nanogpt's pull request 325.
    """

    average: Average
    share: float

    def __post_init__(self) -> None:
        ok = is_number(self.share) and 0 <= self.share <= 1
        require(ok, "share value", self.share, "0 <= share <= 1")

    @property
    def parts(self) -> tuple[str, ...]:
        return self.average.parts

    def move_(self, parts: Parts, lives: list[Tensor], t: int) -> None:
        self.average.move_(parts, lives, t)

    def returned(self, parts: Mapping[str, Tensor], live: Tensor) -> Tensor:
        average = self.average.returned(parts, live)
        return torch.lerp(live.to(average.dtype), average, self.share)


# --- Beside an optimizer ----------------------------------------------------------------------------


@final
class Averages(Wrapper):
    """Several averages of the live weights beside any optimizer; training is not changed by them.

    It is an Optimizer: it steps its base, the averages are part of its state, and so of every checkpoint.
    `averages[name]` can be given wherever an optimizer is asked for its average: `averaged_weights`,
    `averaged_state_dict`, `save_averaged`. The optimizer itself stands for the first of them.

    While an average is shown, one copy of the live weights is kept.

    Arguments:
        base: any optimizer, PACE included.
        averages: name → `PowerLaw`, `Polynomial`, `FixedDecay`, `HalfLife`, `BEMA` or a `Blend` of one.

    >>> import torch, paceline
    >>> from paceline.optim.averages import Averages, HalfLife, PowerLaw
    >>> model = torch.nn.Linear(2, 1)
    >>> base = torch.optim.AdamW(model.parameters(), lr=1e-2)
    >>> optimizer = Averages(base, {"short": PowerLaw(0.5), "long": HalfLife(0.1)})
    >>> model(torch.ones(4, 2)).square().mean().backward()
    >>> optimizer.step()
    >>> for name in optimizer:
    ...     with paceline.averaged_weights(optimizer[name]):
    ...         loss = model(torch.ones(4, 2)).square().mean()
    """

    def __init__(self, base: Optimizer, averages: Mapping[str, Average]) -> None:
        _check_names(base, averages)
        self.averages = dict(averages)
        self._returned_name = next(iter(averages))
        self._by_name = {name: View(self, name) for name in averages}
        self._views = tuple(self._by_name.values())
        wanted = tuple(_key(name, part) for name, average in averages.items() for part in average.parts)
        self.format = Format(
            prefix="averages_",
            reads="Averages loads its own states and those of its base optimizer",
            check=_no_setting_of_ours,
            wanted=partial(_always, wanted),
            on_device=False,
        )
        super().__init__(base, {})

    def __getitem__(self, name: str) -> "View":
        if name not in self.averages:
            raise KeyError(f"no average is called {name!r}; there are: {', '.join(self.averages)}")
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.averages)

    def __getstate__(self) -> dict[str, Any]:
        names = ("averages", "format", "_returned_name", "_by_name", "_views")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    # --- The step ---------------------------------------------------------------------------------

    def _prepare(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        wanted = self.format.wanted(group)
        for parameter in parameters:
            _seed(parameter, self._memory[parameter], wanted)

    def _finish(self, group: dict[str, Any], moved: list[Tensor], prepared: None) -> None:
        tensors = [(parameter, self._memory[parameter]) for parameter in moved]
        for chunk in chunks(tensors, lambda item: (item[0], item[1]["step"].item())):
            states = [state for _, state in chunk]
            lives = [tensor.detach() for tensor, _ in chunk]
            torch._foreach_add_([state["step"] for state in states], 1)
            t = int(states[0]["step"].item())
            for name, average in self.averages.items():
                average.move_({p: [s[_key(name, p)] for s in states] for p in average.parts}, lives, t)

    def _abandon(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Nothing was changed."""

    # --- Showing and loading ----------------------------------------------------------------------

    def _average(self, name: str, parameter: Tensor, state: State, live: Tensor) -> Tensor:
        # A checkpoint may have been made while one was shown that is no longer kept.
        name = name if name in self.averages else self._returned_name
        average = self.averages[name]
        return average.returned({part: state[_key(name, part)] for part in average.parts}, live)

    def _show(self, name: str, parameter: Tensor, state: State) -> None:
        show_computed_(parameter, state, self._average(name, parameter, state, parameter.detach()))

    def _hide(self, parameter: Tensor, state: State) -> None:
        show_kept_(parameter, state)


def _seed(tensor: Tensor, state: State, wanted: tuple[str, ...]) -> None:
    if state["step"] == 0:
        take_averages(tensor, state, wanted)


def _key(name: str, part: str) -> str:
    return f"{name}_{part}"


def _always(wanted: tuple[str, ...], group: dict[str, Any]) -> tuple[str, ...]:
    return wanted


def _no_setting_of_ours(group: dict[str, Any]) -> None:
    """Averages are the same for all groups."""


def _check_names(base: object, averages: Mapping[str, Average]) -> None:
    require(bool(averages), "averages", averages, "at least one, as name → average")
    for name, average in averages.items():
        ok = isinstance(name, str) and name.isidentifier() and name != "live"
        require(ok, "name of an average", name, "a Python identifier other than live")
        if not isinstance(average, Average):
            raise TypeError(
                f"{name} is no average: {average!r}; give e.g. PowerLaw(0.7), HalfLife(0.1) or BEMA()"
            )
    if isinstance(base, Averages):
        raise ValueError("Averages keeps several averages at once; put all of them into one")
    if is_schedule_free(base):
        raise ValueError(
            f"{type(base).__name__} has a mode to be told; put it into ScheduleFree "
            "(paceline.optim.baselines), and that into Averages"
        )


@final
class View:
    """One of several averages, wherever an optimizer is asked for its average."""

    def __init__(self, owner: Averages, name: str) -> None:
        self.owner = owner
        self.name = name

    def returned_averages(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter with this average of it; one whose average is still live is left out."""
        return self.owner._averages_named(self.name)

    def shows_average(self) -> bool:
        """Whether the parameters hold this average at present."""
        return bool(self.owner.param_groups[0][self.owner.format.hold] == self.name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer that keeps it."""
        return self.owner.param_groups

    def eval(self, model: nn.Module | None = None) -> None:
        """Put this average into the parameters; refused while they hold another one."""
        self.owner._notice_stale_load()
        if self.shows_average():
            return
        if self.owner.shows_average():
            raise RuntimeError(
                f"the parameters hold another average; leave its block or call train() before {self.name!r}"
            )
        self.owner._enter(model)
        self.owner._show_all(self.name)

    def train(self) -> None:
        """Put live back into the parameters."""
        self.owner.train()
