"""The rivals, one file each, behind the interface of the rest: what users would pick instead."""

from paceline.optim.baselines.ademamix import AdEMAMix
from paceline.optim.baselines.ema_nesterov import EMANesterov
from paceline.optim.baselines.gpa import GPA
from paceline.optim.baselines.lookahead import lookahead
from paceline.optim.baselines.schedule_free import ScheduleFree

__all__ = ["GPA", "AdEMAMix", "EMANesterov", "ScheduleFree", "lookahead"]
