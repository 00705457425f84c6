"""Conversations: rendered with a chat template, and tokenized. `chat_samples` packs them.

.. code-block:: text

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}
        │ render    <|im_start|>user⏎Hi<|im_end|>⏎<|im_start|>assistant⏎Hello!<|im_end|>⏎
        ▼ learn                                                         ^^^^^^^^^^^^^^^^
"""

import hashlib
import json
import re
import reprlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from paceline.lm.documents import PARQUET, read_parquet, read_rows
from paceline.lm.vocabulary import plain_copy, size_of

ROLES = ("system", "user", "assistant")
_BEGIN, _END = itemgetter(0), itemgetter(1)

Message = dict[str, str]

# --- Rows -----------------------------------------------------------------------------------------


def chat_rows(*paths: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of JSON lines and parquet files, each with its place for error messages."""
    for path in paths:
        is_parquet = path.name.lower().endswith(PARQUET)
        for number, row in read_parquet(path, "messages") if is_parquet else read_rows(path):
            yield f"{path}, {'row' if is_parquet else 'line'} {number}", row


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


_PROBE = [
    {"role": "user", "content": "First question"},
    {"role": "assistant", "content": "First answer"},
    {"role": "user", "content": "Second question"},
    {"role": "assistant", "content": "Second answer"},
]


@final
class ChatFormat:
    """A tokenizer with its chat template: renders conversations, and finds the assistant's tokens.

    These are the words of each answer and the token that ends its turn, without the header of the turn. An
    answer begins where the generation prompt ends, and ends with the next special token that ends a turn.

    Arguments:
        tokenizer: one of transformers, backed by the tokenizers library.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"{type(tokenizer).__name__} is not backed by the tokenizers library")
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; give one, or take the model's chat version")
        self.template: str = tokenizer.get_chat_template()
        self._named: dict[str, Any] = tokenizer.special_tokens_map
        specials = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.control = re.compile("|".join(map(re.escape, specials)) or "(?!)")
        described: str = tokenizer.backend_tokenizer.to_str()
        self._tokenizer = plain_copy(tokenizer.backend_tokenizer)  # without settings of earlier calls
        self.vocabulary = size_of(self._tokenizer)
        self.fingerprint = hashlib.sha256(
            json.dumps([self.template, described, self._named]).encode()
        ).hexdigest()
        written = self._write(_PROBE).rstrip()
        self.end_of_turn = max((s for s in specials if written.endswith(s)), key=len, default="")
        self._check_probe()

    def _check_probe(self) -> None:
        text, spans = self.render(_PROBE)
        words = [text[start:end] for start, end in spans]
        learned = "".join(words)
        ok = "question" not in learned and "First answer" in learned and "Second answer" in learned
        if self._write(_PROBE[:1]) == self._write(_PROBE[:1], asks=True):
            # Without a generation prompt, a header would count as the assistant's words.
            ok = ok and words[0].strip().startswith("First answer")
        if not ok:
            raise ValueError(
                "the assistant's words cannot be found with this chat template: in a test conversation it "
                f"marks {words}; use one with a generation prompt"
            )

    def _write(self, messages: list[Message], *, asks: bool = False) -> str:
        """Return the conversation as text."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            written: Any = render_jinja_template(
                conversations=[messages],
                chat_template=self.template,
                add_generation_prompt=asks,
                **self._named,
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template fails: {error}") from error
        return str(written[0][0])

    def render(self, messages: list[Message]) -> Rendered:
        """Return the text of a conversation, with the assistant's spans."""
        text = self._write(messages)
        text.encode()  # raises for half of a character, as JSON can write it: "\\ud800"
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        return Rendered(text, [self._span(text, messages, number) for number in answers])

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
        written = self._write(messages, asks=asks)
        if not text.startswith(written):
            raise ValueError(
                "the assistant's words cannot be found: the chat template writes the first "
                f"{len(messages)} messages alone differently than in the whole conversation"
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
