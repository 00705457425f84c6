"""A report as one HTML file that needs nothing but itself.

All text is written here, so the page can be read without scripts; `page.js` draws the diagrams from the
report's own numbers, which the page carries as JSON. Names come from users and are escaped everywhere.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict
from html import escape
from importlib.resources import files
from string import Template
from urllib.parse import quote

from paceline.studies.report.axis import MARGIN, y_axis
from paceline.studies.report.content import Panel, Report, Table
from paceline.studies.report.palette import DARK_GROUND, LIGHT_GROUND, style


def page(report: Report) -> str:
    """The whole page."""
    html = Template(_part("page.html")).substitute(
        title=escape(report.title),
        subtitle=escape(report.subtitle),
        verdict=escape(report.verdict),
        remarks=_list("remarks", report.remarks),
        warnings=_warnings(report.warnings),
        results=_table(report.results, report.methods),
        legend=_legend(report.methods),
        places=_places(report),
        tables="".join(_table(table, report.methods) for table in report.tables),
        css=_colours(report.methods) + _part("page.css"),
        js=_part("page.js"),
        data=_data(report),
    )
    # A file name may hold bytes that are no text. They would keep the page from being written.
    return html.encode("utf-8", "backslashreplace").decode("utf-8")


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _data(report: Report) -> str:
    """What the script needs, as JSON in which no character can end the element it stands in."""
    data = {
        "report": asdict(report),
        "axes": [asdict(y_axis(panel)) for panel in report.panels],
        "margin": MARGIN,
        "dashes": [style(number).dashes for number in range(len(report.methods))],
    }
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # all but ASCII is escaped
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _colours(methods: tuple[str, ...]) -> str:
    """Colours as CSS variables. On paper the ground is white, so the dark ones are for screens only."""
    styles = [style(number) for number in range(len(methods))]
    light = "".join(f"--c{number}:{look.on_light};" for number, look in enumerate(styles))
    dark = "".join(f"--c{number}:{look.on_dark};" for number, look in enumerate(styles))
    return (
        f":root{{--ground:{LIGHT_GROUND};{light}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root{{--ground:{DARK_GROUND};{dark}}}}}\n"
    )


def _list(kind: str, texts: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<ul class="{kind}">{items}</ul>' if items else ""


def _warnings(texts: tuple[str, ...]) -> str:
    if not texts:
        return ""
    heading = "Warning" if len(texts) == 1 else f"{len(texts)} warnings"
    return f'<section class="warnings" role="alert"><h2>{heading}</h2>{_list("", texts)}</section>'


def _sample(number: int) -> str:
    """A short piece of the line of a method."""
    dashes = " ".join(f"{2.5 * length:g}" for length in style(number).dashes)
    return (
        '<svg class="sample" width="34" height="10" aria-hidden="true">'
        f'<line x1="1" x2="33" y1="5" y2="5" style="stroke:var(--c{number})" stroke-dasharray="{dashes}"/>'
        "</svg>"
    )


def _legend(methods: tuple[str, ...]) -> str:
    return "".join(
        f'<button type="button" data-method="{number}" aria-pressed="true" title="{escape(method)}">'
        f"{_sample(number)}<span>{escape(method)}</span></button>"
        for number, method in enumerate(methods)
    )


def _table(table: Table, methods: tuple[str, ...]) -> str:
    numeric = table.numeric or (False,) * len(table.columns)
    kinds = [' class="n"' if flush_right else "" for flush_right in numeric]
    head = "".join(
        f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(table.columns, kinds, strict=True)
    )
    rows = []
    for row in table.rows:
        cells = [f"<td{kind}>{escape(text)}</td>" for text, kind in zip(row, kinds, strict=True)]
        if row and row[0] in methods:  # ties the row to the lines in the diagrams
            cells[0] = f'<th scope="row">{_sample(methods.index(row[0]))}{escape(row[0])}</th>'
        rows.append(f"<tr>{''.join(cells)}</tr>")
    title = escape(table.title)
    caption = f'<p class="caption">{escape(table.caption)}</p>' if table.caption else ""
    return (
        f'<section class="table"><h2>{title}</h2>{caption}'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{title}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _places(report: Report) -> str:
    """Panels gathered by place, in the order in which the places first come up."""
    places: dict[str, list[tuple[int, Panel]]] = {}
    for number, panel in enumerate(report.panels):
        places.setdefault(panel.place, []).append((number, panel))
    return "".join(_place(panels, report.methods) for panels in places.values())


def _place(panels: list[tuple[int, Panel]], methods: tuple[str, ...]) -> str:
    buttons = ""
    if len(panels) > 1:
        pressed = ("true", *("false" for _ in panels[1:]))
        buttons = "".join(
            f'<button type="button" aria-pressed="{state}">{escape(panel.choice)}</button>'
            for state, (_, panel) in zip(pressed, panels, strict=True)
        )
        buttons = f'<div class="choices" role="group" aria-label="Which diagram">{buttons}</div>'
    figures = "".join(
        _figure(number, panel, methods, shown=place == 0) for place, (number, panel) in enumerate(panels)
    )
    return f'<section class="place">{buttons}{figures}</section>'


def _figure(number: int, panel: Panel, methods: tuple[str, ...], *, shown: bool) -> str:
    present = {series.method for series in panel.series}
    key = "".join(
        f'<span data-method="{place}">{_sample(place)}{escape(method)}</span>'
        for place, method in enumerate(methods)
        if method in present
    )
    title, file = escape(panel.title), quote(panel.key, safe="")
    choice = f'&ensp;<span class="choice">{escape(panel.choice)}</span>' if panel.choice else ""
    label = escape(f"{panel.title} {panel.choice}".strip())
    axes = escape(f"{panel.y_label} against {panel.x_label}")
    return (
        f'<figure class="panel{" shown" if shown else ""}" data-panel="{number}">'
        f"<figcaption><h3>{title}{choice}</h3>"
        f'<p class="caption" id="caption-{number}">{escape(panel.caption)}</p></figcaption>'
        f'<div><div class="chart" tabindex="0" role="group" aria-describedby="caption-{number}"'
        f' aria-label="{label}. Left and right arrow keys read the values.">'
        f'<svg role="img" aria-label="{label}: {axes}"></svg>'
        '<div class="tip" role="status" hidden></div></div>'
        f'<p class="note" hidden></p><div class="key">{key}</div>'
        '<div class="below"><details><summary>Numbers</summary><div class="scroll" tabindex="0" role="region"'
        f' aria-label="Numbers of {label}"></div></details>'
        f'<a href="{file}.csv">{escape(panel.key)}.csv</a> <a href="{file}.png">{escape(panel.key)}.png</a>'
        '<button type="button" class="reset" hidden>Reset zoom</button></div></div></figure>'
    )
