"""Make the tables and the figure of docs/results.md and docs/cost.md again, from records/.

    PYTHONPATH=src python records/studies/pages.py

It refuses a record that does not say its seed, code version and hardware.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from scipy import stats

from paceline.cost.arithmetic import OPTIMIZERS

matplotlib.use("Agg")
ROOT = Path(__file__).parents[2]
RECORDS, DOCS = ROOT / "records", ROOT / "docs"
CHOOSING = 1
"""The seed by which settings and learning rates were chosen."""
SMALLEST = 0.003
"""Nats that count as a difference."""
UNMEASURED = "not measured yet"


# --- Records --------------------------------------------------------------------------------------------


def check_origin(seed: Any, about: dict[str, Any], where: str) -> None:
    """Raise ValueError, naming the record, if it does not say where it comes from."""
    hardware = about.get("hardware") or about.get("gpu") or about.get("system")
    for what, value in (("seed", seed), ("code version", about.get("commit")), ("hardware", hardware)):
        if value is None:
            raise ValueError(f"{where} has no {what}; such a record proves nothing")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run of the study of the paper's statements."""

    group: str
    """Task, method with its settings, schedule and steps, as the name of the run has them."""
    lr: float
    seed: int
    losses: dict[str, float]
    """The final held-out loss of all weights that it could return; empty if it diverged."""


NAME = re.compile(r"(?P<task>\w+?)_(?P<method>.+)_lr(?P<lr>[\d.e-]+)_(?P<rest>\w+_\d+)_s(?P<seed>\d+)")


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Return the runs in files with a line a run; of two with one name the later one."""
    found: dict[str, Run] = {}
    for path in paths:
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            line = json.loads(text)
            check_origin(line["config"].get("seed"), line["environment"], f"{path.name}, line {number}")
            name = NAME.fullmatch(line["name"])
            if name is None:
                raise ValueError(f"{path.name}, line {number}: {line['name']} is no name of this study")
            ended = line["outcome"] == "finished" and line["evaluations"]
            found[line["name"]] = Run(
                group=f"{name['task']}_{name['method']}_{name['rest']}",
                lr=float(name["lr"]),
                seed=int(name["seed"]),
                losses=line["evaluations"][-1][1] if ended else {},
            )
    return list(found.values())


def read_bench(device: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows of the newest record of `paceline bench` on a device, by model and optimizer."""
    paths = sorted(RECORDS.glob(f"*-bench-{device}.json"))
    if not paths:
        return {}
    record = json.loads(paths[-1].read_text(encoding="utf-8"))
    check_origin(record.get("seed"), record, paths[-1].name)
    return {(row["model"], row["optimizer"]): row for row in record["rows"]}


# --- The paper's statements -----------------------------------------------------------------------------

Losses = dict[tuple[float, int], float]
"""By learning rate and seed."""

TASKS = {
    "pretraining, 7M": ("gpt", 4000),
    "fine-tuning, 135M": ("sft", 300),
    "pretraining, 124M": ("gpt2", 1200),
}
_PLAIN = "-b0.9-0.999-w0.01"
METHODS = {
    ("AdamW", "sft"): "adamw-b0.9-0.999-w0.1",
    ("AdamW", ""): "adamw" + _PLAIN,
    ("Schedule-Free", "sft"): "schedule_free-b0.9-0.999-w0.05",
    ("Schedule-Free", ""): "schedule_free-b0.9-0.999-w0.1",
    ("PACE", "sft"): "pace-paper-c0.03-k0.5-u1" + _PLAIN,
    ("PACE", ""): "pace-paper-c0.003-k0.5-u1" + _PLAIN,
    ("harder PACE", ""): "pace-paper-c0.01-k0.3-u1" + _PLAIN,
}
"""The settings that the choosing seed gave each method, by method and task."""


@dataclass(frozen=True)
class Side:
    """Weights that a method returns."""

    words: str
    method: str
    schedule: str = "constant"
    is_beside: bool = False
    """Whether the best average kept next to the run is returned, in place of the method's own weights."""
    is_fresh: bool = False
    """Whether the choosing seed is left out, because it chose these settings by this very difference."""

    def losses(self, runs: Sequence[Run], task: str, steps: int) -> Losses:
        """Return the final losses; infinite where a run diverged."""
        slug = METHODS.get((self.method, task)) or METHODS[self.method, ""]
        own = [run for run in runs if run.group == f"{task}_{slug}_{self.schedule}_{steps}"]
        view = "live" if self.method == "AdamW" else "average"
        if self.is_beside and own:
            chosen = [run for run in own if run.seed == CHOOSING] or own
            view = min((y, v) for run in chosen for v, y in run.losses.items() if v.startswith("power_"))[1]
        counted = [run for run in own if not (self.is_fresh and run.seed == CHOOSING)]
        return {(run.lr, run.seed): run.losses.get(view, math.inf) for run in counted}


def best_rate(losses: Losses) -> float:
    """Return the learning rate with the lowest loss of the choosing seed, or the only one."""
    chosen = {place: loss for place, loss in losses.items() if place[1] == CHOOSING} or losses
    return min(chosen, key=chosen.__getitem__)[0]


EMA = Side("AdamW's best EMA", "AdamW", is_beside=True)
WSD = Side("AdamW with WSD", "AdamW", "wsd")
PACE = Side("PACE", "PACE")
LONGER = Side("PACE, longer average", "PACE", is_beside=True)
HARDER = Side("harder pull, longer average", "harder PACE", is_beside=True, is_fresh=True)
CLAIMS: tuple[tuple[Side, Side, float | None], ...] = (
    (PACE, Side("AdamW, live", "AdamW"), None),
    (PACE, EMA, None),
    (PACE, WSD, None),
    (Side("PACE with WSD", "PACE", "wsd"), WSD, None),
    (PACE, Side("Schedule-Free", "Schedule-Free"), None),
    *((PACE, EMA, times) for times in (2, 3, 10)),
    *((LONGER, EMA, times) for times in (None, 3)),
    *((HARDER, EMA, times) for times in (2, 3)),
)
"""What is compared with what, and at how many times AdamW's best rate; None: each at its own best rate."""


def compared(own: Losses, other: Losses, rate: float, other_rate: float) -> str:
    """Return the mean difference seed by seed, its standard error, the count of seeds, and a verdict."""
    seeds = sorted(s for lr, s in own if math.isclose(lr, rate) and (other_rate, s) in other)
    at = next((lr for lr, _ in own if math.isclose(lr, rate)), rate)
    differences = [own[at, seed] - other[other_rate, seed] for seed in seeds]
    if not differences:
        return ""
    if len(differences) == 1:
        return f"{differences[0]:+.3f} (1): not settled"
    mean, error = fmean(differences), stdev(differences) / math.sqrt(len(differences))
    margin = max(stats.t.ppf(0.975, len(differences) - 1) * error, SMALLEST)
    verdict = "not settled"
    if abs(mean) > margin:
        verdict = "lower" if mean < 0 else "higher"
    elif max(abs(mean), error) <= SMALLEST and len(differences) > 2:
        verdict = "tie"
    return f"{mean:+.3f} ± {error:.3f} ({len(differences)}): {verdict}"


def verdicts(runs: Sequence[Run]) -> str:
    """Return the table of all claims over all tasks."""
    rows = []
    for ours, theirs, times in CLAIMS:
        cells = []
        for task, steps in TASKS.values():
            own, other = ours.losses(runs, task, steps), theirs.losses(runs, task, steps)
            has_rates = len({lr for lr, _ in own}) > 1
            if not own or not other or not (has_rates or times is None):
                cells.append("")
            elif times is None:
                cells.append(compared(own, other, best_rate(own), best_rate(other)))
            else:
                at = times * best_rate(EMA.losses(runs, task, steps))
                there = next((lr for lr, _ in other if math.isclose(lr, at)), at)
                cells.append(compared(own, other, at, there))
        rate = "best" if times is None else f"{times:g} ×"
        rows.append([ours.words, theirs.words, rate, *cells])
    return markdown(["", "against", "learning rate", *TASKS], rows)


# --- The figure -----------------------------------------------------------------------------------------

LINES: dict[Side, tuple[str, str]] = {
    Side("AdamW, live", "AdamW"): ("#8a8f98", ":"),
    EMA: ("#3c4048", "-"),
    WSD: ("#3c4048", "--"),
    Side("Schedule-Free", "Schedule-Free"): ("#c98500", "-"),
    PACE: ("#2a78d6", "-"),
    LONGER: ("#2a78d6", "--"),
}


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw the loss over the learning rate, a panel for each task with more than one rate."""
    figure = Figure(figsize=(11, 4.4), dpi=110, layout="constrained", facecolor="white")
    for i, title in enumerate(list(TASKS)[:2], 1):
        task, steps = TASKS[title]
        axes = figure.add_subplot(1, 2, i)
        lowest, rates = math.inf, sorted({lr for lr, _ in PACE.losses(runs, task, steps)})
        for side, (color, dashes) in LINES.items():
            losses = side.losses(runs, task, steps)
            found = [[loss for (lr, _), loss in losses.items() if lr == rate] for rate in rates]
            means = [fmean(own) for own in found]
            errors = [stdev(own) / math.sqrt(len(own)) if len(own) > 1 else 0.0 for own in found]
            lowest = min(lowest, *means)
            axes.errorbar(
                rates, means, errors, color=color, linestyle=dashes, marker="o", markersize=3,
                linewidth=1.4, label=side.words,
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_ylim(lowest - 0.01, lowest + 0.4)  # a run that is lost ends far above
        axes.set_xlabel("learning rate")
        axes.set_ylabel("held-out loss, nats")
        axes.set_title(title, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, metadata={"Software": None})


# --- Other tables ---------------------------------------------------------------------------------------


def section(heading: str) -> str:
    """Return the table under a heading of the study of the control, whose script checks its own records."""
    text = (RECORDS / "studies/sign/tables.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(heading)}\n\n((?:\|.*\n)+)", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"records/studies/sign/tables.md has no table {heading!r}")
    return found[1].rstrip("\n")


PLACES = {
    "CPU, 6M": ("cpu", "gpt-6m"),
    "CPU, 320 small": ("cpu", "small"),
    "H200, 124M": ("h200", "gpt2"),
    "H200, 1.7B": ("h200", "llama-1.7b"),
}
"""Columns of the table of cost, with device and model of their record."""


def cost() -> str:
    """Return bytes by arithmetic, and the measured times of a step as multiples of torch's AdamW."""
    records = {device: read_bench(device) for device in ("cpu", "h200")}
    rows = []
    for name, kept in OPTIMIZERS.items():
        state = kept.state_bytes("float32")
        cells = [f"{state:.4g}", f"{4 + state:.4g}"]
        for device, model in PLACES.values():
            row = records[device].get((model, name))
            ratio = row and (row["graph_ratio"] or row["ratio"])
            cells.append(UNMEASURED if ratio is None else f"{ratio:.2f}")
        rows.append([name, *cells])
    head = ["", "state", "checkpoint", *PLACES]
    return markdown(head, rows)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


# --- Pages ----------------------------------------------------------------------------------------------

PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str, tables: dict[str, Callable[[], str]]) -> str:
    """Return the page with the table at each pair of marks made again."""
    return PLACE.sub(lambda found: f"{found[1]}\n{tables[found[2]]()}\n\n{found[3]}", page)


def main() -> None:
    """Write both pages and the figure, and print their paths."""
    runs = read_runs(sorted(RECORDS.glob("*-evidence-*.jsonl")))
    tables: dict[str, Callable[[], str]] = {
        "verdicts": lambda: verdicts(runs),
        "push": lambda: section("Report at 7M: push against each other method"),
        "cost": cost,
    }
    for name in ("results.md", "cost.md"):
        page = DOCS / name
        page.write_text(filled(page.read_text(encoding="utf-8"), tables), encoding="utf-8")
        print(page)
    draw(runs, DOCS / "results.png")
    print(DOCS / "results.png")


if __name__ == "__main__":
    main()
