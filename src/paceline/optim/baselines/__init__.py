"""Rivals of PACE: one that is an optimizer of its own, and four that are attached to any optimizer."""

from paceline.optim.baselines.ademamix import AdEMAMix
from paceline.optim.baselines.ema_nesterov import ema_nesterov
from paceline.optim.baselines.gpa import gpa
from paceline.optim.baselines.lookahead import lookahead
from paceline.optim.baselines.schedule_free import schedule_free

__all__ = ["AdEMAMix", "ema_nesterov", "gpa", "lookahead", "schedule_free"]
