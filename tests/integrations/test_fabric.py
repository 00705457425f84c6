"""Fabric with PACE: its wrappers of model and optimizer, its files, and a run that goes on from them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

pytest.importorskip("lightning", minversion="2.6")

from lightning.fabric import Fabric

from paceline import (
    PACE,
    Averages,
    PowerLaw,
    Pullback,
    averaged_state_dict,
    averaged_weights,
    reset_average,
    save_averaged,
)

STEPS = 6
DATA = torch.randn(STEPS, 8, 4, generator=torch.Generator().manual_seed(1))
SETTINGS = {
    "plain": {},
    "bfloat16": {},
    "int8": {"average_dtype": "int8"},
    "one average": {"gain": "paper"},
}


def model_of(name="plain"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
    return model.bfloat16() if name == "bfloat16" else model


def train(model, optimizer, steps, fabric=None):
    for i in steps:
        x = DATA[i].to(next(model.parameters()).dtype)
        loss = F.mse_loss(model(x).float(), DATA[i])  # Fabric gives out float32
        fabric.backward(loss) if fabric else loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def cloned(state):
    return {name: value.detach().clone() for name, value in state.items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


def on_a_cpu(name="plain", kind=PACE):
    fabric = Fabric(accelerator="cpu", devices=1)
    model = model_of(name)
    optimizer = kind(model.parameters(), lr=3e-2, **SETTINGS[name])
    return fabric, *fabric.setup(model, optimizer)


def reference(name="plain", steps=STEPS):
    model = model_of(name)
    optimizer = PACE(model.parameters(), lr=3e-2, **SETTINGS[name])
    train(model, optimizer, range(steps))
    return cloned(model.state_dict()), averaged_state_dict(model, optimizer)


@pytest.mark.parametrize("name", SETTINGS)
def test_averages_of_the_wrappers(name, tmp_path):
    live, average = reference(name)
    fabric, model, optimizer = on_a_cpu(name)
    train(model, optimizer, range(STEPS), fabric)
    assert same(cloned(model.state_dict()), live)
    assert same(averaged_state_dict(model, optimizer), average)
    with averaged_weights(optimizer):
        assert same(cloned(model.state_dict()), {n: average[n].to(live[n].dtype) for n in live})
        with pytest.raises(RuntimeError, match="inside averaged_weights"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="do not nest"), averaged_weights(optimizer.optimizer):
            pass
    assert same(cloned(model.state_dict()), live)
    assert same(load_file(save_averaged(model, optimizer, tmp_path)), average)


def test_modes_of_the_wrapper_are_those_of_the_optimizer():
    fabric, model, optimizer = on_a_cpu()
    train(model, optimizer, range(2), fabric)
    live = cloned(model.state_dict())
    optimizer.eval()
    assert optimizer.optimizer.shows_average() and not same(cloned(model.state_dict()), live)
    optimizer.train()
    assert not optimizer.optimizer.shows_average() and same(cloned(model.state_dict()), live)
    optimizer.eval()
    train(model, optimizer, [2], fabric)  # a step puts live back
    assert not optimizer.shows_average()
    reset_average(optimizer)
    assert same(averaged_state_dict(model, optimizer), cloned(model.state_dict()))


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_saved_and_loaded_it_goes_on_to_the_bit(name, shown, tmp_path):
    fabric, model, optimizer = on_a_cpu(name)
    train(model, optimizer, range(3), fabric)
    if shown:
        optimizer.eval()
    before = {key: value.dtype for state in optimizer.state.values() for key, value in state.items()}
    fabric.save(tmp_path / "run.ckpt", {"model": model, "optimizer": optimizer, "step": 3})
    fabric, model, optimizer = on_a_cpu(name)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(tmp_path / "run.ckpt", state)
    after = {key: value.dtype for entry in optimizer.state.values() for key, value in entry.items()}
    assert after == {key: dtype for key, dtype in before.items() if key != "live"}
    optimizer.eval()  # of the wrapper
    optimizer.train()
    train(model, optimizer, range(state["step"], STEPS), fabric)
    live, average = reference(name)
    assert same(cloned(model.state_dict()), live)
    assert same(averaged_state_dict(model, optimizer), average)


@pytest.mark.parametrize("kind", ["Pullback", "Averages"])
def test_wrappers_of_ours_within_fabrics(kind, tmp_path):
    def build(parameters, lr):
        base = torch.optim.AdamW(parameters, lr=lr)
        return Pullback(base, gain="scaled") if kind == "Pullback" else Averages(base, {"a": PowerLaw(0.7)})

    plain = model_of()
    optimizer = build(plain.parameters(), 3e-2)
    train(plain, optimizer, range(STEPS))
    expected = averaged_state_dict(plain, optimizer)
    fabric, model, optimizer = on_a_cpu(kind=build)
    train(model, optimizer, range(3), fabric)
    fabric.save(tmp_path / "run.ckpt", {"model": model, "optimizer": optimizer})
    fabric, model, optimizer = on_a_cpu(kind=build)
    fabric.load(tmp_path / "run.ckpt", {"model": model, "optimizer": optimizer})
    train(model, optimizer, range(3, STEPS), fabric)
    assert same(averaged_state_dict(model, optimizer), expected)
    with averaged_weights(optimizer):
        assert same(cloned(model.state_dict()), expected)
        with pytest.raises(RuntimeError, match="inside averaged_weights"):
            optimizer.step()


def test_hugging_face_model_is_saved_for_from_pretrained(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    fabric = Fabric(accelerator="cpu", devices=1)
    llama = transformers.LlamaForCausalLM(config)
    model, optimizer = fabric.setup(llama, PACE(llama.parameters(), lr=3e-2))
    ids = torch.arange(8)[None]
    for _ in range(3):
        fabric.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
    save_averaged(model, optimizer, tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    average = averaged_state_dict(model, optimizer)
    assert not torch.equal(average["lm_head.weight"], llama.lm_head.weight)
    assert same(cloned(loaded.state_dict()), average)


def test_compiled_model_leaves_no_trace_in_names():
    fabric, model, optimizer = on_a_cpu()
    compiled = torch.compile(model_of(), backend="eager")
    model, optimizer = fabric.setup(compiled, PACE(compiled.parameters(), lr=3e-2))
    assert averaged_state_dict(model, optimizer).keys() == model_of().state_dict().keys()


RANK = """
import sys, torch; torch.set_num_threads(1); import test_fabric as t
from lightning.fabric import Fabric
folder = t.Path(sys.argv[1])
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
def build():
    model = t.model_of()
    return fabric.setup(model, t.PACE(model.parameters(), lr=3e-2))
model, optimizer = build()
t.train(model, optimizer, range(3), fabric)
fabric.save(folder / "run.ckpt", {"model": model, "optimizer": optimizer})
model, optimizer = build()
fabric.load(folder / "run.ckpt", {"model": model, "optimizer": optimizer})
t.train(model, optimizer, range(3, t.STEPS), fabric)
live, average = t.reference()
assert fabric.world_size == 2 and t.same(t.cloned(model.state_dict()), live)  # the same rows on both
assert t.same(t.averaged_state_dict(model, optimizer), average)
file = t.save_averaged(model, optimizer, folder)
if fabric.is_global_zero:
    assert t.same(t.load_file(file), average)
print("done")
"""


@pytest.mark.long
def test_two_processes(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, tmp_path / "rank.py", tmp_path / "out"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.count("done") == 2, done.stderr
