"""Timing: an optimizer and torch's AdamW take turns, so that a busy machine slows both alike."""

import gc
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from paceline.bench.subjects import (
    BASE,
    SUBJECTS,
    Shapes,
    Step,
    make_parameters,
    state_bytes,
)

WARM_UP = 2
"""Steps before those that are timed: they allocate and compile."""
LEAST = 3
"""Rounds that are always timed."""


class Row(NamedTuple):
    """The cost of one optimizer on one set of tensors."""

    model: str
    weights: int
    """How many there are."""
    optimizer: str
    rounds: int
    """Timed steps."""
    ms: float
    """The median of a step, from an idle device to an idle device."""
    low: float
    """A tenth of the steps is quicker."""
    high: float
    """A tenth is slower."""
    ratio: float
    """The ratio to torch's AdamW, by medians of the same rounds."""
    graph_ms: float | None
    """The median of a step captured in a CUDA graph: what is left is the device's. None without a GPU."""
    graph_ratio: float | None
    state: float
    """Bytes a weight that are kept next to it."""
    temporary: float | None
    """The most bytes a weight that a step holds for a moment. None without a GPU."""


def seconds(step: Step, device: str) -> float:
    """Return how long one call takes, until the device has done it."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def in_turns(steps: dict[str, Step], device: str, limit: float) -> dict[str, list[float]]:
    """Return milliseconds of each step in each round; no round begins after `limit` seconds."""
    for _ in range(WARM_UP):
        for step in steps.values():
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    began = time.perf_counter()
    done = 0
    while done < LEAST or time.perf_counter() - began < limit:
        done += 1
        for name, step in steps.items():
            times[name].append(1e3 * seconds(step, device))
    return times


def captured(step: Step) -> Step:
    """Return the same step as a CUDA graph that was captured once."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as torch asks for before it captures
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def temporary_bytes(step: Step) -> int:
    """Return the most bytes of GPU memory that one call holds beyond what was there before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(model: str, shapes: Shapes, names: list[str], device: str, limit: float) -> Iterator[Row]:
    """Yield a row for each optimizer as soon as it is measured, for about `limit` seconds."""
    for name in names:
        yield _measured(model, shapes, name, device, limit)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def _measured(model: str, shapes: Shapes, name: str, device: str, limit: float) -> Row:
    count = sum(torch.Size(shape).numel() for shape in shapes)
    steps: dict[str, Step] = {}
    holders: dict[str, tuple[Any, ...]] = {}
    for each in dict.fromkeys((BASE, name)):
        steps[each], holders[each] = SUBJECTS[each].make(make_parameters(shapes, device))
    times = in_turns(steps, device, limit)
    state = state_bytes(holders[name])
    graph_ms = graph_ratio = temporary = None
    if device == "cuda":
        temporary = temporary_bytes(steps[name]) / count
    if device == "cuda" and SUBJECTS[name].can_be_captured:
        graphs = in_turns({each: captured(step) for each, step in steps.items()}, device, limit)
        graph_ms = statistics.median(graphs[name])
        graph_ratio = graph_ms / statistics.median(graphs[BASE])
    own, middle = times[name], statistics.median(times[name])
    tenths = statistics.quantiles(own, n=10, method="inclusive")
    return Row(
        model=model,
        weights=count,
        optimizer=name,
        rounds=len(own),
        ms=middle,
        low=tenths[0],
        high=tenths[-1],
        ratio=middle / statistics.median(times[BASE]),
        graph_ms=graph_ms,
        graph_ratio=graph_ratio,
        state=state / count,
        temporary=temporary,
    )
