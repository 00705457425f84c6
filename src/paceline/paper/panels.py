"""Parts that the paper's figures share: the table of a figure, and the kinds of panels.

.. code-block:: text

    along           a quantity over steps: of each method the best setting, the mean over seeds with its error
    over, over_c    held-out loss at the end over a setting; over c, with AdamW and the EMA at its left
    river           runs at a constant rate, and the decayed branches that leave them
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, final

from paceline.paper.runs import Sweep, readings
from paceline.paper.scales import PAPER, Scale
from paceline.runs.config import Run, as_mapping
from paceline.studies.lines import Finished
from paceline.studies.looks import Look, look, ordered_look
from paceline.studies.plots import Line, Plot, Sheet
from paceline.studies.runs import Named
from paceline.studies.table import Table
from paceline.studies.table import along as mean_along

Panel = Callable[[Table, str], Plot]
"""A function of rows and a title."""
Draw = Callable[[Table], Sequence[Sequence[Plot]]]
"""A function from the table of a figure to its rows of panels."""
Printed = tuple[str, str, str | None]
"""What it is, the paper's number, and ours; None if runs are missing."""
Lots = Mapping[str, Mapping[str, Any]]
"""Names of lines, and the tags of the rows that each is chosen from."""


@final
@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of the paper: its runs, and what is drawn of them."""

    label: str
    title: str
    sweeps: tuple[Sweep, ...]
    draw: Draw
    printed: Callable[[Table], Sequence[Printed]] = lambda table: ()
    note: str = ""

    def runs(self, scale: Scale) -> list[Named]:
        """Return the runs of the figure at a scale; a run that several sweeps ask for is there for each."""
        return [one for sweep in self.sweeps for one in sweep.runs(scale)]


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


def table_of(runs: Iterable[Named], scale: Scale, found: Mapping[str, Finished]) -> tuple[Table, list[str]]:
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
        here, there = (known.models[one.tags["model"]].short for known in (scale, PAPER))
        more = {"begins": begins, "here": here if here != there else ""}
        for weights, tags in readings(one):
            own: Any = {"name": one.name, "method": tags["method"], "returned": weights, "tags": tags | more}
            missing: Any = {"config": as_mapping(one.run), "methods": {}, "outcome": "unfinished"}
            rows.append(replace(done, **own) if done else Finished(**missing, **own))
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


def sheet(figure: Figure, scale: Scale, found: Mapping[str, Finished]) -> tuple[Sheet, list[str]]:
    """Return a figure from records, and what those differ in that are left out."""
    table, odd = table_of(figure.runs(scale), scale, found)
    trained = {}
    for row in map(scale.models.__getitem__, table.values("model")):
        tokens = row.settings["batch_size"] * row.settings["length"]
        trained[row.short, row.steps] = f"{row.short}, {row.steps:,} steps of {tokens:,} tokens"
    said = "; ".join(trained.values())
    said = said if scale.name == "paper" else f"scale {scale.name}, not the paper's: {said}"
    printed = figure.printed(table)
    notes = [f"{what}: {paper} in the paper, {ours or 'missing'} here" for what, paper, ours in printed]
    notes += [figure.note] if figure.note else []
    names, left = {row.name for row in table}, {row.name for row in table if not row.is_ended}
    notes += [f"{len(left)} of {len(names)} runs are missing"] if left else []
    notes += [f"left out, of other settings than here: {len(odd)} runs"] if odd else []
    rows, subtitle = tuple(map(tuple, figure.draw(table))), f"{figure.label} · {said}"
    return Sheet(title=figure.title, subtitle=subtitle, rows=rows, notes=tuple(notes)), odd


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


def slashed(values: Iterable[float | None]) -> str | None:
    """Return numbers with slashes between them, None if there is none.

    >>> slashed([1.25, None]), slashed([None])
    ('1.250/?', None)
    """
    known = [f"{value:.3f}" if value is not None else "?" for value in values]
    return "/".join(known) if any(word != "?" for word in known) else None


def _settings(rows: Table) -> str:
    """Return the line of a legend: the method, what was chosen for it, and where it ended."""
    row, mean = rows.rows[0], rows.mean()
    parts = [f"η={number(row.lr)}"]
    parts += [f"c={number(row['c'])}"] if row["c"] is not None else []
    parts += [f"κ={row['kappa']:g}"] if row["kappa"] is not None else []
    parts += [row["schedule"]] if row["schedule"] != "constant" else []
    return f"{row.method}  {', '.join(parts)}" + ("" if mean is None else f": {mean.text()}")


# --- Lines of a panel -----------------------------------------------------------------------------------


def each(*methods: str) -> Lots:
    """Return a line for each method."""
    return {method: {"method": method} for method in methods}


def values(tag: str, given: Iterable[Any]) -> Lots:
    """Return a line or a panel for each value of a tag; AdamW, which has neither κ nor uf, is in all."""
    letter = {"lr": "η", "kappa": "κ", "c": "c", "uf": "uf"}.get(tag)
    return {f"{letter} = {number(v)}" if letter else v: {tag: (v, None)} for v in given}


def against(*schedules: str) -> Lots:
    """Return AdamW and its EMA, each under the best of these schedules, and PACE at a constant rate."""
    lots = {method: {"method": method, "schedule": schedules} for method in ("AdamW", "EMA")}
    return {**lots, "PACE": {"method": "PACE", "schedule": "constant"}}


METHODS = each("AdamW", "EMA", "PACE")
BEST_DECAY = {"AdamW constant": {"method": "AdamW", "schedule": "constant"}, **against("cosine", "wsd")}
_NAMES = ("AdamW", "EMA", "AdamW WSD", "PACE", "Schedule-Free", "PACE WSD", "AdamW constant")
LOOKS = dict(zip(_NAMES, map(look, range(7)), strict=True))


def _look(name: str, lots: Lots) -> Look:
    """Return the look of a method, or that of a value among others."""
    return LOOKS.get(name) or ordered_look(list(lots).index(name), len(lots))


def at(points: Sequence[tuple[int, float]], x: float) -> float | None:
    """Return a curve's value between its points; None outside.

    >>> at([(10, 4.0), (20, 3.0)], 15)
    3.5
    """
    for (left, low), (right, high) in pairwise(points):
        if left <= x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return points[-1][1] if points and points[-1][0] == x else None


# --- Panels ---------------------------------------------------------------------------------------------


def grid(panel: Panel, columns: Lots, rows: Lots | None = None) -> Draw:
    """Return what draws a panel for each column, in each row if there are several."""

    def drawn(table: Table) -> list[list[Plot]]:
        return [
            [
                panel(table.where(**tags, **own), ", ".join(filter(None, (left, name))))
                for name, own in columns.items()
            ]
            for left, tags in (rows or {"": {}}).items()
        ]

    return drawn


def below(*draws: Draw) -> Draw:
    """Return what draws grids one below the other."""
    return lambda table: [row for draw in draws for row in draw(table)]


def beside(*draws: Draw) -> Draw:
    """Return what draws the first rows of grids next to each other."""
    return lambda table: [[plot for draw in draws for plot in draw(table)[0]]]


def _plot(title: str, lines: Sequence[Line], rows: Table, **more: Any) -> Plot:
    """Return a panel; a note says what ran in place of what, and how many runs are missing."""
    said, missing = [f"here {name}" for name in rows.values("here") if name], []
    for method, own in rows.by("method").items():
        names, left = {row.name for row in own}, {row.name for row in own if not row.is_ended}
        if left and method != "EMA":  # which is read off the run of AdamW
            missing.append(f"{len(left)} of {len(names)} {method}")
    said += [f"missing: {', '.join(missing)}"] if missing else []
    return Plot(title=title, lines=lines, note=" · ".join(said), **more)


def along(rows: Table, title: str, lots: Lots = METHODS, what: str = "evaluations", **more: Any) -> Plot:
    """Return a panel of the best setting of each line over its steps, by held-out loss at the end.

    It is the mean over seeds, with a band of its standard error.

    Arguments:
        rows: of all lines.
        title: that of the panel.
        lots: the lines. If they are methods, the legend says what was chosen for each.
        what: held-out losses ("evaluations"), training losses ("train"), or readings of the pull ("pull").
        more: fields of `Plot`.
    """
    methods = lots.keys() <= LOOKS.keys()
    lines, shown = [], list[Finished]()
    for name, tags in lots.items():
        own = rows.where(**tags)
        shown += own
        best = own.best("lr", "schedule", "c", "kappa", "uf")
        if best is not None:
            means = mean_along(_points(row, what) for row in best if row.is_ended)
            x, y = [step for step, _ in means], [mean.value for _, mean in means]
            label, error = _settings(best) if methods else name, [mean.error or 0.0 for _, mean in means]
            lines.append(Line(label=label, look=_look(name, lots), x=x, y=y, error=error))
        elif any(row.is_ended for row in own):
            label = f"{name}: diverged at every setting"
            lines.append(Line(label=label, look=_look(name, lots), x=[], y=[]))
    words: Any = {"x_label": "step", "y_label": _Y[what], "own_legend": methods}
    return _plot(title, lines, Table(tuple(shown)), **words, **more)


_Y = {
    "evaluations": "held-out loss (nats a token)",
    "train": "training loss, smoothed (nats a token)",
    "pull": "share of gains at 1",
}


def _points(row: Finished, what: str) -> list[tuple[int, float]]:
    if what == "evaluations":
        return row.curve()
    if what == "pull":
        return row.readings("saturated")
    return [(step, value) for step, value in row.train if value is not None]


def _end(rows: Table) -> tuple[float | None, float]:
    """Return the mean loss over seeds and its error, at the best κ and uf; infinite if all diverged."""
    best = rows.best("schedule", "c", "kappa", "uf")
    if best is None or (mean := best.mean()) is None:
        return (math.inf if any(row.is_ended for row in rows) else None), 0.0
    return mean.value, mean.error or 0.0


def _end_of_pull(rows: Table) -> tuple[float | None, float]:
    """Return the share of gains at 1 at the end of a run."""
    points = [point for row in rows for point in _points(row, "pull")]
    return (points[-1][1] if points else None), 0.0


def over(rows: Table, title: str, x_label: str, places: Lots, lots: Lots, **more: Any) -> Plot:
    """Return a panel of the loss at the end, at each place of the x-axis, for each line."""
    pull, lines = more.get("share", False), []
    for name, tags in lots.items():
        own = rows.where(**tags)
        if len(own):  # else it is another model's rate
            found = [(_end_of_pull if pull else _end)(own.where(**place)) for place in places.values()]
            y, error = zip(*found, strict=True)
            lines.append(Line(label=name, look=_look(name, lots), x=range(len(y)), y=y, error=error))
    y_label = _Y["pull"] + ", at the end" if pull else _Y["evaluations"]
    return _plot(title, lines, rows, x_label=x_label, y_label=y_label, ticks=tuple(places), **more)


def over_c(rows: Table, title: str, strengths: Iterable[float], lots: Lots, **more: Any) -> Plot:
    """Return a panel of the loss at the end over c, with AdamW and the EMA at its left."""
    pulled = {number(c): {"method": "PACE", "c": c} for c in strengths}
    places = {**each("AdamW", "EMA"), **pulled}
    return over(rows, title, "pullback strength c", places, lots, set_apart=2, **more)


def river(rows: Table, title: str) -> Plot:
    """Return a panel of AdamW and PACE at a constant rate, and of the decayed branches that leave them."""
    own, lines = rows.where(method=("AdamW", "PACE")), []
    for row in own:
        points, begins, name = row.curve(), row["begins"], row.method
        label, end, first = _settings(Table((row,))), "", at(points, begins)
        if row["schedule"] == "wsd":
            points = [point for point in points if point[0] > begins]
            points = points if first is None else [(begins, first), *points]
            name, label, end = f"{name} WSD", f"{name} WSD branches", slashed([row.loss]) or ""
        x, y = [step for step, _ in points], [loss for _, loss in points]
        lines.append(Line(label=label, look=LOOKS[name], x=x, y=y, thin=name == "AdamW", end=end))
    return _plot(title, lines, own, x_label="step", y_label=_Y["evaluations"], own_legend=True)
