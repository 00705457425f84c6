"""The diagrams of a report, from what the runs came to."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from math import comb

from paceline.studies.report.content import Number, Panel, Series
from paceline.studies.report.results import Outcomes, Result

LOSS = "held-out loss (nats a token)"


def panels(outcomes: Outcomes) -> tuple[Panel, ...]:
    """All of them, in the order of the page; those without a line are left out."""
    made = [
        _by_rate(outcomes),
        _regret(outcomes),
        _tuning(outcomes),
        *(_curves(outcomes, lr, "curves", "Along the runs", _WHOLE, after=0.0) for lr in outcomes.lrs),
        *(_curves(outcomes, lr, "last-quarter", "The last quarter", _END, after=0.75) for lr in outcomes.lrs),
        *(_pull(outcomes, lr, "saturated", "Gains at their limit", _SATURATED) for lr in outcomes.lrs),
        *(_pull(outcomes, lr, "gap_rms", "Gap between average and live", _GAP) for lr in outcomes.lrs),
    ]
    return tuple(panel for panel in made if panel.series)


# --- Along a run --------------------------------------------------------------------------------------


_WHOLE = "Bold: the weights that are returned; thin: live weights, where an average is returned."
_END = "The same, near the end, where methods part."


def _curves(outcomes: Outcomes, lr: float, key: str, title: str, caption: str, after: float) -> Panel:
    return Panel(
        key=f"{key}-{lr:g}",
        title=title,
        caption=caption,
        x_label="step",
        y_label=LOSS,
        series=tuple(_lines(outcomes, lr, after)),
        place=key,
        choice=f"lr {lr:g}",
    )


def _lines(outcomes: Outcomes, lr: float, after: float) -> Iterable[Series]:
    for method in outcomes.methods:
        runs = list(outcomes.of(method, lr).values())
        if not runs:
            continue
        weights = next((run for run in runs if run.curves), runs[0]).returned[method]
        both = ("live", weights) if weights == "average" else (weights,)
        for name in both:
            begin = after * int(runs[0].about["steps"])
            series = _over_seeds(method, (dict(run.curves.get(name, ())) for run in runs), begin)
            if series is not None:
                yield _as_live(series) if name == "live" and weights != "live" else series


def _as_live(series: Series) -> Series:
    return Series(method=series.method, weights="live", x=series.x, y=series.y)


def _over_seeds(
    method: str, curves: Iterable[Mapping[int, float | None]], begin: float = 0.0
) -> Series | None:
    """Mean, least and greatest over seeds from a step on; None where not every one of them came to."""
    found = [curve for curve in curves if curve]
    if not found:
        return None
    steps = [step for step in sorted(set().union(*found)) if step >= begin]
    columns = [[curve.get(step) for curve in found] for step in steps]
    if not steps:
        return None
    return _series(method, [float(step) for step in steps], columns)


def _series(method: str, x: list[float], columns: list[list[float | None]]) -> Series:
    y, low, high = (tuple(_each(columns, how)) for how in (statistics.fmean, min, max))
    several = any(len(column) > 1 for column in columns)
    return Series(
        method=method, x=tuple(x), y=y, low=low if several else None, high=high if several else None
    )


def _each(columns: list[list[float | None]], how: Callable[[list[float]], float]) -> Iterable[Number]:
    for column in columns:
        known = [value for value in column if value is not None]
        yield how(known) if known and len(known) == len(column) else None


# --- Over learning rates ------------------------------------------------------------------------------


def _losses(outcomes: Outcomes, method: str) -> tuple[list[float], list[list[float | None]]]:
    """Learning rates at which a method has ended, and what it came to there, by seed."""
    rates = [lr for lr in outcomes.lrs if outcomes.losses(method, lr)]
    return rates, [list(outcomes.losses(method, lr).values()) for lr in rates]


def _by_rate(outcomes: Outcomes) -> Panel:
    return Panel(
        key="learning-rates",
        title="Loss of the returned model by learning rate",
        caption="One setting a method, nothing else tuned. A flat curve forgives a wrong rate."
        + (" Bars: least and greatest over seeds." if len(outcomes.seeds) > 1 else ""),
        x_label="learning rate",
        y_label=LOSS,
        x_log=True,
        markers=True,
        series=tuple(_series(m, *_losses(outcomes, m)) for m in outcomes.methods if _losses(outcomes, m)[0]),
        place="learning rates",
    )


def reference(outcomes: Outcomes) -> tuple[str, float, float] | None:
    """The best of the others: method, learning rate and loss, PACE left out where there are others."""
    others = [m for m in outcomes.methods if m not in outcomes.steered] or list(outcomes.methods)
    found = [
        (mean, method, lr)
        for method in others
        if (lr := outcomes.best_lr(method)) is not None and (mean := outcomes.mean(method, lr)) is not None
    ]
    return (min(found)[1], min(found)[2], min(found)[0]) if found else None


def _regret(outcomes: Outcomes) -> Panel:
    best = reference(outcomes)
    series = []
    for method in outcomes.methods if best is not None else ():
        rates, columns = _losses(outcomes, method)
        if rates and best is not None:
            behind = [[None if v is None else v - best[2] for v in column] for column in columns]
            series.append(_series(method, [lr / best[1] for lr in rates], behind))
    named = f"{best[0]} at {best[1]:g}" if best else "none"
    return Panel(
        key="regret",
        title="What a wrong learning rate costs",
        caption=f"How far one fixed setting ends above the best of the other methods ({named}), at multiples "
        "of the learning rate that is best there. Below 0: better than all of them.",
        x_label="learning rate, as a multiple of the best",
        y_label="nats a token above the best",
        x_log=True,
        markers=True,
        series=tuple(series) if len(outcomes.lrs) > 1 else (),
        place="regret",
    )


def _tuning(outcomes: Outcomes) -> Panel:
    series = []
    for method in outcomes.methods:
        rates = [lr for lr in outcomes.lrs if outcomes.losses(method, lr)]
        values = [_or_start(outcomes, method, lr) for lr in rates]
        if len(rates) > 1 and None not in values:
            tries = range(1, len(rates) + 1)
            y = tuple(_least_of(sorted(v for v in values if v is not None), n) for n in tries)
            series.append(Series(method=method, x=tuple(float(n) for n in tries), y=y))
    return Panel(
        key="tuning",
        title="What tuning buys",
        caption="Loss to expect after trying that many of these learning rates, picked at random, and "
        "keeping the best. A run that diverged counts as the loss it started from.",
        x_label="learning rates tried",
        y_label=LOSS,
        markers=True,
        series=tuple(series),
        place="tuning",
    )


def _least_of(values: list[float], picks: int) -> float:
    """The least of that many different ones picked at random, in the mean; `values` rise.

    >>> _least_of([1.0, 2.0, 3.0], 2)  # of 1 2, 1 3, 2 3
    1.3333333333333333
    """
    count = len(values)
    ways = (value * comb(count - 1 - i, picks - 1) for i, value in enumerate(values))
    return sum(ways) / comb(count, picks)


def _or_start(outcomes: Outcomes, method: str, lr: float) -> float | None:
    """What a method came to, in the mean over seeds; None if one diverged before its first step."""
    runs = outcomes.of(method, lr)
    losses = outcomes.losses(method, lr).items()
    values = [loss if loss is not None else runs[seed].first_loss for seed, loss in losses]
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


# --- The control --------------------------------------------------------------------------------------

_SATURATED = (
    "Share of coordinates in which the pull is as strong as it may be; PACE acts like Lookahead on those.",
    "share of coordinates",
)
_GAP = ("How far live weights are from their average (root mean square).", "gap, in units of the weights")


def _pull(outcomes: Outcomes, lr: float, name: str, title: str, words: tuple[str, str]) -> Panel:
    series = []
    for method in outcomes.methods:
        runs: list[Result] = [run for run in outcomes.of(method, lr).values() if run.pull]
        own = [run for run in runs if run.returned[method] == "average"]  # once a run
        curves = ({int(r["step"]): float(r[name]) for r in run.pull if name in r} for run in own)
        made = _over_seeds(method, curves)
        series += [made] if made is not None else []
    return Panel(
        key=f"{name.replace('_', '-')}-{lr:g}",
        title=title,
        caption=words[0],
        x_label="step",
        y_label=words[1],
        series=tuple(series),
        place=name,
        choice=f"lr {lr:g}",
    )
