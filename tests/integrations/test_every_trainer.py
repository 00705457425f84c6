"""The promises of paceline in every trainer: which weights are where, to the bit."""

import json
import os
import subprocess
import sys
from ast import literal_eval
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from killing import KILLS
from trainers import ON_TWO_RANKS, PACKAGES, ROWS
from watching import FAILS, KINDS, LR, SAVED, STEPS, Stop, loss_of, same

from paceline import PACE, Control, averaged_state_dict
from paceline.optim.weights import keeper_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),  # torch's, on CPUs without bfloat16
    pytest.mark.filterwarnings("ignore:mtime may not be reliable"),  # of checkpoints made within a second
    pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path"),
]
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "trainers.py"
OWN_LOOPS = ["transformers", "lightning", "accelerate"]
ROWS_OF_TRL = [pytest.param(name, marks=pytest.mark.long) for name in ("trl", "trl with LoRA")]
"""Trainers with the loop of transformers: `make test` has one kind of each, and one on two ranks."""


def row_of(name):
    for package in PACKAGES[name]:
        if find_spec(package.partition(".")[0]) is None:
            pytest.skip(f"{package} is not installed")
    return ROWS[name]


@pytest.fixture(params=[*OWN_LOOPS, *ROWS_OF_TRL])
def row(request):
    return row_of(request.param)


@pytest.fixture(params=["transformers", "lightning", *ROWS_OF_TRL])
def trainer(request):
    return row_of(request.param)


def assert_right_weights(watch, straight=None):
    """Every forward pass in training was of live, and every one in an evaluation of the average.

    After a resume at step 6 they are those of the run that went straight.
    """
    assert {"training", "average"} <= {purpose for _, purpose, _ in watch.forwards}
    expected = straight or watch
    for steps, purpose, weights in watch.forwards:
        of = expected.average if purpose == "average" else expected.live
        assert same(of[steps], weights), (steps, purpose)


def loss_with(model, weights):
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.get(name, parameter))
        return float(loss_of(model))


@pytest.mark.parametrize(
    "name, kind",
    [
        pytest.param(name, kind, marks=() if name in OWN_LOOPS or kind == "push" else pytest.mark.long)
        for name in (*OWN_LOOPS, "trl", "trl with LoRA")
        for kind in ("paper", "push", "int8", "AdamW", "Muon")
    ],
)
def test_trains_live_evaluates_and_saves_the_average_and_resumes_to_the_bit(name, kind, tmp_path):
    row = row_of(name)
    straight = row.train(tmp_path, KINDS[kind])
    assert len(straight.live) == STEPS + 1
    assert_right_weights(straight)
    assert not same(straight.live[STEPS], straight.average[STEPS])
    for step in (SAVED, STEPS):
        live, average = row.saved(straight, tmp_path, step)
        assert same(live, straight.live[step]) and same(average, straight.average[step])
    if row is not ROWS["accelerate"]:  # a loop of one's own ends with live
        assert same(straight.returned(), straight.average[STEPS])

    resumed = row.train(tmp_path, KINDS[kind], resume=SAVED)
    assert len(resumed.live) == STEPS - SAVED + 1
    assert_right_weights(resumed, straight)
    assert same(resumed.live[-1], straight.live[-1]) and same(resumed.average[-1], straight.average[-1])
    states = [watch.optimizer.state_dict()["state"] for watch in (straight, resumed)]
    for mine, first in zip(*(state.values() for state in states), strict=True):
        assert {key: value.dtype for key, value in mine.items()} == {k: v.dtype for k, v in first.items()}
    losses = [loss_with(straight.model, w) for w in (straight.live[0], straight.average[STEPS])]
    assert losses[1] < 0.995 * losses[0]


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
    assert same(state, watch.average[FAILS])
    keeper_of(watch.optimizer).hide()
    assert same(watch.returned(), watch.live[FAILS])
    straight = row.train(tmp_path / "straight", KINDS["push"])
    resumed = row.train(tmp_path, KINDS["push"], resume=SAVED)
    assert same(resumed.live[-1], straight.live[-1]) and same(resumed.average[-1], straight.average[-1])


@pytest.mark.parametrize("kind", ["push", "int8", "AdamW"])
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
    assert sum(purpose == "training" for _, purpose, _ in watch.forwards) == 2 * STEPS
    assert_right_weights(watch)


# --- Two ranks ------------------------------------------------------------------------------------------

FAST = [("transformers", "full"), ("trl with LoRA", "sharded"), ("lightning", "full")]
"""What `make test` runs, in one start."""


def printed_by(script, *words):
    """Return what a script prints that makes ranks of its own."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout


def assert_as_one_process(cases, folder, kills=0):
    """Train each case in one process and on two ranks, and compare."""
    words = [str(folder), str(kills), *(word for case in cases for word in case)]
    found = json.loads(printed_by(Path(__file__).with_name("ranks.py"), *words).rpartition("FOUND ")[2])
    for (name, case), own in zip(cases, found, strict=True):
        print(f"{name} | {case} | " + " | ".join(f"{what} {value:.1e}" for what, value in own.items()))
        near = dict.fromkeys(("live", "average", "losses"), 2e-2 if "Muon" in case else 2e-5)
        if "bfloat16" in case:  # rounded gradients: AdamW without an average ends as far apart
            without = found[cases.index((name, "full, bfloat16, no average"))]
            near = without | {"average": without["live"]}
        assert {what: value for what, value in own.items() if value > near.get(what, 0.0)} == {}, case


def test_two_ranks_are_as_one_process(tmp_path):
    for name, _ in FAST:
        row_of(name)
    assert_as_one_process(FAST, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_every_way_over_two_ranks_is_as_one_process(name, tmp_path):
    """In every format; both ranks are killed at random moments, several times."""
    row_of(name)
    assert_as_one_process([(name, case) for case in ON_TWO_RANKS[name]], tmp_path, KILLS // 5)


@pytest.mark.long
def test_a_rank_allocates_its_share_of_the_state_and_nothing_before_the_first_step():
    rows = [
        literal_eval(line)
        for line in printed_by(BENCHMARK, "bytes").splitlines()
        if line.startswith("{'optimizer'")
    ]
    assert len(rows) == 6
    for row in rows:
        assert row["before the step"] == 0
        # A step count for each parameter, and rows that do not divide by the ranks, come on top.
        assert max(row["at it"], row["after it"]) <= 1.02 * row["allowed"] + 2048, row
