"""Scenarios of ranks.py: training over several ranks is training in one process, and costs no collective.

DDP, FSDP2, what a step costs, showing averages, skipped steps.
"""

import contextlib
import copy
import itertools
from collections import Counter

import torch
import torch.distributed as dist
from ranks import batch, full, make_model, make_optimizer, my_share, snapshot
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from paceline import PACE, Averages, PowerLaw, Pullback, averaged_weights
from paceline.optim.averages import BEMA

STEPS = 20
# Of what one process and several make of a batch, after STEPS steps.
TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1.3e-6, "atol": 1e-5},
}


def pace(model, **settings):
    return make_optimizer(model, **settings)


def scaled(model, **settings):
    """As `PACE(parameters)` is by itself."""
    return PACE(model.parameters(), lr=1e-2, **settings)


def pullback(model):
    base = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Pullback(base, gain="scaled", return_power=0.8)


def pullback_around_sgd(model):
    base = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    return Pullback(base, pullback_strength=0.3)


def averages(model):
    base = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Averages(base, {"power": PowerLaw(0.7), "bema": BEMA()})


OPTIMIZERS = (pace, scaled, pullback, pullback_around_sgd, averages)


def step(model, optimizer, number, dtype, share=slice(None), forward=None):
    x, y = (part.to(dtype)[share] for part in batch(number))
    optimizer.zero_grad()
    ((forward or model)(x) - y).square().mean().backward()
    optimizer.step()


def assert_alike(ours, expected, what):
    bound = TOLERANCE[expected.dtype]
    assert torch.allclose(full(ours).to(expected), expected, **bound), what


def assert_trained_alike(model, optimizer, single, expected):
    """Weights, state and the average that is returned."""
    theirs = dict(expected.returned_averages())
    ours = dict(optimizer.returned_averages())
    for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
        assert_alike(p.detach(), q.detach(), name)
        assert (p in ours) == (q in theirs), name
        if q in theirs:
            assert_alike(ours[p], theirs[q], f"{name}, returned")
        assert optimizer.state[p].keys() == expected.state[q].keys(), name
        for key, value in expected.state[q].items():
            if value.dtype in TOLERANCE:
                assert_alike(optimizer.state[p][key], value, f"{name} {key}")


def assert_same_on_all_ranks(tensors, what):
    """To the bit."""
    for tensor in tensors:
        others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(others, tensor.contiguous())
        assert all(torch.equal(tensor, other) for other in others), what


class Operations(TorchDispatchMode):
    """What torch is asked to do, by name, below all wrappers."""

    def __enter__(self):
        self.names = Counter()
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does to its parts is counted
        self.names[func._schema.name] += 1
        return func(*args, **(kwargs or {}))

    def collectives(self):
        return sum(
            n for name, n in self.names.items() if name.partition("::")[0] in ("c10d", "_c10d_functional")
        )


@contextlib.contextmanager
def at_most(collectives, group=None):
    """Counted three times over: by us, by torch, and by the process group itself."""
    before = dist.group.WORLD._get_sequence_number_for_group()
    with CommDebugMode() as debug, Operations() as operations:
        yield operations
    group_counted = dist.group.WORLD._get_sequence_number_for_group() - before
    counts = operations.collectives(), debug.get_total_counts(), group_counted
    assert max(counts) <= collectives, (counts, operations.names)


# --- DDP --------------------------------------------------------------------------------------------


def ddp_training(folder):
    for dtype, make in itertools.product((torch.float64, torch.float32), OPTIMIZERS):
        model, single = make_model().to(dtype), make_model().to(dtype)
        wrapped = DistributedDataParallel(model)
        optimizer, expected = make(model), make(single)
        for number in range(STEPS):
            step(wrapped, optimizer, number, dtype, my_share())
            step(single, expected, number, dtype)
            kept = [average for _, average in optimizer.returned_averages()]
            assert len(kept) == 6
            assert_same_on_all_ranks([torch.cat([part.flatten() for part in kept])], (make, number))
        assert_trained_alike(model, optimizer, single, expected)


# --- FSDP2 ------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Parameters of all kinds: tied, frozen, uneven over 2 and 4 ranks, fewer rows than ranks."""

    def __init__(self):
        super().__init__()
        self.inward, self.outward = nn.Linear(6, 6), nn.Linear(6, 6)
        self.outward.weight = self.inward.weight
        self.frozen = nn.Linear(6, 7).requires_grad_(False)
        self.head = nn.Linear(7, 1)

    def forward(self, x):
        return self.head(self.frozen(self.outward(self.inward(x).tanh())).tanh())


def make_tied(dtype):
    torch.manual_seed(0)
    return Tied().to(dtype)


def shard(model, **how):
    if isinstance(model, nn.Sequential):
        for layer in (model[0], model[2], model[4]):
            fully_shard(layer, **how)
    else:  # tied weights have to be in one unit
        fully_shard(model.head, **how)
    return fully_shard(model, **how)


def meshes():
    """Those that a model may be sharded over: all ranks, and copies of shards (HSDP)."""
    size = dist.get_world_size()
    pairs = [(2, 2)] if size == 4 else [(1, size), (size, 1)]
    named = [init_device_mesh("cpu", pair, mesh_dim_names=("copies", "parts")) for pair in pairs]
    return [None, *named]


def assert_cut_like_parameters(model, optimizer):
    for name, p in model.named_parameters():
        for key, value in optimizer.state[p].items():
            if not key.endswith("step"):
                assert isinstance(value, DTensor), (name, key)
                assert value.placements == p.placements, (name, key)
                assert value.device_mesh == p.device_mesh, (name, key)


def fsdp2_training(folder):
    for make in OPTIMIZERS:
        _assert_like_alone(make, make_tied, torch.float64, {})
    for mesh, reshard in itertools.product(meshes(), (True, False)):
        how = {"reshard_after_forward": reshard} | ({} if mesh is None else {"mesh": mesh})
        make = scaled if reshard else pace
        _assert_like_alone(make, lambda dtype: make_model().to(dtype), torch.float32, how, steps=8)
    offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    _assert_like_alone(scaled, make_tied, torch.float32, offload)


def _assert_like_alone(make, build, dtype, how, steps=STEPS):
    model, single = shard(build(dtype), **how), build(dtype)
    optimizer, expected = make(model), make(single)
    for number in range(steps):
        step(model, optimizer, number, dtype, my_share())
        step(single, expected, number, dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(optimizer.state[p] for p in trained)
    assert_cut_like_parameters(model, optimizer)
    assert_trained_alike(model, optimizer, single, expected)


def fsdp2_low_precision(folder):
    """bfloat16 in the model, float32 in the shards: as one process that computes with rounded copies."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    for make in (scaled, pullback):
        model, single = shard(make_model().float(), mp_policy=policy), make_model().float()
        optimizer, expected = make(model), make(single)

        def rounded(x, single=single):
            copies = {name: p.bfloat16() for name, p in single.named_parameters()}
            return functional_call(single, copies, x.bfloat16())

        for number in range(STEPS):  # the whole batch on each rank: the same mean, however it is rounded
            step(model, optimizer, number, torch.float32)
            step(single, expected, number, torch.float32, forward=rounded)
        assert all(p.dtype == torch.float32 for p in model.parameters())
        assert_trained_alike(model, optimizer, single, expected)


def fsdp2_int8_is_refused(folder):
    """Blocks of int8 cut by shards could not be put together again for another number of ranks."""
    for before in (False, True):
        model = make_model().float()
        if before:
            shard(model)
        try:
            optimizer = PACE(model.parameters(), lr=1e-2, average_dtype="int8")
            shard(model)
            optimizer.param_groups[0]["params"] = list(model.parameters())
            step(model, optimizer, 0, torch.float32)
        except (ValueError, RuntimeError) as error:
            assert "sharded" in str(error) and "average_dtype='bfloat16'" in str(error), error
        else:
            raise AssertionError("nothing was raised")


def fsdp2_around_tensor_parallelism(folder):
    """Weights that are cut twice: scale and means are those of the whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    for settings in ({}, {"gain": "paper", "pullback_strength": 0.3}):
        torch.manual_seed(0)
        single = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        model = parallelize_module(copy.deepcopy(single), mesh["tensor"], plan)
        fully_shard(model, mesh=mesh["data"])
        twice = [p for p in model.parameters() if not any(cut.is_replicate() for cut in p.placements)]
        assert len(twice) == 3 and all(p.device_mesh.ndim == 2 for p in twice)
        optimizer, expected = (PACE(net.parameters(), lr=1e-2, **settings) for net in (model, single))
        for number in range(STEPS):  # the whole batch on each rank
            step(model, optimizer, number, torch.float64)
            step(single, expected, number, torch.float64)
        assert_trained_alike(model, optimizer, single, expected)


def gradients_cut_otherwise(folder):
    """A gradient that is cut in another way than its parameter, now and then: what torch makes of both."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    start = torch.randn(4, 3, dtype=torch.float64)
    for settings in ({}, {"foreach": True}, {"foreach": False}):
        ours = nn.Parameter(distribute_tensor(start, mesh, [Replicate()]))
        alone = nn.Parameter(start.clone())
        optimizer, expected = (PACE([p], lr=0.1, gain="paper", **settings) for p in (ours, alone))
        for number in range(6):
            alone.grad = torch.randn(4, 3, dtype=torch.float64)
            ours.grad = distribute_tensor(alone.grad, mesh, [Replicate()])
            if number in (2, 5):  # a part of the sum on each rank
                share = alone.grad * (2 * (dist.get_rank() + 1) / (mesh.size() * (mesh.size() + 1)))
                ours.grad = DTensor.from_local(share, mesh, [Partial()])
            optimizer.step()
            expected.step()
            assert_alike(ours.detach(), alone.detach(), (settings, number))


# --- What a step costs -------------------------------------------------------------------------------


COLLECTIVES = (
    (pace, {}, 0),
    (pace, {"gap": "lookahead"}, 0),
    (pace, {"average_dtype": "bfloat16"}, 0),
    (pace, {"betas": (0.0, 0.99)}, 0),
    (scaled, {}, 1),
    (pullback_around_sgd, {}, 0),
    (pullback, {}, 1),
    (averages, {}, 0),
)


def fsdp2_collectives(folder):
    """None in a step, or one where a number of the whole model is needed, on every path."""
    for make, settings, allowed in COLLECTIVES:
        paths = [{}]
        if make in (pace, scaled) and "average_dtype" not in settings:
            paths = [{}, {"foreach": False}]
        for path in paths:
            model = shard(make_tied(torch.float32))
            optimizer = make(model, **settings, **path)
            for number in range(3):
                x, y = (part.float()[my_share()] for part in batch(number))
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                with at_most(allowed) as operations:
                    optimizer.step()
            _assert_path(optimizer, path, operations)
    hybrid = meshes()[-1]  # copies take no part in sums
    model = shard(make_model().float(), mesh=hybrid)
    optimizer = scaled(model)
    x, y = (part.float() for part in batch(0))
    (model(x) - y).square().mean().backward()
    with at_most(1):
        optimizer.step()


def _assert_path(optimizer, path, operations):
    if not isinstance(optimizer, PACE):
        return
    steps = operations.names["aten::_foreach_addcdiv_"], operations.names["aten::addcdiv_"]
    said = repr(optimizer)
    if "foreach" in path:
        assert "tensor by tensor" in said and not steps[0] and steps[1], operations.names
    else:
        assert "foreach" in said and steps == (1, 0), operations.names


def fsdp2_caches(folder):
    """DTensor finds out how an operation is sharded at the first steps and never again."""

    def misses():
        native, python = torch._C._get_DTensor_sharding_propagator_cache_stats(), DTensor._op_dispatcher
        return native[1], python.sharding_propagator.propagate_op_sharding.cache_info().misses

    for make in OPTIMIZERS:
        for path in ({}, {"foreach": False}) if make in (pace, scaled) else ({},):
            model = shard(make_model())
            optimizer = make(model, **path)
            found = []
            for number in range(8):
                x, y = (part[my_share()] for part in batch(number))
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                optimizer.step()
                found.append(misses())
            assert len(set(found[3:])) == 1, (make, path, found)


# --- Showing averages -------------------------------------------------------------------------------


def swap(folder):
    """Showing the average moves nothing between ranks; live comes back to the bit."""
    for make, sharded in itertools.product(OPTIMIZERS, (True, False)):
        model = make_tied(torch.float32)
        wrapped = shard(model) if sharded else DistributedDataParallel(model)
        optimizer = make(model)
        for number in range(4):
            step(wrapped, optimizer, number, torch.float32, my_share())
        x, y = (part.float() for part in batch(9))
        before, live_loss = snapshot(optimizer), _loss(wrapped, x, y)
        block = averaged_weights(optimizer, wrapped)
        with at_most(0):
            block.__enter__()
        loss = _loss(wrapped, x, y)
        with at_most(0):
            block.__exit__(None, None, None)
        assert_same_on_all_ranks([loss, live_loss], make)
        assert not torch.equal(loss, live_loss)
        after = snapshot(optimizer)
        assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
        assert torch.equal(_loss(wrapped, x, y), live_loss)


def _loss(model, x, y):
    with torch.no_grad():
        return (model(x) - y).square().mean()


# --- Skipped steps ----------------------------------------------------------------------------------


def skipped_steps(folder):
    """An overflow in one rank's share skips the step on all: neither weights, averages nor counts move."""
    for make, sharded in itertools.product((pace, scaled, pullback, averages), (True, False)):
        model, single = make_model().float(), make_model().float()
        wrapped = shard(model) if sharded else DistributedDataParallel(model)
        optimizer, expected = make(model), make(single)
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
        for number in range(8):
            bad = number == 5
            before = snapshot(optimizer)
            for net, own, scaler, share in (
                (wrapped, optimizer, scalers[0], my_share()),
                (single, expected, scalers[1], slice(None)),
            ):
                x, y = (part.float()[share] for part in batch(number))
                own.zero_grad()
                loss = (net(x) - y).square().mean()
                if bad and (net is single or dist.get_rank() == dist.get_world_size() - 1):
                    loss = loss * 1e38
                scaler.scale(loss).backward()
                scaler.unscale_(own)
                nn.utils.clip_grad_norm_(net.parameters(), 0.3)
                scaler.step(own)
                scaler.update()
            after = snapshot(optimizer)
            unchanged = all(torch.equal(before[k], after[k]) for k in before if k in after)
            assert number == 0 or unchanged == bad, (make, number)
            counts = [value for (_, key), value in after.items() if key.endswith("step")]
            assert all(count == (number + 1 if number < 5 else number) for count in counts)
            assert_same_on_all_ranks([torch.stack([count.double() for count in counts])], "counts")
        assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0**9
        assert_trained_alike(model, optimizer, single, expected)


# --- Gathered copies --------------------------------------------------------------------------------


class RootOwned(nn.Module):
    """A model whose embedding and head belong to FSDP2's root, which stays gathered after a forward."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return self.head(hidden)


def make_root_owned(reshard=None):
    torch.manual_seed(0)
    model = RootOwned().double()
    if reshard is not None:
        how = {} if reshard == "usual" else {"reshard_after_forward": reshard}
        for layer in model.layers:
            fully_shard(layer, **how)
        fully_shard(model, **how)
    return model


def _token_loss(model, number):
    tokens = torch.randint(16, (4, 8), generator=torch.Generator().manual_seed(number))
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def fsdp2_evaluations(folder):
    """Evaluations of live and average change no training step, whichever modules stay gathered."""

    def losses(model, optimizer, show):
        found = []
        for number in range(6):
            optimizer.zero_grad()
            loss = _token_loss(model, number)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
            if number % 2:
                with torch.no_grad():
                    found.append(_token_loss(model, 99).item())  # gathers live
                    with show(model, optimizer):
                        found.append(_token_loss(model, 99).item())
                    found.append(_token_loss(model, 98).item())
        return found

    @contextlib.contextmanager
    def by_modes(model, optimizer):
        optimizer.eval(model)
        yield
        optimizer.train()

    def in_a_block(model, optimizer):
        return averaged_weights(optimizer, model=model)

    def left_to_the_step(model, optimizer):
        return contextlib.nullcontext(optimizer.eval(model))

    for show, reshard in itertools.product((in_a_block, by_modes, left_to_the_step), (True, False, "usual")):
        single, model = make_root_owned(), make_root_owned(reshard)
        expected = losses(single, scaled(single), show)
        ours = losses(model, scaled(model), show)
        assert torch.allclose(torch.tensor(ours), torch.tensor(expected), rtol=1e-9), (show, reshard, ours)


def fsdp2_needs_the_model(folder):
    """Without it nothing is shown, and the message says what to write; nor with the model of others."""
    model, other = make_root_owned("usual"), make_root_owned("usual")
    optimizer = scaled(model)
    _token_loss(model, 0).backward()
    optimizer.step()
    before = snapshot(optimizer)
    for show in (averaged_weights, lambda *args: contextlib.nullcontext(optimizer.eval(*args[1:]))):
        for args, error, words in (
            ((), RuntimeError, "averaged_weights(optimizer, model=model)"),
            ((other,), ValueError, "the model"),
        ):
            try:
                with show(optimizer, *args):
                    raise AssertionError("nothing was raised")
            except error as raised:
                assert words in str(raised), raised
            assert not optimizer.shows_average()
            assert_same_bits_of(before, snapshot(optimizer))


def assert_same_bits_of(before, after):
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
