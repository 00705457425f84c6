"""FSDP2, DDP and torch.distributed.checkpoint, by real processes: as one process, or to the bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
BOUNDS = {"to the bit": 0.0, "float32": 1e-6, "rounded": 0.05}
"""Kind → how far apart it may be. What is rounded at random depends on where a weight lies."""


def test_two_ranks(tmp_path):
    """And four, which load what two have saved."""
    command = [sys.executable, Path(__file__).with_name("ranks.py"), tmp_path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert ran.returncode == 0, ran.stderr[-8000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    apart = {
        what: figure
        for kind, bound in BOUNDS.items()
        for what, figure in found[kind].items()
        if not figure <= bound
    }
    assert not apart
    assert found.keys() == BOUNDS.keys() and min(found["rounded"].values()) > 0
    assert {kind: len(found[kind]) for kind in BOUNDS} == {"to the bit": 48, "float32": 32, "rounded": 6}
