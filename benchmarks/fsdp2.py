"""What FSDP2 adds to a step of PACE: `python benchmarks/fsdp2.py` on one GPU.

GPT-2 124M, its parameters once as they are and once sharded by `fully_shard` over one rank; both steps take
turns in each round. To be shown: at most 1.02 times the bare step while the device is busy with it, and the
same path.
"""

import argparse
import json
import os
import statistics
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from paceline import PACE, parameter_groups
from paceline.experiments.bench.command import environment
from paceline.experiments.bench.measure import busy_seconds, seconds
from paceline.lm.gpt import GPT, shape_of


def make(options: argparse.Namespace, device: str, sharded: bool, gain: str) -> PACE:
    torch.manual_seed(0)
    model: nn.Module = GPT(shape_of("gpt:0.3m" if options.small else "gpt2", 50257, 128)).to(device)
    if sharded:
        for module in list(model.modules()):
            if isinstance(module, nn.ModuleList):
                for block in module:
                    fully_shard(block)
        fully_shard(model)
    optimizer = PACE(parameter_groups(model, 0.01), lr=1e-3, gain=gain)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument(
        "--small", action="store_true", help="a tiny model, also on a CPU, to try this program"
    )
    parser.add_argument("--record", type=Path, help="write the figures here")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.small:
        raise SystemExit("benchmarks/fsdp2.py needs a GPU: on a CPU there is no kernel to keep")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("nccl" if device == "cuda" else "gloo")

    rows = []
    for gain in ("paper", "scaled"):
        optimizers = {kind: make(options, device, kind == "FSDP2", gain) for kind in ("bare", "FSDP2")}
        busy: dict[str, list[float]] = {kind: [] for kind in optimizers}
        wall: dict[str, list[float]] = {kind: [] for kind in optimizers}
        for optimizer in optimizers.values():
            for _ in range(3):
                optimizer.step()
        for _ in range(options.rounds):
            for kind, optimizer in optimizers.items():
                wall[kind].append(seconds(optimizer.step, device))
                busy[kind].append(busy_seconds(optimizer.step, device, ahead=min(wall[kind])))
        paths = {kind: repr(own).splitlines()[-2].partition(": ")[2] for kind, own in optimizers.items()}
        row = {"gain": gain, "path": paths["FSDP2"]}
        for what, found in (("busy", busy), ("wall", wall)):
            medians = {kind: 1e3 * statistics.median(times) for kind, times in found.items()}
            row[what] = {**medians, "ratio": medians["FSDP2"] / medians["bare"]}
        rows.append(row)
        print(f"{gain}: {row['path']}")
        for what, meaning in (("busy", "busy with it"), ("wall", "from an idle device to an idle one")):
            print(f"  {meaning}: {row[what]['FSDP2']:.3f} ms, {row[what]['ratio']:.3f} of the bare step")
        assert device == "cpu" or paths["FSDP2"] == paths["bare"], paths
    if options.record:
        about = {"benchmark": "fsdp2", **environment(device), "rounds": options.rounds, "rows": rows}
        options.record.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
