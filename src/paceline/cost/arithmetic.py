"""Bytes of state and checkpoints, and the optimizer's share of a step. Plain arithmetic, without torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from paceline.runs.config import ConfigError

WeightDtype = Literal["float32", "bfloat16"]
WIDTH: Mapping[str, int] = {"float32": 4, "bfloat16": 2}
BLOCK = 128
"""Codes of an int8 average that share a float32 scale, as in `paceline.optim.storage`."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """The state that an optimizer keeps next to each weight."""

    averages: int
    average_dtype: str = "float32"

    def state_bytes(self, weights: WeightDtype) -> float:
        """Return the bytes a weight of moments and averages.

        >>> Kept(averages=1).state_bytes("float32"), Kept(averages=1).state_bytes("bfloat16")
        (12, 8)
        """
        own = WIDTH[weights]
        # Moments have the precision of the weights; a float32 average stays float32 next to bfloat16 weights.
        average = 1 + 4 / BLOCK if self.average_dtype == "int8" else WIDTH.get(self.average_dtype, own)
        return 2 * own + self.averages * average


OPTIMIZERS: Mapping[str, Kept] = {
    "AdamW": Kept(averages=0),
    "AdamW and torch's EMA": Kept(averages=1, average_dtype="as the weights"),
    "attach(AdamW), none": Kept(averages=1),
    "attach(AdamW), push": Kept(averages=2),
    "PACE, none": Kept(averages=1),
    "PACE, paper": Kept(averages=1),
    "PACE, paper, bfloat16": Kept(averages=1, average_dtype="bfloat16"),
    "PACE, paper, int8": Kept(averages=1, average_dtype="int8"),
    "PACE, push": Kept(averages=2),
    "PACE, push, bfloat16": Kept(averages=2, average_dtype="bfloat16"),
    "PACE, push, int8": Kept(averages=2, average_dtype="int8"),
}
"""What each optimizer of `paceline bench` keeps."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """The cost of one optimizer for one model."""

    optimizer: str
    state_per_weight: float
    """Bytes."""
    state: float
    """Bytes on each GPU."""
    checkpoint: float
    """Bytes of a file with weights and state, of the whole model."""
    step_ms: float | None = None
    """Its own time in a step, by a measurement on this hardware."""
    share: float | None = None
    """Its share of the user's step."""
    over_adamw: float | None = None
    """How much longer the user's step is with it than with AdamW, as a share of the step."""


def costs(
    parameters: int,
    *,
    weights: WeightDtype = "float32",
    gpus: int = 1,
    ns_per_weight: Mapping[str, float] | None = None,
    step_ms: float | None = None,
) -> list[Cost]:
    """Return the cost of every optimizer.

    Arguments:
        parameters: how many weights are trained.
        weights: their precision.
        gpus: GPUs that the state is sharded over.
        ns_per_weight: measured times of a step, by optimizer.
        step_ms: a measured step of the user's training with AdamW.

    >>> costs(10**9)[0].checkpoint
    12000000000
    """
    found = []
    for name, kept in OPTIMIZERS.items():
        per_weight = kept.state_bytes(weights)
        own = share = over = None
        if ns_per_weight is not None and name in ns_per_weight:
            own = 1e-6 * ns_per_weight[name] * parameters / gpus
            if step_ms is not None:
                more = own - 1e-6 * ns_per_weight["AdamW"] * parameters / gpus
                share, over = own / (step_ms + more), more / step_ms
        found.append(
            Cost(
                optimizer=name,
                state_per_weight=per_weight,
                state=per_weight * parameters / gpus,
                checkpoint=(WIDTH[weights] + per_weight) * parameters,
                step_ms=own,
                share=share,
                over_adamw=over,
            )
        )
    return found


def measured(path: Path) -> tuple[str, dict[str, float]]:
    """Return the hardware of a record of `paceline bench`, and nanoseconds a weight by optimizer.

    The largest model of the record counts. A time is AdamW's, times the ratio to AdamW, which was measured in
    the same rounds. Where a step was captured in a CUDA graph, that time counts: it is the device's alone.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        most = max(row["weights"] for row in record["rows"])
        rows = {row["optimizer"]: row for row in record["rows"] if row["weights"] == most}
        base = 1e6 * (rows["AdamW"]["graph_ms"] or rows["AdamW"]["ms"]) / most
        return record["hardware"], {
            name: base * (row["graph_ratio"] or row["ratio"]) for name, row in rows.items()
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--bench {path} is no record of paceline bench with AdamW: {error!r}") from None
