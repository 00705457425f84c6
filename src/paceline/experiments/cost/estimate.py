"""What a training costs: all parts together, for a step, for a budget of tokens, and for a run of ours."""

from dataclasses import dataclass, replace
from typing import final

from paceline.experiments.config import ConfigError, Run, parse_spec
from paceline.experiments.cost import memory as memories
from paceline.experiments.cost.communication import Communication, communication
from paceline.experiments.cost.hardware import Hardware
from paceline.experiments.cost.memory import Kept, Memory
from paceline.experiments.cost.optimizer import of_spec
from paceline.experiments.cost.shape import HUB, Shape, named
from paceline.experiments.cost.speed import (
    HOST_OF_LAYER,
    HOST_OF_STEP,
    computing,
    micro_batch_seconds,
    optimizer_seconds,
)
from paceline.experiments.cost.training import Training

ROOM = 0.92
"""Share of a GPU's memory that may be filled: the rest is for CUDA, NCCL and gaps of the allocator."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Bytes of files, of the whole model."""

    whole: int
    """Live weights, moments and averages: what a run goes on from."""
    without_averages: int
    """The same without averages: AdamW's."""
    export: int
    """The returned weights in float32."""
    export_bfloat16: int

    def seconds(self, bandwidth: float) -> float:
        """To write all of it at so many bytes a second."""
        return self.whole / bandwidth


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Of one step of a training."""

    training: Training
    memory: Memory
    operations: float
    """Of a step, counted as 6 a weight and token, and attention; nothing that is computed twice."""
    compute_seconds: float
    """Forward and backward."""
    optimizer_seconds: float
    communication: Communication
    exposed_seconds: float
    """What is left of communication behind which nothing hides."""
    step_seconds: float
    busy_seconds: float
    """Of these the device has work; for the rest it waits for the host, and could do another run's."""
    checkpoint: Checkpoint

    @property
    def fits(self) -> bool:
        """Whether a GPU has the memory for it."""
        return self.memory.total <= ROOM * self.training.hardware.memory

    @property
    def optimizer_share(self) -> float:
        """Of the step."""
        return self.optimizer_seconds / self.step_seconds

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs."""
        return self.training.step_tokens / self.step_seconds

    @property
    def mfu(self) -> float:
        """Share of the peak of all GPUs that the counted operations are, over the whole step."""
        peak = (
            self.training.hardware.peak
            if self.training.computing == 2
            else self.training.hardware.peak_float32
        )
        return self.operations / (self.step_seconds * self.training.gpus * peak)

    def hours(self, tokens: float) -> float:
        """Of a budget."""
        return tokens / self.tokens_per_second / 3600

    def gpu_hours(self, tokens: float) -> float:
        """Of a budget, on all GPUs."""
        return self.hours(tokens) * self.training.gpus


def cost(training: Training) -> Cost:
    """What a step of a training costs.

    >>> from paceline.experiments.cost.hardware import HARDWARE
    >>> from paceline.experiments.cost.optimizer import PRESETS
    >>> found = cost(Training(shape=named("gpt2"), hardware=HARDWARE["h200"], optimizer=PRESETS["pace"],
    ...     micro_batch=16))
    >>> round(1e3 * found.step_seconds, 1), round(found.memory.total / 1e9, 1), found.fits
    (35.0, 10.0, True)
    """
    compute = training.accumulate * micro_batch_seconds(training)
    optimizer, spoken = optimizer_seconds(training), communication(training)
    exposed = max(0.0, spoken.seconds - training.overlap * compute)
    rest = optimizer + exposed + spoken.of_pace_seconds
    whole = busy = compute + rest
    if training.mfu is None:
        layers = training.accumulate * HOST_OF_LAYER[training.compile] * training.shape.layers
        whole = max(whole, layers + HOST_OF_STEP)
        busy = training.accumulate * computing(training).seconds + rest
    return Cost(
        training=training,
        memory=memories.memory(training),
        operations=training.step_tokens * training.shape.operations_per_token,
        compute_seconds=compute,
        optimizer_seconds=optimizer,
        communication=spoken,
        exposed_seconds=exposed,
        step_seconds=whole,
        busy_seconds=busy,
        checkpoint=checkpoint(training),
    )


def checkpoint(training: Training) -> Checkpoint:
    """Of the whole model, however it is sharded."""
    state: Kept = memories.kept(replace(training, sharding="ddp", group=None))
    averages = state.averages + state.host  # where steps are counted
    return Checkpoint(
        whole=state.weights + state.moments + averages,
        without_averages=state.weights + state.moments,
        export=4 * training.shape.parameters,
        export_bfloat16=2 * training.shape.parameters,
    )


# --- A run of ours --------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a run of `paceline train` takes on one GPU."""

    cost: Cost
    """Of a step."""
    steps: int
    """To do: of a run that goes on from a checkpoint of another, those after it."""
    tokens: int
    """Trained on."""
    evaluated_tokens: int
    """Seen by evaluations, of every set of weights; 0 if the run does not say how many samples there are."""
    operations: float
    """Of both: evaluations are forward passes, a third of the operations of a training step."""
    training_seconds: float
    evaluation_seconds: float
    """Saving, compiling and preparing data are not counted."""

    @property
    def seconds(self) -> float:
        return self.training_seconds + self.evaluation_seconds

    @property
    def busy_seconds(self) -> float:
        """Of these the device has work."""
        return self.steps * self.cost.busy_seconds + self.evaluation_seconds

    @property
    def memory(self) -> float:
        """Bytes at most on the GPU."""
        return self.cost.memory.total

    @property
    def checkpoint(self) -> int:
        """Bytes of one."""
        return self.cost.checkpoint.whole


def estimate(
    run: Run, hardware: Hardware, *, shape: Shape | None = None, samples: int | None = None
) -> Estimate:
    """What a run takes on one GPU, before anything is built.

    Arguments:
        run: as `paceline train` takes it.
        hardware: the GPU.
        shape: of a pretrained model, whose name says nothing; or of a tokenizer that is yet to be looked at.
        samples: of the data, for a budget in epochs.

    >>> from paceline.experiments.cost.hardware import HARDWARE
    >>> run = Run(model="gpt2", length=1024, batch_size=16, tokens=10**9, compile=True)
    >>> found = estimate(run, HARDWARE["h200"])
    >>> found.steps, round(found.seconds / 60), round(found.memory / 1e9, 1)
    (61035, 36, 10.0)
    """
    shape = replace(shape, length=run.length) if shape else _shape_of(run)
    micro = min(run.micro_batch_size or run.batch_size, run.batch_size)
    training = Training(
        shape=shape,
        hardware=hardware,
        optimizer=replace(of_spec(run.optimizer), passive=len(run.averages)),
        precision="float32" if run.precision == "float32" else "bfloat16",
        compile=run.compile,
        micro_batch=micro,
        accumulate=-(-run.batch_size // micro),
        activation_checkpointing=run.activation_checkpointing,
        packed=run.task == "sft",
        clip=run.clip_norm is not None,
    )
    step, last = cost(training), _steps(run, shape, samples)
    steps = last - _first(run, last)
    tokens = steps * run.batch_size * run.length
    passes = _passes(run, training, last)
    evaluated = passes * (run.held_out_samples or 0) * run.length
    batches = -(-(run.held_out_samples or 0) // training.micro_batch)
    return Estimate(
        cost=step,
        steps=steps,
        tokens=tokens,
        evaluated_tokens=evaluated,
        operations=(tokens + evaluated / 3) * shape.operations_per_token,
        training_seconds=steps * step.step_seconds,
        evaluation_seconds=passes * batches * computing(training).seconds / 3,  # forward alone
    )


def _steps(run: Run, shape: Shape, samples: int | None) -> int:
    """As `paceline train` counts them."""
    if run.steps is not None:
        return run.steps
    if run.epochs is not None:
        if samples is None:
            raise ConfigError("the budget is in epochs; give the number of samples of the data")
        return max(1, round(run.epochs * samples / run.batch_size))
    tokens = run.tokens if run.tokens is not None else 20 * (run.chinchilla or 0) * shape.parameters
    return max(1, round(tokens / (run.batch_size * run.length)))


def _first(run: Run, last: int) -> int:
    """The step that a run goes on from, if it says: RUN@STEP."""
    return min(run.after[1], last) if run.after else 0


def _passes(run: Run, training: Training, last: int) -> int:
    """How often the held-out samples are gone through: by every set of weights, at every look."""
    every = run.evaluate_every or max(1, last // 10)
    times = last // every - _first(run, last) // every + (last % every != 0)
    name = parse_spec(run.optimizer)[0]
    shows = 2 if training.optimizer.averages or name in ("schedule_free", "schedule_free_plus") else 1
    return times * (shows + training.optimizer.passive)


def _shape_of(run: Run) -> Shape:
    """Of a model of the hub, or of a GPT of ours with the vocabulary that its tokenizer will have."""
    if run.model in HUB:
        return replace(HUB[run.model], length=run.length)
    if run.model != "gpt2" and not run.model.startswith("gpt:"):
        raise ConfigError(f"model {run.model!r} does not say how large it is; give its shape")
    name = run.tokenizer
    if name == "auto":
        name = "gpt2" if run.model == "gpt2" else "bpe:2048"
    if name == "gpt2":
        return named(run.model, length=run.length, vocabulary=50257)
    kind, sizes, _ = parse_spec(name) if name.startswith("bpe:") else ("", [], {})
    if kind != "bpe" or len(sizes) != 1 or not isinstance(sizes[0], int):
        raise ConfigError(
            f"tokenizer {name[:80]!r} does not say how many tokens it has; give the model's shape"
        )
    return named(run.model, length=run.length, vocabulary=sizes[0])
