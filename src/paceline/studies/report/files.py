"""A report on the disk: one page, and the numbers and pictures of every part of it beside."""

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from paceline.lm.files import write_atomically
from paceline.studies.report.content import Panel, Report
from paceline.studies.report.page import page
from paceline.studies.report.pictures import draw


def write(report: Report, folder: Path, tell: Callable[[str], None]) -> Path:
    """Write everything into a folder, pictures last; where the page is."""
    folder.mkdir(parents=True, exist_ok=True)
    named = replace(report, panels=tuple(_with_file_name(panel) for panel in report.panels))
    for table in (named.results, *named.tables):
        write_atomically(folder / f"{table.key}.csv", _csv([table.columns, *table.rows]))
    for panel in named.panels:
        write_atomically(folder / f"{panel.key}.csv", _csv(_rows(panel)))
    target = folder / "report.html"
    write_atomically(target, page(named).encode())
    if find_spec("matplotlib") is None:
        tell("no PNG pictures: they need matplotlib (pip install matplotlib)")
        return target
    for panel in named.panels:
        draw(panel, named.methods, folder / f"{panel.key}.png")
    return target


def _with_file_name(panel: Panel) -> Panel:
    return replace(panel, key=re.sub(r"[^A-Za-z0-9.+-]+", "-", panel.key))


def _rows(panel: Panel) -> Iterator[tuple[object, ...]]:
    yield "method", "weights", panel.x_label, panel.y_label, "least over seeds", "greatest over seeds"
    for series in panel.series:
        none = (None,) * len(series.x)
        for x, y, low, high in zip(series.x, series.y, series.low or none, series.high or none, strict=True):
            yield series.method, series.weights, x, y, low, high


def _csv(rows: Iterable[tuple[object, ...]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
