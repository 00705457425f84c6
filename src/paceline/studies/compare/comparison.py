"""A comparison in its folder: planned, run, reported; it goes on where it was, whatever happened.

.. code-block:: text

    FOLDER/plan.json      what is run, and how many at once         FOLDER/report.html    what came out
    FOLDER/runs/NAME/     each run: records.jsonl, timing.jsonl     FOLDER/*.csv, *.png   the parts of it
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.lm.files import locked
from paceline.runs.config import ConfigError
from paceline.runs.run import drop_checkpoints, is_finished
from paceline.studies import pool
from paceline.studies.compare.plan import Plan, Request, make_plan
from paceline.studies.report import files, results, tables
from paceline.studies.report.content import Report


@dataclass(frozen=True, kw_only=True, slots=True)
class Reported:
    """The comparison is at its end."""

    report: Report
    page: Path
    failed: tuple[str, ...]
    """Runs that could not be done, and why."""


def compare(
    request: Request, folder: Path, *, keep_models: bool, tell: Callable[[str], None]
) -> Iterator[Plan | pool.Told | Reported]:
    """Plan, run what is not finished, and write the report; yields what happens."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from None
    with locked(folder):
        plan = make_plan(request, folder, tell)
        yield plan
        kept = folder / "models-kept"  # once asked for, models are kept: their runs may be done already
        if keep_models:
            kept.touch()
        keep_models = kept.exists()
        failed = {}
        for told in pool.run_all(
            [c for c in plan.cells if not is_finished(c.folder)], plan.jobs, plan.threads
        ):
            yield told
            match told:
                case (cell, pool.Ended(how="failed" | "refused" | "stopped", text=text)):
                    failed[cell.folder.name] = text
                case (cell, pool.Ended(how="finished" | "diverged")) if not keep_models:
                    drop_checkpoints(cell.folder)
        if not keep_models:
            for cell in plan.cells:
                if is_finished(cell.folder):  # killed before its checkpoints went
                    drop_checkpoints(cell.folder)
        report = report_of([cell.folder for cell in plan.cells], plan.missing)
        page = files.write(report, folder, tell)
        yield Reported(report=report, page=page, failed=tuple(f"{k}: {v}" for k, v in failed.items()))


# --- The report -----------------------------------------------------------------------------------------


def report_of(folders: list[Path], missing: Mapping[str, str]) -> Report:
    """The report on runs in these folders."""
    found = [results.read_run(folder) for folder in folders if (folder / "records.jsonl").exists()]
    known = [result for result in found if result is not None]
    if not known:
        raise ConfigError("none of these runs has written anything yet")
    return tables.report(known, missing, expected=len(folders))


def report_again(paths: list[Path], folder: Path, tell: Callable[[str], None]) -> Reported:
    """The report on any runs, or on the comparison in a folder."""
    missing: dict[str, str] = {}
    if len(paths) == 1 and (plan := paths[0] / "plan.json").exists():
        kept = json.loads(plan.read_text(encoding="utf-8"))
        missing, folders = kept["missing"], [paths[0] / "runs" / name for name in kept["runs"]]
    else:
        folders = results.find_runs(paths)
    report = report_of(folders, missing)
    return Reported(report=report, page=files.write(report, folder, tell), failed=())
