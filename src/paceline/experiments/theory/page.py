"""One page from the control problem to PACE: text, pictures, and what is wrong in print."""

import base64
import html
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from paceline.experiments.theory.errata import ERRATA
from paceline.experiments.theory.pictures import Picture


class Chapter(NamedTuple):
    """A step of the way."""

    title: str
    text: str
    pictures: tuple[str, ...]


CHAPTERS = (
    Chapter(
        "The question as a control problem",
        """Near an optimum μ, training is modelled as dθ = [A(μ − θ) + u] dt + √Σ dW, and the mean of θ over
        the run is returned. Which control u makes that mean best, if control costs λ∫|u|²? The answer pulls
        the weights toward the optimum, and makes up for what the mean has missed so far. If the optimum is
        unknown, the best control is the same with the posterior mean in its place (certainty equivalence).
        The practical form, which takes the mean of the weights for that, gains nothing in the very model
        that it is derived from: the flat mean is already close to the best estimate that the path allows.""",
        ("controllers",),
    ),
    Chapter(
        "The best gain, and the one that became PACE",
        """The exact gain k_x = h²/(λT² + g) grows until shortly before the end (E25). Far from the end and
        for αT ≫ 3/2 it is 1/(T(1 + λα²T)), a constant: that is the practical gain.""",
        ("gains", "practical"),
    ),
    Chapter(
        "In steps: θ' = θ − ηg + c(E − θ)",
        """On a quadratic the returned average is an autoregressive process of order 2, so its final error is
        known exactly: βη²σ²N/(a(2 − N)(2N − aβ)) with N = 1 + (1 − β)(1 − a − c). The pull lowers it, for
        every c up to the best one, which is 1 or more whenever a ≤ 3/4. The other readings of Algorithm 1
        differ little, but for “post”, which freezes at c = 1.""",
        ("limits",),
    ),
    Chapter(
        "The catch",
        """The pull shrinks the learning rate that slow changes see, by β/(β + (1 − β)c). Among all settings
        that forget at the same speed, the best has no pull. So the pull does not lower what can be reached;
        it moves the learning rate at which it is reached: by a factor 1 + R, to the right. A push moves it
        to the left. If η* is the best learning rate, R* = η/η* − 1 is the strength that makes of η the best
        one.""",
        ("equal-speed", "basin"),
    ),
    Chapter(
        "Beyond quadratics",
        """For every convex loss the flat mean of the live weights is guaranteed to get within a factor of
        SGD's bound. On real data the picture is that of the quadratic: the basins are shifted, not
        deepened.""",
        ("bounds", "logistic"),
    ),
)

_STYLE = """
body{font:16px/1.55 system-ui,sans-serif;color:#1c1e21;background:#fdfdfb;max-width:62rem;
margin:2rem auto;padding:0 1.2rem}h1{font-size:1.7rem}h2{font-size:1.2rem;margin-top:2.4rem}
img{max-width:100%;height:auto}
figure{margin:1.2rem 0}figcaption{color:#5c6067;font-size:.9rem}
table{border-collapse:collapse;font-size:.87rem}
td,th{padding:.22rem .7rem .22rem 0;text-align:left;vertical-align:top;border-bottom:1px solid #ebebe7}
td.n{text-align:right;font-variant-numeric:tabular-nums}td.n:first-child{text-align:left}.wide{overflow-x:auto}
@media(prefers-color-scheme:dark){body{background:#15171a;color:#e6e6e3}figcaption{color:#a9adb3}
td,th{border-color:#33363b}img{background:white}}
"""


def page(pictures: Mapping[str, Picture], folder: Path) -> str:
    """The page, with the PNG files of that folder inside it."""
    parts = []
    for title, text, names in CHAPTERS:
        parts.append(f"<h2>{html.escape(title)}</h2><p>{html.escape(' '.join(text.split()))}</p>")
        parts += [_figure(pictures[name], folder) for name in names]
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in erratum) + "</tr>" for erratum in ERRATA
    )
    parts.append(
        "<h2>Printed, and right</h2><p>All numbers above are of the corrected formulas.</p>"
        "<div class=wide><table>"
        f"<tr><th></th><th>where</th><th>printed</th><th>right</th></tr>{rows}</table></div>"
    )
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    return (
        f'<!doctype html><html lang="en"><head>{head}<title>From control to PACE</title>'
        f"<style>{_STYLE}</style>"
        f"</head><body><h1>From a control problem to PACE</h1>{''.join(parts)}</body></html>\n"
    )


def _figure(picture: Picture, folder: Path) -> str:
    data = base64.b64encode((folder / f"{picture.name}.png").read_bytes()).decode()
    head, *rows = picture.rows
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td class=n>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    title = html.escape(picture.title)
    return (
        f'<figure><img alt="{title}" src="data:image/png;base64,{data}"><figcaption>{title}</figcaption>'
        f"<div class=wide><table><tr>{cells}</tr>{body}</table></div></figure>"
    )
