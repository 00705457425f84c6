"""How the paper's figures look: panels in rows and columns, one style for all of them, PDF and PNG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, final

from paceline.studies.report.axis import y_axis
from paceline.studies.report.content import Panel, Series
from paceline.studies.report.palette import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT, GRID = "#1c1e21", "#5c6067", "#ebebe7"
# Method to colour and dashes: those that reports have.
METHODS = {"AdamW": 0, "EMA": 1, "AdamW WSD": 2, "PACE": 3, "Schedule-Free": 4, "PACE WSD": 5}
METHODS |= {"PACE, default": 7}
# Light to dark, for values that have an order; dark enough for a white ground.
_RAMP = ("#e0a100", "#d9682b", "#c23b5a", "#94338a", "#5a3f9e", "#24457f", "#0d2f3f")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """How a line is drawn."""

    colour: str
    dashes: tuple[float, ...] = ()


def of_method(name: str) -> Look:
    """The same in every figure."""
    found = style(METHODS[name])
    return Look(colour=found.on_light, dashes=found.dashes)


def of_order(place: int, count: int) -> Look:
    """The look of one of several values that have an order."""
    number = round(place * (len(_RAMP) - 1) / max(count - 1, 1))
    return Look(colour=_RAMP[number], dashes=style(place).dashes)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Points, and how they look. y is None where a run is missing, and infinite where it diverged."""

    label: str
    look: Look
    x: Sequence[float]
    y: Sequence[float | None]
    spread: Sequence[float] | None = None
    """Half the height of the band, or of the bars."""
    thin: bool = False
    end: str = ""
    """Written at the last point."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """One panel."""

    title: str
    lines: tuple[Line, ...]
    x_label: str
    y_label: str
    ticks: tuple[str, ...] = ()
    """Names of the places 0, 1, …: then points are dots, and x is a number of a place."""
    set_apart: int = 0
    """How many of the first places are baselines: a line divides them from the rest."""
    zoom: bool = False
    """The last quarter once more, in a corner."""
    last: bool = False
    """Nothing but the last quarter."""
    share: bool = False
    """Values are shares: from 0 to 1, or to the greatest where all are small."""
    own_legend: bool = False
    """What the lines are differs from panel to panel."""


@final
@dataclass(frozen=True, kw_only=True)
class Sheet:
    """A whole figure."""

    title: str
    subtitle: str
    rows: tuple[tuple[Plot, ...], ...]
    notes: tuple[str, ...] = field(default=())
    """Below it."""


_SMALL = 0.25
"""Shares that are all below it would be flat lines on an axis to 1."""
_HEAD, _LEGEND, _NOTE = 0.72, 0.24, 0.17
"""Inches of the title and what is below it, of a row of the legend, and of a note."""


def draw(sheet: Sheet, stem: Path) -> list[Path]:
    """Write it, as PDF and as PNG."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = max(map(len, sheet.rows))
    own = any(plot.own_legend for row in sheet.rows for plot in row)
    width = max(7.4, 4.1 * columns)
    labels = [] if own else list(dict.fromkeys(o.label for row in sheet.rows for p in row for o in p.lines))
    in_row = max(1, int(width / 1.5))
    notes = [part for note in sheet.notes for part in wrap(note, int(width * 15), subsequent_indent="    ")]
    foot = 0.12 + _LEGEND * -(-len(labels) // in_row) + _NOTE * len(notes)
    subtitle = wrap(sheet.subtitle, int(width * 14))
    head = _HEAD + _NOTE * (len(subtitle) - 1)
    height = head + sum(_height(row, columns) for row in sheet.rows) + foot
    with rc_context({"pdf.fonttype": 42, "font.size": 9, "path.simplify": True}):
        middle = (0.0, foot / height, 1.0, 1 - (head + foot) / height)
        layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.03, hspace=0.03, rect=middle)
        figure = Figure(figsize=(width, height), dpi=130, facecolor="white", layout=layout)
        words: dict[str, Any] = {"ha": "left", "va": "top", "parse_math": False}
        left = 0.12 / width
        figure.text(left, 1 - 0.1 / height, sheet.title, fontsize=13, fontweight="bold", color=INK, **words)
        figure.text(left, 1 - 0.4 / height, "\n".join(subtitle), fontsize=9, color=SOFT, **words)
        grid = figure.subplots(len(sheet.rows), columns, squeeze=False)
        for axes_row, row in zip(grid, sheet.rows, strict=True):
            for axes, plot in zip(axes_row, row, strict=False):
                _draw_plot(axes, plot)
            for axes in axes_row[len(row) :]:
                axes.set_visible(False)
        _shared_legend(figure, labels, in_row, (left, foot / height))
        low = (_NOTE * len(notes) + 0.04) / height
        figure.text(left, low, "\n".join(notes), fontsize=8.5, color=SOFT, linespacing=1.25, **words)
        paths = [stem.with_name(stem.name + ending) for ending in (".pdf", ".png")]
        for path in paths:
            # A PDF says when it was made; without that, the same records give the same file.
            figure.savefig(path, metadata={"CreationDate": None} if path.suffix == ".pdf" else None)
            # The first file places the panels. The second would do it again, which takes longer than drawing.
            figure.set_layout_engine("none")
    return paths


def _height(row: Sequence[Plot], columns: int) -> float:
    """Inches of panels and of what is below them."""
    labels = [len({line.label for line in plot.lines}) for plot in row if plot.own_legend]
    turned = 0.3 if any(map(_turned, row)) else 0.0
    return 3.1 + 0.15 * max(labels) + turned if labels else 2.9 if columns > 1 else 3.6


# --- One panel ------------------------------------------------------------------------------------------


def _draw_plot(axes: "Axes", plot: Plot) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(plot.x_label, color=SOFT, fontsize=8.5)
    axes.set_ylabel(plot.y_label, color=SOFT, fontsize=8.5)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c9cbd0")
    axes.tick_params(colors=SOFT, labelsize=8, length=3)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    known = [line for line in plot.lines if any(y is not None for y in line.y)]
    if not known:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.text(
            0.5, 0.5, "no run of this panel is there yet", transform=axes.transAxes, ha="center", va="center",
            color=SOFT, fontsize=9,
        )  # fmt: skip
    shown = [_last_quarter(line, plot) for line in known] if plot.last else known
    cut = _set_range(axes, plot, shown)
    axes.set_title(
        plot.title, loc="left", fontsize=10, fontweight="bold", color=INK, parse_math=False,
        pad=14 if cut else 6,
    )  # fmt: skip
    axes.text(0, 1.02, cut, color=SOFT, fontsize=6.5, transform=axes.transAxes)
    for line in shown:
        _draw_line(axes, plot, line)
    if plot.ticks:
        _set_places(axes, plot)
    if plot.zoom and known:
        _inset(axes, plot, known)
    if plot.own_legend and known:
        _legend_below(axes, 0.72 if _turned(plot) else 0.5)


def _draw_line(axes: "Axes", plot: Plot, line: Line) -> None:
    bottom, top = axes.get_ylim()
    x = [float(value) for value in line.x]
    y = [math.nan if value is None or math.isinf(value) else value for value in line.y]
    dots = bool(plot.ticks)
    if line.spread is not None and any(line.spread):
        low = [value - s for value, s in zip(y, line.spread, strict=True)]
        high = [value + s for value, s in zip(y, line.spread, strict=True)]
        if dots:
            axes.vlines(x, low, high, color=line.look.colour, linewidth=3.5, alpha=0.3)
        else:
            axes.fill_between(x, low, high, color=line.look.colour, alpha=0.15, linewidth=0)
    part = line.look.dashes
    pieces = _pieces(plot, x, y)
    for i, (xs, ys) in enumerate(pieces):
        axes.plot(
            xs, ys, color=line.look.colour, linewidth=0.9 if line.thin else 1.7,
            linestyle=(0, part) if part else "-", label=line.label if i == 0 else "_",
            marker="o" if dots else None, markersize=3.6, alpha=0.75 if line.thin else 1.0,
        )  # fmt: skip
    for place, value in zip(x, line.y, strict=True):
        if value is not None and math.isinf(value):  # diverged: at the top
            _sign(axes, place, 1.0, "x", line.look.colour)
        elif value is not None and value > top:
            _sign(axes, place, 1.0, "^", line.look.colour) if dots else None
        elif value is not None and value < bottom:
            _sign(axes, place, 0.0, "v", line.look.colour) if dots else None
    if line.end and (ends := [(a, b) for a, b in zip(x, y, strict=True) if not math.isnan(b)]):
        axes.plot(*ends[-1], "o", color=line.look.colour, markersize=4.5)
        axes.annotate(  # below, on the left: losses fall, so nothing else is drawn there
            line.end, ends[-1], textcoords="offset points", xytext=(-2, -10), ha="right", fontsize=7.5,
            color=line.look.colour, annotation_clip=False,
        )  # fmt: skip


def _spread(line: Line) -> list[tuple[float, float]]:
    """Its values with the size of their bars."""
    if line.spread is None:
        return []
    return [(y, s) for y, s in zip(line.y, line.spread, strict=True) if y is not None]


def _pieces(plot: Plot, x: list[float], y: list[float]) -> list[tuple[list[float], list[float]]]:
    """Baselines are dots of their own: no line leads from them to the rest."""
    cut = sum(place < plot.set_apart for place in x) if plot.ticks else 0
    alone = [([a], [b]) for a, b in zip(x[:cut], y[:cut], strict=True)]
    return [(x[cut:], y[cut:]), *alone] if x[cut:] else alone


def _sign(axes: "Axes", x: float, height: float, sign: str, colour: str) -> None:
    axes.plot(
        [x], [height], sign, color=colour, markersize=5, clip_on=False, transform=axes.get_xaxis_transform()
    )


def _set_range(axes: "Axes", plot: Plot, lines: Sequence[Line]) -> str:
    """The y range of reports: a bad run does not press the others flat. What to say of values outside."""
    if plot.share:
        known = [y for line in lines for y in line.y if y is not None]
        top = max(known) if known and 0 < max(known) < _SMALL else 1.0
        axes.set_ylim(-0.03 * top, 1.03 * top)
        return ""
    series = []
    for line in lines:
        # Of a curve the end counts: its beginning would press it flat.
        pairs = [(x, y) for x, y in zip(line.x, line.y, strict=True) if y is not None and math.isfinite(y)]
        if not plot.ticks and not plot.last:
            pairs = [pair for pair in pairs if pair[0] >= 0.1 * max(line.x)]
        if pairs:
            x, y = zip(*pairs, strict=True)
            series.append(Series(method=line.label, x=x, y=y))
    if not series:
        return ""
    panel = Panel(key="", title="", caption="", x_label="", y_label="", series=tuple(series), place="")
    axis = y_axis(panel)
    low, high = axis.range
    room = 0.06 * (high - low) if any(line.end for line in lines) else 0.0  # for what is said of ends
    # Bars of what is shown fit too, if that does not press the lines flat.
    ends = [y + spread for line in lines for y, spread in _spread(line) if y <= high]
    high = min(max([high, *ends]), high + 0.1 * (high - low))
    axes.set_ylim(low - room, high)
    axes.ticklabel_format(axis="y", useOffset=False)
    if not axis.outside:
        return ""
    least, greatest, count = min(axis.outside), max(axis.outside), len(axis.outside)
    if count == 1:
        return f"axis cut: {least:.3f} outside"
    return f"axis cut: {count} values outside, {least:.3f} to {greatest:.3f}"


def _set_places(axes: "Axes", plot: Plot) -> None:
    axes.set_xlim(-0.5, len(plot.ticks) - 0.5)
    axes.set_xticks(range(len(plot.ticks)), plot.ticks)
    axes.tick_params(axis="x", labelsize=7.5, rotation=45 if _turned(plot) else 0)
    if plot.set_apart:
        axes.axvline(plot.set_apart - 0.5, color="#c9cbd0", linewidth=0.8)
    for place in range(len(plot.ticks)):
        wanted = [y for line in plot.lines for x, y in zip(line.x, line.y, strict=True) if x == place]
        if wanted and all(y is None for y in wanted):  # nothing there yet: a hollow sign below
            axes.plot(
                [place], [0.0], "D", markerfacecolor="white", markeredgecolor=SOFT, markersize=4,
                clip_on=False, transform=axes.get_xaxis_transform(), zorder=5,
            )  # fmt: skip


def _turned(plot: Plot) -> bool:
    """Whether names of places are too many to stand beside each other."""
    return len(plot.ticks) > 7


def _last_quarter(line: Line, plot: Plot) -> Line:
    ends = [max(one.x) for one in plot.lines if len(one.x)]
    begin = 0.75 * max(ends, default=0.0)
    kept = [i for i, x in enumerate(line.x) if x >= begin]
    return replace(
        line,
        x=[line.x[i] for i in kept],
        y=[line.y[i] for i in kept],
        spread=None if line.spread is None else [line.spread[i] for i in kept],
    )


def _inset(axes: "Axes", plot: Plot, lines: Sequence[Line]) -> None:
    """Curves fall to the right, so that the upper right is free."""
    small = axes.inset_axes((0.52, 0.5, 0.47, 0.47))
    small.set_facecolor("white")
    part = replace(plot, zoom=False, own_legend=False, last=True, title="")
    shown = [replace(_last_quarter(line, plot), end="") for line in lines]
    cut = _set_range(small, part, shown)
    for line in shown:
        _draw_line(small, part, line)
    small.tick_params(labelsize=6.5, colors=SOFT, length=2)
    small.grid(axis="y", color=GRID, linewidth=0.6)
    small.spines[:].set_color("#c9cbd0")
    small.set_title(
        "last quarter, axis cut" if cut else "last quarter", fontsize=7, color=SOFT, loc="left", pad=2
    )


def _legend_below(axes: "Axes", inches: float) -> None:
    from matplotlib.transforms import ScaledTranslation

    figure = axes.get_figure(root=True)
    assert figure is not None
    # Below by inches: a part of the height would change with what the legend leaves of it.
    below = axes.transAxes + ScaledTranslation(0, -inches, figure.dpi_scale_trans)
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(reversed(labels), reversed(handles), strict=True))  # branches have one name
    labels = list(dict.fromkeys(labels))
    legend = axes.legend(
        [once[label] for label in labels], labels, loc="upper left", bbox_to_anchor=(-0.02, 0),
        bbox_transform=below, frameon=False, fontsize=7.5, handlelength=3.2, labelcolor=INK,
        borderaxespad=0.0, labelspacing=0.3,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)


def _shared_legend(figure: "Figure", labels: list[str], in_row: int, place: tuple[float, float]) -> None:
    found: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    there = [label for label in labels if label in found]
    if there:
        figure.legend(
            [found[label] for label in there], there, loc="upper left", ncols=in_row, frameon=False,
            bbox_to_anchor=place, fontsize=8.5, handlelength=3.2, labelcolor=INK, borderaxespad=0.0,
            borderpad=0.0, columnspacing=1.2,
        )  # fmt: skip
