"""The paper's figures on fine-tuning: their runs, with the sweep spaces of its tables, and what is drawn."""

from collections.abc import Iterator, Sequence
from functools import partial

from paceline.paper import panels
from paceline.paper.panels import DECAYED, Figure, Printed, Rows, along, by_method, number, over_c, title
from paceline.paper.runs import SCHEDULES, adamw, pace, schedule_free
from paceline.paper.scales import Scale
from paceline.studies.lines import Finished
from paceline.studies.looks import ordered_look
from paceline.studies.plots import Plot
from paceline.studies.runs import Named
from paceline.studies.table import Table

Runs = Iterator[Named]

# --- 1B to 2B -------------------------------------------------------------------------------------------

LARGE = {"smollm2-1.7b": (3e-4, 7e-4, 1e-3), "qwen3-1.7b": (3e-4, 5e-4), "gemma3-1b": (1e-3, 5e-3)}
LARGE_RATES = tuple(sorted({lr for rates in LARGE.values() for lr in rates}))
STRENGTHS = (1e-4, 5e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
POWERS = (0.2, 0.5, 0.7)


def _large(scale: Scale, schedules: Sequence[str] = SCHEDULES) -> Runs:
    for model, rates in LARGE.items():
        yield from adamw(scale, model, rates, schedules)
        yield from pace(scale, model, rates, STRENGTHS, POWERS)


_large_constant = partial(_large, schedules=("constant",))


def _draw_large(table: Table) -> Rows:
    lots = {title(model): by_method(table.where(model=model), baselines=DECAYED) for model in LARGE}
    return (tuple(along(name, own) for name, own in lots.items()),)


def _draw_large_twice(table: Table) -> Rows:
    lots = {title(model): by_method(table.where(model=model), baselines=DECAYED) for model in LARGE}
    above = tuple(along(name, own, zoom=False) for name, own in lots.items())
    return above, tuple(along(f"{name}, last quarter", own, last=True) for name, own in lots.items())


def _draw_strengths(table: Table) -> Rows:
    def panel(model: str, kappa: float) -> Plot:
        own = table.where(model=model, kappa=(kappa, None))
        return over_c(f"{title(model)}, κ = {kappa:g}", own, STRENGTHS, "lr", LARGE_RATES)

    return panels.grid(panel, LARGE, POWERS)


HEADLINE = {"smollm2-1.7b": 1e-3, "qwen3-1.7b": 5e-4, "gemma3-1b": 1e-3}


def _headline(scale: Scale) -> Runs:
    for model, lr in HEADLINE.items():
        yield from adamw(scale, model, (lr,), SCHEDULES)
        yield from pace(scale, model, (lr,), STRENGTHS, POWERS)


def _draw_headline(table: Table) -> Rows:
    def panel(model: str, schedule: str) -> Plot:
        own = by_method(table.where(model=model), baselines=(schedule,))
        return along(f"{title(model)}, baselines {schedule}", own)

    return panels.grid(panel, LARGE, SCHEDULES)


# The paper leaves c and κ of the runs with three seeds open. Here c is the one printed for SmolLM2-135M, and
# κ that of this table next to the one printed there.
SEEDS = (42, 1337, 2024)


def _seeds(scale: Scale) -> Runs:
    for model, lr in HEADLINE.items():
        yield from adamw(scale, model, (lr,), ("constant", "wsd"), SEEDS)
        yield from pace(scale, model, (lr,), (0.1,), (0.2,), (1,), ("constant", "wsd"), SEEDS)


def _draw_seeds(table: Table) -> Rows:
    def panel(schedule: str, model: str) -> Plot:
        own = by_method(table.where(model=model, schedule=schedule))
        return panels.mean_along(f"{title(model)}, {schedule}", own)

    return panels.grid(panel, ("constant", "wsd"), LARGE)


# --- Tulu-3 ---------------------------------------------------------------------------------------------

TULU, TULU_RATES, TULU_STRENGTHS = "qwen3-1.7b-tulu", (3e-4, 5e-4), (5e-2, 1e-1, 1.5e-1, 2.5e-1)


def _tulu(scale: Scale) -> Runs:
    yield from adamw(scale, TULU, TULU_RATES)
    yield from pace(scale, TULU, TULU_RATES, TULU_STRENGTHS, POWERS)


def _draw_tulu(table: Table) -> Rows:
    above, below, lr = [], [], TULU_RATES[0]
    for kappa in POWERS:
        own = table.where(kappa=(kappa, None))
        above.append(over_c(f"κ = {kappa:g}", own, TULU_STRENGTHS, "lr", TULU_RATES, own_legend=True))
        below.append(along(f"κ = {kappa:g}, η = {number(lr)}", by_method(own.where(lr=lr))))
    return tuple(above), tuple(below)


# --- Clipped gains --------------------------------------------------------------------------------------

CLIPPED_RATES, CLIPPED_STRENGTHS = (3e-4, 1e-3), (5e-3, 1.5e-2, 5e-2, 1.5e-1, 5e-1)


def _clipped(scale: Scale, rates: Sequence[float] = CLIPPED_RATES) -> Runs:
    return pace(scale, "smollm2-1.7b", rates, CLIPPED_STRENGTHS, POWERS)


_first_clipped = partial(_clipped, rates=CLIPPED_RATES[:1])


def _saturated(row: Finished) -> list[tuple[int, float | None]]:
    return [(step, said.get("saturated")) for step, said in row.pull]


def _draw_clipped(table: Table) -> Rows:
    def panel(lr: float, kappa: float) -> Plot:
        own = table.where(lr=lr, kappa=kappa)
        lines = [
            panels.curve(f"c = {number(row['c'])}", ordered_look(i, len(own)), _saturated(row))
            for i, row in enumerate(own)
        ]
        name = f"κ = {kappa:g}, η = {number(lr)}"
        return panels.plot(name, lines, own, y_label="share of gains at 1", share=True)

    return panels.grid(panel, table.values("lr"), POWERS)


def _draw_clipped_at_end(table: Table) -> Rows:
    def panel(lr: float) -> Plot:
        own, lines = table.where(lr=lr), []
        for i, kappa in enumerate(POWERS):
            curves = [_saturated(row) for row in own.where(kappa=kappa)]
            points = [(place, points[-1][1]) for place, points in enumerate(curves) if points]
            lines.append(panels.curve(f"κ = {kappa:g}", ordered_look(i, len(POWERS)), points))
        labels = {"x_label": "pullback strength c", "y_label": "share of gains at 1, at the end"}
        ticks = tuple(map(number, CLIPPED_STRENGTHS))
        return panels.plot(f"η = {number(lr)}", lines, own, **labels, ticks=ticks, share=True)

    return (tuple(map(panel, CLIPPED_RATES)),)


# --- 135M -----------------------------------------------------------------------------------------------

SMALL, SMALL_RATES = "smollm2-135m", (1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3)
SMALL_STRENGTHS = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)  # and 0, which is the EMA
SMALL_POWERS, SMALL_PERIODS = (0.3, 0.5, 0.7), (1, 5, 10)


def _grid(scale: Scale, powers: Sequence[float] = SMALL_POWERS) -> Runs:
    yield from adamw(scale, SMALL, SMALL_RATES)
    yield from pace(scale, SMALL, SMALL_RATES, SMALL_STRENGTHS, powers, SMALL_PERIODS)


_first_grid = partial(_grid, powers=SMALL_POWERS[:1])


def _draw_grid(table: Table) -> Rows:
    def panel(kappa: float, uf: int) -> Plot:
        own = table.where(kappa=(kappa, None), uf=(uf, None))
        return over_c(f"κ = {kappa:g}, uf = {uf}", own, SMALL_STRENGTHS, "lr", SMALL_RATES)

    return panels.grid(panel, table.where(method="PACE").values("kappa"), SMALL_PERIODS)


def _decayed(scale: Scale) -> Runs:
    yield from adamw(scale, SMALL, SMALL_RATES, SCHEDULES)
    yield from pace(scale, SMALL, SMALL_RATES, SMALL_STRENGTHS, SMALL_POWERS)


def _draw_decayed(table: Table) -> Rows:
    row = [
        along(f"η = {number(lr)}", by_method(table.where(lr=lr, uf=(1, None)), baselines=DECAYED))
        for lr in SMALL_RATES
    ]
    return tuple(row[:3]), tuple(row[3:])


def _draw_rates(table: Table) -> Rows:
    lines = []
    for method, rows in by_method(table.where(uf=(1, None)), baselines=DECAYED).items():
        ends = [panels.end(rows.where(lr=lr), "name", "returned")[0] for lr in SMALL_RATES]
        label = f"{method}, {'constant' if method == 'PACE' else 'best decay'}"
        lines.append(panels.curve(label, panels.LOOKS[method], enumerate(ends)))
    ticks = tuple(map(number, SMALL_RATES))
    return ((panels.plot(title(SMALL), lines, table, x_label="learning rate η", ticks=ticks),),)


# --- Next to Schedule-Free ------------------------------------------------------------------------------

# The paper leaves c and κ of PACE open here. They are those of the dense sweep, with uf = 1.
RIVALS, RIVAL_RATES = ("smollm2-135m-long", "qwen3-1.7b"), (1e-3, 5e-3)
FREE_RATES = {"smollm2-135m-long": (1e-3, 3e-3, 5e-3, 1e-2), "qwen3-1.7b": (3e-4, 1e-3)}
BRANCHED_RATES, BRANCHED_STRENGTH, BRANCHED_POWER = (3e-3, 5e-3), 1e-1, 0.3


def _rivals(scale: Scale) -> Runs:
    for model, rates, strengths, powers in (
        (RIVALS[0], RIVAL_RATES, SMALL_STRENGTHS, SMALL_POWERS),
        (RIVALS[1], LARGE[RIVALS[1]], STRENGTHS, POWERS),
    ):
        yield from adamw(scale, model, rates)
        yield from pace(scale, model, rates, strengths, powers)
        yield from schedule_free(scale, model, FREE_RATES[model])


def _draw_training(table: Table) -> Rows:
    # The EMA has the training loss of AdamW, whose average it is.
    methods = ("AdamW", "Schedule-Free", "PACE")
    lots = {title(model): by_method(table.where(model=model), methods) for model in RIVALS}
    return (tuple(along(name, own, train=True) for name, own in lots.items()),)


def _rivals_and_branches(scale: Scale) -> Runs:
    yield from _rivals(scale)
    yield from adamw(scale, SMALL, BRANCHED_RATES, ("wsd",), budgets=scale.models[SMALL].budgets)
    yield from pace(scale, SMALL, BRANCHED_RATES, (BRANCHED_STRENGTH,), (BRANCHED_POWER,))


def _draw_rivals(table: Table) -> Rows:
    methods, below = ("AdamW", "EMA", "Schedule-Free", "PACE"), []
    for lr in BRANCHED_RATES:
        own = table.where(model=SMALL, lr=lr)
        below.append(
            panels.river(f"{title(SMALL)}, budgets, η = {number(lr)}", own, own.where(method="PACE"))
        )
    above = (along(title(model), by_method(table.where(model=model), methods)) for model in RIVALS)
    return tuple(above), tuple(below)


def _print_rivals(table: Table) -> Iterator[Printed]:
    lr = BRANCHED_RATES[0]  # which of the two rates the printed losses are of is open
    own = table.where(model=SMALL, lr=lr)
    ends = panels.slashed(row.loss for row in own.where(method="AdamW", schedule="wsd"))
    pulled = panels.slashed(row.loss for row in own.where(method="PACE"))
    what = f"{title(SMALL)}, η = {number(lr)}: WSD branches at 50/75/100 %; PACE at the end"
    yield what, "1.277/1.233/1.205; 1.153", f"{ends or '?'}; {pulled or '?'}" if ends or pulled else None
    hours = []
    for method in ("Schedule-Free", "PACE"):
        ended = (row for row in table.where(model=RIVALS[1], method=method) if row.is_ended)
        seconds = [row.seconds for row in ended if row.seconds is not None]
        hours += [f"{min(seconds) / 3600:.3g} h"] if seconds else []
    what = f"{title(RIVALS[1])}, wall clock of Schedule-Free and PACE (one TPU v6e in the paper)"
    yield what, "12 h and 10 h", " and ".join(hours) if len(hours) == 2 else None


FIGURES = (
    Figure("fig:train_curves", "PACE on fine-tuning", _large, _draw_large),
    Figure("fig:135m_grid", "Effect of update frequency and pullback strength", _first_grid, _draw_grid),
    Figure("fig:clip_frac_body", "Fraction of clipped updates", _first_clipped, _draw_clipped),
    Figure(
        "fig:bema_sf", "PACE, Schedule-Free, AdamW and EMA", _rivals_and_branches, _draw_rivals, _print_rivals
    ),
    Figure("fig:c_kappa", "Effect of EMA power and pullback strength", _large_constant, _draw_strengths),
    Figure("fig:appendix_train_curves", "Training loss of three methods", _rivals, _draw_training),
    Figure("fig:appendix_135m_full_grid", "Effect of frequency, power and strength", _grid, _draw_grid),
    Figure("fig:appendix_tulu_qwen", "EMA power and pullback strength on tulu-3", _tulu, _draw_tulu),
    Figure(
        "fig:appendix_full_train_curves", "The last quarter of fig:train_curves", _large, _draw_large_twice
    ),
    Figure("fig:appendix_clip_frac", "Clipped updates over training", _clipped, _draw_clipped),
    Figure("fig:appendix_clip_frac_vs_c", "Clipped updates at the end", _clipped, _draw_clipped_at_end),
    Figure("fig:appendix_wsd_val_curves", "PACE against the best decay", _decayed, _draw_decayed),
    Figure("fig:appendix_wsd_finetune", "Fine-tuning across learning rates", _decayed, _draw_rates),
    Figure("fig:appendix_fig1_all_schedules", "PACE against every schedule", _headline, _draw_headline),
    Figure("fig:appendix_multiseed_robust", "Fine-tuning with three seeds", _seeds, _draw_seeds),
)
