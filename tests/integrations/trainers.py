"""The trainers of the battery: each trains 8 steps, evaluates every 2, and saves every 4.

All of them train a small model under a `Watch`, which notes the weights of every forward pass.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from paceline import PACE, Control, attach, averaged_state_dict, averaged_weights, save_averaged
from paceline.optim.weights import has_keeper

STEPS = 8
LR = 3e-2
Weights = dict[str, torch.Tensor]

KINDS = {
    "paper": lambda params: PACE(params, LR),
    "push": lambda params: PACE(params, LR, control=Control.push()),
    "int8": lambda params: PACE(params, LR, control=Control.push(), average_dtype="int8"),
    "attached": lambda params: attach(torch.optim.AdamW(params, LR), control=Control.push()),
}


class Stop(Exception):
    """What ends a run early, with its watch."""


def weights_of(model: nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


class Watch:
    """The live weights and the average after every step, and the weights of every forward pass."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, fail: str = "") -> None:
        self.model, self.optimizer, self.fail = model, optimizer, fail
        self.live, self.average = [weights_of(model)], [weights_of(model)]
        self.forwards: list[tuple[int, bool, Weights]] = []  # steps taken, whether it trains, weights
        model.register_forward_pre_hook(self._note_forward)
        optimizer.register_step_post_hook(self._note_step)

    def _note_forward(self, model: nn.Module, inputs: Any) -> None:
        steps = len(self.live) - 1
        self.forwards.append((steps, model.training, weights_of(model)))
        if steps == 6 and self.fail == ("training" if model.training else "evaluation"):
            raise Stop(self)

    def _note_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.live.append(weights_of(self.model))
        if has_keeper(optimizer):
            state = averaged_state_dict(self.model, optimizer)
            self.average.append({name: state[name] for name in self.live[-1]})

    def returned(self) -> Weights:
        """The trained weights that the model holds now."""
        return weights_of(self.model)


def same(a: Weights, b: Weights) -> bool:
    """Return whether weights are equal, of all those that `b` has."""
    return all(torch.equal(a[name].to(b[name].dtype), b[name]) for name in b)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a trainer is asked for."""

    folder: Path
    build: Callable[..., torch.optim.Optimizer]
    resume: bool = False
    """From the checkpoint of step 4."""
    fail: str = ""
    """Where a forward pass after step 6 raises: "training" or "evaluation"."""
    averaged: bool = True
    """Whether our callback takes part."""
    best: bool = False
    """End with the best model: an early one, because here higher losses count as better."""
    scaler: Any = None
    accumulate: int = 1
    ranks: int = 1
    more: dict[str, Any] = field(default_factory=dict)
    """Settings of the trainer."""


@dataclass(frozen=True)
class Row:
    """A trainer, how its checkpoint of a step is read (live weights and average), and what it learns."""

    loop: Callable[[Run], Watch]
    saved: Callable[[Watch, Path, int], tuple[Weights, Weights]]
    loss_of: Callable[[nn.Module], torch.Tensor]

    def train(self, folder: Path, build: Any, **settings: Any) -> Watch:
        return self.loop(Run(folder=folder, build=build, **settings))


# --- transformers and TRL -------------------------------------------------------------------------------

TOKENS = torch.randint(32, (48, 8), generator=torch.Generator().manual_seed(1))
TOKENS[:40] = (TOKENS[:40, :1] + torch.arange(8)) % 32  # what there is to learn


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, bos_token_id=1, eos_token_id=2, **sizes | changes))


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))


def arguments(folder: Path, kind: type, **changes: Any) -> Any:
    settings = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.01,
        "save_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return kind(str(folder), **settings | changes)


def data_for_trl() -> dict[str, Any]:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    rows = Dataset.from_dict({"input_ids": TOKENS.tolist()})
    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(32)}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<0>", eos_token="<2>")
    train, held_out = rows.select(range(32)), rows.select(range(32, 48))
    return {"train_dataset": train, "eval_dataset": held_out, "processing_class": tokenizer}


def with_transformers(run: Run, trl: bool = False) -> Watch:
    from transformers import Trainer, TrainingArguments

    from paceline.integrations.huggingface import AveragedModelCallback

    rows = [{"input_ids": row, "labels": row} for row in TOKENS]
    kind, of, data = Trainer, TrainingArguments, {"train_dataset": rows[:32], "eval_dataset": rows[32:]}
    settings = {"gradient_accumulation_steps": run.accumulate, **run.more}
    if trl:
        from trl import SFTConfig, SFTTrainer

        kind, of, data = SFTTrainer, SFTConfig, data_for_trl()
        settings |= {"bf16": False, "gradient_checkpointing": False}
    if run.best:
        settings |= {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
        settings |= {"greater_is_better": True, "save_steps": 2}
    if run.ranks > 1:
        settings["ddp_backend"] = "gloo"
    model = lora() if trl else llama()
    optimizer = run.build([p for p in model.parameters() if p.requires_grad])
    watch = Watch(model, optimizer, run.fail)
    callbacks = [AveragedModelCallback()] if run.averaged else []
    args = arguments(run.folder, of, **settings)
    trainer = watch.trainer = kind(model, args, optimizers=(optimizer, None), callbacks=callbacks, **data)
    trainer.accelerator.scaler = run.scaler
    trainer.train(resume_from_checkpoint=str(run.folder / "checkpoint-4") if run.resume else None)
    if run.best:
        watch.best = int(trainer.state.best_model_checkpoint.rpartition("-")[2])
    return watch


def saved_by_transformers(watch: Watch, folder: Path, step: int) -> tuple[Weights, Weights]:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    checkpoint = folder / f"checkpoint-{step}"
    if not isinstance(watch.model, PeftModel):
        loaded = (AutoModelForCausalLM.from_pretrained(f) for f in (checkpoint, checkpoint / "averaged"))
    else:
        folders = checkpoint, checkpoint / "averaged" / "default"
        loaded = (PeftModel.from_pretrained(llama(), f, is_trainable=True) for f in folders)
    live, average = map(weights_of, loaded)
    return live, average


def loss_of_tokens(model: nn.Module) -> torch.Tensor:
    return model(input_ids=TOKENS[:32], labels=TOKENS[:32]).loss


# --- Lightning, Accelerate ------------------------------------------------------------------------------

INPUTS = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
LABELS = INPUTS.square().sum(1, keepdim=True)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def loader_of() -> Any:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(INPUTS, LABELS), batch_size=8)


def with_lightning(run: Run) -> Watch:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins import MixedPrecision

    from paceline.integrations.lightning import AveragedModelCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network()

        def training_step(self, batch, batch_idx):
            return nn.functional.mse_loss(self.network(batch[0]), batch[1])

        def validation_step(self, batch, batch_idx):
            self.log("loss", self.training_step(batch, batch_idx))

        def configure_optimizers(self):
            optimizer = run.build(self.network.parameters())
            self.watch = Watch(self.network, optimizer, run.fail)
            return optimizer

    saves = ModelCheckpoint(run.folder, "{step}", monitor="loss", mode="max", save_top_k=-1)
    settings = {"max_steps": STEPS, "val_check_interval": 2, "accumulate_grad_batches": run.accumulate}
    settings |= {"accelerator": "cpu", "devices": run.ranks, "strategy": "ddp" if run.ranks > 1 else "auto"}
    settings |= {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings |= {"plugins": [MixedPrecision("16-mixed", "cpu", run.scaler)] if run.scaler else [], **run.more}
    ours = [AveragedModelCallback()] if run.averaged else []
    settings["callbacks"] = [saves, *ours, *settings.get("callbacks", [])]
    trainer, module = pl.Trainer(default_root_dir=run.folder, **settings), Module()
    trainer.fit(
        module, loader_of(), loader_of(), ckpt_path=run.folder / "step=4.ckpt" if run.resume else None
    )
    watch = module.watch
    watch.trainer, watch.module = trainer, module
    if run.best:
        trainer.validate(module, loader_of(), ckpt_path="best", verbose=False)
        watch.best = int(Path(saves.best_model_path).stem.removeprefix("step="))
    return watch


def saved_by_lightning(watch: Watch, folder: Path, step: int) -> tuple[Weights, Weights]:
    file = torch.load(folder / f"step={step}.ckpt", weights_only=True)
    live, average = (
        {name.removeprefix("network."): tensor for name, tensor in file[key].items()}
        for key in ("current_model_state", "state_dict")
    )
    return live, average


def with_accelerate(run: Run) -> Watch:
    """A loop of one's own, as Accelerate has no Trainer."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=run.accumulate, **run.more)
    accelerator.scaler = run.scaler
    model = network()
    optimizer = run.build(model.parameters())
    watch = Watch(model, optimizer, run.fail)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader_of())
    step = 0
    if run.resume:
        accelerator.load_state(run.folder / "4")
        step = 4
    while step < STEPS:
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - y).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            step += accelerator.sync_gradients
            if step % 2 or not accelerator.sync_gradients or not run.averaged:
                continue
            model.eval()
            with averaged_weights(optimizer), torch.no_grad():
                model(INPUTS)
                if step == 4 and not run.resume:
                    accelerator.save_state(run.folder / "4")  # in the block: both sets are in the files
            model.train()
            save_averaged(model, optimizer, run.folder / f"{step}.safetensors")
    return watch


def saved_by_accelerate(watch: Watch, folder: Path, step: int) -> tuple[Weights, Weights]:
    return deepcopy(watch.live[step]), load_file(folder / f"{step}.safetensors")


def loss_of_regression(model: nn.Module) -> torch.Tensor:
    return nn.functional.mse_loss(model(INPUTS), LABELS)


ROWS = {
    "transformers": Row(with_transformers, saved_by_transformers, loss_of_tokens),
    "trl": Row(lambda run: with_transformers(run, trl=True), saved_by_transformers, loss_of_tokens),
    "lightning": Row(with_lightning, saved_by_lightning, loss_of_regression),
    "accelerate": Row(with_accelerate, saved_by_accelerate, loss_of_regression),
}
