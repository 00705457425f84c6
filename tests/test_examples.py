"""Every file of examples/, run as a reader would, in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def returned_is_the_average_and_better(losses):
    assert losses["returned"] == losses["average"] < losses["live"]


def average_is_better(losses):
    assert losses["average"] < losses["live"]


# File → what must hold for the last number after each name that it prints.
EXPECTED = {
    "plain_loop.py": returned_is_the_average_and_better,
    "accelerate_example.py": returned_is_the_average_and_better,
    "huggingface.py": average_is_better,
    "lightning_example.py": average_is_better,
    "teacher.py": lambda accuracies: accuracies["with a teacher"] > 0.85 > accuracies["labels alone"],
    "trl_sft.py": average_is_better,
    "fsdp2.py": lambda losses: losses["average"] < 2,
    "optax_example.py": average_is_better,
}


# Each takes a quarter of a minute or more here, and most of it is imports.
LONG = EXPECTED.keys() - {"plain_loop.py"}
FOLDER = {"fsdp2.py", "huggingface.py", "lightning_example.py", "trl_sft.py"}
"""Those that are told where to write."""
PATHS = [
    pytest.param(path, (), id=path.name, marks=pytest.mark.long if path.name in LONG else ())
    for path in sorted(EXAMPLES.glob("*.py"))
    if path.name != "fsdp2.py"
]
PATHS += [
    pytest.param(EXAMPLES / name, TORCHRUN, id=f"{name} on two ranks", marks=pytest.mark.long)
    for name in sorted(FOLDER)
]


@pytest.mark.slow
@pytest.mark.parametrize("path, launcher", PATHS)
def test_example(path, launcher, tmp_path, tmp_path_factory):
    holds = EXPECTED[path.name]
    arguments = [tmp_path_factory.mktemp("out")] if path.name in FOLDER else []
    assert len(path.read_text().splitlines()) < 80
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, path, *arguments],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    names = "returned|average|live|with a teacher|labels alone"
    found = re.findall(rf"({names}):? (?:loss |accuracy )?(\d+\.\d+)", done.stdout)
    assert holds({word: float(number) for word, number in found}) is not False, done.stdout
    assert not list(tmp_path.iterdir()), "left behind"
