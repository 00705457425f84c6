"""The verdict of a comparison: who ends lower, by how much, and whether the seeds settle it.

1. Rates and methods are chosen on selection seeds that are not counted again, where there are enough seeds.
2. ± is half of the 95 % interval that holds for all comparisons of a page together.
3. A difference is claimed beyond ± and beyond 0.003 nats; a tie, if the 90 % interval is within 0.003 nats.
4. One seed shows no direction.
5. Runs that diverged are counted, and the others compared. Off the best rate the rival is the best there.
6. Runs on other data, lengths, tokenizers or settings are refused; other versions and hardware are named.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from paceline.studies.noise import pooled, quantile
from paceline.studies.table import Mean, Table

SMALLEST = 0.003
"""Nats that count as a difference."""
APART = 4
"""Seeds from which on the first one chooses, and only the others are compared."""

Losses = Mapping[str, Mapping[float, Mapping[int, float | None]]]
"""By method, learning rate and seed; None: diverged."""
Outcome = Literal["lower", "higher", "tie", "not settled", "one seed", "no pair"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One method against one rival, each at one learning rate."""

    method: str
    rival: str
    lr: float
    rival_lr: float
    is_best: bool
    """At the best learning rate of each; if not, both at the same other one."""
    outcome: Outcome
    """Of the method: "lower" is better."""
    difference: Mean | None
    """Method minus rival over pairs of one seed, in nats."""
    half_width: float | None
    """Half of the simultaneous 95 % interval."""
    diverged: tuple[int, int]
    """Seeds of the method and of the rival that diverged here."""
    seeds: tuple[int, int]
    """Seeds of each that ended here."""

    @property
    def is_settled(self) -> bool:
        """Return whether a difference is claimed."""
        return self.outcome in ("lower", "higher")

    @property
    def detectable(self) -> float | None:
        """The smallest difference that these seeds could settle."""
        return None if self.half_width is None else max(self.half_width, SMALLEST)

    def text(self) -> str:
        """Return what is said, e.g. "PACE is 0.021 ± 0.006 below AdamW (3 pairs)"."""
        both, mean = f"{self.method} and {self.rival}", self.difference or Mean(0.0, None, 0)
        way = "below" if self.outcome == "lower" else "above"
        said = {
            "tie": f"{both} tie within {SMALLEST:g} nats ({mean.n} pairs)",
            "not settled": f"{both}: not settled; {mean.n} pairs could detect {self.detectable or 0:.3f}",
            "one seed": f"one seed shows no direction between {both}",
            "no pair": f"{both} have no seed that both finished",
        }
        width = f"{abs(mean.value):.3f} ± {self.half_width or 0:.3f}"
        claim = f"{self.method} is {width} {way} {self.rival} ({mean.n} pairs)"
        fell = zip(self.diverged, self.seeds, (self.method, self.rival), strict=True)
        lost = "".join(f"; {k} of {n} of {name} diverged" for k, n, name in fell if k)
        return said.get(self.outcome, claim) + lost


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The comparisons that a page prints, the one with the best rival first."""

    comparisons: tuple[Comparison, ...] = ()
    chosen_on: tuple[int, ...] = ()
    """Seeds that chose and are not compared; empty: the compared seeds chose."""
    has_choice: bool = False
    family: int = 1
    """Comparisons for which ± holds together."""
    refused: str = ""
    """Why there is no verdict."""
    warnings: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """The verdict: at the best learning rates, then at each other one."""
        if not self.comparisons:
            return f"No verdict: {self.refused}."
        first = self.comparisons[0]
        rates = " and ".join(dict.fromkeys(f"{lr:g}" for lr in (first.lr, first.rival_lr)))
        others = [f". At lr {one.lr:g}, {one.text()}" for one in self.comparisons if not one.is_best]
        return f"At the best learning rates (lr {rates}), {first.text()}{''.join(others)}."

    @property
    def remarks(self) -> tuple[str, ...]:
        """Return what the verdict rests on, and what it cannot tell."""
        first = self.comparisons[0] if self.comparisons else None
        if first is None or first.half_width is None:
            return ("Without two pairs of seeds chance cannot be told from a difference: --seeds 3.",)
        width = (
            f"± is half of the 95 % interval that holds for all {self.family} comparisons together, with the "
            "noise pooled over methods that were trained separately. Pairs are runs of one seed."
        )
        said = f"and compared on the same seeds: differences below {first.detectable:.3f} mean nothing."
        if self.chosen_on:
            said = f"on seed {', '.join(map(str, self.chosen_on))}, which is not compared."
        return (width, f"Rates and methods were chosen {said}") if self.has_choice else (width,)


def of_table(table: Table, selection: Collection[int] | None = None) -> Verdict:
    """Return the verdict on the runs of a table; our own methods are those with a control."""
    refused, named = table.differences()
    for name, values in [*refused.items()][:1]:
        return Verdict(refused=f"the runs differ in {name} ({', '.join(v[:40] for v in values[:3])})")
    losses: dict[str, dict[float, dict[int, float | None]]] = {}
    for row in (row for row in table if row.is_ended):
        losses.setdefault(row.method, {}).setdefault(row.lr, {})[row.seed] = row.loss
    said = tuple(f"The runs differ in {name}: {', '.join(v[:4])}." for name, v in named.items())
    own = {row.method for row in table if row.is_steered}
    trained = {row.method: next(iter(row.methods)) for row in table}
    return judge(losses, own=own, trained=trained, selection=selection, warnings=said)


def judge(
    losses: Losses, *, own: Collection[str] = (), trained: Mapping[str, str] | None = None,
    selection: Collection[int] | None = None, warnings: tuple[str, ...] = (),
) -> Verdict:  # fmt: skip
    """Compare the best of our own methods with every other one; without others, or own ones, with the rest.

    `trained` is the run that a method belongs to: averages of one run share its noise. `selection` are seeds
    that only choose; by default the first of four or more, if there is a choice.
    """
    every = sorted({seed for rates in losses.values() for seeds in rates.values() for seed in seeds})
    has_choice = sum(name in own for name in losses) != 1 or any(len(rates) > 1 for rates in losses.values())
    if selection is None:
        shared = sorted(_shared(losses))
        selection = shared[:1] if has_choice and len(shared) >= APART else ()
    choosing = set(selection) or set(every)
    best = {name: found for name, found in _ranked(losses, choosing).items() if found[0] < 1}
    # What did not finish on the seeds that chose is still compared, after the others.
    best |= _ranked({name: rates for name, rates in losses.items() if name not in best}, set(every))
    ended = [name for name, (share, _, _) in best.items() if share < 1]
    named = [f"{name} diverged in every run" for name in best if name not in ended]
    if len({len(rates) for rates in losses.values()}) > 1:
        named.append(f"Rates tried: {', '.join(f'{name} {len(rates)}' for name, rates in losses.items())}")
    for name, (_, _, lr) in best.items():
        if len(losses[name]) > 1 and lr in (min(losses[name]), max(losses[name])):
            named.append(f"{name} is best at an end of its learning rates, {lr:g}: one beyond may be better")
    warnings = (*warnings, *(f"{text}." for text in named))
    ours, rivals = ([name for name in ended if (name in own) == side] for side in (True, False))
    if len({name in own for name in best}) == 1:
        ours, rivals = ended, ended[1:]
    if not ours or not rivals:
        return Verdict(refused="; ".join(["no two methods to compare", *named]), warnings=warnings)
    subject, rates, off = ours[0], {name: best[name][2] for name in ended}, dict[float, str]()
    apart = set(ours) if ours is not ended else {subject}
    for lr in sorted(losses[subject].keys() - {rates[rivals[0]]}, reverse=True):
        others = {name: {lr: losses[name][lr]} for name in losses if name not in apart and lr in losses[name]}
        if there := list(_ranked(others, choosing)):
            off[lr] = there[0]
    # Where the compared seeds choose, each of our methods could have been the one that is compared.
    family = (len(rivals) + len(off)) * (len(ours) if has_choice and not selection else 1)
    place = Place(losses, trained or {}, [seed for seed in every if seed not in selection], family)
    found = [place.compare(subject, name, rates[subject], rates[name], is_best=True) for name in rivals]
    for lr, rival in off.items():
        found.append(place.compare(subject, rival, lr, lr, is_best=False))
    return Verdict(
        comparisons=tuple(found), chosen_on=tuple(selection), has_choice=has_choice, family=family,
        warnings=warnings,
    )  # fmt: skip


def _ranked(losses: Losses, seeds: Collection[int]) -> dict[str, tuple[float, float, float]]:
    """Return the share of seeds not finished, the mean and the rate of each method at its best, best first.

    Only seeds count that every method ended with, if there are any. A rate with fewer seeds than others is
    not better, whatever its mean: that is of other seeds.
    """
    shared, found = _shared(losses) & set(seeds) or set(seeds), {}
    for name, rates in losses.items():
        ended = {lr: [x for seed, x in by_seed.items() if seed in shared] for lr, by_seed in rates.items()}
        most = max(map(len, ended.values()), default=0)
        keys = []
        for lr, values in ended.items():
            if values:
                known = [x for x in values if x is not None]
                keys.append((1 - len(known) / most, fmean(known) if known else math.inf, lr))
        if keys:
            found[name] = min(keys)
    return {name: found[name] for name in sorted(found, key=lambda name: found[name])}


def _shared(losses: Losses) -> set[int]:
    """Return the seeds that every method ended with."""
    of_each: list[set[int]] = [set().union(*rates.values()) for rates in losses.values()]
    return set.intersection(*of_each) if of_each else set()


@dataclass(frozen=True, slots=True)
class Place:
    """The data that all comparisons share."""

    losses: Losses
    trained: Mapping[str, str]
    seeds: Sequence[int]
    family: int

    def compare(self, method: str, rival: str, lr: float, rival_lr: float, *, is_best: bool) -> Comparison:
        """Compare two methods, each at its rate, with the noise of all that were trained at those two."""
        ended = [self._ended(method, lr), self._ended(rival, rival_lr)]
        known = [{seed: x for seed, x in each.items() if x is not None} for each in ended]
        gaps = [known[0][seed] - known[1][seed] for seed in known[0] if seed in known[1]]
        mean, half = Mean.of(gaps), None
        outcome: Outcome = "one seed" if gaps else "no pair"
        if mean is not None and mean.n > 1:
            own, freedom = self._noise(lr, *((rival, method) if lr == rival_lr else (method,)))
            other, least = (own, freedom) if lr == rival_lr else self._noise(rival_lr, rival)
            error = math.sqrt((own + other) / mean.n)
            if not freedom or not least:  # two averages of one run
                freedom, error = mean.n - 1, mean.error or 0.0
            elif lr != rival_lr and error:  # by Satterthwaite
                freedom = int((own + other) ** 2 / (own**2 / freedom + other**2 / least))
            half, outcome = quantile(1 - 0.05 / self.family, freedom) * error, "not settled"
            if abs(mean.value) > max(half, SMALLEST):
                outcome = "lower" if mean.value < 0 else "higher"
            elif abs(mean.value) + quantile(0.9, freedom) * error <= SMALLEST:
                outcome = "tie"
        return Comparison(
            method=method, rival=rival, lr=lr, rival_lr=rival_lr, is_best=is_best,
            outcome=outcome, difference=mean, half_width=half, seeds=(len(ended[0]), len(ended[1])),
            diverged=(len(ended[0]) - len(known[0]), len(ended[1]) - len(known[1])),
        )  # fmt: skip

    def _noise(self, lr: float, *names: str) -> tuple[float, int]:
        """Return the variance at a rate over all methods that were trained separately, and its freedom."""
        there = [*(name for name in reversed([*self.losses]) if lr in self.losses[name]), *names]
        one_each = {self.trained.get(name, name): name for name in there}
        return pooled([self._ended(name, lr) for name in one_each.values()])

    def _ended(self, name: str, lr: float) -> dict[int, float | None]:
        by_seed = self.losses[name][lr]
        return {seed: by_seed[seed] for seed in self.seeds if seed in by_seed}
