"""The speed of the training loop, side by side with plain loops, in one run, as ratios.

    python benchmarks/training.py overhead
        on the CPU: a 1M-parameter GPT; what a step costs beyond forward, backward and optimizer
    python benchmarks/training.py throughput --nanogpt FOLDER [--record FILE]
        on a GPU: GPT-2 124M, length 1024, bfloat16, compiled, against the training script of nanoGPT (a
        checkout of it, run as it is, on the same tokens); and a 7M GPT, one run and four at once
    python benchmarks/training.py share [--record FILE]
        on a GPU: GPT-2 124M, 16 x 1024 tokens, bfloat16, compiled; what of a whole step is the optimizer's,
        PACE beside its rivals; on the CPU with a small model, such as
        --model gpt:1m --vocabulary 2048 --length 128 --rounds 20

Tokens are random: speed does not depend on them. The first steps, which compile, are not counted.
"""

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline import PACE
from paceline.experiments.bench.command import environment
from paceline.experiments.bench.subjects import BASE, RIVALS
from paceline.lm.batch import Batch, numbers_at
from paceline.lm.evaluate import autocast, summed_loss
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


# --- The optimizer's share of a step ------------------------------------------------------------------


Work = Callable[[], Any]
ALONE = "forward and backward alone"
USUAL = (
    BASE,
    "AdamW, fused, and an EMA",
    "AdamW, foreach",
    "Schedule-Free AdamW",
    "PACE, fused, strength 0",
    "PACE, fused, paper",
    "PACE, fused",
)
ON_A_CPU = ("PACE, foreach, paper", "PACE, foreach")
"""In place of those that need a GPU."""
PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def contenders(words: list[str] | None, device: str) -> list[str]:
    """The usual ones, or all of `paceline bench` with one of these words in their names."""
    names = [name for name in USUAL if device in RIVALS[name].devices]
    names += ON_A_CPU if device == "cpu" else ()
    if words is not None:
        there = [name for name, rival in RIVALS.items() if device in rival.devices]
        asked = [name for name in there if any(word.lower() in name.lower() for word in words)]
        if not asked:
            raise ValueError(f"no optimizer is called {' or '.join(words)}; there are {'; '.join(RIVALS)}")
        names = list(dict.fromkeys((BASE, *asked)))
    if "Schedule-Free AdamW" in names and find_spec("schedulefree") is None:
        names.remove("Schedule-Free AdamW")
        print("without Schedule-Free AdamW: the package schedulefree is not installed", file=sys.stderr)
    return names


def built(options: argparse.Namespace, device: str) -> tuple[GPT, Batch]:
    """A GPT, and a batch of random tokens for it."""
    torch.manual_seed(0)
    shape = shape_of(options.model, options.vocabulary, options.length)
    model = GPT(replace(shape, vocabulary_multiple=64)).to(device)
    size = (2, options.batch_size, options.length)
    tokens, targets = torch.randint(options.vocabulary, size).to(device)
    return model, Batch(tokens, targets, None)


def gradient_of(model: GPT, batch: Batch, precision: torch.dtype, *, compiled: bool) -> Work:
    """Forward and backward. Gradients are made anew at each step, as in training: an optimizer that keeps
    their addresses has to look again."""
    loss_of = torch.compile(summed_loss) if compiled else summed_loss

    def gradient() -> None:
        model.zero_grad(set_to_none=True)
        with autocast(batch.tokens.device, precision):
            loss = loss_of(model, batch) / batch.targets.numel()
        loss.backward()

    return gradient


def timed(works: list[Work], device: str) -> Callable[[], list[float]]:
    """Do one after the other. Milliseconds of each may be asked for when the device has done them too."""
    if device == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(works) + 1)]
        events[0].record()
        for work, event in zip(works, events[1:], strict=True):
            work()
            event.record()
        return lambda: [began.elapsed_time(ended) for began, ended in pairwise(events)]
    marks = [time.perf_counter()]
    for work in works:
        work()
        marks.append(time.perf_counter())
    return lambda: [1e3 * (ended - began) for began, ended in pairwise(marks)]


Times = dict[str, list[list[float]]]
"""By name and round: milliseconds of forward and backward, and of the optimizer, if there is one."""


def in_turns(works: dict[str, list[Work]], model: GPT, rounds: int, settle: int) -> Times:
    """The times of each in each round; in the first rounds, which compile and allocate, they do not count.

    The order is another one in every round: none always follows one that left the device idle. The device is
    waited for once a round only, so that what an optimizer does on the CPU hides behind the device, as far as
    it does in a training that reads no number at every step.
    """
    live = [parameter.detach() for parameter in model.parameters()]
    start = [tensor.clone() for tensor in live]
    device = live[0].device.type
    order, chance = list(works), random.Random(0)
    times: Times = {name: [] for name in works}
    for i in range(settle + rounds):
        chance.shuffle(order)
        readings = {}
        for name in order:
            torch._foreach_copy_(live, start)  # all have the same work, and no step of another changes it
            readings[name] = timed(works[name], device)
        if device == "cuda":
            torch.cuda.synchronize()
        if i >= settle:
            for name, reading in readings.items():
                times[name].append(reading())
    return times


def share_rows(times: Times, tokens: int) -> list[dict[str, Any]]:
    wholes = {name: [sum(parts) for parts in turns] for name, turns in times.items()}
    medians = {name: statistics.median(values) for name, values in wholes.items()}
    rows = []
    for name, ms in medians.items():
        own = ms - medians[ALONE]
        tenths = statistics.quantiles(wholes[name], n=10, method="inclusive")
        row = {"what": name, "ms": round(ms, 3), "low": round(tenths[0], 3), "high": round(tenths[-1], 3)}
        if name != ALONE:
            inside = statistics.median(parts[1] for parts in times[name])
            row |= {"optimizer_ms": round(own, 3), "optimizer_share": round(own / ms, 4)}
            row |= {"optimizer_ms_inside": round(inside, 3)}
        row |= {"ratio": round(ms / medians[BASE], 4), "tokens_per_second": round(1e3 * tokens / ms)}
        rows.append(row)
    return rows


def share(model: GPT, batch: Batch, names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Whole steps of one model with each optimizer, and without any."""
    device = batch.tokens.device.type
    precision = options.precision or ("bfloat16" if device == "cuda" else "float32")
    gradient = gradient_of(model, batch, PRECISIONS[precision], compiled=options.compile)
    works = {ALONE: [gradient]}
    for name in names:
        step, _ = RIVALS[name].make(list(model.parameters()))
        works[name] = [gradient, step]
    times = in_turns(works, model, options.rounds, options.settle)
    return {
        "benchmark": "share",
        "model": options.model,
        "parameters": sum(p.numel() for p in model.parameters()),
        **{name: getattr(options, name) for name in ("batch_size", "length", "vocabulary")},
        "precision": precision,
        "compiled": options.compile,
        "rounds": options.rounds,
        "peak_memory_gb": round(torch.cuda.max_memory_allocated() / 2**30, 1) if device == "cuda" else None,
        "rows": share_rows(times, batch.tokens.numel()),
    }


def share_table(result: dict[str, Any]) -> Iterator[str]:
    size = f"{result['parameters'] / 1e6:,.1f}M parameters"
    how = f"{result['batch_size']} x {result['length']} tokens, {result['precision']}"
    how += ", compiled" if result["compiled"] else ""
    yield f"{result['model']}, {size}, {how}, {result['hardware']}"
    yield share_line("", "step, ms", "optimizer, ms", "share", "inside, ms", "× AdamW", "tokens/s")
    for row in result["rows"]:
        own = ("", "", "")
        if row["what"] != ALONE:
            inside = f"{row['optimizer_ms_inside']:.3f}"
            own = f"{row['optimizer_ms']:.3f}", f"{row['optimizer_share']:.1%}", inside
        end = f"{row['ratio']:.3f}", f"{row['tokens_per_second']:,}"
        yield share_line(row["what"], f"{row['ms']:.3f}", *own, *end)
    yield "optimizer: a step less forward and backward alone. inside: in the step, from backward on."
    yield "Where the two are far apart, the machine was too busy to believe the first."


def share_line(name: str, *cells: str) -> str:
    widths = (10, 14, 7, 11, 8, 10)
    return f"{name:40}" + " ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


# --- The command --------------------------------------------------------------------------------------


def add_share(commands: Any) -> argparse.ArgumentParser:
    about = "what of a whole training step is the optimizer's: a whole step, less forward and backward alone"
    made: argparse.ArgumentParser = commands.add_parser("share", help=about, description=about)
    made.add_argument("--model", default="gpt2", help="gpt2 (default), or a small one such as gpt:1m")
    made.add_argument("--batch-size", type=int, default=16, help="sequences of a step (default 16)")
    made.add_argument("--length", type=int, default=1024, help="tokens of a sequence (default 1024)")
    made.add_argument("--vocabulary", type=int, default=50257, help="(default 50257, which gpt2 needs)")
    made.add_argument(
        "--precision", choices=PRECISIONS, help="of autocast (default bfloat16 on a GPU, else float32)"
    )
    made.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    made.add_argument("--rounds", type=int, default=100, help="steps of each that count (default 100)")
    made.add_argument("--settle", type=int, default=10, help="steps of each before them (default 10)")
    made.add_argument(
        "--only",
        nargs="+",
        metavar="WORD",
        help="optimizers of `paceline bench` with one of these words in their names, beside fused AdamW, "
        "instead of the usual seven",
    )
    return made


def write(result: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


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
    whole = add_share(commands)
    for made in (cpu, gpu, whole):
        made.add_argument("--record", type=Path, help="write the result to this JSON file")
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
    elif options.command == "share":
        if options.rounds < 2 or options.settle < 1:
            whole.error("--rounds is at least 2, --settle at least 1: the first steps compile and allocate")
        try:
            names, (model, batch) = contenders(options.only, device), built(options, device)
        except ValueError as wrong:  # a model, size or optimizer that there is not
            whole.error(str(wrong))
        result |= share(model, batch, names, options)
        print("\n".join(share_table(result)))
        write(result, options.record)
        return
    else:
        result["rows"] = []
        rows = [] if options.part == "small" else gpt2_rows(options.nanogpt, options.steps)
        more = [] if options.part == "gpt2" else small_rows(options.steps)
        for row in chain(rows, more):
            print(json.dumps(row), flush=True)
            result["rows"].append(row)
            write(result, options.record)  # what is known stays known, should the next one fail
    print(json.dumps(result, indent=1))
    write(result, options.record)


if __name__ == "__main__":
    main()
