"""The optimizer and its averages. Imports torch and nothing else."""

from paceline.optim.averages import BEMA, Averages, Blend, FixedDecay, HalfLife, Polynomial, PowerLaw
from paceline.optim.averaging import reset_average
from paceline.optim.groups import parameter_groups
from paceline.optim.pace import PACE
from paceline.optim.pullback import Pullback
from paceline.optim.telemetry import pull_statistics
from paceline.optim.weights import averaged_state_dict, averaged_weights, save_averaged

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
    "averaged_state_dict",
    "averaged_weights",
    "parameter_groups",
    "pull_statistics",
    "reset_average",
    "save_averaged",
]
