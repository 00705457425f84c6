"""Real ranks, two processes on the CPU: DDP and FSDP2 against one process."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

RANKS = 2


SCENARIOS = (
    *("ddp", "fsdp2_loop", "fsdp2_foreach", "fsdp2_relative", "fsdp2_scaled"),
    *("fsdp2_fused", "fsdp2_clipped", "fsdp2_skip", "fsdp2_dcp", "fsdp2_made_before", "fsdp2_residuals"),
    "unwritable",
)


@pytest.mark.slow
def test_two_ranks(tmp_path):
    """What each scenario holds is said in ranks.py. All in one pair of processes: they take long to start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in range(RANKS):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        command = [sys.executable, str(Path(__file__).with_name("ranks.py")), str(tmp_path), *SCENARIOS]
        processes.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
