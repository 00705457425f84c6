"""PACE in Lightning's Trainer. Fabric needs no integration.

A checkpoint follows the convention of Lightning's own WeightAveraging: `state_dict` is the average, which
`load_from_checkpoint` and other tools read. Training resumes from live weights in the optimizer's state.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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

from paceline.optim.state import unsupported_averages
from paceline.optim.weights import Keeper, has_keeper, keeper_of


@final
class AveragedModelCallback(Callback):
    """The callback that validates, saves and returns the average, and trains and resumes from live.

    * Validation, test and prediction run on the average.
    * `state_dict` of every checkpoint is the average, also with `save_weights_only=True`. Live weights are
      in the optimizer's state, from which `trainer.fit(..., ckpt_path=...)` resumes, bit for bit. Unless the
      model is sharded, they are `current_model_state` too.
    * After `trainer.fit` the module holds the average. Another `trainer.fit` continues from live, unless
      other weights were loaded in between.

    It works with `PACE` and with optimizers that `attach` was called on, one or several, on one device, under
    DDP, and under ModelParallelStrategy (FSDP2). Its place in the list of callbacks does not matter.

    .. code-block:: python

        trainer = Trainer(max_epochs=3, callbacks=[AveragedModelCallback(), ModelCheckpoint(monitor="loss")])
        trainer.fit(module, train_loader, val_loader)
        best = Module.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)  # an average
    """

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
        _use_average(trainer.strategy)
        own = {id(parameter) for parameter in pl_module.parameters()}
        for keeper in _keepers(trainer.optimizers):  # of an earlier fit
            trained = _trained([keeper])
            if own.issuperset(map(id, trained)):
                # By all ranks if by one, whose shard alone may have been changed.
                changed = trainer.strategy.reduce_boolean_decision(keeper.was_changed(), all=False)
                loaded = [p.detach().clone() for p in trained] if changed else []
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # about loaded weights, which are copied back next
                    keeper.hide()
                for parameter, weights in zip(trained, loaded, strict=False):
                    parameter.copy_(weights)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise ValueError before the first step if the fit could not end with the average."""
        _refuse(_unsupported_optimizers(trainer, pl_module))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the average. A later hook restores live weights, after all hooks of the validation."""
        if _fits(trainer):
            _show_average(_keepers(trainer.optimizers), pl_module)

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
        _show_average(_keepers(trainer.optimizers), pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the average in the module, for tests and saves after an interrupt."""
        if _fits(trainer):
            _show_average(_keepers(trainer.optimizers), pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Log which weights the module holds."""
        if stage != "fit":
            return
        # A fit without a step has no on_train_end.
        _show_average(_keepers(trainer.optimizers), pl_module)
        rank_zero_info(
            "The module holds the average of its weights; test, predict and save_checkpoint use it. "
            "Live weights come back when this Trainer fits it again."
        )

    # --- Checkpoints --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return a note, which makes Lightning warn a user who resumes without this callback."""
        return {"state_dict": "average", "optimizer_states": "live"}

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add live weights to a checkpoint. Its `state_dict` is the average already."""
        # Of a sharded checkpoint Lightning writes further entries on one rank only.
        if trainer.optimizers and not isinstance(trainer.strategy, ModelParallelStrategy):
            live = {p: own for keeper in _keepers(trainer.optimizers) for p, own in keeper.live_weights()}
            state = pl_module.state_dict(keep_vars=True)
            for name, value in state.items():
                state[name] = live.get(value, value) if isinstance(value, Tensor) else value
            checkpoint["current_model_state"] = _copied(state)
            checkpoint["averaging_state"] = {}  # all of it is in optimizer_states


def _fits(trainer: Trainer) -> bool:
    return trainer.state.fn == TrainerFn.FITTING


def _keepers(optimizers: Iterable[Optimizer]) -> list[Keeper]:
    """Return the keepers of those optimizers that keep an average."""
    return [keeper_of(optimizer) for optimizer in optimizers if has_keeper(optimizer)]


def _trained(keepers: Iterable[Keeper]) -> list[Tensor]:
    return [p for keeper in keepers for group in keeper.groups for p in group["params"]]


def _show_average(keepers: Iterable[Keeper], module: LightningModule) -> None:
    for keeper in keepers:
        keeper.show(None, module)


def _show_live(keepers: Iterable[Keeper]) -> None:
    for keeper in keepers:
        keeper.hide()


@contextmanager
def _showing_average(keepers: list[Keeper], module: LightningModule) -> Iterator[None]:
    """Show the average for the length of a with-block."""
    hidden = [keeper for keeper in keepers if keeper.shown == "live"]
    try:
        _show_average(keepers, module)
        yield
    finally:
        _show_live(hidden)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Return a module's state that no later change of its weights reaches."""
    copied = copy(state)  # keeps torch's attribute _metadata
    for name, value in state.items():
        copied[name] = value.detach().clone() if isinstance(value, Tensor) else value
    return copied


def _use_average(strategy: Strategy) -> None:
    """Make the Trainer use the average as `state_dict` of its checkpoints, with live in the optimizer's."""
    # No hook runs if only weights are saved. So this replaces the methods from which the Trainer gets them.
    own = strategy.lightning_module_state_dict
    if isinstance(own, partial):  # an earlier fit has replaced it
        return
    strategy.lightning_module_state_dict = partial(_averaged_state, strategy, own)  # type: ignore[method-assign]
    strategy.optimizer_state = partial(_state_with_live, strategy, strategy.optimizer_state)  # type: ignore[method-assign]
    strategy.load_model_state_dict = partial(_load_as_live, strategy, strategy.load_model_state_dict)  # type: ignore[method-assign]
    if isinstance(strategy, ModelParallelStrategy):
        strategy.load_checkpoint = partial(_load_sharded, strategy, strategy.load_checkpoint)  # type: ignore[method-assign]


def _load_as_live(strategy: Strategy, load: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    """Load weights over live ones, because the average of training may be in the parameters."""
    _show_live(_keepers(strategy.optimizers))
    return load(*args, **settings)


def _load_sharded(strategy: Strategy, load: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    """Load a checkpoint into a sharded module: all of it in a fit, and else its average alone."""
    module, optimizers = strategy.lightning_module, strategy.optimizers
    assert module is not None
    if not _fits(module.trainer):
        _show_live(_keepers(optimizers))
        strategy.optimizers = []  # whose state Lightning would load too
        try:
            return load(*args, **settings)
        finally:
            strategy.optimizers = optimizers
    # What a sharded state is loaded into must have all entries of the checkpoint, so also live ones.
    for optimizer in optimizers:
        strategy.optimizer_state(optimizer)
    _show_average(_keepers(optimizers), module)
    return load(*args, **settings)


def _averaged_state(strategy: Strategy, state_of_module: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    assert strategy.lightning_module is not None
    with _showing_average(_keepers(strategy.optimizers), strategy.lightning_module):
        return _copied(state_of_module())


def _state_with_live(
    strategy: Strategy, state_of: Callable[[Optimizer], dict[str, Any]], optimizer: Optimizer
) -> dict[str, Any]:
    """Return the state of an optimizer, as it is while the average is shown: it has live weights then."""
    # So a checkpoint restores live weights, also where it is loaded without this callback.
    assert strategy.lightning_module is not None
    with _showing_average(_keepers([optimizer]), strategy.lightning_module):
        return state_of(optimizer)


# --- What is refused ------------------------------------------------------------------------------------


def _refuse(reason: str | None) -> None:
    if reason:
        raise ValueError(f"AveragedModelCallback: {reason}")


def _unsupported(trainer: Trainer) -> str | None:
    """Return why this Trainer cannot validate and keep the average, or None."""
    if isinstance(trainer.strategy, DeepSpeedStrategy | FSDPStrategy):
        return (
            f"{type(trainer.strategy).__name__} trains flat copies of the weights, so that the module would "
            "not hold the average; use ModelParallelStrategy with torch's fully_shard (FSDP2), or DDP"
        )
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
        reason = unsupported_averages(optimizer.param_groups)
        if reason is not None:
            return reason
    return None
