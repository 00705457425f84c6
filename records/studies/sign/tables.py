"""Redraw all tables and figures of this study from its records: `python records/studies/sign/tables.py`.

It writes tables.md and PNG files beside itself. It refuses records that do not say where they come from, and
comparisons of runs of different tokens. `protocol.md` says what the words below, tie and not settled mean.
"""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from scipy import stats

matplotlib.use("Agg")
HERE = Path(__file__).parent
REPORT_FROM = 11
"""Seeds from here on were never used to choose."""
SMALLEST = 0.003
"""Nats that count as a difference."""
VIEWS = {"average": "average", "live": "live", "power_0_5": "κ .5", "power_0_6": "κ .6", "power_0_7": "κ .7"}
VIEWS |= {"power_0_8": "κ .8"}
LAB = ("check", "growth", "further", "forks")
"""Batches of lab.py that try forms of a control."""
SPEED = "growing push"
"""A push whose slow motion gains speed over the run (growth "speed" in lab.py)."""
SUBJECTS = (SPEED, "push", "ademamix")
"""Methods that are compared with every other one."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A finished run."""

    batch: str
    method: str
    setting: str
    lr: float
    seed: int
    steps: int
    outcome: str
    tokens: tuple[str, str]
    """Fingerprints of the training and the held-out tokens."""
    curve: tuple[tuple[int, dict[str, float]], ...]
    seconds: float

    @property
    def views(self) -> dict[str, float]:
        """Final losses of all weights the run could return; empty if it diverged.

        Runs of batch "large" were judged for the last time four steps before their end.
        """
        ended = self.outcome == "finished" and self.curve and self.curve[-1][0] > 0.99 * self.steps
        return self.curve[-1][1] if ended else {}


def read(paths: Iterable[Path]) -> list[Row]:
    """Return the rows of record files; raise ValueError for one that does not say where it comes from."""
    rows: dict[str, Row] = {}
    for path in paths:
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            line = json.loads(text)
            if "batch" not in line:
                continue
            row = _row(line, f"{path.name}, line {number}")
            if line["name"] in rows:
                raise ValueError(f"{path.name}, line {number}: {line['name']} is in the records twice")
            rows[line["name"]] = row
    return list(rows.values())


def _row(line: dict[str, Any], where: str) -> Row:
    config, about = line["config"], line.get("environment", {})
    for what, value in (
        ("seed", config.get("seed")),
        ("code version", about.get("commit")),
        ("hardware", about.get("gpu") or about.get("system")),
    ):
        if value is None:
            raise ValueError(f"{where}: {line.get('name')} has no {what}; such a record proves nothing")
    setting = line["setting"]
    if "method" in setting:  # a line of lab.py, whose settings are in its name
        shown = " ".join(line["name"].split("_")[2:-3])
        if setting["growth"] == "speed":
            strength = setting["R"]
            line["method"], shown = SPEED, f"speed {1 / (1 + strength):g} k {setting['k']:g}"
    else:
        shown = " ".join(f"{key} {value:g}" for key, value in setting.items())
    return Row(
        batch=line["batch"],
        method=line["method"],
        setting=shown,
        lr=line["lr"],
        seed=config["seed"],
        steps=config["steps"],
        outcome=line["outcome"],
        seconds=line["seconds"],
        tokens=(line["data"]["fingerprint"], line["data"]["held_out_fingerprint"]),
        curve=tuple((step, losses) for step, losses in line["evaluations"]),
    )


def check_same_tokens(rows: Sequence[Row], where: str) -> None:
    """Raise ValueError, naming both, if rows to be compared were trained or judged on different tokens."""
    for before, after in pairwise(rows):
        for what, left, right in zip(("training", "held-out"), before.tokens, after.tokens, strict=True):
            if left != right:
                raise ValueError(
                    f"{where}: {before.method} and {after.method} have different {what} tokens "
                    f"({left[:12]} and {right[:12]}); they are never compared"
                )


# --- Choosing ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The setting that a method takes to its report runs, and the weights that it returns."""

    method: str
    setting: str
    lr: float
    view: str
    loss: float
    seeds: int
    trials: int
    diverged: int


def choose(rows: Sequence[Row]) -> list[Choice]:
    """Return the best setting of each method: of those with most selection seeds, the lowest mean."""
    check_same_tokens(rows, "selection")
    found = []
    for method in sorted({row.method for row in rows}):
        own: dict[tuple[str, float], list[Row]] = defaultdict(list)
        for row in rows:
            if row.method == method:
                own[row.setting, row.lr].append(row)
        most = max(len(group) for group in own.values())
        candidates = []
        for (setting, lr), group in own.items():
            if len(group) == most and all(row.views for row in group):
                for view in group[0].views:
                    loss = mean(row.views[view] for row in group)
                    candidates.append((loss, setting, lr, view))
        diverged = sum(not row.views for group in own.values() for row in group)
        if candidates:
            loss, setting, lr, view = min(candidates)
            found.append(
                Choice(
                    method=method,
                    setting=setting,
                    lr=lr,
                    view=view,
                    loss=loss,
                    seeds=most,
                    trials=len(own),
                    diverged=diverged,
                )
            )
    return sorted(found, key=lambda choice: choice.loss)


# --- Comparing -----------------------------------------------------------------------------------------


def steps_saved(curve: Sequence[tuple[int, float]], target: float) -> float | None:
    """Return the share of steps saved until a curve reaches a loss, by interpolation in ln t; None if never.

    >>> round(steps_saved([(1000, 4.0), (2000, 3.0), (4000, 2.0)], 2.5), 4)
    0.2929
    """
    last = curve[-1][0]
    for (t, loss), (after, lower) in pairwise(curve):
        if lower <= target < loss:
            share = (loss - target) / (loss - lower)
            return 1 - math.exp(math.log(t) + share * math.log(after / t)) / last
    return None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One method against one rival on report seeds."""

    rival: str
    difference: float
    half_width: float
    pairs: int
    saved: float
    saved_half_width: float
    words: str


@dataclass(frozen=True)
class Noise:
    """The standard deviation of a run, once method and seed are known, and its degrees of freedom."""

    of_a_run: float
    freedom: int


def verdicts(
    method: Choice, rivals: Sequence[Choice], rows: Sequence[Row], noise: Noise, printed: int
) -> list[Verdict]:
    """Compare a method with all rivals at once, by the rules of the protocol.

    `printed` is the number of comparisons that the page shows: intervals hold for all of them together.
    """
    check_same_tokens(rows, "report")
    own, found = _runs(method, rows), []
    for rival in rivals:
        runs = _runs(rival, rows)
        seeds = sorted(own.keys() & runs.keys())
        if len(seeds) < 2:
            continue
        difference = mean(_loss(method, own, seed) - _loss(rival, runs, seed) for seed in seeds)
        error = noise.of_a_run * math.sqrt(2 / len(seeds))
        half = error * float(stats.t.ppf(1 - 0.025 / printed, noise.freedom))
        narrow = error * float(stats.t.ppf(0.95, noise.freedom))
        words = f"not settled; these seeds could detect {max(half, SMALLEST):.3f}"
        if abs(difference) > max(half, SMALLEST):
            words = "below" if difference < 0 else "above"
        elif abs(difference) + narrow <= SMALLEST:
            words = "tie"
        saved, lower, upper = (
            mean(_saved(method, own[seed], rival, runs[seed], shift) for seed in seeds)
            for shift in (0.0, -half, half)
        )
        verdict = Verdict(
            rival=rival.method,
            difference=difference,
            half_width=half,
            pairs=len(seeds),
            saved=saved,
            saved_half_width=abs(upper - lower) / 2,
            words=words,
        )
        found.append(verdict)
    return found


def noise_of(chosen: Sequence[Choice], rows: Sequence[Row]) -> Noise:
    """Return the noise that methods and seeds do not explain, over the seeds that all methods have."""
    every = [_runs(choice, rows) for choice in chosen]
    seeds = sorted(set.intersection(*(set(runs) for runs in every)))
    table = [
        [_loss(choice, runs, seed) for seed in seeds] for choice, runs in zip(chosen, every, strict=True)
    ]
    of_seeds = [mean(column) for column in zip(*table, strict=True)]
    rest = [
        x - mean(line) - y + mean(of_seeds) for line in table for x, y in zip(line, of_seeds, strict=True)
    ]
    freedom = (len(table) - 1) * (len(seeds) - 1)
    return Noise(math.sqrt(sum(x * x for x in rest) / freedom), freedom)


def _saved(method: Choice, own: Row, rival: Choice, other: Row, shift: float) -> float:
    """Return the share of steps saved against a rival's run; below 0 if more steps are needed.

    `shift` is added to all losses of the method.
    """
    curve = [(t, losses[method.view] + shift) for t, losses in own.curve]
    saved = steps_saved(curve, other.views[rival.view])
    if saved is not None:
        return saved
    needed = steps_saved([(t, losses[rival.view]) for t, losses in other.curve], curve[-1][1])
    assert needed is not None, "one of two curves must reach the end of the other"
    return 1 - 1 / (1 - needed)


def _runs(choice: Choice, rows: Sequence[Row]) -> dict[int, Row]:
    wanted = (choice.method, choice.setting)
    own = [row for row in rows if (row.method, row.setting) == wanted and row.views]
    return {row.seed: row for row in own if math.isclose(row.lr, choice.lr, rel_tol=0.01)}


def _loss(choice: Choice, runs: dict[int, Row], seed: int) -> float:
    return runs[seed].views[choice.view]


# --- Drawing -------------------------------------------------------------------------------------------


def table(title: str, head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown under a title."""
    rows = [head, ["---"] * len(head), *lines]
    return f"## {title}\n\n" + "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows) + "\n"


def main() -> int:
    """Read the records, and write tables.md and the figures."""
    paths = sorted(HERE.glob("2*.jsonl"))
    try:
        rows = read(paths)
        parts = ["# Tables of the study\n\nMade by `tables.py` from the records beside it.\n", minutes()]
        selected = [row for row in rows if row.batch in ("a", "a-edges", "a-second", "a-third", "form")]
        parts += selection("Selection at 7M", selected)
        draw_selection(selected)
        parts += lab([row for row in rows if row.batch in LAB and not row.method.startswith("muon")])
        large = [row for row in rows if row.batch in ("d-select", "large")]
        parts += selection("Selection at 27M", large)
        parts += report("7M", choose(selected), [row for row in rows if row.batch in ("b", "report")])
        parts += report("27M", choose(large), [row for row in rows if row.batch in ("d", "large_report")])
        parts += muon([row for row in rows if row.method.startswith("muon")])
        parts += [rebuilt([row for row in rows if row.batch in ("b", "rebuilt")])]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    (HERE / "tables.md").write_text("\n".join(parts), encoding="utf-8")
    return 0


def minutes() -> str:
    """Return the table of GPU minutes."""
    lines = [json.loads(text) for text in (HERE / "minutes.jsonl").read_text().splitlines()]
    return table(
        "GPU minutes",
        ("date", "batch", "minutes", "runs", "hardware"),
        [[x["date"], x["batch"], x["minutes"], x["runs"], x["hardware"]] for x in lines],
    )


def lab(rows: Sequence[Row]) -> list[str]:
    """Return the table of runs that only lab.py can make."""
    lines = [
        [row.batch, row.method, row.setting, f"{row.lr:g}", VIEWS[view], f"{row.views[view]:.4f}"]
        for row in sorted(rows, key=lambda row: min(row.views.values(), default=math.inf))
        if row.views and (view := min(row.views, key=row.views.__getitem__))
    ]
    return [
        table("Other forms at 7M, seed 1", ("batch", "method", "differs in", "lr", "returns", "loss"), lines)
    ]


def report(size: str, chosen: Sequence[Choice], rows: Sequence[Row]) -> list[str]:
    """Return the tables of the report at one size, and draw its curves."""
    check_same_tokens(rows, "report")
    there = [choice for choice in chosen if len(_runs(choice, rows)) > 1]
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for choice in there:
        runs = _runs(choice, rows)
        axis_end = max(row.steps for row in runs.values())
        curves = [{t: losses[choice.view] for t, losses in row.curve} for row in runs.values()]
        points = [(t, mean(curve[t] for curve in curves)) for t in curves[0] if t >= 0.37 * axis_end]
        axes.plot(*zip(*points, strict=True), "o-", label=choice.method, markersize=4)
    axes.set(xlabel="steps", ylabel="held-out loss (nats a token)")
    axes.set(title=f"{size}, report seeds: what each method would return")
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(HERE / f"report-{size.lower()}.png", dpi=150)
    parts = [finals(f"Report at {size}: final losses", there, rows)]
    pairs = [(one, [other for other in there if other is not one]) for one in there if one.method in SUBJECTS]
    printed, noise = sum(len(rivals) for _, rivals in pairs), noise_of(there, rows)
    for one, rivals in pairs:
        lines = [
            [
                v.rival,
                f"{v.difference:+.4f} ± {v.half_width:.4f}",
                f"{100 * v.saved:+.1f} ± {100 * v.saved_half_width:.1f}",
                v.pairs,
                v.words,
            ]
            for v in verdicts(one, rivals, rows, noise, printed)
        ]
        head = ("rival", "difference in loss", "steps saved, %", "pairs", f"{one.method} is")
        parts.append(table(f"Report at {size}: {one.method} against each other method", head, lines))
    said = f"± is the simultaneous 95 % half-width over all {printed} comparisons at {size}."
    return [*parts, said + "\n"]


def finals(title: str, chosen: Sequence[Choice], rows: Sequence[Row]) -> str:
    """Return the table of final losses, best first."""
    lines = []
    for choice in chosen:
        runs = _runs(choice, rows)
        own = [_loss(choice, runs, seed) for seed in runs]
        own_words = "" if choice.method.startswith("muon") else choice.setting
        at = ", ".join(filter(None, (choice.method, own_words, f"lr {choice.lr:g}")))
        seconds = mean(row.seconds for row in runs.values())
        lines.append(
            [at, VIEWS[choice.view], f"{mean(own):.4f}", f"{stdev(own):.4f}", len(own), f"{seconds:.0f}"]
        )
    head = ("method", "returns", "loss", "sd of a seed", "seeds", "seconds, beside other runs")
    return table(title, head, sorted(lines, key=lambda line: str(line[2])))


def muon(rows: Sequence[Row]) -> list[str]:
    """Return the tables of Muon at 7M: every setting with its best weights, and the best push."""
    check_same_tokens(rows, "Muon")
    rows = [replace(row, method=f"{row.method} {row.setting}".replace(" base-muon", "")) for row in rows]
    methods = sorted({row.method for row in rows})
    chosen = [choose([row for row in rows if row.method == method])[0] for method in methods]
    pushes = [choice for choice in chosen if choice.method.startswith("muon-push")]
    best = min(pushes, key=lambda choice: choice.loss)
    others = [choice for choice in chosen if choice is not best]
    lines = [
        [v.rival, f"{v.difference:+.4f} ± {v.half_width:.4f}", f"{100 * v.saved:+.1f}", v.pairs, v.words]
        for v in verdicts(best, others, rows, noise_of(chosen, rows), len(others))
    ]
    head = ("rival", "difference in loss", "steps saved, %", "pairs", "it is")
    title = f"Muon at 7M: {best.method} against each other setting"
    return [finals("Muon at 7M: final losses", chosen, rows), table(title, head, lines)]


def rebuilt(rows: Sequence[Row]) -> str:
    """Return the table of the same push, trained by the first optimizer and by the rebuilt one."""
    check_same_tokens(rows, "rebuilt")
    first, now = (
        {row.seed: row.views["average"] for row in rows if row.method == method}
        for method in ("push", "rebuilt push")
    )
    lines = [
        [seed, f"{first[seed]:.4f}", f"{now[seed]:.4f}", f"{now[seed] - first[seed]:+.4f}"] for seed in now
    ]
    ends = [mean(first.values()), mean(now.values())]
    lines.append(["mean", *(f"{end:.4f}" for end in ends), f"{ends[1] - ends[0]:+.4f}"])
    return table("The push at 7M, by both optimizers", ("seed", "first", "rebuilt", "difference"), lines)


def selection(title: str, rows: Sequence[Row]) -> list[str]:
    """Return the tables of a selection."""
    chosen = choose(rows)
    best = [
        [
            c.method,
            c.setting,
            f"{c.lr:g}",
            VIEWS.get(c.view, c.view),
            f"{c.loss:.4f}",
            c.seeds,
            c.trials,
            c.diverged,
        ]
        for c in chosen
    ]
    head = ("method", "setting", "lr", "returns", "loss", "seeds", "trials", "diverged")
    every = [
        [row.method, row.setting, f"{row.lr:g}", row.seed, VIEWS.get(view, view), f"{row.views[view]:.4f}"]
        for row in sorted(rows, key=lambda row: (row.method, row.setting, row.lr, row.seed))
        if row.views and (view := min(row.views, key=row.views.__getitem__))
    ]
    return [
        table(f"{title}: the best setting of each method", head, best),
        table(f"{title}: all runs", ("method", "setting", "lr", "seed", "best weights", "loss"), every),
    ]


def draw_selection(rows: Sequence[Row]) -> None:
    """Draw the loss of each method over its learning rate."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for choice in choose(rows):
        own = [row for row in rows if row.method == choice.method and row.views]
        rates = sorted({row.lr for row in own})
        lowest = [min(min(row.views.values()) for row in own if row.lr == lr) for lr in rates]
        axes.plot(rates, lowest, "o-", label=choice.method, markersize=4)
    axes.set(
        xscale="log",
        xlabel="learning rate",
        ylabel="held-out loss (nats a token)",
        title="7M, 4,000 steps: the best setting of each method at each rate, seed 1",
    )
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(HERE / "selection.png", dpi=150)


if __name__ == "__main__":
    sys.exit(main())
