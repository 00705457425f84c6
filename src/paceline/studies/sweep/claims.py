"""Who does which cell: files that machines which share a folder agree by.

.. code-block:: text

    FOLDER/claims/CELL/0001.json   host, process; made by one of those who try, and touched while it lives
    FOLDER/claims/CELL/0002.json   the next one's: the first had stopped, was let go, or its heart stopped

A claim is never taken away: another is made after it, which one of those who try succeeds in, and the highest
counts. So a machine that was away for long finds that it is not its turn any more. Whether a heart beats is
judged by the clock of the one who looks: clocks of machines differ.
"""

import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from paceline.lm.files import write_atomically

BEATS = 12  # in the time after which a heart is taken for stopped


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to do a cell."""

    path: Path

    @property
    def number(self) -> int:
        """Of all claims of this cell."""
        return int(self.path.stem)

    def holds(self) -> bool:
        """Whether nobody has claimed it since."""
        return not _path(self.path.parent, self.number + 1).exists()


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """What is known of a cell from its newest claim."""

    how: Literal["free", "held", "failed"]
    number: int
    """Of that claim; 0: there is none."""
    host: str = ""
    text: str = ""
    """Why it failed."""


class Claims:
    """Claims of cells, by name; those made here are kept alive until they are let go."""

    def __init__(self, folder: Path, names: Iterable[str], seconds: float) -> None:
        self._folder, self._seconds = folder, seconds
        self._self = _this_process()
        self._held: dict[str, Claim] = {}
        self._seen: dict[str, tuple[object, float]] = {}  # the last heartbeat, and when it was new to us
        # Failures of earlier commands are tried again; those from now on are not.
        newest = {name: self._newest(name) for name in names}
        self._failed_before = {n: i for n, i in newest.items() if self._read(n, i).get("how") == "failed"}
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Self:
        self._heart.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._heart.join()
        for name in list(self._held):
            self.let_go(name)

    def state(self, name: str) -> State:
        """Whether a cell may be claimed, as far as this machine can see."""
        number = self._newest(name)
        content = self._read(name, number)
        host, how = str(content.get("host", "another machine")), content.get("how")
        if how == "failed" and self._failed_before.get(name) != number:
            return State(how="failed", number=number, host=host, text=str(content.get("text", "")))
        if (
            number == 0
            or how in ("free", "failed")
            or self._is_dead(content)
            or not self._beats(name, number)
        ):
            return State(how="free", number=number)
        return State(how="held", number=number, host=host)

    def take(self, name: str, seen: State) -> Claim | None:
        """Claim a cell that was seen to be free; None if another was quicker."""
        path = _path(self._folder / name, seen.number + 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump({"how": "held", **self._self}, file)
        except FileExistsError:
            return None
        self._held[name] = Claim(path)
        return self._held[name]

    def let_go(self, name: str, failed: str | None = None) -> bool:
        """End a claim of ours, with the reason if the cell could not be done; whether it was still ours."""
        claim = self._held.pop(name)
        content = {"how": "free"} if failed is None else {"how": "failed", "text": failed}
        with suppress(OSError):
            write_atomically(claim.path, json.dumps(content | self._self).encode())
        return claim.holds()

    # --- Pieces ---

    def _newest(self, name: str) -> int:
        try:
            found = os.listdir(self._folder / name)  # noqa: PTH208
        except FileNotFoundError:
            return 0
        return max((int(entry[:-5]) for entry in found if entry[:-5].isdigit()), default=0)

    def _read(self, name: str, number: int) -> dict[str, Any]:
        """A claim; nothing if it is being written, or its writer was killed while it wrote."""
        try:
            content = json.loads(_path(self._folder / name, number).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def _is_dead(self, content: dict[str, Any]) -> bool:
        """Whether it was a process of this machine that is no more: nobody need wait for its heart."""
        if content.get("machine") != self._self["machine"]:
            return False
        return content.get("started") != _start_of(int(content.get("pid", 0)))

    def _beats(self, name: str, number: int) -> bool:
        try:
            # Opened: on a network file system that asks the server, and looking at the name may not.
            with _path(self._folder / name, number).open("rb") as file:
                beat: object = (number, os.fstat(file.fileno()).st_mtime_ns)
        except OSError:
            beat = (number, None)
        before, since = self._seen.get(name, (None, 0.0))
        if beat != before:
            since = time.monotonic()
            self._seen[name] = beat, since
        return time.monotonic() - since < self._seconds

    def _beat(self) -> None:
        while not self._ended.wait(self._seconds / BEATS):
            for claim in list(self._held.values()):
                with suppress(OSError):
                    os.utime(claim.path)


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:04d}.json"


def _this_process() -> dict[str, Any]:
    host = os.environ.get("PACELINE_HOST") or socket.gethostname()
    # Containers may share a host name, and processes of other containers have other numbers.
    parts = [host, *map(_text_of, ("/proc/sys/kernel/random/boot_id",))]
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))  # noqa: PTH115
    machine = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return {"host": host, "machine": machine, "pid": os.getpid(), "started": _start_of(os.getpid())}


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def _start_of(pid: int) -> str | None:
    """When a process began, so that another of its number is not taken for it; None: it has ended."""
    fields = _text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if fields:
        return None if fields[0] == "Z" else fields[19]
    try:
        os.kill(pid, 0)
    except PermissionError:
        return "alive"
    except (OSError, OverflowError):
        return None
    return "alive"
