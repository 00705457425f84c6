"""What the paper says of its methods, beside what our runs say: each a difference of two losses. No torch.

A difference is taken seed by seed, of settings and rates that seed 1 chose. It counts if its 95 %
interval leaves out 0; losses that are closer than `TIE`, with an error below that, are the same to us.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import final

from paceline.experiments.config import ConfigError
from paceline.experiments.evidence import studies
from paceline.experiments.evidence.estimates import estimates_table
from paceline.experiments.evidence.studies import ADAMW, DEFAULT, FREE, PACE, Room
from paceline.experiments.evidence.tables import TABLES, Mean, Results, Row, baseline, rows_of
from paceline.experiments.pages import markdown
from paceline.experiments.report.verdict import errors_of

TIE = 0.003
ENOUGH = 3
"""Seeds that a tie needs: of two, an error may be small by chance."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One of the two that are compared."""

    words: str
    method: str
    schedule: str = "constant"
    beside: bool = False
    """What is returned is not its own weights but the best average that was kept beside it."""

    def row(self, rows: Iterable[Row]) -> Row | None:
        """Its losses; None if it has none."""
        for row in rows:
            is_beside = row.view not in ("live", "average")
            if (row.method, row.schedule, is_beside) == (self.method, self.schedule, self.beside):
                return row
        return None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One set of weights ends lower than another, or no higher."""

    ours: Side
    theirs: Side
    times: float | None = None
    """Both at so many times the best rate of AdamW; None: each at its own best rate."""
    strictly: bool = True
    """Lower; otherwise: not higher."""
    of_paper: bool = True
    """Whether the paper says it."""

    def difference(self, rows: Sequence[Row]) -> Mean | None:
        """Ours less theirs; None if a run is missing."""
        own, other, found = self.ours.row(rows), self.theirs.row(rows), baseline(rows)
        if own is None or other is None or found is None:
            return None
        if self.times is None:
            known = own.is_whole and other.is_whole
            return own.over(other, own.best_rate, other.best_rate) if known else None
        there = [lr for lr in other.rates if self._is_at(lr, found[1])]
        return own.over(other, there[0], there[0]) if there else None

    def _is_at(self, lr: float, best: float) -> bool:
        return self.times is not None and abs(lr / (self.times * best) - 1) < 1e-6

    def is_about(self, trials: Iterable[studies.Trial], rows: Sequence[Row]) -> bool:
        """Whether a study has such runs, done or not."""
        if self.times is not None:
            found = baseline(rows)
            trials = [one for one in trials if found and self._is_at(one.lr, found[1])]
        methods = {(one.method, one.schedule) for one in trials}
        return {(side.method, side.schedule) for side in (self.ours, self.theirs)} <= methods

    def verdict(self, found: Mean | None) -> str:
        """In words."""
        if found is None:
            return "runs are missing"
        if found.error is None:
            return "one seed: not settled"
        if is_settled(found) and found.loss < 0:
            return "confirmed" if self.strictly else "confirmed: it is lower"
        if is_settled(found):
            return "not confirmed: it is higher"
        if not is_tie(found):
            return f"not settled: 95 % interval ± {_margin(found):.3f}"
        return "not confirmed: a tie" if self.strictly else "confirmed: a tie"


def _margin(difference: Mean) -> float:
    """How far from 0 it has to be to count."""
    assert difference.error is not None
    return max(errors_of(difference.count) * difference.error, TIE)


def is_settled(difference: Mean) -> bool:
    """Whether seeds say that there is a difference, and it is more than what counts for one."""
    return abs(difference.loss) > _margin(difference)


def is_tie(difference: Mean) -> bool:
    """Whether enough seeds say that there is none."""
    assert difference.error is not None
    return max(abs(difference.loss), difference.error) <= TIE and difference.count >= ENOUGH


LIVE, EMA = Side(words="AdamW, live", method=ADAMW), Side(words="AdamW's best EMA", method=ADAMW, beside=True)
WSD = Side(words="AdamW with WSD", method=ADAMW, schedule="wsd")
SCHEDULE_FREE = Side(words="Schedule-Free", method=FREE)
AVERAGE = Side(words="PACE, its average", method=PACE)
LONG = Side(words="PACE, the best average kept beside it", method=PACE, beside=True)
OURS = Side(words="our default, what it returns", method=DEFAULT)
PACE_WSD = Side(words="PACE with WSD", method=PACE, schedule="wsd")

CLAIMS = (
    Claim(ours=AVERAGE, theirs=LIVE),
    Claim(ours=AVERAGE, theirs=EMA),
    Claim(ours=AVERAGE, theirs=WSD, strictly=False),
    Claim(ours=PACE_WSD, theirs=WSD),
    Claim(ours=AVERAGE, theirs=SCHEDULE_FREE),
    *(Claim(ours=AVERAGE, theirs=EMA, times=times) for times in (2, 3, 10)),
    *(Claim(ours=LONG, theirs=EMA, times=times, of_paper=False) for times in (None, 2, 3, 10)),
    *(Claim(ours=OURS, theirs=EMA, times=times, of_paper=False) for times in (None, 2, 3, 10)),
)
"""The same for every task."""

TASKS: dict[str, studies.Study] = {
    "Pretraining a 7M GPT": studies.basin,
    "Fine-tuning SmolLM2-135M": studies.fine_tuning_basin,
    "GPT-2 124M": studies.STUDIES["gpt2"],
}


def verdicts(room: Room, results: Results) -> str:
    """Every claim with every task's difference and verdict: a table for each."""
    found = {task: _verdicts_of(study, room, results) for task, study in TASKS.items()}
    return "\n\n".join(f"{task}:\n\n{table or '(not done yet)'}" for task, table in found.items())


def _verdicts_of(study: studies.Study, room: Room, results: Results) -> str:
    """Of what the task has runs for; nothing, if its settings are not chosen yet."""
    try:
        trials = list(study(room, results))
    except ConfigError:
        return ""
    rows, body, rates = rows_of(trials, results), [], {one.lr for one in trials}
    anywhere = "each at its best rate" if len(rates) > 1 else f"at {min(rates):g}"
    for claim in CLAIMS:
        if not claim.is_about(trials, rows):
            continue
        found = claim.difference(rows)
        says = f"{claim.ours.words} {'below' if claim.strictly else 'not above'} {claim.theirs.words}"
        body.append(
            [
                says if claim.of_paper else f"{says} (ours)",
                anywhere if claim.times is None else f"{claim.times:g} × AdamW's best rate",
                "" if found is None else f"{found:+} ({found.count})",
                claim.verdict(found),
            ]
        )
    return markdown(["statement", "where", "difference (seeds)", "verdict"], body)


def done(room: Room, results: Results) -> str:
    """How many runs each study has, of how many."""
    body = []
    for name, study in studies.STUDIES.items():
        try:
            trials = studies.together(study(room, results))
        except ConfigError:
            body.append([name, "", "chosen from a study that is not done"])
            continue
        there = [results[one] for one in trials if one in results]
        diverged = sum(one.diverged for one in there)
        body.append([name, f"{len(there)} of {len(trials)}", f"{diverged} diverged" if diverged else ""])
    return markdown(["study", "runs", ""], body)


def tables(room: Room, results: Results) -> dict[str, Callable[[], str]]:
    """All of docs/results.md, by their names there."""

    def of_study(name: str) -> Callable[[], str]:
        def made() -> str:
            try:
                return TABLES[name](room, results)
            except ConfigError as error:  # of a study that chooses from one that is not done
                return f"({error})"

        return made

    own = {
        "verdicts": lambda: verdicts(room, results),
        "done": lambda: done(room, results),
        "estimates": lambda: estimates_table(room, results),
    }
    return own | {name: of_study(name) for name in TABLES}
