"""Atomic writes of files and folders, checks that they are as they were written, a lock on a folder."""

import errno
import hashlib
import json
import os
import re
import reprlib
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

FILE = {"bytes": int, "sha256": str}  # what `describe` says of a file
TEMPORARY = ".tmp-"  # prefix of the names of unfinished files and folders
_REPLACED = re.compile(re.escape(TEMPORARY) + r"replaced-(.+)-\d+")


class Damaged(ValueError):
    """A file is missing, or is not what was written."""


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stamp(path: Path) -> list[int]:
    """Return what a file does not keep if its content changes: inode, size and times."""
    status = path.stat()
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def describe(paths: Iterable[Path]) -> dict[str, Any]:
    """Return the size and the sha256 of files, by name; `verify` compares files with it."""
    return {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in paths}


def verify(folder: Path, files: Mapping[str, Any]) -> None:
    """Raise Damaged, naming the file, if files of a folder are not what `describe` said of them."""
    for name, known in files.items():
        path = plain_file(folder, name)
        check_fields(path, known, FILE)
        if (size := path.stat().st_size) != known["bytes"]:
            raise Damaged(f"{path} has {size} bytes; {known['bytes']} were written")
        if sha256_of(path) != known["sha256"]:
            raise Damaged(f"the content of {path} is not what was written")


def check_fields(path: Path, content: Any, fields: Mapping[str, type]) -> None:
    """Raise Damaged, naming the field, for JSON in which one is missing or not of its type.

    A number must not be negative.
    """
    for name, kind in fields.items():
        value = content.get(name) if isinstance(content, dict) else content
        if type(value) is not kind or (type(value) is int and value < 0):
            allowed = "an integer >= 0" if kind is int else f"a value of type {kind.__name__}"
            raise Damaged(f"{path}: {name} is {reprlib.repr(value)}; allowed: {allowed}")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise Damaged, naming file and place, for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise Damaged(f"{path}, {place}: this is no JSON ({error.msg})") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, too deep, or a number of thousands of digits
        raise Damaged(f"{path} is no JSON ({error})") from None
    if not isinstance(content, dict):
        raise Damaged(f"{path} holds a {type(content).__name__}; a JSON object was written")
    return content


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that others see complete or not at all, also after a power cut."""
    # A process number would not be unique: another machine may share the folder.
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{uuid.uuid4().hex}")
    try:
        with naming(path), temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn the error of a write that failed into an OSError with the name of the file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except Exception as error:
        # Libraries in Rust (safetensors, tokenizers) have the system's error number only in their text.
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def sync(path: Path) -> None:
    """Make the system write a file, or the names in a folder, to the disk now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill, and rename it to its final name at the end.

    After an error the temporary folder is removed. An existing folder of the final name is replaced.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    # Not by tempfile, whose folders only their owner may read.
    temporary = final.with_name(f"{TEMPORARY}{final.name}-{uuid.uuid4().hex}")
    temporary.mkdir()
    try:
        yield temporary
        put_in_place(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def put_in_place(made: Path, final: Path) -> None:
    """Rename a folder to its final name when all of it is on the disk; an existing one is replaced."""
    for path in made.iterdir():
        if path.is_file():
            path.chmod(made.stat().st_mode & 0o666)  # safetensors' are for their owner only
        sync(path)
    sync(made)
    try:
        os.replace(made, final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        replaced = final.with_name(f"{TEMPORARY}replaced-{final.name}-{os.getpid()}")
        os.replace(final, replaced)
        os.replace(made, final)
        shutil.rmtree(replaced, ignore_errors=True)
    sync(final.parent)


def remove_temporary(folder: Path, name: str = "") -> None:
    """Remove temporary files of interrupted writes, or only those for a file or folder of this name.

    No one else may be writing these. A folder that was about to be replaced gets its name back if its
    replacement is missing.
    """
    own = re.compile(re.escape(f"{TEMPORARY}{name}") + "-[0-9a-f]{32}")
    for path in folder.glob(f"{TEMPORARY}*"):
        if name and not own.fullmatch(path.name):
            continue
        replaced = _REPLACED.fullmatch(path.name)
        if replaced and not (folder / replaced[1]).exists():
            path.rename(folder / replaced[1])
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def plain_file(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder, by a name that cannot be trusted.

    Raises:
        ValueError: the name leads out of the folder, or is not that of a regular file.
    """
    if name in ("", ".", "..") or any(c in name for c in "/\\\0") or len(name) > 200:
        raise ValueError(f"{name!r} is not the name of a file in {folder}")
    path = folder / name
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    if not stat.S_ISREG(kind):
        raise Damaged(f"{path} is not a regular file")
    return path


class BusyError(RuntimeError):
    """Another process works in a folder."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder for this process. The lock ends with the process, however that ends.

    A folder that was not there is made, and removed at the end if it is empty: refused work leaves nothing.

    Raises:
        BusyError: another process has the lock; the message says which one, and since when.
    """
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "lock"
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        owner, since, when = (path.read_text(errors="replace") if path.exists() else "").partition(" since ")
        at_work = f"{owner or 'another process'} is at work in {folder}{since}{when}"
        raise BusyError(f"{at_work}; wait for it or take another folder") from None
    try:
        with suppress(OSError):  # a full disk: the name of the owner is all that is lost
            path.write_bytes(
                f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}".encode()
            )
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: FileLock takes none on a file that lost its name
        lock.release()
        with suppress(OSError):  # something is in it
            for place in new:
                place.rmdir()


@contextmanager
def one_at_a_time(path: Path, tell: Callable[[str], object]) -> Iterator[None]:
    """Wait until no other process is in this block with the same file, which is there for that time only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        tell("another process prepares the same data; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held, as above
        lock.release()
