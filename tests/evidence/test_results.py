"""docs/results.md: what it is made of, verdicts by hand, and figures with and without all runs."""

import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_studies import made_up

from paceline.experiments.evidence import claims, figures, studies, tables
from paceline.experiments.evidence.claims import AVERAGE, EMA, WSD, Claim
from paceline.experiments.evidence.studies import CPU, DEFAULT, GPU, PACE, STUDIES, together
from paceline.experiments.evidence.tables import rows_of
from paceline.experiments.paper import lines, plots
from paceline.experiments.paper.plots import Line, Plot, of_method

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "records").glob("*evidence*.jsonl"))


def test_every_figure_of_the_page_has_runs(tmp_path):
    results = lines.read(RECORDS)
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    for name, sheet in figures.SHEETS.items():
        try:
            there = has_runs(sheet(GPU, results))
        except studies.ConfigError:
            there = False
        assert there == (f"(results-{name}.png)" in page) == (ROOT / f"docs/results-{name}.png").is_file()


def has_runs(sheet):
    return any(y is not None for row in sheet.rows for plot in row for line in plot.lines for y in line.y)


# --- Verdicts -------------------------------------------------------------------------------------------


def everything(room, loss=lambda one, view: 3.0):
    results = made_up([*studies.tuning(room), *studies.fine_tuning(room)], loss)
    for study in STUDIES.values():
        results |= made_up(together(study(room, results)).values(), loss)
    return results


def rows(pace, wsd=0.0):
    """Of pretraining, with PACE's losses by seed beside 3.0 of all others."""

    def loss(one, view):
        own = pace.get(one.seed, 0.0) if one.method == PACE and view == "average" else 0.0
        return 3.0 + own + (wsd if one.schedule == "wsd" else 0.0) + abs(one.lr - 3e-3)  # best there

    results = everything(GPU, loss)
    return rows_of(first_seeds(results), results)


def first_seeds(results):
    """Pretraining, without seeds that were added."""
    return [one for one in studies.basin(GPU, results) if one.seed not in studies.MORE_SEEDS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pace", "strictly", "said"),
    [
        ({1: -0.02, 2: -0.022, 3: -0.018}, True, "confirmed"),
        ({1: -0.02, 2: -0.022, 3: -0.018}, False, "confirmed: it is lower"),
        ({1: -0.002, 2: -0.002, 3: -0.002}, True, "not confirmed: a tie"),
        ({1: -0.02, 2: 0.02, 3: -0.02}, True, "not settled: 95 % interval ± 0.057"),
        ({1: 0.02, 2: -0.02, 3: 0.02}, False, "not settled: 95 % interval ± 0.057"),
        ({1: -0.02, 2: -0.06, 3: -0.03}, True, "not settled: 95 % interval ± 0.052"),  # 3 errors
        ({1: 0.02, 2: -0.02, 3: 0.003}, True, "not settled: 95 % interval ± 0.050"),  # on the mean a tie
        ({1: 0.02, 2: 0.022, 3: 0.018}, True, "not confirmed: it is higher"),
        ({1: 0.02, 2: 0.022, 3: 0.018}, False, "not confirmed: it is higher"),
        ({1: 0.002, 2: 0.002, 3: 0.002}, False, "confirmed: a tie"),
    ],
)
def test_a_difference_counts_outside_of_its_interval_and_of_a_tie(pace, strictly, said):
    claim = Claim(ours=AVERAGE, theirs=EMA, times=2, strictly=strictly)
    found = claim.difference(rows(pace))
    assert found.loss == pytest.approx(sum(pace.values()) / 3) and found.count == 3
    assert claim.verdict(found) == said


def test_rates_are_those_of_the_statement():
    claim = Claim(ours=AVERAGE, theirs=WSD)
    assert claim.difference(rows({}, wsd=-0.05)).loss == pytest.approx(0.05)
    ten = Claim(ours=AVERAGE, theirs=EMA, times=10).difference(rows({1: 0.5}))
    assert ten.loss == pytest.approx(0.5 / 3) and ten.count == 3
    assert claim.verdict(None) == "runs are missing"
    assert Claim(ours=AVERAGE, theirs=EMA, times=7).difference(rows({})) is None


def test_one_seed_settles_nothing():
    results = {name: one for name, one in everything(GPU).items() if name.endswith("s1")}
    found = rows_of(studies.basin(GPU, results), results)
    claim = Claim(ours=AVERAGE, theirs=EMA)
    assert claim.verdict(claim.difference(found)) == "one seed: not settled"


def test_a_best_rate_is_not_known_before_all_are_run():
    results = everything(GPU, lambda one, view: 3.0 + abs(one.lr - 3e-3))
    trials = first_seeds(results)
    (away,) = [
        one.name
        for one in trials
        if (one.method, one.schedule, one.lr, one.seed) == (PACE, "constant", 3e-3, studies.SEED)
    ]
    del results[away]
    found = rows_of(trials, results)
    own = Claim(ours=AVERAGE, theirs=EMA)
    assert own.difference(found) is None and own.verdict(None) == "runs are missing"
    assert Claim(ours=AVERAGE, theirs=EMA, times=2).difference(found).count == 3
    regret = {line.split(" | ")[0]: line.split(" | ") for line in tables.regret(found).splitlines()}
    (pulled,) = [cells for title, cells in regret.items() if title.startswith("| PACE (")]
    assert pulled[1:4] == ["", "", ""] and pulled[4].startswith("+0.003")
    # No average beside it is known to be the best, and other seeds alone make no mean.
    assert [row.view for row in found if row.kind[:2] == (PACE, "constant")] == ["average"]
    assert all(lr != 3e-3 for row in found if row.kind[:2] == (PACE, "constant") for lr in row.rates)


def test_multiples_of_a_rate_that_nobody_ran_have_no_column():
    results = everything(GPU, lambda one, view: 3.0 + abs(one.lr - 3e-4))
    head = tables.regret(rows_of(studies.fine_tuning_basin(GPU, results), results)).splitlines()[0]
    assert head == "|  | its best rate | there | 1 × 0.0003 | 3 × 0.0003 | 10 × 0.0003 |"


def test_two_seeds_settle_what_is_far_from_zero_but_no_tie():
    def losses(pace):
        found = rows({1: pace, 2: pace})
        return [
            replace(row, losses={at: y for at, y in row.losses.items() if at[1] != studies.SEEDS[-1]})
            for row in found
        ]

    claim = Claim(ours=AVERAGE, theirs=EMA, times=2)
    assert claim.verdict(claim.difference(losses(-0.02))) == "confirmed"
    assert claim.verdict(claim.difference(losses(-0.001))) == "not settled: 95 % interval ± 0.003"


def test_verdicts_say_what_is_not_done():
    text = claims.verdicts(GPU, {})
    assert text.count("not done yet") == 2
    full = claims.verdicts(GPU, everything(GPU))
    assert "not done yet" not in full and all(f"{task}:" in full for task in claims.TASKS)
    assert "| tuning | 36 of 36 |" in claims.done(GPU, everything(GPU))


def test_verdicts_are_of_what_a_task_has_runs_for():
    full = claims.verdicts(GPU, everything(GPU, lambda one, view: 3.0 + abs(one.lr - 3e-3)))
    parts = dict(zip(claims.TASKS, re.split(r"^.+:$", full, flags=re.MULTILINE)[1:], strict=True))
    said = {task: part.strip().splitlines()[2:] for task, part in parts.items()}
    assert len(said["Pretraining a 7M GPT"]) == len(claims.CLAIMS)
    assert len(said["GPT-2 124M"]) == 6
    assert all("| at 0.002 |" in line and "Schedule-Free" not in line for line in said["GPT-2 124M"])


# --- Figures --------------------------------------------------------------------------------------------


def test_lines_of_figures_are_the_losses():
    def loss(one, view):
        return {PACE: 2.0, DEFAULT: 2.5}.get(one.method, 3.0) + one.lr

    results = everything(GPU, loss)
    basin = figures.basin(GPU, results)
    (line,) = [line for line in basin.rows[0][0].lines if line.label == "PACE: its average"]
    assert list(line.y) == pytest.approx([2.0 + lr for lr in studies.RATES])
    strength = figures.strength(GPU, results)
    (line,) = [line for line in strength.rows[0][1].lines if line.label == "κ = 0.5"]
    assert list(line.y) == pytest.approx([2.006] * len(studies.STRENGTHS))
    (share,) = [line for line in strength.rows[1][0].lines if line.label == "κ = 0.3"]
    assert list(share.y) == [0.25] * 3
    budgets = figures.budgets(GPU, results)
    assert [plot.lines[1].end for plot in budgets.rows[0]] == ["3.002", "2.002", "2.502"]
    batch = figures.batch(GPU, results)
    assert [len(plot.lines) for plot in batch.rows[0]] == [
        len({t.setting for t in studies.batch(GPU)}) + 1
    ] * 2


def test_gpt2_has_a_panel_for_each_seed_with_the_best_average_of_adamw():
    def loss(one, view):
        return 3.0 + one.seed - 0.5 * (view == f"power_0_{4 + one.seed}")  # κ = 0.5 of one, 0.6 of the other

    plots = figures.gpt2(GPU, everything(GPU, loss)).rows[0]
    assert [plot.title for plot in plots] == ["seed 1", "seed 2"]
    assert [plots[0].lines[i].label for i in (0, 1)] == [
        "AdamW: live; at the end 4.000",
        "AdamW: EMA κ = 0.5; at the end 3.500",
    ]
    assert plots[1].lines[1].label == "AdamW: EMA κ = 0.6; at the end 4.500"
    assert [len(plot.lines) for plot in plots] == [4, 8]  # the second has decayed branches


def test_a_run_that_is_missing_leaves_its_place_empty():
    results = everything(GPU, lambda one, view: 3.0 + one.lr)
    missing = [one.name for one in studies.batch(GPU) if one.method == DEFAULT and one.lr == 1e-3]
    results = {name: result for name, result in results.items() if name not in missing}
    for plot in figures.batch(GPU, results).rows[0]:
        (line,) = [line for line in plot.lines if line.label == "PACE, default: what it returns"]
        assert line.y[0] is None and list(line.y[1:]) == pytest.approx([3.002, 3.004, 3.008])
        assert len(line.x) == len(plot.ticks) == len(studies.BATCH_RATES)


def test_a_diverged_run_is_drawn_as_one():
    results = everything(GPU, lambda one, view: math.inf if one.lr == 3e-2 else 3.0)
    (line,) = [line for line in figures.basin(GPU, results).rows[0][0].lines if line.label == "AdamW: live"]
    assert line.y[-1] == math.inf and line.y[0] == 3.0


def test_nothing_of_it_imports_torch():
    code = (
        "import sys; from paceline.experiments.evidence import claims, figures, studies; "
        "claims.verdicts(studies.CPU, {}); figures.budgets(studies.CPU, {}); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_figures_of_no_runs_are_not_drawn(tmp_path):
    assert figures.all_figures(CPU, {}, tmp_path) == []


@pytest.mark.parametrize(("spread", "higher"), [(0.0, False), (0.2, True), (5.0, True)])
def test_bars_fit_an_axis_unless_they_would_press_all_flat(spread, higher):
    """How much higher the axis is than without bars: as much as they need, up to a tenth."""
    Figure = pytest.importorskip("matplotlib.figure").Figure

    def height(size):
        line = Line(label="a", look=of_method("AdamW"), x=(0, 1), y=(1.0, 2.0), spread=(0.0, size))
        axes = Figure().subplots()
        plot = Plot(title="", lines=(line,), x_label="", y_label="", ticks=("a", "b"))
        plots._set_range(axes, plot, (line,))
        return axes.get_ylim()

    (low, high), (_, found) = height(0.0), height(spread)
    needed = max(2.0 + spread - high, 0.0)
    assert found == pytest.approx(high + min(needed, 0.1 * (high - low)))
    assert (found > high) == higher
