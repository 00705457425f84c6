"""Token shards: documents tokenized once, then read from the disk as windows.

.. code-block:: text

    folder/  manifest.json        written last: without it the folder is not finished
             tokens-00000.bin     raw little-endian uint16 or uint32, an end-of-text token after each document

A document may continue in the next shard. All shards but the last have the same size.
"""

import hashlib
import json
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.lm.batch import Batch, Numbers
from paceline.lm.files import Damaged, describe, naming, plain_file, verify
from paceline.lm.manifest import (
    MANIFEST,
    SAVED,
    Tell,
    check_files,
    prepared,
    read_manifest,
    refuse_other,
    silent,
    write_manifest,
)
from paceline.lm.vocabulary import Vocabulary

_FIELDS = {"dtype": str, "vocabulary": int, "tokenizer": str, "source": dict, "documents": int, "tokens": int}
_COUNTS = {"documents": int, "tokens": int}
_ANY: Mapping[str, Any] = {}
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_SAVE = 2**23  # tokens between two saves, some tens of seconds
_BATCH = 2**20  # characters tokenized in one call: enough for all cores, some 100 MB of memory

Array = NDArray[np.unsignedinteger[Any]]


@final
@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Prepared tokens: the manifest of a folder."""

    folder: Path
    dtype: str
    vocabulary: int
    tokenizer: str  # fingerprint
    source: Mapping[str, Any]
    documents: int
    files: Mapping[str, Any]  # size and sha256 by name

    @property
    def counts(self) -> list[int]:
        """The number of tokens in each file."""
        return [file["bytes"] // _DTYPES[self.dtype].itemsize for file in self.files.values()]

    @property
    def count(self) -> int:
        """The number of tokens in all files."""
        return sum(self.counts)

    @property
    def fingerprint(self) -> str:
        """The sha256 of the tokens and their format; it does not depend on their source."""
        content = [self.dtype, self.vocabulary, *(file["sha256"] for file in self.files.values())]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


# --- Preparing ------------------------------------------------------------------------------------


def prepare(
    documents: Iterable[str],
    vocabulary: Vocabulary,
    folder: Path,
    *,
    source: Mapping[str, Any],
    shard_tokens: int = 2**27,
    is_cache: bool = False,
    progress: Callable[[int, int], None] = lambda documents, tokens: None,
    check: Callable[[], None] = lambda: None,
    tell: Tell = silent,
) -> Tokens:
    """Tokenize documents into a folder, or open the folder if that is done.

    It may be killed at any time: the folder appears when it is complete, and the next call resumes.

    Arguments:
        documents: the text; the same in the same order in each call.
        vocabulary: the tokenizer.
        folder: new or empty; one with other tokens is refused.
        source: where the documents come from, as JSON; an existing folder must have the same.
        shard_tokens: tokens of a file.
        is_cache: prepare a damaged folder again, instead of refusing it.
        progress: called with the numbers of documents and tokens so far.
        check: called before what is done is saved; raises if the documents are no more those of the source.
        tell: called with lines about damage, and about checks that take long.
    """
    if shard_tokens < 1:
        raise ValueError(f"Invalid {shard_tokens=}; allowed: 1 or more")
    settings = {
        "dtype": "uint16" if vocabulary.size <= 2**16 else "uint32",
        "vocabulary": vocabulary.size,
        "end_of_text": vocabulary.end_of_text,
        "tokenizer": vocabulary.fingerprint,
        "source": json.loads(json.dumps(source)),
        "shard_tokens": shard_tokens,
    }

    def fill(made: Path) -> dict[str, Any]:
        counts = _write_shards(documents, vocabulary, made, settings, progress, check)
        if not counts["tokens"]:
            raise ValueError(f"no documents to prepare for {folder}, or only empty ones")
        return settings | counts

    opened = partial(open_tokens, folder, tell=tell, settings=settings)
    return prepared(Path(folder).absolute(), opened, fill, tell=tell, is_cache=is_cache)


def _write_shards(
    documents: Iterable[str],
    vocabulary: Vocabulary,
    folder: Path,
    settings: Mapping[str, Any],
    progress: Callable[[int, int], None],
    check: Callable[[], None],
) -> dict[str, int]:
    """Write the tokens of all documents; return how many of both there are.

    What an interrupted call has saved in the folder is kept, and its documents are skipped.
    """
    shard_tokens, dtype = settings["shard_tokens"], _DTYPES[settings["dtype"]]
    read, written, files = _saved(folder, settings)
    saved = written
    for batch in _batches(islice(documents, read, None)):
        tokens, read = _encoded(batch, vocabulary, dtype), read + len(batch)
        while len(tokens):
            number, inside = divmod(written, shard_tokens)
            part, tokens = np.split(tokens, [shard_tokens - inside])
            path = folder / f"tokens-{number:05d}.bin"
            with naming(path), path.open("ab") as file:
                file.write(part.data)
            written += len(part)
        progress(read, written)
        if written - saved >= _SAVE:
            check()
            changed = range(saved // shard_tokens, -(-written // shard_tokens))
            files |= describe(folder / f"tokens-{number:05d}.bin" for number in changed)
            write_manifest(folder / SAVED, {**settings, "documents": read, "tokens": written, "files": files})
            saved = written
    return {"documents": read, "tokens": written}


def _saved(folder: Path, settings: Mapping[str, Any]) -> tuple[int, int, dict[str, Any]]:
    """Return the documents, tokens and files that are saved in a folder, and cut it back to them."""
    documents, tokens, files = 0, 0, dict[str, Any]()
    with suppress(OSError, ValueError):  # nothing is saved, or something else, or it is damaged
        saved = read_manifest(folder / SAVED, _COUNTS)
        refuse_other(settings, saved, folder)
        for name, file in saved["files"].items():
            os.truncate(plain_file(folder, name), file["bytes"])
        verify(folder, saved["files"])
        documents, tokens, files = saved["documents"], saved["tokens"], saved["files"]
    for path in folder.iterdir():
        if path.name not in {SAVED, *files}:
            path.unlink()
    return documents, tokens, files


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encoded(batch: list[str], vocabulary: Vocabulary, dtype: np.dtype[Any]) -> Array:
    """Return the tokens of all documents, each followed by the end-of-text token."""
    ids: list[int] = []
    for found in vocabulary.encode(batch):
        if found:
            ids += found
            ids.append(vocabulary.end_of_text)
    if max(ids, default=0) >= vocabulary.size:
        raise ValueError(f"the vocabulary has {vocabulary.size} tokens but gave {max(ids)} for a text")
    return np.array(ids, dtype=dtype)


# --- Opening --------------------------------------------------------------------------------------


def open_tokens(
    folder: Path, *, tell: Tell = silent, verify: bool = False, settings: Mapping[str, Any] = _ANY
) -> Tokens:
    """Open prepared tokens, after a check of their manifest and, at the first opening, of their content.

    Arguments:
        folder: what `prepare` wrote.
        tell: called with a line before a check that takes long.
        verify: check the content even if it was checked before.
        settings: fields of the manifest; a folder with others is refused.
    """
    folder = Path(folder).absolute()
    path = folder / MANIFEST
    if not path.exists():
        raise FileNotFoundError(f"{folder} holds no prepared tokens: no {MANIFEST}")
    manifest = read_manifest(path, _FIELDS)
    dtype = _DTYPES.get(manifest["dtype"])
    if dtype is None:
        raise Damaged(f"{path}: dtype is {manifest['dtype']!r}; allowed: {', '.join(_DTYPES)}")
    needed = manifest["tokens"] * dtype.itemsize
    sizes = [file["bytes"] for file in manifest["files"].values()]
    if not all(sizes) or any(size % dtype.itemsize for size in sizes) or sum(sizes) != needed:
        tokens = f"{manifest['tokens']} tokens of {manifest['dtype']} have {needed}"
        raise Damaged(f"{path}: its files have {reprlib.repr(sizes)} bytes; {tokens}")
    refuse_other(settings, manifest, folder)
    check_files(folder, manifest, tell, again=verify)
    fields = ("dtype", "vocabulary", "tokenizer", "source", "documents", "files")
    return Tokens(folder=folder, **{name: manifest[name] for name in fields})


def _mapped(path: Path, dtype: np.dtype[Any]) -> Array:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        return np.asarray(np.memmap(file, dtype=dtype, mode="r"))  # slices of a memmap itself are slow


# --- Reading --------------------------------------------------------------------------------------


@final
class Windows:
    """Samples for pretraining: adjacent windows of equal length over all shards.

    Sample i is tokens[i * length : i * length + length]; the target of each token is the next one. A window
    may contain several documents, with an end-of-text token between them.
    """

    def __init__(self, tokens: Tokens, length: int) -> None:
        if length < 1:
            raise ValueError(f"Invalid length of a window: {length!r}; allowed: 1 or more")
        if tokens.count < length + 1:
            raise ValueError(
                f"{tokens.folder} holds {tokens.count} tokens; a window of length {length} needs {length + 1}"
            )
        self.length, self.vocabulary, self._tokens = length, tokens.vocabulary, tokens
        self.fingerprint = hashlib.sha256(f"{tokens.fingerprint} {length}".encode()).hexdigest()
        self._shards = [_mapped(tokens.folder / name, _DTYPES[tokens.dtype]) for name in tokens.files]
        self._ends = np.cumsum(tokens.counts)

    def __len__(self) -> int:
        return (self._tokens.count - 1) // self.length

    def batch(self, numbers: Sequence[int] | Numbers) -> Batch:
        """Return the windows of these numbers, in this order."""
        numbers = np.asarray(numbers, dtype=np.int64)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(self):
            raise IndexError(f"window {numbers.min()} or {numbers.max()}; allowed: 0 to {len(self) - 1}")
        windows = np.empty((len(numbers), self.length + 1), dtype=np.int64)
        for window, start in zip(windows, numbers * self.length, strict=True):
            self._read_into(window, start)
        if windows.size and windows.max() >= self.vocabulary:  # a file changed after it was checked
            row, column = np.argwhere(windows >= self.vocabulary)[0]
            shard, place = self._place(numbers[row] * self.length + column)
            path, token = self._tokens.folder / list(self._tokens.files)[shard], windows[row, column]
            raise ValueError(f"{path}: token {token} at place {place}; allowed: below {self.vocabulary}")
        # Copied by numpy, which is faster here than torch with its threads.
        return Batch(torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy()), None)

    def _place(self, position: int) -> tuple[int, int]:
        """Return the number of a token's shard, and its place in it."""
        shard = int(np.searchsorted(self._ends, position, side="right"))
        return shard, int(position - self._ends[shard]) + len(self._shards[shard])

    def _read_into(self, window: Numbers, start: int) -> None:
        """Fill a window with the tokens from a position on, which may be in several shards."""
        shard, place = self._place(start)
        while len(window):
            part = self._shards[shard][place : place + len(window)]
            window[: len(part)] = part
            window, shard, place = window[len(part) :], shard + 1, 0
