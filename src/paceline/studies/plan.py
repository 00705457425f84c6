"""The plan of a comparison: a list of runs that fits the device and the time.

A plan is kept in its folder, so that the same command resumes the same runs.
"""

import json
import math
import resource
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

import torch

from paceline.lm.files import write_atomically
from paceline.lm.loop import Progress, Step, train
from paceline.lm.memory import available
from paceline.runs import build, config, names
from paceline.runs.config import ConfigError, Run, as_mapping, name_of
from paceline.runs.methods import MissingPackageError, check_methods, control_of
from paceline.runs.run import Notice
from paceline.studies import pool
from paceline.studies.engine import AT_ONCE, count_cores, threads_of
from paceline.studies.runs import Named, read_plan

EVALUATIONS = 20
_BUDGETS = ("steps", "tokens", "epochs", "chinchilla")
PASSES = 16  # over the data: more of the same text teaches next to nothing
START_SECONDS = 6.0  # of a run, before its first step and after its last
STEPS = 300

# Good ones of small models in our records, and some on both sides of them.
LEARNING_RATES = {"pretrain": (1e-3, 2e-3, 4e-3, 8e-3), "sft": (1e-4, 3e-4, 1e-3, 3e-3)}

# Without the user's data it is a demonstration: minutes on two CPU cores, at rates on both sides of the best
# one of every method. In so little text, long tokens would be rare ones, and hardly learned.
DEMONSTRATION: dict[str, Any] = {"tokenizer": "bpe:300", "length": 64, "batch_size": 8, "steps": 210}
DEMONSTRATION |= {"held_out_samples": 64, "evaluate_every": 30}
DEMONSTRATION_RATES = (1e-3, 2e-3, 4e-3)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The request of a user."""

    settings: Mapping[str, Any]
    """Of all runs, by the names of `Run`; what a comparison chooses itself may be left out."""
    methods: tuple[str, ...]
    """Names, as in `paceline.runs.names`."""
    lrs: tuple[float, ...] | None = None
    seeds: int = 1
    """Seeds per setting."""
    seconds: float | None = None
    """For everything; instead of a budget in `settings`."""
    jobs: int | None = None
    """Runs in parallel; None: as many as fit."""

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

    @property
    def is_demonstration(self) -> bool:
        """Return whether it leaves open what to train on what, and how long."""
        given = {"data", "model", "task", "tokenizer", "length", "batch_size", *_BUDGETS} - {"steps"}
        return self.seconds is None and not given & self.settings.keys()

    def as_mapping(self) -> dict[str, Any]:
        """Return plain values."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The findings of a few steps of a run."""

    parameters: int
    samples: int
    held_out_samples: int
    step_seconds: float
    fitting: int
    """How many such runs fit the memory in parallel."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The runs, and how many of them in parallel."""

    runs: tuple[Named, ...]
    jobs: int
    missing: Mapping[str, str]
    """Methods that cannot be run here, and why."""
    seconds: float
    """How long all of it takes, about."""
    trial: Trial


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """A request that can be planned: all that is known of it without a trial."""

    request: Request
    base: Run
    """What all runs share."""
    variants: tuple[Run, ...]
    """The runs at one learning rate and seed."""
    missing: Mapping[str, str]
    lrs: tuple[float, ...]

    @property
    def count(self) -> int:
        """Return how many runs it takes."""
        return len(self.variants) * len(self.lrs) * self.request.seeds


def check(request: Request) -> Checked:
    """Check what can be known without building anything; raise ConfigError for a mistake."""
    settings = (DEMONSTRATION if request.is_demonstration else {}) | dict(request.settings)
    budgets = [name for name in _BUDGETS if settings.get(name) is not None]
    if request.seconds is not None and budgets:
        raise ConfigError(f"give one of time, {', '.join(_BUDGETS)}; time and {budgets[0]} given")
    base = config.make(settings if budgets else settings | {"steps": STEPS})
    found, missing, given = [], {}, tuple(request.settings)
    for text in request.methods:
        try:
            check_methods(runs_of([text], base, given)[0])
            found.append(text)
        except MissingPackageError as error:
            missing[text] = str(error)
    if not found:
        raise ConfigError(f"no method is left: {'; '.join(missing.values())}")
    lrs = request.lrs or (DEMONSTRATION_RATES if request.is_demonstration else LEARNING_RATES[base.task])
    variants = tuple(runs_of(found, base, given))
    return Checked(request=request, base=base, variants=variants, missing=missing, lrs=lrs)


def runs_of(methods: Iterable[str], base: Run, given: Sequence[str] = ()) -> list[Run]:
    """Return the runs that these methods need: those that train alike share one.

    Arguments:
        methods: names, as in `paceline.runs.names`.
        base: what all runs share.
        given: settings that the user chose, which no method changes.
    """
    found: dict[str, names.Name] = {}
    for name in map(names.parse, methods):
        alone = found.setdefault(str(name.without_averages), name.without_averages)
        new = (average for average in name.averages if average not in alone.averages)
        found[str(name.without_averages)] = replace(alone, averages=(*alone.averages, *new))
    return [
        config.make(
            as_mapping(base)
            | {key: value for key, value in name.known.run.items() if key not in given}
            | {"method": str(replace(name, schedule="constant")), "schedule": name.schedule}
        )
        for name in found.values()
    ]


def make_plan(checked: Checked, folder: Path, tell: Callable[[str], None]) -> Plan:
    """Return what was planned in this folder before; or try the model for a few steps, and keep a plan."""
    request, before = checked.request, read_plan(folder)
    if before is not None and before["request"] == request.as_mapping():
        try:
            trial = Trial(**before["trial"])
        except TypeError as error:
            raise ConfigError(f"{folder / 'plan.json'}: {error}; move it away") from None
        jobs, steps = before["jobs"], before["steps"]
    else:
        trial, jobs, steps = _measured(checked, tell)
    planned = replace(checked.base, steps=steps, tokens=None, epochs=None, chinchilla=None)
    check_passes(planned, trial)
    planned = with_evaluations(planned, trial)
    runs = tuple(
        _named(variant, planned, lr, planned.seed + seed)
        for seed in range(request.seeds)
        for lr in checked.lrs
        for variant in checked.variants
    )
    chosen = {
        "request": request.as_mapping(),
        "steps": steps,
        "jobs": jobs,
        "trial": asdict(trial),
        "missing": dict(checked.missing),
        "runs": [one.name for one in runs],
    }
    write_atomically(folder / "plan.json", (json.dumps(chosen, indent=1) + "\n").encode())
    seconds = math.ceil(len(runs) / jobs) * run_seconds(planned, trial)
    return Plan(runs=runs, jobs=jobs, missing=checked.missing, seconds=seconds, trial=trial)


def _measured(checked: Checked, tell: Callable[[str], None]) -> tuple[Trial, int, int]:
    """Return a trial of the heaviest run, how many fit in parallel, and steps of each."""
    request, count = checked.request, checked.count
    cores = count_cores()
    jobs = min(request.jobs or min(cores, AT_ONCE), count)
    heaviest = max(checked.variants, key=lambda run: len(run.averages))
    tell(f"trying {heaviest.model} for a few steps")
    trial = _try([heaviest], cores // jobs, tell)
    if request.jobs is None:
        jobs = min(jobs, trial.fitting)
    if request.seconds is not None and jobs > 1:  # they slow each other down
        trial = _try([heaviest] * jobs, cores // jobs, tell)
    return trial, jobs, steps_of(request, heaviest, trial, count, jobs)


def _try(runs: Sequence[Run], cores: int, tell: Callable[[str], None]) -> Trial:
    """Take a few steps of runs in parallel, and return what the slowest of them found."""
    trials: list[Trial] = []
    for message in pool.do_all(measure, runs, len(runs), threads_of(cores)):
        match message:
            case (_, Notice(text=text)):
                tell(text)
            case (_, pool.Ended(how="finished", result=result)):
                trials.append(result)
            case (_, pool.Ended(how="diverged" | "refused" | "failed", text=text)):
                raise ConfigError(text)  # no run could be done
    return max(trials, key=lambda trial: trial.step_seconds)


def steps_of(request: Request, run: Run, trial: Trial, count: int, jobs: int) -> int:
    """Return how many steps each of `count` runs takes: those asked for, or as many as fit the time."""
    if request.seconds is None:
        return build.steps_of(run, trial.samples, trial.parameters)
    rounds = math.ceil(count / jobs)

    def all_of(steps: int) -> float:
        """Return seconds, with a quarter more than was measured."""
        planned = with_evaluations(replace(run, steps=steps), trial)
        return rounds * (START_SECONDS + 1.25 * (run_seconds(planned, trial) - START_SECONDS))

    if all_of(EVALUATIONS) > request.seconds:
        raise ConfigError(
            f"the time is enough for less than {EVALUATIONS} steps of each of {count} runs, too few to see "
            f"anything; give {math.ceil(all_of(EVALUATIONS) / 60)} min or more, fewer methods, rates or "
            "seeds, or a smaller model"
        )
    possible = range(EVALUATIONS, int(request.seconds / rounds / trial.step_seconds) + 1)
    return possible[bisect_right(possible, request.seconds, key=all_of) - 1]


def check_passes(run: Run, trial: Trial) -> None:
    """Raise ConfigError if a run would see the same data too often."""
    assert run.steps is not None
    wanted = run.steps * run.batch_size
    if wanted > PASSES * trial.samples:
        least = math.ceil(wanted / PASSES) * run.length
        raise ConfigError(
            f"the data are too small: {trial.samples * run.length:,} tokens for a budget of "
            f"{wanted * run.length:,}; give {least:,} or more ({PASSES} passes), or a smaller budget"
        )


_LEAST_HELD_OUT = 64


def with_evaluations(run: Run, trial: Trial) -> Run:
    """Return the run with 20 evaluations that take about a seventh of it, unless the user chose them.

    A short run has fewer, down to five: the least that one costs is soon more than the steps between two.
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


def run_seconds(run: Run, trial: Trial) -> float:
    """Return how long a run takes, about."""
    assert run.steps is not None and run.evaluate_every is not None and run.held_out_samples is not None
    evaluations = run.steps / run.evaluate_every * 3  # live, and two averages; a third of a step each
    return START_SECONDS + trial.step_seconds * (
        run.steps + evaluations * run.held_out_samples / run.batch_size / 3
    )


def _named(variant: Run, planned: Run, lr: float, seed: int) -> Named:
    """Return a variant at this learning rate and seed, with all that was planned."""
    assert planned.steps is not None
    control = control_of(variant, planned.steps)
    is_steered = control is not None and control.strength != 0
    run = replace(
        planned,
        method=variant.method,
        schedule=variant.schedule,
        averages=variant.averages,
        clip_norm=variant.clip_norm,
        lr=lr,
        seed=seed,
        keep=1,
        checkpoint_every=planned.checkpoint_every or max(1, planned.steps // 4),
        telemetry_every=max(10, planned.steps // 100) if is_steered else None,
    )
    method = str(run.name.without_averages)
    return Named(name=name_of(run), run=run, tags={"method": method, "lr": lr, "seed": seed})


# --- In a process of its own ----------------------------------------------------------------------------

_WARM, _SECONDS, _TRIED = 2, 4.0, 10
_CONTEXT = 600 << 20  # bytes that a process needs on a GPU before it does anything


def measure(run: Run, send: Callable[[object], None]) -> Trial:
    """Build a run, prepare its data if need be, and take some steps. Only the data are written."""
    job = build.build(run, lambda text: send(Notice(text=text)))
    steps = _TRIED + _WARM
    plan = replace(job.plan, steps=steps, evaluate_every=steps)
    began, taken, seconds = time.perf_counter(), 0, 0.0
    for record in train(job.trainee, plan, Progress()):
        if not isinstance(record, Step):
            break
        taken += 1
        if taken == _WARM:
            began = time.perf_counter()
        seconds = time.perf_counter() - began
        if taken > _WARM and (seconds > _SECONDS or taken == steps):
            break
    return Trial(
        parameters=job.facts["parameters"],
        samples=len(job.trainee.samples),
        held_out_samples=job.facts["data"]["held_out_samples"],
        step_seconds=seconds / max(taken - _WARM, 1),
        fitting=_fitting(job.trainee.device),
    )


def _fitting(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        used = torch.cuda.max_memory_reserved(device)
        return max(1, int(0.9 * (free + used) / (1.2 * used + _CONTEXT)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    left = available()
    return 1 << 10 if left is None else max(1, int(0.9 * (left + peak) / (1.2 * peak)))
