"""What the methods of a run are called, for people; written into its records."""

import re
from collections.abc import Collection

from paceline.runs.config import Run, named_averages

NAMES = {
    "adamw": "AdamW",
    "pace": "PACE",
    "push": "PACE push",
    "schedule_free": "Schedule-Free",
    "lookahead": "Lookahead",
    "gpa": "GPA",
    "ema_nesterov": "EMA-Nesterov",
    "ademamix": "AdEMAMix",
    "sgd": "SGD",
}
SCHEDULES = {"wsd": "WSD", "cosine": "cosine", "inverse_sqrt": "1/√t"}


def methods_of(run: Run, views: Collection[str]) -> dict[str, str]:
    """Return the methods that a run stands for: their names, and the weights that each returns.

    Arguments:
        run: one run, which may keep several averages.
        views: the weights that it evaluates.

    >>> methods_of(Run(steps=9, optimizer="adamw", averages=("long_ema=power:0.7",)), ("live", "long_ema"))
    {'AdamW': 'live', 'AdamW · long EMA': 'long_ema'}
    """
    beside = dict(zip((name for name, _ in named_averages(run.averages)), run.averages, strict=True))
    found = {_name(run, ""): "average" if "average" in views else "live"}
    for name, text in beside.items():
        is_named = text.startswith(f"{name}=")
        label = re.sub(r"\bema\b", "EMA", name.replace("_", " ")) if is_named else text
        found[_name(run, label)] = name
    return found


def _name(run: Run, average: str) -> str:
    optimizer, _, settings = run.optimizer.partition(":")
    schedule, _, how = run.schedule.partition(":")
    name = NAMES.get(optimizer, optimizer)
    if settings:
        name += f" ({settings})"
    if schedule != "constant":
        name += f" {SCHEDULES.get(schedule, schedule)}" + (f" ({how})" if how else "")
    return f"{name} · {average}" if average else name
