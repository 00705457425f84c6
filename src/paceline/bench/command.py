"""The command `paceline bench`: its flags, a table on the terminal, and a record in JSON."""

import argparse
import json
import math
import os
import platform
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.runs.config import ConfigError
from paceline.runs.terminal import Command, say

if TYPE_CHECKING:
    from paceline.bench.measure import Row

EXAMPLES = """examples:
  paceline bench
      the usual tensors for this machine; under a minute on a CPU
  paceline bench --models gpt2 --only push
      some optimizers on the tensors of GPT-2
  paceline bench --seconds 10 --out bench.json
      longer, and also write a record with date, hardware, versions, commit and seed; paceline cost reads it

Each optimizer takes turns with torch's AdamW (fused on a GPU, as it comes on a CPU). × is the ratio of their
medians in this run. State is bytes a weight that are kept next to it. On a GPU "temporary" is the most bytes
a weight that a step holds for a moment, and "graph" is a step captured in a CUDA graph: only the device's
time is left, as in training, where the host is ahead."""

_HEAD = ("", "ms", "10-90 %", "×", "state", "temporary", "graph, ms", "×")
_WIDTHS = (24, 9, 17, 7, 7, 10, 10, 7)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--device", choices=("cpu", "cuda"), help="[a GPU if there is one]")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="gpt-6m, gpt2, llama-1.7b, small")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="optimizers with one of these in their name"
    )
    parser.add_argument("--seconds", type=float, default=1.0, metavar="X", help="for each optimizer [1]")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a record in JSON")


def run(options: argparse.Namespace) -> int:
    """Measure, show a line for each optimizer as it is done, and keep the record up to date."""
    from paceline.bench.measure import measure
    from paceline.bench.subjects import MODELS, SEED

    device, models, names = _chosen(options)
    about = {"benchmark": "step", **environment(device), "seed": SEED, "seconds": options.seconds}
    say(f"{about['hardware']}, {about['threads']} threads, torch {about['torch']}")
    rows: list[Row] = []
    for model in models:
        shapes = MODELS[model]()
        count = sum(math.prod(shape) for shape in shapes)
        say("")
        say(f"{model}: {count / 1e6:,.1f}M weights in {len(shapes)} tensors, float32")
        columns = len(_HEAD) if device == "cuda" else -3
        say(_line(_HEAD[:columns]))
        for row in measure(model, shapes, names, device, options.seconds):
            rows.append(row)
            say(_line(_cells(row)[:columns]))
            if options.out is not None:
                _save(options.out, about, rows)
    if options.out is not None:
        say("")
        say(f"record: {options.out}")
    return 0


def _chosen(options: argparse.Namespace) -> tuple[str, list[str], list[str]]:
    """Return device, models and optimizers; raise ConfigError for a flag that asks for what is not there."""
    import torch

    from paceline.bench.subjects import MODELS, SUBJECTS, USUAL

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no GPU that torch can use")
    models = list(options.models or USUAL[device])
    for model in models:
        if model not in MODELS:
            raise ConfigError(f"--models {model}: allowed: {', '.join(MODELS)}")
    if not 0 <= options.seconds <= 3600:
        raise ConfigError(f"--seconds is {options.seconds:g}; allowed: 0 to 3600")
    names = [name for name in SUBJECTS if any(word.lower() in name.lower() for word in options.only)]
    if not names:
        raise ConfigError(f"--only {' '.join(options.only)}: no optimizer has that in its name; "
                          f"there are: {'; '.join(SUBJECTS)}")  # fmt: skip
    if options.out is not None and not options.out.parent.is_dir():
        raise ConfigError(f"--out {options.out}: there is no folder {options.out.parent}")
    return device, models, names


def _cells(row: "Row") -> tuple[str, ...]:
    times = f"{row.ms:.2f}", f"{row.low:.2f}-{row.high:.2f}", f"{row.ratio:.2f}"
    temporary = "" if row.temporary is None else f"{row.temporary:.1f}"
    graph = ("", "") if row.graph_ms is None else (f"{row.graph_ms:.3f}", f"{row.graph_ratio:.2f}")
    return row.optimizer, *times, f"{row.state:.2f}", temporary, *graph


def _line(cells: tuple[str, ...]) -> str:
    first, *rest = cells
    texts = (cell.rjust(width) for cell, width in zip(rest, _WIDTHS[1:], strict=False))
    return " ".join((first.ljust(_WIDTHS[0]), *texts)).rstrip()


def _save(path: Path, about: dict[str, Any], rows: "list[Row]") -> None:
    whole = path.with_suffix(".tmp")
    text = json.dumps({**about, "rows": [row._asdict() for row in rows]}, indent=1)
    whole.write_text(text + "\n", encoding="utf-8")
    whole.replace(path)  # rows that are done are kept if the command is stopped


def environment(device: str) -> dict[str, Any]:
    """Return where something is measured: date, hardware, versions and commit."""
    from paceline.runs import records

    known = records.environment()
    machine = f"{platform.machine()} CPU, {os.cpu_count()} cores"
    hardware = known["gpu"] if device == "cuda" else machine
    return {"date": date.today().isoformat(), "device": device, "hardware": hardware, **known}


COMMANDS = (
    Command(
        name="bench",
        help="time and memory of an optimizer's step on this machine, next to AdamW",
        examples=EXAMPLES,
        add=add,
        run=run,
    ),
)
