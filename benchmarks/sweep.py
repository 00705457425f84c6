"""What several cells at once gain on one GPU: tokens a second of a sweep, summed over its cells.

    python benchmarks/sweep.py [--record FILE]
        on a GPU: four cells of a 7M GPT, one at a time and four at once, by `paceline sweep` itself
    python benchmarks/sweep.py --model gpt:0.3m --length 16 --batch-size 2 --steps 200 --rounds 1
        the same with tiny cells, to try it on a CPU

Cells differ in their seed. Their text is the one inside this Python, prepared before anything is measured.
Tokens a second: those of all cells, from the first evaluation of each to its last, over the time in which at
least one of them was between the two: the start of processes is not counted. `wall` is the time of the whole
command, and counts everything. Rounds take turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from paceline.experiments.bench.command import environment
from paceline.experiments.records import read

CELLS = 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt:7m")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--optimizer", default="pace")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", type=Path, help="a JSON file for what was measured")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as room:
        once(given, Path(room) / "prepared", 1, steps=2, seeds=1)
        found: dict[int, list[dict[str, float]]] = {1: [], CELLS: []}
        for number in range(given.rounds):
            for jobs in found:
                measured = once(given, Path(room) / f"{number}-{jobs}", jobs, given.steps, CELLS)
                found[jobs].append(measured)
                said = (
                    f"{measured['tokens_per_second']:,.0f} tokens/s together, {measured['wall']:.1f} s in all"
                )
                print(f"{jobs} at once: {said}", flush=True)
    rates, walls = (
        {jobs: statistics.median(row[name] for row in rows) for jobs, rows in found.items()}
        for name in ("tokens_per_second", "wall")
    )
    ratio, wall_ratio = rates[CELLS] / rates[1], walls[1] / walls[CELLS]
    print(f"{CELLS} at once: {ratio:.2f} times the tokens a second of one; by the wall {wall_ratio:.2f}")
    if given.record:
        settings = {name: value for name, value in vars(given).items() if name != "record"}
        content = {"settings": settings, "cells": CELLS, "ratio": ratio, "wall_ratio": wall_ratio}
        rounds = {str(jobs): rows for jobs, rows in found.items()}
        content |= {
            "rounds": rounds,
            "environment": environment("cuda" if torch.cuda.is_available() else "cpu"),
        }
        given.record.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def once(given: argparse.Namespace, out: Path, jobs: int, steps: int, seeds: int) -> dict[str, float]:
    """One sweep, anew: the sum of the rates of cells that ran at once, and the time of all of it."""
    words: list[Any] = ["sweep", "--out", out, "--model", given.model, "--length", given.length]
    words += ["--batch-size", given.batch_size, "--steps", steps, "--optimizer", given.optimizer]
    words += ["--held-out-samples", 8, "--evaluate-every", max(1, steps // 5), "--checkpoint-every", steps]
    words += ["--jobs", jobs, "--seeds", *range(1, seeds + 1), "--stop-diverged", "off"]
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "paceline.cli", *map(str, words)],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    wall = time.perf_counter() - began
    tokens_per_step = given.batch_size * given.length
    spans = [span(path) for path in out.glob("cells/*/timing.jsonl")]
    if not all(spans):
        return {"tokens_per_second": 0.0, "wall": wall}
    busy = union([(first, last) for first, last, _ in spans])
    return {"tokens_per_second": sum(s for *_, s in spans) * tokens_per_step / busy, "wall": wall}


def span(path: Path) -> tuple[float, float, int] | tuple[()]:
    """From the first speed record of a cell to its last, and the steps between them."""
    speeds = [line for line in read(path) if line["kind"] == "speed"]
    if len(speeds) < 2:
        return ()
    return speeds[0]["time"], speeds[-1]["time"], speeds[-1]["step"] - speeds[0]["step"]


def union(spans: list[tuple[float, float]]) -> float:
    """The time in which at least one of them went on."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


if __name__ == "__main__":
    main()
