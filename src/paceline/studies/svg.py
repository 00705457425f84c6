"""A plot as an SVG element of a page: colours by CSS variables, and points that say their values."""

import re
from dataclasses import replace
from html import escape
from io import StringIO

from paceline.studies.looks import COLOURS, GRID, INK, RULE, SOFT
from paceline.studies.plots import Plot, check_installed, draw_plot, style

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
