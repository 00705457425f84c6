"""Values with tensors in them as JSON, in which each tensor is replaced by its path."""

import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON in which each tensor is replaced by its path, and add it to `tensors`."""
    match value:
        case Tensor():
            if path in tensors:
                raise ValueError(f"cannot save two tensors under one name, {path}")
            tensors[path] = value
            return {"$tensor": path}
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"$float": repr(value)}
        case list() | tuple():
            items = [pack(item, _join(path, i), tensors) for i, item in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple": items}
        case Mapping():
            if not all(isinstance(key, str) and not key.startswith("$") for key in value):
                raise TypeError(f"{path or 'the state'} has keys that are not names: {list(value)[:5]}")
            return {key: pack(item, _join(path, key), tensors) for key, item in value.items()}
    raise TypeError(f"cannot save {path}: a {type(value).__name__}")


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def unpack(value: Any, get: Callable[[str], Tensor]) -> Any:
    """Return the value that `pack` was given; `get` returns the tensor of a path.

    Raises:
        ValueError: `pack` cannot have written this.
    """
    if isinstance(value, list):
        return [unpack(item, get) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$tensor": str(path)}:
            return get(path)
        case {"$float": str(text)}:
            return float(text)
        case {"$tuple": list(items)}:
            return tuple(unpack(item, get) for item in items)
    if any(key.startswith("$") for key in value):
        raise ValueError(f"{reprlib.repr(value)} is not a packed value")
    return {key: unpack(item, get) for key, item in value.items()}
