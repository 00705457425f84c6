"""Train for the model you return: PACE, iterate averages and everything around them.

Names are resolved on first use, so that ``import paceline.control`` never imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline import schedules
    from paceline.groups import parameter_groups
    from paceline.optim import (
        BEMA,
        PACE,
        Blend,
        Control,
        FixedDecay,
        HalfLife,
        Polynomial,
        PowerLaw,
        attach,
        averaged_state_dict,
        averaged_tensors,
        averaged_weights,
        pull_statistics,
        reset_average,
        save_averaged,
    )

__version__ = "0.2.0"

__all__ = [
    "BEMA",
    "PACE",
    "Blend",
    "Control",
    "FixedDecay",
    "HalfLife",
    "Polynomial",
    "PowerLaw",
    "__version__",
    "attach",
    "averaged_state_dict",
    "averaged_tensors",
    "averaged_weights",
    "parameter_groups",
    "pull_statistics",
    "reset_average",
    "save_averaged",
    "schedules",
]


def __getattr__(name: str) -> Any:
    if name == "schedules":
        return import_module("paceline.schedules")
    if name == "parameter_groups":
        return import_module("paceline.groups").parameter_groups
    if name in __all__:
        return getattr(import_module("paceline.optim"), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
