"""`benchmarks/training.py share` on a model that takes no time."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[2] / "benchmarks/training.py"
SIZES = {"--model": "gpt:0.3m", "--vocabulary": "90", "--length": "8", "--batch-size": "2"}
TINY = [*(word for flag in SIZES.items() for word in flag), "--no-compile", "--rounds", "2", "--settle", "1"]


@pytest.fixture
def share(monkeypatch):
    if not SCRIPT.exists():
        pytest.skip("benchmarks are not part of the package")
    spec = importlib.util.spec_from_file_location("benchmark_of_training", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*flags):
        monkeypatch.setattr(sys, "argv", ["training.py", "share", *TINY, *flags])
        module.main()

    return run


def test_every_step_is_split_into_the_optimizer_and_the_rest(share, tmp_path, capsys):
    share("--record", str(tmp_path / "share.json"))
    said, written = capsys.readouterr().out, json.loads((tmp_path / "share.json").read_text())
    rows = {row["what"]: row for row in written["rows"]}
    assert len(rows) == 7 and all(name in said for name in rows)
    alone, base = rows["forward and backward alone"], rows["AdamW, fused"]
    assert "optimizer_ms" not in alone and base["ratio"] == 1
    for row in rows.values():
        own = row.get("optimizer_ms", 0.0)
        assert row["ms"] - alone["ms"] == pytest.approx(own, abs=2e-3)
        assert 0 < row.get("optimizer_ms_inside", 0.1) < row["high"]
        assert row["ms"] / base["ms"] == pytest.approx(row["ratio"], rel=1e-2)
        assert row["tokens_per_second"] == pytest.approx(16e3 / row["ms"], rel=1e-2)
    assert written["batch_size"] == 2 and written["torch"] and written["date"]


def test_some_of_them_and_mistakes(share, capsys):
    share("--only", "per tensor")
    said = capsys.readouterr().out
    assert "AdamW, fused" in said and "PACE, per tensor, paper" in said and "PACE, foreach" not in said
    for flags, words in (
        (("--only", "muon"), "no optimizer is called muon; there are AdamW, fused"),
        (("--model", "gpt:2m"), "unknown model 'gpt:2m'"),
        (("--rounds", "1"), "--rounds is at least 2"),
    ):
        with pytest.raises(SystemExit, match="2"):
            share(*flags)
        assert words in capsys.readouterr().err
