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
@dataclass(frozen=True, slots=True)
class Share:
    """A share of a run's steps, written `16%`."""

    percent: float

    def of(self, steps: int) -> int:
        """Return the number of steps, at least one.

        >>> Share(16).of(300)
        48
        """
        return max(1, round(steps * self.percent / 100))

    def __repr__(self) -> str:
        return f"{self.percent}%"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """The meaning of a word of a name."""

    title: str
    """Its name for people."""
    settings: tuple[str, ...]
    """The names of its settings, in the order in which they may stand without a name."""
    ours: Mapping[str, Any] = field(default_factory=dict)
    """Values that follow its authors' advice where the constructor's defaults do not."""
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
        ours={"betas": (0.9, 0.999, 0.999), "alpha_warmup": Share(100), "beta3_warmup": Share(100)},
    ),
    "ema_nesterov": _known(
        "EMA-Nesterov",
        f"push decay start stop {_ADAMW}",
        ours={"start": Share(16), "stop": Share(76)},
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
    "push": _known("push", f"strength {_CONTROL}"),
}
"""Classmethods of `Control`, and their arguments."""
AVERAGES = {
    "ema": _known("EMA", "power every", ours={"power": 0.7}),
    "short_ema": _known("short EMA", "power every", ours={"power": 0.5}),
    "power": _known("EMA", "power every"),
    "polynomial": _known("polynomial", "power"),
    "decay": _known("EMA of fixed decay", "decay start"),
    "half_life": _known("EMA by half-life", "fraction"),
    "bema": _known(
        "BEMA",
        "power bias_power offset scale every min_rate burn_in",
        ours={"every": 1, "burn_in": Share(10)},
    ),
    "blend": _known("blend", "share kind"),
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
_COUNTS_STEPS = {"alpha_warmup", "beta3_warmup", "start", "stop", "warmup_steps", "burn_in"}
_COUNTS_STEPS |= {"every", "pull_every", "k"}


# --- A word with settings -------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Spec:
    """A word with settings: `power:0.7`, `wsd:decay=0.2`."""

    word: str
    values: tuple[Any, ...] = ()
    """Settings without a name."""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.word}:{self.listed}" if self.listed else self.word

    @property
    def listed(self) -> str:
        """The settings as text."""
        named = (f"{name}={_written(value)}" for name, value in self.settings.items())
        return ",".join([*map(_written, self.values), *named])

    def completed(self, known: Known, steps: int) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments in a run of that many steps: those that are given, then ours."""
        given = {**dict(zip(known.settings, self.values, strict=False)), **self.settings}
        if odd := [n for n, value in given.items() if isinstance(value, Share) and n not in _COUNTS_STEPS]:
            raise ConfigError(
                f"{self.word}: {odd[0]} is {given[odd[0]]}, a share of the steps; give a number"
            )
        ours = {name: value for name, value in known.ours.items() if name not in given}
        named = {name: _fixed(value, steps) for name, value in {**ours, **self.settings}.items()}
        return [_fixed(value, steps) for value in self.values], named


def _fixed(value: Any, steps: int) -> Any:
    return value.of(steps) if isinstance(value, Share) else value


def parse_spec(text: str) -> Spec:
    """Return a word with its settings, not checked against any table.

    >>> parse_spec("pace:power=0.3,betas=(0.9, 0.95)").settings
    {'power': 0.3, 'betas': (0.9, 0.95)}
    >>> parse_spec("power:0.7").values, parse_spec("bema:burn_in=5%").settings
    ((0.7,), {'burn_in': 5%})
    """
    word, _, rest = text.partition(":")
    # A share is no expression of Python; a set of one number is, and nothing else needs it.
    rest = re.sub(r"(?<![\w.])(\d+(?:\.\d+)?)%", r"{\1}", rest)
    try:
        call = ast.parse(f"_({rest})", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError
        values = tuple(_literal(value) for value in call.args)
        settings = {item.arg: _literal(item.value) for item in call.keywords if item.arg}
        if len(settings) < len(call.keywords):  # one of them twice, or **
            raise ValueError
        return Spec(word, values, settings)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise ConfigError(f"cannot read {text[:80]!r}; write NAME:setting=value,setting=value") from None


_WORDS = {"inf": math.inf, "-inf": -math.inf, "none": None, "true": True, "false": False}
_WORDS |= {"yes": True, "no": False}


def _literal(node: ast.expr) -> Any:
    word = ast.unparse(node)
    if word.lower() in _WORDS or isinstance(node, ast.Name):  # a word needs no quotes
        return _WORDS.get(word.lower(), word)
    value = ast.literal_eval(node)
    return Share(*value) if isinstance(value, set) else value


def _written(value: Any) -> str:
    """Return a value as `parse_spec` reads it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    is_word = isinstance(value, str) and value.isidentifier() and value.lower() not in _WORDS
    return value if is_word else repr(value).replace(", ", ",") if isinstance(value, tuple) else repr(value)


def _checked(what: str, text: str, table: Mapping[str, Known]) -> Spec:
    """Return a word of a table with its settings; raise ConfigError for one that is not in it."""
    spec = parse_spec(text)
    if spec.word not in table:
        raise ConfigError(
            f"{what} {spec.word[:80]!r} is unknown{nearest(spec.word, table)}; there are: {', '.join(table)}"
        )
    known = table[spec.word].settings
    if len(spec.values) > len(known) and spec.word != "blend":
        raise ConfigError(f"{what} {spec.word} has fewer settings than {text!r} gives: {', '.join(known)}")
    for name in spec.settings:
        # The settings of a blend are those of the average that is blended, too.
        if name not in known and spec.word != "blend":
            raise ConfigError(f"{what} {spec.word} has no setting {name!r}{nearest(name, known)}")
    return spec


def schedule_of(text: str) -> Spec:
    """Return a schedule by its text; raise ConfigError for one that does not exist.

    >>> schedule_of("wsd:decy=2")
    Traceback (most recent call last):
    paceline.runs.terminal.ConfigError: schedule wsd has no setting 'decy' (did you mean decay?)
    """
    spec = parse_spec(text)
    if spec.word in SCHEDULES and (spec.values or spec.settings.keys() & {"steps", "warmup"}):
        said = "settings of a schedule have names, as in wsd:decay=0.2; steps and warmup are the run's"
        raise ConfigError(f"{said}; got {text!r}")
    return _checked("schedule", text, SCHEDULES)


def average_of(text: str) -> tuple[str, Spec]:
    """Return the label of an average and the average; the label is made of the text if none is given.

    >>> average_of("long=power:0.7")[0], average_of("power:0.7")[0]
    ('long', 'power_0_7')
    """
    label, _, spec = text.partition("=") if _is_labelled(text) else ("", "", text)
    found = _checked("average", spec.strip(), AVERAGES)
    return label.strip() or "_".join(re.findall(r"[^\W_]+", spec)), found


def _is_labelled(text: str) -> bool:
    """Return whether an average has a label: `long=power:0.7` has one, `decay:0.99,start=10` has none."""
    return "=" in text and ":" not in text.partition("=")[0]


def averages_of(texts: Iterable[str]) -> dict[str, Spec]:
    """Return averages by label; raise ConfigError for two of one label."""
    texts = tuple(texts)
    found = dict(map(average_of, texts))
    if len(found) < len(texts) or len(set(map(_average_title, texts))) < len(texts):
        raise ConfigError(f"averages need different names; got {', '.join(texts)}")
    if taken := sorted(found.keys() & {"live", "average", "returned", "step"}):
        raise ConfigError(f"an average cannot be named {taken[0]!r}: that means other weights")
    return found


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
        """Return the settings of the base and those of the control in a run of that many steps."""
        _, settings = self.optimizer.completed(self.known, steps)
        own = {name: value for name, value in settings.items() if name in self.known.settings}
        return own, {name: value for name, value in settings.items() if name not in own}


def _average_title(text: str) -> str:
    label, spec = average_of(text)
    if _is_labelled(text):
        return re.sub(r"\bema\b", "EMA", label.replace("_", " "))
    return AVERAGES[spec.word].title + (f" ({spec.listed})" if spec.listed else "")


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
    if spec.values:
        raise ConfigError(f"settings of a method have names, as in pace:c=1e-3; got {spec}")
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
