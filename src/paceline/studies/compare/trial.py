"""A run tried for a few steps: what it needs, and how fast it is."""

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from paceline.lm.loop import Progress, Step, train
from paceline.lm.memory import available
from paceline.runs import build
from paceline.runs.config import Run
from paceline.runs.run import Notice

WARM, SECONDS, STEPS = 2, 4.0, 10
CONTEXT = 600 << 20  # bytes that a process needs on a GPU before it does anything


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What was found."""

    parameters: int
    samples: int
    held_out_samples: int
    step_seconds: float
    fitting: int
    """How many such runs fit the memory at once."""


def measure(run: Run, send: Callable[[object], None]) -> Trial:
    """Build a run, prepare its data if need be, and take some steps. Nothing is written but the data."""
    job = build.build(run, lambda text: send(Notice(text=text)))
    steps = STEPS + WARM
    plan = replace(job.plan, steps=steps, evaluate_every=steps)
    began, taken, seconds = time.perf_counter(), 0, 0.0
    for record in train(job.trainee, plan, Progress()):
        if not isinstance(record, Step):
            break
        taken += 1
        if taken == WARM:
            began = time.perf_counter()
        seconds = time.perf_counter() - began
        if taken > WARM and (seconds > SECONDS or taken == steps):
            break
    return Trial(
        parameters=job.facts["parameters"],
        samples=len(job.trainee.samples),
        held_out_samples=job.facts["data"]["held_out_samples"],
        step_seconds=seconds / max(taken - WARM, 1),
        fitting=_fitting(job.trainee.device),
    )


def _fitting(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        used = torch.cuda.max_memory_reserved(device)
        return max(1, int(0.9 * (free + used) / (1.2 * used + CONTEXT)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    left = available()
    return 1 << 10 if left is None else max(1, int(0.9 * (left + peak) / (1.2 * peak)))
