"""`paceline compare`, as a user calls it, on models that train in a second."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from killing import kill_at_random
from tiny import write_chats, write_model, write_text

from paceline.cli import main
from paceline.lm.files import locked
from paceline.runs.config import ConfigError, Run, name_of
from paceline.runs.methods import OPTIMIZERS
from paceline.runs.records import read
from paceline.runs.run import is_finished
from paceline.studies.compare import method, plan
from paceline.studies.compare.method import NAMES, Method, parse, runs_of
from paceline.studies.compare.trial import Trial

pytestmark = pytest.mark.slow

SMALL = ["--model", "gpt:0.3m", "--tokenizer", "bpe:300", "--length", "16", "--batch-size", "2"]
SMALL += ["--steps", "8", "--held-out-samples", "3", "--warmup", "2", "--device", "cpu"]
TWO_RATES = ["--lr", "1e-3,2e-3", "--methods", "adamw"]


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("compare")
        patch.setenv("PACELINE_CACHE", str(folder / "cache"))
        write_text(folder / "text.txt", paragraphs=120)
        yield folder


def words(room, out, *more):
    return ["compare", "--out", str(out), "--data", str(room / "text.txt"), *SMALL, *map(str, more)]


@pytest.fixture(scope="module")
def compared(room):
    """Every method of the library."""
    assert main(words(room, room / "all", "--lr", "1e-3", "--methods", *NAMES)) == 0
    return room / "all"


def records_of(folder):
    return {run.name: list(read(run / "records.jsonl")) for run in (folder / "runs").iterdir()}


# --- What is run --------------------------------------------------------------------------------------


def test_every_method_of_the_library_is_compared(compared):
    table = (compared / "results.csv").read_text(encoding="utf-8").splitlines()
    assert len(table) == 1 + len(NAMES)
    named = {Method(optimizer=name).optimizer for name in OPTIMIZERS}
    named.remove("schedule_free_plus")  # of a package that is not released yet
    assert named == {m.optimizer.partition(":")[0] for m in NAMES.values()}
    for line in table[1:]:
        assert 3 < float(line.rpartition(",")[2]) < 8, line


def test_all_methods_see_the_same_batches(compared):
    seen = {runs[-1]["batches"] for runs in records_of(compared).values()}
    assert len(seen) == 1 and all(seen)


@pytest.mark.long
def test_seeds_differ_in_weights_and_batches(room, tmp_path):
    assert (
        main(words(room, tmp_path / "c", "--lr", "1e-3", "--methods", "adamw", "pace", "--seeds", "2")) == 0
    )
    ends = {name: runs[-1] for name, runs in records_of(tmp_path / "c").items()}
    by_seed = [{e["batches"] for n, e in ends.items() if f"seed-{seed}" in n} for seed in (42, 43)]
    assert [len(seen) for seen in by_seed] == [1, 1] and by_seed[0] != by_seed[1]
    assert len({json.dumps(end["losses"]) for end in ends.values()}) == 4


def test_a_comparison_leaves_records_and_no_models(compared, room, tmp_path):
    assert not list(compared.glob("runs/*/checkpoints"))
    out = tmp_path / "kept"
    assert main(words(room, out, "--lr", "1e-3", "--methods", "pace", "--keep-models")) == 0
    (run,) = (out / "runs").iterdir()
    assert main(["export", str(run), str(tmp_path / "model"), "--weights", "average"]) == 0


def test_methods_that_train_alike_share_a_run():
    base = Run(steps=5)
    runs = runs_of(tuple(map(parse, method.DEFAULT)), base)
    shared = [("adamw", "constant", 2), ("push", "constant", 0), ("pace", "constant", 0), ("adamw", "wsd", 0)]
    shared.append(("schedule_free", "constant", 0))
    assert [(run.optimizer, run.schedule, len(run.averages)) for run in runs] == shared


def test_the_same_command_again_runs_nothing(compared, room, capfd):
    times = {path: path.read_bytes() for path in compared.glob("runs/*/timing.jsonl")}
    table = (compared / "results.csv").read_bytes()
    assert main(words(room, compared, "--lr", "1e-3", "--methods", *NAMES)) == 0
    assert {path: path.read_bytes() for path in compared.glob("runs/*/timing.jsonl")} == times
    assert (compared / "results.csv").read_bytes() == table
    assert f"{len(times)} are done already" in capfd.readouterr().out


@pytest.fixture(scope="module")
def widened(room):
    """AdamW at one rate, then at two; and when the first run was done."""
    out = room / "widened"
    assert main(words(room, out, "--lr", "1e-3", "--methods", "adamw")) == 0
    times = {path: path.read_bytes() for path in out.glob("runs/*/timing.jsonl")}
    assert main(words(room, out, *TWO_RATES)) == 0
    return out, times


def test_another_rate_reuses_the_runs_that_are_there(widened):
    out, times = widened
    assert len(times) == 1 and len(list((out / "runs").iterdir())) == 2
    assert all(path.read_bytes() == before for path, before in times.items())
    assert "lr 0.002" in (out / "results.csv").read_text(encoding="utf-8")


@pytest.mark.long
def test_fine_tuning_is_compared_too(room, tmp_path, capfd):
    write_model(room / "model")
    write_chats(room / "chats.jsonl", count=40)
    begin = ["compare", "--task", "sft", "--out", tmp_path / "c", "--data", room / "chats.jsonl"]
    begin += ["--model", room / "model", "--length", 64, "--batch-size", 2, "--steps", 4, "--warmup", 1]
    assert main([str(word) for word in (*begin, "--lr", "1e-3", "--methods", "ema_long", "pace")]) == 0
    assert "On this one seed PACE ended" in capfd.readouterr().out
    assert (tmp_path / "c" / "report.html").stat().st_size > 20_000


# --- Plans --------------------------------------------------------------------------------------------


def trial(**more):
    facts = {
        "parameters": 10**6,
        "samples": 10_000,
        "held_out_samples": 500,
        "step_seconds": 0.01,
        "fitting": 4,
    }
    return Trial(**(facts | more))


@pytest.mark.long
def test_a_time_is_turned_into_steps(room, tmp_path, capfd):
    out = tmp_path / "c"
    timed = words(room, out, "--lr", "1e-3", "--methods", "wsd", "--time", "40s")
    at = timed.index("--steps")
    del timed[at : at + 2]
    assert main(timed) == 0
    steps = json.loads((out / "plan.json").read_text(encoding="utf-8"))["steps"]
    assert steps >= plan.EVALUATIONS
    assert f"{steps:,} steps of 32 tokens" in capfd.readouterr().out
    assert main(timed) == 0  # nothing is measured or chosen anew
    assert json.loads((out / "plan.json").read_text(encoding="utf-8"))["steps"] == steps
    assert len(list((out / "runs").iterdir())) == 1


@pytest.mark.parametrize(
    "seconds, step_seconds", [(60, None), (600, None), (6000, None), (600, 0.5), (1200, 0.5), (6000, 3.0)]
)
@pytest.mark.parametrize("jobs", [1, 4])
def test_a_plan_fits_its_time(seconds, step_seconds, jobs):
    """Also one in which a single evaluation takes as long as several steps."""
    request = plan.Request(settings={}, seconds=seconds)
    run = Run(steps=300)
    found = trial() if step_seconds is None else trial(step_seconds=step_seconds)
    steps = plan._steps(request, run, found, 8, jobs)
    planned = plan._with_evaluations(Run(steps=steps), found)
    total = 8 / jobs * plan._run_seconds(planned, found)
    assert 0.6 * seconds < total <= seconds


def test_evaluations_are_many_enough_and_cheap():
    planned = plan._with_evaluations(Run(steps=4000, batch_size=64), trial(held_out_samples=10**6))
    assert planned.steps // planned.evaluate_every == plan.EVALUATIONS
    assert planned.held_out_samples * plan.EVALUATIONS < 0.2 * 4000 * 64
    short = plan._with_evaluations(Run(steps=40, batch_size=16), trial(held_out_samples=10**6))
    assert short.steps // short.evaluate_every == 5
    given = Run(steps=100, evaluate_every=7, held_out_samples=5)
    assert plan._with_evaluations(given, trial()) == given


def test_names_of_runs_differ_where_results_do():
    run = Run(steps=5)
    others = [
        Run(steps=6),
        Run(steps=5, lr=2e-3),
        Run(steps=5, averages=("power:0.5",)),
        Run(steps=5, seed=1),
    ]
    assert len({name_of(r) for r in (run, *others)}) == 5
    assert name_of(run) == name_of(Run(steps=5, keep=7, workers=2))


# --- Mistakes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--methods", "pase"], "method 'pase' is unknown (did you mean pace?)"),
        (["--methods", "pace:strenght=1"], "pace has no setting 'strenght' (did you mean strength?)"),
        (
            ["--methods", "push:strength=1"],
            "pace:control=push: Invalid strength value: 1; allowed: 0 <= strength < 1",
        ),
        (["--methods", "pace:control=psuh"], "control is 'psuh' (did you mean push?); allowed: paper, push,"),
        (["--methods", "adamw:strength=1"], "strength goes with a control, as in adamw:control=push"),
        (["--methods", "adamw:control=paper"], "Control.paper() is sized by the second moments of AdamW"),
        (["--methods", "pace:control=push,c=1"], "c is 1; it goes with control=paper"),
        (["--methods", "gpa:control=push"], "gpa has no setting 'control'"),
        (["--methods", "pace/power:0.5"], "pace keeps an average of its own, and no others beside it"),
        (["--methods", "pace@cosin"], "schedule 'cosin' is unknown (did you mean cosine?)"),
        (["--methods", "adamw/powr:0.5"], "average 'powr' is unknown (did you mean power?)"),
        (["--lr", "1e-3,x"], "lr 'x' is no number"),
        (["--lr", "0,1"], "lr 0 is not one to train with"),
        (["--lr", "1e-3,-1"], "lr -1 is not one to train with"),
        (["--lr", "1e-3,1e-3"], "one of them is there twice"),
        (["--lr", "nan"], "lr nan is not one to train with"),
        (["--seeds", "0"], "seeds is 0; allowed: 1 to 100"),
        (["--seeds", "many"], "seeds is 'many'"),
        (["--time", "soon"], "time is 'soon'; write it as 90s, 10min or 8h"),
        (["--time", "1h"], "time and steps given"),
        (["--steps", "100k"], "the data are too small: "),
        (["--model", "gpt:2m"], "unknown model 'gpt:2m'; did you mean gpt:"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
        (["--out", "/proc/nothing"], "cannot write to /proc/nothing"),
        (["--optimizer", "pace"], "unknown argument '--optimizer'"),
    ],
)
def test_mistakes_are_answered_in_one_line_before_the_first_run(room, tmp_path, capfd, more, said):
    assert main(words(room, tmp_path / "c", *more)) == 2
    error = capfd.readouterr().err
    assert said in error and error.count("\n") == 1, error
    assert not (tmp_path / "c" / "runs").exists()


@pytest.mark.parametrize("step_seconds", [0.5, 1.0, 10.0])
def test_a_time_that_is_too_short_says_what_would_do(step_seconds):
    def steps(seconds):
        found = trial(step_seconds=step_seconds)
        return plan._steps(plan.Request(settings={}, seconds=seconds), Run(steps=300), found, 12, 1)

    with pytest.raises(ConfigError, match="steps of each of 12 runs, too few to see anything") as refused:
        steps(30)
    advised = re.search(r"give (\d+) min or more", str(refused.value))
    assert steps(60 * int(advised[1])) >= plan.EVALUATIONS


def test_too_little_data_says_how_much_is_needed():
    with pytest.raises(
        ConfigError, match="1,280,000 tokens for a budget of 2,048,000,000; give 128,000,000 or more"
    ):
        plan._check_passes(Run(steps=10**6), trial())


@pytest.mark.long
def test_a_method_whose_package_is_missing_is_left_out(room, tmp_path, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    out = tmp_path / "c"
    assert main(words(room, out, "--lr", "1e-3", "--methods", "adamw", "schedule_free")) == 0
    said = capfd.readouterr().out
    assert (
        "schedule_free was not run: optimizer schedule_free needs its package: pip install schedulefree"
        in said
    )
    assert "schedule_free was not run" in (out / "report.html").read_text(encoding="utf-8")
    assert main(words(room, tmp_path / "d", "--methods", "schedule_free")) == 2
    assert main(["report", str(out)]) == 0
    assert "schedule_free was not run" in capfd.readouterr().out


def test_a_run_that_diverges_is_reported_and_not_repeated(room, tmp_path, capfd):
    begin = words(room, tmp_path / "c", "--lr", "1e-3,1e30", "--methods", "adamw", "--clip-norm", "none")
    for _ in range(2):
        assert main(begin) == 0
        said = capfd.readouterr().out
        assert "diverged: loss nan" in said and "AdamW" in said
    ends = [list(read(path))[-1]["outcome"] for path in (tmp_path / "c").glob("runs/*/timing.jsonl")]
    assert sorted(ends) == ["diverged", "finished"]


def test_a_run_that_fails_does_not_stop_the_others(room, widened, tmp_path, capfd):
    """Its folder holds something that is in the way."""
    out = shutil.copytree(widened[0], tmp_path / "c")
    first, second = sorted((out / "runs").iterdir())
    shutil.rmtree(first)
    first.write_text("in the way")
    (second / "timing.jsonl").unlink()
    (second / "records.jsonl").unlink()
    assert main(words(room, out, *TWO_RATES)) == 1
    said = capfd.readouterr()
    assert f"paceline: {first.name}: " in said.err and is_finished(second)
    assert "So far, with 1 of 2 runs" in said.out


def test_two_comparisons_do_not_share_a_folder(room, tmp_path):
    with locked(tmp_path / "c"):
        assert main(words(room, tmp_path / "c")) == 1


# --- Stopped and killed -------------------------------------------------------------------------------


def three_runs(room, out):
    """Two at once, where there are two cores, and one that waits."""
    line = words(room, out, "--lr", "1e-3", "--methods", "ema_long", "pace", "wsd")
    line[line.index("--steps") + 1] = "40"
    return line


def start(room, out):
    """The command, as a process with a group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "paceline.cli", *three_runs(room, out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def report_data(out):
    """All numbers of a report but times, and versions: there may be a commit meanwhile."""
    changing = ("cost.csv", "settings.csv")
    return {path.name: path.read_bytes() for path in out.glob("*.csv") if path.name not in changing}


@pytest.fixture(scope="module")
def undisturbed(room):
    began = time.monotonic()
    assert main(three_runs(room, room / "undisturbed")) == 0
    return report_data(room / "undisturbed"), time.monotonic() - began


def check_whole(out, expected):
    assert report_data(out) == expected
    for timing in out.glob("runs/*/timing.jsonl"):
        kinds = [line["kind"] for line in read(timing)]
        assert kinds.count("end") == 1 and kinds[-1] == "end", timing  # finished runs are not repeated
    assert not list(out.glob("runs/*/checkpoints")) and not list(out.rglob(".tmp-*"))


@pytest.mark.long
def test_killed_at_random_moments_it_ends_in_the_same_report(room, undisturbed, tmp_path):
    expected, whole = undisturbed
    kill_at_random(
        lambda out: start(room, out), lambda out: check_whole(out, expected), tmp_path,
        at_most=8, seconds=(0.3 * whole, 1.5 * whole),
    )  # fmt: skip


@pytest.mark.long  # tests of sweeps, whose processes are the same, stop one by a signal every day
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_and_saves_all_runs(room, undisturbed, tmp_path, number):
    expected, _ = undisturbed
    out = tmp_path / "c"
    process = start(room, out)
    while process.poll() is None and not list(out.glob("runs/*/records.jsonl")):
        time.sleep(0.02)
    time.sleep(0.3)
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    said, _ = process.communicate(timeout=60)
    assert (
        process.returncode == 128 + number and "the same command goes on" in said and "Traceback" not in said
    )
    assert main(three_runs(room, out)) == 0
    check_whole(out, expected)


@pytest.mark.long
def test_the_children_of_a_killed_parent_end(room, tmp_path):
    process = start(room, tmp_path / "c")
    while process.poll() is None and not list((tmp_path / "c").glob("runs/*/lock")):
        time.sleep(0.02)
    process.kill()
    process.communicate()
    until = time.monotonic() + 20
    while time.monotonic() < until and (alive := in_group(process.pid)):
        time.sleep(0.1)
    assert not alive


def in_group(group):
    """Processes of a group that are not dead."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(path)
    return found
