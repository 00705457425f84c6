"""Labels of the paper with real runs at the smallest scale: done, listed, drawn; and mistakes."""

import subprocess
import sys
from dataclasses import replace

import pytest
from tiny import write_chats, write_model, write_text

from paceline.cli import main
from paceline.paper import command, labels
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
    line = ["sweep", RIVER, "--scale", "cpu", "--out", str(room / "runs")]
    return [*line, "--place", f"text={room / 'text.txt'}", *map(str, more)]


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
    assert main(words(room, "--set", "evaluate_every=3", "micro_batch_size=1")) == 0  # no other runs
    said = capsys.readouterr().out
    assert (room / "runs" / "results.jsonl").read_bytes() == before
    assert f"figures: paceline report {RIVER} {room / 'runs' / 'results.jsonl'} --out figures" in said
    assert main(["sweep", "--list", "--out", str(room / "runs")]) == 0
    rows = {row[0]: row[1:] for row in map(str.split, capsys.readouterr().out.splitlines()) if row}
    assert rows[RIVER][:3] == ["9", "9", "0.0"] and rows["fig:appendix_tulu_qwen"][:2] == ["26", "0"]
    assert rows.keys() >= {*FIGURES, *labels.TABLES} and rows["all"][1] == "9"


@pytest.mark.slow
def test_other_data_under_the_same_names_are_refused(room, done, capsys):
    write_text(room / "other.txt", paragraphs=130)
    line = words(room)
    line[-1] = f"text={room / 'other.txt'}"
    assert main(line) == 2
    said = capsys.readouterr().err
    assert "holds a run with other settings (data: ['" in said and "or another --out" in said


@pytest.mark.slow
def test_a_figure_is_drawn_from_records_without_torch(room, done):
    records = str(room / "runs" / "results.jsonl")
    line = ["report", RIVER, records, "--out", str(room / "figures")]
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
    here = located(CPU, {"text": [str(room / "text.txt")]})
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
    here = located(CPU, {"chat": [str(chat)], "tiny-chat-model": [str(model)]})
    one = next(one for one in runs_of(["fig:135m_grid"], here) if one.tags["method"] == "AdamW")
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
        ("report fig:pretrian runs", "no label 'fig:pretrian' (did you mean fig:pretrain?)"),
        ("report fig:pretrain .", "nothing is finished yet in .: it holds no records.jsonl"),
        (
            "report fig:pretrain",
            "runs are missing, as in paceline report fig:pretrain runs/gpu/results.jsonl",
        ),
        ("sweep --list --scale tiny", "invalid choice: 'tiny'"),
        ("sweep pretrain --scale cpu --out s", "no label 'pretrain' (did you mean fig:pretrain?)"),
        ("sweep fig:pretrain --out s", "--scale is missing, as in paceline sweep fig:pretrain --scale gpu"),
        ("sweep fig:pretrain --scale cpu", "--out FOLDER is needed"),
        ("sweep tab:models --scale cpu --out s", "tab:models has no runs: paceline report tab:models"),
        ("sweep fig:pretrain --scale cpu --out s --lr 1", "lr is what a label chooses itself; allowed: "),
        ("sweep fig:pretrain --scale cpu --out s --seeds 2", "seeds is what a label chooses itself"),
        ("sweep fig:pretrain --scale cpu --out s --set keep_steps=5", "keep_steps is what a label chooses"),
        ("sweep fig:pretrain --scale cpu --out s --place text=x.txt", "no file or folder 'x.txt'; say where"),
        (
            "sweep fig:135m_grid --scale cpu --out s",
            "'chat.jsonl'; say where yours is, as in --place chat=FILE",
        ),
        ("sweep fig:135m_grid --scale cpu --out s --place chat=.", "--place tiny-chat-model=FOLDER"),
        ("sweep fig:pretrain --scale gpu --out s --place gpt:7m=.", "scale gpu has no place 'gpt:7m'"),
    ],
)
def test_mistakes_are_answered_before_anything_is_done(tmp_path, monkeypatch, capsys, line, said):
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1, error
    assert not list(tmp_path.iterdir())


def test_a_dry_run_lists_runs_that_labels_share_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pair = [RIVER, "fig:appendix_pretrain_kappa_sweep"]
    place = ["--place", f"text={__file__}"]
    assert main(["sweep", *pair, "--scale", "cpu", "--out", "s", "--dry-run", *place]) == 0
    rows = [row.split() for row in capsys.readouterr().out.splitlines()]
    names = [row[0] for row in rows if row[0].startswith("gpt-")]
    own = [{one.name for one in FIGURES[label].runs(CPU)} for label in pair]
    assert len(names) == len(set(names)) and set(names) == own[0] | own[1] and own[0] & own[1]
    branch = next(row for row in rows if "_adamw_" in row[0] and "_wsd_10_" in row[0])
    assert branch[-3:-1] == [f"{WHOLE}@8", "2"]
    assert not (tmp_path / "s").exists()


def test_places_and_settings_of_the_user_reach_the_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt", "held.txt", "c.jsonl", "v.jsonl", "t.jsonl", "w.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "smol").mkdir()
    asked = {}

    def perform(runs, options, by, later):
        asked.update(runs=runs, later=later)
        return 0

    monkeypatch.setattr(command.sweep, "perform", perform)
    line = "sweep all --scale paper --out s --place text=a.txt text=b.txt text_held_out=held.txt chat=c.jsonl"
    line += " chat_held_out=v.jsonl tulu=t.jsonl tulu_held_out=w.jsonl SmolLM2-1.7B=smol"
    assert main([*line.split(), "--device", "cuda:1", "--set", "telemetry_every=7"]) == 0
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
    places = "text=a.txt text_held_out=held.txt"
    assert main(f"sweep fig:pretrain --scale paper --out s --place {places}".split()) == 0
    kept = {(one.name, step) for one in asked["runs"] for step in one.run.keep_steps}
    own = {one.run.after for one in asked["runs"] if one.run.after}
    assert {one.run.after for one in asked["later"]} | own == kept and asked["later"]
