"""PACE in a loop of your own: train, evaluate the average, save it, resume.

Run `python examples/plain_loop.py`. A small network learns a function from noisy examples, on a CPU, in
seconds. Only the lines marked # PACE differ from a loop with torch.optim.AdamW.
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from paceline import PACE, Control, averaged_weights, save_averaged  # PACE

STEPS = 400


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def loss_of(model: nn.Module, step: int, size: int = 32, noise: float = 0.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size, 4, generator=generator)
    y = torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3] + noise * torch.randn(size, 1, generator=generator)
    return (model(x) - y).square().mean()


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    return loss_of(model, step=2**20, size=4000, noise=0.0).item()


def train(folder: Path, until: int) -> tuple[nn.Module, PACE]:
    """Train from the last checkpoint, if there is one."""
    model = make_model()
    optimizer = PACE(model.parameters(), lr=1e-2, control=Control.push(grow=STEPS))  # PACE
    step, checkpoint = 0, folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while step < until:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        step += 1
    print(f"step {step}: live {evaluate(model):.4f}")
    with averaged_weights(optimizer):  # PACE
        print(f"step {step}: average {evaluate(model):.4f}")
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(saved, checkpoint)  # live weights and averages: training resumes from them, bit for bit
    return model, optimizer


def main(folder: Path) -> None:
    train(folder, until=STEPS // 2)  # and then something went wrong
    model, optimizer = train(folder, until=STEPS)
    file = save_averaged(model, optimizer, folder / "returned.safetensors")  # PACE
    returned = make_model()
    returned.load_state_dict(load_file(file))
    print(f"returned: {evaluate(returned):.4f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
