"""PACE in torchtitan: a container of optimizers for its Trainer, validation and export of the average.

For torchtitan 0.3, whose containers take their optimizers by name from a table; this one has PACE in it.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from torchtitan.components.checkpointer.base import ModelWrapper
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.components.validate import Validator

from paceline.optim import PACE, averaged_weights
from paceline.optim.weights import in_block, keeper_of


@final
class PaceOptimizersContainer(OptimizersContainer):
    """torchtitan's container of optimizers, with a PACE for each part of the model.

    All groups of its configuration say `optimizer_name="PACE"`; their `optimizer_kwargs` are settings of
    `PACE`. `averaged_weights(container, torch.nn.ModuleList(model_parts))` shows the averages of all parts.

    .. code-block:: python

        PaceOptimizersContainer.Config(
            param_groups=[
                ParamGroupConfig(
                    pattern=r"norm", optimizer_name="PACE", optimizer_kwargs={"lr": 8e-4, "weight_decay": 0.0}
                ),
                ParamGroupConfig(pattern=r".*", optimizer_name="PACE", optimizer_kwargs={"lr": 8e-4}),
            ]
        )
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """As torchtitan's."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        if config.implementation == "fused_opt_states_bf16":
            raise ValueError(
                f"Invalid implementation: {config.implementation!r}: PACE keeps its moments in the precision "
                "of the weights; allowed: 'fused', 'foreach', 'for-loop'. For less memory give "
                'optimizer_kwargs={"average_dtype": "bfloat16"} or "int8"'
            )
        super().__init__(config, model_parts=model_parts)
        self.register_step_pre_hook(_refuse_in_block)

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        if name != "PACE":
            raise ValueError(
                f"Invalid optimizer_name: {name!r}; allowed: 'PACE', so that all weights have an average. "
                'AdamW with one is PACE with optimizer_kwargs={"pullback_strength": 0, ...}'
            )
        return PACE

    # --- What `averaged_weights` asks of an optimizer ---------------------------------------------

    def returned_averages(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter of this rank with its returned average."""
        for optimizer in self.optimizers:
            yield from optimizer.returned_averages()

    def shows_average(self) -> bool:
        """Whether the parameters hold the average at present."""
        return any(optimizer.shows_average() for optimizer in self.optimizers)

    def eval(self, model: nn.Module | None = None) -> None:
        """Put the average into the parameters of all parts, or, where that fails, of none.

        Sharded parameters need the model, e.g. `torch.nn.ModuleList(model_parts)`.
        """
        try:
            for optimizer in self.optimizers:
                optimizer.eval(model)
        except BaseException:
            self.train()
            raise

    def train(self) -> None:
        """Put live back into the parameters of all parts."""
        for optimizer in self.optimizers:
            optimizer.train()


def _refuse_in_block(optimizers: Optimizer, args: Any, kwargs: Any) -> None:
    if in_block(optimizers):
        raise RuntimeError(
            "step() inside `with averaged_weights(...)`: the parameters hold the average; leave it first"
        )


def default_pace(lr: float = 8e-4, **settings: Any) -> PaceOptimizersContainer.Config:
    """A container with one group of all parameters: torchtitan's `default_adamw`, for PACE.

    Betas of (0.9, 0.95) and a weight decay of 0.1, as there; other settings of `PACE` by name.

    >>> default_pace(lr=3e-4, average_dtype="int8").param_groups[0].optimizer_kwargs["average_dtype"]
    'int8'
    """
    usual = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    group = ParamGroupConfig(pattern=r".*", optimizer_name="PACE", optimizer_kwargs=usual | settings)
    return PaceOptimizersContainer.Config(param_groups=[group])


@final
class AveragedValidator(Validator):
    """torchtitan's validation, of the average. Training goes on from live, bit for bit."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        """As torchtitan's."""

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Report the loss of the average."""
        model = nn.ModuleList(model_parts)
        with averaged_weights(keeper_of(self.metrics_processor.optimizers), model):
            super().validate(model_parts, step)


def save_averaged_checkpoint(optimizers: PaceOptimizersContainer, folder: str | os.PathLike[str]) -> None:
    """Save the average as torchtitan saves a model: what `checkpoint.initial_load_path` starts from.

    On every rank, of all parts of the model, sharded as they are, in the precision of the weights.
    """
    with averaged_weights(optimizers, nn.ModuleList(optimizers.model_parts)):
        save(ModelWrapper(optimizers.model_parts).state_dict(), checkpoint_id=os.fspath(folder))
