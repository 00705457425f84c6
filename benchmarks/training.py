"""The optimizer's share of a whole training step: forward, backward and step, next to torch's AdamW.

    python benchmarks/training.py
        on a GPU GPT-2 124M, 16 x 1024 tokens, bfloat16, compiled; on a CPU a small GPT in float32
    python benchmarks/training.py --only push --record FILE

Tokens are random: speed does not depend on them. Steps that compile and allocate are not counted.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.bench.command import environment
from paceline.bench.subjects import BASE, SEED, SUBJECTS
from paceline.lm.batch import Batch
from paceline.lm.evaluate import autocast, summed_loss
from paceline.lm.gpt import GPT, shape_of
from paceline.lm.pretrained import Pretrained

Work = Callable[[], Any]
ALONE = "forward and backward alone"
SMOLLM = "smollm2-135m"
SIZES = {
    "cuda": {"model": "gpt2", "vocabulary": 50257, "length": 1024, "batch_size": 16},
    "cpu": {"model": "gpt:1m", "vocabulary": 2048, "length": 128, "batch_size": 8},
}


def model_of(size: dict[str, Any]) -> nn.Module:
    """Return a model with random weights: a GPT, or one with the shapes of SmolLM2-135M."""
    if size["model"] != SMOLLM:
        return GPT(shape_of(size["model"], size["vocabulary"], size["length"]))
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    shape |= {"num_key_value_heads": 3, "vocab_size": size["vocabulary"]}
    return Pretrained(LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True)))


def gradient_of(size: dict[str, Any], device: str, *, compiled: bool) -> tuple[nn.Module, Work]:
    """Return a model, and its forward and backward pass on a batch of random tokens."""
    torch.manual_seed(SEED)
    model = model_of(size).to(device)
    tokens, targets = torch.randint(size["vocabulary"], (2, size["batch_size"], size["length"])).to(device)
    batch = Batch(tokens, targets, None)
    loss_of = torch.compile(summed_loss) if compiled else summed_loss
    precision = torch.bfloat16 if device == "cuda" else torch.float32

    def gradient() -> None:
        model.zero_grad(set_to_none=True)  # as in training: gradients have other addresses at every step
        with autocast(batch.tokens.device, precision):
            loss = loss_of(model, batch) / batch.targets.numel()
        loss.backward()

    return model, gradient


def timed(works: list[Work], device: str) -> Callable[[], list[float]]:
    """Do one work after the other; return milliseconds of each, to be asked for when the device is done."""
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


def in_turns(
    works: dict[str, list[Work]], model: nn.Module, rounds: int, settle: int
) -> dict[str, list[float]]:
    """Return milliseconds of each in each round after those in which they settle.

    The order differs in every round, so that none always follows one that left the device idle. The device is
    waited for once a round: what an optimizer does on the host hides behind it, as in a training.
    """
    live = [parameter.detach() for parameter in model.parameters()]
    start = [tensor.clone() for tensor in live]
    device = live[0].device.type
    order, chance = list(works), random.Random(SEED)
    times: dict[str, list[float]] = {name: [] for name in works}
    for i in range(settle + rounds):
        chance.shuffle(order)
        readings = {}
        for name in order:
            for tensor, first in zip(live, start, strict=True):  # no step of another changes the work
                tensor.copy_(first)
            readings[name] = timed(works[name], device)
        if device == "cuda":
            torch.cuda.synchronize()
        if i >= settle:
            for name, reading in readings.items():
                times[name].append(sum(reading()))
    return times


def rows_of(times: dict[str, list[float]], tokens: int) -> list[dict[str, Any]]:
    """Return a row for each optimizer: its step is the whole step, less forward and backward alone."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = []
    for name, ms in medians.items():
        own = ms - medians[ALONE]
        row = {"what": name, "ms": round(ms, 3), "tokens_per_second": round(1e3 * tokens / ms)}
        if name != ALONE:
            row |= {"optimizer_ms": round(own, 3), "optimizer_share": round(own / ms, 4)}
            row["ratio"] = round(ms / medians[BASE], 4)
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield f"{'':28}{'step, ms':>10}{'optimizer, ms':>15}{'share':>8}{'× AdamW':>9}{'tokens/s':>11}"
    for row in rows:
        own = " " * 32
        if "ratio" in row:
            own = f"{row['optimizer_ms']:15.3f}{row['optimizer_share']:8.1%}{row['ratio']:9.3f}"
        yield f"{row['what']:28}{row['ms']:10.3f}{own}{row['tokens_per_second']:11,}"


def main() -> None:
    """Measure, print a table, and write a record if asked to."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="gpt2, gpt:1m, smollm2-135m, … [gpt2 on a GPU, gpt:1m on a CPU]")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=device == "cuda")
    parser.add_argument("--rounds", type=int, default=40, help="steps of each that count [40]")
    parser.add_argument("--settle", type=int, default=10, help="steps of each before them [10]")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="optimizers with it in the name"
    )
    parser.add_argument("--record", type=Path, help="write the result to this JSON file")
    options = parser.parse_args()
    if options.rounds < 1 or options.settle < 1:
        parser.error("--rounds and --settle are at least 1: the first steps compile and allocate")
    size = SIZES[device] | ({"model": options.model} if options.model else {})
    model, gradient = gradient_of(size, device, compiled=options.compile)
    works: dict[str, list[Work]] = {ALONE: [gradient]}
    for name, subject in SUBJECTS.items():
        if name == BASE or any(word.lower() in name.lower() for word in options.only):
            works[name] = [gradient, subject.make(list(model.parameters()))[0]]
    rows = rows_of(
        in_turns(works, model, options.rounds, options.settle), size["batch_size"] * size["length"]
    )
    about = {"benchmark": "share", **environment(device), "seed": SEED, **size, "compiled": options.compile}
    print(f"{size['model']}, {size['batch_size']} x {size['length']} tokens, {about['hardware']}")
    print("\n".join(table(rows)))
    if options.record is not None:
        text = json.dumps({**about, "rounds": options.rounds, "rows": rows}, indent=1)
        options.record.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
