"""Records of a run: JSON lines, the same to the byte however often the run was interrupted.

`records.jsonl` holds what the run computed: first what it is (config, version, environment, data), then a
line for each step, evaluation and reading of the pull. What depends on the clock goes to `timing.jsonl`.
"""

import errno
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any


class Writer:
    """Appends lines to a file of which the first `keep` bytes are known to be right."""

    def __init__(self, path: Path, keep: int) -> None:
        self._path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        self._file = os.fdopen(descriptor, "r+b")
        if (size := os.fstat(descriptor).st_size) < keep:
            self._file.close()
            raise ValueError(f"{path} has {size} bytes and should have {keep}: its end is lost")
        self._file.truncate(keep)
        self._file.seek(keep)

    def write(self, kind: str, content: Mapping[str, Any]) -> None:
        """Append one line."""
        content = _known({"kind": kind, **content})
        line = json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"
        with self._named():
            self._file.write(line.encode())

    def position(self) -> int:
        """Return the length of the file, now that all of it is on the disk and still under its name."""
        with self._named():
            self._file.flush()
            os.fsync(self._file.fileno())
            if not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                raise OSError(errno.ESTALE, "another file is in its place")
        return self._file.tell()

    def flush(self) -> None:
        """Let others read what was written so far."""
        with self._named():
            self._file.flush()

    def close(self) -> None:
        """Write the rest, and end. If that fails, there was an error before, or little is lost."""
        with suppress(OSError):
            self._file.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the file in errors."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error


class Nowhere:
    """The records of a rank that leaves them to the first."""

    def write(self, kind: str, content: Mapping[str, Any]) -> None: ...

    def position(self) -> int:
        return 0

    def flush(self) -> None: ...

    def close(self) -> None: ...


def _known(value: Any) -> Any:
    """Return the value with None for numbers that are not finite, which JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _known(part) for name, part in value.items()}
    return [_known(part) for part in value] if isinstance(value, list | tuple) else value


def whole_lines(path: Path) -> int:
    """Return how many bytes of a file are complete lines; 0 if it does not exist."""
    return path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records in a file, without a last line that is cut off."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is no JSON: {error}") from None
            yield record


@cache
def environment() -> dict[str, Any]:
    """Return versions and hardware, which a result may depend on too; nothing personal."""
    import torch

    import paceline

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "paceline": paceline.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "gpu": gpu,
        "threads": torch.get_num_threads(),
    }


def _commit() -> str | None:
    """Return the commit of a checkout, with a + if it was edited since; None without one."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *words], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", str(Path(__file__)))
        return git("rev-parse", "HEAD") + (
            "+" if git("status", "--porcelain", "--", str(here.parent)) else ""
        )
    except (OSError, subprocess.SubprocessError):
        return None


class Clock:
    """Measures how fast steps are."""

    def __init__(self, *, tokens: int, operations: float, peak: float | None) -> None:
        self._tokens, self._operations, self._peak = tokens, operations, peak
        self._seconds: list[float] = []

    def add(self, seconds: float) -> None:
        """Count a step."""
        self._seconds.append(seconds)

    def speed(self) -> dict[str, float | None]:
        """Return tokens a second since the last call, and the share of the GPU's peak (MFU) if known."""
        seconds, self._seconds = self._seconds, []
        if not seconds:
            return {"tokens_per_second": None, "mfu": None}
        rate = self._tokens * len(seconds) / sum(seconds)
        return {
            "tokens_per_second": round(rate, 1),
            "mfu": round(rate * self._operations / self._peak, 4) if self._peak else None,
        }
