"""Train for the model you return: PACE, iterate averages and everything around them.

Names are resolved on first use, so that ``import paceline.control`` never imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.optim import (
        BEMA,
        PACE,
        Averages,
        Blend,
        FixedDecay,
        HalfLife,
        Polynomial,
        PowerLaw,
        Pullback,
        averaged_state_dict,
        averaged_weights,
        parameter_groups,
        pull_statistics,
        reset_average,
        save_averaged,
    )

__version__ = "0.1.0"

__all__ = [
    "BEMA",
    "PACE",
    "Averages",
    "Blend",
    "FixedDecay",
    "HalfLife",
    "Polynomial",
    "PowerLaw",
    "Pullback",
    "__version__",
    "averaged_state_dict",
    "averaged_weights",
    "parameter_groups",
    "pull_statistics",
    "reset_average",
    "save_averaged",
]

_HOME = {name: "paceline.optim" for name in __all__ if name != "__version__"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
