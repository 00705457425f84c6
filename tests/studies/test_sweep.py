"""`paceline sweep`, as a user calls it: here, killed, on a Ray cluster; models train in a second."""

import json
import os
import re
import shutil
import signal
import time
import warnings

import pytest
from killing import kill_at_random, start

from paceline.cli import main
from paceline.runs.config import Run
from paceline.runs.records import read
from paceline.runs.run import is_finished
from paceline.studies.lines import Finished, write
from paceline.studies.pool import Ended
from paceline.studies.runs import Named
from paceline.studies.sweep import Results

SMALL = ["--model", "gpt:0.3m", "--tokenizer", "bpe:300", "--length", "16", "--batch-size", "2"]
SMALL += ["--steps", "40", "--device", "cpu", "--set", "held_out_samples=3", "warmup=2"]
FOUR = ["--lr", "1e-3", "2e-3", "--seed", "1", "--seeds", "2"]


def words(room, out, *more, every=10):
    line = ["sweep", "--out", str(out), "--data", str(room / "text.txt"), *SMALL]
    return [*line, f"evaluate_every={every}", *map(str, more)]


@pytest.fixture(scope="module")
def undisturbed(room):
    """Four runs: where they are, what they computed, and how long that took."""
    began = time.monotonic()
    assert main(words(room, room / "undisturbed", *FOUR)) == 0
    return room / "undisturbed", content(room / "undisturbed"), time.monotonic() - began


def content(out):
    """Return what a sweep has computed: records to the byte, results without what depends on the clock."""
    # The first line of records says of which commit the source is, and there may be one meanwhile.
    commit = re.compile(rb'"commit": ("[^"]*"|null)')
    found = {
        path.parent.name: commit.sub(b"", path.read_bytes()) for path in out.glob("runs/*/records.jsonl")
    }
    lines = [{**line, "seconds": 0, "speed": 0} for line in results_of(out)]
    return found | {"results": commit.sub(b"", json.dumps(lines).encode())}


def results_of(out):
    return list(read(out / "results.jsonl"))


def begins(out):
    """Return how often each run was begun."""
    return {
        path.parent.name: sum(line["kind"] == "begin" for line in read(path))
        for path in out.glob("runs/*/timing.jsonl")
    }


def check_whole(out, expected):
    assert content(out) == expected
    for timing in out.glob("runs/*/timing.jsonl"):
        kinds = [line["kind"] for line in read(timing)]
        assert kinds.count("end") == 1 and kinds[-1] == "end", timing  # finished runs are not repeated
    left = [*out.glob("**/.tmp-*"), *out.glob("runs/*/checkpoints"), *out.glob("lock")]
    assert not left


# --- What is written ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_line_a_run_in_the_order_of_the_sweep_and_the_best_first(room, undisturbed, capsys):
    out, before, _ = undisturbed
    lines = results_of(out)
    assert [line["tags"] for line in lines] == [
        {"lr": lr, "seed": seed} for lr in (1e-3, 2e-3) for seed in (1, 2)
    ]
    finished = Finished.read([out / "results.jsonl"])
    assert finished == {run.name: run for run in map(Finished.of_line, lines)} and len(finished) == 4
    assert len({run.loss for run in finished.values()}) == 4
    capsys.readouterr()
    assert main(words(room, out, *FOUR)) == 0
    check_whole(out, before)
    assert set(begins(out).values()) == {1}  # the same command again runs nothing
    said = capsys.readouterr().out
    assert said.startswith("4 of 4 runs done")
    rows = [row.split() for row in said[said.index("Best first") :].splitlines()[2:5]]
    assert rows[0] == ["lr", "loss", "weights", "live", "seeds", "ended"]
    means = {f"{lr:g}": sum(r.loss for r in finished.values() if r.lr == lr) / 2 for lr in (1e-3, 2e-3)}
    assert [row[0] for row in rows[1:]] == sorted(means, key=means.get)
    assert all(row[1] == f"{means[row[0]]:.4f}" and row[-2:] == ["2", "finished"] for row in rows[1:])


def line(name, seed, loss, outcome="finished", live=5.0):
    """Return the records of a run that has ended."""
    return Finished(
        name=name,
        config={},
        methods={"PACE": "average"},
        method="PACE",
        returned="average",
        outcome=outcome,
        evaluations=((5, {"live": live, "average": loss}),),
    )


def test_the_table_is_best_first_with_seeds_together(tmp_path):
    losses = {1e-3: (3.0, 3.2), 2e-3: (2.0, None), 4e-3: (2.5, 2.5), 8e-3: ("failed", "diverged")}
    runs = [
        Named(name=f"{lr} {seed}", run=Run(steps=5), tags={"lr": lr, "seed": seed})
        for lr in losses
        for seed in (1, 2)
    ]
    results = Results(tmp_path, runs)
    for one in runs:
        loss = losses[one.tags["lr"]][one.tags["seed"] - 1]
        if isinstance(loss, str):  # neither has left records
            results.take((one, Ended(how=loss, text="why")))
        else:
            outcome = "diverged" if loss is None else "finished"
            results._finished[one.name] = line(one.name, one.tags["seed"], loss, outcome)
    table = results.table(("lr", "seed"))
    assert table.columns == ("lr", "loss", "weights", "live", "seeds", "ended")
    assert table.rows == (
        ("0.004", "2.5000 ± 0.0000", "average", "5.0000", "2", "2 finished"),
        ("0.001", "3.1000 ± 0.1000", "average", "5.0000", "2", "2 finished"),
        ("0.002", "2.0000", "average", "5.0000", "2", "1 finished, 1 diverged"),
        ("0.008", "", "", "", "2", "1 diverged, 1 failed"),
    )
    assert results.failed == {"0.008 1": "why"}


def test_lines_of_runs_that_are_nowhere_else_stay_in_the_file(tmp_path):
    write([line("gone", 1, 2.0), line("other", 1, 3.0)], tmp_path / "results.jsonl")
    results = Results(tmp_path, [Named(name="gone", run=Run(steps=5)), Named(name="new", run=Run(steps=5))])
    results._finished["new"] = line("new", 1, 1.0)
    results.write()
    assert list(Finished.read([results.path])) == ["new", "gone", "other"]
    assert list(results.finished) == ["new"]


@pytest.mark.slow
def test_a_wider_sweep_takes_runs_that_are_there_or_were_copied_from_elsewhere(room, undisturbed, tmp_path):
    out = tmp_path / "s"
    shutil.copytree(undisturbed[0] / "runs", out / "runs")
    more = ["--lr", "1e-3", "2e-3", "4e-3", "--seed", "1"]
    assert main(words(room, out, *more, every=20)) == 0
    assert [line["tags"] for line in results_of(out)] == [{"lr": lr} for lr in (1e-3, 2e-3, 4e-3)]
    assert len(begins(out)) == 5 and set(begins(out).values()) == {1}


@pytest.mark.slow
def test_a_text_that_changed_between_runs_of_a_sweep_is_said(room, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text((room / "text.txt").read_text())
    line = words(room, tmp_path / "s", "--lr", "1e-3")
    line[line.index("--data") + 1] = str(text)
    assert main(line) == 0 and "different data" not in capsys.readouterr().err
    text.write_text(text.read_text()[::-1])
    assert main([*line, "2e-3"]) == 0 and "different data" in capsys.readouterr().err


@pytest.mark.slow
def test_runs_of_a_file_end_in_any_order_and_are_written_in_theirs(room, tmp_path):
    """The first is the longest."""
    path = tmp_path / "sweep.toml"
    path.write_text(
        '[[cells]]\nsteps = 60\n[[cells]]\nsteps = 3\nmethod = "pace+push:strength=0.7,power=0.5"\n'
    )
    line = words(room, tmp_path / "s", "--config", path, "--jobs", 2)
    at = line.index("--steps")
    del line[at : at + 2]
    assert main(line) == 0
    found = [(line["tags"], line["ended"]) for line in results_of(tmp_path / "s")]
    assert found == [
        ({"steps": 60, "method": "pace"}, 60),
        ({"steps": 3, "method": "pace+push:strength=0.7,power=0.5"}, 3),
    ]


# --- What goes wrong ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_that_fails_does_not_stop_the_others_and_is_tried_again(room, undisturbed, tmp_path, capsys):
    """Its folder holds something that is in the way."""
    whole, expected, _ = undisturbed
    out = shutil.copytree(whole, tmp_path / "s")
    first, second = (out / "runs" / line["name"] for line in results_of(out)[:2])
    shutil.rmtree(first)
    first.write_text("in the way")
    shutil.rmtree(second)
    (out / "results.jsonl").unlink()
    assert main(words(room, out, *FOUR)) == 1
    said = capsys.readouterr()
    assert f"paceline: {first.name}: " in said.err and "File exists" in said.err
    assert "1 finished, 1 failed" in said.out
    assert is_finished(second) and len(results_of(out)) == 3
    first.unlink()
    (second / "records.jsonl").unlink()  # what is lost is done again
    assert main(words(room, out, *FOUR)) == 0
    check_whole(out, expected)


@pytest.mark.slow
def test_runs_that_diverge_are_ended_and_recorded(room, tmp_path, capsys):
    more = ["--set", "clip_norm=none", "--lr", "1e-3", "1", "1e30", "--method", "adamw"]
    for _ in range(2):
        assert main(words(room, tmp_path / "s", *more)) == 0
        good, bad, worst = results_of(tmp_path / "s")
        assert (good["outcome"], good["ended"]) == ("finished", 40)
        assert bad["outcome"] == worst["outcome"] == "diverged"
        assert 20 < bad["ended"] < 40 and worst["ended"] < 5
        assert capsys.readouterr().out.count("1 diverged") == 2
    assert "more than 1 above that of the first step" in bad["why"] and "loss nan" in worst["why"]
    assert set(begins(tmp_path / "s").values()) == {1}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--grid warmup=1,3", "--grid warmup=1,3: write --grid warmup VALUE VALUE, with spaces"),
        ("--grid lr", "--grid lr: write --grid lr VALUE VALUE"),
        ("--grid batch_sise 1 2", "unknown setting 'batch_sise' (did you mean batch_size?)"),
        ("--grid warmup 1 --grid warmup 2", "--grid warmup is there twice"),
        ("--lr 1 2 --grid lr 1 2", "lr is given twice"),
        ("--lr 1,2", "--lr: '1,2'; allowed: numbers with spaces between them"),
        ("--method adam", "method 'adam' is unknown (did you mean adamw?)"),
        ("--seed 1 -2", "seed is -2; allowed: 0 or more"),
        ("--seed 1 two", "seed is 'two'; allowed: a whole number"),
        ("--seeds 0", "--seeds: '0'; allowed: a whole number, 1 or more"),
        ("--seeds 2 --seed 1 2", "seeds counts from one seed, and seed lists several"),
        ("--jobs 0", "--jobs: '0'; allowed: a whole number, 1 or more"),
        ("--scale gpu", "--scale and --place go with a label"),
        ("--config nowhere.toml", "there is no file nowhere.toml"),
    ],
)
def test_mistakes_in_flags_are_answered_in_one_line(tmp_path, capsys, words, said):
    assert main(["sweep", "--out", str(tmp_path / "s"), "--steps", "5", *words.split()]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1, error
    assert not (tmp_path / "s").exists()


def listed(capsys, out, *words):
    assert main(["sweep", "--out", str(out), *words, "--dry-run"]) == 0
    assert not out.exists()
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_flags_win_over_the_file(tmp_path, capsys):
    path = tmp_path / "sweep.toml"
    path.write_text(
        'steps = 5\nbatch_size = 4\nseed = [1, 2]\n[grid]\nlr = [1e-3]\nmethod = ["adamw", "sgd"]\n'
    )
    words = f"--config {path} --batch-size 3 --seed 8 --seeds 2 --lr 5e-3 6e-3".split()
    said = listed(capsys, tmp_path / "s", *words, "--grid", "method", "adamw")
    assert said[0] == ["run", "lr", "seed", "steps", "tokens"]
    assert [row[1:] for row in said[1:5]] == [
        [lr, seed, "5", f"{5 * 3 * 128:,}"] for lr in ("0.005", "0.006") for seed in ("8", "9")
    ]
    assert all(row[0].startswith(f"adamw-constant-lr-{row[1]}-seed-{row[2]}-") for row in said[1:5])
    assert said[5:] == [["4", "runs,", "0", "done"]]
    assert [row[3] for row in listed(capsys, tmp_path / "s", *words[:2], "--lr", "1")[1:5]] == ["5"] * 4


def test_a_budget_that_depends_on_the_data_is_listed_as_it_is(tmp_path, capsys):
    said = listed(capsys, tmp_path / "s", "--set", "epochs=2", "--lr", "1e-3", "2e-3")
    assert [row[2:] for row in said[1:3]] == [["2", "epochs", "?"]] * 2


# --- Stopped and killed -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_signal_saves_all_runs_and_the_same_command_goes_on(room, undisturbed, tmp_path):
    _, expected, _ = undisturbed
    out, line = tmp_path / "s", words(room, tmp_path / "s", *FOUR, "--jobs", 2)
    process = start(line)
    while process.poll() is None and not list(out.glob("runs/*/checkpoints/step-*")):
        time.sleep(0.01)
    assert main(line) == 1  # the folder is held
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT and "Traceback" not in said, said
    assert "the same command goes on" in said or "the same command resumes" in said
    assert main(line) == 0
    check_whole(out, expected)


BRANCHED = """
import argparse, sys
from paceline.studies import sweep
from paceline.studies.runs import decayed, in_order
parser = argparse.ArgumentParser()
sweep.add(parser)
options = parser.parse_args(sys.argv[1:])
runs = sweep.asked(options)
runs += [decayed(one, steps=steps) for one in runs for steps in (20, 40)]
sys.exit(sweep.perform(in_order(runs), options, ()))
"""


@pytest.mark.long
def test_killed_at_random_moments_runs_and_their_branches_end_in_the_same_results(room, tmp_path):
    def begin(out):
        process = start(words(room, out, "--lr", "1e-3", "2e-3")[1:], "-c", BRANCHED)
        while process.poll() is None and not (out / "lock").exists():
            time.sleep(0.02)
        return process

    began = time.monotonic()
    undisturbed = begin(tmp_path / "undisturbed")
    said, _ = undisturbed.communicate(timeout=600)
    assert undisturbed.returncode == 0 and "6 of 6 runs done" in said, said
    seconds, expected = time.monotonic() - began, content(tmp_path / "undisturbed")
    first = {path.parent.name: next(read(path)) for path in tmp_path.glob("undisturbed/runs/*/timing.jsonl")}
    assert sorted(line["step"] for line in first.values()) == [0, 0, 16, 16, 32, 32]

    def check(out):
        check_whole(out, expected)

    kill_at_random(begin, check, tmp_path, at_most=6, seconds=(0.0, 0.7 * seconds))


# --- On a Ray cluster ---------------------------------------------------------------------------------

MEMORY = 80 * 2**20  # bytes of each node's store of objects, the least that Ray takes


@pytest.fixture
def cluster(room):
    """Return a head and a worker; after the cache is known, which the workers have to find."""
    pytest.importorskip("ray")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": MEMORY}
        made = Cluster(initialize_head=True, head_node_args=head)
        made.add_node(num_cpus=1, object_store_memory=MEMORY)
        yield made
        made.shutdown()


@pytest.mark.long
def test_a_cluster_that_loses_a_worker_ends_in_the_results_of_one_machine(
    cluster, room, undisturbed, tmp_path
):
    _, expected, _ = undisturbed
    out = tmp_path / "s"
    second = cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
    line = words(room, out, *FOUR, "--ray", cluster.address)
    process = start(line)
    while process.poll() is None and sum(begins(out).values()) < 2:  # one on each worker
        time.sleep(0.02)
    cluster.remove_node(second, allow_graceful=False)
    while process.poll() is None and sum(map(is_finished, out.glob("runs/*"))) < 2:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)  # and then the command itself is stopped
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 128 + signal.SIGINT and "lost its worker" in said, said
    process = start(line)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    check_whole(out, expected)


@pytest.mark.long
def test_without_a_cluster_it_says_how_to_start_one(tmp_path, capsys):
    pytest.importorskip("ray")
    line = words(tmp_path, tmp_path / "s", *FOUR, "--ray", "127.0.0.1:1")
    assert main(line) == 2
    said = capsys.readouterr().err
    assert "no Ray cluster answers at 127.0.0.1:1" in said and "ray start --head" in said
    assert said.count("\n") == 1 and not (tmp_path / "s").exists()
