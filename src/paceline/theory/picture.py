"""A picture with the numbers that it shows: how one is drawn and printed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.studies.report.palette import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, SOFT, _GRID = "#1c1e21", "#5c6067", "#ebebe7"


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture before it is drawn."""

    name: str
    title: str
    rows: tuple[tuple[str, ...], ...]
    """The numbers, as text; the first row says what they are."""
    panels: tuple[Callable[["Axes"], None], ...]

    def draw(self, path: Path) -> None:
        """Into a PNG file."""
        from matplotlib.figure import Figure

        width = 5.4 * len(self.panels) if len(self.panels) > 1 else 8.2
        figure = Figure(figsize=(width, 4.4), dpi=140, layout="constrained", facecolor="white")
        for i, panel in enumerate(self.panels, 1):
            axes = figure.add_subplot(1, len(self.panels), i)
            axes.grid(color=_GRID)
            axes.set_axisbelow(True)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
            axes.tick_params(colors=SOFT, labelsize=8.5)
            panel(axes)
            axes.legend(frameon=False, fontsize=8.5, labelcolor=_INK)
        figure.savefig(path)

    def text(self) -> list[str]:
        """The numbers as lines of a table."""
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        return [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in self.rows
        ]


def labels(axes: "Axes", title: str, x: str, y: str) -> None:
    """Of a panel and its axes."""
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=_INK)
    axes.set_xlabel(x, fontsize=9, color=_INK)
    axes.set_ylabel(y, fontsize=9, color=_INK)


def line(axes: "Axes", x: Any, y: Any, i: int, label: str, *, solid: bool = False, **more: Any) -> None:
    """A line in the colour and dashes of method i."""
    look = style(i)
    dashes: dict[str, Any] = {"dashes": look.dashes} if look.dashes and not solid else {}
    dashes = {} if "linestyle" in more else dashes
    axes.plot(x, y, color=look.on_light, label=label, linewidth=1.8, **dashes, **more)


def number_text(value: float) -> str:
    """Four digits."""
    return f"{value:.4g}"
