"""Scenarios of ranks.py: states and averages that are saved on some ranks and loaded on others.

Other numbers of ranks, whole states, exports.
"""

import copy
import ctypes
import itertools
import re
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import full, make_model
from ranks_training import (
    TOLERANCE,
    averages,
    my_share,
    pace,
    pullback,
    scaled,
    shard,
    step,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

from paceline import PACE, averaged_weights, save_averaged

BEFORE, AFTER = 5, 10  # steps
# At step 5 the averages of these rest.
LAYOUTS = {
    "float64": (torch.float64, lambda model: scaled(model, update_every=3)),
    "bfloat16": (torch.float32, lambda model: pace(model, update_every=3, average_dtype="bfloat16")),
    "no momentum": (torch.float32, lambda model: pace(model, update_every=3, betas=(0.0, 0.99))),
    "pullback": (torch.float64, pullback),
    "averages": (torch.float64, averages),
}


def entries(model, optimizer):
    """Weights and state as whole tensors, by name. A collective for sharded ones."""
    found = {}
    for name, p in model.named_parameters():
        for key, value in {"weights": p.detach(), **optimizer.state[p]}.items():
            found[f"{name} {key}"] = full(value).clone()
    return found


def assert_equal(ours, expected):
    assert ours.keys() == expected.keys(), ours.keys() ^ expected.keys()
    for key, value in expected.items():
        assert ours[key].dtype == value.dtype, (key, ours[key].dtype, value.dtype)
        assert torch.equal(ours[key], value), key


def train(model, optimizer, steps, dtype):
    """On the whole batch on every rank, whose mean is the same."""
    for number in steps:
        step(model, optimizer, number, dtype)
    optimizer.zero_grad()


# --- Other numbers of ranks -------------------------------------------------------------------------


def reshard(folder):
    """Saved on 2 ranks, loaded and saved again on others and in the end on 2: not a bit is lost.

    Each then trains on as one process that was never stopped.
    """
    sizes = {4: (2, 4, 1, 2), 2: (2, 1, 2), 1: (1, 1)}[dist.get_world_size()]
    meshes = {n: DeviceMesh("cpu", list(range(n))) for n in sorted(set(sizes)) if n > 1}
    for layout, (dtype, make) in LAYOUTS.items():
        single = make_model().to(dtype)
        expected = make(single)
        train(single, expected, range(BEFORE + AFTER), dtype)
        for stage, size in enumerate(sizes):
            if dist.get_rank() < size:
                _stage(folder / f"{layout}-{stage}", layout, meshes.get(size), single, expected)
            dist.barrier()


def _stage(place, layout, mesh, single, expected):
    dtype, make = LAYOUTS[layout]
    first = place.name.endswith("-0")
    model = make_model(seed=0 if first else 4).to(dtype)
    if mesh is not None:
        shard(model, mesh=mesh)
    optimizer = make(model)
    alone = {"no_dist": True} if mesh is None else {"process_group": mesh.get_group()}
    if first:
        train(model, optimizer, range(BEFORE), dtype)
    else:
        before = place.with_name(place.name[:-1] + str(int(place.name[-1]) - 1))
        weights, state = get_state_dict(model, optimizer)
        loaded = {"model": weights, "optimizer": state}
        dcp.load(loaded, checkpoint_id=before, **alone)
        set_state_dict(
            model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
        )
        assert_equal(entries(model, optimizer), torch.load(before / "whole.pt"))
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=place, **alone)
    whole = entries(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(whole, place / "whole.pt")
    train(model, optimizer, range(BEFORE, BEFORE + AFTER), dtype)
    for key, value in entries(single, expected).items():
        if layout == "bfloat16":  # a residual is rounded by a draw that depends on where it lies
            bound = {"rtol": 0.02, "atol": 1e-3}
        else:
            bound = TOLERANCE.get(value.dtype, {"rtol": 0.0, "atol": 0.0})
        ours = entries_of(model, optimizer, key)
        assert torch.allclose(ours.double(), value.double(), **bound), (layout, place.name, key)


def entries_of(model, optimizer, key):
    name, part = key.split(" ")
    p = model.get_parameter(name)
    value = p.detach() if part == "weights" else optimizer.state[p][part]
    return full(value.int() if value.dtype == torch.int16 else value)


# --- Whole states and exports -----------------------------------------------------------------------


def full_states(folder):
    """Sharded → whole on rank 0 → sharded again, or in one process; and from whole on all ranks."""
    whole = StateDictOptions(full_state_dict=True)
    on_host = StateDictOptions(full_state_dict=True, cpu_offload=True)
    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for layout, (dtype, make) in LAYOUTS.items():
        if layout == "no momentum":
            continue  # it has less
        model = shard(make_model().to(dtype))
        optimizer = make(model)
        train(model, optimizer, range(BEFORE), dtype)
        expected = entries(model, optimizer)
        # Counts in it are the optimizer's own, as torch gives them out.
        on_all = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=whole))
        on_first = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=on_host))
        assert bool(on_first) == (dist.get_rank() == 0)
        weights = {name: full(p.detach()).clone() for name, p in model.named_parameters()}
        train(model, optimizer, range(BEFORE, BEFORE + AFTER), dtype)
        later = entries(model, optimizer)

        for state, options in ((on_all, whole), (on_first, from_first)):
            again = make_model(seed=4).to(dtype)
            again.load_state_dict(weights)
            resumed = make(shard(again))
            set_optimizer_state_dict(again, resumed, state, options=options)
            assert_equal(entries(again, resumed), expected)
            train(again, resumed, range(BEFORE, BEFORE + AFTER), dtype)
            assert_equal(entries(again, resumed), later)

        plain = make_model(seed=4).to(dtype)
        plain.load_state_dict(weights)
        resumed = make(plain)
        set_optimizer_state_dict(plain, resumed, on_all, options=whole)
        assert_equal(entries(plain, resumed), expected)
        own = get_optimizer_state_dict(plain, resumed, options=whole)
        back = make_model(seed=4).to(dtype)
        back.load_state_dict(weights)
        resumed = make(shard(back))
        set_optimizer_state_dict(back, resumed, own, options=whole)
        assert_equal(entries(back, resumed), expected)


def int8_to_shards(folder):
    """A state of one process in int8 comes in whole, into an optimizer that keeps another storage."""
    single = make_model().float()
    expected = pace(single, average_dtype="int8")
    train(single, expected, range(BEFORE), torch.float32)
    whole = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(single, expected, options=whole)
    model = make_model().float()
    model.load_state_dict(single.state_dict())
    shard(model)
    optimizer = pace(model, average_dtype="bfloat16")
    set_optimizer_state_dict(model, optimizer, state, options=whole)
    theirs, ours = dict(expected.returned_averages()), dict(optimizer.returned_averages())
    for p, q in zip(model.parameters(), single.parameters(), strict=True):
        assert torch.equal(full(ours[p]), theirs[q])
    train(model, optimizer, range(BEFORE, BEFORE + 1), torch.float32)


def pretrained(folder):
    """A sharded Llama, tied and all: from_pretrained loads the average, to the bit."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 65, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    for tied in (False, True):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied))
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = scaled(model)
        tokens = torch.randint(65, (8, 12), generator=torch.Generator().manual_seed(1))
        for _ in range(4):
            optimizer.zero_grad()
            model(input_ids=tokens[my_share()], labels=tokens[my_share()]).loss.backward()
            optimizer.step()
        averages = dict(optimizer.returned_averages())
        expected = {name: full(averages[p]) for name, p in model.named_parameters()}
        with averaged_weights(optimizer, model), torch.no_grad():
            logits = model(input_ids=tokens).logits
        place = save_averaged(model, optimizer, folder / f"tied-{tied}")
        loaded = LlamaForCausalLM.from_pretrained(place)
        assert loaded.config.tie_word_embeddings == tied
        found = dict(loaded.named_parameters())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        with torch.no_grad():
            assert torch.equal(loaded.eval()(input_ids=tokens).logits, logits)


def export_memory(folder):
    """The writer holds one copy of the model and one tensor more; the others a few tensors, at a time."""
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(24)]
    model = nn.Sequential(*layers)
    largest, total = 2**22, sum(p.numel() * 4 for p in model.parameters())
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = PACE(model.parameters(), lr=1e-3, pullback_strength=0.0)
    model(torch.randn(2, 1024)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    save_averaged(nn.Linear(2, 2), PACE(nn.Linear(2, 2).parameters()), folder / "warm")
    room = total + largest if dist.get_rank() == 0 else 4 * largest
    before = _peak_from_now()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        save_averaged(model, optimizer, folder / "large")
    process = _memory("VmHWM") - before
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    tensors = max(itertools.accumulate(event.nbytes() for event in events))
    print(
        f"save_averaged: {tensors / 2**20:.1f} MiB of tensors, process {process / 2**20:.1f} larger, "
        f"model {total / 2**20:.0f}",
        flush=True,
    )
    assert tensors <= room + 2**10
    assert process <= room + 16 * 2**20  # the profiler's own too
    if dist.get_rank() == 0 and dist.get_world_size() > 1:  # one rank has all of it, and copies nothing
        assert tensors >= total  # or it was not measured


def _peak_from_now():
    """Bytes that are held now; the peak is counted anew."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(which):
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
