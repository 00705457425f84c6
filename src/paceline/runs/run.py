"""One run in its folder: built, resumed, trained, saved, also after a kill.

.. code-block:: text

    RUN/records.jsonl     what was computed             RUN/checkpoints/step-00000100/
    RUN/timing.jsonl      when, and how fast            RUN/lock
"""

import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from paceline.lm import checkpoint
from paceline.lm.evaluate import NotFiniteError
from paceline.lm.files import describe, locked, new_folder, remove_temporary, verify
from paceline.lm.loop import Evaluation, Progress, Step, train
from paceline.lm.parallel import joined
from paceline.optim import pull_statistics
from paceline.runs import build, changes, names, records
from paceline.runs.config import ConfigError, Run, as_mapping
from paceline.runs.methods import check_methods, control_of, memory_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """The run is built and begins at that step."""

    step: int
    steps: int
    parameters: int
    tokens_per_step: int
    views: tuple[str, ...]
    returned: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """Something the user should hear."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint was written."""

    step: int
    folder: Path
    seconds: float


Event = Started | Notice | Step | Evaluation | Saved


class Interrupted(RuntimeError):
    """A signal asked a run, or many, to stop. All is saved; the same command resumes."""

    def __init__(self, number: int, step: int | None) -> None:
        where = "" if step is None else f" after step {step}"
        super().__init__(f"stopped by {signal.Signals(number).name}{where}, and saved")
        self.number = number


class DivergedError(RuntimeError):
    """A run was ended because its loss showed that it has diverged."""


class Watch(Protocol):
    """An object that sees the loss of every step from the first one, and says why a run should end."""

    def take(self, step: int, steps: int, loss: float | None) -> str | None: ...


def execute(
    run: Run, folder: Path, tell: Callable[[str], None], watch: Watch | None = None
) -> Iterator[Event]:
    """Do a run, or the rest of it, and yield what happens. Everything is written to its folder.

    Each rank does this, and the first alone writes.

    Arguments:
        run: the description.
        folder: the folder of the run.
        tell: is called with lines about long preparations.
        watch: may end the run as diverged.
    """
    check_methods(run)
    with ExitStack() as stack:
        try:
            ranks = stack.enter_context(joined(how=run.parallel, device=run.device))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        ranks.of_first(lambda: stack.enter_context(locked(folder)))
        found, problems = ranks.of_first(lambda: _look(folder, run))
        for problem in problems:
            yield Notice(text=f"{problem}; an earlier one is used")
        running = _Running(run, folder, build.build(run, tell, ranks), watch)
        try:
            running.begin(found)
            yield running.started()
            yield from running.go_on()
        finally:
            running.close()


def _look(folder: Path, run: Run) -> tuple[Path | None, list[str]]:
    """Return the checkpoint to continue, if there is any, and what is wrong with newer ones."""
    checkpoints = folder / "checkpoints"
    for place in (folder, checkpoints):  # a tokenizer, or a checkpoint, of which a kill left half
        remove_temporary(place)
    found, problems = checkpoint.newest(checkpoints)
    if found is not None:
        changes.refuse_changes(checkpoint.load_facts(found)["config"], run)
    elif problems:
        raise ValueError(f"{problems[0]}; there is no other (to begin again, move it away)")
    return found, problems


def is_finished(folder: Path) -> bool:
    """Return whether a run has nothing left to do: it came to its end, or diverged."""
    return end_of(folder) is not None


def end_of(folder: Path) -> dict[str, Any] | None:
    """Return when and how a run ended, finished or diverged; None if it has something left to do."""
    timing = folder / "timing.jsonl"
    lines = list(records.read(timing)) if timing.exists() else []
    return lines[-1] if lines and lines[-1].get("kind") == "end" else None


def has_checkpoint(folder: Path, step: int) -> bool:
    """Return whether a run has a checkpoint of that step."""
    return step in dict(checkpoint.all_of(folder / "checkpoints"))


def drop_checkpoints(folder: Path, but: Collection[int] = ()) -> None:
    """Remove the checkpoints of a run, but for those of some steps; its records stay."""
    checkpoints = folder / "checkpoints"
    if not but:
        shutil.rmtree(checkpoints, ignore_errors=True)
        return
    with suppress(OSError):  # another machine removes the same
        remove_temporary(checkpoints)
        checkpoint.prune(checkpoints, keep=0, others=but)


class _Running:
    """The moving parts of one run."""

    def __init__(self, run: Run, folder: Path, job: build.Job, watch: Watch | None) -> None:
        self.run, self.folder, self.job, self.watch = run, folder, job, watch
        self.progress = Progress()
        trainee = job.trainee
        self.ranks = trainee.ranks
        self.clock = records.Clock(job.plan.batch_size * trainee.samples.length)
        self.saved_at: tuple[int, bool] | None = None  # the progress that is on the disk
        self.records: records.Writer | records.Nowhere = records.Nowhere()
        self.timing: records.Writer | records.Nowhere = records.Nowhere()

    # --- Beginning ---

    def begin(self, found: Path | None) -> None:
        """Begin from a checkpoint, from that of another run, or from new weights."""
        trainee, keep = self.job.trainee, 0
        if found is not None:
            saved = checkpoint.read(found, checkpoint.named_tensors(trainee.model))
            facts = saved["facts"]
            changes.refuse_other_data(facts, self.job.facts)
            changes.refuse_other_precision(facts, self.job.facts)
            checkpoint.restore(trainee.model, trainee.optimizer, saved)
            trainee.scheduler.load_state_dict(facts["schedule"])
            checkpoint.restore_random(saved)
            self.progress = Progress(**facts["progress"])
            keep = facts["records"]
            self.saved_at = self.progress.step, self.progress.evaluated
        else:
            self.ranks.of_first(lambda: changes.refuse_lost_checkpoints(self.folder))
            if self.run.fork is not None:
                self.progress.step = build.fork(self.job, self.run.fork, self.folder)
        before = None if found is None else saved["facts"]["tokenizer"]
        self.job.facts["tokenizer"] = self.ranks.of_first(lambda: self._keep_tokenizer(before))
        self.ranks.of_first(lambda: self._open(keep, anew=found is None))

    def _keep_tokenizer(self, before: dict[str, Any] | None) -> dict[str, Any]:
        """Write the tokenizer, unless the run has it `before`; return its files, which are then checked."""
        folder = self.folder / "tokenizer"
        if before is None or not folder.exists():
            with new_folder(folder) as made:
                self.job.save_tokenizer(made)
        if before is not None:
            verify(folder, before)
        return before or describe(path for path in sorted(folder.iterdir()) if path.is_file())

    def _open(self, keep: int, *, anew: bool) -> None:
        """Open the records, of which the first `keep` bytes are right."""
        (self.folder / "checkpoints").mkdir(exist_ok=True)
        self.records = records.Writer(self.folder / "records.jsonl", keep)
        if self.watch is not None:  # it has to see every step
            for line in records.read(self.folder / "records.jsonl"):
                if line["kind"] == "step":
                    self.watch.take(line["step"], self.job.plan.steps, line["loss"])
        self.timing = records.Writer(self.folder / "timing.jsonl", None)
        about = {"time": self.clock.now(), "step": self.progress.step, **records.environment()}
        self.timing.write("begin", about if self.ranks.size == 1 else {**about, "ranks": self.ranks.size})
        if anew:
            control, alone = control_of(self.run, self.job.plan.steps), self.run.name.without_averages
            about = {
                "config": as_mapping(self.run),
                "name": str(self.run.name),
                "methods": names.titles(alone.title, self.run.averages, self.job.trainee.views),
                "returned": self.job.returned,
                "control": None if control is None else asdict(control),
                "environment": records.environment(),
                **self.job.facts,
            }
            self.records.write("run", about)
            self.records.flush()

    def started(self) -> Started:
        plan, model = self.job.plan, self.job.trainee.model
        return Started(
            step=self.progress.step,
            steps=plan.steps,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            tokens_per_step=plan.batch_size * self.job.trainee.samples.length,
            views=tuple(self.job.trainee.views),
            returned=self.job.returned,
        )

    # --- Going on ---

    def go_on(self) -> Iterator[Event]:
        plan, progress = self.job.plan, self.progress
        every = self.run.checkpoint_every or plan.evaluate_every
        yield from self._prune()  # of a run that was killed after its last checkpoint
        with interrupts() as asked, self._divergence_noted():
            began = time.perf_counter()
            for record in train(self.job.trainee, plan, progress, lambda: asked() != 0):
                if isinstance(record, Step):
                    self.clock.add(time.perf_counter() - began)
                self._write(record)
                if isinstance(record, Step):
                    self._look_at(record)
                yield record
                wanted = progress.step % every == 0 or progress.step in self.run.keep_steps
                if progress.evaluated and wanted:
                    yield from self._save()
                began = time.perf_counter()
            number = max(self.ranks.gathered(asked()))
            if number or progress.step == plan.steps:
                yield from self._save()
            # Whoever leaves first has all others signalled by torchrun: they leave together.
            self.ranks.gathered(None)
        if number:
            raise Interrupted(number, progress.step)
        own, beside = memory_of(self.run, self.job.trainee.optimizer)
        self._end("finished", optimizer_bytes=own, average_bytes=beside)

    @contextmanager
    def _divergence_noted(self) -> Iterator[None]:
        try:
            yield
        except (NotFiniteError, DivergedError) as error:
            self._end("diverged", text=str(error))
            raise

    def _look_at(self, record: Step) -> None:
        """Raise DivergedError if the watch says so: before a save, so that after a kill it says so again."""
        loss = record.loss if math.isfinite(record.loss) else None
        why = self.watch and self.watch.take(record.step, self.job.plan.steps, loss)
        if why:
            raise DivergedError(why)

    def _end(self, outcome: str, **facts: Any) -> None:
        """Write the last line of a run that has nothing left to do."""
        about = {"time": self.clock.now(), "step": self.progress.step, "outcome": outcome, **facts}
        self.timing.write("end", {**about, "records": self.records.position()})

    def _write(self, record: Step | Evaluation) -> None:
        self.records.write(type(record).__name__.lower(), asdict(record))
        if isinstance(record, Evaluation):
            self.timing.write("speed", {"time": self.clock.now(), "step": record.step, **self.clock.speed()})
            self.records.flush()
            self.timing.flush()
        elif self.run.telemetry_every and record.step % self.run.telemetry_every == 0 and not record.skipped:
            figures = pull_statistics(self.job.trainee.optimizer)
            self.records.write("telemetry", {"step": record.step, **figures})

    def _save(self) -> Iterator[Event]:
        """Write a checkpoint, unless there is one already; a disk that fails once may work again."""
        progress, job = self.progress, self.job
        if self.saved_at == (progress.step, progress.evaluated):
            return
        began = time.monotonic()
        facts = {
            "config": as_mapping(self.run),
            "progress": asdict(progress),
            "schedule": job.trainee.scheduler.state_dict(),
            "returned": job.returned,
            **job.facts,
        }
        state = checkpoint.collect(job.trainee.model, job.trainee.optimizer, self.ranks)
        for last in (False, False, True):
            try:
                facts["records"] = self.ranks.of_first(self.records.position)
                path = checkpoint.save(self.folder / "checkpoints", progress.step, state, facts, self.ranks)
                break
            except OSError as error:
                if last:
                    raise
                yield Notice(text=f"could not save: {error}; trying again")
                time.sleep(1)
        self.saved_at = progress.step, progress.evaluated
        yield from self._prune()
        seconds = time.monotonic() - began
        self.timing.write("save", {"time": self.clock.now(), "step": progress.step, "seconds": seconds})
        yield Saved(step=progress.step, folder=path, seconds=seconds)

    def _prune(self) -> Iterator[Event]:
        prune = partial(
            checkpoint.prune,
            self.folder / "checkpoints",
            up_to=self.progress.step,
            keep=self.run.keep,
            others=self.run.keep_steps,
        )
        try:
            self.ranks.of_first(prune)
        except OSError as error:
            yield Notice(text=f"could not remove an old checkpoint: {error}")

    def close(self) -> None:
        """Write what is known, and end."""
        for writer in (self.records, self.timing):
            writer.close()


@contextmanager
def interrupts() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the signal that asked to stop, or 0; a second one ends the process.

    Those that come together are one: the command `timeout` sends its signal twice.
    """
    asked, since = 0, 0.0

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked, since
        if asked and time.monotonic() - since > 0.5:
            os._exit(128 + number)
        if not asked:
            asked, since = number, time.monotonic()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(number, ask) for number in numbers]
    try:
        yield lambda: asked
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
