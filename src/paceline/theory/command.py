"""`paceline theory …`: flags, numbers on the terminal, pictures in a folder."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.runs.terminal import Command, say

if TYPE_CHECKING:
    from paceline.theory.picture import Picture

PARTS = {
    "advise": "what the pull did in runs that you made, and what to change",
    "figures": "all pictures with their numbers, and one page from the control problem to PACE",
}

EXAMPLES = """examples:
  paceline theory advise comparison
      the folder of a comparison, or those of runs with readings of the pull (--set telemetry_every=40)
  paceline theory figures --out theory
      half a minute; then open theory/index.html

Each prints its numbers, and draws pictures into the folder --out [theory]."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the parts of the command as parsers of their own."""
    parts = parser.add_subparsers(required=True, metavar="PART", dest="part")
    for name, text in PARTS.items():
        made = parts.add_parser(name, help=text, description=text, allow_abbrev=False)
        if name == "advise":
            made.add_argument("runs", nargs="+", type=Path, help="folders of runs, or that of a comparison")
            text = "where AdamW with an average is best; without it, looked for among the runs"
            made.add_argument("--best-lr", type=float, metavar="X", help=text)
        made.add_argument("--out", type=Path, default=Path("theory"), metavar="FOLDER", help="[theory]")


def run(options: argparse.Namespace) -> int:
    """Print the numbers of a part, and draw its pictures."""
    if options.part == "advise":
        from paceline.theory.runs import advise_on

        lines, picture = advise_on(options.runs, options.best_lr)
        for line in lines:
            say(line)
        _write(picture, options.out)
    else:
        from paceline.theory.page import write_page

        write_page(options.out, _write)
    return 0


def _write(picture: "Picture", folder: Path) -> Path:
    """Print a picture's numbers, draw it into a folder, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    for line in (picture.title, *(f"  {line}" for line in picture.table.lines())):
        say(line)
    path = picture.draw(folder)
    say(f"  {path}")
    return path


COMMANDS = (
    Command(
        name="theory",
        help="the theory behind PACE: numbers, pictures, advice on your runs",
        examples=EXAMPLES,
        add=add,
        run=run,
    ),
)
