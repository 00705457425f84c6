"""`paceline paper` and `paceline figures`: what is done of the paper's experiments, and their figures."""

import argparse
import math
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

from paceline.paper.labels import EXPERIMENTS, cells, experiment
from paceline.paper.results import Book
from paceline.paper.scales import SCALES, Scale
from paceline.runs import records
from paceline.runs.config import ConfigError
from paceline.studies import lines
from paceline.studies.lines import Result

Say = Callable[[str], None]

PAPER_EXAMPLES = """examples:
  paceline paper
      every figure of the paper by its label: how many runs it needs
  paceline paper --scale gpu --records runs/gpu
      the same of models that one GPU trains in minutes, and what is done of it in the folder of a sweep
  paceline paper fig:135m_grid --scale cpu --records runs/cpu
      the runs of one figure by name, each with whether it is done and which one it goes on from
  paceline paper --scale gpu --records runs/gpu --keep records.jsonl
      the finished runs of a folder as one file, a line each: all that `paceline figures` needs

Scales have the same sweeps; they differ in model, data and budget:
  paper   as in the paper: hub models of 135M to 1.7B parameters, GPT-2 on 2.5B tokens
  gpu     SmolLM2-135M and a 7M GPT, a few minutes a run on one GPU
  cpu     a 0.3M GPT and a tiny chat model for 20 steps: to see that everything works

Labels share runs; a run has one name and is counted once in the total. A run with WSD goes on from the run at
a constant rate where its decay begins, and needs its checkpoint.

`paceline sweep LABEL --scale SCALE --out FOLDER` does the runs."""

FIGURES_EXAMPLES = """examples:
  paceline figures fig:pretrain --records records.jsonl --out figures
      the figure as PDF and PNG, from a file of `paceline paper --keep`
  paceline figures all --scale gpu --records runs/gpu
      every figure at another scale, from the folder of `paceline sweep all --scale gpu --out runs/gpu`

Below a figure stand the numbers that the paper prints, with ours beside them. Runs that are missing leave a
gap, and a hollow sign where a tick has none at all; a cross at the top is a run that diverged. Of several
settings of a method, the one that ends lowest of those that are there is drawn; the legend says which."""


def add_paper(parser: argparse.ArgumentParser) -> None:
    """Flags of `paceline paper`."""
    parser.add_argument("label", nargs="?", metavar="LABEL", help="the runs of one figure, one by one")
    _add_common(parser)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write what is in --records to this file")


def add_figures(parser: argparse.ArgumentParser) -> None:
    """Flags of `paceline figures`."""
    parser.add_argument("labels", nargs="+", metavar="LABEL", help="as in `paceline paper`, or all")
    _add_common(parser)
    parser.add_argument("--out", type=Path, default=Path("figures"), metavar="FOLDER", help="[figures]")


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale", choices=tuple(SCALES), default="paper", help="[paper]")
    parser.add_argument(
        "--records",
        nargs="+",
        type=Path,
        default=[],
        metavar="PATH",
        help="folders of sweeps or of runs, or files with a line a run",
    )


# --- Figures --------------------------------------------------------------------------------------------


def draw(options: argparse.Namespace, say: Say) -> int:
    """Draw figures."""
    labels = list(EXPERIMENTS) if options.labels == ["all"] else options.labels
    wanted = [experiment(label).label for label in labels]
    if find_spec("matplotlib") is None:
        raise ConfigError('figures need matplotlib: pip install "paceline[compare]"')
    from paceline.paper.figures import figure

    results, scale = lines.read(options.records), SCALES[options.scale]
    for label in wanted:
        paths, book = figure(label, scale, results, options.out)
        done = len(book.names) - len(book.missing)
        say(f"{label}: {done} of {len(book.names)} runs; {' '.join(map(str, paths))}")
        for text in book.odd:
            say(f"  left out, of other settings than {label} at scale {scale.name}: {text}")
    return 0


# --- Status ---------------------------------------------------------------------------------------------


def status(options: argparse.Namespace, say: Say) -> int:
    """Show what is done."""
    scale, results = SCALES[options.scale], lines.read(options.records)
    if options.keep is not None:
        if not options.records:
            raise ConfigError("--keep writes what is in --records; give it too")
        count = lines.write(_lines_of(options.records), options.keep)
        say(f"{count} runs: {options.keep}")
        return 0
    if options.label is not None:
        return _one(experiment(options.label).label, scale, results, say)
    rows: list[tuple[str, ...]] = [("label", "runs", "done", "verdict")]
    everything: set[str] = set()
    missing: set[str] = set()
    for label in EXPERIMENTS:
        book = Book.of(cells(label, scale), results)
        everything |= book.names
        missing |= set(book.missing)
        counts = str(len(book.names)), str(len(book.names) - len(book.missing))
        rows.append((label, *counts, verdict(book, scale)))
    counts = str(len(everything)), str(len(everything - missing))
    rows.append((f"all, each run once: scale {scale.name}", *counts, ""))
    for line in _table(rows):
        say(line)
    return 0


def _lines_of(paths: Iterable[Path]) -> list[dict[str, object]]:
    """As `lines.read` takes them: of two of one name, the later one."""
    found: dict[str, dict[str, object]] = {}
    for path in paths:
        for line in lines.lines_in(path) if path.is_dir() else records.read(path):
            found[str(line["name"])] = line
    return list(found.values())


def _one(label: str, scale: Scale, results: Mapping[str, Result], say: Say) -> int:
    book = Book.of(cells(label, scale), results)
    named = {cell.name: cell for cell in book.cells}
    rows: list[tuple[str, ...]] = [("run", "", "goes on from")]
    for name, cell in named.items():
        state = book.results[name].outcome if name in book.results else "missing"
        rows.append((name, state, "@".join(map(str, cell.run.after)) if cell.run.after else ""))
    for line in _table(rows):
        say(line)
    say(f"{label} at scale {scale.name}: {len(named)} runs, {len(book.missing)} missing")
    return 0


def verdict(book: Book, scale: Scale) -> str:
    """How far the best of PACE ends from the best of the others, by model; empty where one is missing."""
    said: list[str] = []
    for model in dict.fromkeys(cell.model for cell in book.cells):
        pulled = book.best(book.where(model=model, method="PACE"))
        other = book.best(book.where(model=model, method=("AdamW", "EMA", "Schedule-Free")))
        if pulled is None or other is None:
            continue
        ours, theirs = book.loss(pulled), book.loss(other)
        assert ours is not None and theirs is not None and math.isfinite(ours - theirs)
        said.append(f"{ours - theirs:+.4f} {scale.models[model].title}")
    return f"PACE {', '.join(said)}" if said else ""


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            f"{word:>{width}}" if word[:1].isdigit() or word == "?" else f"{word:<{width}}"
            for word, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
