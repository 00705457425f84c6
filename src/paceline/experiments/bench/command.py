"""`paceline bench`: flags, a table on the terminal, JSON and a picture in a folder."""

import argparse
import json
import os
import platform
from collections.abc import Callable
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.experiments.config import ConfigError

if TYPE_CHECKING:
    from paceline.experiments.bench.measure import Row

Say = Callable[[str], None]

EXAMPLES = """examples:
  paceline bench
      the usual tensors of this machine, a few minutes; then look at bench/bench.png
  paceline bench --models gpt2 --only PACE EMA
      some optimizers on the tensors of GPT-2

Each optimizer takes turns with torch's fused AdamW, and × is the ratio of their medians. "of copying" is the
share of the bandwidth that copying a large tensor reaches (on a CPU, changing one in place), if weights,
gradients and state of the update went through memory once. state and temporary are bytes for a parameter.
On a GPU, ms is the time that it is busy, as in training, where the host is ahead; wall is from an idle GPU to
an idle GPU, after steps of others, and again is the same right after a step of its own, when the host's
caches still have what it needs."""

_HEAD = ("", "ms", "10-90 %", "×", "of copying", "state", "temporary", "wall", "×", "again", "×")


def add(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    parser.add_argument("--device", choices=("cpu", "cuda"), help="[a GPU if there is one]")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="gpt-18m, gpt2, llama-1.7b, flat, …")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="only those with it in their name"
    )
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="steps of each [15]")
    parser.add_argument("--out", type=Path, default=Path("bench"), metavar="FOLDER", help="[bench]")


def run(options: argparse.Namespace, say: Say) -> int:
    """Do it."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler, which finds temporaries, says a lot
    import torch

    from paceline.experiments.bench.measure import copy_bandwidth, measure
    from paceline.experiments.bench.subjects import MODELS, RIVALS, USUAL

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no GPU that torch can use")
    models = options.models or USUAL[device]
    for model in models:
        if model not in MODELS:
            raise ConfigError(f"--models {model}: there are {', '.join(MODELS)}")
    if options.rounds < 1:
        raise ConfigError(f"--rounds is {options.rounds}; allowed: at least 1")
    names = [
        name
        for name, rival in RIVALS.items()
        if device in rival.devices and any(word.lower() in name.lower() for word in options.only)
    ]
    if not names:
        raise ConfigError(
            f"--only {' '.join(options.only)}: no optimizer is called so; there are {'; '.join(RIVALS)}"
        )
    if find_spec("schedulefree") is None and "Schedule-Free AdamW" in names:
        names.remove("Schedule-Free AdamW")
        say("without Schedule-Free AdamW: the package schedulefree is not installed")

    options.out.mkdir(parents=True, exist_ok=True)
    bandwidth = copy_bandwidth(device)
    about = {**environment(device), "copy_bandwidth": bandwidth, "rounds": options.rounds}
    say(f"{about['hardware']}, {about['threads']} threads; copying {bandwidth / 1e9:,.0f} GB/s")
    rows: list[Row] = []
    for model in models:
        shapes = MODELS[model]()
        count = sum(torch.Size(shape).numel() for shape in shapes)
        say("")
        say(f"{model}: {count / 1e6:,.1f}M parameters in {len(shapes)} tensors, float32")
        columns = len(_HEAD) if device == "cuda" else -4  # on a CPU there is but one kind of time
        say(_line(_HEAD[:columns]))
        for row in measure(model, shapes, names, device, options.rounds, bandwidth):
            rows.append(row)
            say(_line(_cells(row)[:columns]))
            _save(options.out / "bench.json", about, rows)
    if find_spec("matplotlib") is not None:
        draw(rows, options.out / "bench.png")
    say("")
    say(f"in {options.out}: " + ", ".join(path.name for path in sorted(options.out.glob("bench.*"))))
    return 0


def _cells(row: "Row") -> tuple[str, ...]:
    spread = f"{row.low:.2f}-{row.high:.2f}"
    share, state, temporary = f"{row.bandwidth:.0%}", f"{row.state:.1f}", f"{row.temporary:.1f}"
    wall = f"{row.wall:.2f}", f"{row.wall_ratio:.2f}", f"{row.again:.2f}", f"{row.again_ratio:.2f}"
    return row.optimizer, f"{row.ms:.2f}", spread, f"{row.ratio:.2f}", share, state, temporary, *wall


def _line(cells: tuple[str, ...]) -> str:
    widths = (-42, 9, 17, 7, 11, 7, 10, 9, 7, 9, 7)
    return " ".join(
        c.ljust(-w) if w < 0 else c.rjust(w) for c, w in zip(cells, widths, strict=False)
    ).rstrip()


def _save(path: Path, about: dict[str, Any], rows: "list[Row]") -> None:
    whole = path.with_suffix(".tmp")
    text = json.dumps({"benchmark": "step", **about, "rows": [row._asdict() for row in rows]}, indent=1)
    whole.write_text(text + "\n", encoding="utf-8")
    whole.replace(path)  # what is done is kept, whenever it is stopped


def environment(device: str) -> dict[str, Any]:
    """Where it was measured."""
    import torch

    import paceline

    return {
        "date": date.today().isoformat(),
        "device": device,
        "hardware": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "paceline": paceline.__version__,
    }


def draw(rows: "list[Row]", path: Path) -> None:
    """Ratios to torch's fused AdamW, a panel for each set of tensors."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row.model for row in rows))
    names = list(dict.fromkeys(row.optimizer for row in rows))
    size = (4.2 * len(models) + 2.2, 0.32 * len(names) + 1.2)
    figure = Figure(figsize=size, dpi=140, layout="constrained", facecolor="white")
    for i, model in enumerate(models, 1):
        axes = figure.add_subplot(1, len(models), i)
        # Of small tensors the device is done before the host has asked for all of them.
        small = model == "small"
        ratios = {row.optimizer: row.wall_ratio if small else row.ratio for row in rows if row.model == model}
        for place, name in enumerate(names):
            if name in ratios:
                own = name.startswith(("PACE", "Pullback"))
                axes.barh(place, ratios[name], color="#2a78d6" if own else "#b5b8bd")
                axes.text(ratios[name], place, f" {ratios[name]:.2f}", va="center", fontsize=8)
        axes.axvline(1, color="#5c6067", linewidth=1)
        axes.set_yticks(range(len(names)), names if i == 1 else [], fontsize=8)
        axes.set_xlim(0, 1.15 * max(ratios.values()))
        axes.invert_yaxis()
        axes.set_title(model, loc="left", fontsize=10.5, fontweight="bold")
        axes.set_xlabel(f"{'wall ' if small else ''}time of a step, × torch's fused AdamW", fontsize=9)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    figure.savefig(path)
