"""The golden trajectories, float64 values of an independent transcription, and what of them is offered."""

import json
from pathlib import Path

import numpy as np

from paceline.optim.settings import Control

DATA = np.load(Path(__file__).parent / "golden" / "golden_pace.npz", allow_pickle=False)
META = json.loads(str(DATA["meta"]))
"""Case → its settings, in the paper's letters."""

# Readings of the paper that algorithm decisions 1, 3, 4, 5 and 6 rule out, and gains that lost.
NOT_OFFERED = {
    "post": "pull of raw toward the old average",
    "saturated_post_frozen": "the same, and frozen for ever where the gain is 1",
    "wsd_uf3_post": "the same, with a schedule",
    "post_raw": "pull of raw by the old average, which is then moved by raw",
    "raw_v": "second moment without bias correction",
    "warmup_base": "the pull at the base learning rate instead of the one in force",
    "uf5_update_clock": "t counting updates of the average instead of steps",
    "relative_gain": "a gain that was removed: sized within each tensor",
    "relative_push": "the same, with a negative strength",
}


def control_of(case):
    """Return the control of a case, or None if it is not offered."""
    paper = META[case]
    sized = paper["gain_mode"] in ("paper", "uniform") and paper["offset"] in (0.0, 1.0)
    if case in NOT_OFFERED or not sized:
        return None
    lookahead = {"gap": "after", "order": "average, then pull"} if paper["variant"] == "lookahead" else {}
    return Control(
        strength=paper["c"],
        sizing=paper["gain_mode"],
        power=paper["kappa"],
        return_power=paper["return_power"],
        every=paper["uf"],
        slope=paper["gain"],
        delay=1.0 - paper["offset"],
        max_gain=float("inf") if paper["clip"] is None else paper["clip"],
        **lookahead,
    )


CONTROLS = {case: control_of(case) for case in META}
OFFERED = [case for case, control in CONTROLS.items() if control is not None]


def adamw_of(case):
    """Return AdamW's settings of a case."""
    paper = META[case]
    return {"betas": tuple(paper["betas"]), **{k: paper[k] for k in ("eps", "weight_decay", "maximize")}}
