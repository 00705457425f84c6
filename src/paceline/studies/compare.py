"""`paceline compare`: several ways to train, next to each other on the same data, and one page on them.

`paceline report` writes that page on any runs: of a comparison, of a sweep, or copied from elsewhere.

.. code-block:: text

    FOLDER/plan.json      what is run, and how many in parallel     FOLDER/report.html    what came out
    FOLDER/runs/NAME/     each run: records.jsonl, timing.jsonl     FOLDER/*.csv, *.png   the parts of it
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.runs import flags
from paceline.runs.config import ConfigError
from paceline.runs.terminal import Command, say, warn
from paceline.studies.runs import folder_of, refuse_others

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

REPORT_EXAMPLES = """examples:
  paceline report comparison
      write the page of `paceline compare` again, e.g. while it is running
  paceline report runs/* --out report
      any runs of `paceline train` that differ in method, lr and seed only
  paceline report sweeps/first records/mine.jsonl --out report
      the runs of a sweep, and lines of runs that were done elsewhere"""

METHODS = ("adamw", "adamw/short_ema", "adamw/ema", "pace+push", "pace", "adamw@wsd", "schedule_free")

# Settings of a run that a comparison chooses for each run, whose runs are each of one process.
CHOSEN = frozenset(
    {"method", "schedule", "horizon", "averages", "lr", "telemetry_every", "keep", "keep_steps", "fork"}
    | {"parallel", "shards"}
)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `paceline compare`."""

    def flag(name: str, text: str, **more: object) -> None:
        parser.add_argument(f"--{name}", help=text, **more)  # type: ignore[arg-type]

    here = Path("comparison")
    flag("out", "where everything goes [comparison]", type=Path, default=here, metavar="FOLDER")
    flag("methods", f"[{' '.join(METHODS)}]", nargs="+", metavar="METHOD")
    flag("lr", "learning rates; each method is run at each of them", nargs="+", metavar="X")
    flag("seeds", "seeds per setting [1]", default="1", metavar="N")
    flag("time", "for everything, e.g. 90s, 10min, 8h: as many steps as fit, not --steps", metavar="10min")
    flag("jobs", "runs in parallel; without it, as many as fit", metavar="N")
    flag("keep-models", "keep the last checkpoint of every run", action="store_true")
    flags.add_settings(parser, CHOSEN)


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
        settings=flags.settings_given(options, CHOSEN),
        methods=tuple(options.methods or METHODS),
        lrs=None if options.lr is None else tuple(_rate(x) for word in options.lr for x in word.split(",")),
        seeds=_whole("seeds", options.seeds),
        seconds=None if options.time is None else seconds(options.time),
        jobs=None if options.jobs is None else _whole("jobs", options.jobs),
    )
    checked = check(request)
    with engine.held(options.out):
        plan = make_plan(checked, options.out, say)
        refuse_others(plan.runs, options.out)
        for line in announcement(plan, options.out):
            say(line)
        kept = options.out / "models-kept"  # once asked for, models are kept: their runs may be done already
        if options.keep_models:
            kept.touch()
        failed = {}
        workers = engine.local([one.run for one in plan.runs], plan.jobs, plan.threads)
        messages = engine.do(plan.runs, options.out, workers, keep_models=kept.exists())
        with shown(plan.runs, options.out, plan.seconds) as screen:
            for message in messages:
                screen.take(message)
                match message:
                    case (one, Ended(how="failed" | "refused", text=why)):
                        failed[one.name] = why
        comparison.show([options.out], options.out)
    for name, why in failed.items():
        warn(f"{name}: {why}")
    return 1 if failed else 0


def announcement(plan: "Plan", folder: Path) -> Iterator[str]:
    """Yield what was chosen, and what it will take."""
    from paceline.runs.run import is_finished

    one, count = plan.runs[0].run, len(plan.runs)
    left = sum(not is_finished(folder_of(folder, named.name)) for named in plan.runs)
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


def _rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"lr {text[:80]!r} is no number; write --lr 1e-3 3e-3") from None


def _whole(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"{name} is {text[:80]!r}; allowed: a whole number")
    return int(text)


def seconds(text: str) -> float:
    """Return a time in seconds.

    >>> seconds("90s"), seconds("1.5h"), seconds("10min")
    (90.0, 5400.0, 600.0)
    """
    units = {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]+)", text.strip().lower())
    if not found or found[2] not in units:
        raise ConfigError(f"time is {text[:80]!r}; write it as 90s, 10min or 8h")
    return float(found[1]) * units[found[2]]


# --- The report -----------------------------------------------------------------------------------------


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `paceline report`."""
    text = "folders of runs, of a comparison or a sweep, or files of lines"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help=text)
    text = "where to write it; without it, to a comparison's own folder"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=text)


def run_report(options: argparse.Namespace) -> int:
    """Write the page, and show its tables and its verdict."""
    from paceline.studies import comparison
    from paceline.studies.plots import check_installed

    if options.out is None and not (len(options.runs) == 1 and (options.runs[0] / "plan.json").exists()):
        raise ConfigError("--out FOLDER is needed: where to write the report")
    check_installed()
    comparison.show(options.runs, options.out or options.runs[0])
    return 0


COMMANDS = (
    Command(
        name="compare",
        help="what averaging and PACE gain on your data: runs of several methods, one page",
        examples=EXAMPLES,
        add=add,
        run=run,
    ),
    Command(
        name="report",
        help="the page on runs that are there",
        examples=REPORT_EXAMPLES,
        add=add_report,
        run=run_report,
    ),
)
