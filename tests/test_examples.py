"""Every example runs from start to end, in small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
def test_compare_learning_rates(tmp_path):
    command = [sys.executable, EXAMPLES / "compare_learning_rates.py", "--steps", "5", "--out", tmp_path]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "PACE" in done.stdout and "EMA" in done.stdout
    json.loads((tmp_path / "results.json").read_text())
    assert (tmp_path / "learning_rates.png").stat().st_size > 1000
