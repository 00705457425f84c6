"""What test_parallel.py has its ranks do: each a process forked from one that has imported everything."""

import faulthandler
import os
import random
import socket
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

import torch
from tiny import RandomTokens
from torch.nn import functional as F
from trials import STEP, Trial, before

from paceline import PACE, Control, averaged_weights, schedules
from paceline.lm import checkpoint
from paceline.lm.batch import IGNORED
from paceline.lm.evaluate import NotFiniteError, summed_loss
from paceline.lm.gpt import GPT, GPTShape
from paceline.lm.loop import Evaluation, Plan, Progress, Step, Trainee, train
from paceline.lm.parallel import ALONE, joined

# Rows that no number of ranks divides; the embedding is the last layer too.
SHAPE = GPTShape(vocabulary=51, length=16, width=30, layers=2, heads=2)
PLAN = Plan(steps=10, batch_size=5, micro_batch_size=2, seed=3, evaluate_every=5, clip_norm=0.5)


def free_port():
    """Below those that connections get by themselves: it is used later, and must still be free then."""
    while True:
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 32_000)))
            return free.getsockname()[1]


def start(folder, size, work, *args, **settings):
    """As many ranks as asked for, each a process; `work` is done in all of them."""
    ports = list({free_port() for _ in range(16)})[:8]  # no two alike: the second would find the first's rank
    folder.mkdir(parents=True, exist_ok=True)
    return [
        Trial(folder / f"said-{rank}", _be, rank, size, ports, work, *args, **settings)
        for rank in range(size)
    ]


def _be(rank, size, ports, work, *args, **settings):
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ports[0]),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    _PORTS[:] = ports
    faulthandler.dump_traceback_later(100)  # where it is, should it be given up
    return work(*args, **settings)


_PORTS = []


@contextmanager
def together(how, **settings):
    """A meeting of all; each of a process needs a port of its own."""
    os.environ["MASTER_PORT"] = str(_PORTS.pop())
    with joined(how=how, device="cpu", **settings) as ranks:
        assert ranks.size == int(os.environ["WORLD_SIZE"])
        yield ranks


# --- The loop against one process -----------------------------------------------------------------


def precise_loss(model, batch):
    """Not rounded to float32, as the usual one is."""
    logits = model(batch.tokens, batch.positions)
    return F.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def trainee_on(ranks, dtype, *, shape=SHAPE, poison=None, **settings):
    torch.manual_seed(0)
    model, called = ranks.spread(GPT(shape).to(dtype), torch.device("cpu"))
    control = Control.paper(c=0.3, return_power=0.8, **settings)
    optimizer = PACE(model.parameters(), lr=1e-3, control=control)
    loss_of = precise_loss if dtype == torch.float64 else summed_loss
    if poison is not None:
        loss_of = partial(_poisoned, loss_of, poison)
    return Trainee(
        model=model,
        optimizer=optimizer,
        scheduler=schedules.constant(optimizer, warmup=2),
        samples=RandomTokens(40, vocabulary=51, masked=0.3),
        held_out={"held-out": RandomTokens(11, vocabulary=51, seed=9, masked=0.3)},
        views={"live": nullcontext, "average": partial(averaged_weights, optimizer, model=model)},
        loss_of=loss_of,
        ranks=ranks,
        called=called,
    )


def _poisoned(loss_of, hit, model, batch):
    """NaN, in a training pass of the last rank, where `hit` says so."""
    loss = loss_of(model, batch)
    mine = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
    return loss * torch.nan if torch.is_grad_enabled() and mine and next(hit) else loss


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def all_of(trainee):
    """Weights, averages and moments, whole."""
    found = {}
    for name, parameter in trainee.model.named_parameters():
        for key, value in {"live": parameter, **trainee.optimizer.state[parameter]}.items():
            found[f"{name} {key}"] = whole(value.detach()).clone()
    return found


def assert_near(ours, expected, dtype):
    near = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1.3e-6, "atol": 1e-5}
    assert ours.keys() == expected.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(
            tensor, expected[name], msg=lambda text, name=name: f"{name}: {text}", **near
        )


def assert_same_everywhere(ranks, tensors):
    """Of DDP: to the bit."""
    for name, tensor in tensors.items():
        others = [torch.empty_like(tensor) for _ in range(ranks.size)]
        torch.distributed.all_gather(others, tensor)
        assert all(torch.equal(tensor, other) for other in others), name


def compare(how, dtype, plan, **settings):
    """Ranks train as one process does."""
    alone = trainee_on(ALONE, dtype, **settings)
    expected = list(train(alone, plan, Progress()))
    with together(how) as ranks:
        trainee = trainee_on(ranks, dtype, **settings)
        found = list(train(trainee, plan, Progress()))
        ours = all_of(trainee)
        assert_near(ours, all_of(alone), dtype)
        assert_same_everywhere(ranks, ours)
        for one, other in zip(found, expected, strict=True):
            if isinstance(one, Evaluation):
                assert one.batches == other.batches
                for view, loss in one.losses["held-out"].items():
                    torch.testing.assert_close(loss, other.losses["held-out"][view], rtol=2e-6, atol=0)
            else:
                assert (one.step, one.targets, one.lr) == (other.step, other.targets, other.lr)
                pairs = ((one.loss, other.loss), (one.grad_norm, other.grad_norm))
                assert all(abs(a - b) <= 1e-5 * abs(b) for a, b in pairs), (one, other)
        if how == "ddp":  # else a process may hang when the model goes
            assert [*vars(trainee.called).values()][-1] is trainee.called.process_group
        if how == "fsdp2":
            assert all(hasattr(p, "full_tensor") for p in trainee.model.parameters())
            state = next(iter(trainee.optimizer.state.values()))
            assert hasattr(state["average"], "full_tensor")


def parity():
    for how in ("ddp", "fsdp2"):
        print(how, "float64, an uneven batch, clipped", flush=True)
        compare(how, torch.float64, PLAN)
        print(how, "float32, every third step updates", flush=True)
        compare(how, torch.float32, PLAN, every=3)
    few = Plan(steps=6, batch_size=1, micro_batch_size=1, seed=3, evaluate_every=3)
    print("a rank without samples", flush=True)
    compare("fsdp2", torch.float64, few)


# --- What is agreed on ------------------------------------------------------------------------------


def faults(folder):
    for how in ("ddp", "fsdp2"):
        with together(how) as ranks:
            nan_on_one_rank(ranks)
            stop_of_one_rank(ranks)
            dropout(ranks)
            save_that_fails_on_one_rank(ranks, folder / how)


def nan_on_one_rank(ranks):
    """A bad share of one rank is a bad step of all: left out by all, or the end of all."""
    plan = Plan(steps=4, batch_size=4, micro_batch_size=4, seed=3, evaluate_every=4, max_skips=1)
    trainee = trainee_on(ranks, torch.float64, poison=iter([False, True, False, False]))
    skipped = []
    before_it = None
    for record in train(trainee, plan, Progress()):
        if isinstance(record, Step):
            skipped.append(record.skipped)
            if record.step == 1:
                before_it = all_of(trainee)
            if record.step == 2:
                after = all_of(trainee)
                assert all(torch.equal(before_it[name], after[name]) for name in after)
    assert skipped == [False, True, False, False]
    trainee = trainee_on(ranks, torch.float64, poison=iter([True]))
    said = ""
    try:
        list(
            train(
                trainee, Plan(steps=4, batch_size=4, micro_batch_size=4, seed=3, evaluate_every=4), Progress()
            )
        )
    except NotFiniteError as error:
        said = str(error)
    assert "at step 1" in said and "tokens.weight" in said, said


def stop_of_one_rank(ranks):
    """One is asked to stop, in a step or in an evaluation: all stop at the same place.

    It asks before the first step, once in each step, and in each round of an evaluation.
    """
    for every, question, place in (
        (9, 1, (0, True)),
        (9, 2, (1, True)),
        (9, 5, (4, True)),
        (1, 3, (1, False)),
    ):
        plan = Plan(steps=9, batch_size=4, micro_batch_size=4, seed=3, evaluate_every=every)
        progress = Progress()
        answers = iter(number == question and ranks.rank == ranks.size - 1 for number in range(1, 100))
        list(train(trainee_on(ranks, torch.float32), plan, progress, answers.__next__))
        assert (progress.step, progress.evaluated) == place, (question, progress)


def dropout(ranks):
    """Other numbers on each rank and in each step, and the same whenever that step is taken."""
    drawn = {}
    for step in (0, 1, 0):
        ranks.reseed(7, step)
        mine = torch.rand(4)
        everyone = ranks.gathered(mine.tolist())
        assert len({tuple(numbers) for numbers in everyone}) == ranks.size
        assert drawn.setdefault(step, everyone) == everyone
    assert drawn[0] != drawn[1]


def save_that_fails_on_one_rank(ranks, folder):
    """Every rank hears of it, and nothing is left of it; a checkpoint is the same whole on any ranks."""
    trainee = trainee_on(ranks, torch.float32)
    list(
        train(trainee, Plan(steps=1, batch_size=4, micro_batch_size=4, seed=3, evaluate_every=1), Progress())
    )
    state = checkpoint.collect(trainee.model, trainee.optimizer, ranks)
    if ranks.is_first:
        before("paceline.lm.checkpoint:_write_tensors", [1], _no_disk)
    said = ""
    try:
        checkpoint.save(folder, 1, state, {}, ranks)
    except OSError as error:
        said = str(error)
    assert "Input/output error" in said, said
    assert not ranks.is_first or list(folder.iterdir()) == []
    path = checkpoint.save(folder, 1, state, {"value": 1}, ranks)  # the disk works again
    ranks.gathered(None)
    found = checkpoint.load(path)
    assert found["facts"] == {"value": 1}
    own = {name: whole(tensor) for name, tensor in checkpoint.named_tensors(trainee.model).items()}
    assert all(torch.equal(found["live"][name], tensor) for name, tensor in own.items())
    mine = checkpoint.read(path, checkpoint.named_tensors(trainee.model))
    checkpoint.restore(trainee.model, trainee.optimizer, mine)
    bad = ranks.size - 1 if ranks.mesh is not None else 0
    part = next(trainee.model.parameters()).detach()
    (part.to_local() if hasattr(part, "to_local") else part)[0, 0] = torch.inf if ranks.rank == bad else 0.0
    try:
        checkpoint.save(folder, 2, checkpoint.collect(trainee.model, trainee.optimizer, ranks), {}, ranks)
    except NotFiniteError as error:
        said = str(error)
    assert "not finite at step 2" in said, said


def _no_disk():
    raise OSError(5, "Input/output error", "disk")


# --- Whole runs -------------------------------------------------------------------------------------


def command(words):
    from paceline.cli import main

    return main(words)


def signalled(words, step, number):
    """The command, with a signal to this rank in a step if it is the last rank."""
    if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        before(STEP, [step], os.kill, os.getpid(), number)
    return command(words)


def said(folder, size):
    return [(folder / f"said-{rank}").read_text() for rank in range(size)]
