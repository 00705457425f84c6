"""Which runs each study has: methods tuned alike, over rates, strengths, batches and tasks. No torch.

A study is a function of a `Room`, what is trained and for how long, and gives `Trial`s: named runs. `basin`
depends on what `tuning` found, so it also takes results.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any, final

from paceline.experiments.config import ConfigError, Run, named_averages
from paceline.experiments.paper.lines import Result

DECAY = 0.2
"""The share of a run over which WSD goes to 0."""
SEED = 1
"""Settings are chosen by it."""
SEEDS = (2, 3)
"""Nothing is chosen by them: what is said of a chosen setting is the mean over these, and the first."""
MORE_SEEDS = (4, 5, 6)
"""Added where three had not settled it."""

ADAMW, FREE, PACE, DEFAULT = "AdamW", "Schedule-Free", "PACE", "PACE, default"
POWERS = (0.3, 0.5, 0.6, 0.7, 0.8)
"""κ of the averages beside every run: what AdamW returns with an EMA, and what PACE may return instead."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What is trained: settings of `Run` for each of the three tasks."""

    name: str
    pretraining: Mapping[str, Any]
    tuning: Mapping[str, Any]
    gpt2: Mapping[str, Any]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One run under its name, and what tables have to know of it."""

    name: str
    run: Run
    """If it goes on from another trial, its `fork` is NAME@STEP of that one."""
    method: str
    setting: str
    """What was tuned of the method, in words."""
    schedule: str
    lr: float
    seed: int
    batch: int = 1
    """Multiples of the usual batch, at the same number of tokens."""

    @property
    def views(self) -> tuple[str, ...]:
        """The weights that could be returned, by their names in the run's evaluations."""
        beside = tuple(view for view, _ in named_averages(self.run.averages))
        return ("live", *beside) if self.method == ADAMW else ("average", *beside)


# --- What is trained ------------------------------------------------------------------------------------

GPU = Room(
    name="gpu",
    pretraining={"model": "gpt:7m", "tokenizer": "bpe:4096", "length": 256, "batch_size": 64, "steps": 4000}
    | {
        "warmup": 400,
        "compile": True,
        "precision": "bfloat16",
        "held_out_samples": 768,
        "evaluate_every": 500,
    },
    tuning={"task": "sft", "model": "HuggingFaceTB/SmolLM2-135M-Instruct", "length": 1024, "batch_size": 16}
    | {"steps": 300, "warmup": 30, "precision": "bfloat16", "held_out_samples": 128, "evaluate_every": 150}
    | {"compile": True}
    | {"checkpoint_every": 300},  # each of 2 to 5 GB, of a run of two minutes
    gpt2={"model": "gpt2", "tokenizer": "gpt2", "length": 1024, "batch_size": 128, "micro_batch_size": 32}
    | {"steps": 1200, "warmup": 120, "compile": True, "precision": "bfloat16", "held_out_samples": 256}
    | {"evaluate_every": 200},
)
_TINY = {"length": 32, "batch_size": 4, "steps": 40, "warmup": 4, "held_out_samples": 8, "device": "cpu"}
_TINY |= {"evaluate_every": 10}
CPU = Room(
    name="cpu",
    pretraining={"model": "gpt:0.3m", "tokenizer": "bpe:512", **_TINY},
    tuning={"task": "sft", "model": "tiny-chat-model", **_TINY},
    gpt2={"model": "gpt:0.3m", "tokenizer": "bpe:512", **_TINY, "steps": 20},
)
ROOMS = {room.name: room for room in (GPU, CPU)}


def placed(room: Room, *, text: Mapping[str, Any], chat: Mapping[str, Any]) -> Room:
    """The same with data and models where they are: settings of `Run` for text and for conversations."""
    return replace(
        room,
        pretraining={**room.pretraining, **text},
        tuning={**room.tuning, **chat},
        gpt2={**room.gpt2, **text},
    )


# --- Methods and their settings: as many of each --------------------------------------------------------

Setting = tuple[str, str, str]
"""Its method, itself in words, and the optimizer of `Run`."""


def _adamw(decay: float, beta2: float) -> Setting:
    return (
        ADAMW,
        f"weight decay {decay:g}, β₂ {beta2:g}",
        f"adamw:betas=(0.9,{beta2:g}),weight_decay={decay:g}",
    )


def _free(beta1: float, beta2: float, decay: float) -> Setting:
    optimizer = f"schedule_free:betas=({beta1:g},{beta2:g}),weight_decay={decay:g}"
    return FREE, f"β {beta1:g}, {beta2:g}, weight decay {decay:g}", optimizer


def _pace(c: float, kappa: float, uf: int = 1, gap: str = "pre") -> Setting:
    more = ("" if uf == 1 else f", every {uf}") + ("" if gap == "pre" else f", {gap}")
    optimizer = f"pace:gain=paper,pullback_strength={c:g},ema_power={kappa:g},update_every={uf}"
    optimizer += "" if gap == "pre" else f",gap={gap}"
    return PACE, f"c {c:g}, κ {kappa:g}{more}", f"{optimizer},betas=(0.9,0.999),weight_decay=0.01"


_DEFAULT: Setting = (DEFAULT, "as it is", "pace:betas=(0.9,0.999),weight_decay=0.01")
_DOUBLE: Setting = (
    PACE,
    "the default's gain, strength 30",
    "pace:gain=scaled,pullback_strength=30,betas=(0.9,0.999),weight_decay=0.01",
)
PAPER = _pace(3e-3, 0.5)
PLAIN = _adamw(0.01, 0.999)
"""AdamW as the paper has it."""

_BETAS = ((0.9, 0.999), (0.95, 0.99), (0.98, 0.95))
SETTINGS: dict[str, tuple[Setting, ...]] = {
    ADAMW: tuple(_adamw(decay, beta2) for decay, beta2 in product((0.01, 0.1), (0.999, 0.99, 0.95))),
    FREE: tuple(_free(*betas, decay) for betas, decay in product(_BETAS, (0.05, 0.1))),
    PACE: tuple(_pace(c, kappa) for c, kappa in product((1e-3, 3e-3, 1e-2), (0.5, 0.7))),
}
"""Six of each, tried at the same two rates; the default has nothing to tune."""
FINE_SETTINGS: dict[str, tuple[Setting, ...]] = {
    ADAMW: tuple(_adamw(decay, beta2) for decay, beta2 in product((0.01, 0.1), (0.999, 0.95))),
    FREE: tuple(_free(*betas, 0.05) for betas in ((0.9, 0.999), (0.95, 0.99), (0.98, 0.95), (0.9, 0.95))),
    PACE: (_pace(3e-3, 0.5), _pace(3e-2, 0.5), _pace(1e-1, 0.3), _pace(1e-2, 0.7)),
}
"""Of fine-tuning, four of each."""


# --- Making trials --------------------------------------------------------------------------------------


def trial(
    prefix: str,
    settings: Mapping[str, Any],
    setting: Setting,
    lr: float,
    schedule: str = "constant",
    seed: int = SEED,
    *,
    batch: int = 1,
    steps: int | None = None,
) -> Trial:
    """One run. With WSD it goes on from the run at a constant rate, from where its decay begins."""
    method, words, optimizer = setting
    whole = settings["steps"] // batch
    steps = steps or whole
    named = [prefix, _slug(optimizer), f"lr{lr:g}", schedule, str(steps), f"s{seed}"]
    constant = "_".join([*named[:3], "constant", str(whole), named[-1]])
    run = Run(
        **{
            "checkpoint_every": max(1, whole // 2),
            **settings,
            "steps": steps,
            "batch_size": settings["batch_size"] * batch,
            # Of a larger batch the same share of the run, in fewer steps.
            "warmup": settings["warmup"] // batch,
            "evaluate_every": max(1, settings["evaluate_every"] // batch),
        },
        optimizer=optimizer,
        averages=tuple(f"power:{power:g}" for power in POWERS) if method != FREE else (),
        lr=lr,
        schedule=f"wsd:decay={DECAY}" if schedule == "wsd" else schedule,
        clip_norm=None if method == FREE else 1.0,  # its authors do not clip
        seed=seed,
        keep=1,
        telemetry_every=max(1, whole // 20) if method in (PACE, DEFAULT) else None,
        fork=f"{constant}@{steps - max(round(DECAY * steps), 1)}" if schedule == "wsd" else None,
    )
    return Trial(
        name="_".join(named), run=run, method=method, setting=words, schedule=schedule, lr=lr, seed=seed,
        batch=batch,
    )  # fmt: skip


def _slug(optimizer: str) -> str:
    """A part of a folder's name.

    >>> _slug("adamw:betas=(0.9,0.999),weight_decay=0.01")
    'adamw-b0.9-0.999-w0.01'
    """
    short = {
        "betas": "b",
        "weight_decay": "w",
        "pullback_strength": "c",
        "ema_power": "k",
        "update_every": "u",
    }
    name, _, rest = optimizer.partition(":")
    for long, letter in short.items():
        rest = rest.replace(long + "=", letter)
    words = (
        rest.replace("gain=", "")
        .replace("gap=", "")
        .replace("),", "-")
        .translate(str.maketrans("", "", "()"))
    )
    return "-".join([name, *words.replace(",", "-").split()])


def together(trials: Iterable[Trial], later: Iterable[Trial] = ()) -> dict[str, Trial]:
    """By name, each after the one that it goes on from, which keeps the checkpoints that branches need; also
    those of `later`, which are not among them."""
    found = {one.name: one for one in trials}
    steps: dict[str, set[int]] = {}
    for one in (*found.values(), *later):
        if one.run.after is not None:
            steps.setdefault(one.run.after[0], set()).add(one.run.after[1])
    for one in list(found.values()):
        if one.run.after is not None and one.run.after[0] not in found:
            raise ConfigError(f"{one.name} goes on from {one.run.after[0]}, which is not in its study")
        if one.name in steps:
            kept = replace(one.run, keep_steps=tuple(sorted(steps[one.name])))
            found[one.name] = replace(one, run=kept)
    # A branch at once after its parent: if time runs out, no checkpoint was made for nothing.
    after: dict[str, list[str]] = {}
    for one in found.values():
        if one.run.after is not None:
            after.setdefault(one.run.after[0], []).append(one.name)
    firsts = [name for name, one in found.items() if one.run.after is None]
    return {name: found[name] for first in firsts for name in (first, *after.get(first, ()))}


def branches(trials: Iterable[Trial], room: Room) -> Iterator[Trial]:
    """All of pretraining that may ever go on from these: with WSD at their rate, at the ends of `budgets`.

    Checkpoints of larger models would fill a disk: whoever goes on from one of them has it trained again.
    """
    yield from budgets(room)
    for one in trials:
        small = one.name.startswith("gpt_") and one.batch == 1
        if small and one.schedule == "constant" and one.method != FREE:
            setting = one.method, one.setting, one.run.optimizer
            yield trial("gpt", room.pretraining, setting, one.lr, "wsd", one.seed)


# --- Studies --------------------------------------------------------------------------------------------

TUNED_RATES = (2e-3, 4e-3)
RATES = (5e-4, 1e-3, 2e-3, 3e-3, 4e-3, 6e-3, 9e-3, 3e-2)
"""From a sixth of the best rate of AdamW, which turned out to be 3e-3, to ten times it."""
SEEDED_RATES = (2e-3, 3e-3, 4e-3, 6e-3, 9e-3, 3e-2)
UNSETTLED_RATES = (2e-3, 3e-3, 6e-3, 9e-3)
"""The best rates of the methods, and two and three times AdamW's."""
FINE_RATES = (1e-4, 3e-4, 9e-4, 3e-3, 5e-3)
FINE_SEEDED_RATES = (3e-4, 9e-4, 3e-3)
"""What turned out best in shorter runs, three times that, and ten times."""
FINE_TUNED_RATES = FINE_SEEDED_RATES[:2]
"""The highest is no setting's best."""
STRENGTHS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
SWEPT_POWERS = (0.3, 0.5, 0.7)
SWEPT_RATES = (2e-3, 6e-3)
SHORTER_RATES = UNSETTLED_RATES
PERIODS = (1, 5, 10)
BATCHES = (4, 16)
BATCH_RATES = (1e-3, 2e-3, 4e-3, 8e-3)
GPT2_RATE = 2e-3  # the paper's


def tuning(room: Room) -> Iterator[Trial]:
    """Pretraining: every setting of every method at two rates."""
    for settings in SETTINGS.values():
        for setting, lr in product(settings, TUNED_RATES):
            yield trial("gpt", room.pretraining, setting, lr)


def basin(room: Room, results: Mapping[str, Result]) -> Iterator[Trial]:
    """Pretraining: the best setting of each method at all rates, under all schedules, and with more seeds."""
    settings = chosen(tuning(room), SETTINGS, results)
    for setting in settings:
        yield from _basin("gpt", room.pretraining, setting, RATES, SEEDED_RATES)
        if setting[0] != FREE:
            yield from (trial("gpt", room.pretraining, setting, lr, "cosine") for lr in RATES[1:5])
    places = [("constant", lr) for lr in UNSETTLED_RATES] + [("wsd", lr) for lr in UNSETTLED_RATES[:2]]
    for seed, (schedule, lr), setting in product(MORE_SEEDS, places, settings):
        if setting[0] != FREE:
            yield trial("gpt", room.pretraining, setting, lr, schedule, seed)


def _basin(
    prefix: str,
    settings: Mapping[str, Any],
    setting: Setting,
    rates: tuple[float, ...],
    seeded: tuple[float, ...],
) -> Iterator[Trial]:
    schedules = ("constant",) if setting[0] == FREE else ("constant", "wsd")
    for lr, schedule in product(rates, schedules):
        yield trial(prefix, settings, setting, lr, schedule)
    for lr, schedule, seed in product(seeded, schedules, SEEDS):
        yield trial(prefix, settings, setting, lr, schedule, seed)


def strength(room: Room) -> Iterator[Trial]:
    """Pretraining: c, κ, the gap that is pulled by, and how often averages are updated; at the best rate of
    AdamW and three times it."""
    pulls = [_pace(c, 0.5) for c in STRENGTHS]
    pulls += [_pace(c, kappa) for c, kappa in product(STRENGTHS[1::2], SWEPT_POWERS) if kappa != 0.5]
    pulls += [_pace(c, 0.5, gap="lookahead") for c in STRENGTHS[1::2]]
    pulls += [_pace(3e-3, 0.5, uf) for uf in PERIODS[1:]]
    for setting, lr in product(pulls, SWEPT_RATES):
        yield trial("gpt", room.pretraining, setting, lr)
    yield from (trial("gpt", room.pretraining, PLAIN, lr) for lr in SWEPT_RATES)


def shorter(room: Room) -> Iterator[Trial]:
    """Pretraining: what seed 1 of `strength` suggests, with seeds that did not choose it. A harder pull to a
    shorter average, with a longer one returned; the default, also pulled twice as hard; AdamW beside them."""
    for setting, lr, seed in product(
        (PLAIN, _pace(1e-2, 0.3), _DEFAULT, _DOUBLE), SHORTER_RATES, (SEED, *SEEDS)
    ):
        yield trial("gpt", room.pretraining, setting, lr, seed=seed)
    for setting, lr, seed in product((PLAIN, _pace(1e-2, 0.3), _DEFAULT), SHORTER_RATES, MORE_SEEDS):
        yield trial("gpt", room.pretraining, setting, lr, seed=seed)


def budgets(room: Room) -> Iterator[Trial]:
    """Pretraining: decayed branches that end at a half, three quarters and all of a constant run."""
    lr, whole = SWEPT_RATES[0], room.pretraining["steps"]
    for setting in (PLAIN, PAPER, _DEFAULT):
        yield trial("gpt", room.pretraining, setting, lr)
        for steps in (whole // 2, whole * 3 // 4, whole):
            yield trial("gpt", room.pretraining, setting, lr, "wsd", steps=steps)


def batch(room: Room) -> Iterator[Trial]:
    """Pretraining on as many tokens with 4 and 16 times the batch."""
    pulls = (_pace(1e-3, 0.5), PAPER, _pace(1e-2, 0.5), _DEFAULT)
    for factor, setting, lr in product(BATCHES, (PLAIN, *pulls), BATCH_RATES):
        yield trial("gpt", room.pretraining, setting, lr, batch=factor)
    # AdamW's best rate with four times the batch, and twice it.
    for setting, lr, seed in product((PLAIN, pulls[0], _DEFAULT), BATCH_RATES[2:], SEEDS):
        yield trial("gpt", room.pretraining, setting, lr, seed=seed, batch=BATCHES[0])


def harder(room: Room) -> Iterator[Trial]:
    """Pretraining: the default pulled twice as hard, where `shorter` leaves it out: at ten times AdamW's best
    rate; and with four times the batch, at AdamW's best rate there and twice it."""
    for setting, seed in product((PLAIN, _DEFAULT, _DOUBLE), (SEED, *SEEDS)):
        yield trial("gpt", room.pretraining, setting, RATES[-1], seed=seed)
        for lr in BATCH_RATES[2:]:
            yield trial("gpt", room.pretraining, setting, lr, seed=seed, batch=BATCHES[0])


def fine_tuning(room: Room) -> Iterator[Trial]:
    """Every setting of every method at two rates."""
    for settings in (*FINE_SETTINGS.values(), (_DEFAULT,)):
        for setting, lr in product(settings, FINE_TUNED_RATES):
            yield trial("sft", room.tuning, setting, lr)


def fine_tuning_basin(room: Room, results: Mapping[str, Result]) -> Iterator[Trial]:
    """The best setting of each method at all rates, under all schedules, and with more seeds; of all methods
    the first seed before the others, so that what is done can be compared."""
    settings = chosen(fine_tuning(room), FINE_SETTINGS, results)
    runs = (_basin("sft", room.tuning, setting, FINE_RATES, FINE_SEEDED_RATES) for setting in settings)
    yield from sorted(chain.from_iterable(runs), key=lambda one: one.seed)
    for setting, lr in product(settings, FINE_SEEDED_RATES):
        if setting[0] != FREE:
            yield trial("sft", room.tuning, setting, lr, "cosine")


def fine_tuning_harder(room: Room, results: Mapping[str, Result]) -> Iterator[Trial]:
    """Fine-tuning with the default pulled twice as hard, which does well in `shorter`; AdamW beside it."""
    adamw = chosen(fine_tuning(room), FINE_SETTINGS, results)[0]
    for setting, lr, seed in product((adamw, _DEFAULT, _DOUBLE), FINE_SEEDED_RATES, (SEED, *SEEDS)):
        yield trial("sft", room.tuning, setting, lr, seed=seed)


def gpt2(room: Room) -> Iterator[Trial]:
    """GPT-2 124M at the paper's learning rate, κ and c; of the second seed decayed branches too."""
    schedules = (("constant", SEED), ("constant", SEEDS[0]), ("wsd", SEEDS[0]))
    for setting, (schedule, seed) in product((PLAIN, PAPER, _DEFAULT), schedules):
        yield trial("gpt2", room.gpt2, setting, GPT2_RATE, schedule, seed)


Study = Callable[[Room, Mapping[str, Result]], Iterator[Trial]]


def _without(study: Callable[[Room], Iterator[Trial]]) -> Study:
    return lambda room, results: study(room)


STUDIES: dict[str, Study] = {
    "tuning": _without(tuning),
    "basin": basin,
    "strength": _without(strength),
    "shorter": _without(shorter),
    "budgets": _without(budgets),
    "batch": _without(batch),
    "harder": _without(harder),
    "fine-tuning": _without(fine_tuning),
    "fine-tuning-basin": fine_tuning_basin,
    "fine-tuning-harder": fine_tuning_harder,
    "gpt2": _without(gpt2),
}


# --- What was chosen ------------------------------------------------------------------------------------


def chosen(
    trials: Iterable[Trial], settings: Mapping[str, tuple[Setting, ...]], results: Mapping[str, Result]
) -> list[Setting]:
    """Of each method the setting with the least loss at any rate, of any weights that it could return; and
    the default."""
    tried = [one for one in trials if one.seed == SEED]
    missing = [one.name for one in tried if one.name not in results]
    if missing:
        raise ConfigError(
            f"settings are chosen from runs of which {len(missing)} are not done, e.g. {missing[0]}"
        )
    best = []
    for method, own in settings.items():
        least = min(
            (loss_of(one, results) for one in tried if one.method == method), key=lambda found: found[0]
        )
        best.append(next(setting for setting in own if setting[1] == least[2].setting))
    return [*best, _DEFAULT]


def loss_of(one: Trial, results: Mapping[str, Result], view: str | None = None) -> tuple[float, str, Trial]:
    """The held-out loss at the end, and of which weights; of the best, if none are named."""
    result = results[one.name]
    if result.diverged or not result.evaluations:
        return float("inf"), view or "", one
    losses = result.evaluations[-1][1]
    known = {
        name: loss for name in ((view,) if view else one.views) if (loss := losses.get(name)) is not None
    }
    name = min(known, key=known.__getitem__, default="")
    return known.get(name, float("inf")), name, one
