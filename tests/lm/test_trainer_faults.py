"""Trainers that are killed, starved and lied to: rows F2 to F15 of the reliability matrix.

Everything runs in processes of its own, with real signals and real files. What a trainer computes after a
fault must be what an undisturbed one computes, to the byte.
"""

import dataclasses
import errno
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import trials
from kills import die_inside_a_save, differences
from test_loop import PLAN, records_of, trainee_of
from tiny import RandomTokens, write_chats, write_model, write_text
from trials import (
    EVALUATION,
    EVERY,
    EXPORT,
    SAVE,
    STEP,
    Trial,
    after,
    before,
    command,
    fail,
    hurry,
    limit,
    send,
    words_of,
)

from paceline import PACE, Control
from paceline.cli import main
from paceline.lm import checkpoint
from paceline.lm.files import Damaged
from paceline.lm.loop import Step
from paceline.runs.config import Run
from paceline.runs.records import read

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("faults")
        patch.setenv("PACELINE_CACHE", str(folder / "cache"))
        patch.setenv("TQDM_DISABLE", "1")
        yield folder


@pytest.fixture(scope="module")
def runs(room):
    """A pretraining and a fine-tuning run of half a second, with dropout, accumulation and averages."""
    common = {
        "batch_size": 2,
        "micro_batch_size": 1,
        "steps": 6,
        "checkpoint_every": 2,
        "evaluate_every": 3,
        "held_out_samples": 2,
        "keep": 1,
        "warmup": 2,
        "device": "cpu",
    }
    text = str(write_text(room / "text.txt", paragraphs=120))
    pretrain = Run(
        data=(text,),
        model="gpt:0.3m",
        tokenizer="bpe:300",
        length=16,
        dropout=0.1,
        method="adamw+push:every=2",
        averages=("power:0.5",),
        telemetry_every=2,
        **common,
    )
    chats, model = str(write_chats(room / "chats.jsonl", count=40)), str(write_model(room / "model"))
    sft = Run(task="sft", data=(chats,), model=model, length=64, **common)
    return {"pretrain": pretrain, "sft": sft}


@pytest.fixture(scope="module")
def expected(room, runs):
    """Folders of undisturbed runs."""
    folders = {}
    for name, run in runs.items():
        folders[name] = room / f"undisturbed-{name}"
        trial = Trial(room / "said", command, words_of(run, folders[name]))
        assert trial.wait() == 0, trial.text()
    return folders


@pytest.fixture
def attempt(tmp_path, runs):
    """Start or go on with a run, the pretraining one if nothing is said, in the folder of this test."""

    def attempt(*faults, run=runs["pretrain"], folder=tmp_path / "run", wait=True):
        trial = Trial(tmp_path / "said", command, words_of(run, folder), *faults)
        if wait:
            trial.code = trial.wait()
            assert "Traceback" not in trial.text(), trial.text()
        return trial

    attempt.folder = tmp_path / "run"
    return attempt


def newest_of(folder):
    """The newest checkpoint, after a look at all that there are."""
    found, problems = checkpoint.newest(folder / "checkpoints")
    assert not problems
    return checkpoint.load_facts(found)["progress"]["step"]


def temporary_in(folder):
    return list((folder / "checkpoints").glob(".tmp-*"))


# --- F2: SIGKILL inside a save ----------------------------------------------------------------------


def test_half_a_tokenizer_of_a_killed_run_is_cleared_away(attempt):
    half = attempt.folder / ".tmp-0123"
    half.mkdir(parents=True)
    (half / "tokenizer.json").write_text("{")
    assert attempt().code == 0
    assert not list(attempt.folder.rglob(".tmp-*")) and (attempt.folder / "tokenizer").is_dir()


def test_a_kill_at_any_call_of_a_save_leaves_the_checkpoint_before_or_after(tmp_path):
    from paceline.lm.files import remove_temporary

    found = []
    for which in range(1, 200):
        folder = tmp_path / str(which)
        code = Trial(tmp_path / "said", trials.save_twice, folder, which).wait()
        assert len(temporary_in(folder)) <= 2
        remove_temporary(folder / "checkpoints")
        place, problems = checkpoint.newest(folder / "checkpoints")
        assert not problems
        saved = checkpoint.load(place)
        assert saved["live"]["w"][0].item() == saved["facts"]["value"]
        assert len(checkpoint.all_of(folder / "checkpoints")) <= 2
        found.append(saved["facts"]["value"])
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert found == sorted(found) and set(found) == {1.0, 2.0} and len(found) > 20


@pytest.mark.parametrize(("name", "points"), [("pretrain", range(2, 70, 20)), ("sft", range(4, 60, 30))])
def test_a_trainer_killed_inside_a_save_goes_on(attempt, expected, runs, tmp_path, name, points):
    killed = 0
    for which in points:
        folder = tmp_path / str(which)
        code = attempt(partial(die_inside_a_save, which), run=runs[name], folder=folder).code
        killed += code == -signal.SIGKILL
        assert len(temporary_in(folder)) <= 1
        assert attempt(run=runs[name], folder=folder).code == 0
        assert not differences(folder, expected[name])
    assert killed > len(points) // 2


def test_a_trainer_killed_after_its_last_save_leaves_no_old_checkpoint(attempt, expected):
    kill = partial(before, "paceline.lm.checkpoint:prune", (4,), send, signal.SIGKILL)  # 0, 2, 4, 6
    assert attempt(kill).code == -signal.SIGKILL
    assert [step for step, _ in checkpoint.all_of(attempt.folder / "checkpoints")] == [4, 6]
    assert attempt().code == 0
    assert not differences(attempt.folder, expected["pretrain"])


# --- F3: signals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "number"),
    [
        pytest.param((STEP, (3,)), signal.SIGTERM, id="step"),
        pytest.param((STEP, (3,)), signal.SIGINT, id="interrupt"),
        pytest.param((STEP, (3,)), signal.SIGUSR1, id="user"),
        # Of the average: other weights are in place.
        pytest.param((EVALUATION, (2,)), signal.SIGTERM, id="evaluation"),
        pytest.param((SAVE, (2,)), signal.SIGTERM, id="save"),
    ],
)
def test_a_signal_ends_a_run_that_goes_on_as_if_nothing_had_been(attempt, expected, place, number):
    first = attempt(partial(before, *place, send, number))
    assert first.code == 128 + number and f"stopped by {number.name}" in first.text()
    step = newest_of(attempt.folder)
    assert f"after step {step}, and saved" in first.text() and 2 <= step <= 3
    assert not temporary_in(attempt.folder)
    assert attempt().code == 0
    assert not differences(attempt.folder, expected["pretrain"])


def test_a_signal_in_fine_tuning(attempt, expected, runs):
    assert attempt(partial(before, STEP, (4,), send, signal.SIGTERM), run=runs["sft"]).code == 143
    assert attempt(run=runs["sft"]).code == 0
    assert not differences(attempt.folder, expected["sft"])


def test_a_second_signal_ends_it_at_once_and_harms_nothing(attempt, expected):
    """Sent a while after the first, inside the save that the first one asked for."""
    trial = attempt(
        partial(before, STEP, (3,), send, signal.SIGTERM),
        partial(before, SAVE, (5,), partial(send, pause=0.7), signal.SIGTERM, signal.SIGINT),
    )
    assert trial.code == 130 and "saved" not in trial.text()
    assert newest_of(attempt.folder) == 2 and len(temporary_in(attempt.folder)) == 1
    assert attempt().code == 0
    assert not differences(attempt.folder, expected["pretrain"])


def test_a_signal_that_comes_twice_at_once_is_one(attempt):
    """As the command `timeout` sends it: to the process, then to its group."""
    assert attempt(partial(before, STEP, (3,), send, signal.SIGTERM, signal.SIGTERM)).code == 143
    assert newest_of(attempt.folder) == 3


# --- F4: disks --------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, of some megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", place], capture_output=True
    ).returncode:
        pytest.skip("only root may mount a small disk")

    def change(options):
        subprocess.run(["mount", "-o", f"remount,{options}", place], check=True)

    yield SimpleNamespace(folder=place / "run", change=change)
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_ends_the_run_and_spares_its_checkpoints(small_disk, attempt, runs, room):
    run = dataclasses.replace(runs["pretrain"], keep=9, checkpoint_every=1)
    undisturbed = room / "undisturbed-keep"
    assert attempt(run=run, folder=undisturbed).code == 0
    trial = attempt(hurry, run=run, folder=small_disk.folder)
    assert trial.code == 1
    assert "No space left on device" in trial.text() and str(small_disk.folder) in trial.text()
    assert trial.text().count("trying again") == 2
    reached = newest_of(small_disk.folder)
    assert 1 <= reached < 6 and not temporary_in(small_disk.folder)
    small_disk.change("size=64m")
    assert attempt(run=run, folder=small_disk.folder).code == 0
    assert not differences(small_disk.folder, undisturbed)


def test_a_disk_that_cannot_be_written_to(small_disk, attempt, expected):
    small_disk.change("size=64m")
    assert attempt(partial(before, STEP, (3,), send, signal.SIGTERM), folder=small_disk.folder).code == 143
    small_disk.change("ro")
    trial = attempt(folder=small_disk.folder)
    assert (
        trial.code == 1 and "Read-only file system" in trial.text() and str(small_disk.folder) in trial.text()
    )
    small_disk.change("rw")
    assert attempt(folder=small_disk.folder).code == 0
    assert not differences(small_disk.folder, expected["pretrain"])


def test_a_limit_on_the_size_of_files(attempt, expected):
    """Just too small for one file after the other, the last byte of each included."""
    files = sorted((expected["pretrain"] / "checkpoints" / "step-00000006").iterdir(), key=os.path.getsize)
    sizes = [path.stat().st_size for path in files]
    for size in (size - 1 for size in sizes if size > 2000):  # what it says must fit
        trial = attempt(partial(limit, resource.RLIMIT_FSIZE, size), hurry)
        assert trial.code == 1 and str(attempt.folder) in trial.text()
        assert checkpoint.all_of(attempt.folder / "checkpoints") == []
    assert attempt(partial(limit, resource.RLIMIT_FSIZE, sizes[-1])).code == 0
    assert not differences(attempt.folder, expected["pretrain"])


CALLS = (
    "os:fsync",
    "os:replace",
    "paceline.lm.files:uuid.uuid4",
    "pathlib:Path.write_text",
    "pathlib:Path.chmod",
    SAVE,
)


@pytest.mark.parametrize("call", CALLS)
def test_a_disk_that_fails_once_is_tried_again(attempt, expected, call):
    """In the second save."""
    arm = partial(before, "paceline.lm.checkpoint:save", (2,), before, call, (1,), fail, errno.EIO)
    trial = attempt(arm, hurry)
    assert trial.code == 0 and trial.text().count("could not save: [Errno 5]") == 1
    assert not differences(attempt.folder, expected["pretrain"])


@pytest.mark.parametrize("call", ["os:replace", SAVE])
def test_a_disk_that_goes_on_failing_ends_the_run(attempt, expected, call):
    """As of a network file system that does not rename."""
    arm = partial(before, "paceline.lm.checkpoint:save", (2,), before, call, EVERY, fail, errno.EIO)
    trial = attempt(arm, hurry)
    assert trial.code == 1 and trial.text().count("trying again") == 2
    assert newest_of(attempt.folder) == 2
    assert attempt().code == 0
    assert not differences(attempt.folder, expected["pretrain"])


def test_an_old_checkpoint_that_cannot_be_removed_ends_nothing(attempt):
    trial = attempt(partial(before, "pathlib:Path.rename", (1,), fail, errno.EBUSY))
    assert trial.code == 0 and "could not remove an old checkpoint: [Errno 16]" in trial.text()


@pytest.mark.parametrize("size", [600, 5_000, 100_000])
def test_a_disk_that_is_full_ends_an_export_with_a_word_and_leaves_nothing(expected, tmp_path, size):
    words = ["export", str(expected["pretrain"]), str(tmp_path / "model")]
    full = partial(limit, resource.RLIMIT_FSIZE, size)
    trial = Trial(tmp_path / "said", command, words, partial(before, EXPORT, (1,), full))
    assert trial.wait() == 1 and not (tmp_path / "model").exists()
    assert len(trial.text().splitlines()) == 1 and f"File too large: '{tmp_path}/" in trial.text()
    assert list(tmp_path.iterdir()) == [tmp_path / "said"]


def test_what_a_killed_export_left_is_removed_by_the_next_and_nothing_else(expected, tmp_path):
    words = ["export", str(expected["pretrain"]), str(tmp_path / "model")]
    killed = partial(after, "paceline.lm.vocabulary:Vocabulary.save", (1,), trials.die)
    assert Trial(tmp_path / "said", command, words, killed).wait() == -signal.SIGKILL
    (left,) = tmp_path.glob(".tmp-*")
    others = [tmp_path / left.name.replace("model", name) for name in ("model-b", "mode")]
    for other in others:
        other.mkdir()
    trial = Trial(tmp_path / "said", command, words)
    assert trial.wait() == 0, trial.text()
    assert sorted(tmp_path.iterdir()) == sorted([*others, tmp_path / "model", tmp_path / "said"])


# --- F5: damage ---------------------------------------------------------------------------------------


@pytest.fixture
def damaged(expected, tmp_path):
    """A copy of a checkpoint, and all ways in which it is damaged: a name, the file, and what does it."""
    folder = shutil.copytree(
        expected["pretrain"] / "checkpoints" / "step-00000006", tmp_path / "checkpoints" / "step-00000006"
    )
    files = sorted(folder.iterdir())
    content = {path: path.read_bytes() for path in files}
    chance = random.Random(5)

    def ways(bits):
        for path in files:
            size = len(content[path])
            for cut in (0, 1, 8, size // 2, size - 1):
                yield f"{path.name} cut to {cut}", path, partial(path.write_bytes, content[path][:cut])
            yield f"{path.name} deleted", path, path.unlink
            yield f"{path.name} is a folder", path, lambda path=path: (path.unlink(), path.mkdir())
        for path, other in ((files[0], files[2]), (files[2], files[4]), (files[3], files[1])):
            yield f"{path.name} for {other.name}", path, partial(path.write_bytes, content[other])
        for _ in range(bits):
            path = chance.choices(files, [len(data) for data in content.values()])[0]
            data, bit = bytearray(content[path]), chance.randrange(8 * len(content[path]))
            data[bit // 8] ^= 1 << bit % 8
            yield f"bit {bit} of {path.name}", path, partial(path.write_bytes, bytes(data))

    def undetected(bits):
        missed = []
        for name, path, harm in ways(bits):
            harm()
            try:
                checkpoint.load(folder)
                missed.append(name)
            except Damaged as error:
                assert str(folder) in str(error)
            except OSError:  # of the twin, where nobody looks before
                assert path.is_dir() or not path.exists()
            if path.is_dir():
                path.rmdir()
            path.write_bytes(content[path])
        return missed

    return SimpleNamespace(folder=folder, undetected=undetected)


def test_every_damage_is_found(damaged):
    assert damaged.undetected(bits=60) == []
    checkpoint.load(damaged.folder)


def test_without_its_manifest_damage_would_not_be_found(damaged, monkeypatch):
    """The twin that must fail."""
    monkeypatch.setattr(checkpoint, "check", lambda folder: {})
    assert len(damaged.undetected(bits=20)) > 15


def test_a_damaged_newest_checkpoint_is_passed_over_and_named(attempt, expected, runs):
    run = dataclasses.replace(runs["pretrain"], keep=2)
    stopped = partial(before, STEP, (5,), send, signal.SIGTERM)
    assert attempt(stopped, run=run).code == 143
    newest = attempt.folder / "checkpoints" / "step-00000005"
    data = bytearray((newest / "live.safetensors").read_bytes())
    data[-5] ^= 1
    (newest / "live.safetensors").write_bytes(data)
    for words in (["eval", str(newest)], ["eval", str(attempt.folder)], ["export", str(newest), "x"]):
        trial = Trial(attempt.folder.parent / "said", command, words)
        assert trial.wait() == 1 and "/live.safetensors is not what" in trial.text()
    trial = attempt(run=run)
    assert trial.code == 0 and f"{newest} is damaged" in trial.text() and "an earlier one" in trial.text()
    final = "checkpoints/step-00000006/live.safetensors"
    assert (attempt.folder / final).read_bytes() == (expected["pretrain"] / final).read_bytes()


def test_a_damaged_checkpoint_does_not_count_among_those_to_keep(attempt, runs):
    """With keep = 1, what is saved before the damaged one's step must not be removed for it."""
    root = attempt.folder / "checkpoints"
    two = dataclasses.replace(runs["pretrain"], keep=2, evaluate_every=99)
    assert attempt(partial(before, STEP, (4,), send, signal.SIGTERM), run=two).code == 143
    (root / "step-00000004" / "state.json").write_text("{}")
    one = dataclasses.replace(two, keep=1)
    assert attempt(partial(before, STEP, (1,), send, signal.SIGTERM), run=one).code == 143
    assert [step for step, _ in checkpoint.all_of(root)] == [3, 4]
    assert attempt(run=one).code == 0
    assert [step for step, _ in checkpoint.all_of(root)] == [6]


def test_if_no_checkpoint_is_whole_the_run_does_not_begin_anew_by_itself(attempt):
    assert attempt(partial(before, STEP, (3,), send, signal.SIGTERM)).code == 143
    (only,) = (attempt.folder / "checkpoints").iterdir()
    (only / "manifest.json").write_text('{"format": 1}')
    records = (attempt.folder / "records.jsonl").read_bytes()
    trial = attempt()
    assert trial.code == 1 and "format 1; allowed: 2" in trial.text() and "there is no other" in trial.text()
    assert (attempt.folder / "records.jsonl").read_bytes() == records


# --- F6: what is not finite -------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_ends_the_run_before_the_update(attempt, expected):
    trial = attempt(partial(after, STEP, (6,), trials.spoil))
    assert trial.code == 1
    assert "gradient norm nan at step 6, on samples " in trial.text() and "tokens.weight" in trial.text()
    assert newest_of(attempt.folder) == 4
    assert attempt().code == 0
    assert not differences(attempt.folder, expected["pretrain"])


def test_a_loss_that_explodes_ends_the_run(attempt, runs):
    run = dataclasses.replace(runs["pretrain"], lr=1e30, clip_norm=None)
    trial = attempt(run=run)
    assert trial.code == 1 and "paceline: loss nan" in trial.text() and "at step 2" in trial.text()


def test_steps_left_out_change_nothing_and_are_counted(attempt, runs):
    run = dataclasses.replace(
        runs["pretrain"], skip_nonfinite=2, checkpoint_every=1, keep=9, schedule="inverse_sqrt"
    )
    trial = attempt(*(partial(after, STEP, (at,), trials.spoil) for at in (1, 3, 4)), run=run)
    assert trial.code == 0 and "Warning" not in trial.text()
    steps = [record for record in read(attempt.folder / "records.jsonl") if record["kind"] == "step"]
    assert [step["skipped"] for step in steps] == [True, False, True, True, False, False]
    states = [checkpoint.load(attempt.folder / "checkpoints" / f"step-{step:08d}") for step in range(1, 7)]
    assert [state["facts"]["progress"]["skips"] for state in states] == [1, 0, 1, 2, 0, 0]
    for step in (3, 4):
        for part in ("live", "optimizer"):
            name = f"checkpoints/step-{step:08d}/{part}.safetensors"
            before_it = f"checkpoints/step-{step - 1:08d}/{part}.safetensors"
            assert (attempt.folder / name).read_bytes() == (attempt.folder / before_it).read_bytes()


def test_readings_of_the_control_are_the_same_after_a_kill_and_left_out_with_their_step(
    attempt, runs, tmp_path
):
    """Interrupted or not; the second step is left out, and with it its reading."""
    run = dataclasses.replace(runs["pretrain"], skip_nonfinite=1, steps=9, averages=(), method="adamw+push")
    spoiled = partial(after, STEP, (2,), trials.spoil)
    assert attempt(spoiled, run=run, folder=tmp_path / "whole").code == 0
    assert attempt(spoiled, partial(before, STEP, (5,), send, signal.SIGTERM), run=run).code == 143
    assert attempt(partial(before, STEP, (2,), send, signal.SIGTERM), run=run).code == 143
    assert attempt(run=run).code == 0
    assert not differences(attempt.folder, tmp_path / "whole")
    told = read(attempt.folder / "records.jsonl")
    assert [record["step"] for record in told if record["kind"] == "telemetry"] == [4, 6, 8]


def test_too_many_steps_left_out_end_the_run(attempt, runs):
    run = dataclasses.replace(runs["pretrain"], skip_nonfinite=2)
    trial = attempt(partial(after, STEP, EVERY, trials.spoil), run=run)
    assert trial.code == 1 and "at step 3, after 2 skipped in a row" in trial.text()


def test_weights_that_are_not_finite_are_never_saved(attempt, expected):
    """An update can overflow although loss and gradient were finite."""
    trial = attempt(partial(after, "paceline.lm.loop:_take_step", (4,), trials.ruin))
    assert trial.code == 1
    assert "tokens.weight has values that are not finite at step 4; nothing was saved" in trial.text()
    assert newest_of(attempt.folder) == 2
    assert attempt().code == 0
    assert not differences(attempt.folder, expected["pretrain"])


def test_a_batch_without_targets_is_a_step_without_gradient():
    trainee = trainee_of(samples=RandomTokens(40, masked=1.0))
    steps = [record for record in records_of(trainee) if isinstance(record, Step)]
    assert all(step.loss == step.grad_norm == step.targets == 0 for step in steps)


# --- F7: data ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shards(room):
    write_text(room / "text.txt", paragraphs=120)
    words = ["data", str(room / "shards"), "--data", str(room / "text.txt"), "--tokenizer", "bpe:300"]
    trial = Trial(room / "said", command, words)
    assert trial.wait() == 0, trial.text()
    return room / "shards"


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["manifest.json", "tokens-00000.bin"])
def test_damaged_shards_of_the_user_are_refused(attempt, runs, shards, tmp_path, name):
    folder = shutil.copytree(shards, tmp_path / "shards")
    flip(folder / "train" / name)
    trial = attempt(run=dataclasses.replace(runs["pretrain"], data=(str(folder),), tokenizer="auto"))
    assert trial.code == 1 and f"{folder / 'train' / name}" in trial.text(), trial.text()


@pytest.mark.parametrize(
    ("task", "names"),
    [
        ("pretrain", ["tokens/*/tokens-00000.bin", "tokens/*/manifest.json", "tokenizers/*/tokenizer.json"]),
        ("sft", ["chats/*/samples.bin"]),
    ],
)
def test_a_damaged_cache_is_named_and_made_again(
    attempt, expected, runs, room, tmp_path, monkeypatch, task, names
):
    cache = shutil.copytree(room / "cache", tmp_path / "cache")
    monkeypatch.setenv("PACELINE_CACHE", str(cache))
    harmed = [path for name in names for path in cache.glob(name)]
    for path in harmed:
        flip(path)
    trial = attempt(run=runs[task])
    assert trial.code == 0 and trial.text().count("it is prepared again") >= len(names), trial.text()
    assert not differences(attempt.folder, expected[task])
    again = attempt(run=runs[task], folder=tmp_path / "again")
    assert again.code == 0 and "prepared again" not in again.text()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"text": "fine"}\n{"text": 5}\n', "a.jsonl, line 2: field 'text' must be text"),
        ("a.jsonl", '{"text": "fine"}\n{"text"\n', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", '{"text": ""}\n' * 3, "no documents but blank ones in .*a.jsonl"),
        ("a.txt", "", "a.txt is empty"),
        ("a.txt", "\udcff", "a.txt, line 1: not UTF-8"),
        ("a.txt", "few words", "too few|nothing that occurs twice"),
    ],
)
def test_damaged_documents_are_named(attempt, runs, tmp_path, name, content, words):
    (tmp_path / name).write_text(content, encoding="utf-8", errors="surrogateescape")
    trial = attempt(run=dataclasses.replace(runs["pretrain"], data=(str(tmp_path / name),)))
    assert trial.code in (1, 2) and re.search(words, trial.text()), trial.text()


# --- F9: other settings -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def begun(room, runs):
    """A run of which half is done."""
    half = partial(before, STEP, (3,), send, signal.SIGTERM)
    assert Trial(room / "said", command, words_of(runs["pretrain"], room / "begun"), half).wait() == 143
    return room / "begun"


@pytest.mark.parametrize(
    "change",
    [
        {"model": "gpt:1m"},
        {"method": "adamw", "telemetry_every": None},
        {"method": "adamw+push:every=3"},
        {"lr": 2e-3},
        {"steps": 8},
        {"batch_size": 4},
        {"micro_batch_size": 2},
        {"length": 32},
        {"seed": 1},
        {"dropout": 0.0},
        {"schedule": "cosine"},
        {"averages": ()},
        {"clip_norm": None},
        {"held_out_samples": 3},
    ],
)
def test_a_changed_setting_is_refused_and_named(begun, runs, capsys, change):
    before_it = {path: path.read_bytes() for path in begun.rglob("*") if path.is_file()}
    before_it.pop(begun / "lock", None)
    assert main(words_of(dataclasses.replace(runs["pretrain"], **change), begun)) == 2
    name = next(iter(change))
    said = capsys.readouterr().err
    old, new = getattr(runs["pretrain"], name), change[name]
    old, new = (list(value) if isinstance(value, tuple) else value for value in (old, new))
    assert f"{name}: {old!r} → {new!r}" in said and len(said.splitlines()) == 1
    assert before_it == {p: p.read_bytes() for p in begun.rglob("*") if p.is_file() and p.name != "lock"}


def test_data_of_the_same_name_and_other_content_are_refused(attempt, runs, tmp_path):
    text = write_text(tmp_path / "mine.txt", paragraphs=120)
    run = dataclasses.replace(runs["pretrain"], data=(str(text),))
    assert attempt(partial(before, STEP, (3,), send, signal.SIGTERM), run=run).code == 143
    write_text(text, paragraphs=130)
    trial = attempt(run=run)
    assert trial.code == 2 and "the data have changed since this run was begun" in trial.text()
    text.write_text(text.read_text().replace("a", "u"))  # the held-out part is another one, too
    trial = Trial(tmp_path / "said", command, ["eval", str(attempt.folder)])
    assert trial.wait() == 2 and "the data have changed" in trial.text()
    write_text(text, paragraphs=120)
    assert attempt(run=run).code == 0


def test_settings_that_may_change_do(attempt, begun, runs):
    shutil.copytree(begun, attempt.folder)
    run = dataclasses.replace(
        runs["pretrain"], evaluate_every=2, checkpoint_every=3, keep=3, skip_nonfinite=1
    )
    assert attempt(run=run).code == 0
    assert newest_of(attempt.folder) == 6


def test_another_precision_on_another_device_is_refused(begun, runs, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(begun, tmp_path / "run")
    monkeypatch.setattr("paceline.runs.build.precision_of", lambda run, device: torch.bfloat16)
    assert main(words_of(runs["pretrain"], folder)) == 2
    assert "begun in float32, and precision auto is bfloat16" in capsys.readouterr().err


# --- F11: memory ------------------------------------------------------------------------------------


@pytest.mark.long
def test_too_little_memory_is_explained_and_harms_nothing(attempt, runs, tmp_path):
    run = dataclasses.replace(runs["pretrain"], batch_size=100, micro_batch_size=None, steps=2)
    run = dataclasses.replace(run, checkpoint_every=1, held_out_samples=1)
    assert attempt(partial(before, STEP, (1,), send, signal.SIGTERM), run=run).code == 143
    trial = attempt(partial(trials.starve, 2**22), run=run)
    assert trial.code == 1
    assert "memory is full; a smaller" in trial.text()
    assert newest_of(attempt.folder) == 1
    assert attempt(run=run).code == 0


# --- F12: two trainers ------------------------------------------------------------------------------


def test_a_second_trainer_is_refused_and_one_that_died_is_succeeded(attempt, expected, runs, tmp_path):
    run = runs["pretrain"]
    first = attempt(partial(before, STEP, EVERY, time.sleep, 0.2), wait=False)
    first.until(lambda: (attempt.folder / "checkpoints" / "step-00000002").exists())
    second = Trial(tmp_path / "second", command, words_of(run, attempt.folder))
    assert second.wait() == 1
    assert f"process {first.pid} on {socket.gethostname()} is at work in {attempt.folder}" in second.text()
    twin = Trial(
        tmp_path / "twin", command, words_of(run, attempt.folder), trials.without_lock, trials.refuse
    )
    assert twin.wait() == 99  # without the lock it would have begun
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    assert attempt().code == 0
    assert not differences(attempt.folder, expected["pretrain"])


# --- F13: clocks and folders --------------------------------------------------------------------------


def test_a_clock_that_goes_back_changes_nothing(attempt, expected):
    assert attempt(trials.turn_back_the_clock).code == 0
    assert not differences(attempt.folder, expected["pretrain"])
    times = [record["time"] for record in read(attempt.folder / "timing.jsonl")]
    assert times == sorted(times) and len(set(times)) > 2


def test_a_folder_that_is_taken_away_ends_the_run_with_a_word(attempt):
    trial = attempt(partial(before, STEP, (4,), shutil.rmtree, attempt.folder), hurry)
    assert trial.code == 1 and trial.text().count("trying again") == 2
    assert "No such file or directory" in trial.text() and str(attempt.folder) in trial.text()
    assert not attempt.folder.exists()


def test_a_line_that_was_cut_off_does_not_spoil_the_next(attempt, expected):
    assert attempt(partial(before, STEP, (3,), send, signal.SIGTERM)).code == 143
    for name in ("records.jsonl", "timing.jsonl"):
        with (attempt.folder / name).open("ab") as file:
            file.write(b'{"kind": "st')
    assert attempt().code == 0
    assert list(read(attempt.folder / "timing.jsonl"))
    assert not differences(attempt.folder, expected["pretrain"])


# --- F15: repeatability -------------------------------------------------------------------------------


def test_two_runs_of_one_description_are_one(attempt, expected, runs):
    for name, run in runs.items():
        folder = attempt.folder / name
        assert attempt(run=run, folder=folder).code == 0
        assert not differences(folder, expected[name])
    other = dataclasses.replace(runs["pretrain"], seed=7)
    assert attempt(run=other, folder=attempt.folder / "other").code == 0
    assert differences(attempt.folder / "other", expected["pretrain"])


GOLDEN = {
    "adamw": "3.9160 3.8322 3.7611 3.6292 3.5879 3.5317 3.4045 3.2470 3.1746 2.9426 "
    "2.9262 2.5233 2.5834 2.5855 2.4394 2.1515 2.1075 2.0007 2.1932 2.0859",
    "pace": "3.9160 3.8322 3.7613 3.6290 3.5827 3.5225 3.3940 3.2411 3.1593 2.9237 "
    "2.9217 2.5135 2.5829 2.5819 2.4259 2.1420 2.1079 2.0118 2.1788 2.0696",
}


@pytest.mark.parametrize("name", GOLDEN)
def test_losses_are_those_that_were_recorded(name):
    make = {"adamw": torch.optim.AdamW, "pace": partial(PACE, control=Control.paper(c=0.1))}[name]
    trainee = trainee_of(partial(make, lr=1e-2))
    plan = dataclasses.replace(PLAN, steps=20)
    losses = [record.loss for record in records_of(trainee, plan) if isinstance(record, Step)]
    assert losses == pytest.approx([float(loss) for loss in GOLDEN[name].split()], abs=1e-4)
