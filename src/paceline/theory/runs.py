"""Advice on runs that were made: what the pull did in them, and what theory says about it."""

import math
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

from paceline.control.advice import Situation, advise
from paceline.runs import names
from paceline.runs.config import ConfigError
from paceline.studies.lines import Finished, find_runs
from paceline.studies.looks import look
from paceline.studies.table import Table
from paceline.theory.picture import DOTS, SOLID, Picture, panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ALIKE = ("model", "length", "batch_size", "steps", "fingerprint", "held_out_fingerprint")
"""Settings and data that must be equal in all runs."""


@final
@dataclass(frozen=True, kw_only=True)
class Kind:
    """Runs with readings of the pull that differ in their seeds only."""

    runs: list[Finished]

    @property
    def name(self) -> str:
        """The name of the method, with that of its schedule."""
        return next(iter(self.runs[0].methods))

    @property
    def when(self) -> str:
        """Return when the last reading was taken."""
        if self.runs[0].config["schedule"] != "constant":
            return "at the full learning rate"
        return "at the end" if all(run.outcome == "finished" for run in self.runs) else "so far"

    def reading(self, name: str) -> float:
        """Return a reading of the pull, the mean over seeds."""
        return statistics.fmean(_reading(run)[name] for run in self.runs)

    @property
    def ratios(self) -> tuple[float, float, float]:
        """The R of a weakly, a typically and a strongly pulled coordinate."""
        return self.reading("ratio/q10"), self.reading("ratio/q50"), self.reading("ratio/q90")

    def situation(self, best_lr: float | None) -> Situation:
        """Return the situation to advise on; the typical coordinate is the median one."""
        control = self.runs[0].control
        assert control is not None  # it has readings
        return Situation(
            lr=self.runs[0].lr,
            steps=int(self.reading("t")),
            ratio=max(self.ratios[1], -0.99),
            power=control["power"],
            step=control["step"],
            best_lr=best_lr,
        )


def _reading(run: Finished) -> Mapping[str, Any]:
    """Return the last reading at the full learning rate: where a rate decays, the pull decays with it."""
    full = 0.9 * max(float(reading["lr"] or 0) for _, reading in run.pull)
    return next(reading for _, reading in reversed(run.pull) if float(reading["lr"] or 0) >= full)


def _method(run: Finished) -> str:
    """Return the setting that names the optimizer, under the name that it had when the run was made."""
    return str(run.config.get("method") or run.config["optimizer"])


def advise_on(folders: Iterable[Path], best_lr: float | None = None) -> tuple[list[str], Picture]:
    """Return what the pull did in runs and what to change, and a picture.

    Arguments:
        folders: of runs, or of a comparison.
        best_lr: that of AdamW with an average; None: looked for among the runs.
    """
    runs = [run for folder in find_runs(folders) if (run := Finished.of_folder(folder)) is not None]
    kinds: dict[tuple[float, str, str], list[Finished]] = {}
    for run in runs:
        if run.pull:
            kinds.setdefault((run.lr, _method(run), run.config["schedule"]), []).append(run)
    if not kinds:
        raise ConfigError(
            "none of these runs has readings of the pull; train with PACE and --set telemetry_every=40"
        )
    for name in _ALIKE:
        values = {str(run.data.get(name, getattr(run, name, run.config.get(name)))) for run in runs}
        if len(values) > 1:
            given = ", ".join(sorted(values))[:120]
            raise ConfigError(f"these runs differ in {name} ({given}); give those that are alike")
    table = Table.of(runs)
    plain = _plain_averages(table)
    lines = (
        [f"Taken as the best learning rate: {best_lr:g}."]
        if best_lr is not None
        else _about_all(table, plain)
    )
    if best_lr is None and plain:
        best_lr = _best(table, _lowest(table, plain))
    if best_lr is None:
        said = "Whether a pull can help depends on where AdamW is best: compare (paceline compare)"
        lines.append(f"{said}, or say it with --best-lr.")
    found = [Kind(runs=alike) for _, alike in sorted(kinds.items(), key=lambda item: item[0])]
    for kind in found:
        low, _, high = kind.ratios
        lines += [
            "",
            f"lr {kind.runs[0].lr:g}, {kind.name}: R between {low:.2g} and {high:.2g} for most coordinates "
            f"{kind.when}; {100 * kind.reading('saturated'):.2g} % are pulled back to the average before "
            "each step.",
        ]
        lines += [f"  {text}" for text in advise(kind.situation(best_lr))]
        lines += [f"  {text}" for text in _seen(kind, table, plain, best_lr)]
    lines += ["", "Theory of slow changes on a quadratic: try what it says before you trust it."]
    return lines, _picture(found, table, plain, best_lr)


# --- Methods of the runs --------------------------------------------------------------------------------


def _best(table: Table, method: str) -> float | None:
    """Return the learning rate at which a method came out lowest; None if there is none."""
    rows = table.where(method=method).best("lr")
    return None if rows is None else rows.rows[0].lr


def _loss(table: Table, method: str, lr: float | None) -> float | None:
    """Return the mean loss over seeds; None if one of them diverged, or none has ended."""
    mean = table.where(method=method, lr=lr).mean()
    return None if mean is None else mean.value


def _lowest(table: Table, methods: Iterable[str]) -> str:
    """Return the method with the lowest loss at its best learning rate."""
    ends = [(_loss(table, method, _best(table, method)), method) for method in methods]
    return min((math.inf if loss is None else loss, method) for loss, method in ends)[1]


def _plain_averages(table: Table) -> dict[str, str]:
    """Return the averages of AdamW at a constant rate: method, and which average it is."""
    found = {}
    for method, rows in table.by("method").items():
        adamw = all(re.match(r"adamw\b", _method(run)) and not run.is_steered for run in rows)
        constant = all(run.config["schedule"] == "constant" for run in rows)
        average = _average_of(rows.rows[0])
        if adamw and constant and average is not None and _best(table, method) is not None:
            found[method] = average
    return found


def _average_of(row: Finished) -> str | None:
    """Return which average a row's method returns, as in power:0.5; None: the live weights."""
    beside = names.averages_of(row.config["averages"])
    if row.returned in beside:
        return str(beside[row.returned])
    if row.returned == "live" or row.control is None:
        return None
    power = row.control["return_power"]
    return f"power:{row.control['power'] if power is None else power:g}"


# --- What is said ---------------------------------------------------------------------------------------


def _about_all(table: Table, plain: Mapping[str, str]) -> list[str]:
    """Return where AdamW's averages are best, and what is best of all."""
    lines = []
    if plain:
        method = _lowest(table, plain)
        lr = _best(table, method)
        tried = sorted(row.lr for row in table.where(method=method) if row.is_ended)
        at_edge = lr in (tried[0], tried[-1])
        edge = ", the edge of what was tried: the true best may lie beyond" if at_edge else ""
        lines.append(f"Without a pull, {method} is best at lr {lr:g}{edge}.")
    methods = [method for method in table.values("method") if _best(table, method) is not None]
    if len(methods) > 1:
        best = _lowest(table, methods)
        lr = _best(table, best)
        lines.append(f"Best of all: {best} at lr {lr:g}, {_loss(table, best, lr):.3f}.")
    return lines


def _seen(kind: Kind, table: Table, plain: Mapping[str, str], best_lr: float | None) -> list[str]:
    """Return what the runs showed, next to what was to be expected; like averages are compared."""
    if not plain or best_lr is None:
        return []
    lr, right, lines = kind.runs[0].lr, kind.situation(best_lr).right_ratio, []
    expected = "a gain" if right is not None and right > 0.25 else "no gain"
    for row in kind.runs[0].each():
        loss = _loss(table, row.method, lr)
        if not row.is_steered or loss is None:
            continue
        alike = [name for name, average in plain.items() if average == _average_of(row)]
        other = alike[0] if alike else _lowest(table, plain)
        without = _loss(table, other, lr)
        seen = f"{row.method} {loss:.3f}; {other} was not run at this rate"
        if without is not None:
            seen = f"{row.method} {loss:.3f}, {other} {without:.3f}, {loss - without:+.3f}"
        elif table.where(method=other, lr=lr).losses:
            seen = f"{row.method} {loss:.3f}, {other} diverged"
        lines.append(f"Expected: {expected}. Seen: {seen}.")
    return lines


def _picture(kinds: list[Kind], table: Table, plain: Mapping[str, str], best_lr: float | None) -> Picture:
    """Return a picture of R as it was and as it should have been, and what came of it, over the rate."""
    lrs, rows = sorted(table.values("lr")), []
    for kind in kinds:
        right = kind.situation(best_lr).right_ratio
        values = (f"{value:.3g}" for value in (*kind.ratios, right) if value is not None)
        rows.append((f"{kind.runs[0].lr:g}", kind.name, *values) + (() if right is not None else ("",)))

    wanted = [] if best_lr is None else [(0, "R* = η/η* − 1", lrs, [lr / best_lr - 1 for lr in lrs], SOLID)]
    said = "R: median, and eight tenths of coordinates"
    frame = panel("Strength of the pull", "learning rate", said, *wanted, log="x", symlog=("y", 0.1))

    def ratios(axes: "Axes") -> None:
        for i, name in enumerate(dict.fromkeys(kind.name for kind in kinds)):
            mine = [kind for kind in kinds if kind.name == name]
            low, middle, high = np.array([kind.ratios for kind in mine]).T
            reach, at = np.maximum([middle - low, high - middle], 0), [kind.runs[0].lr for kind in mine]
            axes.errorbar(at, middle, yerr=reach, fmt="o", capsize=3, color=look(3 + i).colour, label=name)
        frame(axes)

    steered = {row.method for row in table if row.is_steered}
    shown = [method for method in table.values("method") if method in plain or method in steered]
    curves = []
    for i, method in enumerate(shown):
        points = [(lr, loss) for lr in lrs if (loss := _loss(table, method, lr)) is not None]
        curves.append((i, method, [lr for lr, _ in points], [loss for _, loss in points], DOTS))
    losses = panel("What came of it", "learning rate", "held-out loss, mean over seeds", *curves, log="x")
    columns = ("lr", "method", "R, tenth", "median", "nine tenths", "R*")
    return Picture("advice", "The pull in these runs", columns, rows, ratios, losses)
