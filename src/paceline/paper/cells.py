"""One run of the paper, and what its figures have to know of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, final

from paceline.paper import spaces
from paceline.paper.scales import Scale, Trained
from paceline.runs.config import Run, named_averages

ADAMW = "betas=(0.9,0.999),eps=1e-8,weight_decay=0.01"
FREE = "schedule_free:betas=(0.98,0.95),weight_decay=0.05"
DECAY = 0.2
"""The share of a run over which WSD goes to 0."""

Method = Literal["AdamW", "EMA", "PACE", "Schedule-Free"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A run under its name. Cells of one name have the same run, also of several labels or models."""

    name: str
    run: Run
    """If it goes on from another cell, its `fork` is NAME@STEP of that one, which lies beside it."""
    model: str
    """Its row among the models of a scale."""
    method: Method
    lr: float
    c: float | None = None
    kappa: float | None = None
    uf: int | None = None
    schedule: str
    seed: int
    steps: int


# --- Making them ----------------------------------------------------------------------------------------


def adamw(
    scale: Scale, model: str, lr: float, schedule: str = "constant", seed: int = spaces.SEED,
    steps: int | None = None,
) -> Cell:  # fmt: skip
    """AdamW with every EMA beside it that a figure asks for."""
    averages = averages_beside(scale, model)
    return _cell(scale, model, "AdamW", f"adamw:{ADAMW}", lr, schedule, seed, steps, averages=averages)


def pace(
    scale: Scale, model: str, lr: float, c: float, kappa: float, uf: int = 1, schedule: str = "constant",
    seed: int = spaces.SEED, steps: int | None = None,
) -> Cell:  # fmt: skip
    """PACE as in Algorithm 1."""
    optimizer = f"pace:c={c:g},power={kappa:g},every={uf},{ADAMW}"
    return _cell(scale, model, "PACE", optimizer, lr, schedule, seed, steps, c=c, kappa=kappa, uf=uf)


def schedule_free(scale: Scale, model: str, lr: float) -> Cell:
    """Schedule-Free AdamW by its authors' recipe for NanoGPT, which does not clip."""
    return _cell(scale, model, "Schedule-Free", FREE, lr, "constant", spaces.SEED, None)


def _cell(
    scale: Scale, model: str, method: Method, optimizer: str, lr: float, schedule: str, seed: int,
    steps: int | None, *, averages: tuple[str, ...] = (), c: float | None = None,
    kappa: float | None = None, uf: int | None = None,
) -> Cell:  # fmt: skip
    row = scale.models[model]
    steps = steps or row.steps
    words = [row.short, method.lower(), f"lr{lr:g}", schedule, str(steps), f"s{seed}"]
    if c is not None:
        words[2:2] = [f"c{c:g}", f"k{kappa:g}", f"u{uf}"]
    run = Run(
        **{**row.settings, "steps": steps},
        optimizer=optimizer,
        averages=averages,
        lr=lr,
        schedule=f"wsd:decay={DECAY}" if schedule == "wsd" else schedule,
        warmup=50,
        clip_norm=None if method == "Schedule-Free" else 1.0,
        seed=seed,
        # What the pull does is looked at as often as the loss; nothing else pulls.
        telemetry_every=row.settings["evaluate_every"] if method == "PACE" else None,
        fork=_fork(row, words, steps) if schedule == "wsd" else None,
    )
    return Cell(
        name="_".join(words), run=run, model=model, method=method, lr=lr, c=c, kappa=kappa, uf=uf,
        schedule=schedule, seed=seed, steps=steps,
    )  # fmt: skip


def _fork(row: Trained, words: list[str], steps: int) -> str:
    """A run with WSD is the one at a constant rate until its decay begins: that part is not done again."""
    begins = steps - max(round(DECAY * steps), 1)
    return f"{'_'.join([*words[:-3], 'constant', str(row.steps), words[-1]])}@{begins}"


def averages_beside(scale: Scale, model: str) -> tuple[str, ...]:
    """Of a model, and of those that are the same one at this scale: the run is then the same, too."""
    alike = [key for key, row in scale.models.items() if row.short == scale.models[model].short]
    found = {
        (kappa, uf)
        for key in alike
        for kappa in spaces.POWERS_BESIDE[key]
        for uf in spaces.PERIODS_BESIDE.get(key, (1,))
    }
    return tuple(average(kappa, uf) for kappa, uf in sorted(found))


def average(kappa: float, uf: int) -> str:
    """An EMA as the averages of a run name it."""
    return f"power:{kappa:g}" if uf == 1 else f"power:{kappa:g},every={uf}"


# --- What is read off -----------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One set of weights of a cell: what a figure shows as a method."""

    cell: Cell
    view: str
    """The name of these weights in the run's evaluations."""
    method: Method
    model: str
    lr: float
    c: float | None
    kappa: float | None
    uf: int | None
    schedule: str
    seed: int
    steps: int


def readings(cell: Cell) -> Iterator[Reading]:
    """AdamW's live weights and each EMA beside it; the returned average of the others."""
    if cell.method != "AdamW":
        yield _reading(cell, "average", cell.method, cell.c, cell.kappa, cell.uf)
        return
    yield _reading(cell, "live", "AdamW", None, None, None)
    for kappa in spaces.POWERS_BESIDE[cell.model]:
        for uf in spaces.PERIODS_BESIDE.get(cell.model, (1,)):
            ((view, _),) = named_averages([average(kappa, uf)])
            yield _reading(cell, view, "EMA", None, kappa, uf)


def _reading(
    cell: Cell, view: str, method: Method, c: float | None, kappa: float | None, uf: int | None
) -> Reading:
    return Reading(
        cell=cell, view=view, method=method, model=cell.model, lr=cell.lr, c=c, kappa=kappa, uf=uf,
        schedule=cell.schedule, seed=cell.seed, steps=cell.steps,
    )  # fmt: skip
