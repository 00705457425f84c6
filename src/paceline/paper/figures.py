"""What is in each figure of the paper, from results alone."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from paceline.paper import spaces as s
from paceline.paper.cells import Reading
from paceline.paper.labels import Experiment, cells, experiment
from paceline.paper.plots import Line, Look, Plot, Sheet, draw, of_method, of_order
from paceline.paper.results import Book, Curve, at
from paceline.paper.scales import Scale
from paceline.studies.lines import Result

LOSS = "held-out loss (nats a token)"
Rows = tuple[tuple[Plot, ...], ...]


def figure(label: str, scale: Scale, results: Mapping[str, Result], folder: Path) -> tuple[list[Path], Book]:
    """Draw a figure of the paper into a folder; the files, and what they are made of."""
    about = experiment(label)
    book = Book.of(cells(label, scale), results)
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / (about.label.removeprefix("fig:") + ("" if scale.name == "paper" else f"-{scale.name}"))
    return draw(sheet(about, scale, book), stem), book


def sheet(about: Experiment, scale: Scale, book: Book) -> Sheet:
    """The figure, as values."""
    rows, printed = _DRAWN[about.label](book, scale)
    notes = [f"{what}: {paper} in the paper, {ours or 'missing'} here" for what, paper, ours in printed]
    if book.missing:
        notes.append(f"{len(book.missing)} of {len(book.names)} runs are missing")
    if book.odd:
        notes.append(f"left out, of other settings than here: {len(book.odd)} runs")
    return Sheet(
        title=about.title,
        subtitle=f"{about.label} · {_subtitle(scale, book)}",
        rows=rows,
        notes=tuple(notes),
    )


def _subtitle(scale: Scale, book: Book) -> str:
    """What was trained; at a smaller scale than the paper's it says so."""
    found = {}
    for cell in book.cells:
        row = scale.models[cell.model]
        tokens = int(row.settings["batch_size"]) * int(row.settings["length"])
        found[row.short, row.steps] = f"{row.short}, {row.steps:,} steps of {tokens:,} tokens"
    trained = "; ".join(found.values())
    return trained if scale.name == "paper" else f"scale {scale.name}, not the paper's: {trained}"


# --- Words ----------------------------------------------------------------------------------------------


def _number(value: float) -> str:
    """As short as it can be.

    >>> _number(0.003), _number(0.0015), _number(0.15), _number(0.5)
    ('3e-3', '1.5e-3', '0.15', '0.5')
    """
    if value >= 0.1 or value == 0:
        return f"{value:g}"
    power = math.floor(math.log10(value) + 1e-9)
    return f"{round(value / 10**power, 6):g}e{power}"


def _settings(reading: Reading, book: Book, *, with_rate: bool = True) -> str:
    """A line of a legend: the method, what was chosen for it, and where it ended."""
    parts = [f"η={_number(reading.lr)}"] if with_rate else []
    parts += [f"c={_number(reading.c)}"] if reading.c is not None else []
    parts += [f"κ={reading.kappa:g}"] if reading.kappa is not None else []
    parts += [reading.schedule] if reading.schedule != "constant" else []
    loss = book.loss(reading)
    end = "" if loss is None or math.isinf(loss) else f": {loss:.4f}"
    return f"{reading.method}  {', '.join(parts)}{end}"


# --- Parts of figures -----------------------------------------------------------------------------------


def _points(curve: Curve) -> tuple[list[float], list[float | None]]:
    return [x for x, _ in curve], [y for _, y in curve]


def _curves(
    book: Book,
    chosen: Iterable[tuple[str, Sequence[Reading]]],
    take: Callable[[Reading], Curve] | None = None,
) -> tuple[Line, ...]:
    """The best of each lot along its run."""
    lines = []
    for name, among in chosen:
        best = book.best(among)
        if best is not None:
            x, y = _points((take or book.curve)(best))
            lines.append(Line(label=_settings(best, book), look=of_method(name), x=x, y=y))
        else:
            lines.append(Line(label=name, look=of_method(name), x=[], y=[]))
    return tuple(lines)


def _curve_plot(
    title: str, lines: tuple[Line, ...], *, zoom: bool = True, last: bool = False, y_label: str = LOSS
) -> Plot:
    return Plot(
        title=title, lines=lines, x_label="step", y_label=y_label, zoom=zoom, last=last, own_legend=True
    )


def _sweep(
    book: Book,
    title: str,
    strengths: tuple[float, ...],
    by: Sequence[tuple[str, Look, Mapping[str, object]]],
    choice: str = "kappa",
) -> Plot:
    """Loss over c, a line for each of `by` (its name, its look, the readings it stands for).

    AdamW and EMA are the two leftmost ticks. Of readings that differ in `choice`, the best one counts; those
    that differ in seed alone are averaged.
    """
    ticks = ("AdamW", "EMA", *(_number(c) for c in strengths))
    lines = []
    for name, look, wanted in by:
        lots: list[list[Reading]] = [
            book.where(method="AdamW", **{k: v for k, v in wanted.items() if k not in ("kappa", "uf")}),
            book.where(method="EMA", **wanted),
            *(book.where(method="PACE", c=c, **wanted) for c in strengths),
        ]
        found = [_best_mean(book, lot, choice) for lot in lots]
        lines.append(
            Line(
                label=name,
                look=look,
                x=[float(i) for i in range(len(lots))],
                y=[mean for mean, _ in found],
                spread=[deviation for _, deviation in found],
            )
        )
    return Plot(
        title=title, lines=tuple(lines), x_label="pullback strength c", y_label=LOSS, ticks=ticks, set_apart=2
    )


def _best_mean(book: Book, among: Sequence[Reading], choice: str) -> tuple[float | None, float]:
    groups: dict[object, list[Reading]] = {}
    for reading in among:
        groups.setdefault(getattr(reading, choice), []).append(reading)
    found = [value for group in groups.values() if (value := book.mean(group))[0] is not None]
    return min(found, default=(None, 0.0), key=lambda value: math.inf if value[0] is None else value[0])


def _by_rate(rates: tuple[float, ...], **wanted: object) -> list[tuple[str, Look, Mapping[str, object]]]:
    return [
        (f"η = {_number(lr)}", of_order(i, len(rates)), {"lr": lr, "schedule": "constant", **wanted})
        for i, lr in enumerate(rates)
    ]


def _band(book: Book, name: str, among: Sequence[Reading]) -> Line:
    """Mean over seeds and their deviation, at steps that all of them have."""
    curves = [dict(curve) for reading in among if (curve := book.curve(reading))]
    steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    columns = [[curve[step] for curve in curves] for step in steps]
    return Line(
        label=name,
        look=of_method(name),
        x=steps,
        y=[fmean(column) for column in columns],
        spread=[stdev(column) if len(column) > 1 else 0.0 for column in columns],
    )


Printed = tuple[str, str, str | None]
"""What, the paper's number, ours."""


def _text(value: float | None, deviation: float = 0.0) -> str | None:
    if value is None or math.isinf(value):
        return None
    return f"{value:.3f} ± {deviation:.3f}" if deviation else f"{value:.3f}"


# --- Fine-tuning, 1B to 2B ------------------------------------------------------------------------------

DECAYED = ("cosine", "wsd")


def _large_lines(book: Book) -> list[tuple[str, tuple[Line, ...]]]:
    return [
        (
            model,
            _curves(
                book,
                (
                    ("AdamW", book.where(model=model, method="AdamW", schedule=DECAYED)),
                    ("EMA", book.where(model=model, method="EMA", schedule=DECAYED)),
                    ("PACE", book.where(model=model, method="PACE", schedule="constant")),
                ),
            ),
        )
        for model in s.LARGE
    ]


def _train_curves(book: Book, scale: Scale) -> tuple[Rows, list[Printed]]:
    return (tuple(_curve_plot(scale.models[m].title, lines) for m, lines in _large_lines(book)),), []


def _full_curves(book: Book, scale: Scale) -> tuple[Rows, list[Printed]]:
    found = _large_lines(book)
    whole = tuple(_curve_plot(scale.models[m].title, lines, zoom=False) for m, lines in found)
    end = tuple(
        _curve_plot(f"{scale.models[m].title}, last quarter", lines, zoom=False, last=True)
        for m, lines in found
    )
    return (whole, end), []


def _c_kappa(book: Book, scale: Scale) -> tuple[Rows, list[Printed]]:
    return tuple(
        tuple(
            _sweep(
                book,
                f"{scale.models[model].title}, κ = {kappa:g}",
                s.LARGE_STRENGTHS,
                _by_rate(_ALL_LARGE_RATES, model=model, kappa=kappa),
            )
            for kappa in s.LARGE_POWERS
        )
        for model in s.LARGE
    ), []


_ALL_LARGE_RATES = tuple(sorted({lr for rates in s.LARGE_RATES.values() for lr in rates}))


def _tulu(book: Book, scale: Scale) -> tuple[Rows, list[Printed]]:
    ends = tuple(
        _sweep(book, f"κ = {kappa:g}", s.TULU_STRENGTHS, _by_rate(s.TULU_RATES, kappa=kappa))
        for kappa in s.LARGE_POWERS
    )
    first = s.TULU_RATES[0]
    along = []
    for kappa in s.LARGE_POWERS:
        lots = (
            ("AdamW", book.where(method="AdamW", lr=first)),
            ("EMA", book.where(method="EMA", lr=first, kappa=kappa)),
            ("PACE", book.where(method="PACE", lr=first, kappa=kappa)),
        )
        along.append(_curve_plot(f"κ = {kappa:g}, η = {_number(first)}", _curves(book, lots)))
    # Lines of the upper row have names too: all legends are the panels' own.
    return (tuple(_with_legend(plot) for plot in ends), tuple(along)), []


def _with_legend(plot: Plot) -> Plot:
    return Plot(
        title=plot.title, lines=plot.lines, x_label=plot.x_label, y_label=plot.y_label, ticks=plot.ticks,
        set_apart=plot.set_apart, own_legend=True,
    )  # fmt: skip


def _all_schedules(book: Book, scale: Scale) -> tuple[Rows, list[Printed]]:
    rows = []
    for model in s.LARGE:
        row = []
        for schedule in s.SCHEDULES:
            lots = (
                ("AdamW", book.where(model=model, method="AdamW", schedule=schedule)),
                ("EMA", book.where(model=model, method="EMA", schedule=schedule)),
                ("PACE", book.where(model=model, method="PACE")),
            )
            title = f"{scale.models[model].title}, baselines {schedule}"
            row.append(_curve_plot(title, _curves(book, lots)))
        rows.append(tuple(row))
    return tuple(rows), []


def _seeds(book: Book, scale: Scale) -> tuple[Rows, list[Printed]]:
    rows = []
    for schedule in ("constant", "wsd"):
        row = []
        for model in s.LARGE:
            among = {
                method: book.where(model=model, method=method, schedule=schedule)
                for method in ("AdamW", "EMA", "PACE")
            }
            kappas = {reading.kappa for reading in among["EMA"]}
            ends = {kappa: book.mean([r for r in among["EMA"] if r.kappa == kappa])[0] for kappa in kappas}
            known = {kappa: end for kappa, end in ends.items() if end is not None}
            best = min(known, key=known.__getitem__) if known else None
            among["EMA"] = [reading for reading in among["EMA"] if reading.kappa == best]
            lines = tuple(_band(book, method, lot) for method, lot in among.items())
            title = f"{scale.models[model].title}, {schedule}"
            row.append(Plot(title=title, lines=lines, x_label="step", y_label=LOSS, zoom=True))
        rows.append(tuple(row))
    return tuple(rows), []


# --- Clipping -------------------------------------------------------------------------------------------


def _clip_row(book: Book, lr: float) -> tuple[Plot, ...]:
    row = []
    for kappa in s.LARGE_POWERS:
        lines = []
        for i, c in enumerate(s.CLIPPED_STRENGTHS):
            (reading,) = book.where(method="PACE", lr=lr, kappa=kappa, c=c)
            x, y = _points(book.pull(reading, "saturated"))
            look = of_order(i, len(s.CLIPPED_STRENGTHS))
            lines.append(Line(label=f"c = {_number(c)}", look=look, x=x, y=y))
        title = f"κ = {kappa:g}, η = {_number(lr)}"
        row.append(
            Plot(title=title, lines=tuple(lines), x_label="step", y_label="share of gains at 1", share=True)
        )
    return tuple(row)


def _clip_body(book: Book, scale: Scale) -> tuple[Rows, list[Printed]]:
    return (_clip_row(book, s.CLIPPED_RATES[0]),), []


def _clip(book: Book, scale: Scale) -> tuple[Rows, list[Printed]]:
    return tuple(_clip_row(book, lr) for lr in s.CLIPPED_RATES), []


def _clip_by_c(book: Book, scale: Scale) -> tuple[Rows, list[Printed]]:
    row = []
    for lr in s.CLIPPED_RATES:
        lines = []
        for i, kappa in enumerate(s.LARGE_POWERS):
            ends: list[float | None] = []
            for c in s.CLIPPED_STRENGTHS:
                (reading,) = book.where(method="PACE", lr=lr, kappa=kappa, c=c)
                curve = book.pull(reading, "saturated")
                ends.append(curve[-1][1] if curve else None)
            look, places = of_order(i, len(s.LARGE_POWERS)), [float(i) for i in range(len(ends))]
            lines.append(Line(label=f"κ = {kappa:g}", look=look, x=places, y=ends))
        row.append(
            Plot(
                title=f"η = {_number(lr)}", lines=tuple(lines), x_label="pullback strength c",
                y_label="share of gains at 1, at the end", share=True,
                ticks=tuple(_number(c) for c in s.CLIPPED_STRENGTHS),
            )
        )  # fmt: skip
    return (tuple(row),), []


# --- Fine-tuning, 135M ----------------------------------------------------------------------------------


def _grid(book: Book, powers: tuple[float, ...]) -> Rows:
    return tuple(
        tuple(
            _sweep(
                book,
                f"κ = {kappa:g}, uf = {uf}",
                s.SMALL_STRENGTHS,
                _by_rate(s.SMALL_RATES, kappa=kappa, uf=uf),
            )
            for uf in s.SMALL_PERIODS
        )
        for kappa in powers
    )


def _small_grid(book: Book, scale: Scale) -> tuple[Rows, list[Printed]]:
    return _grid(book, (s.GRID_POWER,)), []


def _full_grid(book: Book, scale: Scale) -> tuple[Rows, list[Printed]]:
    return _grid(book, s.SMALL_POWERS), []


def _decayed_curves(book: Book, scale: Scale) -> tuple[Rows, list[Printed]]:
    row = []
    for lr in s.SMALL_RATES:
        lots = (
            ("AdamW", book.where(method="AdamW", lr=lr, schedule=DECAYED)),
            ("EMA", book.where(method="EMA", lr=lr, schedule=DECAYED)),
            ("PACE", book.where(method="PACE", lr=lr, schedule="constant")),
        )
        row.append(_curve_plot(f"η = {_number(lr)}", _curves(book, lots)))
    return (tuple(row[:3]), tuple(row[3:])), []


def _by_rate_alone(book: Book, scale: Scale) -> tuple[Rows, list[Printed]]:
    lines = []
    for name, wanted in (("AdamW", DECAYED), ("EMA", DECAYED), ("PACE", ("constant",))):
        ends = []
        for lr in s.SMALL_RATES:
            among = book.where(method=name, lr=lr, schedule=wanted)
            best = book.best(among)
            losses = [book.loss(one) for one in among]
            none = (
                math.inf if any(loss is not None for loss in losses) else None
            )  # all that are there diverged
            ends.append(book.loss(best) if best is not None else none)
        label = f"{name}, {'best decay' if wanted == DECAYED else 'constant'}"
        places = [float(i) for i in range(len(ends))]
        lines.append(Line(label=label, look=of_method(name), x=places, y=ends))
    ticks = tuple(_number(lr) for lr in s.SMALL_RATES)
    title = scale.models["smollm2-135m"].title
    plot = Plot(title=title, lines=tuple(lines), x_label="learning rate η", y_label=LOSS, ticks=ticks)
    return ((plot,),), []


# --- Beside Schedule-Free; token budgets ----------------------------------------------------------------


def _rival_lots(book: Book, model: str) -> list[tuple[str, Sequence[Reading]]]:
    return [
        (method, book.where(model=model, method=method, schedule="constant"))
        for method in ("AdamW", "EMA", "Schedule-Free", "PACE")
    ]


def _river(
    book: Book, title: str, model: str, scale: Scale, lr: float, pulled: Reading, zoom: bool
) -> tuple[Plot, list[float | None], list[float | None]]:
    """Branches with WSD over PACE at a constant rate; where both are at each budget."""
    budgets = scale.models[model].budgets
    (whole,) = book.where(model=model, method="AdamW", lr=lr, schedule="constant")
    curve = book.curve(pulled)
    x, y = _points(curve)
    lines = [Line(label=_settings(pulled, book), look=of_method("PACE"), x=x, y=y)]
    x, y = _points(book.curve(whole))
    lines.append(Line(label=_settings(whole, book), look=of_method("AdamW"), x=x, y=y, thin=True))
    ends = []
    for steps in budgets:
        (branch,) = book.where(model=model, method="AdamW", lr=lr, schedule="wsd", steps=steps)
        after = branch.cell.run.after
        found = [(a, b) for a, b in book.curve(branch) if after is None or a >= after[1]]
        begin = at(book.curve(whole), after[1]) if after else None
        if begin is not None and after is not None and found and found[0][0] > after[1]:
            found = [(float(after[1]), begin), *found]
        x, y = _points(found)
        loss = book.loss(branch)
        ends.append(loss)
        lines.append(
            Line(label="AdamW WSD branches", look=of_method("AdamW WSD"), x=x, y=y, end=_text(loss) or "")
        )
    values = [at(curve, steps) for steps in budgets]
    plot = _curve_plot(title, tuple(lines), zoom=zoom)
    return plot, ends, values


def _slashed(values: Sequence[float | None]) -> str | None:
    known = [f"{v:.3f}" if v is not None and math.isfinite(v) else "?" for v in values]
    return "/".join(known) if any(word != "?" for word in known) else None


def _bema_sf(book: Book, scale: Scale) -> tuple[Rows, list[Printed]]:
    row = []
    for model in ("smollm2-135m-long", "qwen3-1.7b"):
        row.append(_curve_plot(scale.models[model].title, _curves(book, _rival_lots(book, model))))
    printed: list[Printed] = []
    small = scale.models["smollm2-135m"].title
    for i, lr in enumerate(s.BRANCH_RATES):
        (pulled,) = book.where(model="smollm2-135m", method="PACE", lr=lr)
        plot, ends, values = _river(
            book, f"{small}, budgets, η = {_number(lr)}", "smollm2-135m", scale, lr, pulled, zoom=False
        )
        row.append(plot)
        if i == 0:  # which of the two rates the printed ones are of is not said
            what = f"{small}, η = {_number(lr)}: WSD branches at 50/75/100 %; PACE at the end"
            ours = _slashed(ends)
            end = _text(values[-1])
            printed.append((what, "1.277/1.233/1.205; 1.153", f"{ours}; {end or '?'}" if ours else None))
    printed.append(_hours(book, scale))
    return (tuple(row[:2]), tuple(row[2:])), printed


def _hours(book: Book, scale: Scale) -> Printed:
    """Wall clock of Schedule-Free and of PACE."""
    found = []
    for method in ("Schedule-Free", "PACE"):
        among = book.where(model="qwen3-1.7b", method=method)
        seconds = [book.results[r.cell.name].seconds for r in among if r.cell.name in book.results]
        found.append(min(seconds, default=None))
    free, pulled = found
    ours = f"{free / 3600:.3g} h and {pulled / 3600:.3g} h" if free and pulled else None
    return (
        "Qwen3-1.7B, wall clock of Schedule-Free and PACE (one TPU v6e in the paper)",
        "12 h and 10 h",
        ours,
    )


def _rival_training(book: Book, scale: Scale) -> tuple[Rows, list[Printed]]:
    row = []
    for model in ("smollm2-135m-long", "qwen3-1.7b"):
        # EMA has the training loss of AdamW, whose average it is.
        lots = [(name, lot) for name, lot in _rival_lots(book, model) if name != "EMA"]
        lines = _curves(book, lots, book.train)
        y_label = "training loss, smoothed (nats a token)"
        row.append(_curve_plot(scale.models[model].title, lines, zoom=False, y_label=y_label))
    return (tuple(row),), []


# --- Pretraining ----------------------------------------------------------------------------------------


def _pretrain(book: Book, scale: Scale) -> tuple[Rows, list[Printed]]:
    def along(title: str, schedule: str, **wanted: object) -> Plot:
        lots = (
            ("AdamW", book.where(method="AdamW", schedule=schedule, **wanted)),
            ("EMA", book.where(method="EMA", kappa=s.GPT_POWER, schedule=schedule, **wanted)),
            ("PACE", book.where(method="PACE", kappa=s.GPT_POWER, schedule=schedule, **wanted)),
        )
        return _curve_plot(title, _curves(book, lots))

    kappa = f"κ = {s.GPT_POWER:g}"
    middle = _sweep(book, f"Effect of c, {kappa}", s.GPT_STRENGTHS, _by_rate(s.GPT_RATES, kappa=s.GPT_POWER))
    row = (
        along(f"Constant learning rate, {kappa}", "constant"),
        _with_legend(middle),
        along(f"WSD, {kappa}", "wsd", lr=s.SCHEDULED_RATE),
    )
    best = book.best(book.where(method="AdamW", schedule="wsd"))
    return (row,), [("AdamW WSD", "3.531", _text(book.loss(best)) if best else None)]


def _kappa_sweep(book: Book, scale: Scale) -> tuple[Rows, list[Printed]]:
    return (
        tuple(
            _sweep(book, f"κ = {kappa:g}", s.GPT_STRENGTHS, _by_rate(s.GPT_RATES, kappa=kappa))
            for kappa in s.GPT_POWERS
        ),
    ), []


_BY_SCHEDULE = (("constant", "PACE"), ("cosine", "Schedule-Free"), ("wsd", "AdamW WSD"))


def _csweep(book: Book, scale: Scale) -> tuple[Rows, list[Printed]]:
    by = [
        (schedule, of_method(look), {"schedule": schedule, "kappa": s.SCHEDULED_POWERS})
        for schedule, look in _BY_SCHEDULE
    ]
    plot = _sweep(
        book, f"{scale.models['gpt2-124m'].title}, best κ, mean of seeds", s.SCHEDULED_STRENGTHS, by
    )
    printed = []
    for name, schedule, paper in (("WSD", "wsd", "3.507 ± 0.006"), ("constant", "constant", "3.537 ± 0.004")):
        found = [
            _best_mean(book, book.where(method="PACE", schedule=schedule, c=c), "kappa")
            for c in s.SCHEDULED_STRENGTHS
        ]
        known = [value for value in found if value[0] is not None]
        ours = min(known, key=lambda value: value[0] or math.inf) if known else (None, 0.0)
        printed.append((f"best PACE, {name}, three seeds", paper, _text(*ours)))
    plain = book.mean(book.where(method="AdamW", schedule="wsd"))
    printed.append(("AdamW, WSD", "3.531", _text(*plain)))
    return ((plot,),), printed


def _csweep_kappa(book: Book, scale: Scale) -> tuple[Rows, list[Printed]]:
    return (
        tuple(
            _sweep(
                book,
                f"{schedule}, seed {s.SEED}",
                s.SCHEDULED_STRENGTHS,
                [
                    (
                        f"κ = {kappa:g}",
                        of_order(i, len(s.SCHEDULED_POWERS)),
                        {"schedule": schedule, "kappa": kappa},
                    )
                    for i, kappa in enumerate(s.SCHEDULED_POWERS)
                ],
            )
            for schedule in s.SCHEDULES
        ),
    ), []


def _pretrain_river(book: Book, scale: Scale) -> tuple[Rows, list[Printed]]:
    (pulled,) = book.where(method="PACE", c=s.RIVER_STRENGTH, schedule="constant")
    title = scale.models["gpt2-124m"].title
    left, ends, values = _river(book, title, "gpt2-124m", scale, s.SCHEDULED_RATE, pulled, zoom=False)
    lines = []
    (whole,) = book.where(method="PACE", c=s.RIVER_DECAYED_STRENGTH, schedule="constant")
    x, y = _points(book.curve(whole))
    lines.append(Line(label=_settings(whole, book), look=of_method("PACE"), x=x, y=y))
    for branch in book.where(method="PACE", schedule="wsd"):
        after = branch.cell.run.after
        x, y = _points([(a, b) for a, b in book.curve(branch) if after is None or a >= after[1]])
        end = _text(book.loss(branch)) or ""
        lines.append(Line(label="PACE WSD branches", look=of_method("PACE WSD"), x=x, y=y, end=end))
    right = _curve_plot("PACE with WSD, by budget", tuple(lines), zoom=False)
    printed: list[Printed] = [
        ("AdamW WSD branches at 50/75/100 %", "3.721/3.597/3.530", _slashed(ends)),
        ("PACE, constant, at the same steps", "≈3.707/3.595/3.534", _slashed(values)),
    ]
    return ((left, right),), printed


_DRAWN: dict[str, Callable[[Book, Scale], tuple[Rows, list[Printed]]]] = {
    "fig:train_curves": _train_curves,
    "fig:pretrain": _pretrain,
    "fig:135m_grid": _small_grid,
    "fig:clip_frac_body": _clip_body,
    "fig:bema_sf": _bema_sf,
    "fig:c_kappa": _c_kappa,
    "fig:appendix_train_curves": _rival_training,
    "fig:appendix_135m_full_grid": _full_grid,
    "fig:appendix_pretrain_kappa_sweep": _kappa_sweep,
    "fig:appendix_tulu_qwen": _tulu,
    "fig:appendix_full_train_curves": _full_curves,
    "fig:appendix_clip_frac": _clip,
    "fig:appendix_clip_frac_vs_c": _clip_by_c,
    "fig:appendix_wsd_val_curves": _decayed_curves,
    "fig:appendix_wsd_finetune": _by_rate_alone,
    "fig:appendix_fig1_all_schedules": _all_schedules,
    "fig:appendix_multiseed_robust": _seeds,
    "fig:appendix_pretrain_csweep": _csweep,
    "fig:appendix_pretrain_csweep_kappa": _csweep_kappa,
    "fig:appendix_pretrain_river": _pretrain_river,
}
