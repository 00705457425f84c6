"""How a setting is refused: what, its value, what is allowed; and how a user is warned."""

import sys
import warnings
from numbers import Real
from types import FrameType


def require(ok: bool, what: str, value: object, allowed: str) -> None:
    """Raise ValueError unless ok."""
    if not ok:
        raise ValueError(f"Invalid {what}: {value!r}; allowed: {allowed}")


def is_number(value: object) -> bool:
    """Whether a value is a real number; True and False are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def warn(text: str) -> None:
    """A warning at the line of whoever called us: that of `step()`, past torch's wrappers of it."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and f"{frame.f_globals.get('__name__')}.".startswith(
        ("paceline.optim.", "torch.")
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
