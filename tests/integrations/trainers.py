"""The trainers of the battery: each trains 12 steps, evaluates the average every 2, and saves every 6."""

from pathlib import Path
from typing import Any

import torch
from loops import saved_by_loop, shard, with_accelerate, with_torch
from torch import nn
from watching import (
    LR,
    STEPS,
    TOKENS,
    Row,
    Run,
    Watch,
    Weights,
    llama,
    loader_of,
    loss_of,
    share,
    weights_of,
)

# --- transformers and TRL -------------------------------------------------------------------------------


def fsdp2_on_cpu() -> None:
    """Let Accelerate shard on a CPU, which it does on GPUs only."""
    from accelerate import state
    from accelerate.utils import DistributedType

    init = state.AcceleratorState.__init__

    def init_sharded(self: Any, *args: Any, fsdp_plugin: Any = None, **settings: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **settings)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    state.AcceleratorState.__init__ = init_sharded


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))


def arguments(run: Run, kind: type, **changes: Any) -> Any:
    settings = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4 // run.ranks,
        "per_device_eval_batch_size": 16 // run.ranks,
        "gradient_accumulation_steps": run.accumulate,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "save_strategy": "steps" if run.saves else "no",
        "save_steps": run.every,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    if run.best:
        settings |= {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
        settings |= {"greater_is_better": True, "save_steps": 2}
    if run.ranks > 1:
        settings["ddp_backend"] = "gloo"
    if run.format:
        sharding = {
            "state_dict_type": f"{run.format.upper()}_STATE_DICT",
            "reshard_after_forward": run.reshard,
        }
        settings |= {"fsdp": True, "fsdp_config": sharding}
    return kind(str(run.folder), **settings | changes | run.more)


def data_for_trl() -> dict[str, Any]:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    rows = Dataset.from_dict({"input_ids": TOKENS.tolist()})
    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(32)}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<0>", eos_token="<2>")
    train, held_out = rows.select(range(24)), rows.select(range(24, 40))
    return {"train_dataset": train, "eval_dataset": held_out, "processing_class": tokenizer}


def with_transformers(run: Run, trl: str = "") -> Watch:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from paceline.integrations.huggingface import AveragedModelCallback, optimizer_for_trainer

    watches: list[Watch] = []
    ours = AveragedModelCallback()

    def build(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = run.build([p for p in model.parameters() if p.requires_grad])
        watches.append(Watch(model, optimizer, run))
        watches[0].trainer, watches[0].callback = trainer, ours
        return optimizer

    class NotesLosses(TrainerCallback):
        """Evaluates live weights at odd steps; the Trainer evaluates the average at even ones."""

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.global_step % 4 == 1 and run.averaged and not run.fail:
                with ours.live_weights(), watches[0].asks_for_live():
                    watches[0].note_loss("live", trainer.evaluate(metric_key_prefix="live")["live_loss"])

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **rest: Any) -> None:
            if "eval_loss" in metrics:
                watches[0].note_loss("average", metrics["eval_loss"])

    rows = [{"input_ids": row, "labels": row} for row in TOKENS]
    kind, args = Trainer, TrainingArguments
    data: dict[str, Any] = {"train_dataset": rows[:24], "eval_dataset": rows[24:]}
    changes = {}
    if trl:
        from trl import SFTConfig, SFTTrainer

        kind, args, data = SFTTrainer, SFTConfig, data_for_trl()
        changes = {"bf16": False, "gradient_checkpointing": False}
    trainer = kind(
        lora() if trl == "lora" else run.model(),
        arguments(run, args, **changes),
        optimizer_cls_and_kwargs=optimizer_for_trainer(build) if run.averaged else (lambda: build, {}),
        callbacks=[NotesLosses(), *([ours] if run.averaged else [])],
        **data,
    )
    trainer.accelerator.scaler = run.scaler
    trainer.train(resume_from_checkpoint=str(run.folder / f"checkpoint-{run.resume}") if run.resume else None)
    (watch,) = watches
    if run.best:
        watch.best = int(trainer.state.best_model_checkpoint.rpartition("-")[2])
    return watch


def saved_by_transformers(watch: Watch, folder: Path, step: int) -> tuple[Weights, Weights]:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    checkpoint = folder / f"checkpoint-{step}"
    is_adapter = isinstance(watch.model, PeftModel)
    folders = checkpoint, checkpoint / "averaged" / ("default" if is_adapter else "")
    # A sharded checkpoint has live weights in a format of torch's.
    folders = [f for f in folders if list(f.glob("*config.json"))]
    if is_adapter:
        loaded = [PeftModel.from_pretrained(llama(), f, is_trainable=True) for f in folders]
    else:
        loaded = [AutoModelForCausalLM.from_pretrained(f) for f in folders]
    average = weights_of(loaded[-1])
    return weights_of(loaded[0]) if len(loaded) > 1 else watch.live[step], average


# --- Lightning ------------------------------------------------------------------------------------------


def with_lightning(run: Run) -> Watch:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import FSDPModule

    from paceline.integrations.lightning import AveragedModelCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = run.model()

        def configure_model(self):
            if run.format and not isinstance(self.network, FSDPModule):  # a validation configures it again
                shard(self.network, run, self.device_mesh["data_parallel"])

        def training_step(self, batch, batch_idx):
            return loss_of(self.network, batch)

        def validation_step(self, batch, batch_idx):
            loss = loss_of(self.network, batch)
            self.log("loss", loss, sync_dist=True)
            self.watch.note_loss("average", loss)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.watch.steps % 4 == 1 and run.averaged and not run.fail and run.accumulate == 1:
                self.network.eval()
                with torch.no_grad(), self.watch.asks_for_live():
                    self.watch.note_loss("live", loss_of(self.network, share(TOKENS[24:], run)))
                self.network.train()

        def configure_optimizers(self):
            optimizer = run.build(self.network.parameters())
            self.watch = Watch(self.network, optimizer, run)
            return optimizer

    saves = ModelCheckpoint(
        run.folder,
        "{step}",
        monitor="loss",
        mode="max",
        save_top_k=-1,
        every_n_train_steps=None if run.best else run.every,
    )
    strategy: Any = "ddp" if run.ranks > 1 else "auto"
    if run.format:
        is_sharded = run.format == "sharded"
        strategy = ModelParallelStrategy(run.ranks, 1, is_sharded, process_group_backend="gloo")
    settings = {"max_steps": STEPS, "val_check_interval": 2, "accumulate_grad_batches": run.accumulate}
    settings |= {"accelerator": "cpu", "devices": run.ranks, "strategy": strategy, "num_sanity_val_steps": 0}
    settings["use_distributed_sampler"] = False  # which shuffles
    settings |= {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings |= {"plugins": [MixedPrecision("16-mixed", "cpu", run.scaler)] if run.scaler else [], **run.more}
    ours = [AveragedModelCallback()] if run.averaged else []
    settings["callbacks"] = [*([saves] if run.saves else []), *ours, *settings.get("callbacks", [])]
    trainer, module = pl.Trainer(default_root_dir=run.folder, **settings), Module()
    resumed = run.folder / f"step={run.resume}.ckpt" if run.resume else None
    rows, evaluated = (
        loader_of(share(part, run), size // run.ranks) for part, size in ((TOKENS[:24], 4), (TOKENS[24:], 16))
    )
    module.evaluated = evaluated
    trainer.fit(module, rows, evaluated, ckpt_path=resumed)
    watch = module.watch
    watch.trainer, watch.module = trainer, module
    if run.best:
        trainer.validate(module, evaluated, ckpt_path="best", verbose=False)
        watch.best = int(Path(saves.best_model_path).stem.removeprefix("step="))
    return watch


def saved_by_lightning(watch: Watch, folder: Path, step: int) -> tuple[Weights, Weights]:
    path = folder / f"step={step}.ckpt"
    if path.is_dir():  # in torch's format, which a resume reads
        return watch.live[step], watch.average[step]
    file = torch.load(path, weights_only=True)
    live, average = (
        {name.removeprefix("network."): tensor for name, tensor in file.get(key, {}).items()}
        for key in ("current_model_state", "state_dict")
    )
    return live or watch.live[step], average


# --- All of them ------------------------------------------------------------------------------------------

BY_TRAINER = (saved_by_transformers, ("checkpoint-*/averaged/**/*.json",))
ROWS = {
    "transformers": Row(with_transformers, *BY_TRAINER),
    "trl": Row(lambda run: with_transformers(run, trl="full"), *BY_TRAINER),
    "trl with LoRA": Row(lambda run: with_transformers(run, trl="lora"), *BY_TRAINER),
    "lightning": Row(with_lightning, saved_by_lightning, ("step=*.ckpt/meta.pt", "step=*.ckpt")),
    "accelerate": Row(with_accelerate, saved_by_loop, ("*-averaged/model.safetensors",)),
    "plain loop": Row(with_torch, saved_by_loop, ("*-averaged/model.safetensors",)),
}
LLAMA = "transformers.models.llama.modeling_llama"
PACKAGES = {
    "transformers": (LLAMA, "transformers.trainer"),
    "trl": (LLAMA, "trl.trainer.sft_trainer"),
    "trl with LoRA": (LLAMA, "trl.trainer.sft_trainer", "peft"),
    "lightning": (LLAMA, "lightning.pytorch"),
    "accelerate": (LLAMA, "accelerate"),
    "plain loop": (LLAMA,),
}
"""What a row imports when it is used."""
FULL, SHARDED, DDP = {"format": "full"}, {"format": "sharded"}, {"format": ""}
GATHERED = {"format": "sharded", "reshard": False, "tied": True}
BFLOAT16 = FULL | {"dtype": torch.bfloat16}
ON_TWO_RANKS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "transformers": {
        "DDP": ("push", DDP),
        "DDP, AdamW": ("AdamW", DDP),
        "DDP, Muon": ("Muon", DDP),
        "full": ("push", FULL),
        "sharded, tied, gathered": ("paper", GATHERED),
        "full, tied": ("push", FULL | {"tied": True}),
        "full, AdamW": ("AdamW", FULL),
        "sharded, Muon": ("Muon", SHARDED),
        "full, bfloat16": ("push", BFLOAT16),
        "full, bfloat16, no average": ("no average", BFLOAT16),
    },
    "trl": {"DDP": ("push", DDP), "full": ("push", FULL), "sharded, tied, gathered": ("push", GATHERED)},
    "trl with LoRA": {"DDP": ("push", DDP), "full": ("push", FULL), "sharded": ("push", SHARDED)},
}
for _name in ("lightning", "accelerate", "plain loop"):
    ON_TWO_RANKS[_name] = {
        "DDP": ("push", DDP),
        "full": ("push", FULL),
        "sharded, tied, gathered": ("paper", GATHERED),
        "sharded, AdamW": ("AdamW", SHARDED),
    }
"""Row → case → the kind of optimizer, and how the model is spread over ranks and saved."""
