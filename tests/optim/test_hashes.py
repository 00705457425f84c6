"""Weights and state after 50 steps, as hashes of their bytes: what a change of structure must not change.

`python tests/optim/test_hashes.py` writes the hashes anew. Whoever does that says why, hash by hash.
Other vector instructions may round otherwise: the stored hashes count where AdamW of torch has the stored
fingerprint. That foreach and the loop agree is tested on every machine.
"""

import hashlib
import json
from functools import cache
from pathlib import Path

import pytest
import torch
from problems import make_gradients, make_parameters, set_gradients

from paceline import PACE
from paceline.optim.state import average_of, keeps

STORED = Path(__file__).parents[1] / "golden" / "optim_hashes.json"
STEPS, SHAPES = 50, [(4, 3), (5,), (17, 31)]
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
STRONG = {"gain": "paper", "pullback_strength": 30.0}
PUSH = {"gain": "uniform", "pullback_strength": -0.5}
TWO = {"return_power": 0.8}

CONTROLS = {
    "paper": {"gain": "paper"},
    "strong": STRONG,
    "saturated": {"gain": "paper", "pullback_strength": float("inf")},
    "none": {"gain": "paper", "pullback_strength": 0.0},
    "none, every 3": {"gain": "uniform", "pullback_strength": 0.0, "update_every": 3},
    "pull": {"gain": "uniform", "pullback_strength": 2.0},
    "push": PUSH,
    "two averages": {**STRONG, **TWO},
    "push, two averages": {**PUSH, **TWO},
    "lookahead": {**STRONG, "gap": "lookahead"},
    "every 3": {**STRONG, "update_every": 3},
    "push, every 3, lookahead, two averages": {**PUSH, **TWO, "update_every": 3, "gap": "lookahead"},
    "offset and scale": {**STRONG, "ema_offset": 10.0, "ema_scale": 2.0},
    "power 0": {**STRONG, "ema_power": 0.0},
    "power 1": {**PUSH, "ema_power": 1.0},
    "half gain": {**STRONG, "pullback_strength": 300.0, "max_gain": 0.5},
    "maximize": {**STRONG, "maximize": True},
    "no decay": {**STRONG, "weight_decay": 0.0},
    "no momentum": {**STRONG, "betas": (0.0, 0.95)},
}
SOME = ("strong", "none", "push, two averages", "every 3", "lookahead")
CASES = [(control, "float32", "float32") for control in CONTROLS]
CASES += [(control, dtype, "float32") for control in SOME for dtype in ("float64", "bfloat16")]
CASES += [(control, "float32", "bfloat16") for control in SOME]
CASES += [(control, "bfloat16", "int8") for control in SOME[2:]]
CASES += [("push, two averages", "float32", "int8"), ("push, two averages", "bfloat16", "bfloat16")]
PATHS = {"loop": False, "foreach": True}


def trained(optimizer_of, dtype):
    """An optimizer after all steps: two groups, a schedule, and a parameter that pauses."""
    parameters, gradients = make_parameters(0, dtype, SHAPES), make_gradients(STEPS, 1, SHAPES)
    for t in (4, 9, 10):
        gradients[t][1] = None
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 3e-3, "weight_decay": 0.1}]
    optimizer = optimizer_of(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / 8) - t / 100)
    for own in gradients:
        set_gradients(parameters, own)
        optimizer.step()
        schedule.step()
    return optimizer


def hashed(arrays):
    """Of lists of tensors, a hash for each name."""
    found = {}
    for name, tensors in sorted(arrays.items()):
        data = b"".join(
            tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors
        )
        found[name] = hashlib.sha256(data).hexdigest()[:16]
    return found


@torch.no_grad()
def arrays_of(optimizer):
    """The one place that knows where an optimizer has what."""
    arrays = {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        state, own = optimizer.state[parameter], {"live": parameter.detach()}
        own |= {key: state[key] for key in ("exp_avg", "exp_avg_sq") if key in state}
        names = [name for name in ("average", "returned") if keeps(state, name)]
        own |= {name: average_of(state, name, parameter) for name in names}
        for name, tensor in own.items():
            arrays.setdefault(name, []).append(tensor)
    return arrays


@cache
def hashes_of(control, dtype, kept, path):
    settings = {"foreach": PATHS[path], "average_dtype": kept, **CONTROLS[control]}
    return hashed(arrays_of(trained(lambda groups: PACE(groups, lr=1e-2, **settings), DTYPES[dtype])))


@cache
def fingerprint():
    """What this machine makes of AdamW, and of the powers that rates are."""
    found = {}
    for name, foreach in PATHS.items():
        for dtype in DTYPES:
            made = trained(lambda groups, f=foreach: torch.optim.AdamW(groups, foreach=f), DTYPES[dtype])
            arrays = [p.detach() for group in made.param_groups for p in group["params"]]
            arrays += [made.state[p]["exp_avg_sq"] for group in made.param_groups for p in group["params"]]
            found[f"{dtype}, {name}"] = hashed({"all": arrays})["all"]
    powers = [(1.0 + t) ** -power for t in range(STEPS) for power in (0.5, 0.8)]
    return {**found, "powers": hashlib.sha256(repr(powers).encode()).hexdigest()[:16]}


def name_of(control, dtype, kept, path):
    return f"{control}; {dtype}; average in {kept}; {path}"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("control, dtype, kept", CASES)
def test_no_bit_has_changed(control, dtype, kept, path):
    stored = json.loads(STORED.read_text())
    if stored["fingerprint"] != fingerprint():
        pytest.skip("another machine: torch's own AdamW gives other bits here than where these were stored")
    found = hashes_of(control, dtype, kept, path)
    assert found == stored["hashes"][name_of(control, dtype, kept, path)]


@pytest.mark.parametrize("control, dtype, kept", [case for case in CASES if case[1] != "bfloat16"])
def test_foreach_has_the_bits_of_the_loop(control, dtype, kept):
    assert hashes_of(control, dtype, kept, "loop") == hashes_of(control, dtype, kept, "foreach")


if __name__ == "__main__":
    hashes = {name_of(*case, path): hashes_of(*case, path) for case in CASES for path in PATHS}
    STORED.write_text(json.dumps({"fingerprint": fingerprint(), "hashes": hashes}, indent=1) + "\n")
    print(f"{len(hashes)} kinds of run are in {STORED}")
