"""Run by test_distributed.py, one process a rank: `python ranks.py FOLDER SCENARIO…`, one after another."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from paceline import PACE, averaged_state_dict, averaged_weights, save_averaged

STEPS = 12


def make_model(seed=0):
    torch.manual_seed(seed)
    # 7 and 5 rows do not divide by 2 ranks; the bias of size 1 leaves one rank without any.
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def batch(step):
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return x, x.sin().sum(1, keepdim=True)


def train(model, optimizer, steps, share=slice(None)):
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        (model(x[share]) - y[share]).square().mean().backward()
        optimizer.step()


def make_optimizer(model, **settings):
    return PACE(
        model.parameters(),
        **{"lr": 1e-2, "gain": "paper", "pullback_strength": 0.3, "return_power": 0.8, **settings},
    )


def alone(**settings):
    """What one process makes of the same batches."""
    model = make_model()
    optimizer = make_optimizer(model, **settings)
    train(model, optimizer, range(STEPS))
    return model, optimizer


def my_share():
    rank, size = dist.get_rank(), dist.get_world_size()
    return slice(rank * 8 // size, (rank + 1) * 8 // size)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_close(ours, expected, what):
    assert torch.allclose(full(ours), expected, rtol=1e-12, atol=1e-12), what


def assert_like_alone(model, optimizer, **settings):
    expected_model, expected = alone(**settings)
    for (name, p), q in zip(model.named_parameters(), expected_model.parameters(), strict=True):
        assert_close(p.detach(), q.detach(), name)
        for key in ("exp_avg", "exp_avg_sq", "average", "returned"):
            assert_close(optimizer.state[p][key], expected.state[q][key], f"{name} {key}")


def snapshot(optimizer):
    local = {}
    for i, (p, state) in enumerate(optimizer.state.items()):
        for key, value in {"weights": p.detach(), **state}.items():
            local[i, key] = (value.to_local() if isinstance(value, DTensor) else value).clone()
    return local


def assert_same(before, after):
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)


def ddp(folder):
    """The optimizer is made first; DDP then broadcasts rank 0's weights, and the average follows."""
    model = make_model(seed=dist.get_rank())
    optimizer = make_optimizer(model)
    wrapped = DistributedDataParallel(model)
    train(wrapped, optimizer, range(STEPS), my_share())
    assert_like_alone(model, optimizer)
    for (_, key), value in snapshot(optimizer).items():
        others = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(others, value)
        assert all(torch.equal(value, other) for other in others), f"{key} differs between ranks"
    exported = make_model(seed=9)
    exported.load_state_dict(averaged_state_dict(wrapped, optimizer))
    x, _ = batch(0)
    before = snapshot(optimizer)
    with averaged_weights(optimizer), torch.no_grad():
        assert torch.equal(wrapped(x), exported(x))
    assert_same(before, snapshot(optimizer))
    save_averaged(wrapped, optimizer, folder / "ddp")


def shard(model):
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer)
    return fully_shard(model)


def fsdp2(folder, **settings):
    model = shard(make_model())
    optimizer = make_optimizer(model, **settings)
    train(model, optimizer, range(STEPS), my_share())
    for p in model.parameters():
        for key in ("exp_avg", "exp_avg_sq", "average", "returned"):
            assert optimizer.state[p][key].placements == p.placements
    assert_like_alone(model, optimizer, **settings)
    before = snapshot(optimizer)
    exported = make_model(seed=9)
    exported.load_state_dict({k: full(v) for k, v in averaged_state_dict(model, optimizer).items()})
    x, _ = batch(0)
    with averaged_weights(optimizer, model), torch.no_grad():
        assert torch.equal(model(x), exported(x))
    assert_same(before, snapshot(optimizer))
    file = save_averaged(model, optimizer, folder / "fsdp2")
    if dist.get_rank() == 0:
        from safetensors.torch import load_file

        assert all(torch.equal(v, exported.state_dict()[k]) for k, v in load_file(file).items())


def fsdp2_loop(folder):
    fsdp2(folder, foreach=False)


def fsdp2_foreach(folder):
    fsdp2(folder, foreach=True)


def fsdp2_scaled(folder):
    """rms over the whole model."""
    for foreach in (True, False):
        fsdp2(folder, gain="scaled", pullback_strength=60.0, foreach=foreach)


def fsdp2_made_before(folder):
    """An optimizer made for the whole model, whose groups are then given the parts, as Accelerate does it:
    state follows, that of the whole is gone, and a checkpoint can be loaded before the first step."""

    def made_before():
        model = make_model()
        optimizer = make_optimizer(model)
        shard(model)
        optimizer.param_groups[0]["params"] = list(model.parameters())
        return model, optimizer

    model, optimizer = made_before()
    train(model, optimizer, range(5), my_share())
    assert set(optimizer.state) == set(model.parameters())
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "made-before")
    again, resumed = made_before()
    weights, state = get_state_dict(again, resumed)
    assert set(resumed.state) == set(again.parameters())
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / "made-before")
    set_state_dict(again, resumed, model_state_dict=weights, optim_state_dict=state)
    train(again, resumed, range(5, STEPS), my_share())
    assert_like_alone(again, resumed)


def fsdp2_dcp(folder):
    """A checkpoint of FSDP2 resumes bit for bit; AdamW's comes in through an AdamW."""
    model = shard(make_model())
    optimizer = make_optimizer(model)
    train(model, optimizer, range(5), my_share())
    optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "dcp")
    train(model, optimizer, range(5, STEPS), my_share())

    again = shard(make_model(seed=4))
    resumed = make_optimizer(again)
    weights, state = get_state_dict(again, resumed)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=folder / "dcp")
    set_state_dict(again, resumed, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    train(again, resumed, range(5, STEPS), my_share())
    assert_same(snapshot(optimizer), snapshot(resumed))

    model = shard(make_model())
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, adamw, range(5), my_share())
    adamw.zero_grad()
    pace = PACE(model.parameters(), pullback_strength=0.0, ema_power=0.5)
    pace.load_state_dict(adamw.state_dict())
    live = [p.detach().clone() for p in model.parameters()]
    train(model, pace, range(5, 6), my_share())
    for p, start in zip(model.parameters(), live, strict=True):
        assert pace.state[p]["step"].item() == 6
        expected = full(start) + 7**-0.5 * (full(p.detach()) - full(start))
        assert_close(pace.state[p]["average"], expected, "seeded from the weights at load")


def fsdp2_residuals(folder):
    """bfloat16 residuals of sharded weights: near those of one process, shown and resumed to the bit."""
    settings = {"lr": 1e-2, "gain": "paper", "pullback_strength": 0.3, "average_dtype": "bfloat16"}

    def batches(model, optimizer, steps, share=slice(None)):
        for step in steps:
            x, y = (value.float()[share] for value in batch(step))
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()

    alone = make_model().float()
    expected = PACE(alone.parameters(), **settings)
    batches(alone, expected, range(STEPS))
    for foreach in (False, True):
        model = shard(make_model().float())
        optimizer = PACE(model.parameters(), foreach=foreach, **settings)
        batches(model, optimizer, range(5), my_share())
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / f"dcp{foreach}")
        batches(model, optimizer, range(5, STEPS), my_share())
        ours, theirs = dict(optimizer.returned_averages()), dict(expected.returned_averages())
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            residual = optimizer.state[p]["average_residual"]
            assert residual.placements == p.placements and residual.dtype == torch.bfloat16
            assert torch.allclose(full(ours[p]), theirs[q], rtol=0, atol=1e-3)
        before, shown = (
            snapshot(optimizer),
            {k: full(v) for k, v in averaged_state_dict(model, optimizer).items()},
        )
        with averaged_weights(optimizer, model):
            assert all(torch.equal(full(p.detach()), shown[name]) for name, p in model.named_parameters())
        assert_same(before, snapshot(optimizer))

        again = shard(make_model(seed=4).float())
        resumed = PACE(again.parameters(), foreach=foreach, **settings)
        weights, state = get_state_dict(again, resumed)
        loaded = {"model": weights, "optimizer": state}
        dcp.load(loaded, checkpoint_id=folder / f"dcp{foreach}")
        set_state_dict(again, resumed, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        batches(again, resumed, range(5, STEPS), my_share())
        assert_same(snapshot(optimizer), snapshot(resumed))


def unwritable(folder):
    """Rank 0 cannot write: every rank hears of it at once."""
    model = shard(make_model())
    optimizer = make_optimizer(model)
    train(model, optimizer, range(2), my_share())
    blocked = folder / "file"
    blocked.write_text("not a folder")
    started = time.monotonic()
    try:
        save_averaged(model, optimizer, blocked / "out")
    except (OSError, RuntimeError) as error:
        assert "file" in str(error), error
    else:
        raise AssertionError("nothing was raised")
    assert time.monotonic() - started < 30


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    import ranks_checkpoints  # which import this module, under its own name
    import ranks_training

    scenarios = {**globals(), **vars(ranks_training), **vars(ranks_checkpoints)}
    for name in sys.argv[2:]:
        print(
            f"{time.process_time():.1f} s: {name}", flush=True
        )  # the last one printed is the one that failed
        room = Path(sys.argv[1]) / name
        room.mkdir(exist_ok=True)
        scenarios[name](room)
        dist.barrier()
    dist.destroy_process_group()
