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
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.lm.batch import Batch, Numbers
from paceline.lm.files import locked, plain_file, remove_temporary, sha256_of, sync, write_atomically

FORMAT = 1
_MANIFEST, _PROGRESS = "manifest.json", "progress.json"
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_BATCH = 2**20  # characters tokenized in one call: enough for all cores, some 100 MB of memory

Array = NDArray[np.unsignedinteger[Any]]


class Encodes(Protocol):
    """The part of a vocabulary that `prepare` needs."""

    @property
    def size(self) -> int: ...
    @property
    def end_of_text(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def encode(self, texts: Sequence[str]) -> list[list[int]]: ...


@final
@dataclass(frozen=True, kw_only=True)
class Shard:
    """The manifest's entry for a file of tokens."""

    name: str
    tokens: int
    bytes: int
    sha256: str
    largest: int  # token id


@final
@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Prepared tokens: the manifest of a folder."""

    folder: Path
    dtype: str
    vocabulary: int
    end_of_text: int
    tokenizer: str  # fingerprint
    source: dict[str, Any]
    documents: int
    shards: tuple[Shard, ...]

    @property
    def count(self) -> int:
        """The number of tokens in all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def fingerprint(self) -> str:
        """The sha256 of the tokens and their format; it does not depend on their source."""
        content = [self.dtype, self.vocabulary, *(shard.sha256 for shard in self.shards)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


# --- Preparing ------------------------------------------------------------------------------------


def prepare(
    documents: Iterable[str],
    vocabulary: Encodes,
    folder: Path,
    *,
    source: Mapping[str, Any],
    shard_tokens: int = 2**27,
    save_tokens: int = 2**22,
    progress: Callable[[int, int], None] = lambda documents, tokens: None,
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
        progress: called with the numbers of documents and tokens so far.
    """
    if shard_tokens < 1 or save_tokens < 1:
        raise ValueError(f"Invalid {shard_tokens=}, {save_tokens=}; allowed: 1 or more")
    dtype = "uint16" if vocabulary.size <= 2**16 else "uint32"
    settings = {
        "format": FORMAT,
        "dtype": dtype,
        "vocabulary": vocabulary.size,
        "end_of_text": vocabulary.end_of_text,
        "tokenizer": vocabulary.fingerprint,
        "source": json.loads(json.dumps(source)),
        "shard_tokens": shard_tokens,
    }
    folder = Path(folder).absolute()
    with locked(folder):
        remove_temporary(folder)
        if (folder / _MANIFEST).exists():
            _check_same(settings, _read_json(folder, _MANIFEST), folder)
            (folder / _PROGRESS).unlink(missing_ok=True)
            return open_tokens(folder)
        writer = _Writer(folder, settings)
        for batch in _batches(islice(documents, writer.documents, None)):
            writer.write(_encoded(batch, vocabulary, _DTYPES[dtype]), documents=len(batch))
            progress(writer.documents, writer.tokens)
            if writer.tokens - writer.saved >= save_tokens:
                writer.save()
        writer.finish()
    return open_tokens(folder)


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


def _encoded(batch: list[str], vocabulary: Encodes, dtype: np.dtype[Any]) -> Array:
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
        self.documents = self.tokens = 0
        self.shards: list[Shard] = []  # the full ones
        if (folder / _PROGRESS).exists():
            done = _read_json(folder, _PROGRESS)
            _check_same(settings, done, folder)
            self.documents, self.tokens = done["documents"], done["tokens"]
            self.shards = [Shard(**shard) for shard in done["shards"]]
        self.saved = self.tokens
        self._cut_back()

    def _path(self, number: int) -> Path:
        return self.folder / f"tokens-{number:05d}.bin"

    def _cut_back(self) -> None:
        """Remove everything written after the last save."""
        number, inside = divmod(self.tokens, self.shard_tokens)
        for path in sorted(self.folder.glob("tokens-*.bin")):
            if path > self._path(number) or (path == self._path(number) and not inside):
                path.unlink()
        for i in range(number + bool(inside)):
            size = plain_file(self.folder, self._path(i).name).stat().st_size
            needed = (self.shard_tokens if i < number else inside) * self.dtype.itemsize
            if size < needed:
                raise ValueError(f"{self._path(i)} has {size} bytes, not {needed}; remove {self.folder}")
            os.truncate(self._path(i), needed)

    def write(self, tokens: Array, *, documents: int) -> None:
        """Append the tokens of some documents."""
        self.documents += documents
        while len(tokens):
            number, inside = divmod(self.tokens, self.shard_tokens)
            part, tokens = np.split(tokens, [self.shard_tokens - inside])
            try:
                with self._path(number).open("ab") as file:
                    file.write(part.data)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._path(number))) from error
            self.tokens += len(part)

    def save(self) -> None:
        """Save everything so far, so that an interrupt cannot lose it."""
        full, inside = divmod(self.tokens, self.shard_tokens)
        for number in range(len(self.shards), full):
            self.shards.append(self._shard(number))
        if inside:
            sync(self._path(full))
        self._write_json(_PROGRESS)
        self.saved = self.tokens

    def finish(self) -> None:
        """Save the last shard and write the manifest."""
        if not self.tokens:
            raise ValueError(f"no documents to prepare for {self.folder}, or only empty ones")
        self.save()
        if self.tokens % self.shard_tokens:
            self.shards.append(self._shard(len(self.shards)))
        self._write_json(_MANIFEST)
        (self.folder / _PROGRESS).unlink()

    def _shard(self, number: int) -> Shard:
        path = self._path(number)
        sync(path)
        tokens, digest = _mapped(path, self.dtype), sha256_of(path)
        size, largest = tokens.nbytes, _largest(tokens)
        return Shard(name=path.name, tokens=len(tokens), bytes=size, sha256=digest, largest=largest)

    def _write_json(self, name: str) -> None:
        shards = [asdict(shard) for shard in self.shards]
        done = {"documents": self.documents, "tokens": self.tokens, "shards": shards}
        write_atomically(self.folder / name, json.dumps(self.settings | done, indent=1).encode())


def _check_same(settings: dict[str, Any], found: dict[str, Any], folder: Path) -> None:
    """Raise ValueError if a folder was prepared with other settings."""
    say, other = reprlib.repr, {key: ours for key, ours in settings.items() if found.get(key) != ours}
    if other:
        changes = "; ".join(f"{key} {say(found.get(key))} → {say(ours)}" for key, ours in other.items())
        raise ValueError(f"{folder} holds tokens of something else; choose another folder ({changes})")


# --- Opening --------------------------------------------------------------------------------------


def open_tokens(folder: Path, *, verify: bool = False) -> Tokens:
    """Open prepared tokens, after a check of their manifest and the sizes of their files.

    Arguments:
        folder: what `prepare` wrote.
        verify: check the hashes too, which reads all files.
    """
    folder = Path(folder).absolute()
    manifest = _read_json(folder, _MANIFEST)
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{folder / _MANIFEST}: format {manifest.get('format')!r}; allowed: {FORMAT}")
    try:
        tokens = Tokens(
            folder=folder,
            dtype=manifest["dtype"],
            vocabulary=_count(manifest, "vocabulary"),
            end_of_text=_count(manifest, "end_of_text"),
            tokenizer=manifest["tokenizer"],
            source=manifest["source"],
            documents=_count(manifest, "documents"),
            shards=tuple(_opened(folder, shard, manifest, verify) for shard in manifest["shards"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / _MANIFEST}: not a manifest of tokens ({error!r})") from error
    if tokens.count != manifest.get("tokens"):
        raise ValueError(
            f"{folder / _MANIFEST}: {manifest.get('tokens')} tokens; its shards have {tokens.count}"
        )
    return tokens


def _count(entry: dict[str, Any], key: str) -> int:
    value = entry[key]
    if type(value) is not int or value < 0:
        raise TypeError(f"{key} is {value!r}")
    return value


def _opened(folder: Path, entry: dict[str, Any], manifest: dict[str, Any], verify: bool) -> Shard:
    """Return a shard after a check of its size and its largest token."""
    dtype = _DTYPES.get(manifest["dtype"])
    if dtype is None:
        raise ValueError(f"{folder / _MANIFEST}: dtype {manifest['dtype']!r}; allowed: {', '.join(_DTYPES)}")
    path = plain_file(folder, entry["name"])
    tokens, size = _count(entry, "tokens"), path.stat().st_size
    if not 0 < size == _count(entry, "bytes") == tokens * dtype.itemsize:
        needed = f"{tokens} tokens of {manifest['dtype']} ({tokens * dtype.itemsize} bytes)"
        raise ValueError(f"{path} has {size} bytes; the manifest says {entry['bytes']} and {needed}")
    if verify and sha256_of(path) != entry["sha256"]:
        raise ValueError(f"{path} has changed since it was prepared: its sha256 is not {entry['sha256']}")
    # A manifest of another tool may lack the largest token; then all tokens are read.
    is_known = "largest" in entry and not verify
    largest = _count(entry, "largest") if is_known else _largest(_mapped(path, dtype))
    if largest >= manifest["vocabulary"]:
        raise ValueError(f"{path} holds the token {largest}; allowed: below {manifest['vocabulary']}")
    return Shard(name=path.name, tokens=tokens, bytes=size, sha256=str(entry["sha256"]), largest=largest)


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    if not (folder / name).exists():
        begun = (folder / _PROGRESS).exists()
        why = "its preparation was not finished; run it again" if begun else f"no {name}"
        raise FileNotFoundError(f"{folder} holds no prepared tokens: {why}")
    try:
        content = json.loads(plain_file(folder, name).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder / name}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{folder / name}: not a manifest of tokens")
    return content


def _mapped(path: Path, dtype: np.dtype[Any]) -> Array:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        return np.asarray(np.memmap(file, dtype=dtype, mode="r"))  # slices of a memmap itself are slow


def _largest(tokens: Array) -> int:
    """Return the largest token, reading parts to save memory."""
    return max(int(tokens[at : at + 2**24].max()) for at in range(0, len(tokens), 2**24))


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
        self._shards = [_mapped(tokens.folder / s.name, _DTYPES[tokens.dtype]) for s in tokens.shards]
        self._ends = np.cumsum([shard.tokens for shard in tokens.shards])

    def __reduce__(self) -> tuple[type["Windows"], tuple[Tokens, int]]:
        return Windows, (self._tokens, self.length)  # a worker process maps the files again

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
            path, token = self._tokens.folder / self._tokens.shards[shard].name, windows[row, column]
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
