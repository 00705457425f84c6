"""`paceline sweep`, as a user calls it, on models that train in a second."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from killing import kill_at_random
from tiny import write_text

sys.path.insert(0, str(Path(__file__).parent))
from small_sweeps import FOUR, content, start, words

from paceline.cli import main
from paceline.lm.loop import Step
from paceline.runs.config import Run, mark_of
from paceline.runs.records import read
from paceline.runs.run import DivergedError, execute, is_finished

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("sweep")
        patch.setenv("PACELINE_CACHE", str(folder / "cache"))
        write_text(folder / "text.txt", paragraphs=120)
        yield folder


@pytest.fixture(scope="module")
def undisturbed(room):
    """Four cells, where they are, what they computed, and how long that took."""
    began = time.monotonic()
    assert main(words(room, room / "undisturbed", *FOUR)) == 0
    return room / "undisturbed", content(room / "undisturbed"), time.monotonic() - began


def results_of(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines()]


def begins(out):
    """How often each cell was begun."""
    return {
        path.parent.name: sum(line["kind"] == "begin" for line in read(path))
        for path in out.glob("cells/*/timing.jsonl")
    }


# --- What is written ----------------------------------------------------------------------------------


def test_a_line_a_cell_in_the_order_of_the_sweep(undisturbed):
    out, _, _ = undisturbed
    lines = results_of(out)
    assert [line["settings"] for line in lines] == [
        {"lr": lr, "seed": seed} for lr in (1e-3, 2e-3) for seed in (1, 2)
    ]
    assert len({line["losses"]["average"] for line in lines}) == 4
    for line in lines:
        assert list(line) == ["cell", "hash", "settings", "outcome", "step", "returned", "losses"]
        records = list(read(out / "cells" / line["cell"] / "records.jsonl"))
        assert records[0]["config"]["lr"] == line["settings"]["lr"]
        assert line["losses"] == records[-1]["losses"]["held-out"] and records[-1]["step"] == 40
        assert (line["outcome"], line["step"]) == ("finished", 40)
        assert line["cell"].endswith(f"-{line['hash']}")
    timing = [json.loads(line) for line in (out / "timing.jsonl").read_text().splitlines()]
    assert [line["cell"] for line in timing] == [line["cell"] for line in lines]
    assert all(line["seconds"] > 0 for line in timing)
    assert not list(out.glob("cells/*/checkpoints"))


def test_the_same_command_again_runs_nothing(room, undisturbed, capsys):
    out, before, _ = undisturbed
    assert main(words(room, out, *FOUR)) == 0
    assert content(out) == before and set(begins(out).values()) == {1}
    said = capsys.readouterr().out
    assert "4 of 4 runs done" in said
    rows = said[said.index("Best first") :].splitlines()
    assert rows[1].split() == ["lr", "loss", "±", "weights", "live", "seeds", "ended"]
    losses = [float(row.split()[1]) for row in rows[2:4]]
    assert losses == sorted(losses) and {row.split()[0] for row in rows[2:4]} == {"0.001", "0.002"}


def test_a_wider_sweep_reuses_the_cells_that_are_there(room, undisturbed, tmp_path):
    out = shutil.copytree(undisturbed[0], tmp_path / "s")
    more = ["--grid", "lr", "1e-3", "2e-3", "4e-3", "--seeds", "1", "--evaluate-every", "20"]
    assert main(words(room, out, *more)) == 0
    assert [line["settings"] for line in results_of(out)] == [{"lr": lr} for lr in (1e-3, 2e-3, 4e-3)]
    assert len(begins(out)) == 5 and set(begins(out).values()) == {1}


def test_cells_of_a_file_end_in_any_order_and_are_written_in_theirs(room, tmp_path):
    """The first is the longest."""
    path = tmp_path / "sweep.toml"
    path.write_text(
        '[[cells]]\nsteps = 60\n[[cells]]\nsteps = 3\noptimizer = "push:strength=0.7,power=0.5"\n'
    )
    line = words(room, tmp_path / "s", "--config", path, "--jobs", 2, "--keep-models")
    at = line.index("--steps")
    del line[at : at + 2]
    assert main(line) == 0
    found = [
        (r["settings"]["steps"], r["step"], r["settings"]["optimizer"]) for r in results_of(tmp_path / "s")
    ]
    assert found == [(60, 60, "pace"), (3, 3, "push:strength=0.7,power=0.5")]
    run = tmp_path / "s" / "cells" / results_of(tmp_path / "s")[1]["cell"]
    assert main(["export", str(run), str(tmp_path / "model"), "--weights", "average"]) == 0


# --- What goes wrong ----------------------------------------------------------------------------------


def test_a_cell_that_fails_does_not_stop_the_others_and_is_tried_again(room, undisturbed, tmp_path, capsys):
    """Its folder holds something that is in the way."""
    whole, expected, _ = undisturbed
    out = shutil.copytree(whole, tmp_path / "s")
    first, second = (out / "cells" / line["cell"] for line in results_of(out)[:2])
    shutil.rmtree(first)
    first.write_text("in the way")
    shutil.rmtree(second)
    (out / "results.jsonl").unlink()
    assert main(words(room, out, *FOUR)) == 1
    said = capsys.readouterr()
    assert f"paceline: {first.name}: " in said.err and "File exists" in said.err
    assert is_finished(second)
    lines = results_of(out)
    assert [line["outcome"] for line in lines] == ["failed", "finished", "finished", "finished"]
    assert lines[0]["losses"] == {} and lines[0]["step"] is None and "File" not in json.dumps(lines)
    first.unlink()
    assert main(words(room, out, *FOUR)) == 0
    assert content(out) == expected


def test_cells_that_diverge_are_ended_and_recorded(room, tmp_path, capsys):
    grid = ["--grid", "lr", "1e-3", "1", "1e30", "--optimizer", "adamw"]
    more = ["--clip-norm", "none", "--stop-diverged", "2"]
    for _ in range(2):
        assert main(words(room, tmp_path / "s", *grid, *more)) == 0
        good, bad, worst = results_of(tmp_path / "s")
        assert (good["outcome"], good["step"]) == ("finished", 40)
        assert bad["outcome"] == worst["outcome"] == "diverged" and bad["losses"] == worst["losses"] == {}
        assert 20 < bad["step"] < 40 and worst["step"] < 5
        assert "1 diverged" in capsys.readouterr().out
    why = [json.loads(line)["text"] for line in (tmp_path / "s" / "timing.jsonl").read_text().splitlines()]
    assert "more than 2 above that of the first step" in why[1] and "loss nan" in why[2]
    assert set(begins(tmp_path / "s").values()) == {1}
    assert main(words(room, tmp_path / "t", "--lr", 1, "--optimizer", "adamw", "--stop-diverged", "off")) == 0
    (line,) = results_of(tmp_path / "t")
    assert (line["outcome"], line["step"]) == ("finished", 40)


class Rising:
    """Ends a run at the step after thirty losses: it has to be told of all of them."""

    def __init__(self):
        self.losses = []

    def take(self, step, steps, loss):
        self.losses.append((step, loss))
        return "enough" if len(self.losses) == 30 else None


def test_what_watches_a_run_knows_all_losses_after_a_kill(room, tmp_path):
    run = Run(
        model="gpt:0.3m",
        data=(str(room / "text.txt"),),
        tokenizer="bpe:300",
        length=16,
        batch_size=2,
        steps=40,
    )
    ends = []
    for name, cuts in (("whole", []), ("cut", [7, 18])):
        for cut in [*cuts, None]:
            watch = Rising()
            events = execute(run, tmp_path / name, lambda text: None, watch)
            try:
                for event in events:
                    if isinstance(event, Step) and event.step == cut:
                        break
                events.close()
            except DivergedError as error:
                assert str(error) == "enough"
        ends.append((watch.losses, list(read(tmp_path / name / "timing.jsonl"))[-1]["step"]))
    assert ends[0] == ends[1] and ends[0][1] == 30 and len(ends[0][0]) == 30
    whole, cut = ((tmp_path / name / "records.jsonl").read_bytes() for name in ("whole", "cut"))
    assert whole == cut


def test_a_folder_that_cannot_be_written_is_said(room, capsys):
    assert main(words(room, "/proc/nothing", *FOUR)) == 2
    assert "cannot write to /proc/nothing" in capsys.readouterr().err


# --- Stopped and killed -------------------------------------------------------------------------------


def check_whole(out, expected):
    assert content(out) == expected
    for timing in out.glob("cells/*/timing.jsonl"):
        kinds = [line["kind"] for line in read(timing)]
        assert kinds.count("end") == 1 and kinds[-1] == "end", timing  # finished cells are not repeated
    assert not list(out.glob("cells/*/checkpoints")) and not list(out.glob("cells/*/.tmp-*"))


@pytest.mark.long
def test_killed_at_random_moments_it_ends_in_the_same_results(room, undisturbed, tmp_path):
    def begin(out):
        process = start(words(room, out, *FOUR))
        while process.poll() is None and not (out / "claims").exists():
            time.sleep(0.02)
        return process

    _, expected, whole = undisturbed
    kill_at_random(
        begin, lambda out: check_whole(out, expected), tmp_path, at_most=4, seconds=(0.0, 0.7 * whole)
    )


@pytest.mark.long
def test_a_signal_stops_and_saves_all_cells(room, undisturbed, tmp_path):
    _, expected, _ = undisturbed
    out = tmp_path / "s"
    process = start(words(room, out, *FOUR))
    while process.poll() is None and not list(out.glob("cells/*/records.jsonl")):
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, said
    assert "the same command goes on" in said and "Traceback" not in said
    assert [line["outcome"] for line in results_of(out)] == ["finished"] * len(results_of(out))
    assert main(words(room, out, *FOUR)) == 0
    check_whole(out, expected)


# --- Two machines -------------------------------------------------------------------------------------


def holders(out):
    """By cell, the hosts that have claimed it, one after the other."""
    return {
        folder.name: [json.loads(path.read_text())["host"] for path in sorted(folder.iterdir())]
        for folder in (out / "claims").iterdir()
    }


@pytest.mark.long  # test_branches.py asks of a shared folder, every day
def test_two_machines_share_a_sweep(room, undisturbed, tmp_path):
    _, expected, _ = undisturbed
    line = words(room, tmp_path / "s", *FOUR, "--jobs", 1)
    processes = [start(line, PACELINE_HOST=host) for host in ("left", "right")]
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    check_whole(tmp_path / "s", expected)
    assert set(begins(tmp_path / "s").values()) == {1}
    by_whom = list(holders(tmp_path / "s").values())
    assert sorted(map(len, by_whom)) == [1] * 4 and {host for (host,) in by_whom} == {"left", "right"}
    assert any("done by left" in text or "done by right" in text for text in said)
    assert all("4 of 4 runs done" in text for text in said)


@pytest.mark.long
def test_cells_of_a_machine_that_is_gone_are_taken_over(room, undisturbed, tmp_path):
    _, expected, _ = undisturbed
    out = tmp_path / "s"
    line = words(room, out, *FOUR, "--jobs", 1, "--heart-seconds", 3)
    gone = start(line, PACELINE_HOST="gone")
    while gone.poll() is None and not list(out.glob("cells/*/checkpoints/step-*")):
        time.sleep(0.01)
    os.killpg(gone.pid, signal.SIGSTOP)  # its heart stops, and it holds its cell
    (held,) = [cell for cell, hosts in holders(out).items() if not is_finished(out / "cells" / cell)]
    os.killpg(gone.pid, signal.SIGKILL)
    gone.communicate()
    stays = start(line, PACELINE_HOST="stays")
    said, _ = stays.communicate(timeout=300)
    assert stays.returncode == 0, said
    assert "done by gone" in said
    check_whole(out, expected)
    assert holders(out)[held] == ["gone", "stays"] and begins(out)[held] == 2


def test_marks_of_results_are_those_of_their_settings(undisturbed):
    out, _, _ = undisturbed
    for line in results_of(out):
        settings = next(read(out / "cells" / line["cell"] / "records.jsonl"))["config"]
        made = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
        assert mark_of(Run(**made)) == line["hash"]
