"""Time and memory of one optimizer step beside its rivals, in one run, as ratios.

    python benchmarks/step.py                       the CPU: an 18M-parameter GPT's tensors
    python benchmarks/step.py --device cuda         a GPU: GPT-2's 124M
    python benchmarks/step.py --save records/x.json

The rivals take turns, round by round, so that a busy machine slows all of them alike. Gradients are given;
only the step is timed. "temporary" is the most memory a step holds beyond weights, gradients and state, in
units of the weights.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.swa_utils import get_ema_multi_avg_fn

import paceline
from paceline import PACE, Pullback

Step = Callable[[], Any]


def gpt_shapes(layers: int, width: int, vocabulary: int, context: int) -> list[tuple[int, ...]]:
    """The tensors of a GPT-2 with tied embeddings."""
    block = [(width,)] * 4 + [(3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(vocabulary, width), (context, width), *block * layers, (width,), (width,)]


def make_parameters(shapes: list[tuple[int, ...]], device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
    return parameters


def adamw_with_ema(parameters: list[Tensor]) -> Step:
    """torch's fused AdamW and torch's foreach EMA of its weights, as AveragedModel runs it."""
    optimizer = AdamW(parameters, fused=True)
    average = [parameter.detach().clone() for parameter in parameters]
    update = get_ema_multi_avg_fn(0.999)
    live = [parameter.detach() for parameter in parameters]

    def step() -> None:
        optimizer.step()
        update(average, live, 1)

    return step


def schedule_free(parameters: list[Tensor]) -> Step:
    from schedulefree import AdamWScheduleFree

    optimizer = AdamWScheduleFree(parameters, foreach=True)
    optimizer.train()
    return optimizer.step


RIVALS: dict[str, Callable[[list[Tensor]], Step]] = {
    "torch AdamW fused": lambda p: AdamW(p, fused=True).step,
    "torch AdamW foreach": lambda p: AdamW(p, foreach=True).step,
    "torch AdamW loop": lambda p: AdamW(p, foreach=False).step,
    "torch AdamW fused + EMA": adamw_with_ema,
    "Schedule-Free AdamW foreach": schedule_free,
    "PACE foreach, strength 0": lambda p: PACE(p, foreach=True, pullback_strength=0.0).step,
    "PACE foreach": lambda p: PACE(p, foreach=True).step,
    "PACE foreach, relative": lambda p: PACE(p, foreach=True, gain="relative", pullback_strength=0.5).step,
    "PACE foreach, return_power": lambda p: PACE(p, foreach=True, return_power=0.8).step,
    "PACE loop": lambda p: PACE(p, foreach=False).step,
    "PACE foreach, scaled": lambda p: PACE(p, foreach=True, gain="scaled", pullback_strength=15.0).step,
    "PACE fused, strength 0": lambda p: PACE(p, fused=True, pullback_strength=0.0).step,
    "PACE fused": lambda p: PACE(p, fused=True).step,
    "PACE fused, return_power": lambda p: PACE(p, fused=True, return_power=0.8).step,
    "PACE fused, scaled": lambda p: PACE(p, fused=True, gain="scaled", pullback_strength=15.0).step,
    "Pullback(AdamW fused)": lambda p: Pullback(AdamW(p, fused=True)).step,
    "Pullback(AdamW fused), strength 0": lambda p: Pullback(AdamW(p, fused=True), pullback_strength=0.0).step,
}


def seconds(step: Step, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def temporary_bytes(step: Step, device: str) -> int:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def measure(shapes: list[tuple[int, ...]], device: str, rounds: int) -> list[dict[str, Any]]:
    steps = {
        name: make(make_parameters(shapes, device))
        for name, make in RIVALS.items()
        if device == "cpu" or not name.startswith("PACE fused")  # on a GPU there is none yet
    }
    for step in steps.values():  # first steps allocate
        step()
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds):
        if sys.stdout.isatty():
            print(f"\rround {i + 1} of {rounds}", end="\r", flush=True)
        for name, step in steps.items():
            times[name].append(seconds(step, device))
    weights = 4 * sum(torch.Size(shape).numel() for shape in shapes)
    return [
        {
            "optimizer": name,
            "ms": 1e3 * statistics.median(times[name]),
            "temporary": temporary_bytes(step, device) / weights,
        }
        for name, step in steps.items()
    ]


def environment(device: str) -> dict[str, Any]:
    hardware = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return {
        "date": date.today().isoformat(),
        "device": device,
        "hardware": hardware,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "paceline": paceline.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--rounds", type=int, default=15, help="steps timed per optimizer; the median is shown"
    )
    parser.add_argument("--save", type=Path, help="write the results to this JSON file")
    options = parser.parse_args()
    size = (12, 768, 50257, 1024) if options.device == "cuda" else (8, 384, 9600, 256)
    shapes = gpt_shapes(*size)
    count = sum(torch.Size(shape).numel() for shape in shapes)
    print(f"{count / 1e6:.1f}M parameters in {len(shapes)} tensors on {options.device}, float32")
    rows = measure(shapes, options.device, options.rounds)
    fused = rows[0]["ms"]
    print(f"{'':30} {'ms':>8} {'× fused AdamW':>14} {'temporary':>10}")
    for row in rows:
        row["ratio"] = row["ms"] / fused
        print(f"{row['optimizer']:30} {row['ms']:8.2f} {row['ratio']:14.2f} {row['temporary']:10.2f}")
    if options.save:
        record = {"benchmark": "step", **environment(options.device), "parameters": count, "rows": rows}
        options.save.write_text(json.dumps(record, indent=1) + "\n")
        print(f"saved {options.save}")


if __name__ == "__main__":
    main()
