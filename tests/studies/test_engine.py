"""The engine: order, branches, failures, checkpoints, processes, locks. Most runs here train nothing.

`Workers` write what a run leaves behind; test_sweep.py has real ones.
"""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
from tiny import write_text

from paceline.lm.files import BusyError, locked
from paceline.lm.loop import Step
from paceline.runs.config import ConfigError, Run
from paceline.runs.records import read
from paceline.runs.run import DivergedError, execute, has_checkpoint, is_finished
from paceline.studies.engine import Divergence, do, held
from paceline.studies.live import shown
from paceline.studies.pool import Ended, do_all
from paceline.studies.runs import Named

RUNS = {
    "whole": Run(steps=20, keep_steps=(8, 16)),
    "other": Run(steps=20, seed=3),
    "early": Run(steps=10, schedule="wsd", fork="whole@8"),
    "late": Run(steps=20, schedule="wsd", fork="whole@16"),
}


def named(*names):
    return [Named(name=name, run=RUNS[name]) for name in names]


class Workers:
    """One run at a time; some of them fail, are stopped once, or diverge after a step."""

    def __init__(self, folder, failing=(), stopped=(), diverging=()):
        self.folder, self.failing, self.stopped, self.diverging = folder, failing, {*stopped}, dict(diverging)
        self.begun, self.seen = [], []

    def __call__(self, target, orders):
        for one in orders:
            if one is None:
                continue
            self.begun.append(one.name)
            if one.name in self.failing:
                yield one, Ended(how="failed", text="no room")
            elif one.name in self.stopped:
                self.stopped.remove(one.name)
                yield one, Ended(how="stopped", text="stopped by SIGTERM")
            elif one.name in self.diverging:
                self.leave(one, "diverged", self.diverging[one.name])
                yield one, Ended(how="diverged", text="too high")
            else:
                self.leave(one)
                yield one, Ended(how="finished")
            self.seen.append((one.name, steps_left(self.folder, "whole")))

    def leave(self, one, outcome="finished", last=20):
        """Write what a run leaves behind: how it ended, and checkpoints."""
        if one.run.after is not None:
            assert has_checkpoint(self.folder / "runs" / one.run.after[0], one.run.after[1])
        folder = self.folder / "runs" / one.name
        for step in (*(step for step in one.run.keep_steps if step < last), last):
            (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        end = {"kind": "end", "time": 1.0, "step": last, "outcome": outcome}
        (folder / "timing.jsonl").write_text(json.dumps(end) + "\n")
        (folder / "records.jsonl").write_text("{}\n")


def done(workers, names=tuple(RUNS), later=(), **more):
    """Return how each run ended that was told of."""
    messages = do(named(*names), workers.folder, workers, later=named(*later), **more)
    return {message[0].name: message[1] for message in messages if message is not None}


def steps_left(folder, name):
    return sorted(int(path.name[5:]) for path in (folder / "runs" / name / "checkpoints").glob("step-*"))


# --- Runs that continue others ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "begun"),
    [
        (("late", "early", "other", "whole"), ["other", "whole", "late", "early"]),
        # What waited for a run that has ended comes before runs that could have begun earlier.
        (("whole", "late", "early", "other"), ["whole", "late", "early", "other"]),
    ],
)
def test_a_branch_begins_after_the_end_of_its_run_whatever_the_order(tmp_path, given, begun):
    workers = Workers(tmp_path)
    assert {ended.how for ended in done(workers, given).values()} == {"finished"}
    assert workers.begun == begun and not list(tmp_path.glob("runs/*/checkpoints"))
    assert done(again := Workers(tmp_path)) == {} and again.begun == []


def test_each_checkpoint_stays_until_its_own_branches_are_done(tmp_path):
    done(workers := Workers(tmp_path))
    assert workers.seen == [("whole", [8, 16]), ("other", [8, 16]), ("early", [16]), ("late", [])]


def test_checkpoints_stay_for_runs_that_are_done_later(tmp_path):
    done(Workers(tmp_path), ("whole", "early"), later=("late",))
    assert steps_left(tmp_path, "whole") == [16]
    done(workers := Workers(tmp_path), ("whole", "late"), later=("early",))
    assert workers.begun == ["late"] and steps_left(tmp_path, "whole") == []


def test_branches_of_a_run_that_failed_have_failed_because_of_it_and_are_tried_again(tmp_path):
    ended = done(workers := Workers(tmp_path, failing=("whole",)))
    assert workers.begun == ["whole", "other"]
    why = "whole, which it continues, failed: no room"
    assert {name: (e.how, e.text) for name, e in ended.items() if name != "other"} == {
        "whole": ("failed", "no room"),
        "early": ("failed", why),
        "late": ("failed", why),
    }
    # A branch that fails keeps what it continues.
    assert done(Workers(tmp_path, failing=("late",)))["late"].how == "failed"
    assert steps_left(tmp_path, "whole") == [16]
    done(workers := Workers(tmp_path))
    assert workers.begun == ["late"] and steps_left(tmp_path, "whole") == []


def test_a_run_that_diverged_takes_the_branches_after_that_with_it(tmp_path):
    """One before that is done: its rate goes down before it comes so far."""
    ended = done(Workers(tmp_path, diverging={"whole": 12}))
    assert is_finished(tmp_path / "runs" / "early") and not (tmp_path / "runs" / "late").exists()
    why = "not done: whole, which it continues after step 16, diverged after 12"
    assert (ended["late"].how, ended["late"].text) == ("diverged", why)
    again = done(workers := Workers(tmp_path))
    assert again == {"late": ended["late"]} and workers.begun == []
    # Before that it did not diverge: without its checkpoint, the branch has nothing to continue.
    shutil.rmtree(tmp_path / "runs" / "early")
    early = done(Workers(tmp_path))["early"]
    assert early.how == "failed" and "whole, which it continues, has no checkpoint of step 8" in early.text


def test_a_run_that_somebody_stopped_is_done_again_before_the_rest(tmp_path):
    ended = done(workers := Workers(tmp_path, stopped=("whole",)))
    assert workers.begun == ["whole", "whole", "other", "early", "late"]
    assert {one.how for one in ended.values()} == {"finished"}


# --- Giving up ----------------------------------------------------------------------------------------


def ended_at(losses, warmup):
    watch = Divergence(warmup=warmup)
    steps = len(losses)
    return next((i for i, loss in enumerate(losses, 1) if watch.take(i, steps, loss)), None)


@pytest.mark.parametrize(
    ("losses", "warmup", "step"),
    [
        ([5 - 0.01 * i for i in range(400)], 0, None),
        ([5.0] + [5.9] * 399, 0, None),  # within the margin
        # Smoothed, 7 takes seven steps from 5 to above 6; then a tenth of 400.
        ([5.0] * 100 + [7.0] * 300, 0, 146),
        ([5.0] * 100 + [1e30] * 300, 0, 146),  # as far as 2 above, it is cut off
        ([5.0] * 100 + [1e30] * 35 + [3.0] * 265, 0, None),  # it came back in time
        ([5.0] + [7.0] * 39, 0, 27),  # of short runs, twenty steps
        ([5.0, *([7.0, None] * 200)][:400], 0, 92),  # steps that were left out do not count
        ([5.0] + [7.0] * 399, 30, 70),
        ([5.0] + [7.0] * 399, 300, 80),  # the warm-up is a tenth of the run at most
    ],
)
def test_a_loss_far_above_the_first_one_for_a_tenth_of_the_run_is_given_up(losses, warmup, step):
    assert ended_at(losses, warmup) == step


class Rising:
    """Ends a run at the step after thirty losses: it has to learn all of them."""

    def __init__(self):
        self.losses = []

    def take(self, step, steps, loss):
        self.losses.append((step, loss))
        return "enough" if len(self.losses) == 30 else None


@pytest.mark.slow
def test_what_watches_a_run_knows_all_losses_after_a_kill(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    write_text(tmp_path / "text.txt", paragraphs=120)
    model = {"model": "gpt:0.3m", "tokenizer": "bpe:300", "length": 16, "batch_size": 2}
    run = Run(**model, data=(str(tmp_path / "text.txt"),), steps=40)
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


# --- Processes and folders ----------------------------------------------------------------------------


def seen_gpu(order, send):
    send("began")
    time.sleep(0.5)
    return order, os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.slow
def test_processes_take_orders_as_they_come_and_gpus_by_turns():
    def orders():
        yield 0
        yield 1
        for _ in range(3):
            yield None
        yield 2

    ended = {}
    for message in do_all(seen_gpu, orders(), 2, 1, ("5", "7")):
        if message is not None and message[1] != "began":
            ended[message[0]] = message[1].result
    assert ended[0] == (0, "5") and ended[1] == (1, "7") and ended[2][1] in ("5", "7")


HOLDER = """
import os, sys, time
from pathlib import Path
from paceline.lm.files import locked
with locked(Path(sys.argv[1])):
    if os.fork() == 0:  # as a worker of data that outlives its parent
        print(flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_folder_is_refused_while_another_process_holds_it_and_free_when_that_is_killed(tmp_path):
    arguments = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, start_new_session=True) as holder:
        holder.stdout.readline()
        said = f"process {holder.pid} on {os.uname().nodename} is at work in {tmp_path} since 20"
        with pytest.raises(BusyError, match=said), held(tmp_path):
            pass
        holder.kill()
        holder.wait()
        with held(tmp_path):
            assert (tmp_path / "lock").exists()
            with pytest.raises(BusyError), locked(tmp_path):
                pass
        assert not (tmp_path / "lock").exists()
        os.killpg(holder.pid, 9)


def test_what_is_refused_leaves_nothing_behind(tmp_path):
    with pytest.raises(ConfigError), held(tmp_path / "a" / "b"):
        raise ConfigError("no such method")
    assert not (tmp_path / "a" / "b").exists()
    with (
        pytest.raises(ConfigError, match="cannot write to /proc/nothing"),
        held(tmp_path.__class__("/proc/nothing")),
    ):
        pass


def test_a_run_that_had_been_evaluated_before_it_resumed_is_said_to_be_finished(capsys, tmp_path):
    """Its losses were shown by an earlier command."""
    one = Named(name="x", run=Run(steps=5), tags={"lr": 1e-3})
    assert list(shown([(one, Ended(how="finished"))], [one], tmp_path, ("lr",)))
    assert capsys.readouterr().out == "0 of 1 runs done\nlr 0.001: finished (1 of 1 runs done)\n"
