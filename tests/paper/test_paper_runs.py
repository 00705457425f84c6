"""`paceline paper` with real runs at the smallest scale: done, listed, drawn; and its mistakes."""

import subprocess
import sys
from dataclasses import replace

import pytest
from tiny import write_chats, write_model, write_text

from paceline.cli import main, parse
from paceline.paper import labels
from paceline.paper.labels import FIGURES, runs_of
from paceline.paper.panels import differences, sheet, table_of
from paceline.paper.scales import CPU, located
from paceline.runs.run import execute
from paceline.studies.lines import Finished

RIVER = "fig:appendix_pretrain_river"
WHOLE = "gpt-0.3m_adamw_lr0.002_constant_20_s42"


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("paper")
        patch.setenv("PACELINE_CACHE", str(folder / "cache"))
        write_text(folder / "text.txt", paragraphs=120)
        yield folder


def words(room, *more):
    line = ["paper", "run", RIVER, "--scale", "cpu", "--out", str(room / "runs"), "--cpus-per-run", "1"]
    return [*line, "--text", str(room / "text.txt"), *map(str, more)]


@pytest.fixture(scope="module")
def done(room):
    """The nine runs of a figure, by name."""
    assert main(words(room, "--jobs", "2")) == 0
    return Finished.read([room / "runs" / "results.jsonl"])


@pytest.mark.slow
def test_the_runs_of_a_label_are_done_once_and_listed(room, done, capsys):
    assert done.keys() == {one.name for one in runs_of([RIVER], CPU)} and len(done) == 9
    # Of what this label continues nothing is left; the other run of PACE has a branch in another label.
    left = {path.parents[1].name for path in room.glob("runs/runs/*/checkpoints/step-*")}
    assert left == {"gpt-0.3m_pace_c0.002_k0.5_u1_lr0.002_constant_20_s42"}
    before = (room / "runs" / "results.jsonl").read_bytes()
    assert main(words(room, "--evaluate-every", 3, "--micro-batch-size", 1)) == 0  # no other runs
    said = capsys.readouterr().out
    assert (room / "runs" / "results.jsonl").read_bytes() == before
    assert f"figures: paceline paper draw {RIVER} --records {room / 'runs' / 'results.jsonl'}" in said
    assert main(["paper", "list", RIVER, "appendix_tulu_qwen", "--records", str(room / "runs")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1] == [RIVER, "9", "9", "0.0"]
    assert rows[2][:3] == ["fig:appendix_tulu_qwen", "26", "0"]
    assert " ".join(rows[3][:6]) == "each run once, scale cpu 35"


@pytest.mark.slow
def test_other_data_under_the_same_names_are_refused(room, done, capsys):
    write_text(room / "other.txt", paragraphs=130)
    line = words(room)
    line[line.index("--text") + 1] = str(room / "other.txt")
    assert main(line) == 2
    said = capsys.readouterr().err
    assert "holds a run with other settings (data: ['" in said and "or another --out" in said


@pytest.mark.slow
def test_a_figure_is_drawn_from_records_without_torch(room, done):
    records = str(room / "runs" / "results.jsonl")
    line = ["paper", "draw", "appendix_pretrain_river", "--records", records, "--out", str(room / "figures")]
    code = f"import sys; from paceline.cli import main; print(main({line!r}), 'torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    stem = str(room / "figures" / "appendix_pretrain_river-cpu")
    assert said.splitlines() == [f"{RIVER}: {stem}.pdf {stem}.png", "0 False"]
    # The printed numbers, by hand: where the branches ended.
    ends = [done[f"gpt-0.3m_adamw_lr0.002_wsd_{n}_s42"].evaluations[-1][1]["live"] for n in (10, 15, 20)]
    note = sheet(FIGURES[RIVER], CPU, done)[0].notes[0]
    assert note.endswith(f"3.721/3.597/3.530 in the paper, {'/'.join(f'{x:.3f}' for x in ends)} here")


@pytest.mark.slow
def test_a_branch_is_the_run_with_that_schedule_from_its_first_step(room, done):
    here = located(CPU, data={"text": (str(room / "text.txt"),)})
    one = next(
        x for x in runs_of([RIVER], here) if x.name == "gpt-0.3m_pace_c0.003_k0.5_u1_lr0.002_wsd_20_s42"
    )
    for _ in execute(replace(one.run, fork=None), room / "straight", lambda text: None):
        pass
    straight = Finished.of_folder(room / "straight")
    assert not differences(one.run, straight.config)
    # Drawn, a branch begins with the run that it continues.
    table, odd = table_of(FIGURES[RIVER].runs(CPU), CPU, done)
    (row,) = [row for row in table if row.name == one.name]
    assert row.curve() == straight.curve() and row.pull == straight.pull and not odd


@pytest.mark.slow
def test_an_ema_beside_adamw_is_pace_without_a_pull(room):
    """So c = 0 of the grids needs no run of its own, at any uf."""
    chat, model = write_chats(room / "chat.jsonl"), write_model(room / "tiny-chat-model")
    here = located(CPU, data={"chat": (str(chat),)}, models={"tiny-chat-model": str(model)})
    one = next(one for one in runs_of(["135m_grid"], here) if one.tags["method"] == "AdamW")
    _, _, settings = one.run.method.partition(":")
    alone = replace(one.run, method=f"pace+none:power=0.3,every=5,{settings}", averages=(), keep_steps=())
    for run, name in ((one.run, "beside"), (alone, "alone")):
        for _ in execute(run, room / name, lambda text: None):
            pass
    beside = Finished.of_folder(room / "beside")
    assert beside.curve("power_0_3_every_5") == Finished.of_folder(room / "alone").curve("average")
    assert beside.curve("power_0_3_every_5") != beside.curve("power_0_3")


# --- What is asked for ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("draw fig:nothing", "the paper has no label 'fig:nothing'"),
        ("draw pretrain --records nowhere", "there is no file or folder nowhere"),
        ("list --scale tiny", "invalid choice: 'tiny'"),
        ("run --scale cpu --out s", "LABEL is missing"),
        ("run pretrain --out s", "--scale is missing, as in paceline paper run fig:pretrain"),
        ("run pretrain --scale cpu", "--out is missing"),
        ("run pretrain --scale cpu --out s --lr 1", "unknown argument '--lr'"),
        ("run pretrain --scale cpu --out s --keep-steps 5", "unknown argument '--keep-steps'"),
        ("run pretrain --scale cpu --out s --text x.txt", "there is no file or folder 'x.txt'; say where"),
        ("run 135m_grid --scale cpu --out s", "'chat.jsonl'; say where the data are with --chat"),
        ("run 135m_grid --scale cpu --out s --chat .", "with --base-model tiny-chat-model=FOLDER"),
        ("run pretrain --scale gpu --out s --base-model gpt:7m=.", "scale gpu fine-tunes no 'gpt:7m'"),
        ("run pretrain --scale gpu --out s --base-model SmolLM2-135M=x", "write NAME=FOLDER"),
    ],
)  # fmt: skip
def test_mistakes_are_answered_before_anything_is_done(tmp_path, monkeypatch, capsys, line, said):
    monkeypatch.chdir(tmp_path)
    assert main(["paper", *line.split()]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1, error
    assert not list(tmp_path.iterdir())


def test_a_dry_run_lists_runs_that_labels_share_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pair = [RIVER, "appendix_pretrain_kappa_sweep"]
    assert main(["paper", "run", *pair, "--scale", "cpu", "--out", "s", "--dry-run"]) == 0
    rows = [row.split() for row in capsys.readouterr().out.splitlines()]
    names = [row[0] for row in rows if row[0].startswith("gpt-")]
    own = [{one.name for one in FIGURES[label].runs(CPU)} for label in (RIVER, f"fig:{pair[1]}")]
    assert len(names) == len(set(names)) and set(names) == own[0] | own[1] and own[0] & own[1]
    assert next(row for row in rows if "_adamw_" in row[0] and "_wsd_10_" in row[0])[1:3] == [
        f"{WHOLE}@8",
        "2",
    ]
    assert not (tmp_path / "s").exists()


def test_places_and_settings_of_the_user_reach_the_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt", "held.txt", "c.jsonl", "v.jsonl", "t.jsonl", "w.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "smol").mkdir()
    line = "paper run all --scale paper --out s --text a.txt b.txt --text-held-out held.txt --chat c.jsonl"
    line += " --chat-held-out v.jsonl --tulu t.jsonl --tulu-held-out w.jsonl --base-model SmolLM2-1.7B=smol"
    asked = {}
    monkeypatch.setattr(
        labels.sweep, "perform", lambda runs, options, **more: asked.update(runs=runs, **more)
    )
    options = parse([*line.split(), "--device", "cuda:1", "--telemetry-every", "7"])
    labels.do(labels.figures(["all"]), options, {"device": "cuda:1", "telemetry_every": "7"})
    runs = [one.run for one in asked["runs"]]
    assert {(run.data, run.held_out, run.model) for run in runs if "135M" not in run.model} == {
        (("a.txt", "b.txt"), ("held.txt",), "gpt2"),
        (("c.jsonl",), ("v.jsonl",), "smol"),
        (("c.jsonl",), ("v.jsonl",), "Qwen/Qwen3-1.7B"),
        (("t.jsonl",), ("w.jsonl",), "Qwen/Qwen3-1.7B"),
        (("c.jsonl",), ("v.jsonl",), "google/gemma-3-1b-pt"),
    }
    assert {run.device for run in runs} == {"cuda:1"} and not asked["later"]
    assert {run.telemetry_every for run in runs if "pace" in run.method} == {7}
    assert {run.telemetry_every for run in runs if "pace" not in run.method} == {None}
    # Of one label, runs of others that continue its runs are known, so that checkpoints stay.
    labels.do(labels.figures(["pretrain"]), options, {})
    kept = {(one.name, step) for one in asked["runs"] for step in one.run.keep_steps}
    own = {one.run.after for one in asked["runs"] if one.run.after}
    assert {one.run.after for one in asked["later"]} | own == kept and asked["later"]
