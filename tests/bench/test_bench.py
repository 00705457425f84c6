"""`paceline bench` on tensors that take no time."""

import json

import pytest
import torch

from paceline.cli import main
from paceline.experiments.bench import measure, subjects

pytestmark = pytest.mark.slow


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(subjects.MODELS, "tiny", lambda: [(300, 20), (77,)])


@pytest.mark.long
def test_every_optimizer_is_measured(tiny, tmp_path, capsys):
    """What they keep is known: 8 bytes for AdamW, 4 more for each average."""
    assert (
        main(["bench", "--device", "cpu", "--models", "tiny", "--rounds", "3", "--out", str(tmp_path)]) == 0
    )
    said = capsys.readouterr().out
    written = json.loads((tmp_path / "bench.json").read_text())
    rows = {row["optimizer"]: row for row in written["rows"]}
    assert set(rows) == {name for name, rival in subjects.RIVALS.items() if "cpu" in rival.devices}
    assert rows["AdamW, fused"]["ratio"] == 1.0
    kept = {name: round(row["state"]) for name, row in rows.items()}
    for name, averages in (
        ("AdamW, fused", 0),
        ("AdamW, foreach", 0),
        ("AdamW, foreach, and an EMA", 1),
        ("AdamW, foreach, and two EMAs", 2),
        ("AdamW, fused, and an EMA", 1),
    ):
        assert kept[name] == 8 + 4 * averages
    for name in ("AdamW, fused, and torch's AveragedModel", "PACE, foreach, paper"):
        assert kept[name] == 12
    assert kept["PACE, foreach"] == 16 and rows["PACE, foreach"]["temporary"] > 3
    assert all(row["low"] <= row["ms"] <= row["high"] for row in rows.values())
    assert all(name in said for name in rows)
    assert (tmp_path / "bench.png").stat().st_size > 10_000
    assert written["copy_bandwidth"] > 1e8 and written["torch"] == torch.__version__


def test_some_of_them(tiny, tmp_path):
    command = ["bench", "--device", "cpu", "--models", "tiny", "--only", "ema", "Per Tensor", "--rounds", "1"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [row["optimizer"] for row in rows] == [
        "AdamW, foreach, and an EMA",
        "AdamW, foreach, and two EMAs",
        "AdamW, fused, and an EMA",
        "PACE, per tensor, paper",
    ]


def test_what_is_done_is_kept_when_it_is_stopped(tiny, tmp_path, monkeypatch):
    """The third optimizer is stopped by Ctrl-C."""
    made = []

    def temporary_bytes(step, device):
        made.append(step)
        if len(made) == 3:
            raise KeyboardInterrupt
        return 0

    monkeypatch.setattr(measure, "temporary_bytes", temporary_bytes)
    assert (
        main(["bench", "--device", "cpu", "--models", "tiny", "--rounds", "1", "--out", str(tmp_path)]) == 130
    )
    assert len(json.loads((tmp_path / "bench.json").read_text())["rows"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--models", "gpt3"], "--models gpt3: there are gpt-18m"),
        (["--only", "muon"], "--only muon: no optimizer is called so; there are AdamW, fused"),
        (["--rounds", "0"], "--rounds is 0; allowed: at least 1"),
        *([] if torch.cuda.is_available() else [(["--device", "cuda"], "there is no GPU")]),
    ],
)
def test_mistakes_are_answered_in_one_line(flags, words, tmp_path, capsys):
    assert main(["bench", "--out", str(tmp_path / "out"), *flags]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_tensors_are_those_of_the_models():
    sizes = {name: sum(torch.Size(s).numel() for s in make()) / 1e6 for name, make in subjects.MODELS.items()}
    assert sizes["gpt2"] == pytest.approx(124.4, abs=0.1)
    assert sizes["llama-1.7b"] == pytest.approx(1711, abs=2)
    assert sizes["gpt-18m"] == pytest.approx(18.0, abs=0.1)
    assert len(subjects.MODELS["small"]()) == 320
