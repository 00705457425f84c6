"""What a verdict claims: who, in which direction, and whether it is settled. The words are free."""

import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from paceline.studies.lines import Finished
from paceline.studies.noise import pooled
from paceline.studies.table import Mean, Table
from paceline.studies.verdict import judge, of_table

sys.path.append(str(Path(__file__).parents[2] / "records" / "studies"))
import verdict as simulation

OWN = ("PACE",)


def spread(mean, seeds=(1, 2, 3), sd=0.001, key=0):
    """Losses around a mean, by seed, with exactly this mean and deviation."""
    chance = random.Random(f"{key} {mean} {sd}")
    raw = [chance.gauss(0, 1) for _ in seeds]
    middle = sum(raw) / len(raw)
    size = math.sqrt(sum((x - middle) ** 2 for x in raw) / max(len(raw) - 1, 1)) or 1.0
    return {seed: mean + sd * (x - middle) / size for seed, x in zip(seeds, raw, strict=True)}


def at_one_rate(**means):
    return {name: {1e-3: spread(mean, key=name)} for name, mean in means.items()}


def said(losses, **more):
    return {(one.lr, one.rival): one for one in judge(losses, own=OWN, **more).comparisons}


# --- Claims ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pace", "outcome"), [(3.0, "lower"), (3.2, "higher"), (3.1, "tie")])
def test_a_difference_beyond_all_noise_is_claimed_and_none_is_a_tie(pace, outcome):
    (found,) = judge(at_one_rate(PACE=pace, AdamW=3.1), own=OWN).comparisons
    assert (found.method, found.rival, found.outcome) == ("PACE", "AdamW", outcome)
    assert found.difference.n == 3 and found.difference.value == pytest.approx(pace - 3.1)


def test_below_three_thousandths_nothing_is_claimed_however_sure():
    sure = {name: {1e-3: spread(m, sd=1e-6, key=name)} for name, m in {"PACE": 3.098, "AdamW": 3.1}.items()}
    (found,) = judge(sure, own=OWN).comparisons
    assert found.half_width < 0.002 and found.outcome == "tie"


def test_a_tie_needs_the_whole_90_percent_interval():
    """From -.0066 to +.0024 is no tie: it is not settled, and what could be detected is said."""
    seeds = range(1, 4)
    noise = spread(0.0, seeds, sd=0.002, key="a")
    losses = {
        "PACE": {1e-3: {s: 3.0979 + noise[s] for s in seeds}},
        "AdamW": {1e-3: dict.fromkeys(seeds, 3.1)},
    }
    (found,) = judge(losses, own=OWN).comparisons
    assert found.outcome == "not settled" and not found.is_settled
    assert found.detectable == pytest.approx(found.difference.interval())


def test_one_seed_has_no_direction():
    losses = {"PACE": {1e-3: {5: 2.0}}, "AdamW": {1e-3: {5: 3.0}}}
    verdict = judge(losses, own=OWN)
    assert verdict.comparisons[0].outcome == "one seed" and verdict.comparisons[0].half_width is None
    assert "below" not in verdict.sentence and "above" not in verdict.sentence


def test_two_seeds_that_agree_by_chance_are_no_proof():
    losses = {"PACE": {1e-3: {1: 3.09, 2: 3.094}}, "AdamW": {1e-3: {1: 3.1, 2: 3.1}}}
    assert judge(losses, own=OWN).comparisons[0].outcome == "not settled"


def test_what_a_seed_does_to_all_methods_is_no_noise():
    shift = {1: 0.0, 2: 0.5, 3: -0.3}
    own, other = spread(3.0, key="own"), spread(3.02, key="other")
    losses = {"PACE": {1e-3: {s: own[s] + shift[s] for s in shift}}}
    losses["AdamW"] = {1e-3: {s: other[s] + shift[s] for s in shift}}
    assert judge(losses, own=OWN).comparisons[0].outcome == "lower"


def test_more_rivals_widen_the_interval_and_their_noise_narrows_it():
    """Student's t of the pooled noise, at a level divided by the count of comparisons."""
    losses = {"PACE": {1e-3: {1: 0.1, 2: 0.2}}, "a": {1e-3: {1: 0.3, 2: 0.1}}, "b": {1e-3: {1: 0.2, 2: 0.6}}}
    verdict = judge(losses, own=OWN)
    values = np.array([[0.1, 0.2], [0.3, 0.1], [0.2, 0.6]])
    rest = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    t = 6.2053  # 98.75 % point, two degrees of freedom
    assert verdict.family == 2
    assert verdict.comparisons[0].half_width == pytest.approx(t * math.sqrt((rest**2).sum() / 2), rel=1e-4)


def test_averages_of_one_run_do_not_count_as_noise_of_their_own():
    losses = {"PACE": {1e-3: spread(3.0, sd=0.01, key="p")}}
    losses |= {f"average {i}": {1e-3: spread(3.1, sd=0.01, key=0)} for i in range(6)}
    trained = {f"average {i}": "AdamW" for i in range(6)}
    apart, together = said(losses), said(losses, trained=trained)
    place = (1e-3, "average 0")
    assert together[place].half_width > apart[place].half_width


# --- Choosing -------------------------------------------------------------------------------------------


def test_the_seed_that_chose_is_not_compared():
    """On seed 1 PACE is lucky at one rate; the others show the truth."""
    seeds = range(1, 6)
    flat = {lr: dict.fromkeys(seeds, 3.1) for lr in (1e-3, 2e-3)}
    lucky = {1e-3: {1: 1.0} | dict.fromkeys(range(2, 6), 3.1), 2e-3: dict.fromkeys(seeds, 3.1)}
    verdict = judge({"PACE": lucky, "AdamW": flat}, own=OWN)
    assert verdict.chosen_on == (1,) and verdict.comparisons[0].lr == 1e-3
    assert verdict.comparisons[0].difference == Mean(0.0, 0.0, 4) and verdict.comparisons[0].outcome == "tie"


def test_with_too_few_seeds_for_both_the_page_says_so():
    losses = {
        name: {lr: spread(3.0, key=f"{name} {lr}") for lr in (1e-3, 2e-3)} for name in ("PACE", "AdamW")
    }
    verdict = judge(losses, own=OWN)
    assert verdict.chosen_on == () and verdict.has_choice
    assert f"{verdict.comparisons[0].detectable:.3f}" in verdict.remarks[-1]


def test_where_the_compared_seeds_choose_one_of_our_methods_each_of_them_counts():
    two = judge(at_one_rate(PACE=3.0, push=3.01, AdamW=3.1, WSD=3.2), own=("PACE", "push"))
    assert two.family == 2 * len(two.comparisons) == 4
    assert {one.method for one in two.comparisons} == {"PACE"}


def test_without_a_choice_every_seed_is_compared():
    losses = {name: {1e-3: spread(3.0, range(9), key=name)} for name in ("PACE", "AdamW")}
    verdict = judge(losses, own=OWN)
    assert verdict.comparisons[0].difference.n == 9 and not verdict.has_choice


def test_with_uneven_seeds_only_shared_ones_choose_and_count():
    """PACE is below on each shared seed; a rival's lucky seed of its own changes nothing."""
    losses = {
        "PACE": {1e-3: {1: 3.0, 2: 3.001, 3: 3.002}},
        "AdamW": {1e-3: {1: 3.1, 2: 3.101, 3: 3.102, 4: 1.0}},
    }
    losses["WSD"] = {1e-3: {1: 3.05, 2: 3.051, 3: 3.052}}
    found = judge(losses, own=OWN).comparisons
    assert [(one.rival, one.outcome) for one in found] == [("WSD", "lower"), ("AdamW", "lower")]
    assert found[1].difference.n == 3


def test_without_a_shared_seed_there_is_no_pair():
    losses = {"PACE": {1e-3: {1: 3.0, 2: 3.0}}, "AdamW": {1e-3: {3: 3.1, 4: 3.1}}}
    assert judge(losses, own=OWN).comparisons[0].outcome == "no pair"


def test_a_rate_with_fewer_seeds_is_not_the_best():
    losses = {"PACE": {1e-3: spread(3.0), 2e-3: {1: 2.0}}, "AdamW": {1e-3: spread(3.1), 2e-3: spread(3.2)}}
    assert judge(losses, own=OWN).comparisons[0].lr == 1e-3


def test_off_the_best_rate_the_rival_is_the_best_one_there():
    losses = {
        "PACE": {1e-3: spread(3.1, key="p"), 4e-3: spread(3.2, key="p")},
        "AdamW": {1e-3: spread(3.0, key="a"), 4e-3: spread(5.0, key="a")},
        "WSD": {1e-3: spread(3.05, key="w"), 4e-3: spread(3.1, key="w")},
    }
    found = said(losses)
    assert {place: one.outcome for place, one in found.items()} == {
        (1e-3, "AdamW"): "higher", (1e-3, "WSD"): "higher", (4e-3, "WSD"): "higher"
    }  # fmt: skip
    assert judge(losses, own=OWN).comparisons[0].rival == "AdamW"


def test_without_own_methods_the_best_one_is_compared_with_the_rest():
    verdict = judge(at_one_rate(a=3.1, b=3.0, c=3.2))
    assert {(c.method, c.rival, c.outcome) for c in verdict.comparisons} == {
        ("b", "a", "lower"), ("b", "c", "lower")
    }  # fmt: skip


def test_unequal_trials_and_rates_at_an_end_are_said():
    losses = {"PACE": {lr: spread(3.0, key=lr) for lr in (1e-3, 2e-3, 4e-3)}, "AdamW": {1e-3: spread(3.1)}}
    losses["PACE"][4e-3] = spread(2.9)
    texts = " ".join(judge(losses, own=OWN).warnings)
    assert "PACE 3" in texts and "AdamW 1" in texts and "PACE is best at an end" in texts


# --- Divergence -----------------------------------------------------------------------------------------


def test_a_rival_that_diverged_in_one_of_three_seeds_at_each_rate_is_compared():
    lost = {lr: spread(3.1, key=lr) | {seed: None} for seed, lr in ((1, 1e-3), (2, 2e-3))}
    losses = {"PACE": {lr: spread(3.0, key=f"p{lr}") for lr in lost}, "AdamW": lost}
    found = judge(losses, own=OWN).comparisons[0]
    assert found.outcome == "lower" and found.difference.n == 2
    assert found.diverged == (0, 1) and found.seeds == (3, 3)


def test_a_rate_without_divergence_is_better_than_a_lower_loss_with_some():
    losses = {"PACE": {1e-3: spread(3.0) | {1: None}, 2e-3: spread(3.05)}}
    losses["AdamW"] = {lr: spread(3.1) for lr in losses["PACE"]}
    assert judge(losses, own=OWN).comparisons[0].lr == 2e-3


def test_a_rate_at_which_all_rivals_diverged_is_counted_not_claimed():
    losses = {"PACE": {1e-3: spread(3.0), 4e-3: spread(3.1)}}
    losses["AdamW"] = {1e-3: spread(3.1, key="a"), 4e-3: dict.fromkeys((1, 2, 3))}
    found = said(losses)[4e-3, "AdamW"]
    assert found.outcome == "no pair" and found.diverged == (0, 3)


def test_what_diverged_on_the_seed_that_chose_is_still_compared():
    losses = {"PACE": {lr: spread(3.0, range(1, 6), key=f"p{lr}") for lr in (1e-3, 2e-3)}}
    losses["AdamW"] = {lr: spread(3.1, range(1, 6), key=f"a{lr}") | {1: None} for lr in (1e-3, 2e-3)}
    found = judge(losses, own=OWN).comparisons[0]
    assert found.outcome == "lower" and found.difference.n == 4


@pytest.mark.parametrize("name", ["PACE", "AdamW"])
def test_who_diverged_in_every_run_is_named(name):
    verdict = judge(at_one_rate(PACE=3.0, AdamW=3.1) | {name: {1e-3: dict.fromkeys((1, 2, 3))}}, own=OWN)
    assert not verdict.comparisons and f"{name} diverged in every run" in verdict.refused


# --- Of a table of runs ---------------------------------------------------------------------------------


def run(method, seed, loss, *, own=False, gpu="H200", data="d", **config):
    return Finished(
        name=f"{method} {seed}",
        config={"lr": 1e-3, "seed": seed, "length": 128, "tokenizer": "auto", **config},
        methods={method: "live"},
        method=method,
        returned="live",
        control={"strength": 1.0} if own else None,
        environment={"gpu": gpu},
        data={"fingerprint": data},
        outcome="finished",
        ended=9,
        evaluations=((9, {"live": loss}),),
    )


def table(**more):
    """Return a win of PACE over three seeds; `more` is what AdamW's last run has of its own."""
    pace = [run("PACE", s, 3.0 + s / 1e4, own=True) for s in (1, 2, 3)]
    return Table.of([*pace, *(run("AdamW", s, 3.1, **(more if s == 3 else {})) for s in (1, 2, 3))])


def test_the_table_of_runs_gives_the_same_verdict():
    (found,) = of_table(table()).comparisons
    assert (found.method, found.outcome, found.difference.n) == ("PACE", "lower", 3)


@pytest.mark.parametrize("more", [{"data": "other"}, {"length": 256}, {"tokenizer": "gpt2"}])
def test_other_data_lengths_and_tokenizers_are_refused(more):
    verdict = of_table(table(**more))
    assert not verdict.comparisons and "the runs differ" in verdict.refused


def test_other_hardware_is_named():
    verdict = of_table(table(gpu="A100"))
    assert verdict.comparisons[0].outcome == "lower"
    assert any("gpu" in text and "A100" in text for text in verdict.warnings)


def test_a_longer_run_is_refused():
    rows = table().rows
    longer = Table(
        (*rows[:-1], Finished(**{f: getattr(rows[-1], f) for f in rows[-1].__slots__} | {"ended": 18}))
    )
    assert "steps" in of_table(longer).refused


def test_noise_with_missing_runs_is_that_of_least_squares():
    chance = np.random.default_rng(0)
    values = chance.normal(size=(4, 5))
    known = chance.random((4, 5)) < 0.8
    columns = [{s: values[m, s] if known[m, s] else None for s in range(5)} for m in range(4)]
    places = np.argwhere(known)
    design = np.hstack([np.eye(4)[places[:, 0]], np.eye(5)[places[:, 1]]])
    solved, *_ = np.linalg.lstsq(design, values[known], rcond=None)
    rest = values[known] - design @ solved
    freedom = len(places) - np.linalg.matrix_rank(design)
    assert pooled(columns) == (pytest.approx(rest @ rest / freedom), freedom)


# --- Simulated ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("basin", ["one rate", "four rates, flat", "four rates, steep"])
def test_at_most_one_page_in_twenty_claims_what_is_not_there(seeds, basin):
    """Smaller noise claims less, by the smallest difference; the standard error of 5 % is 0.5 % here."""
    for is_shared in {"one rate": (True, False), "four rates, flat": (False,)}.get(basin, (True,)):
        pages = simulation.pages(2000, seeds, basin, 0.02, is_shared=is_shared)
        claims = [any(simulation.today(page).values()) for page in pages]
        assert np.mean(claims) <= 0.055
