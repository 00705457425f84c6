"""PACE in the Trainer of transformers: evaluated, saved and returned is the average.

Run `python examples/huggingface.py FOLDER`, or `torchrun --nproc-per-node 2` the same file: GPUs shard by
FSDP2, CPUs take DDP. A small Llama learns to count. With a model and data of your own only the lines marked
# PACE differ from what you have today.
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, set_seed

from paceline import PACE, Control, parameter_groups  # PACE
from paceline.integrations.huggingface import AveragedModelCallback, optimizer_for_trainer  # PACE

RANKS = int(os.environ.get("WORLD_SIZE", "1"))  # set by torchrun
GPU = torch.cuda.is_available()
STEPS = 60
SMALL = LlamaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    bos_token_id=0, eos_token_id=0,
)  # fmt: skip


def counting(rows: int, length: int = 16, base: int = 32) -> list[dict[str, torch.Tensor]]:
    """Return rows that count up from anywhere by 1, 2 or 3, modulo `base`."""
    start, by = torch.randint(base, (rows, 1)), torch.randint(1, 4, (rows, 1))
    numbers = (start + by * torch.arange(length)) % base
    return [{"input_ids": row, "labels": row} for row in numbers]


def optimizer_of(model: nn.Module) -> PACE:  # PACE
    return PACE(parameter_groups(model, weight_decay=0.01), lr=1e-2, control=Control.push(grow=STEPS))


def main(out: Path) -> None:
    set_seed(0)
    args = TrainingArguments(
        str(out),
        max_steps=STEPS,
        per_device_train_batch_size=16 // RANKS,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        eval_strategy="steps",
        eval_steps=20,
        save_steps=20,
        load_best_model_at_end=True,
        disable_tqdm=True,
        report_to="none",
        use_cpu=not GPU,
        fsdp=GPU and RANKS > 1,  # FSDP2; on CPUs Accelerate takes DDP
        ddp_backend=None if GPU or RANKS == 1 else "gloo",
    )
    averaged = AveragedModelCallback()  # PACE
    trainer = Trainer(
        AutoModelForCausalLM.from_config(SMALL),
        args,
        train_dataset=counting(1000),
        eval_dataset=counting(100),
        optimizer_cls_and_kwargs=optimizer_for_trainer(optimizer_of),  # PACE
        callbacks=[averaged],  # PACE
    )
    trainer.train()  # after a crash trainer.train(resume_from_checkpoint=True) resumes, bit for bit
    trainer.save_model()  # the best average

    average = trainer.evaluate()["eval_loss"]
    with averaged.live_weights():
        live = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"average: loss {average:.4f}\n   live: loss {live:.4f}")
        AutoModelForCausalLM.from_pretrained(out / "checkpoint-60" / "averaged")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
