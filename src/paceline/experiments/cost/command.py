"""`paceline cost`: flags, a table on the terminal or JSON."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, get_args

from paceline.experiments import config
from paceline.experiments.config import ConfigError
from paceline.experiments.cost.estimate import Cost, cost
from paceline.experiments.cost.hardware import HARDWARE, hardware_of
from paceline.experiments.cost.memory import room_to_show
from paceline.experiments.cost.optimizer import PRESETS, AverageDtype, Optimizer, preset
from paceline.experiments.cost.shape import named
from paceline.experiments.cost.training import Sharding, Training

Say = Callable[[str], None]

EXAMPLES = """examples:
  paceline cost --model 70b --gpus 1024 --hardware h200 --optimizer pace --average-dtype bfloat16
      Llama 70B by FSDP2: bytes on each GPU, seconds of a step, checkpoints, all beside AdamW
  paceline cost --model 8b --gpus 64 --tokens 1T --activation-checkpointing --micro-batch 2
      hours and GPU-hours of a budget
  paceline cost --model gpt2 --gpus 1 --micro-batch 16 --optimizer pace_paper
      one GPU, no sharding
  paceline cost --model llama:width=3072,layers=28,heads=24,keys=8,inner=8192,tied=true --gpus 8 --json
      a shape of the own, as JSON

models: 1b 8b 13b 70b 405b (Llama's shapes), gpt2, gpt:0.3m … gpt:88m, or spelled out as above; and
  HuggingFaceTB/SmolLM2-135M, HuggingFaceTB/SmolLM2-1.7B, Qwen/Qwen3-1.7B, google/gemma-3-1b-pt
optimizers: adamw, ema (AdamW and a float32 copy that is averaged), pace (two averages), pace_paper (one)
sharding: ddp, fsdp (FSDP2, ZeRO-3), hsdp (FSDP2 in groups that are copies); no tensor or pipeline parallelism

Nothing is run: it is arithmetic. docs/cost.md says by which formulas, what they assume, and where they were
checked. The share of the peak that is reached is the model's; give your own with --mfu if you know it."""


def add(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    whole: dict[str, Any] = {"type": int, "metavar": "N"}
    parser.add_argument("--model", default="70b", metavar="NAME", help="[70b]")
    parser.add_argument("--length", **whole, help="tokens of a sequence [the model's]")
    parser.add_argument("--vocabulary", **whole, help="[the model's]")
    parser.add_argument("--hardware", default="h200", metavar="NAME", help=f"{', '.join(HARDWARE)} [h200]")
    parser.add_argument("--gpus", default=8, help="all of them; 8 are a node [8]", **whole)
    parser.add_argument("--sharding", choices=get_args(Sharding), help="[fsdp; ddp on one GPU]")
    parser.add_argument("--group", **whole, help="GPUs of a group of hsdp [a node]")
    parser.add_argument("--micro-batch", default=1, help="sequences at once on each GPU [1]", **whole)
    parser.add_argument("--accumulate", default=1, help="micro batches of a step [1]", **whole)
    parser.add_argument(
        "--activation-checkpointing", action="store_true", help="compute activations twice, keep few"
    )
    parser.add_argument("--weights", choices=("float32", "bfloat16"), default="float32", help="[float32]")
    parser.add_argument(
        "--precision",
        choices=("float32", "bfloat16"),
        default="bfloat16",
        help="of matrix products [bfloat16]",
    )
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile [yes]"
    )
    parser.add_argument("--optimizer", default="pace", metavar="NAME", help=f"{', '.join(PRESETS)} [pace]")
    parser.add_argument(
        "--average-dtype", choices=get_args(AverageDtype), default="float32", help="of averages [float32]"
    )
    parser.add_argument("--update-every", default=1, help="move averages every N steps [1]", **whole)
    parser.add_argument("--no-momentum", action="store_true", help="betas=(0, β₂): no first moment")
    parser.add_argument("--clip", action=argparse.BooleanOptionalAction, default=True, help="[yes]")
    number: dict[str, Any] = {"type": float, "metavar": "X"}
    parser.add_argument("--mfu", help="share of the peak, 0 to 1 [from the model of docs/cost.md]", **number)
    parser.add_argument(
        "--overlap",
        default=0.9,
        help="share of forward and backward that hides communication [0.9]",
        **number,
    )
    parser.add_argument(
        "--disk", default=50.0, help="GB a second that checkpoints are written at [50]", **number
    )
    parser.add_argument("--tokens", metavar="N", help="the budget, e.g. 15T [20 for each parameter]")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")


def run(options: argparse.Namespace, say: Say) -> int:
    """Do it."""
    training = training_of(options)
    if options.disk <= 0:
        raise ConfigError(f"disk is {options.disk}; allowed: above 0")
    budget = 20 * training.shape.parameters
    if options.tokens is not None:
        budget = config.make({"tokens": options.tokens}).tokens or 0
    chosen, base = cost(training), cost(replace(training, optimizer=PRESETS["adamw"]))
    if options.json:
        text = json.dumps(as_mapping(chosen, base, budget, 1e9 * options.disk), indent=1).splitlines()
    else:
        text = lines(chosen, base, budget, 1e9 * options.disk)
    for line in text:
        say(line)
    return 0


def training_of(options: argparse.Namespace) -> Training:
    """What the flags describe."""
    return Training(
        shape=named(options.model, length=options.length, vocabulary=options.vocabulary),
        hardware=hardware_of(options.hardware),
        optimizer=_optimizer(options),
        gpus=options.gpus,
        sharding=options.sharding or ("fsdp" if options.gpus > 1 else "ddp"),
        group=options.group,
        weights=options.weights,
        precision=options.precision,
        compile=options.compile,
        micro_batch=options.micro_batch,
        accumulate=options.accumulate,
        activation_checkpointing=options.activation_checkpointing,
        clip=options.clip,
        mfu=options.mfu,
        overlap=options.overlap,
    )


def _optimizer(options: argparse.Namespace) -> Optimizer:
    made = preset(options.optimizer)
    given: dict[str, Any] = {name: getattr(options, name) for name in ("average_dtype", "update_every")}
    if options.no_momentum:
        given["moments"] = 1
    usual = {"average_dtype": "float32", "update_every": 1}
    if not made.is_pace and given != usual:
        raise ConfigError(f"{made.name} has no average_dtype, update_every or no_momentum; pace has")
    return made.with_settings(**given)


# --- What is said ---------------------------------------------------------------------------------------


def lines(chosen: Cost, base: Cost, budget: float, disk: float) -> list[str]:
    """A table: the optimizer, AdamW, and what the one costs over the other."""
    training = chosen.training
    shape = training.shape
    batch = f"{training.micro_batch} × {training.accumulate} × {shape.length:,} tokens on each"
    again = ", activation checkpointing" if training.activation_checkpointing else ""
    found = [
        f"{shape.parameters / 1e9:,.3f}B parameters, {training.gpus:,} × {training.hardware.name}, "
        f"{training.sharding} over {training.shards:,}, {batch}{again}",
        f"{shape.operations_per_token / 1e9:,.2f} GFLOP a token, {_number(chosen.operations / 1e15)} PFLOP "
        f"and {training.step_tokens:,} tokens a step",
        "",
        _line("", _name(training.optimizer), "adamw", "over it"),
        "bytes on the fullest GPU",
    ]
    for part in ("weights", "gradients", "moments", "averages", "activations", "temporaries", "total"):
        own, other = (getattr(each.memory, part) / 1e9 for each in (chosen, base))
        found.append(_pair(f"  {part}", own, other, "GB"))
    for each in (chosen, base):
        if not each.fits:
            found.append(
                f"  {_name(each.training.optimizer)} does not fit: {training.hardware.memory / 1e9:.0f} GB"
            )
    found += [
        _pair("  to show the average", room_to_show(training) / 1e9, 0.0, "GB"),
        "a step",
    ]
    rows: tuple[tuple[str, Callable[[Cost], float], str], ...] = (
        ("  forward and backward", lambda c: 1e3 * c.compute_seconds, "ms"),
        ("  optimizer", lambda c: 1e3 * c.optimizer_seconds, "ms"),
        ("  communication, in all", lambda c: 1e3 * c.communication.seconds, "ms"),
        ("  communication, not hidden", lambda c: 1e3 * c.exposed_seconds, "ms"),
        ("  whole", lambda c: 1e3 * c.step_seconds, "ms"),
        ("  the optimizer's share", lambda c: 100 * c.optimizer_share, "%"),
        ("  MFU", lambda c: 100 * c.mfu, "%"),
        ("  said, each GPU", lambda c: _said(c) / 1e9, "GB"),
        ("  … because of PACE", lambda c: c.communication.of_pace / 1e3, "kB"),
        (f"{_number(budget / 1e9)}B tokens", lambda c: c.hours(budget), "hours"),
        ("  GPU-hours", lambda c: c.gpu_hours(budget), "h"),
        ("checkpoint", lambda c: c.checkpoint.whole / 1e9, "GB"),
        ("  without averages", lambda c: c.checkpoint.without_averages / 1e9, "GB"),
        (f"  written at {disk / 1e9:g} GB/s", lambda c: c.checkpoint.seconds(disk), "s"),
        ("  exported, float32", lambda c: c.checkpoint.export / 1e9, "GB"),
        ("  exported, bfloat16", lambda c: c.checkpoint.export_bfloat16 / 1e9, "GB"),
    )
    found += [_pair(name, of(chosen), of(base), unit) for name, of, unit in rows]
    return found + [f"note: {text}" for text in training.notes()]


def _said(each: Cost) -> float:
    spoken = each.communication
    return spoken.gathered + spoken.scattered + spoken.reduced + spoken.of_pace


def _name(optimizer: Optimizer) -> str:
    words = [optimizer.name]
    if optimizer.is_pace:
        words.append(optimizer.average_dtype)
    if optimizer.update_every > 1:
        words.append(f"every {optimizer.update_every}")
    return ", ".join(words)


def _pair(name: str, own: float, base: float, unit: str) -> str:
    over = f"{100 * (own / base - 1):+.2f} %" if base and own != base and unit != "%" else ""
    return _line(name, f"{_number(own)} {unit}", f"{_number(base)} {unit}", over)


def _number(value: float) -> str:
    """Four digits, and all of those before the point.

    >>> _number(0.012346), _number(12.345), _number(123456.7)
    ('0.01235', '12.35', '123,457')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _line(name: str, *cells: str) -> str:
    return (f"{name:<28}" + "".join(cell.rjust(22) for cell in cells)).rstrip()


def as_mapping(chosen: Cost, base: Cost, budget: float, disk: float) -> dict[str, Any]:
    """All of it as plain values: bytes and seconds."""
    training = chosen.training

    def of(each: Cost) -> dict[str, Any]:
        return {
            "memory": {**asdict(each.memory), "total": each.memory.total},
            "fits": each.fits,
            "compute_seconds": each.compute_seconds,
            "optimizer_seconds": each.optimizer_seconds,
            "exposed_seconds": each.exposed_seconds,
            "step_seconds": each.step_seconds,
            "optimizer_share": each.optimizer_share,
            "mfu": each.mfu,
            "tokens_per_second": each.tokens_per_second,
            "communication": asdict(each.communication),
            "checkpoint": {**asdict(each.checkpoint), "seconds": each.checkpoint.seconds(disk)},
            "hours": each.hours(budget),
            "gpu_hours": each.gpu_hours(budget),
        }

    return {
        "training": asdict(training),
        "parameters": training.shape.parameters,
        "operations_per_token": training.shape.operations_per_token,
        "operations_per_step": chosen.operations,
        "tokens_per_step": training.step_tokens,
        "budget": budget,
        "cost": of(chosen),
        "adamw": of(base),
        "notes": list(training.notes()),
    }
