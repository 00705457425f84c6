"""PACE in a loop of your own: train, evaluate the average, save it, resume.

Run it with `python examples/plain_loop.py`: a small network learns a function from noisy examples, on a CPU,
in seconds. Lines marked # PACE are all that differs from a loop with torch.optim.AdamW.
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from paceline import PACE, averaged_weights, save_averaged  # PACE

STEPS = 400


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def batch(step: int, size: int = 32, noise: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size, 4, generator=generator)
    y = torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    return x, y + noise * torch.randn(y.shape, generator=generator)


def loss_of(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = data
    return (model(x) - y).square().mean()


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    return loss_of(model, batch(-1, size=4000, noise=0.0)).item()


def train(folder: Path, until: int) -> tuple[nn.Module, PACE]:
    """From the last checkpoint, if there is one."""
    model = make_model()
    optimizer = PACE(model.parameters(), lr=1e-2)  # PACE
    step, checkpoint = 0, folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while step < until:
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        optimizer.step()
        step += 1
        if step % 100 == 0:
            live = evaluate(model)
            with averaged_weights(optimizer):  # PACE
                print(f"step {step}: average {evaluate(model):.4f}, live {live:.4f}")
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(saved, checkpoint)  # live weights and all that it takes to go on, to the bit
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
