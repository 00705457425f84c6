"""Bytes from outside: whatever they are, they give a result or a ValueError or OSError of one line."""

import gzip
import json
from contextlib import contextmanager

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

pytestmark = pytest.mark.slow
# Each example overwrites the files of the one before.
BOUNDED = settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
JSON = st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=6), inner))
BYTE = st.tuples(st.integers(0, 10**6), st.integers(0, 255))
CHANGES = st.tuples(st.lists(BYTE), st.floats(0, 1))
ROWS = b'{"text": "a"}\n{"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}\n'


@contextmanager
def one_line():
    try:
        yield
    except (ValueError, OSError) as error:
        assert str(error) and "\n" not in str(error), repr(error)


def changed(data, changes):
    """Bytes with others in some places, cut off somewhere."""
    data, (places, end) = bytearray(data), changes
    for place, value in places if data else ():
        data[place % len(data)] = value
    return bytes(data[: round(end * len(data))])


def spoiled(draw, content):
    """JSON in which one value, somewhere inside, is another one."""
    if not isinstance(content, dict) or not content or draw(st.integers(0, 3)) == 0:
        return draw(JSON)
    key = draw(st.sampled_from(sorted(content)))
    return content | {key: spoiled(draw, content[key])}


def tokens(folder):
    vocabulary = open_vocabulary("bpe:260", ["some text"] * 2)
    prepare(["some text", "more"], vocabulary, folder, source={"a": [1]}, is_cache=True)


def chats(folder):
    folder.mkdir()
    (folder / "samples.bin").write_bytes(bytes(2 * 3 * 8 * 4))
    report = dict.fromkeys(ChatReport.__slots__, 1) | {"samples": 2}
    content = {"length": 8, "vocabulary": 9, "report": report, "files": describe([folder / "samples.bin"])}
    (folder / "manifest.json").write_text(json.dumps(sealed(content)))


def saved(folder):
    state = {"live": {"w": torch.ones(2)}, "optimizer": {"w": {"step": 1.0}}, "state": {"random": [1]}}
    checkpoint.save(folder.parent, 1, state, {"a": (1, 2.0)}).rename(folder)


READERS = {
    tokens: lambda folder: Windows(open_tokens(folder), 3).batch([0, 1]),
    chats: lambda folder: open_chat(folder).batch([0]),
    saved: lambda folder: (checkpoint.load_facts(folder), checkpoint.load(folder)),
}


@pytest.mark.parametrize("make", READERS)
@BOUNDED
@given(data=st.data())
def test_folders_with_a_manifest(tmp_path_factory, make, data):
    """A file is damaged, or JSON is another; the manifest agrees with what is there now, or not."""
    folder = tmp_path_factory.mktemp("fuzz") / "folder"
    make(folder)
    READERS[make](folder)
    path = data.draw(st.sampled_from(sorted(p for p in folder.iterdir() if p.name != "lock")))
    if path.suffix == ".json" and data.draw(st.booleans()):
        path.write_text(json.dumps(spoiled(data.draw, json.loads(path.read_text()))))
    else:
        path.write_bytes(changed(path.read_bytes(), data.draw(CHANGES)))
    with one_line():
        manifest = json.loads((folder / "manifest.json").read_text())
        if isinstance(manifest, dict) and data.draw(st.booleans()):
            manifest.pop("sha256", None)
            if isinstance(manifest.get("files"), dict) and path.name in manifest["files"]:
                manifest["files"] |= describe([path])
            (folder / "manifest.json").write_text(json.dumps(sealed(manifest)))
    for read in READERS.values():
        with one_line():
            read(folder)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.txt.xz", "a.parquet"])
@BOUNDED
@given(changes=CHANGES, row=JSON, data=st.just(ROWS) | st.binary())
def test_documents_and_conversations(tmp_path, name, changes, row, data):
    path, data = tmp_path / name, data + b"\n" + json.dumps({"messages": [row]}).encode()
    path.write_bytes(changed(gzip.compress(data) if path.suffix == ".gz" else data, changes))
    with one_line():
        list(open_source(path).documents())
    with one_line():
        _ = [messages_of(found, where) for where, found in chat_rows(path)]


@BOUNDED
@given(data=st.data())
def test_tokenizers(tmp_path, data):
    model = {"type": "BPE", "vocab": {"<|endoftext|>": 0, "a": 1}, "merges": []}
    for name, content in (("tokenizer_config", {"eos_token": {}}), ("tokenizer", {"model": model})):
        (tmp_path / f"{name}.json").write_text(json.dumps(spoiled(data.draw, content)))
    with one_line():
        open_vocabulary(tmp_path).encode(["a"])
