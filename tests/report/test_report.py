"""What a report says of runs: on constructed records, where the right answer is known."""

import csv
import json
import math
import re
import subprocess
import sys
from itertools import combinations

import pytest
from report.constructed import write_comparison, write_run

from paceline.cli import main
from paceline.studies.compare.comparison import report_of
from paceline.studies.report import files, panels
from paceline.studies.report.results import Outcomes, find_runs, read_run
from paceline.studies.report.verdict import difference

EMA = "AdamW · long EMA"


def verdict_of(folder, table, **more):
    return report_of(write_comparison(folder, table, **more), {})


# --- The verdict --------------------------------------------------------------------------------------


def test_a_clear_win(tmp_path):
    report = verdict_of(tmp_path, {1e-3: (3.2, 3.18), 2e-3: (3.1, 3.079), 4e-3: (3.5, 3.2)})
    assert report.verdict == (
        "PACE is 0.021 ± 0.002 below AdamW · long EMA, the best of the others, each at its best learning "
        "rate (lr 0.002); at lr 0.004, 2× the best of AdamW · long EMA, 0.300 ± 0.002 below it; at lr 0.001, "
        "1/2 the best of AdamW · long EMA, 0.020 ± 0.002 below it."
    )


def test_a_clear_loss(tmp_path):
    verdict = verdict_of(tmp_path, {1e-3: (3.2, 3.3), 2e-3: (3.1, 3.15)}).verdict
    assert verdict.startswith(f"PACE is 0.050 ± 0.002 above {EMA}, the best of the others")


def test_a_tie_within_noise(tmp_path):
    verdict = verdict_of(tmp_path, {1e-3: (3.2, 3.2), 2e-3: (3.1, 3.099)}, noise=0.01).verdict
    assert verdict.startswith("Within seed noise at the best learning rates (lr 0.002): no difference shown")
    assert "0.001 ± 0.025 below" in verdict and "(within noise)" in verdict


def test_one_seed_cannot_tell(tmp_path):
    report = verdict_of(tmp_path, {1e-3: (3.2, 3.1), 4e-3: (3.3, 2.9)}, seeds=(5,))
    assert report.verdict.startswith("On this one seed PACE ended 0.300 below")
    assert "One seed cannot tell small differences from noise" in report.verdict and "±" not in report.verdict
    assert any("--seeds 3" in remark for remark in report.remarks)


def test_two_seeds_that_agree_by_chance_are_no_proof(tmp_path):
    """Student's t with one degree of freedom: the same means and spread as a clear win of three."""
    table = {1e-3: (3.2, 3.195)}
    assert verdict_of(tmp_path / "two", table, seeds=(1, 2), noise=0.004).verdict.startswith(
        "Within seed noise"
    )
    assert verdict_of(tmp_path / "three", table, seeds=(1, 2, 3), noise=0.001).verdict.startswith(
        "PACE is 0.005"
    )


def test_a_run_that_diverged_is_never_dropped(tmp_path):
    report = verdict_of(tmp_path, {1e-3: (3.2, 3.2), 4e-3: (None, 3.3)})
    assert f"at lr 0.004, 4× the best of {EMA}, {EMA} diverged" in report.verdict
    assert sum("diverged: loss nan at step 33" in warning for warning in report.warnings) == 3
    row = next(row for row in report.results.rows if row[0] == EMA)
    assert row[-1] == "diverged" and row[2] == "0.001"
    rates = next(panel for panel in report.panels if panel.key == "learning-rates")
    assert next(s for s in rates.series if s.method == EMA).y[1] is None


def test_one_seed_of_three_that_diverged_counts(tmp_path):
    paths = write_comparison(tmp_path, {1e-3: (3.2, 3.1), 2e-3: (3.1, 3.2)}, seeds=(1, 2))
    paths += [
        write_run(tmp_path, optimizer="pace", lr=lr, seed=3, losses={"live": 3, "average": 3}, outcome=how)
        for lr, how in ((1e-3, "diverged"), (2e-3, "finished"))
    ]
    report = report_of(paths, {})
    row = next(row for row in report.results.rows if row[0] == "PACE")
    assert row[-2] == "1 of 3 diverged"
    assert Outcomes(tuple(map(read_run, paths))).best_lr("PACE") == 2e-3


def test_where_all_diverge_there_is_no_verdict(tmp_path):
    assert verdict_of(tmp_path, {1e-3: (None, None)}).verdict == (
        "No verdict: no run came to its end without diverging."
    )
    assert "PACE diverged at every learning rate" in verdict_of(tmp_path / "b", {1e-3: (3.0, None)}).verdict
    assert "only PACE came to an end" in verdict_of(tmp_path / "c", {1e-3: (None, 3.0)}).verdict


def test_a_missing_method_is_named(tmp_path):
    paths = write_comparison(tmp_path, {1e-3: (3.2, 3.1)})
    report = report_of(paths, {"schedule_free": "pip install schedulefree"})
    assert "schedule_free was not run: pip install schedulefree" in report.warnings
    assert report.verdict.startswith("PACE is 0.100")


def test_without_pace_the_best_two_are_compared(tmp_path):
    paths = [p for p in write_comparison(tmp_path, {1e-3: (3.2, 3.1)}) if "pace" not in p.name]
    assert (
        report_of(paths, {}).verdict == f"{EMA} is 0.100 ± 0.000 below AdamW, each at its best learning rate."
    )
    assert "one seed cannot tell" in report_of(paths[:1], {}).verdict


def test_runs_that_are_not_alike_get_no_verdict(tmp_path):
    paths = write_comparison(tmp_path, {1e-3: (3.2, 3.1)})
    other = write_run(tmp_path, lr=2e-3, losses={"live": 1.0}, fingerprint="other data", steps=200)
    report = report_of([*paths, other], {})
    assert report.verdict.startswith("No verdict: the runs differ in ")
    assert {"steps", "fingerprint"} <= {
        w.split(" in ")[1].split(":")[0] for w in report.warnings if "differ" in w
    }


def test_other_batches_are_noticed(tmp_path):
    paths = write_comparison(tmp_path, {1e-3: (3.2, 3.1)})
    paths.append(write_run(tmp_path, schedule="wsd", losses={"live": 3.0}, batches="others"))
    assert "With seed 1 the runs have not all seen the same batches." in report_of(paths, {}).warnings


def test_a_comparison_that_is_not_complete_says_so(tmp_path):
    paths = write_comparison(tmp_path, {1e-3: (3.2, 3.1)})
    paths.append(write_run(tmp_path, lr=2e-3, losses={"live": 3.0}, outcome="unfinished"))
    report = report_of([*paths, tmp_path / "not begun"], {})
    assert report.verdict.startswith("So far, with 6 of 8 runs: PACE is 0.100")
    assert any("has not come to its end" in warning for warning in report.warnings)


def test_a_best_rate_at_the_edge_is_remarked(tmp_path):
    report = verdict_of(tmp_path, {1e-3: (3.1, 3.3), 2e-3: (3.2, 3.1), 4e-3: (3.3, 3.2)})
    said = " ".join(report.remarks)
    assert f"{EMA} is best at the lowest rate tried, 0.001" in said and "PACE is best" not in said


def test_differences_are_taken_in_pairs(tmp_path):
    """Seeds move both methods by 0.05, which is not the difference's."""
    outcomes = Outcomes(tuple(map(read_run, write_comparison(tmp_path, {1e-3: (3.2, 3.1)}, noise=0.001))))
    gap = difference(outcomes, ("PACE", 1e-3), (EMA, 1e-3))
    assert gap.mean == pytest.approx(-0.1) and gap.within == pytest.approx(4.30 * 0.001 / math.sqrt(3))


def test_a_run_that_diverged_before_its_first_evaluation_counts_for_all_its_averages(tmp_path):
    paths = write_comparison(tmp_path, {1e-3: (3.2, 3.1)}, seeds=(1, 2))
    common = {"lr": 8e-3, "averages": ("long_ema=power:0.7",)}
    paths.append(write_run(tmp_path, seed=1, losses={"live": 2.6, "long_ema": 2.5}, **common))
    paths.append(write_run(tmp_path, seed=2, losses={}, outcome="diverged", evaluations=0, **common))
    early = {"losses": {}, "outcome": "diverged", "evaluations": 0}
    paths.append(write_run(tmp_path, optimizer="pace", lr=8e-3, seed=1, **early))
    paths.append(write_run(tmp_path, optimizer="pace", lr=8e-3, seed=2, losses={"live": 9.0, "average": 2.8}))
    report = report_of(paths, {})
    rows = {row[0]: row for row in report.results.rows}
    assert rows[EMA][-1] == rows["AdamW"][-1] == rows["PACE"][-1] == "1 of 2 diverged"
    assert rows[EMA][2] == "0.001"
    curves = next(panel for panel in report.panels if panel.key == "curves-0.008")
    returned = next(s for s in curves.series if s.method == "PACE" and s.weights == "returned")
    assert returned.y[-1] == pytest.approx(2.8)


def test_what_has_not_ended_has_not_diverged(tmp_path):
    losses = {"live": 3.0, "long_ema": 3.0}
    paths = [write_run(tmp_path, averages=("long_ema=power:0.7",), losses=losses)]
    paths.append(
        write_run(tmp_path, optimizer="pace", losses={"live": 3, "average": 3}, outcome="unfinished")
    )
    report = report_of(paths, {})
    assert report.verdict.startswith("So far, with 1 of 2 runs: No verdict yet: no run of PACE has ended")
    assert next(row for row in report.results.rows if row[0] == "PACE")[1] == "–"


def test_rates_with_fewer_seeds_are_not_the_best(tmp_path):
    paths = write_comparison(tmp_path, {1e-3: (3.2, 3.1)}, seeds=(1, 2))
    paths.append(write_run(tmp_path, optimizer="pace", lr=2e-3, seed=1, losses={"live": 3, "average": 2.0}))
    assert Outcomes(tuple(map(read_run, paths))).best_lr("PACE") == 1e-3


def test_a_longer_run_is_not_compared_with_a_shorter_one(tmp_path):
    first = write_run(tmp_path / "a", losses={"live": 3.0})
    second = write_run(tmp_path / "b", optimizer="pace", losses={"live": 3.0, "average": 2.5})
    timing = second / "timing.jsonl"  # lengthened later: what it began as stays the first record
    timing.write_text(
        timing.read_text().replace(
            '"kind": "end", "time": 111.0, "step": 100', '"kind": "end", "time": 111.0, "step": 200'
        )
    )
    assert report_of([first, second], {}).verdict == "No verdict: the runs differ in steps (100, 200)."


def test_of_a_run_that_is_there_twice_the_one_that_ended_counts(tmp_path):
    paths = [write_run(tmp_path / "a", losses={"live": 3.0})]
    paths.append(write_run(tmp_path / "b", losses={"live": 2.0}, outcome="unfinished"))
    report = report_of(paths, {})
    assert report.results.rows[0][1] == "3.0000"
    assert any("once more" in warning for warning in report.warnings)


def test_where_one_seed_ended_early_there_is_no_mean(tmp_path):
    """The survivors' would fall where the other one left."""
    paths = write_comparison(tmp_path, {1e-3: (3.2, 3.1)}, seeds=(1, 2))
    early = {"losses": {"live": 9.0, "average": 9.0}, "outcome": "diverged"}
    paths.append(write_run(tmp_path, optimizer="pace", seed=3, **early))
    curves = next(panel for panel in report_of(paths, {}).panels if panel.key == "curves-0.001")
    series = next(s for s in curves.series if s.method == "PACE" and s.weights == "returned")
    assert series.y[2] is not None and series.y[3:] == (None,) * 7


# --- Panels and tables --------------------------------------------------------------------------------


def test_the_cost_of_tuning_is_the_mean_over_all_picks(tmp_path):
    losses = {1e-3: 3.2, 2e-3: 3.1, 4e-3: 3.6}
    report = verdict_of(
        tmp_path, {lr: (loss, None if lr == 4e-3 else loss) for lr, loss in losses.items()}, seeds=(1,)
    )
    tuning = {s.method: s for s in next(p for p in report.panels if p.key == "tuning").series}
    picks = [[min(pick) for pick in combinations(losses.values(), n)] for n in (1, 2, 3)]
    assert tuning[EMA].y == pytest.approx([sum(pick) / len(pick) for pick in picks])
    assert tuning["PACE"].y[0] == pytest.approx((3.2 + 3.1 + 7.0) / 3)  # diverged: where it started


def test_regret_is_against_the_best_of_the_others(tmp_path):
    report = verdict_of(tmp_path, {1e-3: (3.2, 3.1), 4e-3: (3.6, 3.3)}, seeds=(1,))
    regret = {s.method: s for s in next(p for p in report.panels if p.key == "regret").series}
    assert regret["PACE"].x == (1.0, 4.0) and regret["PACE"].y == pytest.approx((-0.1, 0.1))
    assert regret[EMA].y == pytest.approx((0.0, 0.4))


def test_curves_show_live_thin_where_an_average_is_returned(tmp_path):
    report = verdict_of(tmp_path, {1e-3: (3.2, 3.1)})
    curves = next(panel for panel in report.panels if panel.key == "curves-0.001")
    assert {(s.method, s.weights) for s in curves.series} == {
        ("AdamW", "returned"), (EMA, "returned"), ("PACE", "live"), ("PACE", "returned")
    }  # fmt: skip
    pace = next(s for s in curves.series if (s.method, s.weights) == ("PACE", "returned"))
    assert pace.y[-1] == pytest.approx(3.15) and (pace.low[-1], pace.high[-1]) == pytest.approx(
        (3.099, 3.201)
    )
    late = next(panel for panel in report.panels if panel.key == "last-quarter-0.001")
    assert min(late.series[0].x) == 80


def test_what_the_control_did_is_shown_for_pace_alone(tmp_path):
    report = verdict_of(tmp_path, {1e-3: (3.2, 3.1)})
    for key, value in (("saturated-0.001", 0.25), ("gap-rms-0.001", 0.001)):
        (series,) = next(panel for panel in report.panels if panel.key == key).series
        assert series.method == "PACE" and series.y == (value,)


def test_the_cost_table_counts_each_average_for_its_method(tmp_path):
    cost = next(t for t in verdict_of(tmp_path, {1e-3: (3.2, 3.1)}).tables if t.key == "cost")
    assert {row[0]: row[-1] for row in cost.rows} == {"AdamW": "8", EMA: "12", "PACE": "8"}
    assert {row[4] for row in cost.rows} == {"11 s"}


def test_names_say_what_a_method_is(tmp_path):
    path = write_run(
        tmp_path,
        optimizer="adamw:control=push,strength=0.7",
        schedule="wsd:decay=0.3",
        averages=("power:0.9", "long_ema=power:0.7"),
        losses={"live": 3.0, "average": 3.0, "power_0_9": 3.0, "long_ema": 3.0},
    )
    assert read_run(path).returned == {
        "AdamW (control=push,strength=0.7) WSD (decay=0.3)": "average",
        "AdamW (control=push,strength=0.7) WSD (decay=0.3) · power:0.9": "power_0_9",
        "AdamW (control=push,strength=0.7) WSD (decay=0.3) · long EMA": "long_ema",
    }


# --- On the disk --------------------------------------------------------------------------------------


def rows_of(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


@pytest.mark.slow
def test_every_part_has_its_files(tmp_path):
    report = verdict_of(tmp_path / "runs", {1e-3: (3.2, 3.1), 2e-3: (3.2, None)})
    page = files.write(report, tmp_path / "out", lambda text: None)
    assert page.read_text(encoding="utf-8").count("PACE") > 10
    for panel in report.panels:
        rows = rows_of(tmp_path / "out" / f"{panel.key}.csv")
        assert len(rows) == 1 + sum(len(series.x) for series in panel.series)
        assert (tmp_path / "out" / f"{panel.key}.png").stat().st_size > 5000
    for table in (report.results, *report.tables):
        rows = rows_of(tmp_path / "out" / f"{table.key}.csv")
        assert tuple(map(tuple, rows[1:])) == table.rows


def test_without_matplotlib_there_is_a_page_without_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    said = []
    page = files.write(verdict_of(tmp_path / "runs", {1e-3: (3.2, 3.1)}), tmp_path / "out", said.append)
    assert (
        page.exists() and not list((tmp_path / "out").glob("*.png")) and "pip install matplotlib" in said[0]
    )


@pytest.mark.slow
def test_the_same_page_from_any_records(tmp_path, capsys):
    write_comparison(tmp_path / "runs", {1e-3: (3.2, 3.1)})
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "a")]) == 0
    assert main(["report", *map(str, (tmp_path / "runs").iterdir()), "--out", str(tmp_path / "b")]) == 0
    assert "PACE is 0.100 ± 0.002 below" in capsys.readouterr().out
    assert (tmp_path / "a" / "results.csv").read_bytes() == (tmp_path / "b" / "results.csv").read_bytes()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["report", "nowhere", "--out", "x"], "nowhere is not a folder"),
        (["report", "empty", "--out", "x"], "empty holds no run"),
        (["report", "runs"], "--out FOLDER is needed"),
    ],
)
def test_mistakes_are_answered_in_one_line(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write_comparison(tmp_path / "runs", {1e-3: (3.2, 3.1)})
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_last_line_that_is_cut_off_is_left_out(tmp_path):
    path = write_run(tmp_path, losses={"live": 3.0})
    with (path / "records.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind": "evalua')
    assert read_run(path).loss("live") == 3.0


@pytest.mark.slow
def test_reading_needs_no_torch():
    code = "import sys, paceline.studies.report.files as f, paceline.studies.report.tables as t"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_runs_are_found_in_and_below_folders(tmp_path):
    paths = write_comparison(tmp_path / "c" / "runs", {1e-3: (3.2, 3.1)}, seeds=(1,))
    assert find_runs([paths[0]]) == [paths[0]]
    assert find_runs([tmp_path / "c"]) == find_runs([tmp_path / "c" / "runs"]) == sorted(paths)
    assert json.loads((paths[0] / "records.jsonl").read_text().splitlines()[0])["kind"] == "run"
    assert re.fullmatch("[a-z-]+", panels.panels(Outcomes((read_run(paths[0]),)))[0].key)
