"""An EMA teacher without a second model: the student trains, its average is the teacher.

Run `python examples/teacher.py`. Few examples have labels here; on the others the student is taught to agree
with its own average (Mean Teacher, arXiv 1703.01780). It takes seconds on a CPU.
"""

import math

import torch
from torch import nn
from torch.func import functional_call

from paceline import PACE, Control, averaged_tensors, averaged_weights

STEPS = 600


def moons(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points on two half circles that reach into each other, and the half of each."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.arange(size) % 2
    angle = math.pi * torch.rand(size, generator=generator)
    x = torch.stack([torch.cos(angle), torch.sin(angle)], 1)
    x = torch.where(half[:, None] == 1, torch.tensor([1.0, 0.5]) - x, x)
    return x + 0.1 * torch.randn(size, 2, generator=generator), half


def accuracy(model: nn.Module) -> float:
    x, half = moons(4000, seed=2)
    with torch.no_grad():
        return (model(x).argmax(1) == half).float().mean().item()


def train(agreement: float) -> tuple[nn.Module, PACE]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = PACE(model.parameters(), lr=3e-3, control=Control.push())
    x, labels = moons(8, seed=0)  # all that has labels
    others, _ = moons(1000, seed=1)
    for step in range(STEPS):
        loss = nn.functional.cross_entropy(model(x), labels)
        if agreement and step > 0:  # the average begins at the first step
            teacher = averaged_tensors(model, optimizer)  # nothing is copied
            with torch.no_grad():
                said = functional_call(model, teacher, others).softmax(1)
            student = model(others + 0.1 * torch.randn_like(others)).softmax(1)
            loss = loss + agreement * (student - said).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, optimizer


def main() -> None:
    for agreement, name in ((0.0, "labels alone"), (10.0, "with a teacher")):
        model, optimizer = train(agreement)
        with averaged_weights(optimizer):
            print(f"{name}: accuracy {accuracy(model):.4f}")


if __name__ == "__main__":
    main()
