"""What the lines of the study say. Pure functions; no torch.

A *pick* is one fixed setting: a method, and the weights that it returns. Its *regret* at a learning rate is
how much more it loses there than a reference at its own best rate, on the same seeds. Settings were
chosen by seed 1, so where there are others it is not reported.
"""

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from paceline.experiments import records


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One run."""

    method: str
    lr: float
    seed: int
    losses: Mapping[str, float | None]
    """At the end, by weights; empty if it diverged."""
    train: tuple[float | None, ...]
    """Means of 50 steps."""
    readings: tuple[float, ...] = ()
    """Of older runs: the cosine of gradient and gap, gap²/noise, means over tensors; and others."""


class Pick(NamedTuple):
    """One setting."""

    method: str
    weights: str


class Estimate(NamedTuple):
    """A mean over seeds."""

    mean: float
    error: float
    """Its standard error; NaN for one seed."""
    seeds: int

    def __format__(self, sign: str) -> str:
        return f"{self.mean:{sign}.3f}" + ("" if math.isnan(self.error) else f" ± {self.error:.3f}")

    def __str__(self) -> str:
        return f"{self}"


def read(paths: Iterable[Path]) -> list[Result]:
    """The runs in files of records; of two lines of a name, the last."""
    lines = {line["name"]: line for path in paths for line in records.read(path)}
    found = []
    for name, line in lines.items():
        method, lr, seed = name.rsplit("-", 2)
        told = {"losses": line["losses"], "train": tuple(line["train"])}
        told |= {"readings": tuple(line.get("readings", ()))}
        found.append(Result(method=method, lr=float(lr), seed=int(seed), **told))
    return found


CHOSEN_BY = 1
"""The seed that settings were chosen by."""


def to_report(seeds: Iterable[int]) -> list[int]:
    """Those that nothing was chosen by, if there are any.

    >>> to_report([1, 12, 11]), to_report([1])
    ([11, 12], [1])
    """
    known = sorted(seeds)
    return [seed for seed in known if seed != CHOSEN_BY] or known


def losses_of(results: Iterable[Result], pick: Pick) -> dict[float, dict[int, float]]:
    """Learning rate → seed → loss; a run that diverged lost infinitely much."""
    table: dict[float, dict[int, float]] = {}
    for result in results:
        # A run that ended without these weights says nothing of them; one without any has diverged.
        if result.method == pick.method and (pick.weights in result.losses or not result.losses):
            loss = result.losses.get(pick.weights)
            table.setdefault(result.lr, {})[result.seed] = math.inf if loss is None else loss
    return dict(sorted(table.items()))


def best_rate(results: Sequence[Result], pick: Pick) -> float:
    """Where its mean over seeds is least."""
    table = losses_of(results, pick)
    return min(table, key=lambda lr: fmean(table[lr].values()))


def best_weights(results: Sequence[Result], method: str, candidates: Iterable[str] = ()) -> Pick:
    """The weights of a method that lose least at their best rate; of all that it has, or of these."""
    names = list(candidates) or sorted({w for r in results if r.method == method for w in r.losses})
    # Only weights that are known at every rate: the best rate may be where others are missing.
    rates = {result.lr for result in results if result.method == method}
    picks = [p for name in names if losses_of(results, p := Pick(method, name)).keys() >= rates]
    return min(picks, key=lambda pick: fmean(losses_of(results, pick)[best_rate(results, pick)].values()))


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and standard error.

    >>> print(estimate([3.0, 3.2]))
    3.100 ± 0.100
    """
    error = (
        stdev(values) / math.sqrt(len(values)) if len(values) > 1 and math.isfinite(sum(values)) else math.nan
    )
    return Estimate(fmean(values), error, len(values))


def regret(
    results: Sequence[Result], pick: Pick, lr: float, reference: Pick, reference_lr: float
) -> Estimate | None:
    """Loss of a pick less that of a reference, paired by seed; None if they share none."""
    ours, theirs = losses_of(results, pick).get(lr, {}), losses_of(results, reference)[reference_lr]
    shared = to_report(ours.keys() & theirs.keys())
    return estimate([ours[seed] - theirs[seed] for seed in shared]) if shared else None


def after_trials(losses: Sequence[float], trials: int) -> float:
    """The expected best of so many different ones, drawn at random: what tuning costs.

    >>> after_trials([3.0, 4.0], 1), after_trials([3.0, 4.0], 2)
    (3.5, 3.0)
    """
    ordered, count = sorted(losses), len(losses)
    if not 1 <= trials <= count:
        raise ValueError(f"trials is {trials}; allowed: 1 to {count}")
    ways = math.comb(count, trials)
    parts = [
        loss * math.comb(count - i - 1, trials - 1) / ways
        for i, loss in enumerate(ordered)
        if count - i >= trials
    ]
    return math.fsum(parts)


def steps_to(train: Sequence[float | None], target: float, window: int = 50) -> int | None:
    """The step at which the training loss, a mean over `window` steps, is first at the target."""
    for number, loss in enumerate(train, 1):
        if loss is not None and loss <= target:
            return number * window
    return None


def table(results: Sequence[Result]) -> list[list[str]]:
    """A row for each method: the weights that are best at its best rate, and their loss at every rate."""
    rates = sorted({result.lr for result in results})
    rows = [["method", "weights", *(f"{lr:g}" for lr in rates)]]
    for method in sorted({result.method for result in results}):
        pick = best_weights(results, method)
        losses = losses_of(results, pick)
        reported = {lr: [by_seed[seed] for seed in to_report(by_seed)] for lr, by_seed in losses.items()}
        cells = [str(estimate(reported[lr])) if lr in reported else "" for lr in rates]
        rows.append([method, pick.weights, *cells])
    return rows


def main() -> None:
    """Print the table of files of records."""
    parser = argparse.ArgumentParser(
        prog="python -m paceline.experiments.defaults.regret",
        description="Losses of the study: a row for each method, a column for each learning rate.",
    )
    parser.add_argument("records", nargs="+", type=Path)
    rows = table(read(parser.parse_args().records))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
