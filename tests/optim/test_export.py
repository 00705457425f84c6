"""The average out of the program: state dicts, files, names."""

import pytest
import torch
from problems import Tied, assert_same_bits, everything, train, trained
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from paceline import PACE, averaged_state_dict, averaged_weights, save_averaged

DTYPES = [torch.float32, torch.bfloat16]


def test_export_is_a_copy_in_the_precision_asked_for():
    model, optimizer = trained(torch.bfloat16)
    unrounded = averaged_state_dict(model, optimizer)
    average = optimizer.state[model.embed.weight]["average"]
    assert unrounded["embed.weight"].dtype == torch.float32
    assert torch.equal(unrounded["embed.weight"], average)
    assert unrounded["embed.weight"].data_ptr() != average.data_ptr()
    assert unrounded["embed.weight"] is unrounded["out.weight"]
    assert unrounded["frozen.weight"].dtype == torch.bfloat16  # never averaged: as it is
    half = averaged_state_dict(model, optimizer, dtype=torch.float16)
    assert half["embed.weight"].dtype == half["norm.running_mean"].dtype == torch.float16
    assert half["norm.num_batches_tracked"].dtype == torch.int64
    kept = {k: v.clone() for k, v in unrounded.items()}
    train(model, optimizer, 3)
    assert all(torch.equal(unrounded[k], v) for k, v in kept.items())
    with averaged_weights(optimizer):
        inside = averaged_state_dict(model, optimizer)
    assert torch.equal(inside["embed.weight"], averaged_state_dict(model, optimizer)["embed.weight"])


def test_export_follows_parameters_through_renaming_hooks():
    """torch's activation checkpointing renames entries in a hook; a missed name would export live."""
    torch.manual_seed(0)
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(4, 4)), nn.Linear(4, 1))
    optimizer = PACE(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    exported = averaged_state_dict(model, optimizer)
    assert exported.keys() == model.state_dict().keys()
    assert torch.equal(exported["0.weight"], optimizer.state[next(model.parameters())]["returned"])


def test_export_refuses_where_a_state_dict_hides_the_parameters():
    class Hiding(nn.Linear):
        def state_dict(self, *args, **kwargs):
            return {k: v.detach().clone() for k, v in super().state_dict(*args, **kwargs).items()}

    model = Hiding(2, 1)
    optimizer = PACE(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"2 trained parameter\(s\) do not appear"):
        averaged_state_dict(model, optimizer)


def test_export_keeps_the_versions_of_modules():
    class Versioned(nn.Linear):
        _version = 2

    model = nn.Sequential(Versioned(2, 1))
    exported = averaged_state_dict(torch.compile(model, backend="eager"), PACE(model.parameters()))
    assert exported._metadata == model.state_dict()._metadata


def test_export_refuses_integer_precision():
    model, optimizer = trained()
    with pytest.raises(ValueError, match=r"Invalid dtype: torch.int8; allowed: None or a floating dtype"):
        averaged_state_dict(model, optimizer, dtype=torch.int8)


def test_export_of_a_model_the_optimizer_does_not_train_is_refused():
    model, optimizer = trained()
    with pytest.raises(ValueError, match="trains none of this model's parameters"):
        averaged_state_dict(Tied(), optimizer)
    assert averaged_state_dict(model.embed, optimizer).keys() == {"weight"}


def test_export_of_a_compiled_model_has_clean_names():
    model, optimizer = trained()
    expected = averaged_state_dict(model, optimizer)
    inner_compiled = Tied()
    inner_compiled.frozen = torch.compile(inner_compiled.frozen, backend="eager")
    assert averaged_state_dict(torch.compile(model, backend="eager"), optimizer).keys() == expected.keys()
    names = averaged_state_dict(inner_compiled, PACE(inner_compiled.parameters())).keys()
    assert names == expected.keys()


@pytest.mark.parametrize("target", ["weights.safetensors", "folder"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_saved_file_loads_plainly_and_says_what_it_holds(target, dtype, tmp_path):
    model, optimizer = trained(dtype)
    live = everything(optimizer)
    file = save_averaged(model, optimizer, tmp_path / "new" / target)
    assert file.name == (target if target.endswith("safetensors") else "model.safetensors")
    assert [f.name for f in file.parent.iterdir()] == [file.name]
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["weights"] == "average"
    loaded = Tied()
    loaded.load_state_dict(load_file(file))
    assert torch.equal(loaded.out.weight, optimizer.state[model.embed.weight]["average"])
    assert_same_bits(live, everything(optimizer))


def test_buffers_that_share_memory_are_saved(tmp_path):
    model, optimizer = trained()
    model.register_buffer("table", torch.arange(6.0))
    model.register_buffer("square", model.table.view(2, 3))
    loaded = load_file(save_averaged(model, optimizer, tmp_path))
    assert torch.equal(loaded["square"], loaded["table"].view(2, 3))


def test_a_save_replaces_the_file_whole(tmp_path):
    """Someone reading the old file goes on reading the old file."""
    model, optimizer = trained()
    file = save_averaged(model, optimizer, tmp_path)
    old = file.read_bytes()
    with file.open("rb") as reader:
        train(model, optimizer, 2)
        save_averaged(model, optimizer, tmp_path)
        assert reader.read() == old
    assert file.read_bytes() != old


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    model, optimizer = trained()
    file = save_averaged(model, optimizer, tmp_path)
    before = file.read_bytes()
    train(model, optimizer, 2)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="No space"):
        save_averaged(model, optimizer, tmp_path)
    assert file.read_bytes() == before
    assert [f.name for f in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: torch.compile(m, backend="eager")])
@pytest.mark.parametrize("tie", [False, True])
def test_a_hugging_face_model_loads_back_as_the_average(wrap, tie, tmp_path):
    """A real Llama (tiny, random) through save_pretrained and from_pretrained."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tie,
    )
    model = LlamaForCausalLM(config)
    wrapped = wrap(model)
    optimizer = PACE(model.parameters(), lr=1e-2)
    tokens = torch.randint(50, (2, 12))
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    folder = save_averaged(wrapped, optimizer, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    model.eval()
    loaded.eval()
    with averaged_weights(optimizer), torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, loaded(input_ids=tokens).logits)


def test_before_the_first_step_the_export_is_live():
    """Weights that were loaded after the optimizer was made."""
    model = nn.Linear(3, 2)
    optimizer = PACE(model.parameters())
    with torch.no_grad():
        model.weight.fill_(7.0)
    assert list(optimizer.returned_averages()) == []
    assert (averaged_state_dict(model, optimizer)["weight"] == 7.0).all()
