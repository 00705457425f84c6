"""Small things to train on, for all tests of the engine."""

import hashlib
import json

import numpy as np
import torch

from paceline.lm.batch import IGNORED, Batch


class RandomTokens:
    """Samples with something to learn: each token is likely to follow the one before it by one."""

    def __init__(self, count, *, length=16, vocabulary=50, seed=0, masked=0.0):
        noise = np.random.default_rng(seed)
        steps = np.where(
            noise.random((count, length + 1)) < 0.8, 1, noise.integers(0, vocabulary, (count, length + 1))
        )
        self._tokens = torch.from_numpy(np.cumsum(steps, axis=1) % vocabulary)
        self._ignored = torch.from_numpy(noise.random((count, length)) < masked)
        self.vocabulary, self.length = vocabulary, length
        self.fingerprint = hashlib.sha256(self._tokens.numpy().tobytes()).hexdigest()

    def __len__(self):
        return len(self._tokens)

    def batch(self, numbers):
        numbers = torch.as_tensor(np.asarray(numbers))
        tokens = self._tokens[numbers]
        targets = tokens[:, 1:].masked_fill(self._ignored[numbers], IGNORED)
        return Batch(tokens[:, :-1], targets, None)


TEXT = "the average of the weights that a run returns is better than its last one and trains as fast"
WORDS = TEXT.split()


def write_text(path, paragraphs=400, seed=0):
    """A plain text of made-up sentences."""
    noise = np.random.default_rng(seed)
    lines = (" ".join(noise.choice(WORDS, noise.integers(5, 12))) + "." for _ in range(paragraphs))
    path.write_text("\n\n".join(lines), encoding="utf-8")
    return path


def write_chats(path, count=60, seed=0):
    """Conversations of one question and answer, or two."""
    noise = np.random.default_rng(seed)

    def words():
        return " ".join(noise.choice(WORDS, noise.integers(2, 8)))

    rows = []
    for i in range(count):
        turns = [("user", f"{i}: {words()}?"), ("assistant", words())] * (1 + i % 2)
        rows.append(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder):
    """A tiny Llama with random weights, a tokenizer and a chat template, as transformers saves them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    inner.train_from_iterator(
        [" ".join(WORDS)] * 5,
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            attention_dropout=0.1,
            bos_token_id=None,
            eos_token_id=1,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
