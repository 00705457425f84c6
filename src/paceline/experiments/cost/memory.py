"""Bytes on each GPU: what is kept, and what is there at the moment when most is."""

from dataclasses import dataclass, fields
from typing import final

from paceline.experiments.cost.optimizer import BYTES
from paceline.experiments.cost.shape import Tensor
from paceline.experiments.cost.training import Training


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Of the GPU that has most, at its fullest moment."""

    weights: float
    gradients: float
    moments: float
    averages: float
    activations: float
    temporaries: float

    @property
    def total(self) -> float:
        return sum(float(getattr(self, field.name)) for field in fields(self))

    @property
    def kept(self) -> float:
        """Between two steps."""
        return self.weights + self.moments + self.averages


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Bytes of weights and of what the optimizer remembers."""

    weights: int
    moments: int
    averages: int
    host: int
    """In the host's memory."""


def local_elements(tensor: Tensor, shards: int) -> int:
    """Of one tensor, on the GPU that has most of it: FSDP2 cuts rows, and gives nobody half of one.

    >>> local_elements(Tensor(8192, 28672, 1, True, True), 16384)
    28672
    """
    return -(-tensor.rows // shards) * tensor.columns


def kept(training: Training) -> Kept:
    """Weights and state on one GPU, byte for byte as the real optimizers keep them."""
    optimizer, dtype = training.optimizer, training.weights
    weights = moments = averages = host = 0
    for tensor in training.shape.tensors():
        own = local_elements(tensor, training.shards)
        weights += tensor.times * own * BYTES[dtype]
        moments += tensor.times * optimizer.moment_bytes(own, dtype)
        averages += tensor.times * optimizer.average_bytes(own)
        host += tensor.times * optimizer.step_bytes
    return Kept(weights=weights, moments=moments, averages=averages, host=host)


# --- Activations --------------------------------------------------------------------------------------


def layer_activations(training: Training) -> float:
    """Bytes of a token that one layer keeps for its backward pass.

    Inputs of the two norms, in the precision between layers; and in that of products what each of them
    reads: the two normed inputs, queries, keys, values, what attention gives, and the MLP's inside. GPT-2's
    MLP keeps what goes into its GELU and what comes out; a gated one both of its halves and their product,
    and without torch.compile also SiLU of the one. Small: statistics of norms, a number a head of attention.
    """
    shape, c = training.shape, training.computing
    attention = 2 * shape.query_width + 2 * shape.key_width
    if shape.kind == "gpt":
        mlp, statistics = 2 * shape.inner, 16
    else:
        mlp, statistics = (3 if training.compile else 4) * shape.inner, 8
    small = statistics + 4 * shape.heads
    return 2 * training.stream * shape.width + c * (2 * shape.width + attention + mlp) + small


def loss_activations(training: Training) -> float:
    """Bytes of a token at the last layer, when its backward pass begins.

    Compiled, the logits, whose gradient takes their place. Else their logarithms, and two gradients beside
    them, in float32.
    """
    shape, c = training.shape, training.computing
    last = (training.stream + c) * shape.width
    return last + (c if training.compile else 12) * shape.vocabulary


def memory(training: Training) -> Memory:
    """Of the fullest of two moments: when backward begins, or when it ends and the optimizer steps.

    When it begins, all activations are there, and gradients only if they are added up over several micro
    batches (or, with DDP, are parts of its buckets). When it ends, all gradients are, and one layer's
    activations.
    """
    shape, state = training.shape, kept(training)
    tokens = training.micro_tokens
    layer = layer_activations(training) * tokens
    through = layer * shape.layers
    if training.activation_checkpointing:
        through = training.stream * shape.width * tokens * shape.layers
    loss = loss_activations(training) * tokens
    begin_activations = through + loss
    if training.activation_checkpointing:
        begin_activations = through + max(loss, layer)
    gradients = state.weights  # alike: torch's gradients have the precision of their weights
    copies = _copies(training)
    head = training.computing * shape.vocabulary * shape.width / training.shards
    always = training.accumulate > 1 or (training.sharding == "ddp" and training.gpus > 1)
    begin = Memory(
        weights=state.weights,
        gradients=gradients if always else 0,
        moments=state.moments,
        averages=state.averages,
        activations=begin_activations,
        temporaries=copies + head,
    )
    end = Memory(
        weights=state.weights,
        gradients=gradients,
        moments=state.moments,
        averages=state.averages,
        activations=layer,
        temporaries=copies,
    )
    return max(begin, end, key=lambda moment: moment.total)


def _copies(training: Training) -> float:
    """Weights in the precision of products, beside those that are kept.

    Autocast holds one of every matrix from forward to backward; with activation checkpointing, of one layer
    and the last one. FSDP2 holds two units whole, the one in use
    and the next, and of one its gradient, as it was computed and in float32 to be summed; a unit is a layer,
    or the embedding.
    """
    shape = training.shape
    if training.shards > 1:
        unit = max(shape.layer_parameters, shape.vocabulary * shape.width)
        return unit * (2 * training.computing + training.computing + 4)
    if training.weights == training.precision:
        return 0
    held = shape.multiplying
    if training.activation_checkpointing:
        held = shape.layer_parameters + shape.vocabulary * shape.width
    return training.computing * held


def room_to_show(training: Training) -> float:
    """Bytes that `averaged_weights` takes while the average is shown: a copy of live, unless the two swap."""
    swaps = training.optimizer.average_dtype == training.weights == "float32"
    return 0 if swaps or not training.optimizer.is_pace else kept(training).weights
