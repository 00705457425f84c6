"""Kinds of tables about the study, as text of a page. Pure functions; no torch."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from paceline.experiments.defaults.regret import (
    CHOSEN_BY,
    Pick,
    Result,
    best_rate,
    best_weights,
    estimate,
    losses_of,
    read,
    regret,
    to_report,
)
from paceline.experiments.pages import markdown

Results = Sequence[Result]
Study = Mapping[str, Results]
"""By what was trained: the end of a file's name."""


def read_study(paths: Iterable[Path]) -> Study:
    """All runs, those of several days together."""
    files: dict[str, list[Path]] = {}
    for path in sorted(paths):
        files.setdefault(path.stem.partition("-defaults-")[2], []).append(path)
    return {trained: read(own) for trained, own in files.items()}


def chosen_by(results: Results) -> list[Result]:
    """The seed that settings were chosen by."""
    return [result for result in results if result.seed == CHOSEN_BY]


def at(rates: Iterable[float], results: Results) -> list[Result]:
    """Of these learning rates."""
    return [result for result in results if result.lr in rates]


def others(results: Results) -> list[Result]:
    """Seeds that nothing was chosen by."""
    return [result for result in results if result.seed != CHOSEN_BY]


# --- Words ----------------------------------------------------------------------------------------------


def rate_in_words(lr: float) -> str:
    """Short.

    >>> rate_in_words(0.00025)
    '2.5e-4'
    """
    mantissa, exponent = f"{lr:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


_AVERAGE = re.compile(r"(?:blend_(\d_\d+)_)?(power|half_life)_(\d_\d+)")


def weights_in_words(weights: str) -> str:
    """What is returned.

    >>> weights_in_words("power_0_7"), weights_in_words("half_life_0_06"), weights_in_words("average")
    ('κ = 0.7', 'half-life 6 %', 'its average')
    """
    parts = _AVERAGE.fullmatch(weights)
    if parts is None:
        return {"average": "its average"}.get(weights, weights)
    share, value = (float((part or "1").replace("_", ".")) for part in parts.group(1, 3))
    words = f"κ = {value:g}" if parts[2] == "power" else f"half-life {100 * value:g} %"
    return words if share == 1 else f"{100 * share:g} % of {words}, the rest live"


# --- Kinds of tables ------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A method in a table."""

    title: str
    method: str
    weights: str = ""
    """What it returns; the best at its best rate if not said."""
    settings: str = ""

    def pick(self, results: Results) -> Pick:
        """As one fixed setting."""
        return Pick(self.method, self.weights) if self.weights else best_weights(results, self.method)


def losses(results: Results, rows: Sequence[Row]) -> str:
    """At every rate, the mean over seeds."""
    picks = [row.pick(results) for row in rows]
    known = [losses_of(results, pick) for pick in picks]
    rates = sorted({lr for own in known for lr in own})
    body = []
    for row, pick, own in zip(rows, picks, known, strict=True):
        cells = [f"{estimate([*own[lr].values()])}" if lr in own else "" for lr in rates]
        body.append([row.title, weights_in_words(pick.weights), *cells])
    return markdown(["", "returned", *map(rate_in_words, rates)], body)


TIMES = {"1/8": 0.125, "1/4": 0.25, "1/2": 0.5, "1": 1.0, "2": 2.0, "4": 4.0, "8": 8.0}


def regrets(results: Results, rows: Iterable[Row], reference: Pick, times: Sequence[str] = (*TIMES,)) -> str:
    """Over the reference at its best rate, at multiples of that."""
    there = best_rate(results, reference)
    body = []
    for row in rows:
        pick, cells = row.pick(results), []
        for n in times:
            lr = there * TIMES[n]
            found = regret(results, pick, lr, reference, there)
            cells.append("" if found is None else "0" if (pick, lr) == (reference, there) else f"{found:+}")
        body.append([row.title, weights_in_words(pick.weights), *cells])
    return markdown(["× the best rate", "returned", *times], body)


def bests(results: Results, rows: Iterable[Row]) -> str:
    """What each comes to at its best rate; with what of it was run."""
    body = []
    for row in rows:
        pick = row.pick(results)
        own, lr = losses_of(results, pick), best_rate(results, pick)
        loss = estimate([own[lr][seed] for seed in to_report(own[lr])])
        counts = [f"{len(own)}", f"{sum(map(len, own.values()))}"]
        words = [rate_in_words(lr), weights_in_words(pick.weights), f"{loss}"]
        body.append([row.title, row.settings, *counts, *words])
    return markdown(["", "settings", "rates", "runs", "best rate", "returned", "held-out loss"], body)


POWERS = ("power_0_5", "power_0_6", "power_0_7", "power_0_8")


def powers(study: Study, method: str, rows: Iterable[tuple[str, str, float]]) -> str:
    """A method over AdamW, by the average that it returns.

    A row has a title, what is trained, and a multiple of AdamW's best rate.
    """
    body = []
    for title, trained, times in rows:
        results = study[trained]
        reference = best_weights(results, "adamw", POWERS)
        there = best_rate(results, reference)
        found = [regret(results, Pick(method, power), times * there, reference, there) for power in POWERS]
        body.append([title, *("" if one is None else f"{one:+}" for one in found)])
    return markdown(["", *map(weights_in_words, POWERS)], body)


def signs(results: Results, average: str) -> str:
    """What could be seen of AdamW's learning rate during a run; one seed."""
    runs = sorted((r for r in chosen_by(results) if r.method == "adamw" and r.readings), key=lambda r: r.lr)
    live = {lr: own[CHOSEN_BY] for lr, own in losses_of(results, Pick("adamw", "live")).items()}
    mean = {lr: own[CHOSEN_BY] for lr, own in losses_of(results, Pick("adamw", average)).items()}
    body = [
        ["cosine of gradient and gap", *(f"{r.readings[0]:.2f}" for r in runs)],
        ["gap²/noise", *(f"{r.readings[1]:.2f}" for r in runs)],
        [f"live less {weights_in_words(average)}", *(f"{live[r.lr] - mean[r.lr]:.3f}" for r in runs)],
    ]
    return markdown(["", *(rate_in_words(r.lr) for r in runs)], body)
