"""The training loop. It yields what happened, record by record, and writes, prints and draws nothing.

.. code-block:: text

    seed, step → numbers_at → Samples.batch → micro batches → loss, gradient → finite? → clip
        → optimizer, schedule → yield Step
    every `evaluate_every` steps: for each view (live, average, …) the held-out loss → yield Evaluation

Whenever it has yielded, a step is complete and `progress` says where the run is: the caller may save
everything then, and a loop that starts from what was saved goes on as this one would have.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.lm.batch import Batch, Numbers, Samples, load, numbers_at
from paceline.lm.evaluate import LossOf, NotFiniteError, Stopped, autocast, held_out_loss, summed_loss
from paceline.lm.parallel import ALONE, Ranks, local

View = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How to train; what to train is in `Trainee`."""

    steps: int
    """Steps of the whole run."""
    batch_size: int
    """Samples a step, on all ranks together."""
    micro_batch_size: int
    """Samples that go through the model at once, on a rank; gradients of a step are added up over several."""
    seed: int
    """Of the order of samples."""
    clip_norm: float | None = 1.0
    """Limit of the norm of the whole gradient."""
    precision: torch.dtype = torch.float32
    """Of matrix products; weights stay as they are."""
    evaluate_every: int
    """Steps between evaluations; there is always one at the end."""
    max_skips: int = 0
    """Steps in a row that may be left out because loss or gradient is not finite; 0: the first one ends
    the run."""
    workers: int = 0
    """Processes that read samples ahead."""

    def is_evaluated(self, step: int) -> bool:
        """Whether there is an evaluation after that many steps."""
        return step > 0 and (step % self.evaluate_every == 0 or step == self.steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainee:
    """What is trained, and on what. The optimizer is any of torch's interface."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    samples: Samples
    held_out: Mapping[str, Samples]
    views: Mapping[str, View]
    """Which weights to evaluate: a name, and a context in which the parameters hold them."""
    loss_of: LossOf = summed_loss
    """The summed loss of a batch, compiled or not."""
    ranks: Ranks = ALONE
    """Who else trains it."""
    called: nn.Module | None = None
    """What `ranks.spread` gave to be called in training; None: the model itself."""

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.model.parameters()).device


@dataclass(kw_only=True, slots=True)
class Progress:
    """Where a run is: after `step` steps. Changed by the loop, saved and restored by its caller."""

    step: int = 0
    evaluated: bool = True
    """Whether an evaluation that is due after this step has been done."""
    skips: int = 0
    """Steps left out in a row, up to here."""
    batches: str = ""
    """Digest of all batches up to here, in their order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step was taken, or left out."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    targets: int
    """Tokens that took part in the loss."""
    skipped: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Held-out loss after a step: by held-out set, then by view."""

    step: int
    losses: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    batches: str = ""
    """Digest of all that was trained on so far: runs with the same one have seen the same batches."""


def train(
    trainee: Trainee, plan: Plan, progress: Progress, stop: Callable[[], bool] = lambda: False
) -> Iterator[Step | Evaluation]:
    """Train from where `progress` is to the end of the plan, or until `stop()` is true."""
    samples = trainee.samples
    numbers = partial(numbers_at, batch_size=plan.batch_size, samples=len(samples), seed=plan.seed)
    batches = load(
        samples,
        numbers,
        range(progress.step, plan.steps),
        workers=plan.workers,
        pinned=trainee.device.type == "cuda",
    )
    trainee.model.train()
    ranks = trainee.ranks
    try:
        yield from _evaluate(trainee, plan, progress, stop)
        stopping: bool | None = None
        while progress.step < plan.steps and not ranks.hears(stop, stopping):  # before it waits for data
            step, stopping = _take_step(trainee, plan, progress, next(batches), numbers, stop)
            yield step
            yield from _evaluate(trainee, plan, progress, stop)
    except Stopped:
        return


def _evaluate(
    trainee: Trainee, plan: Plan, progress: Progress, stop: Callable[[], bool]
) -> Iterator[Evaluation]:
    if progress.evaluated:
        return
    losses: dict[str, dict[str, float]] = {name: {} for name in trainee.held_out}
    for view, context in trainee.views.items():
        with context():
            for name, samples in trainee.held_out.items():
                losses[name][view] = held_out_loss(
                    trainee.model,
                    samples,
                    device=trainee.device,
                    batch_size=plan.micro_batch_size,
                    precision=plan.precision,
                    loss_of=trainee.loss_of,
                    stop=stop,
                    ranks=trainee.ranks,
                )
    progress.evaluated = True
    yield Evaluation(step=progress.step, losses=losses, batches=progress.batches)


def _take_step(
    trainee: Trainee,
    plan: Plan,
    progress: Progress,
    batch: Batch,
    numbers: Callable[[int], Numbers],
    stop: Callable[[], bool],
) -> tuple[Step, bool]:
    """The step, and whether a rank was asked to stop in it."""
    model, optimizer, ranks = trainee.model, trainee.optimizer, trainee.ranks
    lr, targets = float(optimizer.param_groups[0]["lr"]), batch.target_count()
    ranks.reseed(plan.seed, progress.step)
    total = _gradient(trainee, plan, batch, targets)
    grads = [local(p.grad) for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(grads)
    # The one time that a step waits for the device: an update with NaN cannot be taken back.
    known_loss, known_norm, norm, stopping = ranks.known(total, norm, stop)
    fine = math.isfinite(known_loss) and math.isfinite(known_norm)
    if fine:
        if plan.clip_norm is not None:
            _clip_(grads, plan.clip_norm, norm)
        optimizer.step(lambda: known_loss)  # ScheduleFree+, for one, steps by the loss
        progress.skips = 0
    elif progress.skips >= plan.max_skips:
        raise NotFiniteError(_explain(trainee, progress, known_loss, known_norm, numbers(progress.step)))
    else:
        progress.skips += 1
    optimizer.zero_grad()  # nothing of this step is left for a checkpoint, an evaluation or the next
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # the first may be left out
        trainee.scheduler.step()
    progress.step += 1
    progress.batches = batch.digest(progress.batches)
    progress.evaluated = not plan.is_evaluated(progress.step)
    step = Step(
        step=progress.step, loss=known_loss, grad_norm=known_norm, lr=lr, targets=targets, skipped=not fine
    )
    return step, stopping


def _gradient(trainee: Trainee, plan: Plan, batch: Batch, targets: int) -> Tensor:
    """Leave the gradient of the mean loss in the parameters; gives this rank's share of that loss."""
    device, ranks, called = trainee.device, trainee.ranks, trainee.called or trainee.model
    total = torch.zeros((), device=device)
    parts = ranks.parts(batch, plan.micro_batch_size)
    for left, part in zip(reversed(range(len(parts))), parts, strict=True):
        with ranks.reducing(called, last=left == 0):
            with autocast(device, plan.precision):
                # Not the mean of each micro batch: their targets would weigh unequally.
                loss = trainee.loss_of(called, part.to(device)) / max(targets, 1)
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


@torch.no_grad()
def _clip_(grads: list[Tensor], limit: float, norm: Tensor) -> None:
    """As torch's clip_grads_with_norm_, of the parts of gradients that are here."""
    torch._foreach_mul_(grads, torch.clamp(limit / (norm + 1e-6), max=1.0))


def _explain(trainee: Trainee, progress: Progress, loss: float, norm: float, numbers: Numbers) -> str:
    bad = [
        name
        for name, parameter in trainee.model.named_parameters()
        if parameter.grad is not None and trainee.ranks.any(not bool(local(parameter.grad).isfinite().all()))
    ]
    named = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
    times = f", after {progress.skips} skipped in a row" if progress.skips else ""
    return (
        f"loss {loss} and gradient norm {norm} at step {progress.step + 1}{times}, on samples "
        f"{', '.join(map(str, numbers[:8].tolist()))}{', …' if len(numbers) > 8 else ''}"
        + (f"; gradients not finite: {named}" if bad else "")
        + ". Weights and optimizer are as before that step"
    )
