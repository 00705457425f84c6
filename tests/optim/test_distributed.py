"""Real ranks, processes on the CPU: DDP and FSDP2 against one process."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

TWO_ONLY = (
    *("ddp", "fsdp2_loop", "fsdp2_foreach", "fsdp2_scaled"),
    *("fsdp2_dcp", "fsdp2_made_before", "fsdp2_residuals"),
    "unwritable",
)
FOUR_ONLY = ("fsdp2_around_tensor_parallelism",)
ANY_NUMBER = (
    *("ddp_training", "fsdp2_training", "fsdp2_low_precision", "fsdp2_int8_is_refused"),
    *("fsdp2_collectives", "fsdp2_caches", "swap", "skipped_steps", "gradients_cut_otherwise"),
    *("fsdp2_evaluations", "fsdp2_needs_the_model"),
    *("reshard", "full_states", "int8_to_shards", "pretrained", "export_memory"),
)
# With two ranks in test-all only: some of what they ask, others of these ask too.
LONG = (
    *("fsdp2_low_precision", "skipped_steps", "full_states", "pretrained"),
    *("reshard", "export_memory"),
)


def run(folder, size, scenarios):
    """What each scenario holds is said where it is. All in one set of processes: they take long to start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in range(size):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            # What is freed goes back at once, so that the size of a process is what it holds.
            "MALLOC_MMAP_THRESHOLD_": "65536",
        }
        command = [sys.executable, str(Path(__file__).with_name("ranks.py")), str(folder), *scenarios]
        processes.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output


@pytest.mark.slow
def test_two_ranks(tmp_path):
    run(tmp_path, 2, [name for name in (*TWO_ONLY, *ANY_NUMBER) if name not in LONG])


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "scenarios"), [(1, ANY_NUMBER), (2, LONG), (4, (*ANY_NUMBER, *FOUR_ONLY))], ids=["1", "2", "4"]
)
def test_any_number_of_ranks(tmp_path, size, scenarios):
    run(tmp_path, size, scenarios)
