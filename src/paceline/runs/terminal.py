"""The terminal: what a command is, what it prints, and how it answers mistakes.

A package's `command.py` has a tuple `COMMANDS`, which `cli.py` registers. The file imports neither torch nor
another command; `run` imports what it needs.
"""

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True)
class Command:
    """A command of `paceline`: its flags, its help, and what it does."""

    name: str
    help: str
    """What it does, in one line."""
    examples: str
    """The end of its help. Lines that begin with two spaces and `paceline` are parsed by a test."""
    add: Callable[[argparse.ArgumentParser], object]
    """Add its flags to a parser."""
    run: Callable[[argparse.Namespace], int]
    """Do it, and return the exit code. It raises ConfigError (exit code 2) for a user's mistake."""


def say(text: str) -> None:
    """Print a line."""
    print(printable(text))


def warn(text: str) -> None:
    """Print a line to stderr, with the name of the command."""
    print(f"paceline: {printable(text)}", file=sys.stderr)


def own_rank() -> int | None:
    """Return which of the processes that torchrun started this is; None if it is the only one."""
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    return int(os.environ["RANK"]) if several and "RANK" in os.environ else None


def printable(text: str) -> str:
    r"""Return the text with ? for what cannot be seen: escape codes, line breaks, halves of characters.

    >>> printable("a run\x1b[2J\ncalled §")
    'a run?[2J?called §'
    """
    return "".join(c if c.isprintable() else "?" for c in text)


# --- Mistakes -----------------------------------------------------------------------------------------


class ConfigError(ValueError):
    """A description that cannot be run; the message is one line for its author."""


# What people write who know other trainers.
_ELSEWHERE = {
    "learning_rate": "lr",
    "optimizer": "method",
    "max_steps": "steps",
    "gradient_clipping": "clip_norm",
}


def nearest(name: str, names: Iterable[str]) -> str:
    """Return what may have been meant, for the end of a message.

    >>> nearest("batchsize", ["batch_size", "steps"]), nearest("--learning-rate", ["--length", "--lr"])
    (' (did you mean batch_size?)', ' (did you mean --lr?)')
    """
    names = list(names)
    dashes = "--" if name.startswith("--") else ""
    known = dashes + _ELSEWHERE.get(name.removeprefix("--").replace("-", "_"), "")
    close = [known] if known in names else difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
