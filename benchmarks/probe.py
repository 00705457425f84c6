"""What telemetry costs: steps of PACE with probes of several kinds, in one run, as ratios.

    python benchmarks/probe.py                      the CPU: a 12M-parameter GPT's tensors
    python benchmarks/probe.py --device cuda        a GPU: GPT-2's 124M
    python benchmarks/probe.py --save records/x.json

The contenders take turns, step by step, so that a busy machine slows all of them alike. A step's time is the
median of the steps that were not probed and that of those which were, in their proportion; the GPU is waited
for after every step, so nothing of the probe is hidden behind it. "temporary" is the most memory a step holds
beyond weights, gradients and state, in units of the weights.
"""

import argparse
import gc
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from paceline import PACE
from paceline.experiments.bench.command import environment
from paceline.experiments.bench.measure import seconds, temporary_bytes
from paceline.experiments.bench.subjects import gpt_shapes, make_parameters
from paceline.optim.probes import probe

NEVER = 10**9
CONTENDERS = {
    "no probe": None,
    "probe, not due": NEVER,
    "probe, every=100": 100,
    "probe, every=10": 10,
    "probe, every=1": 1,
}


def warm(shapes: list[tuple[int, ...]], device: str) -> PACE:
    """An optimizer that has taken two steps, probed, as first ones allocate."""
    # On a GPU the pass that takes the step tells of it; on a CPU copies are taken.
    optimizer = PACE(make_parameters(shapes, device), foreach=None if device == "cuda" else True)
    with probe(optimizer, every=1):
        optimizer.step()
        optimizer.step()
    return optimizer


def measure(shapes: list[tuple[int, ...]], device: str, rounds: int) -> list[dict[str, Any]]:
    optimizers = {name: warm(shapes, device) for name in CONTENDERS}
    probes = {name: probe(optimizers[name], every) for name, every in CONTENDERS.items() if every}
    times: dict[tuple[str, bool], list[float]] = {}
    gc.collect()
    gc.disable()  # of few probed steps one that it falls into would be the median
    for t in range(3, rounds + 3):
        if sys.stdout.isatty():
            print(f"\rround {t - 2} of {rounds}", end="\r", flush=True)
        for name, every in CONTENDERS.items():
            probed = every is not None and t % every == 0
            times.setdefault((name, probed), []).append(seconds(optimizers[name].step, device))
    gc.enable()
    assert {name: len(p.history) for name, p in probes.items()} == {
        name: min(1000, len(times.get((name, True), []))) for name in probes
    }
    weights = 4 * sum(torch.Size(shape).numel() for shape in shapes)
    rows = []
    for name, every in CONTENDERS.items():
        plain, probed_ms = (1e3 * statistics.median(times.get((name, kind), [0.0])) for kind in (False, True))
        share = 1 / every if every else 0.0
        temporary = temporary_bytes(optimizers[name].step, device) / weights
        ms = (1 - share) * plain + share * (probed_ms if every != NEVER else plain)
        rows.append({"contender": name, "ms": ms, "probed ms": probed_ms or None, "temporary": temporary})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--rounds", type=int, default=300, help="steps timed per contender")
    parser.add_argument("--save", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    if options.rounds < 100:
        parser.error("argument --rounds: with fewer than 100 no step of every=100 is probed")
    size = (12, 768, 50257, 1024) if options.device == "cuda" else (6, 384, 4096, 256)
    shapes = gpt_shapes(*size)
    count = sum(torch.Size(shape).numel() for shape in shapes)
    print(f"{count / 1e6:.1f}M parameters in {len(shapes)} tensors on {options.device}, float32")
    rows = measure(shapes, options.device, options.rounds)
    alone = rows[0]["ms"]
    print(f"{'':20} {'ms':>8} {'× no probe':>11} {'a probed step':>14} {'temporary':>10}")
    for row in rows:
        row["ratio"] = row["ms"] / alone
        probed = "" if row["probed ms"] is None else f"{row['probed ms'] / alone:.1f} ×"
        times = f"{row['ms']:8.2f} {row['ratio']:11.3f} {probed:>14}"
        print(f"{row['contender']:20} {times} {row['temporary']:10.2f}")
    if options.save:
        record = {"benchmark": "probe", **environment(options.device), "parameters": count, "rows": rows}
        options.save.write_text(json.dumps(record, indent=1) + "\n")
        print(f"saved {options.save}")


if __name__ == "__main__":
    main()
