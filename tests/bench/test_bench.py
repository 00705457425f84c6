"""`paceline bench` and the scripts in benchmarks/, on tensors that take no time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.bench import measure, subjects
from paceline.cli import main
from paceline.cost.arithmetic import OPTIMIZERS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
FLAGS = ["bench", "--device", "cpu", "--models", "tiny", "--seconds", "0"]


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(subjects.MODELS, "tiny", lambda: [(300, 128), (128,)])


def test_every_optimizer_is_measured(tiny, tmp_path, capsys):
    """The record says where it was made, and what each optimizer keeps is what `paceline cost` expects."""
    path = tmp_path / "bench.json"
    assert main([*FLAGS, "--out", str(path)]) == 0
    said, record = capsys.readouterr().out, json.loads(path.read_text())
    rows = {row["optimizer"]: row for row in record["rows"]}
    assert list(rows) == list(subjects.SUBJECTS) == list(OPTIMIZERS)
    assert all(name in said for name in rows)
    for name, row in rows.items():
        counted = 16 * 2 / row["weights"]  # counts of steps: at most two of 8 bytes for each of two tensors
        kept = OPTIMIZERS[name].state_bytes("float32")
        assert kept <= row["state"] <= kept + counted, name
        assert row["low"] <= row["ms"] <= row["high"] and row["rounds"] == measure.LEAST
    assert rows["AdamW"]["ratio"] == 1.0
    assert record["seed"] == 0 and record["torch"] == torch.__version__
    assert record["hardware"] and record["date"] and "commit" in record


def test_some_of_them(tiny, tmp_path):
    path = tmp_path / "bench.json"
    assert main([*FLAGS, "--only", "ema", "INT8", "--out", str(path)]) == 0
    names = [row["optimizer"] for row in json.loads(path.read_text())["rows"]]
    assert names == ["AdamW and torch's EMA", "PACE, paper, int8", "PACE, push, int8"]


def test_an_interrupt_keeps_the_rows_that_are_done(tiny, tmp_path, monkeypatch):
    done = []

    def state_bytes(holders):
        done.append(holders)
        if len(done) == 3:
            raise KeyboardInterrupt
        return 0

    monkeypatch.setattr(measure, "state_bytes", state_bytes)
    assert main([*FLAGS, "--out", str(tmp_path / "bench.json")]) == 130
    assert len(json.loads((tmp_path / "bench.json").read_text())["rows"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--models", "gpt3"], "--models gpt3: allowed: gpt-6m"),
        (["--only", "muon"], "--only muon: no optimizer has that in its name; there are: AdamW"),
        (["--seconds", "-1"], "--seconds is -1; allowed: 0 to 3600"),
        (["--out", "nowhere/bench.json"], "there is no folder nowhere"),
        *([] if torch.cuda.is_available() else [(["--device", "cuda"], "there is no GPU")]),
    ],
)
def test_mistakes_are_answered_in_one_line(flags, words, capsys):
    assert main(["bench", *flags]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_tensors_are_those_of_the_models():
    sizes = {name: sum(torch.Size(s).numel() for s in make()) / 1e6 for name, make in subjects.MODELS.items()}
    assert sizes["gpt2"] == pytest.approx(124.4, abs=0.1)
    assert sizes["llama-1.7b"] == pytest.approx(1711, abs=2)
    assert len(subjects.MODELS["small"]()) == 320


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("training.py", "--model gpt:0.3m --rounds 2 --settle 1 --only push --no-compile"),
        pytest.param("fsdp2.py", "--small --seconds 0", marks=pytest.mark.long),
    ],
)
def test_benchmarks_run(script, flags, tmp_path):
    path = ROOT / "benchmarks" / script
    if not path.exists():
        pytest.skip("benchmarks are not part of the package")
    command = [sys.executable, str(path), *flags.split(), "--record", str(tmp_path / "x.json")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "x.json").read_text())
    assert record["rows"] and record["seed"] == 0 and "push" in done.stdout
    if script == "training.py":
        alone, base, *others = record["rows"]
        assert base["ratio"] == 1 and len(others) == 4
        for row in (base, *others):
            assert row["ms"] - alone["ms"] == pytest.approx(row["optimizer_ms"], abs=2e-3)
