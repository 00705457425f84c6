"""Runs in processes of their own, several at once. They end with the one that started them.

.. code-block:: text

    parent ── run, folder ──→ child: execute(run, folder)
           ←── events ───────        ends at once if the parent is gone, and saves first if it is asked to
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, get_all_start_methods, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from paceline.experiments.config import ConfigError, Run
from paceline.experiments.run import Event, Interrupted, Notice, execute, interrupts
from paceline.lm.evaluate import NotFiniteError
from paceline.lm.files import BusyError
from paceline.lm.loop import Step
from paceline.lm.memory import explain_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run of many, and where it is."""

    run: Run
    folder: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A process has come to its end."""

    how: Literal["finished", "diverged", "failed", "refused", "stopped"]
    text: str = ""
    result: Any = None


Target = Callable[[Any, Callable[[object], None]], Any]


def run_all(cells: Sequence[Cell], jobs: int, threads: int) -> Iterator[tuple[Cell, Event | Ended] | None]:
    """Do runs, so many at once, and yield what happens to which; None now and then when nothing does.

    A signal stops all of them; they are saved, and Interrupted is raised.
    """
    for told in do_all(_train, cells, jobs, threads):
        yield told and (cells[told[0]], told[1])


def do_all(
    target: Target, orders: Sequence[Any], jobs: int, threads: int
) -> Iterator[tuple[int, Any] | None]:
    """Call `target` with each order, in processes; what they send, by the number of the order."""
    # A server that has imported everything forks in no time; where there is none, each child imports anew.
    context: Any = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload([__name__])
    waiting, at_work = list(range(len(orders)))[::-1], dict[Connection, tuple[int, BaseProcess]]()
    told_to_stop = False
    try:
        with interrupts() as asked:
            while at_work or (waiting and not asked()):
                if asked() and not told_to_stop:
                    told_to_stop = True
                    for _, process in at_work.values():
                        _signal(process, signal.SIGTERM)
                while waiting and len(at_work) < jobs and not asked():
                    number = waiting.pop()
                    ours, theirs = context.Pipe()
                    process = context.Process(target=_work, args=(target, orders[number], threads, theirs))
                    process.start()
                    theirs.close()
                    at_work[ours] = number, process
                ready = connection.wait(list(at_work), timeout=0.25)
                for ours in ready:
                    assert isinstance(ours, Connection)
                    number, process = at_work[ours]
                    message = _receive(ours, process)
                    if isinstance(message, Ended):
                        if asked() and message.how == "failed":  # it had not come to where it listens
                            message = Ended(how="stopped")
                        process.join()
                        ours.close()
                        del at_work[ours]
                    yield number, message
                if not ready:
                    yield None
        if asked():
            raise Interrupted(asked(), None)
    finally:
        for ours, (_, process) in at_work.items():
            ours.close()  # which ends it
            process.join()


def _receive(ours: Connection, process: BaseProcess) -> object:
    try:
        return ours.recv()
    except (EOFError, OSError):
        process.join()
        code = process.exitcode or 0
        why = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        hint = (
            ": memory may be full; fewer runs at once (--jobs) need less" if code == -signal.SIGKILL else ""
        )
        return Ended(how="failed", text=f"its process ended {why}{hint}")


def _signal(process: BaseProcess, number: int) -> None:
    if process.pid is not None and process.is_alive():
        os.kill(process.pid, number)


# --- In the child -------------------------------------------------------------------------------------


def _work(target: Target, order: Any, threads: int, theirs: Connection) -> None:
    import torch

    os.environ["TQDM_DISABLE"] = "1"  # bars of libraries would run through the table of the parent
    threading.Thread(target=_end_with_parent, args=(theirs,), daemon=True).start()
    torch.set_num_threads(threads)
    sys.stdin = open(os.devnull)  # noqa: SIM115, PTH123
    lock = threading.Lock()

    def send(message: object) -> None:
        try:
            with lock:
                theirs.send(message)
        except OSError:
            os._exit(1)  # nobody listens any more; what was done is on the disk

    send(_ended(target, order, send))


def _ended(target: Target, order: Any, send: Callable[[object], None]) -> Ended:
    try:
        return Ended(how="finished", result=target(order, send))
    except NotFiniteError as error:
        return Ended(how="diverged", text=str(error))
    except (Interrupted, KeyboardInterrupt) as error:
        return Ended(how="stopped", text=str(error))
    except ConfigError as error:
        return Ended(how="refused", text=str(error))
    except Exception as error:  # whatever it is, the other runs go on, and the user hears of it
        text = explain_memory(error) or " ".join(str(error).split()) or type(error).__name__
        return Ended(how="failed", text=text)


def _end_with_parent(theirs: Connection) -> None:
    """Wait for the end of the parent. A run is safe to be ended anywhere."""
    with suppress(OSError):
        theirs.poll(None)
    os._exit(1)


def _train(cell: Cell, send: Callable[[object], None]) -> None:
    for _ in range(100):  # the process of a parent that was killed may need a moment to end
        try:
            _send_events(cell, send)
            return
        except BusyError as error:
            busy = error
            time.sleep(0.2)
    raise busy


def _send_events(cell: Cell, send: Callable[[object], None]) -> None:
    spoke = 0.0
    for event in execute(cell.run, cell.folder, lambda text: send(Notice(text=text))):
        now = time.monotonic()
        if not isinstance(event, Step) or now - spoke > 0.25:
            spoke = now
            send(event)
