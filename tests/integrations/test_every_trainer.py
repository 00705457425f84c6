"""The promises of paceline in every trainer: which weights are where, to the bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trainers import KINDS, LR, ROWS, STEPS, Stop, same

from paceline import PACE, Control, averaged_state_dict
from paceline.optim.weights import keeper_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),  # torch's, on CPUs without bfloat16
    pytest.mark.filterwarnings("ignore:mtime may not be reliable"),  # of checkpoints made within a second
    pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path"),
]
PACKAGES = {"transformers": ("transformers", "accelerate"), "trl": ("trl", "peft")}
TRAINERS = ["transformers", "trl", "lightning"]
"""Rows that have a loop of their own."""


def row_of(name):
    for package in PACKAGES.get(name, (name,)):
        pytest.importorskip(package)
    return ROWS[name]


@pytest.fixture(params=ROWS)
def row(request):
    return row_of(request.param)


@pytest.fixture(params=TRAINERS)
def trainer(request):
    return row_of(request.param)


def assert_right_weights(watch, straight=None):
    """Every forward pass in training was of live, and every one in an evaluation of the average.

    After a resume at step 4 they are those of the run that went straight.
    """
    assert {trains for _, trains, _ in watch.forwards} == {True, False}
    expected, first = (watch, 0) if straight is None else (straight, 4)
    for steps, trains, weights in watch.forwards:
        assert same((expected.live if trains else expected.average)[first + steps], weights), (steps, trains)


def loss_with(row, model, weights):
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.get(name, parameter))
        return float(row.loss_of(model))


@pytest.mark.parametrize("kind", KINDS)
def test_trains_live_evaluates_and_saves_the_average_and_resumes_to_the_bit(row, kind, tmp_path):
    straight = row.train(tmp_path, KINDS[kind])
    assert len(straight.live) == STEPS + 1
    assert_right_weights(straight)
    assert not same(straight.live[STEPS], straight.average[STEPS])
    for step in (4, STEPS):
        live, average = row.saved(straight, tmp_path, step)
        assert same(live, straight.live[step]) and same(average, straight.average[step])
    if row is not ROWS["accelerate"]:  # a loop of one's own ends with live
        assert same(straight.returned(), straight.average[STEPS])

    resumed = row.train(tmp_path, KINDS[kind], resume=True)
    assert len(resumed.live) == 5
    assert_right_weights(resumed, straight)
    assert same(resumed.live[-1], straight.live[-1]) and same(resumed.average[-1], straight.average[-1])
    states = [watch.optimizer.state_dict()["state"] for watch in (straight, resumed)]
    for mine, first in zip(*(state.values() for state in states), strict=True):
        assert {key: value.dtype for key, value in mine.items()} == {k: v.dtype for k, v in first.items()}
    losses = [loss_with(row, straight.model, w) for w in (straight.live[0], straight.average[STEPS])]
    assert losses[1] < 0.99 * losses[0]


def test_no_control_is_adamw_to_the_bit_with_its_average_next_to_it(row, tmp_path):
    ours = row.train(tmp_path / "ours", lambda params: PACE(params, LR, control=Control.none()))
    theirs = row.train(tmp_path / "theirs", lambda params: torch.optim.AdamW(params, LR), averaged=False)
    assert all(same(a, b) for a, b in zip(ours.live, theirs.live, strict=True))
    expected = {name: weights.double() for name, weights in ours.live[0].items()}
    for t in range(1, STEPS + 1):
        rate = (1 + t) ** -0.7
        expected = {name: (1 - rate) * a + rate * ours.live[t][name] for name, a in expected.items()}
        for name, average in ours.average[t].items():
            torch.testing.assert_close(average.double(), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", ["training", "evaluation"])
def test_a_run_that_raised_lost_nothing_and_resumes(row, place, tmp_path):
    with pytest.raises(Stop) as raised:
        row.train(tmp_path, KINDS["push"], fail=place)
    (watch,) = raised.value.args
    state = averaged_state_dict(watch.model, watch.optimizer)
    assert same(state, watch.average[6])
    keeper_of(watch.optimizer).hide()
    assert same(watch.returned(), watch.live[6])
    straight = row.train(tmp_path / "straight", KINDS["push"])
    resumed = row.train(tmp_path, KINDS["push"], resume=True)
    assert same(resumed.live[-1], straight.live[-1]) and same(resumed.average[-1], straight.average[-1])


@pytest.mark.parametrize("kind", ["push", "int8", "attached"])
def test_the_best_model_is_the_average_of_that_step(trainer, kind, tmp_path):
    watch = trainer.train(tmp_path, KINDS[kind], best=True)
    assert watch.best < STEPS
    assert same(watch.returned(), watch.average[watch.best])


def test_a_step_that_a_gradient_scaler_skips_changes_nothing(row, tmp_path):
    backwards = []

    def build(params):
        params = list(params)
        params[0].register_hook(
            lambda grad: (backwards.append(1), grad * (torch.inf if len(backwards) == 3 else 1))[1]
        )
        return PACE(params, LR, control=Control.push())

    watch = row.train(tmp_path, build, scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    assert len(backwards) >= STEPS and len(watch.live) == len(backwards)
    assert_right_weights(watch)
    assert all(w.isfinite().all() for w in (*watch.live[-1].values(), *watch.average[-1].values()))


def test_the_average_moves_once_for_the_batches_of_a_step(row, tmp_path):
    watch = row.train(tmp_path, KINDS["push"], accumulate=2)
    assert len(watch.live) == STEPS + 1
    assert sum(trains for _, trains, _ in watch.forwards) == 2 * STEPS
    assert_right_weights(watch)


RANK = """
import sys, torch, test_every_trainer as t
from pathlib import Path
torch.set_num_threads(1)
row, folder = t.ROWS[sys.argv[1]], Path(sys.argv[2])
straight = row.train(folder, t.KINDS["push"], ranks=2)
torch.distributed.barrier()
resumed = row.train(folder, t.KINDS["push"], ranks=2, resume=True)
assert torch.distributed.get_world_size() == 2
t.assert_right_weights(straight)
t.assert_right_weights(resumed, straight)
for watch in (straight, resumed):
    for weights in (watch.live[-1], watch.average[-1]):
        for name, value in weights.items():
            both = [torch.empty_like(value) for _ in range(2)]
            torch.distributed.all_gather(both, value)
            assert torch.equal(*both), name
assert t.same(resumed.live[-1], straight.live[-1]) and t.same(resumed.average[-1], straight.average[-1])
live, average = row.saved(straight, folder, 8)
assert t.same(live, straight.live[8]) and t.same(average, straight.average[8])
print("done")
"""


@pytest.mark.long
def test_two_processes(row, request, tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    name = next(name for name, each in ROWS.items() if each is row)
    done = subprocess.run(
        [*command, tmp_path / "rank.py", name, tmp_path / "out"],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.count("done") == 2, done.stderr[-4000:]
