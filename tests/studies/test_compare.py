"""`paceline compare` as a user calls it, on models that train in a second; `paceline report` on its runs."""

import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from killing import kill_at_random, start
from tiny import write_chats, write_model, write_text

from paceline.cli import main
from paceline.lm.files import locked
from paceline.runs import names
from paceline.runs.config import ConfigError, Run
from paceline.runs.records import read
from paceline.studies import plan, plots
from paceline.studies.compare import METHODS

SMALL = ["--model", "gpt:0.3m", "--tokenizer", "bpe:300", "--length", "16", "--batch-size", "2"]
SMALL += ["--steps", "8", "--device", "cpu", "--set", "held_out_samples=3", "warmup=2"]
ALL = (*METHODS, *sorted(set(names.BASES) - set(METHODS)), "adamw/bema", "adamw+push", "adamw@cosine")


def words(room, out, *more):
    return ["compare", "--out", str(out), "--data", str(room / "text.txt"), *SMALL, *map(str, more)]


@pytest.fixture(scope="module")
def compared(room):
    """Every method of the library, at one rate."""
    assert main(words(room, room / "all", "--lr", "1e-3", "--methods", *ALL)) == 0
    return room / "all"


@pytest.fixture(scope="module")
def two(room):
    """AdamW at two rates."""
    assert main(words(room, room / "two", "--lr", "1e-3", "2e-3", "--methods", "adamw")) == 0
    return room / "two"


def ends_of(folder, name="records.jsonl"):
    return {run.name: list(read(run / name))[-1] for run in (folder / "runs").iterdir()}


def results_of(folder):
    return (folder / "results.csv").read_text(encoding="utf-8").splitlines()


# --- What is run ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_method_of_the_library_is_compared_on_the_same_batches(compared):
    table = results_of(compared)
    assert len(table) == 1 + len(ALL)
    assert all(3 < float(line.rpartition(",")[2]) < 8 for line in table[1:])
    seen = {end["batches"] for end in ends_of(compared).values()}
    assert len(seen) == 1 and all(seen)
    assert not list(compared.glob("runs/*/checkpoints"))


def test_methods_that_train_alike_share_a_run_and_may_want_settings():
    runs = plan.runs_of(METHODS, Run(steps=5))
    shared = [("adamw", "constant", 2), ("pace+push", "constant", 0), ("pace", "constant", 0)]
    shared += [("adamw", "wsd", 0), ("schedule_free", "constant", 0)]
    assert [(run.method, run.schedule, len(run.averages)) for run in runs] == shared
    assert [run.clip_norm for run in runs] == [1.0] * 4 + [None]
    assert plan.runs_of(["schedule_free"], Run(steps=5), given=("clip_norm",))[0].clip_norm == 1.0


@pytest.mark.slow
def test_more_rates_run_only_those_and_fewer_run_nothing(room, two, tmp_path, capfd):
    out = shutil.copytree(two, tmp_path / "c")
    before = {path: path.read_bytes() for path in out.glob("runs/*/timing.jsonl")}
    for rates, said in (
        (["1e-3", "2e-3", "4e-3"], "2 are done already"),
        (["1e-3"], "2 run(s) of an earlier command in this folder are left out"),
    ):
        assert main(words(room, out, "--methods", "adamw", "--lr", *rates)) == 0
        assert all(path.read_bytes() == content for path, content in before.items())
        assert len(list((out / "runs").iterdir())) == 3 and said in capfd.readouterr().out
        assert results_of(out)[0].count(",lr 0.00") == len(rates)


@pytest.mark.long
def test_seeds_differ_in_weights_and_batches(room, tmp_path):
    assert main(words(room, tmp_path, "--lr", "1e-3", "--methods", "adamw", "pace", "--seeds", "3")) == 0
    ends = ends_of(tmp_path)
    by_seed = [{e["batches"] for n, e in ends.items() if f"seed-{seed}" in n} for seed in (42, 43, 44)]
    assert [len(seen) for seen in by_seed] == [1, 1, 1] and len(set.union(*by_seed)) == 3
    assert len({json.dumps(end["losses"]) for end in ends.values()}) == 6


@pytest.mark.long
def test_fine_tuning_is_compared_too(room, tmp_path, capfd):
    write_model(room / "model")
    write_chats(room / "chats.jsonl", count=40)
    begin = ["compare", "--task", "sft", "--out", tmp_path / "c", "--data", room / "chats.jsonl"]
    begin += ["--model", room / "model", "--length", 64, "--batch-size", 2, "--steps", 4, "--set", "warmup=1"]
    begin += ["--lr", "1e-3", "--methods", "adamw/ema", "pace"]
    assert main([str(word) for word in begin]) == 0
    assert "one seed shows no direction between PACE and" in capfd.readouterr().out


# --- Plans ----------------------------------------------------------------------------------------------


def trial(**more):
    facts = {
        "parameters": 10**6,
        "samples": 10_000,
        "held_out_samples": 500,
        "step_seconds": 0.01,
        "fitting": 4,
    }
    return plan.Trial(**(facts | more))


@pytest.mark.long
def test_a_time_is_turned_into_steps(room, tmp_path):
    timed = words(room, tmp_path, "--lr", "1e-3", "--methods", "adamw@wsd", "--time", "40s")
    timed[timed.index("--data") + 1] = str(write_text(tmp_path / "long.txt", paragraphs=3000))
    at = timed.index("--steps")
    del timed[at : at + 2]
    kept = []
    for _ in range(2):  # nothing is measured or chosen again
        assert main(timed) == 0
        kept.append(json.loads((tmp_path / "plan.json").read_text(encoding="utf-8")))
    assert kept[0] == kept[1] and kept[0]["steps"] >= plan.EVALUATIONS
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.parametrize(
    "seconds, step_seconds", [(60, 0.01), (600, 0.01), (6000, 0.01), (600, 0.5), (1200, 0.5), (6000, 3.0)]
)
@pytest.mark.parametrize("jobs", [1, 4])
def test_a_plan_fits_its_time(seconds, step_seconds, jobs):
    """Also one in which a single evaluation takes as long as several steps."""
    request = plan.Request(settings={}, methods=("pace",), seconds=seconds)
    found = trial(step_seconds=step_seconds)
    steps = plan.steps_of(request, Run(steps=300), found, 8, jobs)
    planned = plan.with_evaluations(Run(steps=steps), found)
    assert 0.6 * seconds < 8 / jobs * plan.run_seconds(planned, found) <= seconds


@pytest.mark.parametrize("step_seconds", [0.5, 1.0, 10.0])
def test_a_time_that_is_too_short_says_what_would_do(step_seconds):
    def steps(seconds):
        request = plan.Request(settings={}, methods=("pace",), seconds=seconds)
        return plan.steps_of(request, Run(steps=300), trial(step_seconds=step_seconds), 12, 1)

    with pytest.raises(ConfigError, match="steps of each of 12 runs, too few to see anything") as refused:
        steps(30)
    advised = re.search(r"give (\d+) min or more", str(refused.value))
    assert steps(60 * int(advised[1])) >= plan.EVALUATIONS


def test_evaluations_are_many_enough_and_cheap():
    planned = plan.with_evaluations(Run(steps=4000, batch_size=64), trial(held_out_samples=10**6))
    assert planned.steps // planned.evaluate_every == plan.EVALUATIONS
    assert planned.held_out_samples * plan.EVALUATIONS < 0.2 * 4000 * 64
    short = plan.with_evaluations(Run(steps=40, batch_size=16), trial(held_out_samples=10**6))
    assert short.steps // short.evaluate_every == 5
    given = Run(steps=100, evaluate_every=7, held_out_samples=5)
    assert plan.with_evaluations(given, trial()) == given


def test_too_little_data_says_how_much_is_needed():
    with pytest.raises(
        ConfigError, match="1,280,000 tokens for a budget of 2,048,000,000; give 128,000,000 or"
    ):
        plan.check_passes(Run(steps=10**6), trial())


# --- Mistakes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--methods", "pase"], "method 'pase' is unknown (did you mean pace?)"),
        (["--methods", "wsd"], "it is a schedule: adamw@wsd"),
        (["--methods", "pace+push:strength=1"], "Invalid strength value: 1; allowed: 0 <= strength < 1"),
        (["--methods", "adamw+paper"], "Control.paper() is sized by the second moments of AdamW"),
        (["--lr", "1e-3,2e-3"], "'1e-3,2e-3'; allowed: numbers with spaces between them, such as 1e-3 2e-3"),
        (["--lr", "0", "1"], "lr 0 is not one to train with"),
        (["--lr", "1e-3", "-1"], "lr -1 is not one to train with"),
        (["--lr", "1e-3", "1e-3"], "one of them is there twice"),
        (["--lr", "nan"], "lr nan is not one to train with"),
        (["--seeds", "0"], "--seeds: '0'; allowed: a whole number, 1 or more"),
        (["--seeds", "101"], "seeds is 101; allowed: 1 to 100"),
        (["--time", "soon"], "--time: 'soon'; write it as 90s, 10min or 8h"),
        (["--time", "1h"], "time and steps given"),
        (["--set", "fork=runs/first@6"], "fork is no setting of all runs; --methods and --lr say what"),
        (["--set", "lr=1e-3"], "lr is no setting of all runs"),
        (["--method", "pace"], "unknown argument '--method' (did you mean --methods?)"),
    ],
)
def test_mistakes_are_answered_in_one_line_before_anything_is_written(room, tmp_path, capfd, more, said):
    assert main(words(room, tmp_path / "c", *more)) == 2
    error = capfd.readouterr().err
    assert said in error and error.count("\n") == 1, error
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--steps", "100k"], "the data are too small: "),
        (["--model", "gpt:2m"], "unknown model 'gpt:2m'; did you mean gpt:"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
        (["--out", "/proc/nothing"], "cannot write to /proc/nothing"),
    ],
)
def test_what_a_trial_finds_leaves_no_lock(room, tmp_path, capfd, more, said):
    assert main(words(room, tmp_path / "c", *more)) == 2
    error = capfd.readouterr().err
    assert said in error and error.count("\n") == 1, error
    assert not (tmp_path / "c").exists()


def test_without_matplotlib_it_names_the_install_before_any_training(room, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    for line in (words(room, tmp_path / "c"), ["report", str(tmp_path), "--out", str(tmp_path / "c")]):
        assert main(line) == 2
        assert "plots need matplotlib: pip install" in capfd.readouterr().err
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
def test_a_method_whose_package_is_missing_is_left_out(room, tmp_path, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    assert main(words(room, tmp_path / "d", "--methods", "schedule_free")) == 2
    assert main(words(room, tmp_path / "c", "--lr", "1e-3", "--methods", "adamw", "schedule_free")) == 0
    said = "schedule_free was not run: schedule_free needs its package: pip install schedulefree"
    assert said in capfd.readouterr().out and said in (tmp_path / "c/report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_run_that_diverges_is_reported(room, tmp_path, capfd):
    more = ["--lr", "1e-3", "1e30", "--methods", "adamw", "--set", "clip_norm=none"]
    assert main(words(room, tmp_path, *more)) == 0
    said = capfd.readouterr().out
    assert "diverged: loss nan" in said and "AdamW" in said
    assert sorted(end["outcome"] for end in ends_of(tmp_path, "timing.jsonl").values()) == [
        "diverged",
        "finished",
    ]


@pytest.mark.slow
def test_a_run_that_fails_does_not_stop_the_others(room, two, tmp_path, capfd):
    """Its folder holds something that is in the way."""
    out = shutil.copytree(two, tmp_path / "c")
    first, second = sorted((out / "runs").iterdir())
    shutil.rmtree(first)
    first.write_text("in the way")
    shutil.rmtree(second)
    assert main(words(room, out, "--lr", "1e-3", "2e-3", "--methods", "adamw")) == 1
    said = capfd.readouterr()
    assert f"paceline: {first.name}: " in said.err and "So far, with 1 of 2 runs" in said.out
    assert (second / "timing.jsonl").exists()


@pytest.mark.slow
def test_what_is_lost_is_done_again_and_what_is_damaged_is_named(room, two, tmp_path, capfd):
    out = shutil.copytree(two, tmp_path / "c")
    line = words(room, out, "--lr", "1e-3", "2e-3", "--methods", "adamw")
    (first, second), plan = sorted((out / "runs").iterdir()), out / "plan.json"
    lost, damaged = first / "records.jsonl", second / "records.jsonl"
    whole = lost.read_bytes().partition(b"\n")[2]
    lost.unlink()
    assert main(["report", str(out)]) == 1
    assert f"{first.name} is left out: {lost} has 0 bytes" in capfd.readouterr().out
    damaged.write_bytes(damaged.read_bytes()[:-9])
    assert main(line) == 1
    said = capfd.readouterr()
    assert "1 are done already" in said.out and "with 1 of 2 runs" in said.out
    assert f"{first.name} has lost its records, and is done again" in said.out
    assert f"{second.name} is left out: {damaged}" in said.out
    assert f"paceline: {second.name}: {damaged}" in said.err
    assert lost.read_bytes().partition(b"\n")[2] == whole
    plan.write_text(plan.read_text().replace('"steps"', "steps"))
    for command in (["report", str(out)], line):
        assert main(command) == 2
        error = capfd.readouterr().err
        assert f"{plan}, line " in error and "column 4: this is no JSON" in error and error.count("\n") == 1


@pytest.mark.slow
def test_two_comparisons_do_not_share_a_folder(room, tmp_path):
    with locked(tmp_path / "c"):
        assert main(words(room, tmp_path / "c")) == 1


# --- The report -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_same_page_from_any_copy_of_the_runs(two, tmp_path, capfd):
    copy = shutil.copytree(two / "runs", tmp_path / "copied")
    assert main(["report", *map(str, copy.iterdir()), "--out", str(tmp_path / "a")]) == 0
    assert results_of(tmp_path / "a") == results_of(two)
    capfd.readouterr()
    (tmp_path / "planned" / "runs").mkdir(parents=True)
    for more, said in (
        ([copy], "--out FOLDER is needed"),
        ([tmp_path / "nowhere", "--out", tmp_path / "x"], "nowhere is not a folder"),
        ([tmp_path / "a", "--out", tmp_path / "x"], "nothing is finished yet in"),
        ([tmp_path / "planned"], f"nothing is finished yet in {tmp_path / 'planned'}"),
    ):
        assert main(["report", *map(str, more)]) == 2
        error = capfd.readouterr().err
        assert said in error and error.count("\n") == 1


# --- Stopped and killed ---------------------------------------------------------------------------------


def three_runs(room, out):
    """Two in parallel, where there are two cores, and one that waits."""
    line = words(room, out, "--lr", "1e-3", "--methods", "adamw/ema", "pace", "adamw@wsd")
    line[line.index("--steps") + 1] = "40"
    return line


def numbers_of(out):
    """All records and tables but times, and versions: there may be a commit meanwhile."""
    tables = {p.name: p.read_bytes() for p in out.glob("*.csv") if p.name not in ("cost.csv", "settings.csv")}
    for path in out.glob("runs/*/records.jsonl"):
        tables[path.parent.name] = path.read_bytes().partition(b"\n")[2]
    return tables


@pytest.fixture(scope="module")
def undisturbed(room):
    began = time.monotonic()
    assert main(three_runs(room, room / "undisturbed")) == 0
    return numbers_of(room / "undisturbed"), time.monotonic() - began


def check_whole(out, expected):
    assert numbers_of(out) == expected
    for timing in out.glob("runs/*/timing.jsonl"):
        kinds = [line["kind"] for line in read(timing)]
        assert kinds.count("end") == 1 and kinds[-1] == "end", timing  # finished runs are not repeated
    assert not list(out.glob("runs/*/checkpoints")) and not list(out.rglob(".tmp-*"))
    assert not (out / "lock").exists()


def wait_for(process, out, pattern):
    while process.poll() is None and not list(out.glob(pattern)):
        time.sleep(0.02)


@pytest.mark.long
def test_killed_at_random_moments_it_ends_in_the_same_records_and_tables(room, undisturbed, tmp_path):
    expected, whole = undisturbed
    kill_at_random(
        lambda out: start(three_runs(room, out)), lambda out: check_whole(out, expected), tmp_path,
        at_most=8, seconds=(0.3 * whole, 1.5 * whole),
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_and_saves_all_runs(room, undisturbed, tmp_path, number):
    process = start(three_runs(room, tmp_path))
    wait_for(process, tmp_path, "runs/*/records.jsonl")
    time.sleep(0.3)
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "the same command" in said and "Traceback" not in said
    assert main(three_runs(room, tmp_path)) == 0
    check_whole(tmp_path, undisturbed[0])


@pytest.mark.long
def test_the_children_of_a_killed_parent_end(room, tmp_path):
    process = start(three_runs(room, tmp_path))
    wait_for(process, tmp_path, "runs/*/lock")
    process.kill()
    process.communicate()
    until = time.monotonic() + 20
    while time.monotonic() < until and (alive := in_group(process.pid)):
        time.sleep(0.1)
    assert not alive


def in_group(group):
    """Return processes of a group that are not dead."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(path)
    return found
