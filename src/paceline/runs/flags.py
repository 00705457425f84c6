"""The settings of a run on the command line, for every command that makes runs.

Common settings have a flag each. All of them may be given by --set, or in a file, under the same names.
"""

import argparse
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any, get_args, get_origin

from paceline.runs import config
from paceline.runs.config import ConfigError, nearest

COMMON = frozenset(
    {"task", "model", "data", "held_out", "tokenizer", "length", "batch_size", "steps", "tokens", "device"}
)
"""Settings that have a flag in commands of many runs."""


def add_settings(parser: argparse.ArgumentParser, names: Set[str]) -> None:
    """Add --config and --set, and a flag for each of these settings."""
    group = parser.add_argument_group("settings")
    text = "any other setting; a name that comes again makes a list (all: paceline train --help)"
    group.add_argument("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help=text)
    group.add_argument("--config", type=Path, metavar="FILE", help="settings in a TOML file; flags win")
    for name in config.documentation():
        if name not in names:
            continue
        kind: Any = config.kind_of(name)
        options: dict[str, Any] = {"help": described(name).replace("%", "%%"), "default": argparse.SUPPRESS}
        if kind is bool:
            options |= {"action": argparse.BooleanOptionalAction}
        elif get_origin(kind) is tuple:
            options |= {"nargs": "+", "metavar": "X"}
        else:
            options |= {"metavar": "|".join(get_args(kind)) if get_args(kind) else name.upper()}
        group.add_argument(f"--{name.replace('_', '-')}", **options)


def described(name: str) -> str:
    """Return what a setting means, and its default.

    >>> described("keep")
    'How many of the newest checkpoints to keep. [2]'
    """
    default = config.Run.__dataclass_fields__[name].default
    words = " ".join(map(str, default)) if isinstance(default, tuple) else default
    return config.documentation()[name] + ("" if default in (None, (), False) else f" [{words}]")


def settings_given(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a run that the user gave on the command line, by name.

    Raises:
        ConfigError: --set has no setting of a run, or one that is there as a flag too.
    """
    known = config.documentation()
    found = {name: value for name, value in vars(options).items() if name in known}
    for name, values in pairs("--set", options.set).items():
        if name not in known:
            raise ConfigError(f"--set: unknown setting {name[:80]!r}{nearest(name, known)}")
        if name in found:
            raise ConfigError(f"{name} is given twice, as --{name.replace('_', '-')} and by --set")
        found[name] = values if len(values) > 1 else values[0]
    return found


def pairs(flag: str, words: Iterable[str]) -> dict[str, list[str]]:
    """Return the values of each name in words of the form NAME=VALUE.

    >>> pairs("--set", ["keep=1", "data=a.txt", "data=b.txt"])
    {'keep': ['1'], 'data': ['a.txt', 'b.txt']}
    """
    found: dict[str, list[str]] = {}
    for word in words:
        name, _, value = word.partition("=")
        if not value:
            raise ConfigError(f"{flag} {word[:80]}: write {flag} NAME=VALUE")
        found.setdefault(name, []).append(value)
    return found
