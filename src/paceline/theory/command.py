"""`paceline theory …`: flags, and advice on the terminal."""

import argparse
from pathlib import Path

from paceline.runs.terminal import Command, ConfigError, say

EXAMPLES = """examples:
  paceline theory advise --lr 4e-3 --steps 4000 --ratio 0.4 --best-lr 2e-3
      what a control of that strength does to slow changes, and which one is right
  paceline theory figures --out theory
      half a minute; all pictures with their numbers, and a page of them, theory/index.html"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the parts of the command as parsers of their own."""
    parts = parser.add_subparsers(required=True, metavar="PART", dest="part")
    text = "all pictures with their numbers, and one page from the control problem to PACE"
    made = parts.add_parser("figures", help=text, description=text, allow_abbrev=False)
    made.add_argument("--out", type=Path, default=Path("theory"), metavar="FOLDER", help="[theory]")
    text = "what a control does in a run, and what to change"
    made = parts.add_parser("advise", help=text, description=text, allow_abbrev=False)
    made.add_argument("--lr", type=float, required=True, metavar="X", help="the learning rate")
    made.add_argument("--steps", type=int, required=True, metavar="N", help="the steps of the run")
    text = "R of a typical coordinate: the strength, below 0 for a push"
    made.add_argument("--ratio", type=float, required=True, metavar="R", help=text)
    text = "where AdamW with an average is best"
    made.add_argument("--best-lr", type=float, metavar="X", help=text)


def run(options: argparse.Namespace) -> int:
    """Print advice; or the numbers of all pictures, and draw these."""
    if options.part == "advise":
        from paceline.control.advice import Situation, advise

        try:
            names = ("lr", "steps", "ratio", "best_lr")
            for line in advise(Situation(**{name: getattr(options, name) for name in names})):
                say(line)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    else:
        from paceline.theory.page import write_page

        write_page(options.out)
    return 0


COMMANDS = (Command("theory", "the theory behind PACE: numbers, pictures, advice", EXAMPLES, add, run),)
