"""How far averages in few bits are from the same averages in float64, in a whole training run.

    python benchmarks/storage.py --data FOLDER [--record FILE]
        a GPT on the tokens of a folder that `paceline data` made

Each storage and power of the average has a run of its own. At every step a shadow of the average moves in
float64 by the same live weights. The error is the root mean square of the difference between average and
shadow, as a share of that of live - average.
"""

import argparse
import json
from pathlib import Path
from typing import Any, get_args

import torch

from paceline import PACE, Control, averaged_weights, parameter_groups
from paceline.bench.command import environment
from paceline.lm.batch import numbers_at
from paceline.lm.evaluate import autocast, summed_loss
from paceline.lm.gpt import GPT, shape_of
from paceline.lm.shards import Windows
from paceline.optim.settings import AverageDtype
from paceline.runs.data import open_prepared

POWERS = (0.3, 0.5, 0.7)
SEED = 0


def trained(options: argparse.Namespace, samples: Windows, storage: AverageDtype, power: float) -> Any:
    """Train once, and return how far the average has come from its shadow."""
    torch.manual_seed(SEED)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = GPT(shape_of(options.model, options.vocabulary, options.length)).to(device)
    control = Control.paper(power=power)
    optimizer = PACE(parameter_groups(model, 0.01), lr=options.lr, control=control, average_dtype=storage)
    parameters = list(model.parameters())
    shadows = [parameter.detach().double() for parameter in parameters]
    loss = torch.zeros(())
    for t in range(1, options.steps + 1):
        numbers = numbers_at(t - 1, batch_size=options.batch_size, samples=len(samples), seed=SEED)
        batch = samples.batch(numbers).to(device)
        with autocast(device, torch.bfloat16 if device.type == "cuda" else torch.float32):
            loss = summed_loss(model, batch) / batch.targets.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for shadow, parameter in zip(shadows, parameters, strict=True):
            shadow.lerp_(parameter.detach().double(), control.rate(t, power))
    gap = sum((p.detach().double() - s).square().sum() for p, s in zip(parameters, shadows, strict=True))
    with averaged_weights(optimizer):  # parameters hold the average here
        off = sum((p.detach().double() - s).square().sum() for p, s in zip(parameters, shadows, strict=True))
    error = torch.as_tensor(off / gap).sqrt().item()
    return {"average_dtype": storage, "power": power, "error": error, "last_loss": loss.item()}


def main() -> None:
    """Train with each storage and power, and write a record if asked to."""
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
            row = trained(options, samples, storage, power)
            rows.append(row)
            print(f"{storage:9} power {power}: off by {row['error']:.2e}; loss {row['last_loss']:.3f}")
    if options.record:
        settings = {k: getattr(options, k) for k in ("model", "length", "batch_size", "steps", "lr")}
        device = "cuda" if torch.cuda.is_available() else "cpu"
        about = {"benchmark": "storage", **environment(device), "seed": SEED, "settings": settings}
        options.record.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
