"""The update on a CPU in one pass over memory: native.c, built when it is first asked for.

It is plain C and takes a few seconds to build, with whatever C compiler there is; the result is kept under
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
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from paceline.cache import cache_folder
from paceline.optim.onepass import (
    NOT_ALIKE,
    Numbers,
    averages_that_move,
    lie_alike,
    numbers_of,
    row_of,
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

BLOCK = 1024
"""As in native.c."""
_PULLS = {"uniform": 2, "paper": 1, "scaled": 1}


# --- Building it ------------------------------------------------------------------------------------


class _Scalars(ctypes.Structure):
    """Scalars of native.c."""

    _fields_ = [(name, ctypes.c_float) for name in Numbers._fields]


@cache
def _library() -> Any:
    library, number, pointer = ctypes.CDLL(str(_built())), ctypes.c_int64, ctypes.c_void_p
    library.paceline_sums.argtypes = [pointer, number, number, number, pointer]
    library.paceline_step.argtypes = [*library.paceline_sums.argtypes, pointer, *[ctypes.c_int] * 3]
    library.paceline_totals.argtypes = [pointer, number, pointer, pointer]
    for function in (library.paceline_step, library.paceline_sums, library.paceline_totals):
        function.restype = None
    return library


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
    arrays = _Arrays(slots)
    scalars = _Scalars(*numbers_of(at, recipe, float(at.scale)))
    averages = averages_that_move(slots, at)
    pull = _PULLS[recipe.gain] if at.pulling else 0
    lookahead = recipe.gap == "lookahead" and pull > 0  # else it is all the same
    how = (ctypes.byref(scalars), pull, lookahead, averages)
    arrays.call(_library().paceline_step, *how)
    if recipe.gain == "scaled" and pull:
        for slot, total in zip(slots, arrays.totals(), strict=True):
            _remember(slot.exp_avg_sq, total)
    elif _sums:  # they changed, which torch does not know
        for slot in slots:
            _sums.pop(id(slot.exp_avg_sq), None)


class _Arrays:
    """Tensors of native.c, one a slot, and the sums of their blocks."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._tensors = array("q", [number for slot in slots for number in row_of(slot)])
        elements = self._tensors[6::7]
        self._count, self._elements = len(slots), sum(elements)
        self._sums = array("d", bytes(8 * sum(-(-n // BLOCK) for n in elements)))

    def call(self, function: Any, *more: object) -> None:
        """A function of native.c on all elements, shared out over threads."""
        (tensors, _), (sums, _) = self._tensors.buffer_info(), self._sums.buffer_info()

        def part(begin: int, end: int) -> None:
            function(tensors, self._count, begin, end, sums, *more)

        threads = min(torch.get_num_threads(), self._elements // FEWEST)
        if threads <= 1:
            part(0, self._elements)
            return
        share = -(-self._elements // threads)
        ends = [(i * share, min((i + 1) * share, self._elements)) for i in range(threads)]
        # ctypes lets go of the interpreter's lock, so that threads of Python are enough.
        list(_pool(threads).map(lambda both: part(*both), ends))

    def totals(self) -> list[float]:
        """The sum of the second moments of each, after a call that left those of blocks."""
        found = array("d", bytes(8 * self._count))
        (tensors, _), (sums, _) = self._tensors.buffer_info(), self._sums.buffer_info()
        _library().paceline_totals(tensors, self._count, sums, found.buffer_info()[0])
        return found.tolist()


class _Sum(NamedTuple):
    """What a second moment came to, and how to see that it is the same and nobody changed it since."""

    total: float
    version: int
    address: int
    whose: ReferenceType[Tensor]


_sums: dict[int, _Sum] = {}
"""By the identity of the second moment, and gone with it."""


def _remember(moment: Tensor, total: float) -> None:
    key = id(moment)
    before = _sums.get(key)
    whose = before.whose if before else ref(moment, lambda _: _sums.pop(key, None))
    _sums[key] = _Sum(total, moment._version, moment.data_ptr(), whose)


def _remembered(moment: Tensor) -> float | None:
    sum_ = _sums.get(id(moment))
    if sum_ is None or (sum_.version, sum_.address) != (moment._version, moment.data_ptr()):
        return None
    return sum_.total


def sums_of(slots: Sequence[Slot]) -> list[float]:
    """The sum of each second moment: as the last step found it, or added up anew, to the same bits."""
    totals = [_remembered(slot.exp_avg_sq) for slot in slots]
    changed = [slot for slot, total in zip(slots, totals, strict=True) if total is None]
    if changed:
        arrays = _Arrays(changed)
        arrays.call(_library().paceline_sums)
        anew = iter(arrays.totals())
        return [next(anew) if total is None else total for total in totals]
    return [total for total in totals if total is not None]


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="paceline")


if hasattr(os, "register_at_fork"):  # a child has none of its parent's threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
