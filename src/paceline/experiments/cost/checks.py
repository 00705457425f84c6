"""Predictions beside what was measured on an H200: the last table of docs/cost.md, from records.

Errors are predicted / measured − 1.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.experiments.cost.estimate import cost
from paceline.experiments.cost.hardware import HARDWARE
from paceline.experiments.cost.memory import memory
from paceline.experiments.cost.optimizer import PRESETS, of_spec
from paceline.experiments.cost.shape import named
from paceline.experiments.cost.speed import computing, optimizer_seconds
from paceline.experiments.cost.training import Training
from paceline.experiments.pages import markdown

STEP = "2026-11-18-step-h200.json"
SHARE = "2026-11-16-share-h200.json"
TRAINING = "2026-11-15-training-h200.json"
COST = "2026-11-16-cost-h200.json"

OPTIMIZERS = {
    "AdamW, fused": PRESETS["adamw"],
    "AdamW, fused, and an EMA": PRESETS["ema"],
    "PACE, fused, no average": of_spec("pace:gain=paper,update_every=1000000"),
    "PACE, fused, strength 0": of_spec("pace:pullback_strength=0"),
    "PACE, fused": of_spec("pace"),
    "PACE, fused, bfloat16": of_spec("pace:average_dtype=bfloat16"),
    "PACE, fused, int8": of_spec("pace:average_dtype=int8"),
    "PACE, fused, one average": of_spec("pace:return_power=0.2"),
    "PACE, fused, one average, bfloat16": of_spec("pace:return_power=0.2,average_dtype=bfloat16"),
    "PACE, fused, one average, int8": of_spec("pace:return_power=0.2,average_dtype=int8"),
    "PACE, fused, paper": of_spec("pace:gain=paper"),
    "PACE, fused, paper, bfloat16": of_spec("pace:gain=paper,average_dtype=bfloat16"),
    "PACE, fused, paper, int8": of_spec("pace:gain=paper,average_dtype=int8"),
    "PACE, fused, paper, no momentum": of_spec("pace:gain=paper,betas=(0, 0.999)"),
    "PACE, fused, paper, two averages": of_spec("pace:gain=paper,return_power=0.8"),
}
"""By their names in `paceline bench`."""
MODELS = {
    "gpt2": replace(named("gpt2"), vocabulary=50257),
    "llama-1.7b": named("llama:width=2048,layers=24,heads=16,keys=16,inner=8192,vocabulary=49152,tied=true"),
}
"""Likewise."""


def rows_of(folder: Path, record: str) -> list[dict[str, Any]]:
    """What was measured."""
    rows: list[dict[str, Any]] = json.loads((folder / record).read_text(encoding="utf-8"))["rows"]
    return rows


def _training(optimizer: str = "adamw", **settings: Any) -> Training:
    return Training(
        **{
            "shape": named("gpt2"),
            "hardware": HARDWARE["h200"],
            "optimizer": PRESETS[optimizer],
            **settings,
        }
    )


def of_optimizers(folder: Path) -> dict[tuple[str, str], float]:
    """Time of a step of the optimizer, by model and name."""
    found = {}
    for row in rows_of(folder, STEP):
        model, name = row["model"], row["optimizer"]
        if model in MODELS and name in OPTIMIZERS:
            about = _training(shape=MODELS[model], optimizer="adamw", clip=False)
            predicted = optimizer_seconds(replace(about, optimizer=OPTIMIZERS[name]))
            found[model, name] = 1e3 * predicted / row["ms"] - 1
    return found


def of_whole_steps(folder: Path) -> dict[str, float]:
    """Time of a whole step of GPT-2, by optimizer."""
    found = {}
    for row in rows_of(folder, SHARE):
        if (name := row["what"]) in ("AdamW, fused", "PACE, fused, paper", "PACE, fused"):
            about = replace(_training(micro_batch=16, clip=False), optimizer=OPTIMIZERS[name])
            found[name] = 1e3 * cost(about).step_seconds / row["ms"] - 1
    return found


def of_peaks(folder: Path) -> dict[str, float]:
    """Peak memory of GPT-2 in batches of 32, to the tenth of a GiB that was written down."""
    rows = rows_of(folder, TRAINING)
    found = {}
    for row, optimizer in ((rows[2], "adamw"), (rows[4], "pace_paper")):
        predicted = memory(_training(optimizer, micro_batch=32, accumulate=15)).total / 2**30
        found[optimizer] = predicted / row["peak_memory_gb"] - 1
    return found


def of_speeds(folder: Path) -> dict[int, float]:
    """Tokens a second of GPT-2 where nothing was fitted, by batch."""
    rows = rows_of(folder, TRAINING)
    found = {}
    for row, batch in ((rows[0], 12), (rows[2], 32)):
        predicted = cost(_training(micro_batch=batch, accumulate=480 // batch)).tokens_per_second
        found[batch] = predicted / row["tokens_per_second"] - 1
    return found


def of_small(folder: Path) -> dict[int, float]:
    """Tokens a second of a 7M GPT: one alone, which is the host, and six at once, which is the device."""
    rows = rows_of(folder, TRAINING)
    small = _training("pace", shape=named("gpt:7m", vocabulary=4096, length=256), micro_batch=64)
    device = small.step_tokens / (computing(small).seconds + optimizer_seconds(small))
    return {
        1: cost(small).tokens_per_second / rows[5]["tokens_per_second"] - 1,
        6: device / rows[8]["tokens_per_second"] - 1,
    }


def foretold(folder: Path, what: str) -> dict[tuple[str, str], float]:
    """Of steps that were measured after all was fixed, by model and optimizer."""
    return {(row["model"], row["optimizer"]): row["error"][what] for row in rows_of(folder, COST)}


def worst(errors: Mapping[Any, float]) -> str:
    """The largest, in words.

    >>> worst({"GPT-2": 0.01, "Llama": -0.062})
    '6.2 % at most'
    """
    return f"{100 * max(map(abs, errors.values())):.1f} % at most"


def table(folder: Path) -> str:
    """All of them."""
    later = "25M GPT, GPT-2 and a Llama of 1.2B, each with AdamW, PACE and PACE in int8"
    checks = (
        ("peak memory of GPT-2 in batches of 32, AdamW and PACE", TRAINING, worst(of_peaks(folder))),
        (
            f"time of the optimizer, {len(OPTIMIZERS)} of them, GPT-2 and a Llama of 1.7B",
            STEP,
            worst(of_optimizers(folder)),
        ),
        ("a whole step of GPT-2, three optimizers", SHARE, worst(of_whole_steps(folder))),
        ("tokens a second of GPT-2 in two other batches", TRAINING, worst(of_speeds(folder))),
        ("tokens a second of a 7M GPT, alone and six at once", TRAINING, worst(of_small(folder))),
        (f"peak memory: {later}", COST, worst(foretold(folder, "peak"))),
        ("the same, time of a step", COST, worst(foretold(folder, "step_seconds"))),
        ("the same, time of the optimizer", COST, worst(foretold(folder, "optimizer_seconds"))),
    )
    body = [[what, f"[H200](../records/{record})", off] for what, record, off in checks]
    return markdown(["what", "against", "off by"], body)


def tables(folder: Path) -> dict[str, Callable[[], str]]:
    """For the page."""
    return {"checked": partial(table, folder)}
