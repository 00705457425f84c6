"""`paceline sweep` and `paceline report`: runs of one's own, and those of the paper's labels. No torch."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.runs import config, flags
from paceline.runs.config import NO_OTHER_RUN, ConfigError, as_mapping
from paceline.runs.terminal import Command, say
from paceline.studies import sweep
from paceline.studies.runs import ROUNDING, Named

# Settings that users may choose of the paper's runs: what a machine needs, how often to evaluate and to save.
# The last three round differently, and are no other experiment.
_FREE = (NO_OTHER_RUN - {"keep_steps"}) | ROUNDING

_SWEEP = f"""{sweep.GRIDS}

the paper's figures and tables:
  paceline sweep --list --scale gpu
      every label: how many runs it needs, and what they cost; with --out FOLDER, how many are done there
  paceline sweep fig:135m_grid --scale gpu --out runs/gpu --place chat=smoltalk.jsonl.zst
      do the runs of a figure on data that you have downloaded; paceline report then draws it
  paceline sweep fig:bema_sf fig:pretrain --scale gpu --out runs/gpu --place chat=smoltalk.jsonl.zst \\
      text=wiki/ text_held_out=wiki-test.txt SmolLM2-135M=models/smollm2
      two figures, with a model of this machine, too, instead of the hub's

Scales have the same sweeps; they differ in model, data and budget:
  paper   as in the paper: hub models of 135M to 1.7B parameters, GPT-2 on 2.5B tokens
  gpu     SmolLM2-135M and a 7M GPT, a few minutes a run on one GPU
  cpu     a 0.3M GPT and a tiny chat model for 20 steps: to see that everything works

Labels share runs: a run has one name, and is done and counted once. A run with WSD continues the run at a
constant rate where its decay begins."""

_REPORT = """examples:
  paceline report comparison
      write the page of `paceline compare` again, e.g. while it is running
  paceline report runs/* --out report
      any runs of `paceline train` that differ in method, lr and seed only
  paceline report sweeps/first records/mine.jsonl --out report
      the runs of a sweep, and lines of runs that were done elsewhere
  paceline report fig:pretrain runs/gpu/results.jsonl --out figures
      a figure of the paper as PDF and PNG, from runs of any scale; each panel says how many are missing"""


# --- sweep ----------------------------------------------------------------------------------------------


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("labels", nargs="*", metavar="LABEL", help="of the paper, or all, instead of a grid")
    parser.add_argument("--list", action="store_true", help="list the paper's labels and what they cost")
    parser.add_argument("--scale", choices=("paper", "gpu", "cpu"), help="models and budgets of labels")
    text = "data and models of labels on this machine: text, chat, tulu, text_held_out …, or a model's name"
    parser.add_argument("--place", nargs="+", action="extend", default=[], metavar="NAME=PATH", help=text)
    sweep.add(parser)


def _sweep(options: argparse.Namespace) -> int:
    if options.list:
        return _list(options)
    if options.labels:
        return _do(options)
    if options.scale or options.place:
        raise ConfigError(
            "--scale and --place go with a label, as in paceline sweep fig:pretrain --scale gpu"
        )
    return sweep.run(options)


def _list(options: argparse.Namespace) -> int:
    """Show every label of the paper."""
    from paceline.paper import labels
    from paceline.paper.scales import SCALES
    from paceline.studies.lines import Finished

    found = Finished.read([options.out]) if options.out else {}
    scale = SCALES[options.scale] if options.scale else labels.scale_of(found)
    for line in labels.costs(scale, found).titled():
        say(line)
    return 0


def _do(options: argparse.Namespace) -> int:
    """Do the runs of labels; return 1 if one could not be done."""
    from paceline.paper import labels
    from paceline.paper.figures import FIGURES
    from paceline.paper.scales import SCALES, located

    wanted, settings = labels.chosen(options.labels), flags.settings_given(options)
    if options.scale is None:
        raise ConfigError("--scale is missing, as in paceline sweep fig:pretrain --scale gpu --out runs/gpu")
    own = [name for name in ("config", "seeds", "grid") if getattr(options, name)]
    if own := own + sorted(settings.keys() - _FREE):
        raise ConfigError(f"{own[0]} is what a label chooses itself; allowed: {', '.join(sorted(_FREE))}")
    scale = located(SCALES[options.scale], flags.pairs("--place", options.place))
    everything = {one.name: _set(one, settings) for one in labels.runs_of(FIGURES, scale)}
    runs = [everything.pop(one.name) for one in labels.runs_of(wanted, scale)]
    if not runs:
        raise ConfigError(f"{wanted[0]} has no runs: paceline report {wanted[0]}")
    labels.refuse_missing(runs)
    names = {one.name for one in runs}
    later = [one for one in everything.values() if one.run.after and one.run.after[0] in names]
    code = sweep.perform(runs, options, labels.TAGS, later)
    if not options.dry_run:
        drawn = f"{' '.join(options.labels)} {options.out / 'results.jsonl'}"
        say(f"figures: paceline report {drawn} --out figures")
    return code


def _set(one: Named, settings: dict[str, Any]) -> Named:
    """Return a run with settings of the user. Only a run that pulls measures the pull."""
    own = {k: v for k, v in settings.items() if k != "telemetry_every" or one.run.telemetry_every is not None}
    return replace(one, run=config.make(as_mapping(one.run) | own)) if own else one


# --- report ---------------------------------------------------------------------------------------------


def _add_report(parser: argparse.ArgumentParser) -> None:
    text = "folders of runs, of a comparison or a sweep, or files of lines; before them, labels of the paper"
    parser.add_argument("runs", nargs="+", metavar="RUNS", help=text)
    text = "where to write it [a comparison's own folder; of labels: figures]"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=text)


def _report(options: argparse.Namespace) -> int:
    """Draw labels of the paper, or write the page on runs, and show its tables and its verdict."""
    from paceline.studies import comparison
    from paceline.studies.plots import check_installed

    check_installed()
    words = [word for word in options.runs if word == "all" or word.startswith(("fig:", "tab:"))]
    paths = [Path(word) for word in options.runs if word not in words]
    if words:
        return _draw(words, paths, options.out or Path("figures"))
    found = comparison.read(paths)
    if options.out is None and not (len(paths) == 1 and (paths[0] / "plan.json").exists()):
        raise ConfigError("--out FOLDER is needed: where to write the report")
    comparison.show(found, options.out or paths[0])
    return 1 if found.damaged else 0


def _draw(words: Sequence[str], paths: Sequence[Path], folder: Path) -> int:
    """Draw figures of the paper as PDF and PNG, and show its tables."""
    from paceline.paper import labels
    from paceline.paper.figures import FIGURES
    from paceline.paper.panels import sheet
    from paceline.studies.lines import Finished
    from paceline.studies.plots import draw

    wanted, found = labels.chosen(words), Finished.read(paths)
    scale = labels.scale_of(found)
    if not paths and any(label in FIGURES for label in wanted):
        raise ConfigError(f"runs are missing, as in paceline report {wanted[0]} runs/gpu/results.jsonl")
    for label in wanted:
        if label in FIGURES:
            folder.mkdir(parents=True, exist_ok=True)
            made, odd = sheet(FIGURES[label], scale, found)
            name = label.partition(":")[2] + ("" if scale.name == "paper" else f"-{scale.name}")
            say(f"{label}: {' '.join(map(str, draw(made, folder / name)))}")
            for text in odd:
                say(f"  left out, of other settings than {label} at scale {scale.name}: {text}")
        else:
            for line in labels.TABLES[label](scale).titled():
                say(line)
    return 0


COMMANDS = (
    Command(
        "sweep", "many runs: grids, lists, seeds, or a figure of the paper; here or on a Ray cluster",
        _SWEEP, _add_sweep, _sweep,
    ),
    Command(
        "report", "the page on runs that are there, or a figure of the paper from them",
        _REPORT, _add_report, _report,
    ),
)  # fmt: skip
