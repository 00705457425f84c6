"""The paper's figures by label: what they cost, doing their runs, and drawing them from records. No torch."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.paper import DATA
from paceline.paper.figures import FIGURES
from paceline.paper.panels import Figure, sheet, table_of
from paceline.paper.scales import SCALES, Scale, located
from paceline.runs import config
from paceline.runs.config import ConfigError, as_mapping
from paceline.runs.terminal import nearest, say
from paceline.studies import plots, sweep
from paceline.studies.lines import Finished
from paceline.studies.runs import Named, folder_of, in_order
from paceline.studies.text import Listing


def figures(labels: Iterable[str]) -> list[Figure]:
    """Return the figures with these labels, each once; all of them for "all". "fig:" may be left out."""
    found: dict[str, Figure] = {}
    for label in labels:
        full = label if label.startswith("fig:") or label == "all" else f"fig:{label}"
        if full != "all" and full not in FIGURES:
            hint = nearest(full, FIGURES) or f"; there are {', '.join(FIGURES)}"
            raise ConfigError(f"the paper has no label {label[:80]!r}{hint}")
        found |= FIGURES if full == "all" else {full: FIGURES[full]}
    return list(found.values())


def runs_of(labels: Iterable[str], scale: Scale) -> list[Named]:
    """Return the runs of figures, each once and before those that continue it.

    They keep the checkpoints that runs of any figure continue, so that a run is the same for all figures.

    >>> [one.run.after for one in runs_of(["appendix_pretrain_river"], SCALES["paper"]) if one.run.after][0]
    ('gpt2_adamw_lr0.002_constant_4750_s42', 3800)
    """
    own = {label: figure.runs(scale) for label, figure in FIGURES.items()}
    names = {one.name for figure in figures(labels) for one in own[figure.label]}
    return [one for one in in_order(one for runs in own.values() for one in runs) if one.name in names]


# --- List -----------------------------------------------------------------------------------------------

SPEED = 4e14  # operations a second: an H100 at 40 % of its peak in bfloat16


def show(wanted: Sequence[Figure], options: argparse.Namespace) -> int:
    """Show how many runs each figure needs, how many are done, and what they cost."""
    found = Finished.read(options.records)
    _show(wanted, _scale(options, found), found)
    return 0


def _scale(options: argparse.Namespace, found: Mapping[str, Finished]) -> Scale:
    """Return the scale that is asked for; without one, that of which there are most records."""
    if options.scale is not None or not found:
        return SCALES[options.scale or "paper"]
    return max(SCALES.values(), key=lambda scale: sum(one.name in found for one in runs_of(["all"], scale)))


def _show(wanted: Sequence[Figure], scale: Scale, found: Mapping[str, Finished]) -> None:
    rows, everything = [], dict[str, tuple[bool, float]]()
    for figure in wanted:
        table, _ = table_of(runs := figure.runs(scale), scale, found)
        done = {row.name: row.is_ended for row in table}
        own = {one.name: (done[one.name], _hours(one, scale)) for one in runs}
        rows.append((figure.label, own))
        everything |= own
    rows.append((f"each run once, scale {scale.name}", everything))
    lines = []
    for label, own in rows:
        ended, hours = zip(*own.values(), strict=True)
        lines.append((label, str(len(ended)), str(sum(ended)), f"{sum(hours):,.1f}"))
    for line in Listing(columns=("label", "runs", "done", "hours"), rows=tuple(lines)).lines():
        say(line)
    say(f"hours: training alone, on a GPU that does {SPEED:g} operations a second, an H100 at 40 %")


def _hours(one: Named, scale: Scale) -> float:
    """Return an estimate of the time of a run: six operations a parameter and token."""
    steps: int = one.tags["steps"] - (one.run.after[1] if one.run.after else 0)
    tokens = steps * one.run.batch_size * one.run.length
    return scale.models[one.tags["model"]].parameters * 6 * tokens / SPEED / 3600


# --- Run ------------------------------------------------------------------------------------------------


def do(wanted: Sequence[Figure], options: argparse.Namespace, settings: Mapping[str, Any]) -> int:
    """Do the runs of figures; return 1 if one could not be done."""
    models = dict(text.split("=", 1) for text in options.base_model if "=" in text)
    for text in options.base_model:
        folder = text.partition("=")[2]
        if not folder or not Path(folder).exists():
            raise ConfigError(f"--base-model is {text[:80]!r}; write NAME=FOLDER, a folder that is there")
    data = {name: getattr(options, name) for kind in DATA for name in (kind, f"{kind}_held_out")}
    scale = located(SCALES[options.scale], data=data, models=models)
    everything = {one.name: _set(one, settings) for one in runs_of(["all"], scale)}
    runs = [everything.pop(one.name) for one in runs_of([figure.label for figure in wanted], scale)]
    names = {one.name for one in runs}
    later = [one for one in everything.values() if one.run.after and one.run.after[0] in names]
    _check(runs, options)

    def show(results: sweep.Results) -> None:
        _show(wanted, scale, results.finished)
        kept = [path for one in runs for path in folder_of(options.out, one.name).glob("checkpoints/step-*")]
        if kept and not options.keep_models:
            size = sum(file.stat().st_size for path in kept for file in path.rglob("*") if file.is_file())
            say(f"checkpoints that stay, for runs of other labels: {len(kept)}, {size / 1e9:,.1f} GB")
        say(f"figures: paceline paper draw {' '.join(options.labels)} --records {results.path}")

    return sweep.perform(runs, options, later=later, show=show)


def _set(one: Named, settings: Mapping[str, Any]) -> Named:
    """Return a run with settings of the user. Only a run that pulls measures the pull."""
    own = {k: v for k, v in settings.items() if k != "telemetry_every" or one.run.telemetry_every is not None}
    return replace(one, run=config.make(as_mapping(one.run) | own)) if own else one


def _check(runs: Sequence[Named], options: argparse.Namespace) -> None:
    """Raise ConfigError for data and models that are nowhere."""
    for one in runs:
        run = one.run
        for item in (*run.data, *run.held_out):
            if item != "python" and not Path(item).exists():
                flag = "--chat" if run.task == "sft" else "--text"
                raise ConfigError(f"there is no file or folder {item!r}; say where the data are with {flag}")
        if run.task == "sft" and "/" not in run.model and not Path(run.model).exists():
            hint = f"say where yours is with --base-model {run.model}=FOLDER"
            raise ConfigError(f"scale {options.scale} fine-tunes a small chat model, and brings none; {hint}")


# --- Draw -----------------------------------------------------------------------------------------------


def draw(wanted: Sequence[Figure], options: argparse.Namespace) -> int:
    """Draw figures as PDF and PNG, from records."""
    plots.check_installed()
    found, folder = Finished.read(options.records), options.out or Path("figures")
    scale = _scale(options, found)
    folder.mkdir(parents=True, exist_ok=True)
    for figure in wanted:
        made, odd = sheet(figure, scale, found)
        name = figure.label.removeprefix("fig:") + ("" if scale.name == "paper" else f"-{scale.name}")
        say(f"{figure.label}: {' '.join(map(str, plots.draw(made, folder / name)))}")
        for text in odd:
            say(f"  left out, of other settings than {figure.label} at scale {scale.name}: {text}")
    return 0
