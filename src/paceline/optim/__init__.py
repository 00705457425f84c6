"""The optimizer and its averages. Read settings.py and rule.py first. Imports torch and nothing else."""

from paceline.optim.attach import attach
from paceline.optim.averages import BEMA, Blend, FixedDecay, HalfLife, Polynomial, PowerLaw
from paceline.optim.export import averaged_state_dict, averaged_tensors, save_averaged
from paceline.optim.pace import PACE
from paceline.optim.settings import Control
from paceline.optim.telemetry import pull_statistics
from paceline.optim.weights import averaged_weights, reset_average

__all__ = [
    "BEMA",
    "PACE",
    "Blend",
    "Control",
    "FixedDecay",
    "HalfLife",
    "Polynomial",
    "PowerLaw",
    "attach",
    "averaged_state_dict",
    "averaged_tensors",
    "averaged_weights",
    "pull_statistics",
    "reset_average",
    "save_averaged",
]
