"""The y range of a panel, such that one bad run does not press all other lines flat."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from paceline.studies.report.content import Panel

_FAR = 8.0
"""How many median deviations from the median a value may lie. Some five standard deviations if normal."""
MARGIN = 0.05
"""Room above and below the lines, as a part of the range."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """The y axis of one panel."""

    range: tuple[float, float]
    fence: tuple[float, float] | None
    """Values outside are left out of the range; None: all are in it."""
    outside: tuple[float, ...]
    """The values the range leaves out. Whoever draws the axis has to say so."""


def y_axis(panel: Panel) -> Axis:
    """The axis that shows all values, or all but the far ones where those would hide the rest.

    >>> from paceline.studies.report.content import Series
    >>> line = Series(method="A", x=(1, 2, 3, 4, 5), y=(3.0, 3.1, 3.2, 3.3, 11.0))
    >>> axis = y_axis(Panel(key="k", title="", caption="", x_label="", y_label="", series=(line,), place=""))
    >>> [round(edge, 3) for edge in axis.range], axis.outside
    ([2.985, 3.315], (11.0,))
    """
    values = list(_values(panel))
    if not values:
        return Axis(range=(0.0, 1.0), fence=None, outside=())
    middle = median(values)
    reach = _FAR * median(abs(value - middle) for value in values)
    fence = (middle - reach, middle + reach)
    inside = [value for value in values if fence[0] <= value <= fence[1]]
    # Cutting an axis costs trust; it has to make the rest three times as tall. A reach of 0 tells nothing.
    if reach == 0 or 3 * (max(inside) - min(inside)) > max(values) - min(values):
        return Axis(range=_widened(min(values), max(values)), fence=None, outside=())
    outside = tuple(value for value in values if not fence[0] <= value <= fence[1])
    return Axis(range=_widened(min(inside), max(inside)), fence=fence, outside=outside)


def _values(panel: Panel) -> Iterator[float]:
    for series in panel.series:
        for numbers in (series.y, series.low or (), series.high or ()):
            yield from (number for number in numbers if number is not None)


def _widened(low: float, high: float) -> tuple[float, float]:
    margin = MARGIN * (high - low or abs(high) or 1.0)
    return low - margin, high + margin
