"""Timing: a rival and torch's fused AdamW take turns, so that a busy machine slows both alike."""

import gc
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from paceline.experiments.bench.subjects import (
    BASE,
    RIVALS,
    Shapes,
    Step,
    make_parameters,
    move_on_,
    state_bytes,
)

WARM_UP = 8
"""Steps before those that are timed."""

IN_A_ROW = 4
"""Steps of a round right after another of the same optimizer."""


class Row(NamedTuple):
    """What one optimizer costs on one set of tensors."""

    model: str
    optimizer: str
    ms: float
    """Median of a step: on a GPU the time that it is busy with it, when the host is ahead of it."""
    low: float
    """A tenth of the steps is quicker."""
    high: float
    """A tenth is slower."""
    ratio: float
    """To torch's fused AdamW, by medians of the same rounds."""
    bandwidth: float
    """Share of the bandwidth of copying: the least that must be read and written, by the time it took."""
    state: float
    """Bytes kept for a parameter, beside the weight."""
    temporary: float
    """The most that a step holds for a moment, bytes for a parameter."""
    wall: float
    """Median of a step, ms, from an idle device to an idle device: of small tensors, mostly the host's."""
    wall_ratio: float
    """To torch's fused AdamW, likewise."""
    again: float
    """As `wall`, of a step right after another of the same optimizer: caches have all that the host needs."""
    again_ratio: float
    """To torch's fused AdamW, likewise."""


def copy_bandwidth(device: str, rounds: int = 7) -> float:
    """Bytes a second, reads and writes both counted, of copying one large tensor to another; on a CPU of
    changing one in place, as an optimizer does, since a CPU reads what it copies to as well."""
    elements = 2**28 if device == "cuda" else 2**26
    source = torch.ones(elements, device=device)
    target = source if device == "cpu" else torch.ones_like(source)
    copy: Step = (lambda: target.mul_(1.0)) if device == "cpu" else (lambda: target.copy_(source))
    copy()
    return 8 * elements / min(busy_seconds(copy, device, ahead=0.0) for _ in range(rounds))


def seconds(step: Step, device: str) -> float:
    """Of one call, until the device has done it."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def busy_seconds(step: Step, device: str, ahead: float) -> float:
    """Of one call, without what the device waits for the host, which takes `ahead` seconds for it."""
    if device != "cuda":
        return seconds(step, device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    cycles = int(2e9 * min(2 * ahead + 1e-3, 0.2))  # the host gets its head start
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def temporary_bytes(step: Step, device: str) -> int:
    """The most that one call holds beyond what was there before."""
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
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def measure(
    model: str, shapes: Shapes, names: list[str], device: str, rounds: int, bandwidth: float
) -> Iterator[Row]:
    """A row for each optimizer, as they are done."""
    count = sum(torch.Size(shape).numel() for shape in shapes)
    for name in names:
        rival = RIVALS[name]
        steps: dict[str, Step] = {}
        holders: dict[str, Any] = {}
        stepped = {each: make_parameters(shapes, device) for each in dict.fromkeys((BASE, name))}
        for each, parameters in stepped.items():
            steps[each], holders[each] = RIVALS[each].make(parameters)
        for each, step in steps.items():  # first steps allocate and build, and second moments are of few
            for _ in range(WARM_UP):
                step()
                move_on_(stepped[each])
        times: dict[str, list[float]] = {each: [] for each in steps}
        walls: dict[str, list[float]] = {each: [] for each in steps}
        agains: dict[str, list[float]] = {each: [] for each in steps}
        for _ in range(rounds):
            for each, step in steps.items():
                if device == "cuda":
                    walls[each].append(seconds(step, device))
                times[each].append(busy_seconds(step, device, ahead=min(walls[each], default=0.0)))
                if device == "cuda":
                    agains[each] += [seconds(step, device) for _ in range(IN_A_ROW)]
                move_on_(stepped[each])
        if device != "cuda":
            walls = agains = times
        temporary = temporary_bytes(steps[name], device) / count  # before anybody asks for its state
        own = times[name]
        middle = statistics.median(own)
        tenths = statistics.quantiles(own, n=10, method="inclusive") if len(own) > 1 else own * 9
        yield Row(
            model=model,
            optimizer=name,
            ms=1e3 * middle,
            low=1e3 * tenths[0],
            high=1e3 * tenths[-1],
            ratio=middle / statistics.median(times[BASE]),
            bandwidth=rival.traffic * count / middle / bandwidth,
            state=state_bytes(holders[name], device) / count,
            temporary=temporary,
            wall=1e3 * statistics.median(walls[name]),
            wall_ratio=statistics.median(walls[name]) / statistics.median(walls[BASE]),
            again=1e3 * statistics.median(agains[name]),
            again_ratio=statistics.median(agains[name]) / statistics.median(agains[BASE]),
        )
        del steps, holders, step, stepped, parameters
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
