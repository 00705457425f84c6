"""What 8-bit moments cost with the pull around them: time, memory and exactness, side by side in one run.

    python benchmarks/low_bit.py                        the CPU: tensors of an 18M GPT, and 320 small ones
    python benchmarks/low_bit.py --device cuda          a GPU: those of GPT-2's 124M, and 320 small ones
    python benchmarks/low_bit.py --record records/x.json

The 8-bit AdamW of torchao and that of bitsandbytes, where they are installed, alone and inside `Pullback`,
beside torch's fused AdamW and PACE. All take turns, round by round. ms is the median of a step, least that of
the quickest, by which to go on a busy machine; × are ratios of either. On a GPU both are the time that it is
busy, as in training, where the host is ahead, and wall is from an idle GPU to an idle GPU. state and
temporary are bytes for a weight: what is kept beside it, and the most that a step holds for a moment.

Then 50 steps of a small regression: how far the weights are from those of the same optimizer with moments in
float32, as a share of the way that those went, and the losses of both.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler, which finds temporaries, says a lot

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from paceline import PACE, Pullback, averaged_weights
from paceline.experiments.bench.command import environment
from paceline.experiments.bench.measure import busy_seconds, seconds, temporary_bytes
from paceline.experiments.bench.subjects import MODELS, Shapes, make_parameters, state_bytes

USUAL = {"cpu": ["gpt-18m", "small"], "cuda": ["gpt2", "small"]}
SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
BASE = "AdamW, fused"

Make = Callable[..., Optimizer]


class Contender(NamedTuple):
    """An optimizer, by how it is made of parameters and the settings of AdamW."""

    make: Make
    inner: str | None = None  # the 8-bit optimizer inside it
    twin: str | None = None  # the same with moments in float32


def contenders() -> dict[str, Contender]:
    """All of them that can be had here."""
    found = {
        BASE: Contender(lambda p, **s: AdamW(p, fused=True, **s)),
        "PACE, fused": Contender(lambda p, **s: PACE(p, **s)),
        "PACE, fused, paper": Contender(lambda p, **s: PACE(p, gain="paper", **s)),
    }
    for package, make in low_bit().items():
        found[package] = Contender(make, twin=BASE)
        around = f"Pullback of {package}"
        found |= {
            f"{around}, strength 0": Contender(wrapped(make, pullback_strength=0.0), package),
            f"{around}, paper": Contender(wrapped(make, gain="paper"), package, "PACE, fused, paper"),
            f"{around}, scaled": Contender(wrapped(make, gain="scaled"), package, "PACE, fused"),
        }
    return found


def low_bit() -> dict[str, Make]:
    """The 8-bit AdamWs that are installed, by package."""
    found: dict[str, Make] = {}
    if find_spec("torchao") is not None:
        from torchao.optim import AdamW8bit

        found["torchao"] = AdamW8bit
    if find_spec("bitsandbytes") is not None:
        from bitsandbytes.optim import AdamW8bit as AdamW8bitOfBitsandbytes

        found["bitsandbytes"] = AdamW8bitOfBitsandbytes
    return found


def wrapped(make: Make, **control: Any) -> Make:
    return lambda p, **settings: Pullback(make(p, **settings), **control)


# --- Cost -------------------------------------------------------------------------------------------


def measure(model: str, shapes: Shapes, device: str, rounds: int) -> list[dict[str, Any]]:
    """A row for each contender."""
    found = contenders()
    optimizers = {}
    for name, contender in found.items():
        say(f"{model}: first steps of {name}")
        optimizers[name] = contender.make(make_parameters(shapes, device), **SETTINGS)
        for _ in range(3):  # they allocate, and torchao compiles its step for each shape
            optimizers[name].step()
    times: dict[str, list[float]] = {name: [] for name in found}
    walls: dict[str, list[float]] = {name: [] for name in found}
    for i in range(rounds):
        say(f"{model}: round {i + 1} of {rounds}")
        for name, optimizer in optimizers.items():
            walls[name].append(seconds(optimizer.step, device))
            if device == "cuda":
                times[name].append(busy_seconds(optimizer.step, device, ahead=min(walls[name])))
    say("")
    medians = {name: statistics.median(times[name] or walls[name]) for name in found}
    least = {name: min(times[name] or walls[name]) for name in found}
    waits = {name: statistics.median(walls[name]) for name in found}
    weights = sum(torch.Size(shape).numel() for shape in shapes)
    rows = []
    for name, contender in found.items():
        row = {
            "model": model,
            "optimizer": name,
            "ms": 1e3 * medians[name],
            "least_ms": 1e3 * least[name],
            "ratio": medians[name] / medians[BASE],
            "ratio_to_inner": medians[name] / medians[contender.inner] if contender.inner else None,
            "least_ratio_to_inner": least[name] / least[contender.inner] if contender.inner else None,
            "wall": 1e3 * waits[name],
            "wall_ratio": waits[name] / waits[BASE],
            "wall_ratio_to_inner": waits[name] / waits[contender.inner] if contender.inner else None,
            "state": state_bytes(optimizers[name], device) / weights,
            "temporary": temporary_bytes(optimizers[name].step, device) / weights,
        }
        rows.append(row)
    del optimizers, optimizer
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return rows


# --- Exactness --------------------------------------------------------------------------------------


def regression(device: str, steps: int = 50) -> list[dict[str, Any]]:
    """Of each contender: losses, and the distance from its twin."""
    found, ends = contenders(), {}
    rows = []
    for name, contender in found.items():
        say(f"regression: {name}")
        start, live, losses = fit(contender.make, device, steps)
        ends[name] = live
        row: dict[str, Any] = {"optimizer": name, **losses}
        if contender.twin is not None:
            twin = ends[contender.twin]
            row |= {"twin": contender.twin, "distance": length(live, twin) / length(twin, start)}
        rows.append(row)
    say("")
    return rows


def fit(make: Make, device: str, steps: int) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
    """The weights before and after, and losses on all examples."""
    generator = torch.Generator().manual_seed(0)
    # Of the 4,096 weights and more that both packages want, else they keep float32.
    shapes = [(128, 64), (64, 128)]
    teacher, student = (
        [(torch.randn(s, generator=generator) / s[1] ** 0.5).to(device) for s in shapes] for _ in range(2)
    )
    inputs = torch.randn(2048, 64, generator=generator).to(device)
    noise = torch.randn(2048, 64, generator=generator).to(device)
    batches = torch.randint(2048, (steps, 64), generator=generator).to(device)

    def outputs(weights: list[Any], x: Tensor) -> Tensor:
        return torch.tanh(x @ weights[0].T) @ weights[1].T

    targets = outputs(teacher, inputs) + 0.1 * noise
    parameters = [nn.Parameter(weight.clone()) for weight in student]
    optimizer = make(parameters, **{**SETTINGS, "lr": 1e-2})

    def loss_on(batch: Any) -> Tensor:
        return (outputs(parameters, inputs[batch]) - targets[batch]).square().mean()

    for batch in batches:
        optimizer.zero_grad()
        loss_on(batch).backward()
        optimizer.step()
    everything = slice(None)
    with torch.no_grad():
        losses = {"loss": loss_on(everything).item(), "loss_of_average": None}
        live = [parameter.detach().clone() for parameter in parameters]
        if isinstance(optimizer, PACE | Pullback):
            with averaged_weights(optimizer):
                losses["loss_of_average"] = loss_on(everything).item()
    return student, live, losses


def length(a: list[Tensor], b: list[Tensor]) -> float:
    return sum((x - y).square().sum().item() for x, y in zip(a, b, strict=True)) ** 0.5


# --- The command ------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Where it is, on a terminal."""
    if sys.stdout.isatty():
        print(f"\r{text:78}", end="\r", flush=True)


def show_costs(rows: list[dict[str, Any]]) -> None:
    times = f"{'ms':>9} {'× AdamW':>8} {'× inner':>8} {'least':>9} {'× inner':>8} {'wall':>9} {'× inner':>8}"
    print(f"{'':40} {times} {'state':>6} {'temporary':>10}")
    for row in rows:
        inner = {
            kind: "" if row[f"{kind}ratio_to_inner"] is None else f"{row[f'{kind}ratio_to_inner']:.2f}"
            for kind in ("", "least_", "wall_")
        }
        times = f"{row['ms']:9.2f} {row['ratio']:8.2f} {inner['']:>8} {row['least_ms']:9.2f}"
        times += f" {inner['least_']:>8} {row['wall']:9.2f} {inner['wall_']:>8}"
        print(f"{row['optimizer']:40} {times} {row['state']:6.2f} {row['temporary']:10.2f}")


def show_distances(rows: list[dict[str, Any]]) -> None:
    print(f"{'50 steps of a regression':40} {'loss':>9} {'of average':>11} {'distance':>9}")
    for row in rows:
        average = "" if row["loss_of_average"] is None else f"{row['loss_of_average']:.5f}"
        distance = f"{row['distance']:.2%} from {row['twin']}" if "twin" in row else ""
        print(f"{row['optimizer']:40} {row['loss']:9.5f} {average:>11} {distance:>9}".rstrip())


def main() -> None:
    warnings.filterwarnings("ignore")  # the packages' own
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=device)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--rounds", type=int, default=15, help="steps timed of each [15]")
    parser.add_argument("--record", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("argument --rounds: at least 1")
    if not low_bit():
        parser.error("there is no 8-bit AdamW to measure; pip install torchao, or bitsandbytes")
    about = environment(options.device)
    about |= {package: import_module(package).__version__ for package in low_bit()}
    results: dict[str, Any] = {"rounds": options.rounds, "rows": []}
    for model in options.models or USUAL[options.device]:
        shapes = MODELS[model]()
        count = sum(torch.Size(shape).numel() for shape in shapes)
        rows = measure(model, shapes, options.device, options.rounds)
        print(f"{model}: {count / 1e6:,.1f}M weights in {len(shapes)} tensors on {options.device}, float32")
        show_costs(rows)
        print()
        results["rows"] += rows
    results["regression"] = regression(options.device)
    show_distances(results["regression"])
    if options.record:
        record = {"benchmark": "low_bit", **about, **results}
        options.record.write_text(json.dumps(record, indent=1) + "\n")
        print(f"saved {options.record}")


if __name__ == "__main__":
    main()
