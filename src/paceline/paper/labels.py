"""Which runs each figure of the paper needs: those that it draws or chooses from, and no others."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import final

from paceline.paper import spaces as s
from paceline.paper.cells import Cell, adamw, pace, schedule_free
from paceline.paper.scales import Scale
from paceline.runs.config import ConfigError, Run, nearest

Cells = Iterator[Cell]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """One figure of the paper."""

    label: str
    title: str
    cells: Callable[[Scale], Cells]


# --- What several of them need --------------------------------------------------------------------------


def _baselines(scale: Scale, model: str, rates: tuple[float, ...], schedules: tuple[str, ...]) -> Cells:
    for lr, schedule in product(rates, schedules):
        yield adamw(scale, model, lr, schedule)


def _pulled(
    scale: Scale, model: str, rates: tuple[float, ...], strengths: tuple[float, ...],
    powers: tuple[float, ...], periods: tuple[int, ...] = (1,),
) -> Cells:  # fmt: skip
    for lr, c, kappa, uf in product(rates, strengths, powers, periods):
        yield pace(scale, model, lr, c, kappa, uf)


def _large(scale: Scale, schedules: tuple[str, ...]) -> Cells:
    for model in s.LARGE:
        rates = s.LARGE_RATES[model]
        yield from _baselines(scale, model, rates, schedules)
        yield from _pulled(scale, model, rates, s.LARGE_STRENGTHS, s.LARGE_POWERS)


def _clipped(scale: Scale, rates: tuple[float, ...]) -> Cells:
    yield from _pulled(scale, "smollm2-1.7b", rates, s.CLIPPED_STRENGTHS, s.LARGE_POWERS)


def _dense(scale: Scale, powers: tuple[float, ...], periods: tuple[int, ...], *schedules: str) -> Cells:
    yield from _baselines(scale, "smollm2-135m", s.SMALL_RATES, schedules)
    yield from _pulled(scale, "smollm2-135m", s.SMALL_RATES, s.SMALL_STRENGTHS, powers, periods)


def _rivals(scale: Scale) -> Cells:
    long = "smollm2-135m-long"
    yield from _baselines(scale, long, s.RIVAL_RATES, ("constant",))
    yield from _pulled(scale, long, s.RIVAL_RATES, s.SMALL_STRENGTHS, s.SMALL_POWERS)
    yield from (schedule_free(scale, long, lr) for lr in s.FREE_RATES)
    rates = s.LARGE_RATES["qwen3-1.7b"]
    yield from _baselines(scale, "qwen3-1.7b", rates, ("constant",))
    yield from _pulled(scale, "qwen3-1.7b", rates, s.LARGE_STRENGTHS, s.LARGE_POWERS)
    yield from (schedule_free(scale, "qwen3-1.7b", lr) for lr in s.QWEN_FREE_RATES)


# --- One by one -----------------------------------------------------------------------------------------


def _bema_sf(scale: Scale) -> Cells:
    yield from _rivals(scale)
    for lr in s.BRANCH_RATES:
        yield adamw(scale, "smollm2-135m", lr)
        for steps in scale.models["smollm2-135m"].budgets:
            yield adamw(scale, "smollm2-135m", lr, "wsd", steps=steps)
        yield pace(scale, "smollm2-135m", lr, s.BRANCH_STRENGTH, s.BRANCH_POWER)


def _tulu(scale: Scale) -> Cells:
    yield from _baselines(scale, "qwen3-1.7b-tulu", s.TULU_RATES, ("constant",))
    yield from _pulled(scale, "qwen3-1.7b-tulu", s.TULU_RATES, s.TULU_STRENGTHS, s.LARGE_POWERS)


def _all_schedules(scale: Scale) -> Cells:
    for model, lr in s.HEADLINE.items():
        yield from _baselines(scale, model, (lr,), s.SCHEDULES)
        yield from _pulled(scale, model, (lr,), s.LARGE_STRENGTHS, s.LARGE_POWERS)


def _seeds(scale: Scale) -> Cells:
    for (model, lr), seed, schedule in product(s.HEADLINE.items(), s.HEADLINE_SEEDS, ("constant", "wsd")):
        yield adamw(scale, model, lr, schedule, seed)
        yield pace(scale, model, lr, s.HEADLINE_STRENGTH, s.HEADLINE_POWER, 1, schedule, seed)


def _gpt(scale: Scale, powers: tuple[float, ...]) -> Cells:
    yield from _baselines(scale, "gpt2-124m", s.GPT_RATES, ("constant",))
    yield from _pulled(scale, "gpt2-124m", s.GPT_RATES, s.GPT_STRENGTHS, powers)


def _scheduled(
    scale: Scale, schedules: tuple[str, ...], powers: tuple[float, ...], seeds: tuple[int, ...]
) -> Cells:
    for schedule, seed in product(schedules, seeds):
        yield adamw(scale, "gpt2-124m", s.SCHEDULED_RATE, schedule, seed)
        for c, kappa in product(s.SCHEDULED_STRENGTHS, powers):
            yield pace(scale, "gpt2-124m", s.SCHEDULED_RATE, c, kappa, 1, schedule, seed)


def _pretrain(scale: Scale) -> Cells:
    yield from _gpt(scale, (s.GPT_POWER,))
    yield from _scheduled(scale, ("wsd",), (s.GPT_POWER,), (s.SEED,))


def _river(scale: Scale) -> Cells:
    lr, kappa = s.SCHEDULED_RATE, s.RIVER_POWER
    yield adamw(scale, "gpt2-124m", lr)
    for c in (s.RIVER_STRENGTH, s.RIVER_DECAYED_STRENGTH):
        yield pace(scale, "gpt2-124m", lr, c, kappa)
    for steps in scale.models["gpt2-124m"].budgets:
        yield adamw(scale, "gpt2-124m", lr, "wsd", steps=steps)
        yield pace(scale, "gpt2-124m", lr, s.RIVER_DECAYED_STRENGTH, kappa, 1, "wsd", steps=steps)


# In the order of the paper.
_EACH: tuple[tuple[str, str, Callable[[Scale], Cells]], ...] = (
    ("fig:train_curves", "PACE on fine-tuning", lambda x: _large(x, s.SCHEDULES)),
    ("fig:pretrain", "PACE on pretraining", _pretrain),
    (
        "fig:135m_grid",
        "Effect of update frequency and pullback strength",
        lambda x: _dense(x, (s.GRID_POWER,), s.SMALL_PERIODS, "constant"),
    ),
    ("fig:clip_frac_body", "Fraction of clipped updates", lambda x: _clipped(x, s.CLIPPED_RATES[:1])),
    ("fig:bema_sf", "PACE, Schedule-Free, AdamW and EMA on fine-tuning", _bema_sf),
    ("fig:c_kappa", "Effect of EMA power and pullback strength", lambda x: _large(x, ("constant",))),
    ("fig:appendix_train_curves", "Training loss of PACE, Schedule-Free, AdamW and EMA", _rivals),
    (
        "fig:appendix_135m_full_grid",
        "Effect of update frequency, EMA power and pullback strength",
        lambda x: _dense(x, s.SMALL_POWERS, s.SMALL_PERIODS, "constant"),
    ),
    (
        "fig:appendix_pretrain_kappa_sweep",
        "Effect of EMA power and pullback strength on pretraining",
        lambda x: _gpt(x, s.GPT_POWERS),
    ),
    ("fig:appendix_tulu_qwen", "Effect of EMA power and pullback strength on tulu-3", _tulu),
    (
        "fig:appendix_full_train_curves",
        "Last quarter of the curves of fig:train_curves",
        lambda x: _large(x, s.SCHEDULES),
    ),
    (
        "fig:appendix_clip_frac",
        "Fraction of clipped updates over training",
        lambda x: _clipped(x, s.CLIPPED_RATES),
    ),
    (
        "fig:appendix_clip_frac_vs_c",
        "Fraction of clipped updates at the end of training",
        lambda x: _clipped(x, s.CLIPPED_RATES),
    ),
    (
        "fig:appendix_wsd_val_curves",
        "PACE against AdamW and EMA with their best decay",
        lambda x: _dense(x, s.SMALL_POWERS, (1,), *s.SCHEDULES),
    ),
    (
        "fig:appendix_wsd_finetune",
        "Fine-tuning across learning rates",
        lambda x: _dense(x, s.SMALL_POWERS, (1,), *s.SCHEDULES),
    ),
    ("fig:appendix_fig1_all_schedules", "PACE against the baselines under every schedule", _all_schedules),
    ("fig:appendix_multiseed_robust", "Fine-tuning with three seeds", _seeds),
    (
        "fig:appendix_pretrain_csweep",
        "Pullback strength across schedules, three seeds",
        lambda x: _scheduled(x, s.SCHEDULES, s.SCHEDULED_POWERS, s.SCHEDULED_SEEDS),
    ),
    (
        "fig:appendix_pretrain_csweep_kappa",
        "Pullback strength by EMA power",
        lambda x: _scheduled(x, s.SCHEDULES, s.SCHEDULED_POWERS, (s.SEED,)),
    ),
    ("fig:appendix_pretrain_river", "Token budgets on pretraining", _river),
)
EXPERIMENTS = {label: Experiment(label=label, title=title, cells=cells) for label, title, cells in _EACH}


# --- Cells and runs -------------------------------------------------------------------------------------


def experiment(label: str) -> Experiment:
    """By its label in the paper, with or without "fig:"."""
    full = label if label.startswith("fig:") else f"fig:{label}"
    if full not in EXPERIMENTS:
        raise ConfigError(
            f"the paper has no label {label[:80]!r}{nearest(full, list(EXPERIMENTS))}; "
            f"there are {', '.join(EXPERIMENTS)}"
        )
    return EXPERIMENTS[full]


def cells(label: str, scale: Scale) -> tuple[Cell, ...]:
    """What the figure needs: each cell after the one that it goes on from, none twice.

    >>> from paceline.paper.scales import PAPER
    >>> [cell.run.after for cell in cells("appendix_pretrain_river", PAPER) if cell.run.after][0]
    ('gpt2_adamw_lr0.002_constant_4750_s42', 1900)
    """
    return _cells(scale)[experiment(label).label]


def runs(label: str, scale: Scale) -> dict[str, Run]:
    """The runs to do, by name, in an order in which they can be done: each in a folder of its name beside the
    others, where those that go on from another look for it."""
    return {cell.name: cell.run for cell in cells(label, scale)}


@cache
def _cells(scale: Scale) -> dict[str, tuple[Cell, ...]]:
    """Of all labels at once: only so it is known which checkpoints of a run others go on from."""
    found = {label: _with_parents(entry.cells(scale)) for label, entry in EXPERIMENTS.items()}
    forks: dict[str, set[int]] = {}
    for cell in (cell for cells in found.values() for cell in cells):
        if cell.run.after is not None:
            forks.setdefault(cell.run.after[0], set()).add(cell.run.after[1])

    def kept(cell: Cell) -> Cell:
        steps = tuple(sorted(forks.get(cell.name, ())))
        return replace(cell, run=replace(cell.run, keep_steps=steps)) if steps else cell

    return {label: tuple(map(kept, cells)) for label, cells in found.items()}


def _with_parents(cells: Cells) -> list[Cell]:
    """Constant rates first; what others go on from is there, also if the figure does not show it."""
    made = {(cell.model, cell.name): cell for cell in cells}
    for cell in list(made.values()):
        if cell.run.after is not None and (cell.model, cell.run.after[0]) not in made:
            whole = _constant(cell)
            made[whole.model, whole.name] = whole
    return sorted(made.values(), key=lambda cell: cell.run.after is not None)


def _constant(cell: Cell) -> Cell:
    """The cell that one with WSD goes on from."""
    assert cell.run.after is not None
    name = cell.run.after[0]
    steps = int(name.split("_")[-2])
    run = replace(cell.run, steps=steps, schedule="constant", fork=None)
    return replace(cell, name=name, run=run, schedule="constant", steps=steps)
