"""AdEMAMix against the paper's algorithm written out in NumPy, its limits, its states."""

import copy
import io
import math

import numpy as np
import pytest
import torch
from problems import (
    advance,
    assert_same_bits,
    everything,
    make_gradients,
    make_parameters,
    set_gradients,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import AdamW

from paceline.optim import schedules
from paceline.optim.baselines.ademamix import AdEMAMix, ademamix_step_, alpha_at, beta3_at

pytestmark = pytest.mark.slow

FAST = {"lr": 1e-2, "betas": (0.9, 0.99, 0.999)}


class Paper:
    """Algorithm 1 of arXiv 2409.03137 line by line, for one array, with its two schedulers."""

    def __init__(self, theta, lr, betas, eps, weight_decay, alpha, alpha_warmup, beta3_warmup):
        self.theta, self.lr, self.eps, self.decay = theta.copy(), lr, eps, weight_decay
        self.beta1, self.beta2, self.beta3 = betas
        self.alpha, self.alpha_warmup, self.beta3_warmup = alpha, alpha_warmup, beta3_warmup
        self.m1, self.m2, self.v = np.zeros_like(theta), np.zeros_like(theta), np.zeros_like(theta)
        self.t = 0

    def step(self, g):
        self.t += 1
        t = self.t
        alpha = (
            self.alpha if self.alpha_warmup is None else min(t * self.alpha / self.alpha_warmup, self.alpha)
        )
        beta3 = self.beta3
        if self.beta3_warmup is not None:
            log_start, log_end, part = np.log(self.beta1), np.log(self.beta3), t / self.beta3_warmup
            if part < 1:
                beta3 = np.exp(log_start * log_end / ((1 - part) * log_end + part * log_start))
        self.m1 = self.beta1 * self.m1 + (1 - self.beta1) * g
        self.m2 = beta3 * self.m2 + (1 - beta3) * g
        self.v = self.beta2 * self.v + (1 - self.beta2) * g**2
        m1_hat, v_hat = self.m1 / (1 - self.beta1**t), self.v / (1 - self.beta2**t)
        move = (m1_hat + alpha * self.m2) / (np.sqrt(v_hat) + self.eps) + self.decay * self.theta
        self.theta = self.theta - self.lr * move


VARIANTS = {
    "default": {},
    "fast": FAST,
    "both_warmups": {**FAST, "alpha_warmup": 120, "beta3_warmup": 120},
    "alpha_first": {**FAST, "alpha_warmup": 50, "beta3_warmup": 150},
    "beta3_first": {**FAST, "alpha_warmup": 150, "beta3_warmup": 50, "alpha": 8.0},
    "longer_than_the_run": {**FAST, "alpha_warmup": 1000, "beta3_warmup": 777},
    "no_decay": {**FAST, "weight_decay": 0.0, "eps": 1e-3},
    "strong_decay": {**FAST, "weight_decay": 0.7, "alpha": 0.5, "beta3_warmup": 10},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_papers_algorithm_over_200_steps(name):
    """Weights and all three moments, through both warm-ups and beyond."""
    settings = {"lr": 1e-3, "betas": (0.9, 0.999, 0.9999), "eps": 1e-8, "weight_decay": 1e-2, "alpha": 5.0}
    settings |= {"alpha_warmup": None, "beta3_warmup": None, **VARIANTS[name]}
    parameters, gradients = make_parameters(), make_gradients(200)
    papers = [Paper(parameter.detach().numpy(), **settings) for parameter in parameters]
    optimizer = AdEMAMix(parameters, **VARIANTS[name])
    for step_gradients in gradients:
        advance(optimizer, parameters, [step_gradients])
        for paper, gradient in zip(papers, step_gradients, strict=True):
            paper.step(gradient.numpy())
    for parameter, paper in zip(parameters, papers, strict=True):
        state = optimizer.state[parameter]
        pairs = [
            (parameter.detach(), paper.theta),
            (state["exp_avg"], paper.m1),
            (state["exp_avg_slow"], paper.m2),
            (state["exp_avg_sq"], paper.v),
        ]
        for ours, theirs in pairs:
            assert np.allclose(ours.numpy(), theirs, rtol=1e-12, atol=1e-12)


def test_the_step_is_a_function_of_tensors():
    """By hand: one step from zero moments is lr · (1 + α (1 − β₃)) sign(g), and the decay."""
    live, grad = torch.tensor([1.0, -2.0]).double(), torch.tensor([3.0, -4.0]).double()
    moments = [torch.zeros(2, dtype=torch.float64) for _ in range(3)]
    step = torch.zeros((), dtype=torch.float64)
    settings = {"lr": 0.1, "betas": (0.9, 0.99, 0.75), "eps": 0.0, "weight_decay": 0.5, "alpha": 8.0}
    ademamix_step_(live, grad, *moments, step, **settings, alpha_warmup=2, beta3_warmup=None, maximize=False)
    # α(1) = 4, so that 1 + 4 · 0.25 = 2 times 0.1; decay 1 − 0.1 · 0.5.
    assert torch.allclose(live, torch.tensor([0.95 - 0.2, -1.9 + 0.2], dtype=torch.float64), rtol=1e-14)
    assert torch.allclose(moments[1], 0.25 * grad) and step == 1


# --- The warm-ups ---------------------------------------------------------------------------------


def test_alpha_grows_linearly_and_stays():
    assert [alpha_at(t, 5.0, 10) for t in (0, 1, 5, 9, 10, 11, 10**9)] == [0, 0.5, 2.5, 4.5, 5, 5, 5]
    assert alpha_at(1, 5.0, None) == 5.0 == alpha_at(1, 5.0, 1)


def test_beta3_starts_at_beta1_and_ends_at_beta3():
    assert beta3_at(0, 0.9, 0.9999, 1000) == pytest.approx(0.9, rel=1e-15)
    assert beta3_at(1000, 0.9, 0.9999, 1000) == beta3_at(10**9, 0.9, 0.9999, 1000) == 0.9999
    assert beta3_at(1, 0.9, 0.9999, None) == 0.9999 == beta3_at(1, 0.9, 0.9999, 1)
    assert beta3_at(999.999999, 0.9, 0.9999, 1000) == pytest.approx(0.9999, rel=1e-12)


def test_beta3_has_a_half_life_that_grows_linearly():
    """By hand: half-lives 1 and 100 steps, so 1 + t after t of 99; 0.5^(1/h) is the decay of half-life h."""
    for t in range(99):
        assert beta3_at(t, 0.5, 0.5**0.01, 99) == pytest.approx(0.5 ** (1 / (1 + t)), rel=1e-14)


@pytest.mark.parametrize("beta1, beta3", [(0.9, 0.9999), (0.5, 0.99), (0.99, 0.5)])
def test_beta3_interpolates_the_papers_f(beta1, beta3):
    """f(β) = ln ½ / ln β − 1 and its inverse ½^(1/(f+1)), as the paper derives the closed form."""

    def f(beta):
        return math.log(0.5) / math.log(beta) - 1

    for t in range(1, 20):
        between = (1 - t / 20) * f(beta1) + t / 20 * f(beta3)
        assert beta3_at(t, beta1, beta3, 20) == pytest.approx(0.5 ** (1 / (between + 1)), rel=1e-13)


def test_beta3_from_or_to_no_momentum_is_finite():
    """β = 0 has half-life 0: half-way to half-life 2 is half-life 1."""
    assert beta3_at(0, 0.0, 0.5**0.5, 10) == 0.0
    assert beta3_at(5, 0.0, 0.5**0.5, 10) == pytest.approx(0.5)
    assert beta3_at(5, 0.5**0.5, 0.0, 10) == pytest.approx(0.5)
    assert beta3_at(5, 0.0, 0.0, 10) == 0.0


# --- Limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("extra", [{}, {"maximize": True}, {"weight_decay": 0.0}])
def test_alpha_0_is_adamw(dtype, extra):
    """Bit for bit, AdamW's loop; the slow momentum's settings do not matter."""
    settings = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, **extra}
    ours, theirs = make_parameters(dtype=dtype), make_parameters(dtype=dtype)
    adamw = AdamW(theirs, foreach=False, **settings)
    betas = (*settings.pop("betas"), 0.999)
    ademamix = AdEMAMix(ours, **settings, betas=betas, alpha=0.0, alpha_warmup=7, beta3_warmup=13)
    gradients = make_gradients(50)
    advance(ademamix, ours, gradients)
    advance(adamw, theirs, gradients)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(ademamix.state[a][key], adamw.state[b][key])


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_tensor_learning_rate_is_its_number(shape):
    ours, theirs = make_parameters(), make_parameters()
    advance(AdEMAMix(ours, lr=torch.full(shape, 0.125)), ours, make_gradients(5))
    advance(AdEMAMix(theirs, lr=0.125), theirs, make_gradients(5))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_with_betas_0_it_is_alpha_plus_1_steps_of_the_sign():
    parameters, gradients = make_parameters(), make_gradients(5)
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = AdEMAMix(parameters, lr=0.1, betas=(0.0, 0.0, 0.0), eps=0.0, weight_decay=0.0, alpha=2.0)
    advance(optimizer, parameters, gradients)
    for i, (parameter, start) in enumerate(zip(parameters, before, strict=True)):
        signs = sum(step[i].sign() for step in gradients)
        assert torch.allclose(parameter, start - 0.3 * signs, rtol=1e-12, atol=1e-12)


def test_it_descends_a_quadratic():
    parameter = torch.full((3,), 5.0).requires_grad_()
    optimizer = AdEMAMix([parameter], lr=0.02, betas=(0.9, 0.999, 0.99), alpha_warmup=600, beta3_warmup=600)
    for _ in range(600):
        optimizer.zero_grad()
        parameter.square().sum().backward()
        optimizer.step()
    assert parameter.abs().max() < 0.5


# --- The contract of an optimizer -----------------------------------------------------------------

WARMING = {**FAST, "alpha_warmup": 6, "beta3_warmup": 9}


def stored(state):
    """Through a file, as a checkpoint goes."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_state_goes_on_bit_for_bit(dtype):
    """Saved amid both warm-ups; counts stay float64 beside bfloat16 weights."""
    gradients = make_gradients(12)
    parameters = make_parameters(dtype=dtype)
    optimizer = AdEMAMix(parameters, **WARMING)
    advance(optimizer, parameters, gradients[:5])
    twins = [parameter.detach().clone().requires_grad_() for parameter in parameters]
    resumed = AdEMAMix(twins)
    resumed.load_state_dict(stored(optimizer.state_dict()))
    for twin in twins:
        step = resumed.state[twin]["step"]
        assert step.dtype == torch.float64 and step.device.type == "cpu" and step == 5
    advance(optimizer, parameters, gradients[5:])
    advance(resumed, twins, gradients[5:])
    assert_same_bits(everything(optimizer), everything(resumed))


def test_state_exists_from_the_start():
    """So that torch.distributed.checkpoint needs no step of its own, which would count."""
    model = nn.Linear(3, 2)
    optimizer = AdEMAMix(model.parameters())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    saved = get_optimizer_state_dict(model, optimizer)["state"]
    assert saved.keys() == {"weight", "bias"}
    assert all(sorted(s) == ["exp_avg", "exp_avg_slow", "exp_avg_sq", "step"] for s in saved.values())
    assert all(optimizer.state[parameter]["step"] == 0 for parameter in model.parameters())
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_moments_have_the_parameters_shape_and_precision():
    for dtype in (torch.float32, torch.bfloat16):
        for parameter in make_parameters(dtype=dtype):
            optimizer = AdEMAMix([parameter])
            set_gradients([parameter], [torch.ones(parameter.shape)])
            optimizer.step()
            for key in ("exp_avg", "exp_avg_slow", "exp_avg_sq"):
                moment = optimizer.state[parameter][key]
                assert moment.dtype == dtype and moment.shape == parameter.shape and not moment.requires_grad


def test_gradients_are_never_modified():
    for maximize in (False, True):
        parameters, gradients = make_parameters(), make_gradients(1)[0]
        kept = [gradient.clone() for gradient in gradients]
        set_gradients(parameters, gradients)
        AdEMAMix(parameters, maximize=maximize).step()
        assert all(torch.equal(p.grad, old) for p, old in zip(parameters, kept, strict=True))


def test_maximize_is_minimizing_the_negative():
    gradients = make_gradients(12)
    ours, theirs = make_parameters(), make_parameters()
    up, down = AdEMAMix(ours, maximize=True, **WARMING), AdEMAMix(theirs, **WARMING)
    advance(up, ours, gradients)
    advance(down, theirs, [[-gradient for gradient in step] for step in gradients])
    assert_same_bits(everything(up), everything(down))


def test_a_parameter_without_a_gradient_is_left_alone_with_its_count():
    parameters, gradients = make_parameters(), make_gradients(6)
    optimizer = AdEMAMix(parameters, **WARMING)
    alone = make_parameters()[1:2]
    twin = AdEMAMix(alone, **WARMING)
    for t, step in enumerate(gradients):
        present = t % 2 == 0
        before = everything(optimizer)
        set_gradients(parameters, [step[0], step[1] if present else None, *step[2:]])
        optimizer.step()
        if present:
            advance(twin, alone, [[step[1]]])
        else:
            skipped = {k: v for k, v in everything(optimizer).items() if k.startswith("1/")}
            assert_same_bits({k: v for k, v in before.items() if k.startswith("1/")}, skipped)
    assert optimizer.state[parameters[1]]["step"] == 3 and optimizer.state[parameters[0]]["step"] == 6
    assert torch.equal(parameters[1], alone[0])


def test_groups_are_as_many_optimizers():
    settings = [
        {"alpha": 0.0, "weight_decay": 0.3},
        {"alpha_warmup": 4},
        {"beta3_warmup": 7, "lr": 3e-3},
        {"betas": (0.0, 0.9, 0.99), "maximize": True},
    ]
    gradients = make_gradients(12)
    together = make_parameters()
    groups = [{"params": [p], **own} for p, own in zip(together, settings, strict=True)]
    advance(AdEMAMix(groups), together, gradients)
    for i, parameter in enumerate(make_parameters()):
        advance(AdEMAMix([parameter], **settings[i]), [parameter], [[step[i]] for step in gradients])
        assert torch.equal(parameter, together[i])


def test_closure_is_evaluated_once_with_gradients():
    parameter = torch.ones(2).requires_grad_()
    optimizer, calls = AdEMAMix([parameter], lr=0.1), []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0 and calls == [True]
    assert (parameter < 1).all()


def test_frozen_parameters_have_no_state_until_they_are_thawed():
    frozen, parameter = torch.ones(2), torch.ones(2).requires_grad_()
    optimizer = AdEMAMix([frozen, parameter])
    assert frozen not in optimizer.state
    set_gradients([frozen.requires_grad_(), parameter], [torch.ones(2), None])
    optimizer.step()
    assert optimizer.state[frozen]["step"] == 1 and optimizer.state[parameter]["step"] == 0


@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_model_cast_after_construction_trains_on(steps_before):
    model = nn.Linear(3, 2)
    optimizer = AdEMAMix(model.parameters(), **FAST)

    def step():
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    for _ in range(steps_before):
        step()
    model.double()
    step()
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert state["exp_avg_slow"].dtype == torch.float64 and state["step"] == steps_before + 1
        slow = 1 - 0.999 ** (steps_before + 1)
        assert torch.allclose(state["exp_avg_slow"], torch.full_like(parameter, slow), rtol=1e-5)


def test_schedules_and_copies_work():
    parameters = make_parameters()
    optimizer = AdEMAMix(parameters, **FAST)
    scheduler = schedules.cosine(optimizer, steps=4)
    for step in make_gradients(5):
        advance(optimizer, parameters, [step])
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.0
    twin = copy.deepcopy(optimizer)
    assert_same_bits(everything(optimizer), everything(twin))


# --- What is refused ------------------------------------------------------------------------------


def test_sparse_gradients_are_refused_before_anything_moves():
    dense, embedding = torch.ones(2).requires_grad_(), nn.Embedding(3, 2, sparse=True)
    optimizer = AdEMAMix([dense, embedding.weight])
    dense.grad = torch.ones(2)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"sparse gradients: one of shape \(3, 2\).*sparse=False"):
        optimizer.step()
    assert torch.equal(dense.detach(), torch.ones(2)) and optimizer.state[dense]["step"] == 0


REFUSED = [
    ({"lr": -1e-3}, "lr value: -0.001", "0 <= lr"),
    ({"lr": math.nan}, "lr value: nan", "0 <= lr"),
    ({"lr": "fast"}, "lr value: 'fast'", "0 <= lr"),
    ({"lr": torch.tensor([1e-3, 1e-3])}, "lr value: tensor", "1-element Tensor"),
    ({"lr": torch.tensor(-1.0)}, "lr value: -1.0", "0 <= lr"),
    ({"betas": (0.9, 0.999)}, "betas value: (0.9, 0.999)", "three floats"),
    ({"betas": 0.9}, "betas value: 0.9", "three floats"),
    ({"betas": (1.0, 0.999, 0.9999)}, "betas[0] value: 1.0", "0 <= beta < 1"),
    ({"betas": (0.9, -0.1, 0.9999)}, "betas[1] value: -0.1", "0 <= beta < 1"),
    ({"betas": (0.9, 0.999, 1.0)}, "betas[2] value: 1.0", "0 <= beta < 1"),
    ({"eps": -1.0}, "eps value: -1.0", ">= 0"),
    ({"weight_decay": math.inf}, "weight_decay value: inf", ">= 0 and finite"),
    ({"alpha": -1}, "alpha value: -1", ">= 0"),
    ({"alpha": None}, "alpha value: None", ">= 0"),
    ({"alpha_warmup": 0}, "alpha_warmup value: 0", "None, or an integer >= 1"),
    ({"alpha_warmup": 1e4}, "alpha_warmup value: 10000.0", "None, or an integer >= 1"),
    ({"beta3_warmup": -5}, "beta3_warmup value: -5", "None, or an integer >= 1"),
    ({"maximize": 1}, "maximize value: 1", "True or False"),
]


@pytest.mark.parametrize("settings, value, allowed", REFUSED)
def test_out_of_range_settings_are_refused_with_name_value_and_range(settings, value, allowed):
    optimizer = AdEMAMix([torch.ones(2).requires_grad_()])
    parameter = torch.ones(2).requires_grad_()
    for attempt in (
        lambda: AdEMAMix([parameter], **settings),
        lambda: AdEMAMix([{"params": [parameter], **settings}]),
        lambda: optimizer.add_param_group({"params": [parameter], **settings}),
    ):
        with pytest.raises(ValueError) as refusal:
            attempt()
        assert f"Invalid {value}" in str(refusal.value) and allowed in str(refusal.value)
    assert len(optimizer.param_groups) == 1 and len(optimizer.state) == 1
