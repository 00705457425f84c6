"""The golden trajectories, float64 values of an independent transcription, and what of them is offered."""

import json
from pathlib import Path

import numpy as np

DATA = np.load(Path(__file__).parent / "golden" / "golden_pace.npz", allow_pickle=False)
META = json.loads(str(DATA["meta"]))

# Readings of the paper that algorithm decisions 1, 3, 4, 5 and 6 rule out, and a gain that is no more.
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
OFFERED = [case for case in META if case not in NOT_OFFERED]


def settings(options):
    return {
        "betas": tuple(options["betas"]),
        "eps": options["eps"],
        "weight_decay": options["weight_decay"],
        "pullback_strength": options["c"],
        "gain": options["gain_mode"],
        "ema_power": options["kappa"],
        "update_every": options["uf"],
        "ema_offset": options["offset"],
        "ema_scale": options["gain"],
        "max_gain": float("inf") if options["clip"] is None else options["clip"],
        "gap": options["variant"],
        "return_power": options["return_power"],
        "maximize": options["maximize"],
    }
