"""`benchmarks/low_bit.py` on tensors that take no time."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from paceline.experiments.bench import subjects

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # the packages' own warnings
SCRIPT = Path(__file__).parents[2] / "benchmarks/low_bit.py"


@pytest.fixture
def benchmark():
    if not SCRIPT.exists():
        pytest.skip("benchmarks are not part of the package")
    spec = importlib.util.spec_from_file_location("benchmark_of_low_bits", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(module, monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["low_bit.py", "--device", "cpu", *flags])
    module.main()


@pytest.mark.long
def test_what_is_kept_and_how_exact_it_is(benchmark, monkeypatch, tmp_path, capsys):
    """2 bytes for 8-bit moments and 4 for each average; weights near those of moments in float32."""
    pytest.importorskip("torchao")
    monkeypatch.setitem(subjects.MODELS, "tiny", lambda: [(128, 256), (77,)])
    path = tmp_path / "low.json"
    run(benchmark, monkeypatch, "--models", "tiny", "--rounds", "2", "--record", str(path))
    said, written = capsys.readouterr().out, json.loads(path.read_text())
    rows = {row["optimizer"]: row for row in written["rows"]}
    assert all(name in said for name in rows)
    kept = {name: round(row["state"]) for name, row in rows.items()}
    assert kept["AdamW, fused"] == 8 and kept["PACE, fused"] == 16
    assert kept["torchao"] == 2 and kept["Pullback of torchao, strength 0"] == 6
    assert kept["Pullback of torchao, paper"] == 6 and kept["Pullback of torchao, scaled"] == 10
    assert rows["AdamW, fused"]["ratio"] == 1 and rows["torchao"]["ratio_to_inner"] is None
    paper = rows["Pullback of torchao, paper"]
    assert paper["ratio_to_inner"] == pytest.approx(paper["ms"] / rows["torchao"]["ms"])
    # The gap and √v̂, and nothing else as large.
    assert 8 <= paper["temporary"] < 12.5
    ends = {row["optimizer"]: row for row in written["regression"]}
    for name, row in ends.items():
        if "twin" in row:
            assert 0 < row["distance"] < 0.05, name
            assert row["loss"] == pytest.approx(ends[row["twin"]]["loss"], rel=0.01)
    assert written["torchao"] and written["torch"] and written["date"]


def test_mistakes(benchmark, monkeypatch, capsys):
    for flags, words in (
        (["--models", "gpt3"], "invalid choice: 'gpt3'"),
        (["--rounds", "0"], "--rounds: at least 1"),
    ):
        with pytest.raises(SystemExit, match="2"):
            run(benchmark, monkeypatch, *flags)
        assert words in capsys.readouterr().err
    monkeypatch.setattr(benchmark, "low_bit", dict)
    with pytest.raises(SystemExit, match="2"):
        run(benchmark, monkeypatch)
    assert "pip install torchao" in capsys.readouterr().err
