"""The runs of the paper's figures: sweeps of AdamW with averages beside it, of PACE, and of Schedule-Free.

A run has one name, whichever figure asks for it, and is done once. At a smaller scale several of the paper's
models are one model: then one run stands for all of them, and only its tags differ.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, final

from paceline.paper.scales import Scale
from paceline.runs.config import Run
from paceline.runs.names import average_of
from paceline.studies.runs import Named, decayed

_ADAMW = "betas=(0.9,0.999),eps=1e-8,weight_decay=0.01"
METHODS = {
    "AdamW": f"adamw:{_ADAMW}",
    "PACE": "pace:c={c:g},power={kappa:g},every={uf}," + _ADAMW,  # as in Algorithm 1
    # Its authors' settings for NanoGPT, without clipping.
    "Schedule-Free": "schedule_free:betas=(0.98,0.95),weight_decay=0.05",
}
DECAY = 0.2  # the share of a run over which WSD goes to 0
SEED = 42
SCHEDULES = ("constant", "cosine", "wsd")
BESIDE: dict[str, tuple[tuple[float, ...], tuple[int, ...]]] = {
    "SmolLM2-135M": ((0.3, 0.5, 0.7), (1, 5, 10)),
    "SmolLM2-135M, long": ((0.3, 0.5, 0.7), (1,)),
    **dict.fromkeys(
        ("SmolLM2-1.7B", "Qwen3-1.7B", "Qwen3-1.7B on tulu-3", "Gemma3-1B"), ((0.2, 0.5, 0.7), (1,))
    ),
    "GPT-2-124M": ((0.1, 0.2, 0.3, 0.5, 0.7), (1,)),
}
"""κ and uf of the EMAs beside AdamW: every one that a figure of the model asks for, from one run."""


@final
@dataclass(frozen=True, slots=True)
class Sweep:
    """The combinations of settings of one method, on one of the paper's models."""

    method: Literal["AdamW", "PACE", "Schedule-Free"]
    model: str
    lr: Sequence[float]
    c: Sequence[float | None] = (None,)
    kappa: Sequence[float | None] = (None,)
    uf: Sequence[int | None] = (None,)
    schedules: Sequence[str] = ("constant",)
    seeds: Sequence[int] = (SEED,)
    budgets: bool = False
    """Whether WSD decays at 50, 75 and 100 % of the run, not at its end alone."""

    def runs(self, scale: Scale) -> Iterator[Named]:
        """Yield the runs; with WSD, the run at a constant rate and the branches that continue it."""
        row, settings = scale.models[self.model], self._settings(scale)
        choices = self.schedules, self.seeds, self.lr, self.c, self.kappa, self.uf
        for schedule, seed, lr, c, kappa, uf in product(*choices):
            chosen = {"c": c, "kappa": kappa, "uf": uf}
            first = "cosine" if schedule == "cosine" else "constant"
            tags = {"model": self.model, "method": self.method, "lr": lr, "seed": seed, **chosen}
            words = [row.short, self.method.lower()]
            words += [f"{name[0]}{value:g}" for name, value in chosen.items() if value is not None]
            words += [f"lr{lr:g}", "{}", "{}", f"s{seed}"]
            name = "_".join(words).format
            method = METHODS[self.method].format(**chosen)
            one = Named(
                name=name(first, row.steps),
                run=Run(method=method, schedule=first, lr=lr, seed=seed, **settings),
                tags={**tags, "schedule": first, "steps": row.steps},
            )
            yield one
            if schedule == "wsd":
                for steps in row.budgets if self.budgets else (row.steps,):
                    yield decayed(one, steps=steps, share=DECAY, name=name("wsd", steps))

    def _settings(self, scale: Scale) -> dict[str, Any]:
        """Return the settings that all of these runs share."""
        row = scale.models[self.model]
        settings = {**row.settings, "warmup": 50, "clip_norm": 1.0}
        if self.method == "Schedule-Free":
            return settings | {"clip_norm": None}
        if self.method == "PACE":  # the pull is measured as often as the loss
            return settings | {"telemetry_every": row.settings["evaluate_every"]}
        # Also the EMAs of models that are this one at this scale: their run is then this one.
        alike = [key for key, other in scale.models.items() if other.short == row.short]
        found = sorted({pair for key in alike for pair in product(*BESIDE[key])})
        return settings | {"averages": tuple(average(kappa, uf) for kappa, uf in found)}


def average(kappa: float, uf: int) -> str:
    """Return an EMA as the averages of a run name it."""
    return f"power:{kappa:g}" if uf == 1 else f"power:{kappa:g},every={uf}"


def readings(one: Named) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield weights and tags of all that a run stands for: of AdamW also each EMA beside it."""
    if one.tags["method"] != "AdamW":
        yield "average", dict(one.tags)
        return
    yield "live", dict(one.tags)
    for kappa, uf in product(*BESIDE[one.tags["model"]]):
        yield average_of(average(kappa, uf))[0], {**one.tags, "method": "EMA", "kappa": kappa, "uf": uf}
