"""The charts of a comparison, from its table."""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import comb
from typing import final

from paceline.studies.looks import look
from paceline.studies.plots import Line, Plot
from paceline.studies.table import Mean, Table, along

LOSS = "held-out loss (nats a token)"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A plot on a page, and what is said of it."""

    key: str
    """The name of its files, e.g. "curves-0.004"."""
    plot: Plot
    caption: str
    """What to see in it, in a sentence or two."""
    lr: float | None = None
    """Charts of other learning rates take its place; None: it is of all."""


def charts(table: Table) -> tuple[Chart, ...]:
    """Return all charts in the order of the page; those without a line are left out."""
    made = [_by_rate(table), _regret(table), _tuning(table)]
    for kind in (_curves, _last_quarter, _saturated, _gap):
        made += [replace(kind(table.where(lr=lr), table), lr=lr) for lr in rates(table)]
    return tuple(chart for chart in made if chart.plot.lines)


def rates(table: Table) -> tuple[float, ...]:
    """Return the learning rates, in order."""
    return tuple(sorted(table.values("lr")))


def reference(table: Table) -> Table | None:
    """Return the best of the other methods at its best rate: PACE is left out where there are others."""
    others = Table(tuple(row for row in table if not row.is_steered))
    return (others if len(others) else table).best("method", "lr")


# --- Over learning rates --------------------------------------------------------------------------------


def _points(rows: Table) -> Iterator[tuple[float, Table]]:
    """Yield each learning rate at which a run of a method has ended, and the runs there."""
    for lr, at in sorted(rows.by("lr").items()):
        if at.losses:
            yield lr, at


def _line(number: int, method: str, points: Iterable[tuple[float, Mean | None]], **more: bool) -> Line:
    """Return the line of a method through means; None stands for a place where a run diverged."""
    found = list(points)
    return Line(
        label=method,
        look=look(number),
        x=[x for x, _ in found],
        y=[math.inf if mean is None else mean.value for _, mean in found],
        error=[0.0 if mean is None else mean.error or 0.0 for _, mean in found],
        thin=more.get("thin", False),
    )


def _lines(lines: Iterable[Line]) -> tuple[Line, ...]:
    return tuple(line for line in lines if len(line.x))


def _by_rate(table: Table) -> Chart:
    lines = (
        _line(number, method, ((lr, at.mean()) for lr, at in _points(rows)))
        for number, (method, rows) in enumerate(table.by("method").items())
    )
    return Chart(
        key="learning-rates",
        plot=Plot(
            title="Loss of the returned model by learning rate",
            lines=_lines(lines),
            x_label="learning rate",
            y_label=LOSS,
            dots=True,
            x_log=True,
        ),
        caption="One setting a method, nothing else tuned. A flat curve forgives a wrong rate.",
    )


def _regret(table: Table) -> Chart:
    best, lines = reference(table), list[Line]()
    mean = None if best is None else best.mean()
    name, lr = ("none", 1.0) if best is None else (best.rows[0].method, best.rows[0].lr)
    for number, (method, rows) in enumerate(table.by("method").items()):
        points = [(at, runs.mean()) for at, runs in _points(rows)]
        if mean is not None:
            behind = [(at / lr, own and replace(own, value=own.value - mean.value)) for at, own in points]
            lines.append(_line(number, method, behind))
    return Chart(
        key="regret",
        plot=Plot(
            title="What a wrong learning rate costs",
            lines=_lines(lines) if len(rates(table)) > 1 else (),
            x_label=f"learning rate, as a multiple of the best of {name}",
            y_label="nats a token above the best",
            dots=True,
            x_log=True,
        ),
        caption=f"How far one fixed setting ends above the best of the other methods ({name} at {lr:g}). "
        "Below 0: better than all of them.",
    )


def _tuning(table: Table) -> Chart:
    lines = []
    for number, (method, rows) in enumerate(table.by("method").items()):
        values = sorted(_or_start(at) for _, at in _points(rows))
        if len(values) > 1 and math.isfinite(values[-1]):
            tries = [float(n) for n in range(1, len(values) + 1)]
            y = [least_of(values, int(n)) for n in tries]
            lines.append(Line(label=method, look=look(number), x=tries, y=y))
    return Chart(
        key="tuning",
        plot=Plot(
            title="What tuning buys",
            lines=tuple(lines),
            x_label="learning rates tried",
            y_label=LOSS,
            dots=True,
        ),
        caption="Loss to expect after trying that many of these learning rates, picked at random, and "
        "keeping the best. A run that diverged counts as the loss it started from.",
    )


def least_of(values: Sequence[float], picks: int) -> float:
    """Return the mean of the least of some of these sorted values, over all ways to pick them.

    >>> least_of([1.0, 2.0, 3.0], 2)  # of 1 2, 1 3, 2 3
    1.3333333333333333
    """
    count = len(values)
    ways = (value * comb(count - 1 - i, picks - 1) for i, value in enumerate(values))
    return sum(ways) / comb(count, picks)


def _or_start(rows: Table) -> float:
    """Return the mean loss over seeds; infinite if one diverged before its first step."""
    ended = [row for row in rows if row.is_ended]
    losses = [row.start if row.loss is None else row.loss for row in ended]
    return statistics.fmean(math.inf if loss is None else loss for loss in losses)


# --- Along a run ----------------------------------------------------------------------------------------


def _curves(rows: Table, table: Table) -> Chart:
    lines = []
    for number, method in enumerate(table.values("method")):
        own = rows.where(method=method)
        weights = own.rows[0].returned if len(own) else "live"
        # Live weights of a run with averages next to it are a method of their own.
        for kind in ("live", weights) if weights == "average" else (weights,):
            points = along(row.curve(kind) for row in own)
            lines.append(_line(number, method, points, thin=kind == "live" and weights != "live"))
    return Chart(
        key=f"curves-{_lr(rows)}",
        plot=Plot(title="Along the runs", lines=_lines(lines), x_label="step", y_label=LOSS),
        caption="Bold: the weights that are returned; thin: live weights, where an average is returned.",
    )


def _last_quarter(rows: Table, table: Table) -> Chart:
    whole = _curves(rows, table)
    return Chart(
        key=f"last-quarter-{_lr(rows)}",
        plot=replace(whole.plot, title="The last quarter", last=True),
        caption="The same, near the end, where methods part.",
    )


def _lr(rows: Table) -> str:
    return f"{rows.rows[0].lr:g}"


# --- The control ----------------------------------------------------------------------------------------


def _saturated(rows: Table, table: Table) -> Chart:
    caption = "Share of coordinates in which the pull is as strong as it may be; PACE acts like Lookahead "
    chart = _pull(
        rows, table, "saturated", "Gains at their limit", "share of coordinates", caption + "there."
    )
    return replace(chart, plot=replace(chart.plot, share=True))


def _gap(rows: Table, table: Table) -> Chart:
    caption = "How far live weights are from their average (root mean square)."
    return _pull(
        rows, table, "gap_rms", "Gap between average and live", "gap, in units of the weights", caption
    )


def _pull(rows: Table, table: Table, name: str, title: str, y_label: str, caption: str) -> Chart:
    lines = []
    for number, method in enumerate(table.values("method")):
        own = [row for row in rows.where(method=method) if row.returned == "average"]  # once a run
        lines.append(_line(number, method, along(row.readings(name) for row in own)))
    return Chart(
        key=f"{name.replace('_', '-')}-{_lr(rows)}",
        plot=Plot(title=title, lines=_lines(lines), x_label="step", y_label=y_label),
        caption=caption,
    )
