"""PACE with FSDP2: every rank keeps and steps its part of weights, moments and averages.

Run `torchrun --nproc-per-node 2 examples/fsdp2.py FOLDER`, where FOLDER is for checkpoint and result. It runs
on CPUs; on GPUs use nccl and a mesh of "cuda". Another number of ranks can load its checkpoints.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from paceline import PACE, Control, averaged_weights, save_averaged

STEPS = 60


def make() -> tuple[nn.Module, PACE]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, PACE(model.parameters(), lr=1e-2, control=Control.push(grow=STEPS))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)  # each rank its own batch
    x = torch.randn(32, 4, generator=generator)
    y = torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3] + 0.5 * torch.randn(32, 1, generator=generator)
    return (model(x) - y).square().mean()


def train(model: nn.Module, optimizer: PACE, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
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

    with averaged_weights(optimizer, model=model), torch.no_grad():  # part by part; nothing is gathered
        loss = loss_of(model, STEPS).item()
    file = save_averaged(model, optimizer, folder / "returned.safetensors")  # on every rank; rank 0 writes
    print(f"rank {dist.get_rank()}: loss of the average {loss:.4f}, saved {file.name}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
