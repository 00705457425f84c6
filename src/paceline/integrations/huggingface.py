"""PACE in the Trainer of transformers and in those built on it, such as TRL's SFTTrainer.

The Trainer shows the average while it evaluates and saves whatever the parameters hold afterwards: the
average if an evaluation has just run, live otherwise. The callback here makes one rule of it.
"""

import logging
import os
import shutil
from pathlib import Path
from typing import Any, final

import torch
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from paceline.optim import PACE, averaged_weights, save_averaged
from paceline.optim.weights import keeper_of, unknown_parameters

logger = logging.getLogger(__name__)


def pace_for_trainer(args: TrainingArguments, **settings: Any) -> tuple[type[PACE], dict[str, Any]]:
    """What a Trainer takes as `optimizer_cls_and_kwargs` to train with PACE.

    Learning rate, betas, eps and weight decay are those of the training arguments, as for its AdamW; the
    Trainer leaves norms and biases without weight decay.

    Arguments:
        args: the arguments the Trainer gets.
        settings: others of `PACE`, by name.

    >>> from transformers import TrainingArguments
    >>> args = TrainingArguments("out", learning_rate=1e-3, use_cpu=True)
    >>> pace_for_trainer(args, return_power=0.8)[1]
    {'lr': 0.001, 'betas': (0.9, 0.999), 'eps': 1e-08, 'return_power': 0.8}
    """
    if "weight_decay" in settings:
        raise ValueError(
            f"Invalid weight_decay={settings['weight_decay']}: the Trainer sets it for each of its parameter "
            "groups; give it to TrainingArguments"
        )
    from_args = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }
    return PACE, from_args | settings


@final
class AveragedModelCallback(TrainerCallback):
    """Evaluate, keep and return the average; train and resume from live, whatever runs when.

    * Evaluation runs on the average.
    * `checkpoint-N/` holds live weights, from which training resumes, and `checkpoint-N/averaged/` the
      average, for `from_pretrained`. Of a PEFT model that is a folder for each adapter:
      `checkpoint-N/averaged/default/`. (In a hyperparameter search there is no `averaged/`.)
    * After training the model holds the average, that of the best checkpoint with
      `load_best_model_at_end`: this is what `trainer.evaluate()` and `trainer.save_model()` use.

    For any optimizer of paceline, on one device, under DDP and under DeepSpeed's ZeRO-1 and 2, which is for
    gains of each weight alone (`gain="paper"`). ZeRO-3 and FSDP are refused.

    .. code-block:: python

        trainer = Trainer(
            model, args, train_dataset=data, eval_dataset=held_out,
            optimizer_cls_and_kwargs=pace_for_trainer(args),
            callbacks=[AveragedModelCallback()],
        )
    """

    def __init__(self) -> None:
        self._training = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuse what would end with other weights than the average, before the first step."""
        reason = _refusal(args, kwargs["model"], kwargs["optimizer"])
        if reason:
            raise ValueError(f"AveragedModelCallback: {reason}")
        zero = _zero_of(kwargs["optimizer"])
        if zero is not None:
            # What is trained is a flat copy, of which each rank has a part; the model is to have the whole.
            keeper_of(zero).after_exchange = zero.update_lp_params  # type: ignore[attr-defined]
        self._training = True

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Put live back: a checkpoint may be saved next, without another event before it."""
        if self._training:
            keeper_of(kwargs["optimizer"]).train()

    def on_predict(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Any,
        **kwargs: Any,
    ) -> None:
        """As after an evaluation."""
        self.on_evaluate(args, state, control, **kwargs)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Put the average beside the checkpoint that was just saved."""
        if state.is_hyper_param_search:
            return  # the folder has a name that is not told here
        checkpoint = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        partial = checkpoint / "averaged.partial"
        # The Trainer, resuming, takes every folder right inside a checkpoint for another adapter to load,
        # and then leaves out the one in the checkpoint itself.
        is_adapter = (checkpoint / "adapter_config.json").is_file()
        inside = partial / "default" if is_adapter else partial
        if _zero_of(kwargs["optimizer"]) is None:
            save_averaged(kwargs["model"], kwargs["optimizer"], inside)
        else:
            with averaged_weights(kwargs["optimizer"]):  # on every rank: it is collective
                if state.is_world_process_zero:
                    kwargs["model"].save_pretrained(inside)
        if state.is_world_process_zero:
            if kwargs["processing_class"] is not None:
                kwargs["processing_class"].save_pretrained(inside)
            whole = checkpoint / "averaged"
            shutil.rmtree(whole, ignore_errors=True)  # of a run that came this far before
            os.replace(partial, whole)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the average in the model, and say so."""
        optimizer: Optimizer = kwargs["optimizer"]
        of = "the last step"
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            best = Path(state.best_model_checkpoint)
            of = best.name
            # The Trainer has loaded the live weights of that checkpoint; its average goes with them. (Under
            # DeepSpeed both are loaded.)
            if _zero_of(optimizer) is None:
                saved = torch.load(best / "optimizer.pt", map_location="cpu", weights_only=True)
                optimizer.load_state_dict(saved)
        keeper_of(optimizer).eval()
        self._training = False
        if state.is_world_process_zero:
            logger.warning(
                "The model holds the average of its weights as of %s; evaluate() and save_model() use it. "
                "Live weights come back when training goes on.",
                of,
            )


def _zero_of(optimizer: Optimizer) -> Any:
    """DeepSpeed's optimizer around ours, if there is one."""
    return optimizer.optimizer if isinstance(optimizer, DeepSpeedOptimizerWrapper) else None


def _refusal(args: TrainingArguments, model: nn.Module, optimizer: Optimizer) -> str | None:
    """Why this run cannot be evaluated on and end with its average, if it cannot."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return "FSDP1 hides the parameters; use DDP"
    keeper = keeper_of(optimizer)
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    zero = _zero_of(optimizer)
    if zero is not None:
        return _refusal_under_deepspeed(zero)
    if any(isinstance(parameter, DTensor) for parameter in trained):
        return "parameters sharded by FSDP2 are not supported in the Trainer yet; use DDP"
    if {*map(id, trained)} - {*map(id, model.parameters())}:
        return f"{type(keeper).__name__} trains parameters that are not the model's own"
    if unknown := unknown_parameters([keeper], model):
        return (
            f"{type(keeper).__name__} does not train {len(unknown)} trainable parameter(s) of the model, "
            f"first '{unknown[0]}', so there is no average of them; freeze them or give them to it"
        )
    if args.load_best_model_at_end and args.save_only_model:
        return (
            "load_best_model_at_end=True with save_only_model=True: the best average is loaded from "
            "optimizer.pt, which is then not saved"
        )
    return None


def _refusal_under_deepspeed(zero: Any) -> str | None:
    if not hasattr(zero, "update_lp_params"):
        return (
            f"DeepSpeed's {type(zero).__name__} hides the parameters, so that the model could not be given "
            "their average; use ZeRO stage 1 or 2, or DDP"
        )
    for group in zero.param_groups:
        pulls = group.get("pullback_strength") != 0 and group.get("gain") == "scaled"
        if pulls:
            return (
                f'gain="{group["gain"]}" needs sums over the whole model, of which DeepSpeed shows a rank '
                'its own part only; use pace_for_trainer(args, gain="paper")'
            )
    return None
