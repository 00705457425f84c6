"""Seconds of a step on one GPU: forward and backward by a roofline, the optimizer by its traffic."""

from dataclasses import dataclass
from typing import final

from paceline.experiments.cost.memory import layer_activations, local_elements
from paceline.experiments.cost.optimizer import FOREACH
from paceline.experiments.cost.training import Training

# Passes over what a layer keeps for its backward pass, by kernels that do not multiply: written and read in
# forward, read in backward, its gradient written and read. Without torch.compile no two operations are one:
# in a Llama of transformers a norm alone is six. Counted from the operands of its operations (tests/cost).
_PASSES = 5.0
PASSES_EAGER = {"gpt": 6.0, "llama": 16.5}
_PASSES_AGAIN = 2 / 5  # of them in the second forward pass of activation checkpointing
# Passes over the logits, in bytes of a logit: compiled, five over numbers of products' precision; else ten
# over float32.
_LOSS_EAGER = 40.0

MASKED = 0.19
"""Share of the stated operations that attention with a mask reaches, forward and backward: SmolLM2-135M with
1,024 tokens (records/2026-11-17-packed-h200.json)."""

HOST_OF_LAYER = {True: 1e-3, False: 2e-3}
"""Seconds that the host takes to launch forward and backward of a layer, compiled or not. A device that is
quicker waits for it."""
HOST_OF_STEP = 8e-3
"""Seconds that the host takes for the rest of a step of `paceline train`. With that of a compiled layer, a
step of a 7M GPT takes 16 ms; alone on an H200 it took 17.8 (records/2026-11-15-training-h200.json)."""

CLIPPING = 12.0
"""Bytes of a float32 gradient that `clip_grad_norm_` moves: read for the norm, read and written to scale."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Computing:
    """Seconds of a micro batch on one GPU."""

    products: float
    """Matrix products and attention, at the share of the peak that large ones reach."""
    operands: float
    """What goes through memory for them."""
    rest: float
    """Everything between them, through memory."""

    @property
    def seconds(self) -> float:
        return self.products + self.operands + self.rest


def computing(training: Training) -> Computing:
    """Forward and backward of a micro batch.

    Every matrix product takes the time of its operations and the time of its operands, not the longer of the
    two alone: so small widths, which do little with each number, reach less of the peak.
    """
    shape, hardware, c = training.shape, training.hardware, training.computing
    tokens, again = training.micro_tokens, training.activation_checkpointing
    rounds = 4 if again else 3  # forward, backward for inputs, backward for weights
    layer = sum(out * into for out, into in shape.products())
    head = shape.vocabulary * shape.width
    attention = 4.0 * shape.query_width * shape.length
    operations = tokens * (shape.layers * rounds * 2.0 * layer + 3 * 2.0 * head)
    attending = tokens * shape.layers * rounds * attention
    moved = shape.layers * rounds * sum(_operands(tokens, out, into, c) for out, into in shape.products())
    moved += 3 * _operands(tokens, shape.vocabulary, shape.width, c)
    passes = _PASSES if training.compile else PASSES_EAGER[shape.kind]
    between = passes * layer_activations(training) * shape.layers * (1 + _PASSES_AGAIN * again)
    between += 5 * c * shape.vocabulary if training.compile else _LOSS_EAGER * shape.vocabulary
    peak = hardware.peak if c == 2 else hardware.peak_float32
    return Computing(
        products=operations / (peak * hardware.products)
        + attending / (peak * (MASKED if training.packed else hardware.products)),
        operands=moved / hardware.copy_bandwidth,
        rest=tokens * between / hardware.copy_bandwidth,
    )


def _operands(tokens: int, out: int, into: int, size: int) -> float:
    return float(size) * (tokens * (out + into) + out * into)


def micro_batch_seconds(training: Training) -> float:
    """Forward and backward of a micro batch: by the given MFU, or by the model."""
    if training.mfu is not None:
        operations = training.micro_tokens * training.shape.operations_per_token
        peak = training.hardware.peak if training.computing == 2 else training.hardware.peak_float32
        return operations / (peak * training.mfu)
    host = HOST_OF_LAYER[training.compile] * training.shape.layers
    return max(computing(training).seconds, host)


def optimizer_seconds(training: Training) -> float:
    """Of one step of the optimizer, on the mean over `update_every`, with clipping if the training clips."""
    optimizer, hardware = training.optimizer, training.hardware
    elements = sum(
        tensor.times * local_elements(tensor, training.shards) for tensor in training.shape.tensors()
    )
    copying = hardware.copy_bandwidth
    return elements * (
        optimizer.traffic(training.weights) / (copying * optimizer.share)
        + optimizer.beside(training.weights) / (copying * FOREACH)
    ) + (clipping_seconds(training, elements) if training.clip else 0.0)


def clipping_seconds(training: Training, elements: int) -> float:
    """Of `clip_grad_norm_`."""
    size = 1.0 if training.weights == "float32" else 0.5
    return elements * CLIPPING * size / (training.hardware.copy_bandwidth * FOREACH)
