"""Hash weights and state of PACE after 50 steps on every path that the first version and this one share.

    PYTHONPATH=<sources of a version> python bits.py OUT.json
    python bits.py --compare FIRST.json NOW.json

The first version is that of commit e7fda71. A uniform gain R runs at lr · (1 + R) there, which is what lr
means now.
"""

import hashlib
import itertools
import json
import platform
import sys
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

SHAPES = [(64, 33), (129,), (), (3, 5, 7)]
LR, STEPS = 1e-2, 50
CASES: dict[str, tuple[dict[str, object], tuple[str, dict[str, object]], dict[str, object]]] = {
    # name: settings of the first version, those of Control, and what both take
    "algorithm 1": ({"gain": "paper"}, ("paper", {}), {}),
    "harder": ({"gain": "paper", "pullback_strength": 3.0}, ("paper", {"c": 3.0}), {}),
    "two averages": (
        {"gain": "paper", "pullback_strength": 3.0, "return_power": 0.8},
        ("paper", {"c": 3.0, "return_power": 0.8}),
        {},
    ),
    "every 3": ({"gain": "paper", "update_every": 3}, ("paper", {"every": 3}), {}),
    "clipped": (
        {"gain": "paper", "pullback_strength": 300.0, "max_gain": 0.5},
        ("paper", {"c": 300.0, "max_gain": 0.5}),
        {},
    ),
    "slope": ({"gain": "paper", "ema_scale": 0.3}, ("paper", {"slope": 0.3}), {}),
    "average first": (
        {"gain": "paper", "gap": "lookahead"},
        ("paper", {"gap": "after", "order": "average, then pull"}),
        {},
    ),
    "no decay": ({"gain": "paper"}, ("paper", {}), {"weight_decay": 0.0}),
    "maximize": ({"gain": "paper"}, ("paper", {}), {"maximize": True}),
    "none": (
        {"gain": "paper", "pullback_strength": 0.0, "ema_power": 0.7},
        ("none", {}),
        {},
    ),
    "push": (
        {"gain": "uniform", "pullback_strength": -0.5, "ema_power": 0.6, "return_power": 0.7},
        ("push", {}),
        {},
    ),
    "pull": (
        {"gain": "uniform", "pullback_strength": 1.0, "ema_power": 0.2, "return_power": 0.7},
        ("pull", {}),
        {},
    ),
}
FACTORS = {"push": 0.5, "pull": 2.0}
DTYPES, STORAGES = (torch.float64, torch.float32, torch.bfloat16), ("float32", "bfloat16", "int8")


def digest(tensors: list[Tensor]) -> str:
    """Return a hash of the bits of tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def run(name: str, dtype: torch.dtype, storage: str, foreach: bool) -> dict[str, str]:
    """Return the hashes of weights and of each entry of the state."""
    import paceline

    first, (kind, fields), shared = CASES[name]
    generator = torch.Generator().manual_seed(0)
    lives = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in SHAPES]
    settings = {"average_dtype": storage, "foreach": foreach, **shared}
    if hasattr(paceline, "Control"):
        control = getattr(paceline.Control, kind)(**fields)
        optimizer = paceline.PACE(lives, lr=LR, control=control, **settings)
    else:
        optimizer = paceline.PACE(lives, lr=LR * FACTORS.get(name, 1.0), **first, fused=False, **settings)
    for _ in range(STEPS):
        for live in lives:
            live.grad = (0.1 + torch.randn(live.shape, generator=generator)).to(dtype)
        optimizer.step()
    keys = sorted({key for live in lives for key in optimizer.state[live]} - {"step"})
    entries = {key: digest([optimizer.state[live][key] for live in lives]) for key in keys}
    return {"live": digest(list(lives)), **entries}


def compare(first: Path, now: Path) -> None:
    """Print which paths differ, and in what."""
    a, b = (json.loads(path.read_text())["hashes"] for path in (first, now))
    different = [path for path in a if a[path] != b[path]]
    print(f"{len(a) - len(different)} of {len(a)} paths have the same bits")
    for path in different:
        keys = [key for key in a[path].keys() | b[path].keys() if a[path].get(key) != b[path].get(key)]
        print(f"{path}: {', '.join(keys)}")


def main(out: Path) -> None:
    """Hash every path, and write the hashes with date and versions."""
    torch.set_num_threads(1)
    hashes = {}
    for case, dtype, storage, foreach in itertools.product(CASES, DTYPES, STORAGES, (False, True)):
        if dtype == torch.float64 and storage != "float32":
            continue
        kind = f"{str(dtype).removeprefix('torch.')}, averages {storage}"
        hashes[f"{case}, {kind}, {'foreach' if foreach else 'loop'}"] = run(case, dtype, storage, foreach)
    made = {"date": date.today().isoformat(), "torch": torch.__version__, "machine": platform.machine()}
    made["instructions"] = torch.backends.cpu.get_cpu_capability()
    out.write_text(json.dumps({**made, "hashes": hashes}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "--compare":
        compare(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main(Path(sys.argv[1]))
