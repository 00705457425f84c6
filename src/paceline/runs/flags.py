"""The settings of a run as flags, for every command that makes runs."""

import argparse
from collections.abc import Set
from typing import Any, get_args, get_origin

from paceline.runs import config


def add_settings(parser: argparse.ArgumentParser, without: Set[str] = frozenset()) -> None:
    """Add a flag for each setting of a run, but for those that the command chooses itself."""
    group = parser.add_argument_group("settings")
    for name, text in config.documentation().items():
        if name in without:
            continue
        kind: Any = config.kind_of(name)
        default = config.Run.__dataclass_fields__[name].default
        words = " ".join(default) if isinstance(default, tuple) else default
        shown = "" if default in (None, (), False) else f" [{words}]"
        options: dict[str, Any] = {"help": (text + shown).replace("%", "%%"), "default": argparse.SUPPRESS}
        if kind is bool:
            options |= {"action": argparse.BooleanOptionalAction}
        elif get_origin(kind) is tuple:
            options |= {"nargs": "+", "metavar": "X"}
        else:
            options |= {"metavar": "|".join(get_args(kind)) if get_args(kind) else name.upper()}
        group.add_argument(f"--{name.replace('_', '-')}", **options)


def settings_given(options: argparse.Namespace, without: Set[str] = frozenset()) -> dict[str, Any]:
    """Return the settings of a run that the user gave as flags, by name."""
    names = config.documentation().keys() - without
    return {name: value for name, value in vars(options).items() if name in names}
