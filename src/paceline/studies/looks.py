"""The colours, dashes and axes that all plots of the package share.

.. code-block:: python

    def panel(axes):
        frame(axes, "Gains over time", "time t", "gain")
        curve(axes, times, gains, look(3), "exact")
"""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, SOFT, RULE, GRID = "#1c1e21", "#5c6067", "#c9cbd0", "#ebebe7"


# --- Colours and dashes ---------------------------------------------------------------------------------

# On a light and on a dark ground, both with a contrast of 3:1 at least. They start from those of Okabe and
# Ito, which people with colour-blindness tell apart.
COLOURS = (
    ("#4a4a4a", "#d9d9d9"),  # grey, for the method that others are measured against
    ("#2f93cf", "#63bdf0"),  # sky blue
    ("#00509e", "#4779d9"),  # blue
    ("#bd3600", "#ff6a2b"),  # vermilion
    ("#008f68", "#1fc79a"),  # bluish green
    ("#c25b96", "#e59ac4"),  # reddish purple
    ("#c28500", "#f5c043"),  # orange, darkened
    ("#7d55d9", "#9d6bff"),  # violet
    ("#6b6800", "#e8e39a"),  # yellow, darkened
    ("#7a3b12", "#c98a5e"),  # brown
    ("#00656b", "#4fc3c9"),  # teal
    ("#7d0a2e", "#e0486f"),  # crimson
)
# Lengths of strokes and gaps in line widths. Colour is never the only sign of a line.
_DASHES: tuple[tuple[float, ...], ...] = (
    (),
    (4.0, 1.6),
    (1.2, 1.4),
    (9.0, 1.6),
    (5.0, 1.5, 1.2, 1.5),
    (2.4, 2.4),
    (5.0, 1.5, 1.2, 1.5, 1.2, 1.5),
    (9.0, 1.5, 3.0, 1.5),
    (0.8, 2.6),
    (7.0, 3.5),
    (3.0, 1.4, 1.2, 1.4, 1.2, 1.4, 1.2, 1.4),
)
# Light to dark, for values that have an order.
_RAMP = ("#e0a100", "#d9682b", "#c23b5a", "#94338a", "#5a3f9e", "#24457f", "#0d2f3f")


@final
@dataclass(frozen=True, slots=True)
class Look:
    """The look of a line."""

    colour: str
    dashes: tuple[float, ...] = ()
    number: int = 0
    """Its place among the methods of a page; the class of its SVG elements is `m{number}`."""

    @property
    def style(self) -> Any:
        """The line style for matplotlib."""
        return (0, self.dashes) if self.dashes else "-"

    @property
    def variable(self) -> str:
        """The name of its colour in `css()`."""
        return f"--c{self.number % len(COLOURS)}"


def look(number: int) -> Look:
    """Return the look of a method by its number; 132 of them differ."""
    return Look(COLOURS[number % len(COLOURS)][0], _DASHES[number % len(_DASHES)], number)


def ordered_look(place: int, count: int) -> Look:
    """Return the look of one of several values that have an order."""
    return Look(
        _RAMP[round(place * (len(_RAMP) - 1) / max(count - 1, 1))], _DASHES[place % len(_DASHES)], place
    )


# --- Axes -----------------------------------------------------------------------------------------------

_FAR = 8.0
"""How many median deviations from the median a value may lie: five standard deviations if normal."""
_MARGIN = 0.05


def y_range(values: Iterable[float]) -> tuple[tuple[float, float], tuple[float, ...]]:
    """Return the range of an axis on which one bad run does not hide the rest, and the values above it.

    Low values are never outside: of losses they are the best.

    >>> (low, high), outside = y_range([3.0, 3.1, 3.2, 3.3, 11.0])
    >>> round(low, 3), round(high, 3), outside
    (2.985, 3.315, (11.0,))
    """
    known = list(values)
    if not known:
        return (0.0, 1.0), ()
    middle = median(known)
    reach = _FAR * median(abs(value - middle) for value in known)
    inside = [value for value in known if value - middle <= reach]
    # A cut axis costs trust: it has to make the rest three times as tall. A reach of 0 tells nothing.
    if reach == 0 or 3 * (max(inside) - min(inside)) > max(known) - min(known):
        inside = known
    low, high = min(inside), max(inside)
    margin = _MARGIN * (high - low or abs(high) or 1.0)
    return (low - margin, high + margin), tuple(value for value in known if value > high)


def brief(x: float) -> str:
    """Return a number as the text of a tick.

    >>> brief(0.002), brief(30000), brief(2.5e6)
    ('0.002', '30,000', '2.5M')
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(x) >= size:
            return f"{x / size:g}{letter}"
    return f"{x:,.0f}" if abs(x) >= 10_000 else f"{x:.4g}"


def frame(axes: "Axes", title: str, x_label: str, y_label: str, pad: float = 6) -> None:
    """Set title, labels, grid and spines of axes."""
    # matplotlib would read formulas in names of users.
    plain: dict[str, Any] = {"color": INK, "parse_math": False}
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", pad=pad, **plain)
    axes.set_xlabel(x_label, color=SOFT, fontsize=8.5, parse_math=False)
    axes.set_ylabel(y_label, color=SOFT, fontsize=8.5, parse_math=False)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(RULE)
    axes.tick_params(which="both", color=RULE, labelcolor=SOFT, labelsize=8, length=3)


def curve(axes: "Axes", x: Any, y: Any, style: Look, label: str, **more: Any) -> None:
    """Draw a line into axes; `more` is for matplotlib and wins over the look."""
    settings = {"color": style.colour, "linestyle": style.style, "linewidth": 1.7, "label": label}
    axes.plot(x, y, **(settings | more))
