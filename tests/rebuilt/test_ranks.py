"""Real ranks, processes on the CPU: DDP, FSDP2 and torch.distributed.checkpoint against one process."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

TRAINING = ("fsdp2", "steps_and_blocks", "ddp", "first_step_at_rate_zero")
SAVING = ("checkpoints", "full_states")


@pytest.mark.parametrize(
    ("size", "scenarios"),
    [
        pytest.param(2, TRAINING, marks=pytest.mark.slow),
        pytest.param(2, SAVING, marks=pytest.mark.slow),
        pytest.param(4, (*SAVING, *TRAINING), marks=pytest.mark.long),
    ],
    ids=("training", "saving", "four"),
)
def test_ranks(tmp_path, size, scenarios):
    """Run scenarios one after another, in one set of processes: these take long to start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),
            "OMP_NUM_THREADS": "1",
        }
    command = [sys.executable, str(Path(__file__).with_name("ranks.py")), str(tmp_path), *scenarios]
    processes = []
    for rank in range(size):
        environment = {**os.environ, **place, "RANK": str(rank), "WORLD_SIZE": str(size)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen(command, env=environment, **pipes))
    try:
        outputs = [process.communicate(timeout=900)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
