"""What it costs others that a large step keeps what it loads in the GPU's cache: `python benchmarks/kept.py`.

Whole steps of GPTs on one GPU, forward and backward recorded in a CUDA graph and PACE's step after it, with
and without what `paceline.optim.fused.LARGE` decides, in turns: the difference of forward and backward, of
the step and of both, with the error of its mean. Tokens are random.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from training import PRECISIONS, built, gradient_of

from paceline import PACE
from paceline.experiments.bench.command import environment
from paceline.optim import fused

MODELS = (
    ("gpt2", 16, 1024, 50257),
    ("gpt2", 4, 1024, 50257),
    ("gpt:25m", 32, 512, 8192),
    ("gpt:7m", 32, 256, 8192),
)
"""Name, sequences of a batch, their length, vocabulary."""

STEPS = 6
"""In a row; the first of them is not counted."""


def recorded(gradient: Callable[[], None], parameters: list[torch.nn.Parameter]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # the first compiles
            gradient()
    torch.cuda.current_stream().wait_stream(side)
    for parameter in parameters:
        parameter.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradient()
    return graph


def in_a_row(graph: torch.cuda.CUDAGraph, optimizer: PACE) -> tuple[float, float]:
    """Means of forward and backward, and of the step, in µs."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * STEPS + 1)]
    torch.cuda._sleep(2_000_000)  # the host gets its head start
    for before, between in zip(events[0:-1:2], events[1::2], strict=True):
        before.record()
        graph.replay()
        between.record()
        optimizer.step()
    events[-1].record()
    torch.cuda.synchronize()
    times = [1e3 * a.elapsed_time(b) for a, b in pairwise(events[2:])]
    return statistics.mean(times[0::2]), statistics.mean(times[1::2])


def compare(name: str, batch_size: int, length: int, vocabulary: int, rounds: int) -> dict[str, Any]:
    torch._dynamo.reset()
    options = argparse.Namespace(model=name, batch_size=batch_size, length=length, vocabulary=vocabulary)
    model, batch = built(options, "cuda")
    parameters = list(model.parameters())
    graph = recorded(gradient_of(model, batch, PRECISIONS["bfloat16"], compiled=True), parameters)
    optimizer = PACE(parameters, lr=1e-5, gain="paper", average_dtype="bfloat16")
    found: dict[float, list[tuple[float, float]]] = {0: [], float("inf"): []}
    for i in range(rounds + 3):
        for large in sorted(found, reverse=bool(i % 2)):
            fused.LARGE = large
            times = in_a_row(graph, optimizer)
            if i >= 3:
                found[large].append(times)
    kept, not_kept = found.values()
    row: dict[str, Any] = {"model": name, "batch_size": batch_size, "length": length}
    for i, what in enumerate(("forward and backward", "step")):
        row[what] = round(statistics.median(times[i] for times in not_kept), 1)
    differences = [(a[0] - b[0], a[1] - b[1], sum(a) - sum(b)) for a, b in zip(kept, not_kept, strict=True)]
    for what, values in zip(("forward and backward", "step", "both"), zip(*differences), strict=True):
        mean, error = statistics.mean(values), statistics.stdev(values) / rounds**0.5
        row[f"{what}, kept, more by"] = [round(mean, 1), round(error, 1)]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100, help="of both ways (default 100)")
    parser.add_argument("--record", type=Path, help="write the result to this JSON file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs a GPU")
    about = {"benchmark": "kept", "date": time.strftime("%F"), **environment("cuda")}
    rows = []
    for model in MODELS:
        rows.append(compare(*model, options.rounds))
        print(json.dumps(rows[-1]), flush=True)
    if options.record is not None:
        result = {**about, "unit": "µs", "rounds": options.rounds, "rows": rows}
        options.record.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
