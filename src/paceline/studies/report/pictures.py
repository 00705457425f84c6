"""A panel as a PNG file, with the colours, dashes and y range it has on the page."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.studies.report.axis import y_axis
from paceline.studies.report.content import Number, Panel, Series
from paceline.studies.report.palette import style

if TYPE_CHECKING:  # it is an extra: whoever wants no pictures need not have it
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

_INK, _SOFT, _GRID = "#1c1e21", "#5c6067", "#ebebe7"
_DODGE = 1.5
"""Points between methods measured at the same x, so that their bars stand side by side."""
_LONG = 34
"""So many letters of a name fit into a column of the legend."""
_FEW = 10
"""So many measured points have each its own tick."""


def draw(panel: Panel, methods: tuple[str, ...], path: Path) -> None:
    """Draws `panel` into a new file. `methods` are those of the report, in the order of their colours."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.2), dpi=160, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    _prepare(axes, panel)
    for series in sorted(panel.series, key=lambda one: one.weights == "returned"):  # bold over thin
        _draw_series(axes, panel, series, methods)
    present = {series.method for series in panel.series}
    shown = [number for number, method in enumerate(methods) if method in present]
    samples = [_line([], [], number, 2.0) for number in shown]
    if samples:
        legend = figure.legend(
            samples, [str(number) for number in shown], loc="outside lower left", ncols=3, frameon=False,
            fontsize=8.5, handlelength=3.6, labelcolor=_INK,
        )  # fmt: skip
        for text, number in zip(legend.get_texts(), shown, strict=True):
            # matplotlib would read formulas in names, and leave out those with a leading underscore.
            text.set_parse_math(False)
            text.set_text(_cut(methods[number]))
    with warnings.catch_warnings():
        # A sign the font lacks is drawn as a box. That is no reason to stop a report.
        warnings.filterwarnings("ignore", message=".*Glyph")
        figure.savefig(path)


def _prepare(axes: "Axes", panel: Panel) -> None:
    """Title, axes and grid."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    axis = y_axis(panel)
    title = f"{panel.title}, {panel.choice}" if panel.choice else panel.title
    axes.set_title(title, loc="left", color=_INK, fontsize=12, fontweight="bold", pad=24, parse_math=False)
    corner: dict[str, Any] = {"transform": axes.transAxes, "va": "bottom", "parse_math": False}
    axes.text(0, 1.015, panel.y_label, color=_SOFT, fontsize=9, **corner)
    axes.set_xlabel(panel.x_label, loc="right", color=_SOFT, fontsize=9, parse_math=False)
    if panel.x_log:
        axes.set_xscale("log")
    axes.set_ylim(*axis.range)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    points = sorted({x for series in panel.series for x in series.x if x > 0 or not panel.x_log})
    if points:
        axes.set_xlim(*_x_range(points[0], points[-1], panel))
    if (panel.markers or panel.x_log) and len(points) <= _FEW:
        axes.xaxis.set_major_locator(FixedLocator(points))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _brief(x)))
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_SOFT)
    axes.tick_params(colors=_SOFT, labelsize=9, length=3)
    axes.tick_params(axis="y", length=0)
    if axis.outside:
        least, greatest = min(axis.outside), max(axis.outside)
        text = f"axis cut: {len(axis.outside)} values outside, {least:.4f} to {greatest:.4f}"
        axes.text(1, 1.015, text, color=_SOFT, fontsize=8, ha="right", **corner)


def _draw_series(axes: "Axes", panel: Panel, series: Series, methods: tuple[str, ...]) -> None:
    from matplotlib.transforms import ScaledTranslation, blended_transform_factory

    number = methods.index(series.method)
    live = series.weights == "live"
    step = _DODGE * (number - (len(methods) - 1) / 2) if panel.markers else 0.0
    assert axes.figure is not None
    shift = ScaledTranslation(step / 72, 0, axes.figure.dpi_scale_trans)
    place = axes.transData + shift
    y, colour = _floats(series.y), style(number).on_light
    if series.low is not None and series.high is not None:
        low, high = _floats(series.low), _floats(series.high)
        if panel.markers:
            axes.vlines(series.x, low, high, color=colour, linewidth=1, alpha=0.75, transform=place)
        else:
            axes.fill_between(series.x, low, high, color=colour, alpha=0.06 if live else 0.13, linewidth=0)
    line = _line(series.x, y, number, 0.8 if live else 1.8)
    line.set_transform(place)
    axes.add_line(line)
    if not panel.markers:
        return
    bottom, top = axes.get_ylim()
    edge = blended_transform_factory(axes.transData, axes.transAxes) + shift
    # Signs as on the page: a dot; a cross for a run that diverged; a triangle for a value the axis cuts off.
    for x, value in zip(series.x, series.y, strict=True):
        if panel.x_log and x <= 0:  # it has no place on this axis
            continue
        sign, height, where = "o", value, place
        if value is None:
            sign, height, where = "x", 1.0, edge
        elif value > top:
            sign, height, where = "^", 1.0, edge
        elif value < bottom:
            sign, height, where = "v", 0.0, edge
        axes.plot(
            [x], [height if height is not None else 0.0], sign, color=colour, markersize=3.5 if live else 5,
            clip_on=False, transform=where,
        )  # fmt: skip


def _x_range(left: float, right: float, panel: Panel) -> tuple[float, float]:
    """Lines run from edge to edge; dots and bars stay clear of it."""
    part = 0.06 if panel.markers or left == right else 0.0
    if panel.x_log:
        factor = (right / left if right > left else 10.0) ** part
        return left / factor, right * factor
    room = part * (right - left or 1.0)
    return left - room, right + room


def _brief(x: float) -> str:
    """The text of a tick, as short as on the page."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(x) >= size:
            return f"{x / size:g}{letter}"
    return f"{x:,.0f}" if abs(x) >= 10_000 else f"{x:.4g}"


def _cut(name: str) -> str:
    return name if len(name) <= _LONG else name[: _LONG - 1] + "…"


def _line(x: Sequence[float], y: Sequence[float], number: int, width: float) -> "Line2D":
    from matplotlib.lines import Line2D

    look = style(number)
    dashes: Any = (0, look.dashes) if look.dashes else "-"
    return Line2D(x, y, color=look.on_light, linewidth=width, linestyle=dashes)


def _floats(numbers: tuple[Number, ...]) -> list[float]:
    return [float("nan") if number is None else number for number in numbers]
