"""A finished run as one line of JSON: all that figures need, and nothing of the machine's folders.

.. code-block:: text

    {"format": 1, "name": "gpt2_adamw_lr0.002_constant_4750_s42", "config": {…}, "environment": {…},
     "parameters": 124439808, "data": {…fingerprints…}, "outcome": "finished", "seconds": 5123.4,
     "evaluations": [[95, {"live": 5.1, "power_0_5": 5.0}], …], "train": [[48, 6.2], …],
     "pull": [[95, {"saturated": 0.02, …}], …]}
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from paceline.runs import records
from paceline.runs.config import ConfigError

FORMAT = 1
_POINTS = 100
"""Of the training loss: each is the mean of as many steps."""
_PULL = ("saturated", "gain/mean", "gap_rms")


# --- Writing --------------------------------------------------------------------------------------------


def is_ended(folder: Path) -> bool:
    """Whether a folder holds a run that has nothing left to do: it came to its end, or diverged."""
    timing = folder / "timing.jsonl"
    if not timing.exists() or not (folder / "records.jsonl").exists():
        return False
    lines = list(records.read(timing))
    return bool(lines) and lines[-1]["kind"] == "end"


def line_of(folder: Path) -> dict[str, Any]:
    """The line of a run that has ended, by the records in its folder."""
    if not is_ended(folder):
        raise ConfigError(f"{folder} holds no run that has ended")
    lines = list(records.read(folder / "records.jsonl"))
    timing = list(records.read(folder / "timing.jsonl"))
    about = lines[0]
    steps = [(line["step"], line["loss"]) for line in lines if line["kind"] == "step" and not line["skipped"]]
    size = max(1, about["steps"] // _POINTS)
    return {
        "format": FORMAT,
        "name": folder.name,
        "config": {name: _without_folders(name, value) for name, value in about["config"].items()},
        "environment": about["environment"],
        "parameters": about["parameters"],
        "data": {name: value for name, value in about["data"].items() if "fingerprint" in name},
        "outcome": timing[-1]["outcome"],
        "seconds": round(_seconds(timing), 1),
        "evaluations": [
            [line["step"], {view: _rounded(loss) for view, loss in line["losses"]["held-out"].items()}]
            for line in lines
            if line["kind"] == "evaluation"
        ],
        "train": [_mean(steps[i : i + size]) for i in range(0, len(steps), size)],
        "pull": [
            [line["step"], {name: _rounded(line[name]) for name in _PULL}]
            for line in lines
            if line["kind"] == "telemetry"
        ],
    }


def _without_folders(name: str, value: Any) -> Any:
    """Where things were is nobody's business, and not the same elsewhere. Names of the hub stay whole."""
    if name in ("data", "held_out"):
        return [item if item.startswith("hf:") else Path(item).name for item in value]
    local = name in ("fork", "chat_template") or (
        name in ("model", "tokenizer") and Path(str(value)).exists()
    )
    return Path(value).name if local and value is not None else value


def _seconds(timing: list[dict[str, Any]]) -> float:
    """At work, over all of its beginnings: not while it was stopped."""
    total, began = 0.0, None
    for line, after in zip(timing, [*timing[1:], None], strict=True):
        began = line["time"] if line["kind"] == "begin" else began
        if after is None or after["kind"] == "begin":
            total += line["time"] - (began if began is not None else line["time"])
    return total


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.7g}")


def _mean(part: list[tuple[int, float | None]]) -> list[Any]:
    known = [loss for _, loss in part if loss is not None]
    return [part[-1][0], _rounded(sum(known) / len(known)) if known else None]


def lines_in(root: Path) -> Iterator[dict[str, Any]]:
    """Those of all ended runs in a folder of runs, or in that of a sweep, by name."""
    root = root / "cells" if (root / "cells").is_dir() else root
    for folder in sorted(root.iterdir()):
        if folder.is_dir() and is_ended(folder):
            yield line_of(folder)


def write(lines: Iterable[dict[str, Any]], path: Path) -> int:
    """Write lines to a file; how many."""
    texts = [json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines]
    path.write_text("".join(texts), encoding="utf-8")
    return len(texts)


# --- Reading --------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a line says."""

    name: str
    config: dict[str, Any]
    environment: dict[str, Any]
    parameters: int
    outcome: str
    seconds: float
    evaluations: tuple[tuple[int, dict[str, float | None]], ...]
    train: tuple[tuple[int, float | None], ...]
    pull: tuple[tuple[int, dict[str, float | None]], ...]

    @property
    def diverged(self) -> bool:
        """Whether its loss stopped being a number."""
        return self.outcome == "diverged"

    def curve(self, view: str) -> list[tuple[int, float]]:
        """Held-out loss of these weights after each step that was evaluated."""
        found = ((step, losses.get(view)) for step, losses in self.evaluations)
        return [(step, loss) for step, loss in found if loss is not None]


def read(paths: Iterable[Path]) -> dict[str, Result]:
    """The results in files of lines, and of runs in folders, by name. Of two of one name, the later one."""
    found: dict[str, Result] = {}
    for path in paths:
        if not path.exists():
            raise ConfigError(f"there is no file or folder {path}")
        for number, line in enumerate(lines_in(path) if path.is_dir() else records.read(path), 1):
            result = _result(line, f"{path}, line {number}")
            found[result.name] = result
    return found


def _result(line: dict[str, Any], where: str) -> Result:
    if not isinstance(line, dict) or line.get("format") != FORMAT:
        raise ConfigError(f"{where} is no record of a run of the paper (`paceline paper --keep` writes them)")
    try:
        plain = ("name", "config", "environment", "parameters", "outcome", "seconds")
        series: dict[str, Any] = {n: tuple(map(tuple, line[n])) for n in ("evaluations", "train", "pull")}
        return Result(**{name: line[name] for name in plain}, **series)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{where} is no record of a run of the paper: {error!r}") from None
