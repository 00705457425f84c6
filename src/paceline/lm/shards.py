"""Token shards: documents tokenized once, then read from the disk as windows.

.. code-block:: text

    folder/  manifest.json        written last: without it the folder is not finished
             tokens-00000.bin     raw little-endian uint16 or uint32, an end-of-text token after each document
             progress.json        while preparing: how much is saved

A document may continue in the next shard. All shards but the last have the same size.
"""

import hashlib
import json
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.lm.batch import Batch, Numbers
from paceline.lm.files import Damaged, describe, locked, naming, plain_file, remove_temporary, sync, verify
from paceline.lm.manifest import (
    MANIFEST,
    Tell,
    check_files,
    read_manifest,
    refuse_other,
    silent,
    unless_damaged,
    write_manifest,
)
from paceline.lm.vocabulary import Vocabulary

_PROGRESS = "progress.json"
_FIELDS = {"dtype": str, "vocabulary": int, "tokenizer": str, "documents": int, "tokens": int}
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
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
    save_tokens: int = 2**22,
    is_cache: bool = False,
    progress: Callable[[int, int], None] = lambda documents, tokens: None,
    tell: Tell = silent,
) -> Tokens:
    """Tokenize documents into a folder, or open the folder if that is done.

    It may be killed at any time. Called again with the same arguments it resumes after its last save, and
    writes the same bytes.

    Arguments:
        documents: the same in the same order in each call.
        vocabulary: the tokenizer.
        folder: created if needed; one with other tokens is refused.
        source: where the documents come from, as JSON; a call resumes only work of the same source.
        shard_tokens: tokens of a file.
        save_tokens: tokens between two saves (some seconds), which an interrupt may lose.
        is_cache: prepare a damaged folder again, instead of refusing it.
        progress: called with the numbers of documents and tokens so far.
        tell: called with lines about damage, and about checks that take long.
    """
    if shard_tokens < 1 or save_tokens < 1:
        raise ValueError(f"Invalid {shard_tokens=}, {save_tokens=}; allowed: 1 or more")
    settings = _settings(vocabulary, source, shard_tokens)
    folder = Path(folder).absolute()
    with locked(folder):
        remove_temporary(folder)
        found = unless_damaged(lambda: _begun(folder, settings, tell), tell, is_cache=is_cache)
        if isinstance(found, Tokens):
            return found
        if found is None:
            for path in (folder / MANIFEST, folder / _PROGRESS, *folder.glob("tokens-*.bin")):
                path.unlink(missing_ok=True)
        writer = found or _Writer(folder, settings)
        for batch in _batches(islice(documents, writer.documents, None)):
            writer.write(_encoded(batch, vocabulary, writer.dtype), documents=len(batch))
            progress(writer.documents, writer.tokens)
            if writer.tokens - writer.saved >= save_tokens:
                writer.save()
        writer.finish()
    return open_tokens(folder, tell=tell)


def _settings(vocabulary: Vocabulary, source: Mapping[str, Any], shard_tokens: int) -> dict[str, Any]:
    """Return what decides the tokens of a folder."""
    return {
        "dtype": "uint16" if vocabulary.size <= 2**16 else "uint32",
        "vocabulary": vocabulary.size,
        "end_of_text": vocabulary.end_of_text,
        "tokenizer": vocabulary.fingerprint,
        "source": json.loads(json.dumps(source)),
        "shard_tokens": shard_tokens,
    }


def _begun(folder: Path, settings: dict[str, Any], tell: Tell) -> "Tokens | _Writer":
    """Return the tokens in a folder, or a writer of what is missing."""
    if not (folder / MANIFEST).exists():
        return _Writer(folder, settings)
    refuse_other(settings, _read(folder / MANIFEST), folder)
    return open_tokens(folder, tell=tell)


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


class _Writer:
    """A writer of shards, which resumes after the last save."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.settings = folder, settings
        self.dtype, self.shard_tokens = _DTYPES[settings["dtype"]], settings["shard_tokens"]
        self.documents = self.tokens = self.saved = 0
        self.files: dict[str, Any] = {}  # as they were saved; the last one may not be full
        if (folder / _PROGRESS).exists():
            done = _read(folder / _PROGRESS)
            refuse_other(settings, done, folder)
            self.documents, self.tokens, self.saved = done["documents"], done["tokens"], done["tokens"]
            self.files = done["files"]
        self._cut_back()

    def _path(self, number: int) -> Path:
        return self.folder / f"tokens-{number:05d}.bin"

    def _cut_back(self) -> None:
        """Remove everything written after the last save, and check what was saved."""
        for path in self.folder.glob("tokens-*.bin"):
            if path.name not in self.files:
                path.unlink()
            elif plain_file(self.folder, path.name).stat().st_size > self.files[path.name]["bytes"]:
                os.truncate(path, self.files[path.name]["bytes"])
        verify(self.folder, self.files)

    def write(self, tokens: Array, *, documents: int) -> None:
        """Append the tokens of some documents."""
        self.documents += documents
        while len(tokens):
            number, inside = divmod(self.tokens, self.shard_tokens)
            part, tokens = np.split(tokens, [self.shard_tokens - inside])
            with naming(self._path(number)), self._path(number).open("ab") as file:
                file.write(part.data)
            self.tokens += len(part)

    def save(self) -> None:
        """Save everything so far, so that an interrupt cannot lose it."""
        changed = range(self.saved // self.shard_tokens, -(-self.tokens // self.shard_tokens))
        paths = [self._path(number) for number in changed]
        for path in paths:
            sync(path)
        self.files |= describe(paths)
        done = {"documents": self.documents, "tokens": self.tokens, "files": self.files}
        write_manifest(self.folder / _PROGRESS, self.settings | done)
        self.saved = self.tokens

    def finish(self) -> None:
        """Save the rest; the progress becomes the manifest."""
        if not self.tokens:
            raise ValueError(f"no documents to prepare for {self.folder}, or only empty ones")
        self.save()
        (self.folder / _PROGRESS).replace(self.folder / MANIFEST)
        sync(self.folder)


# --- Opening --------------------------------------------------------------------------------------


def open_tokens(folder: Path, *, tell: Tell = silent, verify: bool = False) -> Tokens:
    """Open prepared tokens, after a check of their manifest and, at the first opening, of their content.

    Arguments:
        folder: what `prepare` wrote.
        tell: called with a line before a check that takes long.
        verify: check the content even if it was checked before.
    """
    folder = Path(folder).absolute()
    if not (folder / MANIFEST).exists():
        begun = (folder / _PROGRESS).exists()
        why = "its preparation was not finished; run it again" if begun else f"no {MANIFEST}"
        raise FileNotFoundError(f"{folder} holds no prepared tokens: {why}")
    manifest = _read(folder / MANIFEST)
    check_files(folder, manifest, tell, again=verify)
    fields = ("dtype", "vocabulary", "tokenizer", "documents", "files")
    return Tokens(folder=folder, **{name: manifest[name] for name in fields})


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a manifest, or of the progress of a preparation."""
    manifest = read_manifest(path, _FIELDS)
    dtype = _DTYPES.get(manifest["dtype"])
    if dtype is None:
        raise Damaged(f"{path}: dtype is {manifest['dtype']!r}; allowed: {', '.join(_DTYPES)}")
    needed = manifest["tokens"] * dtype.itemsize
    sizes = [file["bytes"] for file in manifest["files"].values()]
    if not all(sizes) or any(size % dtype.itemsize for size in sizes) or sum(sizes) != needed:
        tokens = f"{manifest['tokens']} tokens of {manifest['dtype']} have {needed}"
        raise Damaged(f"{path}: its files have {reprlib.repr(sizes)} bytes; {tokens}")
    return manifest


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
