"""The average of paceline where timm has its `model_ema`: in checkpoints and in validation.

timm's loaders take `state_dict_ema` first. It needs no second model: the average is the optimizer's.
"""

from collections.abc import Iterator
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.optim import averaged_state_dict, averaged_weights
from paceline.optim.weights import keeper_of


@final
class PaceModelEma:
    """What timm takes as `model_ema`, for a model that is trained by an optimizer of paceline.

    It has no weights of its own, and no `module`: its state dict is the average, and called, it computes
    with the average.

    Arguments:
        model: the model; wrappers of `torch.compile` and DistributedDataParallel leave no trace in names.
        optimizer: the `PACE` that trains it, or another optimizer of paceline.

    >>> import torch, paceline
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = paceline.PACE(model.parameters())
    >>> model_ema = PaceModelEma(model, optimizer)
    >>> list(model_ema.state_dict())
    ['weight', 'bias']
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        self._keeper = keeper_of(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The average, copied, with the buffers of the model: `state_dict_ema` in timm's checkpoints."""
        return averaged_state_dict(self._model, self._keeper)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model computes with the average. Live weights are back in it afterwards."""
        if self._keeper.shows_average():
            return self._model(*args, **kwargs)
        with averaged_weights(self._keeper, self._model):
            return self._model(*args, **kwargs)

    def eval(self) -> "PaceModelEma":
        """Put the model into evaluation mode, which it shares."""
        self._model.eval()
        return self

    def update(self, model: nn.Module, step: int | None = None) -> None:
        """Nothing is left to do: the optimizer's step has moved the average."""

    def named_buffers(self, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
        """None of its own: for timm's `distribute_bn`, which has seen to those of the model."""
        return iter(())
