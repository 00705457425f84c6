"""One page from the control problem to PACE: text, pictures, and what is wrong in print."""

import base64
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import NamedTuple

from paceline.runs.terminal import say
from paceline.studies.text import Listing
from paceline.theory import controllers, convex, quadratics
from paceline.theory.errata import ERRATA
from paceline.theory.picture import Picture


class Chapter(NamedTuple):
    """A step of the way."""

    title: str
    text: str
    pictures: tuple[Callable[[], Picture], ...]
    errata: str  # numbers of those that belong here


CHAPTERS = (
    Chapter(
        "The question as a control problem",
        """Near an optimum μ, training is modelled as dθ = [A(μ − θ) + u] dt + √Σ dW, and the mean of θ
        over the run is returned. Which control u makes that mean best, if control costs λ∫|u|²? The
        answer pulls the weights toward the optimum, and makes up for what the mean has missed so far.
        If the optimum is unknown, the best control is the same with the posterior mean in its place
        (certainty equivalence). The practical form, which takes the mean of the weights for it, makes
        the error larger, not smaller, in the very model that it is derived from: the flat mean is
        already close to the best estimate that the path allows.""",
        (controllers.controllers,),
        "E1 E2 E3 E11 E12",
    ),
    Chapter(
        "The best gain, and the one that became PACE",
        """The exact gain k_x = h²/(λT² + g), with h = ∫ e^(−αs) ds and g = ∫ h² ds over the time to go τ =
        T − t, grows until shortly before the end if control is cheap. Far from the end and for αT ≫ 3/2
        it is 1/(T(1 + λα²T)), a constant: that is the practical gain.""",
        (controllers.gains_over_time, controllers.practical_range),
        "E5 E6 E7 E7b E8 E9 E10 E24 E25",
    ),
    Chapter(
        "In steps: θ' = θ − ηg + c(E − θ)",
        """The practical control in discrete time, with an exponential average E in place of the mean. On a
        quadratic E is an autoregressive process of order 2, so its final error is known exactly:
        βη²σ²N/(a(2 − N)(2N − aβ)) with N = 1 + (1 − β)(1 − a − c). The pull lowers it, for every c up
        to the best one, which is 1 or more whenever a ≤ 3/4. The other readings of Algorithm 1 differ
        little, but for “post”, which freezes at c = 1.""",
        (quadratics.limiting_errors,),
        "E4 E17 E18 E19 E21",
    ),
    Chapter(
        "The catch",
        """The pull shrinks the learning rate that slow changes see, by β/(β + (1 − β)c). Among all
        settings that forget at the same speed, the best has no pull. So the pull does not lower what
        can be reached; it moves the learning rate at which it is reached: by a factor 1 + R, to the
        right. A push moves it to the left. If η* is the best learning rate, R* = η/η* − 1 is the
        strength that makes of η the best one. The balance of the next gradient and the gap, which says
        whether the next loss would fall with a stronger pull, changes its sign near η* on this
        quadratic. In the networks of our study it did not: it was positive at every rate.""",
        (quadratics.equal_speed, quadratics.basin, quadratics.right_ratios),
        "",
    ),
    Chapter(
        "Beyond quadratics",
        """For every convex loss the flat mean of the live weights is guaranteed to get within a factor of
        SGD's bound. On real data, where curvature changes along the way, a pull moves the basin too,
        and makes it a little shallower.""",
        (convex.convex, convex.logistic),
        "E13 E14 E15 E16 E26 E27",
    ),
    Chapter(
        "PACE",
        """What is left to make of it an optimizer for networks: the curvature of a coordinate is taken to
        be √v̂ + ε of AdamW, the step is AdamW's, the average a power law, β = (1 + t)^−κ, and the gain
        is at most 1: gain = min(β · ηc/(√v̂ + ε), 1); θ' = AdamW(θ) + gain · (E − θ); E' = (1 − β)E +
        βθ'. The strength R = ηc/√v̂ has the units of a learning rate times curvature over gradient, and
        so changes with the scale of the loss.""",
        (),
        "E20 E22 E23 E28 E29",
    ),
)

_STYLE = """
body{font:16px/1.55 system-ui,sans-serif;color:#1c1e21;background:#fdfdfb;max-width:62rem;
margin:2rem auto;padding:0 1.2rem}h1{font-size:1.7rem}h2{font-size:1.2rem;margin-top:2.4rem}
img{max-width:100%;height:auto}.many img{max-width:none;width:max(100%,60rem)}
figure{margin:1.2rem 0}figcaption{color:#5c6067;font-size:.9rem}.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.87rem}.n{text-align:right;font-variant-numeric:tabular-nums}
td,th{padding:.22rem .9rem .22rem 0;text-align:left;vertical-align:top;border-bottom:1px solid #ebebe7}
.errata td{overflow-wrap:anywhere}
@media(max-width:600px){.errata tr,.errata td{display:block;border:0;padding:0}.errata th{display:none}
.errata tr{border-bottom:1px solid #ebebe7;padding:.4rem 0}
.errata td:nth-child(3)::before{content:"printed: "}
.errata td:nth-child(4)::before{content:"right: "}}
@media(prefers-color-scheme:dark){body{background:#15171a;color:#e6e6e3}figcaption{color:#a9adb3}
td,th{border-color:#33363b}img{background:white}}
"""


def write_page(folder: Path) -> None:
    """Make all pictures, print their numbers, and make one page; what needs a missing package is left out."""
    parts, number = [], 0
    for chapter in CHAPTERS:
        parts.append(f"<h2>{escape(chapter.title)}</h2><p>{escape(' '.join(chapter.text.split()))}</p>")
        for make in chapter.pictures:
            number += 1
            say(
                f"{number} of {sum(len(one.pictures) for one in CHAPTERS)}: {make.__name__.replace('_', ' ')}"
            )
            try:
                picture = make()
            except ImportError as missing:  # scikit-learn, for real data
                say(f"  left out: {missing}")
                continue
            parts.append(figure(picture, _write(picture, folder)))
        parts.append(_errata(chapter.errata.split()))
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    text = (
        f'<!doctype html><html lang="en"><head>{head}<title>From control to PACE</title>'
        f"<style>{_STYLE}</style>"
        f"</head><body><h1>From a control problem to PACE</h1>{''.join(parts)}</body></html>\n"
    )
    place = folder / "index.html"
    place.write_text(text, encoding="utf-8")
    say(f"page: {place}")


def _write(picture: Picture, folder: Path) -> Path:
    """Print a picture's numbers, draw it into a folder, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    for line in (picture.title, *(f"  {line}" for line in picture.table.lines())):
        say(line)
    path = picture.draw(folder)
    say(f"  {path}")
    return path


def _errata(numbers: list[str]) -> str:
    """Return the table of what is printed differently in the paper; the page has the right forms."""
    found = tuple(erratum for erratum in ERRATA if erratum.number in numbers)
    listed = Listing(columns=("", "where", "printed", "right"), rows=found, numeric=(False,) * 4)
    return f"<div class=errata>{listed.html()}</div>" if found else ""


def figure(picture: Picture, image: Path) -> str:
    """Return a picture, its image inside, and its numbers as HTML."""
    data, title = base64.b64encode(image.read_bytes()).decode(), escape(picture.title)
    many = "wide many" if len(picture.panels) > 1 else "wide"
    return (
        f'<figure><div class="{many}"><img alt="{title}" src="data:image/png;base64,{data}"></div>'
        f"<figcaption>{title}</figcaption><div class=wide>{picture.table.html()}</div></figure>"
    )
