"""The paper's figures on pretraining: their runs, with the sweep spaces of its tables, and what is drawn."""

from collections.abc import Iterator, Sequence
from functools import partial

from paceline.paper import panels
from paceline.paper.panels import LOOKS, Figure, Printed, Rows, along, by_method, over_c, slashed, title
from paceline.paper.runs import SCHEDULES, SEED, adamw, pace
from paceline.paper.scales import Scale
from paceline.studies.runs import Named
from paceline.studies.table import Table

Runs = Iterator[Named]
GPT = "gpt2-124m"

# --- Learning rates and strengths -----------------------------------------------------------------------

RATES = (3e-4, 1e-3, 1.5e-3, 2e-3, 2.5e-3, 3e-3, 1e-2)
# The paper leaves the points of "coarse 1e-4 to 3e-1 plus local 1e-3 to 1e-2" open. They are the bins of
# fine-tuning here, and the local points that are printed for the schedules.
STRENGTHS = (1e-4, 5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 7e-3, 1e-2, 3e-2, 1e-1, 3e-1)
POWERS, POWER = (0.2, 0.5, 0.7), 0.5
RATE, LOCAL = 2e-3, (3e-4, 1e-3, 2e-3, 3e-3, 5e-3, 7e-3, 1e-2)
LOCAL_POWERS, LOCAL_SEEDS = (0.1, 0.2, 0.3, 0.5), (0, 1, 42)


def _swept(scale: Scale, powers: Sequence[float] = POWERS) -> Runs:
    yield from adamw(scale, GPT, RATES)
    yield from pace(scale, GPT, RATES, STRENGTHS, powers)


def _draw_swept(table: Table) -> Rows:
    lots = {kappa: table.where(kappa=(kappa, None)) for kappa in POWERS}
    return (tuple(over_c(f"κ = {kappa:g}", own, STRENGTHS, "lr", RATES) for kappa, own in lots.items()),)


def _first(scale: Scale) -> Runs:
    yield from _swept(scale, (POWER,))
    yield from _scheduled(scale, ("wsd",), (POWER,), (SEED,))


def _draw_first(table: Table) -> Rows:
    constant, decayed = (table.where(kappa=(POWER, None), schedule=name) for name in ("constant", "wsd"))
    left = along(f"Constant learning rate, κ = {POWER:g}", by_method(constant))
    middle = over_c(f"Effect of c, κ = {POWER:g}", constant, STRENGTHS, "lr", RATES, own_legend=True)
    return ((left, middle, along(f"WSD, κ = {POWER:g}", by_method(decayed))),)


def _print_decayed(table: Table) -> Iterator[Printed]:
    yield "AdamW WSD", "3.531", _least(table.where(method="AdamW", schedule="wsd"))


def _least(rows: Table) -> str | None:
    """Return the least mean loss over seeds, ± its standard error."""
    best = rows.best("c", "kappa")
    mean = best.mean() if best is not None else None
    return None if mean is None else mean.text(3)


# --- Schedules ------------------------------------------------------------------------------------------


def _scheduled(
    scale: Scale, schedules: Sequence[str] = SCHEDULES, powers: Sequence[float] = LOCAL_POWERS,
    seeds: Sequence[int] = LOCAL_SEEDS,
) -> Runs:  # fmt: skip
    yield from adamw(scale, GPT, (RATE,), schedules, seeds)
    yield from pace(scale, GPT, (RATE,), LOCAL, powers, schedules=schedules, seeds=seeds)


_first_seed = partial(_scheduled, seeds=(SEED,))


def _draw_scheduled(table: Table) -> Rows:
    own = table.where(kappa=(*LOCAL_POWERS, None))
    name = f"{title(GPT)}, best κ, mean of seeds and its standard error"
    return ((over_c(name, own, LOCAL, "schedule", SCHEDULES),),)


def _print_scheduled(table: Table) -> Iterator[Printed]:
    pulled = table.where(method="PACE")
    yield "best PACE, WSD, three seeds", "3.507 ± 0.006", _least(pulled.where(schedule="wsd"))
    yield "best PACE, constant, three seeds", "3.537 ± 0.004", _least(pulled.where(schedule="constant"))
    yield from _print_decayed(table)


def _draw_powers(table: Table) -> Rows:
    lots = {schedule: table.where(schedule=schedule) for schedule in SCHEDULES}
    return (tuple(over_c(f"{s}, seed {SEED}", own, LOCAL, "kappa", LOCAL_POWERS) for s, own in lots.items()),)


# --- Token budgets --------------------------------------------------------------------------------------

RIVER_STRENGTH, RIVER_DECAYED_STRENGTH = 2e-3, 3e-3


def _river(scale: Scale) -> Runs:
    budgets = scale.models[GPT].budgets
    yield from adamw(scale, GPT, (RATE,), ("wsd",), budgets=budgets)
    yield from pace(scale, GPT, (RATE,), (RIVER_STRENGTH,), (POWER,))
    decayed = (RIVER_DECAYED_STRENGTH,)
    yield from pace(scale, GPT, (RATE,), decayed, (POWER,), schedules=("wsd",), budgets=budgets)


def _draw_river(table: Table) -> Rows:
    pulled, own = (table.where(method="PACE", c=c) for c in (RIVER_STRENGTH, RIVER_DECAYED_STRENGTH))
    (whole,) = own.where(schedule="constant")
    lines = [panels.curve(panels.settings(whole), LOOKS["PACE"], whole.curve())]
    lines += panels.branches(own.where(schedule="wsd"), "PACE WSD")
    right = panels.plot("PACE with WSD, by budget", lines, own, own_legend=True)
    return ((panels.river(title(GPT), table, pulled), right),)


def _print_river(table: Table) -> Iterator[Printed]:
    decayed = table.where(method="AdamW", schedule="wsd")
    yield "AdamW WSD branches at 50/75/100 %", "3.721/3.597/3.530", slashed(row.loss for row in decayed)
    (pulled,) = table.where(method="PACE", c=RIVER_STRENGTH)
    ours = slashed(panels.at(pulled.curve(), row["steps"]) for row in decayed)
    yield "PACE, constant, at the same steps", "≈3.707/3.595/3.534", ours


FIGURES = (
    Figure("fig:pretrain", "PACE on pretraining", _first, _draw_first, _print_decayed),
    Figure("fig:appendix_pretrain_kappa_sweep", "EMA power and strength on pretraining", _swept, _draw_swept),
    Figure(
        "fig:appendix_pretrain_csweep", "Strength across schedules, three seeds", _scheduled, _draw_scheduled,
        _print_scheduled,
    ),
    Figure("fig:appendix_pretrain_csweep_kappa", "Strength by EMA power", _first_seed, _draw_powers),
    Figure("fig:appendix_pretrain_river", "Token budgets on pretraining", _river, _draw_river, _print_river),
)  # fmt: skip
