"""Parameters, gradients, models and settings that many tests share."""

import copy

import torch
from torch import nn

from paceline import PACE
from paceline.experiments.bench.measure import temporary_bytes

PATHS = [False, True]  # foreach: the loop, which is the reference, and the list path
SHAPES = [(4, 3), (5,), (), (2, 3, 2)]

# One row per way the update can branch; every option appears away from its default.
VARIANTS = {
    "default": {"gain": "paper"},
    "strong": {"gain": "paper", "pullback_strength": 30.0},
    "saturated": {"gain": "paper", "pullback_strength": float("inf")},
    "strength_0": {"gain": "paper", "pullback_strength": 0.0},
    "uniform": {"gain": "uniform", "pullback_strength": 2.0},
    "push": {"gain": "uniform", "pullback_strength": -0.5},
    "scaled": {"gain": "scaled", "pullback_strength": 60.0},
    "scaled_lookahead": {"gain": "scaled", "pullback_strength": 60.0, "gap": "lookahead", "update_every": 2},
    "lookahead": {"gain": "paper", "gap": "lookahead", "pullback_strength": 30.0},
    "lookahead_saturated": {"gain": "paper", "gap": "lookahead", "pullback_strength": float("inf")},
    "every_3": {"gain": "paper", "update_every": 3, "pullback_strength": 30.0},
    "return_power": {"gain": "paper", "return_power": 0.8, "pullback_strength": 30.0},
    "return_power_lookahead_every_2": {
        "gain": "paper",
        "return_power": 0.9,
        "gap": "lookahead",
        "update_every": 2,
        "pullback_strength": 30.0,
    },
    "power_0": {"gain": "paper", "ema_power": 0.0, "pullback_strength": 30.0},
    "power_1": {"gain": "paper", "ema_power": 1.0, "pullback_strength": 30.0},
    "offset_scale": {"gain": "paper", "ema_offset": 10.0, "ema_scale": 2.0, "pullback_strength": 30.0},
    "half_gain": {"gain": "paper", "max_gain": 0.5, "pullback_strength": 300.0},
    "maximize": {"gain": "paper", "maximize": True, "pullback_strength": 30.0},
    "no_decay": {"gain": "paper", "weight_decay": 0.0, "pullback_strength": 30.0},
    "betas_eps": {"gain": "paper", "betas": (0.8, 0.95), "eps": 1e-3, "pullback_strength": 30.0},
    "no_momentum": {"gain": "paper", "betas": (0.0, 0.95), "pullback_strength": 30.0},
    "usual": {"gain": "scaled"},
}


def make_parameters(seed=0, dtype=torch.float64, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


def make_gradients(steps, seed=1, shapes=SHAPES):
    """A list per step of float64 gradients, with a drift so that averages trail live."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [0.5 + torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        for _ in range(steps)
    ]


def set_gradients(parameters, gradients):
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.to(parameter.dtype)


def run(parameters, gradients, **settings):
    """A PACE over the parameters after one step per entry of gradients; the paper's unless settings say."""
    optimizer = PACE(parameters, **{"lr": 1e-2, "gain": "paper", **settings})
    advance(optimizer, parameters, gradients)
    return optimizer


def advance(optimizer, parameters, gradients):
    for step_gradients in gradients:
        set_gradients(parameters, step_gradients)
        optimizer.step()


def everything(optimizer):
    """Weights and state as a flat dict of copies, for bitwise comparison."""
    flat = {}
    for i, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        flat[f"{i}/weights"] = parameter.detach().clone()
        for key, value in optimizer.state.get(parameter, {}).items():
            flat[f"{i}/{key}"] = value.detach().clone()
    return flat


def assert_same_bits(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype, key
        # Bytes, so that NaNs compare and -0.0 differs from 0.0.
        assert _bytes(a[key]) == _bytes(b[key]), f"{key} differs"


def _bytes(tensor):
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def peak_bytes(action):
    """The most bytes that tensors made during the action held at once, by the profiler's count."""
    return temporary_bytes(action, "cpu")


SETTINGS = {"gain": "paper", "pullback_strength": 30.0, "update_every": 2, "return_power": 0.9}


class Net(nn.Module):
    """The parameters of `make_parameters`, named p0 to p3."""

    def __init__(self, dtype=torch.float32, seed=0):
        super().__init__()
        for i, parameter in enumerate(make_parameters(seed=seed, dtype=dtype)):
            self.register_parameter(f"p{i}", nn.Parameter(parameter.detach()))


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


def train(model, optimizer, steps=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(7, (16,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).float(), (tokens + 1) % 7).backward()
        optimizer.step()


def trained(dtype=torch.float32, **settings):
    torch.manual_seed(0)
    model = Tied().to(dtype)
    optimizer = PACE(model.parameters(), lr=3e-2, gain="paper", pullback_strength=0.1, **settings)
    train(model, optimizer)
    return model, optimizer


CHANGES_OF_MOMENTS = {
    "nothing": lambda optimizer, parameter: None,
    "in place": lambda optimizer, parameter: optimizer.state[parameter]["exp_avg_sq"].mul_(9.0),
    "replaced": lambda optimizer, parameter: optimizer.state[parameter].update(
        exp_avg_sq=optimizer.state[parameter]["exp_avg_sq"] * 9.0
    ),
    "loaded": lambda optimizer, parameter: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "not pulled": lambda optimizer, parameter: optimizer.param_groups[0].update(pullback_strength=0.0),
    "another gain": lambda optimizer, parameter: optimizer.param_groups[0].update(gain="paper"),
    "another path": lambda optimizer, parameter: optimizer.param_groups[0].update(fused=None),
}


def with_and_without_memory(change, shapes, device="cpu", **settings):
    """Everything after six steps of PACE(fused=True), with a change before the fourth that is taken back
    before the fifth, where possible: of an optimizer, and of one that is made to forget before every step."""
    settings = {"gain": "scaled", "pullback_strength": 15.0, "fused": True, **settings}
    runs = []
    for forgetful in (False, True):
        parameters = [
            p.detach().to(device).requires_grad_() for p in make_parameters(0, torch.float32, shapes)
        ]
        optimizer = PACE(parameters, lr=1e-2, **settings)
        for t, gradients in enumerate(make_gradients(6, shapes=shapes)):
            if t == 3:
                CHANGES_OF_MOMENTS[change](optimizer, parameters[0])
            if t == 4:
                optimizer.param_groups[0].update(settings)
            if forgetful:
                optimizer._tables.clear()
            advance(optimizer, parameters, [[gradient.to(device) for gradient in gradients]])
        runs.append(everything(optimizer))
    return runs
