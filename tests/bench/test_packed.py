"""`benchmarks/packed.py` on a model that takes no time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long  # a process that compiles a Llama
SCRIPT = Path(__file__).parents[2] / "benchmarks/packed.py"


def test_packing_and_compiling_are_timed(tmp_path):
    if not SCRIPT.exists():
        pytest.skip("benchmarks are not part of the package")
    pytest.importorskip("transformers")
    record = tmp_path / "packed.json"
    command = [sys.executable, SCRIPT, "--small", "--rounds", "2", "--record", record]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(record.read_text(encoding="utf-8"))
    assert [row["what"] for row in found["rows"]] == [
        "one conversation a sequence",
        "packed",
        "packed, compiled",
    ]
    assert all(row["ms"] > 0 and row["what"] in ran.stdout for row in found["rows"]) and found["date"]
