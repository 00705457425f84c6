"""Figures of docs/results.md, from records alone and in the look of the paper's figures. No torch."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.experiments.config import ConfigError
from paceline.experiments.evidence import studies
from paceline.experiments.evidence.studies import ADAMW, DEFAULT, FREE, PACE, Room, Trial, loss_of
from paceline.experiments.evidence.tables import Results, Row, rows_of, told_apart, words_of
from paceline.experiments.paper.plots import Line, Look, Plot, Sheet, draw, of_method, of_order

LOSS = "held-out loss, nats"
_OWN = {ADAMW: "AdamW", FREE: "Schedule-Free", PACE: "PACE", DEFAULT: "PACE, default"}
"""Whose look in the paper's figures a method has."""
_BESIDE = {ADAMW: "EMA", PACE: "PACE", DEFAULT: "PACE, default"}


def all_figures(room: Room, results: Results, folder: Path) -> list[Path]:
    """Every figure that has a run, as PDF and PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, sheet in SHEETS.items():
        try:
            found = sheet(room, results)
        except ConfigError:  # settings are chosen from runs that are not done
            continue
        if any(y is not None for row in found.rows for plot in row for line in plot.lines for y in line.y):
            made += draw(found, folder / f"results-{name}")
    return made


# --- Over learning rates --------------------------------------------------------------------------------


def _label(row: Row) -> str:
    if row.method == FREE:
        return FREE
    if row.view == "average":
        return f"{row.method}: {'what it returns' if row.method == DEFAULT else words_of(row.view)}"
    return f"{row.method}: {words_of(row.view)}"


def _look(row: Row) -> Look:
    own = row.view in ("live", "average")
    look = of_method((_OWN if own else _BESIDE)[row.method])
    return look if own or row.method == ADAMW else replace(look, dashes=(1.0, 2.0))


def _over_rates(
    title: str,
    rows: Sequence[Row],
    label: Callable[[Row], str] = _label,
    look: Callable[[Row], Look] = _look,
) -> Plot:
    rates = sorted({lr for row in rows for lr in row.rates})
    lines = []
    for row in told_apart(rows):
        means = [row.mean(lr) for lr in rates]
        lines.append(
            Line(
                label=label(row),
                look=look(row),
                x=range(len(rates)),
                y=[None if mean is None else mean.loss for mean in means],
                spread=[0.0 if mean is None or mean.error is None else mean.error for mean in means],
                thin=row.view not in ("live", "average"),
            )
        )
    return Plot(
        title=title, lines=tuple(lines), x_label="learning rate", y_label=LOSS,
        ticks=tuple(f"{lr:g}" for lr in rates), own_legend=True,
    )  # fmt: skip


def _basin(title: str, subtitle: str, trials: Iterable[Trial], results: Results) -> Sheet:
    rows = rows_of(trials, results)
    plots = []
    for schedule, words in (("constant", "constant rate"), ("wsd", "decayed over the last fifth (WSD)")):
        plots.append(_over_rates(words, [row for row in rows if row.schedule == schedule]))
    return Sheet(
        title=title, subtitle=subtitle, rows=(tuple(plots),),
        notes=("Points are means over seeds, bars their standard error; settings were chosen with seed 1.",),
    )  # fmt: skip


def basin(room: Room, results: Results) -> Sheet:
    """Pretraining."""
    return _basin("The basin in pretraining", _of(room.pretraining), studies.basin(room, results), results)


def fine_tuning_basin(room: Room, results: Results) -> Sheet:
    """Fine-tuning."""
    trials = studies.fine_tuning_basin(room, results)
    return _basin("The basin in fine-tuning", _of(room.tuning), trials, results)


def batch(room: Room, results: Results) -> Sheet:
    """Larger batches, as many tokens."""
    trials = list(studies.batch(room))
    plots = []
    for factor in studies.BATCHES:
        rows = rows_of([one for one in trials if one.batch == factor], results)
        named = {row.setting: row for row in rows if row.view in ("live", "average")}
        best = [row for row in rows if row.view not in ("live", "average") and row.method == ADAMW]
        strengths = [one for one in named if one.startswith("c ")]

        def label(row: Row) -> str:
            return f"PACE {row.setting}" if row.method == PACE else _label(row)

        def look(row: Row, strengths: list[str] = strengths) -> Look:
            return of_order(strengths.index(row.setting), 3) if row.method == PACE else _look(row)

        plots.append(_over_rates(f"{factor} times the batch", [*named.values(), *best], label, look))
    return Sheet(
        title="Larger batches, as many tokens", subtitle=_of(room.pretraining), rows=(tuple(plots),),
        notes=(
            "With a larger batch as many times fewer steps. Points are means over one or three seeds,",
            "bars their standard error.",
        ),
    )  # fmt: skip


# --- Over strengths -------------------------------------------------------------------------------------


def strength(room: Room, results: Results) -> Sheet:
    """Loss and clipped share over c."""
    trials = {(one.setting, one.lr): one for one in studies.strength(room)}
    ticks = ("AdamW", "EMA", *(f"{c:g}" for c in studies.STRENGTHS))
    kinds = [(f"κ = {power:g}", power, "") for power in studies.SWEPT_POWERS]
    kinds.append(("κ = 0.5, lookahead", 0.5, ", lookahead"))
    upper, lower = [], []
    for lr in studies.SWEPT_RATES:
        losses, shares = [], []
        for place, (label, power, more) in enumerate(kinds):
            found = [trials.get((f"c {c:g}, κ {power:g}{more}", lr)) for c in studies.STRENGTHS]
            there = [(i + 2, one) for i, one in enumerate(found) if one is not None]
            look = of_order(place, len(kinds))
            x = [i for i, _ in there]
            y = [_loss(one, results, "average") for _, one in there]
            losses.append(Line(label=label, look=look, x=x, y=y))
            shares.append(Line(label=label, look=look, x=x, y=[_saturated(one, results) for _, one in there]))
        plain = trials[studies.PLAIN[1], lr]
        for row in rows_of([plain], results):
            method, at = ("AdamW", 0) if row.view == "live" else ("EMA", 1)
            losses.append(Line(label=_label(row), look=of_method(method), x=[at], y=[row.least]))
        upper.append(
            Plot(
                title=f"learning rate {lr:g}", lines=tuple(losses), x_label="c", y_label=LOSS, ticks=ticks,
                set_apart=2,
            )
        )  # fmt: skip
        lower.append(
            Plot(
                title="gains that are clipped at the end", lines=tuple(shares), x_label="c", y_label="share",
                ticks=ticks, set_apart=2, share=True,
            )
        )  # fmt: skip
    return Sheet(
        title="How hard to pull", subtitle=_of(room.pretraining), rows=(tuple(upper), tuple(lower)),
        notes=("PACE's own average; of AdamW its live weights and its best EMA; one seed.",),
    )  # fmt: skip


def _loss(one: Trial, results: Results, view: str) -> float | None:
    return loss_of(one, results, view)[0] if one.name in results else None


def _saturated(one: Trial, results: Results) -> float | None:
    said = results[one.name].pull if one.name in results else ()
    return next((share for _, reading in reversed(said) if (share := reading["saturated"]) is not None), None)


# --- Over steps -----------------------------------------------------------------------------------------


def budgets(room: Room, results: Results) -> Sheet:
    """Runs at a constant rate, and branches that leave them to end early."""
    trials = studies.together(studies.budgets(room)).values()
    plots = []
    for method in (ADAMW, PACE, DEFAULT):
        lines = []
        for one in trials:
            if one.method != method:
                continue
            result, view = results.get(one.name), "live" if method == ADAMW else "average"
            curve = result.curve(view) if result is not None else []
            if one.run.after is not None and curve:  # from where it left
                parent = results.get(one.run.after[0])
                start = [
                    point for point in (parent.curve(view) if parent else ()) if point[0] <= one.run.after[1]
                ]
                curve = [*start[-1:], *curve]
            kind = "AdamW WSD" if one.run.after else _OWN[method]
            ended = f"{curve[-1][1]:.3f}" if curve else ""
            lines.append(
                Line(
                    label="decayed branches" if one.run.after else f"constant rate, at its end {ended}",
                    look=of_method(kind), x=[step for step, _ in curve], y=[loss for _, loss in curve],
                    thin=bool(one.run.after), end=ended if one.run.after else "",
                )
            )  # fmt: skip
        title = f"{method}: {'live weights' if method == ADAMW else 'what it returns'}"
        plots.append(Plot(title=title, lines=tuple(lines), x_label="step", y_label=LOSS, own_legend=True))
    return Sheet(
        title="Branches that end early",
        subtitle=f"{_of(room.pretraining)}, learning rate {studies.SWEPT_RATES[0]:g}",
        rows=(tuple(plots),), notes=(),
    )  # fmt: skip


def gpt2(room: Room, results: Results) -> Sheet:
    """GPT-2's curves, a panel for each seed."""
    there = [one for one in studies.together(studies.gpt2(room)).values() if one.name in results]
    seeds = sorted({one.seed for one in there})
    plots = [_curves([one for one in there if one.seed == seed], results, f"seed {seed}") for seed in seeds]
    return Sheet(title="GPT-2", subtitle=_of(room.gpt2), rows=(tuple(plots),), notes=())


def _curves(trials: Sequence[Trial], results: Results, title: str) -> Plot:
    """What each could return: of AdamW its weights, and the average that is best at the end."""
    lines = []
    best = next((loss_of(one, results)[1] for one in trials if one.method == ADAMW), "live")
    for one in trials:
        for view in dict.fromkeys(("live", best)) if one.method == ADAMW else ("average",):
            curve = results[one.name].curve(view)
            row = Row(method=one.method, setting="", schedule=one.schedule, view=view, losses={})
            label = _label(row) + (", WSD" if one.schedule == "wsd" else "")
            # In the legend, not at the lines' ends: those are too close to each other.
            label += f"; at the end {curve[-1][1]:.3f}" if curve else ""
            lines.append(
                Line(
                    label=label, look=_look(row), x=[x for x, _ in curve], y=[y for _, y in curve],
                    thin=one.schedule == "wsd",
                )
            )  # fmt: skip
    return Plot(title=title, lines=tuple(lines), x_label="step", y_label=LOSS, zoom=True, own_legend=True)


def _of(settings: object) -> str:
    """What was trained, in words."""
    assert isinstance(settings, dict)
    tokens = settings["steps"] * settings["batch_size"] * settings["length"]
    batch = f"{settings['batch_size']} × {settings['length']}"
    return f"{settings['model']}, {settings['steps']:,} steps of {batch} tokens, {tokens / 1e6:,.1f}M in all"


SHEETS: dict[str, Callable[[Room, Results], Sheet]] = {
    "basin": basin,
    "strength": strength,
    "budgets": budgets,
    "batch": batch,
    "fine-tuning": fine_tuning_basin,
    "gpt2": gpt2,
}
