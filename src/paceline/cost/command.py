"""The command `paceline cost`: its flags, and a table on the terminal or JSON."""

import argparse
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from paceline.cost.arithmetic import Cost, WeightDtype, costs, measured
from paceline.runs.config import ConfigError
from paceline.runs.terminal import Command, say
from paceline.studies.text import Listing

EXAMPLES = """examples:
  paceline cost
      GPT-2 124M on one GPU: what each optimizer keeps, and the size of a checkpoint
  paceline cost --parameters 8B --gpus 64
      the same for 8 billion weights, sharded by FSDP2
  paceline bench --out bench.json
  paceline cost --parameters 1.7B --bench bench.json --step 850
      also the optimizer's time on this machine, and its share of your step of 850 ms with AdamW

State is on each GPU. A checkpoint holds the weights and the state of the whole model; the model that
save_averaged writes has the size of the weights. Paper and none keep one average, push and pull keep two."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--parameters", default="124M", metavar="N", help="weights, e.g. 8B [124M]")
    parser.add_argument("--weights", choices=get_args(WeightDtype), default="float32", help="[float32]")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="that share the state [1]")
    parser.add_argument("--bench", type=Path, metavar="FILE", help="a record of paceline bench --out FILE")
    parser.add_argument("--step", type=float, metavar="MS", help="your measured step with AdamW")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    """Show the cost of every optimizer."""
    parameters = _count(options.parameters)
    _check(options)
    hardware, times = (None, None) if options.bench is None else measured(options.bench)
    found = costs(
        parameters, weights=options.weights, gpus=options.gpus, ns_per_weight=times, step_ms=options.step
    )
    if options.json:
        for line in json.dumps([asdict(cost) for cost in found], indent=1).splitlines():
            say(line)
        return 0
    where = f", sharded over {options.gpus} GPUs" if options.gpus > 1 else ""
    say(f"{parameters:,} weights in {options.weights}{where}")
    say("")
    for line in _table(found):
        say(line)
    say("")
    if hardware is None:
        say("times: paceline bench --out FILE measures them here; then add --bench FILE --step MS")
    else:
        say(f"times: {options.bench}, {hardware}")
    if options.gpus > 1:
        say("int8 is refused for sharded weights: shards would cut its blocks; bfloat16 works")
    return 0


def _count(text: str) -> int:
    """Return a number of weights.

    >>> _count("1.7B"), _count("124000000")
    (1700000000, 124000000)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([kMBT]?)", text)
    scale = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
    count = round(float(found[1]) * scale[found[2]]) if found else 0
    if count < 1:
        raise ConfigError(f"--parameters is {text[:80]!r}; write it as 124M, 8B or 124000000")
    return count


def _check(options: argparse.Namespace) -> None:
    if options.gpus < 1:
        raise ConfigError(f"--gpus is {options.gpus}; allowed: at least 1")
    if options.step is not None and not options.step > 0:
        raise ConfigError(f"--step is {options.step:g}; allowed: above 0, in milliseconds")
    if options.step is not None and options.bench is None:
        raise ConfigError("--step needs --bench FILE: a record of paceline bench --out FILE on this machine")
    if options.bench is not None and options.weights != "float32":
        raise ConfigError("--bench has times for float32 weights; leave out --weights")


def _table(found: list[Cost]) -> list[str]:
    head = ("", "bytes a weight", "state, GB", "checkpoint, GB", "step, ms", "of your step", "over AdamW")
    rows = [head, *map(_cells, found)]
    # Columns of times are there only if they were asked for.
    used = [i for i in range(len(head)) if any(row[i] for row in rows[1:])]
    columns, *lines = (tuple(row[i] for i in used) for row in rows)
    return Listing(columns=columns, rows=tuple(lines)).lines()


def _cells(cost: Cost) -> tuple[str, ...]:
    per_weight = f"{cost.state_per_weight:.2f}"
    size = f"{cost.state / 1e9:,.2f}", f"{cost.checkpoint / 1e9:,.2f}"
    own = "" if cost.step_ms is None else f"{cost.step_ms:,.2f}"
    share = "" if cost.share is None else f"{cost.share:.1%}"
    over = "" if cost.over_adamw is None else f"{cost.over_adamw:+.1%}"
    return cost.optimizer, per_weight, *size, own, share, over


COMMANDS = (
    Command(
        name="cost",
        help="bytes that an optimizer keeps, and its share of your training step",
        examples=EXAMPLES,
        add=add,
        run=run,
    ),
)
