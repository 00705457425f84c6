"""Advice on runs that were made: what the pull did in them, and what theory says about it."""

import statistics
from collections.abc import Iterable
from pathlib import Path

from paceline.control.advice import Situation, advise
from paceline.control.family import right_strength
from paceline.experiments.config import ConfigError
from paceline.experiments.report.results import Outcomes, Result, find_runs, is_pace, read_run


def advise_on(folders: Iterable[Path]) -> list[str]:
    """For the folders of runs, or of a comparison: a line for each learning rate, and what to change."""
    results = [result for folder in find_runs(folders) if (result := read_run(folder)) is not None]
    pulled = [result for result in results if result.pull]
    if not pulled:
        raise ConfigError(
            "none of these runs has readings of the pull; train with PACE and --telemetry-every 40"
        )
    outcomes = Outcomes(tuple(results))
    plain = _plain_method(outcomes)
    best = outcomes.best_lr(plain) if plain else None
    lines = []
    if plain and best is not None:
        edge = best in (outcomes.lrs[0], outcomes.lrs[-1])
        lines.append(
            f"Without a pull, {plain} is best at lr {best:g}"
            + (", the edge of what was tried: the true best may lie beyond." if edge else ".")
        )
    for lr in sorted({result.lr for result in pulled}):
        lines.append("")
        lines += _at(lr, [r for r in pulled if r.lr == lr], outcomes, plain, best)
    lines += [
        "",
        "A strength named here follows from slow changes on a quadratic. Try it before you trust it.",
    ]
    return lines


def _plain_method(outcomes: Outcomes) -> str | None:
    """The method without a pull that came out lowest at its best rate; a constant rate and an average."""
    found: dict[str, float] = {}
    for method in outcomes.methods:
        runs = [r for r in outcomes.results if method in r.returned]
        ok = all(r.config["optimizer"].partition(":")[0] == "adamw" for r in runs)
        ok = ok and all(r.config["schedule"] == "constant" for r in runs)
        lr = outcomes.best_lr(method) if ok else None
        mean = outcomes.mean(method, lr) if lr is not None else None
        if mean is not None and any(r.returned[method] != "live" for r in runs):
            found[method] = mean
    return min(found, key=found.__getitem__) if found else None


def _at(
    lr: float, runs: list[Result], outcomes: Outcomes, plain: str | None, best: float | None
) -> list[str]:
    situation = situation_of(runs[0], best)
    low, high = (statistics.fmean(r.pull[-1][f"ratio/{q}"] for r in runs) for q in ("q10", "q90"))
    lines = [f"lr {lr:g}: R between {low:.2g} and {high:.2g} for most coordinates at the end."]
    lines += [f"  {line}" for line in advise(situation)]
    if plain and best is not None:
        lines += [f"  {line}" for line in _seen(lr, outcomes, plain, best)]
    return lines


def situation_of(run: Result, best: float | None) -> Situation:
    """A run of PACE at its last reading; its typical coordinate is the median one."""
    last = run.pull[-1]
    strength = _setting(run, "pullback_strength", 3e-3)
    lr, ratio = float(last["lr"]), float(last["ratio/q50"])
    return Situation(
        lr=lr,
        steps=int(last["t"]),
        root=lr * strength / max(ratio, 1e-30),
        strength=strength,
        ema_power=_setting(run, "ema_power", 0.5),
        best_lr=best,
    )


def _setting(run: Result, name: str, default: float) -> float:
    for part in run.config["optimizer"].partition(":")[2].split(","):
        key, _, value = part.partition("=")
        if key.strip() == name:
            return float(value)
    return default


def _seen(lr: float, outcomes: Outcomes, plain: str, best: float) -> list[str]:
    """What the runs showed, beside what was to be expected."""
    without = outcomes.mean(plain, lr)
    lines = []
    for method in outcomes.methods:
        constant = all(r.config["schedule"] == "constant" for r in outcomes.results if method in r.returned)
        loss = outcomes.mean(method, lr)
        if not is_pace(method) or not constant or loss is None:
            continue
        if without is None:
            lines.append(f"Seen: {plain} diverged, {method} came to {loss:.3f}.")
            continue
        right = float(right_strength(lr, best))
        expected = "a gain" if right > 0.25 else "no gain"
        lines.append(
            f"Expected: {expected}. Seen: {method} {loss:.3f}, {plain} {without:.3f}, {loss - without:+.3f}."
        )
    return lines
