"""PACE with FSDP2: every rank keeps its part of weights, moments and average, and steps on that alone.

    torchrun --nproc-per-node 2 examples/fsdp2.py

On CPUs as here; on GPUs with nccl, a mesh of "cuda" and batches that are there. Checkpoints are those of
torch.distributed.checkpoint: another number of ranks can load them.
"""

import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from paceline import PACE, averaged_weights, save_averaged

STEPS = 60


def make() -> tuple[nn.Module, PACE]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # else of GPUs, where there are any
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # The default adds up v̂ over all ranks, in one all-reduce a step; gain="paper" needs none.
    return model, PACE(model.parameters(), lr=1e-2)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)  # each rank its own
    x = torch.randn(32, 4, generator=generator)
    y = torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    return x, y + 0.5 * torch.randn(y.shape, generator=generator)


def train(model: nn.Module, optimizer: PACE, steps: range) -> None:
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()


def main(folder: Path) -> None:
    model, optimizer = make()
    train(model, optimizer, range(STEPS // 2))
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "checkpoint")

    model, optimizer = make()  # as after a crash
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / "checkpoint")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    train(model, optimizer, range(STEPS // 2, STEPS))

    with averaged_weights(optimizer, model), torch.no_grad():  # swapped part by part; nothing is gathered
        x, y = batch(-1)
        loss = (model(x) - y).square().mean().item()
    file = save_averaged(model, optimizer, folder / "returned.safetensors")  # on every rank; rank 0 writes
    print(f"rank {dist.get_rank()}: loss of the average {loss:.4f}, saved {file.name}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    main(Path(names[0]))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(names[0])
    dist.destroy_process_group()
