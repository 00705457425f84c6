"""The training loop. It yields a record of each step and evaluation; it writes and prints nothing.

.. code-block:: text

    seed, step → numbers_at → Samples.batch → micro batches → loss, gradient → finite? → clip
        → optimizer, schedule → yield Step
    every `evaluate_every` steps: for each view (live, average, …) the held-out loss → yield Evaluation

After each yield a step is complete, and `progress` says where the run is. The caller may save everything
then. A loop that starts from this state continues exactly as this one would.
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

from paceline.lm.batch import Batch, Numbers, Samples, load_batches, numbers_at
from paceline.lm.evaluate import LossOf, NotFiniteError, Stopped, autocast, held_out_loss, summed_loss
from paceline.lm.parallel import ALONE, Ranks, local

View = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The settings of the training loop. `Trainee` has the model and the data."""

    steps: int
    """Steps of the whole run."""
    batch_size: int
    """Samples per step, on all ranks together."""
    micro_batch_size: int
    """Samples of one forward pass on a rank; a step adds up the gradients of several."""
    seed: int
    """The seed of the order of samples."""
    clip_norm: float | None = 1.0
    """The largest norm of the whole gradient; None: no clipping."""
    precision: torch.dtype = torch.float32
    """The precision of matrix products; weights keep theirs."""
    evaluate_every: int
    """Steps between evaluations; there is always one at the end."""
    max_skips: int = 0
    """How many steps in a row may be skipped because loss or gradient is not finite; 0: the first one ends
    the run."""

    def is_evaluated(self, step: int) -> bool:
        """Return whether an evaluation follows this step."""
        return step > 0 and (step % self.evaluate_every == 0 or step == self.steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainee:
    """The model, any torch optimizer, and the data."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    samples: Samples
    held_out: Mapping[str, Samples]
    views: Mapping[str, View]
    """The weights to evaluate, by name: each a context in which the parameters hold them."""
    loss_of: LossOf = summed_loss
    """Returns the summed loss of a batch; may be compiled."""
    ranks: Ranks = ALONE
    """The processes that train the model."""
    called: nn.Module | None = None
    """The module to call in training, from `ranks.spread`; None: the model itself."""

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.model.parameters()).device


@dataclass(kw_only=True, slots=True)
class Progress:
    """The state of a run after `step` steps. The loop changes it; the caller saves and restores it."""

    step: int = 0
    evaluated: bool = True
    """Whether an evaluation that is due after this step has been done."""
    skips: int = 0
    """How many of the last steps were skipped in a row."""
    batches: str = ""
    """The digest of all batches so far, in their order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The record of a step, taken or skipped."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    targets: int
    """Tokens that took part in the loss."""
    skipped: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The held-out losses after a step: by held-out set, then by view."""

    step: int
    losses: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    batches: str = ""
    """The digest of all batches so far: runs with equal digests have trained on the same data."""


def train(
    trainee: Trainee, plan: Plan, progress: Progress, stop: Callable[[], bool] = lambda: False
) -> Iterator[Step | Evaluation]:
    """Train from `progress` to the end of the plan, or until `stop()` is true; yield the records."""
    samples = trainee.samples
    numbers = partial(numbers_at, batch_size=plan.batch_size, samples=len(samples), seed=plan.seed)
    batches = load_batches(
        samples,
        numbers,
        range(progress.step, plan.steps),
        pinned=trainee.device.type == "cuda",
    )
    trainee.model.train()
    ranks = trainee.ranks
    try:
        yield from _evaluate(trainee, plan, progress, stop)
        stopping: bool | None = None
        # Asked before it waits for data.
        while progress.step < plan.steps and not ranks.should_stop(stop, stopping):
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
    """Take a step; return its record, and whether a rank was asked to stop."""
    model, optimizer, ranks = trainee.model, trainee.optimizer, trainee.ranks
    lr, targets = float(optimizer.param_groups[0]["lr"]), batch.target_count()
    ranks.reseed(plan.seed, progress.step)
    total = _gradient(trainee, plan, batch, targets)
    grads = [local(p.grad) for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(grads)
    # A step waits for the device only here: an update with NaN could not be undone.
    known_loss, known_norm, norm, stopping = ranks.step_totals(total, norm, stop)
    fine = math.isfinite(known_loss) and math.isfinite(known_norm)
    if fine:
        if plan.clip_norm is not None:
            _clip_(grads, plan.clip_norm, norm)
        optimizer.step(lambda: known_loss)  # some optimizers, such as ScheduleFree+, use the loss
        progress.skips = 0
    elif progress.skips >= plan.max_skips:
        raise NotFiniteError(_explain(trainee, progress, known_loss, known_norm, numbers(progress.step)))
    else:
        progress.skips += 1
    optimizer.zero_grad()  # also frees the gradients' memory for evaluation and checkpoint
    with warnings.catch_warnings():
        # torch warns if the optimizer's first step is skipped.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        trainee.scheduler.step()
    progress.step += 1
    progress.batches = batch.digest(progress.batches)
    progress.evaluated = not plan.is_evaluated(progress.step)
    step = Step(
        step=progress.step, loss=known_loss, grad_norm=known_norm, lr=lr, targets=targets, skipped=not fine
    )
    return step, stopping


def _gradient(trainee: Trainee, plan: Plan, batch: Batch, targets: int) -> Tensor:
    """Compute the gradient of the mean loss, and return this rank's share of that loss."""
    device, ranks, called = trainee.device, trainee.ranks, trainee.called or trainee.model
    total = torch.zeros((), device=device)
    parts = ranks.parts(batch, plan.micro_batch_size)
    for left, part in zip(reversed(range(len(parts))), parts, strict=True):
        with ranks.reducing(called, last=left == 0):
            with autocast(device, plan.precision):
                # Divided by all targets of the step, so that each target has the same weight.
                loss = trainee.loss_of(called, part.to(device)) / max(targets, 1)
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


@torch.no_grad()
def _clip_(grads: list[Tensor], limit: float, norm: Tensor) -> None:
    """Scale this rank's parts of gradients, so that the norm of the whole is at most the limit."""
    # torch's clip_grads_with_norm_ takes parameters, not local parts of gradients.
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
