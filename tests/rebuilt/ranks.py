"""What the ranks of test_ranks.py run: `python ranks.py FOLDER SCENARIO…`, a process for each rank."""

import copy
import os
import sys
import warnings
from contextlib import contextmanager, nullcontext
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
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from paceline.rebuilt.attach import attach
from paceline.rebuilt.averages import BEMA
from paceline.rebuilt.pace import PACE
from paceline.rebuilt.settings import Control
from paceline.rebuilt.weights import averaged_state_dict, averaged_weights, save_averaged

STEPS, WORDS, WIDTH = 10, 13, 6  # 13 rows do not divide by 2 or 4 ranks
SAME = 1e-6  # of float32, next to one process


class Model(nn.Module):
    """Embedding and head belong to the root, as in the usual recipe of FSDP2."""

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


OPTIMIZERS = {
    "paper": lambda p, **own: PACE(p, 1e-2, control=Control.paper(0.3, return_power=0.8), **own),
    "push": lambda p, **own: PACE(p, 1e-2, control=Control.push(), **own),
    "none": lambda p, **own: PACE(p, 1e-2, control=Control.none(), **own),
    "adamw": lambda p, **own: attach(torch.optim.AdamW(p, lr=1e-2), control=Control.push(), **own),
    "sgd": lambda p, **own: attach(
        torch.optim.SGD(p, lr=0.1), control=Control.push(), averages={"bema": BEMA(every=2)}, **own
    ),
}


def make(kind, model, storage="float32"):
    return OPTIMIZERS[kind](list(model.parameters()), average_dtype=storage)


def shard(model, **how):
    for layer in model.layers:
        fully_shard(layer, **how)
    return fully_shard(model, **how)


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
            found[i, key] = whole(value).clone() if isinstance(value, torch.Tensor) else value
    return found


def distance(ours, theirs):
    """Return the largest relative distance of two tensors of one name."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    pairs = [(ours[key].double(), v.double()) for key, v in theirs.items() if isinstance(v, torch.Tensor)]
    apart = [(a - b).norm() / b.norm().clamp_min(1e-12) for a, b in pairs]
    return torch.stack(apart).max().item()  # NaN if any is


def assert_same(ours, theirs):
    assert distance(ours, theirs) == 0


@contextmanager
def no_collective():
    """Count by torch's own means, and by the process group's."""
    before = dist.group.WORLD._get_sequence_number_for_group()
    with CommDebugMode() as debug:
        yield
    assert debug.get_total_counts() == dist.group.WORLD._get_sequence_number_for_group() - before == 0


def loss_of(model, step, share=slice(None)):
    words = torch.randint(WORDS, (8, 5), generator=torch.Generator().manual_seed(step))[share]
    return nn.functional.cross_entropy(model(words).flatten(0, 1), words.roll(1, 1).flatten())


def train(model, optimizer, steps, *, shared=False, evaluated=False):
    """Train, on this rank's share of a batch or on all of it, and return the mean losses over ranks."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if shared else (0, 1)
    share, losses = slice(rank * 8 // size, (rank + 1) * 8 // size), []
    for step in steps:
        optimizer.zero_grad()
        losses.append(loss_of(model, step, share))
        losses[-1].backward()
        optimizer.step()
        names = (None, "bema") if isinstance(optimizer, torch.optim.SGD) else (None,)
        for name in names if evaluated and step % 2 else ():  # live before and after: copies of it are about
            for block in (nullcontext(), averaged_weights(optimizer, name, model=model), nullcontext()):
                with torch.no_grad(), block:
                    losses.append(loss_of(model, step, share))
    optimizer.zero_grad()
    losses = torch.stack(losses).detach() / size
    if shared:
        dist.all_reduce(losses)
    return losses


# --- Training -------------------------------------------------------------------------------------------


def fsdp2(folder):
    """Train and evaluate as one process, and export what it exports, shown or not."""
    for kind, storage, reshard in product(OPTIMIZERS, ("float32", "bfloat16"), (True, False)):
        if storage == "bfloat16" and reshard:
            continue
        single, model = Model(), shard(Model(), reshard_after_forward=reshard)
        expected, optimizer = make(kind, single, storage), make(kind, model, storage)
        assert not optimizer.state_dict()["state"]
        theirs = train(single, expected, range(STEPS), evaluated=True)
        ours = train(model, optimizer, range(STEPS), shared=True, evaluated=True)
        found = []
        for block in (nullcontext(), averaged_weights(optimizer, model=model)):
            with block, torch.no_grad():
                loss_of(model, 0)
                found.append(averaged(model, optimizer))
                loss_of(model, 0)
                found.append(load_file(save_averaged(model, optimizer, folder / f"{kind}-{len(found)}")))
                assert_same(found[-1], found[0])
        assert_same(found[2], found[0])
        for i, p in enumerate(optimizer.param_groups[0]["params"]):
            for key, value in optimizer.state_dict()["state"][i].items():
                if isinstance(value, torch.Tensor) and value.dim():
                    assert (value.placements, value.shape) == (p.placements, p.shape), key
        # What is rounded at random depends on where a weight lies.
        bounds = (SAME,) * 3 if storage == "float32" else (5e-5, 2e-3, 0.05)
        assert torch.allclose(ours, theirs, rtol=bounds[0], atol=0), (kind, storage, reshard)
        assert distance(found[0], averaged(single, expected)) < bounds[1], (kind, storage, reshard)
        assert distance(entries(optimizer), entries(expected)) < bounds[2]


def steps_and_blocks(folder):
    """Neither makes a collective call. Without model=, or with a part of it, nothing is shown."""
    for kind, storage in product(OPTIMIZERS, ("float32", "bfloat16")):
        model = shard(Model(), reshard_after_forward=False)
        optimizer = make(kind, model, storage)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            with no_collective():
                optimizer.step()
        before = entries(optimizer)
        with no_collective(), averaged_weights(optimizer, model=model):
            pass
        for part in (None, model.layers):
            with pytest.raises(RuntimeError, match=r"whole model|model=model"):
                averaged_weights([optimizer], model=part).__enter__()
            assert optimizer.param_groups[0]["parameters_hold"] == "live"
        assert_same(entries(optimizer), before)
        with pytest.raises((RuntimeError, ValueError), match="average_dtype='bfloat16'"):
            train(model, make(kind, model, "int8"), [0])
        if isinstance(optimizer, PACE):
            live = loss_of(model, 0)
            optimizer.eval(model)
            assert not torch.equal(loss_of(model, 0), live)
            optimizer.train()  # which knows where it was shown
            assert torch.equal(loss_of(model, 0), live)


def ddp(folder):
    for kind, storage in product(OPTIMIZERS, ("float32", "bfloat16", "int8")):
        single, model = Model(), Model(seed=dist.get_rank())  # DDP broadcasts the weights of rank 0
        expected, optimizer = make(kind, single, storage), make(kind, model, storage)
        wrapped = DistributedDataParallel(model)
        theirs = train(single, expected, range(STEPS), evaluated=True)
        ours = train(wrapped, optimizer, range(STEPS), shared=True, evaluated=True)
        # A draw may fall to the other side.
        assert torch.allclose(ours, theirs, rtol=SAME if storage == "float32" else 1e-4, atol=0)
        apart = distance(averaged(wrapped, optimizer), averaged(single, expected))
        assert apart < (SAME if storage == "float32" else 1e-2), (kind, storage, apart)


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


def checkpoints(folder):
    """Save on some ranks, load on others, and train on as one process that was never stopped."""
    sizes = {4: (2, 4, 1), 2: (2, 1, 2)}[dist.get_world_size()]
    meshes = {n: DeviceMesh("cpu", list(range(n))) for n in sorted(set(sizes)) if n > 1}
    switch = (False, True)
    for kind, storage, flat, shown in product(
        ("paper", "adamw", "sgd"), ("float32", "bfloat16"), switch, switch
    ):
        if storage == "bfloat16" and (kind == "sgd" or flat != shown):
            continue
        single, ended = Model(), {}
        expected = make(kind, single, storage)
        train(single, expected, range(STEPS))
        for stage, size in enumerate(sizes):
            place, last = (folder / f"{kind}-{storage}-{flat}-{shown}-{n}" for n in (stage, stage - 1))
            if dist.get_rank() < size:
                model = shard(Model(stage), mesh=meshes[size]) if size > 1 else Model(stage)
                alone = {"process_group": meshes[size].get_group()} if size > 1 else {"no_dist": True}
                optimizer = make(kind, model, storage)
                groups = [{**group, "params": None} for group in optimizer.param_groups]
                if stage == 0:
                    train(model, optimizer, range(5))
                else:
                    load(last, model, optimizer, flat, shown, alone)
                    assert_same(entries(optimizer), torch.load(last / "whole.pt"))
                assert [{**group, "params": None} for group in optimizer.param_groups] == groups
                with averaged_weights(optimizer, model=model) if shown else nullcontext():
                    dcp.save(states(model, optimizer, flat), checkpoint_id=place, **alone)
                saved = entries(optimizer)
                if dist.get_rank() == 0:
                    torch.save(saved, place / "whole.pt")
                train(model, optimizer, range(5, STEPS))
                assert_same(entries(optimizer), ended.setdefault(size, entries(optimizer)))
                apart = distance(entries(optimizer), entries(expected))
                assert apart < (SAME if storage == "float32" else 0.05), (kind, storage, flat, shown, apart)
            dist.barrier()


def states(model, optimizer, flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    own = dcp_state.get_optimizer_state_dict(model, optimizer, options=options)
    return {"model": dcp_state.get_model_state_dict(model), "optimizer": own}


def load(place, model, optimizer, flat, shown, alone):
    """Load into an optimizer whose dummy step counts nothing; what was saved while shown, while shown."""
    live = weights(model)
    states(model, optimizer, flat)
    name = "step" if isinstance(optimizer, PACE) else "paceline_step"
    assert all(state[name] == 0 for state in optimizer.state_dict()["state"].values())
    assert_same(averaged(model, optimizer), live)

    def read():
        own = states(model, optimizer, flat)
        dcp.load(own, checkpoint_id=place, **alone)
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        dcp_state.set_optimizer_state_dict(model, optimizer, own["optimizer"], options=options)
        dcp_state.set_model_state_dict(model, own["model"])

    if shown:
        with pytest.raises(ValueError, match="its entry 'live'"):
            read()
    with averaged_weights(optimizer, model=model) if shown else nullcontext():
        read()


EVERYWHERE = StateDictOptions(full_state_dict=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def full_states(folder):
    """Whole, and cut again: saved while shown, kept in another storage, or AdamW's, without averages."""
    storages = [("float32",) * 2, ("bfloat16",) * 2, ("float32", "bfloat16"), ("bfloat16", "float32")]
    cases = product(("push", "adamw"), [*storages, ("int8", "bfloat16")], (False, True))
    for kind, (storage, other), shown in cases:
        model = Model() if storage == "int8" else shard(Model())
        optimizer = make(kind, model, storage)
        train(model, optimizer, range(5))
        live, averages = weights(model), averaged(model, optimizer)
        with averaged_weights(optimizer, model=model) if shown else nullcontext():
            held = weights(model)
            state = copy.deepcopy(dcp_state.get_optimizer_state_dict(model, optimizer, options=EVERYWHERE))
        train(model, optimizer, range(5, STEPS))
        for options in (EVERYWHERE,) if shown or storage != other else (EVERYWHERE, FROM_FIRST):
            again = Model(seed=4)
            again.load_state_dict(held)
            resumed = make(kind, shard(again), other)
            dcp_state.set_optimizer_state_dict(again, resumed, copy.deepcopy(state), options=options)
            assert_same(weights(again), live)
            assert_same(averaged(again, resumed), averages)
            train(again, resumed, range(5, STEPS))
            if storage == other:
                assert_same(entries(resumed), entries(optimizer))
    model = shard(Model())
    adamw = torch.optim.AdamW(model.parameters(), 1e-2)
    train(model, adamw, range(3))
    for kind, options in (("push", FROM_FIRST), ("adamw", FROM_FIRST), ("adamw", EVERYWHERE)):
        state = copy.deepcopy(dcp_state.get_optimizer_state_dict(model, adamw, options=EVERYWHERE))
        again = shard(Model(seed=4))
        optimizer = make(kind, again)
        with pytest.warns(match="has no average") if kind == "push" else nullcontext():
            dcp_state.set_optimizer_state_dict(again, optimizer, state, options=options)
        again.load_state_dict(model.state_dict())
        assert_same(averaged(again, optimizer), weights(again))
        train(again, optimizer, [3])
        assert 0 < distance(averaged(again, optimizer), weights(again)) < 0.5


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    warnings.filterwarnings("error", message="the (loaded state|model was loaded)")
    dist.init_process_group("gloo")
    for name in sys.argv[2:]:
        print(name, flush=True)  # the last one printed is the one that failed
        globals()[name](Path(sys.argv[1]) / name)
        dist.barrier()
    dist.destroy_process_group()
