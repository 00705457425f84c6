"""Each rival against an independent transcription or the original package, and the limits it must have."""

import copy

import numpy as np
import pytest
import schedulefree
import torch
from problems import advance, assert_same_bits, make_gradients, make_parameters, set_gradients
from torch import nn, optim

from paceline import Averages, FixedDecay, Pullback, averaged_weights
from paceline.optim.baselines import GPA, EMANesterov, ScheduleFree, lookahead

pytestmark = pytest.mark.slow

STEPS = 60


def noisy_gradient(weights, t):
    """Of a fixed quadratic at any weights: the same function for ours and for the transcription."""
    noise = np.random.default_rng(t).standard_normal(4)
    return np.array([1.0, 3.0, 0.2, 5.0]) * (weights - np.array([1.0, -1.0, 2.0, 0.5])) + 0.3 * noise


START = np.array([0.3, 0.7, -1.2, 2.0])


class AdamW:
    """In NumPy, as a function of weights and gradient."""

    def __init__(self, lr=0.05, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.m = self.v = 0.0
        self.t = 0

    def __call__(self, weights, gradient):
        self.t += 1
        b1, b2 = self.betas
        self.m = b1 * self.m + (1 - b1) * gradient
        self.v = b2 * self.v + (1 - b2) * gradient**2
        root = np.sqrt(self.v / (1 - b2**self.t)) + self.eps
        return weights * (1 - self.lr * self.weight_decay) - self.lr * self.m / (1 - b1**self.t) / root


def sgd(lr):
    return lambda weights, gradient: weights - lr * gradient


def trace(make, steps=STEPS, lrs=None):
    """Live weights, and what is returned, after each step of one of ours on the quadratic."""
    parameter = nn.Parameter(torch.tensor(START))
    optimizer = make([parameter])
    live, returned = [], []
    for t in range(steps):
        if lrs is not None:
            optimizer.param_groups[0]["lr"] = lrs[t]
        parameter.grad = torch.tensor(noisy_gradient(parameter.detach().numpy(), t))
        optimizer.step()
        live.append(parameter.detach().numpy().copy())
        if isinstance(optimizer, EMANesterov | GPA | Pullback | ScheduleFree | Averages):
            with averaged_weights(optimizer):
                returned.append(parameter.detach().numpy().copy())
    return np.array(live), np.array(returned)


def close(a, b, tolerance=1e-12):
    return np.abs(np.asarray(a) - np.asarray(b)).max() <= tolerance


# --- Lookahead ------------------------------------------------------------------------------------


def lookahead_transcribed(base, k, alpha, steps=STEPS):
    fast = slow = START
    lives, slows = [], []
    for t in range(steps):
        fast = base(fast, noisy_gradient(fast, t))
        if (t + 1) % k == 0:
            slow = slow + alpha * (fast - slow)
            fast = slow
        lives.append(fast)
        slows.append(slow)
    return lives, slows


@pytest.mark.parametrize(("k", "alpha"), [(5, 0.5), (10, 0.8), (1, 0.3), (3, 1.0)])
def test_lookahead_is_the_papers(k, alpha):
    live, slow = trace(lambda p: lookahead(optim.AdamW(p, lr=0.05), k=k, alpha=alpha))
    expected, slows = lookahead_transcribed(AdamW(), k, alpha)
    assert close(live, expected) and close(slow, slows)


def test_lookahead_with_alpha_1_is_its_base():
    live, _ = trace(lambda p: lookahead(optim.AdamW(p, lr=0.05), k=4, alpha=1.0))
    assert close(live, trace(lambda p: optim.AdamW(p, lr=0.05))[0])


# --- EMA-Nesterov ---------------------------------------------------------------------------------


def nesterov_transcribed(base, push, decay, start=0, stop=None, lrs=None):
    """In the paper's own variables: x, m and the point y where gradients are taken."""
    x, m, y = START, np.zeros(4), START
    xs, ys = [], []
    largest = 0.0
    for t in range(STEPS):
        if lrs is not None:
            base.lr = lrs[t]
        largest = max(largest, 1.0 if lrs is None else lrs[t])
        new = base(y, noisy_gradient(y, t))
        m = decay * m + (1 - decay) * (new - x)
        x = new
        on = start < t + 1 and (stop is None or t + 1 <= stop)
        beta = push * (1.0 if lrs is None else lrs[t] / largest) if on else 0.0
        y = x + beta * m
        xs.append(x)
        ys.append(y)
    return ys, xs


@pytest.mark.parametrize(("push", "decay"), [(0.3, 0.99), (0.6, 0.99), (2.0, 0.9), (0.5, 0.3)])
def test_ema_nesterov_is_the_papers(push, decay):
    live, returned = trace(lambda p: EMANesterov(optim.AdamW(p, lr=0.05), push=push, decay=decay))
    ys, xs = nesterov_transcribed(AdamW(), push, decay)
    assert close(live, ys, 1e-11) and close(returned, xs, 1e-11)


def test_ema_nesterov_switches_off_and_follows_the_rate():
    """The push is proportional to the rate, begins after `start` steps and ends after `stop`."""
    lrs = [0.05 * min(1.0, (t + 1) / 10) * (1 - t / 80) for t in range(STEPS)]
    settings = {"push": 0.6, "decay": 0.95, "start": 15, "stop": 40}
    live, returned = trace(lambda p: EMANesterov(optim.AdamW(p, lr=0.05), **settings), lrs=lrs)
    ys, xs = nesterov_transcribed(AdamW(), **settings, lrs=lrs)
    assert close(live, ys, 1e-11) and close(returned, xs, 1e-11)
    apart = np.abs(live - returned).max(axis=1)
    assert (apart[:15] == 0).all() and (apart[15:40] > 0).all() and (apart[40:] == 0).all()


def test_ema_nesterov_without_a_push_is_its_base():
    for settings in ({"push": 0.0}, {"stop": 0}):
        live, _ = trace(lambda p, settings=settings: EMANesterov(optim.AdamW(p, lr=0.05), **settings))
        assert np.array_equal(live, trace(lambda p: optim.AdamW(p, lr=0.05))[0])


def test_ema_nesterov_of_short_memory_is_nesterovs_method():
    """decay → 0: y = x + β (x − x_before), gradients at y; torch's SGD with nesterov=True walks along y."""
    beta, lr = 0.7, 0.03
    x = y = START
    ys = []
    for t in range(STEPS):
        new = y - lr * noisy_gradient(y, t)
        y = new + beta * (new - x)
        x = new
        ys.append(y)
    errors = []
    for decay in (1e-3, 1e-4):
        live, _ = trace(lambda p, decay=decay: EMANesterov(optim.SGD(p, lr=lr), push=beta, decay=decay))
        errors.append(np.abs(live - ys).max())
    assert errors[1] < 1e-3 and errors[1] < errors[0] / 5
    torchs, _ = trace(lambda p: optim.SGD(p, lr=lr, momentum=beta, nesterov=True))
    assert close(torchs, ys, 1e-12)


def test_ema_nesterov_is_pullback_with_a_negative_strength():
    """R = −push/decay at a fixed averaging rate 1 − decay."""
    decay, push = 0.9, 0.5
    settings = {"ema_power": 1.0, "ema_offset": 1 / (1 - decay), "ema_scale": 0.0, "gap": "lookahead"}
    live, _ = trace(lambda p: EMANesterov(optim.AdamW(p, lr=0.05), push=push, decay=decay))
    settings |= {"gain": "uniform", "pullback_strength": -push / decay}
    pushed, _ = trace(lambda p: Pullback(optim.AdamW(p, lr=0.05), **settings))
    assert np.array_equal(live, pushed)


# --- GPA ------------------------------------------------------------------------------------------


def gpa_transcribed(base, mu_x, mu_y):
    x = z = y = START
    ys, xs = [], []
    for t in range(STEPS):
        z = base(z, noisy_gradient(y, t))
        x = mu_x * x + (1 - mu_x) * z
        y = mu_y * x + (1 - mu_y) * z
        ys.append(y)
        xs.append(x)
    return ys, xs


@pytest.mark.parametrize(("mu_x", "mu_y"), [(0.9967, 0.7), (0.9, 0.8), (0.5, 0.0), (0.95, 1.0)])
def test_gpa_is_the_papers(mu_x, mu_y):
    """Weight decay acts on z, the weights that the base moves."""
    live, returned = trace(lambda p: GPA(optim.AdamW(p, lr=0.05), mu_x=mu_x, mu_y=mu_y))
    ys, xs = gpa_transcribed(AdamW(), mu_x, mu_y)
    assert close(live, ys) and close(returned, xs)


def test_gpa_of_a_short_average_is_its_base():
    live, returned = trace(lambda p: GPA(optim.AdamW(p, lr=0.05), mu_x=0.0, mu_y=0.7))
    base, _ = trace(lambda p: optim.AdamW(p, lr=0.05))
    assert np.array_equal(live, base) and np.array_equal(returned, base)


def test_gpa_at_the_fast_weights_is_its_base_with_an_ema():
    live, returned = trace(lambda p: GPA(optim.AdamW(p, lr=0.05), mu_x=0.9, mu_y=0.0))
    base, ema = trace(lambda p: Averages(optim.AdamW(p, lr=0.05), {"ema": FixedDecay(0.9)}))
    assert np.array_equal(live, base) and np.array_equal(returned, ema)


def test_gpa_of_sgd_is_nesterov_momentum_and_heavy_ball():
    """At rate lr/(1 − μ): x, or y, walks as torch's SGD with momentum μ does."""
    mu, lr = 0.9, 0.01
    live, _ = trace(lambda p: GPA(optim.SGD(p, lr=lr / (1 - mu)), mu_x=mu, mu_y=mu))
    nesterov, _ = trace(lambda p: optim.SGD(p, lr=lr, momentum=mu, nesterov=True))
    assert close(live, nesterov, 1e-11)
    live, returned = trace(lambda p: GPA(optim.SGD(p, lr=lr / (1 - mu)), mu_x=mu, mu_y=1.0))
    heavy, _ = trace(lambda p: optim.SGD(p, lr=lr, momentum=mu))
    assert close(live, heavy, 1e-11) and np.array_equal(live, returned)


# --- Schedule-Free --------------------------------------------------------------------------------

PACKAGED = {
    "AdamW": lambda p: schedulefree.AdamWScheduleFree(p, lr=0.05, warmup_steps=5, weight_decay=0.1),
    "AdamW loop": lambda p: schedulefree.AdamWScheduleFree(p, lr=0.05, betas=(0.95, 0.99), foreach=False),
    "SGD": lambda p: schedulefree.SGDScheduleFree(p, lr=0.1, momentum=0.8),
    "RAdam": lambda p: schedulefree.RAdamScheduleFree(p, lr=0.05),
}


@pytest.mark.parametrize("name", PACKAGED)
def test_schedule_free_is_the_packages_own(name):
    """Live bit for bit its train mode, returned bit for bit its eval mode; from a fresh optimizer on."""
    ours, theirs = make_parameters(dtype=torch.float32), make_parameters(dtype=torch.float32)
    adapter, package = ScheduleFree(PACKAGED[name](ours)), PACKAGED[name](theirs)
    package.train()
    for gradients in make_gradients(20):
        advance(adapter, ours, [gradients])
        advance(package, theirs, [gradients])
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
        evaluated = copy.deepcopy((theirs, package))
        evaluated[1].eval()
        with averaged_weights(adapter):
            assert all(torch.equal(p, q) for p, q in zip(ours, evaluated[0], strict=True))


def test_schedule_free_does_not_drift_by_evaluating():
    """The package's own way there and back moves bfloat16 weights a little each time."""
    shapes = [(300,)]
    parameters = make_parameters(dtype=torch.bfloat16, shapes=shapes)
    optimizer = ScheduleFree(schedulefree.AdamWScheduleFree(parameters, lr=0.05))
    advance(optimizer, parameters, make_gradients(5, shapes=shapes))
    before = [p.detach().clone() for p in parameters]
    for _ in range(20):
        optimizer.eval()
        optimizer.train()
    assert all(torch.equal(p, q) for p, q in zip(parameters, before, strict=True))
    for _ in range(20):
        optimizer.base.eval()
        optimizer.base.train()
    assert not all(torch.equal(p, q) for p, q in zip(parameters, before, strict=True))


def test_schedule_free_takes_over_a_checkpoint_of_the_package():
    """Saved in eval mode, as its documentation asks: the weights are x, and go back to y at the next step."""
    theirs, ours = make_parameters(), make_parameters(seed=3)
    package = schedulefree.AdamWScheduleFree(theirs, lr=0.05)
    package.train()
    advance(package, theirs, make_gradients(5))
    package.eval()
    adapter = ScheduleFree(schedulefree.AdamWScheduleFree(ours, lr=0.05))
    with torch.no_grad():
        for p, q in zip(ours, theirs, strict=True):
            p.copy_(q)
    adapter.load_state_dict(copy.deepcopy(package.state_dict()))
    package.train()
    for optimizer, parameters in ((package, theirs), (adapter, ours)):
        set_gradients(parameters, make_gradients(1, seed=8)[0])
        optimizer.step()
    assert_same_bits(dict(enumerate(ours)), dict(enumerate(theirs)))
