"""The paper's experiments at the smallest scale: real runs, their lines, every figure."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import write_chats, write_model, write_text

from paceline.cli import main
from paceline.paper.figures import figure, sheet
from paceline.paper.labels import EXPERIMENTS, cells, experiment
from paceline.paper.results import Book, at, differences
from paceline.paper.scales import CPU, located
from paceline.runs.run import execute
from paceline.studies import lines

# --- Some of the runs of every label --------------------------------------------------------------------


def some(label, others):
    """One cell of each kind of run, two here and there, all of a river; those that others have, first."""
    all_of = {cell.name: cell for cell in cells(label, HERE[0])}
    taken, kinds = [], {}
    for cell in sorted(all_of.values(), key=lambda cell: cell.name not in others):
        if cell.seed == 2024:  # two seeds will do
            continue
        kind = (cell.run.model, cell.method, cell.schedule, cell.steps, "seed" in label and cell.seed)
        most = 2 if cell.method == "PACE" and label in ("fig:135m_grid", "fig:clip_frac_body") else 1
        if "river" in label or len(kinds.setdefault(kind, [])) < most:
            kinds.setdefault(kind, []).append(cell)
            taken += [all_of[cell.run.after[0]]] if cell.run.after else []
            taken.append(cell)
    return {cell.name: cell for cell in taken}


HERE = []


@pytest.mark.long
def test_every_label_from_its_runs_to_its_figure(tmp_path, monkeypatch, capsys):
    """In one test, so that workers do not do the runs once each."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TQDM_DISABLE", "1")
    chat, model = write_chats(tmp_path / "chat.jsonl", count=60), write_model(tmp_path / "tiny-chat-model")
    text = write_text(
        tmp_path / "text.txt", paragraphs=300
    )  # in place of "python", which takes seconds to read
    models = {"tiny-chat-model": str(model)}
    HERE[:] = [located(CPU, text=(str(text),), chat=(str(chat),), models=models)]
    wanted = {}
    for label in reversed(EXPERIMENTS):
        wanted |= some(label, wanted)
    root = tmp_path / "runs"
    for name, cell in sorted(wanted.items(), key=lambda item: item[1].run.after is not None):
        for _ in execute(cell.run, root / name, lambda text: None):
            pass
    check_lines(root, tmp_path / "records.jsonl")
    labels = list(EXPERIMENTS)
    drawing = [start_drawing(tmp_path, labels[i::2]) for i in range(2)]
    check_branch(root, tmp_path)
    check_ema(root, tmp_path)
    check_figures(drawing, root, tmp_path)
    check_printed_numbers(root)
    check_odd_record(root, capsys, tmp_path)
    check_diverged(root)
    check_status(root, capsys, tmp_path)
    check_runs_of_a_label(root, capsys)


def check_lines(done, kept):
    """They are whole, and say nothing of this machine."""
    count = lines.write(lines.lines_in(done), kept)
    text = kept.read_text(encoding="utf-8")
    assert count == len(text.splitlines()) == len(list(done.iterdir()))
    assert str(done.parent) not in text and str(Path.home()) not in text
    read, again = lines.read([kept]), lines.read([done])
    assert read == again
    for name, result in read.items():
        assert result.outcome == "finished" and result.evaluations[-1][0] == result.config["steps"]
        assert all(math.isfinite(loss) for _, losses in result.evaluations for loss in losses.values())
        if "_wsd_" not in name:  # a branch may end before the pull is looked at
            assert bool(result.pull) == ("_pace_" in name)
        assert result.environment["torch"] and result.parameters > 1000 and result.seconds > 0


def check_branch(done, tmp_path):
    """A branch is the run with that schedule from its first step, to the bit."""
    # Of the whole budget: a shorter run would have a shorter warm-up.
    own = [c for c in cells("appendix_pretrain_river", HERE[0]) if c.run.after and c.method == "PACE"]
    branch = next(c for c in own if c.steps == 20)
    straight = replace(branch.run, fork=None)
    for _ in execute(straight, tmp_path / "straight", lambda text: None):
        pass
    whole, forked = lines.line_of(tmp_path / "straight"), lines.line_of(done / branch.name)
    assert [line for line in whole["evaluations"] if line[0] > branch.run.after[1]] == forked["evaluations"]
    # Drawn, a branch begins with the run that it left.
    book = Book.of(cells("appendix_pretrain_river", HERE[0]), lines.read([done]))
    (reading,) = [one for one in book.readings if one.cell.name == branch.name]
    assert book.curve(reading) == [(step, losses["average"]) for step, losses in whole["evaluations"]]


def check_ema(done, tmp_path):
    """An EMA beside AdamW is PACE without a pull: c = 0 of the grids needs no run of its own, at any uf."""
    cell = next(c for c in cells("135m_grid", HERE[0]) if c.method == "AdamW")
    own = "pace:control=none,power=0.3,every=5"
    run = replace(cell.run, optimizer=own + cell.run.optimizer.replace("adamw:", ","), averages=())
    for _ in execute(run, tmp_path / "zero", lambda text: None):
        pass
    ema = lines.line_of(done / cell.name)["evaluations"]
    zero = lines.line_of(tmp_path / "zero")["evaluations"]
    assert [(t, losses["power_0_3_every_5"]) for t, losses in ema] == [
        (t, said["average"]) for t, said in zero
    ]
    assert ema[-1][1]["power_0_3_every_5"] != ema[-1][1]["power_0_3"]


# --- Figures --------------------------------------------------------------------------------------------


def start_drawing(room, labels):
    """The command in a process of its own, which says at its end whether torch was imported."""
    words = ["figures", *labels, "--scale", "cpu", "--records", str(room / "records.jsonl")]
    code = (
        "import sys; from paceline.cli import main; "
        f"code = main({[*words, '--out', str(room / 'out')]!r}); print(code, 'torch' in sys.modules)"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def check_figures(drawing, done, room):
    """All of them are drawn from lines alone, without torch."""
    said = []
    for process in drawing:
        said += process.communicate(timeout=600)[0].splitlines()
        assert process.returncode == 0 and said[-1] == "0 False"
    results = lines.read([done])
    for label in EXPERIMENTS:
        stem = room / "out" / (label.removeprefix("fig:") + "-cpu")
        assert stem.with_name(stem.name + ".pdf").read_bytes().startswith(b"%PDF")
        assert stem.with_name(stem.name + ".png").read_bytes().startswith(b"\x89PNG")
        (line,) = [line for line in said if line.startswith(f"{label}:")]
        count = len({cell.name for cell in cells(label, CPU)})
        assert f" of {count} runs" in line and not line.startswith(f"{label}: 0 of")
        made = sheet(experiment(label), CPU, Book.of(cells(label, CPU), results))
        assert "scale cpu, not the paper's" in made.subtitle
        points = [y for row in made.rows for plot in row for line in plot.lines for y in line.y]
        assert any(y is not None for y in points), f"nothing is drawn in {label}"


def check_printed_numbers(done):
    results = lines.read([done])
    for label, expected in {
        "fig:appendix_pretrain_csweep": ["3.507 ± 0.006", "3.537 ± 0.004", "3.531"],
        "fig:appendix_pretrain_river": ["3.721/3.597/3.530", "≈3.707/3.595/3.534"],
        "fig:bema_sf": ["1.277/1.233/1.205; 1.153", "12 h and 10 h"],
        "fig:pretrain": ["3.531"],
    }.items():
        notes = sheet(experiment(label), CPU, Book.of(cells(label, CPU), results)).notes
        for number, note in zip(expected, notes, strict=False):
            assert f"{number} in the paper" in note
    # By hand: where the branches of the river ended.
    book = Book.of(cells("appendix_pretrain_river", CPU), results)
    ends = []
    for steps in (10, 15, 20):
        line = lines.line_of(done / f"gpt-0.3m_adamw_lr0.002_wsd_{steps}_s42")
        ends.append(f"{line['evaluations'][-1][1]['live']:.3f}")
    made = sheet(experiment("appendix_pretrain_river"), CPU, book)
    assert made.notes[0].endswith(f"3.721/3.597/3.530 in the paper, {'/'.join(ends)} here")


@pytest.mark.slow
def test_without_any_record_everything_is_missing(tmp_path):
    paths, _ = figure("fig:appendix_pretrain_river", CPU, {}, tmp_path)
    assert all(path.stat().st_size > 1000 for path in paths)
    for label in EXPERIMENTS:
        book = Book.of(cells(label, CPU), {})
        assert book.missing == book.names
        notes = sheet(experiment(label), CPU, book).notes
        assert notes[-1] == f"{len(book.names)} of {len(book.names)} runs are missing"
        assert all(note.endswith("missing here") for note in notes[:-1])


def check_odd_record(done, capsys, tmp_path):
    """A record of another run under the same name is left out, and that is said."""
    name = "gpt-0.3m_adamw_lr0.002_constant_20_s42"
    line = lines.line_of(done / name)
    assert not differences(next(c.run for c in cells("pretrain", CPU) if c.name == name), line["config"])
    line["config"]["batch_size"] = 99
    lines.write([line], tmp_path / "odd.jsonl")
    capsys.readouterr()
    words = ["figures", "appendix_pretrain_river", "--scale", "cpu", "--out", str(tmp_path)]
    assert main([*words, "--records", str(tmp_path / "odd.jsonl")]) == 0
    said = capsys.readouterr().out
    assert "0 of 9 runs" in said and f"{name}: batch_size: 99, not 4" in said


def check_diverged(done):
    results = lines.read([done])
    own = cells("appendix_pretrain_river", CPU)
    name = "gpt-0.3m_pace_c0.002_k0.5_u1_lr0.002_constant_20_s42"
    results[name] = replace(results[name], outcome="diverged")
    book = Book.of(own, results)
    pulled = book.where(method="PACE", schedule="constant")
    assert {book.loss(one) == math.inf for one in pulled if one.cell.name == name} == {True}
    best = book.best(pulled)
    assert best is not None and best.cell.name != name
    # Branches that were not begun because of that have diverged, too; one from before that is missing.
    whole = "gpt-0.3m_adamw_lr0.002_constant_20_s42"
    early = replace(results[whole], outcome="diverged", evaluations=results[whole].evaluations[:2])
    early = replace(early, train=tuple(point for point in early.train if point[0] <= 10))
    branches = {cell.name: cell.run.after[1] for cell in own if cell.run.after and cell.run.after[0] == whole}
    kept = {n: r for n, r in results.items() if n not in branches}
    book = Book.of(own, {**kept, whole: early})
    assert book.missing == {n for n, step in branches.items() if step == 8} and len(branches) == 3
    ended = [book.loss(one) for one in book.where(method="AdamW", schedule="wsd")]
    assert sorted(map(str, ended)) == ["None", "inf", "inf"]


# --- Commands -------------------------------------------------------------------------------------------


def check_status(done, capsys, tmp_path):
    capsys.readouterr()
    assert main(["paper", "--scale", "cpu", "--records", str(done)]) == 0
    said = capsys.readouterr().out
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    (sweep / "cells").symlink_to(done)
    assert main(["paper", "--scale", "cpu", "--records", str(sweep)]) == 0
    assert capsys.readouterr().out == said
    for label in EXPERIMENTS:
        (row,) = [line for line in said.splitlines() if line.startswith(label + " ")]
        book = Book.of(cells(label, CPU), lines.read([done]))
        assert row.split()[1:3] == [str(len(book.names)), str(len(book.names) - len(book.missing))]
    assert main(["paper", "--scale", "cpu"]) == 0
    empty = capsys.readouterr().out
    assert "PACE" not in empty  # no verdict without records
    kept = tmp_path / "kept.jsonl"
    assert main(["paper", "--scale", "cpu", "--records", str(done), "--keep", str(kept)]) == 0
    assert len(lines.read([kept])) == len(list(done.iterdir()))


def check_runs_of_a_label(done, capsys):
    capsys.readouterr()
    assert main(["paper", "appendix_pretrain_river", "--scale", "cpu", "--records", str(done)]) == 0
    said = capsys.readouterr().out
    assert "gpt-0.3m_adamw_lr0.002_constant_20_s42@16" in said and said.count("finished") == 9
    assert "9 runs, 0 missing" in said


@pytest.mark.parametrize(
    "words, said",
    [
        ("figures fig:nothing", "the paper has no label 'fig:nothing'"),
        ("figures fig:pretrain --records nowhere", "there is no file or folder nowhere"),
        ("paper --keep x", "--keep writes what is in --records; give it too"),
        ("paper --scale tiny", "invalid choice: 'tiny'"),
    ],
)
def test_mistakes(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    assert said in capsys.readouterr().err


def test_what_is_no_record_is_refused(tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text(json.dumps({"format": 7}) + "\n", encoding="utf-8")
    assert main(["figures", "pretrain", "--records", str(tmp_path / "x.jsonl")]) == 2
    assert "line 1 is no record of a run of the paper" in capsys.readouterr().err


def test_between_two_evaluations():
    curve = [(10.0, 4.0), (20.0, 3.0)]
    assert [at(curve, x) for x in (5, 10, 15, 20, 25)] == [None, 4.0, 3.5, 3.0, None]
