"""What the ranks of test_every_trainer.py run: `torchrun ranks.py ROW FOLDER STAGE CASE...`.

The first rank prints how far apart what should be equal is. One process has trained the same before, without
saving, and has left its weights and losses in FOLDER.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from trainers import ON_TWO_RANKS, ROWS, fsdp2_on_cpu
from watching import KINDS, SAVED, STEPS, Watch, Weights


def distance(a: Weights, b: Weights) -> float:
    """Return how far weights are from others, in their own precision."""
    assert a.keys() == b.keys()
    return max((a[name].double() - b[name].to(a[name].dtype).double()).abs().max().item() for name in b)


def apart(one: Watch, live: Weights, average: Weights) -> float:
    return max(distance(one.live[-1], live), distance(one.average[-1], average))


def run(row_name: str, folder: Path, stage: str, case: str) -> dict[str, float]:
    """Return what is compared → how far it is apart."""
    row, (kind, how) = ROWS[row_name], ON_TWO_RANKS[row_name][case]
    settings = {"ranks": 2, **how}
    place = folder / case.replace(" ", "-")
    if stage == "killed":
        row.train(place / "killed", KINDS[kind], fail="killed", **settings)
    if stage == "resumed":
        resumed = row.train(place / "killed", KINDS[kind], resume=True, **settings)
        return {"killed and resumed": apart(resumed, *torch.load(f"{place}-ended.pt"))}
    if how["format"] and row_name in ("transformers", "lightning"):
        with pytest.raises((ValueError, RuntimeError), match="average_dtype='bfloat16'"):
            row.train(place / "int8", KINDS["int8"], **settings)
    live, average, losses = torch.load(f"{place}.pt")
    silent = row.train(place / "silent", KINDS[kind], saves=False, **settings)
    found = {
        "live": distance(silent.live[-1], live),
        "average": distance(silent.average[-1], average),
        "losses": max(abs(silent.losses[name] - loss) for name, loss in losses.items()),
    }
    assert silent.losses.keys() == losses.keys() and len(losses) >= 9, (silent.losses, losses)
    straight = row.train(place / "out", KINDS[kind], **settings)
    dist.barrier()
    found["saving"] = apart(straight, silent.live[-1], silent.average[-1])
    if dist.get_rank() == 0:
        torch.save((straight.live[-1], straight.average[-1]), f"{place}-ended.pt")
        for step in (SAVED, STEPS):
            saved = row.saved(straight, place / "out", step)
            of = straight.live[step], straight.average[step]
            found["saved"] = max(map(distance, saved, of))
    resumed = row.train(place / "out", KINDS[kind], resume=True, **settings)
    assert len(resumed.live) == STEPS - SAVED + 1
    found["resumed"] = apart(resumed, straight.live[-1], straight.average[-1])
    if row_name in ("transformers", "trl", "trl with LoRA", "lightning"):
        found["returned"] = distance(silent.returned(), silent.average[-1])
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    _, row_name, folder, stage, *cases = sys.argv
    fsdp2_on_cpu()
    found = {case: run(row_name, Path(folder), stage, case) for case in cases}
    if dist.get_rank() == 0:
        print("FOUND", json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()
