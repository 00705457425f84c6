"""PACE in torchtitan: a container of optimizers for its Trainer, validation and export of the average.

For torchtitan 0.3, whose containers find optimizers by name. The container of this module knows PACE.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from torchtitan.components.checkpointer.base import ModelWrapper
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.components.validate import Validator

from paceline.optim import PACE, averaged_weights


@final
class PaceOptimizersContainer(OptimizersContainer):
    """The container of torchtitan, with a PACE for each part of the model.

    All groups of its configuration have `optimizer_name="PACE"`; their `optimizer_kwargs` are settings of
    `PACE`. `averaged_weights(container.optimizers, model=torch.nn.ModuleList(model_parts))` shows the
    averages of all parts.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """The configuration, with torchtitan's fields."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        if config.implementation == "fused_opt_states_bf16":
            raise ValueError(
                f"Invalid implementation: {config.implementation!r}; allowed: 'fused', 'foreach', 'for-loop'"
            )
        super().__init__(config, model_parts=model_parts)

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        if name != "PACE":
            raise ValueError(
                f"Invalid optimizer_name: {name!r}; allowed: 'PACE', so that all weights have an average. "
                'AdamW with one is PACE with optimizer_kwargs={"control": Control.none()}'
            )
        return PACE


def default_pace(lr: float = 8e-4, **settings: Any) -> PaceOptimizersContainer.Config:
    """Return a container with one group of all parameters: torchtitan's `default_adamw`, for PACE.

    Betas are (0.9, 0.95) and weight decay is 0.1, as there; further settings of `PACE` by name.

    >>> default_pace(lr=3e-4, average_dtype="bfloat16").param_groups[0].optimizer_kwargs["average_dtype"]
    'bfloat16'
    """
    usual = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    group = ParamGroupConfig(pattern=r".*", optimizer_name="PACE", optimizer_kwargs=usual | settings)
    return PaceOptimizersContainer.Config(param_groups=[group])


@final
class AveragedValidator(Validator):
    """The validation of torchtitan, with the average. Training continues from live, bit for bit."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        """The configuration, with torchtitan's fields."""

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Report the loss of the average."""
        optimizers = self.metrics_processor.optimizers.optimizers
        with averaged_weights(optimizers, model=nn.ModuleList(model_parts)):
            super().validate(model_parts, step)


def save_averaged_checkpoint(optimizers: PaceOptimizersContainer, folder: str | os.PathLike[str]) -> None:
    """Save the average as torchtitan saves a model, which `checkpoint.initial_load_path` starts from.

    Call it on every rank. All parts of the model are saved, sharded as they are, in their own precision.
    """
    with averaged_weights(optimizers.optimizers, model=nn.ModuleList(optimizers.model_parts)):
        save(ModelWrapper(optimizers.model_parts).state_dict(), checkpoint_id=os.fspath(folder))
