"""Cells that go on from others: when they begin, what becomes of them, and which checkpoints stay for them.

The engine here writes what a run leaves behind, and trains nothing; test_labels.py has real ones.
"""

import json
import shutil
import threading
import time

import pytest

from paceline.runs.config import Run
from paceline.runs.run import has_checkpoint, is_finished
from paceline.studies.pool import Ended
from paceline.studies.sweep import conduct
from paceline.studies.sweep.claims import Claims
from paceline.studies.sweep.conduct import Swept, cells_of, sweep

RUNS = {
    "whole": Run(steps=20, keep_steps=(8, 16)),
    "other": Run(steps=20, seed=3),
    "early": Run(steps=10, schedule="wsd", fork="whole@8"),
    "late": Run(steps=20, schedule="wsd", fork="whole@16"),
}


def leave(cell, outcome="finished", last=20):
    """What a run leaves behind: records, how it ended, and checkpoints."""
    if cell.after is not None:
        assert has_checkpoint(*cell.after), "begun without what it goes on from"
    cell.folder.mkdir(parents=True, exist_ok=True)
    for step in (*(step for step in cell.run.keep_steps if step < last), last):
        (cell.folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    about = {"kind": "run", "config": {}, "environment": {}, "data": {}, "steps": 20, "parameters": 1}
    about["returned"] = "live"
    losses = {"held-out": {"live": 2.0}}
    lines = [about, {"kind": "evaluation", "step": last, "losses": losses}]
    (cell.folder / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    timing = [{"kind": "begin", "time": 0.0}, {"kind": "end", "time": 1.0, "step": last, "outcome": outcome}]
    (cell.folder / "timing.jsonl").write_text("".join(json.dumps(line) + "\n" for line in timing))


class Engine:
    """One cell at a time; some of them fail, or diverge after a step."""

    def __init__(self, failing=(), diverging=()):
        self.failing, self.diverging, self.begun = failing, dict(diverging), []

    def __call__(self, orders):
        for cell in orders:
            if cell is None:
                time.sleep(0.01)
                yield None
                continue
            name = cell.folder.name
            self.begun.append(name)
            if name in self.failing:
                yield cell, Ended(how="failed", text="no room")
            elif name in self.diverging:
                leave(cell, "diverged", self.diverging[name])
                yield cell, Ended(how="diverged", text="too high")
            else:
                leave(cell)
                yield cell, Ended(how="finished")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(conduct, "LOOK_EVERY", 0.02)


def done(folder, engine, names=tuple(RUNS), later=(), **more):
    """The end of a sweep, with the lines of its cells by name, and what was told of each."""
    cells = cells_of({name: RUNS[name] for name in names}, folder, None)
    rest = cells_of({name: RUNS[name] for name in later}, folder, None)
    settings = {"heart_seconds": 60, "keep_models": False, "later": rest} | more
    ended, told = None, {}
    for event in sweep(cells, folder, engine, **settings):
        if isinstance(event, Swept):
            ended = event
        elif event is not None:
            told[event[0].folder.name] = event[1]
    return ended, {line.result["cell"]: line for line in ended.lines}, told


def steps_left(folder, name):
    return sorted(int(path.name[5:]) for path in (folder / "cells" / name / "checkpoints").glob("step-*"))


def test_a_branch_begins_after_the_end_of_its_run_whatever_the_order(tmp_path):
    engine = Engine()
    ended, lines, _ = done(tmp_path, engine, ("late", "early", "other", "whole"))
    assert engine.begun == ["other", "whole", "late", "early"]
    assert {line.result["outcome"] for line in ended.lines} == {"finished"} and list(lines) == [
        "late", "early", "other", "whole",
    ]  # fmt: skip
    assert not list(tmp_path.glob("cells/*/checkpoints"))


def test_a_branch_comes_before_runs_that_could_have_begun_earlier(tmp_path):
    engine = Engine()
    done(tmp_path, engine, ("whole", "late", "early", "other"))
    assert engine.begun == ["whole", "late", "early", "other"]


def test_each_checkpoint_stays_until_its_own_branches_are_done(tmp_path):
    seen = []

    class Watched(Engine):
        def __call__(self, orders):
            for told in super().__call__(orders):
                yield told
                if told is not None:  # the sweep has dealt with it
                    seen.append((told[0].folder.name, steps_left(tmp_path, "whole")))

    done(tmp_path, Watched())
    assert seen == [("whole", [8, 16]), ("other", [8, 16]), ("early", [16]), ("late", [])]


def test_checkpoints_stay_for_runs_that_are_done_later(tmp_path):
    done(tmp_path, Engine(), ("whole", "early"), later=("late",))
    assert steps_left(tmp_path, "whole") == [16]
    engine = Engine()
    done(tmp_path, engine, ("whole", "late"), later=("early",))
    assert engine.begun == ["late"] and steps_left(tmp_path, "whole") == []


def test_models_that_are_kept_are_all_kept(tmp_path):
    done(tmp_path, Engine(), keep_models=True)
    assert steps_left(tmp_path, "whole") == [8, 16, 20] and steps_left(tmp_path, "late") == [20]


def test_branches_of_a_run_that_failed_have_failed_because_of_it_and_are_tried_again(tmp_path):
    engine = Engine(failing=("whole",))
    ended, _, told = done(tmp_path, engine)
    assert engine.begun == ["whole", "other"]
    why = "whole, which it goes on from, failed: no room"
    assert ended.failed == ("whole: no room", f"early: {why}", f"late: {why}")
    assert (told["early"].how, told["early"].text) == ("failed", why)
    again = Engine()
    ended, _, _ = done(tmp_path, again)
    assert again.begun == ["whole", "early", "late"] and not ended.failed


def test_a_branch_that_fails_keeps_what_it_goes_on_from(tmp_path):
    ended, _, _ = done(tmp_path, Engine(failing=("late",)))
    assert ended.failed == ("late: no room",) and steps_left(tmp_path, "whole") == [16]
    ended, _, _ = done(tmp_path, Engine())
    assert not ended.failed and steps_left(tmp_path, "whole") == []


def test_a_run_that_diverged_takes_the_branches_after_that_with_it(tmp_path):
    """One before that is done: its rate goes down before it comes so far."""
    for _ in range(2):  # and the same command says the same
        engine = Engine(diverging={"whole": 12})
        ended, lines, told = done(tmp_path, engine)
        assert not ended.failed and is_finished(tmp_path / "cells" / "early")
        outcomes = {name: line.result["outcome"] for name, line in lines.items()}
        assert outcomes == {
            "whole": "diverged", "other": "finished", "early": "finished", "late": "diverged",
        }  # fmt: skip
        why = "not done: whole, which it goes on from after step 16, diverged after 12"
        assert lines["late"].timing["text"] == why == told["late"].text
        assert not (tmp_path / "cells" / "late").exists()
    assert engine.begun == []
    # Before that it did not diverge: without its checkpoint, the branch has nothing to go on from.
    shutil.rmtree(tmp_path / "cells" / "early")
    ended, lines, _ = done(tmp_path, engine)
    assert len(ended.failed) == 1 and "has no checkpoint of step 8 any more" in ended.failed[0]
    assert lines["early"].result["outcome"] == "failed"


def test_a_checkpoint_that_somebody_removed_is_missed_by_name(tmp_path):
    done(tmp_path, Engine(), ("whole", "other"))
    assert steps_left(tmp_path, "whole") == []
    ended, _, _ = done(tmp_path, Engine())
    assert len(ended.failed) == 2
    assert (
        "late: whole, which it goes on from, has no checkpoint of step 16 any more; move " in ended.failed[1]
    )


def test_a_branch_waits_for_a_run_of_another_machine(tmp_path):
    """That one ends in the middle, or fails."""
    for outcome in ("finished", "failed"):
        folder = tmp_path / outcome
        (whole,) = cells_of({"whole": RUNS["whole"]}, folder, None)
        engine = Engine()
        with Claims(folder / "claims", ["whole"], 60) as elsewhere:
            assert elsewhere.take("whole", elsewhere.state("whole")) is not None

            def end(outcome=outcome, whole=whole, elsewhere=elsewhere, engine=engine):
                while engine.begun != ["other"]:
                    time.sleep(0.01)
                time.sleep(0.2)  # ten looks, in which a branch could begin too early
                assert engine.begun == ["other"]
                if outcome == "finished":
                    leave(whole)
                elsewhere.let_go("whole", None if outcome == "finished" else "its disk is full")

            other = threading.Thread(target=end)
            other.start()
            ended, _, _ = done(folder, engine)
            other.join()
        if outcome == "finished":
            # Which of the two is first depends on what the sweep was looking at when the other run ended.
            assert engine.begun[0] == "other" and sorted(engine.begun[1:]) == ["early", "late"]
            assert not ended.failed
        else:
            assert engine.begun == ["other"]
            assert ended.failed[1] == "early: whole, which it goes on from, failed: its disk is full"
