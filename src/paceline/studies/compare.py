"""`paceline compare`: several ways to train, next to each other on the same data, and one page on them.

.. code-block:: text

    FOLDER/plan.json      what is run, and how many in parallel     FOLDER/report.html    what came out
    FOLDER/runs/NAME/     each run: records.jsonl, timing.jsonl     FOLDER/*.csv, *.png   the parts of it
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.runs import config, flags
from paceline.runs.config import ConfigError
from paceline.runs.terminal import Command, say, warn
from paceline.studies.runs import count, rate, refuse_others

if TYPE_CHECKING:
    from paceline.studies.plan import Plan

EXAMPLES = """examples:
  paceline compare
      a demonstration: 15 short runs of a small GPT on the text inside this Python; minutes on two cores
  paceline compare --data my.jsonl --model gpt:12m --lr 1e-3 2e-3 4e-3 --seeds 3 --time 8h
      your own text, as many steps as fit the time
  paceline compare --task sft --data chat.jsonl --model HuggingFaceTB/SmolLM2-135M-Instruct \\
      --length 1024 --tokens 20M --methods adamw/ema pace+push pace pace:c=1e-2 adamw@wsd
      fine-tuning on conversations, with methods of your choice

What it costs: methods x learning rates x seeds runs, where averages of one run share it: adamw,
adamw/short_ema and adamw/ema are one. Before the first one it tries the model for a few steps, and says how
long everything will take. Stop it any time (Ctrl-C): the same command resumes, and repeats no finished run.

methods: BASE[+CONTROL][:setting=value,…][/AVERAGE][@SCHEDULE], e.g. adamw:weight_decay=0.1/power:0.9@wsd
  adamw              AdamW, its last weights            adamw@wsd      AdamW with a decay, its last weights
  adamw/short_ema    an average of AdamW's weights      pace           PACE as in the paper, its average
  adamw/ema          a longer one, of the same run      pace+push      PACE with a push, as we recommend it
  schedule_free  adamw/bema  lookahead  gpa  ema_nesterov  ademamix  sgd  adamw@cosine  adamw@linear"""

METHODS = ("adamw", "adamw/short_ema", "adamw/ema", "pace+push", "pace", "adamw@wsd", "schedule_free")

# Settings of a run that a comparison chooses for each run, whose runs are each of one process.
CHOSEN = frozenset(
    {"method", "schedule", "horizon", "averages", "lr", "telemetry_every", "keep", "keep_steps", "fork"}
    | {"parallel"}
)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `paceline compare`."""

    def flag(name: str, text: str, **more: object) -> None:
        parser.add_argument(f"--{name}", help=text, **more)  # type: ignore[arg-type]

    here = Path("comparison")
    flag("out", "where everything goes [comparison]", type=Path, default=here, metavar="FOLDER")
    flag("methods", f"[{' '.join(METHODS)}]", nargs="+", metavar="METHOD")
    text = "learning rates; each method is run at each of them"
    flag("lr", text, nargs="+", type=rate, metavar="X", dest="lrs")
    flag("seeds", "seeds per setting [1]", type=count, default=1, metavar="N")
    text = "for everything, e.g. 90s, 10min, 8h: as many steps as fit, not --steps"
    flag("time", text, type=seconds, metavar="10min")
    flag("jobs", "runs in parallel; without it, as many as fit", type=count, metavar="N")
    flags.add_settings(parser, flags.COMMON)


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of all runs that file and flags give; flags win."""
    found = config.read_toml(options.config) if options.config else {}
    found |= flags.settings_given(options)
    if chosen := sorted(found.keys() & CHOSEN):
        raise ConfigError(f"{chosen[0]} is no setting of all runs; --methods and --lr say what is compared")
    return found


def run(options: argparse.Namespace) -> int:
    """Plan, do the runs that are not done, and write the page; return 1 if a run could not be done."""
    from paceline.studies import comparison, engine
    from paceline.studies.live import shown
    from paceline.studies.plan import Request, check, make_plan
    from paceline.studies.plots import check_installed
    from paceline.studies.pool import Ended

    # All that can be refused is refused before anything is written.
    check_installed()
    request = Request(
        settings=settings_of(options),
        methods=tuple(options.methods or METHODS),
        lrs=None if options.lrs is None else tuple(options.lrs),
        seeds=options.seeds,
        seconds=options.time,
        jobs=options.jobs,
    )
    checked = check(request)
    with engine.held(options.out):
        plan = make_plan(checked, options.out, say)
        refuse_others(plan.runs, options.out)
        for line in announcement(plan, options.out):
            say(line)
        failed = {}
        workers = engine.local([one.run for one in plan.runs], plan.jobs)
        messages = engine.do(plan.runs, options.out, workers)
        for message in shown(messages, plan.runs, options.out, tuple(plan.runs[0].tags)):
            match message:
                case (one, Ended(how="failed" | "refused", text=why)):
                    failed[one.name] = why
        found = comparison.read([options.out])
        comparison.show(found, options.out)
    failed |= found.damaged
    for name, why in failed.items():
        warn(f"{name}: {why}")
    return 1 if failed else 0


def announcement(plan: "Plan", folder: Path) -> Iterator[str]:
    """Yield what was chosen, and what it will take."""
    from paceline.studies.engine import is_done

    one, count = plan.runs[0].run, len(plan.runs)
    left = sum(not is_done(folder, named.name) for named in plan.runs)
    assert one.steps is not None
    tokens = one.steps * one.batch_size * one.length
    lrs = ", ".join(f"{lr:g}" for lr in sorted({named.run.lr for named in plan.runs}))
    yield (
        f"{count} runs of {one.model} ({plan.trial.parameters:,} parameters): {one.steps:,} steps of "
        f"{one.batch_size * one.length:,} tokens each, lr {lrs}"
    )
    passes = one.steps * one.batch_size / plan.trial.samples
    yield (
        f"{tokens:,} tokens a run, {passes:.2g} passes over the data; evaluated on "
        f"{(one.held_out_samples or 0) * one.length:,} held-out tokens"
    )
    parallel = f"{plan.jobs} in parallel" if plan.jobs > 1 else "one after the other"
    done = f"{count - left} are done already, the rest" if left < count else "all"
    yield f"{parallel}; {done} will take about {plan.seconds * left / count / 60:.1f} minutes"
    for name, why in plan.missing.items():
        yield f"{name} is left out: {why}"


def seconds(text: str) -> float:
    """Return a time in seconds.

    >>> seconds("90s"), seconds("1.5h"), seconds("10min")
    (90.0, 5400.0, 600.0)
    """
    units = {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]+)", text.strip().lower())
    if not found or found[2] not in units:
        raise argparse.ArgumentTypeError(f"{text[:80]!r}; write it as 90s, 10min or 8h")
    return float(found[1]) * units[found[2]]


COMMANDS = (
    Command(
        name="compare",
        help="what averaging and PACE gain on your data: runs of several methods, one page",
        examples=EXAMPLES,
        add=add,
        run=run,
    ),
)
