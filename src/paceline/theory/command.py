"""`paceline theory …`: flags, numbers on the terminal, pictures in a folder."""

import argparse
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.runs.config import ConfigError

if TYPE_CHECKING:
    from paceline.theory.picture import Picture

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
      half a minute; then open theory/index.html

Each prints its numbers, and draws a picture into the folder --out [theory]."""

# part → flag → kind and meaning; defaults are those of the pictures
_FLAGS: dict[str, dict[str, tuple[type, str]]] = {
    "gains": {
        "curvature": (float, "α of the loss, over 0 [1]"),
        "penalty": (float, "λ, what control costs [0.01]"),
        "horizon": (float, "T, how long [20]"),
    },
    "simulate": {
        "curvature": (float, "α, over 0; diffusion only [1]"),
        "penalty": (float, "λ; diffusion only [0.01]"),
        "horizon": (float, "T; diffusion only [20]"),
        "prior": (float, "variance of what is known about the optimum before; diffusion only [4]"),
        "rate": (float, "β, of the average; logistic only [0.02]"),
        "paths": (int, "how many at once [4000, logistic 40]"),
        "steps": (int, "how many in each [400, logistic 1000]"),
        "seed": (int, "of all that is random [0]"),
    },
    "limits": {"speed": (float, "a = learning rate · curvature, 0 to 1 [0.1]"), "rate": (float, "β [0.05]")},
    "bounds": {
        "rate": (float, "β, of the average [0.1]"),
        "pull": (float, "c, 0 to 1 [0.3]"),
        "paths": (int, "how many at once [200]"),
        "seed": (int, "of all that is random [0]"),
    },
}


def add(parser: argparse.ArgumentParser, kind: type[argparse.ArgumentParser]) -> None:
    """The parts of the command as parsers of their own."""
    parts = parser.add_subparsers(required=True, metavar="PART", parser_class=kind, dest="part")
    for name, text in PARTS.items():
        made = parts.add_parser(name, help=text, description=text, allow_abbrev=False)
        if name == "advise":
            made.add_argument("runs", nargs="+", type=Path, help="folders of runs, or that of a comparison")
            text = "where AdamW with an average is best; without it, looked for among the runs"
            made.add_argument("--best-lr", type=float, metavar="X", help=text)
        made.add_argument("--out", type=Path, default=Path("theory"), metavar="FOLDER", help="[theory]")
        if name == "simulate":
            text = "controllers of an unknown optimum, or the update on real data [diffusion]"
            made.add_argument("--problem", choices=("diffusion", "logistic"), default="diffusion", help=text)
        for flag, (number, meaning) in _FLAGS.get(name, {}).items():
            made.add_argument(f"--{flag}", type=number, default=argparse.SUPPRESS, help=meaning)


def run(options: argparse.Namespace, say: Say) -> int:
    """Do it."""
    if options.part == "advise":
        from paceline.theory.runs import advise_on

        lines, picture = advise_on(options.runs, options.best_lr)
        for line in lines:
            say(line)
        _write(picture, options.out, say)
        return 0
    from paceline.theory import controllers, convex, quadratics
    from paceline.theory.figures import ALL
    from paceline.theory.page import page

    if options.part == "figures":
        made = {}
        for i, make in enumerate(ALL, 1):
            say(f"{i} of {len(ALL)}: {make.__name__.replace('_', ' ')}")
            try:
                picture = make()
            except ImportError as missing:  # scikit-learn, for real data
                say(f"  left out: {missing}")
                continue
            made[picture.name] = picture
            _write(picture, options.out, say)
        place = options.out / "index.html"
        place.write_text(page(made, options.out), encoding="utf-8")
        say(f"page: {place}")
        return 0
    given = {name: getattr(options, name) for name in _FLAGS[options.part] if name in options}
    kind = getattr(options, "problem", options.part)
    makers: dict[str, Callable[..., Picture]] = {
        "gains": controllers.gains_over_time,
        "limits": quadratics.limiting_errors,
        "bounds": convex.convex,
        "diffusion": controllers.controllers,
        "logistic": convex.logistic,
    }
    if unknown := given.keys() - inspect.signature(makers[kind]).parameters.keys():
        raise ConfigError(f"--{min(unknown)} is no setting of {kind}")
    _write(makers[kind](**given), options.out, say)
    return 0


def _write(picture: "Picture", folder: Path, say: Say) -> None:
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
