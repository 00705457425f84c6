"""Parameters, gradients, models and controls that many tests share."""

import torch
from torch import nn

from paceline import PACE, Control

SHAPES = [(4, 3), (5,), (), (2, 3, 2)]
INF = float("inf")
BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1 + 4 / 128}
"""How an average is kept, and what that takes for a weight."""

# A row for each way the update can branch; every field of a control is away from its default in one of them.
CONTROLS = {
    "paper": Control.paper(30.0),
    "usual paper": Control.paper(),
    "saturated": Control.paper(INF, power=0.6),
    "two averages": Control.paper(30.0, power=0.3, return_power=0.8),
    "clipped at half": Control.paper(300.0, max_gain=0.5),
    "unclipped": Control.pull(3.0, power=0.4, max_gain=INF, return_power=None),
    "push": Control.push(),
    "pull": Control.pull(),
    "none": Control.none(),
    "none, two powers": Control.none(power=0.3, return_power=0.9),
    "power 0": Control.paper(30.0, power=0.0),
    "power 1": Control.paper(30.0, power=1.0),
    "every 3": Control.push(every=3),
    "every 3, pulled at every 2": Control.push(every=3, pull_every=2),
    "pulled at all steps": Control.paper(30.0, every=3, pull_every=1),
    "late": Control.push(delay=3.0, slope=0.5),
    "floor": Control.pull(0.7, power=0.9, return_power=1.0, least_rate=0.3),
    "gap after": Control.push(gap="after"),
    "growing": Control.push(0.75, grow=12),
    "average first": Control.pull(0.7, order="average, then pull"),
    "lookahead": Control.paper(INF, every=2, gap="after", order="average, then pull", return_power=0.9),
    "step": Control.paper(30.0, step=0.25),
}
BESIDE = {name: control for name, control in CONTROLS.items() if control.sizing == "uniform"}
"""The controls that `attach` can take beside any optimizer."""


def make_parameters(seed=0, dtype=torch.float64, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return [draw(shape).to(dtype).requires_grad_() for shape in shapes]


def make_gradients(steps, seed=1, shapes=SHAPES):
    """Return a list for each step of float64 gradients, with a drift so that averages trail live."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda shape: 0.5 + torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return [[draw(shape) for shape in shapes] for _ in range(steps)]


def set_gradients(parameters, gradients):
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.to(parameter)


def advance(optimizer, parameters, gradients):
    for step_gradients in gradients:
        set_gradients(parameters, step_gradients)
        optimizer.step()
    return optimizer


def run(parameters, gradients, control=CONTROLS["paper"], **settings):
    """Return a PACE over the parameters after a step for each entry of gradients."""
    return advance(PACE(parameters, **{"lr": 1e-2, "control": control, **settings}), parameters, gradients)


def parameters_of(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def everything(optimizer):
    """Return weights and state as a flat dict of copies, for bitwise comparison."""
    flat, states = {}, optimizer.state_dict()["state"]
    for i, parameter in enumerate(parameters_of(optimizer)):
        flat[f"{i}/weights"] = parameter.detach().clone()
        for key, value in states.get(i, {}).items():
            flat[f"{i}/{key}"] = torch.as_tensor(value).detach().clone()
    return flat


def assert_same_bits(a, b):
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype, key
        # Bytes, so that NaNs compare and -0.0 differs from 0.0.
        assert _bytes(a[key]) == _bytes(b[key]), f"{key} differs"


def _bytes(tensor):
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def copies(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def peak_bytes(action):
    """Return the most bytes that tensors made during an action held, by the profiler's count on a CPU."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        action()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


class Tied(nn.Module):
    """Embedding and output share a weight; one layer is frozen; there are BatchNorm buffers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens):
        return self.out(torch.tanh(self.frozen(self.norm(self.embed(tokens)))))


def train(model, optimizers, steps=10, seed=0):
    """Train on tokens 0 to 6, each of which has its successor as label."""
    generator = torch.Generator().manual_seed(seed)
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    for _ in range(steps):
        tokens = torch.randint(7, (16,), generator=generator)
        model.zero_grad()
        nn.functional.cross_entropy(model(tokens).float(), (tokens + 1) % 7).backward()
        for optimizer in optimizers:
            optimizer.step()


def trained(dtype=torch.float32, make=None, **settings):
    """Return a tied model after ten steps, and its optimizer."""
    torch.manual_seed(0)
    model = Tied().to(dtype)
    make = make or (lambda parameters: PACE(parameters, 3e-2, **{"control": Control.push(), **settings}))
    optimizer = make(list(model.parameters()))
    train(model, optimizer)
    return model, optimizer
