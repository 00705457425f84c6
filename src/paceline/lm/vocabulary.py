"""Vocabularies: what turns text into token ids. GPT-2's, a model's own, or one trained on the documents.

Every one is a tokenizer of the `tokenizers` library underneath. Text is only ever text: neither are special
tokens added to it, nor is "<|endoftext|>" in a document taken for the end of one.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, final, runtime_checkable

from paceline.lm.documents import needed_for
from paceline.lm.files import write_atomically

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_END = "<|endoftext|>"
_ENDS = (_END, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")  # by falling preference, if nothing is said
_PAIRS = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))  # as OpenAI and transformers call them
_BYTES = 256


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Vocabulary:
    """A tokenizer, and the token that ends a document."""

    tokenizer: "Tokenizer"
    end_of_text: int

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, and none besides."""
        return [found.ids for found in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these tokens; ends of documents are written out."""
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    @cached_property
    def size(self) -> int:
        """All token ids are below it; not always their number, since some tokenizers leave gaps."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of what decides the tokens of a text; a new version of `tokenizers` may word it anew."""
        whole = json.loads(self.tokenizer.to_str())
        parts = [whole[part] for part in ("normalizer", "pre_tokenizer", "model", "added_tokens")]
        return hashlib.sha256(json.dumps([self.end_of_text, *parts]).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Write files that `open_vocabulary` and transformers' AutoTokenizer read from the folder."""
        end = self.tokenizer.id_to_token(self.end_of_text)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "tokenizer.json", self.tokenizer.to_str(pretty=True).encode())
        write_atomically(folder / "tokenizer_config.json", json.dumps(settings, indent=2).encode())


def open_vocabulary(where: str | Path, documents: Iterable[str] = ()) -> Vocabulary:
    """The vocabulary of that name.

    Arguments:
        where: "bpe:2048" trains a byte-level BPE of that size on the documents; a tokenizer.json or a folder
            with one, or with GPT-2's encoder.json and vocab.bpe, is read; any other name, such as "gpt2", is
            one of the Hugging Face hub.
        documents: read only to train.
    """
    if trained := re.fullmatch(r"bpe:(\d{1,7})", str(where)):
        return train_vocabulary(documents, int(trained[1]))
    path = Path(where).expanduser()
    if path.is_dir():
        return _read_folder(path)
    if path.exists():
        return _read_file(path, ends=_ENDS)
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", str(where)) or path.suffix == ".json":
        raise FileNotFoundError(
            f"no vocabulary {where}: no such file, and not a name such as gpt2 or bpe:2048"
        )
    return _read_hub(str(where))


def train_vocabulary(documents: Iterable[str], size: int) -> Vocabulary:
    """A byte-level BPE of at most that many tokens, learnt from the documents; the same ones give the same.

    >>> vocabulary = train_vocabulary(["to be or not to be"] * 2, size=261)
    >>> [vocabulary.decode([token]) for token in vocabulary.encode(["to be"])[0]]
    ['to', ' be']
    """
    if size <= _BYTES:
        raise ValueError(
            f"Invalid size of a vocabulary: {size}; allowed: {_BYTES + 1} (all bytes, the end) or more"
        )
    with needed_for("training a vocabulary"):
        from tokenizers import models, pre_tokenizers, trainers
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=[_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    if tokenizer.get_vocab_size() == _BYTES + 1 < size:
        raise ValueError("no text to train a vocabulary on: the documents hold nothing that occurs twice")
    return _vocabulary(tokenizer, [_END], "the trained tokenizer")


@runtime_checkable
class _Loaded(Protocol):
    """A tokenizer of transformers with one of `tokenizers` underneath."""

    backend_tokenizer: Any
    eos_token: str | None


def vocabulary_of(tokenizer: object) -> Vocabulary:
    """The vocabulary of a tokenizer that transformers has loaded; the tokenizer itself is left alone."""
    if not isinstance(tokenizer, _Loaded):
        raise ValueError(
            f"{type(tokenizer).__name__} is not backed by the tokenizers library; load a fast one"
        )
    ends = _ENDS if tokenizer.eos_token is None else [str(tokenizer.eos_token)]
    return _vocabulary(tokenizer.backend_tokenizer, ends, type(tokenizer).__name__)


# --- Reading --------------------------------------------------------------------------------------


def _read_folder(folder: Path) -> Vocabulary:
    ends: Sequence[str] = _ENDS
    settings = folder / "tokenizer_config.json"
    if settings.exists():
        try:
            end = json.loads(settings.read_bytes())["eos_token"]
            ends = [end if isinstance(end, str) else end["content"]]
        except (KeyError, TypeError):
            pass  # none named
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{settings}: not JSON ({error})") from error
    if (folder / "tokenizer.json").exists():
        return _read_file(folder / "tokenizer.json", ends)
    for vocabulary, merges in _PAIRS:
        if (folder / vocabulary).exists() and (folder / merges).exists():
            return _read_pair(folder / vocabulary, folder / merges, ends)
    pairs = " or ".join(" and ".join(pair) for pair in _PAIRS)
    raise FileNotFoundError(f"{folder} holds no vocabulary; looked for tokenizer.json, {pairs}")


def _read_file(path: Path, ends: Sequence[str]) -> Vocabulary:
    with needed_for("a vocabulary"):
        from tokenizers import Tokenizer
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path}: not a tokenizer ({error})") from error
    return _vocabulary(tokenizer, ends, str(path))


def _read_pair(vocabulary: Path, merges: Path, ends: Sequence[str]) -> Vocabulary:
    """GPT-2's two files."""
    with needed_for("a vocabulary"):
        from tokenizers import models
    try:
        tokenizer = _byte_level(models.BPE.from_file(str(vocabulary), str(merges)))
    except Exception as error:
        raise ValueError(f"{vocabulary}, {merges}: not a tokenizer ({error})") from error
    return _vocabulary(tokenizer, ends, str(vocabulary))


def _byte_level(model: Any) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _read_hub(name: str) -> Vocabulary:
    """Files of a tokenizer are fetched and read as those of a folder: none of the hub's code runs."""
    with needed_for("a vocabulary of the hub"):
        from huggingface_hub import snapshot_download
    files = ["tokenizer.json", "tokenizer_config.json", *(file for pair in _PAIRS for file in pair)]
    try:
        folder = snapshot_download(name, allow_patterns=files)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"no vocabulary {name}: no such file or folder here, and not from the Hugging Face hub ({error})"
        ) from error
    return _read_folder(Path(folder))


def _vocabulary(tokenizer: "Tokenizer", ends: Sequence[str], where: str) -> Vocabulary:
    known = tokenizer.get_vocab(with_added_tokens=True)
    end = next((end for end in ends if end in known), None)
    if end is None:
        raise ValueError(f"{where} has no token that ends a text; looked for {', '.join(ends)}")
    own = type(tokenizer).from_str(tokenizer.to_str())  # a copy: the settings below are ours alone
    own.no_truncation()
    own.no_padding()
    own.add_special_tokens([end])
    own.encode_special_tokens = True
    return Vocabulary(tokenizer=own, end_of_text=known[end])
