"""The update on a GPU in one pass over memory: one launch of kernel.py for all tensors of a kind."""

import math
import sys
import weakref
from array import array
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from paceline.optim import chunking
from paceline.optim.chunking import Few, chunks, segments
from paceline.optim.launching import Kernel
from paceline.optim.onepass import (
    NOT_ALIKE,
    Numbers,
    averages_of,
    is_on_gpu,
    lie_alike,
    log_of,
    numbers_of,
    row_of,
    steady_of,
)
from paceline.optim.recipe import Recipe
from paceline.optim.rule import NUMERATORS, Scalar, Slot, at_count, pulls_ever
from paceline.optim.state import State, scale_key
from paceline.optim.storage import BLOCK

TILES = {
    (torch.float32, 1): (1024, 4),
    (torch.float32, 2): (1024, 4),
    (torch.bfloat16, 1): (256, 2),
    (torch.bfloat16, 2): (512, 4),
    (torch.int8, 1): (256, 2),
    (torch.int8, 2): (512, 2),
}
"""Storage of averages and how many there are → elements and warps of a program, as they are fastest on an
H200."""

LARGE = 2**26
"""Elements of a launch that keeps what it loads in the GPU's second cache for as long as it can. On an H200
that takes 2 % less time, though nothing is read twice; but whoever comes next finds a part of it taken, and
forward and backward of a small GPT lose more by that than its steps gain (benchmarks/kept.py)."""

SPARES = 8
"""How many captures there may be between two steps that are not captured."""

DEVICES = ("cuda",)

STORED = (torch.float32, torch.bfloat16, torch.int8)
"""Averages, or residuals."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_NO_NUMBERS = (0.0,) * (len(Numbers._fields) + 1)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def missing(kind: str) -> str | None:
    """Return what fused=True lacks on this kind of device, None if nothing."""
    if kind not in DEVICES:
        return "needs a GPU with CUDA"
    return None if _has_triton() else "needs Triton, which is not installed"


def refusal(slot: Slot) -> str | None:
    """Return why a parameter cannot take this path, in words that follow its name; None if it can."""
    live = slot.live
    if (lacking := missing(live.device.type)) is not None:
        return f"is on {live.device.type}: fused=True {lacking}; leave it out"
    for name, tensor in (("", live), ("has a gradient that ", slot.grad)):
        if tensor.dtype not in DTYPES:
            return f"{name}is {tensor.dtype}; fused=True is for float32, bfloat16 and float16"
    if slot.average.dtype not in STORED:
        return f"is {live.dtype} and its state is of another precision than PACE gave it"
    if not lie_alike(slot):
        return NOT_ALIKE
    for name, tensor in (("", live), ("has a gradient that ", slot.grad)):
        if not is_plain(tensor):
            return f"{name}is not plain memory (a wrapper, a negative view); clone it"
    return None


class Table:
    """The launches of one parameter group, kept while its arrays are at the same addresses."""

    def __init__(self) -> None:
        self._rows: list[tuple[object, ...]] = []
        self._launches: list[_Launch] = []
        # A captured graph goes on to read what it was captured with, and nobody tells us of its end.
        self._captured: list[object] = []

    def update(self, slots: list[Slot], states: list[State], on_device: bool) -> None:
        """Make launches for these arrays unless those of the last step are as good."""
        ages = [0.0 if on_device else slot.step.item() for slot in slots]
        rows = [
            (*_row(slot, state), *_kind(slot, state), slot.step.data_ptr(), age - ages[0])
            for slot, state, age in zip(slots, states, ages, strict=True)
        ]
        # No stream captures before CUDA is initialized, and asking would initialize it.
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
        if rows == self._rows:
            if capturing:
                self._captured.append((self._launches, slots, [list(state.values()) for state in states]))
            return
        if capturing:
            raise RuntimeError(
                "take one step before you capture: with fused=True the first step, and the first after a "
                "change of parameters or state, tells the device where they are"
            )
        alike: dict[object, list[int]] = {}
        for i, (slot, state, age) in enumerate(zip(slots, states, ages, strict=True)):
            if slot.live.numel():
                alike.setdefault((*_kind(slot, state), age), []).append(i)
        self._rows = rows
        with torch.inference_mode(False):  # else no later step could write to what a launch keeps
            self._launches = [_Launch(slots, states, places) for places in alike.values()]

    def step_(self, slots: list[Slot], recipe: Recipe, scale: Scalar = 1.0) -> None:
        """Take one step, in place, whose counts are advanced already; `scale` as in `pace_step_`."""
        for launch in self._launches:
            own = [slots[i] for i in launch.places]
            launch.set_gradients(array("q", [slot.grad.data_ptr() for slot in own]))
            launch.step_(_count(own, recipe), recipe, scale)
            # As before the step: whoever changes a moment in between only has them added up anew.
            if not launch.leaves_sums(recipe):
                launch.added_up = None
            elif launch.added_up is None:
                launch.added_up = launch.changes_of_moments(own)

    def root_of_mean(self, slots: list[Slot], recipe: Recipe, elements: int) -> Tensor | None:
        """Return the root of the sum of v̂ over all slots, without those with a NaN or Inf, over so many
        elements, () float32; None if none has stepped."""
        root: Tensor | None = None
        for launch in self._launches:
            own = [slots[i] for i in launch.places]
            launch.elements, count = elements, _count(own, recipe)
            if recipe.capturable or count > 0:
                changes = None if recipe.capturable else launch.changes_of_moments(own)
                part = launch.root_of_mean(recipe.betas[1], count, elements, changes)
                root = part if root is None else torch.hypot(root, part.to(root))
        return root


def _count(slots: list[Slot], recipe: Recipe) -> float:
    """The steps that each has taken; NaN if they are counted on the device."""
    return math.nan if recipe.capturable else slots[0].step.item()


def is_plain(tensor: Tensor) -> bool:
    """Whether its elements are what lies at its address: no wrapper, no negative view, no unwritten zeros."""
    known = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return known and not tensor.is_neg() and (tensor.data_ptr() != 0 or tensor.numel() == 0)


def _row(slot: Slot, state: State) -> tuple[int, ...]:
    """The row of a slot in the table of kernel.py."""
    others = (state.get(scale_key(name)) for name in ("average", "returned"))
    own = row_of(slot)
    return (own[0], *own[2:], *(0 if other is None else other.data_ptr() for other in others))


def _kind(slot: Slot, state: State) -> tuple[object, ...]:
    """What all slots of a launch have in common, but their age."""
    live, dtypes = slot.live, (slot.grad.dtype, slot.exp_avg_sq.dtype, slot.average.dtype)
    aligned = all(array.data_ptr() % 16 == 0 for array in (live, *slot[2:6]) if array is not None)
    return live.device, live.dtype, *dtypes, averages_of(slot), slot.exp_avg is not None, aligned


class _Launch:
    """Tensors that one launch advances, and where they are: of one device, precision, storage and age."""

    def __init__(self, all_slots: list[Slot], states: list[State], places: list[int]) -> None:
        self.places = places
        """Which of the slots they are."""
        slots = [all_slots[i] for i in places]
        live = slots[0].live
        self._device, self._dtype, self._stored = live.device, live.dtype, slots[0].average.dtype
        self._grad_dtype, self._moments = slots[0].grad.dtype, slots[0].exp_avg_sq.dtype
        self._momentum, self._averages = slots[0].exp_avg is not None, averages_of(slots[0])
        self._block, self._warps = TILES[self._stored, self._averages]
        self._aligned = bool(_kind(slots[0], states[places[0]])[-1])
        self._sizes = tuple(slot.live.numel() for slot in slots)
        rows = [_row(slot, states[i]) for slot, i in zip(slots, places, strict=True)]
        self._table = torch.tensor(rows, dtype=torch.int64).to(self._device)
        self._chunks = chunks(self._device, self._sizes, self._block)
        self._programs = len(self._chunks)
        self._kept = "evict_last" if sum(self._sizes) >= LARGE else ""
        self._kernels: dict[tuple[object, ...], Kernel] = {}
        # Where warps take the largest of blocks of int8, they sum up those too, and none waits for another.
        self._parts = self._block // BLOCK if self._stored == torch.int8 else 1
        self._sums = torch.empty((self._programs, self._parts), dtype=torch.float32, device=self._device)
        self._segments = segments(self._device, self._sizes, self._block, self._parts)
        self._totals = torch.empty(len(self._segments.places), dtype=torch.float64, device=self._device)
        self._few = chunking.few(self._device, self._sizes, self._block, self._parts)
        self._arrived = torch.zeros((), dtype=torch.int32, device=self._device)
        self._grads = torch.zeros(len(places), dtype=torch.int64, device=self._device)
        self._sent: array[int] = array("q")
        self._grads_aligned = False
        self._one = torch.ones((), dtype=torch.float32, device=self._device)
        # A step that leaves a root for the next may itself read that which the last has left.
        self._root, self._next_root = torch.empty_like(self._one), torch.empty_like(self._one)
        self._share: float | None = None  # what sums count in `_root`, if a step has left it
        self.elements = 0
        """Of which the mean of second moments is taken; of other launches too. 0: of none."""
        ages = [slot.step.data_ptr() if slot.step.device == self._device else 0 for slot in slots]
        self._counts = torch.tensor(ages, dtype=torch.int64).to(self._device)
        # Pinned memory for captures: there before one begins, and for as long as it is replayed.
        self._spares = list[Tensor]()
        self._captured = dict[tuple[int, ...], Tensor]()
        self.added_up: int | None = None
        """What `changes_of_moments` was at the step that left the sums which are at hand; None: none did."""
        self._guard = torch.cuda.device(self._device if self._device.type == "cuda" else -1)
        self._seen: list[weakref.ref[Tensor]] = []

    def changes_of_moments(self, slots: list[Slot]) -> int | None:
        """Return a number that grows if anybody else changes a second moment; None if nobody counts."""
        moments = [slot.exp_avg_sq for slot in slots]
        if len(moments) != len(self._seen) or any(r() is not v for r, v in zip(self._seen, moments)):
            self._seen, self.added_up = list(map(weakref.ref, moments)), None
        return None if any(map(Tensor.is_inference, moments)) else sum(v._version for v in moments)

    def set_gradients(self, addresses: "array[int]") -> None:
        """Tell the device where they are at this step."""
        capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        # They often come back to where they were, with nothing to send; but a replay sends those of its own.
        if addresses == self._sent and not capturing and not self._captured:
            return
        if capturing:  # what is replayed is the copy, so that what is copied has to stay
            self._grads.copy_(self._pinned(addresses), non_blocking=True)
        else:
            self._grads.copy_(torch.frombuffer(addresses, dtype=torch.int64), non_blocking=True)
        self._sent = addresses
        self._grads_aligned = _are_aligned(addresses)

    def _pinned(self, addresses: "array[int]") -> Tensor:
        """Addresses in memory that stays as it is."""
        key = tuple(addresses)
        if key not in self._captured:
            if not self._spares:
                raise RuntimeError(
                    f"more than {SPARES} captures of a fused step since the last that was not captured: take "
                    "such a step between"
                )
            self._captured[key] = self._spares.pop().copy_(torch.frombuffer(addresses, dtype=torch.int64))
        return self._captured[key]

    def step_(self, count: float, recipe: Recipe, scale: Scalar) -> None:
        """Take the step of that count; of NaN, if they are counted on the device."""
        on_device = recipe.capturable or is_on_gpu(recipe.lr)
        # What a kernel does not look at is None: some are slower by up to 4 % with arguments of no use.
        table, ages, t = None, None, 0
        if recipe.capturable and self._device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            while len(self._spares) < SPARES:
                self._spares.append(torch.empty(len(self.places), dtype=torch.int64, pin_memory=True))
        if on_device:
            numbers: tuple[Scalar, ...] = _NO_NUMBERS
            table, ages = self._numbers_on_device(count, recipe)
            pulls, averages = pulls_ever(recipe), self._averages
        else:
            at, t = at_count(count, recipe), int(count)
            numbers = (*numbers_of(at, recipe, 1.0), float(count == 1))
            pulls, averages = bool(at.pulling), self._averages if at.averaging else 0
        pull = "none" if not pulls else "over" if recipe.gain in NUMERATORS else "uniform"
        multiple = self._number(scale) if recipe.gain == "scaled" and pulls else self._one
        # What live has beyond an average that rests changes too; and at a first step, which may be one that
        # moves none, they begin as live.
        if self._stored != torch.float32 or count == 1:
            averages = self._averages
        few = self._few if self.leaves_sums(recipe) and self.elements and not recipe.capturable else None
        share = 0.0 if few is None else _share(recipe.betas[1], count, self.elements)
        how = (
            pull, averages, recipe.gap == "lookahead" and pull != "none",
            self._parts if self.leaves_sums(recipe) else 0,
            on_device, self._grads_aligned, few is not None,
        )  # fmt: skip
        self._run(
            self._kernels.get(how) or self._step_kernel(how),
            (
                self._table, self._grads, self._chunks, multiple,
                self._sums, *self._places_of_root(few, self._next_root),
                table, ages, t, None if few is None else share, *numbers,
            ),
        )  # fmt: skip
        self._share = None
        if few is not None:
            self._share, self._root, self._next_root = share, self._next_root, self._root

    def _step_kernel(self, how: tuple[Any, ...]) -> Kernel:
        from paceline.optim import kernel

        pull, averages, lookahead, sums, on_device, grads_aligned, root = how
        constants = {
            "OF": self._dtype, "GRAD": self._grad_dtype, "MOMENTS": self._moments,
            "MOMENTUM": self._momentum, "STORAGE": self._stored,
            "PULL": pull, "LOOKAHEAD": lookahead, "AVERAGES": averages, "SUMS": sums,
            **self._constants_of_root(root), "ON_DEVICE": on_device, "ALIGNED": self._aligned,
            "GRAD_ALIGNED": grads_aligned, "KEPT": self._kept, "BLOCK": self._block,
        }  # fmt: skip
        return self._kernel(how, kernel.step, self._programs, constants, self._warps)

    @staticmethod
    def leaves_sums(recipe: Recipe) -> bool:
        """Whether a step adds up second moments, for the next."""
        return recipe.gain == "scaled" and recipe.pullback_strength != 0

    def _numbers_on_device(self, count: float, recipe: Recipe) -> tuple[Tensor, Tensor]:
        """As `step` of kernel.py takes them: a row for each tensor, and how old each is."""
        from paceline.optim import kernel, kernel_before

        tensors, lr = len(self.places), recipe.lr
        table = torch.empty((tensors, kernel.NUMBERS.value), dtype=torch.float32, device=self._device)
        ages = torch.empty(tensors, dtype=torch.int64, device=self._device)
        there = lr.to(self._device) if isinstance(lr, Tensor) and is_on_gpu(lr) else None
        every = int(min(recipe.update_every, 2**31 - 1))  # also of NumPy, which Triton does not take
        own = self._counts, self._one if there is None else there, table, ages, tensors, every
        arguments = *own, count, *steady_of(recipe)
        constants = {
            "ON_DEVICE": recipe.capturable, "LR": None if there is None else there.dtype,
            "OVER": recipe.gain in NUMERATORS, "BLOCK": 32,
        }  # fmt: skip
        how = "numbers", *constants.values()
        self._run(self._kernel(how, kernel_before.numbers, -(-tensors // 32), constants, 1), arguments)
        return table, ages

    def _number(self, number: Scalar) -> Tensor:
        """On the device; to read it here would be to wait for all that was asked before."""
        if number is self._root:  # as mostly, and to ask torch takes longer
            return self._root
        if isinstance(number, Tensor):
            return number.to(self._device, torch.float32)
        return self._one if number == 1 else torch.full_like(self._one, number)

    def root_of_mean(self, beta2: float, count: float, elements: int, changes: int | None) -> Tensor:
        """The root of the sum of all v̂ over so many elements, without tensors that have a NaN or Inf: as the
        last step, of that count, left v; of NaN, if they are counted on the device. Of sums that are at
        hand it is known how many `changes` there were. () float32, until it is asked for again."""
        anew = math.isnan(count)
        stale = anew or self.added_up is None or self.added_up != changes
        self.added_up = changes
        share = 1 / elements if anew else _share(beta2, count, elements)
        few = None if anew else self._few
        if stale or (few is not None and self._share != share):
            self._add_up(few, share)
        self._share = share
        if few is not None:
            return self._root
        places, starts, _ = self._segments
        own = self._sums, places, self._totals, self._arrived, starts, self._counts
        made = self._kernels.get(("mean", anew)) or self._mean_kernel(anew)
        self._run(made, (*own, log_of(beta2), share, self._root))
        return self._root

    def _mean_kernel(self, anew: bool) -> Kernel:
        from paceline.optim.kernel_before import mean

        constants = {"ON_DEVICE": anew, "WIDTH": chunking.WIDTH, **self._segments.shape}
        return self._kernel(("mean", anew), mean, len(self._segments.places), constants, 16)

    def _add_up(self, few: Few | None, share: float) -> None:
        from paceline.optim.kernel_before import add_up

        root = few is not None
        constants = {"MOMENTS": self._moments, "SUMS": self._parts, **self._constants_of_root(root)}
        constants |= {"ALIGNED": self._aligned, "BLOCK": self._block}
        made = self._kernel(("add_up", root), add_up, self._programs, constants, self._warps)
        places = self._places_of_root(few, self._root)
        self._run(made, (self._table, self._chunks, self._sums, *places, share if root else None))

    def _places_of_root(self, few: Few | None, root: Tensor) -> tuple[Tensor | None, ...]:
        """`starts`, `arrived` and `root` of a kernel that leaves one, or of one that does not."""
        return (None, None, None) if few is None else (few.starts, self._arrived, root)

    def _constants_of_root(self, root: bool) -> dict[str, Any]:
        tensors, parts = self._few.shape if root and self._few is not None else (0, 0)
        return {"ROOT": root, "TENSORS": tensors, "PARTS": parts}

    def _kernel(
        self, how: tuple[object, ...], function: Any, programs: int, constants: dict[str, Any], warps: int
    ) -> Kernel:
        """That of a function of kernel.py, which is known by `how` from here on."""
        if how not in self._kernels:
            self._kernels[how] = Kernel(function, programs, constants, warps, self._device)
        return self._kernels[how]

    def _run(self, kernel: Kernel, arguments: tuple[Any, ...]) -> None:
        if self._device.type == "cuda" and torch.cuda.current_device() == self._device.index:
            kernel(arguments)  # as mostly: to change devices and back takes longer than to ask
        else:
            with self._guard:
                kernel(arguments)


def _share(beta2: float, count: float, elements: int) -> float:
    """What a sum of second moments counts in the mean of v̂, after so many steps."""
    corrected: float = 1 - beta2**count
    return 1 / (elements * corrected)


def _are_aligned(addresses: "array[int]") -> bool:
    """Whether all are multiples of 16 bytes: of one number that they are digits of, a tenth of the time."""
    return int.from_bytes(addresses.tobytes(), sys.byteorder) & _last_bits(len(addresses)) == 0


@lru_cache(maxsize=64)
def _last_bits(count: int) -> int:
    return int.from_bytes(array("q", [15]) * count, sys.byteorder)
