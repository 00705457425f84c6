"""Tables of docs/storage.md, docs/around.md and docs/training.md, from records of benchmarks. No torch."""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from paceline.experiments import records
from paceline.experiments.pages import markdown

Rows = dict[tuple[str, str], dict[str, Any]]
Runs = dict[tuple[str, float], list[Mapping[str, float]]]

STORAGES = ("float32", "bfloat16", "int8")
STEPS = {"H200": "2026-11-18-step-h200", "CPU": "2026-11-18-step-cpu", "small": "2026-11-18-step-small-h200"}
"""Records of `paceline bench`."""


def read(folder: Path, name: str) -> dict[str, Any]:
    """What a benchmark wrote."""
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return found


def by_optimizer(record: Mapping[str, Any]) -> Rows:
    """Its rows, by what was stepped and what stepped it."""
    return {(row["model"], row["optimizer"]): row for row in record["rows"]}


def runs_of(path: Path) -> Runs:
    """Losses at the end of runs of the study of defaults, one for each seed, by method and learning rate."""
    found: Runs = {}
    for line in records.read(path):
        method, lr, _ = line["name"].rsplit("-", 2)
        found.setdefault((method, float(lr)), []).append(line["losses"])
    return found


def spread(losses: Iterable[float]) -> str:
    """Mean and standard deviation.

    >>> spread([3.0, 3.2])
    '3.100 ± 0.141'
    """
    values = list(losses)
    return f"{fmean(values):.3f} ± {stdev(values):.3f}"


def size(state: float) -> str:
    """Bytes a weight, of which a tensor's count of steps is none.

    >>> size(16.0000445), size(10.0625)
    ('16', '10.06')
    """
    return f"{round(state, 2):g}"


# --- What a step costs ----------------------------------------------------------------------------------


def in_short(folder: Path) -> str:
    """State and time by storage, for GPT-2."""
    rows = by_optimizer(read(folder, STEPS["H200"]))
    body = []
    for storage in STORAGES:
        line = [f'`"{storage}"`']
        for kind in ("PACE, fused", "PACE, fused, paper"):
            row = rows["gpt2", kind if storage == "float32" else f"{kind}, {storage}"]
            line += [size(row["state"]), f"{row['ratio']:.2f}"]
        body.append(line)
    return markdown(["`average_dtype`", "two averages, the default", "time", "one average", "time"], body)


_TIMED = {
    "18M, two x86 cores": ("CPU", "gpt-18m", "ratio"),
    "GPT-2's 124M, H200": ("H200", "gpt2", "ratio"),
    "a Llama's 1.7B, H200": ("H200", "llama-1.7b", "ratio"),
    "320 × 1,000, two x86 cores": ("CPU", "small", "ratio"),
    "320 × 1,000, H200, wall": ("small", "small", "wall_ratio"),
    "again": ("small", "small", "again_ratio"),
}
"""Columns: of which record, what is stepped, and which number."""


_REMOVED = ("PACE, by itself", "PACE, fused, paper, clipped", "average on the host", "relative")
"""Measured, and removed since; as was the one pass over memory on a CPU."""


def step_table(folder: Path) -> str:
    """Everything that was measured, as a multiple of torch's fused AdamW."""
    known = {key: by_optimizer(read(folder, name)) for key, name in STEPS.items()}
    # The CPU's record has those that only a CPU has, the GPU's the storages.
    names = list(dict.fromkeys(name for key in ("H200", "CPU") for _, name in known[key]))
    body = []
    for name in names:
        if any(word in name for word in _REMOVED):
            continue
        kept = next(rows[at] for rows in known.values() for at in rows if at[1] == name)
        line = [name, size(kept["state"])]
        for record, model, number in _TIMED.values():
            row = known[record].get((model, name))
            if record == "CPU" and name.startswith("PACE, fused"):
                row = None
            line.append("" if row is None else f"{row[number]:.2f}")
        body.append(line)
    return markdown(["", "state", *_TIMED], body)


# --- Averages in few bits ---------------------------------------------------------------------------------

SHADOW = "2026-11-16-shadow-h200"


def storage_table(folder: Path) -> str:
    """What each storage keeps of a weight, and how far it is off."""
    rows = by_optimizer(read(folder, STEPS["H200"]))
    errors = {(row["average_dtype"], row["power"]): row["error"] for row in read(folder, SHADOW)["rows"]}
    powers = sorted({power for _, power in errors})
    keys = {
        "float32": "`average`, `returned`",
        "bfloat16": "`average_residual`, `returned_residual`",
        "int8": "the same, and `average_scale`, `returned_scale`",
    }
    body = []
    for storage in STORAGES:
        row = rows["gpt2", "PACE, fused" if storage == "float32" else f"PACE, fused, {storage}"]
        each = (row["state"] - rows["gpt2", "AdamW, fused"]["state"]) / 2
        off = [f"{errors[storage, power]:.2g}" for power in powers]
        body.append([f'`"{storage}"`', size(each), keys[storage], *off])
    head = ["`average_dtype`", "bytes of an average", "keys of the state"]
    return markdown([*head, *(f"error, κ = {power:g}" for power in powers)], body)


WHOLE = {
    "the paper's, κ = 0.3": ("PACE:paper,{},kappa:0.3", "power_0_3"),
    "the paper's, κ = 0.5": ("PACE:paper,{},kappa:0.5", "power_0_5"),
    "the paper's, κ = 0.7": ("PACE:paper,{},kappa:0.7", "power_0_7"),
    "the default": ("PACE:default,{}", "power_0_7"),
}
"""Of the runs with storages: their names, and the float32 average of the same live weights."""


def lost(losses: Iterable[Mapping[str, float]], shadow: str) -> float:
    """The most that storing alone loses: the average above the same in float32."""
    return max(each["average"] - each[shadow] for each in losses)


def whole_runs(folder: Path) -> str:
    """Held-out losses by storage."""
    runs = runs_of(folder / "2026-11-18-defaults-7m-storages.jsonl")
    body = []
    for title, (method, shadow) in WHOLE.items():
        of = {storage: runs[method.format(storage), 0.002] for storage in STORAGES}
        losses = [spread(each["average"] for each in of[storage]) for storage in STORAGES]
        body.append([title, *losses, *(f"{lost(of[storage], shadow):z.5f}" for storage in STORAGES[1:])])
    return markdown(["", *STORAGES, "storing loses, bfloat16", "int8"], body)


# --- Around other optimizers ------------------------------------------------------------------------------

LOW_BIT = {"CPU": "2026-11-16-low-bit-cpu", "H200": "2026-11-16-low-bit-h200"}


def low_bit_table(folder: Path) -> str:
    """8-bit moments, alone and with the pull: the quickest round of the busy CPU, medians of the GPU."""
    cpu, gpu = (by_optimizer(read(folder, name)) for name in LOW_BIT.values())
    body = []
    for (model, name), row in cpu.items():
        if model != "gpt-18m":
            continue
        ratio = row["least_ratio_to_inner"]
        line = [name, size(row["state"]), f"{row['temporary']:.1f}", f"{row['least_ms']:,.0f}"]
        line.append("" if ratio is None else f"{ratio:.2f}")
        other = gpu.get(("gpt2", name))
        body.append([*line, *(("", "") if other is None else (f"{other['ms']:.1f}", f"{other['wall']:.1f}"))])
    head = ["", "state", "at most for a moment", "18M on one core, ms", "× its base"]
    return markdown([*head, "GPT-2 on an H200, ms", "wall, ms"], body)


# --- Training ---------------------------------------------------------------------------------------------

TRAINING = "2026-11-15-training-h200"


def throughput_table(folder: Path) -> str:
    """Tokens a second of whole training steps."""
    body = [
        [
            row["what"].replace(" x ", " × "),
            row["loop"],
            f"{row['tokens_per_second']:,}",
            f"{100 * row['mfu']:.1f}" if "mfu" in row else "",
            f"{row['peak_memory_gb']}" if "peak_memory_gb" in row else "",
        ]
        for row in read(folder, TRAINING)["rows"]
    ]
    return markdown(["", "", "tokens/s", "MFU, %", "peak memory, GiB"], body)


PAGES: dict[str, dict[str, Callable[[Path], str]]] = {
    "storage.md": {
        "in-short": in_short,
        "storages": storage_table,
        "whole-runs": whole_runs,
        "steps": step_table,
    },
    "around.md": {"low-bit": low_bit_table},
    "training.md": {"throughput": throughput_table},
}
"""Pages, and their tables by name: each of the folder of records."""


def tables(page: str, folder: Path) -> dict[str, Callable[[], str]]:
    """Of one page."""
    return {name: partial(make, folder) for name, make in PAGES[page].items()}
