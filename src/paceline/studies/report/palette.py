"""The colour and dashes of each method, the same in the page and in the pictures.

The colours start from those of Okabe and Ito, which people with colour-blindness tell apart; each has a
darker form for a white ground and a lighter one for a dark ground, both with a contrast of 3:1 at least.
No two methods share their dashes, so that colour is never the only sign.
"""

from dataclasses import dataclass

LIGHT_GROUND = "#fdfdfb"
DARK_GROUND = "#15171a"


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """How the lines of one method look."""

    on_light: str
    on_dark: str
    dashes: tuple[float, ...]
    """Lengths of strokes and gaps in line widths; empty: one unbroken line."""


_COLOURS = (
    ("#4a4a4a", "#d9d9d9"),  # grey, for the method all others are measured against
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
_DASHES = (
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


def style(number: int) -> Style:
    """How method `number` looks. The two cycles differ in length, so 132 methods all differ."""
    on_light, on_dark = _COLOURS[number % len(_COLOURS)]
    return Style(on_light=on_light, on_dark=on_dark, dashes=_DASHES[number % len(_DASHES)])
