"""Trainers on several ranks of a CPU: `python benchmarks/trainers.py distances`, and `bytes`.

`distances` trains every trainer of the tests on two ranks next to one process, and prints how far apart they
end. `bytes` prints what an optimizer allocates on each of two and four ranks under FSDP2. There it is made by
Accelerate, before the model is sharded.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline import PACE, Control, attach
from paceline.bench.command import environment

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integrations"))

from loops import accelerator_of
from ranks import compared, get_ready, has_ended, start
from trainers import ON_TWO_RANKS
from watching import Run, llama, loss_of

OPTIMIZERS = {
    "paper": (1, lambda parameters: PACE(parameters, 1e-3)),
    "push": (2, lambda parameters: PACE(parameters, 1e-3, control=Control.push())),
    "AdamW and push": (
        2,
        lambda parameters: attach(torch.optim.AdamW(parameters, 1e-3), control=Control.push()),
    ),
}


def distances(kills: int, folder: Path) -> list[dict[str, Any]]:
    """Return for each trainer and case what is compared → the largest difference."""
    rows = []
    for name in ON_TWO_RANKS:
        for case in ON_TWO_RANKS[name]:
            found = compared(name, case, folder, kills)
            rows.append({"trainer": name, "case": case, **found})
            print(
                f"{name} | {case} | " + " | ".join(f"{what} {value:.1e}" for what, value in found.items()),
                flush=True,
            )
    return rows


# --- Bytes ------------------------------------------------------------------------------------------------


def bytes_of_tensors() -> int:
    """Return the bytes of all tensors of this process, each storage once."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, nn.Parameter) and each.device.type != "meta":
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def write_row(name: str, file: Path) -> None:
    """Write the bytes that an optimizer adds on a rank, and the most that its state may take."""
    averages, build = OPTIMIZERS[name]
    ranks = int(os.environ["WORLD_SIZE"])
    accelerator = accelerator_of(Run(folder=Path(), build=build, ranks=ranks, format="full"))
    model = llama(hidden_size=64, intermediate_size=128)
    weights, begin = sum(parameter.numel() for parameter in model.parameters()), bytes_of_tensors()
    optimizer = build(model.parameters())
    built = bytes_of_tensors() - begin
    model, wrapped = accelerator.prepare(model, optimizer)
    inside: list[int] = []
    optimizer.register_step_post_hook(lambda *_: inside.append(bytes_of_tensors()))
    loss_of(model).backward()
    before = bytes_of_tensors()
    wrapped.step()
    row = {"before the step": built, "at it": inside[0] - before, "after it": bytes_of_tensors() - before}
    row |= {"allowed": (8 + 4 * averages) * weights // ranks, "weights": weights}
    if accelerator.is_main_process:
        file.write_text(json.dumps(row))


def state_bytes(folder: Path) -> list[dict[str, Any]]:
    """Return a row for each optimizer on two and on four ranks, of the first rank."""
    rows = []
    for ranks in (2, 4):
        for name in OPTIMIZERS:
            has_ended(start(ranks, write_row, name, folder / "row.json"))
            rows.append({"optimizer": name, "ranks": ranks, **json.loads((folder / "row.json").read_text())})
            print(rows[-1])
    return rows


def main() -> None:
    """Print a table, and put it into a record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("table", choices=("distances", "bytes"))
    parser.add_argument("--kills", type=int, default=4, help="of each sharded case of distances [4]")
    parser.add_argument("--record", type=Path, help="put the result into this JSON file, next to the other")
    options = parser.parse_args()
    get_ready(ON_TWO_RANKS)
    with tempfile.TemporaryDirectory() as folder:
        is_bytes = options.table == "bytes"
        rows = state_bytes(Path(folder)) if is_bytes else distances(options.kills, Path(folder))
    if options.record:
        known = json.loads(options.record.read_text()) if options.record.exists() else {}
        own = {"benchmark": "trainers", **environment("cpu"), options.table: rows}
        options.record.write_text(json.dumps(known | own, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
