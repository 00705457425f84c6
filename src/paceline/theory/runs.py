"""Advice on runs that were made: what the pull did in them, and what theory says about it."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.control.advice import Situation, advise
from paceline.runs.config import ConfigError, named_averages
from paceline.studies.report.palette import style
from paceline.studies.report.results import Outcomes, Result, differences, read_outcomes
from paceline.theory.picture import Picture, labels, line

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Runs that differ in their seeds only."""

    runs: list[Result]

    @property
    def lr(self) -> float:
        return self.runs[0].lr

    @property
    def control(self) -> Mapping[str, Any]:
        """The control of these runs, as plain values."""
        return dict(self.runs[0].about["control"])

    @property
    def name(self) -> str:
        optimizer, schedule = (self.runs[0].config[key] for key in ("optimizer", "schedule"))
        return str(optimizer) if schedule == "constant" else f"{optimizer}, {schedule}"

    @property
    def when(self) -> str:
        if self.runs[0].config["schedule"] != "constant":
            return "at the full learning rate"
        return "at the end" if all(run.outcome == "finished" for run in self.runs) else "so far"

    def reading(self, name: str) -> float:
        """Of the pull, a mean over seeds."""
        return statistics.fmean(_reading(run)[name] for run in self.runs)

    @property
    def ratios(self) -> tuple[float, float, float]:
        """R of a weak, a typical and a strongly pulled coordinate."""
        return self.reading("ratio/q10"), self.reading("ratio/q50"), self.reading("ratio/q90")


def kinds_of(results: Iterable[Result]) -> list[Kind]:
    """By learning rate."""
    found: dict[tuple[float, str, str], list[Result]] = {}
    for run in results:
        found.setdefault((run.lr, run.config["optimizer"], run.config["schedule"]), []).append(run)
    return [Kind(runs=runs) for _, runs in sorted(found.items(), key=lambda item: item[0])]


def advise_on(folders: Iterable[Path], best_lr: float | None = None) -> tuple[list[str], Picture]:
    """For the folders of runs, or of a comparison: what the pull did in each, what to change, and a picture.

    `best_lr` is that of AdamW with an average; without it, it is looked for among the runs.
    """
    outcomes = read_outcomes(folders)
    pulled = [result for result in outcomes.results if result.pull]
    if not pulled:
        raise ConfigError(
            "none of these runs has readings of the pull; train with PACE and --telemetry-every 40"
        )
    if unlike := differences(outcomes.results):
        name, values = next(iter(unlike.items()))
        raise ConfigError(
            f"these runs differ in {name} ({', '.join(values)[:120]}); give those that are alike"
        )
    plain = _plain_methods(outcomes)
    lines = (
        _about_all(outcomes, plain) if best_lr is None else [f"Taken as the best learning rate: {best_lr:g}."]
    )
    if best_lr is None and plain:
        best_lr = outcomes.best_lr(_lowest(outcomes, plain))
    if best_lr is None:
        lines.append(
            "Whether a pull can help depends on where AdamW is best: compare (paceline compare), or say it "
            "with --best-lr."
        )
    kinds = kinds_of(pulled)
    for kind in kinds:
        lines += ["", _title(kind)]
        lines += [f"  {text}" for text in advise(situation_of(kind, best_lr))]
        lines += [f"  {text}" for text in _seen(kind, outcomes, plain, best_lr)]
    lines += ["", "Theory of slow changes on a quadratic: try what it says before you trust it."]
    return lines, _picture(kinds, outcomes, plain, best_lr)


def _picture(
    kinds: list[Kind], outcomes: Outcomes, plain: Mapping[str, str], best_lr: float | None
) -> Picture:
    """R as it was and as it should have been, and what came of it, over the learning rate."""
    rows: list[tuple[str, ...]] = [("lr", "optimizer", "R, tenth", "median", "nine tenths", "R*")]
    for kind in kinds:
        right = situation_of(kind, best_lr).right_ratio
        rows.append(
            (
                f"{kind.lr:g}",
                kind.name,
                *(f"{value:.3g}" for value in kind.ratios),
                "" if right is None else f"{right:.3g}",
            )
        )

    def ratios(axes: "Axes") -> None:
        for i, name in enumerate(dict.fromkeys(kind.name for kind in kinds)):
            mine = [kind for kind in kinds if kind.name == name]
            low, middle, high = np.array([kind.ratios for kind in mine]).T
            reach = np.maximum([middle - low, high - middle], 0)
            colour, lrs = style(3 + i).on_light, [kind.lr for kind in mine]
            axes.errorbar(lrs, middle, yerr=reach, fmt="o", capsize=3, color=colour, label=name)
        if best_lr is not None:
            line(
                axes, outcomes.lrs, [lr / best_lr - 1 for lr in outcomes.lrs], 0, "R* = η/η* − 1", solid=True
            )
        _rates(axes, outcomes)
        axes.set_yscale("symlog", linthresh=0.1)
        labels(axes, "Strength of the pull", "learning rate", "R: median, and eight tenths of coordinates")

    def losses(axes: "Axes") -> None:
        names = [name for name in outcomes.methods if name in plain or name in outcomes.steered]
        for i, name in enumerate(names):
            points = [(lr, mean) for lr in outcomes.lrs if (mean := outcomes.mean(name, lr)) is not None]
            line(
                axes,
                [lr for lr, _ in points],
                [loss for _, loss in points],
                i,
                name,
                marker="o",
                markersize=4,
            )
        _rates(axes, outcomes)
        labels(axes, "What came of it", "learning rate", "held-out loss, mean over seeds")

    return Picture(name="advice", title="The pull in these runs", rows=tuple(rows), panels=(ratios, losses))


def _rates(axes: "Axes", outcomes: Outcomes) -> None:
    axes.set_xscale("log")
    axes.set_xticks(outcomes.lrs, [f"{lr:g}" for lr in outcomes.lrs])
    axes.minorticks_off()


def _about_all(outcomes: Outcomes, plain: Mapping[str, str]) -> list[str]:
    """Where AdamW's averages are best, and what is best of all."""
    lines = []
    if plain:
        method = _lowest(outcomes, plain)
        lr = outcomes.best_lr(method)
        tried = [rate for rate in outcomes.lrs if outcomes.losses(method, rate)]
        edge = lr in (tried[0], tried[-1])
        lines.append(
            f"Without a pull, {method} is best at lr {lr:g}"
            + (", the edge of what was tried: the true best may lie beyond." if edge else ".")
        )
    ends = {}
    for method in outcomes.methods:
        rate = outcomes.best_lr(method)
        mean = None if rate is None else outcomes.mean(method, rate)
        if rate is not None and mean is not None:
            ends[method] = (mean, rate)
    if len(ends) > 1:
        best = min(ends, key=lambda name: ends[name])
        lines.append(f"Best of all: {best} at lr {ends[best][1]:g}, {ends[best][0]:.3f}.")
    return lines


def _plain_methods(outcomes: Outcomes) -> dict[str, str]:
    """Averages of AdamW at a constant rate: method, and which average it is."""
    found = {}
    for method in outcomes.methods:
        runs = [r for r in outcomes.results if method in r.returned]
        adamw = all(r.config["optimizer"].partition(":")[0] == "adamw" and not r.is_steered for r in runs)
        constant = all(r.config["schedule"] == "constant" for r in runs)
        average = average_of(runs[0], method)
        if adamw and constant and average is not None and outcomes.best_lr(method) is not None:
            found[method] = average
    return found


def _lowest(outcomes: Outcomes, methods: Iterable[str]) -> str:
    def end(method: str) -> float:
        lr = outcomes.best_lr(method)
        mean = None if lr is None else outcomes.mean(method, lr)
        return float("inf") if mean is None else mean

    return min(methods, key=end)


def average_of(run: Result, method: str) -> str | None:
    """Which average a method of a run returns, as in power:0.5; None: the live weights."""
    weights = run.returned[method]
    if weights == "live":
        return None
    beside = dict(named_averages(run.config["averages"]))
    if weights in beside:
        return beside[weights]
    control = run.about["control"]
    if control is None:
        return None
    power = control["power"] if control["return_power"] is None else control["return_power"]
    return f"power:{power:g}"


def _title(kind: Kind) -> str:
    low, _, high = kind.ratios
    return (
        f"lr {kind.lr:g}, {kind.name}: R between {low:.2g} and {high:.2g} for most coordinates {kind.when}; "
        f"{100 * kind.reading('saturated'):.2g} % are pulled back to the average before each step."
    )


def _reading(run: Result) -> Mapping[str, float]:
    """The last reading at the full learning rate: where a rate decays, the pull decays with it."""
    full = 0.9 * max(reading["lr"] for reading in run.pull)
    return next(reading for reading in reversed(run.pull) if reading["lr"] >= full)


def situation_of(kind: Kind, best_lr: float | None) -> Situation:
    """What advice is given on; the typical coordinate is the median one."""
    return Situation(
        lr=kind.lr,
        steps=int(kind.reading("t")),
        ratio=max(kind.ratios[1], -0.99),
        power=kind.control["power"],
        step=kind.control["step"],
        best_lr=best_lr,
    )


def _seen(kind: Kind, outcomes: Outcomes, plain: Mapping[str, str], best_lr: float | None) -> list[str]:
    """What the runs showed, beside what was to be expected; like averages are compared."""
    if not plain or best_lr is None:
        return []
    lr, run = kind.lr, kind.runs[0]
    right = situation_of(kind, best_lr).right_ratio
    expected = "a gain" if right is not None and right > 0.25 else "no gain"
    lines = []
    for method in run.returned:
        loss = outcomes.mean(method, lr)
        if method not in outcomes.steered or loss is None:
            continue
        alike = [name for name, average in plain.items() if average == average_of(run, method)]
        other = alike[0] if alike else _lowest(outcomes, plain)
        without = outcomes.mean(other, lr)
        if without is not None:
            seen = f"{method} {loss:.3f}, {other} {without:.3f}, {loss - without:+.3f}"
        elif outcomes.losses(other, lr):
            seen = f"{method} {loss:.3f}, {other} diverged"
        else:
            seen = f"{method} {loss:.3f}; {other} was not run at this rate"
        lines.append(f"Expected: {expected}. Seen: {seen}.")
    return lines
