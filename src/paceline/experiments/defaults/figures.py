"""The figures of the study: regret over the learning rate, what tuning costs, steps to a target.

example:
  python -m paceline.experiments.defaults.figures records/FILE.jsonl --out docs/defaults.png \\
      --methods adamw scaled:15,control:0.2/power_0_7 paper:0.003 schedule_free
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from paceline.experiments.defaults.regret import (
    Pick,
    Result,
    after_trials,
    best_rate,
    best_weights,
    estimate,
    losses_of,
    read,
    regret,
    steps_to,
)
from paceline.experiments.report.palette import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(results: Sequence[Result], methods: Sequence[str], path: Path) -> list[str]:
    """Three panels, and their numbers as lines of text; the others are compared with the first method."""
    from matplotlib.figure import Figure

    picks = [_pick(results, method) for method in methods]
    reference = picks[0]
    figure = Figure(figsize=(15, 4.6), dpi=140, layout="constrained", facecolor="white")
    over_rates, over_trials, over_steps = (figure.add_subplot(1, 3, i) for i in (1, 2, 3))
    lines = _regret(over_rates, results, picks, reference)
    lines += _trials(over_trials, results, picks)
    lines += _steps(over_steps, results, picks, reference)
    handles, labels = over_rates.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path)
    return lines


def _pick(results: Sequence[Result], text: str) -> Pick:
    """METHOD with the weights that serve it best, or METHOD/WEIGHTS."""
    method, _, weights = text.partition("/")
    return Pick(method, weights) if weights else best_weights(results, method)


def _regret(axes: "Axes", results: Sequence[Result], picks: Sequence[Pick], reference: Pick) -> list[str]:
    there = best_rate(results, reference)
    lines = [f"regret against {reference.method} ({reference.weights}) at {there:g}"]
    for i, pick in enumerate(picks):
        found = {lr: regret(results, pick, lr, reference, there) for lr in losses_of(results, pick)}
        known = {lr: value for lr, value in found.items() if value is not None and math.isfinite(value.mean)}
        errors = [0.0 if math.isnan(value.error) else value.error for value in known.values()]
        axes.errorbar(
            list(known), [value.mean for value in known.values()], yerr=errors, color=style(i).on_light,
            marker="o", markersize=4, label=f"{pick.method}, {pick.weights}",
        )  # fmt: skip
        lines.append(f"  {pick.method}: " + ", ".join(f"{lr:g}: {value}" for lr, value in known.items()))
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=0.05)
    axes.set_ylim(bottom=-0.025)
    _label(
        axes,
        "Regret of one fixed setting",
        "learning rate",
        f"held-out loss over {reference.method} at {there:g}, nats",
    )
    return lines


def _trials(axes: "Axes", results: Sequence[Result], picks: Sequence[Pick]) -> list[str]:
    lines = ["expected best loss after N learning rates drawn at random"]
    for i, pick in enumerate(picks):
        losses = [fmean(seeds.values()) for seeds in losses_of(results, pick).values()]
        losses = [min(loss, 20.0) for loss in losses]  # a run that diverged is as bad as guessing
        counts = range(1, len(losses) + 1)
        values = [after_trials(losses, n) for n in counts]
        axes.plot(list(counts), values, color=style(i).on_light, marker="o", markersize=4)
        lines.append(f"  {pick.method}: " + ", ".join(f"{value:.3f}" for value in values))
    _label(axes, "What tuning costs", "learning rates tried, at random", "expected best held-out loss")
    return lines


def _steps(axes: "Axes", results: Sequence[Result], picks: Sequence[Pick], reference: Pick) -> list[str]:
    """Steps until the training loss is where the reference's is after nine tenths of its run."""
    there = best_rate(results, reference)
    curves = [r.train for r in results if r.method == reference.method and r.lr == there]
    ends = [curve[len(curve) * 9 // 10] for curve in curves]
    target = fmean(end for end in ends if end is not None)
    lines, names = [f"steps to a training loss of {target:.3f}, each at its best rate"], list[str]()
    for i, pick in enumerate(picks):
        rate = best_rate(results, pick)
        needed = [steps_to(r.train, target) for r in results if r.method == pick.method and r.lr == rate]
        known = [float(n) for n in needed if n is not None]
        text = str(estimate(known)) if known else "never"
        if known:
            axes.barh(i, fmean(known), color=style(i).on_light)
        names.append(f"{pick.method}: {fmean(known):.0f}" if known else f"{pick.method}: never")
        lines.append(f"  {pick.method} at {rate:g}: {text} ({len(known)} of {len(needed)} runs)")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    _label(axes, f"Steps to a training loss of {target:.3f}", "steps", "")
    return lines


def _label(axes: "Axes", title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color="#ebebe7")
    axes.set_axisbelow(True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m paceline.experiments.defaults.figures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument(
        "--methods",
        nargs="+",
        required=True,
        help="METHOD, with the weights that are best at its best rate, or METHOD/WEIGHTS; the others are "
        "compared with the first",
    )
    parser.add_argument("--out", type=Path, required=True, help="the PNG file")
    given = parser.parse_args()
    results = read(given.records)
    known: dict[str, set[str]] = {}
    for result in results:
        known.setdefault(result.method, set()).update(result.losses)
    for method, _, weights in (text.partition("/") for text in given.methods):
        if method not in known:
            parser.error(f"{method} is in no record; there are {', '.join(sorted(known))}")
        if weights and weights not in known[method]:
            parser.error(f"{method} returned no {weights}; there are {', '.join(sorted(known[method]))}")
    for line in draw(results, given.methods, given.out):
        print(line)


if __name__ == "__main__":
    main()
