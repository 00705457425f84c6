"""What came out of a sweep: a line a cell, and a table, best first."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.lm.files import write_atomically
from paceline.runs.config import mark_of
from paceline.runs.run import end_of, has_checkpoint, is_finished
from paceline.studies.pool import Cell
from paceline.studies.report.content import Table
from paceline.studies.report.results import read_run
from paceline.studies.sweep.cells import differing, text
from paceline.studies.sweep.claims import Claims


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """What is known of a cell that has ended."""

    result: dict[str, Any]
    """Depends on the cell alone: the same wherever and however often it was run."""
    timing: dict[str, Any]


class Results:
    """The lines of all cells that have ended, in the order of the sweep, in two files."""

    def __init__(self, folder: Path, cells: Sequence[Cell]) -> None:
        self._folder, self._cells = folder, cells
        self._settings = differing([cell.run for cell in cells])
        self._finished: dict[Path, Line] = {}

    def write(self, claims: Claims) -> list[Line]:
        """Write the files anew, whole."""
        lines = []
        for cell, settings in zip(self._cells, self._settings, strict=True):
            if cell.folder not in self._finished and is_finished(cell.folder):
                self._finished[cell.folder] = _finished(cell, settings)
            if cell.folder in self._finished:
                lines.append(self._finished[cell.folder])
            elif (state := claims.state(cell.folder.name)).how == "failed":
                lines.append(_without_run(cell, settings, "failed", state.text))
            elif (text := diverged_before(cell)) is not None:
                lines.append(_without_run(cell, settings, "diverged", text))
        _write(self._folder / "results.jsonl", [line.result for line in lines])
        _write(self._folder / "timing.jsonl", [line.timing for line in lines])
        return lines


def _finished(cell: Cell, settings: dict[str, Any]) -> Line:
    found = read_run(cell.folder)
    assert found is not None
    losses = {view: points[-1][1] for view, points in found.curves.items()}
    result = _head(cell, settings, found.outcome) | {
        "step": found.end["step"],
        "returned": found.about["returned"],
        "losses": losses if found.outcome == "finished" else {},
    }
    timing = {
        "cell": cell.folder.name,
        "seconds": round(found.seconds, 1),
        "tokens_per_second": found.tokens_per_second,
        "text": found.end.get("text", ""),
    }
    return Line(result=result, timing=timing)


def _without_run(cell: Cell, settings: dict[str, Any], outcome: str, why: str) -> Line:
    timing = {"cell": cell.folder.name, "seconds": None, "tokens_per_second": None, "text": why}
    nothing: dict[str, Any] = {"step": None, "returned": None, "losses": {}}
    return Line(result=_head(cell, settings, outcome) | nothing, timing=timing)


def diverged_before(cell: Cell) -> str | None:
    """Why a branch is not done: what it goes on from diverged before it came there. None: it did not.

    Done from its first step, the branch would have diverged at the same one: until there the two are one run.
    """
    if cell.after is None or is_finished(cell.folder):
        return None
    folder, step = cell.after
    end = end_of(folder)
    if end is None or end["outcome"] != "diverged" or end["step"] > step or has_checkpoint(folder, step):
        return None
    return f"not done: {folder.name}, which it goes on from after step {step}, diverged after {end['step']}"


def _head(cell: Cell, settings: dict[str, Any], outcome: str) -> dict[str, Any]:
    return {
        "cell": cell.folder.name,
        "hash": mark_of(cell.run),
        "settings": settings,
        "outcome": outcome,
    }


def _write(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    rows = [json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines]
    write_atomically(path, "".join(rows).encode())


# --- The table ----------------------------------------------------------------------------------------


def table_of(lines: Sequence[dict[str, Any]]) -> Table:
    """Lines of `results.jsonl` as a table: best first, seeds together, by the returned weights."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault(json.dumps(_without_seed(line)), []).append(line)
    rows = sorted((_row(group) for group in groups.values()), key=lambda row: row[0])
    names = [*_without_seed(lines[0])] if lines else []
    return Table(
        key="sweep",
        title="Best first",
        caption="Held-out loss of the returned weights, in nats; ± is the standard deviation over seeds.",
        columns=(*names, "loss", "±", "weights", "live", "seeds", "ended"),
        rows=tuple(row[1] for row in rows),
        numeric=(*(False for _ in names), True, True, False, True, True, False),
    )


def _without_seed(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line["settings"].items() if name != "seed"}


def _row(group: list[dict[str, Any]]) -> tuple[tuple[bool, bool, float], tuple[str, ...]]:
    """What to sort by, and the row: those of which every seed came to its end are first."""
    lines = [line for line in group if line["losses"] and None not in line["losses"].values()]
    known, view = [line["losses"] for line in lines], lines[0]["returned"] if lines else ""
    losses = [by_view[view] for by_view in known]
    mean = statistics.fmean(losses) if losses else 0.0
    spread = f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
    outcomes = [line["outcome"] for line in group]
    ended = ", ".join(f"{outcomes.count(o)} {o}" for o in ("finished", "diverged", "failed") if o in outcomes)
    cells = [text(value) for value in _without_seed(group[0]).values()]
    live = statistics.fmean(by_view["live"] for by_view in known) if known else 0.0
    shown = (f"{mean:.4f}", spread, view, f"{live:.4f}") if known else ("", "", "", "")
    order = not known, len(known) < len(group), mean
    return order, (*cells, *shown, str(len(group)), ended)
