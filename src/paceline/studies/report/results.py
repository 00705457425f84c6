"""Runs as their records tell them, and what was compared in them. No torch."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from paceline.runs import records
from paceline.runs.config import ConfigError

Points = tuple[tuple[int, float | None], ...]  # step and loss; None: not finite


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run."""

    name: str
    config: Mapping[str, Any]
    about: Mapping[str, Any]
    """Data, environment, size: the first record."""
    outcome: Literal["finished", "diverged", "unfinished"]
    curves: Mapping[str, Points]
    """Held-out loss by weights."""
    first_loss: float | None
    """Of the first step."""
    pull: tuple[Mapping[str, float], ...]
    """Readings of what the control did."""
    batches: str | None
    """Digest of all that it was trained on."""
    tokens_per_second: float | None
    """The median over the run."""
    seconds: float
    """Wall time of all its sessions."""
    end: Mapping[str, Any]
    """Bytes of the optimizer, or why it diverged."""

    @property
    def lr(self) -> float:
        return float(self.config["lr"])

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def returned(self) -> dict[str, str]:
        """The methods that this run stands for: their names, and the weights that each returns."""
        return dict(self.about["methods"])

    @property
    def is_steered(self) -> bool:
        """Whether the run moves live weights by their gap to an average: it is one of PACE."""
        control = self.about["control"]
        return control is not None and control["strength"] != 0

    def loss(self, weights: str) -> float | None:
        """What the run came to; None if it diverged."""
        points = self.curves.get(weights, ())
        return points[-1][1] if self.outcome == "finished" and points else None

    def optimizer_bytes(self, weights: str) -> int | None:
        """Memory of the optimizer, with these weights and without the others kept beside it."""
        if "optimizer_bytes" not in self.end:
            return None
        return int(self.end["optimizer_bytes"]) + int(self.end["average_bytes"].get(weights, 0))


# --- Reading ------------------------------------------------------------------------------------------


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The folders of runs among these, and directly below them."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"{path} is not a folder")
        places = [path] if (path / "records.jsonl").exists() else [*path.glob("*/records.jsonl")]
        places = [place.parent if place.name == "records.jsonl" else place for place in places]
        if not places and (path / "runs").is_dir():
            places = [place.parent for place in (path / "runs").glob("*/records.jsonl")]
        if not places:
            raise ConfigError(f"{path} holds no run: there is no records.jsonl in it or below")
        found += sorted(places)
    return list(dict.fromkeys(found))


def read_run(folder: Path) -> Result | None:
    """A run, from its records alone; None if it has not written any."""
    about, curves, pull, batches, first = None, dict[str, list[tuple[int, float | None]]](), [], None, None
    for record in records.read(folder / "records.jsonl"):
        match record["kind"]:
            case "run":
                about = record
            case "step" if first is None:
                first = _finite(record["loss"])
            case "evaluation":
                batches = record.get("batches") or None
                for weights, loss in next(iter(record["losses"].values())).items():
                    curves.setdefault(weights, []).append((record["step"], _finite(loss)))
            case "telemetry":
                pull.append(record)
    if about is None:
        return None
    times = list(records.read(folder / "timing.jsonl")) if (folder / "timing.jsonl").exists() else []
    speeds = [line["tokens_per_second"] for line in times if line.get("tokens_per_second")]
    end = times[-1] if times and times[-1]["kind"] == "end" else {}
    return Result(
        name=folder.name,
        config=about["config"],
        about=about,
        outcome=end.get("outcome", "unfinished"),
        curves={weights: tuple(points) for weights, points in curves.items()},
        first_loss=first,
        pull=tuple(pull),
        batches=batches,
        tokens_per_second=statistics.median(speeds) if speeds else None,
        seconds=_seconds(times),
        end=end,
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _seconds(times: list[dict[str, Any]]) -> float:
    """Of all sessions, from the beginning of each to the last that is known of it."""
    total, began, last = 0.0, None, 0.0
    for line in times:
        if line["kind"] == "begin":
            total += last - began if began is not None else 0.0
            began = line["time"]
        last = line["time"]
    return total + (last - began if began is not None else 0.0)


# --- Together -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcomes:
    """What each method came to, at each learning rate and seed."""

    results: tuple[Result, ...]

    @cached_property
    def methods(self) -> tuple[str, ...]:
        """All of them, in the order in which they were given."""
        return tuple(dict.fromkeys(name for result in self.results for name in result.returned))

    @cached_property
    def steered(self) -> frozenset[str]:
        """The methods of PACE among them, or of another optimizer with a control."""
        return frozenset(name for result in self.results if result.is_steered for name in result.returned)

    @cached_property
    def lrs(self) -> tuple[float, ...]:
        return tuple(sorted({result.lr for result in self.results}))

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({result.seed for result in self.results}))

    def of(self, method: str, lr: float) -> dict[int, Result]:
        """The runs of a method at a learning rate, by seed; of two, the one that ended."""
        found = [r for r in self.results if r.lr == lr and method in r.returned]
        found.sort(key=lambda r: r.outcome != "unfinished")
        return {r.seed: r for r in found}

    def losses(self, method: str, lr: float) -> dict[int, float | None]:
        """What they came to; None: diverged. Those that are not finished are left out."""
        found = self.of(method, lr).items()
        return {seed: r.loss(r.returned[method]) for seed, r in found if r.outcome != "unfinished"}

    def mean(self, method: str, lr: float) -> float | None:
        """Over seeds; None if one of them diverged, or none is finished."""
        values = list(self.losses(method, lr).values())
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if known and len(known) == len(values) else None

    def best_lr(self, method: str) -> float | None:
        """The learning rate at which a method came out lowest; None if it ended at none, or diverged.

        Rates at which fewer seeds have ended than elsewhere are left out: their means are of other seeds.
        """
        ended = {lr: len(self.losses(method, lr)) for lr in self.lrs}
        most = max(ended.values(), default=0)
        means = {
            lr: mean for lr, n in ended.items() if n == most and (mean := self.mean(method, lr)) is not None
        }
        return min(means, key=means.__getitem__) if means else None

    def has_ended(self, method: str) -> bool:
        """Whether any run of a method came to its end, or diverged."""
        return any(self.losses(method, lr) for lr in self.lrs)


def differences(results: Iterable[Result]) -> dict[str, list[str]]:
    """Settings and data in which runs differ that should be alike in a comparison."""
    free = {"optimizer", "schedule", "averages", "lr", "seed", "telemetry_every", "keep", "checkpoint_every"}
    free |= {"workers", "skip_nonfinite", "device", "evaluate_every"}
    seen: dict[str, dict[str, None]] = {}
    for result in results:
        facts = {k: v for k, v in result.config.items() if k not in free}
        facts |= {k: result.about["data"].get(k) for k in ("fingerprint", "held_out_fingerprint")}
        if result.outcome == "finished":  # a run may have been made longer
            facts["steps"] = result.end.get("step", facts.get("steps"))
        for name, value in facts.items():
            seen.setdefault(name, {})[str(value)] = None
    return {name: list(values) for name, values in seen.items() if len(values) > 1}


def read_outcomes(paths: Iterable[Path]) -> Outcomes:
    """What the runs in these folders came to, from their records."""
    found = (read_run(folder) for folder in find_runs(paths))
    return Outcomes(tuple(result for result in found if result is not None))
