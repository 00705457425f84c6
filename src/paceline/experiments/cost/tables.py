"""The tables of docs/cost.md, made by the functions: between marks in the page, to be made again."""

from collections.abc import Callable

from paceline.experiments.cost.estimate import Cost, cost
from paceline.experiments.cost.hardware import HARDWARE
from paceline.experiments.cost.optimizer import PRESETS, Optimizer, Precision
from paceline.experiments.cost.shape import SHAPES
from paceline.experiments.cost.training import Sharding, Training
from paceline.experiments.pages import markdown

_MANY = 2**20  # weights
GPUS = (8, 64, 256, 1024, 4096, 16384)
PACE, PAPER = PRESETS["pace"], PRESETS["pace_paper"]
SIDE_BY_SIDE: dict[str, Optimizer] = {
    "AdamW": PRESETS["adamw"],
    "AdamW, EMA": PRESETS["ema"],
    "PACE float32": PACE,
    "PACE bfloat16": PACE.with_settings(average_dtype="bfloat16"),
    "PACE int8": PACE.with_settings(average_dtype="int8"),
    "paper float32": PAPER,
    "paper bfloat16": PAPER.with_settings(average_dtype="bfloat16"),
    "paper int8": PAPER.with_settings(average_dtype="int8"),
}
"""The columns: optimizers and storages."""


def usual(model: str, gpus: int, optimizer: Optimizer, sharding: Sharding = "fsdp") -> Training:
    """The training of the tables: one sequence at once on each H200, activation checkpointing."""
    return Training(
        shape=SHAPES[model],
        hardware=HARDWARE["h200"],
        optimizer=optimizer,
        gpus=gpus,
        sharding=sharding,
        activation_checkpointing=True,
    )


def _of_models(cell: Callable[[Cost, Cost], str], sharding: Sharding = "fsdp") -> str:
    rows = []
    for model in SHAPES:
        for gpus in GPUS:
            base = cost(usual(model, gpus, PRESETS["adamw"], sharding))
            costs = [cost(usual(model, gpus, each, sharding)) for each in SIDE_BY_SIDE.values()]
            rows.append([model, f"{gpus:,}", *(cell(each, base) for each in costs)])
    return markdown(["model", "GPUs", *SIDE_BY_SIDE], rows)


def memory_table() -> str:
    """GB on the fullest GPU; in brackets what does not fit."""

    def cell(each: Cost, _: Cost) -> str:
        text = f"{each.memory.total / 1e9:,.1f}"
        return text if each.fits else f"({text})"

    return _of_models(cell)


def time_table() -> str:
    """Seconds of AdamW's step, and what the others take beyond it."""

    def cell(each: Cost, base: Cost) -> str:
        if each.training.optimizer.name == "adamw":
            return f"{each.step_seconds:.3f} s"
        return f"{100 * (each.step_seconds / base.step_seconds - 1):+.3f} %"

    return _of_models(cell)


def state_table() -> str:
    """Bytes a weight."""
    rows = []
    for name, optimizer in SIDE_BY_SIDE.items():
        dtypes: tuple[Precision, ...] = ("float32", "bfloat16")
        kept = [optimizer.moment_bytes(_MANY, dtype) + optimizer.average_bytes(_MANY) for dtype in dtypes]
        moved = optimizer.traffic("float32") + optimizer.beside("float32")
        rows.append([name, *(f"{size / _MANY:.2f}" for size in kept), f"{moved:.2f}"])
    return markdown(["", "float32 weights", "bfloat16 weights", "moved, float32"], rows)


def update_every_table() -> str:
    """70B on 256 GPUs: milliseconds of the optimizer."""
    every = (1, 2, 5, 10, 100)
    kinds = {name: each for name, each in SIDE_BY_SIDE.items() if each.is_pace}
    rows = []
    for name, optimizer in kinds.items():
        costs = [cost(usual("70b", 256, optimizer.with_settings(update_every=n))) for n in every]
        moved = costs[0].training.optimizer.traffic("float32"), costs[3].training.optimizer.traffic("float32")
        rows.append(
            [name, f"{moved[0]:.1f}", f"{moved[1]:.1f}", *(f"{1e3 * c.optimizer_seconds:.2f}" for c in costs)]
        )
    return markdown(["", "bytes, every step", "every 10th", *(f"{n}" for n in every)], rows)


def checkpoint_table() -> str:
    """GB of files."""
    rows = []
    for model in SHAPES:
        costs = [cost(usual(model, 1024, each)).checkpoint for each in SIDE_BY_SIDE.values()]
        files = [f"{each.whole / 1e9:,.0f}" for each in costs]
        rows.append(
            [model, *files, f"{costs[0].export / 1e9:,.0f}", f"{costs[0].export_bfloat16 / 1e9:,.1f}"]
        )
    return markdown(["model", *SIDE_BY_SIDE, "export", "export, bfloat16"], rows)


def sharding_table() -> str:
    """70B: what each way of sharding keeps and says."""
    rows = []
    for gpus in (64, 1024, 16384):
        for sharding in ("ddp", "fsdp", "hsdp"):
            each = cost(usual("70b", gpus, PACE, sharding))
            spoken = each.communication
            said = spoken.gathered + spoken.scattered + spoken.reduced
            rows.append(
                [
                    f"{gpus:,}",
                    sharding,
                    f"{each.memory.kept / 1e9:,.1f}",
                    f"{each.memory.total / 1e9:,.1f}" if each.fits else f"({each.memory.total / 1e9:,.1f})",
                    f"{said / 1e9:,.0f}",
                    f"{spoken.of_pace / 1e3:.1f}",
                    f"{spoken.seconds:.2f}",
                    f"{each.exposed_seconds:.2f}",
                    f"{each.step_seconds:.2f}",
                ]
            )
    head = [
        "GPUs",
        "",
        "kept, GB",
        "fullest, GB",
        "said, GB",
        "of it PACE, kB",
        "takes, s",
        "not hidden, s",
        "step, s",
    ]
    return markdown(head, rows)


BUDGET = 15e12


def seventy_table() -> str:
    """15T tokens of a 70B model on 1,024 H200."""
    base = cost(usual("70b", 1024, PRESETS["adamw"]))
    rows = []
    kinds = SIDE_BY_SIDE | {"PACE float32, every 10th step": PACE.with_settings(update_every=10)}
    for name, optimizer in kinds.items():
        each = cost(usual("70b", 1024, optimizer))
        more = each.gpu_hours(BUDGET) - base.gpu_hours(BUDGET)
        rows.append(
            [
                name,
                f"{1e3 * each.optimizer_seconds:.2f}",
                f"{100 * each.optimizer_share:.3f}",
                f"{100 * (each.step_seconds / base.step_seconds - 1):+.4f}",
                f"{more:+,.0f}",
                f"{(each.memory.total - base.memory.total) / 1e9:+.2f}",
                f"{each.checkpoint.whole / 1e9:,.0f}",
                f"{each.checkpoint.seconds(50e9):.0f}",
            ]
        )
    head = [
        "",
        "optimizer, ms",
        "share, %",
        "time, %",
        "GPU-hours",
        "memory, GB",
        "checkpoint, GB",
        "written, s",
    ]
    return markdown(head, rows)


def small_table() -> str:
    """70B on few GPUs, where the optimizer's part of a step and of the memory is largest."""
    rows = []
    for gpus in (8, 16, 32, 64):
        base = cost(usual("70b", gpus, PRESETS["adamw"]))
        for name in ("AdamW", "PACE float32", "PACE bfloat16", "PACE int8", "paper int8"):
            each = cost(usual("70b", gpus, SIDE_BY_SIDE[name]))
            total = f"{each.memory.total / 1e9:,.0f}"
            rows.append(
                [
                    f"{gpus}",
                    name,
                    total if each.fits else f"({total})",
                    f"{1e3 * each.optimizer_seconds:,.0f}",
                    f"{100 * (each.step_seconds / base.step_seconds - 1):+.2f}",
                ]
            )
    return markdown(["GPUs", "", "fullest, GB", "optimizer, ms", "time, %"], rows)


def hardware_table() -> str:
    """What is taken for each GPU."""
    rows = [
        [
            each.name,
            f"{each.peak / 1e12:,.0f}",
            f"{each.memory / 1e9:.0f}",
            f"{each.bandwidth / 1e12:.2f}",
            f"{each.link / 1e9:.0f}",
            f"{each.network / 1e9:.0f}",
        ]
        for each in HARDWARE.values()
    ]
    head = [
        "",
        "bfloat16, TFLOP/s",
        "memory, GB",
        "its bandwidth, TB/s",
        "NVLink, GB/s",
        "network, GB/s",
    ]
    return markdown(head, rows)


def model_table() -> str:
    """The presets."""
    rows = []
    for name, s in SHAPES.items():
        whole = cost(usual(name, 1024, PRESETS["adamw"]))
        numbers = (s.width, s.layers, s.heads, s.keys, s.inner, s.vocabulary, s.length)
        rows.append(
            [
                name,
                f"{s.parameters / 1e9:.3f}",
                *(f"{number:,}" for number in numbers),
                f"{s.operations_per_token / 1e9:,.1f}",
                f"{100 * whole.mfu:.0f}",
                f"{whole.gpu_hours(1e12):,.0f}",
            ]
        )
    head = ["", "parameters, B", "width", "layers", "heads", "keys", "inner", "vocabulary", "length"]
    return markdown([*head, "GFLOP a token", "MFU, %", "GPU-hours for 1T tokens"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "state": state_table,
    "hardware": hardware_table,
    "models": model_table,
    "memory": memory_table,
    "time": time_table,
    "every": update_every_table,
    "checkpoints": checkpoint_table,
    "sharding": sharding_table,
    "seventy": seventy_table,
    "small": small_table,
}
