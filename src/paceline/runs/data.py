"""Samples from the names of data: prepared once, in a cache that runs share.

.. code-block:: text

    python, files → documents ─┬→ training → train/     ┐
                    split by text                       ├ one folder, named after its content
                               └→ held out → held-out/  ┘ and that of the tokenizer
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.cache import cache_folder
from paceline.lm.chat import ChatFormat, chat_rows, messages_of
from paceline.lm.chat_samples import ChatSamples, prepare_chat
from paceline.lm.documents import PARQUET, ROWS, TEXT, Files, cut, is_held_out, open_source
from paceline.lm.files import Damaged, sha256_of, stamp, verify
from paceline.lm.manifest import MANIFEST, prepared, read_manifest
from paceline.lm.python_corpus import Corpus, python_corpus
from paceline.lm.shards import Tokens, open_tokens, prepare
from paceline.lm.vocabulary import Vocabulary, open_vocabulary
from paceline.runs.config import ConfigError

Tell = Callable[[str], None]
HELD_OUT_SHARE = 0.05
_Stamps = list[tuple[Path, list[int]]]
_MISTAKES = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, ValueError)


@contextmanager
def inputs_named() -> Iterator[None]:
    """Turn what is wrong with data, tokenizers and models that the user named into a ConfigError."""
    try:
        yield
    except Damaged:  # the name was right
        raise
    except _MISTAKES as error:
        raise ConfigError(str(error)) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Text turned into tokens, in two parts, and what turned it."""

    vocabulary: Vocabulary
    training: Tokens
    held_out: Tokens


def prepare_text(
    names: tuple[str, ...], held_out: tuple[str, ...], tokenizer: str | Vocabulary, usual: str, tell: Tell
) -> Text:
    """Return the tokens of these sources, prepared if need be; `usual` is the tokenizer for auto."""
    if _is_prepared(names):
        folder = Path(names[0]).expanduser()
        vocabulary = open_vocabulary(folder / "tokenizer")
        if isinstance(tokenizer, Vocabulary) and tokenizer.fingerprint != vocabulary.fingerprint:
            raise ConfigError(f"{names[0]} was prepared with another tokenizer than the model's")
        if isinstance(tokenizer, str) and tokenizer != "auto":
            raise ConfigError(f"{names[0]} is prepared with a tokenizer already; leave out tokenizer")
        training = _part(folder, "train", vocabulary, tell)
    else:
        sources, part = [_Source(name) for name in names], "all" if held_out else "train"
        vocabulary = _vocabulary(usual if tokenizer == "auto" else tokenizer, sources, part, tell)
        training = _tokens(sources, part, vocabulary, tell)
    others = held_out_text(names, held_out, vocabulary, tell)
    return Text(vocabulary=vocabulary, training=training, held_out=others)


def held_out_text(
    names: tuple[str, ...], held_out: tuple[str, ...], vocabulary: Vocabulary, tell: Tell
) -> Tokens:
    """Return the tokens to evaluate on: other text or, without it, what is held out of these sources."""
    if not held_out and _is_prepared(names):
        return _part(Path(names[0]).expanduser(), "held-out", vocabulary, tell)
    part = "all" if held_out else "held-out"
    return _tokens([_Source(name) for name in held_out or names], part, vocabulary, tell)


@inputs_named()
def prepare_folder(names: list[str], tokenizer: str, folder: Path, tell: Tell) -> Text:
    """Prepare text in a folder of the user's choice, which is a name of data from then on."""
    sources, kept = [_Source(name) for name in names], folder / "tokenizer"
    vocabulary = _vocabulary(tokenizer, sources, "train", tell)
    if not (kept / "tokenizer_config.json").exists():
        vocabulary.save(kept)
    elif open_vocabulary(kept).fingerprint != vocabulary.fingerprint:
        raise ConfigError(
            f"{folder} holds tokens of another tokenizer than {tokenizer}; choose another folder"
        )
    for part in ("held-out", "train"):
        _tokens(sources, part, vocabulary, tell, folder / part)
    return open_prepared(folder, tell)


def _is_prepared(names: tuple[str, ...]) -> bool:
    return len(names) == 1 and (Path(names[0]).expanduser() / "train" / MANIFEST).exists()


def open_prepared(folder: Path, tell: Tell) -> Text:
    """Return the text in a folder that `prepare_folder` wrote."""
    vocabulary = open_vocabulary(folder / "tokenizer")
    training, held_out = (_part(folder, part, vocabulary, tell) for part in ("train", "held-out"))
    return Text(vocabulary=vocabulary, training=training, held_out=held_out)


def _part(folder: Path, part: str, vocabulary: Vocabulary, tell: Tell) -> Tokens:
    tokens = open_tokens(folder / part, tell=tell)
    if tokens.tokenizer != vocabulary.fingerprint:
        raise ConfigError(f"{tokens.folder} was made with another tokenizer than the one in {folder}")
    if (made_of := tokens.source.get("part", part)) != part:
        raise ConfigError(f"{tokens.folder} holds the part {made_of} of the text, not {part}")
    return tokens


def _vocabulary(tokenizer: str | Vocabulary, sources: "list[_Source]", part: str, tell: Tell) -> Vocabulary:
    if isinstance(tokenizer, Vocabulary):
        return tokenizer
    if not tokenizer.startswith("bpe:"):
        return open_vocabulary(tokenizer)
    kept = cache_folder() / "tokenizers" / _key(tokenizer, part, *_descriptions(sources))

    def opened() -> Vocabulary:
        verify(kept, read_manifest(kept / MANIFEST, {})["files"])
        return open_vocabulary(kept)

    def fill(made: Path) -> dict[str, Any]:
        tell(f"training a vocabulary, {tokenizer}")
        open_vocabulary(tokenizer, _documents(sources, part)).save(made)
        return {}

    return prepared(kept, opened, fill, tell=tell, is_cache=True)


def _tokens(
    sources: "list[_Source]", part: str, vocabulary: Vocabulary, tell: Tell, folder: Path | None = None
) -> Tokens:
    """Return the tokens of one part, prepared if need be: in the cache, or in a folder of the user's."""
    described = _descriptions(sources)

    def check() -> None:
        for source in sources:
            source.check()

    return prepare(
        _some(sources, part),
        vocabulary,
        folder or cache_folder() / "tokens" / _key(vocabulary.fingerprint, part, *described),
        source={"sources": described, "part": part},
        is_cache=folder is None,
        progress=_Progress(f"tokenizing ({part})", tell),
        check=check,
        tell=tell,
    )


def _descriptions(sources: "list[_Source]") -> list[dict[str, Any]]:
    return [source.description for source in sources]


def _key(*content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


class _Source:
    """Documents by the name of where they come from."""

    def __init__(self, name: str) -> None:
        self.name = name
        try:
            self._source: Corpus | Any = python_corpus() if name == "python" else open_source(name)
        except (FileNotFoundError, ValueError) as error:  # no such file, or not one that can be read
            raise ConfigError(str(error)) from None
        self._stamps = _stamps(self._source.files if isinstance(self._source, Files) else ())

    @cached_property
    def description(self) -> dict[str, Any]:
        described: dict[str, Any] = self._source.describe()
        return described

    def documents(self, part: str) -> Iterator[str]:
        """Yield the documents of one part: train, held-out or all."""
        source = self._source
        if isinstance(source, Corpus):
            yield from source.held_out if part != "train" else ()
            yield from source.training if part != "held-out" else ()
            return
        size = _part_size(source)
        for document in source.documents():
            for piece in cut(document, size) if size else (document,):
                if part == "all" or is_held_out(piece, HELD_OUT_SHARE) == (part == "held-out"):
                    yield piece
        self.check()

    def check(self) -> None:
        """Raise ConfigError if a file was written after it was hashed."""
        _check_unchanged(self._stamps)


def _stamps(files: Iterable[Path]) -> _Stamps:
    return [(path, stamp(path)) for path in files]


def _check_unchanged(stamps: _Stamps) -> None:
    """Raise ConfigError if files were written after these stamps: their hash would name other content."""
    for path, known in stamps:
        if stamp(path) != known:
            raise ConfigError(f"{path} was changed while it was read; run the same command again")


def _part_size(source: Any) -> int | None:
    """Return the size in characters of the parts of a plain text, some of which are held out; else None."""
    if isinstance(source, Files) and all(path.name.lower().endswith(TEXT) for path in source.files):
        return max(200, min(10_000, sum(path.stat().st_size for path in source.files) // 100))
    return None


def _documents(sources: list[_Source], part: str) -> Iterator[str]:
    for source in sources:
        yield from source.documents(part)


def _some(sources: list[_Source], part: str) -> Iterator[str]:
    documents = _documents(sources, part)
    first = next(documents, None)
    if first is None:
        raise ConfigError(
            f"too few documents: by chance none is in the {part} part; give other held_out data"
        )
    yield first
    yield from documents


# --- Conversations ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Chats:
    """Packed conversations, in two parts."""

    tokenizer: str
    """The fingerprint of how they are written."""
    training: ChatSamples
    held_out: ChatSamples


def check_chat_files(names: tuple[str, ...]) -> None:
    """Raise ConfigError for a name that is no file of conversations, before a model is loaded."""
    for name in names:
        path = Path(name).expanduser()
        if not path.is_file():
            raise ConfigError(f"there is no file {path}; conversations come from JSON lines or parquet")
        if not path.name.lower().endswith(ROWS + PARQUET):
            raise ConfigError(f"{path} cannot hold conversations; allowed: {', '.join(ROWS + PARQUET)}")
        where, row = next(chat_rows(path), (str(path), None))
        if row is None:
            raise ConfigError(f"{path} is empty")
        messages_of(row, where)


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def read_template(name: str | None) -> str | None:
    """Return the chat template of that name, or in a file."""
    if name is None or name == "chatml":
        return name and CHATML
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the chat template {name}: {error}") from None


def prepare_chats(
    names: tuple[str, ...], held_out: tuple[str, ...], tokenizer: Any, length: int, tell: Tell
) -> Chats:
    """Return conversations in the form of the tokenizer's chat template, packed; prepared if need be."""
    form = ChatFormat(tokenizer)
    training = _chats(names, "all" if held_out else "train", form, length, tell)
    others = held_out_chats(names, held_out, form, length, tell)
    return Chats(tokenizer=form.fingerprint, training=training, held_out=others)


def held_out_chats(
    names: tuple[str, ...], held_out: tuple[str, ...], form: ChatFormat, length: int, tell: Tell
) -> ChatSamples:
    """Return the conversations to evaluate on: others or, without them, those held out of these."""
    return _chats(held_out or names, "all" if held_out else "held-out", form, length, tell)


def _chats(names: tuple[str, ...], part: str, form: ChatFormat, length: int, tell: Tell) -> ChatSamples:
    stamps = _stamps(Path(name).expanduser() for name in names)  # before they are hashed
    about = {"files": [sha256_of(file) for file, _ in stamps], "part": part}
    folder = cache_folder() / "chats" / _key(form.fingerprint, length, about)
    progress = _Progress(f"rendering conversations ({part})", tell)
    return prepare_chat(
        _chat_rows(stamps, part),
        form,
        folder,
        source=about,
        length=length,
        is_cache=True,
        progress=progress,
        tell=tell,
    )


def _chat_rows(stamps: _Stamps, part: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of one part, split by the first question: one question never occurs in both parts."""
    for where, row in chat_rows(*(file for file, _ in stamps)):
        if part != "all":
            asked = next((m["content"] for m in messages_of(row, where) if m["role"] == "user"), "")
            if is_held_out(asked, HELD_OUT_SHARE) != (part == "held-out"):
                continue
        yield where, row
    _check_unchanged(stamps)


class _Progress:
    """Says how far it is every few seconds."""

    def __init__(self, what: str, tell: Tell) -> None:
        self._what, self._tell, self._spoke = what, tell, time.monotonic()

    def __call__(self, documents: int, tokens: int) -> None:
        if time.monotonic() - self._spoke > 5:
            self._spoke = time.monotonic()
            self._tell(f"{self._what}: {documents:,} documents, {tokens:,} tokens")
