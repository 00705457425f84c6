"""AdEMAMix next to a plain loop, to AdamW and to the paper's formulas."""

import copy

import pytest
import torch
from problems import everything, make_gradients, make_parameters, same, set_gradients

from paceline.optim.baselines import AdEMAMix
from paceline.optim.baselines.ademamix import alpha_at, beta3_at

SETTINGS = {"betas": (0.9, 0.99, 0.999), "alpha": 4.0, "alpha_warmup": 6, "beta3_warmup": 9}


def holes(steps):
    """Return gradients of which each parameter lacks some, so that all counts of steps differ."""
    lists = make_gradients(steps)
    return [[g if (t + i) % (i + 2) else None for i, g in enumerate(each)] for t, each in enumerate(lists)]


def step_by_tensor_(live, state, lr, weight_decay, eps=1e-8):
    """Take a step of one parameter in torch's plain operations, in AdamW's order."""
    state["t"] += 1
    t, (beta1, beta2, beta3) = state["t"], SETTINGS["betas"]
    live.mul_(1 - lr * weight_decay)
    state["fast"].lerp_(live.grad, 1 - beta1)
    state["slow"].lerp_(live.grad, 1 - beta3_at(t, beta1, beta3, SETTINGS["beta3_warmup"]))
    state["square"].mul_(beta2).addcmul_(live.grad, live.grad, value=1 - beta2)
    share = alpha_at(t, SETTINGS["alpha"], SETTINGS["alpha_warmup"]) * (1 - beta1**t)
    root = (state["square"].sqrt() / (1 - beta2**t) ** 0.5).add_(eps)
    live.addcdiv_(state["fast"].add(state["slow"], alpha=share), root, value=-lr / (1 - beta1**t))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_step_of_all_tensors_is_that_of_one_after_the_other_to_the_bit(dtype):
    ours, theirs = make_parameters(dtype=dtype), make_parameters(dtype=dtype)
    optimizer = AdEMAMix(ours, 1e-2, weight_decay=0.1, **SETTINGS)
    states = [{"t": 0, **{k: torch.zeros_like(p) for k in ("fast", "slow", "square")}} for p in theirs]
    for gradients in holes(15):
        set_gradients(ours, gradients)
        set_gradients(theirs, gradients)
        optimizer.step()
        with torch.no_grad():
            for live, state in zip(theirs, states, strict=True):
                if live.grad is not None:
                    step_by_tensor_(live, state, 1e-2, weight_decay=0.1)
    assert same(ours, theirs)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_alpha_0_is_adamw_to_the_bit(foreach, maximize):
    ours, theirs = (make_parameters(dtype=torch.float32) for _ in range(2))
    settings = {"lr": 1e-2, "weight_decay": 0.1, "maximize": maximize}
    pair = AdEMAMix(ours, alpha=0.0, **settings), torch.optim.AdamW(theirs, foreach=foreach, **settings)
    for gradients in holes(50):
        for optimizer, parameters in zip(pair, (ours, theirs), strict=True):
            set_gradients(parameters, gradients)
            optimizer.step()
    assert same(ours, theirs)


def test_the_slow_momentum_is_the_paper_s_sum_of_gradients():
    parameter = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = AdEMAMix([parameter], 1e-2, (0.9, 0.999, 0.99), weight_decay=0.0, alpha=3.0)
    gradients = [float(t) for t in range(1, 8)]
    for gradient in gradients:
        before = parameter.item()
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    m1, m2, v = (
        sum((1 - beta) * beta ** (7 - t) * g**power for t, g in enumerate(gradients, 1))
        for beta, power in ((0.9, 1), (0.99, 1), (0.999, 2))
    )
    move = -1e-2 * (m1 / (1 - 0.9**7) + 3.0 * m2) / ((v / (1 - 0.999**7)) ** 0.5 + 1e-8)
    assert parameter.item() - before == pytest.approx(move, rel=1e-12)


def test_the_dummy_step_of_a_checkpoint_makes_a_state_and_counts_nothing():
    parameters = make_parameters()
    optimizer = AdEMAMix(parameters, 1e-2)
    assert not optimizer.state
    set_gradients(parameters, [torch.zeros_like(p) for p in parameters])
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert [state["step"].item() for state in optimizer.state.values()] == [0.0] * len(parameters)


def test_a_sparse_gradient_is_refused_by_name_and_changes_nothing():
    dense, table = make_parameters(shapes=[(3,), (4, 2)])
    optimizer = AdEMAMix([("dense", dense), ("table", table)], 1e-2)
    before = copy.deepcopy(everything(optimizer))
    dense.grad, table.grad = torch.ones(3).double(), torch.zeros(4, 2).double().to_sparse()
    with pytest.raises(RuntimeError, match=r"'table' has a gradient of layout torch\.sparse_coo"):
        optimizer.step()
    assert all(torch.equal(everything(optimizer)[key], value) for key, value in before.items())


BAD = {
    "lr": -1.0,
    "betas": (0.9, 0.999, 1.0),
    "alpha": -1.0,
    "alpha_warmup": 0,
    "beta3_warmup": 2.5,
    "maximize": "no",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_named(name):
    for make in (
        lambda: AdEMAMix(make_parameters(), **{name: BAD[name]}),
        lambda: AdEMAMix([{"params": make_parameters(), name: BAD[name]}]),
    ):
        with pytest.raises(ValueError, match=f"Invalid {name} value: .* allowed"):
            make()
