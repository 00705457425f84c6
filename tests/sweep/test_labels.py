"""Labels of the paper by `paceline sweep`: real runs at the smallest scale, killed, shared, tried again."""

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny import write_text

sys.path.insert(0, str(Path(__file__).parent))
from small_sweeps import start

from paceline.cli import main
from paceline.paper.labels import EXPERIMENTS, cells, runs
from paceline.paper.scales import CPU, located
from paceline.runs.records import read
from paceline.runs.run import execute, is_finished

KILLS = int(os.environ.get("PACELINE_KILLS", "1"))
RIVER = "fig:appendix_pretrain_river"
NAMES = [cell.name for cell in cells(RIVER, CPU)]
WHOLE = "gpt-0.3m_adamw_lr0.002_constant_20_s42"
BRANCHES = [cell.name for cell in cells(RIVER, CPU) if cell.run.after and cell.run.after[0] == WHOLE]


def words(room, out, *more):
    return ["sweep", RIVER, "--scale", "cpu", "--out", str(out), "--text", str(room / "text.txt"),
            "--cpus-per-cell", "1", "--jobs", "2", *map(str, more)]  # fmt: skip


def evaluations(out):
    """What every run computed, by name: all but when it did."""
    return {
        path.parent.name: [line for line in read(path) if line["kind"] != "run"]
        for path in out.glob("cells/*/records.jsonl")
    }


def state(out):
    """Bytes and time of the records of every run that has ended."""
    return {
        path: (path.read_bytes(), path.stat().st_mtime_ns)
        for folder in out.glob("cells/*")
        if is_finished(folder)
        for path in (folder / "records.jsonl", folder / "timing.jsonl")
    }


def check_whole(out, expected):
    assert evaluations(out) == expected and sorted(expected) == sorted(NAMES)
    timing = {path.parent.name: list(read(path)) for path in out.glob("cells/*/timing.jsonl")}
    for lines in timing.values():
        kinds = [line["kind"] for line in lines]
        assert kinds.count("end") == 1 and kinds[-1] == "end"
    for cell in cells(RIVER, CPU):
        if cell.run.after is not None:
            assert timing[cell.name][0]["time"] > timing[cell.run.after[0]][-1]["time"]
            assert timing[cell.name][0]["step"] == cell.run.after[1]
    # Of what this label goes on from, nothing is left; the other run of PACE has a branch in another label.
    left = {path.parents[1].name for path in out.glob("cells/*/checkpoints/step-*")}
    assert left == {"gpt-0.3m_pace_c0.002_k0.5_u1_lr0.002_constant_20_s42"}


# --- Real runs ------------------------------------------------------------------------------------------


@pytest.fixture
def room(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_text(tmp_path / "text.txt", paragraphs=120)
    return tmp_path


@pytest.fixture
def expected(room):
    """What the runs compute one by one, in a folder as a sweep leaves it."""
    torch.set_num_threads(1)
    for name, run in runs(RIVER, located(CPU, text=(str(room / "text.txt"),))).items():
        for _ in execute(run, room / "undisturbed" / "cells" / name, lambda text: None):
            pass
    return evaluations(room / "undisturbed")


@pytest.mark.long
def test_a_label_that_is_killed_shared_and_tried_again(room, expected, monkeypatch, capsys):
    """In one test, so that workers do not do the runs once each. All is there but a run and its branches."""
    before = state(undone(room, "s0"))
    check_killed(room, "s0", expected, KILLS, monkeypatch, capsys)
    assert {path: found for path, found in state(room / "s0").items() if path in before} == before
    check_one_that_fails(room, expected, capsys)
    check_other_runs(room, capsys)


@pytest.mark.long
def test_a_label_that_is_killed_often(room, expected, monkeypatch, capsys):
    for number in range(7):  # all nine runs, from the first on
        check_killed(room, f"s{number}", expected, 3, monkeypatch, capsys)


def undone(room, name):
    """A sweep of which a run and its branches are left to do."""
    out = shutil.copytree(room / "undisturbed", room / name)
    for cell in (WHOLE, *BRANCHES):
        shutil.rmtree(out / "cells" / cell)
    return out


def check_killed(room, name, expected, kills, monkeypatch, capsys):
    """Alone or with its children; what had ended is not touched again, and two machines end it together."""
    chance = random.Random(seed := random.randrange(2**32))
    print("seed", seed)
    out = room / name
    for _ in range(kills):
        left = len(NAMES) - len(state(out)) // 2
        ends, more = chance.randrange(max(left, 1)), chance.uniform(0.0, 2.0)  # the moment
        process = start(words(room, out))
        while process.poll() is None and len(NAMES) - len(state(out)) // 2 > left - ends:
            time.sleep(0.02)
        while process.poll() is None and not (out / "claims").exists():
            time.sleep(0.02)
        time.sleep(more)
        if chance.random() < 0.5:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.communicate()
    before, begun = state(out), {path.name for path in out.glob("claims/*")}
    print("ended before the last kill:", len(before) // 2)
    capsys.readouterr()
    other = start(words(room, out, "--jobs", 1), PACELINE_HOST="left")
    with monkeypatch.context() as patch:
        patch.setenv("PACELINE_HOST", "right")
        assert main(words(room, out, "--jobs", 1)) == 0
    said = [other.communicate(timeout=300)[0], capsys.readouterr().out]
    assert other.returncode == 0, said
    check_whole(out, expected)
    assert {path: found for path, found in state(out).items() if path in before} == before
    claimed = {folder.name: len(list(folder.iterdir())) for folder in (out / "claims").iterdir()}
    assert all(count == 1 for cell, count in claimed.items() if cell not in begun)
    for text in said:
        assert f"{RIVER}: 9 of 9 runs done; PACE " in text
        assert f"figures: paceline figures {RIVER} --scale cpu --records {out}" in text


def check_one_that_fails(room, expected, capsys):
    """Its branches fail because of it, until it is tried again."""
    out = undone(room, "failing")
    (out / "cells" / WHOLE).write_text("in the way")
    before = state(out)
    capsys.readouterr()
    assert main(words(room, out)) == 1
    said = capsys.readouterr()
    for name in BRANCHES:
        assert f"paceline: {name}: {WHOLE}, which it goes on from, failed: " in said.err
    assert f"{RIVER}: 5 of 9 runs done" in said.out and state(out) == before
    outcomes = {line["cell"]: line["outcome"] for line in read(out / "results.jsonl")}
    assert {name for name, outcome in outcomes.items() if outcome == "failed"} == {WHOLE, *BRANCHES}
    (out / "cells" / WHOLE).unlink()
    assert main(words(room, out)) == 0
    check_whole(out, expected)
    # No folder of this machine is in it.
    assert (out / "results.jsonl").read_bytes() == (room / "s0" / "results.jsonl").read_bytes()


def check_other_runs(room, capsys):
    """Other data under the same names are refused; what makes no other run is not."""
    out, before = room / "failing", state(room / "failing")
    write_text(room / "other.txt", paragraphs=130)
    line = words(room, out)
    line[line.index("--text") + 1] = str(room / "other.txt")
    capsys.readouterr()
    assert main(line) == 2
    said = capsys.readouterr().err
    assert "holds a run with other settings (data: ['" in said and "or another --out" in said
    assert main(words(room, out, "--evaluate-every", 3, "--micro-batch-size", 1)) == 0
    assert state(out) == before


# --- What is asked for ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("fig:nothing --scale cpu", "the paper has no label 'fig:nothing'"),
        ("135m_grid", "say at which scale fig:135m_grid is to be run: --scale cpu, gpu or paper"),
        ("all fig:pretrain --scale cpu", "all are all labels; give it alone"),
        ("pretrain --scale cpu --lr 1", "--lr would make other runs than those of fig:pretrain"),
        ("pretrain --scale cpu --optimizer pace", "--optimizer would make other runs"),
        ("pretrain --scale cpu --grid lr 1 2", "--grid would make other runs"),
        ("pretrain --scale cpu --seeds 1 2", "--seeds would make other runs"),
        ("pretrain --scale cpu --config x.toml", "--config would make other runs"),
        ("pretrain --scale cpu --keep-steps 5", "--keep-steps would make other runs"),
        ("pretrain --scale cpu --data x", "where data lie is said by --text, --chat and --tulu"),
        ("pretrain --scale cpu --model x", "where a model lies is said by --base-model NAME=FOLDER"),
        ("pretrain --scale cpu --text x.txt", "there is no file or folder 'x.txt'; say where the data are"),
        (
            "135m_grid --scale cpu",
            "there is no file or folder 'chat.jsonl'; say where the data are with --chat",
        ),
        ("135m_grid --scale cpu --chat .", "say where yours is with --base-model tiny-chat-model=FOLDER"),
        ("pretrain --scale gpu --base-model gpt:7m=.", "scale gpu fine-tunes no 'gpt:7m'; there are Hugging"),
        (
            "pretrain --scale gpu --base-model smollm2-135m",
            "--base-model is 'smollm2-135m'; write NAME=FOLDER",
        ),
        ("pretrain --scale gpu --base-model SmolLM2-135M=x", "there is no folder x"),
        ("--scale cpu --steps 5", "--scale goes with a label of the paper"),
        ("--text x --steps 5", "--text goes with a label of the paper, which comes first"),
        ("pretrain --scale cpu --device tpu --jobs x", "jobs is 'x'"),
    ],
)
def test_mistakes_are_answered_before_anything_is_done(tmp_path, monkeypatch, capsys, more, said):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *more.split(), "--out", "s"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1, error
    assert not list(tmp_path.iterdir())


def listed(capsys, *more):
    assert main(["sweep", *more, "--dry-run"]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_labels_share_runs_and_all_are_all(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-chat-model").mkdir()
    (tmp_path / "chat.jsonl").touch()
    rows = listed(capsys, RIVER, "--scale", "cpu", "--out", "s")
    assert next(row.split() for row in rows if "_wsd_10_" in row)[1:3] == [f"{WHOLE}@8", "2"]
    assert rows[-1] == "9 cells, 0 done"
    river, kappa = (
        {cell.name for cell in cells(label, CPU)} for label in (RIVER, "fig:appendix_pretrain_kappa_sweep")
    )
    assert river & kappa and river - kappa
    line = [RIVER, "appendix_pretrain_kappa_sweep", "--scale", "cpu", "--out", "s"]
    rows = [row.split()[0] for row in listed(capsys, *line)[1:] if row.startswith("gpt-")]
    assert len(rows) == len(set(rows)) and set(rows) == river | kappa
    everything = {cell.name for label in EXPERIMENTS for cell in cells(label, CPU)}
    rows = [row.split()[0] for row in listed(capsys, "all", "--scale", "cpu", "--out", "s")]
    assert sum(row in everything for row in rows) == len(everything)
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_data_and_models_of_this_machine_are_those_of_the_runs(tmp_path, monkeypatch):
    from paceline.cli import _parse
    from paceline.studies.sweep.labels import labelled

    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt", "held.txt", "c.jsonl", "v.jsonl", "t.jsonl", "w.jsonl"):
        (tmp_path / name).touch()
    for name in ("smol", "qwen"):
        (tmp_path / name).mkdir()
    line = "sweep all --scale paper --out s --text a.txt b.txt --text-held-out held.txt --chat c.jsonl"
    line += " --chat-held-out v.jsonl --tulu t.jsonl --tulu-held-out w.jsonl"
    line += " --base-model SmolLM2-1.7B=smol --base-model Qwen/Qwen3-1.7B=qwen"
    wanted = labelled(_parse(line.split()), {"device": "cuda:1", "telemetry_every": "7"})
    found = {(run.data, run.held_out, run.model) for run in wanted.runs.values() if "135M" not in run.model}
    assert found == {
        (("a.txt", "b.txt"), ("held.txt",), "gpt2"),
        (("c.jsonl",), ("v.jsonl",), "smol"),
        (("c.jsonl",), ("v.jsonl",), "qwen"),
        (("t.jsonl",), ("w.jsonl",), "qwen"),
        (("c.jsonl",), ("v.jsonl",), "google/gemma-3-1b-pt"),
    }
    assert {run.device for run in wanted.runs.values()} == {"cuda:1"} and not wanted.later
    for name, run in wanted.runs.items():
        assert run.telemetry_every == (7 if "_pace_" in name else None)


def test_runs_that_go_on_from_these_in_other_labels_are_known(tmp_path, monkeypatch):
    from paceline.cli import _parse
    from paceline.studies.sweep.labels import labelled

    wanted = labelled(_parse(["sweep", "135m_grid", "--scale", "gpu", "--out", "s"]), {})
    kept = {(name, step) for name, run in wanted.runs.items() for step in run.keep_steps}
    later = {tuple(run.fork.rsplit("@", 1)) for run in wanted.later.values()}
    assert kept and {(name, int(step)) for name, step in later} == kept
    assert not wanted.later.keys() & wanted.runs.keys()
