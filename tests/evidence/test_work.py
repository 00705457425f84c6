"""The command, as it is called on a machine with a GPU, on a small one."""

import json
from dataclasses import replace

import pytest
from tiny import write_text

from paceline.experiments.evidence import claims, work
from paceline.experiments.evidence.__main__ import main
from paceline.experiments.evidence.studies import CPU, GPU, PLAIN, batch, fine_tuning, gpt2, trial
from paceline.experiments.evidence.work import fitting
from paceline.experiments.paper.lines import read


@pytest.mark.slow
def test_a_study_from_its_runs_to_its_table_and_what_records_have_is_not_done_again(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    text = str(write_text(tmp_path / "text.txt", paragraphs=300))
    words = ["gpt2", "--room", "cpu", "--text", text, "--jobs", "2"]
    kept, more = tmp_path / "kept.jsonl", tmp_path / "more.jsonl"
    assert main([*words, "--out", str(tmp_path / "runs"), "--keep", str(kept)]) == 0
    lines = {line["name"]: line for line in map(json.loads, kept.read_text().splitlines())}
    assert lines.keys() == {one.name for one in gpt2(CPU)}
    assert not list((tmp_path / "runs").glob("cells/*_s2/checkpoints/*")), (
        "nothing goes on from them any more"
    )

    # Another day: a branch and a run are missing, and the branch needs the run that it goes on from.
    branch, alone = (
        "gpt2_adamw-b0.9-0.999-w0.01_lr0.002_wsd_20_s2",
        "gpt2_pace-b0.9-0.999-w0.01_lr0.002_constant_20_s1",
    )
    kept.write_text(
        "".join(json.dumps(line) + "\n" for name, line in lines.items() if name not in (branch, alone))
    )
    capsys.readouterr()
    again = [*words, "--records", str(kept), "--out", str(tmp_path / "other"), "--keep", str(more)]
    assert main(again) == 0
    assert "gpt2: 3 of 9 runs to do" in capsys.readouterr().out
    done = {line["name"]: line for line in map(json.loads, more.read_text().splitlines())}
    assert done.keys() == {branch, alone}, "of the run that it goes on from there is a line"
    assert all(done[name]["evaluations"] == lines[name]["evaluations"] for name in done)

    tables = claims.tables(CPU, read([kept, more]))
    live = lines[branch]["evaluations"][-1][1]["live"]
    assert f"| AdamW, wsd | 2 | {live:.3f} |" in tables["gpt2"]() and tables["gpt2"]().count("\n| ") == 10
    assert "settings are chosen from runs of which 36 are not done" in tables["basin"]()


@pytest.mark.long
def test_a_run_whose_checkpoint_is_gone_is_done_again_for_its_branch(tmp_path, monkeypatch):
    """As where settings are tuned first, of models that are too large to keep a checkpoint of each."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    text = str(write_text(tmp_path / "text.txt", paragraphs=300))
    room = replace(CPU, gpt2={**CPU.gpt2, "data": (text,)})

    def study(*schedules):
        return lambda room, results: iter([trial("sft", room.gpt2, PLAIN, 1e-3, one) for one in schedules])

    monkeypatch.setitem(work.STUDIES, "first", study("constant"))
    monkeypatch.setitem(work.STUDIES, "then", study("constant", "wsd"))
    runs, keep = tmp_path / "runs", tmp_path / "kept.jsonl"
    assert work.work(["first"], room, runs, [], keep, 1, print) == []
    first = keep.read_text()
    assert work.work(["first", "then"], room, runs, [], keep, 1, print) == []
    lines = keep.read_text()
    assert lines.startswith(first), "the line of the run is the one that settings were chosen by"
    assert [json.loads(line)["name"].split("_")[-3] for line in lines.splitlines()] == ["constant", "wsd"]


def test_an_unknown_study_is_said(capsys):
    with pytest.raises(SystemExit):
        main(["basins", "--out", "x", "--keep", "y"])
    assert "there is no study 'basins'" in capsys.readouterr().err


def test_no_more_runs_at_once_than_fit():
    """Eight of these did not: the largest batches of a 7M GPT, which were done eight at once and ran out."""
    h200 = 140 * 10**9
    large, small = ([one.run for one in batch(GPU) if one.batch == factor] for factor in (16, 4))
    assert fitting(large, [h200]) == fitting([*large, *small], [h200]) == 5
    assert fitting(small, [h200]) > 8 and fitting(large, [h200, h200]) == 10
    assert fitting([one.run for one in fine_tuning(GPU)], [h200]) == 7
    assert fitting(large, [10**9]) == 1
    assert fitting(large, []) is None
    assert fitting([one.run for one in gpt2(CPU)], [h200]) is None
