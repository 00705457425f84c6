"""Run the batches of this study that the engine can run, and write a line for each finished run.

`protocol.md` says what each batch decides. Runs that are in a record already are skipped, so the same command
continues a batch on another machine:

    python records/studies/sign/batches.py a --text wiki --held-out first.jsonl --out runs --keep new.jsonl

Stop it any time; runs that had not finished continue from their checkpoints in --out. Optimizers are written
as the engine of commit ea5a979 reads them: run batches from a checkout of that commit with this folder in it.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

from paceline.experiments import pool
from paceline.experiments.config import Run
from paceline.experiments.paper import lines
from paceline.experiments.run import Interrupted
from paceline.experiments.sweep.command import local_engine
from paceline.experiments.sweep.conduct import cells_of, sweep

HERE = Path(__file__).parent
POWERS = (0.5, 0.6, 0.7, 0.8)
"""κ of the averages that every method may return."""
BEST = 3e-3
"""AdamW's best rate at 7M in the records of the first round; the grids of rivals are multiples of it."""
_7M: dict[str, Any] = {
    "model": "gpt:7m",
    "length": 256,
    "batch_size": 64,
    "steps": 4000,
    "evaluate_every": 500,
}
_SFT: dict[str, Any] = {"task": "sft", "model": "HuggingFaceTB/SmolLM2-135M-Instruct", "length": 1024}
_SFT |= {"batch_size": 16, "steps": 300, "evaluate_every": 50, "held_out_samples": 128}
MODELS: dict[str, dict[str, Any]] = {
    "7m": _7M,
    "7m-1000": _7M | {"steps": 1000, "evaluate_every": 125},
    "7m-2000": _7M | {"steps": 2000, "evaluate_every": 250},
    "7m-8000": _7M | {"steps": 8000, "evaluate_every": 1000},
    "7m-batch": _7M | {"batch_size": 256, "steps": 1000, "evaluate_every": 125},
    "27m": _7M | {"model": "gpt:25m", "steps": 2500, "evaluate_every": 312},
    "sft": _SFT,
    "sft-900": _SFT | {"steps": 900, "evaluate_every": 150},
    "gpt2": {"model": "gpt2", "tokenizer": "gpt2", "length": 1024, "batch_size": 128, "micro_batch_size": 32}
    | {"steps": 1200, "evaluate_every": 150, "held_out_samples": 256},
    "tiny": {"model": "gpt:0.3m", "length": 32, "batch_size": 4, "steps": 40, "evaluate_every": 20}
    | {"held_out_samples": 8},
}
"""What is trained, by the name of its scale."""


@dataclass(frozen=True, kw_only=True)
class Named:
    """One run, and what tables need to know of it."""

    batch: str
    method: str
    setting: dict[str, Any]
    lr: float
    """As AdamW means it: a push of strength R trains its base at lr · (1 + R)."""
    run: Run
    scale: str = "7m"

    @property
    def name(self) -> str:
        """The name of the run's folder; equal names are equal runs."""
        parts = [f"{key}{value:g}" for key, value in self.setting.items()]
        if self.scale not in ("7m", "tiny"):
            parts.insert(0, self.scale)
        return "_".join([self.method, *parts, f"lr{self.lr:g}", f"n{self.run.steps}", f"s{self.run.seed}"])


# --- Methods -------------------------------------------------------------------------------------------


def trained(
    scale: str, method: str, optimizer: str, lr: float, seed: int, *, base_lr: float | None = None, **own: Any
) -> Named:
    """Describe one run of a method; `own` holds its setting, and under `run` what differs in the run."""
    changes = {"averages": tuple(f"power:{power:g}" for power in POWERS), "schedule": "constant"}
    changes |= own.pop("run", {})
    model = {**MODELS[scale], **changes}
    run = Run(
        optimizer=optimizer, lr=lr if base_lr is None else base_lr, seed=seed, **{"clip_norm": 1.0, **model},
        warmup=model["steps"] // 10, checkpoint_every=model["steps"], keep=1, precision="auto",
        compile=model["steps"] > 40, data=("text",), held_out=("held-out",),
    )  # fmt: skip
    return Named(batch="", method=method, setting=own, lr=lr, run=run, scale=scale)


def adamw(scale: str, lr: float, seed: int, **changes: Any) -> Named:
    """Describe AdamW at a constant rate, with averages beside it."""
    return trained(scale, "adamw", "adamw:betas=(0.9,0.999),weight_decay=0.01", lr, seed, run=changes)


def bema(scale: str, lr: float, seed: int) -> Named:
    """Describe AdamW with bias-corrected EMAs beside it."""
    names = tuple(
        f"bema:{k:g},bias_power={b:g},every=1" for k, b in product((0.5, 0.6, 0.7), (0.2, 0.4, 0.6))
    )
    one = adamw(scale, lr, seed, averages=names)
    return replace(one, method="bema")


def wsd(scale: str, lr: float, seed: int, decay: float) -> Named:
    """Describe AdamW that decays to 0 at the end, continued from the run at a constant rate."""
    parent, steps = adamw(scale, lr, seed), MODELS[scale]["steps"]
    fork = f"{parent.name}@{steps - round(decay * steps)}"
    one = adamw(scale, lr, seed, schedule=f"wsd:decay={decay:g}", fork=fork)
    return replace(one, method="wsd", setting={"decay": decay})


def linear(scale: str, lr: float, seed: int) -> Named:
    """Describe AdamW whose rate falls linearly from the end of the warm-up to 0."""
    return replace(adamw(scale, lr, seed, schedule="wsd:decay=0.9"), method="linear")


def push(scale: str, lr: float, seed: int, R: float, k: float, **changes: Any) -> Named:
    """Describe a push: strength R < 0 on the average of power k; another average is returned."""
    optimizer = (
        f"pace:gain=uniform,pullback_strength={R:g},ema_power={k:g},return_power=0.7,"
        "betas=(0.9,0.999),weight_decay=0.01"
    )
    beside = tuple(f"power:{power:g}" for power in POWERS if power != 0.7)
    return trained(
        scale,
        "push",
        optimizer,
        lr,
        seed,
        base_lr=lr * (1 + R),
        R=R,
        k=k,
        run={"averages": beside, **changes},
    )


def pull(scale: str, lr: float, seed: int) -> Named:
    """Describe a pull of strength 1 toward a short average; its base runs at twice the rate."""
    one = push(scale, lr, seed, 1.0, 0.2)
    return replace(one, method="pull")


def ademamix(scale: str, lr: float, seed: int, alpha: float, beta3: float, **changes: Any) -> Named:
    """Describe AdEMAMix whose two warm-ups are the run."""
    steps = MODELS[scale]["steps"]
    optimizer = (
        f"ademamix:betas=(0.9,0.999,{beta3:g}),alpha={alpha:g},alpha_warmup={steps},beta3_warmup={steps},"
        "weight_decay=0.01"
    )
    return trained(scale, "ademamix", optimizer, lr, seed, alpha=alpha, beta3=beta3, run=changes)


def gpa(scale: str, lr: float, seed: int, x: float, y: float) -> Named:
    """Describe GPA around AdamW."""
    optimizer = f"gpa:mu_x={x:g},mu_y={y:g},betas=(0.9,0.999),weight_decay=0.01"
    return trained(scale, "gpa", optimizer, lr, seed, x=x, y=y)


def nesterov(scale: str, lr: float, seed: int, push: float, decay: float = 0.99, stop: float = 0.76) -> Named:
    """Describe EMA-Nesterov around AdamW; it pushes from 16 % of the run to `stop` of it."""
    steps = MODELS[scale]["steps"]
    optimizer = (
        f"ema_nesterov:push={push:g},decay={decay:g},start={steps * 16 // 100},"
        f"stop={round(steps * stop)},betas=(0.9,0.999),weight_decay=0.01"
    )
    return trained(scale, "nesterov", optimizer, lr, seed, push=push, decay=decay, stop=stop)


def schedule_free(scale: str, lr: float, seed: int, b1: float, b2: float, wd: float = 0.1) -> Named:
    """Describe Schedule-Free AdamW without clipping, as its authors run it."""
    optimizer = f"schedule_free:betas=({b1:g},{b2:g}),weight_decay={wd:g}"
    unclipped = {"averages": (), "clip_norm": None}
    return trained(scale, "schedule_free", optimizer, lr, seed, b1=b1, b2=b2, wd=wd, run=unclipped)


# --- Batches -------------------------------------------------------------------------------------------


def batch_a(scale: str, seed: int = 1) -> Iterator[Named]:
    """Select at 7M: the first grid of each method, in the order in which they are wanted."""
    rates = [BEST * factor for factor in (1, 2 / 3, 3 / 2, 2, 1 / 2)]
    near = rates[:3]
    yield from (adamw(scale, lr, seed) for lr in rates)
    yield from (push(scale, lr, seed, -0.5, 0.6) for lr in near)
    for lr, beta3 in product((BEST * 2 / 3, BEST / 3, BEST * 4 / 3), (0.99, 0.997, 0.999)):
        yield ademamix(scale, lr, seed, 5, beta3)
    yield from (wsd(scale, lr, seed, decay) for lr, decay in product(rates[:4], (0.1, 0.2, 0.4)))
    for R, k in product((-0.3, -0.5, -0.7), (0.5, 0.6, 0.7)):
        if (R, k) != (-0.5, 0.6):
            yield push(scale, BEST, seed, R, k)
    for lr, x in product((BEST, 2 * BEST, 3 * BEST), (0.9869, 0.9934, 0.9967)):
        yield gpa(scale, lr, seed, x, 0.7)
    yield from (linear(scale, lr, seed) for lr in rates[:4])
    for lr, share in product((BEST / 2, BEST, BEST * 4 / 3), (0.3, 0.6, 0.9)):
        yield nesterov(scale, lr, seed, share)
    for lr, (b1, b2) in product((BEST, 2 * BEST, 3 * BEST, 4 * BEST), ((0.9, 0.999), (0.95, 0.99))):
        yield schedule_free(scale, lr, seed, b1, b2)
    yield from (bema(scale, lr, seed) for lr in near)


def batch_a_edges(scale: str, seed: int = 1) -> Iterator[Named]:
    """Select at 7M: one more point where the best of the first grid lay at an edge."""
    yield from (push(scale, BEST, seed, -0.8, k) for k in (0.5, 0.6))
    yield from (ademamix(scale, BEST * 2 / 3, seed, 8, beta3) for beta3 in (0.999, 0.997))
    yield push(scale, BEST * 3 / 2, seed, -0.7, 0.5)
    yield ademamix(scale, BEST * 2 / 3, seed, 10, 0.999)


def batch_a_second(scale: str) -> Iterator[Named]:
    """Select at 7M: the two best settings of each method on seed 2, edges of rivals, bias-corrected EMAs."""
    low, near = BEST * 2 / 3, BEST
    for lr in (low, near):
        yield adamw(scale, lr, 2)
        yield from (wsd(scale, lr, 2, decay) for decay in (0.2, 0.4))
    yield from (push(scale, near, 2, R, k) for R, k in ((-0.7, 0.5), (-0.5, 0.6)))
    yield from (ademamix(scale, low, 2, 5, beta3) for beta3 in (0.997, 0.999))
    yield from (nesterov(scale, lr, 2, 0.6) for lr in (near, near / 2))
    yield from (gpa(scale, near, 2, x, 0.7) for x in (0.9869, 0.9934))
    yield from (linear(scale, lr, 2) for lr in (1.5 * near, 2 * near))
    yield linear(scale, 3 * near, 1)
    yield from (nesterov(scale, near, 1, 0.6, decay) for decay in (0.98, 0.995))
    yield nesterov(scale, near, 1, 0.6, stop=1.0)
    yield from (gpa(scale, near, 1, 0.9934, y) for y in (0.5, 0.9))
    yield from (gpa(scale, lr, 1, 0.9869, 0.7) for lr in (low, near / 2))
    yield from (schedule_free(scale, 2 * near, 2, *betas) for betas in ((0.95, 0.99), (0.9, 0.999)))
    yield schedule_free(scale, 2 * near, 1, 0.95, 0.99, 0.05)


def batch_a_third(scale: str) -> Iterator[Named]:
    """Select at 7M: seed 2 of the push that was second best on seed 1."""
    yield push(scale, BEST, 2, -0.7, 0.6)


def batch_b(scale: str) -> Iterator[Named]:
    """Report at 7M: five fresh seeds of the push, AdamW, its best WSD and the two best rivals."""
    seeds = range(11, 16)
    yield from (ademamix(scale, BEST * 2 / 3, seed, 5, 0.997) for seed in seeds)
    yield from (adamw(scale, BEST, seed) for seed in seeds)
    yield from (push(scale, BEST, seed, -0.7, 0.5) for seed in seeds)
    yield from (nesterov(scale, BEST, seed, 0.6) for seed in seeds)
    yield from (wsd(scale, BEST, seed, 0.4) for seed in seeds)


def scaled_ademamix(scale: str, lr: float, seed: int, **changes: Any) -> Named:
    """Describe AdEMAMix whose slow momentum forgets over a twelfth of the run, as in its best setting."""
    return ademamix(scale, lr, seed, 5, round(1 - 12 / MODELS[scale]["steps"], 4), **changes)


def batch_b_linear(scale: str) -> Iterator[Named]:
    """Report at 7M: a push, and AdEMAMix, under a rate that falls linearly to 0, as most trainers have it."""
    falling = "wsd:decay=0.9"
    for seed in range(11, 16):
        yield linear(scale, 1.5 * BEST, seed)
        yield replace(push(scale, 1.5 * BEST, seed, -0.7, 0.5, schedule=falling), method="linear-push")
        yield replace(ademamix(scale, BEST, seed, 5, 0.997, schedule=falling), method="linear-ademamix")


def batch_b_rates(scale: str) -> Iterator[Named]:
    """Report at 7M: rates from a quarter of the best one to eight times as much, one seed."""
    for factor in (0.25, 0.5, 2, 4, 8):
        yield adamw(scale, BEST * factor, 11)
        yield push(scale, BEST * factor, 11, -0.7, 0.5)
        yield ademamix(scale, BEST * 2 / 3 * factor, 11, 5, 0.997)


def batch_c(scale: str) -> Iterator[Named]:
    """Report at 7M: lengths from 1,000 to 8,000 steps, and a batch four times as large.

    The text of 56.5M tokens is passed over .3, .6 and 2.3 times; 16,000 steps would be 4.6 times.
    """
    lengths = ("7m-8000", "7m-2000", "7m-1000") if scale != "tiny" else ("tiny",)
    for one, seed in product(lengths, (11, 12)):
        yield scaled_ademamix(one, BEST * 2 / 3, seed)
        yield push(one, BEST, seed, -0.7, 0.5)
        yield adamw(one, BEST, seed)
        yield wsd(one, BEST, seed, 0.4)
    batch = "7m-batch" if scale != "tiny" else "tiny"
    for factor, seed in product((1, 2), (11, 12)):
        yield scaled_ademamix(batch, BEST * 2 / 3 * factor, seed)
        yield push(batch, BEST * factor, seed, -0.7, 0.5)
        yield adamw(batch, BEST * factor, seed)


def batch_d_select(scale: str) -> Iterator[Named]:
    """Select at 27M: three rates of each method on seed 1, and the usual betas and weight decay once."""
    one = "27m" if scale != "tiny" else "tiny"
    for lr in (1e-3, 1.5e-3, 2e-3):
        yield scaled_ademamix(one, lr * 2 / 3, 1)
        yield push(one, lr, 1, -0.7, 0.5)
        yield adamw(one, lr, 1)
        yield wsd(one, lr, 1, 0.4)
    usual = trained(one, "adamw-usual", "adamw:betas=(0.9,0.95),weight_decay=0.1", 1.5e-3, 1)
    yield usual


def batch_d_edges(scale: str) -> Iterator[Named]:
    """Select at 27M: one more point where the best of `batch_d_select` lay at an edge."""
    one = "27m" if scale != "tiny" else "tiny"
    yield from (adamw(one, 0.67e-3, 1), scaled_ademamix(one, 0.44e-3, 1))


def batch_d(scale: str) -> Iterator[Named]:
    """Report at 27M: four fresh seeds of each method at its best rate, and the parents of WSD."""
    one, seeds = "27m" if scale != "tiny" else "tiny", range(11, 15)
    yield from (scaled_ademamix(one, 0.67e-3, seed) for seed in seeds)
    yield from (adamw(one, 1.5e-3, seed) for seed in seeds)
    yield from (wsd(one, 1.5e-3, seed, 0.4) for seed in seeds)
    yield from (adamw(one, 1e-3, seed) for seed in seeds)
    yield from (push(one, 1.5e-3, seed, -0.7, 0.5) for seed in seeds)


def batch_e(scale: str) -> Iterator[Named]:
    """Report in fine-tuning: one, two and three times the best rate, three seeds; a longer run with one."""
    best = 3e-4
    for factor, seed in product((1, 2, 3), (11, 12, 13)):
        yield adamw("sft", best * factor, seed)
        yield push("sft", best * factor, seed, -0.5, 0.6)
        yield pull("sft", best * factor, seed)
    yield from (scaled_ademamix("sft", best * 2 / 3, seed) for seed in (11, 12, 13))
    yield from (adamw("sft-900", best, 11), push("sft-900", best, 11, -0.5, 0.6), pull("sft-900", best, 11))


def batch_g(scale: str) -> Iterator[Named]:
    """Report on GPT-2 124M: one pair at the paper's rate, the decayed branch of AdamW, and AdEMAMix."""
    one = "gpt2" if scale != "tiny" else "tiny"
    yield push(one, 2e-3, 11, -0.7, 0.5)
    yield adamw(one, 2e-3, 11)
    yield wsd(one, 2e-3, 11, 0.4)
    yield scaled_ademamix(one, 2e-3 * 2 / 3, 11)


BATCHES: dict[str, Callable[[str], Iterable[Named]]] = {
    "a": batch_a,
    "a-edges": batch_a_edges,
    "a-second": batch_a_second,
    "a-third": batch_a_third,
    "b": batch_b,
    "b-linear": batch_b_linear,
    "b-rates": batch_b_rates,
    "c": batch_c,
    "d-select": batch_d_select,
    "d-edges": batch_d_edges,
    "d": batch_d,
    "e": batch_e,
    "g": batch_g,
}


# --- Running -------------------------------------------------------------------------------------------


def wanted(names: Iterable[str], scale: str, known: set[str]) -> dict[str, Named]:
    """Return the runs that no record has, by name, and the parents of forks among them."""
    every = {one.name: replace(one, batch=batch) for batch in names for one in BATCHES[batch](scale)}
    found = {name: one for name, one in every.items() if name not in known}
    for one in list(found.values()):
        if one.run.after is not None:
            parent, step = one.run.after
            kept = found.get(parent, every[parent])
            steps = tuple(sorted({*kept.run.keep_steps, step}))
            found[parent] = replace(kept, run=replace(kept.run, keep_steps=steps))
    return {name: found[name] for name in every if name in found}


def main() -> int:
    """Parse the command line, run what is wanted until the deadline, and write lines as runs finish."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("batches", nargs="+", choices=tuple(BATCHES))
    parser.add_argument("--text", required=True, help="folder made by `paceline data`")
    parser.add_argument("--held-out", required=True, help="file of the held-out articles for these runs")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--keep", type=Path, required=True, help="file that gets a line for each run")
    parser.add_argument("--scale", choices=tuple(MODELS), default="7m", help="what is trained [7m]")
    parser.add_argument("--jobs", type=int, default=8, help="runs in parallel [8]")
    parser.add_argument("--until", type=float, default=float("inf"), help="start no run after this time")
    given = parser.parse_args()
    known = set(lines.read(sorted(HERE.glob("2*.jsonl"))))
    runs = wanted(given.batches, given.scale, known)
    placed = {
        name: replace(one.run, data=(given.text,), held_out=(given.held_out,)) for name, one in runs.items()
    }
    print(f"{len(runs)} runs to do, {len(known)} in records", flush=True)
    cells = cells_of(placed, given.out, 1.0)

    def engine(orders: Iterable[pool.Cell | None]) -> Iterator[pool.Told]:
        def timely() -> Iterator[pool.Cell | None]:
            for order in orders:
                if time.time() > given.until:
                    return
                yield order

        return local_engine([cell.run for cell in cells], given.jobs)(timely())

    began, written = time.time(), set[str]()
    try:
        for event in sweep(cells, given.out, engine, heart_seconds=60, keep_models=False):
            if isinstance(event, tuple) and isinstance(event[1], pool.Ended):
                name = event[0].folder.name
                print(f"{time.time() - began:5.0f} s  {event[1].how}  {name}  {event[1].text}", flush=True)
                _write(runs, given.out, given.keep, written)
    except Interrupted:
        print("stopped; the same command continues", flush=True)
    finally:
        _write(runs, given.out, given.keep, written)
    return 0


def _write(runs: dict[str, Named], out: Path, keep: Path, written: set[str]) -> None:
    """Append the lines of runs that have ended since the last call."""
    with keep.open("a") as file:
        for name, one in runs.items():
            folder = out / "cells" / name
            if name not in written and folder.is_dir() and lines.is_ended(folder):
                about = {"batch": one.batch, "method": one.method, "setting": one.setting, "lr": one.lr}
                line = {**lines.line_of(folder), **about, "date": datetime.now(UTC).strftime("%Y-%m-%d")}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                written.add(name)


if __name__ == "__main__":
    sys.exit(main())
