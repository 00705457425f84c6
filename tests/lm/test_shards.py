"""Shards: the right tokens in the right place, also after kills; nothing damaged is read."""

import errno
import hashlib
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.lm import files, shards
from paceline.lm.files import Damaged
from paceline.lm.manifest import write_manifest
from paceline.lm.shards import Windows, open_tokens, prepare

pytestmark = pytest.mark.slow


class Letters:
    """A token is a byte; a document ends with 256, or with more in a larger vocabulary."""

    def __init__(self, size=257):
        self.size, self.end_of_text, self.fingerprint = size, size - 1, f"letters {size}"
        self.seen = []

    def encode(self, texts):
        self.seen += texts
        return [list(text.encode()) for text in texts]


def make_documents(number=60, seed=0):
    draw = random.Random(seed)
    return ["".join(draw.choices("abcdefgh ", k=draw.randint(1, 80))) for _ in range(number)]


DOCUMENTS = make_documents()
TOKENS = [token for text in DOCUMENTS for token in (*text.encode(), 256)]
SOURCE = {"name": "test", "files": [1, 2]}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(shards, "_BATCH", 100)


def prepared(folder, documents=DOCUMENTS, vocabulary=None, **settings):
    settings = {"source": SOURCE, "shard_tokens": 500} | settings
    return prepare(documents, vocabulary or Letters(), folder, **settings)


def contents(folder):
    apart = ("lock", "checked")
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in apart}


# --- Preparing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size, dtype, item", [(257, "uint16", 2), (2**16, "uint16", 2), (2**16 + 1, "uint32", 4)]
)
def test_shards_hold_every_document_and_its_end(tmp_path, size, dtype, item):
    tokens = prepared(tmp_path, vocabulary=Letters(size))
    expected = [size - 1 if token == 256 else token for token in TOKENS]
    assert tokens.count == len(TOKENS) and tokens.documents == len(DOCUMENTS)
    assert tokens.counts == [500] * 4 + [len(TOKENS) - 2000]
    data = b"".join((tmp_path / name).read_bytes() for name in tokens.files)
    assert data == b"".join(token.to_bytes(item, "little") for token in expected)
    assert (tokens.dtype, tokens.vocabulary) == (dtype, size)
    assert tokens == open_tokens(tmp_path, verify=True)


def test_the_size_of_batches_leaves_no_trace(tmp_path, monkeypatch):
    prepared(tmp_path / "one")
    monkeypatch.setattr(shards, "_BATCH", 10**6)
    prepared(tmp_path / "two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_a_document_may_be_longer_than_several_shards(tmp_path):
    tokens = prepared(tmp_path, ["a" * 1234, "b"])
    assert tokens.counts == [500, 500, 237]
    whole = np.concatenate([np.fromfile(tmp_path / name, "<u2") for name in tokens.files])
    assert whole.tolist() == [97] * 1234 + [256, 98, 256]


def test_shards_that_end_with_the_last_document(tmp_path):
    tokens = prepared(tmp_path, ["a" * 499, "b" * 499])
    assert tokens.counts == [500, 500]
    assert sorted(contents(tmp_path)) == ["manifest.json", "tokens-00000.bin", "tokens-00001.bin"]


def test_progress_is_told(tmp_path):
    told = []
    tokens = prepared(tmp_path, progress=lambda *done: told.append(done))
    assert told == sorted(told) and len(told) > 10
    assert told[-1] == (len(DOCUMENTS), tokens.count)
    assert all(done == len([*"".join(DOCUMENTS[:number])]) + number for number, done in told)


def test_empty_documents_leave_no_token(tmp_path):
    assert prepared(tmp_path, ["", "a", ""]).count == 2


@pytest.mark.parametrize("documents", [[], ["", ""]])
def test_nothing_to_prepare_is_refused(tmp_path, documents):
    with pytest.raises(ValueError, match="no documents to prepare"):
        prepared(tmp_path, documents)
    with pytest.raises(FileNotFoundError, match="holds no prepared tokens"):
        open_tokens(tmp_path)


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path):
    class Wrong(Letters):
        def encode(self, texts):
            return [[1, 300] for _ in texts]

    with pytest.raises(ValueError, match="has 257 tokens but gave 300 for a text"):
        prepared(tmp_path, vocabulary=Wrong())


def test_the_size_of_a_shard_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="shard_tokens=0"):
        prepared(tmp_path, shard_tokens=0)


# --- Going on -------------------------------------------------------------------------------------


def test_finished_work_is_not_done_again(tmp_path):
    first = prepared(tmp_path)
    before = contents(tmp_path)
    assert prepared(tmp_path, documents=iter(())) == first
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "change, words",
    [
        ({"source": {"name": "other"}}, r"source \{.*'test'\} → \{'name': 'other'\}"),
        (
            {"vocabulary": Letters(300)},
            "vocabulary 257 → 300; end_of_text 256 → 299; tokenizer 'letters 257' →",
        ),
        ({"shard_tokens": 400}, "shard_tokens 500 → 400"),
    ],
)
def test_a_folder_of_other_data_is_refused_and_left_alone(tmp_path, change, words):
    prepared(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=f"was prepared from something else; .*{words}"):
        prepared(tmp_path, **change)
    assert contents(tmp_path) == before


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(FileNotFoundError, match=r"holds no prepared tokens: no manifest\.json"):
        prepared(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_second_of_two_preparers_waits(tmp_path):
    told, ended = [], []

    def documents():
        """While the first reads, the second comes."""
        other.start()
        while not told:
            time.sleep(0.01)
        yield from DOCUMENTS

    def second():
        ended.append(prepared(tmp_path / "a", iter(()), tell=told.append))

    other = threading.Thread(target=second)
    first = prepared(tmp_path / "a", documents())
    other.join(20)
    assert ended == [first] and told == ["another process prepares the same data; waiting for it"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_interrupted_preparation_resumes(tmp_path, monkeypatch):
    """Also one of other text in the same place begins anew, and one whose files have changed since."""
    monkeypatch.setattr(shards, "_SAVE", 1)
    monkeypatch.setattr(shards, "_BATCH", 1)
    whole = prepared(tmp_path / "whole", shard_tokens=150)

    def documents(stop=None, skipped=0):
        for number, document in enumerate(DOCUMENTS):
            if number == stop:
                raise KeyboardInterrupt
            read.append(number)
            yield document

    def interrupted(name):
        with pytest.raises(KeyboardInterrupt):
            prepared(tmp_path / name, documents(4), shard_tokens=150)
        return tmp_path / f".tmp-{name}.part"

    told = []
    for name, spoil in (("a", None), ("b", "tokens-00000.bin"), ("c", "saved.json")):
        read = []
        left = interrupted(name)
        if spoil is not None:
            flip(left / spoil, 40)
        told.clear()
        again = prepared(
            tmp_path / name, DOCUMENTS, shard_tokens=150, progress=lambda read, _: told.append(read)
        )
        assert contents(again.folder) == contents(whole.folder) and not left.exists()
        assert told[0] == (5 if spoil is None else 1)
    interrupted("d")
    with pytest.raises(ValueError, match="no documents"):
        prepared(tmp_path / "d", [], source={"other": 1}, shard_tokens=150)


def test_a_full_disk_is_reported_with_the_file_and_can_be_resumed(tmp_path, monkeypatch):
    real, calls = Path.open, count()

    def full(path, mode="r"):
        if mode == "ab" and next(calls) == 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, mode)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(OSError, match=r"No space left on device: '.*tokens-0000\d\.bin'"):
            prepared(tmp_path / "a")
    assert prepared(tmp_path / "a").count == len(TOKENS)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


# --- Kills ----------------------------------------------------------------------------------------

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["paceline.lm.shards", "pytest"])


def killed_at(folder, point):
    """Prepare in a process that kills itself when it touches the folder for the point-th time."""
    touched = count()
    touches = ("open", "os.rename", "os.remove", "os.mkdir")

    def hook(event, arguments):
        if event in touches and str(folder) in str(arguments[0]) and next(touched) == point:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    shards._BATCH = shards._SAVE = 1  # in a process of its own: every document is saved when it comes
    prepared(folder / "a", DOCUMENTS[:6], shard_tokens=150)


def test_killed_at_every_touch_of_the_disk(tmp_path):
    whole = prepared(tmp_path / "whole", DOCUMENTS[:6], shard_tokens=150)
    for point in count(0, 2):
        folder = tmp_path / str(point)
        child = PROCESSES.Process(target=killed_at, args=(folder, point))
        child.start()
        child.join()
        again = prepared(folder / "a", DOCUMENTS[:6], shard_tokens=150)
        assert contents(again.folder) == contents(whole.folder), f"after a kill at touch {point}"
        assert not list(folder.glob(".tmp-*")), "something is left of it"
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
    assert point > 15  # the lock, a folder, 6 documents, 2 shards, the manifest, their sync


# --- Opening --------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Tokens beside a file that nobody may read."""
    (tmp_path / "secret.bin").write_bytes(bytes(1000))
    prepared(tmp_path / "tokens")
    return tmp_path / "tokens"


def change(folder, **fields):
    """Write a manifest that agrees with itself."""
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]
    write_manifest(folder / "manifest.json", manifest | fields)


def flip(path, place, bit=1):
    data = bytearray(path.read_bytes())
    data[place] ^= bit
    path.write_bytes(data)


def refused(folder, words, error=ValueError, **settings):
    with pytest.raises(error, match=words) as raised:
        open_tokens(folder, **settings)
    assert "\n" not in str(raised.value)


def test_a_missing_folder(tmp_path):
    refused(tmp_path / "no", f"{tmp_path}/no holds no prepared tokens: no manifest", FileNotFoundError)


def test_a_flipped_bit_is_found(folder):
    """Before the first opening, in any byte of the manifest and of a file, and in the one that says so."""
    for path in (folder / "manifest.json", folder / "tokens-00000.bin", folder / "tokens-00004.bin"):
        whole = path.read_bytes()
        for place in range(0, len(whole), 9):  # bits 0, 1, 2, …
            (folder / "checked").unlink(missing_ok=True)
            flip(path, place, 1 << place % 8)
            refused(folder, f"{folder}/({path.name}|.*{path.name} is missing)", Damaged)
            path.write_bytes(whole)
    open_tokens(folder)
    for place in range(0, (folder / "checked").stat().st_size, 9):
        flip(folder / "checked", place)
        assert open_tokens(folder).count == len(TOKENS)


def test_content_is_compared_at_the_first_opening_and_after_a_change(folder, monkeypatch):
    hashed, real = [], files.sha256_of
    monkeypatch.setattr(files, "sha256_of", lambda path: hashed.append(path.name) or real(path))
    monkeypatch.setattr("paceline.lm.manifest._LARGE", 1000)
    told = []
    (folder / "checked").unlink()
    for _ in range(2):
        open_tokens(folder, tell=told.append)
        assert told == [f"checking {folder} (0.0 GB), once"] and len(hashed) == 5
    os.utime(folder / "tokens-00003.bin")
    assert open_tokens(folder).count == len(TOKENS) and len(hashed) == 10
    open_tokens(folder, verify=True)
    assert len(hashed) == 15
    when = (folder / "tokens-00003.bin").stat().st_mtime_ns
    flip(folder / "tokens-00003.bin", 77)
    os.utime(folder / "tokens-00003.bin", ns=(when, when))
    refused(folder, r"the content of .*tokens-00003\.bin is not what was written")


def test_a_folder_that_cannot_be_written_is_checked_each_time(folder, monkeypatch):
    (folder / "checked").unlink()
    (folder / "checked").mkdir()
    assert open_tokens(folder) == open_tokens(folder)
    flip(folder / "tokens-00003.bin", 77)
    refused(folder, r"tokens-00003\.bin is not what was written")


@pytest.mark.parametrize("name", ["tokens-00001.bin", "manifest.json"])
def test_a_damaged_cache_is_named_and_prepared_again(folder, tmp_path, name):
    prepared(tmp_path / "whole")
    flip(folder / name, 77)
    before = contents(folder)
    with pytest.raises(Damaged, match=f"{name} is not what was written|{name}, line"):
        prepared(folder)
    assert contents(folder) == before
    told = []
    assert prepared(folder, is_cache=True, tell=told.append).count == len(TOKENS)
    assert len(told) == 1 and name in told[0] and told[0].endswith("it is prepared again")
    assert contents(folder) == contents(tmp_path / "whole")


@pytest.mark.parametrize("size", [0, 1, 998, 999, 1001, 2000, None])
def test_a_shard_of_another_size(folder, size):
    if size is None:
        (folder / "tokens-00001.bin").unlink()
        refused(folder, r"tokens-00001\.bin is missing")
    else:
        os.truncate(folder / "tokens-00001.bin", size)
        refused(folder, rf"tokens-00001\.bin has {size} bytes; 1000 were written")


@pytest.mark.parametrize("name", ["../secret.bin", "/etc/passwd", "link.bin", "down"])
def test_nothing_outside_of_the_folder_is_read(folder, name):
    (folder / "link.bin").symlink_to(folder / "../secret.bin")
    (folder / "down").mkdir()
    data = (folder / "../secret.bin").read_bytes()
    change(folder, files={name: {"bytes": 1000, "sha256": hashlib.sha256(data).hexdigest()}}, tokens=500)
    refused(folder, "not the name of a file|not a regular file")


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "[" * 100_000, "{}", '{"format": 1}', "9" * 5000])
def test_a_manifest_that_is_none(folder, text):
    (folder / "manifest.json").write_text(text)
    refused(folder, r"manifest\.json(, line 1, column \d: this| is no JSON|: format| holds a)", Damaged)


@pytest.mark.parametrize("value", [-1, 1.0, "1", None, True, [], {"a": {}}, {"a": 5}, 10**30])
@pytest.mark.parametrize("key", ["dtype", "vocabulary", "tokenizer", "documents", "tokens", "files"])
def test_a_manifest_with_a_wrong_value(folder, key, value):
    if (key, value) in [("tokenizer", "1"), ("vocabulary", 10**30), ("documents", 10**30)]:
        return  # strange, but a name, or a count
    change(folder, **{key: value})
    refused(folder, r"manifest\.json: ", Damaged)


# --- Windows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 7, 499, 500, 501, 1300, len(TOKENS) - 1])
def test_windows_are_the_tokens_side_by_side(folder, length):
    windows = Windows(open_tokens(folder), length)
    assert (windows.length, windows.vocabulary) == (length, 257)
    assert len(windows) == (len(TOKENS) - 1) // length
    batch = windows.batch(range(len(windows)))
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64 and batch.positions is None
    assert batch.tokens.is_contiguous() and batch.targets.is_contiguous()
    assert batch.tokens.flatten().tolist() == TOKENS[: len(windows) * length]
    assert batch.targets.flatten().tolist() == TOKENS[1 : len(windows) * length + 1]


def test_windows_come_in_the_order_asked_for(folder):
    windows = Windows(open_tokens(folder), 10)
    numbers = np.array([150, 3, 3, 49, 0])
    batch = windows.batch(numbers)
    assert batch.tokens.tolist() == [TOKENS[10 * i : 10 * i + 10] for i in numbers]
    assert windows.batch([]).tokens.shape == (0, 10)


def test_a_window_that_is_not_there(folder):
    windows = Windows(open_tokens(folder), 10)
    for numbers in ([len(windows)], [-1], [0, 10**9]):
        with pytest.raises(IndexError, match=f"allowed: 0 to {len(windows) - 1}"):
            windows.batch(numbers)


def test_too_few_tokens_for_one_window(folder):
    tokens = open_tokens(folder)
    with pytest.raises(
        ValueError, match=f"holds {len(TOKENS)} tokens; .* {len(TOKENS)} needs {len(TOKENS) + 1}"
    ):
        Windows(tokens, len(TOKENS))
    with pytest.raises(ValueError, match="Invalid length of a window: 0"):
        Windows(tokens, 0)


@pytest.mark.parametrize("place", [0, 123, 499])
def test_a_token_that_went_bad_after_opening_is_named(folder, place):
    windows = Windows(open_tokens(folder), 10)
    with (folder / "tokens-00001.bin").open("r+b") as file:
        file.seek(2 * place)
        file.write((300).to_bytes(2, "little"))
    number = (500 + place) // 10
    windows.batch([0, number - 2, number + 1])
    with pytest.raises(
        ValueError, match=rf"tokens-00001\.bin: token 300 at place {place}; allowed: below 257"
    ):
        windows.batch([0, number])


def test_the_fingerprint_is_that_of_tokens_and_length(folder, tmp_path):
    tokens = open_tokens(folder)
    fingerprint = Windows(tokens, 10).fingerprint
    assert len(bytes.fromhex(fingerprint)) == 32
    prepared(tmp_path / "again", source={"name": "elsewhere"})
    assert Windows(open_tokens(tmp_path / "again"), 10).fingerprint == fingerprint
    assert Windows(tokens, 11).fingerprint != fingerprint
    prepared(tmp_path / "other", documents=[*DOCUMENTS[:-1], DOCUMENTS[-1] + "!"])
    assert Windows(open_tokens(tmp_path / "other"), 10).fingerprint != fingerprint
