"""PACE in Lightning's Trainer. Fabric needs no integration.

A checkpoint follows the convention of Lightning's own WeightAveraging: `state_dict` is the average, which
`load_from_checkpoint` and other tools read. Live weights are stored next to it, to resume from.
"""

import warnings
from collections.abc import Callable, Iterable
from copy import copy
from functools import partial
from typing import Any, final

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from paceline.optim.attach import PREFIX
from paceline.optim.checkpoint import with_live
from paceline.optim.weights import Keeper, has_keeper, keeper_of


@final
class AveragedModelCallback(Callback):
    """The callback that validates, saves and returns the average, and trains and resumes from live.

    * Validation, test and prediction run on the average.
    * `state_dict` of every checkpoint is the average, also with `save_weights_only=True`. Live weights are
      stored as `current_model_state`. `trainer.fit(..., ckpt_path=...)` resumes from them, bit for bit.
    * After `trainer.fit` the module holds the average. Another `trainer.fit` continues from live, unless
      other weights were loaded in between.

    It works with `PACE` and with optimizers that `attach` was called on, one or several, on one device and
    under DDP. Its place in the list of callbacks does not matter.

    .. code-block:: python

        trainer = Trainer(max_epochs=3, callbacks=[AveragedModelCallback(), ModelCheckpoint(monitor="loss")])
        trainer.fit(module, train_loader, val_loader)
        best = Module.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)  # an average
    """

    def __init__(self) -> None:
        # Versions of the parameters when they were left with the average; torch counts changes in place.
        self._left_as: list[int] = []

    # --- Which weights the module holds -------------------------------------------------------------------

    @torch.no_grad()
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Move to the front of the callbacks, and restore live weights after an earlier fit."""
        if stage != "fit":
            return
        _refuse(_unsupported(trainer))
        # In front, so that all other callbacks see the same weights, in any order.
        others = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
        trainer.callbacks = [self, *others]  # type: ignore[attr-defined]
        _save_average(trainer.strategy)
        own = {id(parameter) for parameter in pl_module.parameters()}
        earlier = [k for k in _keepers(trainer.optimizers) if own.issuperset(map(id, _trained([k])))]
        trained = _trained(earlier)
        loaded = [p.detach().clone() for p in trained] if _versions(trained) != self._left_as else []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about loaded weights, which are copied back below
            _show_live(earlier)
        for parameter, weights in zip(trained, loaded, strict=False):
            parameter.copy_(weights)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise ValueError before the first step if the fit could not end with the average."""
        _refuse(_unsupported_optimizers(trainer, pl_module))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the average. A later hook restores live weights, after all hooks of the validation."""
        if _fits(trainer):
            _show_average(_keepers(trainer.optimizers))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore live weights after the sanity check."""
        _show_live(_keepers(trainer.optimizers))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Restore live weights after a validation within the epoch."""
        _show_live(_keepers(trainer.optimizers))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore live weights after the validation of the epoch, before other hooks of its end."""
        _show_live(_keepers(trainer.optimizers))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the average in the module."""
        self._leave_average(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the average in the module, for tests and saves after an interrupt."""
        if _fits(trainer):
            self._leave_average(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Log which weights the module holds."""
        if stage != "fit":
            return
        self._leave_average(trainer)  # a fit without a step has no on_train_end
        rank_zero_info(
            "The module holds the average of its weights; test, predict and save_checkpoint use it. "
            "Live weights come back when this Trainer fits it again."
        )

    def _leave_average(self, trainer: Trainer) -> None:
        keepers = _keepers(trainer.optimizers)
        _show_average(keepers)
        self._left_as = _versions(_trained(keepers))

    # --- Checkpoints --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return a note, which makes Lightning warn a user who resumes without this callback."""
        return {"state_dict": "average", "current_model_state": "live"}

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add live weights to a checkpoint. Its `state_dict` is the average already."""
        keepers = _keepers(trainer.optimizers)
        if not keepers:
            return  # the Trainer has not trained
        live = {id(tensor): live for keeper in keepers for tensor, live in keeper.live_weights()}
        checkpoint["current_model_state"] = _with(live, checkpoint["state_dict"], pl_module)
        checkpoint["averaging_state"] = {}  # all of it is in optimizer_states
        # With these a checkpoint restores live even where it is loaded without this callback.
        checkpoint["optimizer_states"] = [
            _state_with_live(optimizer, state)
            for optimizer, state in zip(trainer.optimizers, checkpoint["optimizer_states"], strict=True)
        ]

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Load live weights in place of `state_dict`, which Lightning has just loaded."""
        if _fits(trainer) and "current_model_state" in checkpoint:
            pl_module.load_state_dict(checkpoint["current_model_state"], strict=pl_module.strict_loading)


def _fits(trainer: Trainer) -> bool:
    return trainer.state.fn == TrainerFn.FITTING


def _keepers(optimizers: Iterable[Optimizer]) -> list[Keeper]:
    """Return the keepers of those optimizers that keep an average."""
    return [keeper_of(optimizer) for optimizer in optimizers if has_keeper(optimizer)]


def _trained(keepers: Iterable[Keeper]) -> list[Tensor]:
    return [p for keeper in keepers for group in keeper.groups for p in group["params"]]


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


def _show_average(keepers: Iterable[Keeper]) -> None:
    for keeper in keepers:
        keeper.show()


def _show_live(keepers: Iterable[Keeper]) -> None:
    for keeper in keepers:
        keeper.hide()


def _save_average(strategy: Strategy) -> None:
    """Make the Trainer use the average as `state_dict` of its checkpoints."""
    # No hook runs if only weights are saved. So this replaces the method from which the Trainer gets them.
    own = strategy.lightning_module_state_dict
    if not isinstance(own, partial):  # an earlier fit may have replaced it
        strategy.lightning_module_state_dict = partial(_averaged_state, strategy, own)  # type: ignore[method-assign]


def _averaged_state(strategy: Strategy, module_state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    module = strategy.lightning_module
    assert module is not None
    averages = (pair for keeper in _keepers(strategy.optimizers) for pair in keeper.averages())
    # In the precision of the parameter, with which the model computes when it shows the average.
    shown = {id(tensor): average.to(tensor) for tensor, average in averages}
    return _with(shown, module_state(), module)


def _with(tensors: dict[int, Tensor], state: dict[str, Any], module: LightningModule) -> dict[str, Any]:
    """Return a copy of a module's state in which these tensors replace those of the parameters.

    The keys of `tensors` are the ids of parameters.
    """
    replaced = copy(state)  # keeps torch's attribute _metadata
    for name, value in module.state_dict(keep_vars=True).items():
        if id(value) in tensors:
            replaced[name] = tensors[id(value)].detach()
    return replaced


def _state_with_live(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    if not has_keeper(optimizer):
        return state
    attached = any(PREFIX + "step" in entries for entries in state["state"].values())
    found: dict[str, Any] = with_live(optimizer, keeper_of(optimizer), state, PREFIX if attached else "")
    return found


# --- What is refused ------------------------------------------------------------------------------------


def _refuse(reason: str | None) -> None:
    if reason:
        raise ValueError(f"AveragedModelCallback: {reason}")


def _unsupported(trainer: Trainer) -> str | None:
    """Return why this Trainer cannot validate and keep the average, or None."""
    if isinstance(trainer.strategy, DeepSpeedStrategy | FSDPStrategy | ModelParallelStrategy):
        return f"{type(trainer.strategy).__name__} is not supported in Lightning yet; use DDP"
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            name = type(callback).__name__
            return f"{name} averages weights too and would save its average in place of ours; remove one"
    return None


def _unsupported_optimizers(trainer: Trainer, module: LightningModule) -> str | None:
    """Return why the average of these optimizers cannot be shown and saved, or None."""
    if not _keepers(trainer.optimizers):
        names = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers) or "none"
        return (
            f"no optimizer of configure_optimizers keeps an average (it returned: {names}); return "
            "paceline.PACE(self.parameters(), lr=1e-3), or call paceline.attach on yours"
        )
    own = {id(parameter) for parameter in module.parameters()}
    saved = {id(value) for value in module.state_dict(keep_vars=True).values()}
    for optimizer in filter(has_keeper, trainer.optimizers):
        name, trained = type(optimizer).__name__, _trained([keeper_of(optimizer)])
        if not own.issuperset(map(id, trained)):
            return f"{name} trains parameters that are not the module's own"
        missing = [p for p in trained if p.requires_grad and id(p) not in saved]
        if missing:
            return (
                f"{len(missing)} parameter(s) that {name} trains do not appear in the module's "
                "state_dict(keep_vars=True), so their average cannot be saved; a hook or an override of "
                "state_dict replaces them"
            )
    return None
