"""Functions called in processes of their own, several in parallel. They end with the one that started them.

.. code-block:: text

    parent ── target, order ──→ child: target(order, send)
           ←── messages ───────        ends if the parent is gone, and saves first if it is asked to
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, get_all_start_methods, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Literal, Protocol, final

from paceline.lm.evaluate import NotFiniteError
from paceline.lm.memory import explain_memory
from paceline.runs.config import ConfigError
from paceline.runs.run import DivergedError, Interrupted, interrupts


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A process has come to its end."""

    how: Literal["finished", "diverged", "failed", "refused", "stopped"]
    text: str = ""
    result: Any = None


Target = Callable[[Any, Callable[[object], None]], Any]


class Crew(Protocol):
    """Whoever does orders: processes of this machine, or workers of a cluster."""

    def room(self) -> int:
        """Return how many orders are done in parallel."""

    def begin(self, order: Any) -> None:
        """Begin an order."""

    def hear(self) -> Iterable[tuple[Any, Any]]:
        """Return orders and what has come of each, after a quarter of a second at most."""

    def stop(self) -> None:
        """Ask all to save, and to end."""

    def close(self) -> None:
        """End what is still at work."""


def drive(crew: Crew, orders: Iterable[Any]) -> Iterator[tuple[Any, Any] | None]:
    """Hand out orders; yield each with what is sent for it, at last an `Ended`.

    A signal stops all of them: they save, and Interrupted is raised. None is yielded while nothing happens.
    An order that is None says that there is none now, but may be later.
    """
    waiting, last, more, is_stopping, at_work = iter(orders), object(), True, False, 0
    try:
        with interrupts() as asked:
            while at_work or (more and not asked()):
                if asked() and not is_stopping:
                    is_stopping = True
                    crew.stop()
                while more and not asked() and at_work < crew.room():
                    if (order := next(waiting, last)) is None:
                        break
                    if more := order is not last:
                        crew.begin(order)
                        at_work += 1
                yield None
                for order, message in crew.hear():
                    if isinstance(message, Ended):
                        at_work -= 1
                        if asked() and message.how == "failed":  # it had not come to where it listens
                            message = Ended(how="stopped")
                    yield order, message
        if asked():
            raise Interrupted(asked(), None)
    finally:
        crew.close()


def do_all(
    target: Target, orders: Iterable[Any], jobs: int, threads: int, gpus: Sequence[str] = ()
) -> Iterator[tuple[Any, Any] | None]:
    """Call `target` with each order in a process of its own, as `drive` does.

    Arguments:
        target: a function that the processes can import.
        orders: as in `drive`.
        jobs: how many processes there are in parallel.
        threads: those of each process.
        gpus: names as in CUDA_VISIBLE_DEVICES; each process sees one of them. Empty: what this process sees.
    """
    return drive(_Processes(target, jobs, threads, gpus), orders)


@final
class _Processes:
    """A crew of processes, each in a place of its own, which says what GPU it has."""

    def __init__(self, target: Target, jobs: int, threads: int, gpus: Sequence[str]) -> None:
        self._target, self._jobs, self._threads, self._gpus = target, jobs, threads, gpus
        # A server that has imported everything forks in no time; without one, each child imports it.
        self._context: Any = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
        if self._context.get_start_method() == "forkserver":
            # The second is imported by the first optimizer of every process, and takes seconds.
            self._context.set_forkserver_preload([__name__, "torch._dynamo"])
        self._at_work = dict[Connection, tuple[Any, BaseProcess, int]]()

    def room(self) -> int:
        return self._jobs

    def begin(self, order: Any) -> None:
        place = min(set(range(self._jobs)) - {place for _, _, place in self._at_work.values()})
        gpu = self._gpus[place % len(self._gpus)] if self._gpus else None
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(self._target, order, self._threads, gpu, theirs))
        process.start()
        theirs.close()
        self._at_work[ours] = order, process, place

    def hear(self) -> Iterator[tuple[Any, Any]]:
        for ours in connection.wait(list(self._at_work), timeout=0.25):
            assert isinstance(ours, Connection)
            order, process, _ = self._at_work[ours]
            message = _receive(ours, process)
            if isinstance(message, Ended):
                process.join()
                ours.close()
                del self._at_work[ours]
            yield order, message

    def stop(self) -> None:
        for _, process, _ in self._at_work.values():
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGTERM)

    def close(self) -> None:
        for ours, (_, process, _) in self._at_work.items():
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
            ": memory may be full; fewer runs in parallel (--jobs) need less"
            if code == -signal.SIGKILL
            else ""
        )
        return Ended(how="failed", text=f"its process ended {why}{hint}")


# --- In the child -------------------------------------------------------------------------------------


def _work(target: Target, order: Any, threads: int, gpu: str | None, theirs: Connection) -> None:
    # The terminal interrupts all; until a run listens for it, what ends this is the parent's own signal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # read when CUDA is used for the first time
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
    except (NotFiniteError, DivergedError) as error:
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
