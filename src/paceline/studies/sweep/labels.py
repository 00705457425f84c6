"""Labels of the paper as a sweep: runs under their names, with data and models of this machine. No torch."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from paceline.paper.labels import EXPERIMENTS, experiment, runs
from paceline.paper.scales import SCALES, Scale, located
from paceline.runs import config, records
from paceline.runs.config import NO_OTHER_RUN, ConfigError, Run, as_mapping

MAY_BE_SET = (NO_OTHER_RUN - {"keep_steps"}) | {"micro_batch_size", "activation_checkpointing", "compile"}
"""Settings of a label's runs that users may choose: what a machine needs, how often to look and to save. The
last three round otherwise, and are no other experiment."""

_DATA = (
    ("text", "what pretraining reads"),
    ("chat", "conversations that fine-tuning reads"),
    ("tulu", "those of the runs on tulu-3"),
)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Labelled:
    """What labels ask for."""

    labels: tuple[str, ...]
    scale: Scale
    runs: Mapping[str, Run]
    """By name, each after the one that it goes on from."""
    later: Mapping[str, Run]
    """Of other labels, that go on from one of these."""
    settings: Mapping[str, Any]
    """Of the user."""


def add(parser: argparse.ArgumentParser) -> None:
    """Flags that go with labels."""
    parser.add_argument(
        "labels",
        nargs="*",
        metavar="LABEL",
        help="figures of the paper (`paceline paper` lists them), or all",
    )
    group = parser.add_argument_group(
        "labels", "Where things are that a label's runs need, instead of the hub."
    )
    group.add_argument("--scale", choices=tuple(SCALES), help="of models, data and budgets; a label needs it")
    for name, text in _DATA:
        group.add_argument(
            f"--{name}", nargs="+", default=[], metavar="X", help=f"{text}; as --data in train"
        )
        group.add_argument(
            f"--{name}-held-out", nargs="+", default=[], metavar="X", help="what they evaluate on"
        )
    group.add_argument(
        "--base-model",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=FOLDER",
        help="where a model lies that is fine-tuned, by its name in the scale, e.g. SmolLM2-135M=models/smol",
    )


def refuse_flags(options: argparse.Namespace) -> None:
    """Raise ConfigError for flags that go with labels, if there are none."""
    names = ["scale", "base_model", *(name + more for name, _ in _DATA for more in ("", "_held_out"))]
    for name in names:
        if getattr(options, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} goes with a label of the paper, which comes first, e.g. "
                f"paceline sweep fig:135m_grid --{name.replace('_', '-')} …"
            )


def labelled(options: argparse.Namespace, settings: Mapping[str, Any]) -> Labelled:
    """The runs of labels, as flags ask for them."""
    labels = tuple(EXPERIMENTS) if options.labels == ["all"] else _known(options.labels)
    given = [name for name in ("config", "grid", "seeds") if getattr(options, name)]
    for name in [*given, *(name for name in settings if name not in MAY_BE_SET)]:
        hint = {"data": "; where data lie is said by --text, --chat and --tulu"}
        hint |= {"held_out": "; say --text-held-out or --chat-held-out"}
        hint |= {"model": "; where a model lies is said by --base-model NAME=FOLDER"}
        raise ConfigError(
            f"--{name.replace('_', '-')} would make other runs than those of {labels[0]}, of which all is "
            f"said by the label and --scale{hint.get(name, '')}"
        )
    if options.scale is None:
        raise ConfigError(f"say at which scale {labels[0]} is to be run: --scale cpu, gpu or paper")
    scale = _located(options)
    wanted: dict[str, Run] = {}
    for label in labels:
        wanted |= runs(label, scale)
    # Constant rates first: branches that wait would be looked at again and again.
    wanted = dict(sorted(wanted.items(), key=lambda item: item[1].fork is not None))
    _check_places(wanted, options.scale)
    everything = {name: run for label in EXPERIMENTS for name, run in runs(label, scale).items()}
    later = {
        name: run
        for name, run in everything.items()
        if name not in wanted and run.after is not None and run.after[0] in wanted
    }
    return Labelled(
        labels=labels,
        scale=scale,
        runs={name: _with(run, settings) for name, run in wanted.items()},
        later={name: _with(run, settings) for name, run in later.items()},
        settings=settings,
    )


def _known(labels: Sequence[str]) -> tuple[str, ...]:
    if "all" in labels:
        raise ConfigError("all are all labels; give it alone")
    return tuple(dict.fromkeys(experiment(label).label for label in labels))


def _with(run: Run, settings: Mapping[str, Any]) -> Run:
    """A run with settings of the user; what the pull does is looked at only where something pulls."""
    chosen = {k: v for k, v in settings.items() if k != "telemetry_every" or run.telemetry_every is not None}
    return config.make(as_mapping(run) | chosen) if chosen else run


# --- Where things are -----------------------------------------------------------------------------------


def _located(options: argparse.Namespace) -> Scale:
    scale = SCALES[options.scale]
    tuned = {str(row.settings["model"]) for row in scale.models.values() if row.settings.get("task") == "sft"}
    models = {}
    for text in options.base_model:
        name, equals, folder = text.partition("=")
        found = [full for full in tuned if name.lower() in (full.lower(), full.rpartition("/")[2].lower())]
        if not equals or not folder:
            raise ConfigError(f"--base-model is {text[:80]!r}; write NAME=FOLDER")
        if not found:
            raise ConfigError(
                f"--base-model: scale {scale.name} fine-tunes no {name[:80]!r}; there are "
                f"{', '.join(sorted(tuned))}"
            )
        if not Path(folder).exists():
            raise ConfigError(f"--base-model {text[:80]}: there is no folder {folder[:80]}")
        models[found[0]] = folder
    data = {
        name + more: tuple(getattr(options, name + more)) for name, _ in _DATA for more in ("", "_held_out")
    }
    return located(scale, models=models, **data)


def _check_places(wanted: Mapping[str, Run], scale: str) -> None:
    """Raise ConfigError for data and models that are nowhere, before the first of many runs finds out."""
    for run in wanted.values():
        for item in (*run.data, *run.held_out):
            if not item.startswith("hf:") and item != "python" and not Path(item).exists():
                flag = "--chat" if run.task == "sft" else "--text"
                raise ConfigError(f"there is no file or folder {item!r}; say where the data are with {flag}")
        if run.task == "sft" and "/" not in run.model and not Path(run.model).exists():
            raise ConfigError(
                f"scale {scale} fine-tunes a small chat model, and brings none; say where yours is with "
                f"--base-model {run.model}=FOLDER"
            )


def refuse_other_runs(wanted: Mapping[str, Run], root: Path) -> None:
    """Raise ConfigError if a run is there under the name of one of these, and is another one."""
    for name, run in wanted.items():
        path = root / name / "records.jsonl"
        about = next(records.read(path), None) if path.exists() else None
        before = {} if about is None else about["config"]
        now = as_mapping(run)
        changed = [
            f"{key}: {before[key]!r}, now {now[key]!r}"
            for key in before
            if key in now and key not in MAY_BE_SET | {"keep_steps"} and before[key] != now[key]
        ]
        if changed:
            raise ConfigError(
                f"{root / name} holds a run with other settings ({'; '.join(changed)}); give those again, "
                "or another --out"
            )
