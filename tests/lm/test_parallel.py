"""Several ranks, real processes on the CPU: the run of one process, whoever saves, stops, fails or dies."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import crew
import pytest
import torch
from tiny import write_text

from paceline.cli import main
from paceline.lm import checkpoint
from paceline.lm.batch import Batch
from paceline.lm.parallel import ALONE, Ranks, joined

WORDS = (
    "--model gpt:0.3m --tokenizer bpe:300 --length 16 --batch-size 5 --steps 12 --evaluate-every 4 "
    "--checkpoint-every 1 --warmup 2 --device cpu --method pace:c=0.3,every=3,return_power=0.8"
)
SETTINGS = WORDS.split()


def codes(trials, seconds=120):
    return [trial.wait(seconds) for trial in trials]


def text_of(trials):
    return "\n".join(f"--- {trial.said.name}\n{trial.text()}" for trial in trials)


# --- Shares -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 5, 12, 13])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_every_sample_is_the_share_of_one_rank(count, size):
    rounds = [Ranks(rank=rank, size=size).rounds(count, 2) for rank in range(size)]
    assert len({len(own) for own in rounds}) == 1, "a rank would wait for another"
    numbers = [number for own in rounds for part in own for number in part]
    assert sorted(numbers) == list(range(count))
    shares = [sum(map(len, own)) for own in rounds]
    assert max(shares) - min(shares) <= 1
    assert all(len(part) <= 2 for own in rounds for part in own)


def test_a_rank_without_samples_has_one_without_targets():
    tokens = torch.arange(6).view(3, 2)
    batch = Batch(tokens, tokens + 1, None)
    parts = [Ranks(rank=rank, size=4).parts(batch, 2) for rank in range(4)]
    assert [[part.target_count() for part in own] for own in parts] == [[0], [2], [2], [2]]
    assert torch.equal(torch.cat([own[0].tokens for own in parts[1:]]), tokens)
    (alone,) = ALONE.parts(batch, 3)
    assert torch.equal(alone.tokens, tokens)


def test_one_process_meets_nobody(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined(how="fsdp2") as ranks:
        assert ranks is ALONE
    before = torch.get_rng_state()
    ALONE.reseed(1, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_device_for_one_is_refused_before_anyone_is_waited_for(monkeypatch):
    message = "device is 'cuda:1'; allowed with several ranks: auto, cpu, cuda"
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=re.escape(message)), joined(how="fsdp2", device="cuda:1"):
        pass


# --- The loop -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_train_as_one_process_does(tmp_path):
    trials = crew.start(tmp_path, 2, crew.parity)
    assert codes(trials) == [0, 0], text_of(trials)


@pytest.mark.slow
def test_all_ranks_skip_stop_and_fail_together(tmp_path):
    trials = crew.start(tmp_path, 2, crew.faults, tmp_path)
    assert codes(trials) == [0, 0], text_of(trials)


@pytest.mark.long
@pytest.mark.parametrize("work", ["parity", "faults"])
def test_four_ranks(tmp_path, work):
    args = (tmp_path,) if work == "faults" else ()
    trials = crew.start(tmp_path, 4, getattr(crew, work), *args)
    assert codes(trials, 300) == [0] * 4, text_of(trials)


# --- Runs in their folder -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Of a run, without its folder; and a run of it by one process, undisturbed."""
    room = tmp_path_factory.mktemp("text")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(room / "cache"))
        words = ["train", "pretrain", "--data", str(write_text(room / "text.txt", paragraphs=120)), *SETTINGS]
        assert main([*words, "--out", str(room / "alone")]) == 0
        yield words, room / "alone"


def train(folder, size, words, *more, work=crew.command, expected=0, **settings):
    """A run on so many ranks; what each said."""
    words = [*words, "--out", str(folder / "run"), *more]
    if size == 1:
        assert main(words) == expected
        return []
    trials = crew.start(folder / f"{size}-{'-'.join(more)}", size, work, words, **settings)
    assert codes(trials) == [expected] * size, text_of(trials)
    return [trial.text() for trial in trials]


def saved(folder, step=12):
    """All tensors of a checkpoint, by name, whole."""
    found = checkpoint.load(folder / "checkpoints" / f"step-{step:08d}")
    tensors = dict(found["live"])
    for name, entry in found["optimizer"].items():
        tensors |= {f"{name}.{key}": value for key, value in entry.items()}
    return tensors, found["facts"]


def assert_near(folder, other, step=12):
    (ours, facts), (theirs, their_facts) = saved(folder, step), saved(other, step)
    assert ours.keys() == theirs.keys() and any(name.endswith(".returned") for name in ours)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1.3e-6, atol=1e-5)
    assert facts["progress"] == their_facts["progress"]


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def records_of(folder):
    return lines_of(folder / "records.jsonl")


def assert_near_records(folder, other):
    ours, theirs = records_of(folder)[1:], records_of(other)[1:]
    for one, two in zip(ours, theirs, strict=True):
        assert one["kind"] == two["kind"] and one["step"] == two["step"]
        if one["kind"] == "step":
            assert one["loss"] == pytest.approx(two["loss"], rel=1e-5) and one["targets"] == two["targets"]
        else:
            assert one["losses"]["held-out"] == pytest.approx(two["losses"]["held-out"], rel=1e-5)
            assert one["batches"] == two["batches"]


def steps_taken(folder, steps):
    """Cut a run short: as if it had been killed after that many steps."""
    for step, place in checkpoint.all_of(folder / "checkpoints"):
        if step > steps:
            for path in place.iterdir():
                path.unlink()
            place.rmdir()


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(2, 1, 2), (2, 4, 1, 3)])
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_a_run_goes_on_on_any_number_of_ranks(tmp_path, words, capsys, how, sizes):
    """Stopped at steps 5, 7, …, between updates of the averages."""
    words, alone = words
    run = tmp_path / "run"
    for place, size in enumerate(sizes):
        more = [] if place + 1 == len(sizes) else ["--keep", "20"]
        said = train(tmp_path, size, words, "--parallel", how, *more)
        if place + 1 < len(sizes):
            steps_taken(run, 5 + 2 * place)
        assert all(text == "" for text in said[1:]), "the first speaks for all"
    assert_near(run, alone)
    assert_near_records(run, alone)
    begun = [line for line in lines_of(run / "timing.jsonl") if line["kind"] == "begin"]
    assert [(line["step"], line.get("ranks", 1)) for line in begun] == [
        (0 if place == 0 else 3 + 2 * place, size) for place, size in enumerate(sizes)
    ]
    capsys.readouterr()
    assert main(["doctor", str(run)]) == 0
    assert "NOT" not in capsys.readouterr().out
    losses = []
    for folder in (run, alone):
        assert main(["eval", str(folder)]) == 0
        losses.append(float(re.search(r"average: ([\d.]+)", capsys.readouterr().out)[1]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert main(["export", str(run), str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_signal_to_one_rank_saves_and_ends_all(tmp_path, words):
    words, alone = words
    signalled = {"work": crew.signalled, "expected": 143, "step": 4, "number": signal.SIGTERM}
    said = train(tmp_path, 2, words, "--parallel", "fsdp2", **signalled)
    run = tmp_path / "run"
    assert [step for step, _ in checkpoint.all_of(run / "checkpoints")][-1] == 4
    assert "stopped by SIGTERM after step 4, and saved" in said[0] and said[1] == ""
    train(tmp_path, 1, words)
    assert_near(run, alone)


@pytest.mark.slow
def test_a_mistake_is_said_by_every_rank_and_nobody_hangs(tmp_path, words):
    words, _ = words
    said = train(tmp_path, 2, [*words, "--lr", "nonsense"], expected=2)
    assert all(f"paceline: rank {rank}: lr is 'nonsense'" in text for rank, text in enumerate(said))
    (tmp_path / "run").mkdir()
    with subprocess.Popen(["flock", str(tmp_path / "run" / "lock"), "sleep", "60"]) as holder:
        try:
            time.sleep(0.5)
            said = train(tmp_path, 2, words, "--seed", "1", expected=1)
        finally:
            holder.kill()
    assert all("at work in" in text for text in said)


# --- torchrun -----------------------------------------------------------------------------------------


@contextmanager
def torchrun(folder, words, *options):
    """The command on two ranks, as a user starts it; all of them are gone afterwards."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options]
    command += ["-m", "paceline", *words, "--out", str(folder / "run")]
    source = str(Path(__file__).parents[2] / "src")
    paths = os.pathsep.join(path for path in (source, os.environ.get("PYTHONPATH")) if path)
    more = {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=os.environ | more, **pipes) as process:
        try:
            yield process
        finally:
            process.terminate()  # it ends its ranks


def ranks_of(parent):
    """The processes of the ranks, by rank."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int((path / "stat").read_text().rsplit(")", 1)[1].split()[1]) != parent:
                continue
            environment = (path / "environ").read_text().split("\0")
        except (OSError, ValueError):
            continue
        found |= {int(line[5:]): int(path.name) for line in environment if line.startswith("RANK=")}
    return found


def until(fact, process, seconds=90):
    end = time.monotonic() + seconds
    while not fact():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end, "it never came to pass"
        time.sleep(0.01)


def kill_one_rank(folder, process, after):
    """SIGKILL to rank 1 once that step is saved."""
    until(lambda: (folder / "run" / "checkpoints" / f"step-{after:08d}").exists(), process)
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)


LONGER = ("--steps", "24", "--evaluate-every", "24", "--keep", "100", "--batch-size", "16")


@pytest.mark.long
def test_a_rank_that_is_killed_ends_all_with_its_name(tmp_path, words):
    words, _ = words
    with torchrun(tmp_path, [*words, *LONGER, "--parallel", "fsdp2"]) as process:
        until(lambda: (tmp_path / "run" / "checkpoints" / "step-00000002").exists(), process)
        # A busy torchrun looks after its ranks late: the other one must not be the first to say why.
        process.send_signal(signal.SIGSTOP)
        os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
        time.sleep(1)
        process.send_signal(signal.SIGCONT)
        began = time.monotonic()
        text, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and time.monotonic() - began < 60
    cause = text.partition("Root Cause")[2]
    assert re.search(r"rank +: 1 .*\n.*exitcode +: -9", cause), text


@pytest.mark.long
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_started_again_by_torchrun_a_run_ends_in_the_same_bits(tmp_path, words, how):
    words, _ = words
    words = [*words, *LONGER, "--parallel", how, "--set", "dropout=0.1"]
    ends = []
    for name, kills in (("whole", 0), ("killed", 1)):
        with torchrun(tmp_path / name, words, "--max-restarts", "1") as process:
            if kills:
                kill_one_rank(tmp_path / name, process, 7)
            text, _ = process.communicate(timeout=300)
        assert process.returncode == 0, text
        ends.append(saved(tmp_path / name / "run", 24))
    (whole, facts), (killed, other) = ends
    assert facts["progress"] == other["progress"]
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    assert records_of(tmp_path / "whole" / "run") == records_of(tmp_path / "killed" / "run")
    begun = [
        line for line in lines_of(tmp_path / "killed" / "run" / "timing.jsonl") if line["kind"] == "begin"
    ]
    assert len(begun) == 2 and begun[1]["step"] >= 7


@pytest.mark.long
def test_a_signal_to_torchrun_saves_and_the_same_command_goes_on(tmp_path, words):
    words, _ = words
    words = [*words, *LONGER, "--parallel", "fsdp2"]
    with torchrun(tmp_path, words, "--max-restarts", "3") as process:
        until(lambda: (tmp_path / "run" / "checkpoints" / "step-00000003").exists(), process)
        process.send_signal(signal.SIGTERM)
        text, _ = process.communicate(timeout=60)
    assert "stopped by SIGTERM" in text and process.returncode != 0
    stopped = checkpoint.all_of(tmp_path / "run" / "checkpoints")[-1][0]
    assert 3 <= stopped < 24
    with torchrun(tmp_path, words) as process:
        text, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and f"from step {stopped}" in text
