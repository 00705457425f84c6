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

from paceline.experiments.candidates import GAINS, Candidate
from paceline.experiments.config import (
    ConfigError,
    Run,
    check_spec,
    named_averages,
    nearest,
    parse_spec,
    returned_of,
)
from paceline.lm.loop import View
from paceline.optim import (
    BEMA,
    PACE,
    Averages,
    Blend,
    FixedDecay,
    HalfLife,
    Polynomial,
    PowerLaw,
    Pullback,
    averaged_weights,
    parameter_groups,
    schedules,
)
from paceline.optim.averages import Average
from paceline.optim.baselines import GPA, AdEMAMix, EMANesterov, ScheduleFree, lookahead
from paceline.optim.weights import KeepsAverage

Groups = list[dict[str, Any]]
T = TypeVar("T")


class MissingPackageError(ConfigError):
    """An optimizer of a package that is not installed."""


# --- Optimizers -------------------------------------------------------------------------------------


PLAIN: dict[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "pace": PACE,
    "ademamix": AdEMAMix,
    "sgd": torch.optim.SGD,
    "candidate": Candidate,
}
AROUND_ADAMW: dict[str, Callable[..., Optimizer]] = {
    "lookahead": lookahead,
    "gpa": GPA,
    "ema_nesterov": EMANesterov,
}
# What Schedule-Free remembers in its groups, beside their settings.
REMEMBERED = ("k", "weight_sum", "lr_max", "scheduled_lr", "train_mode")
OPTIMIZERS = (*PLAIN, *AROUND_ADAMW, "schedule_free", "schedule_free_plus")


def _make(name: str, groups: Groups, lr: float, settings: dict[str, Any]) -> Optimizer:
    if name.startswith("schedule_free"):
        kind = _schedule_free(name)
        _check_settings(name, settings, kind)
        return ScheduleFree(kind(groups, lr=lr, **settings))
    if name in AROUND_ADAMW:
        wrapper = AROUND_ADAMW[name]
        _check_settings(name, settings, wrapper, torch.optim.AdamW)
        own = {key: settings.pop(key) for key in inspect.signature(wrapper).parameters if key in settings}
        return wrapper(_make("adamw", groups, lr, settings), **own)
    _check_settings(name, settings, PLAIN[name], *(GAINS.values() if name == "candidate" else ()))
    if name == "adamw" and groups[0]["params"][0][1].is_cuda:
        settings = {"fused": True, **settings}  # torch's fast path on a GPU, and not its default
    return PLAIN[name](groups, lr=lr, **settings)


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
    """`blend:0.5,half_life,0.1` is half live, half the average `half_life:0.1`."""
    check_spec("average", kind, tuple(AVERAGES))
    return Blend(AVERAGES[kind](*values, **named), share)


AVERAGES: dict[str, Callable[..., Average]] = {
    "power": PowerLaw,
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


def make_optimizer(run: Run, model: nn.Module) -> Optimizer:
    """The optimizer of a run, with the averages it asks for beside it."""
    name, positional, settings = _known("optimizer", run.optimizer, OPTIMIZERS)
    if positional:
        raise ConfigError(f"optimizer settings have names, as in pace:ema_power=0.7; got {run.optimizer!r}")
    decay = settings.pop("weight_decay", None)
    decay = _plain(name, "weight_decay", decay)
    groups = _called(name, partial(parameter_groups, model, decay))
    optimizer = _called(name, partial(_make, name, groups, run.lr, settings))
    averages = {}
    for label, spec in named_averages(run.averages):
        kind, values, named = _known("average", spec, AVERAGES)
        averages[label] = _called(kind, partial(AVERAGES[kind], *values, **named))
    if "average" in averages and isinstance(optimizer, KeepsAverage):
        raise ConfigError(f"{name} has an average of its own, called average; give others other names")
    if len(averages) < len(run.averages):
        raise ConfigError(f"averages need different names; got {', '.join(run.averages)}")
    return _called("averages", partial(Averages, optimizer, averages)) if averages else optimizer


def make_schedule(run: Run, optimizer: Optimizer, steps: int) -> LRScheduler:
    """The schedule of a run of that many steps."""
    name, positional, settings = _known("schedule", run.schedule, SCHEDULES)
    if positional or settings.keys() & {"steps", "warmup"}:
        raise ConfigError(
            "settings of a schedule have names, as in wsd:decay=0.2; steps and warmup are settings of the "
            f"run; got {run.schedule!r}"
        )
    if "steps" in inspect.signature(SCHEDULES[name]).parameters:
        settings["steps"] = steps
    warmup = min(run.warmup, steps // 10)
    return _called(name, partial(SCHEDULES[name], optimizer, warmup=warmup, **settings))


def make_views(optimizer: Optimizer, model: nn.Module) -> tuple[dict[str, View], str]:
    """The weights of the model to evaluate, by name, and the name of those that are returned."""
    views: dict[str, View] = {"live": nullcontext}
    base = optimizer.base if isinstance(optimizer, Averages) else optimizer
    if isinstance(base, KeepsAverage):
        views["average"] = partial(averaged_weights, base, model)
    if isinstance(optimizer, Averages):
        views |= {name: partial(averaged_weights, optimizer[name], model) for name in optimizer}
    return views, returned_of(views)


def memory_of(optimizer: Optimizer) -> tuple[int, dict[str, int]]:
    """Bytes of its state: without averages kept beside it, and of each of those."""
    if not isinstance(optimizer, Averages):
        return sum(_bytes_by_key(optimizer).values()), {}
    sizes, prefix = _bytes_by_key(optimizer), optimizer.format.prefix
    own = sum(_bytes_by_key(optimizer.base).values())
    parts = {
        name: [f"{prefix}{name}_{part}" for part in optimizer.averages[name].parts] for name in optimizer
    }
    return own, {name: sum(sizes[key] for key in keys) for name, keys in parts.items()}


def _bytes_by_key(optimizer: Optimizer) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor):
                sizes[key] += value.nbytes
    return sizes


def check_methods(run: Run) -> None:
    """Build all of it around one number: what is wrong with a setting shows before a model is built."""
    model = nn.Linear(1, 1)
    optimizer = make_optimizer(run, model)
    make_schedule(run, optimizer, max(run.steps or 1000, 20))
    if run.telemetry_every is not None:
        pulling(optimizer)
    base = optimizer.base if isinstance(optimizer, Averages) else optimizer
    if isinstance(base, PACE):  # what one pass takes depends on the device, and the run's may be another
        for group in base.param_groups:
            group["fused"] = None
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # ScheduleFree+ divides by their sum
    # Where torch looks at some settings for the first time.
    _called(run.optimizer, partial(optimizer.step, lambda: 1.0))


def pulling(optimizer: Optimizer) -> PACE | Pullback:
    """The optimizer whose pull can be looked at."""
    base = optimizer.base if isinstance(optimizer, Averages) else optimizer
    if not isinstance(base, PACE | Pullback):
        raise ConfigError("telemetry_every looks at the pull of pace; this optimizer pulls nothing")
    return base


# --- Messages ---------------------------------------------------------------------------------------


def _known(what: str, spec: str, table: Iterable[str]) -> tuple[str, list[Any], dict[str, Any]]:
    check_spec(what, spec, tuple(table))
    return parse_spec(spec)


def _check_settings(name: str, settings: Mapping[str, Any], *makers: Callable[..., Any]) -> None:
    known = [key for make in makers for key in inspect.signature(make).parameters]
    if "lr" in settings:
        raise ConfigError("the learning rate is a setting of the run (lr), not of the optimizer")
    for key in settings:
        if key in ("params", "base") or key not in known:
            raise ConfigError(f"{name} has no setting {key!r}{nearest(key, known)}")


def _plain(name: str, key: str, value: Any) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ConfigError(f"{name}: {key} is {value!r}; allowed: a number")
    return value


def _called(name: str, make: Callable[[], T]) -> T:
    """What a constructor gives; what it refuses, in one line."""
    try:
        return make()
    except ConfigError:
        raise
    except Exception as error:  # optimizers of others check little and fail in any way
        raise ConfigError(f"{name}: {' '.join(str(error).split())}") from None
