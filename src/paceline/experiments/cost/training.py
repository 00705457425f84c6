"""The description of a training whose cost is asked for."""

from dataclasses import dataclass
from typing import Literal, final

from paceline.experiments.config import ConfigError
from paceline.experiments.cost.hardware import Hardware
from paceline.experiments.cost.optimizer import BYTES, Optimizer, Precision
from paceline.experiments.cost.shape import Shape

Sharding = Literal["ddp", "fsdp", "hsdp"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A model, GPUs, an optimizer, and how they are put together."""

    shape: Shape
    hardware: Hardware
    optimizer: Optimizer
    gpus: int = 1
    sharding: Sharding = "ddp"
    """ddp: all of it on every GPU; fsdp: FSDP2 (ZeRO-3), weights, gradients and state spread over all GPUs;
    hsdp: over the GPUs of a group, which are copies of each other."""
    group: int | None = None
    """GPUs of a group of hsdp; none: those of a node."""
    weights: Precision = "float32"
    """Of the live weights, as the optimizer sees them."""
    precision: Precision = "bfloat16"
    """Of matrix products."""
    compile: bool = True
    micro_batch: int = 1
    """Sequences at once through the model, on each GPU."""
    accumulate: int = 1
    """Micro batches of a step."""
    activation_checkpointing: bool = False
    """Every layer keeps its input only, and is computed again in the backward pass."""
    packed: bool = False
    """Several examples in a sequence, kept apart by a mask, which the fastest attention does not take."""
    clip: bool = True
    """The gradient's norm is limited, by torch's `clip_grad_norm_`."""
    mfu: float | None = None
    """Share of the peak that the counted operations of forward and backward reach; none: from the model of
    `speed.py`."""
    overlap: float = 0.9
    """Share of the time of forward and backward behind which communication can hide."""

    def __post_init__(self) -> None:
        for name in ("gpus", "micro_batch", "accumulate"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; allowed: at least 1")
        node = self.hardware.node
        if self.gpus > node and self.gpus % node:
            raise ConfigError(
                f"gpus is {self.gpus}; allowed: up to {node}, or a multiple of {node}, whole nodes"
            )
        if self.group is not None and self.sharding != "hsdp":
            raise ConfigError(f"group is for hsdp, not {self.sharding}")
        if self.gpus % self.shards:
            raise ConfigError(f"group is {self.shards}; allowed: what divides {self.gpus} GPUs")
        if self.mfu is not None and not 0 < self.mfu <= 1:
            raise ConfigError(f"mfu is {self.mfu}; allowed: above 0 and at most 1")
        if not 0 <= self.overlap <= 1:
            raise ConfigError(f"overlap is {self.overlap}; allowed: 0 to 1")
        if self.weights == "bfloat16" and self.precision == "float32":
            raise ConfigError("precision is float32 beside weights in bfloat16; allowed: bfloat16")

    @property
    def shards(self) -> int:
        """GPUs that a weight is spread over."""
        if self.sharding == "ddp":
            return 1
        if self.sharding == "fsdp":
            return self.gpus
        return min(self.group or self.hardware.node, self.gpus)

    @property
    def computing(self) -> int:
        """Bytes of a number in matrix products."""
        return BYTES[self.precision]

    @property
    def stream(self) -> int:
        """Bytes of a number between layers: autocast keeps the weights' float32 there, FSDP2 casts inputs."""
        autocast = self.weights == "float32" and self.shards == 1
        return 4 if autocast else self.computing

    @property
    def micro_tokens(self) -> int:
        """Tokens at once through the model, on each GPU."""
        return self.micro_batch * self.shape.length

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, on all GPUs."""
        return self.micro_tokens * self.accumulate * self.gpus

    def notes(self) -> tuple[str, ...]:
        """What to know before believing the numbers."""
        found = []
        if self.optimizer.average_dtype == "int8" and self.shards > 1:
            found.append(
                "PACE refuses int8 averages of sharded parameters today (shards would cut its blocks): the "
                "numbers are what it would take; bfloat16 works"
            )
        if self.weights == "bfloat16" and self.optimizer.name == "adamw":
            found.append("moments of bfloat16 weights are bfloat16, as torch's AdamW keeps them")
        if self.mfu is None and self.hardware.name != "H200 SXM":
            found.append(
                f"{self.hardware.name} was not measured: its shares of the peak are those of an H200"
            )
        return tuple(found)
