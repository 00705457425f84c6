"""Runs on a Ray cluster: one task each, in the process that the pool of one machine would do it in.

Every node sees the folder of the study under the same path. A run whose worker is lost is tried again on
another one, and resumes from its folder. Ray is imported here and nowhere else.
"""

import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.lm.loop import Step
from paceline.runs.config import ConfigError
from paceline.runs.run import Interrupted, Notice, interrupts
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
    there: Any = ray.cluster_resources  # which has no types
    count = int(there().get("GPU", 0))
    gpus = 1 / max(1, -(-(jobs or 1) // count)) if count else 0.0
    return partial(_do_all, ray=ray, jobs=jobs, cpus=threads_of(1), gpus=gpus)


def _do_all(
    target: Target, orders: Iterable[Named | None], *, ray: Any, jobs: int | None, cpus: int, gpus: float
) -> Iterator[tuple[Named, Any] | None]:
    """Call `target` with each run on the cluster, as `pool.do_all` does here."""
    # Without retries of Ray, which are silent: here a lost worker is said, and counted.
    remote: Any = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(_one)
    begin = partial(remote.options(num_returns="streaming").remote, target, threads=cpus)
    waiting, more = iter(orders), True
    at_work = dict[Any, _Task]()
    until: float | None = None
    with interrupts() as asked:
        while at_work or (more and not asked()):
            if asked() and until is None:
                until = time.monotonic() + PATIENCE
                for stream in at_work:
                    ray.cancel(stream)  # which the pool in the task takes for Ctrl-C: it saves
            if until is not None and time.monotonic() > until:
                break
            while more and len(at_work) < (jobs or _room(ray, cpus, gpus)) and not asked():
                try:
                    one = next(waiting)
                except StopIteration:
                    more = False
                    break
                if one is None:
                    break
                at_work[begin(one)] = _Task(one=one)
            if not at_work:
                time.sleep(0.25)
            ready = ray.wait(list(at_work), timeout=0.25, fetch_local=False)[0] if at_work else []
            if not ready:
                yield None
            for stream in ready:
                task = at_work[stream]
                message, is_lost = _next(ray, stream, task, bool(asked()))
                if is_lost or isinstance(message, Ended):
                    del at_work[stream]
                if is_lost:
                    at_work[begin(task.one)] = task
                yield task.one, message
        if asked():
            raise Interrupted(asked(), None)


def _next(ray: Any, stream: Any, task: _Task, stopping: bool) -> tuple[Any, bool]:
    """Return what a task sends next, and whether its worker is lost and the task is to begin again."""
    from ray.exceptions import RayError, RayTaskError, TaskCancelledError

    try:
        message = ray.get(next(stream))
    except StopIteration:
        return Ended(how="stopped" if stopping else "failed", text="its task ended without a word"), False
    except TaskCancelledError:
        return Ended(how="stopped"), False
    except RayTaskError as error:  # raised by our own code: it would be again
        return Ended(how="failed", text=_short(error.cause)), False
    except RayError as error:
        if stopping:
            return Ended(how="stopped"), False
        if task.losses >= LOSSES:
            return Ended(how="failed", text=f"lost its worker again and again: {_short(error)}"), False
        task.losses += 1
        return Notice(text=f"{task.one.name}: lost its worker ({_short(error)}); it resumes elsewhere"), True
    if isinstance(message, Step) and message.step > task.step:
        task.step, task.losses = message.step, 0
    return message, False


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


def _room(ray: Any, cpus: int, gpus: float) -> int:
    """Return how many runs fit the cluster as it is now: one at least, which waits for more to come."""
    there = ray.cluster_resources()
    fitting = int(there.get("CPU", 0) // cpus)
    return max(1, min(fitting, int(there.get("GPU", 0) / gpus + 1e-6)) if gpus else fitting)


def _one(target: Target, one: Named, threads: int) -> Iterator[Any]:
    """Yield what a run sends, in the worker: the same pool that a machine of its own would use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # as Ray has set it for this task
    with suppress(Interrupted):
        for message in pool.do_all(target, [one], 1, threads, () if visible is None else (visible,)):
            if message is not None:
                yield message[1]
