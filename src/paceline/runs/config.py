"""What a run is: one typed, frozen description, from a TOML file, from flags, or from both.

Names are the same everywhere: `batch_size = 16` in a file is `--batch-size 16` on the command line.
Nothing here imports torch, so a mistake is answered at once.
"""

import ast
import difflib
import hashlib
import inspect
import json
import math
import re
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

SCHEDULES = ("constant", "inverse_sqrt", "cosine", "wsd")


class ConfigError(ValueError):
    """A description that cannot be run; the message is one line for its author."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training run. All that its result depends on is here, and in the data's fingerprint."""

    task: Literal["pretrain", "sft"] = "pretrain"
    """Train a new model on text, or fine-tune a pretrained one on conversations."""
    model: str = "gpt:1m"
    """gpt:0.3m … gpt:50m, gpt2 (the 124M), a name on the Hugging Face hub, a folder, or a .gguf file."""
    data: tuple[str, ...] = ("python",)
    """What to train on: python (the text inside this Python), files (.txt, .md, .jsonl, .parquet, also
    .gz .xz .zst), folders, hf:NAME (a dataset of the hub), or a folder made by `paceline data`."""
    held_out: tuple[str, ...] = ()
    """What to evaluate on; empty: one document in twenty is set aside."""
    held_out_samples: int | None = None
    """At most that many samples of it; none: all."""
    tokenizer: str = "auto"
    """bpe:2048 (trained on the data), gpt2, a name or a folder; auto: the model's own, gpt2 for gpt2, else
    bpe:2048."""
    chat_template: str | None = None
    """For sft of a model that has no chat template of its own, or another one: chatml, or a file (Jinja)."""
    length: int = 128
    """Tokens of a sample."""
    batch_size: int = 16
    """Samples a step, on all ranks together."""
    micro_batch_size: int | None = None
    """Samples at once through the model, for less memory; none: all of the step, or of a rank's share."""
    steps: int | None = None
    """How long to train; or one of the next three."""
    tokens: int | None = None
    """Tokens to train on: 10M is ten million."""
    epochs: float | None = None
    """Passes over the data."""
    chinchilla: float | None = None
    """Multiples of twenty tokens per parameter."""
    optimizer: str = "pace"
    """NAME or NAME:setting=value,…: pace (Algorithm 1), push (what we recommend), adamw, ademamix, lookahead,
    gpa, ema_nesterov, schedule_free, schedule_free_plus, sgd. E.g. pace:c=1e-3 or adamw:control=push"""
    lr: float = 1e-3
    """The learning rate, after the warm-up."""
    schedule: str = "constant"
    """constant, inverse_sqrt, cosine, wsd or wsd:decay=0.2."""
    warmup: int = 50
    """Steps of linear warm-up; at most a tenth of the run."""
    averages: tuple[str, ...] = ()
    """Averages to keep beside, e.g. power:0.7, long=half_life:0.1, decay:0.999, polynomial:8, bema:0.5; or
    part of one, the rest live: blend:0.5,half_life,0.1."""
    clip_norm: float | None = 1.0
    """Limit of the gradient's norm; none: no limit."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of matrix products; auto: bfloat16 on a GPU, float32 elsewhere."""
    device: str = "auto"
    """cpu, cuda, cuda:1; auto: a GPU if there is one."""
    compile: bool = False
    """torch.compile: a minute or two at first, faster from then on."""
    parallel: Literal["ddp", "fsdp2"] = "ddp"
    """On several ranks, started by torchrun: the whole model on each, or all of it in shards."""
    shards: int | None = None
    """With fsdp2, how many ranks share one copy of the weights; none: all of them share one."""
    activation_checkpointing: bool = False
    """Compute activations twice instead of keeping them."""
    dropout: float = 0.0
    """Of a new model."""
    seed: int = 42
    """Of initial weights, order of samples, and dropout."""
    evaluate_every: int | None = None
    """Steps between evaluations; none: ten in the run."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; none: as often as evaluations."""
    keep: int = 2
    """How many of the newest checkpoints to keep, beside the best one."""
    keep_steps: tuple[int, ...] = ()
    """Write a checkpoint after each of these steps too, and keep it: for other runs to fork from."""
    skip_nonfinite: int = 0
    """How many steps in a row may be left out because loss or gradient is not finite."""
    workers: int = 0
    """Processes that read data ahead."""
    telemetry_every: int | None = None
    """Steps between readings of the pull (`paceline.pull_statistics`); none: never."""
    fork: str | None = None
    """A checkpoint of another run to start from: its folder, or RUN@STEP; RUN is a folder, or the name of one
    beside this run's. Weights, optimizer and step come from there; the schedule is this run's."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def after(self) -> tuple[str, int] | None:
        """The run that this one goes on from and after which step, if its fork is RUN@STEP.

        >>> Run(steps=9, fork="runs/first@6").after, Run(steps=9, fork="runs/first").after
        (('runs/first', 6), None)
        """
        name, _, step = (self.fork or "").rpartition("@")
        return (name, int(step)) if name and step.isdigit() else None


# Settings that may differ when a run goes on: they do not change what is computed in what was done.
MAY_CHANGE = frozenset(
    {"evaluate_every", "checkpoint_every", "keep", "keep_steps", "workers", "skip_nonfinite"}
    | {"telemetry_every", "device", "parallel", "shards"}
)

# Settings that make no other run: how often to look and to save, and where. Leaving out steps does change it.
NO_OTHER_RUN = MAY_CHANGE - {"skip_nonfinite"}


def mark_of(run: Run) -> str:
    """Eight digits that differ where runs compute something else.

    >>> mark_of(Run(steps=5)) == mark_of(Run(steps=5, keep=7, device="cpu"))
    True
    >>> mark_of(Run(steps=5)) == mark_of(Run(steps=5, skip_nonfinite=3))
    False
    """
    decisive = {name: value for name, value in as_mapping(run).items() if name not in NO_OTHER_RUN}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:8]


def name_of(run: Run) -> str:
    """The folder of a run among others: readable, and another for every run that computes something else."""
    words = re.sub(r"[^a-z0-9.]+", "-", f"{run.optimizer} {run.schedule}".lower()).strip("-")
    return f"{words[:40]}-lr-{run.lr:g}-seed-{run.seed}-{mark_of(run)}"


def _check(run: Run) -> None:
    """What can be said of each value without building anything."""
    for name in ("length", "batch_size", "keep"):
        _require(getattr(run, name) >= 1, name, getattr(run, name), "at least 1")
    for name in (
        "micro_batch_size",
        "held_out_samples",
        "evaluate_every",
        "checkpoint_every",
        "telemetry_every",
        "shards",
    ):
        value = getattr(run, name)
        _require(value is None or value >= 1, name, value, "at least 1")
    for name in ("warmup", "workers", "skip_nonfinite", "seed"):
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
    if run.shards is not None and run.parallel != "fsdp2":
        raise ConfigError(
            f"shards is {run.shards}; it goes with parallel fsdp2, and here it is {run.parallel}"
        )
    if run.task == "sft" and run.model.startswith("gpt:"):
        raise ConfigError(
            f"model {run.model!r} has no chat template to fine-tune with; give a pretrained model"
        )
    check_spec("schedule", run.schedule, SCHEDULES)
    for average in run.averages:
        check_spec("averages", average.partition("=")[2] if _is_named(average) else average)


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {value!r}; allowed: {allowed}")


# --- NAME:setting=value,… ---------------------------------------------------------------------------


def parse_spec(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """A name with settings, in order or by name.

    >>> parse_spec("pace:power=0.3,betas=(0.9, 0.95)")
    ('pace', [], {'power': 0.3, 'betas': (0.9, 0.95)})
    >>> parse_spec("power:0.7")
    ('power', [0.7], {})
    """
    name, _, rest = text.partition(":")
    try:
        call = ast.parse(f"_({rest})", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError
        positional = [_literal(value) for value in call.args]
        named = {item.arg: _literal(item.value) for item in call.keywords if item.arg}
        if len(named) < len(call.keywords):  # one of them twice, or **
            raise ValueError
        return name, positional, named
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise ConfigError(f"cannot read {text[:80]!r}; write NAME:setting=value,setting=value") from None


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):  # a word needs no quotes
        return {"inf": math.inf, "none": None, "true": True, "false": False}.get(node.id.lower(), node.id)
    return ast.literal_eval(node)


def check_spec(what: str, text: str, names: tuple[str, ...] = ()) -> None:
    """Raise ConfigError if a spec cannot be read, or has none of these names."""
    name = parse_spec(text)[0]
    if names and name not in names:
        raise ConfigError(f"{what} {name!r} is unknown{nearest(name, names)}; there are: {', '.join(names)}")


def nearest(name: str, names: Iterator[str] | tuple[str, ...] | list[str]) -> str:
    """What may have been meant, for the end of a message.

    >>> nearest("batchsize", ["batch_size", "steps"])
    ' (did you mean batch_size?)'
    """
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def named_averages(averages: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Name and spec of each average; without a name of its own, one is made of the spec."""
    for text in averages:
        if _is_named(text):
            name, _, spec = text.partition("=")
            yield name.strip(), spec.strip()
        else:
            yield "_".join("".join(c if c.isalnum() else " " for c in text).split()), text


def returned_of(views: Iterable[str]) -> str:
    """Which of the weights that a run evaluates it returns: the optimizer's average, else one beside it.

    >>> returned_of(["live", "power_0_7"]), returned_of(["live"])
    ('power_0_7', 'live')
    """
    names = list(views)
    return "average" if "average" in names else names[min(1, len(names) - 1)]


def _is_named(text: str) -> bool:
    """`long=power:0.7` has a name; `decay:0.99,start=10` has not."""
    return "=" in text and ":" not in text.partition("=")[0]


# --- From files and flags ---------------------------------------------------------------------------


@cache
def documentation() -> dict[str, str]:
    """The text under each field of `Run`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(Run))).body[0]
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for item, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            texts[item.target.id] = " ".join(str(after.value.value).split())
    return texts


def read_toml(path: Path) -> dict[str, Any]:
    """The settings in a file, not checked yet."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {' '.join(str(error).split())}") from None


def make(settings: Mapping[str, Any]) -> Run:
    """A run from settings by name: of the right type, or as text as on a command line.

    >>> make({"steps": "1k", "lr": "3e-4"}).steps
    1000
    >>> make({"stepz": 5})
    Traceback (most recent call last):
    paceline.runs.config.ConfigError: unknown setting 'stepz' (did you mean steps?)
    """
    types = get_type_hints(Run)
    for name in settings:
        if name not in types:
            raise ConfigError(f"unknown setting {str(name)[:80]!r}{nearest(str(name), list(types))}")
    return Run(**{name: _convert(name, value, types[name]) for name, value in settings.items()})


def as_mapping(run: Run) -> dict[str, Any]:
    """The settings as plain values, for records and checkpoints."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(run).items()}


@cache
def kind_of(name: str) -> Any:
    """The type of a setting without None, and whether None is allowed."""
    kind = get_type_hints(Run)[name]
    if isinstance(kind, UnionType):
        return next(part for part in get_args(kind) if part is not NoneType)
    return kind


def _convert(name: str, value: Any, kind: Any) -> Any:
    if isinstance(kind, UnionType) and (value is None or value == "none"):
        return None
    kind = kind_of(name)
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if value not in choices:
            raise ConfigError(
                f"{name} is {str(value)[:80]!r}{nearest(str(value)[:80], choices)}; "
                f"allowed: {', '.join(choices)}"
            )
        return value
    if get_origin(kind) is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        count = get_args(kind)[0] is int
        made = [_count(item) if count else item if isinstance(item, str) else None for item in items]
        if None in made or (not count and not isinstance(value, list | tuple | str)):
            allowed = "whole numbers" if count else "texts"
            raise ConfigError(f"{name} is {str(value)[:80]!r}; allowed: a list of {allowed}")
        return tuple(made)
    convert = {bool: _flag, int: _count, float: _number, str: _text}[kind]
    converted = convert(value)
    if converted is None:
        allowed = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[kind]
        raise ConfigError(f"{name} is {str(value)[:80]!r}; allowed: {allowed}")
    return converted


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value).lower())


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def _count(value: Any) -> int | None:
    """A whole number; as text it may end in k, M, B or T."""
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
