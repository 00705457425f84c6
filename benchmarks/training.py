"""The speed of the training loop, side by side with plain loops, in one run, as ratios.

    python benchmarks/training.py overhead
        on the CPU: a 1M-parameter GPT; what a step costs beyond forward, backward and optimizer
    python benchmarks/training.py throughput --nanogpt FOLDER [--record FILE]
        on a GPU: GPT-2 124M, length 1024, bfloat16, compiled, against the training script of nanoGPT (a
        checkout of it, run as it is, on the same tokens); and a 7M GPT, one run and four at once

Tokens are random: speed does not depend on them. The first steps, which compile, are not counted.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline import PACE
from paceline.experiments.bench.command import environment
from paceline.lm.batch import numbers_at
from paceline.lm.evaluate import summed_loss
from paceline.lm.gpt import GPT, shape_of
from paceline.lm.loop import Plan, Progress, Step, Trainee, train
from paceline.lm.shards import Windows, prepare
from paceline.lm.throughput import operations_per_token, peak_of
from paceline.optim import parameter_groups, schedules


class Spelled:
    """A vocabulary for documents that are numbers already, written out."""

    fingerprint = "numbers"

    def __init__(self, size: int) -> None:
        self.size, self.end_of_text = size, size - 1

    def encode(self, texts: Any) -> list[list[int]]:
        return [np.frombuffer(text.encode("latin-1"), dtype="<u2").tolist() for text in texts]


def random_tokens(room: Path, vocabulary: int, count: int) -> Any:
    noise = np.random.default_rng(0)
    document = noise.integers(0, vocabulary, count, dtype=np.uint16).tobytes().decode("latin-1")
    return prepare([document], Spelled(vocabulary), room / f"tokens-{vocabulary}", source={"random": count})


def trainee_of(
    model_name: str,
    tokens: Any,
    length: int,
    device: str,
    *,
    compiled: bool,
    optimizer: str,
    bias: bool = True,
) -> Trainee:
    torch.manual_seed(0)
    shape = replace(shape_of(model_name, tokens.vocabulary, length), vocabulary_multiple=64, bias=bias)
    model = GPT(shape).to(device)
    groups = parameter_groups(model, 0.1)
    made: Any
    if optimizer == "pace":
        made = PACE(groups, lr=6e-4, betas=(0.9, 0.95))
    else:
        made = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
    return Trainee(
        model=model,
        optimizer=made,
        scheduler=schedules.constant(made, warmup=10),
        samples=Windows(tokens, length),
        held_out={},
        views={"live": nullcontext},
        loss_of=torch.compile(summed_loss) if compiled else summed_loss,
    )


# --- Overhead on the CPU ------------------------------------------------------------------------------


def bare_steps(trainee: Trainee, plan: Plan) -> Iterator[None]:
    """Forward, backward, optimizer, and nothing else."""
    numbers = numbers_at(0, batch_size=plan.batch_size, samples=len(trainee.samples), seed=0)
    batch = trainee.samples.batch(numbers)
    while True:
        loss = summed_loss(trainee.model, batch) / batch.targets.numel()
        loss.backward()
        trainee.optimizer.step()
        trainee.optimizer.zero_grad()
        yield


def overhead(rounds: int) -> dict[str, Any]:
    plan = Plan(steps=10**6, batch_size=16, micro_batch_size=16, seed=0, evaluate_every=10**6)
    with tempfile.TemporaryDirectory() as room:
        tokens = random_tokens(Path(room), 2048, 10**6)
        loops = {
            "bare": bare_steps(
                trainee_of("gpt:1m", tokens, 128, "cpu", compiled=False, optimizer="pace"), plan
            ),
            "paceline": train(
                trainee_of("gpt:1m", tokens, 128, "cpu", compiled=False, optimizer="pace"), plan, Progress()
            ),
        }
        times: dict[str, list[float]] = {name: [] for name in loops}
        for i in range(rounds + 5):
            for name, loop in loops.items():  # they take turns, so that a busy machine slows both alike
                began = time.perf_counter()
                next(loop)
                if i >= 5:
                    times[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(values) for name, values in times.items()}
    share = 1 - medians["bare"] / medians["paceline"]
    return {
        "milliseconds": {name: round(1e3 * value, 2) for name, value in medians.items()},
        "overhead_of_a_step": round(share, 4),
        "rounds": rounds,
    }


# --- Throughput on a GPU ------------------------------------------------------------------------------


def engine(model: str, room: Path, device: str, settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """Tokens a second of our loop; median over the steps after the first."""
    plan = Plan(
        steps=steps + settings["settle"],
        batch_size=settings["micro"] * settings["accumulate"],
        micro_batch_size=settings["micro"],
        seed=0,
        evaluate_every=10**6,
        precision=torch.bfloat16 if device == "cuda" else torch.float32,
    )
    tokens = random_tokens(room, settings["vocabulary"], settings["tokens"])
    trainee = trainee_of(
        model,
        tokens,
        settings["length"],
        device,
        compiled=settings["compile"],
        optimizer=settings["optimizer"],
        bias=settings["bias"],
    )
    times, before = [], time.perf_counter()
    for record in train(trainee, plan, Progress()):
        now = time.perf_counter()
        if isinstance(record, Step) and record.step > settings["settle"]:
            times.append(now - before)
        before = now
    rate = plan.batch_size * settings["length"] / statistics.median(times)
    peak = peak_of(torch.device(device))
    operations = operations_per_token(trainee.model, settings["length"])
    return {
        "tokens_per_second": round(rate),
        "mfu": round(rate * operations / peak, 3) if peak else None,
        "parameters": sum(p.numel() for p in trainee.model.parameters()),
        "peak_memory_gb": round(torch.cuda.max_memory_allocated() / 2**30, 1) if device == "cuda" else None,
    }


def nanogpt(folder: Path, settings: dict[str, Any], steps: int, *, bias: bool) -> dict[str, Any]:
    """Tokens a second that the script of nanoGPT prints of itself; median after the first iterations."""
    data = folder / "data" / "random"
    data.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(0)
    for part in ("train", "val"):
        noise.integers(0, 50257, settings["tokens"], dtype=np.uint16).tofile(data / f"{part}.bin")
    flags = {
        "dataset": "random",
        "batch_size": settings["micro"],
        "gradient_accumulation_steps": settings["accumulate"],
        "block_size": settings["length"],
        "bias": bias,
        "max_iters": steps + settings["settle"],
        "eval_interval": 10**9,
        "eval_iters": 1,
        "always_save_checkpoint": False,
        "out_dir": str(folder / "out"),
    }
    words = [sys.executable, "train.py", *(f"--{key}={value}" for key, value in flags.items())]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    found = re.findall(r"iter (\d+): loss [\d.]+, time ([\d.]+)ms", done.stdout)
    times = [float(ms) / 1e3 for number, ms in found if int(number) > settings["settle"]]
    if done.returncode or not times:
        return {"error": (done.stderr or done.stdout)[-800:]}
    per_step = settings["micro"] * settings["accumulate"] * settings["length"]
    return {"tokens_per_second": round(per_step / statistics.median(times))}


GPT2 = {"vocabulary": 50257, "length": 1024, "tokens": 2 * 10**7, "compile": True, "settle": 5}
SMALL = {
    "vocabulary": 2048,
    "length": 256,
    "tokens": 2 * 10**7,
    "compile": True,
    "settle": 20,
    "micro": 64,
    "accumulate": 1,
    "optimizer": "adamw",
    "bias": True,
}


def alone(words: list[str]) -> subprocess.Popen[str]:
    """One measurement in a process of its own: none inherits compiled code or memory of another."""
    return subprocess.Popen(
        [sys.executable, __file__, "one", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def result_of(process: "subprocess.Popen[str]") -> dict[str, Any]:
    out, err = process.communicate()
    return json.loads(out.splitlines()[-1]) if process.returncode == 0 else {"error": err[-800:]}


def gpt2_rows(folder: Path | None, steps: int) -> Iterator[dict[str, Any]]:
    """nanoGPT at its own settings and at ours, and the engine at both, with two optimizers."""
    for micro, accumulate, bias, optimizers in (
        (12, 40, False, ("adamw",)),  # nanoGPT's own settings
        (32, 15, True, ("adamw", "pace")),  # GPT-2 itself, with biases
    ):
        size = {**GPT2, "micro": micro, "accumulate": accumulate}
        about = f"GPT-2 124M, {micro} x {accumulate} x 1024"
        name = f"bias={bias}"
        for optimizer in optimizers:
            words = ["gpt2", json.dumps({**size, "optimizer": optimizer, "bias": bias}), str(steps)]
            yield {"what": about, "loop": f"paceline, {optimizer}, {name}", **result_of(alone(words))}
            if folder is not None and optimizer == "adamw":
                found = nanogpt(folder, size, steps, bias=bias)
                yield {"what": about, "loop": f"nanoGPT, {name}", **found}


def small_rows(steps: int) -> Iterator[dict[str, Any]]:
    """Several runs at once: small models leave most of a GPU idle."""
    for together in (1, 2, 4, 6):
        words = ["gpt:7m", json.dumps(SMALL), str(20 * steps)]
        rows = [result_of(process) for process in [alone(words) for _ in range(together)]]
        row = {"what": "GPT 7M, 64 x 256", "loop": f"paceline, {together} at once"}
        errors = [found["error"] for found in rows if "error" in found]
        total = sum(found.get("tokens_per_second", 0) for found in rows)
        yield {**row, "error": errors[0]} if errors else {**row, "tokens_per_second": total}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    cpu = commands.add_parser("overhead")
    cpu.add_argument("--rounds", type=int, default=100)
    gpu = commands.add_parser("throughput")
    gpu.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT")
    gpu.add_argument("--steps", type=int, default=15)
    gpu.add_argument("--part", choices=("gpt2", "small", "all"), default="all")
    for made in (cpu, gpu):
        made.add_argument("--record", type=Path)
    one = commands.add_parser("one")
    one.add_argument("model")
    one.add_argument("settings", type=json.loads)
    one.add_argument("steps", type=int)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.command == "one":
        with tempfile.TemporaryDirectory() as room:
            print(json.dumps(engine(options.model, Path(room), device, options.settings, options.steps)))
        return
    result: dict[str, Any] = {"date": time.strftime("%F"), **environment(device)}
    if options.command == "overhead":
        result |= overhead(options.rounds)
    else:
        result["rows"] = []
        rows = [] if options.part == "small" else gpt2_rows(options.nanogpt, options.steps)
        more = [] if options.part == "gpt2" else small_rows(options.steps)
        for row in chain(rows, more):
            print(json.dumps(row), flush=True)
            result["rows"].append(row)
            if options.record:  # what is known stays known, should the next one fail
                options.record.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))
    if options.record:
        options.record.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
