"""Optimizers, schedules and averages from their names, checked before any model is built."""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline import schedules
from paceline.groups import parameter_groups
from paceline.lm.loop import View
from paceline.optim import (
    BEMA,
    PACE,
    Control,
    HalfLife,
    PowerLaw,
    attach,
    averaged_weights,
)
from paceline.optim.attach import PREFIX
from paceline.optim.averages import Average, Parts
from paceline.optim.baselines import AdEMAMix, ema_nesterov, gpa, lookahead, schedule_free
from paceline.optim.settings import require
from paceline.optim.weights import has_keeper
from paceline.runs import names
from paceline.runs.config import ConfigError, Run, returned_of

T = TypeVar("T")


class MissingPackageError(ConfigError):
    """An optimizer of a package that is not installed."""


# --- What names make ----------------------------------------------------------------------------------


def _schedule_free(groups: list[dict[str, Any]], **settings: Any) -> Optimizer:
    try:
        from schedulefree import AdamWScheduleFree  # type: ignore[import-untyped]
    except ImportError:
        raise MissingPackageError("schedule_free needs its package: pip install schedulefree") from None
    base: Optimizer = AdamWScheduleFree(groups, **settings)
    return schedule_free(base)


@final
@dataclass(frozen=True)
class Seldom:
    """An average that moves at multiples of `every` steps, as the paper's EMAs with uf > 1 do."""

    average: Average
    every: int

    def __post_init__(self) -> None:
        whole = isinstance(self.every, int) and not isinstance(self.every, bool)
        require(whole and self.every >= 1, "every", self.every, "an integer >= 1")

    @property
    def parts(self) -> tuple[str, ...]:
        return self.average.parts

    def move_(self, parts: Parts, lives: list[Tensor], t: int) -> None:
        if t % self.every == 0:
            self.average.move_(parts, lives, t)

    def returned(self, parts: Mapping[str, Tensor], live: Tensor) -> Tensor:
        return self.average.returned(parts, live)


def _power(power: float, every: int = 1) -> Average:
    """Return the average of PACE, taken in at every step or at every n-th one."""
    return PowerLaw(power) if every == 1 else Seldom(PowerLaw(power), every)


def _linear(optimizer: Optimizer, *, steps: int, warmup: int) -> LRScheduler:
    """Return a schedule that goes to 0 from the end of the warm-up on."""
    return schedules.wsd(optimizer, steps=steps, warmup=warmup, decay=1 - warmup / steps)


BASES: dict[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "ademamix": AdEMAMix,
    "pace": PACE,
    "schedule_free": _schedule_free,
    "sgd": torch.optim.SGD,
}
AROUND_ADAMW: dict[str, Callable[..., Optimizer]] = {
    "lookahead": lookahead,
    "gpa": gpa,
    "ema_nesterov": ema_nesterov,
}
AVERAGES: dict[str, Callable[..., Average]] = {
    "ema": _power,
    "short_ema": _power,
    "power": _power,
    "half_life": HalfLife,
    "bema": BEMA,
}
SCHEDULES: dict[str, Callable[..., LRScheduler]] = {
    "constant": schedules.constant,
    "inverse_sqrt": schedules.inverse_sqrt,
    "cosine": schedules.cosine,
    "linear": _linear,
    "wsd": schedules.wsd,
}
# What Schedule-Free and EMA-Nesterov remember in their groups, next to their settings.
REMEMBERED = ("k", "weight_sum", "lr_max", "scheduled_lr", "train_mode", "largest_lr")


# --- Optimizers -----------------------------------------------------------------------------------------


def make_optimizer(run: Run, model: nn.Module, steps: int) -> Optimizer:
    """Return the optimizer of a run of that many steps, with the averages that are kept next to it."""
    name = names.parse(run.method)
    word, horizon = name.optimizer.word, run.horizon or steps
    settings, steering = name.arguments(horizon)
    decay = _plain(word, "weight_decay", settings.pop("weight_decay", None))
    groups = _called(word, partial(parameter_groups, model, decay))
    control = _control(name.control, steering)
    if word == "pace":
        settings["control"] = control
    is_adamw = word == "adamw" or word in AROUND_ADAMW
    if is_adamw and groups[0]["params"][0][1].is_cuda:
        settings = {"fused": True, **settings}  # torch's fast path on a GPU, and not its default
    if word in AROUND_ADAMW:
        around = AROUND_ADAMW[word]
        own = {key: settings.pop(key) for key in inspect.signature(around).parameters if key in settings}
        base = _called(word, partial(BASES["adamw"], groups, lr=run.lr, **settings))
        return _called(word, partial(around, base, **own))
    made = _called(word, partial(BASES[word], groups, lr=run.lr, **settings))
    if word in ("pace", "schedule_free") or (control is None and not run.averages):
        return made
    return _called(word, partial(_attached, made, run, control, horizon, steering))


def _control(kind: str | None, settings: dict[str, Any]) -> Control | None:
    if kind is None:
        return None
    given = {key: value for key, value in settings.items() if key != "average_dtype"}
    make: Callable[..., Control] = getattr(Control, kind)
    return _called(kind, partial(make, **given))


def _attached(
    optimizer: Optimizer, run: Run, control: Control | None, horizon: int, steering: dict[str, Any]
) -> Optimizer:
    """Attach a control and averages; without a control the first average of a power law takes its place."""
    averages, kept = make_averages(run, horizon), kept_as(run)
    if control is None:
        own = next((average for label, average in averages.items() if kept[label] == "average"), None)
        control = Control.none(own.power) if isinstance(own, PowerLaw) else Control.none()
    others = {label: average for label, average in averages.items() if kept[label] == label}
    precision = {key: value for key, value in steering.items() if key == "average_dtype"}
    return attach(optimizer, control=control, averages=others, **precision)


# --- Averages and schedules -----------------------------------------------------------------------------


def make_averages(run: Run, horizon: int) -> dict[str, Average]:
    """Return the averages that a run keeps next to its optimizer, by label."""
    averages = {}
    for label, spec in names.averages_of(run.averages).items():
        settings = spec.completed(names.AVERAGES[spec.word], horizon)
        averages[label] = _called(spec.word, partial(AVERAGES[spec.word], **settings))
    return averages


def kept_as(run: Run) -> dict[str, str]:
    """Return under which name the optimizer keeps each of these averages."""
    kept = {label: label for label in names.averages_of(run.averages)}
    power_laws = [label for label, average in make_averages(run, 1).items() if isinstance(average, PowerLaw)]
    if power_laws and names.parse(run.method).control is None:
        kept[power_laws[0]] = "average"
    return kept


def make_schedule(run: Run, optimizer: Optimizer, steps: int) -> LRScheduler:
    """Return the schedule of a run of that many steps."""
    spec = names.schedule_of(run.schedule)
    make = SCHEDULES[spec.word]
    length = {"steps": steps} if "steps" in inspect.signature(make).parameters else {}
    warmup = min(run.warmup, (run.horizon or steps) // 10)
    return _called(spec.word, partial(make, optimizer, warmup=warmup, **length, **spec.settings))


def make_views(run: Run, optimizer: Optimizer, model: nn.Module) -> tuple[dict[str, View], str]:
    """Return the weights of the model to evaluate, by name, and the name of those that are returned."""
    views: dict[str, View] = {"live": nullcontext}
    if has_keeper(optimizer) and (names.parse(run.method).control is not None or not run.averages):
        views["average"] = partial(averaged_weights, optimizer, model=model)
    for label, name in kept_as(run).items():
        views[label] = partial(averaged_weights, optimizer, name, model=model)
    return views, returned_of(views)


def control_of(run: Run, steps: int) -> Control | None:
    """Return the control of a run of that many steps; None without one."""
    name = names.parse(run.method)
    return _control(name.control, name.arguments(run.horizon or steps)[1])


def memory_of(run: Run, optimizer: Optimizer) -> tuple[int, dict[str, int]]:
    """Return the bytes of an optimizer's state without averages kept next to it, and of each of those."""
    sizes: Counter[str] = Counter()
    for state in optimizer.state_dict()["state"].values():
        for key, value in state.items():
            sizes[key] += value.nbytes if isinstance(value, Tensor) else 0
    averages = make_averages(run, 1)
    beside = {}
    for label, name in kept_as(run).items():
        parts = [""] if name == "average" else [f"_{part}" for part in averages[label].parts]
        beside[label] = sum(sizes.pop(f"{PREFIX}{name}{part}", 0) for part in parts)
    return sum(sizes.values()), beside


def check_methods(run: Run) -> None:
    """Build all of it around one number: what is wrong with a value shows before a model is built."""
    model, steps = nn.Linear(1, 1), max(run.steps or 1000, 20)
    optimizer = make_optimizer(run, model, steps)
    make_schedule(run, optimizer, steps)
    control = control_of(run, steps)
    if run.telemetry_every is not None and (control is None or control.strength == 0):
        raise ConfigError(
            f"telemetry_every reads what a control does; {run.method} has none, and pace and pace+push do"
        )
    if isinstance(optimizer, PACE):  # what one pass takes depends on the device, and the run's may be another
        for group in optimizer.param_groups:
            group["fused"] = None
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    # Where torch checks some settings for the first time.
    _called(run.method, optimizer.step)


# --- Messages ---------------------------------------------------------------------------------------


def _plain(name: str, key: str, value: Any) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ConfigError(f"{name}: {key} is {value!r}; allowed: a number")
    return value


def _called(name: str, make: Callable[[], T]) -> T:
    """Return what a constructor gives; say in one line what it refuses."""
    try:
        return make()
    except ConfigError:
        raise
    except Exception as error:  # optimizers of others check little and fail in any way
        raise ConfigError(f"{name}: {' '.join(str(error).split())}") from None
