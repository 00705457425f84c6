"""The description of a run: typed and frozen, from a TOML file, from flags, or from both.

Names are the same everywhere: `batch_size = 16` in a file is `--batch-size 16` on the command line.
Nothing here imports torch, so a mistake is answered immediately.
"""

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from paceline.runs import names
from paceline.runs.terminal import ConfigError as ConfigError
from paceline.runs.terminal import nearest as nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training run. All that its result depends on is here, and in the data's fingerprint."""

    task: Annotated[
        Literal["pretrain", "sft"], "Train a new model on text, or fine-tune one on conversations."
    ] = "pretrain"
    model: Annotated[
        str, "gpt:0.3m … gpt:50m, gpt2 (the 124M), a name on the Hugging Face hub, or a folder."
    ] = "gpt:1m"
    data: Annotated[
        tuple[str, ...],
        "What to train on: python (the text inside this Python), files (.txt, .md, .jsonl, .parquet, also "
        ".gz .xz .zst), folders, or a folder made by `paceline data`.",
    ] = ("python",)
    held_out: Annotated[tuple[str, ...], "Data to evaluate on; without it, one document in twenty."] = ()
    held_out_samples: Annotated[int | None, "Evaluate on at most that many samples; none: all."] = None
    tokenizer: Annotated[
        str, "bpe:2048 (trained on the data), gpt2, a name or a folder; auto: the model's own, else bpe:2048."
    ] = "auto"
    chat_template: Annotated[
        str | None, "For sft, instead of the model's own chat template: chatml, or a file (Jinja)."
    ] = None
    length: Annotated[int, "Tokens of a sample."] = 128
    batch_size: Annotated[int, "Samples a step, on all ranks together."] = 16
    micro_batch_size: Annotated[
        int | None, "Samples in one pass through the model, for less memory; none: all of a rank's share."
    ] = None
    steps: Annotated[int | None, "How long to train; or one of the next three."] = None
    tokens: Annotated[int | None, "Tokens to train on: 10M is ten million."] = None
    epochs: Annotated[float | None, "Passes over the data."] = None
    chinchilla: Annotated[float | None, "Multiples of twenty tokens per parameter."] = None
    method: Annotated[
        str,
        "BASE[+CONTROL][:setting=value,…][/AVERAGE][@SCHEDULE]: pace (Algorithm 1), pace+push (what we "
        "recommend), adamw, ademamix, lookahead, gpa, ema_nesterov, schedule_free, sgd. E.g. adamw/ema, "
        "adamw@wsd, adamw+push, pace:c=1e-3.",
    ] = "pace"
    lr: Annotated[float, "The learning rate, after the warm-up."] = 1e-3
    schedule: Annotated[str, "constant, inverse_sqrt, cosine, linear, or wsd:decay=0.2."] = "constant"
    warmup: Annotated[int, "Steps of linear warm-up; at most a tenth of the horizon."] = 50
    horizon: Annotated[
        int | None,
        "Steps of the run that this one is a branch of. Warm-up, and some settings of methods, are shares of "
        "them; none: the run's own.",
    ] = None
    averages: Annotated[
        tuple[str, ...],
        "Averages to keep next to the optimizer, e.g. ema, power:0.7, half_life:0.1, bema.",
    ] = ()
    clip_norm: Annotated[
        float | None,
        "Limit of the gradient's norm; none: no limit, as for Schedule-Free without this setting.",
    ] = 1.0
    precision: Annotated[
        Literal["auto", "float32", "bfloat16"], "Of matrix products; auto: bfloat16 on a GPU."
    ] = "auto"
    device: Annotated[str, "cpu, cuda, cuda:1; auto: a GPU if there is one."] = "auto"
    compile: Annotated[bool, "torch.compile: a minute or two at first, faster from then on."] = False
    parallel: Annotated[
        Literal["ddp", "fsdp2"], "On several ranks, by torchrun: the whole model on each, or shards of it."
    ] = "ddp"
    activation_checkpointing: Annotated[bool, "Compute activations twice instead of keeping them."] = False
    dropout: Annotated[float, "Dropout of a new model."] = 0.0
    seed: Annotated[int, "The seed of initial weights, order of samples, and dropout."] = 42
    evaluate_every: Annotated[int | None, "Steps between evaluations; none: ten in the run."] = None
    checkpoint_every: Annotated[int | None, "Steps between checkpoints; none: as evaluations."] = None
    keep: Annotated[int, "How many of the newest checkpoints to keep."] = 2
    keep_steps: Annotated[
        tuple[int, ...], "Write and keep a checkpoint after each of these steps, for other runs to fork from."
    ] = ()
    skip_nonfinite: Annotated[int, "Steps in a row that may be skipped as not finite."] = 0
    telemetry_every: Annotated[int | None, "Steps between readings of the pull; none: never."] = None
    fork: Annotated[
        str | None,
        "A checkpoint of another run to start from: its folder, or RUN@STEP; RUN is a folder, or the name of "
        "one next to this run's. Weights, optimizer and step come from there; the schedule is this run's.",
    ] = None

    def __post_init__(self) -> None:
        name = names.parse(self.method)
        if "@" in self.method and self.schedule not in ("constant", name.schedule):
            raise ConfigError(f"schedule is {self.schedule!r}, and method {self.method!r} has another one")
        schedule = self.schedule if name.schedule == "constant" else name.schedule
        parts = {
            "method": str(replace(name, averages=(), schedule="constant")),
            "averages": (*name.averages, *self.averages),
        }
        for field, value in {**parts, "schedule": str(names.schedule_of(schedule))}.items():
            object.__setattr__(self, field, value)  # two ways to write the same run are one run
        _check(self)

    @property
    def name(self) -> names.Name:
        """The name of its method, with its schedule and all averages that are kept next to it."""
        return replace(names.parse(self.method), averages=self.averages, schedule=self.schedule)

    @property
    def after(self) -> tuple[str, int] | None:
        """The run that this one continues and after which step, if its fork is RUN@STEP.

        >>> Run(steps=9, fork="runs/first@6").after, Run(steps=9, fork="runs/first").after
        (('runs/first', 6), None)
        """
        name, _, step = (self.fork or "").rpartition("@")
        return (name, int(step)) if name and step.isdigit() else None


# Settings that may differ when a run is resumed: they do not change what is computed in what was done.
MAY_CHANGE = frozenset(
    {"evaluate_every", "checkpoint_every", "keep", "keep_steps", "skip_nonfinite"}
    | {"telemetry_every", "device", "parallel"}
)

# Settings that make no other run: how often to look and to save, and where. Leaving out steps does change it.
NO_OTHER_RUN = MAY_CHANGE - {"skip_nonfinite"}


def mark_of(run: Run) -> str:
    """Return eight digits that differ where runs compute something else.

    >>> mark_of(Run(steps=5)) == mark_of(Run(steps=5, keep=7, device="cpu"))
    True
    >>> mark_of(Run(steps=5)) == mark_of(Run(steps=5, skip_nonfinite=3))
    False
    """
    decisive = {name: value for name, value in as_mapping(run).items() if name not in NO_OTHER_RUN}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:8]


def name_of(run: Run) -> str:
    """Return the name of a run's folder: readable, and different where runs compute something else."""
    words = re.sub(r"[^a-z0-9.]+", "-", f"{run.method} {run.schedule}".lower()).strip("-")
    return f"{words[:40]}-lr-{run.lr:g}-seed-{run.seed}-{mark_of(run)}"


_AT_LEAST_1 = (
    "length", "batch_size", "micro_batch_size", "held_out_samples", "evaluate_every", "checkpoint_every",
    "telemetry_every", "keep", "horizon",
)  # fmt: skip


def _check(run: Run) -> None:
    """Raise ConfigError for a value that is wrong in any case."""
    for name in _AT_LEAST_1:
        value = getattr(run, name)
        _require(value is None or value >= 1, name, value, "at least 1")
    for name in ("warmup", "skip_nonfinite", "seed"):
        _require(0 <= getattr(run, name) < 2**63, name, getattr(run, name), "0 or more")
    _require(all(step >= 1 for step in run.keep_steps), "keep_steps", run.keep_steps, "each at least 1")
    _require(math.isfinite(run.lr) and run.lr >= 0, "lr", run.lr, "0 or more, and finite")
    _require(0 <= run.dropout < 1, "dropout", run.dropout, "at least 0 and below 1")
    limit = run.clip_norm
    _require(limit is None or 0 < limit < math.inf, "clip_norm", limit, "above 0 and finite, or none")
    budgets = {name: getattr(run, name) for name in ("steps", "tokens", "epochs", "chinchilla")}
    given = [name for name, value in budgets.items() if value is not None]
    for name in given:
        _require(0 < budgets[name] < math.inf, name, budgets[name], "above 0, and finite")
    if len(given) != 1:
        raise ConfigError(
            f"give exactly one of steps, tokens, epochs, chinchilla; {' and '.join(given) or 'none'} given"
        )
    _require(bool(run.data) and all(run.data), "data", run.data, "at least one file, folder or name")
    _require(all(run.held_out), "held_out", run.held_out, "files, folders or names")
    if run.task == "sft" and run.model.startswith("gpt:"):
        raise ConfigError(
            f"model {run.model!r} has no chat template to fine-tune with; give a pretrained model"
        )
    names.parse(str(run.name))  # whether its parts go together


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {value!r}; allowed: {allowed}")


# --- What it returns --------------------------------------------------------------------------------


def returned_of(views: Iterable[str]) -> str:
    """Return which of the weights that a run evaluates it returns: the optimizer's average, else another.

    >>> returned_of(["live", "power_0_7"]), returned_of(["live"])
    ('power_0_7', 'live')
    """
    names = list(views)
    return "average" if "average" in names else names[min(1, len(names) - 1)]


# --- From files and flags ---------------------------------------------------------------------------


@cache
def documentation() -> dict[str, str]:
    """Return what each setting of a run means."""
    return {name: kind.__metadata__[0] for name, kind in get_type_hints(Run, include_extras=True).items()}


def read_toml(path: Path) -> dict[str, Any]:
    """Return the settings in a file, not checked yet."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {' '.join(str(error).split())}") from None


def make(settings: Mapping[str, Any]) -> Run:
    """Return a run from settings by name: of the right type, or text as on a command line.

    >>> make({"steps": "1k", "lr": "3e-4"}).steps
    1000
    >>> make({"stepz": 5})
    Traceback (most recent call last):
    paceline.runs.terminal.ConfigError: unknown setting 'stepz' (did you mean steps?)
    """
    types = get_type_hints(Run)
    for name in settings:
        if name not in types:
            raise ConfigError(f"unknown setting {str(name)[:80]!r}{nearest(str(name), list(types))}")
    made = {name: _convert(name, value, types[name]) for name, value in settings.items()}
    method = made.get("method", Run.__dataclass_fields__["method"].default)
    parsed = names.parse(method)
    # Run itself cannot tell a constant schedule that is asked for from its default.
    if "@" in method and made.get("schedule", parsed.schedule) == "constant" != parsed.schedule:
        raise ConfigError(f"schedule is 'constant', and method {method!r} has another one")
    return Run(**{**parsed.known.run, **made})


def as_mapping(run: Run) -> dict[str, Any]:
    """Return the settings as plain values, for records and checkpoints."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(run).items()}


@cache
def kind_of(name: str) -> Any:
    """Return the type of a setting, without None."""
    kind = get_type_hints(Run)[name]
    if isinstance(kind, UnionType):
        return next(part for part in get_args(kind) if part is not NoneType)
    return kind


def _convert(name: str, value: Any, kind: Any) -> Any:
    """Return a value of a setting's type, from one of TOML or a text; raise ConfigError if there is none."""
    if isinstance(kind, UnionType) and (value is None or value == "none"):
        return None
    kind, shown = kind_of(name), str(value)[:80]
    if get_origin(kind) is Literal:
        if value in (choices := get_args(kind)):
            return value
        raise ConfigError(f"{name} is {shown!r}{nearest(shown, choices)}; allowed: {', '.join(choices)}")
    is_many = get_origin(kind) is tuple
    convert, allowed = _KINDS[get_args(kind)[0] if is_many else kind]
    items = value if is_many and isinstance(value, list | tuple) else [value]
    made = tuple(convert(item) for item in items)
    if None in made:
        raise ConfigError(f"{name} is {shown!r}; allowed: {'a list, each ' if is_many else ''}{allowed}")
    return made if is_many else made[0]


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value).lower())


def _text(value: Any) -> str | None:
    """Return a text that a file can have as its name and that can be written as UTF-8; else None."""
    return value if isinstance(value, str) and re.fullmatch(r"[^\0\ud800-\udfff]+", value) else None


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def _count(value: Any) -> int | None:
    """Return a whole number, None if it is none; a text may end in k, M, B or T."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        scale = _SUFFIXES.get(value[-1:].lower(), 1)
        try:  # exactly: 8.2 · 10⁶ is no whole number in floating point
            number = Decimal(value[:-1] if scale > 1 else value) * scale
            value = int(number) if abs(number) < 2**63 and number == int(number) else None
        except ArithmeticError:
            return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and abs(value) < 2**63 else None


_KINDS: dict[type, tuple[Callable[[Any], Any], str]] = {
    bool: (_flag, "true or false"),
    int: (_count, "a whole number"),
    float: (_number, "a number"),
    str: (_text, "a text in UTF-8"),
}
"""What makes a value of each type, or None, and what is allowed."""
