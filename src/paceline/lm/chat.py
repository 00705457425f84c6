"""Conversations: rendered with a chat template, tokenized, and packed into samples.

.. code-block:: text

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}
        │ render    <|im_start|>user⏎Hi<|im_end|>⏎<|im_start|>assistant⏎Hello!<|im_end|>⏎
        │ learn                                                         ^^^^^^^^^^^^^^^^
        ▼ pack      into the first sample with room; positions begin again with each conversation
    folder/  manifest.json    source, settings, report, and the sha256 of the samples
             samples.bin      raw little-endian int32; three rows for each sample: tokens, their positions in
                              their conversations, and 1 where a token is the assistant's
"""

import hashlib
import json
import re
import reprlib
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.lm.batch import IGNORED, Batch, Numbers
from paceline.lm.documents import needed_for, read_rows
from paceline.lm.files import new_folder, plain_file, sha256_of, write_atomically

FORMAT = 1
ROLES = ("system", "user", "assistant")
_BATCH = 512  # conversations tokenized in one call: enough for all cores
_INT32 = np.dtype("<i4")
_BEGIN, _END = itemgetter(0), itemgetter(1)

Message = dict[str, str]
Rows = Iterable[tuple[str, Mapping[str, Any]]]

# --- Rows -----------------------------------------------------------------------------------------


def chat_rows(*paths: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of JSON lines files, compressed or not, each with its place for error messages."""
    for path in paths:
        for number, row in read_rows(path):
            yield f"{path}, line {number}", row


def messages_of(row: Mapping[str, Any], where: str) -> list[Message]:
    """Return role and content of the messages of a row.

    Raises:
        ValueError: the row is not a conversation.
    """
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        has = ", ".join(row) or "nothing"
        raise ValueError(f"{where}: no list of messages under 'messages'; it has {has}")
    for number, message in enumerate(messages, 1):
        place = f"{where}, message {number}"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, dict) else message
            raise ValueError(f"{place}: role {reprlib.repr(role)}; allowed: {', '.join(ROLES)}")
        content = message.get("content")
        if not isinstance(content, str):
            raise ValueError(f"{place}: its content must be text, not {type(content).__name__}")
        if message["role"] == "assistant" and (number == 1 or not content.strip()):
            why = "is empty" if number > 1 else "comes first, so nothing asks for it"
            raise ValueError(f"{place}: the assistant's answer {why}")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


# --- Rendering ------------------------------------------------------------------------------------


class Rendered(NamedTuple):
    """The text of a conversation, and the spans of the assistant's words in it."""

    text: str
    spans: list[tuple[int, int]]


class Example(NamedTuple):
    """The tokens of a conversation."""

    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_]  # True for the assistant's tokens
    merged: int  # tokens that are the assistant's only in part, and are not learned


_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_PROBE = [
    {"role": "user", "content": "First question"},
    {"role": "assistant", "content": "First answer"},
    {"role": "user", "content": "Second question"},
    {"role": "assistant", "content": "Second answer"},
]


@final
class ChatFormat:
    """A tokenizer with its chat template: renders conversations, and finds the assistant's tokens.

    These are the words of each answer and the token that ends its turn, without the header of the turn. If
    the template marks them by {% generation %}, its marks are used. If not, an answer begins where the
    generation prompt ends, and ends with the next special token that ends a turn.

    Arguments:
        tokenizer: one of transformers, backed by the tokenizers library.
        template: Jinja text in place of the tokenizer's own chat template.
    """

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        with needed_for("a chat template"):
            from tokenizers import Tokenizer
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"{type(tokenizer).__name__} is not backed by the tokenizers library")
        if template is None and not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; give one, or take the model's chat version")
        self.template: str = template or tokenizer.get_chat_template()
        self.is_marked = _MARK.search(self.template) is not None
        self._named: dict[str, Any] = tokenizer.special_tokens_map
        specials = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.control = re.compile("|".join(map(re.escape, specials)) or "(?!)")
        described: str = tokenizer.backend_tokenizer.to_str()
        self._tokenizer = Tokenizer.from_str(described)  # a copy, without settings of earlier calls
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocabulary = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.fingerprint = hashlib.sha256(
            json.dumps([self.template, described, self._named]).encode()
        ).hexdigest()
        written = self._write(_PROBE)[0].rstrip()
        self.end_of_turn = max((s for s in specials if written.endswith(s)), key=len, default="")
        self._check_probe()

    def _check_probe(self) -> None:
        text, spans = self.render(_PROBE)
        words = [text[start:end] for start, end in spans]
        learned = "".join(words)
        ok = "question" not in learned and "First answer" in learned and "Second answer" in learned
        if not self.is_marked and self._write(_PROBE[:1]) == self._write(_PROBE[:1], asks=True):
            # Without a generation prompt, a header would count as the assistant's words.
            ok = ok and words[0].strip().startswith("First answer")
        if not ok:
            raise ValueError(
                "the assistant's words cannot be found with this chat template: in a test conversation it "
                f"marks {words}; use one with a generation prompt, or with {{% generation %}} around them"
            )

    def _write(self, messages: list[Message], *, asks: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """Return the conversation as text, and the spans that the template marks."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            written: Any = render_jinja_template(
                conversations=[messages],
                chat_template=self.template,
                return_assistant_tokens_mask=self.is_marked,
                add_generation_prompt=asks,
                **self._named,
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template fails: {error}") from error
        texts, marks = written
        return texts[0], marks[0] if self.is_marked else []

    def render(self, messages: list[Message]) -> Rendered:
        """Return the text of a conversation, with the assistant's spans."""
        text, spans = self._write(messages)
        text.encode()  # raises for half of a character, as JSON can write it: "\\ud800"
        if not self.is_marked:
            answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
            spans = [self._span(text, messages, number) for number in answers]
        return Rendered(text, spans)

    def _span(self, text: str, messages: list[Message], number: int) -> tuple[int, int]:
        start = self._beginning(text, messages[:number], asks=True)
        if not self.end_of_turn:
            return start, self._beginning(text, messages[: number + 1])
        # Rendering up to this answer would not do: Qwen3 adds <think> to the last answer only.
        end = text.find(self.end_of_turn, start)
        if end < 0:
            raise ValueError(f"the chat template does not end message {number + 1} by {self.end_of_turn}")
        return start, end + len(self.end_of_turn)

    def _beginning(self, text: str, messages: list[Message], *, asks: bool = False) -> int:
        """Return how many characters of a text its first messages take."""
        written, _ = self._write(messages, asks=asks)
        if not text.startswith(written):
            raise ValueError(
                "the assistant's words cannot be found: the chat template writes the first "
                f"{len(messages)} messages alone differently than in the whole conversation; use one that "
                "marks the words by {% generation %}"
            )
        return len(written)

    def tokenize(self, conversations: Sequence[Rendered]) -> list[Example]:
        """Return the tokens of conversations, and which of them are learned."""
        found = self._tokenizer.encode_batch([text for text, _ in conversations], add_special_tokens=False)
        return [_example(*both) for both in zip(found, (spans for _, spans in conversations), strict=True)]


def _example(encoding: Any, spans: list[tuple[int, int]]) -> Example:
    offsets = encoding.offsets  # (begin, end) of each token in the text
    learned, merged = np.zeros(len(offsets), dtype=np.bool_), 0
    for start, end in spans:
        inside = bisect_left(offsets, start, key=_BEGIN), bisect_right(offsets, end, key=_END)
        touched = bisect_right(offsets, start, key=_END), bisect_left(offsets, end, key=_BEGIN)
        learned[slice(*inside)] = True
        merged += inside[0] - touched[0] + touched[1] - inside[1]
    learned[:1] = False  # nothing predicts it
    return Example(np.array(encoding.ids, dtype=np.int32), learned, merged)


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

    @property
    def padding(self) -> float:
        """The share of places that hold no token."""
        return 1 - self.tokens / self.places


def prepare_chat(
    rows: Rows,
    form: ChatFormat,
    folder: Path,
    *,
    source: Mapping[str, Any],
    length: int,
    progress: Callable[[int, int], None] = lambda conversations, tokens: None,
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
        progress: called with the numbers of conversations and tokens so far.
    """
    if length < 2:
        raise ValueError(f"Invalid length of a sample: {length!r}; allowed: 2 or more")
    settings = {"length": length, "chat_format": form.fingerprint, "source": json.loads(json.dumps(source))}
    folder = Path(folder).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        samples = open_chat(folder)
        if other := [key for key, value in settings.items() if samples.manifest.get(key) != value]:
            raise ValueError(f"{folder} was made with another {', '.join(other)}; choose another folder")
        return samples
    with new_folder(folder) as made:
        path = made / "samples.bin"
        report = _write_samples(rows, form, path, length, progress)
        content = {"format": FORMAT, **settings, "vocabulary": form.vocabulary, "sha256": sha256_of(path)}
        content["report"] = asdict(report)
        write_atomically(made / "manifest.json", json.dumps(content, indent=1).encode())
    return open_chat(folder)


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

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.manifest, self._path = manifest, path
        self.report = ChatReport(**manifest["report"])
        self.length: int = manifest["length"]
        self.vocabulary: int = manifest["vocabulary"]
        self._rows = np.memmap(path, dtype=_INT32, mode="r", shape=(len(self), 3, self.length))

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatSamples, (self._path, self.manifest)  # a worker process maps the file itself

    @property
    def fingerprint(self) -> str:
        """The sha256 of the samples; it does not depend on their source."""
        content = [self.length, self.vocabulary, self.manifest["sha256"]]
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


def open_chat(folder: Path, *, verify: bool = False) -> ChatSamples:
    """Open prepared conversations, after a check of their manifest and the size of their file.

    Arguments:
        folder: what `prepare_chat` wrote.
        verify: check the sha256 too, which reads the whole file.
    """
    folder = Path(folder).absolute()
    try:
        manifest = json.loads(plain_file(folder, "manifest.json").read_bytes())
        needed = 3 * ChatReport(**manifest["report"]).samples * manifest["length"] * _INT32.itemsize
        known = {name: manifest[name] for name in ("format", "vocabulary", "sha256")}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder} holds no prepared conversations ({error!r})") from error
    if known["format"] != FORMAT:
        raise ValueError(f"{folder}: format {known['format']!r}; this version reads {FORMAT}")
    path = plain_file(folder, "samples.bin")
    if path.stat().st_size != needed:
        raise ValueError(f"{path} has {path.stat().st_size} bytes instead of {needed}")
    if verify and sha256_of(path) != known["sha256"]:
        raise ValueError(f"{path} has changed since it was prepared: its sha256 is not {known['sha256']}")
    return ChatSamples(path, manifest)
