"""A picture with the numbers that it shows."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from paceline.studies.looks import SOFT, curve, frame, look
from paceline.studies.plots import Sheet, draw
from paceline.studies.text import Listing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Panel = Callable[["Axes"], None]
Curve = tuple[Any, ...]
"""Number of the look, label, x and y, and settings for matplotlib if there are any."""

SOLID: dict[str, Any] = {"linestyle": "-"}
DOTS: dict[str, Any] = {"marker": "o", "markersize": 4}
DOTTED: dict[str, Any] = {"color": SOFT, "linewidth": 1, "linestyle": ":"}


@final
class Picture:
    """A picture before it is drawn: the columns and rows of its numbers, and its panels."""

    def __init__(
        self, name: str, title: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]], *panels: Panel
    ) -> None:
        self.name, self.title, self.panels = name, title, panels
        self.table = Listing(columns=tuple(columns), rows=tuple(rows))

    def draw(self, folder: Path) -> Path:
        """Write a PNG file into a folder, and return its path."""
        return draw(Sheet(title=self.title, rows=(self.panels,)), folder / self.name, (".png",))[0]


def row(name: str, *values: Any) -> tuple[str, ...]:
    """Return a row of a table: numbers get four digits."""
    return name, *(value if isinstance(value, str) else f"{float(value):.4g}" for value in values)


def panel(
    title: str,
    x_label: str,
    y_label: str,
    *curves: Curve,
    log: str = "",
    symlog: tuple[str, float] | None = None,
    level: float | None = None,
    y_range: tuple[float | None, float | None] | None = None,
) -> Panel:
    """Return a panel of curves.

    `log` names the logarithmic axes: "x", "y" or "xy". `symlog` is an axis that is linear around 0, and how
    far. `level` is where a thin horizontal line is drawn.
    """

    def drawn(axes: "Axes") -> None:
        for number, label, x, y, *settings in curves:
            curve(axes, x, y, look(number), label, **(settings[0] if settings else {}))
        if level is not None:
            axes.axhline(level, color=SOFT, linewidth=0.8)
        for name in log:
            getattr(axes, f"set_{name}scale")("log")
        if symlog is not None:
            getattr(axes, f"set_{symlog[0]}scale")("symlog", linthresh=symlog[1])
        if y_range is not None:
            axes.set_ylim(*y_range)
        frame(axes, title, x_label, y_label)

    return drawn
