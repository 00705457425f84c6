"""PACE in the Trainer of transformers: evaluated, saved and returned is the average.

Run `python examples/huggingface.py`. A small Llama learns to count, on a CPU, in seconds. With a model and
data of your own only the lines marked # PACE differ from what you have today.
"""

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, set_seed

from paceline import Control  # PACE
from paceline.integrations.huggingface import AveragedModelCallback, pace_for_trainer  # PACE

SMALL = LlamaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    bos_token_id=0, eos_token_id=0,
)  # fmt: skip


def counting(rows: int, length: int = 16, base: int = 32) -> list[dict[str, torch.Tensor]]:
    """Return rows that count up from anywhere by 1, 2 or 3, modulo `base`."""
    start, by = torch.randint(base, (rows, 1)), torch.randint(1, 4, (rows, 1))
    numbers = (start + by * torch.arange(length)) % base
    return [{"input_ids": row, "labels": row} for row in numbers]


def main(out: Path) -> None:
    set_seed(0)
    args = TrainingArguments(
        str(out),
        max_steps=60,
        per_device_train_batch_size=16,
        learning_rate=1e-2,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        eval_strategy="steps",
        eval_steps=20,
        save_steps=20,
        load_best_model_at_end=True,
        disable_tqdm=True,
        report_to="none",
        use_cpu=True,
    )
    trainer = Trainer(
        AutoModelForCausalLM.from_config(SMALL),
        args,
        train_dataset=counting(1000),
        eval_dataset=counting(100),
        optimizer_cls_and_kwargs=pace_for_trainer(args, control=Control.push()),  # PACE
        callbacks=[AveragedModelCallback()],  # PACE
    )
    trainer.train()  # after a crash trainer.train(resume_from_checkpoint=True) resumes, bit for bit
    trainer.save_model()  # the best average

    best = Path(trainer.state.best_model_checkpoint)
    for what, folder in (("returned", out), ("average", best / "averaged"), ("live", best)):
        model = AutoModelForCausalLM.from_pretrained(folder)
        loss = Trainer(model, args, eval_dataset=trainer.eval_dataset).evaluate()["eval_loss"]
        print(f"{what:>8}: loss {loss:.4f}, from {folder.relative_to(out.parent)}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder) / "out")
