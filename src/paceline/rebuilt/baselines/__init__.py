"""Rivals of PACE: one that is an optimizer of its own, and four that are attached to any optimizer."""

from paceline.rebuilt.baselines.ademamix import AdEMAMix
from paceline.rebuilt.baselines.ema_nesterov import ema_nesterov
from paceline.rebuilt.baselines.gpa import gpa
from paceline.rebuilt.baselines.lookahead import lookahead
from paceline.rebuilt.baselines.schedule_free import schedule_free

__all__ = ["AdEMAMix", "ema_nesterov", "gpa", "lookahead", "schedule_free"]
