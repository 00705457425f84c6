"""What the study runs, by name: METHOD-LR-SEED. A method is the settings of an optimizer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.experiments.config import Run

Named = dict[str, Run]
Spec = str | Callable[[float], str]
"""An optimizer, or what it is at a learning rate."""


# --- What is trained --------------------------------------------------------------------------------


PASSIVE = tuple(f"power:{power}" for power in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)) + tuple(
    f"half_life:{fraction}" for fraction in (0.03, 0.06, 0.12, 0.25)
)
BLENDS = tuple(f"blend:{share},half_life,0.06" for share in (0.5, 0.75))
FEW = ("power:0.5", "power:0.6", "power:0.7", "power:0.8", "half_life:0.06", "half_life:0.12")
LONG = tuple(f"power:{power}" for power in (0.5, 0.6, 0.7, 0.8, 1.0))
"""As many as a GPU with several fine-tunings at once can hold; a run of 150 steps wants long ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """A model, how long it is trained, and a learning rate about which the others lie."""

    settings: Mapping[str, Any]
    middle: float
    passive: tuple[str, ...] = PASSIVE + BLENDS
    """Averages beside AdamW."""
    few: tuple[str, ...] = FEW
    """Beside everything else."""

    def lr(self, power: int) -> float:
        """The middle one times a power of 2."""
        return self.middle * 2.0**power


_GPT: dict[str, Any] = {"length": 256, "held_out_samples": 768, "compile": True}


def _pretraining(model: str, batch_size: int, steps: int, middle: float) -> Scale:
    """A tenth of the steps warms up: with less, the warm-up decides what a large rate does."""
    own = {"model": model, "batch_size": batch_size, "steps": steps, "warmup": steps // 10}
    return Scale(settings=_GPT | own, middle=middle)


SCALES = {
    "7m": _pretraining("gpt:7m", 32, 2000, 2e-3),  # 16.4M tokens
    "7m-quarter": _pretraining("gpt:7m", 32, 500, 2e-3),
    "7m-twice": _pretraining("gpt:7m", 32, 4000, 2e-3),
    "7m-large-batch": _pretraining("gpt:7m", 128, 500, 2e-3),
    "25m": _pretraining("gpt:25m", 32, 2000, 1e-3),
    "sft": Scale(
        settings={"task": "sft", "length": 512, "batch_size": 16, "steps": 150, "warmup": 15}
        | {"held_out_samples": 256},  # compiled beside others, a run did not end in 200 s
        middle=3e-4,
        passive=LONG,
        few=LONG,
    ),
    "1m": Scale(
        settings={"model": "gpt:1m", "length": 64, "batch_size": 16, "steps": 1200, "warmup": 120}
        | {"held_out_samples": 256},
        middle=4e-3,
    ),
    "tiny": Scale(
        settings={"model": "gpt:0.3m", "tokenizer": "bpe:300", "length": 64, "batch_size": 8, "steps": 1000}
        | {"warmup": 100, "held_out_samples": 256},
        middle=3e-3,
    ),
}
RECIPES = {"paper": "weight_decay=0.01,betas=(0.9,0.999)", "usual": "weight_decay=0.1,betas=(0.9,0.95)"}
ALL = (-3, -2, -1, 0, 1, 2, 3)
RIGHT = (-1, 0, 1, 2, 3)


def grid(
    scale: Scale,
    method: str,
    optimizer: Spec,
    powers: tuple[int, ...] = RIGHT,
    *,
    recipe: str | None = "paper",
    averages: tuple[str, ...] | None = None,
    seed: int = 1,
    **more: Any,
) -> Named:
    """A method at several learning rates: powers of 2 times the scale's."""
    runs = {}
    averages = scale.few if averages is None else averages
    for power in powers:
        lr = scale.lr(power)
        text = optimizer if isinstance(optimizer, str) else optimizer(lr)
        if recipe is not None:
            text += ("," if ":" in text else ":") + RECIPES[recipe]
        settings: dict[str, Any] = {**scale.settings, **more}
        steps = settings["steps"]
        # Losses are wanted of the end only, and no checkpoint of a run that takes a minute.
        settings |= {"evaluate_every": steps, "checkpoint_every": steps, "keep": 1}
        full = method if recipe in (None, "paper") else f"{method}@{recipe}"
        runs[f"{full}-{plainly(lr)}-{seed}"] = Run(
            optimizer=text, lr=lr, averages=averages, seed=seed, **settings
        )
    return runs


def plainly(lr: float) -> str:
    """A learning rate without an exponent, whose sign would look like the hyphens of a name.

    >>> plainly(3.75e-5)
    '0.0000375'
    """
    return f"{lr:.10f}".rstrip("0").rstrip(".")


def decayed(runs: Named) -> Named:
    """The same with WSD: over the last fifth the rate goes to 0."""
    return {
        f"{method}+wsd-{lr}-{seed}": replace(run, schedule="wsd:decay=0.2")
        for (method, lr, seed), run in ((name.rsplit("-", 2), run) for name, run in runs.items())
    }


# --- Methods ----------------------------------------------------------------------------------------


def plain(scale: Scale, recipe: str = "paper", powers: tuple[int, ...] = ALL, **more: Any) -> Named:
    """AdamW at a constant rate with every average beside it."""
    return grid(scale, "adamw", "adamw", powers, recipe=recipe, averages=scale.passive, **more)


def paper(scale: Scale, strengths: tuple[float, ...], powers: tuple[int, ...] = RIGHT, **more: Any) -> Named:
    """PACE as printed."""
    runs: Named = {}
    for c in strengths:
        runs |= grid(scale, f"paper:{c:g}", f"candidate:gain=paper,strength={c:g}", powers, **more)
    return runs


def rivals(scale: Scale, **more: Any) -> Named:
    """What a user would take instead."""
    no_recipe: dict[str, Any] = {"recipe": None, "averages": ()}
    free = "schedule_free:betas=({},{}),weight_decay=0.05"
    plus = "schedule_free_plus:sf_beta1_anneal_steps={steps},c_warmup={warmup},weight_decay=20"
    plus = plus.format(**scale.settings)
    runs = grid(scale, "cosine", "adamw", schedule="cosine", **more)
    runs |= grid(scale, "schedule_free", free.format(0.9, 0.999), ALL, **no_recipe, **more)
    runs |= grid(scale, "schedule_free.98", free.format(0.98, 0.95), (1, 2, 3), **no_recipe, **more)
    # Its learning rate is a factor of the one it finds: 1 by default.
    found, factors = replace(scale, middle=1.0), (-5, -4, -3, -2, -1, 0, 1)
    runs |= grid(found, "schedule_free_plus", plus, factors, clip_norm=None, **no_recipe, **more)
    runs |= grid(scale, "gpa", "gpa:mu_x=0.9967,mu_y=0.7", (0, 1, 2), averages=(), **more)
    runs |= grid(scale, "ema_nesterov", "ema_nesterov:push=0.3", (-1, 0, 1), **more)
    mix = "ademamix:alpha=5,betas=(0.9,0.999,0.999),weight_decay=0.01"
    runs |= grid(scale, "ademamix", mix, (-2, -1, 0), recipe=None, **more)
    return runs


def hypotheses(scale: Scale, powers: tuple[int, ...] = (0, 2), **more: Any) -> Named:
    """H2 to H6 and ours, each at a setting or two; a gain's own settings are in its name."""
    steps = scale.settings["steps"]
    tried: dict[str, Spec] = {
        "h2": "gain=hypergradient",
        "h2:0.12": "gain=hypergradient,target=0.12",
        "h3": "gain=without_drift,strength=2",
        "h4": "gain=gated,strength=1",
        "h5": f"gain=push_then_pull,strength=2,steps={steps}",
        "h6": "gain=relative,strength=1",
        "relative·lr": lambda lr: f"gain=relative,strength={125 * lr:g}",
        "sized:4": "gain=sized,strength=4",
        "sized:14,2": "gain=sized,strength=14,power=2",
        "stable": "gain=stable",
        "clipped": "gain=clipped",
        "eps": lambda lr: f"gain=uniform,strength=0,eps={3e-3 * lr:g}",
        "leash": "gain=leash,length=0.1",
        "capped": "gain=capped,length=0.03",
        "capped+pull": "gain=capped,length=0.03,strength=1",
        "capped+pull,start": "gain=capped,length=0.03,strength=1,frozen=true",
        "push": "gain=uniform,strength=-0.3",
    }
    return _all(scale, tried, powers, **more)


def _all(scale: Scale, tried: dict[str, Spec], powers: tuple[int, ...], **more: Any) -> Named:
    runs: Named = {}
    for method, spec in tried.items():
        runs |= grid(scale, method, _candidate(spec), powers, **more)
    return runs


GATES = ((6.0, 0.5, 0.1), (6.0, 0.5, 0.25), (6.0, 0.5, 0.0), (3.0, 1.0, 0.1), (10.0, 0.3, 0.1))
"""Strength, threshold, push of H4. Noise that is pulled with strength R has a variance 1/(1 + R) as large, so
the threshold goes with it."""


def gated(scale: Scale, powers: tuple[int, ...] = (-2, *RIGHT), **more: Any) -> Named:
    """H4, which won on the smallest model, at several settings."""
    runs: Named = {}
    for r, threshold, push in GATES:
        spec = f"candidate:gain=gated,strength={r:g},threshold={threshold:g},push={push:g}"
        runs |= grid(scale, f"gated:{r:g},{threshold:g},{push:g}", spec, powers, **more)
    return runs


def ablations(scale: Scale, powers: tuple[int, ...] = (0, 2), **more: Any) -> Named:
    """What of the paper's gain does the work."""
    tried: dict[str, Spec] = {
        "paper:0.003,embedding": "gain=paper,strength=3e-3,part=largest",
        "paper:0.003,rest": "gain=paper,strength=3e-3,part=rest",
        "paper:0.003,control:0.35": "gain=paper,strength=3e-3,ema_power=0.35",
        "paper:0.003,control:0.65": "gain=paper,strength=3e-3,ema_power=0.65",
        "scaled:5": "gain=scaled,strength=5",
        "scaled:15": "gain=scaled,strength=15",
        "softened:15": "gain=softened,strength=15",
        "tensorwise:5": "gain=tensorwise,strength=5",
        "uniform·lr": lambda lr: f"gain=uniform,strength={125 * lr:g}",
    }
    return _all(scale, tried, powers, **more)


def _candidate(spec: Spec) -> Spec:
    return f"candidate:{spec}" if isinstance(spec, str) else lambda lr: f"candidate:{spec(lr)}"


def warmups(scale: Scale, **more: Any) -> Named:
    """AdamW and PACE with a warm-up of a fortieth of the run, instead of a tenth."""
    short = {"warmup": scale.settings["steps"] // 40}
    runs = grid(scale, "adamw,short-warmup", "adamw", **short, **more)
    return runs | grid(
        scale, "paper:0.003,short-warmup", "candidate:gain=paper,strength=3e-3", **short, **more
    )


SIGNED: dict[str, Spec] = {
    "signed:15,0.3": "gain=scaled,strength=15,push=0.3",
    "signed:15,0.5": "gain=scaled,strength=15,push=0.5",
    "signed:15,0.3,control:0.35": "gain=scaled,strength=15,push=0.3,ema_power=0.35",
    "scaled:15": "gain=scaled,strength=15",
    "scaled:15,control:0.35": "gain=scaled,strength=15,ema_power=0.35",
    "split:15,0.5": "gain=split,strength=15,push=0.5,ema_power=0.35,slow_power=0.5",
    "softened:15,0.5": "gain=softened,strength=15,push=0.5",
    "signed:15,0.5,control:0.6": "gain=scaled,strength=15,push=0.5,ema_power=0.6",
    "signed:15,0.7": "gain=scaled,strength=15,push=0.7",
    "signed:5,0.5": "gain=scaled,strength=5,push=0.5",
    "signed:40,0.5": "gain=scaled,strength=40,push=0.5",
    "push:0.5": "gain=uniform,strength=-0.5",
    "uniform·lr,0.5": lambda lr: f"gain=uniform,strength={125 * lr - 0.5:g}",
    "scaled:60": "gain=scaled,strength=60",
    "scaled:30,control:0.35": "gain=scaled,strength=30,ema_power=0.35",
    "scaled:60,control:0.35": "gain=scaled,strength=60,ema_power=0.35",
    "scaled:300": "gain=scaled,strength=300",
    "signed:300,0.5": "gain=scaled,strength=300,push=0.5",
}
"""Pull what has small gradients, push the rest."""


def signed(scale: Scale, powers: tuple[int, ...] = (-2, *RIGHT), **more: Any) -> Named:
    """All of `SIGNED`."""
    return _all(scale, SIGNED, powers, **more)


STRENGTHS = (15, 30, 60, 120, 240)


def short(scale: Scale, powers: tuple[int, ...] = ALL, **more: Any) -> Named:
    """The scaled pull toward a short average, and what it does to steady motion done to the step alone."""
    runs: Named = {}
    for r in STRENGTHS:
        spec = f"candidate:gain=scaled,strength={r},ema_power=0.2"
        runs |= grid(scale, f"scaled:{r},control:0.2", spec, powers, **more)
        runs |= grid(scale, f"softened:{r}", f"candidate:gain=softened,strength={r}", powers, **more)
        spec = f"candidate:gain=signal,strength={4 * r},ema_power=0.2"
        runs |= grid(scale, f"signal:{4 * r},control:0.2", spec, powers, **more)
        library = f"pace:gain=scaled,pullback_strength={r},ema_power=0.2"
        runs |= grid(scale, f"PACE:scaled,{r},control:0.2", library, powers, **more)
    return runs


def schedules(scale: Scale, powers: tuple[int, ...] = (0, 1, 2), **more: Any) -> Named:
    """The pull and the push with a learning rate that goes to 0 over the run."""
    tried: dict[str, Spec] = {
        "paper:0.003+cosine": "gain=paper,strength=3e-3",
        "signed:15,0.5+cosine": SIGNED["signed:15,0.5"],
    }
    return _all(scale, tried, powers, schedule="cosine", **more)


STORAGES = ("float32", "bfloat16", "int8")
KAPPAS = (0.3, 0.5, 0.7)


def storages(scale: Scale, **more: Any) -> Named:
    """PACE with its averages kept in several precisions. They pull, so an error of theirs comes back.

    Beside each stands the average that it returns, `power:κ` in the precision of the weights, of the same
    live weights. What the loss of `average` is above that one's is what storing loses; how much `power:κ`
    itself differs between storages is what the pull toward a rounded average does to training.
    """
    runs: Named = {}
    for storage in STORAGES:
        kept = f"average_dtype={storage},fused=True"  # the path that is fast in all of them, on a GPU
        for power in KAPPAS:
            # With one average, what pulls is what is returned.
            spec = f"pace:gain=paper,pullback_strength=3e-3,ema_power={power}"
            name, twin = f"PACE:paper,{storage},kappa:{power}", (f"power:{power}",)
            runs |= grid(scale, name, f"{spec},{kept}", (0,), averages=twin, **more)
        default = f"PACE:default,{storage}"
        runs |= grid(scale, default, f"pace:{kept}", (0,), averages=("power:0.7",), **more)
    return runs


def lean(scale: Scale, **more: Any) -> Named:
    """PACE without a first moment, and with an average that is moved at every tenth step."""
    spec, more = "pace:gain=paper,pullback_strength=3e-3,ema_power=0.5", {"averages": ("power:0.5",), **more}
    without = f"{spec},betas=(0.0,0.999),weight_decay=0.01"
    return grid(scale, "PACE:paper,no_momentum", without, (-2, -1, 0), recipe=None, **more) | grid(
        scale, "PACE:paper,every:10", f"{spec},update_every=10", (0,), **more
    )


Group = Callable[[Scale, int], Named]
GROUPS: dict[str, Group] = {
    "baselines": lambda scale, seed: plain(scale, seed=seed),
    "usual": lambda scale, seed: (
        plain(scale, "usual", (-2, *RIGHT), seed=seed)
        | paper(scale, (3e-3,), (0, 1, 2), recipe="usual", seed=seed)
    ),
    "paper": lambda scale, seed: paper(scale, (1e-3, 3e-3, 1e-2, 3e-2, 0.1), ALL, seed=seed),
    "gated": lambda scale, seed: gated(scale, seed=seed),
    "ablations": lambda scale, seed: ablations(scale, seed=seed),
    "rivals": lambda scale, seed: rivals(scale, seed=seed),
    "signed": lambda scale, seed: signed(scale, ALL, seed=seed),
    "short": lambda scale, seed: short(scale, seed=seed),
    "short-usual": lambda scale, seed: short(scale, seed=seed, recipe="usual"),
    "schedules": lambda scale, seed: schedules(scale, seed=seed),
    "signed-usual": lambda scale, seed: signed(scale, seed=seed, recipe="usual"),
    "hypotheses": lambda scale, seed: hypotheses(scale, seed=seed),
    "warmups": lambda scale, seed: warmups(scale, seed=seed),
    "storages": lambda scale, seed: storages(scale, seed=seed),
    "lean": lambda scale, seed: lean(scale, seed=seed),
    "decay": lambda scale, seed: decayed(
        plain(scale, seed=seed)
        | plain(scale, "usual", (-2, *RIGHT), seed=seed)
        | paper(scale, (3e-3,), seed=seed)
        | short(scale, seed=seed)
        | gated(scale, seed=seed)
    ),
}
