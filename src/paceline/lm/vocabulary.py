"""Vocabularies turn text into token ids: GPT-2's, a model's own, or one trained on the documents.

Each one wraps a tokenizer of the `tokenizers` library. It adds no special tokens to a text, and
"<|endoftext|>" inside of a document is encoded as plain text.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from paceline.lm.documents import needed_for
from paceline.lm.files import read_json, write_atomically

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_END = "<|endoftext|>"
# By preference, if none is configured.
_ENDS: Sequence[str] = (_END, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
# The files of a folder, by preference: all of it, or GPT-2's two under the names of OpenAI and transformers.
_FILES = (("tokenizer.json",), ("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
_BYTES = 256


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Vocabulary:
    """A tokenizer, and the token that ends a document."""

    tokenizer: "Tokenizer"
    end_of_text: int

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, without special tokens."""
        return [found.ids for found in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of these tokens; end-of-text tokens appear in it."""
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    @cached_property
    def size(self) -> int:
        """The largest token id + 1; larger than the number of tokens if a tokenizer has gaps."""
        return size_of(self.tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 of all that decides the tokens; it may change with the version of `tokenizers`."""
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
    """Read a vocabulary, or train one on the documents.

    Arguments:
        where: "bpe:2048" trains a byte-level BPE of that size. A tokenizer.json is read, and so is a folder
            with one or with GPT-2's encoder.json and vocab.bpe. Other names, such as "gpt2", are read from
            the Hugging Face hub.
        documents: used only for training.
    """
    if trained := re.fullmatch(r"bpe:(\d{1,7})", str(where)):
        return train_vocabulary(documents, int(trained[1]))
    path = Path(where).expanduser()
    if path.exists():
        return _read(path)
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", str(where)) or path.suffix == ".json":
        raise FileNotFoundError(
            f"no vocabulary {where}: no such file, and not a name such as gpt2 or bpe:2048"
        )
    return _read(_downloaded(str(where)))


def train_vocabulary(documents: Iterable[str], size: int) -> Vocabulary:
    """Train a byte-level BPE of at most `size` tokens. The result depends only on the documents.

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


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """Return the vocabulary of a tokenizer of transformers, which is copied and not changed."""
    kind, wrapped = type(tokenizer).__name__, getattr(tokenizer, "backend_tokenizer", None)
    if wrapped is None:
        raise ValueError(f"{kind} is not backed by the tokenizers library; load a fast one")
    ends = _ENDS if tokenizer.eos_token is None else [str(tokenizer.eos_token)]
    return _vocabulary(wrapped, ends, kind)


def plain_copy(tokenizer: "Tokenizer") -> "Tokenizer":
    """Return a copy that neither truncates nor pads."""
    own: Tokenizer = type(tokenizer).from_str(tokenizer.to_str())
    own.no_truncation()
    own.no_padding()
    return own


def size_of(tokenizer: "Tokenizer") -> int:
    """Return the largest token id + 1."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


# --- Reading --------------------------------------------------------------------------------------

# Not by transformers' AutoTokenizer: it rebuilds GPT-2's tokenizer with other details, which changes the
# fingerprint, and it takes seconds to import.


def _read(where: Path) -> Vocabulary:
    """Read a tokenizer.json, or the files of a folder."""
    choices = [(where,)] if where.is_file() else [tuple(map(where.joinpath, names)) for names in _FILES]
    files = next((files for files in choices if all(map(Path.exists, files))), None)
    ends = _ENDS if where.is_file() else _configured_ends(where / "tokenizer_config.json")
    if files is None:
        names = ", ".join(" and ".join(names) for names in _FILES)
        raise FileNotFoundError(f"{where} holds no vocabulary; looked for {names}")
    with needed_for("a vocabulary"):
        from tokenizers import Tokenizer, models
    paths = [str(path) for path in files]
    try:
        tokenizer = (
            Tokenizer.from_file(*paths) if len(paths) == 1 else _byte_level(models.BPE.from_file(*paths))
        )
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{', '.join(paths)}: not a tokenizer ({error})") from error
    return _vocabulary(tokenizer, ends, paths[0])


def _configured_ends(settings: Path) -> Sequence[str]:
    """Return the token that a folder's settings name as the end, or the usual ones."""
    end = read_json(settings).get("eos_token") if settings.exists() else None
    if isinstance(end, dict):
        end = end.get("content")
    return [end] if isinstance(end, str) else _ENDS


def _byte_level(model: Any) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _downloaded(name: str) -> Path:
    """Return a folder with the files of a tokenizer of the hub; no code of the hub is run."""
    with needed_for("a vocabulary of the hub"):
        from huggingface_hub import snapshot_download
    files = ["tokenizer_config.json", *(file for names in _FILES for file in names)]
    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"no vocabulary {name}: no such file or folder here, and not from the Hugging Face hub ({error})"
        ) from error


def _vocabulary(tokenizer: "Tokenizer", ends: Sequence[str], where: str) -> Vocabulary:
    known = tokenizer.get_vocab(with_added_tokens=True)
    end = next((end for end in ends if end in known), None)
    if end is None:
        raise ValueError(f"{where} has no token that ends a text; looked for {', '.join(ends)}")
    own = plain_copy(tokenizer)
    own.add_special_tokens([end])
    own.encode_special_tokens = True
    return Vocabulary(tokenizer=own, end_of_text=known[end])
