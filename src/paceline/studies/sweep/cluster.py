"""Cells on a Ray cluster: one task each, in the process that the pool of one machine would do it in.

Whoever joins the cluster has to see the folder of the sweep under the same path. A cell whose worker is lost
is tried again elsewhere, and goes on from its folder. Ray is imported here and nowhere else.
"""

import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from paceline.lm.loop import Step
from paceline.runs.config import ConfigError
from paceline.runs.run import Event, Interrupted, Notice, interrupts
from paceline.studies import pool
from paceline.studies.pool import Cell, Ended, Told

LOSSES = 3  # workers that a cell may lose without a step forward
PATIENCE = 60.0  # seconds in which cells that were asked to stop may save


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What a cell needs."""

    cpus: int
    gpus: float | None = None
    """A part of a GPU, or several; None: one if the cluster has any, else none."""
    at_once: int | None = None
    """Cells at once; None: as many as there is room for in the cluster."""


@dataclass(kw_only=True, slots=True)
class _Task:
    cell: Cell
    step: int = 0
    losses: int = 0
    """Workers lost since the last step forward."""


def connect(address: str | None) -> Any:
    """Join a cluster: of that address, of RAY_ADDRESS, or one that runs on this machine."""
    try:
        import ray
    except ImportError:
        raise ConfigError("--engine ray needs a package: pip install 'paceline[ray]'") from None
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    host, _, port = where.rpartition(":")
    try:
        if port.isdigit() and "/" not in host:  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(
            f"no Ray cluster answers at {where} ({why[:200]}); start one with: ray start --head"
        ) from None
    return ray


def run_all(ray: Any, cells: Iterable[Cell | None], resources: Resources) -> Iterator[Told]:
    """As `pool.run_all`, on a cluster."""
    gpus = resources.gpus
    if gpus is None:
        gpus = 1.0 if ray.cluster_resources().get("GPU", 0) else 0.0
    # Ray would begin a lost task anew in silence; here it is told, and counted.
    remote: Any = ray.remote(num_cpus=resources.cpus, num_gpus=gpus, max_retries=0)(_one)
    streaming: Any = remote.options(num_returns="streaming")
    waiting, more = iter(cells), True
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
            room = resources.at_once or _room(ray, resources.cpus, gpus)
            while more and len(at_work) < room and not asked():
                try:
                    cell = next(waiting)
                except StopIteration:
                    more = False
                    break
                if cell is None:
                    break
                at_work[streaming.remote(cell, resources.cpus)] = _Task(cell=cell)
            if not at_work:
                time.sleep(0.25)
                yield None
                continue
            ready, _ = ray.wait(list(at_work), timeout=0.25, fetch_local=False)
            if not ready:
                yield None
            for stream in ready:
                task = at_work[stream]
                for message in _messages(ray, stream, task, bool(asked())):
                    if message is None:  # its worker is lost
                        del at_work[stream]
                        at_work[streaming.remote(task.cell, resources.cpus)] = task
                        break
                    if isinstance(message, Ended):
                        del at_work[stream]
                    yield task.cell, message
        if asked():
            raise Interrupted(asked(), None)


def _messages(ray: Any, stream: Any, task: _Task, stopping: bool) -> Iterator[Event | Ended | None]:
    """What a task says next: an event, or how it ended; a notice and None if it is to be begun again."""
    from ray.exceptions import RayError, RayTaskError, TaskCancelledError

    try:
        message = ray.get(next(stream))
    except StopIteration:
        message = Ended(how="stopped" if stopping else "failed", text="its task ended without a word")
    except TaskCancelledError:
        message = Ended(how="stopped")
    except RayTaskError as error:  # raised by our own code: it would be again
        message = Ended(how="failed", text=" ".join(str(error.cause).split()) or type(error.cause).__name__)
    except RayError as error:
        if stopping:
            message = Ended(how="stopped")
        elif task.losses >= LOSSES:
            message = Ended(how="failed", text=f"lost {task.losses + 1} workers in a row: {_short(error)}")
        else:
            task.losses += 1
            yield Notice(
                text=f"{task.cell.folder.name}: lost its worker ({_short(error)}); it goes on elsewhere"
            )
            message = None
    if isinstance(message, Step) and message.step > task.step:
        task.step, task.losses = message.step, 0
    yield message


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


def _room(ray: Any, cpus: int, gpus: float) -> int:
    """How many cells fit what the cluster has now; one at least, which waits for more to come."""
    there = ray.cluster_resources()
    fitting = [int(there.get("CPU", 0) // cpus)]
    if gpus:
        fitting.append(int(there.get("GPU", 0) / gpus + 1e-6))
    return max(1, min(fitting))


def _one(cell: Cell, threads: int) -> Iterator[Event | Ended]:
    """In the worker: the same pool that a machine of its own would use, for one cell."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # as Ray has set it for this task
    with suppress(Interrupted):
        for told in pool.run_all([cell], 1, threads, () if visible is None else (visible,)):
            if told is not None:
                yield told[1]
