"""Accelerate needs no module of ours: what it prepares is taken as it is, by the functions of paceline."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

accelerate = pytest.importorskip("accelerate", minversion="1.1")

from accelerate import Accelerator  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils.fsdp_utils import fsdp2_switch_optimizer_parameters  # noqa: E402

from paceline import (  # noqa: E402
    PACE,
    Averages,
    PowerLaw,
    Pullback,
    averaged_state_dict,
    averaged_weights,
    save_averaged,
)

# torch's, on CPUs without bfloat16
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

ROOT = Path(__file__).parents[2]
GENERATOR = torch.Generator().manual_seed(1)
INPUTS = torch.randn(64, 4, generator=GENERATOR)
DATA = torch.utils.data.TensorDataset(INPUTS, torch.randn(64, 1, generator=GENERATOR))
LR = 3e-2


@pytest.fixture(autouse=True)
def fresh():
    """Accelerators of one process share a state, which keeps its settings."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 1)).to(dtype)


def wrapped(model, kind):
    base = torch.optim.AdamW(model.parameters(), lr=LR)
    if kind == "Pullback":
        return Pullback(base, gain="scaled")
    return Averages(base, {"long": PowerLaw(0.7), "short": PowerLaw(0.3)})


def pace(**settings):
    return lambda model: PACE(model.parameters(), lr=LR, **settings)


KINDS = {
    "PACE": (pace(), torch.float32),
    "float64": (pace(), torch.float64),
    "bfloat16": (pace(), torch.bfloat16),
    "bfloat16, residual in bfloat16": (pace(average_dtype="bfloat16"), torch.bfloat16),
    "bfloat16, residual in int8": (pace(average_dtype="int8"), torch.bfloat16),
    "residual in int8": (pace(average_dtype="int8"), torch.float32),
    "Pullback": (lambda model: wrapped(model, "Pullback"), torch.bfloat16),
    "Averages": (lambda model: wrapped(model, "Averages"), torch.bfloat16),
}
# What must survive: the precision of entries that is not that of the parameter, which torch would cast to.
DTYPES = {
    "bfloat16": {"average": torch.float32, "returned": torch.float32, "step": torch.float64},
    "bfloat16, residual in bfloat16": {"average_residual": torch.bfloat16},
    "bfloat16, residual in int8": {"average_residual": torch.int8, "average_scale": torch.float32},
    "residual in int8": {"returned_residual": torch.int8, "returned_scale": torch.float32},
}


def steps_of(model, optimizer, batches, accelerator=None):
    dtype = next(model.parameters()).dtype
    for x, y in batches:
        loss = (model(x.to(dtype)) - y.to(dtype)).square().mean()
        (accelerator.backward if accelerator else torch.Tensor.backward)(loss)
        optimizer.step()
        optimizer.zero_grad()


def batches(first, last, size=8):
    return [DATA[i * size : (i + 1) * size] for i in range(first, last)]


def assert_same_state(a, b):
    """State dicts, to the bit and to the type."""
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for key, entries in a["state"].items():
        other = b["state"][key]
        if not isinstance(entries, dict):
            assert entries == other
            continue
        assert entries.keys() == other.keys()
        for name, value in entries.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == other[name].dtype, name
                assert torch.equal(value, other[name]), name
            else:
                assert value == other[name], name


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same_weights(a, b):
    assert a.keys() == b.keys()
    assert all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("taken", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_prepare_changes_nothing(kind, taken):
    """It takes the state out and puts it back, which in torch's own optimizers casts and is not noticed."""
    make, dtype = KINDS[kind]
    model = make_model(dtype)
    optimizer = make(model)
    steps_of(model, optimizer, batches(0, taken))
    before, live = copy.deepcopy(optimizer.state_dict()), weights_of(model)
    twin = copy.deepcopy((model, optimizer))
    for name, expected in DTYPES.get(kind, {}).items():
        assert {entries[name].dtype for entries in before["state"].values()} == {expected}

    accelerator = Accelerator(cpu=True)
    model, prepared = accelerator.prepare(model, optimizer)
    assert isinstance(prepared, AcceleratedOptimizer) and prepared.optimizer is optimizer
    assert_same_state(before, prepared.state_dict())
    assert_same_weights(live, weights_of(model))

    rng = torch.get_rng_state()
    steps_of(model, prepared, batches(taken, 6), accelerator)
    torch.set_rng_state(rng)
    steps_of(*twin, batches(taken, 6))
    assert_same_state(twin[1].state_dict(), prepared.state_dict())
    assert_same_weights(weights_of(twin[0]), weights_of(model))


@pytest.mark.parametrize("kind", ["PACE", "bfloat16", "bfloat16, residual in int8", "Pullback", "Averages"])
def test_average_is_reached_through_what_prepare_gives(kind, tmp_path):
    make, dtype = KINDS[kind]
    model = make_model(dtype)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, make(model))
    steps_of(model, optimizer, batches(0, 5), accelerator)
    live = weights_of(model)
    averages = {id(p): average.clone() for p, average in optimizer.optimizer.returned_averages()}
    expected = {name: averages[id(p)] for name, p in model.named_parameters()}
    assert all(not torch.equal(live[name].float(), average.float()) for name, average in expected.items())

    assert_same_weights(averaged_state_dict(model, optimizer), expected)
    with averaged_weights(optimizer):
        assert_same_weights(weights_of(model), {name: a.to(dtype) for name, a in expected.items()})
    assert_same_weights(weights_of(model), live)
    assert_same_weights(load_file(save_averaged(model, optimizer, tmp_path)), expected)
    # What Accelerate itself calls for optimizers that have modes.
    optimizer.eval()
    assert_same_weights(weights_of(model), {name: a.to(dtype) for name, a in expected.items()})
    optimizer.train()
    assert_same_weights(weights_of(model), live)


def run(kind, folder, resume=False, shown=False):
    """Six steps with a schedule; a checkpoint after the third, from which `resume` goes on."""
    accelerator = Accelerator(cpu=True)
    make, dtype = KINDS[kind]
    model = make_model(dtype)
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    # Of its own: a loader that begins draws from the generator it has, and dropout draws from torch's.
    size = 8 // accelerator.num_processes
    loader = torch.utils.data.DataLoader(DATA, batch_size=size, generator=torch.Generator())
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    torch.manual_seed(2)
    if resume:
        torch.manual_seed(3)  # the checkpoint knows better
        accelerator.load_state(folder)
    for i, (x, y) in enumerate(accelerator.skip_first_batches(loader, 3) if resume else loader, 3 * resume):
        if i == 6:
            break
        if i == 3 and not resume:
            if shown:
                with averaged_weights(optimizer):
                    accelerator.save_state(folder)
            else:
                accelerator.save_state(folder)
        steps_of(model, optimizer, [(x, y)], accelerator)
        schedule.step()
    average = averaged_state_dict(model, optimizer)
    # Of a prepared schedule, every process takes a step.
    assert schedule.get_last_lr()[0] == pytest.approx(LR * 0.9 ** (6 * accelerator.num_processes))
    return optimizer.state_dict(), weights_of(model), average


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_run_ends_as_an_uninterrupted_one(kind, shown, tmp_path):
    """Also of a checkpoint that was saved while the average was shown: the run goes on from live."""
    state, live, average = run(kind, tmp_path, shown=shown)
    resumed_state, resumed_live, resumed_average = run(kind, tmp_path, resume=True)
    assert_same_state(state, resumed_state)
    assert_same_weights(live, resumed_live)
    assert_same_weights(average, resumed_average)
    assert any(not torch.equal(live[name].float(), average[name].float()) for name in live)


@pytest.mark.parametrize("kind", ["PACE", "Pullback", "Averages"])
def test_average_moves_once_for_all_batches_of_a_step(kind):
    make, _ = KINDS[kind]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = make_model().eval()  # without dropout, several batches are one
    optimizer = make(model)
    loader = torch.utils.data.DataLoader(DATA, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for i, (x, y) in enumerate(loader, 1):
        before = averaged_state_dict(model, optimizer), weights_of(model)
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - y).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        after = averaged_state_dict(model, optimizer), weights_of(model)
        if i % 4:
            assert_same_weights(before[0], after[0])
            assert_same_weights(before[1], after[1])
        else:
            assert not torch.equal(before[1]["0.weight"], after[1]["0.weight"])
            assert not torch.equal(before[0]["0.weight"], after[0]["0.weight"])
    assert i == 16
    whole = make_model().eval()
    other = make(whole)
    steps_of(whole, other, batches(0, 4, size=16))
    steps = {
        int(value)
        for entries in optimizer.state_dict()["state"].values()
        for name, value in entries.items()
        if name.endswith("step")
    }
    assert steps == {4}
    for mine, theirs in (
        (weights_of(model), weights_of(whole)),
        (averaged_state_dict(model, optimizer), averaged_state_dict(whole, other)),
    ):
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["PACE", "Pullback"])
def test_clipped_gradients_are_those_of_torch(kind):
    make, _ = KINDS[kind]
    accelerator = Accelerator(cpu=True)
    model, twin = make_model().eval(), make_model().eval()
    other = make(twin)
    model, optimizer = accelerator.prepare(model, make(model))
    for x, y in batches(0, 4):
        accelerator.backward((model(x) - y).square().mean())
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
        assert norm > 0.1
        optimizer.step()
        optimizer.zero_grad()
        (twin(x) - y).square().mean().backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        other.step()
        other.zero_grad()
    assert_same_state(optimizer.state_dict(), other.state_dict())
    assert_same_weights(weights_of(model), weights_of(twin))


@pytest.mark.parametrize("kind", ["PACE", "Pullback", "Averages"])
def test_skipped_step_leaves_everything_and_is_noticed(kind):
    """Accelerate patches the step of the optimizer to tell whether a scaler calls it."""
    make, _ = KINDS[kind]
    Accelerator(cpu=True)
    model = make_model()
    optimizer = AcceleratedOptimizer(make(model), scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    for i, (x, y) in enumerate(batches(0, 3)):
        optimizer.scaler.scale((model(x) - y).square().mean()).backward()
        if i == 1:
            next(model.parameters()).grad[0] = torch.inf
        before, live = copy.deepcopy(optimizer.state_dict()), weights_of(model)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped is (i == 1)
        if i == 1:
            assert_same_state(before, optimizer.state_dict())
            assert_same_weights(live, weights_of(model))
        else:
            assert not torch.equal(live["0.weight"], model[0].weight)


def test_mixed_precision_keeps_weights_and_average_in_float32():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = make_model()
    model, optimizer = accelerator.prepare(model, PACE(model.parameters(), lr=LR))
    assert model(INPUTS[:2]).dtype == torch.float32 and accelerator.mixed_precision == "bf16"
    steps_of(model, optimizer, batches(0, 3), accelerator)
    average = averaged_state_dict(model, optimizer)
    assert {value.dtype for value in average.values()} == {torch.float32}
    assert average.keys() == make_model().state_dict().keys()
    with averaged_weights(optimizer):
        assert_same_weights(weights_of(model), average)


def test_optimizer_without_an_average_is_refused_by_its_own_name():
    accelerator = Accelerator(cpu=True)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(TypeError, match="AdamW keeps no average"):
        averaged_state_dict(model, optimizer)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("kind", ["PACE", "Pullback", "Averages"])
def test_parameters_may_be_replaced_before_the_first_step(kind, trained):
    """As by Accelerate with FSDP2, on GPUs only: it shards the model, and then it prepares optimizers."""
    make, _ = KINDS[kind]
    Accelerator(cpu=True)
    model, plain = make_model(), make_model()
    optimizer, expected = make(model), make(plain)
    if trained:
        steps_of(model, optimizer, batches(0, 1))
    by_address = {p.data_ptr(): nn.Parameter(p.detach().clone()) for p in model.parameters()}
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            group["params"][i] = torch.empty(1)
            group["params"][i].data_ptr = p.data_ptr()
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, by_address[p.data_ptr()])
    fsdp2_switch_optimizer_parameters(optimizer, by_address)
    if trained:
        with pytest.raises(RuntimeError, match=r"has taken steps with 4 parameter\(s\) that are in none"):
            AcceleratedOptimizer(optimizer)
        return
    AcceleratedOptimizer(optimizer)
    for net, own in ((model, optimizer), (plain, expected)):
        torch.manual_seed(1)  # of dropout
        steps_of(net, own, batches(0, 3))
    assert_same_weights(averaged_state_dict(model, optimizer), averaged_state_dict(plain, expected))


RANK = """
import sys, torch; torch.set_num_threads(1); import test_accelerate as t
folder = t.Path(sys.argv[1])
for kind in ("PACE", "bfloat16, residual in int8", "Averages"):
    state, live, average = t.run(kind, folder / kind, shown=True)
    assert all(name.startswith("module.") for name in live)
    assert average.keys() == t.make_model().state_dict().keys()
    resumed = t.run(kind, folder / kind, resume=True)
    t.assert_same_state(state, resumed[0])
    t.assert_same_weights(live, resumed[1])
    t.assert_same_weights(average, resumed[2])
    for weights in (live, average):
        for value in weights.values():
            other = [torch.empty_like(value) for _ in range(2)]
            torch.distributed.all_gather(other, value)
            assert torch.equal(*other)
assert torch.distributed.get_world_size() == 2
"""


@pytest.mark.long
def test_two_processes(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-m", *command, tmp_path / "rank.py", tmp_path / "out"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
