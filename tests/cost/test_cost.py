"""`paceline cost`: bytes against real optimizers, and shares against arithmetic by hand."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from paceline import PACE, Control, attach
from paceline.cli import main
from paceline.cost.arithmetic import BLOCK, OPTIMIZERS, Kept, costs
from paceline.optim import storage

CONTROLS = {1: Control.paper(), 2: Control.push()}


def kept_by(optimizer, parameter):
    """Return the bytes a weight of a real optimizer after a step, without its count of steps."""
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    (state,) = optimizer.state_dict()["state"].values()
    return sum(t.nbytes for name, t in state.items() if not name.endswith("step")) / parameter.numel()


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("average_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("averages", [1, 2])
def test_state_is_that_of_the_real_optimizer(weights, average_dtype, averages):
    parameter = nn.Parameter(torch.ones(4, BLOCK, dtype=getattr(torch, weights)))
    optimizer = PACE([parameter], control=CONTROLS[averages], average_dtype=average_dtype)
    expected = Kept(averages=averages, average_dtype=average_dtype).state_bytes(weights)
    assert kept_by(optimizer, parameter) == expected


def test_attach_keeps_as_much_as_pace():
    for name, control in (("none", Control.none()), ("push", Control.push())):
        parameter = nn.Parameter(torch.ones(4, BLOCK))
        optimizer = attach(torch.optim.AdamW([parameter]), control=control)
        assert kept_by(optimizer, parameter) == OPTIMIZERS[f"attach(AdamW), {name}"].state_bytes("float32")


def test_blocks_are_those_of_the_storage():
    assert storage.BLOCK == BLOCK


def test_shares_of_a_step():
    """AdamW takes 20 ms of a step of 200; what takes 30 makes it a step of 210."""
    found = {cost.optimizer: cost for cost in costs(
        10**7, gpus=1, ns_per_weight={"AdamW": 2.0, "PACE, push": 3.0}, step_ms=200.0
    )}  # fmt: skip
    assert found["AdamW"].step_ms == pytest.approx(20) and found["AdamW"].share == pytest.approx(0.1)
    push = found["PACE, push"]
    assert push.step_ms == pytest.approx(30) and push.share == pytest.approx(30 / 210)
    assert push.over_adamw == pytest.approx(0.05) and found["AdamW"].over_adamw == 0
    assert found["PACE, paper"].step_ms is None


def test_gpus_divide_state_and_time_but_no_checkpoint():
    one, many = (costs(10**9, gpus=gpus, ns_per_weight={"AdamW": 1.0})[0] for gpus in (1, 8))
    assert (one.state, one.checkpoint, one.step_ms) == (8e9, 12e9, pytest.approx(1000))
    assert (many.state, many.checkpoint, many.step_ms) == (1e9, 12e9, pytest.approx(125))


@pytest.fixture
def record(tmp_path):
    names = ("optimizer", "weights", "ms", "ratio", "graph_ms", "graph_ratio")
    rows = [
        ("AdamW", 1000, 9.0, 1.0, 1.0, 1.0),
        ("PACE, push", 1000, 8.0, 0.9, 2.1, 2.0),
        ("AdamW", 10, 5.0, 1.0, None, None),
    ]
    rows = [dict(zip(names, row, strict=True)) for row in rows]
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"hardware": "NVIDIA X", "rows": rows}))
    return path


def test_the_command_shows_all_of_it(record, capsys):
    assert main(["cost"]) == 0
    said = capsys.readouterr().out
    assert "124,000,000 weights in float32" in said and "of your step" not in said
    assert all(name in said for name in OPTIMIZERS)
    command = ["cost", "--parameters", "100k", "--bench", str(record), "--step", "1000", "--json"]
    assert main(command) == 0
    found = {row["optimizer"]: row for row in json.loads(capsys.readouterr().out)}
    assert found["AdamW"]["share"] == pytest.approx(0.1)  # 100 ms: 1 ms for 1,000 weights in a graph
    assert found["PACE, push"]["step_ms"] == pytest.approx(200)
    assert main(command[:-1]) == 0
    said = capsys.readouterr().out
    assert "NVIDIA X" in said and "+10.0%" in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--parameters lots", "--parameters is 'lots'; write it as 124M, 8B or 124000000"),
        ("--gpus 0", "--gpus is 0; allowed: at least 1"),
        ("--step 5", "--step needs --bench FILE"),
        ("--step -1", "--step is -1; allowed: above 0"),
        ("--bench nowhere.json", "--bench nowhere.json is no record of paceline bench"),
        ("--bench x --weights bfloat16", "--bench has times for float32 weights"),
    ],
)
def test_mistakes_are_answered_in_one_line(flags, words, capsys):
    assert main(["cost", *flags.split()]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


@pytest.mark.slow
def test_the_command_needs_no_torch():
    code = "import sys; from paceline.cli import main; main(['cost']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
