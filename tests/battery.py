"""One table of all optimizers and wrappers. Every generic test (test_battery.py) runs over every row."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import schedulefree
import torch
from lion_pytorch import Lion
from torch import nn, optim

from paceline import BEMA, PACE, Averages, Blend, FixedDecay, HalfLife, Polynomial, PowerLaw, Pullback
from paceline.optim.baselines import GPA, AdEMAMix, EMANesterov, ScheduleFree, lookahead

SHAPES = [(4, 3), (5,), (), (2, 3, 2)]
MATRICES = [(4, 3), (3, 3)]


@dataclass(frozen=True)
class Row:
    """An optimizer as data: how to make it, and in what it differs from what all others do."""

    make: Callable[..., optim.Optimizer]  # of parameters or groups, and a learning rate
    lr: float = 1e-2
    # Wrong inputs: a call that must raise, and words of its message.
    refused: list[tuple[Callable[[Any], object], type[Exception], str]] = field(default_factory=list)
    shapes: tuple[tuple[int, ...], ...] = tuple(SHAPES)
    keeps_average: bool = True
    keeps_grad: bool = True  # .grad is the same after a step
    own_clock: bool = True  # each parameter counts its own steps; otherwise the group does
    needs_closure: bool = False
    is_apart: bool = True  # what a parameter does depends on itself alone
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16)
    can_be_copied: bool = True  # by deepcopy and pickle


def many(base):
    averages = {
        "power": PowerLaw(0.6),
        "polynomial": Polynomial(3),
        "fixed": FixedDecay(0.9, start=2),
        "half": HalfLife(0.3),
        "bema": BEMA(every=2),
        "blend": Blend(PowerLaw(0.8), share=0.6),
    }
    return Averages(base, averages)


PACE_REFUSED = [
    (lambda p: PACE(p, lr=-1.0), ValueError, "Invalid learning rate: -1.0"),
    (
        lambda p: PACE(p, gain="paper", pullback_strength=-1.0),
        ValueError,
        "Invalid pullback_strength value: -1.0",
    ),
    (lambda p: PACE(p, ema_power=1.5), ValueError, "0 <= ema_power <= 1"),
]
WRAPPER_REFUSED = [
    (lambda p: Pullback(p), TypeError, "wraps a torch.optim.Optimizer"),
    (lambda p: Pullback(optim.SGD(p), pullback_strength=-0.1), ValueError, "pullback_strength value: -0.1"),
    (lambda p: Pullback(optim.SGD(p), update_every=0), ValueError, "an integer >= 1"),
    (lambda p: Pullback(optim.SGD(p), gain="v"), ValueError, "'uniform', 'scaled', None"),
    (lambda p: Pullback(PACE(p)), ValueError, "by an average of its own already"),
    (lambda p: Pullback(schedulefree.SGDScheduleFree(p)), ValueError, "between its own average and"),
    (lambda p: Pullback(optim.Adam(p, differentiable=True)), ValueError, "differentiable=True"),
]

ROWS = {
    "AdamW": Row(
        # Not ours: shows that the tests ask for nothing that torch's own does not do.
        lambda p, lr: optim.AdamW(p, lr=lr),
        keeps_average=False,
        refused=[(lambda p: optim.AdamW(p, lr=-1.0), ValueError, "Invalid learning rate: -1.0")],
    ),
    "PACE paper": Row(
        lambda p, lr: PACE(p, lr=lr, gain="paper", pullback_strength=0.3, foreach=False), refused=PACE_REFUSED
    ),
    "PACE foreach": Row(lambda p, lr: PACE(p, lr=lr, gain="paper", pullback_strength=0.3, foreach=True)),
    "PACE": Row(lambda p, lr: PACE(p, lr=lr), is_apart=False),
    "PACE returned": Row(
        lambda p, lr: PACE(p, lr=lr, gain="uniform", pullback_strength=0.5, return_power=0.8, update_every=2)
    ),
    "PACE lookahead": Row(lambda p, lr: PACE(p, lr=lr, gap="lookahead", gain="paper", pullback_strength=3.0)),
    "PACE bfloat16": Row(
        lambda p, lr: PACE(p, lr=lr, average_dtype="bfloat16", gain="paper", pullback_strength=0.3),
        dtypes=(torch.float32, torch.bfloat16),
        refused=[
            (lambda p: PACE(p, average_dtype="int4"), ValueError, "'float32', 'bfloat16', 'int8'"),
        ],
    ),
    "PACE int8": Row(
        lambda p, lr: PACE(
            p,
            lr=lr,
            average_dtype="int8",
            gain="uniform",
            pullback_strength=0.5,
            return_power=0.8,
            update_every=2,
        ),
        dtypes=(torch.float32, torch.bfloat16),
    ),
    "Pullback SGD": Row(
        lambda p, lr: Pullback(optim.SGD(p, lr=lr), pullback_strength=0.5), lr=0.1, refused=WRAPPER_REFUSED
    ),
    "Pullback momentum": Row(
        lambda p, lr: Pullback(optim.SGD(p, lr=lr, momentum=0.9), pullback_strength=0.5, return_power=0.8)
    ),
    "Pullback Adam": Row(lambda p, lr: Pullback(optim.Adam(p, lr=lr), pullback_strength=0.3)),
    "Pullback AdamW": Row(
        lambda p, lr: Pullback(optim.AdamW(p, lr=lr), pullback_strength=0.3, update_every=2)
    ),
    "Pullback AdamW fused": Row(
        lambda p, lr: Pullback(optim.AdamW(p, lr=lr, fused=True), gain="uniform", pullback_strength=0.3)
    ),
    "Pullback AMSGrad": Row(
        lambda p, lr: Pullback(optim.AdamW(p, lr=lr, amsgrad=True), gap="lookahead", pullback_strength=0.3)
    ),
    "Pullback NAdam": Row(lambda p, lr: Pullback(optim.NAdam(p, lr=lr), pullback_strength=0.3)),
    "Pullback RAdam": Row(lambda p, lr: Pullback(optim.RAdam(p, lr=lr), pullback_strength=0.3), lr=0.1),
    "Pullback Adafactor": Row(lambda p, lr: Pullback(optim.Adafactor(p, lr=lr), pullback_strength=0.3)),
    "Pullback RMSprop": Row(lambda p, lr: Pullback(optim.RMSprop(p, lr=lr), pullback_strength=0.3)),
    "Pullback Adagrad": Row(lambda p, lr: Pullback(optim.Adagrad(p, lr=lr), pullback_strength=0.3), lr=0.1),
    "Pullback Muon": Row(
        lambda p, lr: Pullback(optim.Muon(p, lr=lr), pullback_strength=0.3), shapes=tuple(MATRICES)
    ),
    "Pullback Lion": Row(lambda p, lr: Pullback(Lion(p, lr=lr), pullback_strength=0.3), can_be_copied=False),
    "Pullback passive": Row(lambda p, lr: Pullback(optim.AdamW(p, lr=lr), pullback_strength=0.0)),
    "Averages": Row(
        lambda p, lr: many(optim.AdamW(p, lr=lr)),
        refused=[
            (lambda p: Averages(p, {"a": BEMA()}), TypeError, "wraps a torch.optim.Optimizer"),
            (lambda p: Averages(optim.SGD(p), {}), ValueError, "at least one"),
            (lambda p: Averages(optim.SGD(p), {"a b": BEMA()}), ValueError, "a Python identifier"),
            (lambda p: Averages(optim.SGD(p), {"a": 0.9}), TypeError, "a is no average: 0.9"),
            (lambda p: Averages(many(optim.SGD(p)), {"a": BEMA()}), ValueError, "put all of them into one"),
        ],
    ),
    "Averages PACE": Row(lambda p, lr: many(PACE(p, lr=lr, gain="paper", pullback_strength=0.3))),
    "Averages PACE int8": Row(
        lambda p, lr: many(PACE(p, lr=lr, average_dtype="int8", gain="paper", pullback_strength=0.3)),
        dtypes=(torch.float32, torch.bfloat16),
    ),
    "Averages Pullback": Row(
        lambda p, lr: many(Pullback(optim.SGD(p, lr=lr), pullback_strength=0.5)), lr=0.1
    ),
    "Lookahead": Row(
        lambda p, lr: lookahead(optim.AdamW(p, lr=lr), k=3, alpha=0.5),
        refused=[
            (lambda p: lookahead(optim.SGD(p), k=0), ValueError, "Invalid k value: 0"),
            (lambda p: lookahead(optim.SGD(p), alpha=1.5), ValueError, "0 < alpha <= 1"),
        ],
    ),
    "EMANesterov": Row(
        lambda p, lr: EMANesterov(optim.AdamW(p, lr=lr), push=0.5, decay=0.9, start=3, stop=30),
        refused=[
            (lambda p: EMANesterov(optim.SGD(p), push=-1), ValueError, "Invalid push value: -1"),
            (lambda p: EMANesterov(optim.SGD(p), decay=1.0), ValueError, "0 < decay < 1"),
            (lambda p: EMANesterov(optim.SGD(p), start=5, stop=4), ValueError, "an integer >= start"),
            (lambda p: EMANesterov(GPA(optim.SGD(p))), ValueError, "cannot wrap GPA"),
        ],
    ),
    "GPA": Row(
        lambda p, lr: GPA(optim.AdamW(p, lr=lr), mu_x=0.9, mu_y=0.7),
        refused=[
            (lambda p: GPA(optim.SGD(p), mu_x=1.0), ValueError, "0 <= mu_x < 1"),
            (lambda p: GPA(optim.SGD(p), mu_y=1.1), ValueError, "0 <= mu_y <= 1"),
            (lambda p: GPA(optim.LBFGS(p)), ValueError, "takes its gradients itself"),
        ],
    ),
    "ScheduleFree AdamW": Row(
        lambda p, lr: ScheduleFree(schedulefree.AdamWScheduleFree(p, lr=lr, warmup_steps=5)),
        keeps_grad=False,
        own_clock=False,
        refused=[
            (lambda p: ScheduleFree(optim.SGD(p)), TypeError, "of the schedulefree package, not SGD"),
            (lambda p: ScheduleFree(p), TypeError, "wraps a torch.optim.Optimizer"),
        ],
    ),
    "ScheduleFree SGD": Row(
        lambda p, lr: ScheduleFree(schedulefree.SGDScheduleFree(p, lr=lr)),
        lr=0.1,
        own_clock=False,
    ),
    "ScheduleFree RAdam": Row(
        lambda p, lr: ScheduleFree(schedulefree.RAdamScheduleFree(p, lr=lr)),
        lr=0.1,
        own_clock=False,
    ),
    "AdEMAMix": Row(
        lambda p, lr: AdEMAMix(p, lr=lr, betas=(0.9, 0.999, 0.99), alpha=2.0, alpha_warmup=20),
        keeps_average=False,
        refused=[(lambda p: AdEMAMix(p, alpha=-1.0), ValueError, "alpha value: -1.0")],
    ),
}
if "AdamCScheduleFreePlusPaper" in dir(schedulefree):  # after release 1.4.1
    ROWS["ScheduleFree+"] = Row(
        lambda p, lr: ScheduleFree(schedulefree.AdamCScheduleFreePlusPaper(p, lr=lr)),
        lr=0.1,
        own_clock=False,
        needs_closure=True,
        is_apart=False,
    )

rows = pytest.mark.parametrize("name", ROWS)
averaging_rows = pytest.mark.parametrize("name", [n for n, row in ROWS.items() if row.keeps_average])


class Problem:
    """A quadratic with noise: parameters, and gradients of 0.5 · scale · |parameter − target|²."""

    def __init__(self, name, dtype=torch.float32, seed=0, device="cpu"):
        self.row = ROWS[name]
        generator = torch.Generator().manual_seed(seed)
        draw = lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
        self.model = nn.ParameterList(draw(shape).to(device, dtype) for shape in self.row.shapes)
        self.parameters = list(self.model)
        self.targets = [draw(shape).to(device) for shape in self.row.shapes]
        self.optimizer = self.row.make(self.parameters, self.row.lr)

    def loss(self):
        pairs = zip(self.parameters, self.targets, strict=True)
        return sum(((p.detach().double() - t) ** 2).sum().item() for p, t in pairs) / 2

    def gradients(self, k, scale=1.0):
        """The gradients of step k: a pure function of the weights and of k."""
        noise = torch.Generator().manual_seed(1000 + k)
        return [
            (scale * (p.detach().double() - t) + 0.1 * _noise(t, noise)).to(p.dtype)
            for p, t in zip(self.parameters, self.targets, strict=True)
        ]

    def set_gradients(self, k):
        for parameter, gradient in zip(self.parameters, self.gradients(k), strict=True):
            parameter.grad = gradient if parameter.requires_grad else None

    def closure(self, k):
        def evaluate():
            self.set_gradients(k)
            return torch.tensor(self.loss())

        return evaluate

    def step(self, k):
        if self.row.needs_closure:
            self.optimizer.step(self.closure(k))
        else:
            self.set_gradients(k)
            self.optimizer.step()

    def run(self, steps, start=0):
        for k in range(start, start + steps):
            self.step(k)
        return self


def _noise(like, generator):
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.device)
