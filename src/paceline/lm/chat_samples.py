"""Conversations packed into samples: each goes into the first sample with room for it.

.. code-block:: text

    folder/  manifest.json    source, settings, report, size and sha256 of the samples
             samples.bin      raw little-endian int32; three rows for each sample: tokens, their positions in
                              their conversations, and 1 where a token is the assistant's
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.lm.batch import IGNORED, Batch, Numbers
from paceline.lm.chat import ChatFormat, Rendered, messages_of
from paceline.lm.files import Damaged, check_fields, naming
from paceline.lm.manifest import MANIFEST, Tell, check_files, prepared, read_manifest, refuse_other, silent

_SAMPLES = "samples.bin"
_FIELDS = {"length": int, "vocabulary": int, "report": dict}
_ANY: Mapping[str, Any] = {}
_BATCH = 512  # conversations tokenized in one call: enough for all cores
_INT32 = np.dtype("<i4")

Rows = Iterable[tuple[str, Mapping[str, Any]]]

# --- Packing --------------------------------------------------------------------------------------


@final
class FirstFit:
    """First-fit packing: each conversation goes into the first sample with room for it.

    >>> pack = FirstFit(10)
    >>> [pack.place(size) for size in (6, 7, 4, 3, 1)]
    [(0, 0), (1, 0), (0, 6), (1, 7), (2, 0)]
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._rooms = np.full(1, length, dtype=np.int32)  # room in the samples so far, and in empty ones

    @property
    def samples(self) -> int:
        """The number of samples that hold a conversation."""
        return int((self._rooms < self.length).sum())

    def place(self, size: int) -> tuple[int, int]:
        """Return the sample for `size` tokens, and the place of the first of them in it."""
        sample = int((self._rooms >= size).argmax())
        room = int(self._rooms[sample])
        if room < size:
            sample, room = len(self._rooms), self.length
            self._rooms = np.append(self._rooms, np.full_like(self._rooms, self.length))
        self._rooms[sample] -= size
        return sample, self.length - room


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ChatReport:
    """The numbers of conversations and tokens that were packed, cut off and left out."""

    conversations: int
    """Conversations read."""
    unanswered: int
    """Conversations left out because the assistant says nothing."""
    control: int
    """Conversations left out because a message contains a special token of the tokenizer."""
    beyond: int
    """Conversations left out because the first answer begins beyond the length of a sample."""
    truncated: int
    """Conversations cut off at the length of a sample."""
    tokens_cut: int
    """Tokens cut off."""
    merged: int
    """Tokens that are partly in an answer and partly around it; they are not learned."""
    samples: int
    """Samples written."""
    places: int
    """Places for tokens in all samples."""
    tokens: int
    """Tokens in all samples."""
    loss_tokens: int
    """Tokens that are learned."""


def prepare_chat(
    rows: Rows,
    form: ChatFormat,
    folder: Path,
    *,
    source: Mapping[str, Any],
    length: int,
    is_cache: bool = False,
    progress: Callable[[int, int], None] = lambda conversations, tokens: None,
    tell: Tell = silent,
) -> "ChatSamples":
    """Render, tokenize and pack conversations into a folder, or open the folder if that is done.

    Conversations keep their order. Each goes into the first sample with room for it, and none is split. The
    report counts what is left out or cut off. A row that is not a conversation raises ValueError.

    Arguments:
        rows: conversations, each with its place for error messages, as from `chat_rows`.
        form: the tokenizer with its chat template.
        folder: appears when it is complete; one with other content is refused.
        source: where the rows come from, as JSON; an existing folder must have the same.
        length: tokens of a sample.
        is_cache: prepare a damaged folder again, instead of refusing it.
        progress: called with the numbers of conversations and tokens so far.
        tell: called with lines about damage, and about a check that takes long.
    """
    if length < 2:
        raise ValueError(f"Invalid length of a sample: {length!r}; allowed: 2 or more")
    settings = {"length": length, "chat_format": form.fingerprint, "source": json.loads(json.dumps(source))}

    def fill(made: Path) -> dict[str, Any]:
        with naming(made / _SAMPLES):
            report = _write_samples(rows, form, made / _SAMPLES, length, progress)
        return {**settings, "vocabulary": form.vocabulary, "report": asdict(report)}

    opened = partial(open_chat, folder, tell=tell, settings=settings)
    return prepared(Path(folder).absolute(), opened, fill, tell=tell, is_cache=is_cache)


def _write_samples(
    rows: Rows, form: ChatFormat, path: Path, length: int, progress: Callable[[int, int], None]
) -> ChatReport:
    count: Counter[str] = Counter()
    pack, rows = FirstFit(length), iter(rows)
    with path.open("wb") as file:
        while batch := list(islice(rows, _BATCH)):
            count["conversations"] += len(batch)
            for tokens, learned, merged in form.tokenize(_rendered(batch, form, count)):
                cut, learned = max(0, len(tokens) - length), learned[:length]
                if not learned.any():
                    count["beyond"] += 1
                    continue
                count.update(truncated=cut > 0, tokens_cut=cut, merged=merged)
                count.update(tokens=len(learned), loss_tokens=int(learned.sum()))
                sample, place = pack.place(len(learned))
                parts: tuple[NDArray[Any], ...] = (tokens[:length], np.arange(len(learned)), learned)
                for row, part in enumerate(parts, 3 * sample):
                    file.seek((row * length + place) * _INT32.itemsize)  # a gap reads as 0: padding
                    file.write(part.astype(_INT32).data)
            progress(count["conversations"], count["tokens"])
        count.update(samples=pack.samples, places=pack.samples * length)
        if not pack.samples:
            raise ValueError(f"nothing to learn: {', '.join(f'{n} {what}' for what, n in count.items())}")
        file.truncate(3 * count["places"] * _INT32.itemsize)
    return ChatReport(**{field.name: count[field.name] for field in fields(ChatReport)})


def _rendered(batch: Rows, form: ChatFormat, count: Counter[str]) -> list[Rendered]:
    """Return the rendered conversations that can be learned from, and count the others."""
    rendered = []
    for where, row in batch:
        messages = messages_of(row, where)
        if all(message["role"] != "assistant" for message in messages):
            count["unanswered"] += 1
        elif any(form.control.search(message["content"]) for message in messages):
            count["control"] += 1
        else:
            try:
                rendered.append(form.render(messages))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
    return rendered


# --- Samples --------------------------------------------------------------------------------------


@final
class ChatSamples:
    """Packed conversations on disk. A conversation begins wherever the position is 0.

    Padding has token 0 and position 0 at every place. So it attends only to itself, and it has no target.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.manifest, self._path = manifest, folder / _SAMPLES
        self.report = ChatReport(**manifest["report"])
        self.length: int = manifest["length"]
        self.vocabulary: int = manifest["vocabulary"]
        self._rows = np.memmap(self._path, dtype=_INT32, mode="r", shape=(len(self), 3, self.length))

    @property
    def fingerprint(self) -> str:
        """The sha256 of the samples; it does not depend on their source."""
        content = [self.length, self.vocabulary, self.manifest["files"][_SAMPLES]["sha256"]]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def __len__(self) -> int:
        return self.report.samples

    def batch(self, numbers: Sequence[int] | Numbers) -> Batch:
        """Return the samples of these numbers, in this order."""
        numbers = np.asarray(numbers, dtype=np.int64)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(self):
            raise IndexError(f"sample {numbers.min()} or {numbers.max()}; allowed: 0 to {len(self) - 1}")
        tokens, positions, learned = self._rows[numbers].astype(np.int64).swapaxes(0, 1)
        for row, place in np.argwhere((tokens < 0) | (tokens >= self.vocabulary)):
            raise ValueError(
                f"{self._path}: token {tokens[row, place]} in sample {numbers[row]} at place {place}; "
                f"allowed: 0 to {self.vocabulary - 1}"
            )
        # The first token of a conversation is never learned, so no target comes from the next one.
        targets = np.full_like(tokens, IGNORED)
        targets[:, :-1] = np.where(learned[:, 1:], tokens[:, 1:], IGNORED)
        return Batch(*(torch.from_numpy(np.ascontiguousarray(part)) for part in (tokens, targets, positions)))


def open_chat(
    folder: Path, *, tell: Tell = silent, verify: bool = False, settings: Mapping[str, Any] = _ANY
) -> ChatSamples:
    """Open prepared conversations, after a check of their manifest and, at the first opening, their content.

    Arguments:
        folder: what `prepare_chat` wrote.
        tell: called with a line before a check that takes long.
        verify: check the content even if it was checked before.
        settings: fields of the manifest; a folder with others is refused.
    """
    folder = Path(folder).absolute()
    path = folder / MANIFEST
    manifest = read_manifest(path, _FIELDS)
    check_fields(path, manifest["report"], {field.name: int for field in fields(ChatReport)})
    if manifest["files"].keys() != {_SAMPLES} or len(manifest["report"]) != len(fields(ChatReport)):
        raise Damaged(f"{path} is not a manifest of conversations")
    refuse_other(settings, manifest, folder)
    check_files(folder, manifest, tell, again=verify)
    size = (folder / _SAMPLES).stat().st_size
    needed = 3 * manifest["report"]["samples"] * manifest["length"] * _INT32.itemsize
    if not 0 < size == needed:
        raise Damaged(f"{path}: samples of {needed} bytes; {_SAMPLES} has {size}")
    return ChatSamples(folder, manifest)
