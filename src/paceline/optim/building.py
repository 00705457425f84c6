"""Small libraries in C, built when they are first asked for, with whatever C compiler there is.

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
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
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
            "needs a small function in C, and there is no compiler to build it: neither cc, gcc nor clang, "
            "and CC is not set"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as room:
        made = Path(room) / library.name
        command = [*compiler.split(), *flags, "-o", str(made), str(source), "-lm"]
        ran = subprocess.run(command, capture_output=True, text=True)
        if ran.returncode != 0:
            raise RuntimeError(
                f"needs {source.name}, which {compiler} could not build; CC names another compiler. It said: "
                f"{ran.stderr.strip()[-500:]}"
            )
        reason = None if trial is None else trial(made)
        if reason is not None:
            text = Path(room) / refused.name
            text.write_text(reason)
            text.replace(refused)
            raise RuntimeError(reason)
        made.replace(library)  # whole or not there, also for a process that builds it at the same time
    return library
