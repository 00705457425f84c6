"""Bytes and seconds of what GPUs say to each other in a step."""

from dataclasses import dataclass
from math import log2
from typing import final

from paceline.experiments.cost.optimizer import BYTES
from paceline.experiments.cost.training import Training

REACHED = 0.8
"""Share of a link's stated speed that collectives reach: a common figure, not measured here."""
LATENCY = 10e-6
"""Seconds for each doubling of the GPUs that a collective is over: a guess, not measured here."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """Of one step, for each GPU."""

    gathered: float
    """Bytes that come in by all-gather of weights."""
    scattered: float
    """Bytes that go out by reduce-scatter of gradients."""
    reduced: float
    """Bytes that go out and in by all-reduce of gradients, among copies."""
    of_pace: float
    """Bytes that PACE adds: those of one all-reduce, of a float32 sum for each tensor, if its gain is scaled
    by a sum over all weights and the weights are sharded."""
    seconds: float
    """All of it, as if nothing else went on."""
    of_pace_seconds: float


def communication(training: Training) -> Communication:
    """What each way of sharding says.

    FSDP2 gathers the weights for forward and again for backward, in the precision of products, and sums
    gradients in float32, for every micro batch. DDP sums gradients once a step, hsdp those of its shards
    among the groups.
    """
    shape, hardware = training.shape, training.hardware
    shards, copies = training.shards, training.gpus // training.shards
    parameters = shape.parameters
    part = (shards - 1) / shards
    gathered = 2.0 * training.computing * parameters * part * training.accumulate
    scattered = 4.0 * parameters * part * training.accumulate
    gradient = BYTES[training.weights] if training.sharding == "ddp" else 4
    reduced = 2.0 * gradient * parameters / shards * (copies - 1) / copies
    seconds = (gathered + scattered) / _speed(training, shards)
    units = shape.layers + 2
    if shards > 1:
        seconds += 3 * units * training.accumulate * LATENCY * log2(shards)
    if copies > 1:
        # All GPUs of a node talk to other nodes at once, each by its own adapter, unless each holds the same.
        alone = training.gpus > hardware.node and shards > 1
        speed = hardware.network * REACHED if alone else _speed(training, training.gpus)
        seconds += reduced / speed + units * LATENCY * log2(copies)
    tensors = sum(tensor.times for tensor in shape.tensors())
    speaks = training.optimizer.scaled and shards > 1
    return Communication(
        gathered=gathered,
        scattered=scattered,
        reduced=reduced,
        of_pace=4.0 * tensors if speaks else 0.0,
        seconds=seconds,
        of_pace_seconds=LATENCY * log2(shards) if speaks else 0.0,
    )


def _speed(training: Training, over: int) -> float:
    """Bytes a second of a collective: NVLink's, between nodes at most what their adapters do together."""
    hardware = training.hardware
    across = hardware.network * hardware.node
    return REACHED * (hardware.link if over <= hardware.node else min(hardware.link, across))
