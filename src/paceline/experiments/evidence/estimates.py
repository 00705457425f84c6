"""What runs were estimated to take, beside what they took. No torch."""

from dataclasses import replace

from paceline.experiments.config import ConfigError
from paceline.experiments.cost.hardware import HARDWARE
from paceline.experiments.cost.price import of_run, together
from paceline.experiments.evidence import studies
from paceline.experiments.evidence.studies import Room, Trial
from paceline.experiments.evidence.tables import Results
from paceline.experiments.pages import markdown

AT_ONCE = {("gpt", True): 8, ("sft", False): 4, ("sft", True): 6, ("gpt2", True): 3}
"""By the first word of their names, and whether they were compiled: how many runs were on the GPU at once,
each with a share of it."""
TITLES = {"gpt": "pretraining a 7M GPT", "sft": "fine-tuning SmolLM2-135M", "gpt2": "GPT-2 124M"}


def estimates(room: Room, results: Results) -> dict[tuple[str, bool], tuple[int, float, float]]:
    """Of each kind of run: how many there are, and minutes of an H200, estimated and taken."""
    found = {}
    trials = {one.name: one for study in studies.STUDIES.values() for one in _trials(study, room, results)}
    for (kind, compiled), jobs in AT_ONCE.items():
        done = [
            replace(one, run=replace(one.run, compile=compiled))
            for name, one in trials.items()
            if name.split("_")[0] == kind and name in results and results[name].config["compile"] == compiled
        ]
        prices = [price for one in done if (price := of_run(one.run, HARDWARE["h200"])) is not None]
        estimated = together(prices).lasting(jobs)
        if done and estimated is not None and len(prices) == len(done):
            taken = sum(results[one.name].seconds for one in done) / jobs
            found[kind, compiled] = len(done), estimated / 60, taken / 60
    return found


def _trials(study: studies.Study, room: Room, results: Results) -> list[Trial]:
    try:
        return list(study(room, results))
    except ConfigError:  # it chooses from runs that are not done
        return []


def estimates_table(room: Room, results: Results) -> str:
    """In words."""
    body = []
    for (kind, compiled), (count, estimated, taken) in estimates(room, results).items():
        minutes = f"{estimated:.1f} min", f"{taken:.1f} min", f"{taken / estimated:.2f}"
        title = TITLES[kind] + ("" if compiled else ", not compiled")
        body.append([title, f"{count}", f"{AT_ONCE[kind, compiled]}", *minutes])
    return markdown(["", "runs", "at once", "estimated", "taken", "taken / estimated"], body)
