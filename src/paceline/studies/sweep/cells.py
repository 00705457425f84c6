"""What a sweep consists of: one run for every combination of what was listed. No torch.

.. code-block:: text

    settings of all  ×  [[cells]]: settings that go together  ×  [grid]: values of each  ×  seeds
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.runs import config
from paceline.runs.config import NO_OTHER_RUN, ConfigError, Run, as_mapping, mark_of, nearest

Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """What the user asked for."""

    settings: Settings = field(default_factory=dict)
    """Of all runs, by the names of `Run`."""
    cells: tuple[Settings, ...] = ()
    """Settings that go together; each of them is combined with all of the grid."""
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values of each setting; all combinations are run."""
    seeds: tuple[int, ...] = ()
    """Each combination is run with each of them; empty: with the seed of the settings."""

    def __post_init__(self) -> None:
        for name, values in self.grid.items():
            if not isinstance(values, list | tuple) or not values:
                raise ConfigError(f"grid: {name} is {values!r}; allowed: a list of values")
        if not isinstance(self.grid, Mapping) or not all(isinstance(cell, Mapping) for cell in self.cells):
            raise ConfigError(
                "cells are tables of settings: [[cells]], then name = value in lines of their own"
            )
        together = {name for cell in self.cells for name in cell}
        for name in [*self.grid, *together]:
            if name == "seed":
                raise ConfigError("seed is not swept by name; give seeds")
            if name in NO_OTHER_RUN:
                raise ConfigError(f"{name} makes no other run, so that cells cannot differ in it")
            if name in self.grid and name in together:
                raise ConfigError(f"{name} is both in the grid and in cells; one of them decides")
        if not all(isinstance(seed, int) and not isinstance(seed, bool) for seed in self.seeds):
            raise ConfigError(f"seeds is {list(self.seeds)!r}; allowed: whole numbers")


def read(path: Path) -> Sweep:
    """A sweep from a TOML file: settings as in that of a run, and `seeds`, `[grid]` and `[[cells]]`."""
    content = config.read_toml(path)
    seeds, grid, cells = content.pop("seeds", []), content.pop("grid", {}), content.pop("cells", [])
    for name, value, kind, allowed in (
        ("seeds", seeds, list, "a list of whole numbers"),
        ("grid", grid, dict, "a table, [grid], of name = [value, value]"),
        ("cells", cells, list, "tables, each under [[cells]]"),
    ):
        if not isinstance(value, kind):
            raise ConfigError(f"{path}: {name} is {str(value)[:80]!r}; allowed: {allowed}")
    return Sweep(settings=content, cells=tuple(cells), grid=grid, seeds=tuple(seeds))


def grid_of(words: Sequence[Sequence[str]]) -> dict[str, Sequence[str]]:
    """The grid that flags give: of each, the name of a setting and its values.

    >>> grid_of([["lr", "1e-3", "3e-3"], ["optimizer", "adamw", "push:strength=0.7,power=0.5"]])
    {'lr': ['1e-3', '3e-3'], 'optimizer': ['adamw', 'push:strength=0.7,power=0.5']}
    """
    grid: dict[str, Sequence[str]] = {}
    for flag, *values in words:
        name = flag.replace("-", "_")
        if "=" in flag or not values:
            meant = flag.partition("=")[0]
            raise ConfigError(
                f"--grid {flag[:80]}: write --grid {meant} VALUE VALUE, with spaces between them"
            )
        if name not in (known := config.documentation()):
            raise ConfigError(f"--grid: unknown setting {flag[:80]!r}{nearest(name, list(known))}")
        if name in grid:
            raise ConfigError(f"--grid {name} is there twice; give all of its values after one")
        grid[name] = values
    return grid


def runs_of(sweep: Sweep) -> list[Run]:
    """All runs, in their order: seeds change first, then the last of the grid."""
    combinations = [
        dict(sweep.settings) | dict(cell) | dict(zip(sweep.grid, values, strict=True))
        for cell in sweep.cells or ({},)
        for values in itertools.product(*sweep.grid.values())
    ]
    seeds = [{"seed": seed} for seed in sweep.seeds] or [{}]
    runs = [config.make(settings | seed) for settings in combinations for seed in seeds]
    found: dict[str, int] = {}
    for number, run in enumerate(runs, 1):
        if (before := found.setdefault(mark_of(run), number)) != number:
            raise ConfigError(
                f"cells {before} and {number} of the sweep are the same run; {_in_words(run, runs)}"
            )
    return runs


def _in_words(run: Run, runs: Sequence[Run]) -> str:
    return ", ".join(f"{name} {text(value)}" for name, value in differing(runs)[runs.index(run)].items())


def differing(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Of each run the settings in which not all are alike, under the same names in the same order."""
    settings = [as_mapping(run) for run in runs]
    names = [
        name
        for name in config.documentation()
        if name not in NO_OTHER_RUN and any(other[name] != settings[0][name] for other in settings)
    ]
    return [{name: other[name] for name in names} for other in settings]


def text(value: Any) -> str:
    """A value for a table.

    >>> text(0.001), text(["power:0.5"]), text(None)
    ('0.001', 'power:0.5', 'none')
    """
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
