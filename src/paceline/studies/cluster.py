"""Runs on a Ray cluster: one task each, in the process that the pool of one machine would do it in.

Every node sees the folder of the study under the same path. A run whose worker is lost is tried again on
another one, and resumes from its folder. Ray is imported here and nowhere else.
"""

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from paceline.lm.loop import Step
from paceline.runs.config import ConfigError
from paceline.runs.run import Interrupted, Notice
from paceline.studies import pool
from paceline.studies.engine import Workers, threads_of
from paceline.studies.pool import Ended, Target
from paceline.studies.runs import Named

LOSSES = 3  # workers that a run may lose without a step forward
PATIENCE = 60.0  # seconds in which runs that were asked to stop may save


@dataclass(kw_only=True, slots=True)
class _Task:
    one: Named
    step: int = 0
    losses: int = 0
    """Workers lost since the last step forward."""


def workers(address: str | None, jobs: int | None) -> Workers:
    """Connect to a cluster, and return its workers. A run has one core, or OMP_NUM_THREADS.

    Arguments:
        address: that of a cluster. None: RAY_ADDRESS, or a cluster on this machine, or a new one here.
        jobs: how many runs in parallel; they share the GPUs. None: one a GPU, or as there is room for.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError("--ray needs a package: pip install ray") from None
    where = address or os.environ.get("RAY_ADDRESS")
    host, _, port = (where or "").rpartition(":")
    try:
        if port.isdigit() and "/" not in host:  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        why = " ".join(str(error).split())[:200]
        raise ConfigError(f"no Ray cluster answers at {where} ({why}); start: ray start --head") from None
    return lambda target, orders: pool.drive(_Tasks(ray, target, jobs), orders)


@final
class _Tasks:
    """A crew of Ray's tasks, one a run. One whose worker is lost begins again."""

    def __init__(self, ray: Any, target: Target, jobs: int | None) -> None:
        self._ray, self._jobs, self._cpus = ray, jobs, threads_of(1)
        count = int(ray.cluster_resources().get("GPU", 0))
        self._gpus = 1 / max(1, -(-(jobs or 1) // count)) if count else 0.0
        # Without retries of Ray, which are silent: here a lost worker is said, and counted.
        remote = ray.remote(num_cpus=self._cpus, num_gpus=self._gpus, max_retries=0)(_one)
        options = remote.options(num_returns="streaming")
        self._start = partial(options.remote, target, threads=self._cpus)
        self._at_work = dict[Any, _Task]()
        self._until: float | None = None

    def room(self) -> int:
        """Return how many runs fit the cluster as it is now: one at least, which waits for more to come."""
        there = self._ray.cluster_resources()
        fitting = int(there.get("CPU", 0) // self._cpus)
        if self._gpus:
            fitting = min(fitting, int(there.get("GPU", 0) / self._gpus + 1e-6))
        return self._jobs or max(1, fitting)

    def begin(self, order: Named) -> None:
        self._at_work[self._start(order)] = _Task(one=order)

    def hear(self) -> Iterator[tuple[Named, Any]]:
        if self._until is not None and time.monotonic() > self._until:
            for task in self._at_work.values():
                yield task.one, Ended(how="stopped")
            self._at_work.clear()
        if not self._at_work:
            time.sleep(0.25)
            return
        for stream in self._ray.wait(list(self._at_work), timeout=0.25, fetch_local=False)[0]:
            task = self._at_work[stream]
            message, is_lost = self._next(stream, task)
            if is_lost or isinstance(message, Ended):
                del self._at_work[stream]
            if is_lost:
                self._at_work[self._start(task.one)] = task
            yield task.one, message

    def _next(self, stream: Any, task: _Task) -> tuple[Any, bool]:
        """Return what a task sends next, and whether its worker is lost and the task is to begin again."""
        from ray.exceptions import RayError, RayTaskError, TaskCancelledError

        try:
            message = self._ray.get(next(stream))
        except StopIteration:
            return Ended(how="failed", text="its task ended without a word"), False
        except TaskCancelledError:
            return Ended(how="stopped"), False
        except RayTaskError as error:  # raised by our own code: it would be again
            return Ended(how="failed", text=_short(error.cause)), False
        except RayError as error:
            if self._until is not None:
                return Ended(how="stopped"), False
            if task.losses >= LOSSES:
                return Ended(how="failed", text=f"lost its worker again and again: {_short(error)}"), False
            task.losses += 1
            text = f"{task.one.name}: lost its worker ({_short(error)}); it resumes elsewhere"
            return Notice(text=text), True
        if isinstance(message, Step) and message.step > task.step:
            task.step, task.losses = message.step, 0
        return message, False

    def stop(self) -> None:
        self._until = time.monotonic() + PATIENCE
        for stream in self._at_work:
            self._ray.cancel(stream)  # which the pool in the task takes for Ctrl-C: it saves

    def close(self) -> None:
        """Do nothing: tasks end with the command that began them."""


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


def _one(target: Target, one: Named, threads: int) -> Iterator[Any]:
    """Yield what a run sends, in the worker: the same pool that a machine of its own would use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # as Ray has set it for this task
    with suppress(Interrupted):
        for message in pool.do_all(target, [one], 1, threads, () if visible is None else (visible,)):
            if message is not None:
                yield message[1]
