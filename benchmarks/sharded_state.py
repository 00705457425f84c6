"""What PACE allocates on each rank under FSDP2: `torchrun --nproc-per-node 2 benchmarks/sharded_state.py`.

Accelerate makes the optimizer before it shards the model. The script counts the bytes of all tensors
of a rank before the first step, at its end and after it. It fails if the state is larger than its share.
"""

import argparse
import gc
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline import PACE, Control, attach

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integrations"))

from trainers import accelerator_of, fsdp2_on_cpu
from watching import Run, llama, loss_of

OPTIMIZERS = {
    "paper": (1, lambda parameters: PACE(parameters, 1e-3)),
    "push": (2, lambda parameters: PACE(parameters, 1e-3, control=Control.push())),
    "AdamW": (2, lambda parameters: attach(torch.optim.AdamW(parameters, 1e-3), control=Control.push())),
}


def bytes_of_tensors() -> int:
    """Return the bytes of all tensors of this process, each storage once."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, nn.Parameter) and each.device.type != "meta":
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def row_of(name: str) -> dict[str, Any]:
    """Return the bytes that an optimizer adds on a rank, and the most that its state may take."""
    averages, build = OPTIMIZERS[name]
    ranks = int(os.environ["WORLD_SIZE"])
    accelerator = accelerator_of(Run(folder=Path(), build=build, ranks=ranks, format="full"))
    model = llama(hidden_size=64, intermediate_size=128)
    weights, start = sum(parameter.numel() for parameter in model.parameters()), bytes_of_tensors()
    optimizer = build(model.parameters())
    built = bytes_of_tensors() - start
    model, wrapped = accelerator.prepare(model, optimizer)
    inside: list[int] = []
    optimizer.register_step_post_hook(lambda *_: inside.append(bytes_of_tensors()))
    loss_of(model).backward()
    before = bytes_of_tensors()
    wrapped.step()
    row = {"built": built, "at the step": inside[0] - before, "after": bytes_of_tensors() - before}
    allowed = (8 + 4 * averages) * weights / ranks
    # A step count for each parameter, and rows that do not divide by the ranks, come on top.
    assert max(row.values()) <= 1.02 * allowed + 2048, (name, row, allowed)
    return row | {"allowed": allowed, "weights": weights}


def main() -> None:
    """Print a row for each optimizer, of the first rank."""
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    fsdp2_on_cpu()
    for name in OPTIMIZERS:
        row = row_of(name)
        if dist.get_rank() == 0:
            print(f"{name} on {dist.get_world_size()} ranks: {row}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
