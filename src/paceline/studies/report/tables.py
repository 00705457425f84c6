"""The tables of a report, and the report itself."""

import statistics
from collections.abc import Iterable, Mapping

from paceline.studies.report.content import Report, Table
from paceline.studies.report.panels import panels
from paceline.studies.report.results import Outcomes, Result, differences
from paceline.studies.report.verdict import judge, remarks


def report(results: Iterable[Result], missing: Mapping[str, str], expected: int | None = None) -> Report:
    """All that is to be said of these runs; `expected` of them there should be."""
    outcomes = Outcomes(tuple(results))
    differing = differences(outcomes.results)
    ended = sum(result.outcome != "unfinished" for result in outcomes.results)
    complete = ended == (len(outcomes.results) if expected is None else expected)
    verdict = judge(outcomes, differing)
    return Report(
        title="What is gained by training for the model you return",
        subtitle=_subtitle(outcomes),
        verdict=verdict
        if complete
        else f"So far, with {ended} of {expected or len(outcomes.results)} runs: {verdict}",
        remarks=remarks(outcomes),
        warnings=tuple(_warnings(outcomes, missing, differing)),
        methods=outcomes.methods,
        results=results_table(outcomes),
        panels=panels(outcomes),
        tables=(_cost(outcomes), _runs(outcomes), _settings(outcomes)),
    )


def _subtitle(outcomes: Outcomes) -> str:
    first = outcomes.results[0]
    config, about = first.config, first.about
    tokens = about["steps"] * config["batch_size"] * config["length"]
    seeds = len(outcomes.seeds)
    return (
        f"{config['model']}, {about['parameters'] / 1e6:.3g}M parameters, on {', '.join(config['data'])}: "
        f"{about['steps']:,} steps, {tokens / 1e6:.3g}M tokens a run; {len(outcomes.lrs)} learning "
        f"rate{'s' if len(outcomes.lrs) > 1 else ''}, {seeds} seed{'s' if seeds > 1 else ''}"
    )


def _warnings(
    outcomes: Outcomes, missing: Mapping[str, str], differing: Mapping[str, list[str]]
) -> Iterable[str]:
    for name, values in differing.items():
        yield f"The runs differ in {name}: {', '.join(values[:4])}. They cannot be compared."
    for name, why in missing.items():
        yield f"{name} was not run: {why}"
    for result in outcomes.results:
        if result.outcome == "diverged":
            yield f"{result.name} diverged: {result.end.get('text', 'its loss is not finite')}"
        elif result.outcome == "unfinished":
            yield f"{result.name} has not come to its end."
    seen: dict[tuple[object, ...], str] = {}
    for result in outcomes.results:
        what = (result.lr, result.seed, *result.returned)
        if what in seen:
            yield f"{result.name} is {seen[what]} once more; the one that ended counts, or the last."
        seen[what] = result.name
    for seed in outcomes.seeds:
        ended = [r for r in outcomes.results if r.seed == seed and r.outcome == "finished"]
        if len({r.batches for r in ended}) > 1 and not differing:
            yield f"With seed {seed} the runs have not all seen the same batches."


# --- Results ------------------------------------------------------------------------------------------


def results_table(outcomes: Outcomes) -> Table:
    """What each method came to at each learning rate, and at its best one."""
    several = len(outcomes.seeds) > 1
    rows = []
    for method in outcomes.methods:
        best = outcomes.best_lr(method)
        cells = [_cell(outcomes, method, lr) for lr in outcomes.lrs]
        none = "diverged" if outcomes.has_ended(method) else "–"
        at_best = none if best is None else _cell(outcomes, method, best)
        rows.append((method, at_best, "" if best is None else f"{best:g}", *cells))
    return Table(
        key="results",
        title="Loss of the returned model",
        caption="Held-out cross-entropy in nats a token, lower is better"
        + (": mean ± standard deviation over seeds." if several else "."),
        columns=("method", "best", "at lr", *(f"lr {lr:g}" for lr in outcomes.lrs)),
        rows=tuple(rows),
        numeric=(False, *[True] * (2 + len(outcomes.lrs))),
    )


def _cell(outcomes: Outcomes, method: str, lr: float) -> str:
    values = list(outcomes.losses(method, lr).values())
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "diverged" if not known else f"{len(values) - len(known)} of {len(values)} diverged"
    if not known:
        return "–"
    spread = f" ± {statistics.stdev(known):.3f}" if len(known) > 1 else ""
    return f"{statistics.fmean(known):.4f}{spread}"


# --- Cost ---------------------------------------------------------------------------------------------


def _cost(outcomes: Outcomes) -> Table:
    rows: list[tuple[str, ...]] = []
    plain = None
    for method in outcomes.methods:
        runs = [r for r in outcomes.results if method in r.returned and r.tokens_per_second]
        if not runs:
            continue
        speed = statistics.median(r.tokens_per_second or 0.0 for r in runs)
        plain = plain or speed
        tokens = runs[0].config["batch_size"] * runs[0].config["length"]
        sizes = [size for r in runs if (size := r.optimizer_bytes(r.returned[method])) is not None]
        memory = f"{sizes[0] / 1e6:,.1f} MB" if sizes else "–"
        each = f"{sizes[0] / runs[0].about['parameters']:.0f}" if sizes else "–"
        whole = [r.seconds for r in runs if r.outcome == "finished"]
        wall = f"{statistics.median(whole):,.0f} s" if whole else "–"
        rows.append(
            (
                method,
                f"{1e3 * tokens / speed:,.1f} ms",
                f"{plain / speed:.2f}",
                f"{speed:,.0f}",
                wall,
                memory,
                each,
            )
        )
    return Table(
        key="cost",
        title="What it costs",
        caption="Medians over runs that may have shared the device. Methods of one run share its time, "
        f"which includes every average kept in it. Multiples are of {rows[0][0] if rows else 'nothing'}.",
        columns=(
            "method",
            "a step",
            "multiple",
            "tokens/s",
            "a run",
            "memory of the optimizer",
            "bytes a parameter",
        ),
        rows=tuple(rows),
        numeric=(False, *[True] * 6),
    )


def _runs(outcomes: Outcomes) -> Table:
    rows = tuple(
        (
            result.name,
            result.outcome,
            *(f"{result.lr:g}", str(result.seed)),
            "; ".join(
                f"{method}: {'–' if (loss := result.loss(weights)) is None else f'{loss:.4f}'}"
                for method, weights in result.returned.items()
            ),
            result.batches or "–",
        )
        for result in outcomes.results
    )
    return Table(
        key="runs",
        title="Every run",
        caption="Runs with the same digest of batches were trained on the same tokens in the same order.",
        columns=("run", "outcome", "lr", "seed", "loss of what it returns", "batches"),
        rows=rows,
        numeric=(False, False, True, True, False, False),
    )


def _settings(outcomes: Outcomes) -> Table:
    first = outcomes.results[0]
    chosen = {
        k: v for k, v in first.config.items() if k not in ("optimizer", "schedule", "averages", "lr", "seed")
    }
    data, where = first.about["data"], first.about["environment"]
    facts = {
        "seeds": ", ".join(map(str, outcomes.seeds)),
        **{name: _words(value) for name, value in chosen.items() if value is not None},
        "parameters": f"{first.about['parameters']:,}",
        **{f"data: {name.replace('_', ' ')}": _words(value) for name, value in data.items()},
        **{name: _words(value) for name, value in where.items() if value is not None},
    }
    return Table(
        key="settings",
        title="Settings and data",
        columns=("setting", "value"),
        rows=tuple(facts.items()),
    )


def _words(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
