"""How a setting is refused: what, its value, what is allowed."""

from numbers import Real


def require(ok: bool, what: str, value: object, allowed: str) -> None:
    """Raise ValueError unless ok."""
    if not ok:
        raise ValueError(f"Invalid {what}: {value!r}; allowed: {allowed}")


def is_number(value: object) -> bool:
    """Whether a value is a real number; True and False are not."""
    return isinstance(value, Real) and not isinstance(value, bool)
