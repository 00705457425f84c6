"""Vocabularies: trained, read from files, taken from transformers; the same text gives the same tokens."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import tokenizers
from transformers import AutoTokenizer

from paceline.lm.vocabulary import open_vocabulary, train_vocabulary, vocabulary_of

pytestmark = pytest.mark.slow

TEXT = ["the quick brown fox jumps over the lazy dog", "the dog and the fox", "Ünïcode € 𝄞\n\ttabs"] * 3
TRICKY = [
    "",
    " ",
    "the fox",
    " leading and trailing ",
    "<|endoftext|>",
    "never seen: Ελληνικά 中文 \x00\x7f",
    "a\r\nb\tc",
]


@pytest.fixture(scope="module")
def trained():
    return train_vocabulary(TEXT, size=300)


def test_a_trained_vocabulary_has_its_size_and_its_end(trained):
    assert trained.size == 300
    assert trained.decode([trained.end_of_text]) == "<|endoftext|>"
    assert all(0 <= token < 300 for tokens in trained.encode(TEXT + TRICKY) for token in tokens)


def test_every_text_survives(trained):
    assert [trained.decode(tokens) for tokens in trained.encode(TRICKY)] == TRICKY


def test_frequent_words_are_one_token_and_bytes_are_the_last_resort(trained):
    ids = trained.encode([" the", "𝄞𝄞"])
    assert len(ids[0]) == 1
    assert len(train_vocabulary(["plain text twice"] * 2, size=270).encode(["𝄞"])[0]) == 4


def test_text_is_never_taken_for_the_end_of_a_document(trained):
    (tokens,) = trained.encode(["a<|endoftext|>b"])
    assert trained.end_of_text not in tokens
    assert trained.decode(tokens) == "a<|endoftext|>b"


def test_training_is_the_same_in_every_process(trained):
    code = (
        "from paceline.lm.vocabulary import train_vocabulary;"
        f"print(train_vocabulary({TEXT!r}, size=300).fingerprint)"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": seed},
        )
        assert done.stdout == trained.fingerprint + "\n"


def test_other_documents_or_another_size_are_another_vocabulary(trained):
    assert train_vocabulary(TEXT, size=299).fingerprint != trained.fingerprint
    assert train_vocabulary(TEXT[:-1], size=300).fingerprint != trained.fingerprint
    assert open_vocabulary("bpe:300", iter(TEXT)).fingerprint == trained.fingerprint


@pytest.mark.parametrize("size", [0, 256])
def test_a_vocabulary_holds_at_least_all_bytes(size):
    with pytest.raises(ValueError, match="allowed: 257"):
        open_vocabulary(f"bpe:{size}", TEXT)


def test_there_must_be_text_to_train_on():
    with pytest.raises(ValueError, match="no text to train"):
        open_vocabulary("bpe:300")


# --- Files ----------------------------------------------------------------------------------------


def test_saved_and_opened(trained, tmp_path):
    trained.save(tmp_path / "a")
    for where in (tmp_path / "a", str(tmp_path / "a"), tmp_path / "a/tokenizer.json"):
        again = open_vocabulary(where)
        assert again.encode(TRICKY) == trained.encode(TRICKY)
        assert (again.size, again.end_of_text) == (300, trained.end_of_text)
        assert again.fingerprint == trained.fingerprint


@pytest.mark.parametrize("names", [("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")])
def test_the_two_files_of_gpt2(trained, tmp_path, names):
    trained.tokenizer.model.save(str(tmp_path))
    (tmp_path / "vocab.json").rename(tmp_path / names[0])
    (tmp_path / "merges.txt").rename(tmp_path / names[1])
    found = open_vocabulary(tmp_path)
    assert found.encode(TRICKY) == trained.encode(TRICKY)
    assert found.end_of_text == trained.end_of_text


GPT2 = os.environ.get("PACELINE_GPT2")


@pytest.mark.skipif(not GPT2, reason="PACELINE_GPT2 names no folder with encoder.json and vocab.bpe")
def test_gpt2_itself():
    vocabulary = open_vocabulary(GPT2)
    assert vocabulary.encode(["Hello world"]) == [[15496, 995]]
    assert (vocabulary.size, vocabulary.end_of_text) == (50257, 50256)


def test_the_end_is_the_one_the_folder_names(trained, tmp_path):
    trained.tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = tmp_path / "tokenizer_config.json"
    for end in ("the", {"content": "the", "special": True}):
        settings.write_text(json.dumps({"eos_token": end}))
        found = open_vocabulary(tmp_path)
        assert found.decode([found.end_of_text]) == "the" != "<|endoftext|>"
        assert found.fingerprint != trained.fingerprint
    for named in ({}, {"eos_token": None}):
        settings.write_text(json.dumps(named))
        assert open_vocabulary(tmp_path).end_of_text == trained.end_of_text
    settings.write_text('{"eos_token": "no such token"}')
    with pytest.raises(ValueError, match=r"no token that ends a text; looked for no such token"):
        open_vocabulary(tmp_path)
    settings.write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json, line 1, column 2: this is no JSON"):
        open_vocabulary(tmp_path)


def test_settings_of_a_file_that_would_lose_text_are_dropped(trained, tmp_path):
    odd = tokenizers.Tokenizer.from_str(trained.tokenizer.to_str())
    odd.enable_truncation(2)
    odd.enable_padding(length=20)
    odd.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", trained.end_of_text)]
    )
    odd.save(str(tmp_path / "tokenizer.json"))
    assert open_vocabulary(tmp_path).encode(TEXT) == trained.encode(TEXT)


def test_gaps_between_ids_count(tmp_path):
    model = tokenizers.models.WordLevel({"a": 0, "</s>": 7}, unk_token="a")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    assert open_vocabulary(tmp_path).size == 8


def test_what_is_no_vocabulary_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no vocabulary; looked for tokenizer\.json"):
        open_vocabulary(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 5}')
    with pytest.raises(ValueError, match=r"tokenizer.json: not a tokenizer"):
        open_vocabulary(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("x y z\n")
    with pytest.raises(ValueError, match=r"merges.txt: not a tokenizer"):
        open_vocabulary(tmp_path)


# --- The hub and transformers ---------------------------------------------------------------------


def test_a_name_of_the_hub(trained, tmp_path, monkeypatch):
    trained.save(tmp_path)
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append(name)
        assert all(pattern.endswith((".json", ".txt", ".bpe")) for pattern in allow_patterns)  # no code
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    assert open_vocabulary("gpt2").fingerprint == open_vocabulary("owner/name-1.5").fingerprint
    assert asked == ["gpt2", "owner/name-1.5"]
    for path in ("./gpt2", "/no/such/folder", "~/x", "a/b/c", "gpt2.json", "../x", "bpe:", "bpe:x", ""):
        with pytest.raises(FileNotFoundError, match=r"no vocabulary|holds no"):
            open_vocabulary(path)
    assert len(asked) == 2


def test_a_name_the_hub_does_not_know(monkeypatch):
    def snapshot_download(name, allow_patterns):
        raise OSError("404")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    with pytest.raises(FileNotFoundError, match=r"no vocabulary nobody/nothing: .*\(404\)"):
        open_vocabulary("nobody/nothing")


def test_transformers_reads_what_was_saved_and_its_tokenizer_is_left_alone(trained, tmp_path):
    trained.save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token_id == trained.end_of_text
    assert tokenizer(TEXT)["input_ids"] == trained.encode(TEXT)
    marked = tokenizer("a<|endoftext|>")["input_ids"]
    found = vocabulary_of(tokenizer)
    assert found.encode(TRICKY) == trained.encode(TRICKY)
    assert found.fingerprint == trained.fingerprint and found.end_of_text == trained.end_of_text
    assert tokenizer("a<|endoftext|>")["input_ids"] == marked != found.encode(["a<|endoftext|>"])[0]


def test_a_tokenizer_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="SimpleNamespace is not backed"):
        vocabulary_of(SimpleNamespace())
