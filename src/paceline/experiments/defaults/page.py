"""Tables of docs/defaults.md and docs/choose.md, from records alone. No torch."""

from collections.abc import Callable
from functools import partial

from paceline.experiments.defaults.regret import Pick, best_weights
from paceline.experiments.defaults.tables import (
    POWERS,
    Results,
    Row,
    Study,
    at,
    bests,
    chosen_by,
    losses,
    others,
    powers,
    rate_in_words,
    regrets,
    signs,
)

GPT, CHAT = "7m-2000-steps", "sft-150-steps"
DEFAULT, PAPER, USUAL = "scaled:15,control:0.2", "paper:0.003", "weight decay 0.1, β₂ 0.95"
K5, K6, K7, K8 = POWERS
ALL = "power_1_0"
REFERENCES = {GPT: Pick("adamw", K6), CHAT: Pick("adamw", K8)}

REGRET = (
    Row("**the default**", DEFAULT, K7),
    Row("the same", DEFAULT, K6),
    Row("PACE of the paper", PAPER, K5),
    Row("AdamW", "adamw", K6),
    Row("AdamW", "adamw", K7),
    Row("AdamW, WSD", "adamw+wsd", "live"),
    Row("Schedule-Free", "schedule_free", "average"),
)
CHAT_REGRET = (
    Row("**the default**", DEFAULT, K7),
    Row("the same", DEFAULT, K8),
    Row("PACE of the paper", PAPER, K5),
    Row("the same", PAPER, K8),
    Row("AdamW", "adamw", K8),
    Row("AdamW", "adamw", K7),
    Row("AdamW, WSD", "adamw+wsd", K8),
    Row("Schedule-Free", "schedule_free", "average"),
)
SEEDS = (
    Row("PACE, c = 3e-3", PAPER, K6),
    Row("**scaled, 15, control 0.2**", DEFAULT, K6),
    Row("scaled, 60, control 0.2", "scaled:60,control:0.2", K6),
    Row("softened, 15", "softened:15", K6),
)
PLAIN, FREE = "weight decay 0.01, β₂ 0.999", "β 0.9, 0.999, weight decay 0.05"
BASELINES = (
    Row("AdamW", "adamw", settings=PLAIN),
    Row("AdamW", "adamw@usual", settings=USUAL),
    Row("AdamW, WSD", "adamw+wsd", settings="the last fifth decays"),
    Row("AdamW, cosine to 0", "cosine"),
    Row("Schedule-Free", "schedule_free", settings=FREE),
    Row("Schedule-Free", "schedule_free.98", settings="β 0.98, 0.95, weight decay 0.05"),
    Row("GPA", "gpa", settings="μ 0.9967, 0.7"),
    Row("EMA-Nesterov", "ema_nesterov", settings="push 0.3"),
    Row("AdEMAMix", "ademamix", settings="α 5, β₃ 0.999"),
    *(
        Row("PACE of the paper", f"paper:{c:g}", settings=f"c = {rate_in_words(c)}")
        for c in (1e-3, 3e-3, 1e-2, 3e-2)
    ),
    Row("**scaled, 15, control 0.2**", DEFAULT),
)
CHAT_BASELINES = (
    Row("AdamW", "adamw", settings=PLAIN),
    Row("AdamW, WSD", "adamw+wsd", settings="the last fifth decays"),
    Row("Schedule-Free", "schedule_free", settings=FREE),
    Row("PACE of the paper", PAPER, settings="c = 3e-3"),
    Row("**scaled, 15, control 0.2**", DEFAULT),
)
METHODS = (
    Row("AdamW", "adamw"),
    Row(f"AdamW, {USUAL}", "adamw@usual"),
    Row("AdamW, WSD", "adamw+wsd"),
    Row("AdamW, cosine to 0", "cosine"),
    Row("Schedule-Free (β 0.9, 0.999)", "schedule_free"),
    Row("GPA (μ 0.9967, 0.7)", "gpa"),
    Row("EMA-Nesterov, push 0.3", "ema_nesterov"),
    Row("AdEMAMix (α 5, β₃ 0.999)", "ademamix"),
    Row("PACE, c = 1e-3", "paper:0.001"),
    Row("PACE, c = 3e-3", PAPER),
    Row("PACE, c = 1e-2", "paper:0.01"),
    Row(f"PACE, c = 3e-3, {USUAL}", "paper:0.003@usual"),
    Row("PACE, c = 3e-3, cosine to 0", "paper:0.003+cosine"),
    Row("scaled, 15", "scaled:15"),
    Row("scaled, 15, control 0.35", "scaled:15,control:0.35"),
    Row("scaled, 30, control 0.35", "scaled:30,control:0.35"),
    Row("**scaled, 15, control 0.2**", DEFAULT),
    Row("scaled, 30, control 0.2", "scaled:30,control:0.2"),
    Row("scaled, 60, control 0.2", "scaled:60,control:0.2"),
    Row("scaled, 240, control 0.2", "scaled:240,control:0.2"),
    Row("softened, 15", "softened:15"),
    Row("push alone, 0.5", "push:0.5"),
    Row("signed, 15, push 0.5", "signed:15,0.5"),
    Row("signed, 40, push 0.5", "signed:40,0.5"),
    Row("split, 15, push 0.5", "split:15,0.5"),
    Row("H4, R = 3, threshold 1, push 0.1", "gated:3,1,0.1"),
)
IDEAS = (
    Row("AdamW", "adamw"),
    Row("**scaled, 15, control 0.2**", DEFAULT),
    Row("PACE, c = 3e-3, control 0.35", "paper:0.003,control:0.35"),
    Row("PACE, c = 3e-3, control 0.65", "paper:0.003,control:0.65"),
    Row("PACE, c = 3e-3, in the embedding alone", "paper:0.003,embedding"),
    Row("PACE, c = 3e-3, in everything else", "paper:0.003,rest"),
    Row("scaled within each tensor, 5 (`tensorwise`)", "tensorwise:5"),
    Row("alike for all coordinates, R = 125 η", "uniform·lr"),
    Row("the same less a push of 0.5", "uniform·lr,0.5"),
    Row("H2, cosine steered to 0.12", "h2:0.12"),
    Row("H3, drift compensated, R = 2", "h3"),
    Row("H5, push early and pull late, R = 2", "h5"),
    Row("steps divided by the rms of g/√v̂ where that is over 1 (`stable`)", "stable"),
    Row("steps cut at η (`clipped`)", "clipped"),
    Row("strength by the size of a tensor (`sized`)", "sized:4"),
)
CHAT_METHODS = (
    Row("AdamW", "adamw", K8),
    Row("AdamW", "adamw", ALL),
    Row("AdamW, WSD", "adamw+wsd", K8),
    Row("AdamW, WSD", "adamw+wsd", ALL),
    Row("Schedule-Free", "schedule_free", "average"),
    Row("PACE, c = 3e-3", PAPER, K8),
    Row("PACE, c = 3e-3", PAPER, ALL),
    Row("scaled, 15", "scaled:15", K8),
    Row("**scaled, 15, control 0.2**", DEFAULT, K8),
    Row("**scaled, 15, control 0.2**", DEFAULT, ALL),
    Row("scaled, 60, control 0.2", "scaled:60,control:0.2", K8),
    Row("signal, 60, control 0.2", "signal:60,control:0.2", K8),
    Row("signal, 120, control 0.2", "signal:120,control:0.2", K8),
    Row("softened, 15", "softened:15", K8),
    Row("push alone, 0.5", "push:0.5", K8),
    Row("signed, 15, push 0.5", "signed:15,0.5", K8),
    Row("split, 15, push 0.5", "split:15,0.5", K8),
)


def transfer(results: Results, *more: Row, recipe: str = "") -> str:
    """The default with its own average and with AdamW's best, beside AdamW with that."""
    adamw = best_weights(results, f"adamw{recipe}", POWERS)
    ours = [Row("the default", f"{DEFAULT}{recipe}", weights) for weights in (K7, adamw.weights)]
    return losses(results, [Row("AdamW", *adamw), *ours, *more])


PULL = Row("PACE of the paper", PAPER, K5)
SIGNALS = {
    average: [Row(f"signal, {r}", f"signal:{r},control:0.2", average) for r in (60, 120)]
    for average in (K5, K6)
}
OLDER = (
    Row("AdamW", "adamw"),
    Row("AdamW, WSD", "adamw+wsd"),
    Row("AdamW, warm-up 400", "warm"),
    Row("AdamW, ε = 3e-3 · lr", "eps"),
    Row("PACE of the paper, c = 3e-3", "pace"),
    Row("H3, drift compensated", "h3"),
    Row("H4, gated (R = 1, threshold 3)", "h4"),
    Row("H5, push then pull", "h5"),
    Row("H6, relative, R = 1", "relative"),
    Row("steps of at most 3 % of a tensor", "cap.03"),
    Row("the same of a tensor as it began, and a pull", "heldF.03"),
)
LIMITS = (
    Row("AdamW", "plain"),
    Row("AdamW, warm-up 100", "warm"),
    Row("steps of at most 3 % of a tensor as it began, and a pull", "heldF.03"),
)
GATED = (
    Row("0.3M: AdamW", "plain", K5),
    *(
        Row(f"0.3M: H4, R = 6, threshold 0.5, push {push / 100:g}", f"e6,.5,P{push}", K5)
        for push in (0, 10, 25, 50)
    ),
    Row("1M: AdamW", "1m,plain"),
    Row("1M: H4, R = 6, threshold 0.5, push 0.5", "1m,g6,.5"),
    Row("1M: H4, R = 3, threshold 1, no push", "1m,g3,1,P0"),
)
MULTIPLES = ("1/2", "1", "2", "4")
NEAR = (Row("the default", DEFAULT, K7), Row("AdamW", "adamw", K6))
CHAT_NEAR = (Row("the default", DEFAULT, K7), Row("AdamW", "adamw", K8))
LENGTHS = (
    ("pretraining, 500 steps", "7m-quarter", 1),
    ("pretraining, 500 steps of four times the batch", "7m-large-batch", 1),
    ("pretraining, 2,000 steps", GPT, 1),
    ("pretraining of 25M, 2,000 steps", "25m-2000-steps", 1),
    ("fine-tuning, 150 steps", CHAT, 1),
    ("fine-tuning at twice the best rate", CHAT, 2),
)

PAGES: dict[str, dict[str, Callable[[Study], str]]] = {
    "defaults.md": {
        "pretraining-regret": lambda study: regrets(study[GPT], REGRET, REFERENCES[GPT]),
        "fine-tuning-regret": lambda study: regrets(study[CHAT], CHAT_REGRET, REFERENCES[CHAT]),
        "pretraining-best": lambda study: bests(study[GPT], BASELINES),
        "fine-tuning-best": lambda study: bests(study[CHAT], CHAT_BASELINES),
        "larger": lambda study: transfer(study["25m-2000-steps"]),
        "shorter": lambda study: transfer(study["7m-quarter"], PULL),
        "large-batch": lambda study: transfer(study["7m-large-batch"], PULL, *SIGNALS[K5]),
        "usual": lambda study: transfer(study["7m-usual"], recipe="@usual"),
        "signal": lambda study: transfer(study["7m-usual"], *SIGNALS[K6]),
        "pretraining": lambda study: losses(chosen_by(study[GPT]), METHODS),
        "pretraining-seeds": lambda study: regrets(
            others(study[GPT]), SEEDS, REFERENCES[GPT], ("1", "2", "4")
        ),
        "ideas": lambda study: losses(at((2e-3, 8e-3), chosen_by(study[GPT])), IDEAS),
        "fine-tuning": lambda study: losses(chosen_by(study[CHAT]), CHAT_METHODS),
        "pretraining-signs": lambda study: signs(study[GPT], K6),
        "fine-tuning-signs": lambda study: signs(study[CHAT], K8),
        "older": lambda study: losses(study["7m-short-warmup"], OLDER),
        "limits": lambda study: losses(study["cpu-limits"], LIMITS),
        "gated": lambda study: losses(study["cpu-gated"], GATED),
    },
    "choose.md": {
        "pretraining-near": lambda study: regrets(study[GPT], NEAR, REFERENCES[GPT], MULTIPLES),
        "fine-tuning-near": lambda study: regrets(study[CHAT], CHAT_NEAR, REFERENCES[CHAT], MULTIPLES),
        "powers": lambda study: powers(study, DEFAULT, LENGTHS),
    },
}


def tables(page: str, study: Study) -> dict[str, Callable[[], str]]:
    """Of one page, by their names there."""
    return {name: partial(make, study) for name, make in PAGES[page].items()}
