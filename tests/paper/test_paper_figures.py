"""Every figure of the paper from made-up records: what is in its panels, and that it is drawn."""

import math
import random
from dataclasses import replace

import pytest

from paceline.paper.labels import FIGURES, runs_of
from paceline.paper.panels import differences, sheet, table_of
from paceline.paper.runs import readings
from paceline.paper.scales import CPU, GPU, PAPER
from paceline.runs.config import as_mapping
from paceline.studies import plots
from paceline.studies.lines import Finished

RIVER = "fig:appendix_pretrain_river"
SWEPT = "fig:appendix_pretrain_csweep"


def finished(one, noise):
    """A run with losses that fall from step to step, and end where its settings and chance want it."""
    ends = {
        weights: 3 + 0.1 * tags["lr"] ** 0.5 - 0.1 * (tags["method"] == "PACE") + noise.random() / 100
        for weights, tags in readings(one)
    }
    run, first = one.run, one.run.after[1] if one.run.after else 0
    steps = sorted(
        {*range(run.evaluate_every, run.steps, run.evaluate_every), run.steps} - set(range(first + 1))
    )
    at = lambda step: {weights: end + math.exp(-5 * step / run.steps) for weights, end in ends.items()}  # noqa: E731
    return Finished(
        name=one.name, config=as_mapping(run), methods={}, method="", returned=next(iter(ends)),
        outcome="finished", ended=run.steps, steps=run.steps, seconds=3600.0,
        evaluations=tuple((step, at(step)) for step in steps), train=tuple((step, 3.0) for step in steps),
        pull=tuple((step, {"saturated": one.tags["c"] or 0.0}) for step in steps),
    )  # fmt: skip


@pytest.fixture(scope="module")
def records():
    noise = random.Random(0)
    return {one.name: finished(one, noise) for one in runs_of(FIGURES, PAPER)}


def points(made):
    return [[y for line in plot.lines for y in line.y] for row in made.rows for plot in row]


@pytest.mark.parametrize("label", FIGURES)
def test_every_panel_has_lines_and_no_run_is_missing(label, records):
    made, odd = sheet(FIGURES[label], PAPER, records)
    assert all(panel and None not in panel for panel in points(made)) and not odd
    assert not any("missing" in note for note in made.notes)
    assert not any(plot.note for row in made.rows for plot in row)


@pytest.mark.parametrize("label", FIGURES)
def test_without_records_every_panel_says_what_is_missing_and_what_ran_instead(label):
    made, _ = sheet(FIGURES[label], GPU, {})
    count = len({one.name for one in FIGURES[label].runs(GPU)})
    assert made.notes[-1] == f"{count} of {count} runs are missing"
    notes = [note for note in made.notes[:-1] if note != FIGURES[label].note]
    assert all(note.endswith("missing here") for note in notes)
    assert "scale gpu, not the paper's" in made.subtitle
    for row in made.rows:
        for plot in row:
            assert "missing: " in plot.note and "EMA" not in plot.note
            other = "here gpt-7m" if "pretrain" in label else "here smollm2-135m"
            # The paper's own SmolLM2-135M stands for itself.
            assert (other in plot.note) != (
                "135m_" in label or "wsd_" in label or "SmolLM2-135M" in plot.title
            )
    assert not any(y is not None for panel in points(made) for y in panel)


@pytest.mark.slow
@pytest.mark.parametrize("label", ["fig:bema_sf", "fig:appendix_clip_frac_vs_c", SWEPT])
def test_every_kind_of_panel_is_drawn(label, records, tmp_path):
    made, _ = sheet(FIGURES[label], PAPER, records)
    pdf, png = sorted(plots.draw(made, tmp_path / "figure"))
    assert pdf.read_bytes().startswith(b"%PDF") and png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("label", ["fig:train_curves", "fig:appendix_wsd_val_curves"])
def test_next_to_the_best_decay_stands_adamw_at_a_constant_rate(label, records):
    for plot in (plot for row in sheet(FIGURES[label], PAPER, records)[0].rows for plot in row):
        constant, adamw, ema, pulled = (line.label.partition(":")[0] for line in plot.lines)
        assert constant.startswith("AdamW") and "cosine" not in constant and "wsd" not in constant
        assert adamw.startswith("AdamW") and adamw.endswith(("cosine", "wsd"))
        assert ema.startswith("EMA") and ema.endswith(("cosine", "wsd")) and pulled.startswith("PACE")


def test_curves_over_three_seeds_are_their_mean_and_its_standard_error(records):
    made, _ = sheet(FIGURES["fig:appendix_multiseed_robust"], PAPER, records)
    line = next(line for line in made.rows[0][0].lines if line.label.startswith("PACE"))
    names = [f"smollm2-1.7b_pace_c0.1_k0.2_u1_lr0.001_constant_1778_s{seed}" for seed in (42, 1337, 2024)]
    ends = [records[name].loss for name in names]
    mean = sum(ends) / 3
    assert line.y[-1] == pytest.approx(mean) and f"{mean:.4f}" in line.label
    assert line.error[-1] == pytest.approx(math.sqrt(sum((x - mean) ** 2 for x in ends) / 6))


def test_values_of_a_sweep_are_means_over_seeds_at_the_best_power(records):
    (((plot,),),) = (sheet(FIGURES[SWEPT], PAPER, records)[0].rows,)
    line = next(line for line in plot.lines if line.label == "wsd")
    place = plot.ticks.index("3e-3")
    own = [
        [records[f"gpt2_pace_c0.003_k{k}_u1_lr0.002_wsd_4750_s{seed}"].loss for seed in (0, 1, 42)]
        for k in (0.1, 0.2, 0.3, 0.5)
    ]
    best = min(own, key=sum)
    mean = sum(best) / 3
    error = math.sqrt(sum((x - mean) ** 2 for x in best) / 2 / 3)
    assert line.y[place] == pytest.approx(mean) and line.error[place] == pytest.approx(error)


def test_a_record_of_another_run_under_the_name_is_left_out(records):
    name = "gpt2_adamw_lr0.002_constant_4750_s42"
    other = replace(records[name], config={**records[name].config, "batch_size": 99})
    made, odd = sheet(FIGURES[RIVER], PAPER, {**records, name: other})
    assert odd == [f"{name}: batch_size: 99, not 512"]
    assert made.notes[-2:] == (
        "1 of 9 runs are missing", "left out, of other settings than here: 1 runs",
    )  # fmt: skip
    elsewhere = {"data": ["my.txt"], "model": "gpt", "micro_batch_size": 1, "device": "cpu", "fork": None}
    run = next(one.run for one in runs_of([RIVER], PAPER) if one.name == name)
    assert not differences(run, {**records[name].config, **elsewhere})


def test_branches_of_a_run_that_diverged_before_have_diverged_too(records):
    whole = "gpt2_adamw_lr0.002_constant_4750_s42"
    branches = {f"gpt2_adamw_lr0.002_wsd_{n}_s42" for n in (2375, 3563, 4750)}
    early = replace(records[whole], outcome="diverged", ended=2000)
    kept = {name: run for name, run in records.items() if name not in branches}
    table, _ = table_of(FIGURES[RIVER].runs(PAPER), PAPER, {**kept, whole: early})
    ended = {row["steps"]: row.outcome for row in table.where(method="AdamW", schedule="wsd")}
    assert ended == {2375: "unfinished", 3563: "diverged", 4750: "diverged"}


def test_a_method_that_diverged_at_all_settings_is_said_to(records):
    runs = [one for one in FIGURES[SWEPT].runs(PAPER) if one.tags["method"] == "AdamW"]
    broken = {one.name: replace(records[one.name], outcome="diverged") for one in runs}
    (((plot,),),) = (sheet(FIGURES[SWEPT], PAPER, records | broken)[0].rows,)
    assert all(line.y[0] == line.y[1] == math.inf for line in plot.lines)
    made, _ = sheet(FIGURES["fig:train_curves"], CPU, {})
    assert made.rows[0][0].lines == []
