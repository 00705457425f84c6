"""The paper's labels: 20 figures and two tables; what they cost, and their runs. No torch."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from paceline.paper.figures import FIGURES
from paceline.paper.panels import table_of
from paceline.paper.scales import SCALES, Scale
from paceline.runs.config import ConfigError
from paceline.runs.terminal import nearest
from paceline.studies.lines import Finished
from paceline.studies.runs import Named, in_order, text
from paceline.studies.text import Listing

SPEED = 4e14  # operations a second: an H100 at 40 % of its peak in bfloat16
TAGS = ("model", "method", "schedule", "steps", "lr", "c", "kappa", "uf", "seed")
"""What tells runs apart."""


def chosen(words: Iterable[str]) -> list[str]:
    """Return labels, each once; all of them for "all".

    Raises:
        ConfigError: a word is no label; the nearest is named.
    """
    found, known = dict[str, None](), [*FIGURES, *TABLES]
    for word in words:
        if word != "all" and word not in known:
            hint = nearest(word, known) or "; paceline sweep --list names all"
            raise ConfigError(f"the paper has no label {word[:80]!r}{hint}")
        found |= dict.fromkeys(known if word == "all" else [word])
    return list(found)


def runs_of(labels: Iterable[str], scale: Scale) -> list[Named]:
    """Return the runs of labels, each once and before those that continue it.

    They keep the checkpoints that runs of any figure continue, so that a run is the same for all figures.

    >>> runs_of(["fig:appendix_pretrain_river"], SCALES["paper"])[3].run.after
    ('gpt2_adamw_lr0.002_constant_4750_s42', 3800)
    """
    own = {label: figure.runs(scale) for label, figure in FIGURES.items()}
    names = {one.name for label in labels for one in own.get(label, ())}
    return [one for one in in_order(one for runs in own.values() for one in runs) if one.name in names]


def scale_of(found: Mapping[str, Finished]) -> Scale:
    """Return the scale of most of these records; without any, the paper's."""
    if not found:
        return SCALES["paper"]
    count = {name: sum(one.name in found for one in runs_of(FIGURES, SCALES[name])) for name in SCALES}
    return SCALES[max(count, key=lambda name: count[name])]


def refuse_missing(runs: Iterable[Named]) -> None:
    """Raise ConfigError for data and models that are nowhere."""
    for run in (one.run for one in runs):
        kind = "chat" if run.task == "sft" else "text"
        for item in (*run.data, *run.held_out):
            if item != "python" and not Path(item).exists():
                said = f"there is no file or folder {item!r}; say where yours is"
                raise ConfigError(f"{said}, as in --place {kind}=FILE")
        if run.task == "sft" and "/" not in run.model and not Path(run.model).exists():
            said = f"there is no model {run.model!r}, and none is brought; say where yours is"
            raise ConfigError(f"{said}: --place tiny-chat-model=FOLDER")


# --- What they are and what they cost -------------------------------------------------------------------


def costs(scale: Scale, found: Mapping[str, Finished]) -> Listing:
    """Return all labels with their runs, how many of them are done, and what they cost."""
    rows, everything = [], dict[str, tuple[bool, float]]()
    for label, figure in FIGURES.items():
        runs = figure.runs(scale)
        ended = {row.name for row in table_of(runs, scale, found)[0] if row.is_ended}
        own = {one.name: (one.name in ended, _hours(one, scale)) for one in runs}
        rows.append((label, *_counted(own), figure.title))
        everything |= own
    rows += [(label, "0", "0", "0.0", table(scale).title) for label, table in TABLES.items()]
    rows.append(("all", *_counted(everything), "each run once"))
    return Listing(
        title=f"The paper's labels at scale {scale.name}",
        caption=f"Hours are those of training alone, on a GPU that does {SPEED:g} operations a second.",
        columns=("label", "runs", "done", "hours", ""),
        rows=tuple(rows),
        numeric=(False, True, True, True, False),
    )


def _counted(runs: Mapping[str, tuple[bool, float]]) -> tuple[str, str, str]:
    done, hours = zip(*runs.values(), strict=True)
    return str(len(runs)), str(sum(done)), f"{sum(hours):,.1f}"


def _hours(one: Named, scale: Scale) -> float:
    """Return an estimate of the time of a run: six operations a parameter and token."""
    steps: int = one.tags["steps"] - (one.run.after[1] if one.run.after else 0)
    tokens = steps * one.run.batch_size * one.run.length
    return scale.models[one.tags["model"]].parameters * 6 * tokens / SPEED / 3600


def _models(scale: Scale) -> Listing:
    names = ("model", "data", "length", "batch_size", "steps")
    return Listing(
        title="Models and budgets",
        caption=f"At scale {scale.name}.",
        columns=("in the paper", *names),
        rows=tuple((key, *(text(row.settings[name]) for name in names)) for key, row in scale.models.items()),
        numeric=(False, False, False, True, True, True),
    )


def _sweeps(scale: Scale) -> Listing:
    names = ("model", "method", "lr", "c", "kappa", "uf", "schedules", "seeds")
    return Listing(
        title="What each figure sweeps",
        caption="At every scale.",
        columns=("label", *names),
        rows=tuple(
            (label, *(_values(getattr(sweep, name)) for name in names))
            for label, figure in FIGURES.items()
            for sweep in figure.sweeps
        ),
        numeric=(False,) * (1 + len(names)),
    )


def _values(given: str | Sequence[object]) -> str:
    return given if isinstance(given, str) else " ".join(text(value) for value in given if value is not None)


TABLES = {"tab:models": _models, "tab:hp_per_experiment": _sweeps}
