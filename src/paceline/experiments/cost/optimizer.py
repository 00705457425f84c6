"""What an optimizer keeps of a weight, and how many bytes of it a step reads and writes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, final

from paceline.experiments.config import ConfigError, nearest, parse_spec

Precision = Literal["float32", "bfloat16"]
AverageDtype = Literal["float32", "bfloat16", "int8"]

BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2}
BLOCK = 128
"""int8 codes that share a float32 scale, as in `paceline.optim.storage`."""

FUSED_ADAMW = 0.81
"""Share of copying's bandwidth that torch's fused AdamW reaches on an H200: .80 and .81
(records/2026-11-18-step-h200.json)."""
FUSED_PACE = 0.98
"""The same of PACE's kernel (.94 to 1.01, the least with int8 and two averages)."""
FOREACH = 0.80
"""The same of foreach calls over all tensors: an EMA beside AdamW .87, clipping .72."""
SEVERAL_PASSES = 0.26
"""The same of an optimizer that goes over memory several times, as most by foreach do, by what one pass would
have to move: Schedule-Free AdamW .26."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """What costs something about an optimizer."""

    name: str
    moments: int = 2
    """Arrays like the weights, beside averages."""
    averages: int = 0
    """That the step itself moves."""
    passive: int = 0
    """Averages in float32 kept beside the step, by foreach."""
    average_dtype: AverageDtype = "float32"
    update_every: int = 1
    scaled: bool = False
    """Whether the gain is scaled by a sum over all weights."""
    share: float = FUSED_ADAMW
    """Of copying's bandwidth."""

    def __post_init__(self) -> None:
        if self.update_every < 1:
            raise ConfigError(f"update_every is {self.update_every}; allowed: at least 1")
        if self.update_every > 1 and not self.is_pace:
            raise ConfigError(f"{self.name} has no update_every, which is one of the settings of pace")

    @property
    def is_pace(self) -> bool:
        """Whether it is ours, with all its storages."""
        return self.name.startswith("pace")

    # --- Bytes of state -------------------------------------------------------------------------------

    def moment_bytes(self, elements: int, weights: Precision) -> int:
        """Return those of the moments of one tensor."""
        return elements * self.moments * BYTES[weights]

    def average_bytes(self, elements: int) -> int:
        """Of one tensor: all its averages, scales included.

        >>> PRESETS["pace"].with_settings(average_dtype="int8").average_bytes(1000)
        2064
        """
        if self.average_dtype == "int8":
            each = elements + 4 * -(-elements // BLOCK)
        else:
            each = elements * BYTES[self.average_dtype]
        return self.averages * each + self.passive * 4 * elements

    @property
    def step_bytes(self) -> int:
        """Of a tensor's own count of steps: torch's float32, ours in float64 on the host."""
        return 8 if self.is_pace else 4

    # --- Bytes that a step moves ----------------------------------------------------------------------

    def traffic(self, weights: Precision) -> float:
        """Bytes a weight that one step reads and writes in the GPU's memory, on the mean over `update_every`.

        Weights, moments and averages are read and written, gradients read. A float32 average is touched at
        every n-th step only; a residual is live − average, and has to be written whenever live moves.

        >>> PRESETS["adamw"].traffic("float32"), PRESETS["pace"].traffic("float32")
        (28.0, 44.0)
        """
        moved = 3.0 * BYTES[weights] + 2.0 * self.moment_bytes(1, weights)
        return moved + 2.0 * self._averages_moved()

    def beside(self, weights: Precision) -> float:
        """Bytes a weight that passive averages read and write after the step."""
        return self.passive * (8.0 + BYTES[weights])

    def _averages_moved(self) -> float:
        if self.average_dtype == "float32":
            return 4.0 * self.averages / self.update_every
        each = 2.0 if self.average_dtype == "bfloat16" else 1 + 4 / BLOCK
        return each * self.averages

    def with_settings(self, **settings: Any) -> "Optimizer":
        """The same with other settings."""
        return replace(self, **settings)


def _pace(name: str, averages: int, scaled: bool) -> Optimizer:
    return Optimizer(name=name, averages=averages, scaled=scaled, share=FUSED_PACE)


PRESETS: dict[str, Optimizer] = {
    "adamw": Optimizer(name="adamw"),
    "ema": Optimizer(name="ema", passive=1),
    "pace": _pace("pace", 2, True),
    "pace_paper": _pace("pace_paper", 1, False),
}
"""torch's fused AdamW; the same with a float32 copy that is averaged; PACE's default, and the paper's."""

# Of those that `paceline train` knows: arrays like the weights.
_OTHERS: dict[str, Optimizer] = {
    "ademamix": Optimizer(name="ademamix", moments=3, share=SEVERAL_PASSES),
    "lookahead": Optimizer(name="lookahead", averages=1, share=SEVERAL_PASSES),
    "gpa": Optimizer(name="gpa", averages=2, share=SEVERAL_PASSES),
    "ema_nesterov": Optimizer(name="ema_nesterov", averages=1, share=SEVERAL_PASSES),
    "schedule_free": Optimizer(name="schedule_free", share=SEVERAL_PASSES),
    "schedule_free_plus": Optimizer(name="schedule_free_plus", share=SEVERAL_PASSES),
    "sgd": Optimizer(name="sgd", moments=0, share=FOREACH),
    "candidate": Optimizer(name="candidate", averages=2, share=SEVERAL_PASSES),
}


def preset(name: str) -> Optimizer:
    """An optimizer by name."""
    if name not in PRESETS:
        raise ConfigError(
            f"optimizer {name[:80]!r} is unknown{nearest(name, list(PRESETS))}; "
            f"there are: {', '.join(PRESETS)}"
        )
    return PRESETS[name]


def of_spec(text: str) -> Optimizer:
    """The optimizer of a run, as `Run.optimizer` names it.

    >>> of_spec("pace:gain=paper,average_dtype=int8,update_every=10").average_bytes(128)
    132
    """
    name, _, settings = parse_spec(text)
    if name == "pace":
        return _of_pace(settings)
    if name == "sgd" and settings.get("momentum"):
        return replace(_OTHERS["sgd"], moments=1)
    if name == "adamw":
        return PRESETS["adamw"]
    if name not in _OTHERS:
        known = ["adamw", "pace", *_OTHERS]
        raise ConfigError(
            f"optimizer {name[:80]!r} is unknown{nearest(name, known)}; there are: {', '.join(known)}"
        )
    return _OTHERS[name]


def _of_pace(settings: Mapping[str, Any]) -> Optimizer:
    """As `paceline.optim.recipe.completed` fills in what is not said; tests hold the two together."""
    given = {name: value for name, value in settings.items() if value is not None}
    gain, pulls = given.get("gain", "scaled"), given.get("pullback_strength") != 0
    usual: tuple[float | None, float | None] = (0.2, 0.7) if gain == "scaled" else (0.5, None)
    if not pulls:  # then the average that pulls is the one to return
        usual = (given.get("return_power"), None)
    returned = given.get("return_power", usual[1])
    two = returned is not None and returned != given.get("ema_power", usual[0])
    one_pass = given.get("foreach") is None and given.get("fused") is not False
    return Optimizer(
        name="pace",
        moments=1 if given.get("betas", (0.9, 0.999))[0] == 0 else 2,
        averages=2 if two else 1,
        scaled=pulls and gain == "scaled",
        share=FUSED_PACE if one_pass else SEVERAL_PASSES,
        average_dtype=given.get("average_dtype", "float32"),
        update_every=given.get("update_every", 1),
    )
