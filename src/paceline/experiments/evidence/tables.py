"""Tables of docs/results.md from records alone: a cell is the mean over seeds. No torch."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import final

from paceline.experiments.config import named_averages
from paceline.experiments.evidence import studies
from paceline.experiments.evidence.studies import ADAMW, FREE, Room, Trial, loss_of
from paceline.experiments.pages import markdown
from paceline.experiments.paper.lines import Result

Results = Mapping[str, Result]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """Of the seeds of one place: the loss, its standard error, and how many there are."""

    loss: float
    error: float | None
    count: int

    def __format__(self, sign: str) -> str:
        if not math.isfinite(self.loss):
            return "diverged"
        return f"{self.loss:{sign}.3f}" + ("" if self.error is None else f" ± {self.error:.3f}")

    def __str__(self) -> str:
        return f"{self}"

    def __neg__(self) -> "Mean":
        return replace(self, loss=-self.loss)


def mean_of(losses: Sequence[float]) -> Mean | None:
    """None of no loss.

    >>> str(mean_of([3.0, 3.2])), str(mean_of([3.0]))
    ('3.100 ± 0.100', '3.000')
    """
    if not losses:
        return None
    finite = all(map(math.isfinite, losses))
    error = stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 and finite else None
    return Mean(loss=fmean(losses) if finite else math.inf, error=error, count=len(losses))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A method with what it returns, over learning rates and seeds."""

    method: str
    setting: str
    schedule: str
    view: str
    """The weights that are returned, by their name in evaluations."""
    losses: Mapping[tuple[float, int], float]
    """By rate and seed."""
    is_whole: bool = True
    """Whether the seed that settings are chosen by has been run at all rates; otherwise nobody knows which
    is best."""

    @property
    def title(self) -> str:
        """In words."""
        named = self.method + ("" if self.schedule == "constant" else f", {self.schedule}")
        return f"{named} ({self.setting}): {words_of(self.view)}"

    @property
    def kind(self) -> tuple[str, str, str]:
        """What was run: rows of one kind differ in the weights alone."""
        return self.method, self.schedule, self.setting

    @property
    def least(self) -> float:
        """At its best rate, of the seed that settings are chosen by."""
        return self.losses.get((self.best_rate, studies.SEED), math.inf)

    @property
    def rates(self) -> list[float]:
        """Those that there are."""
        return sorted({lr for lr, _ in self.losses})

    @property
    def best_rate(self) -> float:
        """By the seed that settings are chosen by."""
        return min(self.rates, key=lambda lr: self.losses.get((lr, studies.SEED), math.inf))

    def mean(self, lr: float) -> Mean | None:
        """Over the seeds of a rate."""
        return mean_of([loss for (rate, _), loss in self.losses.items() if rate == lr])

    def is_as(self, other: "Row") -> bool:
        """Whether a reader of tables would see no difference."""
        return all(math.isclose(y, other.losses[place], abs_tol=5e-4) for place, y in self.losses.items())

    def over(self, other: "Row", lr: float, other_lr: float) -> Mean | None:
        """How much worse it is at a rate than the other at its own, seed by seed."""
        own = {seed: y for (rate, seed), y in self.losses.items() if math.isclose(rate, lr, rel_tol=1e-6)}
        theirs = {seed: y for (rate, seed), y in other.losses.items() if rate == other_lr}
        return mean_of([own[seed] - theirs[seed] for seed in sorted(own.keys() & theirs.keys())])


def rows_of(trials: Iterable[Trial], results: Results) -> list[Row]:
    """A row for each method, schedule and kind of weights: its own, and the best average beside them.

    Which average beside is best is seen at the best rate of the seed that settings are chosen by, once for
    all rates; so not before all are run. A rate that this seed is to be run at, and was not, has no other
    seed either: means of other seeds beside it would differ by the seeds.
    """
    groups: dict[tuple[str, str, str], list[Trial]] = {}
    for one in trials:
        groups.setdefault((one.method, one.schedule, one.setting), []).append(one)
    found = []
    for (method, schedule, setting), planned in groups.items():
        first = [one for one in planned if one.seed == studies.SEED]
        missing = {one.lr for one in first if one.name not in results}
        own = [one for one in planned if one.name in results and one.lr not in missing]
        is_whole = not missing if first else len({one.lr for one in planned}) == 1
        views = _views(own, results)[: None if is_whole else 1] if own else ()
        for view in views:
            losses = {(one.lr, one.seed): loss_of(one, results, view)[0] for one in own}
            found.append(
                Row(method=method, setting=setting, schedule=schedule, view=view, losses=losses,
                    is_whole=is_whole)
            )  # fmt: skip
    return found


def told_apart(rows: Iterable[Row]) -> list[Row]:
    """Without averages beside a method that are what it returns anyway, or equal it to three digits."""
    kept: list[Row] = []
    for row in rows:
        last = kept[-1] if kept else None
        same = last is not None and last.kind == row.kind and row.is_as(last)
        kept += [] if same else [row]
    return kept


def _views(own: list[Trial], results: Results) -> list[str]:
    """Its own weights, and the best of those beside them."""
    first = own[0].views[0]
    chosen = [one for one in own if one.seed == studies.SEED] or own
    beside = [
        (loss_of(one, results, view)[0], view)
        for one in chosen
        for view in one.views[1:]
        if any(losses.get(view) is not None for _, losses in results[one.name].evaluations[-1:])
    ]
    return [first, *([min(beside)[1]] if beside else [])]


def words_of(view: str) -> str:
    """What weights are, for readers.

    >>> words_of("power_0_7"), words_of("average")
    ('EMA κ = 0.7', 'its average')
    """
    if view.startswith("power_"):
        return f"EMA κ = {view.removeprefix('power_').replace('_', '.')}"
    return {"average": "its average"}.get(view, view)


# --- Markdown -------------------------------------------------------------------------------------------


def over_rates(rows: Sequence[Row]) -> str:
    """Losses of rows at every rate."""
    rates = sorted({lr for row in rows for lr in row.rates})
    body = [[row.title, *(str(row.mean(lr) or "") for lr in rates)] for row in told_apart(rows)]
    return markdown(["learning rate", *(f"{lr:g}" for lr in rates)], body)


def regret(rows: Sequence[Row], multiples: Sequence[float] = (1, 2, 3, 10)) -> str:
    """Over the best tuned baseline, at multiples of AdamW's best rate; paired by seed."""

    found = baseline(rows)
    if found is None:
        return ""
    best, lr = found
    known = {rate for row in rows for rate in row.rates}
    there = [times for times in multiples if any(math.isclose(rate, times * lr) for rate in known)]
    body = []
    for row in told_apart(rows):
        at_best = row.over(best, row.best_rate, best.best_rate) if row.is_whole else None
        over = [at_best, *(row.over(best, times * lr, best.best_rate) for times in there)]
        body.append(
            [
                row.title,
                f"{row.best_rate:g}" if row.is_whole else "",
                *("" if mean is None else f"{mean:+}" for mean in over),
            ]
        )
    head = ["", "its best rate", "there", *(f"{times:g} × {lr:g}" for times in there)]
    said = f"Over {best.mean(best.best_rate)}: {best.title} at {best.best_rate:g}, seed by seed."
    return f"{markdown(head, body)}\n\n{said}"


def baseline(rows: Sequence[Row]) -> tuple[Row, float] | None:
    """The best of what is not PACE, and the best rate of AdamW at a constant one; None without AdamW at all
    its rates."""
    others = [row for row in rows if row.method in (ADAMW, FREE) and row.is_whole]
    plain = [row for row in others if row.method == ADAMW and row.schedule == "constant"]
    if not plain:
        return None
    return min(others, key=lambda row: row.least), min(plain, key=lambda row: row.least).best_rate


# --- One study each -------------------------------------------------------------------------------------


def tuning_table(room: Room, results: Results) -> str:
    """Every setting that was tried, with the weights that were best at each rate."""
    return _tried(list(studies.tuning(room)), results)


def fine_tuning_table(room: Room, results: Results) -> str:
    """The same of fine-tuning."""
    return _tried(list(studies.fine_tuning(room)), results)


def _tried(trials: list[Trial], results: Results) -> str:
    rates = sorted({one.lr for one in trials})
    body = []
    for method, setting in dict.fromkeys((one.method, one.setting) for one in trials):
        cells = []
        for lr in rates:
            (one,) = [t for t in trials if (t.method, t.setting, t.lr) == (method, setting, lr)]
            if one.name not in results:
                cells.append("")
                continue
            loss, view, _ = loss_of(one, results)
            cells.append(f"{loss:.3f} ({words_of(view)})" if math.isfinite(loss) else "diverged")
        body.append([method, setting, *cells])
    return markdown(["", "setting", *(f"{lr:g}" for lr in rates)], body)


def basin_tables(room: Room, results: Results) -> str:
    """Losses over rates, and regret."""
    return _basin_tables(list(studies.basin(room, results)), results)


def fine_tuning_basin_tables(room: Room, results: Results) -> str:
    """The same of fine-tuning."""
    return _basin_tables(list(studies.fine_tuning_basin(room, results)), results)


def _basin_tables(trials: list[Trial], results: Results) -> str:
    rows = rows_of(trials, results)
    return f"{over_rates(rows)}\n\n{regret(rows)}"


def strength_table(room: Room, results: Results) -> str:
    """c by κ at two rates, with the share of gains at 1 in the last reading; and updates every few steps."""
    trials = [one for one in studies.strength(room) if one.method != ADAMW]
    rates = studies.SWEPT_RATES
    body = []
    for setting in dict.fromkeys(one.setting for one in trials):
        cells = []
        for lr in rates:
            (one,) = {t.name: t for t in trials if (t.setting, t.lr) == (setting, lr)}.values()
            cells += _pulled(one, results)
        body.append([setting, *cells])
    plain = {lr: studies.trial("gpt", room.pretraining, studies.PLAIN, lr) for lr in rates}
    for view in ("live", *map(_view, studies.SWEPT_POWERS)):
        cells = []
        for one in plain.values():
            cells += [f"{loss_of(one, results, view)[0]:.3f}" if one.name in results else "", "", ""]
        body.append([f"AdamW: {words_of(view)}", *cells])
    head = [word for lr in rates for word in (f"{lr:g}", "best beside", "at 1")]
    return markdown(["", *head], body)


def _pulled(one: Trial, results: Results) -> list[str]:
    if one.name not in results:
        return ["", "", ""]
    own, (best, view, _) = loss_of(one, results, "average")[0], loss_of(one, results)
    pull = [said["saturated"] for _, said in results[one.name].pull if said.get("saturated") is not None]
    share = f"{100 * pull[-1]:.1f} %" if pull and pull[-1] is not None else ""
    if not math.isfinite(own):
        return ["diverged", "", share]
    return [f"{own:.3f}", f"{best:.3f} ({words_of(view)})", share]


def shorter_tables(room: Room, results: Results) -> str:
    """Of a harder pull toward a shorter average."""
    return _over_ema(studies.shorter(room), studies.SHORTER_RATES, results)


def harder_tables(room: Room, results: Results) -> str:
    """Of the default pulled harder: at a high rate, and with a larger batch."""
    trials, parts = list(studies.harder(room)), []
    for factor in (1, studies.BATCHES[0]):
        own = [one for one in trials if one.batch == factor]
        rates = tuple(dict.fromkeys(one.lr for one in own))
        title = "At ten times the best rate" if factor == 1 else f"With {factor} times the batch"
        parts.append(f"{title}:\n\n{_over_ema(own, rates, results)}")
    return "\n\n".join(parts)


def fine_tuning_harder_tables(room: Room, results: Results) -> str:
    """Of the default pulled harder in fine-tuning."""
    return _over_ema(studies.fine_tuning_harder(room, results), studies.FINE_SEEDED_RATES, results)


def _over_ema(trials: Iterable[Trial], rates: tuple[float, ...], results: Results) -> str:
    """Losses, and over those of AdamW's best EMA at the same rate."""
    rows = rows_of(trials, results)
    emas = [row for row in rows if row.method == ADAMW and row.view != "live"]
    if not emas:
        return over_rates(rows)
    (ema,) = emas
    body = []
    for row in told_apart(rows):
        found = [row.over(ema, lr, lr) for lr in rates]
        if row is not ema:
            body.append([row.title, *("" if one is None else f"{one:+}" for one in found)])
    head = [f"over {ema.title} at", *(f"{lr:g}" for lr in rates)]
    return f"{over_rates(rows)}\n\n{markdown(head, body)}"


def budgets_table(room: Room, results: Results) -> str:
    """Where decayed branches end, and the run that they left at the same step."""
    trials = studies.together(studies.budgets(room))
    body = []
    for one in trials.values():
        if one.run.after is None or one.name not in results:
            continue
        whole = results.get(one.run.after[0])
        view = "live" if one.method == ADAMW else "average"
        ended = loss_of(one, results, view)[0]
        steps = one.run.steps
        beside = "" if whole is None else next((f"{y:.3f}" for x, y in whole.curve(view) if x == steps), "")
        body.append([one.method, f"{steps:,}", f"{ended:.3f} ({words_of(view)})", beside])
    return markdown(["", "steps", "decayed", "at a constant rate"], body)


def batch_tables(room: Room, results: Results) -> str:
    """A table for each size of batch."""
    trials = list(studies.batch(room))
    parts = []
    for factor in studies.BATCHES:
        rows = rows_of([one for one in trials if one.batch == factor], results)
        parts.append(f"{factor} times the batch:\n\n{over_rates(rows)}")
    return "\n\n".join(parts)


def gpt2_table(room: Room, results: Results) -> str:
    """All weights that a run could return."""
    body = []
    for one in studies.together(studies.gpt2(room)).values():
        if one.name in results:
            losses = results[one.name].evaluations[-1][1]
            cells = [f"{loss:.3f}" if (loss := losses.get(view)) is not None else "" for view in _COLUMNS]
            body.append([f"{one.method}, {one.schedule}", str(one.seed), *cells])
    return markdown(["", "seed", *map(words_of, _COLUMNS)], body)


def _view(power: float) -> str:
    ((view, _),) = named_averages([f"power:{power:g}"])
    return view


_COLUMNS = ("live", "average", *map(_view, studies.POWERS))

TABLES: dict[str, Callable[[Room, Results], str]] = {
    "tuning": tuning_table,
    "basin": basin_tables,
    "strength": strength_table,
    "shorter": shorter_tables,
    "budgets": budgets_table,
    "batch": batch_tables,
    "harder": harder_tables,
    "fine-tuning": fine_tuning_table,
    "fine-tuning-basin": fine_tuning_basin_tables,
    "fine-tuning-harder": fine_tuning_harder_tables,
    "gpt2": gpt2_table,
}
