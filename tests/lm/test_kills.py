"""SIGKILL at any moment changes nothing in what a run computes (5 kills; `make test-all` does 1,000)."""

import json
import os
import random

import kills
import pytest
import trials

pytestmark = pytest.mark.long  # test_trainer_faults.py kills at chosen moments, every day
KILLS = 5


def tally_of(folder, *args, **settings):
    """A campaign in a process of its own, which has computed nothing: forks of one that has may hang."""
    trial = trials.Trial(folder / "said", trials.kill, folder, *args, **settings)
    assert trial.wait(seconds=600) == 0, trial.text()
    return kills.Tally(**json.loads((folder / "tally.json").read_text()))


def test_killed_runs_end_as_undisturbed_ones(tmp_path):
    seed = int(os.environ.get("PACELINE_SEED", random.randrange(2**32)))
    tally = tally_of(tmp_path, ("pretrain", "sft"), KILLS, seed)
    assert not tally.errors and not tally.differences, f"PACELINE_SEED={seed}: {tally}"
    assert tally.kills >= KILLS


def test_a_trainer_that_saves_naively_does_not_survive(tmp_path):
    """The twin that must fail: without it nobody knows whether the kills hit anything."""
    for seed in range(6):
        tally = tally_of(tmp_path, ("pretrain",), 6, seed, prepare=kills.naive, aimed=1.0)
        if tally.errors or tally.differences:
            return
    pytest.fail("36 kills inside saves, and nothing was found wrong")
