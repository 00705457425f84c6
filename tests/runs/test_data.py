"""Data by their names: what changes while it is read is refused; the chat template that has a name."""

import itertools
import json
import shutil

import pytest
from tiny import write_chats, write_model, write_text

from paceline.lm import shards
from paceline.lm.chat import ChatFormat
from paceline.lm.pretrained import load_tokenizer
from paceline.runs import data
from paceline.runs.config import ConfigError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tokenizer(tmp_path):
    return load_tokenizer(write_model(tmp_path / "model"))


def silent(text):
    pass


def test_text_that_is_written_while_it_is_read_is_refused_and_leaves_no_cache(tmp_path, cache):
    text = write_text(tmp_path / "text.txt", paragraphs=60)

    def write_more(said):  # its hash is known by then
        with text.open("a") as file:
            file.write("more\n\n")

    def prepared(tell):
        return data.prepare_text((str(text),), (), "bpe:300", "gpt2", tell)

    with pytest.raises(ConfigError, match=r"text\.txt was changed while it was read"):
        prepared(write_more)
    assert not list(cache.rglob("manifest.json"))
    assert prepared(silent).training.count > 0


def test_text_that_was_other_for_a_while_is_in_no_tokens(tmp_path, cache, monkeypatch):
    """What is saved of an interrupted preparation is of the text that was hashed."""
    monkeypatch.setattr(shards, "_SAVE", 1)
    monkeypatch.setattr(shards, "_BATCH", 1)
    folder, vocabulary = tmp_path / "texts", str(write_model(tmp_path / "model"))
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.txt").write_text("\n\n".join(f"{name}: paragraph {i} of all" for i in range(900)))
    before = (folder / "b.txt").read_bytes()
    real, calls = shards._encoded, itertools.count()

    def encoded(*arguments):
        if next(calls) == 0:
            (folder / "b.txt").write_bytes(before.replace(b"of all", b"POISON"))
        return real(*arguments)

    def prepared():
        text = data.prepare_folder([str(folder)], vocabulary, tmp_path / "out", silent)
        return text.training.fingerprint, text.held_out.fingerprint

    with monkeypatch.context() as patch:
        patch.setattr(shards, "_encoded", encoded)
        with pytest.raises(ConfigError, match="was changed while it was read"):
            prepared()
    (folder / "b.txt").write_bytes(before)
    resumed = prepared()
    shutil.rmtree(tmp_path / "out")
    assert prepared() == resumed


def test_conversations_that_are_written_while_they_are_read_are_refused(
    tmp_path, cache, tokenizer, monkeypatch
):
    chats = write_chats(tmp_path / "chat.jsonl", count=80)
    real = data.sha256_of
    monkeypatch.setattr(data, "sha256_of", lambda path: (real(path), path.write_bytes(path.read_bytes()))[0])
    with pytest.raises(ConfigError, match=r"chat\.jsonl was changed while it was read"):
        data.prepare_chats((str(chats),), (), tokenizer, 64, silent)
    assert not list(cache.rglob("manifest.json"))


def test_conversations_in_parquet_are_those_of_lines(tmp_path, cache, tokenizer):
    pyarrow = pytest.importorskip("pyarrow")
    chats, table = write_chats(tmp_path / "chat.jsonl", count=80), tmp_path / "chat.parquet"
    rows = [json.loads(line) for line in chats.read_text(encoding="utf-8").splitlines()]
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), table)
    data.check_chat_files((str(table),))
    found = [data.prepare_chats((str(path),), (), tokenizer, 64, silent) for path in (chats, table)]
    for part in ("training", "held_out"):
        ours, theirs = (getattr(one, part) for one in found)
        assert ours.fingerprint == theirs.fingerprint and len(ours) > 0


def test_the_template_chatml(tokenizer):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    own = ChatFormat(tokenizer).render(messages)
    tokenizer.chat_template = data.read_template("chatml")
    assert ChatFormat(tokenizer).render(messages) == own  # the tiny model's own template is ChatML too
    text, ((begin, end),) = own
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"
    assert text[begin:end] == "Ho<|im_end|>"
    assert data.read_template(None) is None
    with pytest.raises(ConfigError, match="cannot read the chat template nowhere"):
        data.read_template("nowhere")
