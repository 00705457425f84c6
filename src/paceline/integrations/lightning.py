"""PACE in Lightning's Trainer. Fabric needs nothing of this: docs/lightning.md.

A checkpoint follows the convention of Lightning's own WeightAveraging: `state_dict` is the average, so that
`load_from_checkpoint` and other tools return it, and live weights are beside it, to resume from.
"""

from collections.abc import Callable, Iterable
from copy import copy
from functools import partial
from typing import Any, final

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from paceline.optim.averaging import Averaging
from paceline.optim.weights import keeper_of


@final
class AveragedModelCallback(Callback):
    """Validate, keep and return the average; train and resume from live, whatever runs when.

    * Validation, test and prediction run on the average.
    * `state_dict` of every checkpoint is the average, also with `save_weights_only=True`. The live weights
      are beside it, as `current_model_state`; `trainer.fit(..., ckpt_path=...)` goes on from them to the bit.
    * After `trainer.fit` the module holds the average. Another `trainer.fit` goes on from live, unless other
      weights were loaded in between.

    Its place in the list of callbacks does not matter: it puts itself first. For any optimizer of paceline,
    one or several, on one device or under DDP; strategies that shard or hide parameters are refused.

    .. code-block:: python

        trainer = Trainer(max_epochs=3, callbacks=[AveragedModelCallback(), ModelCheckpoint(monitor="loss")])
        trainer.fit(module, train_loader, val_loader)
        best = Module.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)  # an average
    """

    def __init__(self) -> None:
        # Of parameters left with the average in them; torch counts changes in place.
        self._left_as: list[int] = []

    # --- Which weights the module holds -----------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Come before all other callbacks; go on from live after an earlier fit."""
        if stage != "fit":
            return
        _refuse(_refusal_of(trainer))
        # First to show the average and to put live back, so that others see one rule, in any order.
        others = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
        trainer.callbacks = [self, *others]  # type: ignore[attr-defined]
        _save_average(trainer.strategy)
        earlier = [keeper for keeper in _keepers(trainer.optimizers) if not _foreign(keeper, pl_module)]
        if [parameter._version for parameter in _trained(earlier)] == self._left_as:
            _show_live(earlier)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what would end with other weights than the average, before the first step."""
        _refuse(_refusal_of_optimizers(trainer, pl_module))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the average, until the last hook of a validation has run."""
        if _fits(trainer):
            _show_average(_keepers(trainer.optimizers))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put live back after the sanity check."""
        _show_live(_keepers(trainer.optimizers))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Put live back after a validation within the epoch."""
        _show_live(_keepers(trainer.optimizers))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put live back after the validation of the epoch, for all that run at its end."""
        _show_live(_keepers(trainer.optimizers))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the average in the module."""
        self._leave_average(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """As at the end: what is left of a run that was interrupted is tested and saved like any other."""
        if _fits(trainer):
            self._leave_average(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Say which weights the module holds."""
        if stage != "fit":
            return
        self._leave_average(trainer)  # a fit without a step to take has no on_train_end
        rank_zero_info(
            "The module holds the average of its weights; test, predict and save_checkpoint use it. "
            "Live weights come back when this Trainer fits it again."
        )

    def _leave_average(self, trainer: Trainer) -> None:
        keepers = _keepers(trainer.optimizers)
        _show_average(keepers)
        self._left_as = [parameter._version for parameter in _trained(keepers)]

    # --- Checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Not empty: Lightning then warns whoever resumes without this callback."""
        return {"state_dict": "average", "current_model_state": "live"}

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Put live weights beside the average, which is in `state_dict` already."""
        optimizers = [_inside(optimizer) for optimizer in trainer.optimizers]
        keepers = [optimizer for optimizer in optimizers if isinstance(optimizer, Averaging)]
        if not keepers:
            return  # of a Trainer that has not trained
        live = {id(tensor): live for keeper in keepers for tensor, live in keeper.live_weights()}
        checkpoint["current_model_state"] = _with(live, checkpoint["state_dict"], pl_module)
        checkpoint["averaging_state"] = {}  # all of it is in optimizer_states
        # They then bring live weights along by themselves, where something resumes without callbacks: as
        # Lightning's own search for a learning rate does.
        checkpoint["optimizer_states"] = [
            optimizer.with_live(state) if isinstance(optimizer, Averaging) else state
            for optimizer, state in zip(optimizers, checkpoint["optimizer_states"], strict=True)
        ]

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Go on from live: Lightning has just put `state_dict` into the module; optimizers come next."""
        if _fits(trainer) and "current_model_state" in checkpoint:
            pl_module.load_state_dict(checkpoint["current_model_state"], strict=pl_module.strict_loading)


def _fits(trainer: Trainer) -> bool:
    return trainer.state.fn == TrainerFn.FITTING


def _inside(optimizer: object) -> object:
    """The optimizer itself, of which a wrapper may have been given."""
    try:
        return keeper_of(optimizer)
    except TypeError:
        return optimizer


def _keepers(optimizers: Iterable[object]) -> list[Averaging]:
    """Those of paceline."""
    return [inside for inside in map(_inside, optimizers) if isinstance(inside, Averaging)]


def _trained(keepers: Iterable[Averaging]) -> list[Tensor]:
    return [p for keeper in keepers for group in keeper.param_groups for p in group["params"]]


def _foreign(keeper: Averaging, module: LightningModule) -> bool:
    """Whether it trains parameters that are not the module's own."""
    return bool({id(parameter) for parameter in _trained([keeper])} - {*map(id, module.parameters())})


def _show_average(keepers: Iterable[Averaging]) -> None:
    for keeper in keepers:
        keeper.eval()


def _show_live(keepers: Iterable[Averaging]) -> None:
    for keeper in keepers:
        keeper.train()


def _save_average(strategy: Strategy) -> None:
    """From here on, have the Trainer take the average for `state_dict` of its checkpoints.

    Callbacks are not asked when weights alone are saved, so it is done where the Trainer asks for weights.
    """
    own = strategy.lightning_module_state_dict
    if not isinstance(own, partial):  # by an earlier fit
        strategy.lightning_module_state_dict = partial(_averaged_state, strategy, own)  # type: ignore[method-assign]


def _averaged_state(strategy: Strategy, module_state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    module = strategy.lightning_module
    assert module is not None
    averages = (pair for keeper in _keepers(strategy.optimizers) for pair in keeper.returned_averages())
    # In the precision of the parameter: what the model computes with when it shows the average.
    shown = {id(tensor): average.to(tensor) for tensor, average in averages}
    return _with(shown, module_state(), module)


def _with(tensors: dict[int, Tensor], state: dict[str, Any], module: LightningModule) -> dict[str, Any]:
    """A state of the module with these tensors, by the id of the parameter, in place of its own."""
    replaced = copy(state)  # with the versions of modules, which torch keeps beside the entries
    for name, value in module.state_dict(keep_vars=True).items():
        if id(value) in tensors:
            replaced[name] = tensors[id(value)].detach()
    return replaced


# --- What is refused ------------------------------------------------------------------------------


def _refuse(reason: str | None) -> None:
    if reason:
        raise ValueError(f"AveragedModelCallback: {reason}")


def _refusal_of(trainer: Trainer) -> str | None:
    """Why this Trainer cannot validate and keep the average, if it cannot."""
    if isinstance(trainer.strategy, DeepSpeedStrategy | FSDPStrategy | ModelParallelStrategy):
        name = type(trainer.strategy).__name__
        return f"strategy {name} shards or hides the parameters, so their average cannot be shown; use DDP"
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            name = type(callback).__name__
            return f"{name} averages weights too and would save its average in place of ours; remove one"
    return None


def _refusal_of_optimizers(trainer: Trainer, module: LightningModule) -> str | None:
    """Why the average of these optimizers cannot be shown and saved, if it cannot."""
    keepers = _keepers(trainer.optimizers)
    if not keepers:
        names = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers) or "none"
        return (
            f"no optimizer of configure_optimizers keeps an average (it returned: {names}); return one of "
            "paceline, e.g. paceline.PACE(self.parameters(), lr=1e-3)"
        )
    saved = {id(value) for value in module.state_dict(keep_vars=True).values()}
    for keeper in keepers:
        name, trained = type(keeper).__name__, _trained([keeper])
        if any(isinstance(parameter, DTensor) for parameter in trained):
            return f"{name} trains sharded parameters (DTensor), which are not supported in Lightning yet"
        if _foreign(keeper, module):
            return f"{name} trains parameters that are not the module's own"
        missing = [p for p in trained if p.requires_grad and not is_lazy(p) and id(p) not in saved]
        if missing:
            return (
                f"{len(missing)} parameter(s) that {name} trains do not appear in the module's "
                "state_dict(keep_vars=True), so their average cannot be saved; a hook or an override of "
                "state_dict replaces them"
            )
    return None
