"""Models of transformers in the engine's hands, and folders that plain transformers loads."""

import copy
import json
import os
import socket
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from paceline.lm.gpt import GPT, GPTShape
from paceline.lm.pretrained import Pretrained, export_folder, load_pretrained, separates_examples
from paceline.lm.vocabulary import train_vocabulary

pytestmark = pytest.mark.slow

VOCABULARY = 64
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def make(kind="llama", attention="sdpa", seed=0, **fields):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **fields or SMALL)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def some_tokens(rows=2, length=12, seed=1):
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def tokenizer():
    trained = train_vocabulary(["to be or not to be"] * 4, 260).tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<|endoftext|>")


@pytest.fixture
def folder(tmp_path, tokenizer):
    """A small model as transformers saves it, in bfloat16."""
    make(**SMALL | {"vocab_size": 260}).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def offline(monkeypatch):
    asked = []

    def refuse(*where):
        asked.append(where)
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield
    assert not asked


def edit(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


# --- The adapter ----------------------------------------------------------------------------------


def test_logits_and_names_are_those_of_transformers():
    theirs = make()
    ours = Pretrained(theirs)
    tokens = some_tokens()
    assert torch.equal(ours(tokens), theirs(tokens).logits)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert dict(ours.named_parameters()).keys() == dict(theirs.named_parameters()).keys()
    assert ours.vocabulary == VOCABULARY


def test_what_happens_to_the_adapter_happens_to_the_model():
    theirs = make()
    ours = Pretrained(theirs).to(torch.float64).train()
    assert {p.dtype for p in theirs.parameters()} == {torch.float64}
    assert theirs.training and all(part.training for part in theirs.modules())
    ours.eval()
    assert not any(part.training for part in theirs.modules())
    ours.lm_head = torch.nn.Linear(32, 5, bias=False, dtype=torch.float64)
    assert ours(some_tokens()).shape == (2, 12, 5)


def test_a_copy_is_a_model_of_its_own():
    ours = Pretrained(make())
    other = copy.deepcopy(ours)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not other(some_tokens()).any()
    assert ours(some_tokens()).any()


def test_one_graph_without_breaks():
    ours = Pretrained(make())
    positions = torch.arange(12).remainder(5)[None].expand(2, -1)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    tokens = some_tokens()
    torch.testing.assert_close(compiled(tokens, positions), ours(tokens, positions), atol=1e-5, rtol=1e-4)


# --- Packed examples ------------------------------------------------------------------------------

SEPARATING = [
    ("llama", SMALL),
    ("qwen3", SMALL),
    ("gemma3_text", SMALL | SLIDING),
    ("gpt2", GPT2 | ENDS),
]
# They take positions, and attend to neighbours all the same.
LEAKING = [
    ("bloom", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4} | ENDS),
    ("opt", SMALL | {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    (
        "falcon",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        | ENDS,
    ),
    (
        "rwkv",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32}
        | ENDS,
    ),
]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("kind", "fields"), SEPARATING, ids=lambda value: value if isinstance(value, str) else ""
)
def test_no_example_influences_another(kind, fields, attention):
    """Changing any one token moves logits of its own example, from there on, and no others; in every row."""
    ours = Pretrained(make(kind, attention, **fields))
    tokens = some_tokens(rows=2)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8]])
    example = (positions == 0).cumsum(-1)
    with torch.no_grad():
        before = ours(tokens, positions)
        for row, place in ((0, 0), (0, 4), (0, 5), (0, 6), (1, 1), (1, 3)):
            other = tokens.clone()
            other[row, place] = (other[row, place] + 1) % VOCABULARY
            moved = (ours(other, positions) - before).abs().amax(-1) > 0
            expected = torch.zeros_like(moved)
            expected[row] = (example[row] == example[row, place]) & (torch.arange(12) >= place)
            assert torch.equal(moved, expected)
        alone = ours(tokens[1:, 3:])
    torch.testing.assert_close(before[1:, 3:], alone, atol=1e-5, rtol=1e-4)
    assert separates_examples(ours, VOCABULARY)


@pytest.mark.parametrize(
    ("kind", "fields"), LEAKING, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_model_that_cannot_separate_is_found_out(kind, fields):
    ours = Pretrained(make(kind, "eager", **fields))
    assert not separates_examples(ours, VOCABULARY)


def test_the_gpt_separates_and_stays_as_it_is():
    torch.manual_seed(0)
    shape = GPTShape(vocabulary=10, length=8, width=16, layers=1, heads=2, dropout=0.5, vocabulary_multiple=8)
    model = GPT(shape).train()
    random = torch.get_rng_state()
    assert separates_examples(model, 10)
    assert model.training and torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())


# --- Loading --------------------------------------------------------------------------------------


def test_a_folder_comes_back_in_float32_without_network(folder, offline):
    model, tokenizer = load_pretrained(folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not model.training and not model.whole.training
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(model(some_tokens()), expected(some_tokens()).logits)
    assert tokenizer.decode(tokenizer("to be or")["input_ids"]) == "to be or"


def test_weights_that_are_not_there_are_not_invented(folder, offline):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"has no weights for model\.layers\.1\.mlp\.up_proj\.weight"):
        load_pretrained(folder)


def test_quantized_weights_are_refused(folder, offline):
    edit(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ValueError, match="holds quantized weights"):
        load_pretrained(folder)


@pytest.mark.parametrize("name", ["/nowhere/model", "./nowhere", "a/b/c"])
def test_a_path_that_leads_nowhere_asks_no_network(name, offline):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        load_pretrained(name)


def test_a_folder_without_a_model(tmp_path, offline):
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        load_pretrained(tmp_path)


def test_activation_checkpointing_changes_no_gradient(folder, offline):
    def gradients(**switches):
        model, _ = load_pretrained(folder, **switches)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            loss = model.train()(some_tokens()).logsumexp(-1).sum()
        loss.backward()
        return [p.grad for p in model.parameters()], sum(kept)

    plain, much = gradients()
    again, little = gradients(activation_checkpointing=True)
    assert little < 0.5 * much
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.skipif("PACELINE_SMOLLM2" not in os.environ, reason="PACELINE_SMOLLM2 names no folder")
def test_smollm2(tmp_path, offline):
    model, tokenizer = load_pretrained(os.environ["PACELINE_SMOLLM2"])
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert separates_examples(model, model.vocabulary)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")[
        "input_ids"
    ]
    with torch.no_grad():
        answer = model.whole.generate(tokens, max_new_tokens=8, do_sample=False)[0, tokens.shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


# --- Exporting ------------------------------------------------------------------------------------


def loss(logits, tokens):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()


def test_an_exported_gpt_is_loaded_by_plain_transformers(tmp_path):
    vocabulary = train_vocabulary(["to be or not to be"] * 4, 260)
    torch.manual_seed(0)
    shape = GPTShape(
        vocabulary=vocabulary.size, length=16, width=32, layers=2, heads=2, vocabulary_multiple=64
    )
    model = GPT(shape).eval()
    export_folder(model, vocabulary, tmp_path / "out")
    theirs, tokenizer = (
        kind.from_pretrained(tmp_path / "out") for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    assert type(theirs).__name__ == "GPT2LMHeadModel"
    assert theirs.config.eos_token_id == vocabulary.end_of_text == tokenizer.eos_token_id
    assert tokenizer("to be or not")["input_ids"] == vocabulary.encode(["to be or not"])[0]
    tokens = some_tokens()
    assert loss(theirs(tokens).logits, tokens) == pytest.approx(loss(model(tokens), tokens), abs=1e-5)
    assert theirs(tokens).logits.shape[-1] == vocabulary.size


def test_an_exported_model_is_loaded_by_plain_transformers(tmp_path, tokenizer):
    ours = Pretrained(make())
    with torch.no_grad():
        ours.lm_head.weight.mul_(3)
    path = export_folder(ours, tokenizer, tmp_path / "deep/out")
    assert path == tmp_path / "deep/out"
    assert not [p for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pkl")]
    theirs = AutoModelForCausalLM.from_pretrained(path)
    tokens = some_tokens()
    assert loss(theirs(tokens).logits, tokens) == pytest.approx(loss(ours(tokens), tokens), abs=1e-5)


def test_an_export_replaces_nothing(tmp_path, tokenizer):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="out exists already"):
        export_folder(Pretrained(make()), tokenizer, tmp_path / "out")
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "thesis.txt"]


def test_an_export_that_fails_leaves_nothing(tmp_path, tokenizer, monkeypatch):
    ours = Pretrained(make())

    def fail(folder: Path, **_):
        (folder / "model.safetensors").touch()
        raise OSError("disk full")

    monkeypatch.setattr(ours.whole, "save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        export_folder(ours, tokenizer, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_only_models_of_ours_are_exported(tmp_path, tokenizer):
    with pytest.raises(TypeError, match="only a GPT or a Pretrained can be exported, not Linear"):
        export_folder(torch.nn.Linear(1, 1), tokenizer, tmp_path / "out")
