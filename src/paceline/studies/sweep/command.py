"""`paceline sweep`: flags or labels of the paper, the runs they ask for, and what is shown."""

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.paper.command import verdict
from paceline.paper.labels import cells as cells_of_label
from paceline.paper.results import Book
from paceline.runs.config import ConfigError, Run, name_of
from paceline.studies import lines
from paceline.studies.sweep import cells as described
from paceline.studies.sweep import labels
from paceline.studies.sweep.labels import Labelled

if TYPE_CHECKING:
    from paceline.studies.pool import Cell
    from paceline.studies.sweep.conduct import Engine, Swept

Say = Callable[[str], None]

EXAMPLES = """examples:
  paceline sweep --out sweeps/first --model gpt:1m --steps 300 --seeds 1 2 3 \\
      --grid lr 1e-3 2e-3 4e-3 --grid optimizer adamw pace push:strength=0.7,power=0.5
      27 runs: all combinations of three rates, three optimizers and three seeds
  paceline sweep --out sweeps/mine --config mine.toml --jobs 4 --dry-run
      what a file describes, as a list; without --dry-run it is run, four at once
  paceline sweep fig:135m_grid --scale gpu --out runs/gpu --dry-run
      the runs of a figure of the paper (`paceline paper` has the labels); without --dry-run they are run
  paceline sweep fig:bema_sf fig:pretrain --scale gpu --out runs/gpu --chat smoltalk.jsonl.zst \
      --text wiki/ --text-held-out wiki-test.txt --base-model SmolLM2-135M=models/smollm2
      two figures, with data and model from this machine instead of the hub; runs that both need are done once
  paceline sweep all --scale paper --out /shared/paper --engine ray
      everything in the paper, on a cluster; then: paceline figures all --records /shared/paper

A file has the settings of `paceline train` and, besides, what is swept:
  model = "gpt:1m"
  steps = 300
  seeds = [1, 2, 3]
  [grid]                        # all combinations of these
  lr = [1e-3, 2e-3, 4e-3]
  [[cells]]                     # settings that go together, each with all of the grid
  optimizer = "adamw"
  schedule = "wsd"
  [[cells]]
  optimizer = "pace"

Stop it whenever you like (Ctrl-C): the same command goes on, and repeats no finished cell. Several machines
that see the same folder may run the same command at once. Results: FOLDER/results.jsonl."""

AT_ONCE = 4


def add(parser: argparse.ArgumentParser) -> None:
    """Its own flags; those of a run are added by the caller."""
    labels.add(parser)
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="the folder of the sweep")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings, seeds, grid and cells in TOML")
    parser.add_argument(
        "--grid",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="a setting and its values; more of them: all combinations",
    )
    parser.add_argument("--seeds", nargs="+", metavar="N", help="run each combination with each of these")
    parser.add_argument("--dry-run", action="store_true", help="list the cells, and run nothing")
    parser.add_argument(
        "--jobs", metavar="N", help="cells at once [a GPU each; without one, a core each, at most 4]"
    )
    parser.add_argument(
        "--engine", choices=("local", "ray"), default="local", help="this machine, or a Ray cluster [local]"
    )
    parser.add_argument("--ray-address", metavar="X", help="[RAY_ADDRESS, or a cluster on this machine]")
    parser.add_argument("--cpus-per-cell", metavar="N", help="threads of a cell [all cores shared; ray: 1]")
    parser.add_argument("--gpus-per-cell", metavar="X", help="ray: e.g. 0.25, four cells a GPU [1 if any]")
    parser.add_argument(
        "--stop-diverged",
        default="1",
        metavar="NATS|off",
        help="end a cell whose training loss, smoothed, has been that far above its first for a tenth of the "
        "run [1]",
    )
    parser.add_argument(
        "--heart-seconds",
        default="60",
        metavar="X",
        help="take over a cell of another machine that has shown no life for so long [60]",
    )
    parser.add_argument("--keep-models", action="store_true", help="keep the last checkpoints of every cell")


def sweep_of(options: argparse.Namespace, settings: Mapping[str, Any]) -> described.Sweep:
    """What file and flags ask for; flags win."""
    sweep = described.read(options.config) if options.config else described.Sweep()
    seeds = sweep.seeds
    if options.seeds is not None:
        seeds = tuple(_whole("seeds", text) for text in options.seeds)
    grid = {**sweep.grid, **described.grid_of(options.grid)}
    return replace(sweep, settings={**sweep.settings, **settings}, grid=grid, seeds=seeds)


def run(options: argparse.Namespace, settings: Mapping[str, Any], say: Say, warn: Say) -> int:
    """Do it; 1 if a cell could not be done."""
    wanted = labels.labelled(options, settings) if options.labels else None
    if wanted is None:
        labels.refuse_flags(options)
        named = {name_of(run): run for run in described.runs_of(sweep_of(options, settings))}
    else:
        named = dict(wanted.runs)
        labels.refuse_other_runs(named, options.out / "cells")
    runs = list(named.values())
    margin = None if options.stop_diverged == "off" else _positive("--stop-diverged", options.stop_diverged)
    heart = _positive("--heart-seconds", options.heart_seconds)
    engine = _engine(options, runs)  # what is wrong with a flag shows before torch is imported
    from paceline.runs.methods import check_methods
    from paceline.studies import live
    from paceline.studies.sweep.conduct import Swept, cells_of, sweep

    if wanted is None:  # those of labels are known to be right, and this takes seconds
        for method in {(r.optimizer, r.schedule, r.averages, r.telemetry_every): r for r in runs}.values():
            check_methods(method)
    cells = cells_of(named, options.out, margin)
    if options.dry_run:
        return _list(cells, wanted, say)
    made = engine()  # a cluster that is not there is said before anything else
    rows = _rows(cells, wanted is not None)
    say(rows.counts())
    ended: Swept | None = None
    events = sweep(
        cells,
        options.out,
        made,
        heart_seconds=heart,
        keep_models=options.keep_models,
        later=cells_of(wanted.later, options.out, margin) if wanted else (),
    )
    with live.shown(rows) as screen:
        for event in events:
            if isinstance(event, Swept):
                ended = event
            else:
                screen.take(event)
    assert ended is not None
    if wanted is None:
        _show(ended, say)
    else:
        _show_labels(wanted, options, say)
    say(f"results: {options.out / 'results.jsonl'}")
    for text in ended.failed:
        warn(text)
    return 1 if ended.failed else 0


def _engine(options: argparse.Namespace, runs: list[Run]) -> "Callable[[], Engine]":
    jobs = None if options.jobs is None else _whole("jobs", options.jobs, least=1)
    cpus = None if options.cpus_per_cell is None else _whole("cpus-per-cell", options.cpus_per_cell, least=1)
    gpus = None if options.gpus_per_cell is None else _number("--gpus-per-cell", options.gpus_per_cell)
    if options.engine == "local":
        for flag, given in (("--ray-address", options.ray_address), ("--gpus-per-cell", gpus)):
            if given is not None:
                raise ConfigError(f"{flag} is for --engine ray; here --jobs says how many share a GPU")
        return partial(local_engine, runs, jobs, cpus)
    if gpus is not None and (gpus < 0 or (gpus > 1 and gpus != int(gpus))):
        raise ConfigError(f"--gpus-per-cell is {gpus:g}; allowed: 0 to 1, or a whole number")
    return partial(_ray, options.ray_address, jobs, cpus, gpus)


def local_engine(runs: Sequence[Run], jobs: int | None = None, threads: int | None = None) -> "Engine":
    """Processes of this machine, so many at once, with so many threads each; None: what suits it."""
    import torch

    from paceline.studies import pool

    # Cells that name a GPU get that one; the others share all, by turns.
    named = any(run.device not in ("auto", "cuda") for run in runs)
    gpus = [] if named else _gpus(torch.cuda.device_count())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = min(jobs or len(gpus) or min(cores, AT_ONCE), len(runs))
    return partial(pool.run_all, jobs=jobs, threads=threads or max(1, cores // jobs), gpus=gpus)


def _gpus(count: int) -> list[str]:
    """What to call each GPU that this process sees."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return (visible or [str(number) for number in range(count)])[:count]


def _ray(address: str | None, jobs: int | None, cpus: int | None, gpus: float | None) -> "Engine":
    from paceline.studies.sweep import cluster

    resources = cluster.Resources(cpus=cpus or 1, gpus=gpus, at_once=jobs)
    return partial(cluster.run_all, cluster.connect(address), resources=resources)


# --- What is shown ------------------------------------------------------------------------------------


def _rows(cells: "tuple[Cell, ...]", by_name: bool) -> Any:
    """What a cell is called: by the settings in which not all are alike, or by a name that says them."""
    from paceline.studies.live import Rows

    settings = described.differing([cell.run for cell in cells])
    if by_name or not settings[0]:
        return Rows(cells, ("cell",), [(cell.folder.name,) for cell in cells])
    labels = [[described.text(value) for value in of_one.values()] for of_one in settings]
    return Rows(cells, tuple(settings[0]), labels)


def _list(cells: "tuple[Cell, ...]", wanted: Labelled | None, say: Say) -> int:
    """Show every cell, with its steps and tokens."""
    from paceline.runs.run import is_finished
    from paceline.studies.live import as_text
    from paceline.studies.report.content import Table

    settings = described.differing([cell.run for cell in cells])
    if wanted is not None:
        settings = [{"goes on from": cell.run.fork or ""} for cell in cells]
    names = tuple(settings[0])
    done = [is_finished(cell.folder) for cell in cells]
    rows = tuple(
        (
            cell.folder.name,
            *(described.text(value) for value in of_one.values()),
            *_size(cell.run),
            "done" if is_done else "",
        )
        for cell, of_one, is_done in zip(cells, settings, done, strict=True)
    )
    columns = ("cell", *names, "steps", "tokens", "")
    numeric = (False, *(False for _ in names), True, True, False)
    for line in as_text(
        Table(key="cells", title="Cells", columns=columns, rows=rows, numeric=numeric)
    ).splitlines():
        say(line)
    say(f"{len(cells)} cells, {sum(done)} done")
    return 0


def _size(run: Run) -> tuple[str, str]:
    """Steps and tokens that are its own; of a budget that depends on data or model, that budget."""
    from paceline.runs.build import steps_of

    if run.epochs is not None:
        return f"{run.epochs:g} epochs", "?"
    if run.chinchilla is not None:
        return f"{run.chinchilla:g} chinchilla", "?"
    steps = steps_of(run, 0, 0) - (run.after[1] if run.after else 0)
    return f"{steps:,}", f"{steps * run.batch_size * run.length:,}"


def _show(ended: "Swept", say: Say) -> None:
    """A table, best first."""
    from paceline.studies.live import as_text
    from paceline.studies.sweep.results import table_of

    table = table_of([line.result for line in ended.lines])
    say("")
    say(f"{table.title}. {table.caption}")
    for line in as_text(table).splitlines():
        say(line)


def _show_labels(wanted: Labelled, options: argparse.Namespace, say: Say) -> None:
    """What is there of each label now, and how to see it."""
    folder = options.out
    results = lines.read([folder])
    say("")
    for label in wanted.labels:
        book = Book.of(cells_of_label(label, wanted.scale), results)
        said = f"{label}: {len(book.names) - len(book.missing)} of {len(book.names)} runs done"
        found = verdict(book, wanted.scale)
        say(f"{said}; {found}" if found else said)
    kept = [path for name in wanted.runs for path in (folder / "cells" / name / "checkpoints").glob("step-*")]
    if kept and not options.keep_models:
        size = sum(file.stat().st_size for path in kept for file in path.rglob("*") if file.is_file())
        say(f"checkpoints that stay, for runs that go on from them: {len(kept)}, {size / 1e9:,.1f} GB")
    name = wanted.labels[0] if len(wanted.labels) == 1 else "all"
    say(f"figures: paceline figures {name} --scale {wanted.scale.name} --records {folder}")


# --- Numbers ------------------------------------------------------------------------------------------


def _whole(name: str, text: str, least: int = 0) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < least:
        raise ConfigError(f"{name} is {text[:80]!r}; allowed: a whole number, {least} or more")
    return int(text)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name} is {text[:80]!r}; allowed: a number") from None


def _positive(name: str, text: str) -> float:
    number = _number(name, text)
    if not 0 < number < float("inf"):
        raise ConfigError(f"{name} is {text[:80]!r}; allowed: above 0, and finite")
    return number
