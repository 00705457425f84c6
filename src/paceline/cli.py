"""The command `paceline`: it registers the commands, parses, and says errors in one line."""

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn

from paceline.bench import command as bench
from paceline.cost import command as cost
from paceline.paper import command as paper
from paceline.runs import command as runs
from paceline.runs.config import ConfigError, documentation, nearest
from paceline.runs.terminal import Command, own_rank, printable, warn
from paceline.studies import compare
from paceline.theory import command as theory

COMMANDS: dict[str, Command] = {
    command.name: command
    for module in (compare, paper, runs, bench, cost, theory)
    for command in module.COMMANDS
}

EXIT = "exit codes: 0 done, 1 failed, 2 a mistake in what was asked for, 130 Ctrl-C"


class _Parser(argparse.ArgumentParser):
    """A parser whose mistakes are ConfigErrors: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    try:
        return _answer(arguments)
    except RuntimeError as error:
        # torch's handler of SIGCHLD raises anywhere, also while an error is reported.
        return _fail(error, 1)


def _answer(arguments: Sequence[str] | None) -> int:
    """Run the command, and say its errors in one line."""
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        return COMMANDS[options.command].run(options)
    except ConfigError as error:
        return _fail(error, 2)
    except KeyboardInterrupt:
        warn("stopped")
        return 130
    except BrokenPipeError:
        return 141
    except (OSError, ValueError, RuntimeError, MemoryError, ImportError) as error:
        return _report(error)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line; `command` is the command's name.

    Raises:
        ConfigError: the line cannot be read.
    """
    for before, word in pairwise(("", *arguments)):
        if re.fullmatch(r"(--[\w-]+=)?", word):
            raise ConfigError(f"{word.rstrip('=') or before or 'COMMAND'} has an empty value")
    parser = _Parser(
        prog="paceline", description="Train for the model you return.", epilog=EXIT, allow_abbrev=False
    )
    parts = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    parsers = {}
    for command in COMMANDS.values():
        parsers[command.name] = parts.add_parser(
            command.name,
            help=command.help,
            description=command.help,
            epilog=command.examples,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if arguments and arguments[0] == command.name:  # the flags of all others are not asked for
            command.add(parsers[command.name])
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        flag = unknown[0].partition("=")[0]
        known = re.findall(r"--[a-z][\w-]*", parsers[options.command].format_usage())
        meant, name = nearest(flag, known), flag.removeprefix("--").replace("-", "_")
        if flag == "--task" and options.command == "train":
            meant = "; it is a word: paceline train sft …"
        elif "--set" in known and name in documentation() and f"{flag}s" not in known:
            meant = f"; it is a setting without a flag: --set {name}=VALUE"
        raise ConfigError(f"unknown argument {unknown[0][:80]!r}{meant}")
    return options


def _report(error: BaseException) -> int:
    if "torch" not in sys.modules:  # then it is none of those below, and importing them takes seconds
        return _fail(error, 1)
    from paceline.lm.memory import explain_memory
    from paceline.runs.run import Interrupted

    if isinstance(error, Interrupted):
        if not own_rank():
            warn(f"{error}; the same command resumes")
        return 128 + error.number
    return _fail(explain_memory(error) or error, 1)


def _fail(error: object, code: int) -> int:
    text = printable(" ".join(str(error).split()) or type(error).__name__)
    if (rank := own_rank()) is not None:
        text = f"rank {rank}: {text}"
        if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun then repeats it at its end
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            # torchrun takes the first error for the cause. If this one only follows from the end of another
            # rank, that one is to come first; of a killed rank, which says nothing, torchrun knows itself.
            time.sleep(2)
            get_error_handler().record_exception(RuntimeError(text))
    warn(text)
    return code
