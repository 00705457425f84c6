"""Which runs there are, what is chosen from them, and tables by hand."""

import math

import pytest
import torch

from paceline.experiments.config import ConfigError
from paceline.experiments.evidence import studies, tables
from paceline.experiments.evidence.studies import CPU, GPU, STUDIES, together
from paceline.experiments.methods import make_optimizer
from paceline.experiments.paper.lines import Result

ADAMW, FREE, PACE = studies.ADAMW, studies.FREE, studies.PACE


def result(name, **losses):
    ended = "diverged" if math.inf in losses.values() else "finished"
    return Result(
        name=name, config={}, environment={}, parameters=1, outcome=ended, seconds=1.0,
        evaluations=((10, losses),), train=(), pull=((10, {"saturated": 0.25}),),
    )  # fmt: skip


def made_up(trials, loss=lambda one, view: 3.0):
    return {one.name: result(one.name, **{view: loss(one, view) for view in one.views}) for one in trials}


def all_trials(room):
    results = made_up([*studies.tuning(room), *studies.fine_tuning(room)])
    return {name: together(study(room, results)) for name, study in STUDIES.items()}


@pytest.mark.parametrize("room", [GPU, CPU])
def test_the_same_name_is_the_same_run_in_every_study(room):
    seen = {}
    for trials in all_trials(room).values():
        for name, one in trials.items():
            other = seen.setdefault(name, one)
            assert other.run.fork == one.run.fork and other.run.optimizer == one.run.optimizer
            assert (other.run.lr, other.run.seed, other.run.steps) == (
                one.run.lr,
                one.run.seed,
                one.run.steps,
            )
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("room", [GPU, CPU])
def test_every_optimizer_can_be_made(room):
    """One that is refused would be so on the day of the runs."""
    made = {one.run.optimizer: one.run for trials in all_trials(room).values() for one in trials.values()}
    for run in made.values():
        assert make_optimizer(run, torch.nn.Linear(2, 2)).param_groups[0]["lr"] == run.lr


def test_methods_are_tried_equally_often():
    for study in (studies.tuning, studies.fine_tuning):
        counts = {}
        for one in study(GPU):
            counts[one.method] = counts.get(one.method, 0) + 1
        assert len({counts[method] for method in (ADAMW, FREE, PACE)}) == 1


def test_a_branch_goes_on_from_a_run_of_its_study_that_keeps_that_checkpoint():
    for trials in all_trials(GPU).values():
        names = list(trials)
        for name, one in trials.items():
            if one.run.fork is None:
                continue
            parent, _, step = one.run.fork.rpartition("@")
            assert names.index(parent) < names.index(name)
            assert int(step) in trials[parent].run.keep_steps
            assert one.run.steps - int(step) == round(0.2 * one.run.steps)
            assert (trials[parent].run.optimizer, trials[parent].run.lr) == (one.run.optimizer, one.run.lr)


def test_fine_tuning_has_the_first_seed_of_all_methods_before_others():
    results = made_up(studies.fine_tuning(GPU))
    trials = list(studies.fine_tuning_basin(GPU, results))
    seeds = [one.seed for one in trials if one.schedule != "cosine"]
    assert seeds == sorted(seeds) and set(seeds) == {1, 2, 3}


def test_batches_see_as_many_tokens():
    usual = GPU.pretraining["steps"] * GPU.pretraining["batch_size"]
    assert {one.run.steps * one.run.batch_size for one in studies.batch(GPU)} == {usual}


def test_what_is_chosen_is_the_least_of_any_weights_at_any_rate():
    def loss(one, view):
        if one.method == ADAMW and "0.95" in one.setting and one.lr == 4e-3 and view == "power_0_6":
            return 2.5 if "0.1," in one.setting else 2.6
        return 2.9 if one.method == PACE and one.setting == "c 0.01, κ 0.7" and view == "average" else 3.0

    results = made_up(studies.tuning(CPU), loss)
    found = [setting[1] for setting in studies.chosen(studies.tuning(CPU), studies.SETTINGS, results)]
    assert found[0] == "weight decay 0.1, β₂ 0.95" and found[2] == "c 0.01, κ 0.7"
    results.popitem()
    with pytest.raises(ConfigError, match="of which 1 are not done"):
        studies.chosen(studies.tuning(CPU), studies.SETTINGS, results)


def test_regret_is_over_the_best_baseline_at_multiples_of_adamws_best_rate():
    best = {studies.PLAIN[0]: 3e-3, PACE: 6e-3}

    def loss(one, view):
        at = best.get(one.method, 3e-3)
        worse = {"live": 0.1, "average": 0.05}.get(view, 0.0) + {FREE: 0.2, PACE: 0.01}.get(one.method, 0.0)
        decayed = -0.02 if one.schedule == "wsd" else 0.0
        own = 0.006 * (one.seed - 1) if one.method == PACE else 0.0  # on top of what all methods have
        return 3 + abs(math.log2(one.lr / at)) * 0.1 + worse + decayed + 0.03 * (one.seed - 1) + own

    tried = list(studies.tuning(GPU))
    results = made_up(tried, loss)
    trials = [one for one in studies.basin(GPU, results) if one.seed not in studies.MORE_SEEDS]
    results |= made_up(trials, loss)
    text = tables.TABLES["basin"](GPU, results)
    assert (
        "Over 3.010 ± 0.017: AdamW, wsd (weight decay 0.01, β₂ 0.999): EMA κ = 0.3 at 0.003, seed by seed."
        in text
    )
    rows = {line.split(" | ")[0][2:]: line.split(" | ") for line in text.splitlines() if " | " in line}
    pulled = rows["PACE (c 0.001, κ 0.5): EMA κ = 0.3"]
    # Its best rate; there; at AdamW's: what all seeds have in common is not in the error.
    assert pulled[1:4] == ["0.006", "+0.036 ± 0.003", "+0.136 ± 0.003"]
    assert rows["PACE, wsd (c 0.001, κ 0.5): EMA κ = 0.3"][6].startswith("+0.")  # at ten times it
    with_error = [
        line for line in text.splitlines() if line.startswith("| AdamW (weight decay 0.01, β₂ 0.999): live")
    ]
    assert "3.130 ± 0.017" in with_error[0]


def test_an_average_beside_that_is_what_is_returned_has_no_line_of_its_own():
    trials = [studies.trial("gpt", GPU.pretraining, studies.PAPER, lr) for lr in (2e-3, 3e-3)]
    for other, lines in ((3.0, 1), (2.999, 2)):
        losses = {"average": (3.0, 3.0), "power_0_7": (3.0004, other)}
        results = made_up(trials, lambda one, view, at=losses: at.get(view, (3.1, 3.1))[one.lr == 3e-3])
        rows = tables.rows_of(trials, results)
        assert [row.view for row in rows] == ["average", "power_0_7"]
        assert tables.told_apart(rows) == rows[:lines]


def test_a_shorter_average_is_compared_with_adamws_ema_at_the_same_rate_and_seed():
    def loss(one, view):
        return (
            3 + 10 * one.lr + 0.01 * one.seed + {ADAMW: 0.0}.get(one.method, -0.02) + 0.1 * (view == "live")
        )

    text = tables.TABLES["shorter"](GPU, made_up(studies.shorter(GPU), loss))
    (line,) = [
        line for line in text.splitlines() if line.startswith("| PACE (c 0.01, κ 0.3): its average | -")
    ]
    assert line.count("-0.020 ± 0.000") == 4
    assert text.splitlines()[-1].count("-0.020 ± 0.000") == 4 and "strength 30" in text.splitlines()[-1]


def test_a_run_that_diverged_is_said_and_chosen_by_nobody():
    def loss(one, view):
        return math.inf if one.lr == 4e-3 else 3.0

    results = made_up(studies.tuning(CPU), loss)
    assert "diverged" in tables.TABLES["tuning"](CPU, results)
    assert studies.chosen(studies.tuning(CPU), studies.SETTINGS, results)


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_has_a_table_with_and_without_its_results(name):
    results = made_up([*studies.tuning(CPU), *studies.fine_tuning(CPU)])
    assert "|" in tables.TABLES[name](CPU, results)
    results |= made_up(together(STUDIES[name](CPU, results)).values())
    full = tables.TABLES[name](CPU, results)
    assert "3.000" in full and "nan" not in full
