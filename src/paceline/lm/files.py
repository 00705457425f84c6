"""Files that are whole or not there: atomic writes, folders committed by renaming, a lock, hashes."""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY = ".tmp-"  # beginning of the names of what is not committed yet
_REPLACED = re.compile(re.escape(TEMPORARY) + r"replaced-(.+)-\d+")


def sha256_of(path: Path) -> str:
    """The hash of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that others see whole or not at all, also after a power cut."""
    # Not by the number of the process: another machine that shares the folder may have one of that number.
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{uuid.uuid4().hex}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # a full disk does not say of which file
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Have the system write a file, or the names in a folder, to the disk now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A folder to fill, which appears under its name when it is complete, by one rename, or not at all.

    A folder of that name is replaced: it goes only after the new one could not be renamed onto it.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = (
        final.parent / f"{TEMPORARY}{uuid.uuid4().hex}"
    )  # not by tempfile: its are for their owner alone
    temporary.mkdir()
    try:
        yield temporary
        for path in temporary.iterdir():
            if path.is_file():
                path.chmod(temporary.stat().st_mode & 0o666)  # so are those of safetensors
            sync(path)
        sync(temporary)
        try:
            os.replace(temporary, final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            replaced = final.with_name(f"{TEMPORARY}replaced-{final.name}-{os.getpid()}")
            os.replace(final, replaced)
            os.replace(temporary, final)
            shutil.rmtree(replaced, ignore_errors=True)
        sync(final.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_temporary(folder: Path) -> None:
    """Remove what interrupted writes left behind; only while nobody else may be writing there.

    What was being replaced comes back if nothing had come in its place yet.
    """
    for path in folder.glob(f"{TEMPORARY}*"):
        replaced = _REPLACED.fullmatch(path.name)
        if replaced and not (folder / replaced[1]).exists():
            path.rename(folder / replaced[1])
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def plain_file(folder: Path, name: str) -> Path:
    """A regular file directly in a folder, by a name that came from a file; ValueError for any other."""
    if name in ("", ".", "..") or any(c in name for c in "/\\\0") or len(name) > 200:
        raise ValueError(f"{name!r} is not the name of a file in {folder}")
    path = folder / name
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    if not stat.S_ISREG(kind):
        raise ValueError(f"{path} is not a regular file")
    return path


_held: set[int] = set()  # descriptors of locks


def _let_go() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)  # readers of data would keep the lock of a trainer that died


class BusyError(RuntimeError):
    """Another process is at work in a folder."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Be the only one at work in a folder. The lock goes with its process, however that ends."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    _held.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 20).decode(errors="replace").strip() or "unknown"
            raise BusyError(
                f"another process (number {owner}) is at work in {folder}; wait for it or take another folder"
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        if descriptor in _held:  # not so in a fork
            _held.remove(descriptor)
            os.close(descriptor)
