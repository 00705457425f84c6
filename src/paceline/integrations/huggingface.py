"""PACE in the Trainer of transformers and in those built on it, such as TRL's SFTTrainer.

The Trainer saves the weights that the parameters hold. Without the callback of this module these are the
average after an evaluation, and live weights at other times.
"""

import inspect
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, load_fsdp_optimizer
from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from paceline.optim import save_averaged
from paceline.optim.sharding import is_sharded
from paceline.optim.state import unsupported_averages
from paceline.optim.weights import Keeper, keeper_of

logger = logging.getLogger(__name__)


def optimizer_for_trainer(build: Callable[[nn.Module], Optimizer]) -> tuple[Any, dict[str, Any]]:
    """Return what a Trainer takes as `optimizer_cls_and_kwargs`, given a function from model to optimizer.

    The Trainer calls it before it shards the model. The scheduler of the training arguments scales the
    learning rate that the optimizer was built with.

    Arguments:
        build: returns `PACE`, or an optimizer that `attach` was called on, for all parameters to be trained.

    >>> from paceline import PACE, Control, parameter_groups
    >>> def build(model):
    ...     return PACE(parameter_groups(model, weight_decay=0.1), lr=1e-3, control=Control.push())
    >>> kind, settings = optimizer_for_trainer(build)
    """

    def build_checked(model: nn.Module) -> Optimizer:
        optimizer = build(model)
        keeper_of(optimizer)  # raises for one that keeps no average
        return optimizer

    # The Trainer calls what is no class of optimizers without arguments, and what it returns with the model.
    return (lambda: build_checked), {}


@final
class AveragedModelCallback(TrainerCallback):
    """The callback that evaluates, saves and returns the average, and trains and resumes from live.

    * Evaluation runs on the average. Inside `with callback.live_weights():` it runs on live weights.
    * `checkpoint-N/` holds live weights, from which training resumes. `checkpoint-N/averaged/` holds the
      average, for `from_pretrained`. For a PEFT model it has a folder for each adapter.
    * After training the model holds the average. With `load_best_model_at_end` it is that of the best
      checkpoint. `trainer.evaluate()` and `trainer.save_model()` use it.

    It works with `PACE` and with any optimizer that `attach` was called on, on one device, under DDP and
    under FSDP2.

    .. code-block:: python

        trainer = Trainer(
            model, args, train_dataset=data, eval_dataset=held_out,
            optimizer_cls_and_kwargs=optimizer_for_trainer(build),
            callbacks=[AveragedModelCallback()],
        )
    """

    def __init__(self) -> None:
        self._has_trainer = False
        self._evaluates_live = False
        self._shown_in: tuple[Keeper, nn.Module] | None = None

    @contextmanager
    def live_weights(self) -> Iterator[None]:
        """Evaluate live weights for the length of a with-block, in training and after it."""
        if self._shown_in is None:
            raise RuntimeError(
                "live_weights() of an AveragedModelCallback that has not trained; use the callback that the "
                "Trainer was given. Before training the model's weights are live"
            )
        keeper, model = self._shown_in
        was_shown, outer = keeper.shown != "live", self._evaluates_live
        keeper.hide()
        self._evaluates_live = True
        try:
            yield
        finally:
            self._evaluates_live = outer
            if was_shown:
                keeper.show(None, model)

    def _show(self, keeper: Keeper, model: nn.Module) -> None:
        if not self._evaluates_live:
            keeper.show(None, model)

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raise ValueError for a callback that another Trainer has, whose model it would show."""
        if self._has_trainer:
            raise ValueError("one AveragedModelCallback was given to two Trainers; make one for each")
        self._has_trainer = True

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raise ValueError before the first step if the run could not end with the average."""
        model, optimizer = kwargs["model"], _inside(kwargs["optimizer"])
        reason = _unsupported_parallelism(args, model) or _unsupported(args, model, optimizer)
        if reason:
            raise ValueError(f"AveragedModelCallback: {reason}")
        keeper = keeper_of(optimizer)
        keeper.drop_copies(model)  # from an evaluation before a checkpoint was loaded
        # The Trainer calls these two around an evaluation, if an optimizer has them, and does not say which
        # model it evaluates, whose gathered copies must be dropped.
        optimizer.eval = partial(self._show, keeper, model)  # type: ignore[attr-defined]
        if not hasattr(optimizer, "train"):
            optimizer.train = keeper.hide  # type: ignore[attr-defined]
        self._shown_in = (keeper, model)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore live weights, because a checkpoint may be saved next."""
        if _is_training(kwargs["model"]):
            keeper_of(kwargs["optimizer"]).hide()

    def on_predict(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Any,
        **kwargs: Any,
    ) -> None:
        """Restore live weights after a prediction within training."""
        self.on_evaluate(args, state, control, **kwargs)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save the average inside of the checkpoint that was just saved."""
        if state.is_hyper_param_search:
            return  # a callback does not get the name of its folder
        checkpoint = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        unfinished = checkpoint / "averaged.partial"
        # On resume the Trainer loads each folder directly inside of a checkpoint as an adapter.
        is_adapter = hasattr(kwargs["model"], "peft_config")
        inside = unfinished / "default" if is_adapter else unfinished
        save_averaged(kwargs["model"], kwargs["optimizer"], inside)
        if state.is_world_process_zero:
            if kwargs["processing_class"] is not None:
                kwargs["processing_class"].save_pretrained(inside)
            whole = checkpoint / "averaged"
            shutil.rmtree(whole, ignore_errors=True)  # from an earlier run to this step
            os.replace(unfinished, whole)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the average in the model, and log that."""
        optimizer: Optimizer = kwargs["optimizer"]
        of = "the last step"
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            # The Trainer has loaded the live weights of that checkpoint. Load its average too.
            best = Path(state.best_model_checkpoint)
            _load_state(optimizer, kwargs["model"], best)
            of = best.name
        keeper_of(optimizer).show(None, kwargs["model"])
        if state.is_world_process_zero:
            logger.warning(
                "The model holds the average of its weights as of %s; evaluate() and save_model() use it. "
                "Live weights come back when training continues.",
                of,
            )


def _inside(optimizer: Any) -> Optimizer:
    """Return the optimizer that Accelerate has wrapped."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    assert isinstance(optimizer, Optimizer)
    return optimizer


def _is_training(model: nn.Module) -> bool:
    """Return whether a call of `Trainer.train` for this model is running."""
    # By the calls that run, because a note of ours would stay after Ctrl-C.
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is Trainer.train.__code__ and frame.f_locals["self"].model is model:
            return True
        frame = frame.f_back
    return False


def _load_state(optimizer: Optimizer, model: nn.Module, checkpoint: Path) -> None:
    """Load the optimizer's state of a checkpoint, in the format in which the Trainer has saved it."""
    if AcceleratorState().distributed_type == DistributedType.FSDP:
        # Of an Accelerator this takes what a PartialState has: the rank, and a barrier.
        load_fsdp_optimizer(AcceleratorState().fsdp_plugin, PartialState(), optimizer, model, checkpoint)
        return
    saved = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)
    optimizer.load_state_dict(saved)


# --- What is refused ------------------------------------------------------------------------------------


def _unsupported_parallelism(args: TrainingArguments, model: nn.Module) -> str | None:
    """Return why the average cannot be kept the way this model is spread over devices, or None."""
    kind = AcceleratorState().distributed_type
    if kind == DistributedType.DEEPSPEED:
        return (
            "DeepSpeed trains flat copies of the weights, in ZeRO-1, 2 and 3, so that the model would not "
            "hold the average; use fsdp=True (FSDP2), or DDP"
        )
    if kind == DistributedType.FSDP:
        plugin = AcceleratorState().fsdp_plugin
        if plugin.fsdp_version != 2:
            return 'FSDP1 is not supported; use FSDP2, by fsdp_config={"version": 2}'
        if args.load_best_model_at_end and "FULL" not in str(plugin.state_dict_type):
            return (
                "load_best_model_at_end needs checkpoints in the full format, because ranks of the Trainer "
                'may disagree about which sharded one is the best; set fsdp_config={"state_dict_type": '
                '"FULL_STATE_DICT"}'
            )
    elif any(is_sharded(parameter) for parameter in model.parameters()):
        return (
            "the parameters are sharded, and not by the Trainer's FSDP2 (tensor parallelism or "
            "DistributedConfig), whose way of saving leaves out the average; use fsdp=True, or DDP"
        )
    return None


def _unsupported(args: TrainingArguments, model: nn.Module, optimizer: Optimizer) -> str | None:
    """Return why a run cannot be evaluated on its average and end with it, or None."""
    groups = keeper_of(optimizer).groups
    known = {id(parameter) for group in groups for parameter in group["params"]}
    named = dict(model.named_parameters())
    if known - {id(parameter) for parameter in named.values()}:
        return f"{type(optimizer).__name__} trains parameters that are not the model's own"
    unknown = [name for name, p in named.items() if p.requires_grad and id(p) not in known]
    if unknown:
        return (
            f"{type(optimizer).__name__} does not train {len(unknown)} trainable parameter(s) of the model, "
            f"first {unknown[0]!r}, so there is no average of them; freeze them or give them to it"
        )
    if args.load_best_model_at_end and args.save_only_model:
        return (
            "load_best_model_at_end=True loads the best average from optimizer.pt, which "
            "save_only_model=True leaves out"
        )
    return unsupported_averages(groups)
