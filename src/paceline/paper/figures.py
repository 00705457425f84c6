"""The paper's figures: the sweeps of each, as the paper's tables list them, and what is drawn of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from paceline.paper import panels
from paceline.paper.panels import Figure, Printed, along, each, grid, number, over, over_c, river, values
from paceline.paper.runs import SCHEDULES, SEED, Sweep
from paceline.studies.table import Table

Rates = Mapping[str, Sequence[float]]


def both(
    rates: Rates, c: Sequence[float], kappa: Sequence[float], *, uf: Sequence[int] = (1,),
    schedules: Sequence[str] = ("constant",), pulled: Sequence[str] = ("constant",),
    seeds: Sequence[int] = (SEED,),
) -> tuple[Sweep, ...]:  # fmt: skip
    """Return, of each model at its rates, AdamW under these schedules and PACE under those it is `pulled`."""
    found = []
    for model, lr in rates.items():
        found += [Sweep("AdamW", model, lr, schedules=schedules, seeds=seeds)]
        found += [Sweep("PACE", model, lr, c, kappa, uf, pulled, seeds)]
    return tuple(found)


# --- Fine-tuning: 1B to 2B ------------------------------------------------------------------------------

LARGE = {"SmolLM2-1.7B": (3e-4, 7e-4, 1e-3), "Qwen3-1.7B": (3e-4, 5e-4), "Gemma3-1B": (1e-3, 5e-3)}
HEADLINE = {"SmolLM2-1.7B": (1e-3,), "Qwen3-1.7B": (5e-4,), "Gemma3-1B": (1e-3,)}
RATES = sorted({lr for rates in LARGE.values() for lr in rates})
STRENGTHS, POWERS = (1e-4, 5e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1), (0.2, 0.5, 0.7)
MODELS, BY_POWER, TWO = values("model", LARGE), values("kappa", POWERS), ("constant", "wsd")
TULU_RATES, TULU_STRENGTHS = (3e-4, 5e-4), (5e-2, 1e-1, 1.5e-1, 2.5e-1)
BEST_DECAY = partial(along, lots=panels.BEST_DECAY)
_over_tulu = partial(over_c, strengths=TULU_STRENGTHS, lots=values("lr", TULU_RATES), own_legend=True)

LARGER = (
    Figure(
        "fig:train_curves", "PACE on fine-tuning",
        both(LARGE, STRENGTHS, POWERS, schedules=SCHEDULES),
        grid(BEST_DECAY, MODELS),
    ),
    Figure(
        "fig:appendix_full_train_curves", "The last quarter of fig:train_curves",
        both(LARGE, STRENGTHS, POWERS, schedules=SCHEDULES),
        panels.below(
            grid(BEST_DECAY, MODELS),
            grid(partial(BEST_DECAY, last=True), MODELS, {"last quarter": {}}),
        ),
    ),
    Figure(
        "fig:c_kappa", "Effect of EMA power and pullback strength",
        both(LARGE, STRENGTHS, POWERS),
        grid(partial(over_c, strengths=STRENGTHS, lots=values("lr", RATES)), BY_POWER, MODELS),
    ),
    Figure(
        "fig:appendix_fig1_all_schedules", "PACE against every schedule",
        both(HEADLINE, STRENGTHS, POWERS, schedules=SCHEDULES),
        lambda table: [[along(table.where(model=model), f"{model}, baselines {s}", panels.against(s))
                        for s in SCHEDULES] for model in LARGE],
    ),
    # The paper leaves c and κ of the runs with three seeds open. Here c is the one printed for SmolLM2-135M,
    # and κ that of its table next to the one printed there.
    Figure(
        "fig:appendix_multiseed_robust", "Fine-tuning with three seeds",
        both(HEADLINE, (0.1,), (0.2,), schedules=TWO, pulled=TWO, seeds=(42, 1337, 2024)),
        grid(along, MODELS, values("schedule", TWO)),
    ),
    Figure(
        "fig:appendix_tulu_qwen", "EMA power and pullback strength on tulu-3",
        both({"Qwen3-1.7B on tulu-3": TULU_RATES}, TULU_STRENGTHS, POWERS),
        panels.below(
            grid(_over_tulu, BY_POWER),
            grid(along, BY_POWER, values("lr", TULU_RATES[:1])),
        ),
    ),
)  # fmt: skip

# --- Fine-tuning: clipped gains -------------------------------------------------------------------------

CLIPPED_RATES, CLIPPED_STRENGTHS = (3e-4, 1e-3), (5e-3, 1.5e-2, 5e-2, 1.5e-1, 5e-1)
CLIPPED = Sweep("PACE", "SmolLM2-1.7B", CLIPPED_RATES, CLIPPED_STRENGTHS, POWERS, (1,))
COUNTED = "A weight that never had a gradient has the greatest gain, and counts as clipped."
_over_steps = partial(along, lots=values("c", CLIPPED_STRENGTHS), what="pull", share=True)
_at_end = partial(
    over,
    x_label="pullback strength c",
    places={number(c): {"c": c} for c in CLIPPED_STRENGTHS},
    lots=BY_POWER,
    share=True,
)

CLIPS = (
    Figure(
        "fig:clip_frac_body", "Fraction of clipped updates",
        (replace(CLIPPED, lr=CLIPPED_RATES[:1]),),
        grid(_over_steps, BY_POWER, values("lr", CLIPPED_RATES[:1])), note=COUNTED,
    ),
    Figure(
        "fig:appendix_clip_frac", "Clipped updates over training", (CLIPPED,),
        grid(_over_steps, BY_POWER, values("lr", CLIPPED_RATES)), note=COUNTED,
    ),
    Figure(
        "fig:appendix_clip_frac_vs_c", "Clipped updates at the end", (CLIPPED,),
        grid(_at_end, values("lr", CLIPPED_RATES)), note=COUNTED,
    ),
)  # fmt: skip

# --- Fine-tuning: 135M, and next to Schedule-Free -------------------------------------------------------

SMALL, SMALL_RATES = "SmolLM2-135M", (1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3)
SMALL_STRENGTHS = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)  # and 0, which is the EMA
SMALL_POWERS, PERIODS = (0.3, 0.5, 0.7), (1, 5, 10)
SHOWN_RATES = (1e-3, 2e-3, 5e-3)  # the caption says three; which of the five is open
BUDGET_RATES = (3e-3, 5e-3)
LONG, OTHER = "SmolLM2-135M, long", "Qwen3-1.7B"
LONG_AND_OTHER = values("model", (LONG, OTHER))
# The paper leaves c and κ of PACE next to Schedule-Free open. They are those of the dense sweep, with uf = 1.
RIVALS = (
    *both({LONG: (1e-3, 5e-3)}, SMALL_STRENGTHS, SMALL_POWERS),
    Sweep("Schedule-Free", LONG, (1e-3, 3e-3, 5e-3, 1e-2)),
    *both({OTHER: LARGE[OTHER]}, STRENGTHS, POWERS),
    Sweep("Schedule-Free", OTHER, (3e-4, 1e-3)),
)
_over_small = partial(over_c, strengths=SMALL_STRENGTHS, lots=values("lr", SMALL_RATES))
_over_lr = partial(
    over,
    x_label="learning rate η",
    places={number(lr): {"lr": lr} for lr in SMALL_RATES},
    lots=panels.BEST_DECAY,
)


def _print_rivals(table: Table) -> list[Printed]:
    lr = BUDGET_RATES[0]  # which of the two rates the printed losses are of is open
    own = table.where(model=SMALL, lr=lr)
    lots = own.where(method="AdamW", schedule="wsd"), own.where(method="PACE")
    ends = [panels.slashed(row.loss for row in lot) for lot in lots]
    losses = "; ".join(end or "?" for end in ends) if any(ends) else None
    clocked = (table.where(model=OTHER, method=method) for method in ("Schedule-Free", "PACE"))
    seconds = [
        min((row.seconds for row in rows if row.is_ended and row.seconds), default=0) for rows in clocked
    ]
    hours = " and ".join(f"{each / 3600:.3g} h" for each in seconds) if all(seconds) else None
    what = f"{SMALL}, η = {number(lr)}: WSD branches at 50/75/100 %; PACE at the end"
    clock = f"{OTHER}, wall clock of Schedule-Free and PACE (one TPU v6e in the paper)"
    return [(what, "1.277/1.233/1.205; 1.153", losses), (clock, "12 h and 10 h", hours)]


SMALLER = (
    Figure(
        "fig:135m_grid", "Effect of update frequency and pullback strength",
        both({SMALL: SMALL_RATES}, SMALL_STRENGTHS, SMALL_POWERS[:1], uf=PERIODS),
        grid(_over_small, values("uf", PERIODS), values("kappa", SMALL_POWERS[:1])),
    ),
    Figure(
        "fig:appendix_135m_full_grid", "Effect of frequency, power and strength",
        both({SMALL: SMALL_RATES}, SMALL_STRENGTHS, SMALL_POWERS, uf=PERIODS),
        grid(_over_small, values("uf", PERIODS), values("kappa", SMALL_POWERS)),
    ),
    Figure(
        "fig:appendix_wsd_val_curves", "PACE against the best decay",
        both({SMALL: SHOWN_RATES}, SMALL_STRENGTHS, SMALL_POWERS, schedules=SCHEDULES),
        grid(BEST_DECAY, values("lr", SHOWN_RATES), values("uf", (1,))),
    ),
    Figure(
        "fig:appendix_wsd_finetune", "Fine-tuning across learning rates",
        both({SMALL: SMALL_RATES}, SMALL_STRENGTHS, SMALL_POWERS, schedules=SCHEDULES),
        grid(_over_lr, {f"{SMALL}, AdamW and EMA at their best decay": {"uf": (1, None)}}),
    ),
    Figure(
        "fig:bema_sf", "PACE, Schedule-Free, AdamW and EMA",
        (
            *RIVALS,
            Sweep("AdamW", SMALL, BUDGET_RATES, schedules=("wsd",), budgets=True),
            Sweep("PACE", SMALL, BUDGET_RATES, (1e-1,), (0.3,), (1,)),
        ),
        panels.below(
            grid(partial(along, lots=each("AdamW", "EMA", "Schedule-Free", "PACE")), LONG_AND_OTHER),
            grid(river, values("lr", BUDGET_RATES), {f"{SMALL}, budgets": {"model": SMALL}}),
        ),
        printed=_print_rivals,
    ),
    Figure(  # the EMA has the training loss of AdamW, whose average it is
        "fig:appendix_train_curves", "Training loss of three methods", RIVALS,
        grid(partial(along, lots=each("AdamW", "Schedule-Free", "PACE"), what="train"), LONG_AND_OTHER),
    ),
)  # fmt: skip

# --- Pretraining ----------------------------------------------------------------------------------------

GPT, GPT_RATES = "GPT-2-124M", (3e-4, 1e-3, 1.5e-3, 2e-3, 2.5e-3, 3e-3, 1e-2)
# The paper leaves the points of "coarse 1e-4 to 3e-1 plus local 1e-3 to 1e-2" open. They are the bins of
# fine-tuning here, and the local points that are printed for the schedules.
COARSE = (1e-4, 5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 7e-3, 1e-2, 3e-2, 1e-1, 3e-1)
LOCAL, LOCAL_POWERS = (3e-4, 1e-3, 2e-3, 3e-3, 5e-3, 7e-3, 1e-2), (0.1, 0.2, 0.3, 0.5)
RATE, POWER, BUDGET_C, DECAYED_C = (2e-3,), (0.5,), 2e-3, 3e-3
AT_POWER = values("kappa", POWER)
_over_coarse = partial(over_c, strengths=COARSE, lots=values("lr", GPT_RATES))
_scheduled, BY_SCHEDULE = partial(both, {GPT: RATE}, LOCAL), values("schedule", SCHEDULES)


def _least(table: Table, method: str, schedule: str) -> str | None:
    """Return the least mean loss over seeds, ± its standard error."""
    best = table.where(method=method, schedule=schedule).best("c", "kappa")
    mean = best.mean() if best is not None else None
    return None if mean is None else mean.text(3)


def _print_decayed(table: Table) -> list[Printed]:
    return [("AdamW WSD", "3.531", _least(table, "AdamW", "wsd"))]


def _print_scheduled(table: Table) -> list[Printed]:
    return [
        ("best PACE, WSD, three seeds", "3.507 ± 0.006", _least(table, "PACE", "wsd")),
        ("best PACE, constant, three seeds", "3.537 ± 0.004", _least(table, "PACE", "constant")),
        *_print_decayed(table),
    ]


def _print_budgets(table: Table) -> list[Printed]:
    decayed = table.where(method="AdamW", schedule="wsd")
    (pulled,) = table.where(method="PACE", c=BUDGET_C)
    ends, curve = panels.slashed(row.loss for row in decayed), pulled.curve()
    there = panels.slashed(panels.at(curve, row["steps"]) for row in decayed)
    return [
        ("AdamW WSD branches at 50/75/100 %", "3.721/3.597/3.530", ends),
        ("PACE, constant, at the same steps", "≈3.707/3.595/3.534", there),
    ]


PRETRAINING = (
    Figure(
        "fig:pretrain", "PACE on pretraining",
        (*both({GPT: GPT_RATES}, COARSE, POWER), *_scheduled(POWER, schedules=("wsd",), pulled=("wsd",))),
        panels.beside(
            grid(along, values("schedule", ("constant",)), AT_POWER),
            grid(partial(_over_coarse, own_legend=True), values("schedule", ("constant",)), AT_POWER),
            grid(along, values("schedule", ("wsd",)), AT_POWER),
        ),
        printed=_print_decayed,
    ),
    Figure(
        "fig:appendix_pretrain_kappa_sweep", "EMA power and strength on pretraining",
        both({GPT: GPT_RATES}, COARSE, POWERS),
        grid(_over_coarse, BY_POWER),
    ),
    Figure(
        "fig:appendix_pretrain_csweep", "Strength across schedules, three seeds",
        _scheduled(LOCAL_POWERS, schedules=SCHEDULES, pulled=SCHEDULES, seeds=(0, 1, 42)),
        grid(partial(over_c, strengths=LOCAL, lots=BY_SCHEDULE),
             {f"{GPT}, best κ, mean of seeds and its standard error": {"kappa": (*LOCAL_POWERS, None)}}),
        printed=_print_scheduled,
    ),
    Figure(
        "fig:appendix_pretrain_csweep_kappa", "Strength by EMA power, one seed",
        _scheduled(LOCAL_POWERS, schedules=SCHEDULES, pulled=SCHEDULES),
        grid(partial(over_c, strengths=LOCAL, lots=values("kappa", LOCAL_POWERS)), BY_SCHEDULE),
    ),
    Figure(
        "fig:appendix_pretrain_river", "Token budgets on pretraining",
        (
            Sweep("AdamW", GPT, RATE, schedules=("wsd",), budgets=True),
            Sweep("PACE", GPT, RATE, (BUDGET_C,), POWER, (1,)),
            Sweep("PACE", GPT, RATE, (DECAYED_C,), POWER, (1,), ("wsd",), budgets=True),
        ),
        grid(river, {GPT: {"c": (BUDGET_C, None)}, "PACE with WSD, by budget": {"c": DECAYED_C}}),
        printed=_print_budgets,
    ),
)  # fmt: skip
FIGURES = {figure.label: figure for figure in (*LARGER, *CLIPS, *SMALLER, *PRETRAINING)}
