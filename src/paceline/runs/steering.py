"""From the settings of an optimizer, as text, to a `Control`: `pace:control=push,strength=0.7`."""

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from paceline.optim import Control
from paceline.runs.config import ConfigError, nearest, parse_spec

CONTROLS: dict[str, Callable[..., Control]] = {
    "paper": Control.paper,
    "push": Control.push,
    "pull": Control.pull,
    "none": Control.none,
}
SETTINGS = ("control", "c", *(field.name for field in fields(Control)))
"""Settings that make a control. `c` is the paper's letter for the strength of control=paper."""
SHORT = {"push": {"control": "push"}}
"""Names of PACE with a control that has a name of its own."""


def named_settings(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the settings of an optimizer; a short name is written out.

    >>> named_settings("push:strength=0.7")
    ('pace', {'control': 'push', 'strength': 0.7})
    """
    name, positional, settings = parse_spec(text)
    if positional:
        raise ConfigError(f"optimizer settings have names, as in pace:control=push; got {text!r}")
    if name in SHORT:
        if "control" in settings:
            raise ConfigError(f"{name} is pace:control={name}; write pace:control={settings['control']}")
        return "pace", {**SHORT[name], **settings}
    return name, settings


def take_control(name: str, settings: dict[str, Any]) -> Control | None:
    """Take what makes a control out of an optimizer's settings, and return the control; None without one.

    PACE always has a control: Algorithm 1 unless another one is named.
    """
    given = {key: settings.pop(key) for key in SETTINGS if key in settings}
    if not given and name != "pace":
        return None
    if "control" not in given and name != "pace":
        raise ConfigError(f"{name}: {next(iter(given))} goes with a control, as in {name}:control=push")
    kind = given.pop("control", "paper")
    kind = "none" if kind is None else str(kind)  # the word none is read as None
    if kind not in CONTROLS:
        raise ConfigError(
            f"{name}: control is {kind!r}{nearest(kind, tuple(CONTROLS))}; allowed: {', '.join(CONTROLS)}"
        )
    return _made(name, kind, given)


def _made(name: str, kind: str, given: dict[str, Any]) -> Control:
    """Return the control of a kind, with fields of it replaced."""
    if "c" in given and (kind != "paper" or "strength" in given):
        why = "it is the strength, which is given too" if kind == "paper" else "it goes with control=paper"
        raise ConfigError(f"{name}: c is {given['c']!r}; {why}")
    if kind == "paper" and "strength" in given:
        given["c"] = given.pop("strength")
    own = inspect.signature(CONTROLS[kind]).parameters
    try:
        control = CONTROLS[kind](**{key: value for key, value in given.items() if key in own})
        return replace(control, **{key: value for key, value in given.items() if key not in own})
    except ValueError as error:
        raise ConfigError(f"{name}:control={kind}: {error}") from None


def control_in(text: str) -> Control | None:
    """Return the control that an optimizer is named with; None without one.

    >>> control_in("push").strength, control_in("adamw:weight_decay=0.1")
    (-0.5, None)
    """
    name, settings = named_settings(text)
    return take_control(name, settings)


def is_steered(text: str) -> bool:
    """Return whether the optimizer of that name moves live weights by their gap to an average."""
    control = control_in(text)
    return control is not None and control.strength != 0
