"""Doing runs, several at once, and keeping a line of each."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.experiments import pool, records
from paceline.experiments.config import Run, as_mapping
from paceline.experiments.defaults.runs import Named
from paceline.experiments.run import drop_checkpoints


def work(runs: Named, out: Path, record: Path, jobs: int, tell: Callable[[str], None]) -> None:
    """Do the runs that the record has no line of, in their order."""
    done = {line["name"] for line in records.read(record)} if record.exists() else set()
    cells = [pool.Cell(run=run, folder=out / name) for name, run in runs.items() if name not in done]
    tell(f"{len(cells)} runs to do, {len(runs) - len(cells)} done before")
    for told in pool.run_all(cells, jobs, threads=1):
        match told:
            case (cell, pool.Ended(how="finished" | "diverged" as how)):
                line = summary(cell.folder, how)
                with record.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line, allow_nan=False) + "\n")
                tell(_for_a_terminal(line))
                drop_checkpoints(cell.folder)
            case (cell, pool.Ended(how=how, text=text)):
                tell(f"{cell.folder.name}: {how}: {text}")


def summary(folder: Path, outcome: str) -> dict[str, Any]:
    """All that is kept of a run: its settings, the losses at its end, and how it came there."""
    lines = list(records.read(folder / "records.jsonl"))
    about, steps = lines[0], [line["loss"] for line in lines if line["kind"] == "step"]
    ends = [line for line in lines if line["kind"] == "evaluation"]
    usual = as_mapping(Run(steps=1))
    timing = list(records.read(folder / "timing.jsonl"))
    return {
        "name": folder.name,
        "outcome": outcome,
        "config": {
            k: _without_folders(k, v) for k, v in about["config"].items() if v != usual[k] and k != "fork"
        },
        "losses": ends[-1]["losses"]["held-out"] if outcome == "finished" else {},
        "train": [_mean(steps[i : i + 50]) for i in range(0, len(steps), 50)],
        "seconds": round(timing[-1]["time"] - timing[0]["time"], 1),
        "environment": {k: about["environment"][k] for k in ("commit", "torch", "gpu")},
    }


def _without_folders(name: str, value: Any) -> Any:
    """Where the data were is nobody's business, and not the same elsewhere."""
    if name in ("data", "held_out"):
        return [Path(item).name for item in value]
    return Path(value).name if name in ("model", "tokenizer") else value


def _mean(losses: list[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None]
    return round(sum(known) / len(known), 4) if known else None


def _for_a_terminal(line: Mapping[str, Any]) -> str:
    known = {k: v for k, v in line["losses"].items() if v is not None}
    best = min(known, key=known.__getitem__) if known else None
    end = f"{known[best]:.4f} ({best})" if best else line["outcome"]
    return f"{line['name']:32} {end}, {line['seconds']:.0f} s"
