"""The update on a CPU in one pass over memory: native.c, built when it is first asked for.

It is plain C and takes a few seconds to build, with whatever C compiler there is; the result is kept under
`PACELINE_CACHE` (~/.cache/paceline) by a key of its source, and is the same to the bit for any number of
threads. Equal to `pace_step_` to a few units in the last place, on weights and state; averages in few bits
are opened and closed to the bit as storage.py does it.
"""

import ctypes
import math
import os
from array import array
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

from paceline.optim.building import built
from paceline.optim.members import Ages, Members, is_plain
from paceline.optim.onepass import (
    NOT_ALIKE,
    NOT_PLAIN,
    Numbers,
    averages_of,
    lie_alike,
    numbers_of,
    row_of,
    seed_averages_,
)
from paceline.optim.recipe import Recipe
from paceline.optim.rule import Scalar, Slot, at_count
from paceline.optim.state import State, scale_key

SOURCE = Path(__file__).with_name("native.c")
# No fused multiply-add, no errno: results do not depend on the CPU, and square roots are vectors. Loops over
# a line are made vectors, not sixteen statements each, which GCC does not always put together again.
FLAGS = (
    *("-std=gnu11", "-O3", "-fPIC", "-shared"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("--param", "max-completely-peel-times=8"),
)
FEWEST = 2**16
"""Elements of a thread; below, handing the work over costs more than it saves."""

BLOCK = 1024
"""As in native.c."""
_PULLS = {"uniform": 2, "paper": 1, "scaled": 1}
_STORAGES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


# --- Building it ------------------------------------------------------------------------------------


class _Scalars(ctypes.Structure):
    """Scalars of native.c."""

    _fields_ = [(name, ctypes.c_float) for name in Numbers._fields]


@cache
def _library() -> Any:
    library, number, pointer = ctypes.CDLL(str(_built())), ctypes.c_int64, ctypes.c_void_p
    library.paceline_sums.argtypes = [pointer, number, number, number, pointer]
    library.paceline_step.argtypes = [*library.paceline_sums.argtypes, pointer, *[ctypes.c_int] * 4, number]
    library.paceline_totals.argtypes = [pointer, number, pointer, pointer]
    for function in (library.paceline_step, library.paceline_sums, library.paceline_totals):
        function.restype = None
    return library


def _built() -> Path:
    """The shared library, built if it is not there yet."""
    return built(SOURCE, "step", FLAGS)


# --- The step ---------------------------------------------------------------------------------------


def refusal(slot: Slot) -> str | None:
    """Why a parameter cannot take this path, in words that follow its name; None if it can."""
    live = slot.live
    arrays = [array for array in slot[:4] if array is not None]
    if any(array.dtype != torch.float32 for array in arrays) or slot.average.dtype not in _STORAGES:
        other = "" if slot.grad.dtype == live.dtype else f", its gradient {slot.grad.dtype}"
        return f"is {live.dtype}{other}; fused=True on a CPU is for float32"
    if not lie_alike(slot):
        return NOT_ALIKE
    if not is_plain(slot.grad):
        return NOT_PLAIN
    return None


@cache
def missing() -> str | None:
    """What this path lacks on this machine, in words that follow "fused=True on a CPU"; None: nothing."""
    try:
        _library()
    except RuntimeError as error:
        return str(error)
    except OSError as error:  # of a compiler that is not there, or a folder that cannot be made
        return f"needs a small function in C, which could not be built: {error}"
    return None


def native_step_(members: Members, recipe: Recipe, scale: Scalar = 1.0, factor: Scalar = 1.0) -> None:
    """One step for all members, in place, whose counts are advanced already; the rest as in `pace_step_`."""
    ages = members.ages()
    for arrays in _alike(members, ages):
        arrays.set_gradients(members.addresses)
        at = at_count(ages.at(arrays.places[0]), recipe, float(scale))
        if at.t == 1 and not arrays.storage:  # else C does it
            rests = members.rests()
            seed_averages_([rests[i] for i in arrays.places])
        scalars = _Scalars(*numbers_of(at, recipe, float(at.scale), float(factor)))
        # What live has beyond an average that rests changes too.
        averages = arrays.averages if at.averaging or arrays.storage else 0
        pull = _PULLS[recipe.gain] if at.pulling else 0
        lookahead = recipe.gap == "lookahead" and pull > 0  # else it is all the same
        kinds = pull, lookahead, averages, arrays.storage
        arrays.call(_library().paceline_step, ctypes.byref(scalars), *kinds, int(at.t))
        # What it was before is as good: whoever changes a moment in between only has them added up anew.
        if recipe.gain != "scaled" or not pull:
            arrays.added_up = None
        elif arrays.added_up is None:
            arrays.added_up = members.changes_of_moments()


def root_of_mean(members: Members, beta2: float, elements: int, capturable: bool) -> float | None:
    """The root of the sum of v̂ over all members, without those with a NaN or Inf, over so many elements; None
    if none has stepped."""
    ages = members.ages()
    stepped = [arrays for arrays in _alike(members, ages) if ages.at(arrays.places[0]) > 0]
    if not stepped:
        return None
    parts = []
    for arrays in stepped:
        correction = 1 - beta2 ** ages.at(arrays.places[0])
        parts += [total / correction for total in arrays.second_moments(members.changes_of_moments())]
    return math.sqrt(max(math.fsum(filter(math.isfinite, parts)), 0.0) / elements)


def _alike(members: Members, ages: Ages) -> "list[_Arrays]":
    """The arrays of members of one age each."""
    if members.memo.get("younger") != ages.younger:
        places: dict[float, list[int]] = {}
        rests = members.rests()
        for i in range(len(rests)):
            places.setdefault(ages.at(i), []).append(i)
        members.memo["younger"] = ages.younger
        members.memo["arrays"] = [_Arrays(rests, members.states, own) for own in places.values()]
    found: list[_Arrays] = members.memo["arrays"]
    return found


_COLUMNS = 9
"""Of a Tensor of native.c."""


class _Arrays:
    """Tensors of native.c, one a slot, all of one age, and the sums of their blocks."""

    def __init__(self, rests: list[Slot], states: list[State], places: list[int]) -> None:
        self.places = places
        """Which of the members they are."""
        slots = [rests[i] for i in places]
        self.averages = averages_of(slots[0])
        self.storage = _STORAGES[slots[0].average.dtype]
        self.added_up: int | None = None
        """What `changes_of_moments` was at the step that left the sums which are at hand."""
        rows = [row_of(slot) + _scales_of(states[i]) for i, slot in zip(places, slots, strict=True)]
        self._tensors = array("q", [number for row in rows for number in row])
        elements = self._tensors[6::_COLUMNS]
        self._count, self._elements = len(places), sum(elements)
        self._sums = array("d", bytes(8 * sum(-(-n // BLOCK) for n in elements)))

    def set_gradients(self, addresses: "array[int]") -> None:
        """Where they are at this step; those of all members."""
        whole = len(addresses) == len(self.places)
        self._tensors[1::_COLUMNS] = addresses if whole else array("q", [addresses[i] for i in self.places])

    def second_moments(self, changes: int | None) -> list[float]:
        """The sum of each: as the last step left it or, after changes, anew, to the same bits."""
        if changes is None or self.added_up != changes:
            self.call(_library().paceline_sums)
            self.added_up = changes
        return self.totals()

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


def _scales_of(state: State) -> tuple[int, int]:
    """Where those of averages in int8 are; 0 of others."""
    average, returned = (state.get(scale_key(name)) for name in ("average", "returned"))
    return 0 if average is None else average.data_ptr(), 0 if returned is None else returned.data_ptr()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="paceline")


if hasattr(os, "register_at_fork"):  # a child has none of its parent's threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
