"""Averaged weights in and out: blocks, eval and train, exports, files, several optimizers."""

import copy
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from problems import (
    Tied,
    assert_same_bits,
    copies,
    everything,
    make_gradients,
    make_parameters,
    peak_bytes,
    run,
    same,
    train,
    trained,
)
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import update_bn

from paceline import (
    PACE,
    Control,
    HalfLife,
    PowerLaw,
    attach,
    averaged_state_dict,
    averaged_tensors,
    averaged_weights,
    reset_average,
    save_averaged,
)

DTYPES = [torch.float32, torch.bfloat16]


def attached(parameters):
    return attach(torch.optim.SGD(parameters, 3e-2), control=Control.push(), averages={"long": PowerLaw(0.9)})


MAKERS = {"PACE": None, "attached": attached}

# --- Blocks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("maker", MAKERS)
def test_a_hundred_swaps_are_the_identity(maker, dtype):
    _, optimizer = trained(dtype, MAKERS[maker])
    before = everything(optimizer)
    for _ in range(50):
        with averaged_weights(optimizer):
            pass
        if maker == "PACE":
            optimizer.eval()
            optimizer.train()
    assert_same_bits(before, everything(optimizer))


def test_steps_nesting_train_and_reset_inside_a_block_are_refused():
    _, optimizer = trained()
    before = everything(optimizer)
    with averaged_weights(optimizer):
        with pytest.raises(RuntimeError, match="inside averaged_weights"):
            optimizer.step(lambda: pytest.fail("the closure must not run"))
        with pytest.raises(RuntimeError, match="blocks do not nest"), averaged_weights(optimizer):
            pass
        with pytest.raises(RuntimeError, match="leave the block"):
            optimizer.train()
        with pytest.raises(RuntimeError, match="leave the block"):
            reset_average(optimizer)
        optimizer.eval()  # what trainers call before evaluation: it is so already
    assert_same_bits(before, everything(optimizer))


def test_eval_and_train_are_idempotent_and_free_when_nothing_changes():
    model, optimizer = trained()
    before, versions = everything(optimizer), [p._version for p in model.parameters()]
    for _ in range(3):
        optimizer.train()
    assert [p._version for p in model.parameters()] == versions
    optimizer.eval()
    shown = copies(model.parameters())
    optimizer.eval()
    with averaged_weights(optimizer):
        assert same(model.parameters(), shown)
    assert same(model.parameters(), shown)  # a block inside leaves it so
    optimizer.train()
    assert_same_bits(before, everything(optimizer))


def test_an_exchange_needs_the_memory_of_two_tensors():
    """Each swap frees what it makes; the first one's averages are counted once."""
    shapes = [(256, 256)] * 8
    parameters = make_parameters(dtype=torch.float32, shapes=shapes)
    optimizer = run(parameters, make_gradients(1, shapes=shapes))

    def show_and_hide():
        for _ in range(3):
            with averaged_weights(optimizer):
                pass

    assert 0 < peak_bytes(show_and_hide) <= 10 * 256 * 256 * 4 + 4096


SILENT = {
    "doubled": lambda p: p.data.mul_(2),  # 2^10 exponents that grow by 1 are a multiple of 2^32
    "negated": lambda p: p.data.neg_(),
    "permuted": lambda p: p.data.copy_(p.data.flip(0)),
    "replaced": lambda p: setattr(p, "data", torch.zeros_like(p.data)),
}


@pytest.mark.parametrize("change", SILENT.values(), ids=SILENT)
@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
def test_a_change_inside_a_block_is_said_where_a_plain_sum_or_an_address_would_not_tell(dtype, change):
    (p,) = make_parameters(dtype=dtype, shapes=[(32, 32)])
    optimizer = run([p], make_gradients(3, shapes=[p.shape]))
    said = pytest.warns(UserWarning, match="were changed while they held the average")
    with said, averaged_weights(optimizer):
        change(p)


def test_an_optimizer_without_an_average_is_refused_in_plain_words():
    adamw = torch.optim.AdamW([torch.ones(1).requires_grad_()])
    for given in (adamw, SimpleNamespace(), [adamw]):
        with pytest.raises(TypeError, match=r"keeps no average.*paceline\.attach"), averaged_weights(given):
            pass
    with pytest.raises(ValueError, match="no optimizer was given"), averaged_weights([]):
        pass


def test_the_optimizer_is_found_inside_a_trainers_wrapper():
    model, optimizer = trained()
    wrapper = SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer))
    exported = averaged_state_dict(model, wrapper)
    with averaged_weights(wrapper):
        assert_same_bits(dict(model.state_dict()), dict(exported))
    zero = type("DeepSpeedZeroOptimizer", (SimpleNamespace,), {"__module__": "deepspeed.runtime.zero"})
    with pytest.raises(RuntimeError, match="ZeroOptimizer trains flat copies"):
        averaged_weights(SimpleNamespace(optimizer=zero(optimizer=optimizer))).__enter__()


KILLED_INSIDE = """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    import torch
    from problems import trained
    from paceline import averaged_weights
    model, optimizer = trained()
    with averaged_weights(optimizer):
        torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}, {file!r})
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_killed_inside_a_block_resumes_from_live(tmp_path):
    file, tests = str(tmp_path / "checkpoint.pt"), str(Path(__file__).parents[1])
    code = textwrap.dedent(KILLED_INSIDE.format(tests=tests, file=file))
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, env=os.environ)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    saved = torch.load(file, weights_only=True)
    resumed = Tied()
    resumed.load_state_dict(saved["model"])
    again = PACE(resumed.parameters(), control=Control.push())
    again.load_state_dict(saved["optimizer"])
    model, optimizer = trained()
    for each, its in ((model, optimizer), (resumed, again)):
        train(each, its, 5, seed=1)
    assert_same_bits(everything(optimizer), everything(again))


def test_batch_norm_can_be_updated_for_the_average():
    model, optimizer = trained()
    live = copy.deepcopy(model.norm.running_mean)
    with averaged_weights(optimizer):
        update_bn([torch.arange(7)], model)
        assert not torch.equal(model.norm.running_mean, live)


def test_a_compiled_model_computes_with_what_is_shown():
    model, optimizer = trained()
    compiled, tokens = torch.compile(model.eval(), backend="eager"), torch.arange(7)
    with torch.no_grad():
        live = compiled(tokens)
        with averaged_weights(optimizer):
            assert torch.equal(compiled(tokens), model(tokens))
            assert not torch.equal(compiled(tokens), live)
        assert torch.equal(compiled(tokens), live)


# --- Several averages, several optimizers -----------------------------------------------------------------


def test_every_average_of_an_attached_optimizer_is_shown_by_its_name():
    model, _ = trained()
    averages = {"short": PowerLaw(0.3), "long": PowerLaw(0.9), "tail": HalfLife(0.2)}
    optimizer = attach(torch.optim.AdamW(model.parameters(), 3e-2), control=Control.none(), averages=averages)
    train(model, optimizer)
    live, seen = copies(model.parameters()), set()
    for name in (None, *averages):
        with averaged_weights(optimizer, name):
            seen.add(model.embed.weight.sum().item())
        tensors = averaged_tensors(model, optimizer, name)
        assert tensors["embed.weight"].sum().item() in seen
    assert len(seen) == 4 and same(model.parameters(), live)
    with pytest.raises(KeyError, match="no average is called 'wide'"), averaged_weights(optimizer, "wide"):
        pass
    assert same(model.parameters(), live)


def two_optimizers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    both = [PACE(model[0].parameters(), 0.1), attached(model[2].parameters())]
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(4, 3)).square().mean().backward()
        for optimizer in both:
            optimizer.step()
    return model, both


@pytest.mark.parametrize("way", ["export", "save", "block"])
def test_a_model_of_two_optimizers_is_averaged_whole(way, tmp_path):
    model, both = two_optimizers()
    live = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = {**averaged_tensors(model, both)}

    def found(optimizers):
        if way == "export":
            return dict(averaged_state_dict(model, optimizers))
        if way == "save":
            return load_file(save_averaged(model, optimizers, tmp_path))
        with averaged_weights(optimizers):
            return {name: p.detach().clone() for name, p in model.named_parameters()}

    assert_same_bits(found(both), expected)
    assert_same_bits(found(tuple(reversed(both))), expected)
    assert not any(torch.equal(expected[name], value) for name, value in live.items())
    if way != "block":
        with pytest.raises(ValueError, match=r"2 trainable parameter.*'2\.weight'.*others=\"live\""):
            found(both[0])
        assert torch.equal(averaged_state_dict(model, both[0], others="live")["2.weight"], live["2.weight"])
        model[2].requires_grad_(False)
        found(both[0])  # frozen parameters have no average to miss
    assert_same_bits({name: p.detach() for name, p in model.named_parameters()}, live)


def test_optimizers_of_one_memory_share_no_block():
    first, both = nn.Parameter(torch.zeros(3)), []
    for p in (first, nn.Parameter(first.data)):
        both.append(run([p], make_gradients(3, shapes=[p.shape])))
    live = first.detach().clone()
    with pytest.raises(ValueError, match=r"share memory"), averaged_weights(both):
        pass
    assert torch.equal(first, live)


def test_a_block_of_several_optimizers_is_entered_and_left_as_a_whole():
    _, both = two_optimizers()
    before = [everything(optimizer) for optimizer in both]
    with pytest.raises(ZeroDivisionError), averaged_weights(both):
        for optimizer in both:
            with pytest.raises(RuntimeError, match="inside"):
                optimizer.step()
        raise ZeroDivisionError
    with averaged_weights(both[1]), pytest.raises(RuntimeError, match="do not nest"):
        averaged_weights(both).__enter__()
    with pytest.raises(KeyError), averaged_weights(both, "long"):  # an average of the second alone
        pass
    for optimizer, state in zip(both, before, strict=True):
        assert_same_bits(state, everything(optimizer))


# --- Exports ----------------------------------------------------------------------------------------------


def test_an_export_is_a_copy_in_the_precision_asked_for():
    model, optimizer = trained(torch.bfloat16)
    exported, average = averaged_state_dict(model, optimizer), optimizer.state[model.embed.weight]["returned"]
    assert exported["embed.weight"].dtype == torch.float32
    assert torch.equal(exported["embed.weight"], average)
    assert exported["embed.weight"].data_ptr() != average.data_ptr()
    assert exported["embed.weight"] is exported["out.weight"]
    assert exported["frozen.weight"].dtype == torch.bfloat16  # never averaged: as it is
    half = averaged_state_dict(model, optimizer, dtype=torch.float16)
    assert half["embed.weight"].dtype == half["norm.running_mean"].dtype == torch.float16
    assert half["norm.num_batches_tracked"].dtype == torch.int64
    kept = {k: v.clone() for k, v in exported.items()}
    train(model, optimizer, 3)
    assert all(torch.equal(exported[k], v) for k, v in kept.items())
    outside = averaged_state_dict(model, optimizer)
    with averaged_weights(optimizer):
        assert_same_bits(dict(averaged_state_dict(model, optimizer)), dict(outside))
    with pytest.raises(ValueError, match=r"Invalid dtype: torch\.int8; allowed: None or a floating dtype"):
        averaged_state_dict(model, optimizer, dtype=torch.int8)


def test_an_export_follows_parameters_through_renaming_hooks():
    """torch's activation checkpointing renames entries in a hook; a missed name would export live."""
    torch.manual_seed(0)
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(4, 4)), nn.Linear(4, 1))
    optimizer = PACE(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    exported = averaged_state_dict(model, optimizer)
    assert exported.keys() == model.state_dict().keys()
    assert torch.equal(exported["0.weight"], optimizer.state[next(model.parameters())]["average"])


class Hiding(nn.Linear):
    def state_dict(self, *args, **kwargs):
        return {k: v.detach().clone() for k, v in super().state_dict(*args, **kwargs).items()}


def test_an_export_that_could_not_be_the_average_is_refused():
    model, optimizer = trained()
    with pytest.raises(ValueError, match="trains none of this model's parameters"):
        averaged_state_dict(Tied(), optimizer)
    assert averaged_state_dict(model.embed, optimizer).keys() == {"weight"}
    model.embed = nn.Embedding(9, 4)  # resized
    with pytest.raises(ValueError, match=r"'embed\.weight'"):
        averaged_state_dict(model, optimizer)
    hiding = Hiding(2, 1)
    optimizer = PACE(hiding.parameters())
    hiding(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"2 trained parameter\(s\) do not appear"):
        averaged_state_dict(hiding, optimizer)


@pytest.mark.parametrize("kind", ["parameter", "buffer", "another's"])
def test_what_shares_memory_with_an_averaged_parameter_is_not_exported_live(kind):
    """A block shows the average in both. Neighbours in one storage, as of cuDNN's LSTM, are no such thing."""
    model, whole = nn.Linear(3, 3, bias=False), torch.ones(6, 3)
    model.weight.data = whole[:3]
    if kind != "another's":
        model.register_buffer("next", whole[3:])
    both = [PACE(model.parameters(), lr=0.1)]
    if kind == "another's":
        model.tied = nn.Parameter(model.weight.data)
        both += [attach(torch.optim.SGD([model.tied], lr=0.1))]
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(1, 3)).sum().add(0.0 if kind != "another's" else model.tied.sum()).backward()
        for optimizer in both:
            optimizer.step()
    if kind != "another's":
        assert averaged_state_dict(model, both).keys() == {"weight", "next"}
    if kind == "parameter":
        model.tied = nn.Parameter(model.weight.data, requires_grad=False)
    elif kind == "buffer":
        model.register_buffer("tied", model.weight.data[1])
    with pytest.raises(ValueError, match=r"parameter '(tied|weight)' and .* share memory"):
        averaged_state_dict(model, both)


def test_an_export_of_a_wrapped_model_has_clean_names_and_versions():
    model, optimizer = trained()
    expected, wrapped = averaged_state_dict(model, optimizer), nn.DataParallel(model)
    for each in (torch.compile(model, backend="eager"), wrapped, torch.compile(wrapped, backend="eager")):
        exported = averaged_state_dict(each, optimizer)
        assert list(exported) == list(expected)
        assert exported._metadata["norm"] == model.state_dict()._metadata["norm"]


def test_the_average_runs_as_a_model_next_to_live_without_a_copy():
    model, optimizer = trained()
    model.eval()
    tensors, tokens = averaged_tensors(model, optimizer), torch.arange(7)
    average = optimizer.state[model.embed.weight]["returned"]
    assert tensors["embed.weight"].data_ptr() == average.data_ptr()
    teacher = torch.func.functional_call(model, tensors, tokens)
    assert not torch.equal(model(tokens), teacher)
    with averaged_weights(optimizer):
        assert torch.equal(model(tokens), teacher)
        with pytest.raises(RuntimeError, match="hold an average at present"):
            averaged_tensors(model, optimizer)
    with pytest.raises(ValueError, match="trains none of this model's parameters"):
        averaged_tensors(copy.deepcopy(model), optimizer)
    model.more = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"2 trainable parameter.*'more\.weight'"):
        averaged_tensors(model, optimizer)
    model, optimizer = trained(average_dtype="int8")
    with pytest.raises(ValueError, match="kept as a residual in few bits"):
        averaged_tensors(model, optimizer)


# --- Files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["weights.safetensors", "folder"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_saved_file_loads_plainly_and_says_what_it_holds(target, dtype, tmp_path):
    model, optimizer = trained(dtype)
    model.register_buffer("table", torch.arange(6.0))
    model.register_buffer("square", model.table.view(2, 3))  # shares memory
    before = everything(optimizer)
    file = save_averaged(model, optimizer, tmp_path / "new" / target)
    assert file.name == (target if target.endswith("safetensors") else "model.safetensors")
    assert [f.name for f in file.parent.iterdir()] == [file.name]
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["weights"] == "average"
    content = load_file(file)
    assert torch.equal(content["square"], content["table"].view(2, 3))
    assert torch.equal(content["out.weight"], optimizer.state[model.embed.weight]["returned"])
    assert_same_bits(before, everything(optimizer))


def test_a_save_replaces_the_file_whole_and_one_that_fails_leaves_it(tmp_path, monkeypatch):
    model, optimizer = trained()
    file = save_averaged(model, optimizer, tmp_path)
    old = file.read_bytes()
    with file.open("rb") as reader:
        train(model, optimizer, 2)
        save_averaged(model, optimizer, tmp_path)
        assert reader.read() == old != file.read_bytes()
    old = file.read_bytes()
    train(model, optimizer, 2)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="No space"):
        save_averaged(model, optimizer, tmp_path)
    assert file.read_bytes() == old and [f.name for f in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize("tie", [False, True])
def test_a_hugging_face_model_loads_back_as_the_average(tie, tmp_path):
    """A real Llama (tiny, random) through save_pretrained and from_pretrained."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, tie_word_embeddings=tie))
    wrapped = torch.compile(model, backend="eager") if tie else model
    optimizer = PACE(model.parameters(), lr=1e-2)
    tokens = torch.randint(50, (2, 12))
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    folder = save_averaged(wrapped, optimizer, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.eval()
    with averaged_weights(optimizer), torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, loaded(input_ids=tokens).logits)


def test_what_ignores_the_weights_that_it_is_given_is_saved_while_it_shows_the_average(tmp_path):
    """PyTorchModelHubMixin takes any word as one for push_to_hub, and prompts are read from the model."""
    from huggingface_hub import PyTorchModelHubMixin
    from peft import PromptTuningConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    class Mixed(nn.Module, PyTorchModelHubMixin):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)

    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1))
    prompts = get_peft_model(llama, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    for model, file in ((Mixed(), "model.safetensors"), (prompts, "adapter_model.safetensors")):
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = PACE(parameters, lr=0.1, control=Control.push())
        for _ in range(5):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        live, folder = copies(parameters), save_averaged(model, optimizer, tmp_path / file)
        saved = load_file(folder / file).values()
        with averaged_weights(optimizer):
            assert all(any(torch.equal(one, p) for one in saved) for p in parameters)
        assert same(parameters, live)
        with pytest.raises(ValueError, match="give no dtype"):
            save_averaged(model, optimizer, tmp_path / "other", dtype=torch.bfloat16)
