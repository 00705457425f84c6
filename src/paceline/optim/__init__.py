"""The optimizer and its averages. Imports torch and nothing else."""

from paceline.optim.pace import PACE, reset_average
from paceline.optim.weights import averaged_state_dict, averaged_weights, save_averaged

__all__ = ["PACE", "averaged_state_dict", "averaged_weights", "reset_average", "save_averaged"]
