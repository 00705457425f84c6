"""What FSDP2 adds to a step of PACE: `python benchmarks/fsdp2.py` on one GPU.

GPT-2 124M, its parameters once as they are and once sharded by `fully_shard` over one rank. Both steps take
turns in each round, eager and captured in a CUDA graph.
"""

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from paceline import PACE, Control, parameter_groups
from paceline.bench.command import environment
from paceline.bench.measure import captured, in_turns
from paceline.bench.subjects import SEED
from paceline.lm.gpt import GPT, shape_of

CONTROLS = {"paper": Control.paper(), "push": Control.push()}


def make(device: str, *, small: bool, sharded: bool, control: Control) -> PACE:
    """Return an optimizer of a GPT with random gradients."""
    torch.manual_seed(SEED)
    model: nn.Module = GPT(shape_of("gpt:0.3m" if small else "gpt2", 50257, 128)).to(device)
    if sharded:
        for module in list(model.modules()):
            if isinstance(module, nn.ModuleList):
                for block in module:
                    fully_shard(block)
        fully_shard(model)
    optimizer = PACE(parameter_groups(model, 0.01), lr=1e-3, control=control)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return optimizer


def row_of(name: str, options: argparse.Namespace, device: str) -> dict[str, Any]:
    """Return the medians of both steps and their ratio."""
    made = {
        kind: make(device, small=options.small, sharded=kind == "FSDP2", control=CONTROLS[name])
        for kind in ("bare", "FSDP2")
    }
    steps: dict[str, Any] = {kind: optimizer.step for kind, optimizer in made.items()}
    row: dict[str, Any] = {"control": name}
    for what in ("eager", "graph") if device == "cuda" else ("eager",):
        if what == "graph":
            steps = {kind: captured(step) for kind, step in steps.items()}
        times = in_turns(steps, device, options.seconds)
        medians = {kind: statistics.median(values) for kind, values in times.items()}
        row[what] = {**medians, "ratio": medians["FSDP2"] / medians["bare"]}
        print(f"{name}, {what}: {medians['FSDP2']:.3f} ms, {row[what]['ratio']:.3f} of the bare step")
    return row


def main() -> None:
    """Measure each control, and write a record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each pair of steps [2]")
    parser.add_argument(
        "--small", action="store_true", help="a tiny model, also on a CPU, to try this script"
    )
    parser.add_argument("--record", type=Path, help="write the result to this JSON file")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.small:
        raise SystemExit("benchmarks/fsdp2.py needs a GPU, or --small")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rows = [row_of(name, options, device) for name in CONTROLS]
    if options.record:
        about = {"benchmark": "fsdp2", **environment(device), "seed": SEED, "seconds": options.seconds}
        options.record.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
