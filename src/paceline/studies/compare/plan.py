"""What to run: from what was asked for to a list of runs that fits the device and the time.

A plan is kept in its folder, so that the same command goes on with the same runs.
"""

import json
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.lm.files import write_atomically
from paceline.runs import build, config
from paceline.runs.config import ConfigError, Run, name_of
from paceline.runs.methods import MissingPackageError, check_methods
from paceline.runs.run import Notice
from paceline.runs.steering import is_steered
from paceline.studies import pool
from paceline.studies.compare import method
from paceline.studies.compare.trial import Trial, measure

EVALUATIONS = 20
PASSES = 16  # over the data: more of the same text teaches next to nothing
AT_ONCE = 4
START_SECONDS = 6.0  # of a run, before its first step and after its last
STEPS = 300

# Good ones of small models in our records, and on both sides of them.
LEARNING_RATES = {"pretrain": (1e-3, 2e-3, 4e-3, 8e-3), "sft": (1e-4, 3e-4, 1e-3, 3e-3)}

# Without data of the user's it is a demonstration: minutes on two CPU cores, at rates from good to four times
# as high. Of so little text, long tokens would be rare ones, and hardly learned.
DEMONSTRATION: dict[str, Any] = {"tokenizer": "bpe:300", "length": 64, "batch_size": 8, "steps": 210}
DEMONSTRATION |= {"held_out_samples": 64, "evaluate_every": 30}
DEMONSTRATION_RATES = (2e-3, 4e-3, 8e-3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the user asked for."""

    settings: Mapping[str, Any]
    """Of all runs, by the names of `Run`; what a comparison chooses itself may be left out."""
    methods: tuple[str, ...] = method.DEFAULT
    lrs: tuple[float, ...] | None = None
    seeds: int = 1
    seconds: float | None = None
    """For everything; instead of a budget in `settings`."""
    jobs: int | None = None
    """Runs at once; None: as many as fit."""

    def __post_init__(self) -> None:
        if not 1 <= self.seeds <= 100:
            raise ConfigError(f"seeds is {self.seeds}; allowed: 1 to 100")
        if self.jobs is not None and not 1 <= self.jobs <= 64:
            raise ConfigError(f"jobs is {self.jobs}; allowed: 1 to 64")
        if self.seconds is not None and not 1 <= self.seconds < math.inf:
            raise ConfigError(f"time is {self.seconds:g} seconds; allowed: 1 second or more")
        if not self.methods:
            raise ConfigError("no method is given")
        for lr in self.lrs or ():
            if not 0 < lr < math.inf:
                raise ConfigError(f"lr {lr:g} is not one to train with; allowed: above 0, and finite")
        if self.lrs is not None and len(set(self.lrs)) < len(self.lrs):
            raise ConfigError(f"lr {', '.join(f'{lr:g}' for lr in self.lrs)}: one of them is there twice")

    def as_mapping(self) -> dict[str, Any]:
        """As plain values."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is run, and how many at once."""

    cells: tuple[pool.Cell, ...]
    jobs: int
    threads: int
    missing: Mapping[str, str]
    """Methods that cannot be run here, and why."""
    seconds: float
    """How long all of it takes, about."""
    trial: Trial


def make_plan(request: Request, folder: Path, tell: Callable[[str], None]) -> Plan:
    """Check everything, try the model for a few steps, and choose; or take what was chosen before."""
    kept = folder / "plan.json"
    before = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else None
    base = _base(request, steps=STEPS if request.seconds is not None else None)
    variants, missing = _variants(request, base)
    lrs = request.lrs or (DEMONSTRATION_RATES if _is_demonstration(request) else LEARNING_RATES[base.task])
    count = len(variants) * len(lrs) * request.seeds
    if before is not None and before["request"] == request.as_mapping():
        trial, jobs, threads, steps = (
            Trial(**before["trial"]),
            before["jobs"],
            before["threads"],
            before["steps"],
        )
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        jobs = min(request.jobs or min(cores, AT_ONCE), count)
        threads = max(1, cores // jobs)
        heaviest = max(variants, key=lambda run: len(run.averages))
        tell(f"trying {heaviest.model} for a few steps")
        trial = _try(heaviest, 1, threads, tell)
        if request.jobs is None:
            jobs = min(jobs, trial.fitting)
            threads = max(1, cores // jobs)
        if request.seconds is not None and jobs > 1:  # they slow each other down
            trial = _try(heaviest, jobs, threads, tell)
        steps = _steps(request, heaviest, trial, count, jobs)
    planned = replace(base, steps=steps, tokens=None, epochs=None, chinchilla=None)
    _check_passes(planned, trial)
    planned = _with_evaluations(planned, trial)
    cells = tuple(
        pool.Cell(run=run, folder=folder / "runs" / name_of(run))
        for seed in range(request.seeds)
        for lr in lrs
        for run in (_finished_up(v, planned, lr, planned.seed + seed) for v in variants)
    )
    chosen = {
        "request": request.as_mapping(),
        "steps": steps,
        "jobs": jobs,
        "threads": threads,
        "trial": asdict(trial),
        "missing": dict(missing),
        "runs": [cell.folder.name for cell in cells],
    }
    write_atomically(kept, (json.dumps(chosen, indent=1) + "\n").encode())
    seconds = math.ceil(count / jobs) * _run_seconds(planned, trial)
    return Plan(cells=cells, jobs=jobs, threads=threads, missing=missing, seconds=seconds, trial=trial)


# --- Pieces -------------------------------------------------------------------------------------------


def _base(request: Request, steps: int | None) -> Run:
    """What all runs share; with that many steps, if the request does not say how many."""
    settings = (DEMONSTRATION if _is_demonstration(request) else {}) | dict(request.settings)
    budgets = [n for n in ("steps", "tokens", "epochs", "chinchilla") if settings.get(n) is not None]
    if steps is not None and budgets:
        raise ConfigError(f"give one of time, steps, tokens, epochs, chinchilla; time and {budgets[0]} given")
    if not budgets:
        settings["steps"] = STEPS if steps is None else steps
    return config.make(settings)


def _is_demonstration(request: Request) -> bool:
    """Whether nothing is said of what to train on what, and how long."""
    said = {"data", "model", "tokenizer", "length", "batch_size", "tokens", "epochs", "chinchilla", "task"}
    return request.seconds is None and not said & request.settings.keys()


def _variants(request: Request, base: Run) -> tuple[list[Run], dict[str, str]]:
    """The runs at one learning rate and seed; methods whose package is missing are left out, and named."""
    methods, missing = [], {}
    for text in request.methods:
        parsed = method.parse(text)
        try:
            check_methods(method.runs_of((parsed,), base)[0])
            methods.append(parsed)
        except MissingPackageError as error:
            missing[text] = str(error)
    if not methods:
        raise ConfigError(f"no method is left: {'; '.join(missing.values())}")
    return method.runs_of(tuple(methods), base), missing


def _try(run: Run, at_once: int, threads: int, tell: Callable[[str], None]) -> Trial:
    """A few steps in processes of their own, the slowest of them."""
    trials: list[Trial] = []
    for told in pool.do_all(measure, [run] * at_once, at_once, threads):
        match told:
            case (_, Notice(text=text)):
                tell(text)
            case (_, pool.Ended(how="finished", result=result)):
                trials.append(result)
            case (_, pool.Ended(how="diverged" | "refused" | "failed", text=text)):
                raise ConfigError(text)  # no run could be done
    return max(trials, key=lambda trial: trial.step_seconds)


def _steps(request: Request, run: Run, trial: Trial, count: int, jobs: int) -> int:
    if request.seconds is None:
        return build.steps_of(run, trial.samples, trial.parameters)
    rounds = math.ceil(count / jobs)

    def all_of(steps: int) -> float:
        """Seconds, with a quarter more than was measured."""
        planned = _with_evaluations(replace(run, steps=steps), trial)
        return rounds * (START_SECONDS + 1.25 * (_run_seconds(planned, trial) - START_SECONDS))

    if all_of(EVALUATIONS) > request.seconds:
        raise ConfigError(
            f"the time is enough for less than {EVALUATIONS} steps of each of {count} runs, too few to see "
            f"anything; give {math.ceil(all_of(EVALUATIONS) / 60)} min or more, fewer methods, rates or "
            "seeds, or a smaller model"
        )
    possible = range(EVALUATIONS, int(request.seconds / rounds / trial.step_seconds) + 1)
    return possible[bisect_right(possible, request.seconds, key=all_of) - 1]


def _check_passes(run: Run, trial: Trial) -> None:
    assert run.steps is not None
    wanted = run.steps * run.batch_size
    if wanted > PASSES * trial.samples:
        least = math.ceil(wanted / PASSES) * run.length
        raise ConfigError(
            f"the data are too small: {trial.samples * run.length:,} tokens for a budget of "
            f"{wanted * run.length:,}; give {least:,} or more ({PASSES} passes), or a smaller budget"
        )


_LEAST_HELD_OUT = 64


def _with_evaluations(run: Run, trial: Trial) -> Run:
    """Twenty evaluations that take about a seventh of a run, unless the user said how many, and of how much.

    Of a short run fewer, down to five: what one costs at least is soon more than the steps between two.
    """
    assert run.steps is not None
    samples = run.held_out_samples
    # Three sets of weights, a third of a step's time for each batch: half as long as the steps before it.
    apart = math.ceil(2 * (samples or _LEAST_HELD_OUT) / run.batch_size)
    often = min(max(run.steps // EVALUATIONS, apart), run.steps // 5)
    every = run.evaluate_every or max(1, often)
    if samples is None:
        samples = max(_LEAST_HELD_OUT, round(0.15 * every * run.batch_size))
        samples = min(samples, trial.held_out_samples)
    return replace(run, evaluate_every=every, held_out_samples=samples)


def _run_seconds(run: Run, trial: Trial) -> float:
    assert run.steps is not None and run.evaluate_every is not None and run.held_out_samples is not None
    evaluations = run.steps / run.evaluate_every * 3  # live, and two averages; a third of a step each
    return START_SECONDS + trial.step_seconds * (
        run.steps + evaluations * run.held_out_samples / run.batch_size / 3
    )


def _finished_up(variant: Run, planned: Run, lr: float, seed: int) -> Run:
    assert planned.steps is not None
    every = max(10, planned.steps // 100) if is_steered(variant.optimizer) else None
    return replace(
        planned,
        optimizer=variant.optimizer,
        schedule=variant.schedule,
        averages=variant.averages,
        lr=lr,
        seed=seed,
        keep=1,
        checkpoint_every=planned.checkpoint_every or max(1, planned.steps // 4),
        telemetry_every=every,
    )
