"""PACE in a loop with Accelerate: evaluated and saved is the average.

Run `python examples/accelerate_example.py`, or `accelerate launch` it on what you have. A small network
learns a noisy function in seconds. Only the lines marked # PACE differ from a loop with AdamW.
"""

import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import PACE, Control, averaged_weights, save_averaged  # PACE


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))


def noisy(rows: int, noise: float) -> TensorDataset:
    x = torch.rand(rows, 4) * 4 - 2
    return TensorDataset(x, torch.sin(x).sum(1, keepdim=True) + noise * torch.randn(rows, 1))


@torch.no_grad()
def loss_of(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    x, y = (tensor.to(device) for tensor in data.tensors)
    return float((model(x) - y).square().mean())


def main(out: Path) -> None:
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    held_out = noisy(1000, noise=0.0)
    loader = DataLoader(noisy(4096, noise=1.0), batch_size=32, shuffle=True)
    model = network()
    optimizer = PACE(model.parameters(), lr=3e-2, control=Control.push())  # PACE
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    for epoch in range(4):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - y).square().mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        accelerator.save_state(out / f"epoch-{epoch}")  # accelerator.load_state resumes from live
        live = loss_of(model, held_out, accelerator.device)
        with averaged_weights(optimizer):  # PACE
            average = loss_of(model, held_out, accelerator.device)
        accelerator.print(f"epoch {epoch}\n    live: loss {live:.4f}\n average: loss {average:.4f}")

    file = save_averaged(model, optimizer, out)  # PACE
    if accelerator.is_main_process:
        returned = network().to(accelerator.device)
        returned.load_state_dict(load_file(file))
        print(f"returned: loss {loss_of(returned, held_out, accelerator.device):.4f}, in {file.name}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
