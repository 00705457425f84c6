"""One table of all optimizers. Every test of test_battery.py runs over every row."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import schedulefree
import torch
from lion_pytorch import Lion
from problems import SHAPES
from torch import nn, optim

from paceline import BEMA, PACE, Blend, Control, FixedDecay, HalfLife, Polynomial, PowerLaw, attach
from paceline.optim.baselines import AdEMAMix, ema_nesterov, gpa, lookahead, schedule_free

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
FURTHER = {
    "power": PowerLaw(0.6),
    "polynomial": Polynomial(3),
    "fixed": FixedDecay(0.9, start=2),
    "half": HalfLife(0.3),
    "bema": BEMA(every=2),
    "blend": Blend(PowerLaw(0.8), share=0.6),
}


@dataclass(frozen=True)
class Row:
    """An optimizer as data: how to make it, and in what it differs from what all others do."""

    make: Callable[..., optim.Optimizer]  # of parameters or groups, and a learning rate
    lr: float = 1e-2
    shapes: tuple[tuple[int, ...], ...] = tuple(SHAPES)
    keeps_average: bool = True
    keeps_grad: bool = True  # .grad is the same after a step
    own_clock: bool = True  # each parameter counts its own steps; otherwise the group does
    rests_at_0: bool = True  # a step at lr = 0 moves nothing
    computes_average: bool = False  # from the base's state, so that it cannot be reset
    casts: bool = False  # its whole state follows a cast of the model
    dtypes: tuple[torch.dtype, ...] = DTYPES
    is_attached: bool = True  # its copies refuse to step


def pace(control, **own):
    dtypes = DTYPES if "average_dtype" not in own else DTYPES[1:]
    make = lambda p, lr: PACE(p, lr, control=control, **own)  # noqa: E731
    return Row(make, dtypes=dtypes, is_attached=False, casts=True)


def beside(base, control=Control.push(), lr=1e-2, averages=None, average_dtype="float32", **own):  # noqa: B008
    settings = {"control": control, "averages": averages, "average_dtype": average_dtype}
    return Row(lambda p, lr: attach(base(p, lr=lr), **settings), lr=lr, **own)


def momentum(parameters, lr):
    return optim.SGD(parameters, lr, momentum=0.9)


AVERAGE_FIRST = Control.pull(3.0, every=2, gap="after", order="average, then pull")
ROWS = {
    # Not ours: it shows that the tests ask for nothing that torch's own optimizer does not do.
    "AdamW": Row(lambda p, lr: optim.AdamW(p, lr), lr=0.03, keeps_average=False, is_attached=False),
    "PACE paper, loop": pace(Control.paper(0.3), foreach=False),
    "PACE paper": pace(Control.paper(0.3)),
    "PACE push": pace(Control.push()),
    "PACE pull": pace(Control.pull(every=2)),
    "PACE average first": pace(AVERAGE_FIRST),
    "PACE none": pace(Control.none()),
    "PACE bfloat16": pace(Control.paper(0.3), average_dtype="bfloat16"),
    "PACE int8": pace(Control.push(every=2), average_dtype="int8"),
    "AdamW beside": beside(optim.AdamW, Control.none()),
    "AdamW pushed": beside(optim.AdamW),
    "AdamW pulled, int8": beside(optim.AdamW, Control.pull(), average_dtype="int8", dtypes=DTYPES[1:]),
    "fused AdamW pushed": beside(lambda p, lr: optim.AdamW(p, lr, fused=True)),
    "AMSGrad, average first": beside(lambda p, lr: optim.AdamW(p, lr, amsgrad=True), AVERAGE_FIRST),
    "SGD pulled": beside(optim.SGD, Control.pull(0.5), lr=0.1),
    "momentum, many averages": beside(momentum, averages=FURTHER),
    "Adafactor pushed": beside(optim.Adafactor),
    "NAdam pushed": beside(optim.NAdam),
    "Lion pushed": beside(Lion, lr=0.03),
    "Muon pushed": beside(lambda p, lr: optim.Muon(p, lr, ns_steps=2), lr=0.1, shapes=((4, 3), (3, 3))),
    "Lookahead": Row(lambda p, lr: lookahead(optim.AdamW(p, lr), k=3)),
    "GPA": Row(lambda p, lr: gpa(optim.AdamW(p, lr), mu_x=0.9), rests_at_0=False),
    "EMA-Nesterov": Row(
        lambda p, lr: ema_nesterov(optim.AdamW(p, lr), push=0.5, decay=0.9, start=3, stop=30)
    ),
    "Schedule-Free AdamW": Row(
        lambda p, lr: schedule_free(schedulefree.AdamWScheduleFree(p, lr, warmup_steps=5)),
        keeps_grad=False,
        own_clock=False,
        rests_at_0=False,
        computes_average=True,
    ),
    "Schedule-Free SGD": Row(
        lambda p, lr: schedule_free(schedulefree.SGDScheduleFree(p, lr)),
        lr=0.1,
        own_clock=False,
        rests_at_0=False,
        computes_average=True,
    ),
    "AdEMAMix": Row(
        lambda p, lr: AdEMAMix(p, lr, (0.9, 0.999, 0.99), alpha=2.0, alpha_warmup=20),
        keeps_average=False,
        is_attached=False,
        casts=True,
    ),
}

rows = pytest.mark.parametrize("name", ROWS)
averaging_rows = pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.keeps_average])


class Problem:
    """A quadratic with noise: parameters, and gradients of half the squared distance from targets."""

    def __init__(self, name, dtype=torch.float32, seed=0, device="cpu", shapes=None):
        self.row = ROWS[name]
        generator = torch.Generator().manual_seed(seed)
        draw = lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
        shapes = self.row.shapes if shapes is None else shapes
        self.model = nn.ParameterList(draw(shape).to(device, dtype) for shape in shapes)
        self.parameters = list(self.model)
        self.targets = [draw(shape).to(device) for shape in shapes]
        self.optimizer = self.row.make(self.parameters, self.row.lr)

    def loss(self):
        pairs = zip(self.parameters, self.targets, strict=True)
        return sum(((p.detach().double() - t) ** 2).sum().item() for p, t in pairs) / 2

    def gradients(self, k):
        """Return the gradients of step k: a pure function of the weights and of k."""
        noise = torch.Generator().manual_seed(1000 + k)
        found = []
        for p, target in zip(self.parameters, self.targets, strict=True):
            draw = torch.randn(target.shape, generator=noise, dtype=torch.float64).to(target.device)
            found.append((p.detach().double() - target + 0.1 * draw).to(p))
        return found

    def set_gradients(self, k):
        for parameter, gradient in zip(self.parameters, self.gradients(k), strict=True):
            parameter.grad = gradient if parameter.requires_grad else None

    def closure(self, k):
        def evaluate():
            self.set_gradients(k)
            return torch.tensor(self.loss())

        return evaluate

    def step(self, k):
        self.set_gradients(k)
        self.optimizer.step()

    def run(self, steps, start=0):
        for k in range(start, start + steps):
            self.step(k)
        return self

    def like(self, weights, seed=7):
        """Return a fresh problem of the same targets, with these weights."""
        fresh = Problem(next(name for name, row in ROWS.items() if row is self.row), seed=seed)
        fresh.targets = self.targets
        with torch.no_grad():
            for parameter, value in zip(fresh.parameters, weights, strict=True):
                parameter.copy_(value)
        return fresh
