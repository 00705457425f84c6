"""A list of runs: each with its name and the tags that tables and figures choose by. No torch.

.. code-block:: text

    grid:     settings of all × [[cells]], settings that go together × [grid], values of each × seeds
    decayed:  a run with a decay of WSD, that continues one at a constant rate from where its decay begins

The folder of a study has one folder a run: FOLDER/runs/NAME.
"""

import argparse
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.lm.files import Damaged, read_json
from paceline.runs import config, records
from paceline.runs.config import NO_OTHER_RUN, ConfigError, Run, as_mapping, mark_of, name_of

SEVERAL = ("method", "lr")
"""Settings that may be lists: all values are combined with the grid. So may `seed`, which changes first."""

ROUNDING = frozenset({"micro_batch_size", "activation_checkpointing", "compile"})
"""Settings that round differently, and make no other experiment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """One run of a study."""

    name: str
    """The name of its folder, and what other runs call it that continue it (`fork = "NAME@STEP"`)."""
    run: Run
    tags: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What tables and figures choose by: method, setting, schedule, lr, seed, batch and others."""


def folder_of(study: Path, name: str) -> Path:
    """Return the folder of a run in that of its study."""
    return study / "runs" / name


_PLANNED = {"request": dict, "steps": int, "jobs": int, "trial": dict}
_PLANNED |= {"missing": dict, "runs": list}
"""What `plan.json` holds (studies/plan.py)."""
_WORDS = {dict: "an object", int: "a whole number", list: "a list"}


def read_plan(study: Path) -> dict[str, Any] | None:
    """Return what a comparison has planned in its folder; None without a plan."""
    path = study / "plan.json"
    if not path.exists():
        return None
    try:
        found = read_json(path)
        for name, kind in _PLANNED.items():
            if not isinstance(found.get(name), kind):
                raise Damaged(f"{path}: {name} is {str(found.get(name))[:80]!r}; allowed: {_WORDS[kind]}")
        if not all(isinstance(name, str) and name == Path(name).name for name in found["runs"]):
            raise Damaged(f"{path}: runs are {str(found['runs'])[:80]}; allowed: names of folders")
    except Damaged as error:
        raise ConfigError(f"{error}; move it away to have it planned again") from None
    return found


def refuse_others(runs: Iterable[Named], study: Path) -> None:
    """Raise ConfigError for other runs under these names, such as copied or renamed folders."""
    for one in runs:
        folder, now = folder_of(study, one.name), as_mapping(one.run)
        place = folder / "records.jsonl"
        try:
            lines = records.read(place) if place.exists() else iter(())
            before: dict[str, Any] = dict(next(lines, {"config": {}})["config"])
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{place}, line 1 is no record of a run: {error!r}") from None
        decisive = before.keys() & now.keys() - NO_OTHER_RUN - ROUNDING
        if changed := [
            f"{k}: {before[k]!r}, now {now[k]!r}" for k in sorted(decisive) if before[k] != now[k]
        ]:
            said = f"{folder} holds a run with other settings ({'; '.join(changed)})"
            raise ConfigError(f"{said}; move it away, or give those again, or another --out")


# --- Flags --------------------------------------------------------------------------------------------


def count(word: str) -> int:
    """Return the number of things that a flag asks for."""
    if not re.fullmatch(r"[1-9][0-9]{0,8}", word):
        raise argparse.ArgumentTypeError(f"{word[:80]!r}; allowed: a whole number, 1 or more")
    return int(word)


def rate(word: str) -> float:
    """Return a learning rate of several that stand after their flag."""
    try:
        return float(word)
    except ValueError:
        said = f"{word[:80]!r}; allowed: numbers with spaces between them, such as 1e-3 2e-3"
        raise argparse.ArgumentTypeError(said) from None


# --- Combinations -------------------------------------------------------------------------------------


def grid(
    settings: Mapping[str, Any],
    *,
    cells: Sequence[Mapping[str, Any]] = (),
    values: Mapping[str, Sequence[Any]] | None = None,
    seeds: int | None = None,
) -> list[Named]:
    """Return all combinations, each tagged with the settings in which not all are alike.

    Arguments:
        settings: those of all runs, by the names of `Run`; `method`, `lr` and `seed` may be lists.
        cells: settings that go together; each of them is combined with all of `values`.
        values: values of each setting; all combinations are run, of which the last setting changes first.
        seeds: how many seeds each combination is run with, counted from `seed`.

    >>> [one.tags for one in grid({"steps": 9, "lr": [1e-3, 2e-3]}, seeds=2)][1:3]
    [{'lr': 0.001, 'seed': 43}, {'lr': 0.002, 'seed': 42}]
    """
    settings, values = dict(settings), dict(values or {})
    if twice := [name for name in SEVERAL if name in values and isinstance(settings.get(name), list)]:
        raise ConfigError(f"{twice[0]} is given twice, by name and in the grid")
    values = {name: settings.pop(name) for name in SEVERAL if isinstance(settings.get(name), list)} | values
    numbers = _seeds(settings.pop("seed", None), seeds)
    _check(cells, values)
    combinations = [
        settings | dict(cell) | dict(zip(values, chosen, strict=True))
        for cell in cells or ({},)
        for chosen in itertools.product(*values.values())
    ]
    runs = [config.make(combined | {"seed": seed}) for combined in combinations for seed in numbers]
    tags = differing(runs)
    found: dict[str, int] = {}
    for number, (run, of_one) in enumerate(zip(runs, tags, strict=True), 1):
        if (before := found.setdefault(mark_of(run), number)) != number:
            words = ", ".join(f"{name} {text(value)}" for name, value in of_one.items())
            raise ConfigError(f"runs {before} and {number} of the grid are the same; {words}")
    return [Named(name=name_of(run), run=run, tags=of_one) for run, of_one in zip(runs, tags, strict=True)]


def _seeds(given: Any, count: int | None) -> list[int]:
    one = config.Run.__dataclass_fields__["seed"].default if given is None else given
    # A list of one is what a flag gives that may have several.
    several = list(one) if isinstance(one, list | tuple) else [one]
    if not several:
        raise ConfigError("seed is an empty list; allowed: whole numbers")
    found = [config.make({"steps": 1, "seed": seed}).seed for seed in several]
    if count is None:
        return found
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 1000:
        raise ConfigError(f"seeds is {str(count)[:80]!r}; allowed: how many, 1 to 1000")
    if len(found) > 1:
        raise ConfigError("seeds counts from one seed, and seed lists several; give one of both")
    return [found[0] + number for number in range(count)]


def _check(cells: Sequence[Mapping[str, Any]], values: Mapping[str, Sequence[Any]]) -> None:
    for name, several in values.items():
        if not isinstance(several, list | tuple) or not several:
            raise ConfigError(f"grid: {name} is {several!r}; allowed: a list of values")
    if not all(isinstance(cell, Mapping) for cell in cells):
        raise ConfigError("cells are tables of settings: [[cells]], then name = value in lines of their own")
    together = {name for cell in cells for name in cell}
    for name in [*values, *together]:
        if name == "seed":
            raise ConfigError(
                "seed goes with all of the grid: give it outside, as a list if there are several"
            )
        if name in NO_OTHER_RUN:
            raise ConfigError(f"{name} changes no result, so that runs cannot differ in it alone")
        if name in values and name in together:
            raise ConfigError(f"{name} is both in the grid and in cells; one of them decides")


def read(path: Path) -> dict[str, Any]:
    """Return the arguments of `grid` in a TOML file: settings of a run, and `seeds`, [grid], [[cells]]."""
    content = config.read_toml(path)
    values, cells = content.pop("grid", {}), content.pop("cells", [])
    for name, value, kind, allowed in (
        ("grid", values, dict, "a table, [grid], of name = [value, value]"),
        ("cells", cells, list, "tables, each under [[cells]]"),
    ):
        if not isinstance(value, kind):
            raise ConfigError(f"{path}: {name} is {str(value)[:80]!r}; allowed: {allowed}")
    return {"seeds": content.pop("seeds", None), "settings": content, "values": values, "cells": tuple(cells)}


def differing(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return, for each run, the settings in which not all are alike: the same names in the same order."""
    settings = [as_mapping(run) for run in runs]
    names = [
        name
        for name in config.documentation()
        if name not in NO_OTHER_RUN and any(other[name] != settings[0][name] for other in settings)
    ]
    return [{name: other[name] for name in names} for other in settings]


def text(value: Any) -> str:
    """Return the value of a setting as a table shows it.

    >>> text(0.001), text(["power:0.5"]), text(None)
    ('0.001', 'power:0.5', 'none')
    """
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


# --- Runs that continue others ------------------------------------------------------------------------


def decayed(one: Named, *, steps: int | None = None, share: float = 0.2, name: str | None = None) -> Named:
    """Return the run with WSD that continues one at a constant rate from where its decay begins.

    Its weights are those of WSD from the first step on, and only the decay is computed.

    Arguments:
        one: the run at a constant rate.
        steps: where the decay ends; all steps of `one` if it is left out.
        share: the part of those steps over which the rate goes to 0.
        name: that of the new run; made from its settings if it is left out.

    >>> whole = Named(name="whole", run=Run(steps=100), tags={"method": "PACE"})
    >>> decayed(whole, steps=50).run.fork, decayed(whole).tags
    ('whole@40', {'method': 'PACE', 'schedule': 'wsd', 'steps': 100})
    """
    assert one.run.steps is not None and one.run.schedule == "constant"
    end = steps or one.run.steps
    begins = end - max(round(share * end), 1)  # as in schedules.WSD, which needs torch
    run = replace(
        one.run,
        steps=end,
        horizon=one.run.horizon or one.run.steps,
        schedule=f"wsd:decay={share:g}",
        fork=f"{one.name}@{begins}",
        keep_steps=(),
    )
    return Named(name=name or name_of(run), run=run, tags={**one.tags, "schedule": "wsd", "steps": end})


def in_order(runs: Iterable[Named]) -> list[Named]:
    """Return each run once: first those that continue no other, which keep the checkpoints of others."""
    found: dict[str, Named] = {}
    for one in runs:
        if found.setdefault(one.name, one).run != one.run:
            raise ConfigError(f"two runs have the name {one.name}")
    steps: dict[str, set[int]] = {}
    for one in found.values():
        if one.run.after is not None:
            steps.setdefault(one.run.after[0], set()).add(one.run.after[1])
    kept = [
        replace(one, run=replace(one.run, keep_steps=tuple(sorted({*one.run.keep_steps, *steps[name]}))))
        if name in steps
        else one
        for name, one in found.items()
    ]
    return sorted(kept, key=lambda one: one.run.after is not None)
