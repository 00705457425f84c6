"""The runs of the paper's figures: AdamW with averages beside it, PACE, Schedule-Free.

A run has one name, whichever figure asks for it, and is done once. At a smaller scale several of the paper's
models are one model: then one run stands for all of them, and only its tags differ.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from paceline.paper.scales import Scale
from paceline.runs.config import Run
from paceline.studies.runs import Named, decayed

ADAMW = "betas=(0.9,0.999),eps=1e-8,weight_decay=0.01"
FREE = (
    "schedule_free:betas=(0.98,0.95),weight_decay=0.05"  # its authors' settings for NanoGPT, without clipping
)
DECAY = 0.2  # the share of a run over which WSD goes to 0
SEED = 42
SCHEDULES = ("constant", "cosine", "wsd")

BESIDE: dict[str, tuple[tuple[float, ...], tuple[int, ...]]] = {
    "smollm2-135m": ((0.3, 0.5, 0.7), (1, 5, 10)),
    "smollm2-135m-long": ((0.3, 0.5, 0.7), (1,)),
    **dict.fromkeys(("smollm2-1.7b", "qwen3-1.7b", "qwen3-1.7b-tulu", "gemma3-1b"), ((0.2, 0.5, 0.7), (1,))),
    "gpt2-124m": ((0.1, 0.2, 0.3, 0.5, 0.7), (1,)),
}
"""κ and uf of the EMAs beside AdamW: every one that a figure of the model asks for, from one run."""


# --- Making them ----------------------------------------------------------------------------------------


def adamw(
    scale: Scale, model: str, rates: Sequence[float], schedules: Sequence[str] = ("constant",),
    seeds: Sequence[int] = (SEED,), budgets: Sequence[int] = (),
) -> Iterator[Named]:  # fmt: skip
    """Yield AdamW at all combinations, with every EMA beside it that a figure asks for."""
    # Also those of models that are this one at this scale: their run is then this one.
    alike = [key for key, row in scale.models.items() if row.short == scale.models[model].short]
    found = sorted({pair for key in alike for pair in product(*BESIDE[key])})
    averages = tuple(average(kappa, uf) for kappa, uf in found)
    for lr, schedule, seed in product(rates, schedules, seeds):
        tags = {"method": "AdamW", "lr": lr, "seed": seed}
        yield from _named(scale, model, f"adamw:{ADAMW}", tags, schedule, budgets, averages=averages)


def average(kappa: float, uf: int) -> str:
    """Return an EMA as the averages of a run name it."""
    return f"power:{kappa:g}" if uf == 1 else f"power:{kappa:g},every={uf}"


def pace(
    scale: Scale, model: str, rates: Sequence[float], strengths: Sequence[float], powers: Sequence[float],
    periods: Sequence[int] = (1,), schedules: Sequence[str] = ("constant",), seeds: Sequence[int] = (SEED,),
    budgets: Sequence[int] = (),
) -> Iterator[Named]:  # fmt: skip
    """Yield PACE as in Algorithm 1, at all combinations."""
    # The pull is measured as often as the loss.
    often = scale.models[model].settings["evaluate_every"]
    for schedule, seed, lr, c, kappa, uf in product(schedules, seeds, rates, strengths, powers, periods):
        tags = {"method": "PACE", "lr": lr, "c": c, "kappa": kappa, "uf": uf, "seed": seed}
        optimizer = f"pace:c={c:g},power={kappa:g},every={uf},{ADAMW}"
        yield from _named(scale, model, optimizer, tags, schedule, budgets, telemetry_every=often)


def schedule_free(scale: Scale, model: str, rates: Sequence[float]) -> Iterator[Named]:
    """Yield Schedule-Free AdamW at these learning rates."""
    for lr in rates:
        tags = {"method": "Schedule-Free", "lr": lr, "seed": SEED}
        yield from _named(scale, model, FREE, tags, "constant", (), clip_norm=None)


def _named(
    scale: Scale, model: str, optimizer: str, tags: Mapping[str, Any], schedule: str, budgets: Sequence[int],
    **more: Any,
) -> Iterator[Named]:  # fmt: skip
    """Yield the run; with WSD, the run at a constant rate and the branches that continue it."""
    row = scale.models[model]
    words = [row.short, tags["method"].lower()]
    words += [
        f"{letter}{tags[tag]:g}" for tag, letter in (("c", "c"), ("kappa", "k"), ("uf", "u")) if tag in tags
    ]
    words += [f"lr{tags['lr']:g}"]

    def name(schedule: str, steps: int) -> str:
        return "_".join([*words, schedule, str(steps), f"s{tags['seed']}"])

    first = "cosine" if schedule == "cosine" else "constant"
    settings = {
        **row.settings,
        "warmup": 50,
        "clip_norm": 1.0,
        "lr": tags["lr"],
        "seed": tags["seed"],
        **more,
    }
    run = Run(method=optimizer, schedule=first, **settings)
    none = dict.fromkeys(("c", "kappa", "uf"))
    one = Named(
        name=name(first, row.steps),
        run=run,
        tags={"model": model, **none, "schedule": first, "steps": row.steps, **tags},
    )
    yield one
    if schedule == "wsd":
        for steps in budgets or (row.steps,):
            yield decayed(one, steps=steps, share=DECAY, name=name("wsd", steps))
