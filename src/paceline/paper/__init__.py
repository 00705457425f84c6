"""The paper's experiments: the runs of each figure at three scales, and what is drawn of them."""

from paceline.runs.config import NO_OTHER_RUN
from paceline.studies.runs import ROUNDING

DATA = {"text": "what pretraining reads", "chat": "conversations of fine-tuning", "tulu": "those of tulu-3"}
"""Kinds of data that users may have on their machine."""
MAY_BE_SET = (NO_OTHER_RUN - {"keep_steps"}) | ROUNDING
"""Settings of runs that users may choose: what a machine needs, how often to evaluate and to save. The last
three round differently, and are no other experiment."""
