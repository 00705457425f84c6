"""What a report shows, as plain values: `page` makes HTML of it, `pictures` PNG, `files` CSV and JSON.

Numbers may be None where there is none (a run that diverged); they are never NaN or infinite.
"""

from dataclasses import dataclass
from typing import Literal

Number = float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line of a panel. A method has the same colour and dashes in every panel."""

    method: str
    """Whose line it is, e.g. "PACE"; one of `Report.methods`."""
    weights: Literal["live", "returned"] = "returned"
    """Live weights are drawn thin, the returned ones bold."""
    x: tuple[float, ...]
    y: tuple[Number, ...]
    low: tuple[Number, ...] | None = None
    """Least and greatest over seeds, where there are several: drawn as a band, or as bars if `markers`."""
    high: tuple[Number, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One diagram."""

    key: str
    """Name of its files, e.g. "curves-0.004"."""
    title: str
    caption: str
    """What to see in it, in a sentence or two."""
    x_label: str
    y_label: str
    x_log: bool = False
    markers: bool = False
    """Few points that were measured one by one: dots on the lines."""
    series: tuple[Series, ...]
    place: str
    """Panels of one place are shown one at a time, with a button for each."""
    choice: str = ""
    """The text of that button, e.g. "lr 0.004"; empty where a panel has its place for itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of text, as they are shown."""

    key: str
    title: str
    caption: str = ""
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[bool, ...] = ()
    """Which columns are set flush right; empty: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All of it, in the order of the page."""

    title: str
    subtitle: str
    """Model, data and budget in a line."""
    verdict: str
    """The one sentence."""
    remarks: tuple[str, ...]
    """What the verdict rests on, and what it cannot tell."""
    warnings: tuple[str, ...]
    """What went wrong: runs that diverged or failed, methods that are missing, runs that do not match."""
    methods: tuple[str, ...]
    """All methods, in the order of their colours."""
    results: Table
    panels: tuple[Panel, ...]
    tables: tuple[Table, ...]
    """Cost, every run, settings and data."""
