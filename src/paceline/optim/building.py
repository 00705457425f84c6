"""Small libraries in C and C++, built when they are first asked for, with whatever compiler there is.

The result is kept under `PACELINE_CACHE` (~/.cache/paceline) by a key of all that it is made of.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from paceline.cache import cache_folder

_COMPILERS = {".c": ("CC", ("cc", "gcc", "clang")), ".cpp": ("CXX", ("c++", "g++", "clang++"))}
"""Ending of a source → what names a compiler, and how it is called otherwise."""


def built(
    source: Path,
    name: str,
    flags: tuple[str, ...],
    about: tuple[str, ...] = (),
    trial: Callable[[Path], str | None] | None = None,
) -> Path:
    """The shared library of a source, built if it is not there yet; RuntimeError or OSError if it cannot be.

    `about` is what else it depends on. A `trial` of what was built says why it is of no use, which is kept in
    its place, or None; what it raises is not kept.
    """
    variable, names = _COMPILERS[source.suffix]
    compiler = os.environ.get(variable) or next(filter(None, map(shutil.which, names)), None)
    parts = (source.read_text(), " ".join(flags), platform.platform(), str(compiler), *about)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = cache_folder() / "native"
    library, refused = (folder / f"{name}-{key}.{ending}" for ending in ("so", "txt"))
    if library.exists():
        return library
    if refused.exists():
        raise RuntimeError(refused.read_text())
    if compiler is None:
        raise RuntimeError(
            f"needs a small function of {source.name}, and there is no compiler to build it: "
            f"neither {', '.join(names[:-1])} nor {names[-1]}, and {variable} is not set"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as room:
        made = Path(room) / library.name
        command = [*compiler.split(), str(source), *flags, "-o", str(made), "-lm"]
        ran = subprocess.run(command, capture_output=True, text=True)
        if ran.returncode != 0:
            raise RuntimeError(
                f"needs {source.name}, which {compiler} could not build; {variable} names another compiler. "
                f"It said: {ran.stderr.strip()[-500:]}"
            )
        reason = None if trial is None else trial(made)
        if reason is not None:
            text = Path(room) / refused.name
            text.write_text(reason)
            text.replace(refused)
            raise RuntimeError(reason)
        made.replace(library)  # whole or not there, also for a process that builds it at the same time
    return library
