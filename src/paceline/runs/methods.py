"""From their names to optimizers, schedules and averages, checked before any model is built."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

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
    Blend,
    Control,
    FixedDecay,
    HalfLife,
    Polynomial,
    PowerLaw,
    attach,
    averaged_weights,
)
from paceline.optim.attach import PREFIX
from paceline.optim.averages import Average
from paceline.optim.baselines import AdEMAMix, ema_nesterov, gpa, lookahead, schedule_free
from paceline.optim.weights import has_keeper
from paceline.runs.config import (
    ConfigError,
    Run,
    check_spec,
    named_averages,
    nearest,
    parse_spec,
    returned_of,
)
from paceline.runs.seldom import Seldom
from paceline.runs.steering import (
    SETTINGS,
    SHORT,
    control_in,
    is_steered,
    named_settings,
    take_control,
)

Groups = list[dict[str, Any]]
T = TypeVar("T")


class MissingPackageError(ConfigError):
    """An optimizer of a package that is not installed."""


# --- Optimizers -------------------------------------------------------------------------------------


BASES: dict[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "ademamix": AdEMAMix,
    "sgd": torch.optim.SGD,
}
"""Optimizers that keep no average: a control and averages are attached to them."""
AROUND_ADAMW: dict[str, Callable[..., Optimizer]] = {
    "lookahead": lookahead,
    "gpa": gpa,
    "ema_nesterov": ema_nesterov,
}
# What Schedule-Free and EMA-Nesterov remember in their groups, beside their settings.
REMEMBERED = ("k", "weight_sum", "lr_max", "scheduled_lr", "train_mode", "largest_lr")
OPTIMIZERS = ("pace", *SHORT, *BASES, *AROUND_ADAMW, "schedule_free", "schedule_free_plus")


def make_optimizer(run: Run, model: nn.Module) -> Optimizer:
    """Return the optimizer of a run, with the averages it asks for beside it."""
    check_spec("optimizer", run.optimizer, OPTIMIZERS)
    name, settings = named_settings(run.optimizer)
    decay = _plain(name, "weight_decay", settings.pop("weight_decay", None))
    groups = _called(name, partial(parameter_groups, model, decay))
    averages = averages_of(run)
    if name not in BASES:
        if averages:
            raise ConfigError(
                f"{name} keeps an average of its own, and no others beside it; leave out averages, or take "
                "another optimizer, as in adamw:control=push"
            )
        return _called(name, partial(_make, name, groups, run.lr, settings))
    return _called(name, partial(_make_attached, name, groups, run, averages, settings))


def _make(name: str, groups: Groups, lr: float, settings: dict[str, Any]) -> Optimizer:
    """Return an optimizer that keeps an average of its own."""
    if name == "pace":
        control = take_control(name, settings)
        assert control is not None  # PACE always has one
        _check_settings(name, settings, PACE)
        return PACE(groups, lr=lr, control=control, **settings)
    if name.startswith("schedule_free"):
        kind = _schedule_free(name)
        _check_settings(name, settings, kind)
        return schedule_free(kind(groups, lr=lr, **settings))
    wrapper = AROUND_ADAMW[name]
    _check_settings(name, settings, wrapper, torch.optim.AdamW)
    own = {key: settings.pop(key) for key in inspect.signature(wrapper).parameters if key in settings}
    return wrapper(_base("adamw", groups, lr, settings), **own)


def _make_attached(
    name: str, groups: Groups, run: Run, averages: dict[str, Average], settings: dict[str, Any]
) -> Optimizer:
    """Return an optimizer that keeps no average by itself, with those attached that the run asks for."""
    control = take_control(name, settings)
    precision = {key: settings.pop(key) for key in ("average_dtype",) if control and key in settings}
    _check_settings(name, settings, BASES[name], *([attach] if control else []))
    optimizer = _base(name, groups, run.lr, settings)
    kept = kept_as(run)
    if control is None and not averages:
        return optimizer
    if control is None:
        # An optimizer with attached averages always keeps one of a power law: the first that is asked for.
        own = next((average for label, average in averages.items() if kept[label] == "average"), None)
        control = Control.none(own.power) if isinstance(own, PowerLaw) else Control.none()
    others = {label: average for label, average in averages.items() if kept[label] == label}
    return attach(optimizer, control=control, averages=others, **precision)


def _base(name: str, groups: Groups, lr: float, settings: dict[str, Any]) -> Optimizer:
    if name == "adamw" and groups[0]["params"][0][1].is_cuda:
        settings = {"fused": True, **settings}  # torch's fast path on a GPU, and not its default
    return BASES[name](groups, lr=lr, **settings)


def _schedule_free(name: str) -> Callable[..., Optimizer]:
    try:
        if name == "schedule_free":
            from schedulefree import AdamWScheduleFree  # type: ignore[import-untyped]

            return AdamWScheduleFree  # type: ignore[no-any-return]
        from schedulefree.adamc_schedulefree_plus_paper import (  # type: ignore[import-untyped]
            AdamCScheduleFreePlusPaper,
        )

        return AdamCScheduleFreePlusPaper  # type: ignore[no-any-return]
    except ImportError:
        where = "schedulefree" if name == "schedule_free" else "schedulefree, newer than 1.4.1"
        raise MissingPackageError(f"optimizer {name} needs its package: pip install {where}") from None


# --- Averages and schedules -------------------------------------------------------------------------


def _blend(share: float, kind: str, *values: Any, **named: Any) -> Blend:
    """Return live mixed with an average: `blend:0.5,half_life,0.1` is half live, half `half_life:0.1`."""
    check_spec("average", kind, tuple(AVERAGES))
    return Blend(AVERAGES[kind](*values, **named), share)


def _power(power: float, every: int = 1) -> Average:
    """Return the average of PACE, taken in at every step or at every n-th one."""
    return PowerLaw(power) if every == 1 else Seldom(PowerLaw(power), every)


AVERAGES: dict[str, Callable[..., Average]] = {
    "power": _power,
    "polynomial": Polynomial,
    "decay": FixedDecay,
    "half_life": HalfLife,
    "bema": BEMA,
    "blend": _blend,
}
SCHEDULES: dict[str, Callable[..., LRScheduler]] = {
    "constant": schedules.constant,
    "inverse_sqrt": schedules.inverse_sqrt,
    "cosine": schedules.cosine,
    "wsd": schedules.wsd,
}


def averages_of(run: Run) -> dict[str, Average]:
    """Return the averages that a run keeps beside its optimizer, by name."""
    averages = {}
    for label, spec in named_averages(run.averages):
        check_spec("average", spec, tuple(AVERAGES))
        kind, values, named = parse_spec(spec)
        averages[label] = _called(kind, partial(AVERAGES[kind], *values, **named))
    if len(averages) < len(run.averages):
        raise ConfigError(f"averages need different names; got {', '.join(run.averages)}")
    return averages


def kept_as(run: Run) -> dict[str, str]:
    """Return under which name the optimizer keeps each of these averages."""
    names = {label: label for label in averages_of(run)}
    power_laws = [label for label, average in averages_of(run).items() if isinstance(average, PowerLaw)]
    if power_laws and control_in(run.optimizer) is None:
        names[power_laws[0]] = "average"
    return names


def make_schedule(run: Run, optimizer: Optimizer, steps: int) -> LRScheduler:
    """Return the schedule of a run of that many steps."""
    check_spec("schedule", run.schedule, tuple(SCHEDULES))
    name, positional, settings = parse_spec(run.schedule)
    if positional or settings.keys() & {"steps", "warmup"}:
        raise ConfigError(
            "settings of a schedule have names, as in wsd:decay=0.2; steps and warmup are settings of the "
            f"run; got {run.schedule!r}"
        )
    known = inspect.signature(SCHEDULES[name]).parameters
    own = [key for key in known if key not in ("optimizer", "steps", "warmup")]
    for key in settings:
        if key not in own:
            raise ConfigError(f"schedule {name} has no setting {key!r}{nearest(key, own)}")
    if "steps" in known:
        settings["steps"] = steps
    warmup = min(run.warmup, steps // 10)
    return _called(name, partial(SCHEDULES[name], optimizer, warmup=warmup, **settings))


def make_views(run: Run, optimizer: Optimizer, model: nn.Module) -> tuple[dict[str, View], str]:
    """Return the weights of the model to evaluate, by name, and the name of those that are returned."""
    views: dict[str, View] = {"live": nullcontext}
    if has_keeper(optimizer) and (control_in(run.optimizer) is not None or not run.averages):
        views["average"] = partial(averaged_weights, optimizer, model=model)
    for label, name in kept_as(run).items():
        views[label] = partial(averaged_weights, optimizer, name, model=model)
    return views, returned_of(views)


def memory_of(run: Run, optimizer: Optimizer) -> tuple[int, dict[str, int]]:
    """Return the bytes of an optimizer's state without averages kept beside it, and of each of those."""
    sizes = _bytes_by_key(optimizer)
    averages = averages_of(run)
    beside = {}
    for label, name in kept_as(run).items():
        parts = [""] if name == "average" else [f"_{part}" for part in averages[label].parts]
        beside[label] = sum(sizes.pop(f"{PREFIX}{name}{part}", 0) for part in parts)
    return sum(sizes.values()), beside


def _bytes_by_key(optimizer: Optimizer) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for state in optimizer.state_dict()["state"].values():
        for key, value in state.items():
            if isinstance(value, Tensor):
                sizes[key] += value.nbytes
    return sizes


def check_methods(run: Run) -> None:
    """Build all of it around one number: what is wrong with a setting shows before a model is built."""
    model = nn.Linear(1, 1)
    optimizer = make_optimizer(run, model)
    make_schedule(run, optimizer, max(run.steps or 1000, 20))
    if run.telemetry_every is not None and not is_steered(run.optimizer):
        raise ConfigError(
            f"telemetry_every reads what a control does; {run.optimizer} has none, and pace and push do"
        )
    if isinstance(optimizer, PACE):  # what one pass takes depends on the device, and the run's may be another
        for group in optimizer.param_groups:
            group["fused"] = None
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # ScheduleFree+ divides by their sum
    # Where torch checks some settings for the first time.
    _called(run.optimizer, partial(optimizer.step, lambda: 1.0))


# --- Messages ---------------------------------------------------------------------------------------


def _check_settings(name: str, settings: Mapping[str, Any], *makers: Callable[..., Any]) -> None:
    """Raise ConfigError for a setting that none of these takes."""
    known: Iterable[str] = [key for make in makers for key in inspect.signature(make).parameters]
    known = [key for key in known if key not in ("params", "base", "optimizer", "averages", "lr")]
    offered = [*known, *SETTINGS] if name == "pace" or name in BASES else known
    if "lr" in settings:
        raise ConfigError("the learning rate is a setting of the run (lr), not of the optimizer")
    for key in settings:
        if key not in known:
            raise ConfigError(f"{name} has no setting {key!r}{nearest(key, offered)}")


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
