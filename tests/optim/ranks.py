"""What the ranks of test_ranks.py run: `python ranks.py FOLDER` prints how far apart what should be equal is.

Two processes, then four, next to one process that is never sharded, saved or stopped.
"""

import copy
import json
import os
import sys
import warnings
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel

from paceline import (
    BEMA,
    PACE,
    Control,
    PowerLaw,
    attach,
    averaged_state_dict,
    averaged_weights,
    save_averaged,
)

STEPS, WORDS, WIDTH = 8, 13, 6  # 13 rows do not divide by 2 or 4 ranks
FOUND: dict[str, dict[str, float]] = {}
"""Kind → what was compared → the largest relative distance."""


class Model(nn.Module):
    """Embedding and head belong to the root, as in the usual recipe of FSDP2; one layer has a single row."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 5), nn.Linear(5, 1), nn.Linear(1, WIDTH)])

    def forward(self, words):
        y = x = self.embedding(words)
        for layer in self.layers:
            y = layer(y).tanh()
        return self.head(x + y)


def adamw(parameters, **own):
    return attach(torch.optim.AdamW(parameters, 1e-2), control=Control.push(), **own)


def sgd(parameters, **own):
    bema = {"bema": BEMA(every=2)}
    return attach(torch.optim.SGD(parameters, 0.1), control=Control.push(), averages=bema, **own)


OPTIMIZERS = {
    "paper": lambda p, **own: PACE(p, 1e-2, control=Control.paper(0.3, return_power=0.8), **own),
    "push": lambda p, **own: PACE(p, 1e-2, control=Control.push(), **own),
    "AdamW": adamw,
    "SGD": sgd,
}


def make(kind, model, storage="float32"):
    return OPTIMIZERS[kind](list(model.parameters()), average_dtype=storage)


def shard(model, **how):
    for layer in model.layers:
        fully_shard(layer, **how)
    return fully_shard(model, **how)


# --- What is compared -------------------------------------------------------------------------------------


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def weights(model):
    return {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


def averaged(model, optimizer):
    return {name: whole(value) for name, value in averaged_state_dict(model, optimizer).items()}


def entries(optimizer):
    """Return live weights and state as whole tensors, by place. A collective for sharded ones."""
    found, state = {}, optimizer.state_dict()["state"]
    for i, p in enumerate(optimizer.param_groups[0]["params"]):
        for key, value in {"weights": p.detach(), **state.get(i, {})}.items():
            if isinstance(value, torch.Tensor):
                found[i, key] = whole(value).clone()
    return found


def compare(kind, what, ours, theirs):
    """Note the largest relative distance of two tensors of one name."""
    assert ours.keys() == theirs.keys(), (what, ours.keys() ^ theirs.keys())
    pairs = [(ours[key].double(), value.double()) for key, value in theirs.items()]
    apart = torch.stack([(a - b).norm() / b.norm().clamp_min(1e-12) for a, b in pairs]).max().item()
    known = FOUND.setdefault(kind, {}).get(what, 0.0)
    FOUND[kind][what] = apart if not apart <= known else known  # NaN stays


def same(what, ours, theirs):
    compare("to the bit", what, ours, theirs)


def loss_of(model, step, share=slice(None)):
    words = torch.randint(WORDS, (8, 5), generator=torch.Generator().manual_seed(step))[share]
    return nn.functional.cross_entropy(model(words).flatten(0, 1), words.roll(1, 1).flatten())


def train(model, optimizer, steps, *, shared=False, evaluated=False):
    """Train on a batch, or on this rank's share of it, and return the losses, in blocks and outside."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if shared else (0, 1)
    share, losses = slice(rank * 8 // size, (rank + 1) * 8 // size), []
    for step in steps:
        optimizer.zero_grad()
        losses.append(loss_of(model, step, share))
        losses[-1].backward()
        optimizer.step()
        names = (None, "bema") if isinstance(optimizer, torch.optim.SGD) else (None,)
        for name in names if evaluated and step % 2 else ():  # live before and after: copies of it are kept
            for block in (nullcontext(), averaged_weights(optimizer, name, model=model), nullcontext()):
                with torch.no_grad(), block:
                    losses.append(loss_of(model, step, share))
    optimizer.zero_grad()
    losses = torch.stack(losses).detach() / size
    if shared:
        dist.all_reduce(losses)
    return losses


# --- Training ---------------------------------------------------------------------------------------------


def fsdp2(folder):
    """Train, evaluate and export as one process; what is exported is the same whatever is shown."""
    cases = [*product(OPTIMIZERS, ("float32",), (True, False)), ("push", "bfloat16", False)]
    for kind, storage, reshard in cases:
        what, near = f"FSDP2 {kind}, {storage}, {reshard}", "float32" if storage == "float32" else "rounded"
        single, model = Model(), shard(Model(), reshard_after_forward=reshard)
        expected, optimizer = make(kind, single, storage), make(kind, model, storage)
        theirs = train(single, expected, range(STEPS), evaluated=True)
        ours = train(model, optimizer, range(STEPS), shared=True, evaluated=True)
        compare(near, f"{what}: losses", {"": ours}, {"": theirs})
        compare(near, f"{what}: state", entries(optimizer), entries(expected))
        found = averaged(model, optimizer)
        compare(near, f"{what}: export", found, averaged(single, expected))
        with averaged_weights(optimizer, model=model):
            same(f"{what}: shown", weights(model), found)
            same(f"{what}: export of what is shown", averaged(model, optimizer), found)
            same(f"{what}: file", load_file(save_averaged(model, optimizer, folder / "model")), found)
        for i, p in enumerate(optimizer.param_groups[0]["params"]):
            for key, value in optimizer.state_dict()["state"][i].items():
                if isinstance(value, torch.Tensor) and value.dim():
                    assert (value.placements, value.shape) == (p.placements, p.shape), key


def muon(folder):
    """Muon, which orthogonalizes in bfloat16: as the sharded one alone, next to an exact average."""
    found = []
    for is_attached in (False, True):
        model = shard(Model())
        matrices = [p for p in model.parameters() if p.ndim == 2 and min(p.shape) > 1]
        optimizer = torch.optim.Muon(matrices, 1e-2)
        if is_attached:
            attach(optimizer, averages={"all": PowerLaw(1)})
        lives = [weights(model)]
        for step in range(4):
            train(model, optimizer, [step])
            lives.append(weights(model))
        found.append(lives[-1])
    same("Muon", *found)
    names = [name for name, p in model.named_parameters() if any(p is q for q in matrices)]
    with averaged_weights(optimizer, model=model):
        shown = {name: weights(model)[name] for name in names}
    compare("float32", "Muon", shown, {n: sum(own[n].double() for own in lives) / 5 for n in names})


def steps_and_blocks(folder):
    """Neither makes a collective call. Without model=, or with a part of it, nothing is shown."""
    for kind in OPTIMIZERS:
        model = shard(Model(), reshard_after_forward=False)
        optimizer = make(kind, model)
        with pytest.raises((RuntimeError, ValueError), match="average_dtype='bfloat16'"):
            train(model, make(kind, model, "int8"), [0])
        train(model, optimizer, range(2))
        loss_of(model, 3).backward()
        with CommDebugMode() as calls:
            optimizer.step()
            with averaged_weights(optimizer, model=model):
                pass
        assert calls.get_total_counts() == 0, calls.get_comm_counts()
        before = entries(optimizer)
        for part, message in (
            (None, r"write averaged_weights\(optimizer, model=model\)"),
            (model.layers, "whole model"),
        ):
            with pytest.raises(RuntimeError, match=message) as refused:
                averaged_weights([optimizer], model=part).__enter__()
            assert "\n" not in str(refused.value)
            same(f"{kind}: refused", entries(optimizer), before)
        if isinstance(optimizer, PACE):
            live = loss_of(model, 0)
            optimizer.eval(model)
            assert not torch.equal(loss_of(model, 0), live)
            optimizer.train()  # which knows where it was shown
            assert torch.equal(loss_of(model, 0), live)


def replicas(folder):
    """Under DDP as one process; ZeRO, which knows a part of the parameters, exports nothing as an average."""
    for kind, storage in (("paper", "float32"), ("AdamW", "float32"), ("push", "int8")):
        single, model = Model(), Model(seed=dist.get_rank())  # DDP broadcasts the weights of rank 0
        expected, optimizer = make(kind, single, storage), make(kind, model, storage)
        wrapped = DistributedDataParallel(model)
        theirs = train(single, expected, range(STEPS), evaluated=True)
        ours = train(wrapped, optimizer, range(STEPS), shared=True, evaluated=True)
        near = "float32" if storage == "float32" else "rounded"
        compare(near, f"DDP {kind}: losses", {"": ours}, {"": theirs})
        compare(near, f"DDP {kind}: export", averaged(wrapped, optimizer), averaged(single, expected))
    zero = ZeroRedundancyOptimizer(model.parameters(), PACE, lr=1e-2)
    loss_of(model, 0).backward()
    zero.step()
    with pytest.raises(TypeError, match="ZeroRedundancyOptimizer keeps no average"):
        averaged_state_dict(model, zero)
    with pytest.raises(ValueError, match="belong to none of these optimizers"):
        averaged_state_dict(model, zero.optim)


def first_step_at_rate_zero(folder):
    """Count the first step of a warm-up on all ranks alike, also where one has no gradient but zeros."""
    for kind in OPTIMIZERS:
        model = fully_shard(nn.Embedding(8, 3))
        optimizer = make(kind, model)
        optimizer.param_groups[0]["lr"] = 0.0
        for _ in range(2):
            model(torch.tensor([0, 1])).square().sum().backward()  # rows of the first rank
            optimizer.step()
        steps = [value.item() for (_, key), value in entries(optimizer).items() if "step" in key]
        assert steps and set(steps) == {2.0}, (kind, steps)


# --- What is saved ----------------------------------------------------------------------------------------

SIZES = (2, 4, 1, 2)
CASES = [
    # kind, storage, flat, saved and loaded while the average is shown
    ("paper", "float32", False, False),
    ("paper", "bfloat16", True, True),
    ("AdamW", "float32", True, False),
    ("SGD", "float32", False, True),
]


def checkpoints(folder):
    """Save on 2 ranks, load on 4, on 1 and on 2, and train on as one process that was never stopped."""
    meshes = {n: DeviceMesh("cpu", list(range(n))) for n in (2, 4)}
    for kind, storage, flat, shown in CASES:
        what, ended = f"checkpoint {kind}, {storage}", {}
        single = Model()
        expected = make(kind, single, storage)
        train(single, expected, range(STEPS))
        for stage, size in enumerate(SIZES):
            place, last = (folder / f"{kind}-{storage}-{n}" for n in (stage, stage - 1))
            if dist.get_rank() < size:
                model = shard(Model(stage), mesh=meshes[size]) if size > 1 else Model(stage)
                alone = {"process_group": meshes[size].get_group()} if size > 1 else {"no_dist": True}
                optimizer = make(kind, model, storage)
                if stage == 0:
                    train(model, optimizer, range(4))
                else:
                    load(last, model, optimizer, flat, shown, alone)
                    same(f"{what}: loaded", entries(optimizer), torch.load(last / "whole.pt"))
                with averaged_weights(optimizer, model=model) if shown else nullcontext():
                    dcp.save(states(model, optimizer, flat), checkpoint_id=place, **alone)
                saved = entries(optimizer)
                if dist.get_rank() == 0:
                    torch.save(saved, place / "whole.pt")
                train(model, optimizer, range(4, STEPS))
                same(f"{what}: again", entries(optimizer), ended.setdefault(size, entries(optimizer)))
                near = "float32" if storage == "float32" else "rounded"
                compare(near, f"{what}: end", entries(optimizer), entries(expected))
            dist.barrier()


def states(model, optimizer, flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    own = dcp_state.get_optimizer_state_dict(model, optimizer, options=options)
    return {"model": dcp_state.get_model_state_dict(model), "optimizer": own}


def load(place, model, optimizer, flat, shown, alone):
    """Load into an optimizer whose dummy step counts nothing; what was saved while shown, while shown."""
    live, groups = weights(model), copy.deepcopy(optimizer.state_dict()["param_groups"])
    states(model, optimizer, flat)
    name = "step" if isinstance(optimizer, PACE) else "paceline_step"
    assert all(state[name] == 0 for state in optimizer.state_dict()["state"].values())
    same("dummy step", averaged(model, optimizer), live)

    def read():
        own = states(model, optimizer, flat)
        dcp.load(own, checkpoint_id=place, **alone)
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        dcp_state.set_optimizer_state_dict(model, optimizer, own["optimizer"], options=options)
        dcp_state.set_model_state_dict(model, own["model"])

    if shown and not isinstance(model, FSDPModule):  # on one rank; a refusal is the same on all
        with pytest.raises(ValueError, match="its entry 'live'"):
            read()
    with averaged_weights(optimizer, model=model) if shown else nullcontext():
        read()
    assert optimizer.state_dict()["param_groups"] == groups


EVERYWHERE = StateDictOptions(full_state_dict=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def full_states(folder):
    """Gather a state whole and cut it again: kept in another storage, saved while shown, or AdamW's."""
    for kind, storage, other, shown in (
        ("push", "float32", "float32", False),
        ("push", "int8", "bfloat16", True),
        ("AdamW", "float32", "bfloat16", False),
        ("AdamW", "bfloat16", "bfloat16", True),
    ):
        model = Model() if storage == "int8" else shard(Model())
        optimizer = make(kind, model, storage)
        train(model, optimizer, range(4))
        live, averages = weights(model), averaged(model, optimizer)
        with averaged_weights(optimizer, model=model) if shown else nullcontext():
            held = weights(model)
            state = copy.deepcopy(dcp_state.get_optimizer_state_dict(model, optimizer, options=EVERYWHERE))
        train(model, optimizer, range(4, STEPS))
        for options in (EVERYWHERE,) if shown or storage != other else (EVERYWHERE, FROM_FIRST):
            again = Model(seed=4)
            again.load_state_dict(held)
            resumed = make(kind, shard(again), other)
            dcp_state.set_optimizer_state_dict(again, resumed, copy.deepcopy(state), options=options)
            same(f"full state {kind}: live", weights(again), live)
            same(f"full state {kind}: average", averaged(again, resumed), averages)
            train(again, resumed, range(4, STEPS))
            if storage == other:
                same(f"full state {kind}: end", entries(resumed), entries(optimizer))
    model = shard(Model())
    plain = torch.optim.AdamW(model.parameters(), 1e-2)
    train(model, plain, range(3))
    for kind, options in (("push", FROM_FIRST), ("AdamW", FROM_FIRST), ("AdamW", EVERYWHERE)):
        state = copy.deepcopy(dcp_state.get_optimizer_state_dict(model, plain, options=EVERYWHERE))
        again = shard(Model(seed=4))
        optimizer = make(kind, again)
        with pytest.warns(match="has no average") if kind == "push" else nullcontext():
            dcp_state.set_optimizer_state_dict(again, optimizer, state, options=options)
        again.load_state_dict(model.state_dict())
        same("AdamW's state", averaged(again, optimizer), weights(again))
        train(again, optimizer, [3])


# --- Processes --------------------------------------------------------------------------------------------

SCENARIOS = {
    2: (fsdp2, muon, steps_and_blocks, replicas, first_step_at_rate_zero, full_states),
    4: (checkpoints,),
}


def run(rank, size, folder):
    torch.set_num_threads(1)
    warnings.filterwarnings("error", message="the (loaded state|model was loaded)")
    dist.init_process_group("gloo", f"file://{folder}/store-{size}", rank=rank, world_size=size)
    for scenario in SCENARIOS[size]:
        scenario(folder / scenario.__name__)
    if rank == 0:
        (folder / f"{size}.json").write_text(json.dumps(FOUND))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    place, found = Path(sys.argv[1]), {}
    for size in SCENARIOS:  # forked: what is imported above is imported once
        start_processes(run, (size, place), size, start_method="fork")
        for kind, own in json.loads((place / f"{size}.json").read_text()).items():
            found.setdefault(kind, {}).update(own)
    print(json.dumps(found))
