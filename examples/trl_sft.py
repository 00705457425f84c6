"""PACE in TRL's SFTTrainer with a LoRA adapter: evaluated, saved and returned is the average of the adapter.

Run `python examples/trl_sft.py FOLDER`, or `torchrun --nproc-per-node 2` the same file: GPUs shard by FSDP2,
CPUs take DDP. A small Llama learns to spell. Lines marked # PACE are not AdamW's. It needs trl and peft.
"""

import os
import random
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from paceline import PACE, Control, parameter_groups  # PACE
from paceline.integrations.huggingface import AveragedModelCallback, optimizer_for_trainer  # PACE

RANKS = int(os.environ.get("WORLD_SIZE", "1"))  # set by torchrun
GPU = torch.cuda.is_available()
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def tokenizer() -> PreTrainedTokenizerFast:
    words = enumerate(["<pad>", "<s>", "</s>", *"0123456789", *DIGITS])
    level = Tokenizer(models.WordLevel({word: i for i, word in words}))
    level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=level, pad_token="<pad>", eos_token="</s>")


def spelled(numbers: range, wrong: float = 0.0) -> Dataset:
    said = {n: [int(d) if random.random() > wrong else random.randrange(10) for d in str(n)] for n in numbers}
    texts = [(" ".join(str(n)), " " + " ".join(DIGITS[d] for d in said[n])) for n in numbers]
    return Dataset.from_list([{"prompt": prompt, "completion": rest} for prompt, rest in texts])


def base() -> LlamaForCausalLM:
    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=23, eos_token_id=2, **sizes))


def optimizer_of(model: nn.Module) -> PACE:  # PACE
    return PACE(parameter_groups(model, weight_decay=0.0), lr=2e-2, control=Control.push())


def main(out: Path) -> None:
    settings = {"max_steps": 240, "eval_strategy": "steps", "eval_steps": 80, "save_steps": 80}
    settings |= {"per_device_train_batch_size": 16 // RANKS, "disable_tqdm": True, "report_to": "none"}
    settings |= {"lr_scheduler_type": "constant", "load_best_model_at_end": True, "bf16": False}
    settings |= {"use_cpu": not GPU, "fsdp": GPU and RANKS > 1}  # FSDP2; on CPUs Accelerate takes DDP
    averaged = AveragedModelCallback()  # PACE
    trainer = SFTTrainer(
        base(),
        SFTConfig(str(out), **settings, ddp_backend=None if GPU or RANKS == 1 else "gloo"),
        train_dataset=spelled(range(1003, 10000, 9), wrong=0.2),
        eval_dataset=spelled(range(1000, 10000, 90)),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=8, target_modules="all-linear", modules_to_save=["embed_tokens", "lm_head"]),
        optimizer_cls_and_kwargs=optimizer_for_trainer(optimizer_of),  # PACE
        callbacks=[averaged],  # PACE
    )
    trainer.train()
    trainer.save_model(str(out / "returned"))  # the average of the adapter, of the best checkpoint

    average = trainer.evaluate()["eval_loss"]
    with averaged.live_weights():
        live = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"average: loss {average:.4f}\n   live: loss {live:.4f}")
        PeftModel.from_pretrained(base(), out / "checkpoint-240" / "averaged" / "default")  # as any adapter


if __name__ == "__main__":
    main(Path(sys.argv[1]))
