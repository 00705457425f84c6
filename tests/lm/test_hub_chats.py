"""Conversations of the hub, and the chat template that has a name."""

import json
import sys
from types import SimpleNamespace

import pytest
from tiny import write_chats, write_model

from paceline.lm.chat import ChatFormat
from paceline.lm.pretrained import load_tokenizer
from paceline.runs import data
from paceline.runs.config import ConfigError


@pytest.fixture
def tokenizer(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return load_tokenizer(str(write_model(tmp_path / "model")))


def test_conversations_of_the_hub_are_those_of_a_file(tokenizer, tmp_path, monkeypatch):
    path = write_chats(tmp_path / "chat.jsonl", count=80)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    api = SimpleNamespace(dataset_info=lambda name, revision: SimpleNamespace(sha="c0ffee"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=lambda: api))
    loaded = SimpleNamespace(load_dataset=lambda *words, **settings: iter(rows))
    monkeypatch.setitem(sys.modules, "datasets", loaded)
    data.check_chat_files(("hf:owner/chats",))
    hub = data.prepare_chats(("hf:owner/chats",), (), tokenizer, 64, lambda text: None)
    file = data.prepare_chats((str(path),), (), tokenizer, 64, lambda text: None)
    for one, other in ((hub.training, file.training), (hub.held_out, file.held_out)):
        assert len(one) == len(other) > 0
        same = one.batch(range(len(one))), other.batch(range(len(other)))
        assert same[0].tokens.equal(same[1].tokens) and same[0].targets.equal(same[1].targets)


def test_the_template_chatml(tokenizer):
    own = ChatFormat(tokenizer).render(
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    )
    tokenizer.chat_template = None
    named = ChatFormat(tokenizer, data.read_template("chatml"))
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    assert named.render(messages) == own  # the tiny model's own template is ChatML too
    text, ((begin, end),) = named.render(messages)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"
    assert text[begin:end] == "Ho<|im_end|>"
    assert data.read_template(None) is None
    with pytest.raises(ConfigError, match="cannot read the chat template nowhere"):
        data.read_template("nowhere")
