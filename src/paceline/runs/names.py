"""Names of methods: `BASE[+CONTROL][:setting=value,…][/AVERAGE][@SCHEDULE]`. No torch.

.. code-block:: text

    adamw    adamw/ema    adamw@wsd    adamw+push    adamw+paper:c=1e-3
    pace     pace+push:strength=0.7    ademamix:alpha=8@linear    ema_nesterov:stop=none

The tables say what there is. A new control is one line of `CONTROLS`, and a classmethod of `Control`.
"""

import ast
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, final

from paceline.runs.terminal import ConfigError, nearest

# --- What there is --------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """The meaning of a word of a name."""

    title: str
    """Its name for people."""
    settings: tuple[str, ...]
    """The names of its settings. The first one of an average needs no name: `power:0.7`."""
    ours: Mapping[str, Any] = field(default_factory=dict)
    """Values that follow its authors' advice where the constructor's defaults do not."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """The same for settings that count steps, as shares of the run's."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a run that it wants otherwise than AdamW."""
    control: str | None = None
    """The control that a base has if none is named."""
    averages: bool = True
    """Whether controls and averages can be attached to a base. If not, it keeps an average of its own."""


def _known(title: str, settings: str, **more: Any) -> Known:
    return Known(title=title, settings=tuple(settings.split()), **more)


_ADAMW = "betas eps weight_decay amsgrad maximize foreach capturable differentiable fused"
_PACE = "betas eps weight_decay average_dtype foreach fused maximize"
_CONTROL = (
    "power return_power step grow every pull_every slope delay least_rate max_gain gap order average_dtype"
)

BASES = {
    "adamw": _known("AdamW", _ADAMW),
    "pace": _known("PACE", _PACE, control="paper", averages=False),
    "ademamix": _known(
        "AdEMAMix",
        "betas eps weight_decay alpha alpha_warmup beta3_warmup maximize",
        ours={"betas": (0.9, 0.999, 0.999)},
        shares={"alpha_warmup": 1.0, "beta3_warmup": 1.0},
    ),
    "ema_nesterov": _known(
        "EMA-Nesterov",
        f"push decay start stop {_ADAMW}",
        shares={"start": 0.16, "stop": 0.76},
        averages=False,
    ),
    "gpa": _known("GPA", f"mu_x mu_y {_ADAMW}", averages=False),
    "lookahead": _known("Lookahead", f"k alpha {_ADAMW}", averages=False),
    "schedule_free": _known(
        "Schedule-Free",
        "betas eps weight_decay warmup_steps r weight_lr_power foreach",
        ours={"weight_decay": 0.1},
        run={"clip_norm": None},
        averages=False,
    ),
    "sgd": _known("SGD", "momentum dampening weight_decay nesterov maximize foreach differentiable fused"),
}
"""Optimizers."""
CONTROLS = {
    "none": _known("with an average", _CONTROL),
    "paper": _known("with the paper's pull", f"c {_CONTROL}"),
    "pull": _known("pull", f"strength {_CONTROL}"),
    "push": _known("push", f"strength {_CONTROL}", shares={"grow": 1.0}),
}
"""Classmethods of `Control`, and their arguments."""
AVERAGES = {
    "ema": _known("EMA", "power every", ours={"power": 0.7}),
    "short_ema": _known("short EMA", "power every", ours={"power": 0.5}),
    "power": _known("EMA", "power every"),
    "half_life": _known("EMA by half-life", "fraction"),
    "bema": _known(
        "BEMA",
        "power bias_power offset scale every min_rate burn_in",
        ours={"every": 1},
        shares={"burn_in": 0.1},
    ),
}
"""Averages that are kept next to an optimizer."""
SCHEDULES = {
    "constant": _known("constant", ""),
    "inverse_sqrt": _known("1/√t", "timescale"),
    "cosine": _known("cosine", ""),
    "linear": _known("linear", ""),
    "wsd": _known("WSD", "decay"),
}
"""Learning-rate schedules."""


# --- A word with settings -------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Spec:
    """A word with settings: `wsd:decay=0.2`."""

    word: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.word}:{self.listed}" if self.settings else self.word

    @property
    def listed(self) -> str:
        """The settings as text."""
        return ",".join(f"{name}={_written(value)}" for name, value in self.settings.items())

    def completed(self, known: Known, steps: int) -> dict[str, Any]:
        """Return the settings in a run of that many steps: those that are given, and ours.

        >>> Spec("ema_nesterov", {"stop": 150}).completed(BASES["ema_nesterov"], 300)
        {'start': 48, 'stop': 150}
        """
        counts = {name: max(1, round(share * steps)) for name, share in known.shares.items()}
        return {**known.ours, **counts, **self.settings}


def parse_spec(text: str, first: str = "") -> Spec:
    """Return a word with its settings, not checked against any table; `first` names one without a name.

    >>> parse_spec("pace:power=0.3,betas=(0.9, 0.95)").settings
    {'power': 0.3, 'betas': (0.9, 0.95)}
    >>> parse_spec("power:0.7", "power").settings
    {'power': 0.7}
    """
    word, _, rest = text.partition(":")
    try:
        call = ast.parse(f"_({rest})", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError
        unnamed = dict(zip([first] if first else [], call.args, strict=False))
        named = {item.arg: item.value for item in call.keywords if item.arg}
        if len(unnamed | named) < len(call.args) + len(call.keywords):  # one of them twice, or **
            raise ValueError
        return Spec(word, {name: _literal(value) for name, value in (unnamed | named).items()})
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise ConfigError(f"cannot read {text[:80]!r}; write NAME:setting=value,setting=value") from None


_WORDS = {"inf": math.inf, "-inf": -math.inf, "none": None, "true": True, "false": False}
_WORDS |= {"yes": True, "no": False}


def _literal(node: ast.expr) -> Any:
    word = ast.unparse(node)
    if word.lower() in _WORDS or isinstance(node, ast.Name):  # a word needs no quotes
        return _WORDS.get(word.lower(), word)
    return ast.literal_eval(node)


def _written(value: Any) -> str:
    """Return a value as `parse_spec` reads it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    is_word = isinstance(value, str) and value.isidentifier() and value.lower() not in _WORDS
    return value if is_word else repr(value).replace(", ", ",") if isinstance(value, tuple) else repr(value)


def _checked(what: str, text: str, table: Mapping[str, Known]) -> Spec:
    """Return a word of a table with its settings; raise ConfigError for one that is not in it."""
    word = text.partition(":")[0]
    if word not in table:
        raise ConfigError(
            f"{what} {word[:80]!r} is unknown{nearest(word, table)}; there are: {', '.join(table)}"
        )
    known = table[word].settings
    spec = parse_spec(text, known[0] if what == "average" else "")
    for name in spec.settings:
        if name not in known:
            raise ConfigError(f"{what} {word} has no setting {name!r}{nearest(name, known)}")
    return spec


def schedule_of(text: str) -> Spec:
    """Return a schedule by its text; raise ConfigError for one that does not exist.

    >>> schedule_of("wsd:decy=2")
    Traceback (most recent call last):
    paceline.runs.terminal.ConfigError: schedule wsd has no setting 'decy' (did you mean decay?)
    """
    return _checked("schedule", text, SCHEDULES)


def average_of(text: str) -> tuple[str, Spec]:
    """Return the label of an average, which is made of its text, and the average.

    >>> average_of("power:0.7")
    ('power_0_7', Spec(word='power', settings={'power': 0.7}))
    """
    return "_".join(re.findall(r"[^\W_]+", text)), _checked("average", text.strip(), AVERAGES)


def averages_of(texts: Iterable[str]) -> dict[str, Spec]:
    """Return averages by label; raise ConfigError for two of one label."""
    texts = tuple(texts)
    if len(set(map(_average_title, texts))) < len(texts):
        raise ConfigError(f"averages need different names; got {', '.join(texts)}")
    return dict(map(average_of, texts))


# --- A method -------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Name:
    """The name of a method, parsed and checked. `str` gives it back in the shortest form."""

    optimizer: Spec
    control: str | None = None
    averages: tuple[str, ...] = ()
    schedule: str = "constant"

    @property
    def known(self) -> Known:
        """The entry of its base in the table."""
        return BASES[self.optimizer.word]

    def __str__(self) -> str:
        parts = [self.optimizer.word]
        if self.control != self.known.control:
            parts.append(f"+{self.control}")
        if self.optimizer.listed:
            parts.append(f":{self.optimizer.listed}")
        parts += [f"/{average}" for average in self.averages]
        return "".join(parts) + (f"@{self.schedule}" if self.schedule != "constant" else "")

    @property
    def without_averages(self) -> "Name":
        """The same method, of which another set of weights is returned."""
        return replace(self, averages=())

    @property
    def title(self) -> str:
        """The name for people.

        >>> parse("pace+push:strength=0.7@wsd").title, parse("adamw/ema").title
        ('PACE push (strength=0.7) WSD', 'AdamW · EMA')
        """
        words = [self.known.title]
        if self.control is not None and self.control != self.known.control:
            words.append(CONTROLS[self.control].title)
        if self.optimizer.listed:
            words.append(f"({self.optimizer.listed})")
        if self.schedule != "constant":
            spec = parse_spec(self.schedule)
            words += [SCHEDULES[spec.word].title, *([f"({spec.listed})"] if spec.listed else [])]
        return " · ".join([" ".join(words), *map(_average_title, self.averages)])

    def arguments(self, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the settings of the base and those of the control in a run of that many steps.

        >>> parse("pace+push").arguments(300), parse("pace+push:grow=0").arguments(300)
        (({}, {'grow': 300}), ({}, {'grow': 0}))
        """
        shares = CONTROLS[self.control].shares if self.control else {}
        settings = self.optimizer.completed(
            replace(self.known, shares={**self.known.shares, **shares}), steps
        )
        own = {name: value for name, value in settings.items() if name in self.known.settings}
        return own, {name: value for name, value in settings.items() if name not in own}


def _average_title(text: str) -> str:
    spec = average_of(text)[1]
    known = AVERAGES[spec.word]
    listed = spec.listed.removeprefix(f"{known.settings[0]}=")
    return known.title + (f" ({listed})" if listed else "")


def titles(alone: str, averages: Iterable[str], views: Collection[str]) -> dict[str, str]:
    """Return the methods that a run stands for: their names for people, and the weights that each returns.

    Arguments:
        alone: the name of the run without averages.
        averages: those that it keeps next to its optimizer.
        views: the weights that it evaluates.

    >>> titles("AdamW", ("ema",), ("live", "ema"))
    {'AdamW': 'live', 'AdamW · EMA': 'ema'}
    """
    found = {alone: "average" if "average" in views else "live"}
    return found | {f"{alone} · {_average_title(text)}": average_of(text)[0] for text in averages}


@cache  # a study makes thousands of runs of few names, and parsing is two thirds of it
def parse(text: str) -> Name:
    """Return a name by its text; raise ConfigError, with the nearest word, for what does not exist.

    >>> str(parse("pace+paper:c=1e-3@wsd:decay=0.1"))
    'pace:c=0.001@wsd:decay=0.1'
    """
    rest, at, schedule = text.partition("@")
    rest, *averages = rest.split("/")
    head, _, settings = rest.partition(":")
    base, plus, control = head.partition("+")
    if base not in BASES:
        raise ConfigError(f"method {base[:80]!r} is unknown{_meant(base)}; there are: {', '.join(BASES)}")
    known = BASES[base]
    averages_of(averages)
    if plus and control not in CONTROLS:
        there = f"{nearest(control, CONTROLS)}; there are: {', '.join(CONTROLS)}"
        raise ConfigError(f"{base} has no control {control[:80]!r}{there}")
    if not known.averages and ((plus and known.control is None) or averages):
        what = "no others next to it" if averages else "no control"
        raise ConfigError(
            f"{base} keeps an average of its own, and {what}; take another base, as in adamw+push/ema"
        )
    spec = parse_spec(f"{base}:{settings}")
    name = Name(optimizer=spec, control=control or known.control, averages=tuple(averages))
    _check_settings(name)
    return replace(name, schedule=str(schedule_of(schedule))) if at else name


def _check_settings(name: Name) -> None:
    """Raise ConfigError for a setting that neither the base nor the control has."""
    spec, said = name.optimizer, str(replace(name, optimizer=Spec(name.optimizer.word)))
    known = (*name.known.settings, *(CONTROLS[name.control].settings if name.control else ()))
    for key in spec.settings:
        if key == "lr":
            raise ConfigError("the learning rate is a setting of the run (lr), not of the method")
        if key not in known:
            steers = key in ("strength", *CONTROLS["paper"].settings)
            meant = f"; it goes with a control, as in {spec.word}+push" if steers else nearest(key, known)
            raise ConfigError(f"{said} has no setting {key!r}{meant}")


def _meant(word: str) -> str:
    """Return what may have been meant by an unknown base, which may be another part of a name."""
    for table, form in ((CONTROLS, "a control: pace+{}"), (AVERAGES, "an average: adamw/{}")):
        if word in table:
            return f"; it is {form.format(word)}"
    return f"; it is a schedule: adamw@{word}" if word in SCHEDULES else nearest(word, BASES)
