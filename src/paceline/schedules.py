"""Learning-rate schedules: constant, 1/√t, cosine, WSD, each after a linear warm-up.

A schedule multiplies each group's learning rate by a factor, which depends only on the step number k. This is
the number of `scheduler.step()` calls before an optimizer step, and 0 at the first. With

.. code-block:: text

    for batch in batches:
        train_on(batch)
        optimizer.step()
        scheduler.step()

the optimizer step number k has the rate lr · factor(k). For k < warmup the factor is (k + 1) / warmup: the
first step has 1/warmup of the rate, never 0, and the last step of the warm-up has the full rate.

Each function returns an ordinary torch scheduler. Its factor is an instance of a small class, which can be
called, plotted or given to another `LambdaLR`. To resume, build optimizer and scheduler as before, then load
both states. The scheduler's state includes its settings (steps, warmup, …), which replace those that it was
built with.
"""

import math
from dataclasses import dataclass
from numbers import Integral
from typing import final

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from paceline.optim.settings import is_number, require

# --- Factors --------------------------------------------------------------------------------------
# No slots: LambdaLR saves the __dict__ of a factor, and loads it by updating that.


@final
@dataclass(frozen=True, kw_only=True)
class Constant:
    """The factor (k + 1) / warmup for k < warmup, and 1 from then on.

    >>> [Constant(warmup=2)(k) for k in range(4)]
    [0.5, 1.0, 1.0, 1.0]
    """

    warmup: int = 0

    def __post_init__(self) -> None:
        _set_count(self, "warmup", self.warmup, at_least=0)

    def __call__(self, step: int) -> float:
        return (step + 1) / self.warmup if step < self.warmup else 1.0


@final
@dataclass(frozen=True, kw_only=True)
class InverseSqrt:
    """The factor (k + 1) / warmup for k < warmup, then √(timescale / (timescale + k − warmup)).

    The timescale is the number of steps after the warm-up until the factor is 1/√2. None stands for the
    length of the warm-up, so that the factor is √(warmup / k), or for 1 without a warm-up: 1/√(k + 1).

    >>> [InverseSqrt()(k) for k in (0, 3, 99)]
    [1.0, 0.5, 0.1]
    >>> [InverseSqrt(warmup=2)(k) for k in (0, 1, 2, 8)]
    [0.5, 1.0, 1.0, 0.5]
    """

    warmup: int = 0
    timescale: float | None = None

    def __post_init__(self) -> None:
        _set_count(self, "warmup", self.warmup, at_least=0)
        if self.timescale is not None:
            ok = is_number(self.timescale) and 0.0 < self.timescale < math.inf
            require(ok, "timescale", self.timescale, "None, or > 0 and finite")
            object.__setattr__(self, "timescale", float(self.timescale))

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        timescale = max(self.warmup, 1) if self.timescale is None else self.timescale
        return math.sqrt(timescale / (timescale + step - self.warmup))


@final
@dataclass(frozen=True, kw_only=True)
class Cosine:
    """The factor (k + 1) / warmup for k < warmup, then ½ (1 + cos(π (k − warmup) / (steps − warmup))).

    It is 1 at k = warmup, above 0 at the last step, k = steps − 1, and 0 from k = steps on.

    >>> [round(Cosine(steps=4)(k), 6) for k in range(6)]
    [1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0]
    """

    steps: int
    warmup: int = 0

    def __post_init__(self) -> None:
        _set_count(self, "steps", self.steps, at_least=1)
        _set_count(self, "warmup", self.warmup, at_least=0)
        require(self.warmup < self.steps, "warmup", self.warmup, f"< steps = {self.steps}")

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        left = max(self.steps - step, 0) / (self.steps - self.warmup)
        # Equal to the docstring's formula, in which 1 + cos would cancel near the end and reach 0 too early.
        return math.sin(0.5 * math.pi * left) ** 2


@final
@dataclass(frozen=True, kw_only=True)
class WSD:
    """The factor (k + 1) / warmup for k < warmup, then min(1, (steps − k) / n), n = round(decay · steps).

    Warm-up, stable, decay: it is 1 up to k = steps − n, then linear. It is 1/n at the last step,
    k = steps − 1, and 0 from k = steps on. n is at least 1.

    >>> [WSD(steps=8, decay=0.5, warmup=2)(k) for k in range(10)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """

    steps: int
    decay: float = 0.2
    warmup: int = 0

    def __post_init__(self) -> None:
        _set_count(self, "steps", self.steps, at_least=1)
        _set_count(self, "warmup", self.warmup, at_least=0)
        ok = is_number(self.decay) and 0.0 < self.decay <= 1.0
        require(ok, "decay", self.decay, "0 < decay <= 1, a fraction of steps")
        object.__setattr__(self, "decay", float(self.decay))
        stable_end = self.steps - self.decay_steps
        require(self.warmup <= stable_end, "warmup", self.warmup, f"<= {stable_end}, where decay begins")

    @property
    def decay_steps(self) -> int:
        """The number of steps of the decay."""
        return max(round(self.decay * self.steps), 1)

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        return min(max(self.steps - step, 0) / self.decay_steps, 1.0)


# --- Schedulers -----------------------------------------------------------------------------------


def constant(optimizer: Optimizer, *, warmup: int = 0) -> LRScheduler:
    """Return a scheduler with linear warm-up, then the full rate; `Constant` has the factor.

    >>> import torch, paceline
    >>> from paceline import schedules
    >>> optimizer = paceline.PACE(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    >>> scheduler = schedules.constant(optimizer, warmup=4)
    >>> scheduler.get_last_lr()
    [0.025]
    """
    return _scheduler(optimizer, Constant(warmup=warmup))


def inverse_sqrt(optimizer: Optimizer, *, warmup: int = 0, timescale: float | None = None) -> LRScheduler:
    """Return a scheduler with linear warm-up, then an endless decay like 1/√t; `InverseSqrt` has the factor.

    >>> import torch, paceline
    >>> from paceline import schedules
    >>> optimizer = paceline.PACE(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    >>> scheduler = schedules.inverse_sqrt(optimizer, warmup=100)
    """
    return _scheduler(optimizer, InverseSqrt(warmup=warmup, timescale=timescale))


def cosine(optimizer: Optimizer, *, steps: int, warmup: int = 0) -> LRScheduler:
    """Return a scheduler with linear warm-up, then half a cosine to 0 at `steps`; `Cosine` has the factor.

    >>> import torch, paceline
    >>> from paceline import schedules
    >>> optimizer = paceline.PACE(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    >>> scheduler = schedules.cosine(optimizer, steps=1000, warmup=50)
    """
    return _scheduler(optimizer, Cosine(steps=steps, warmup=warmup))


def wsd(optimizer: Optimizer, *, steps: int, decay: float = 0.2, warmup: int = 0) -> LRScheduler:
    """Return a scheduler with linear warm-up, the full rate, then a linear decay to 0; `WSD` has the factor.

    `decay` is the length of the decay as a fraction of `steps`.

    >>> import torch, paceline
    >>> from paceline import schedules
    >>> optimizer = paceline.PACE(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    >>> scheduler = schedules.wsd(optimizer, steps=1000, decay=0.2, warmup=50)
    """
    return _scheduler(optimizer, WSD(steps=steps, decay=decay, warmup=warmup))


def _scheduler(optimizer: Optimizer, factor: Constant | InverseSqrt | Cosine | WSD) -> LRScheduler:
    if not isinstance(optimizer, Optimizer):  # LambdaLR would raise AttributeError
        raise TypeError(f"{type(optimizer).__name__} is not an Optimizer")
    return LambdaLR(optimizer, factor)


def _set_count(factor: object, name: str, value: int, at_least: int) -> None:
    ok = isinstance(value, Integral) and not isinstance(value, bool) and value >= at_least
    require(ok, f"{name}", value, f"an integer >= {at_least}")
    # A plain int: torch.load(weights_only=True) refuses NumPy's, which sweeps use.
    object.__setattr__(factor, name, int(value))
