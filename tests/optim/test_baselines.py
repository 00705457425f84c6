"""Lookahead, GPA, EMA-Nesterov and Schedule-Free next to their papers' formulas in plain NumPy float64."""

import copy

import numpy as np
import pytest
import schedulefree
import torch
from problems import (
    advance,
    assert_same_bits,
    copies,
    everything,
    make_gradients,
    make_parameters,
    same,
    set_gradients,
)
from reference import Reference, SGDReference, array, distance
from torch import optim
from torch.optim import lr_scheduler

from paceline import Control, averaged_weights
from paceline.optim.baselines import ema_nesterov, gpa, lookahead, schedule_free
from paceline.optim.weights import keeper_of

BASES = {
    "AdamW": (lambda p: optim.AdamW(p, 1e-2, weight_decay=0.1), Reference, {"weight_decay": 0.1}),
    "momentum": (lambda p: optim.SGD(p, 1e-2, momentum=0.9), SGDReference, {}),
}


class Plain:
    """One parameter under a rule of a paper: `live` is where gradients are taken, `average` is returned."""

    def __init__(self, start, base, settings):
        self.base = base(start, Control.none(), lr=1e-2, **settings)
        self.live = self.average = self.fast = np.array(start)
        self.trend = np.zeros_like(self.live)

    def move(self, weights, gradient):
        """Return the base's step from these weights."""
        self.base.t += 1
        return self.base.base(weights, gradient)[0]


class Lookahead(Plain):
    def step(self, gradient, k=3, alpha=0.4):
        self.live = self.move(self.live, gradient)
        if self.base.t % k == 0:
            self.live = self.average = self.average + alpha * (self.live - self.average)


class GPA(Plain):
    def step(self, gradient, mu_x=0.8, mu_y=0.6):
        self.fast = self.move(self.fast, gradient)
        self.average = mu_x * self.average + (1 - mu_x) * self.fast
        self.live = mu_y * self.average + (1 - mu_y) * self.fast


class EMANesterov(Plain):
    largest = 0.0

    def step(self, gradient, push=0.6, decay=0.8, start=2, stop=9):
        self.largest = max(self.largest, self.base.lr)
        before, self.average = self.average, self.move(self.live, gradient)
        self.trend = decay * self.trend + (1 - decay) * (self.average - before)
        is_on = start < self.base.t <= stop
        self.live = self.average + is_on * push * self.base.lr / self.largest * self.trend


ATTACHED = {
    "Lookahead": (lambda base: lookahead(base, k=3, alpha=0.4), Lookahead),
    "GPA": (lambda base: gpa(base, mu_x=0.8, mu_y=0.6), GPA),
    "EMA-Nesterov": (lambda base: ema_nesterov(base, push=0.6, decay=0.8, start=2, stop=9), EMANesterov),
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", ATTACHED)
def test_a_rival_beside_any_base_is_its_paper(name, base):
    """With gradients at live, a rate that rises and falls, and steps without some gradients."""
    make, kind, settings = BASES[base]
    attach_to, reference = ATTACHED[name]
    parameters = make_parameters()
    expected = [reference(array(p), kind, settings) for p in parameters]
    optimizer = attach_to(make(parameters))
    schedule = lr_scheduler.LambdaLR(optimizer, lambda t: (0.5, 1.0, 2.0, 0.7)[t % 4])
    for t, noise in enumerate(make_gradients(14)):
        gradients = [0.3 * p.detach() + g for p, g in zip(parameters, noise, strict=True)]
        gradients[2] = None if t in (0, 4) else gradients[2]
        for each, gradient in zip(expected, gradients, strict=True):
            each.base.lr = optimizer.param_groups[0]["lr"]
            if gradient is not None:
                each.step(array(gradient))
        advance(optimizer, parameters, [gradients])
        schedule.step()
        assert all(distance(p, each.live) < 1e-12 for p, each in zip(parameters, expected, strict=True)), t
    with averaged_weights(optimizer):
        assert all(distance(p, each.average) < 1e-12 for p, each in zip(parameters, expected, strict=True))


@pytest.mark.parametrize("name", ATTACHED)
def test_a_closure_finds_live_and_one_that_raises_leaves_it(name):
    """GPA moves the base's weights into the parameters, which is undone around a closure, by arithmetic."""
    found = []
    for closes in (False, True):
        parameters = make_parameters()
        optimizer = ATTACHED[name][0](optim.SGD(parameters, 1e-2))
        for noise in make_gradients(5):
            live = copies(parameters)

            def closure(live=live, noise=noise, parameters=parameters):
                assert all(torch.allclose(p, w, rtol=1e-14) for p, w in zip(parameters, live, strict=True))
                set_gradients(parameters, [0.3 * p + g for p, g in zip(live, noise, strict=True)])

            if closes:
                with pytest.raises(ZeroDivisionError):
                    optimizer.step(lambda: 1 / 0)
                assert all(torch.allclose(p, w, rtol=1e-14) for p, w in zip(parameters, live, strict=True))
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        found.append(copies(parameters))
    assert all(torch.allclose(a, b, rtol=1e-13) for a, b in zip(*found, strict=True))


# --- Schedule-Free ----------------------------------------------------------------------------------------


class ScheduleFree:
    """y = (1 − β) z + β x, where gradients are taken; z moves by the rate, and x is the mean of z."""

    def __init__(self, start, is_adamw):
        self.x = self.y = self.z = np.array(start)
        self.v, self.t, self.sum, self.largest, self.is_adamw = np.zeros_like(self.x), 0, 0.0, 0.0, is_adamw

    def step(self, g, rate, warmup, beta=0.9, beta2=0.999, decay=0.1):
        self.t += 1
        rate = rate * min(1.0, self.t / warmup)
        self.largest = max(self.largest, rate)
        self.sum += self.largest**2
        if self.is_adamw:
            self.v = beta2 * self.v + (1 - beta2) * g * g
            g = g / (np.sqrt(self.v / (1 - beta2**self.t)) + 1e-8)
        self.z = self.z - rate * (g + decay * self.y)
        share = self.largest**2 / self.sum
        self.x = (1 - share) * self.x + share * self.z
        self.y = (1 - beta) * self.z + beta * self.x


FREE = {
    "AdamW": lambda p: schedulefree.AdamWScheduleFree(p, 1e-2, weight_decay=0.1, warmup_steps=4),
    "SGD": lambda p: schedulefree.SGDScheduleFree(p, 1e-2, weight_decay=0.1, warmup_steps=4),
}
frees = pytest.mark.parametrize("name", FREE)


@frees
def test_schedule_free_shows_x_and_trains_on_from_y(name):
    """Evaluated after every step, which the package's own eval() and train() would do by arithmetic."""
    parameters, untouched = make_parameters(), make_parameters()
    expected = [ScheduleFree(array(p), name == "AdamW") for p in parameters]
    optimizer, alone = schedule_free(FREE[name](parameters)), FREE[name](untouched)
    alone.train()
    for noise in make_gradients(10):
        for each, g in zip(expected, noise, strict=True):
            each.step(array(g), 1e-2, 4)
        advance(optimizer, parameters, [copies(noise)])  # the package overwrites gradients
        advance(alone, untouched, [noise])
        assert same(parameters, untouched)
        assert all(distance(p, each.y) < 1e-12 for p, each in zip(parameters, expected, strict=True))
        with averaged_weights(optimizer):
            assert all(distance(p, each.x) < 1e-12 for p, each in zip(parameters, expected, strict=True))
    optimizer.eval()
    alone.eval()
    assert same(parameters, untouched)
    with averaged_weights(optimizer):  # x is there already
        assert same(parameters, untouched)


@frees
def test_schedule_free_is_evaluated_from_the_state_that_was_loaded(name):
    """A load replaces the base's groups and states, from which x is computed."""
    parameters = make_parameters()
    optimizer = advance(schedule_free(FREE[name](parameters)), parameters, make_gradients(5))
    state, right = copy.deepcopy(optimizer.state_dict()), everything(optimizer)
    with averaged_weights(optimizer):
        x = copies(parameters)
    live = copies(parameters)
    advance(optimizer, parameters, make_gradients(5, seed=7))
    optimizer.load_state_dict(state)
    with torch.no_grad():
        torch._foreach_copy_(parameters, live)
    assert_same_bits(everything(optimizer), right)
    assert same([dict(keeper_of(optimizer).averages())[p] for p in parameters], x)


# --- What is refused --------------------------------------------------------------------------------------


def sgd():
    return optim.SGD(make_parameters(), 1e-2)


REFUSED = {
    "k": (lambda: lookahead(sgd(), k=0), "every"),
    "alpha": (lambda: lookahead(sgd(), alpha=0.0), "alpha"),
    "mu_x": (lambda: gpa(sgd(), mu_x=1.0), "mu_x"),
    "mu_y": (lambda: gpa(sgd(), mu_y=-0.1), "mu_y"),
    "push": (lambda: ema_nesterov(sgd(), push=-1.0), "push"),
    "decay": (lambda: ema_nesterov(sgd(), decay=1.0), "decay"),
    "start": (lambda: ema_nesterov(sgd(), start=-1), "start"),
    "stop": (lambda: ema_nesterov(sgd(), start=5, stop=4), "stop"),
    "twice": (lambda: gpa(lookahead(sgd())), "keeps averages already"),
    "not schedule-free": (lambda: schedule_free(sgd()), "schedulefree package"),
    "schedule-free": (lambda: lookahead(FREE["SGD"](make_parameters())), r"baselines\.schedule_free"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    act, message = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=message):
        act()
