"""The average in the parameters for a while, and live back again."""

import copy
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from problems import (
    PATHS,
    Tied,
    assert_same_bits,
    everything,
    make_gradients,
    make_parameters,
    peak_bytes,
    run,
    train,
    trained,
)
from torch import nn
from torch.optim.swa_utils import update_bn

from paceline import (
    PACE,
    Averages,
    PowerLaw,
    Pullback,
    averaged_state_dict,
    averaged_weights,
    reset_average,
)

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("return_power", [None, 0.9])
def test_block_shows_the_returned_average_and_restores_live(dtype, return_power):
    """S7."""
    model, optimizer = trained(dtype, return_power=return_power)
    before = everything(optimizer)
    key = "average" if return_power is None else "returned"
    with averaged_weights(optimizer):
        for p in model.parameters():
            if p.requires_grad:
                assert torch.equal(p, before_of(before, optimizer, p, key).to(dtype))
                assert not torch.equal(p, before_of(before, optimizer, p, "weights"))
    assert_same_bits(before, everything(optimizer))


def before_of(flat, optimizer, parameter, key):
    i = [id(p) for p in optimizer.param_groups[0]["params"]].index(id(parameter))
    return flat[f"{i}/{key}"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_thousand_swaps_are_the_identity(dtype):
    _model, optimizer = trained(dtype)
    before = everything(optimizer)
    for _ in range(500):
        with averaged_weights(optimizer):
            pass
        optimizer.eval()
        optimizer.train()
    assert_same_bits(before, everything(optimizer))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_exception_in_the_block_restores_live(error, dtype):
    _model, optimizer = trained(dtype)
    before = everything(optimizer)
    with pytest.raises(error), averaged_weights(optimizer):
        raise error
    assert_same_bits(before, everything(optimizer))
    with averaged_weights(optimizer):
        pass


def restores_live(swap):
    _model, optimizer = trained()
    before = everything(optimizer)
    try:
        with swap(optimizer):
            raise ValueError
    except ValueError:
        pass
    try:
        assert_same_bits(before, everything(optimizer))
    except AssertionError:
        return False
    return True


def test_a_swap_without_restore_would_fail_that():
    """S7, broken twin."""

    @contextmanager
    def careless(optimizer):
        optimizer.eval()
        yield
        optimizer.train()

    assert restores_live(averaged_weights)
    assert not restores_live(careless)


def test_step_nesting_and_train_inside_a_block_are_refused():
    _model, optimizer = trained()
    before = everything(optimizer)
    with averaged_weights(optimizer):
        with pytest.raises(RuntimeError, match="inside averaged_weights"):
            optimizer.step(lambda: pytest.fail("the closure must not run"))
        with pytest.raises(RuntimeError, match="blocks do not nest"), averaged_weights(optimizer):
            pass
        with pytest.raises(RuntimeError, match="leave the block"):
            optimizer.train()
        with pytest.raises(RuntimeError, match="leave the block"):
            reset_average(optimizer)
        optimizer.eval()  # what Trainers call before evaluation: it is so already
        assert optimizer.shows_average()
    assert_same_bits(before, everything(optimizer))


def test_eval_and_train_are_idempotent_and_free_when_nothing_changes():
    model, optimizer = trained()
    before = everything(optimizer)
    versions = [p._version for p in model.parameters()]
    for _ in range(3):
        optimizer.train()
    assert [p._version for p in model.parameters()] == versions
    optimizer.eval()
    shown = everything(optimizer)
    optimizer.eval()
    with averaged_weights(optimizer):
        assert_same_bits(shown, everything(optimizer))
    assert optimizer.shows_average()
    assert_same_bits(shown, everything(optimizer))
    optimizer.train()
    assert_same_bits(before, everything(optimizer))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_after_a_forgotten_eval_is_correct(dtype):
    gradients = make_gradients(10)
    careful = run(make_parameters(dtype=dtype), gradients, pullback_strength=30.0)
    parameters = make_parameters(dtype=dtype)
    careless = PACE(parameters, lr=1e-2, gain="paper", pullback_strength=30.0)
    for step in gradients:
        careless.eval()
        for p, g in zip(parameters, step, strict=True):
            p.grad = g.to(dtype)
        careless.step()
    assert_same_bits(everything(careful), everything(careless))


@pytest.mark.parametrize("dtype", DTYPES)
def test_state_dict_inside_is_the_one_outside_plus_live(dtype):
    model, optimizer = trained(dtype, return_power=0.9)
    outside = optimizer.state_dict()
    live = {i: p.detach().clone() for i, p in enumerate(model.parameters())}
    with averaged_weights(optimizer):
        inside = optimizer.state_dict()
        shown = {k: v.clone() for k, v in model.state_dict().items()}
    assert inside["param_groups"][0].pop("parameters_hold") == "average"
    assert outside["param_groups"][0].pop("parameters_hold") == "live"
    assert inside["param_groups"] == outside["param_groups"]
    for i, entry in outside["state"].items():
        # After the block, so that nothing taken inside may change when live comes back.
        assert torch.equal(inside["state"][i].pop("live"), live[i])
        assert inside["state"][i].keys() == entry.keys()
        assert all(torch.equal(inside["state"][i][k], v) for k, v in entry.items())
    assert torch.equal(shown["embed.weight"], optimizer.state[model.embed.weight]["returned"].to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_saved_inside_a_block_training_goes_on_from_live(dtype):
    model, optimizer = trained(dtype)
    with averaged_weights(optimizer):
        weights = {k: v.clone() for k, v in model.state_dict().items()}
        state = optimizer.state_dict()
    resumed = Tied().to(dtype)
    resumed.load_state_dict(weights)  # the average
    again = PACE(resumed.parameters())
    again.load_state_dict(state)
    assert_same_bits(everything(optimizer), everything(again))
    train(model, optimizer, 50, seed=1)
    train(resumed, again, 50, seed=1)
    assert_same_bits(everything(optimizer), everything(again))


KILLED_INSIDE = """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    import torch
    from problems import trained
    from paceline import averaged_weights
    model, optimizer = trained()
    with averaged_weights(optimizer):
        torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}, {file!r})
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_process_killed_inside_a_block_resumes_from_live(tmp_path):
    """S7: a real process and a real SIGKILL, after it saved while the average was shown."""
    file = str(tmp_path / "checkpoint.pt")
    tests = str(Path(__file__).parents[1])
    code = textwrap.dedent(KILLED_INSIDE.format(tests=tests, file=file))
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert killed.returncode == -9, killed.stderr.decode()
    saved = torch.load(file, weights_only=True)
    resumed = Tied()
    resumed.load_state_dict(saved["model"])
    again = PACE(resumed.parameters())
    again.load_state_dict(saved["optimizer"])
    model, optimizer = trained()
    train(model, optimizer, 10, seed=1)
    train(resumed, again, 10, seed=1)
    assert_same_bits(everything(optimizer), everything(again))


def test_a_failing_swap_leaves_live_and_average_as_they_were(monkeypatch):
    """Out of memory or Ctrl-C in the middle of eval()."""
    from paceline.optim import weights

    _model, optimizer = trained()
    before = everything(optimizer)
    genuine, calls = weights.show_average_, []

    def failing(parameter, state, key):
        calls.append(key)
        if len(calls) == 3:
            raise KeyboardInterrupt
        genuine(parameter, state, key)

    monkeypatch.setattr(weights, "show_average_", failing)
    with pytest.raises(KeyboardInterrupt):
        optimizer.eval()
    assert not optimizer.shows_average()
    assert_same_bits(before, everything(optimizer))


def test_exchange_needs_the_memory_of_the_largest_tensor():
    shapes = [(256, 256)] * 8
    parameters = make_parameters(dtype=torch.float32, shapes=shapes)
    optimizer = run(parameters, make_gradients(1, shapes=shapes))

    def show_and_hide():
        with averaged_weights(optimizer):
            pass

    peak = peak_bytes(show_and_hide)
    assert 0 < peak <= 256 * 256 * 4 + 4096


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("leave_inside", [True, False])
def test_evaluation_in_inference_mode(dtype, leave_inside):
    """Trainers evaluate under torch.inference_mode; training goes on afterwards."""
    careful, careless = trained(dtype), trained(dtype)
    with torch.inference_mode():
        careless[1].eval()
        careless[0](torch.arange(7))
        if leave_inside:
            careless[1].train()
    careless[1].train()
    assert_same_bits(everything(careful[1]), everything(careless[1]))
    for model, optimizer in (careful, careless):
        model.norm.reset_running_stats()
        train(model, optimizer, 5, seed=1)
    assert_same_bits(everything(careful[1]), everything(careless[1]))


def test_other_optimizers_are_refused_in_plain_words():
    adamw = torch.optim.AdamW([torch.ones(1).requires_grad_()])
    with (
        pytest.raises(TypeError, match=r"AdamW keeps no average.*pullback_strength=0"),
        averaged_weights(adamw),
    ):
        pass
    with pytest.raises(TypeError, match="AdamW keeps no average"):
        reset_average(adamw)


def test_the_optimizer_is_found_inside_a_trainers_wrapper():
    """Accelerate, Fabric and others hand out one with the optimizer as its attribute; and one around that."""
    model, optimizer = trained()
    wrapper = SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer))
    inside = averaged_state_dict(model, wrapper)
    with averaged_weights(wrapper):
        assert_same_bits(dict(model.state_dict()), inside)
        with pytest.raises(RuntimeError, match="inside"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="do not nest"), averaged_weights(optimizer):
            pass
    with (
        pytest.raises(TypeError, match="SimpleNamespace keeps no average"),
        averaged_weights(SimpleNamespace()),
    ):
        pass


def test_whoever_computes_with_copies_is_told():
    """DeepSpeed trains flat copies of the weights; the model gets what they hold after each exchange."""
    model, optimizer = trained()
    copies = [p.detach().clone() for p in model.parameters()]

    def follow():
        for own, parameter in zip(copies, model.parameters(), strict=True):
            own.copy_(parameter.detach())

    optimizer.after_exchange = follow
    for exchange in (optimizer.eval, optimizer.train):
        exchange()
        assert all(torch.equal(c, p) for c, p in zip(copies, model.parameters(), strict=True)), exchange


def test_average_that_would_not_reach_the_model_is_refused():
    _, optimizer = trained()
    zero = type("DeepSpeedZeroOptimizer", (SimpleNamespace,), {"__module__": "deepspeed.runtime.zero"})
    wrapper = SimpleNamespace(optimizer=zero(optimizer=optimizer))
    with pytest.raises(RuntimeError, match="ZeroOptimizer trains flat copies"), averaged_weights(wrapper):
        pass
    assert not optimizer.shows_average()
    optimizer.after_exchange = lambda: None  # who sees to it
    with averaged_weights(wrapper):
        assert optimizer.shows_average()


def test_a_wrapper_that_takes_on_the_class_is_not_the_optimizer():
    """As those of Lightning and Fabric; a block of theirs would be unknown to the optimizer that steps."""
    model, optimizer = trained()
    wrapper = Imitates(optimizer)
    wrapper.__class__ = type("Wrapped", (Imitates, PACE), {})
    assert isinstance(wrapper, PACE)
    expected = averaged_state_dict(model, optimizer)
    with averaged_weights(wrapper):
        assert_same_bits(dict(model.state_dict()), expected)
        with pytest.raises(RuntimeError, match="inside"):
            optimizer.step()
    reset_average(wrapper)
    assert all(torch.equal(v, model.state_dict()[n]) for n, v in averaged_state_dict(model, wrapper).items())


@pytest.mark.parametrize("kind", ["Averages", "Averages of PACE"])
def test_such_a_wrapper_has_the_modes_of_the_optimizer(kind):
    """Also where those depend on more than the class; and one of the averages may have any name."""
    model, base = trained()
    base = base if kind == "Averages of PACE" else torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = Averages(base, {"first": PowerLaw(0.9), "average": PowerLaw(0.1)})
    train(model, optimizer, 3)
    wrapper = Imitates(optimizer)
    wrapper.__class__ = type("Wrapped", (Imitates, Averages), {})
    live = {name: value.clone() for name, value in model.state_dict().items()}
    with averaged_weights(optimizer):
        first = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(RuntimeError, match=r"train\(\) inside"):
            wrapper.train()
    assert_same_bits(dict(model.state_dict()), live)
    if kind == "Averages of PACE":
        base.eval()  # which steps aside
    wrapper.eval()
    assert_same_bits(dict(model.state_dict()), first)
    wrapper.train()
    assert_same_bits(dict(model.state_dict()), live)


def test_what_such_a_wrapper_has_noticed_is_known_to_the_optimizer():
    model, optimizer = trained()
    optimizer.load_state_dict(copy.deepcopy(optimizer.with_live(optimizer.state_dict())))
    wrapper = Imitates(optimizer)
    wrapper.__class__ = type("Wrapped", (Imitates, PACE), {})
    wrapper.eval()  # after which the step would warn of a model that was loaded later
    train(model, optimizer, 1)


class Imitates:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self.optimizer, name)


KINDS = {
    "float32": lambda parameters: PACE(parameters, lr=1e-2),
    "int8": lambda parameters: PACE(parameters, lr=1e-2, average_dtype="int8"),
    "Pullback": lambda parameters: Pullback(torch.optim.AdamW(parameters, lr=1e-2), gain="scaled"),
    "Averages": lambda parameters: Averages(torch.optim.AdamW(parameters), {"a": PowerLaw(0.7)}),
    "Averages of PACE": lambda parameters: Averages(PACE(parameters, lr=1e-2), {"a": PowerLaw(0.9)}),
}


def two_layers(kind, steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].bias.requires_grad_(False)
    optimizer = KINDS[kind](model.parameters())
    for _ in range(steps):
        model(torch.ones(2, 4, dtype=model[0].weight.dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [0, 3])
def test_with_live_a_state_is_the_one_of_a_block(kind, steps):
    model, optimizer = two_layers(kind, steps)
    live = {name: p.detach().clone() for name, p in model.named_parameters()}
    outside = optimizer.state_dict()
    made = copy.deepcopy(optimizer.with_live(outside))  # it refers to the parameters, as always
    assert same_state(optimizer.state_dict(), outside) and not optimizer.shows_average()
    with averaged_weights(optimizer):
        shown = optimizer.state_dict()
        assert same_state(made, shown)
        assert optimizer.with_live(shown) is shown
        found = dict(optimizer.live_weights())
        assert all(torch.equal(found[p], live[n]) for n, p in model.named_parameters() if p in found)
    assert steps == 0 or len(found) == 3  # not the frozen one
    other, again = two_layers(kind, 0)
    other.load_state_dict(averaged_state_dict(model, optimizer))
    again.load_state_dict(made)
    assert all(torch.equal(p, live[name]) for name, p in other.named_parameters())
    assert not again.shows_average()


def same_state(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same_state, a, b))
    return a == b


def test_live_weights_after_loading_in_the_other_order():
    model, optimizer = two_layers("float32", 3)
    live = model[1].weight.detach().clone()
    with averaged_weights(optimizer):
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    model.load_state_dict(weights)
    assert torch.equal(dict(optimizer.live_weights())[model[1].weight], live)


# --- Models ---------------------------------------------------------------------------------------


def test_tied_frozen_and_buffered_model_equals_its_export():
    """S8: tied tensors swapped once; outputs equal those of a model loaded from the export, bit for bit."""
    model, optimizer = trained()
    exported = Tied()
    exported.load_state_dict(averaged_state_dict(model, optimizer))
    tokens = torch.arange(7)
    model.eval()
    exported.eval()
    with averaged_weights(optimizer), torch.no_grad():
        assert model.out.weight is model.embed.weight
        assert torch.equal(model(tokens), exported(tokens))
        assert torch.equal(model.embed.weight, averaged_state_dict(model, optimizer)["embed.weight"])
    with torch.no_grad():
        assert not torch.equal(model(tokens), exported(tokens))
    assert torch.equal(exported.frozen.weight, model.frozen.weight)


def test_batch_norm_statistics_of_the_average():
    """The recipe: update_bn inside the block; with it the average is better than with live's statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 1))
    optimizer = PACE(model.parameters(), lr=5e-2, pullback_strength=0.0, ema_power=0.8)
    data = torch.randn(400, 5) * 3 + 1
    target = data.sin().sum(1, keepdim=True)
    batches = list(zip(data.split(50), target.split(50), strict=True))
    for _ in range(10):
        for x, y in batches:
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()

    def loss():
        model.eval()
        with torch.no_grad():
            return (model(data) - target).square().mean().item()

    with averaged_weights(optimizer):
        stale = loss()
        update_bn((x for x, _ in batches), model)
        fresh = loss()
    assert fresh < stale


@pytest.mark.slow
@pytest.mark.parametrize("foreach", PATHS)
def test_average_of_a_strength_0_run_is_better_than_live_on_a_noisy_quadratic(foreach):
    """What it is all for: at a constant learning rate, the average is closer to the optimum."""
    parameter = torch.zeros(200, dtype=torch.float64).requires_grad_()
    optimizer = PACE([parameter], lr=5e-2, weight_decay=0.0, pullback_strength=0.0, foreach=foreach)
    noise = torch.Generator().manual_seed(0)
    for _ in range(2000):
        parameter.grad = parameter.detach() - 1.0 + torch.randn(200, generator=noise, dtype=torch.float64)
        optimizer.step()
    live = (parameter.detach() - 1.0).square().mean()
    average = (optimizer.state[parameter]["average"] - 1.0).square().mean()
    assert average < 0.5 * live
