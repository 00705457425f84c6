"""`paceline paper`: its flags, and which of the three verbs in labels.py does it. No torch."""

import argparse
from pathlib import Path

from paceline.paper import DATA, MAY_BE_SET
from paceline.runs import config, flags
from paceline.runs.config import ConfigError
from paceline.runs.terminal import Command
from paceline.studies import sweep

EXAMPLES = """examples:
  paceline paper
      every figure by its label: how many runs it needs, and what they cost
  paceline paper list --records runs/gpu
      the same at the scale of these runs, and how many are done
  paceline paper run fig:135m_grid --scale gpu --out runs/gpu --dry-run
      list the runs of a figure; without --dry-run they are done
  paceline paper run fig:bema_sf fig:pretrain --scale gpu --out runs/gpu --chat smoltalk.jsonl.zst \\
      --text wiki/ --text-held-out wiki-test.txt --base-model SmolLM2-135M=models/smollm2
      two figures, with data and a model from this machine instead of the hub
  paceline paper run all --scale paper --out /shared/paper --engine ray
      everything in the paper, on a cluster
  paceline paper draw fig:pretrain --records runs/gpu/results.jsonl --out figures
      the figure as PDF and PNG, from runs of any scale

Scales have the same sweeps; they differ in model, data and budget:
  paper   as in the paper: hub models of 135M to 1.7B parameters, GPT-2 on 2.5B tokens
  gpu     SmolLM2-135M and a 7M GPT, a few minutes a run on one GPU
  cpu     a 0.3M GPT and a tiny chat model for 20 steps: to see that everything works

Labels share runs: a run has one name, and is done and counted once. A run with WSD continues the run at a
constant rate where its decay begins. Each panel of a figure says how many runs are missing, and which model
ran in place of the paper's. Below stand the numbers that the paper prints, with ours next to them."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the flags of all three verbs."""
    parser.add_argument("verb", nargs="?", choices=("list", "run", "draw"), default="list", help="[list]")
    parser.add_argument(
        "labels", nargs="*", metavar="LABEL", help="figures, or all; to run, at least one [all]"
    )
    parser.add_argument("--scale", choices=("paper", "gpu", "cpu"), help="[that of the records, or paper]")
    parser.add_argument(
        "--records",
        nargs="+",
        type=Path,
        default=[],
        metavar="PATH",
        help="folders of runs, or files of lines",
    )
    sweep.add_engine(parser, required=False)
    group = parser.add_argument_group("places", "Data and models of this machine, instead of the hub.")
    for name, text in DATA.items():
        group.add_argument(f"--{name}", nargs="+", metavar="X", help=f"{text}; as --data in train")
        group.add_argument(f"--{name}-held-out", nargs="+", metavar="X", help="what they are evaluated on")
    help = "a model that is fine-tuned, by its name in the scale, e.g. SmolLM2-135M=models/smollm2"
    group.add_argument(
        "--base-model", nargs="+", action="extend", default=[], metavar="NAME=FOLDER", help=help
    )
    flags.add_settings(parser, config.documentation().keys() - MAY_BE_SET)


def run(options: argparse.Namespace) -> int:
    """List figures, do their runs, or draw them."""
    from paceline.paper import labels

    wanted = labels.figures(options.labels or ["all"])
    if options.verb != "run":
        show = labels.show if options.verb == "list" else labels.draw
        return show(wanted, options)
    for name, given in {"LABEL": options.labels, "--scale": options.scale, "--out": options.out}.items():
        if not given:
            example = "paceline paper run fig:pretrain --scale gpu --out runs/gpu"
            raise ConfigError(f"{name} is missing, as in {example}")
    return labels.do(wanted, options, flags.settings_given(options))


COMMANDS = (
    Command(
        name="paper", help="the paper's figures: list them, do their runs, draw them from records",
        examples=EXAMPLES, add=add, run=run,
    ),
)  # fmt: skip
