"""The average of paceline where timm has its `model_ema`: in checkpoints and in validation.

timm's loaders take `state_dict_ema` first. No second model is needed: the optimizer keeps the average.
"""

from collections.abc import Iterator
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.optim import averaged_state_dict, averaged_weights
from paceline.optim.weights import keeper_of


@final
class PaceModelEma:
    """The `model_ema` for timm, of a model that `PACE` or an attached optimizer trains.

    It has no weights and no `module`: its state dict is the average, and calling it computes with the
    average.

    Arguments:
        model: the model; wrappers of `torch.compile` and DistributedDataParallel leave no trace in names.
        optimizer: the optimizer that trains it.

    >>> import torch, paceline
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = paceline.PACE(model.parameters(), lr=1e-3, control=paceline.Control.push())
    >>> list(PaceModelEma(model, optimizer).state_dict())
    ['weight', 'bias']
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._keeper = keeper_of(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the average, with the buffers of the model: `state_dict_ema` in checkpoints."""
        return averaged_state_dict(self._model, self._optimizer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model with the average, and restore its weights."""
        if self._keeper.shown != "live":
            return self._model(*args, **kwargs)
        with averaged_weights(self._optimizer):
            return self._model(*args, **kwargs)

    def eval(self) -> "PaceModelEma":
        """Set the trained model itself to evaluation mode, because it is shared."""
        self._model.eval()
        return self

    def update(self, model: nn.Module, step: int | None = None) -> None:
        """Do nothing: the optimizer's step has moved the average."""

    def named_buffers(self, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Return no buffers, so that timm's `distribute_bn` handles those of the model only once."""
        return iter(())
