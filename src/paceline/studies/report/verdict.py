"""What the numbers say, in one sentence, and how sure that is. Nothing is claimed that seeds do not show."""

import math
import statistics
from dataclasses import dataclass

from paceline.studies.report.results import Outcomes

# 97.5 % points of Student's t by degrees of freedom; two seeds leave one.
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How much lower or higher one method ends than another, in nats a token: negative is lower."""

    mean: float
    within: float | None
    """Half of the 95 % interval, from seeds in pairs; None: there is one seed, and no way to know."""

    @property
    def is_shown(self) -> bool:
        """Whether it is more than seeds make by themselves."""
        return self.within is not None and abs(self.mean) > self.within

    def text(self) -> str:
        """E.g. "0.021 ± 0.006 below"."""
        way = "below" if self.mean < 0 else "above"
        return f"{abs(self.mean):.3f}{'' if self.within is None else f' ± {self.within:.3f}'} {way}"


def difference(outcomes: Outcomes, one: tuple[str, float], other: tuple[str, float]) -> Difference | None:
    """Of a method at a learning rate to another; None if a run diverged, or no seed has both."""
    first, second = outcomes.losses(*one), outcomes.losses(*other)
    if not (first and second) or None in first.values() or None in second.values():
        return None
    pairs = [(first[seed], second[seed]) for seed in first if seed in second]
    gaps = [a - b for a, b in pairs if a is not None and b is not None]
    if not gaps:
        return None
    count = len(gaps)
    if count == 1:
        return Difference(mean=gaps[0], within=None)
    error = statistics.stdev(gaps) / math.sqrt(count)
    return Difference(mean=statistics.fmean(gaps), within=errors_of(count) * error)


def errors_of(count: int) -> float:
    """How many standard errors are half of a 95 % interval, of so many seeds, two at least.

    >>> errors_of(3)
    4.3
    """
    return _STUDENT[min(count - 2, len(_STUDENT) - 1)]


def judge(outcomes: Outcomes, differing: dict[str, list[str]]) -> str:
    """The verdict."""
    if differing:
        name, values = next(iter(differing.items()))
        return f"No verdict: the runs differ in {name} ({', '.join(v[:40] for v in values[:3])})."
    best = {name: lr for name in outcomes.methods if (lr := outcomes.best_lr(name)) is not None}
    if not best:
        return "No verdict: no run came to its end without diverging."
    ranked = sorted(best, key=lambda name: outcomes.mean(name, best[name]) or 0.0)
    paces = [name for name in ranked if name in outcomes.steered]
    rivals = [name for name in ranked if name not in outcomes.steered]
    if len(ranked) == 1 or not outcomes.steered:
        return _without_pace(outcomes, ranked, best)
    if not any(outcomes.has_ended(name) for name in outcomes.steered):
        return (
            f"No verdict yet: no run of PACE has ended; {rivals[0]} is at {_at(outcomes, rivals[0], best)}."
        )
    if not paces:
        return f"PACE diverged at every learning rate; {rivals[0]} is best, {_at(outcomes, rivals[0], best)}."
    if not rivals:
        return f"Nothing to compare with: only PACE came to an end, {_at(outcomes, paces[0], best)}."
    return _sentence(outcomes, paces[0], rivals[0], best)


def _at(outcomes: Outcomes, name: str, best: dict[str, float]) -> str:
    return f"{outcomes.mean(name, best[name]):.3f} at lr {best[name]:g}"


def _without_pace(outcomes: Outcomes, ranked: list[str], best: dict[str, float]) -> str:
    first = ranked[0]
    if len(ranked) == 1:
        return f"Nothing to compare with: only {first} came to an end, {_at(outcomes, first, best)}."
    second = ranked[1]
    gap = difference(outcomes, (first, best[first]), (second, best[second]))
    if gap is None:
        return f"No verdict: {first} and {second} have no seed in common at their best learning rates."
    if gap.within is None:
        return (
            f"On this one seed {first} ended lowest, {_at(outcomes, first, best)}, next {second}, "
            f"{_at(outcomes, second, best)}; one seed cannot tell whether that is more than noise."
        )
    if gap.is_shown:
        return f"{first} is {gap.text()} {second}, each at its best learning rate."
    return f"Within seed noise: no difference shown between {first} and {second} ({gap.text()})."


def _sentence(outcomes: Outcomes, pace: str, rival: str, best: dict[str, float]) -> str:
    gap = difference(outcomes, (pace, best[pace]), (rival, best[rival]))
    if gap is None:
        return f"No verdict: {pace} and {rival} have no seed in common at their best learning rates."
    elsewhere = _elsewhere(outcomes, pace, rival, best[rival])
    rates = (
        f"(lr {best[pace]:g} and {best[rival]:g})" if best[pace] != best[rival] else f"(lr {best[pace]:g})"
    )
    if gap.within is None:
        text = (
            f"On this one seed {pace} ended {gap.text()} {rival}, the best of the others, each at its best "
            f"learning rate {rates}"
        )
        return f"{text}{elsewhere}. One seed cannot tell small differences from noise."
    if gap.is_shown:
        text = (
            f"{pace} is {gap.text()} {rival}, the best of the others, each at its best learning rate {rates}"
        )
    else:
        text = (
            f"Within seed noise at the best learning rates {rates}: no difference shown between {pace} and "
            f"{rival}, the best of the others ({gap.text()})"
        )
    return f"{text}{elsewhere}."


def _elsewhere(outcomes: Outcomes, pace: str, rival: str, at: float) -> str:
    """At the highest and the lowest learning rate, beside the rival's best one."""
    parts = []
    for lr in dict.fromkeys((outcomes.lrs[-1], outcomes.lrs[0])):
        if lr == at or not (outcomes.losses(pace, lr) and outcomes.losses(rival, lr)):
            continue
        gap = difference(outcomes, (pace, lr), (rival, lr))
        if gap is not None:
            noise = "" if gap.within is None or gap.is_shown else " (within noise)"
            parts.append(f"at lr {lr:g}, {multiple(lr / at)} the best of {rival}, {gap.text()} it{noise}")
        else:
            fell = [name for name in (pace, rival) if None in outcomes.losses(name, lr).values()]
            if not fell:
                continue
            parts.append(
                f"at lr {lr:g}, {multiple(lr / at)} the best of {rival}, {' and '.join(fell)} diverged"
            )
    return "".join(f"; {part}" for part in parts)


def multiple(ratio: float) -> str:
    """A ratio of learning rates in words.

    >>> multiple(4.0), multiple(0.25), multiple(3.3333)
    ('4×', '1/4', '3.33×')
    """
    return f"{ratio:.3g}×" if ratio >= 1 else f"1/{1 / ratio:.3g}"


def remarks(outcomes: Outcomes) -> tuple[str, ...]:
    """What the verdict rests on, and what it cannot tell."""
    if (seeds := len(outcomes.seeds)) == 1:
        sure = "One seed: what of a difference is chance cannot be told. --seeds 3 runs the same on three."
    else:
        sure = (
            f"± is half of a 95 % interval over {seeds} seeds in pairs: with the same seed, all methods have "
            "the same weights at the start and the same batches."
        )
        sure += " Two seeds give wide intervals; more of them narrow ones." if seeds == 2 else ""
    said = [
        sure,
        "A method's best learning rate is picked by the held-out loss that is compared, which flatters all "
        "methods by about the same little.",
    ]
    for name in outcomes.methods:
        best = outcomes.best_lr(name)
        if best is not None and len(outcomes.lrs) > 1 and best in (outcomes.lrs[0], outcomes.lrs[-1]):
            side = "low" if best == outcomes.lrs[0] else "high"
            said.append(
                f"{name} is best at the {side}est rate tried, {best:g}: a {side}er one may be better."
            )
    return tuple(said)
