"""Checks of arguments. An error names the argument, its value and what is allowed."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def require(ok: bool, what: str, value: object, allowed: str) -> None:
    """Raise ValueError if an argument is not ok."""
    if not ok:
        raise ValueError(f"Invalid {what}: {value!r}; allowed: {allowed}")


def number(what: str, value: ArrayLike, allowed: str, ok: Any) -> Array:
    """Return a number or an array of numbers as an array, if all are finite and `ok`."""
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"Invalid {what}: {value!r}; allowed: {allowed}") from None
    require(bool(np.all(np.isfinite(array)) and np.all(ok(array))), what, value, allowed)
    return array


def whole(what: str, value: Any, least: int) -> int:
    """Return an integer, if it is at least `least`."""
    ok = isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= least)
    require(ok, what, value, f"an integer >= {least}")
    return int(value)


def one(what: str, array: Array) -> float:
    """Return an array's single number, for functions that do not broadcast."""
    require(array.ndim == 0, what, array.tolist(), "a single number")
    return float(array)


def broadcast(what: str, value: ArrayLike, shape: tuple[int, ...]) -> Array:
    """Return finite numbers, broadcast to a shape."""
    array = finite(what, value)
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(f"Invalid {what}: shape {array.shape}; allowed: shape {shape}") from None


def positive(what: str, value: ArrayLike) -> Array:
    """Return numbers, if they are above 0."""
    return number(what, value, "a finite number > 0", lambda x: x > 0)


def finite(what: str, value: ArrayLike) -> Array:
    """Return numbers, if they are finite."""
    return number(what, value, "a finite number", lambda x: x == x)


def not_negative(what: str, value: ArrayLike) -> Array:
    """Return numbers, if they are at least 0."""
    return number(what, value, "a finite number >= 0", lambda x: x >= 0)


def checked_rate(value: ArrayLike) -> Array:
    """Return averaging rates, if they are above 0 and at most 1."""
    return number("rate", value, "0 < rate <= 1", lambda x: (x > 0) & (x <= 1))


def fraction(what: str, value: ArrayLike) -> Array:
    """Return numbers, if they are between 0 and 1, both excluded."""
    return number(what, value, f"0 < {what} < 1", lambda x: (x > 0) & (x < 1))


def time_in(time: ArrayLike, horizon: Array) -> Array:
    """Return times, if they are from 0 to the horizon."""
    return number("time", time, f"0 <= time <= horizon = {horizon}", lambda x: (x >= 0) & (x <= horizon))


def square(what: str, value: ArrayLike) -> Array:
    """Return a square matrix; a number becomes one of size 1."""
    matrix = np.atleast_2d(number(what, value, "a square matrix of finite numbers", lambda x: x == x))
    ok = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1] and bool(np.all(np.isfinite(matrix)))
    require(ok, what, value, "a square matrix of finite numbers")
    return matrix


def symmetric(what: str, value: ArrayLike, *, definite: bool = False) -> Array:
    """Return a symmetric matrix, if it is positive definite (`definite`) or semidefinite."""
    matrix = square(what, value)
    size = float(np.max(np.abs(matrix), initial=0.0))
    alike = bool(np.allclose(matrix, matrix.T, rtol=0, atol=1e-12 * size))
    kind = "positive definite" if definite else "positive semidefinite"
    require(alike, what, value, f"a symmetric, {kind} matrix")
    least = float(np.linalg.eigvalsh(matrix)[0])
    require(least > 0 if definite else least >= -1e-12 * size, what, value, f"a symmetric, {kind} matrix")
    return (matrix + matrix.T) / 2
