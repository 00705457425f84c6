"""Records of a run: JSON lines, the same to the byte however often the run was interrupted.

`records.jsonl` holds what the run computed: first what it is (config, version, environment, data), then a
line for each step, evaluation and reading of the pull. What depends on the clock goes to `timing.jsonl`.

Each line ends in a checksum of all lines up to it: a line that was changed, lost or moved does not match.
"""

import errno
import json
import math
import os
import platform
import subprocess
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, final

from paceline.lm.files import Damaged

_SEAL = b', "crc": "%08x"}\n'
_SIZE = len(_SEAL % 0)


class Writer:
    """Appends lines to a file, after its first `keep` bytes; None keeps all of its whole lines.

    Raises:
        Damaged: what is kept is not what was written.
    """

    def __init__(self, path: Path, keep: int | None) -> None:
        self._path, self._crc, kept = path, 0, 0
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        self._file = os.fdopen(descriptor, "r+b")
        lines = _checked(self._file, path)
        try:
            while kept != keep and (found := next(lines, None)):
                kept, self._crc = kept + len(found[0]), found[1]
            if keep is not None and kept != keep:
                raise Damaged(f"{path} has {kept} bytes in whole lines, and should have {keep}")
        except Damaged:
            self._file.close()
            raise
        self._file.truncate(kept)
        self._file.seek(kept)

    def write(self, kind: str, content: Mapping[str, Any]) -> None:
        """Append one line."""
        line, self._crc = _sealed(_known({"kind": kind, **content}), self._crc)
        with self._named():
            self._file.write(line)

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


def sealed(lines: Iterable[Mapping[str, Any]]) -> bytes:
    """Return the content of a file of these lines, which `read` checks."""
    crc, parts = 0, []
    for content in lines:
        line, crc = _sealed(content, crc)
        parts.append(line)
    return b"".join(parts)


def _sealed(content: Mapping[str, Any], crc: int) -> tuple[bytes, int]:
    """Return a line that ends in the checksum of all lines up to it, and that checksum."""
    line = json.dumps(content, ensure_ascii=False, allow_nan=False)[:-1].encode()
    crc = zlib.crc32(line, crc)
    return line + _SEAL % crc, crc


def _known(value: Any) -> Any:
    """Return the value with None for numbers that are not finite, which JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _known(part) for name, part in value.items()}
    return [_known(part) for part in value] if isinstance(value, list | tuple) else value


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records in a file, without a last line that is cut off.

    Files without checksums, which earlier versions and studies wrote, are read too. The first line tells.

    Raises:
        Damaged: a line is not what was written, or is no JSON object.
    """
    with path.open("rb") as file:
        for number, (line, _) in enumerate(_checked(file, path), 1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise Damaged(f"{path}, line {number} is no JSON: {error}") from None
            if not isinstance(record, dict):
                raise Damaged(f"{path}, line {number} is no record; a JSON object was written")
            record.pop("crc", None)
            yield record


def whole_lines(path: Path) -> int:
    """Return how many bytes of a file are whole lines; 0 if it does not exist."""
    return path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0


def times_of(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's `timing.jsonl`, none if there is no such file.

    Raises:
        Damaged: a line is not what was written, or the run has ended and its records are not complete.
    """
    timing, path = folder / "timing.jsonl", folder / "records.jsonl"
    lines = list(read(timing)) if timing.exists() else []
    end = lines[-1] if lines and lines[-1].get("kind") == "end" else {}
    if "records" in end and (found := whole_lines(path)) != end["records"]:
        raise Damaged(f"{path} has {found} bytes in whole lines; the run ended with {end['records']}")
    return lines


def _checked(lines: Iterable[bytes], path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield each whole line, and the checksum of all lines up to it."""
    crc, is_sealed = 0, True
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):  # a kill cut it off
            return
        seal = line[-_SIZE:]
        if number == 1:
            is_sealed = seal.startswith(_SEAL[:10])
        crc = zlib.crc32(line[:-_SIZE], crc)
        if seal != _SEAL % crc if is_sealed else seal.startswith(_SEAL[:10]):
            raise Damaged(f"{path}, line {number} is not what was written")
        yield line, crc


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


@final
class Clock:
    """Measures how fast steps are, and tells a time that never goes back, whatever the system's does."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens  # of a step
        self._seconds: list[float] = []
        self._zero = time.time() - time.monotonic()

    def now(self) -> float:
        """Return the time in seconds since 1970, as the system had it when the run began."""
        return self._zero + time.monotonic()

    def add(self, seconds: float) -> None:
        """Count a step."""
        self._seconds.append(seconds)

    def speed(self) -> dict[str, float | None]:
        """Return tokens a second since the last call; None if there was no step."""
        seconds, self._seconds = self._seconds, []
        rate = round(self._tokens * len(seconds) / sum(seconds), 1) if seconds else None
        return {"tokens_per_second": rate}
