"""A report with all that a real one may have, and names that would break a careless page."""

import math
import random

from paceline.studies.report.content import Number, Panel, Report, Series, Table

HOSTILE = "</script><script>alert(1)</script>"
METHODS = (
    "AdamW",
    "AdamW, short EMA (0.99)",
    "AdamW, long EMA (0.9999)",
    "PACE",
    "AdamW, WSD schedule with a cooldown over the last fifth",
    "Schedule-Free AdamW",
    f"Mine {HOSTILE} & $x_1$ \u2028",
)
RATES = (0.0005, 0.001, 0.004, 0.016)
STEPS = tuple(range(0, 4001, 50))
_OFFSETS = (0.06, 0.03, 0.02, 0.0, 0.015, 0.01, 0.05)
_SENSITIVITY = (0.09, 0.05, 0.03, 0.006, 0.06, 0.03, 0.08)


def sample() -> Report:
    """The same report each time."""
    panels = (
        *(_curves(rate, "curves", 0) for rate in RATES),
        *(_curves(rate, "end", 3000) for rate in RATES),
        _against_rate(),
        _regret(),
        _tuning(),
        _saturation(),
        _gap(),
    )
    return Report(
        title="Which optimizer for the 124M model?",
        subtitle="GPT, 124 million parameters · 4,000 steps of 0.26M tokens · tiny & <odd> names.bin",
        verdict="PACE ends at a loss of 3.0112, lower than AdamW by 0.0613 ± 0.0041, and needs no schedule: "
        "at its worst learning rate it still beats the best one of AdamW.",
        remarks=(
            "Three seeds per method and learning rate; differences are paired by seed.",
            "All methods saw the same batches in the same order.",
            "Nothing here tells what happens at a larger model or a longer run.",
        ),
        warnings=(
            "AdamW diverged at learning rate 0.016 in 3 of 3 runs.",
            f"{METHODS[6]}: one run failed and is left out.",
        ),
        methods=METHODS,
        results=Table(
            key="results",
            title="Results",
            caption="Each method at its best learning rate. Loss on held-out text, mean over three seeds.",
            columns=("Method", "Best lr", "Loss", "Least", "Greatest", "Against AdamW", "Regret at worst lr"),
            rows=tuple(
                (method, "0.004", f"{3.01 + _OFFSETS[i]:.4f}", f"{3.005 + _OFFSETS[i]:.4f}",
                 f"{3.016 + _OFFSETS[i]:.4f}", f"{_OFFSETS[i] - _OFFSETS[0]:+.4f}",
                 f"{4 * _SENSITIVITY[i]:.4f}")
                for i, method in enumerate(METHODS)
            ),
            numeric=(False, True, True, True, True, True, True),
        ),
        panels=panels,
        tables=(
            Table(
                key="cost",
                title="Cost",
                caption="Time and memory of a step, against AdamW.",
                columns=("Method", "ms per step", "Memory", "Bytes per parameter"),
                rows=tuple((method, f"{212 + 3 * i}", f"{9.1 + i / 5:.1f} GiB", str(16 + 4 * (i > 0)))
                           for i, method in enumerate(METHODS)),
                numeric=(False, True, True, True),
            ),
            Table(
                key="runs",
                title="Every run",
                columns=("Method", "lr", "Seed", "Loss", "Hours", "State"),
                rows=tuple((method, str(rate), str(seed), f"{_final(i, rate) or 11.0161:.4f}", "1.43", "done")
                           for i, method in enumerate(METHODS) for rate in RATES for seed in (1, 2, 3)),
                numeric=(False, True, True, True, True, False),
            ),
            Table(
                key="settings",
                title="Settings and data",
                columns=("Setting", "Value"),
                rows=(
                    ("command", "paceline compare --methods adamw,ema,pace,wsd,schedulefree --lr 0.0005"),
                    ("data", "/a/very/long/path/that/has/no/blanks/in/it/and/goes/on/on/train_000001.bin"),
                    ("weight decay", "0.1"),
                ),
            ),
        ),
    )  # fmt: skip


def _final(method: int, rate: float) -> Number:
    """The loss at the end; AdamW diverges at the greatest learning rate, my own method is bad there."""
    if rate == RATES[-1] and method == 0:
        return None
    if rate == RATES[-1] and method == 6:
        return 5.2
    return 3.01 + _OFFSETS[method] + _SENSITIVITY[method] * math.log2(rate / 0.004) ** 2 / 3


def _curves(rate: float, place: str, start: int) -> Panel:
    chance = random.Random(f"{rate}")
    steps = tuple(step for step in STEPS if step >= start)
    series = []
    for i, method in enumerate(METHODS):
        end = _final(i, rate) or 10.5
        for weights, above, noise in (("live", 0.05, 0.03), ("returned", 0.0, 0.004)):
            fall = [(11 - end) * math.exp(-step / 160) + 0.5 * math.exp(-step / 1500) for step in STEPS]
            y = [end + above + part + chance.gauss(0, noise) for part in fall]
            y = y[-len(steps) :]
            # One run stops for a while: a gap in its line.
            values = tuple(
                None if i == 5 and 1500 < step < 1800 else value for step, value in zip(steps, y, strict=True)
            )
            spread = 0.012 if weights == "returned" else 0.03
            series.append(
                Series(
                    method=method,
                    weights="live" if weights == "live" else "returned",
                    x=steps,
                    y=values,
                    low=tuple(None if value is None else value - spread for value in values),
                    high=tuple(None if value is None else value + spread for value in values),
                )
            )
    last = "The last quarter" if start else "Loss on held-out text while training"
    return Panel(
        key=f"{place}-{rate}",
        title=last,
        caption="The weights each method would return if it were stopped there, and the live ones.",
        x_label="step",
        y_label="loss",
        series=tuple(series),
        place=place,
        choice=f"lr {rate}",
    )


def _against_rate() -> Panel:
    series = []
    for i, method in enumerate(METHODS):
        y = tuple(_final(i, rate) for rate in RATES)
        low = tuple(None if value is None else value - 0.008 for value in y)
        high = tuple(None if value is None else value + 0.011 for value in y)
        series.append(Series(method=method, x=RATES, y=y, low=low, high=high))
    return Panel(
        key="loss-against-lr",
        title="Final loss against the learning rate",
        caption="A flat line is a method that needs no tuning.",
        x_label="learning rate",
        y_label="final loss",
        x_log=True,
        markers=True,
        series=tuple(series),
        place="rates",
    )


def _regret() -> Panel:
    return Panel(
        key="regret",
        title="What a wrong learning rate costs",
        caption="Loss above the method's own best, by how far the learning rate is from it.",
        x_label="factor between the learning rates",
        y_label="regret",
        x_log=True,
        markers=True,
        series=tuple(
            Series(method=method, x=(1, 2, 4, 8), y=tuple(_SENSITIVITY[i] * step**2 / 3 for step in range(4)))
            for i, method in enumerate(METHODS)
        ),
        place="regret",
    )


def _tuning() -> Panel:
    tries = (1, 2, 3, 4)
    return Panel(
        key="tuning",
        title="Loss against the number of runs spent on tuning",
        caption="The best loss to expect after trying that many learning rates at random.",
        x_label="learning rates tried",
        y_label="expected best loss",
        markers=True,
        series=tuple(
            Series(method=method, x=tries, y=tuple(3.01 + _OFFSETS[i] + _SENSITIVITY[i] / n for n in tries))
            for i, method in enumerate(METHODS)
        ),
        place="tuning",
    )  # fmt: skip


def _saturation() -> Panel:
    return Panel(
        key="saturation",
        title="How often the controller is at its limit",
        caption="Part of the steps, over a window of a hundred.",
        x_label="step",
        y_label="saturation",
        series=(Series(method="PACE", x=STEPS, y=tuple(0.4 * math.exp(-step / 700) for step in STEPS)),),
        place="inside",
        choice="saturation",
    )


def _gap() -> Panel:
    return Panel(
        key="gap",
        title="From the live weights to the returned ones",
        caption="Distance of the two, as a part of the norm of the weights.",
        x_label="tokens",
        y_label="gap",
        x_log=True,
        series=tuple(
            Series(
                method=METHODS[i],
                x=tuple(262144.0 * (step + 1) for step in STEPS),
                y=tuple(0.01 * (i + 1) * (1 - math.exp(-step / 400)) for step in STEPS),
            )
            for i in (1, 2, 3, 5)
        ),
        place="inside",
        choice="gap",
    )
