"""A finished run as one line of JSON: what tables, figures and verdicts need, and no folder of a machine.

.. code-block:: text

    {"format": 2, "name": "gpt2_adamw_lr0.002_constant_4750_s42", "config": {…}, "tags": {"batch": "a"},
     "methods": {"AdamW": "live", "AdamW · long EMA": "long_ema"}, "returned": "long_ema", "control": null,
     "environment": {…}, "data": {…fingerprints…}, "parameters": 124439808, "steps": 4750,
     "outcome": "finished", "why": "", "ended": 4750, "seconds": 5123.4, "speed": 51200.0,
     "memory": {"live": 995518464, "long_ema": 1493277696}, "batches": "f050556f", "start": 10.8,
     "evaluations": [[95, {"live": 5.1, "long_ema": 5.0}], …], "train": [[48, 6.2], …],
     "pull": [[95, {"saturated": 0.02, …}], …]}

This is the only reader of records of runs, in folders and in files.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, final

from paceline.lm.files import Damaged, write_atomically
from paceline.runs import records
from paceline.runs.config import ConfigError

FORMAT = 2
_POINTS = 100
"""Of the training loss: each is the mean of as many steps."""
_PULL = ("saturated", "gain/mean", "gap_rms", "ratio/q10", "ratio/q50", "ratio/q90", "lr", "t")

Losses = Mapping[str, float | None]
"""Held-out loss by weights; None where it was not finite."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A run as its records tell it: finished, diverged, or unfinished so far.

    One run may stand for several methods, one for each average that it keeps. `each` gives a row for each.
    """

    name: str
    config: Mapping[str, Any]
    methods: Mapping[str, str]
    """All methods that the run stands for, and the weights that each returns."""
    method: str
    """The one that this row stands for."""
    returned: str
    """The weights that it returns."""
    tags: Mapping[str, Any] = field(default_factory=dict)
    """What a study calls it: method, setting, schedule, lr, seed, batch."""
    control: Mapping[str, Any] | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    parameters: int = 0
    steps: int = 0
    """How many were planned."""
    outcome: Literal["finished", "diverged", "unfinished"]
    why: str = ""
    """Of a run that diverged."""
    ended: int | None = None
    """The last step of a run that has ended."""
    seconds: float | None = None
    """At work, over all sessions; None if its clock went back."""
    speed: float | None = None
    """Tokens a second, the median over the run."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the optimizer, with these weights and without the others kept next to it."""
    batches: str | None = None
    """Digest of all batches that it was trained on."""
    start: float | None = None
    """Training loss of the first step."""
    evaluations: tuple[tuple[int, Losses], ...] = ()
    train: tuple[tuple[int, float | None], ...] = ()
    pull: tuple[tuple[int, Mapping[str, float | None]], ...] = ()
    """Readings of what the control did."""

    # --- Reading ---

    @classmethod
    def of_folder(cls, folder: Path, tags: Mapping[str, Any] | None = None) -> "Finished | None":
        """Return the run in a folder, as far as it is; None if it has not written anything.

        Raises:
            Damaged: its records are not what a run writes, or end before it did; the file is named.
        """
        place, _ = files_of(folder)
        times = records.times_of(folder)
        lines = [*records.read(place)] if place.exists() else []
        if not lines:
            return None
        try:
            found = _of_records(folder.name, lines, times, tags)
        except (AttributeError, KeyError, StopIteration, TypeError, ValueError) as error:
            raise Damaged(f"{place} holds no record of a run: {error!r}") from None
        if found.outcome == "finished" and found.ended not in dict(found.evaluations):
            raise Damaged(f"{place} is cut off: it lacks the evaluation of the last step, {found.ended}")
        return found

    @classmethod
    def of_line(cls, line: Any, where: str = "line") -> "Finished":
        """Return the run that a line holds; raise ConfigError, naming the place, if it holds none."""
        if not isinstance(line, dict) or line.get("format") != FORMAT:
            raise ConfigError(f"{where} is no record of a run, or one of another version of paceline")
        try:
            line = {name: value for name, value in line.items() if name != "format"}
            for name in ("evaluations", "train", "pull"):
                line[name] = tuple((step, value) for step, value in line[name])
            return cls(**line, method=_method_of(line["methods"], line["returned"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{where} is no record of a run: {error!r}") from None

    @staticmethod
    def read(paths: Iterable[Path]) -> dict[str, "Finished"]:
        """Return the runs in files of lines, and those that ended in folders; of two of a name the later."""
        found: dict[str, Finished] = {}
        for path in paths:
            if not path.exists():
                raise ConfigError(f"there is no file or folder {path}")
            if path.is_dir():
                runs = [run for run in map(Finished.of_folder, find_runs([path])) if run and run.is_ended]
            else:
                lines = enumerate(records.read(path), 1)
                runs = [Finished.of_line(line, f"{path}, line {number}") for number, line in lines]
            for run in runs:
                if run.name in found and found[run.name].data != run.data:
                    raise ConfigError(f"{path}: two runs on different data are called {run.name}")
                found[run.name] = run
        return found

    # --- Asking ---

    @property
    def lr(self) -> float:
        """The learning rate, as the study counts it."""
        return float(self["lr"])

    @property
    def seed(self) -> int:
        return int(self["seed"])

    @property
    def is_ended(self) -> bool:
        """Return whether it came to its end, or diverged."""
        return self.outcome != "unfinished"

    @property
    def diverged(self) -> bool:
        """Return whether its loss stopped being a number."""
        return self.outcome == "diverged"

    @property
    def is_steered(self) -> bool:
        """Return whether it is a run of PACE, which moves live weights by their gap to an average."""
        return self.control is not None and self.control["strength"] != 0

    @property
    def loss(self) -> float | None:
        """The final loss of the returned weights; None if it diverged, or has not come to its end."""
        last = self.evaluations[-1][1] if self.outcome == "finished" and self.evaluations else {}
        return last.get(self.returned)

    def __getitem__(self, tag: str) -> Any:
        """Return a tag; without one of that name the row's own field, or the setting of the run."""
        if tag == "method":
            return self.method
        if tag in self.tags:
            return self.tags[tag]
        return self.config[tag] if tag in self.config else getattr(self, tag)

    def curve(self, weights: str | None = None) -> list[tuple[int, float]]:
        """Return the held-out loss of these weights, or of the returned ones, at each evaluation."""
        found = ((step, losses.get(weights or self.returned)) for step, losses in self.evaluations)
        return [(step, loss) for step, loss in found if loss is not None]

    def readings(self, name: str) -> list[tuple[int, float]]:
        """Return what the control did, by one of its measures, at each reading."""
        return [(step, value) for step, read in self.pull if (value := read.get(name)) is not None]

    def each(self) -> "Iterator[Finished]":
        """Yield a row for each method that the run stands for."""
        for method, weights in self.methods.items():
            yield replace(self, method=method, returned=weights)

    # --- Writing ---

    def as_line(self) -> dict[str, Any]:
        """Return the line of a run that has ended, as plain values."""
        if not self.is_ended:
            raise ConfigError(f"{self.name} has not come to its end")
        line = {"format": FORMAT, **asdict(self)}
        del line["method"]
        return line


def write(runs: Iterable[Finished], path: Path) -> None:
    """Write the lines of runs to a file, with checksums."""
    write_atomically(path, records.sealed(run.as_line() for run in runs))


def files_of(run: Path) -> tuple[Path, Path]:
    """Return the files of a run in its folder: what it computed, and when."""
    return run / "records.jsonl", run / "timing.jsonl"


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Return the folders of runs among these, and those in them and in their `runs`."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"{path} is not a folder")
        folders = [path, *sorted(path.glob("*")), *sorted(path.glob("runs/*"))]
        places = [folder for folder in folders if any(map(Path.exists, files_of(folder)))]
        found += places
        if not places:
            raise ConfigError(f"nothing is finished yet in {path}: it holds no records.jsonl, and none below")
    return list(dict.fromkeys(found))


# --- From records -----------------------------------------------------------------------------------------


def _of_records(
    name: str, lines: list[dict[str, Any]], times: list[dict[str, Any]], tags: Mapping[str, Any] | None
) -> Finished:
    about, of_kind = lines[0], {kind: [r for r in lines if r["kind"] == kind] for kind in _KINDS}
    steps = [(step["step"], _rounded(step["loss"])) for step in of_kind["step"] if not step.get("skipped")]
    end = times[-1] if times and times[-1]["kind"] == "end" else {}
    size = max(1, about["steps"] // _POINTS)
    speeds = [line["tokens_per_second"] for line in times if line.get("tokens_per_second")]
    own, beside = end.get("optimizer_bytes"), end.get("average_bytes", {})
    config = {key: _without_folders(key, value) for key, value in about["config"].items()}
    planned = about["steps"]
    if end.get("outcome") == "finished" and end["step"] > planned:
        # It was made longer. Warm-up and shares are still those of what it was planned as.
        config |= {"steps": end["step"], "horizon": planned} | dict.fromkeys(("tokens", "epochs"))
        planned = end["step"]
    return Finished(
        name=name,
        config=config,
        methods=about["methods"],
        method=_method_of(about["methods"], about["returned"]),
        returned=about["returned"],
        tags=dict(tags or {}),
        control=about["control"],
        environment=about["environment"],
        data=about["data"],
        parameters=about["parameters"],
        steps=planned,
        outcome=end.get("outcome", "unfinished"),
        why=end.get("text", ""),
        ended=end.get("step"),
        seconds=_seconds(times),
        speed=statistics.median(speeds) if speeds else None,
        memory={w: own + beside.get(w, 0) for w in about["methods"].values()} if own is not None else {},
        batches=of_kind["evaluation"][-1].get("batches") if of_kind["evaluation"] else None,
        start=_rounded(of_kind["step"][0]["loss"]) if of_kind["step"] else None,
        evaluations=tuple(
            (
                line["step"],
                {view: _rounded(loss) for view, loss in next(iter(line["losses"].values())).items()},
            )
            for line in of_kind["evaluation"]
        ),
        train=tuple(_mean(steps[i : i + size]) for i in range(0, len(steps), size)),
        pull=tuple(
            (line["step"], {key: _rounded(line[key]) for key in _PULL if key in line})
            for line in of_kind["telemetry"]
        ),
    )


_KINDS = ("step", "evaluation", "telemetry")


def _method_of(methods: Mapping[str, str], returned: str) -> str:
    """Return the method of a run that returns these weights."""
    return next(name for name, weights in methods.items() if weights == returned)


def _without_folders(name: str, value: Any) -> Any:
    """Return a setting without the folders of a machine. Names of the hub stay whole."""
    if name in ("data", "held_out"):
        return [item if item.startswith("hf:") else Path(item).name for item in value]
    local = name in ("fork", "chat_template") or (
        name in ("model", "tokenizer") and Path(str(value)).exists()
    )
    return Path(value).name if local and value is not None else value


def _seconds(times: list[dict[str, Any]]) -> float | None:
    """Return the time of all sessions, each to the last that is known of it; None if the clock went back."""
    parts = [after["time"] - line["time"] for line, after in pairwise(times) if after["kind"] != "begin"]
    return None if any(part < 0 for part in parts) else round(sum(parts), 1)


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.7g}")


def _mean(part: list[tuple[int, float | None]]) -> tuple[int, float | None]:
    known = [loss for _, loss in part if loss is not None]
    return part[-1][0], _rounded(sum(known) / len(known)) if known else None
