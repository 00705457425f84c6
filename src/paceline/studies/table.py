"""Rows of finished runs, and means over them: choose by tags, take the best."""

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from paceline.studies.lines import Finished
from paceline.studies.noise import quantile


@final
@dataclass(frozen=True, slots=True)
class Mean:
    """A mean of `n` values and its standard error; the error is None for one value."""

    value: float
    error: float | None
    n: int

    @staticmethod
    def of(values: Iterable[float]) -> "Mean | None":
        """Return the mean of values; None if there is none."""
        known = list(values)
        if not known:
            return None
        mean, n = statistics.fmean(known), len(known)
        squares = math.fsum((value - mean) ** 2 for value in known)
        return Mean(mean, math.sqrt(squares / (n - 1) / n) if n > 1 else None, n)

    def interval(self, level: float = 0.95) -> float | None:
        """Return half the width of the interval at this level, for verdicts only; None for one value."""
        return None if self.error is None else quantile(level, self.n - 1) * self.error

    def text(self, digits: int = 4) -> str:
        """Return the value ± its standard error.

        >>> Mean(3.25, 0.01, 3).text(3), Mean(3.25, None, 1).text(3)
        ('3.250 ± 0.010', '3.250')
        """
        return f"{self.value:.{digits}f}" + ("" if self.error is None else f" ± {self.error:.{digits}f}")


def along(curves: Iterable[Iterable[tuple[int, float]]]) -> list[tuple[int, Mean]]:
    """Return the mean over curves at each step to which every one of them came; empty ones do not count.

    >>> along([[(1, 4.0), (2, 3.0)], [(1, 5.0)], []])
    [(1, Mean(value=4.5, error=0.5, n=2))]
    """
    found = [each for curve in curves if (each := dict(curve))]
    steps = sorted(set.intersection(*map(set, found))) if found else []
    return [(step, mean) for step in steps if (mean := Mean.of(curve[step] for curve in found))]


@final
@dataclass(frozen=True)
class Table:
    """Rows of runs, one for each method that a run stands for."""

    rows: tuple[Finished, ...]

    @staticmethod
    def of(runs: Iterable[Finished]) -> "Table":
        """Return a table with a row for each method of each run."""
        return Table(tuple(row for run in runs for row in run.each()))

    def __iter__(self) -> Iterator[Finished]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def values(self, tag: str) -> tuple[Any, ...]:
        """Return the values of a tag, each once, in the order of the rows."""
        return tuple(dict.fromkeys(row[tag] for row in self.rows))

    def where(self, **tags: Any) -> "Table":
        """Return the rows with these tags; a tuple or set allows several values."""
        wanted = {k: v if isinstance(v, tuple | set | frozenset) else (v,) for k, v in tags.items()}
        return Table(tuple(row for row in self.rows if all(row[k] in v for k, v in wanted.items())))

    def by(self, *tags: str) -> "dict[Any, Table]":
        """Return the rows by the value of a tag, or of several as a tuple."""
        found: dict[Any, list[Finished]] = {}
        for row in self.rows:
            found.setdefault(row[tags[0]] if len(tags) == 1 else tuple(row[t] for t in tags), []).append(row)
        return {value: Table(tuple(rows)) for value, rows in found.items()}

    @cached_property
    def losses(self) -> dict[int, float | None]:
        """The final loss by seed, of rows that ended; None if it diverged. Of two runs the later counts."""
        return {row.seed: row.loss for row in self.rows if row.is_ended}

    @property
    def diverged(self) -> int:
        """Return how many seeds diverged."""
        return sum(loss is None for loss in self.losses.values())

    def mean(self) -> Mean | None:
        """Return the mean loss over seeds; None if one of them diverged, or none has ended."""
        return None if self.diverged else Mean.of(x for x in self.losses.values() if x is not None)

    def best(self, *tags: str) -> "Table | None":
        """Return the rows of the values of these tags with the lowest mean loss, none of them diverged.

        Values at which fewer seeds have ended than elsewhere are left out: their means are of other seeds.
        """
        groups = self.by(*tags).values()
        most = max((len(group.losses) for group in groups), default=0)
        means = [(mean.value, i) for i, group in enumerate(groups) if (mean := group.mean())
                 and mean.n == most]  # fmt: skip
        return list(groups)[min(means)[1]] if means else None

    def differences(self) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """Return in what the runs differ that forbids a comparison, and what is only to be named."""
        seen: dict[str, dict[str, None]] = {}
        here = {row.name for row in self.rows}
        for row in self.rows:
            facts = {name: value for name, value in row.config.items() if name not in _FREE}
            facts |= {name: row.data.get(name) for name in ("fingerprint", "held_out_fingerprint")}
            facts |= {f"{name} (version)": row.environment.get(name) for name in _VERSIONS}
            # Any average may be given any name.
            own = [text for text in row.config.get("averages") or () if text.startswith(f"{row.returned}=")]
            facts[f"the average of {row.method}"] = own
            facts["hash of the tokenizer"] = row.data.get("tokenizer")
            # A branch of a run that is here too is that run with another schedule.
            fork: str | None = row.config.get("fork")
            facts["fork"] = fork if fork and fork.rpartition("@")[0] not in here else None
            # Of other budgets the config has no steps.
            facts["steps"] = row.ended if row.outcome == "finished" else row.steps
            for name, value in facts.items():
                seen.setdefault(name, {})[str(value)] = None
        differing = {name: list(values) for name, values in seen.items() if len(values) > 1}
        named = {name: values for name, values in differing.items() if name in _NAMED or "(version)" in name}
        return {name: values for name, values in differing.items() if name not in named}, named


_FREE = {"method", "optimizer", "schedule", "averages", "lr", "seed", "telemetry_every", "keep", "keep_steps"}
_FREE |= {"checkpoint_every", "workers", "skip_nonfinite", "device", "evaluate_every"}
"""Settings that make a method, or change no result."""
_NAMED = {
    "clip_norm",
    "warmup",
    "horizon",
    "fork",
    "precision",
    "compile",
    "micro_batch_size",
    "parallel",
}
"""Settings that a method may want for itself, or that change a result by rounding alone."""
_VERSIONS = ("paceline", "commit", "torch", "gpu", "system")
