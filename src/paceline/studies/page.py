"""A page as one HTML file that needs nothing but itself, and next to it the numbers and pictures in it.

All text and all charts are in it, so it can be read without scripts. Names come from users and are escaped.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from html import escape
from importlib.resources import files
from io import StringIO
from pathlib import Path
from string import Template
from typing import final
from urllib.parse import quote

from paceline.lm.files import write_atomically
from paceline.studies.looks import COLOURS, GRID, INK, RULE, SOFT, look
from paceline.studies.panels import Chart
from paceline.studies.plots import Plot, Sheet, check_installed, draw, draw_plot, style
from paceline.studies.text import Listing


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """The content of a page, in its order."""

    title: str
    subtitle: str
    verdict: str
    remarks: tuple[str, ...]
    """What the verdict rests on, and what it cannot tell."""
    warnings: tuple[str, ...]
    methods: tuple[str, ...]
    """All methods, in the order of their looks."""
    charts: tuple[Chart, ...]
    tables: tuple[Listing, ...]
    """The first one stands above the charts."""
    lr: float | None = None
    """The learning rate whose charts are shown first."""


def write(page: Page, folder: Path) -> Path:
    """Write the page and the files of its parts into a folder, and return where the page is."""
    folder.mkdir(parents=True, exist_ok=True)
    for table in page.tables:
        write_atomically(folder / f"{table.key}.csv", _encoded(table.csv()))
    for chart in page.charts:
        write_atomically(folder / f"{_file(chart)}.csv", _encoded(_numbers(chart).csv()))
    target = folder / "report.html"
    write_atomically(target, _encoded(html(page)))
    for chart in page.charts:
        title = chart.plot.title if chart.lr is None else f"{chart.plot.title}, lr {chart.lr:g}"
        # The endings are appended by hand: a rate in the name has a dot.
        draw(
            Sheet(title=title, subtitle=chart.caption, rows=((chart.plot,),)),
            folder / _file(chart),
            (".png",),
        )
    return target


def _file(chart: Chart) -> str:
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", chart.key)


def _numbers(chart: Chart) -> Listing:
    rows = []
    for line in chart.plot.lines:
        errors = line.error or [0.0] * len(line.x)
        for x, y, error in zip(line.x, line.y, errors, strict=True):
            value = "" if y is None else "diverged" if math.isinf(y) else f"{y:.7g}"
            kind = "live" if line.thin else "returned"
            rows.append((line.label, kind, f"{x:g}", value, f"{error:.3g}" if error else ""))
    labels = (chart.plot.x_label, chart.plot.y_label)
    return Listing(columns=("method", "weights", *labels, "standard error"), rows=tuple(rows))


def _encoded(text: str) -> bytes:
    # Names may hold what a terminal obeys, or halves of characters, which cannot be written.
    return re.sub(r"[^\n -~]", _escaped, text).encode()


def _escaped(found: "re.Match[str]") -> str:
    sign = found[0]
    return sign if sign.isprintable() else sign.encode("unicode_escape").decode()


# --- HTML -----------------------------------------------------------------------------------------------


def html(page: Page) -> str:
    """Return the page as text."""
    return Template(_part("page.html")).substitute(
        title=escape(page.title),
        subtitle=escape(page.subtitle),
        verdict=escape(page.verdict),
        remarks=_list("remarks", page.remarks),
        warnings=_warnings(page.warnings),
        first="".join(_table(table, page.methods) for table in page.tables[:1]),
        methods=_methods(page.methods),
        choices=_choices(page),
        charts="".join(_figure(chart) for chart in page.charts),
        tables="".join(_table(table, page.methods) for table in page.tables[1:]),
        css=css() + _part("page.css") + _off(len(page.methods)),
        js=_part("page.js"),
    )


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _off(methods: int) -> str:
    """Return the rules that hide a method; on paper too."""
    return "".join(f".off{number} .m{number}{{display:none}}" for number in range(methods))


def _list(kind: str, texts: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<ul class="{kind}">{items}</ul>' if items else ""


def _warnings(texts: tuple[str, ...]) -> str:
    if not texts:
        return ""
    heading = "Warning" if len(texts) == 1 else f"{len(texts)} warnings"
    return f'<section class="warnings" role="alert"><h2>{heading}</h2>{_list("", texts)}</section>'


def _methods(methods: tuple[str, ...]) -> str:
    """Return the legend of all charts: a button for each method."""
    return "".join(
        f'<button type="button" data-method="{number}" aria-pressed="true" title="{escape(method)}">'
        f"{_sample(number)}<span>{escape(method)}</span></button>"
        for number, method in enumerate(methods)
    )


def _sample(number: int) -> str:
    """Return a short piece of the line of a method."""
    shown = look(number)
    dashes = " ".join(f"{2.5 * length:g}" for length in shown.dashes)
    return (
        '<svg class="sample" width="34" height="10" aria-hidden="true"><line x1="1" x2="33" y1="5" y2="5" '
        f'style="stroke:var({shown.variable});stroke-width:2.5" stroke-dasharray="{dashes}"/></svg>'
    )


def _choices(page: Page) -> str:
    rates = sorted({chart.lr for chart in page.charts if chart.lr is not None})
    if len(rates) < 2:
        return ""
    chosen = page.lr if page.lr in rates else rates[0]
    buttons = "".join(
        f'<button type="button" data-choice="{lr:g}" aria-pressed="{_pressed(lr == chosen)}">{lr:g}</button>'
        for lr in rates
    )
    return f'<div role="group" aria-label="Learning rate" class="choices">learning rate {buttons}</div>'


def _pressed(is_pressed: bool) -> str:
    return "true" if is_pressed else "false"


def _table(table: Listing, methods: tuple[str, ...]) -> str:
    """Return a table; rows of methods begin with a sample of their lines."""
    caption = f'<p class="caption">{escape(table.caption)}</p>' if table.caption else ""
    title = escape(table.title)
    rows = table.html(lambda cell: _sample(methods.index(cell)) if cell in methods else "")
    box = f'<div class="scroll" tabindex="0" role="region" aria-label="{title}">{rows}</div>'
    return f"<section><h2>{title}</h2>{caption}{box}</section>"


def _figure(chart: Chart) -> str:
    """Return a chart with its title and caption, and links to its files."""
    key, lr = _file(chart), "" if chart.lr is None else f"{chart.lr:g}"
    choice = f' data-choice="{lr}"' if lr else ""
    shown = f" <span>lr {lr}</span>" if lr else ""
    links = " ".join(f'<a href="{quote(key)}.{ending}">{ending}</a>' for ending in ("csv", "png"))
    return (
        f"<figure{choice}><figcaption><h3>{escape(chart.plot.title)}{shown}</h3>"
        f'<p class="caption">{escape(chart.caption)}</p></figcaption>{svg(chart.plot, key)}'
        f'<p class="files">{links}</p></figure>'
    )


# --- Charts as SVG --------------------------------------------------------------------------------------

_INKS = {
    "ink": (INK, "#e6e6e3"),
    "soft": (SOFT, "#a2a6ad"),
    "rule": (RULE, "#4a4f57"),
    "grid": (GRID, "#282b30"),
}
_VARIABLES = _INKS | {f"c{number}": pair for number, pair in enumerate(COLOURS)}


def css() -> str:
    """Return the colours of elements as CSS variables; dark ones are for screens, as paper is white."""
    light = "".join(f"--{name}:{on_light};" for name, (on_light, _) in _VARIABLES.items())
    dark = "".join(f"--{name}:{on_dark};" for name, (_, on_dark) in _VARIABLES.items())
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"


def svg(plot: Plot, key: str, size: tuple[float, float] = (4.8, 3.1)) -> str:
    """Return a plot without title and legend as an SVG element for a page.

    Elements of a method have the class `m{number}` and a `<title>` with what they show. Colours are the
    variables of `css()`. `key` differs between plots of a page.
    """
    check_installed()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with style(), rc_context({"svg.hashsalt": key}):
        figure = Figure(figsize=size, layout="constrained")
        figure.patch.set_visible(False)
        axes = figure.add_subplot()
        axes.patch.set_visible(False)
        draw_plot(axes, replace(plot, title="", own_legend=False))
        text = StringIO()
        figure.savefig(
            text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    drawn = text.getvalue()
    drawn = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", drawn, flags=re.S)
    drawn = re.sub(r"\s*\n\s*", " ", drawn[drawn.index("<svg") :])
    drawn = re.sub(r' (d|x|y|transform)="[^"]*"', _rounded, drawn)
    drawn = re.sub(r" font-family: [^;]*;", "", drawn)  # that of the page
    name = escape(f"{plot.y_label} against {plot.x_label}")
    drawn = re.sub(
        r"<svg[^>]*?(viewBox=\"[^\"]*\")[^>]*>", r'<svg role="img" aria-label="{}" \1>', drawn, count=1
    )
    drawn = drawn.replace("{}", name, 1)
    drawn = re.sub(r'<g id="m(\d+)-([0-9a-f]*)">', _with_title, drawn)
    drawn = re.sub(r'<g id="[^"]*">', "<g>", drawn)  # names that several plots of a page would share
    for name, (colour, _) in _VARIABLES.items():
        drawn = drawn.replace(colour, f"var(--{name})")
    return drawn


def _rounded(found: "re.Match[str]") -> str:
    return re.sub(r"(\.\d\d)\d+", r"\1", found[0])


def _with_title(found: "re.Match[str]") -> str:
    words = escape(bytes.fromhex(found[2]).decode())
    return f'<g class="m{found[1]}"><title>{words}</title>'
