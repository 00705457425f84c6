"""Make the tables and the figure of docs/results.md, cost.md and compare.md again, from records/.

    PYTHONPATH=src python records/studies/pages.py

It refuses a record that does not say its seed, code version and hardware.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from paceline.cost.arithmetic import OPTIMIZERS
from paceline.studies.lines import Finished
from paceline.studies.table import Mean
from paceline.studies.text import Listing
from paceline.studies.verdict import SMALLEST

matplotlib.use("Agg")
ROOT = Path(__file__).parents[2]
RECORDS, DOCS = ROOT / "records", ROOT / "docs"
CHOOSING = 1
"""The seed by which settings and learning rates were chosen."""
UNMEASURED = "not measured yet"


# --- Records --------------------------------------------------------------------------------------------


def check_origin(seed: Any, about: dict[str, Any], where: str) -> None:
    """Raise ValueError, naming the record, if it does not say where it comes from."""
    hardware = about.get("hardware") or about.get("gpu") or about.get("system")
    for what, value in (("seed", seed), ("code version", about.get("commit")), ("hardware", hardware)):
        if value is None:
            raise ValueError(f"{where} has no {what}; such a record proves nothing")


def read_runs(paths: Iterable[Path]) -> list[Finished]:
    """Return the runs in files with a line a run; of two with one name the later one."""
    runs = [run for path in paths for run in Finished.read([path]).values()]
    for run in runs:
        check_origin(run.config.get("seed"), dict(run.environment), run.name)
    return list({run.name: run for run in runs}.values())


def read_bench(device: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows of the newest record of `paceline bench` on a device, by model and optimizer."""
    paths = sorted(RECORDS.glob(f"*-bench-{device}.json"))
    if not paths:
        return {}
    record = json.loads(paths[-1].read_text(encoding="utf-8"))
    check_origin(record.get("seed"), record, paths[-1].name)
    return {(row["model"], row["optimizer"]): row for row in record["rows"]}


# --- The paper's statements -----------------------------------------------------------------------------

Losses = dict[float, dict[int, float | None]]
"""By learning rate and seed; None where a run diverged."""

TASKS = {
    "pretraining, 7M": ("gpt:7m", 4000),
    "fine-tuning, 135M": ("SmolLM2-135M-Instruct", 300),
    "pretraining, 124M": ("gpt2", 1200),
}
TUNED = "SmolLM2-135M-Instruct"
_PLAIN = "betas=(0.9,0.999),weight_decay=0.01"
_PULL = "pace:gain=paper,pullback_strength={},ema_power={},update_every=1," + _PLAIN
METHODS = {
    ("AdamW", TUNED): "adamw:betas=(0.9,0.999),weight_decay=0.1",
    ("AdamW", ""): f"adamw:{_PLAIN}",
    ("Schedule-Free", TUNED): "schedule_free:betas=(0.9,0.999),weight_decay=0.05",
    ("Schedule-Free", ""): "schedule_free:betas=(0.9,0.999),weight_decay=0.1",
    ("PACE", TUNED): _PULL.format(0.03, 0.5),
    ("PACE", ""): _PULL.format(0.003, 0.5),
    ("harder PACE", ""): _PULL.format(0.01, 0.3),
}
"""The settings that the choosing seed gave each method, by method and model."""


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

    def losses(self, runs: Sequence[Finished], model: str, steps: int) -> Losses:
        """Return the final losses; None where a run diverged."""
        optimizer = METHODS.get((self.method, model)) or METHODS[self.method, ""]
        wanted = (model, optimizer, self.schedule, steps)
        own = [
            run
            for run in runs
            if (run["model"], run["optimizer"], run["schedule"].partition(":")[0], run["steps"]) == wanted
        ]
        view = "live" if self.method == "AdamW" else "average"
        if self.is_beside and own:
            ends = [run.evaluations[-1][1] for run in own if run.seed == CHOOSING and not run.diverged]
            view = min((y, v) for end in ends for v, y in end.items() if y and v.startswith("power_"))[1]
        found: Losses = {}
        for run in (run for run in own if not (self.is_fresh and run.seed == CHOOSING)):
            found.setdefault(run.lr, {})[run.seed] = replace(run, returned=view).loss
        return found


def best_rate(losses: Losses) -> float:
    """Return the learning rate with the lowest loss of the choosing seed, or the only one."""
    every = [
        (loss, lr, seed) for lr, seeds in losses.items() for seed, loss in seeds.items() if loss is not None
    ]
    return min([found for found in every if found[2] == CHOOSING] or every)[1]


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
    pairs = ((x, other.get(other_rate, {}).get(seed)) for seed, x in own.get(rate, {}).items())
    mean = Mean.of(x - y for x, y in pairs if x is not None and y is not None)
    if mean is None:
        return ""
    if mean.error is None:
        return f"{mean.value:+.3f} (1): not settled"
    verdict = "not settled"
    if abs(mean.value) > max(mean.interval() or 0.0, SMALLEST):
        verdict = "lower" if mean.value < 0 else "higher"
    elif max(abs(mean.value), mean.error) <= SMALLEST and mean.n > 2:
        verdict = "tie"
    return f"{mean.value:+.3f} ± {mean.error:.3f} ({mean.n}): {verdict}"


def verdicts(runs: Sequence[Finished]) -> str:
    """Return the table of all claims over all tasks."""
    rows = []
    for ours, theirs, times in CLAIMS:
        cells = []
        for model, steps in TASKS.values():
            own, other = ours.losses(runs, model, steps), theirs.losses(runs, model, steps)
            if not own or not other or not (len(own) > 1 or times is None):
                cells.append("")
            elif times is None:
                cells.append(compared(own, other, best_rate(own), best_rate(other)))
            else:
                at = times * best_rate(EMA.losses(runs, model, steps))
                near = [next((lr for lr in each if math.isclose(lr, at)), at) for each in (own, other)]
                cells.append(compared(own, other, *near))
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


def draw(runs: Sequence[Finished], path: Path) -> None:
    """Draw the loss over the learning rate, a panel for each task with more than one rate."""
    figure = Figure(figsize=(11, 4.4), dpi=110, layout="constrained", facecolor="white")
    for i, title in enumerate(list(TASKS)[:2], 1):
        model, steps = TASKS[title]
        axes = figure.add_subplot(1, 2, i)
        lowest, rates = math.inf, sorted(PACE.losses(runs, model, steps))
        for side, (color, dashes) in LINES.items():
            losses = side.losses(runs, model, steps)
            whole = [lr for lr in rates if losses.get(lr) and None not in losses[lr].values()]
            means = [Mean.of(x for x in losses[lr].values() if x is not None) for lr in whole]
            known = [mean for mean in means if mean is not None]
            lowest = min(lowest, *(mean.value for mean in known))
            values, errors = [mean.value for mean in known], [mean.error or 0.0 for mean in known]
            axes.errorbar(
                whole, values, errors, color=color, linestyle=dashes, marker="o", markersize=3,
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


def simulated() -> str:
    """Return how often the verdict claims what is not there, before and with its rules."""
    path = sorted(RECORDS.glob("*-verdict-simulated.json"))[-1]
    record = json.loads(path.read_text(encoding="utf-8"))
    check_origin(record["seed"], record["environment"], path.name)
    before, *_, now = ([*tables.values()] for tables in record["verdicts"].values())
    rows = []
    for seeds in (2, 3, 5):
        false = [max(row["any"] for row in claims if row["seeds"] == seeds) for claims, _ in (before, now)]
        wanted = {"rates": "four rates, flat", "seeds": seeds, "sd": 0.003}
        right = [row["right"] for row in now[1] if wanted.items() <= row.items()]
        rows.append([str(seeds), *(f"{value:.0f} %" for value in (*false, *right))])
    head = ["seeds", "claims nothing backs, before", "now", "0.005 nats settled", "0.01", "0.02"]
    return markdown(head, rows)


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
    return Listing(columns=tuple(head), rows=tuple(map(tuple, rows)), numeric=(False,) * len(head)).markdown()


# --- Pages ----------------------------------------------------------------------------------------------

PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str, tables: dict[str, Callable[[], str]]) -> str:
    """Return the page with the table at each pair of marks made again."""
    return PLACE.sub(lambda found: f"{found[1]}\n{tables[found[2]]()}\n\n{found[3]}", page)


def main() -> None:
    """Write the pages and the figure, and print their paths."""
    runs = read_runs(sorted(RECORDS.glob("*-evidence-*.jsonl")))
    tables: dict[str, Callable[[], str]] = {
        "verdicts": lambda: verdicts(runs),
        "push-7m": lambda: section("Report at 7M: growing push against each other method"),
        "push-27m": lambda: section("Report at 27M: growing push against each other method"),
        "cost": cost,
        "simulated": simulated,
    }
    for name in ("results.md", "cost.md", "compare.md"):
        page = DOCS / name
        page.write_text(filled(page.read_text(encoding="utf-8"), tables), encoding="utf-8")
        print(page)
    draw(runs, DOCS / "results.png")
    print(DOCS / "results.png")


if __name__ == "__main__":
    main()
