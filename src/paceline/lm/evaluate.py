"""The loss, and its mean over held-out samples."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.lm.batch import IGNORED, Batch, Samples
from paceline.lm.parallel import ALONE, Ranks

LossOf = Callable[[nn.Module, Batch], Tensor]


class NotFiniteError(RuntimeError):
    """A run has diverged: loss, gradient or weights are not finite. Earlier checkpoints are valid."""


class Stopped(Exception):
    """An evaluation was asked to stop, and has no result."""


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy of a batch, in nats, summed over its targets."""
    logits = model(batch.tokens, batch.positions)
    # In bfloat16, small differences between logits would be lost.
    return F.cross_entropy(
        logits.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Disable dropout and gradients, and restore the model's mode at the end."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def held_out_loss(
    model: nn.Module,
    samples: Samples,
    *,
    device: torch.device,
    batch_size: int,
    precision: torch.dtype,
    loss_of: LossOf = summed_loss,
    stop: Callable[[], bool] = lambda: False,
    ranks: Ranks = ALONE,
) -> float:
    """Return the mean loss over all targets of these samples, with the weights that the parameters hold.

    Each rank computes its share, and all ranks return the mean.
    """
    total, count = torch.zeros((), dtype=torch.float64, device=device), 0
    with evaluating(model), autocast(device, precision):
        for numbers in ranks.rounds(len(samples), batch_size):
            if ranks.any(stop()):
                raise Stopped
            batch = samples.batch(numbers) if numbers else samples.batch(range(1)).without_targets()
            total += loss_of(model, batch.to(device))  # stays on the device: nothing waits for it
            count += batch.target_count()
    loss, targets = ranks.summed(total, count)
    return loss / max(targets, 1)


def autocast(device: torch.device, precision: torch.dtype) -> torch.autocast:
    """Return a context in which matrix products have that precision; weights and losses keep float32."""
    return torch.autocast(device.type, precision, enabled=precision != torch.float32)
