"""One look of plots for the whole package: panels in rows and columns, as PDF, PNG and SVG.

.. code-block:: python

    lines = [Line(label="AdamW", look=look(0), x=[100, 200], y=[3.4, 3.3], error=[0.01, 0.01])]
    plot = Plot(title="Loss", lines=lines, x_label="step", y_label="nats a token")
    draw(Sheet(title="Figure 1", rows=((plot, plot),)), folder / "figure-1")  # .pdf and .png

A panel may also be a function that draws into axes, with `frame` and `curve` of looks.py.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, final

from paceline.runs.config import ConfigError
from paceline.studies.looks import INK, RULE, SOFT, Look, brief, frame, y_range

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes


def check_installed() -> None:
    """Raise ConfigError if plots cannot be drawn here."""
    if find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib: pip install matplotlib")


# --- What is drawn --------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Points, and how they look. y is None where a run is missing, and infinite where it diverged."""

    label: str
    look: Look
    x: Sequence[float]
    y: Sequence[float | None]
    error: Sequence[float] | None = None
    """Half the height of the band, or of the bars."""
    thin: bool = False
    end: str = ""
    """Written at the last point."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """One panel."""

    title: str
    lines: Sequence[Line]
    x_label: str
    y_label: str
    dots: bool = False
    """Few points, each measured by itself: dots with bars, side by side where x is the same."""
    x_log: bool = False
    ticks: tuple[str, ...] = ()
    """Names of the places 0, 1, …: then points are dots, and x is the number of a place."""
    set_apart: int = 0
    """How many of the first places are baselines: a line divides them from the rest."""
    last: bool = False
    """Nothing but the last quarter."""
    share: bool = False
    """Values are shares: from 0 to 1, or to the greatest where all are small."""
    own_legend: bool = False
    """What the lines are differs from panel to panel."""
    note: str = ""
    """Small text below the title, e.g. which runs are missing."""

    @property
    def has_dots(self) -> bool:
        """Return whether points are drawn one by one."""
        return self.dots or bool(self.ticks)


Panel = Plot | Callable[["Axes"], None]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Sheet:
    """A whole figure."""

    title: str
    rows: tuple[tuple[Panel, ...], ...]
    subtitle: str = ""
    notes: tuple[str, ...] = ()
    """Lines of text below it."""


# --- Axes -----------------------------------------------------------------------------------------------

_SMALL = 0.25
"""Shares that are all below it would be flat lines on an axis to 1."""
_FEW = 10
"""So many measured points each have their own tick."""
_DODGE = 1.6
"""Points between methods that are measured at the same x."""
_HEAD, _LEGEND, _NOTE = 0.72, 0.24, 0.17
"""Inches of the title and what is below it, of a row of the legend, and of a note."""


def draw_plot(axes: "Axes", plot: Plot) -> None:
    """Draw one panel into axes."""
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    known = [line for line in plot.lines if any(y is not None for y in line.y)]
    shown = [_last_quarter(line, plot) for line in known] if plot.last else known
    cut = _set_range(axes, plot, shown)
    small = " · ".join(filter(None, (plot.note, cut)))
    frame(axes, plot.title, plot.x_label, plot.y_label, pad=14 if small else 6)
    corner: dict[str, Any] = {"color": SOFT, "transform": axes.transAxes}
    axes.text(0, 1.02, small, fontsize=6.5, **corner)
    if not known:
        axes.set_xticks([])
        axes.set_yticks([])
        text = "no run of this panel is there yet"
        axes.text(0.5, 0.5, text, ha="center", va="center", fontsize=9, **corner)
    _set_x(axes, plot, shown)
    for place, line in enumerate(shown):
        _draw_line(axes, plot, line, place - (len(shown) - 1) / 2)
    if plot.own_legend and known:
        _legend_below(axes, known, 0.72 if _turned(plot) else 0.5)


def _draw_line(axes: "Axes", plot: Plot, line: Line, side: float) -> None:
    from matplotlib.transforms import ScaledTranslation, blended_transform_factory

    figure, style = axes.get_figure(root=True), line.look
    assert figure is not None
    top = axes.get_ylim()[1]
    shift = ScaledTranslation(_DODGE * side / 72 if plot.dots else 0, 0, figure.dpi_scale_trans)
    place, edge = axes.transData + shift, blended_transform_factory(axes.transData, axes.transAxes) + shift
    x = [float(value) for value in line.x]
    y = [math.nan if value is None or math.isinf(value) else value for value in line.y]
    common: dict[str, Any] = {"color": style.colour, "gid": _tag(style.number, line.label)}
    if line.error is not None and any(line.error):
        low, high = ([v + sign * e for v, e in zip(y, line.error, strict=True)] for sign in (-1, 1))
        if plot.has_dots:
            axes.vlines(x, low, high, linewidth=3.5, alpha=0.3, transform=place, **common)
        else:
            axes.fill_between(x, low, high, alpha=0.15, linewidth=0, **common)
    for xs, ys in _pieces(plot, x, y):
        axes.plot(
            xs, ys, linewidth=0.9 if line.thin else 1.7, linestyle=style.style, transform=place,
            alpha=0.75 if line.thin else 1.0, **common,
        )  # fmt: skip
    for i, value in enumerate(line.y):
        if value is None or (not plot.has_dots and not math.isinf(value)):
            continue
        sign, height, where = "o", value, place
        if math.isinf(value):  # diverged: at the top
            sign, height, where = "x", 1.0, edge
        elif value > top:
            sign, height, where = "^", 1.0, edge
        common["gid"] = _tag(style.number, _words(line, plot, i))
        axes.plot([x[i]], [height], sign, markersize=3.8, clip_on=False, transform=where, **common)
    if line.end and (ends := [(a, b) for a, b in zip(x, y, strict=True) if not math.isnan(b)]):
        axes.plot(*ends[-1], "o", markersize=4.5, **common)
        axes.annotate(  # below, on the left: losses fall, so nothing else is drawn there
            line.end, ends[-1], textcoords="offset points", xytext=(-2, -10), ha="right", fontsize=7.5,
            color=style.colour, annotation_clip=False,
        )  # fmt: skip


def _words(line: Line, plot: Plot, i: int) -> str:
    """Return what a point says: its line, its place and its value."""
    value = line.y[i]
    assert value is not None
    at = plot.ticks[int(line.x[i])] if plot.ticks else brief(line.x[i])
    error = f" ± {line.error[i]:.4f}" if line.error is not None and line.error[i] else ""
    said = "diverged" if math.isinf(value) else f"{value:.4f}{error}"
    return f"{line.label}, {plot.x_label} {at}: {said}"


def _pieces(plot: Plot, x: list[float], y: list[float]) -> list[tuple[list[float], list[float]]]:
    """Return the parts of a line; baselines are dots of their own, from which no line leads to the rest."""
    cut = sum(place < plot.set_apart for place in x) if plot.ticks else 0
    return [(x[cut:], y[cut:])] + [([a], [b]) for a, b in zip(x[:cut], y[:cut], strict=True)]


def _set_range(axes: "Axes", plot: Plot, lines: Sequence[Line]) -> str:
    """Set the range of y, and return what to say of values outside."""
    axes.ticklabel_format(axis="y", useOffset=False)
    if plot.share:
        known = [y for line in lines for y in line.y if y is not None]
        top = max(known) if known and 0 < max(known) < _SMALL else 1.0
        axes.set_ylim(-0.03 * top, 1.03 * top)
        return ""
    values = []
    for line in lines:
        # Of a curve the end counts: its beginning would press it flat.
        begin = -math.inf if plot.has_dots or plot.last else 0.1 * max(line.x)
        pairs = zip(line.x, line.y, strict=True)
        values += [y for x, y in pairs if y is not None and math.isfinite(y) and x >= begin]
    (low, high), outside = y_range(values)
    room = 0.06 * (high - low) if any(line.end for line in lines) else 0.0  # for what is said of ends
    # Bars of what is shown fit too, if that does not press the lines flat.
    bars = [(y, e) for line in lines for y, e in zip(line.y, line.error or (), strict=False) if y is not None]
    top = min(max([high, *(y + e for y, e in bars if y <= high)]), high + 0.1 * (high - low))
    bottom = max(min([low, *(y - e for y, e in bars if y >= low)]), low - 0.1 * (high - low))
    axes.set_ylim(bottom - room, top)
    if not outside:
        return ""
    if len(outside) == 1:
        return f"axis cut: {outside[0]:.3f} outside"
    return f"axis cut: {len(outside)} values outside, {min(outside):.3f} to {max(outside):.3f}"


def _set_x(axes: "Axes", plot: Plot, lines: Sequence[Line]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    if plot.ticks:
        _set_places(axes, plot)
        return
    points = sorted({float(x) for line in lines for x in line.x if x > 0 or not plot.x_log})
    if not points:
        return
    left, right = points[0], points[-1]
    part = 0.06 if plot.has_dots or left == right else 0.0  # lines run from edge to edge, dots stay clear
    if plot.x_log:
        axes.set_xscale("log")
        factor = (right / left if right > left else 10.0) ** part
        axes.set_xlim(left / factor, right * factor)
    else:
        axes.set_xlim(left - part * (right - left or 1.0), right + part * (right - left or 1.0))
    if plot.has_dots and len(points) <= _FEW:  # each measured point has its own tick
        axes.xaxis.set_major_locator(FixedLocator(points))
    if plot.x_log:
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: brief(x)))


def _set_places(axes: "Axes", plot: Plot) -> None:
    axes.set_xlim(-0.5, len(plot.ticks) - 0.5)
    axes.set_xticks(range(len(plot.ticks)), plot.ticks)
    axes.tick_params(axis="x", labelsize=7.5, rotation=45 if _turned(plot) else 0)
    if plot.set_apart:
        axes.axvline(plot.set_apart - 0.5, color=RULE, linewidth=0.8)
    for place in range(len(plot.ticks)):
        wanted = [y for line in plot.lines for x, y in zip(line.x, line.y, strict=True) if x == place]
        if wanted and all(y is None for y in wanted):  # nothing there yet: a hollow sign below
            axes.plot(
                [place], [0.0], "D", markerfacecolor="none", markeredgecolor=SOFT, markersize=4,
                clip_on=False, transform=axes.get_xaxis_transform(), zorder=5,
            )  # fmt: skip


def _turned(plot: Plot) -> bool:
    """Return whether names of places are too many to stand next to each other."""
    return len(plot.ticks) > 7


def _last_quarter(line: Line, plot: Plot) -> Line:
    begin = 0.75 * max((max(one.x) for one in plot.lines if len(one.x)), default=0.0)
    kept = [i for i, x in enumerate(line.x) if x >= begin]
    error = None if line.error is None else [line.error[i] for i in kept]
    return replace(line, x=[line.x[i] for i in kept], y=[line.y[i] for i in kept], error=error, end="")


def _legend_below(axes: "Axes", lines: Sequence[Line], inches: float) -> None:
    from matplotlib.transforms import ScaledTranslation

    figure = axes.get_figure(root=True)
    assert figure is not None
    # Below by inches: a part of the height would change with what the legend leaves of it.
    below = axes.transAxes + ScaledTranslation(0, -inches, figure.dpi_scale_trans)
    _legend(axes, lines, fontsize=7.5, bbox_to_anchor=(-0.02, 0), bbox_transform=below)


def _legend(owner: Any, lines: Iterable[Line], **settings: Any) -> None:
    from matplotlib.lines import Line2D

    looks: dict[str, Look] = {}
    for line in lines:
        looks.setdefault(line.label, line.look)  # branches have one name
    samples = [Line2D([], [], color=o.colour, linestyle=o.style, linewidth=1.7) for o in looks.values()]
    settings |= {"loc": "upper left", "frameon": False, "handlelength": 3.2, "labelcolor": INK}
    settings |= {"borderaxespad": 0.0, "borderpad": 0.0, "labelspacing": 0.3, "columnspacing": 1.2}
    made = owner.legend(samples, list(map(str, range(len(looks)))), **settings)
    for text, label in zip(made.get_texts(), looks, strict=True):
        # matplotlib would read formulas in names, and leave out those with a leading underscore.
        text.set_parse_math(False)
        text.set_text(label)


# --- Files ----------------------------------------------------------------------------------------------


def draw(sheet: Sheet, stem: Path, endings: Sequence[str] = (".pdf", ".png")) -> list[Path]:
    """Write a figure next to `stem`, a file for each ending; the same values give the same files."""
    check_installed()
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = max(map(len, sheet.rows))
    width = max(7.4, 4.1 * columns)
    lines = [
        o for row in sheet.rows for p in row if isinstance(p, Plot) and not p.own_legend for o in p.lines
    ]
    in_row = max(1, int(width / 2.4))
    notes = [part for note in sheet.notes for part in wrap(note, int(width * 15), subsequent_indent="    ")]
    foot = 0.12 + _LEGEND * -(-len({line.label for line in lines}) // in_row) + _NOTE * len(notes)
    subtitle = wrap(sheet.subtitle, int(width * 13))
    head = _HEAD + _NOTE * (len(subtitle) - 1)
    height = head + sum(_height(row, columns) for row in sheet.rows) + foot
    with style():
        middle = (0.0, foot / height, 1.0, 1 - (head + foot) / height)
        layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.03, hspace=0.03, rect=middle)
        figure = Figure(figsize=(width, height), dpi=140, facecolor="white", layout=layout)
        words: dict[str, Any] = {"ha": "left", "va": "top", "parse_math": False}
        left = 0.12 / width
        figure.text(left, 1 - 0.1 / height, sheet.title, fontsize=13, fontweight="bold", color=INK, **words)
        figure.text(left, 1 - 0.4 / height, "\n".join(subtitle), fontsize=9, color=SOFT, **words)
        grid = figure.subplots(len(sheet.rows), columns, squeeze=False)
        for axes_row, row in zip(grid, sheet.rows, strict=True):
            for axes, panel in zip(axes_row, row, strict=False):
                _draw_panel(axes, panel)
            for axes in axes_row[len(row) :]:
                axes.set_visible(False)
        if lines:
            _legend(figure, lines, fontsize=8.5, ncols=in_row, bbox_to_anchor=(left, foot / height))
        low = (_NOTE * len(notes) + 0.04) / height
        figure.text(left, low, "\n".join(notes), fontsize=8.5, color=SOFT, linespacing=1.25, **words)
        paths = [stem.with_name(stem.name + ending) for ending in endings]
        for path in paths:
            # A PDF says when it was made; without that, the same records give the same file.
            dated = {".pdf": "CreationDate", ".svg": "Date"}.get(path.suffix)
            figure.savefig(path, metadata={dated: None} if dated else None)
            # The first file places the panels. The second would do it again, which takes longer than drawing.
            figure.set_layout_engine("none")
    return paths


def _draw_panel(axes: "Axes", panel: Panel) -> None:
    if isinstance(panel, Plot):
        draw_plot(axes, panel)
        return
    panel(axes)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)


def _height(row: Sequence[Panel], columns: int) -> float:
    """Return inches of panels and of what is below them."""
    own = [panel for panel in row if isinstance(panel, Plot) and panel.own_legend]
    if not own:
        return 2.9 if columns > 1 else 3.6
    labels = max(len({line.label for line in plot.lines}) for plot in own)
    return 3.1 + 0.15 * labels + (0.3 if any(map(_turned, own)) else 0.0)


@contextmanager
def style() -> "Iterator[None]":
    """Set what all figures share while one is drawn."""
    from matplotlib import rc_context

    svg: Any = {"svg.fonttype": "none", "svg.hashsalt": "paceline"}
    with rc_context({"pdf.fonttype": 42, "font.size": 9, **svg}), warnings.catch_warnings():
        # A sign that the font lacks is drawn as a box. That is no reason to stop.
        warnings.filterwarnings("ignore", message=".*Glyph")
        yield


def _tag(number: int, words: str) -> str:
    """Return a group's name in the SVG: whose it is and what it says, as text that is an XML name."""
    return f"m{number}-" + words.encode("utf-8", "backslashreplace").hex()
