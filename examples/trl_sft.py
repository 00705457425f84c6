"""PACE in TRL's SFTTrainer with a LoRA adapter: evaluated, saved and returned is the average of the adapter.

Run `python examples/trl_sft.py`. A small Llama learns to spell numbers, on a CPU, in seconds. With a model
and data of your own only the lines marked # PACE differ from what you have today.
"""

import tempfile
from pathlib import Path

from datasets import Dataset
from peft import LoraConfig, PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from paceline import Control  # PACE
from paceline.integrations.huggingface import AveragedModelCallback, pace_for_trainer  # PACE

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def tokenizer() -> PreTrainedTokenizerFast:
    words = enumerate(["<pad>", "<s>", "</s>", *"0123456789", *DIGITS])
    level = Tokenizer(models.WordLevel({word: i for i, word in words}))
    level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=level, pad_token="<pad>", eos_token="</s>")


def spelled(numbers: range) -> Dataset:
    texts = [(" ".join(str(n)), " " + " ".join(DIGITS[int(d)] for d in str(n))) for n in numbers]
    return Dataset.from_list([{"prompt": prompt, "completion": rest} for prompt, rest in texts])


def base() -> LlamaForCausalLM:
    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=23, eos_token_id=2, **sizes))


def main(out: Path) -> None:
    settings = {"max_steps": 90, "eval_strategy": "steps", "eval_steps": 30, "save_steps": 30}
    settings |= {"per_device_train_batch_size": 16, "disable_tqdm": True, "report_to": "none"}
    args = SFTConfig(
        str(out),
        **settings,
        learning_rate=2e-2,
        lr_scheduler_type="constant",
        load_best_model_at_end=True,
        bf16=False,
        use_cpu=True,
    )
    trainer = SFTTrainer(
        base(),
        args,
        train_dataset=spelled(range(1000, 2000)),
        eval_dataset=spelled(range(2000, 2100)),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=8, target_modules="all-linear", modules_to_save=["embed_tokens", "lm_head"]),
        optimizer_cls_and_kwargs=pace_for_trainer(args, control=Control.push()),  # PACE
        callbacks=[AveragedModelCallback()],  # PACE
    )
    trainer.train()
    trainer.save_model(str(out / "returned"))  # the average of the adapter, of the best checkpoint
    print(f"returned: loss {trainer.evaluate()['eval_loss']:.4f}")
    PeftModel.from_pretrained(base(), out / "checkpoint-90" / "averaged" / "default")  # like any adapter


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder) / "out")
