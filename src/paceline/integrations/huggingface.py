"""PACE in the Trainer of transformers and in those built on it, such as TRL's SFTTrainer.

The Trainer saves the weights that the parameters hold. Without the callback of this module these are the
average after an evaluation, and live weights at other times.
"""

import logging
import os
import shutil
from pathlib import Path
from typing import Any, final

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from paceline.optim import PACE, save_averaged
from paceline.optim.weights import keeper_of

logger = logging.getLogger(__name__)


def pace_for_trainer(args: TrainingArguments, **settings: Any) -> tuple[type[PACE], dict[str, Any]]:
    """Return what a Trainer takes as `optimizer_cls_and_kwargs` to train with PACE.

    Learning rate, betas, eps and weight decay are those of the training arguments, as for AdamW.

    Arguments:
        args: the arguments of the Trainer.
        settings: further settings of `PACE`, by name.

    >>> from paceline import Control
    >>> from transformers import TrainingArguments
    >>> args = TrainingArguments("out", learning_rate=1e-3, use_cpu=True)
    >>> kind, settings = pace_for_trainer(args, control=Control.push())
    >>> settings["lr"], settings["control"].strength
    (0.001, -0.5)
    """
    if "weight_decay" in settings:
        raise ValueError(
            f"Invalid weight_decay value: {settings['weight_decay']}; give it to TrainingArguments, because "
            "the Trainer sets it for each of its parameter groups"
        )
    from_args = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }
    return PACE, from_args | settings


@final
class AveragedModelCallback(TrainerCallback):
    """The callback that evaluates, saves and returns the average, and trains and resumes from live.

    * Evaluation runs on the average.
    * `checkpoint-N/` holds live weights, from which training resumes. `checkpoint-N/averaged/` holds the
      average, for `from_pretrained`. For a PEFT model it has a folder for each adapter.
    * After training the model holds the average. With `load_best_model_at_end` it is that of the best
      checkpoint. `trainer.evaluate()` and `trainer.save_model()` use it.

    It works with `PACE` and with any optimizer that `attach` was called on, on one device and under DDP.

    .. code-block:: python

        trainer = Trainer(
            model, args, train_dataset=data, eval_dataset=held_out,
            optimizer_cls_and_kwargs=pace_for_trainer(args, control=Control.push()),
            callbacks=[AveragedModelCallback()],
        )
    """

    def __init__(self) -> None:
        self._training = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raise ValueError before the first step if the run could not end with the average."""
        optimizer = _inside(kwargs["optimizer"])
        reason = _unsupported(args, kwargs["model"], optimizer)
        if reason:
            raise ValueError(f"AveragedModelCallback: {reason}")
        if not isinstance(optimizer, PACE):
            # The Trainer calls these two around an evaluation, if an optimizer has them.
            keeper = keeper_of(optimizer)
            optimizer.eval, optimizer.train = keeper.show, keeper.hide  # type: ignore[attr-defined]
        self._training = True

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore live weights, because a checkpoint may be saved next."""
        if self._training:
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
        partial = checkpoint / "averaged.partial"
        # On resume the Trainer loads each folder directly inside of a checkpoint as an adapter.
        is_adapter = (checkpoint / "adapter_config.json").is_file()
        inside = partial / "default" if is_adapter else partial
        save_averaged(kwargs["model"], kwargs["optimizer"], inside)
        if state.is_world_process_zero:
            if kwargs["processing_class"] is not None:
                kwargs["processing_class"].save_pretrained(inside)
            whole = checkpoint / "averaged"
            shutil.rmtree(whole, ignore_errors=True)  # from an earlier run to this step
            os.replace(partial, whole)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the average in the model, and log that."""
        optimizer: Optimizer = kwargs["optimizer"]
        of = "the last step"
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            # The Trainer has loaded the live weights of that checkpoint. Load its average too.
            best = Path(state.best_model_checkpoint)
            saved = torch.load(best / "optimizer.pt", map_location="cpu", weights_only=True)
            optimizer.load_state_dict(saved)
            of = best.name
        keeper_of(optimizer).show()
        self._training = False
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


def _unsupported(args: TrainingArguments, model: nn.Module, optimizer: Optimizer) -> str | None:
    """Return why a run cannot be evaluated on its average and end with it, or None."""
    kind = AcceleratorState().distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        return f"{kind.value} is not supported in the Trainer yet; use DDP"
    known = {id(parameter) for group in keeper_of(optimizer).groups for parameter in group["params"]}
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
    return None
