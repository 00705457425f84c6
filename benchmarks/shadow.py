"""How far averages that are kept in few bits are from the same in float64, in a whole training run.

    python benchmarks/shadow.py --data FOLDER [--record FILE]
        a GPT on the tokens of a folder that `paceline data` made, once for each storage and power of the
        average; at every step a shadow of the average is moved in float64 by the same live weights

The error is the root mean square of what the average is off, as a share of that of live - average.
"""

import argparse
import json
from pathlib import Path
from typing import Any, get_args

import torch

from paceline import PACE
from paceline.experiments.bench.command import environment
from paceline.experiments.data import open_prepared
from paceline.lm.batch import numbers_at
from paceline.lm.evaluate import autocast, summed_loss
from paceline.lm.gpt import GPT, shape_of
from paceline.lm.shards import Windows
from paceline.optim import parameter_groups
from paceline.optim.recipe import AverageDtype
from paceline.optim.state import average_of

POWERS = (0.3, 0.5, 0.7)


class Shadow:
    """The average of a parameter in float64, by the formula of the paper."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter, self.value = parameter, parameter.detach().double()

    def move(self, rate: float) -> None:
        self.value.mul_(1 - rate).add_(self.parameter.detach().double(), alpha=rate)


def trained(options: argparse.Namespace, samples: Windows, storage: str, power: float) -> dict[str, Any]:
    """One run, and how far its average has come from its shadow."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = GPT(shape_of(options.model, options.vocabulary, options.length)).to(device)
    settings = {"gain": "paper", "ema_power": power, "average_dtype": storage}
    optimizer = PACE(parameter_groups(model, 0.01), lr=options.lr, **settings)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shadows = [Shadow(parameter) for parameter in parameters]
    loss = torch.zeros(())
    for t in range(1, options.steps + 1):
        numbers = numbers_at(t - 1, batch_size=options.batch_size, samples=len(samples), seed=0)
        batch = samples.batch(numbers).to(device)
        with autocast(device, torch.bfloat16 if device.type == "cuda" else torch.float32):
            loss = summed_loss(model, batch) / batch.targets.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for shadow in shadows:
            shadow.move((1 + t) ** -power)
    off = gap = size = 0.0
    for shadow in shadows:
        average = average_of(optimizer.state[shadow.parameter], "average", shadow.parameter).double()
        live = shadow.parameter.detach().double()
        off += (average - shadow.value).square().sum().item()
        gap += (live - shadow.value).square().sum().item()
        size += live.square().sum().item()
    return {
        "average_dtype": storage,
        "power": power,
        "error": (off / gap) ** 0.5,
        "of_the_weights": (off / size) ** 0.5,
        "last_loss": loss.item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="a folder of tokens")
    parser.add_argument("--model", default="gpt:7m")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--record", type=Path, help="write the result to this JSON file")
    options = parser.parse_args()
    tokens = open_prepared(options.data).training
    options.vocabulary = tokens.vocabulary
    samples, rows = Windows(tokens, options.length), []
    for storage in get_args(AverageDtype):
        for power in POWERS:
            rows.append(trained(options, samples, storage, power))
            row = rows[-1]
            of = f"{row['error']:.2e} of live - average, {row['of_the_weights']:.2e} of the weights"
            print(f"{storage:9} power {power}: off by {of}; loss {row['last_loss']:.3f}")
    if options.record:
        about = {k: getattr(options, k) for k in ("model", "length", "batch_size", "steps", "lr")}
        device = "cuda" if torch.cuda.is_available() else "cpu"
        result = {"benchmark": "shadow", **environment(device), "settings": about, "rows": rows}
        options.record.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
