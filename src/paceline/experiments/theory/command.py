"""`paceline theory …`: flags, numbers on the terminal, pictures in a folder."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.experiments.config import ConfigError

Say = Callable[[str], None]

PARTS = {
    "gains": "how strongly the best controller pulls, over time; exact, relaxed and practical",
    "simulate": "controllers of an unknown optimum on simulated paths, or the update on real data",
    "limits": "final error and speed of the update on a quadratic, over the strength of the pull",
    "bounds": "what is guaranteed for a convex loss, and what is measured",
    "advise": "what the pull did in runs that you made, and what to change",
    "figures": "everything: all pictures, and one page from the control problem to PACE",
}

EXAMPLES = """examples:
  paceline theory gains --curvature 1 --penalty 0.01 --horizon 20
  paceline theory simulate --problem logistic
  paceline theory limits --speed 0.1 --rate 0.05
  paceline theory bounds --rate 0.1 --pull 0.3
  paceline theory advise comparison
      the folder of a comparison, or those of runs with readings of the pull (--telemetry-every)
  paceline theory figures --out theory
      about a minute; then open theory/index.html

Each prints its numbers, and draws a picture into the folder --out [theory]."""

# part → flag → default and meaning
_FLAGS: dict[str, dict[str, tuple[Any, str]]] = {
    "gains": {
        "curvature": (1.0, "α of the loss, over 0"),
        "penalty": (0.01, "λ, what control costs"),
        "horizon": (20.0, "T, how long"),
    },
    "simulate": {
        "problem": ("diffusion", "diffusion, or logistic: real data"),
        "curvature": (1.0, "α (diffusion)"),
        "penalty": (0.01, "λ (diffusion)"),
        "horizon": (20.0, "T (diffusion)"),
        "prior": (4.0, "variance of what is known about the optimum before (diffusion)"),
        "paths": (1000, "how many at once"),
        "steps": (400, "how many in each"),
        "seed": (0, "of all that is random"),
    },
    "limits": {"speed": (0.1, "a = learning rate · curvature, 0 to 1"), "rate": (0.05, "β, of the average")},
    "bounds": {
        "rate": (0.1, "β, of the average"),
        "pull": (0.3, "c, 0 to 1"),
        "paths": (200, "how many at once"),
        "seed": (0, "of all that is random"),
    },
}


def add(parser: argparse.ArgumentParser, kind: type[argparse.ArgumentParser]) -> None:
    """The parts of the command as parsers of their own."""
    parts = parser.add_subparsers(required=True, metavar="PART", parser_class=kind, dest="part")
    for name, text in PARTS.items():
        made = parts.add_parser(name, help=text, description=text, allow_abbrev=False)
        if name == "advise":
            made.add_argument("runs", nargs="+", type=Path, help="folders of runs, or that of a comparison")
            continue
        made.add_argument("--out", type=Path, default=Path("theory"), metavar="FOLDER", help="[theory]")
        for flag, (default, meaning) in _FLAGS.get(name, {}).items():
            options: dict[str, Any] = {"choices": ("diffusion", "logistic")} if flag == "problem" else {}
            made.add_argument(
                f"--{flag}", type=type(default), default=default, help=f"{meaning} [{default}]", **options
            )


def run(options: argparse.Namespace, say: Say) -> int:
    """Do it."""
    if options.part == "advise":
        from paceline.experiments.theory.runs import advise_on

        for line in advise_on(options.runs):
            say(line)
        return 0
    from paceline.experiments.theory import pictures
    from paceline.experiments.theory.page import page

    if options.part == "figures":
        made = {}
        for number, make in enumerate(pictures.ALL, 1):
            say(f"{number} of {len(pictures.ALL)}: {make.__name__.replace('_', ' ')}")
            picture = make()
            made[picture.name] = picture
            _write(picture, options.out, say)
        place = options.out / "index.html"
        place.write_text(page(made, options.out), encoding="utf-8")
        say(f"page: {place}")
        return 0
    given = {name: getattr(options, name) for name in _FLAGS[options.part]}
    if options.part == "gains":
        picture = pictures.gains_over_time(**given)
    elif options.part == "limits":
        picture = pictures.limiting_errors(**given)
    elif options.part == "bounds":
        picture = pictures.convex(**given)
    elif given.pop("problem") == "logistic":
        picture = pictures.logistic(**{name: given[name] for name in ("steps", "paths", "seed")})
    else:
        picture = pictures.controllers(**given)
    _write(picture, options.out, say)
    return 0


def _write(picture: "Any", folder: Path, say: Say) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    say(picture.title)
    for line in picture.text():
        say(f"  {line}")
    path = folder / f"{picture.name}.png"
    try:
        picture.draw(path)
    except ImportError:
        raise ConfigError('pictures need matplotlib: pip install "paceline[theory]"') from None
    say(f"  {path}")
