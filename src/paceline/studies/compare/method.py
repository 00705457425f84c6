"""What can be compared: a way to train, and the weights of it that are returned."""

from dataclasses import dataclass, replace

from paceline.runs.config import SCHEDULES, ConfigError, Run, check_spec, nearest

SHORT, LONG = "short_ema=power:0.5", "long_ema=power:0.7"


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """An optimizer under a schedule, and what of it is returned."""

    optimizer: str = "adamw"
    """As in `Run`."""
    schedule: str = "constant"
    """As in `Run`."""
    average: str | None = None
    """An average kept beside, as in `Run`; None: the optimizer's own average if it has one, else live."""


NAMES = {
    "adamw": Method(),
    "ema_short": Method(average=SHORT),
    "ema_long": Method(average=LONG),
    "push": Method(optimizer="push"),
    "pace": Method(optimizer="pace"),
    "wsd": Method(schedule="wsd"),
    "cosine": Method(schedule="cosine"),
    "schedule_free": Method(optimizer="schedule_free"),
    "bema": Method(average="bema=bema:0.5"),
    "lookahead": Method(optimizer="lookahead"),
    "gpa": Method(optimizer="gpa"),
    "ema_nesterov": Method(optimizer="ema_nesterov"),
    "ademamix": Method(optimizer="ademamix"),
    "sgd": Method(optimizer="sgd"),
}
DEFAULT = ("adamw", "ema_short", "ema_long", "push", "pace", "wsd", "schedule_free")


def parse(text: str) -> Method:
    """Return a method by its name, with settings, another average and another schedule if they are given.

    >>> parse("ema_long")
    Method(optimizer='adamw', schedule='constant', average='long_ema=power:0.7')
    >>> parse("adamw:weight_decay=0.1/power:0.9@cosine")
    Method(optimizer='adamw:weight_decay=0.1', schedule='cosine', average='power:0.9')
    """
    rest, _, schedule = text.partition("@")
    rest, _, average = rest.partition("/")
    name, _, settings = rest.partition(":")
    if name not in NAMES:
        raise ConfigError(f"method {name[:80]!r} is unknown{nearest(name, list(NAMES))}; {_ALLOWED}")
    method = NAMES[name]
    if settings:
        method = replace(method, optimizer=f"{method.optimizer}:{settings}")
    if average:
        method = replace(method, average=average)
    if schedule:
        check_spec("schedule", schedule, SCHEDULES)
        method = replace(method, schedule=schedule)
    return method


_ALLOWED = f"there are: {', '.join(NAMES)}; write NAME:setting=value/AVERAGE@SCHEDULE for variants"


def runs_of(methods: tuple[Method, ...], base: Run) -> list[Run]:
    """The runs that these methods need: those that train alike share one."""
    averages: dict[tuple[str, str], list[str]] = {}
    for method in methods:
        kept = averages.setdefault((method.optimizer, method.schedule), [])
        if method.average is not None and method.average not in kept:
            kept.append(method.average)
    return [
        replace(base, optimizer=optimizer, schedule=schedule, averages=tuple(kept))
        for (optimizer, schedule), kept in averages.items()
    ]
