"""The update on a CPU in one pass over memory: native.c, built when it is first asked for.

It is plain C and takes a second to build, with whatever C compiler there is; the result is kept under
`PACELINE_CACHE` (~/.cache/paceline) by a key of its source, and is the same to the bit for any number of
threads. Equal to `pace_step_` to a few units in the last place, on weights and state.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

from paceline.cache import cache_folder
from paceline.optim.onepass import (
    NOT_ALIKE,
    Numbers,
    averages_that_move,
    lie_alike,
    numbers_of,
    seed_averages_,
)
from paceline.optim.recipe import Recipe
from paceline.optim.rule import At, Scalar, Slot, at_step
from paceline.optim.sharded import mesh_of

SOURCE = Path(__file__).with_name("native.c")
# No fused multiply-add, no errno: results do not depend on the CPU, and square roots are vectors.
FLAGS = (
    *("-std=gnu11", "-O3", "-fPIC", "-shared"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
FEWEST = 2**16
"""Elements of a thread; below, handing the work over costs more than it saves."""

_PULLS = {"uniform": 2, "paper": 1, "scaled": 1}


# --- Building it ------------------------------------------------------------------------------------


class _Scalars(ctypes.Structure):
    """Scalars of native.c."""

    _fields_ = [(name, ctypes.c_float) for name in Numbers._fields]


@cache
def _function() -> Any:
    step = ctypes.CDLL(str(_built())).paceline_step
    step.restype = None
    number = ctypes.c_int64
    step.argtypes = [ctypes.c_void_p, number, number, number, ctypes.c_void_p, *[ctypes.c_int] * 4]
    return step


def _built() -> Path:
    """The shared library, built if it is not there yet."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    about = (" ".join(FLAGS), platform.platform(), str(compiler))
    key = hashlib.sha256("\0".join((SOURCE.read_text(), *about)).encode()).hexdigest()[:16]
    folder = cache_folder() / "native"
    library = folder / f"step-{key}.so"
    if library.exists():
        return library
    if compiler is None:
        raise RuntimeError(
            "fused=True on a CPU needs a small function in C, and there is no compiler to build it: neither "
            "cc, gcc nor clang, and CC is not set. Install one, or leave fused out"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as room:
        made = Path(room) / library.name
        command = [*compiler.split(), *FLAGS, "-o", str(made), str(SOURCE), "-lm"]
        ran = subprocess.run(command, capture_output=True, text=True)
        if ran.returncode != 0:
            raise RuntimeError(
                f"fused=True on a CPU: {compiler} could not build {SOURCE.name}; leave fused out, or name "
                f"another compiler in CC. It said: {ran.stderr.strip()[-500:]}"
            )
        made.replace(library)  # whole or not there, also for a process that builds it at the same time
    return library


# --- The step ---------------------------------------------------------------------------------------


def refusal(slot: Slot) -> str | None:
    """Why a parameter cannot take this path, in words that follow its name; None if it can."""
    live = slot.live
    if mesh_of(live) is not None:
        return "is sharded over several ranks, which fused=True does not support"
    arrays = [array for array in slot[:6] if array is not None]
    if any(array.dtype != torch.float32 for array in arrays):
        return f"is {live.dtype}; fused=True on a CPU is for float32"
    return None if lie_alike(slot) else NOT_ALIKE


def native_step_(slots: Sequence[Slot], recipe: Recipe, scale: Scalar = 1.0) -> None:
    """One step for all slots of a parameter group, in place; `scale` as in `pace_step_`."""
    torch._foreach_add_([slot.step for slot in slots], 1)
    alike: dict[float, list[Slot]] = {}
    for slot in slots:
        alike.setdefault(slot.step.item(), []).append(slot)
    for group in alike.values():
        _step_alike_(group, at_step(group[0].step, recipe, float(scale)), recipe)


def _step_alike_(slots: list[Slot], at: At, recipe: Recipe) -> None:
    """Slots of one step count."""
    seed_averages_(slots, at)
    rows = array("q", [number for slot in slots for number in _row(slot)])  # Tensor of native.c, one a slot
    scalars = _Scalars(*numbers_of(at, recipe, float(at.scale)))
    averages = averages_that_move(slots, at)
    pull = _PULLS[recipe.gain] if at.pulling else 0
    lookahead = int(recipe.gap == "lookahead" and averages > 0)
    step, (address, _), count = _function(), rows.buffer_info(), sum(rows[6::7])

    def part(begin: int, end: int) -> None:
        step(
            address, len(slots), begin, end, ctypes.byref(scalars), pull, lookahead, averages, recipe.maximize
        )

    threads = min(torch.get_num_threads(), count // FEWEST)
    if threads <= 1:
        part(0, count)
        return
    share = -(-count // threads)
    # ctypes lets go of the interpreter's lock, so that threads of Python are enough.
    list(_pool(threads).map(lambda i: part(i * share, min((i + 1) * share, count)), range(threads)))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="paceline")


if hasattr(os, "register_at_fork"):  # a child has none of its parent's threads
    os.register_at_fork(after_in_child=_pool.cache_clear)


def _row(slot: Slot) -> tuple[int, ...]:
    live, grad, exp_avg, exp_avg_sq, average, returned, _ = slot
    moments, second = (exp_avg.data_ptr(), exp_avg_sq.data_ptr()), average if returned is None else returned
    return live.data_ptr(), grad.data_ptr(), *moments, average.data_ptr(), second.data_ptr(), live.numel()
