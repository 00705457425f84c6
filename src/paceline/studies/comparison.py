"""The result of a comparison: tables, warnings and verdict, also while runs are under way. No torch."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from paceline.lm.files import Damaged
from paceline.runs.config import ConfigError
from paceline.runs.terminal import say
from paceline.studies.lines import Finished, files_of, find_runs
from paceline.studies.page import Page, write
from paceline.studies.panels import charts, rates, reference
from paceline.studies.runs import folder_of, read_plan
from paceline.studies.table import Table
from paceline.studies.text import Listing
from paceline.studies.verdict import of_table


@final
@dataclass(kw_only=True, slots=True)
class Found:
    """The runs found in folders and in files of lines."""

    runs: list[Finished] = field(default_factory=list)
    waiting: int = 0
    """Planned runs that have written nothing yet."""
    unplanned: int = 0
    """Runs in the folder of a comparison that its plan, which is the latest command's, leaves out."""
    missing: dict[str, str] = field(default_factory=dict)
    """Methods that could not be run, and why."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Runs that cannot be read, and why."""

    def take(self, folders: Sequence[Path]) -> None:
        """Read the runs in folders."""
        for folder in folders:
            _, timing = files_of(folder)
            try:
                run = Finished.of_folder(folder)
            except (OSError, ValueError) as error:
                self.damaged[folder.name] = str(error)
                continue
            if run is not None:
                self.runs.append(run)
            elif timing.exists() and timing.stat().st_size:
                self.damaged[folder.name] = f"{folder} has lost its records.jsonl"
            else:
                self.waiting += 1


def read(paths: Iterable[Path]) -> Found:
    """Return what folders and files of lines hold; raise ConfigError if that is no run at all."""
    found = Found()
    for path in paths:
        if path.is_file():
            found.runs += Finished.read([path]).values()
        elif (plan := read_plan(path)) is not None:
            found.missing |= plan["missing"]
            found.take([folder_of(path, name) for name in plan["runs"]])
            others = {one.name for one in (path / "runs").glob("*") if one.is_dir()} - {*plan["runs"]}
            found.unplanned += len(others)
        else:
            found.take(find_runs([path]))
    if not found.runs:
        if found.damaged:
            raise Damaged("; ".join(found.damaged.values()))
        raise ConfigError("nothing is finished yet: none of these runs has written anything")
    return found


def show(found: Found, folder: Path) -> None:
    """Write the page on runs into a folder, and print its tables and its verdict."""
    page = page_of(found)
    shown = (table for table in page.tables if table.key in ("results", "cost"))
    for line in (*(line for table in shown for line in table.titled()), "", *page.warnings, page.verdict):
        say(line)
    say(f"report: {write(page, folder)}")


def page_of(found: Found) -> Page:
    """Return the page on runs."""
    runs, table = found.runs, Table.of(found.runs)
    best, verdict = reference(table), of_table(table)
    ended, planned = sum(run.is_ended for run in runs), len(runs) + len(found.damaged) + found.waiting
    listings = (results(table), _cost(table), _runs(runs), _settings(runs[0], table))
    so_far = "" if ended == planned else f"So far, with {ended} of {planned} runs: "
    return Page(
        title="What is gained by training for the model you return",
        subtitle=_subtitle(runs[0], table),
        verdict=so_far + verdict.sentence,
        remarks=verdict.remarks,
        warnings=(*verdict.warnings, *_warnings(found)),
        methods=table.values("method"),
        charts=charts(table),
        tables=tuple(listing for listing in listings if listing.rows),
        lr=None if best is None else best.rows[0].lr,
    )


def _subtitle(first: Finished, table: Table) -> str:
    tokens, data = first.steps * first["batch_size"] * first["length"], first.config.get("data", ())
    return (
        f"{first['model']}, {first.parameters / 1e6:.3g}M parameters, on {', '.join(data) or 'other data'}: "
        f"{first.steps:,} steps, {tokens / 1e6:.3g}M tokens a run; {_count(rates(table), 'learning rate')}, "
        f"{_count(table.values('seed'), 'seed')}"
    )


def _count(values: Sequence[object], name: str) -> str:
    return f"{len(values)} {name}{'' if len(values) == 1 else 's'}"


def _warnings(found: Found) -> Iterator[str]:
    runs = found.runs
    for name, why in found.missing.items():
        yield f"{name} was not run: {why}"
    for name, why in found.damaged.items():
        yield f"{name} is left out: {why}"
    if found.unplanned:
        yield f"{found.unplanned} run(s) of an earlier command in this folder are left out"
    seen: dict[tuple[object, ...], str] = {}
    for run in runs:
        if run.diverged:
            yield f"{run.name} diverged: {run.why or 'its loss is not finite'}"
        elif not run.is_ended:
            yield f"{run.name} has not come to its end."
        if run.seconds is None:
            yield f"{run.name}: its clock went back, so how long it took is not known."
        alike = {seen[what]: None for m in run.methods if (what := (m, run.lr, run.seed)) in seen}
        for other in alike:
            said = f"{run.name} has the method, learning rate and seed of {other}"
            yield f"{said}; only the one that ended counts, or the last."
        seen |= {(method, run.lr, run.seed): run.name for method in run.methods}
    for seed in dict.fromkeys(run.seed for run in runs):
        if len({run.batches for run in runs if run.seed == seed and run.outcome == "finished"}) > 1:
            yield f"With seed {seed} the runs have not all seen the same batches."


# --- Tables ---------------------------------------------------------------------------------------------


def results(table: Table) -> Listing:
    """Return what each method came to at each learning rate, and at its best one."""
    lrs = rates(table)
    rows = []
    for method, own in table.by("method").items():
        best, at = own.best("lr"), own.by("lr")
        ended = [row.diverged for row in own if row.is_ended]
        none = "–" if not ended else "diverged" if all(ended) else "some diverged"
        shown = (none, "") if best is None else (_cell(best), f"{best.rows[0].lr:g}")
        rows.append((method, *shown, *(_cell(at[lr]) if lr in at else "–" for lr in lrs)))
    several = len(table.values("seed")) > 1
    return Listing(
        key="results",
        title="Loss of the returned model",
        caption="Held-out cross-entropy in nats a token, lower is better"
        + (": mean ± standard error over seeds." if several else "."),
        columns=("method", "best", "at lr", *(f"lr {lr:g}" for lr in lrs)),
        rows=tuple(rows),
        numeric=(False, *[True] * (2 + len(lrs))),
    )


def _cell(rows: Table) -> str:
    if rows.diverged:
        count = len(rows.losses)
        return "diverged" if rows.diverged == count else f"{rows.diverged} of {count} diverged"
    mean = rows.mean()
    return "–" if mean is None else mean.text()


def _cost(table: Table) -> Listing:
    rows, plain = list[tuple[str, ...]](), None
    for method, own in table.by("method").items():
        speeds = [row.speed for row in own if row.speed]
        if not speeds:
            continue
        speed, first = statistics.median(speeds), own.rows[0]
        plain = plain or speed
        size = next((row.memory[row.returned] for row in own if row.returned in row.memory), None)
        whole = [row.seconds for row in own if row.outcome == "finished" and row.seconds is not None]
        rows.append(
            (
                method,
                f"{1e3 * first['batch_size'] * first['length'] / speed:,.1f} ms",
                f"{plain / speed:.2f}",
                f"{speed:,.0f}",
                f"{statistics.median(whole):,.0f} s" if whole else "–",
                "–" if size is None else f"{size / 1e6:,.1f} MB",
                "–" if size is None else f"{size / first.parameters:.0f}",
            )
        )
    named = ("a step", "multiple", "tokens/s", "a run", "memory of the optimizer", "bytes a parameter")
    return Listing(
        key="cost",
        title="What it costs",
        caption="Medians over runs that may have shared the device. Methods of one run share its time, "
        f"which includes every average kept in it. Multiples are of {table.rows[0].method}.",
        columns=("method", *named),
        rows=tuple(rows),
        numeric=(False, *[True] * len(named)),
    )


def _runs(runs: Iterable[Finished]) -> Listing:
    rows = []
    for run in runs:
        losses = ((row.method, row.loss) for row in run.each())
        said = "; ".join(f"{method}: {'–' if loss is None else f'{loss:.4f}'}" for method, loss in losses)
        rows.append((run.name, run.outcome, f"{run.lr:g}", str(run.seed), said, run.batches or "–"))
    return Listing(
        key="runs",
        title="Every run",
        caption="Runs with the same digest of batches were trained on the same tokens in the same order.",
        columns=("run", "outcome", "lr", "seed", "loss of what it returns", "batches"),
        rows=tuple(rows),
        numeric=(False, False, True, True, False, False),
    )


def _settings(first: Finished, table: Table) -> Listing:
    own = ("method", "optimizer", "schedule", "averages", "lr", "seed")
    facts = {
        "seeds": table.values("seed"),
        **{name: value for name, value in first.config.items() if name not in own},
        "parameters": first.parameters,
        **{f"data: {name.replace('_', ' ')}": value for name, value in first.data.items()},
        **first.environment,
    }
    return Listing(
        key="settings",
        title="Settings and data",
        columns=("setting", "value"),
        numeric=(False, False),
        rows=tuple((name, _words(value)) for name, value in facts.items() if value is not None),
    )


def _words(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
