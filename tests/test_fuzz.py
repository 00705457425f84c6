"""Bytes from outside: whatever they are, they give a result or a ValueError or OSError of one line."""

import gzip
import json
import lzma
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.lm import checkpoint
from paceline.lm.chat import chat_rows, messages_of
from paceline.lm.chat_samples import ChatReport, open_chat
from paceline.lm.documents import open_source
from paceline.lm.files import describe
from paceline.lm.manifest import sealed
from paceline.lm.shards import Windows, open_tokens, prepare
from paceline.lm.vocabulary import open_vocabulary

sys.path.append(str(Path(__file__).parent / "lm"))
from test_shards import Letters

pytestmark = pytest.mark.slow
BOUNDED = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
JSON = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)
CHANGES = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=4)


@contextmanager
def plain_errors():
    try:
        yield
    except (ValueError, OSError) as error:
        assert str(error) and "\n" not in str(error), repr(error)


def changed(data, changes, end):
    """Bytes with others in places, cut off at an end."""
    data = bytearray(data)
    for place, value in changes:
        if data:
            data[place % len(data)] = value
    return bytes(data[: end % (len(data) + 1) or None])


def spoiled(draw, content):
    """JSON in which one value, somewhere inside, is another one, or is missing."""
    if not isinstance(content, dict) or not content or draw(st.booleans()):
        return draw(JSON)
    key = draw(st.sampled_from(sorted(content)))
    if draw(st.integers(0, 4)) == 0:
        return {name: value for name, value in content.items() if name != key}
    return content | {key: spoiled(draw, content[key])}


# --- Folders with manifests -----------------------------------------------------------------------------


def read_tokens(folder):
    windows = Windows(open_tokens(folder), 3)
    windows.batch(range(min(5, len(windows))))


def read_chats(folder):
    samples = open_chat(folder)
    samples.batch(range(min(5, len(samples))))


def read_checkpoint(folder):
    checkpoint.load_facts(folder)
    checkpoint.load(folder)


def tokens(folder):
    prepare(["some text", "more"], Letters(), folder, source={"a": [1]})


def chats(folder):
    folder.mkdir()
    (folder / "samples.bin").write_bytes(bytes(2 * 3 * 8 * 4))
    report = dict.fromkeys(ChatReport.__slots__, 1) | {"samples": 2}
    content = {"length": 8, "vocabulary": 9, "report": report, "files": describe([folder / "samples.bin"])}
    (folder / "manifest.json").write_text(json.dumps(sealed(content)))


def saved(folder):
    state = {
        "live": {"w": torch.ones(2)},
        "optimizer": {"w": {"step": 1.0}},
        "state": {"groups": [{"lr": 1}]},
    }
    checkpoint.save(folder.parent, 1, state, {"a": (1, 2.0)}).rename(folder)


@pytest.mark.parametrize(
    ("make", "read"), [(tokens, read_tokens), (chats, read_chats), (saved, read_checkpoint)]
)
@BOUNDED
@given(data=st.data())
def test_folders(tmp_path_factory, make, read, data):
    folder = tmp_path_factory.mktemp("fuzz") / "folder"
    make(folder)
    read(folder)
    path = data.draw(st.sampled_from(sorted(p for p in folder.iterdir() if p.name != "lock")))
    if path.suffix == ".json" and data.draw(st.booleans()):
        content = json.loads(path.read_text())
        content.pop("sha256", None)
        path.write_text(json.dumps(spoiled(data.draw, content)))
    else:
        path.write_bytes(changed(path.read_bytes(), data.draw(CHANGES), data.draw(st.integers(0, 10**6))))
    if data.draw(st.booleans()):
        (folder / "checked").unlink(missing_ok=True)
    with plain_errors():
        manifest = json.loads((folder / "manifest.json").read_text())
        if isinstance(manifest, dict) and data.draw(st.booleans()):  # it agrees with whatever is there now
            known = manifest.get("files")
            if path.name != "manifest.json" and isinstance(known, dict):
                known |= describe([path])
            manifest.pop("sha256", None)
            (folder / "manifest.json").write_text(json.dumps(sealed(manifest)))
        read(folder)
    shutil.rmtree(folder)


# --- Files of the user ------------------------------------------------------------------------------------

ROWS = b'{"text": "a"}\n{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


@pytest.mark.parametrize(
    "name", [kind + packed for kind in ("a.txt", "a.jsonl") for packed in PACK] + ["a.parquet"]
)
@BOUNDED
@given(changes=CHANGES, end=st.integers(0, 10**6), row=JSON, noise=st.none() | st.binary())
def test_documents_and_conversations(tmp_path, name, changes, end, row, noise):
    path = tmp_path / name
    pack = PACK.get(path.suffix, bytes)
    path.write_bytes(changed(pack(ROWS + json.dumps(row).encode()) if noise is None else noise, changes, end))
    with plain_errors():
        list(open_source(path).documents())
    with plain_errors():
        for where, found in chat_rows(path):
            messages_of(found, where)


@BOUNDED
@given(messages=JSON)
def test_rows_of_any_kind(messages):
    with plain_errors():
        messages_of({"messages": messages}, "here")
    with plain_errors():
        messages_of({"messages": [{"role": messages, "content": messages}]}, "here")


@BOUNDED
@given(data=st.data())
def test_tokenizers(tmp_path, data):
    content = {"eos_token": {"content": "<|endoftext|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(spoiled(data.draw, content)))
    model = {"type": "BPE", "vocab": {"<|endoftext|>": 0, "a": 1}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(spoiled(data.draw, {"version": "1.0", "model": model}))
    )
    with plain_errors():
        open_vocabulary(tmp_path).encode(["a"])
