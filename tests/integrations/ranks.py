"""Trainers on two ranks: `python ranks.py FOLDER KILLS ROW CASE [ROW CASE...]` prints what it has found.

A rank is a fork of this process, which has imported the trainers and computed nothing.
"""

import json
import math
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessContext, start_processes
from trainers import ON_TWO_RANKS, PACKAGES, ROWS, fsdp2_on_cpu
from watching import KINDS, SAVED, STEPS, Watch, Weights, whole

from paceline import averaged_state_dict
from paceline.optim.weights import keeper_of

# --- Ranks ------------------------------------------------------------------------------------------------


def start(ranks: int, target: Callable[..., None], *arguments: Any) -> ProcessContext:
    """Start the processes of a job, in each of which `target` is called."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        job = (ranks, free.getsockname()[1], target, arguments)
    return start_processes(as_rank, job, ranks, join=False, start_method="fork")


def as_rank(rank: int, ranks: int, port: int, target: Callable[..., None], arguments: Any) -> None:
    if ranks > 1:
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        os.environ |= {name: str(value) for name, value in own.items()}
    target(*arguments)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def has_ended(job: ProcessContext, seconds: float = math.inf) -> bool:
    """Wait until all ranks have ended, and no longer than this; raise if one of them fails."""
    end = time.monotonic() + seconds
    while not job.join(None if seconds == math.inf else max(0.0, end - time.monotonic())):
        if time.monotonic() >= end:
            return False
    return True


# --- What is compared -------------------------------------------------------------------------------------


def distance(a: Weights, b: Weights) -> float:
    """Return how far weights are from others, in their own precision."""
    assert a.keys() == b.keys()
    return max((a[name].double() - b[name].to(a[name].dtype).double()).abs().max().item() for name in b)


def apart(one: Watch, live: Weights, average: Weights) -> float:
    return max(distance(one.live[-1], live), distance(one.average[-1], average))


def train(row: str, case: str, place: Path, **settings: Any) -> Watch:
    kind, how = ON_TWO_RANKS[row][case]
    own = {"ranks": 2, "averaged": kind != "no average", **how}
    return ROWS[row].train(place, KINDS[kind], **own | settings)


def alone(row: str, case: str, place: Path) -> None:
    """Train in one process without saving, which the ranks are compared to."""
    watch = train(row, case, place, saves=False, ranks=1, format="")
    torch.save((watch.live[-1], watch.average[-1], watch.losses), place / "alone.pt")


def together(row: str, case: str, place: Path) -> None:
    """Train without saving, with it, and resumed; write what is compared → how far it is apart."""
    live, average, losses = torch.load(place / "alone.pt")
    silent = train(row, case, place / "silent", saves=False)
    assert silent.losses.keys() == losses.keys(), (silent.losses, losses)
    found = {
        "live": distance(silent.live[-1], live),
        "average": distance(silent.average[-1], average),
        "losses": max([abs(silent.losses[name] - loss) for name, loss in losses.items()], default=0.0),
    }
    if silent.run.averaged:
        assert len(losses) >= 9, losses
        found |= saved_and_resumed(row, case, place, silent)
    if dist.get_rank() == 0:
        (place / "found.json").write_text(json.dumps(found))


def saved_and_resumed(row: str, case: str, place: Path, silent: Watch) -> dict[str, float]:
    if silent.run.format and row in ("transformers", "lightning"):
        with pytest.raises((ValueError, RuntimeError), match="average_dtype='bfloat16'"):
            ROWS[row].train(place / "int8", KINDS["int8"], ranks=2, format=silent.run.format)
    straight = train(row, case, place / "out")
    found = {"saving": apart(straight, silent.live[-1], silent.average[-1])}
    dist.barrier()
    if dist.get_rank() == 0:
        for step in (SAVED, STEPS):
            saved = ROWS[row].saved(straight, place / "out", step)
            found["saved"] = max(map(distance, saved, (straight.live[step], straight.average[step])))
    resumed = train(row, case, place / "out", resume=SAVED)
    assert len(resumed.live) == STEPS - SAVED + 1
    found["resumed"] = apart(resumed, straight.live[-1], straight.average[-1])
    if row not in ("accelerate", "plain loop"):
        found["returned"] = distance(silent.returned(), silent.average[-1])
    if row == "lightning":
        path = place / "out" / f"step={SAVED}.ckpt"
        straight.trainer.validate(straight.module, straight.module.evaluated, ckpt_path=path, verbose=False)
        found["validated by its path"] = distance(straight.returned(), straight.average[SAVED])
        found["not overwritten"] = distance(ended(straight)[1], straight.average[STEPS])
    return found


# --- Killed -----------------------------------------------------------------------------------------------


def ended(watch: Watch) -> tuple[Weights, Weights]:
    """Return live weights and the average, also where a resumed run had no step to take."""
    average = averaged_state_dict(watch.model, watch.optimizer)  # which drops gathered parameters
    live = dict(keeper_of(watch.optimizer).live_weights())
    named = {n: p for n, p in watch.model.named_parameters() if p.requires_grad}
    return {n: whole(live[p]).clone() for n, p in named.items()}, {n: whole(average[n]) for n in named}


def run_to_its_end(row: str, case: str, place: Path, resume: int = 0) -> None:
    every = SAVED if row == "lightning" else 2  # Lightning resumes an epoch from its first batch
    watch = ended(train(row, case, place, resume=resume, every=every))
    if int(os.environ["RANK"]) == 0:
        torch.save(watch, place / "ended.pt")


def killed(row: str, case: str, place: Path, kills: int) -> float:
    """Return how far runs whose ranks were killed at random moments end from one that was not."""
    began = time.monotonic()
    has_ended(start(2, run_to_its_end, row, case, place / "straight"))
    length, seed = time.monotonic() - began, random.randrange(2**32)
    print(f"{row}, {case}: seed {seed}, killed within {length:.1f} s", flush=True)
    chance, done, rounds, worst = random.Random(seed), 0, 0, 0.0
    straight = torch.load(place / "straight" / "ended.pt")
    while done < kills:
        rounds += 1
        out = place / f"killed {rounds}"
        out.mkdir()
        while True:
            job = start(2, run_to_its_end, row, case, out, ROWS[row].newest(out))
            if has_ended(job, chance.uniform(0, length) if done < kills else math.inf):
                break
            for process in chance.sample(job.processes, 2):
                process.kill()
            for process in job.processes:
                process.join()
            done += 1
        worst = max(worst, *map(distance, torch.load(out / "ended.pt"), straight))
    print(f"{done} kills in {rounds} runs", flush=True)
    return worst


# --- All of it --------------------------------------------------------------------------------------------


def get_ready(rows: Iterable[str]) -> None:
    """Import what these trainers import, so that ranks need not."""
    torch.set_num_threads(1)
    fsdp2_on_cpu()
    imported = {package for row in rows for package in PACKAGES[row]}
    for package in ("torch._dynamo", "torch.distributed.tensor", *sorted(imported)):
        import_module(package)


def compared(row: str, case: str, folder: Path, kills: int) -> dict[str, float]:
    """Return what is compared → the largest difference."""
    place = folder / f"{row}, {case}".replace(" ", "-")
    place.mkdir()
    has_ended(start(1, alone, row, case, place))
    has_ended(start(2, together, row, case, place))
    found: dict[str, float] = json.loads((place / "found.json").read_text())
    if kills and ON_TWO_RANKS[row][case][1]["format"] and "resumed" in found:
        found["killed and resumed"] = killed(row, case, place, kills)
    return found


def main() -> None:
    _, folder, kills, *words = sys.argv
    cases = list(zip(words[::2], words[1::2], strict=True))
    get_ready(row for row, _ in cases)
    found = [compared(row, case, Path(folder), int(kills)) for row, case in cases]
    print("FOUND", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
