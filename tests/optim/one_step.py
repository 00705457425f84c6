"""What one step of an optimizer must leave, from its state before it: for test_state_machine.py."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from problems import BESIDE, CONTROLS
from reference import Reference, SGDReference, array

from paceline import PACE, attach
from paceline.optim.state import average_of, entries_of_average, storage_of
from paceline.optim.weights import keeper_of

VALUES = {
    "lr": [1e-2, 0.3, torch.tensor(0.1, dtype=torch.float64), 1e-3, 0.0],
    "betas": [(0.8, 0.9), (0.95, 0.999), (0.0, 0.9), (0.8, 0.5)],
    "eps": [1e-8, 1e-3],
    "weight_decay": [0.0, 0.01, 0.3],
    "maximize": [False, True],
    "average_dtype": ["float32", "bfloat16", "int8"],
    "control": list(CONTROLS.values()),
}
ADAMW = tuple(VALUES)[:5]
SHAPES = [(3,), (), (4, 5), (0,), (150,)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
# What rounding at random may change, as a share of the largest |live − average| of a tensor.
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-7, "int8": 1.01 / 127}


def drawn(noise, shape, scale=1.0):
    """Return values with a drift, so that averages trail live, and with outliers."""
    values = scale * (0.3 + np.random.default_rng(noise.randrange(2**32)).standard_t(2.5, shape))
    return torch.tensor(values.tolist(), dtype=torch.float64)


@dataclass(frozen=True)
class Subject:
    """All that the machine must know of an optimizer."""

    make: Callable[..., Any]  # of parameters and settings
    names: tuple[str, ...] = tuple(VALUES)  # of its settings
    moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    reference: type = Reference
    is_attached: bool = False  # casts and copies are not for these

    def settings(self, noise, dtype):
        """Return a setting of each name that parameters of a dtype can have."""
        own = {name: self.draw(noise, name) for name in self.names}
        return own | ({"average_dtype": "float32"} if dtype == torch.float64 else {})

    def draw(self, noise, name):
        return noise.choice(list(BESIDE.values()) if name == "control" and self.is_attached else VALUES[name])


def beside(base, params, control=CONTROLS["push"], average_dtype="float32", **own):
    return attach(base(params, **own), control=control, average_dtype=average_dtype)


MOMENTS = ("base_exp_avg", "base_exp_avg_sq")
SGD = partial(beside, partial(torch.optim.SGD, momentum=0.9))
SUBJECTS = {
    "loop": Subject(partial(PACE, foreach=False)),
    "foreach": Subject(partial(PACE, foreach=True)),
    "AdamW": Subject(partial(beside, torch.optim.AdamW), moments=MOMENTS, is_attached=True),
    "SGD": Subject(SGD, ("lr", *tuple(VALUES)[5:]), ("base_momentum_buffer",), SGDReference, True),
}


def contents(optimizer, parameters):
    """Return copies of parameters and of all that is kept of them."""
    keeper, found = keeper_of(optimizer), {}
    for i, parameter in enumerate(parameters):
        own = {"weights": parameter, **keeper.memory.get(parameter, {})}
        if keeper.memory is not optimizer.state:
            base = optimizer.state.get(parameter, {})
            own |= {f"base_{key}": value for key, value in base.items() if value is not None}
        found |= {f"{i or ''}{key}": value.detach().clone() for key, value in own.items()}
    return found


def kept(optimizer, parameter):
    """Return copies of what is kept of a parameter next to its live weights."""
    found = contents(optimizer, [parameter])
    return {key: value for key, value in found.items() if key not in ("weights", "live")}


def without_averages(entries):
    return {key: value for key, value in entries.items() if not key.startswith(("average", "returned"))}


def has(entries, name):
    """Return whether there is an average of this name that has begun."""
    return bool(entries) and bool(entries["step"]) and storage_of(entries, name) is not None


def source_of(entries, name, names):
    """Return the average that one of a control goes on from: what is returned stays what is returned."""
    if name == "average" and "returned" not in names and has(entries, "returned"):
        return "returned"
    return "average" if name == "returned" and not has(entries, "returned") else name


def largest(values):
    return float(np.abs(values).max()) if values.size else 0.0


class Expected:
    """What the next step makes of a parameter."""

    def __init__(self, subject, own, live, entries):
        self.subject, self.own = subject, own
        wide, self.lost = torch.promote_types(live.dtype, torch.float32), 0.0
        adamw = {name: own[name] for name in ADAMW if name in own} | {"lr": float(own["lr"])}
        self.reference = reference = subject.reference(array(live), own["control"], **adamw)
        averages = {}
        for name in own["control"].averages:  # one that is not there begins as live
            source = source_of(entries, name, own["control"].averages)
            averages[name] = array(
                average_of(entries, source, live).to(wide) if has(entries, source) else live
            )
            if has(entries, source) and storage_of(entries, source) != own["average_dtype"]:
                gap = largest(reference.live - averages[name])
                self.lost = max(self.lost, ROUNDING[own["average_dtype"]] * gap)
        reference.average = averages["average"]
        reference.returned = averages.get("returned", reference.average)
        for name, key in zip("mv", subject.moments, strict=False):
            if key in entries:
                setattr(reference, name, array(entries[key].to(live.dtype)))
        reference.t = int(entries["step"]) if entries else 0
        before = reference.live, reference.average, reference.returned
        self.sizes = [sum(map(np.abs, before)), np.abs(reference.m), reference.v]

    def check(self, gradient, live, entries):
        """Take the step and compare what the optimizer's has left."""
        own, reference, control = self.own, self.reference, self.own["control"]
        gradient, unit = array(gradient), 32 * torch.finfo(live.dtype).eps
        reference.step(gradient)
        limit = unit * (self.sizes[0] + np.abs(reference.raw) + np.abs(reference.live)) + 3 * self.lost
        assert (np.abs(array(live) - reference.live) <= limit).all(), "live"
        sizes = self.sizes[1] + np.abs(gradient), self.sizes[2] + gradient**2
        for name, key, size in zip("mv", self.subject.moments, sizes, strict=False):
            assert entries[key].dtype == live.dtype, key
            assert (np.abs(array(entries[key]) - getattr(reference, name)) <= unit * size).all(), key
        names = {"step", *self.subject.moments} | ({"base_step"} & entries.keys())
        for name in control.averages:
            steers = name == "average" and control.strength != 0
            theirs = reference.average if steers else reference.evaluated
            rounding = ROUNDING[own["average_dtype"]] * (largest(reference.live - theirs) + largest(limit))
            off = np.abs(array(average_of(entries, name, live)) - theirs)
            assert (off <= limit + self.lost + rounding).all(), name
            kept = entries_of_average(name, live, own["average_dtype"])
            assert all(entries[key].dtype == entry.dtype for key, entry in kept.items())
            names |= kept.keys()
        assert entries.keys() == names
        counts = {entries[key].item() for key in ("step", "base_step") if key in entries}
        assert counts == {reference.t}
