"""What the paper's figures share: the table of a figure, and the kinds of panels.

.. code-block:: text

    along       held-out loss over steps: the best run of each method
    mean_along  the mean over seeds, with a band of its standard error
    over_c      held-out loss at the end over the strength c, with AdamW and the EMA at its left
    river       decayed branches of AdamW over PACE at a constant rate
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, final

from paceline.paper.runs import BESIDE, average
from paceline.paper.scales import PAPER, Scale
from paceline.runs.config import Run, as_mapping
from paceline.runs.names import average_of
from paceline.studies.lines import Finished
from paceline.studies.looks import Look, look, ordered_look
from paceline.studies.plots import Line, Plot, Sheet
from paceline.studies.runs import Named
from paceline.studies.table import Mean, Table

LOSS = "held-out loss (nats a token)"
DECAYED = ("cosine", "wsd")
METHODS = ("AdamW", "EMA", "PACE")
LOOKS = dict(zip(("AdamW", "EMA", "AdamW WSD", "PACE", "Schedule-Free", "PACE WSD"), map(look, range(6))))

Rows = tuple[tuple[Plot, ...], ...]
Printed = tuple[str, str, str | None]


@final
@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of the paper: its runs at a scale, and what is drawn of them."""

    label: str
    title: str
    runs: Callable[[Scale], Iterable[Named]]
    draw: Callable[[Table], Rows]
    printed: Callable[[Table], Iterable[Printed]] = lambda table: ()
    """What the paper prints: what it is, the paper's number, and ours; None if runs are missing."""


# --- The table of a figure ------------------------------------------------------------------------------

# What has to be as in the run. Not where data and model are, nor what a machine needs, nor whether a decayed
# run was forked: done from its first step it is the same.
DECISIVE = (
    "task", "length", "batch_size", "steps", "method", "lr", "schedule", "warmup", "averages", "clip_norm",
    "dropout", "seed",
)  # fmt: skip


def differences(run: Run, config: Mapping[str, Any]) -> list[str]:
    """Return in what a record is of another run."""
    now = as_mapping(run)
    return [f"{k}: {config.get(k)!r}, not {now[k]!r}" for k in DECISIVE if config.get(k) != now[k]]


def readings(one: Named) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield weights and tags of all that a run stands for: of AdamW also each EMA beside it."""
    if one.tags["method"] != "AdamW":
        yield "average", dict(one.tags)
        return
    yield "live", dict(one.tags)
    for kappa, uf in product(*BESIDE[one.tags["model"]]):
        yield average_of(average(kappa, uf))[0], {**one.tags, "method": "EMA", "kappa": kappa, "uf": uf}


def table_of(
    runs: Iterable[Named], scale: Scale, found: Mapping[str, Finished]
) -> tuple[Table, list[str]]:  # fmt: skip
    """Return a row for each reading of each run, and what records of other runs differ in; they are left out.

    A run that is missing has rows too, which are unfinished. A branch has the curves of the run it continues.
    A run that stands for several of the paper's models has rows for each.
    """
    rows, odd = [], {}
    for one in {(one.tags["model"], one.name): one for one in runs}.values():
        if one.name in found and (differs := differences(one.run, found[one.name].config)):
            odd[one.name] = f"{one.name}: {'; '.join(differs)}"
        done = None if one.name in odd else found.get(one.name)
        name, begins = one.run.after or ("", 0)
        if name in found and name not in odd:
            done = _continued(found[name], done, begins)
        short = scale.models[one.tags["model"]].short
        more = {"begins": begins, "here": short if short != PAPER.models[one.tags["model"]].short else ""}
        missing = Finished(
            name=one.name,
            config=as_mapping(one.run),
            methods={},
            method="",
            returned="",
            outcome="unfinished",
        )
        for weights, tags in readings(one):
            own = {"name": one.name, "method": tags["method"], "returned": weights, "tags": tags | more}
            rows.append(replace(done or missing, **own))
    return Table(tuple(rows)), list(odd.values())


def _continued(before: Finished, done: Finished | None, begins: int) -> Finished | None:
    """Return a branch with the curves, up to where it begins, of the run that it continues.

    If that one diverged before, so did the branch: until there the two are one run.
    """
    if done is None:
        return before if before.diverged and (before.ended or 0) <= begins else None
    curves: dict[str, Any] = {}
    for name in ("evaluations", "train", "pull"):
        first, rest = getattr(before, name), getattr(done, name)
        curves[name] = (*(p for p in first if p[0] <= begins), *(p for p in rest if p[0] > begins))
    return replace(done, **curves)


def note(rows: Iterable[Finished]) -> str:
    """Return the model that ran in place of the paper's, and how many runs of which method are missing."""
    table = Table(tuple(rows))
    said, missing = [f"here {name}" for name in table.values("here") if name], []
    for method, own in table.by("method").items():
        names, left = {row.name for row in own}, {row.name for row in own if not row.is_ended}
        if left and method != "EMA":  # which is read off the run of AdamW
            missing.append(f"{len(left)} of {len(names)} {method}")
    return " · ".join([*said, *([f"missing: {', '.join(missing)}"] if missing else [])])


def sheet(figure: Figure, scale: Scale, found: Mapping[str, Finished]) -> tuple[Sheet, list[str]]:
    """Return a figure from records, and what those differ in that are left out."""
    table, odd = table_of(figure.runs(scale), scale, found)
    trained = {}
    for row in map(scale.models.__getitem__, table.values("model")):
        tokens = row.settings["batch_size"] * row.settings["length"]
        trained[row.short, row.steps] = f"{row.short}, {row.steps:,} steps of {tokens:,} tokens"
    said = "; ".join(trained.values())
    said = said if scale.name == "paper" else f"scale {scale.name}, not the paper's: {said}"
    notes = [
        f"{what}: {paper} in the paper, {o or 'missing'} here" for what, paper, o in figure.printed(table)
    ]
    names, left = {row.name for row in table}, {row.name for row in table if not row.is_ended}
    notes += [f"{len(left)} of {len(names)} runs are missing"] if left else []
    notes += [f"left out, of other settings than here: {len(odd)} runs"] if odd else []
    subtitle = f"{figure.label} · {said}"
    return Sheet(title=figure.title, subtitle=subtitle, rows=figure.draw(table), notes=tuple(notes)), odd


# --- Words ----------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Return a number as short as it can be.

    >>> number(0.003), number(0.0015), number(0.15), number(0.5)
    ('3e-3', '1.5e-3', '0.15', '0.5')
    """
    if value >= 0.1 or value == 0:
        return f"{value:g}"
    power = math.floor(math.log10(value) + 1e-9)
    return f"{round(value / 10**power, 6):g}e{power}"


def title(model: str) -> str:
    """Return the name of a model of the paper."""
    return PAPER.models[model].title


def settings(row: Finished) -> str:
    """Return the line of a legend: the method, what was chosen for it, and where it ended."""
    parts = [f"η={number(row.lr)}"]
    parts += [f"c={number(row['c'])}"] if row["c"] is not None else []
    parts += [f"κ={row['kappa']:g}"] if row["kappa"] is not None else []
    parts += [row["schedule"]] if row["schedule"] != "constant" else []
    return f"{row.method}  {', '.join(parts)}" + ("" if row.loss is None else f": {row.loss:.4f}")


def slashed(values: Iterable[float | None]) -> str | None:
    """Return numbers with slashes between them, None if there is none.

    >>> slashed([1.25, None]), slashed([None])
    ('1.250/?', None)
    """
    known = [f"{value:.3f}" if value is not None else "?" for value in values]
    return "/".join(known) if any(word != "?" for word in known) else None


# --- Panels ---------------------------------------------------------------------------------------------


def by_method(
    table: Table, methods: Sequence[str] = METHODS, baselines: Sequence[str] = ()
) -> dict[str, Table]:
    """Return the rows of each method; with `baselines`, all but PACE under these schedules."""
    found = {method: table.where(method=method) for method in methods}
    schedules = {method: "constant" if method == "PACE" else tuple(baselines) for method in methods}
    return {m: rows.where(schedule=schedules[m]) for m, rows in found.items()} if baselines else found


def curve(label: str, shown: Look, points: Iterable[tuple[int, float | None]], **more: Any) -> Line:
    """Return a line through points."""
    known = [(step, y) for step, y in points if y is not None]
    return Line(label=label, look=shown, x=[x for x, _ in known], y=[y for _, y in known], **more)


def grid(panel: Callable[[Any, Any], Plot], rows: Iterable[Any], columns: Iterable[Any]) -> Rows:
    """Return a panel for each pair of values."""
    return tuple(tuple(panel(row, column) for column in columns) for row in rows)


def plot(title: str, lines: Sequence[Line], rows: Iterable[Finished], **more: Any) -> Plot:
    """Return a panel of the loss over steps, with a note on the runs that it needs."""
    labels: dict[str, Any] = {"x_label": "step", "y_label": LOSS}
    return Plot(title=title, lines=lines, note=note(rows), **(labels | more))


def along(
    title: str, lots: Mapping[str, Table], *, train: bool = False, zoom: bool = True, last: bool = False
) -> Plot:
    """Return the best run of each method over its steps, by held-out loss at the end."""
    best = [(method, row) for method, rows in lots.items() for row in rows.best("name", "returned") or ()]
    lines = [curve(settings(row), LOOKS[method], row.train if train else row.curve()) for method, row in best]
    for method in lots.keys() - dict(best).keys():
        if any(row.is_ended for row in lots[method]):
            lines.append(Line(label=f"{method}: all diverged", look=LOOKS[method], x=[], y=[]))
    rows = (row for own in lots.values() for row in own)
    y_label = "training loss, smoothed (nats a token)" if train else LOSS
    return plot(
        title, lines, rows, y_label=y_label, zoom=zoom and not (train or last), last=last, own_legend=True
    )


def mean_along(title: str, lots: Mapping[str, Table]) -> Plot:
    """Return the mean of each method over its seeds, at steps that all have; of the EMAs the best."""
    lines = []
    for method, rows in lots.items():
        curves = [dict(row.curve()) for row in rows.best("kappa") or rows if row.is_ended]
        steps = sorted(set.intersection(*map(set, curves))) if curves else []
        means = [mean for step in steps if (mean := Mean.of(own[step] for own in curves)) is not None]
        error = [mean.error or 0.0 for mean in means]
        points = zip(steps, (mean.value for mean in means), strict=True)
        lines.append(curve(method, LOOKS[method], points, error=error))
    return plot(title, lines, (row for own in lots.values() for row in own), zoom=True)


def end(rows: Table, *choice: str) -> tuple[float | None, float]:
    """Return the mean loss over seeds and its error, at the best of `choice`; infinite if all diverged."""
    best = rows.best(*choice)
    if best is None or (mean := best.mean()) is None:
        return (math.inf if any(row.is_ended for row in rows) else None), 0.0
    return mean.value, mean.error or 0.0


def over_c(
    title: str, rows: Table, strengths: Sequence[float], by: str, values: Sequence[Any], *,
    own_legend: bool = False,
) -> Plot:  # fmt: skip
    """Return the loss at the end over c, a line for each value: the mean over seeds, at the best κ and uf."""
    lines = []
    for i, value in enumerate(values):
        own = rows.where(**{by: (value, None)})  # AdamW has no κ and goes with every one
        if not len(own):  # another model's rate
            continue
        lots = [own.where(method="AdamW"), own.where(method="EMA")]
        lots += [own.where(method="PACE", c=c) for c in strengths]
        ends, errors = zip(*(end(lot, "kappa", "uf") for lot in lots), strict=True)
        label = value if isinstance(value, str) else f"{'η' if by == 'lr' else 'κ'} = {number(value)}"
        shown = ordered_look(i, len(values))
        lines.append(Line(label=label, look=shown, x=range(len(ends)), y=ends, error=errors))
    ticks = ("AdamW", "EMA", *map(number, strengths))
    label = "pullback strength c"
    return plot(title, lines, rows, x_label=label, ticks=ticks, set_apart=2, own_legend=own_legend)


def river(title: str, baseline: Table, pulled: Table) -> Plot:
    """Return decayed branches of AdamW over PACE at a constant rate."""
    (whole,), (ours,) = baseline.where(method="AdamW", schedule="constant"), pulled
    decayed = baseline.where(method="AdamW", schedule="wsd")
    lines = [
        curve(settings(ours), LOOKS["PACE"], ours.curve()),
        curve(settings(whole), LOOKS["AdamW"], whole.curve(), thin=True),
        *branches(decayed, "AdamW WSD"),
    ]
    return plot(title, lines, (whole, ours, *decayed), own_legend=True)


def branches(rows: Table, name: str) -> Iterator[Line]:
    """Yield decayed branches, each from where it leaves the run at a constant rate."""
    for row in rows:
        points = [point for point in row.curve() if point[0] > row["begins"]]
        if points and (first := at(row.curve(), row["begins"])) is not None:
            points.insert(0, (row["begins"], first))
        yield curve(f"{name} branches", LOOKS[name], points, end=slashed([row.loss]) or "")


def at(points: Sequence[tuple[int, float]], x: float) -> float | None:
    """Return a curve's value between its points; None outside.

    >>> at([(10, 4.0), (20, 3.0)], 15)
    3.5
    """
    for (left, low), (right, high) in pairwise(points):
        if left <= x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return points[-1][1] if points and points[-1][0] == x else None
