"""The update on a GPU in one pass over memory: one launch of kernel.py for all tensors of a kind."""

import math
import sys
from array import array
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from paceline.optim import chunking
from paceline.optim.chunking import Few, chunks, segments
from paceline.optim.launching import Kernel
from paceline.optim.members import Ages, Members, is_plain
from paceline.optim.onepass import (
    NOT_ALIKE,
    NOT_PLAIN,
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
from paceline.optim.sharded import local
from paceline.optim.state import State, scale_key
from paceline.optim.storage import BLOCK
from paceline.optim.told import Tell, Teller, Told

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

STORED = (torch.float32, torch.bfloat16, torch.int8)
"""Averages, or residuals."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_NO_NUMBERS = (0.0,) * (len(Numbers._fields) + 1)


def refusal(slot: Slot) -> str | None:
    """Why a parameter cannot take this path, in words that follow its name; None if it can."""
    live = slot.live
    for name, tensor in (("", live), ("has a gradient that ", slot.grad)):
        if tensor.dtype not in DTYPES:
            return f"{name}is {tensor.dtype}; fused=True on a GPU is for float32, bfloat16 and float16"
    if slot.average.dtype not in STORED:
        return f"is {live.dtype} and its state is of another precision than PACE gave it"
    if not lie_alike(slot):
        return NOT_ALIKE
    if not is_plain(slot.grad):
        return NOT_PLAIN
    return None


@cache
def missing() -> str | None:
    """What this path lacks on this machine, in words that follow "fused=True on a GPU"; None: nothing."""
    return None if find_spec("triton") else "needs Triton, which is not installed"


def fused_step_(
    members: Members,
    recipe: Recipe,
    scale: Scalar = 1.0,
    factor: Scalar = 1.0,
    skip: Tensor | None = None,
    tell: Tell | None = None,
) -> None:
    """One step for all members, in place, whose counts are advanced already; `scale` and `factor` as in
    `pace_step_`. Where `skip`, () on the device, is not 0, nothing changes. `tell` gets what was done."""
    ages = _ages(members, recipe.capturable)
    for launch in _launches(members, ages):
        _set_gradients(launch, members)
        told = launch.step_(ages.at(launch.places[0]), recipe, scale, factor, skip, tell is not None)
        # As before the step: whoever changes a moment in between only has them added up anew.
        if not launch.leaves_sums(recipe):
            launch.added_up = None
        elif launch.added_up is None:
            launch.added_up = members.changes_of_moments()
        if tell is not None:
            tell.update(zip((members.parameters[i] for i in launch.places), told, strict=True))


def sums_of_gradients(members: Members, capturable: bool) -> list[Tensor]:
    """As in sharded.py, of all members."""
    found = []
    for launch in _launches(members, _ages(members, capturable)):
        _set_gradients(launch, members)
        found.append(launch.sums_of_gradients())
    return found


def _set_gradients(launch: "_Launch", members: Members) -> None:
    if launch.set_gradients(members.addresses):
        # What a replay reads has to stay, also where somebody replaces it.
        members.memo.setdefault("captured", []).append((launch, members.hold()))


def root_of_mean(members: Members, beta2: float, elements: int, capturable: bool) -> Tensor | None:
    """The root of the sum of v̂ over all members, without those with a NaN or Inf, over so many elements; None
    if none has stepped. () float32."""
    ages = _ages(members, capturable)
    root: Tensor | None = None
    for launch in _launches(members, ages):
        launch.elements = elements
        count = ages.at(launch.places[0])
        if capturable or count > 0:
            changes = None if capturable else members.changes_of_moments()
            part = launch.root_of_mean(beta2, count, elements, changes)
            root = part if root is None else torch.hypot(root, part.to(root))
    return root


def _ages(members: Members, capturable: bool) -> Ages:
    """How old each is; unknown to the host, and the same for all, if they are counted on the device."""
    return Ages(math.nan, []) if capturable else members.ages()


def _launches(members: Members, ages: Ages) -> "list[_Launch]":
    """One for all tensors of a device, a precision and an age."""
    if members.memo.get("younger") != ages.younger:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            raise RuntimeError(
                "take one step before you capture: with fused=True the first step, and the first after a "
                "change of parameters or state, tells the device where they are"
            )
        alike: dict[object, list[int]] = {}
        rests = members.rests()
        for i, (slot, grad) in enumerate(zip(rests, members.grads, strict=True)):
            if slot.live.numel():
                live, dtypes = slot.live, (grad.dtype, slot.exp_avg_sq.dtype, slot.average.dtype)
                kind = live.device, live.dtype, *dtypes, _is_aligned(slot, members.states[i])
                key = (*kind, ages.at(i) if ages.younger else None)
                alike.setdefault(key, []).append(i)
        members.memo["younger"] = ages.younger
        members.memo["launches"] = [_Launch(members, rests, places) for places in alike.values()]
    launches: list[_Launch] = members.memo["launches"]
    return launches


def _is_aligned(slot: Slot, state: State) -> bool:
    arrays = (*slot[:6], state.get("live_rest"))
    return all(local(array).data_ptr() % 16 == 0 for array in arrays if array is not None)


class _Launch:
    """Tensors that one launch advances, and where they are: of one device, precision, storage and age."""

    def __init__(self, members: Members, rests: list[Slot], places: list[int]) -> None:
        self.places = places
        """Which of the members they are."""
        slots = [rests[i] for i in places]
        live = slots[0].live
        self._device, self._dtype, self._stored = live.device, live.dtype, slots[0].average.dtype
        self._grad_dtype, self._moments = members.grads[places[0]].dtype, slots[0].exp_avg_sq.dtype
        self._momentum, self._averages = slots[0].exp_avg is not None, averages_of(slots[0])
        self._block, self._warps = TILES[self._stored, self._averages]
        self._aligned = _is_aligned(slots[0], members.states[places[0]])
        self._sizes = tuple(slot.live.numel() for slot in slots)
        rows = []
        for slot, i in zip(slots, places, strict=True):
            state = members.states[i]
            others = (state.get(key) for key in (scale_key("average"), scale_key("returned"), "live_rest"))
            addresses = (0 if other is None else local(other).data_ptr() for other in others)
            row = row_of(slot)
            rows.append((row[0], *row[2:], *addresses))
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
        # In the host's memory, which torch gives to others once it is free while the device may still write
        # there: these stay until that is done.
        averages = [average for slot in slots for average in (slot.average, slot.returned)]
        self._on_host = [each for each in averages if each is not None and each.device != live.device]
        self._done: torch.cuda.Event | None = None

    def __del__(self) -> None:
        done: torch.cuda.Event | None = getattr(self, "_done", None)
        if done is not None:
            done.synchronize()

    def set_gradients(self, addresses: "array[int]") -> bool:
        """Where they are at this step; those of all members. Whether that was captured."""
        capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        # They often come back to where they were, with nothing to send; but a replay sends those of its own.
        if addresses is self._sent and not capturing and not self._captured:
            return False
        whole = len(addresses) == len(self.places)
        own = addresses if whole else array("q", [addresses[i] for i in self.places])
        if capturing:  # what is replayed is the copy, so that what is copied has to stay
            self._grads.copy_(self._pinned(own), non_blocking=True)
        else:
            self._grads.copy_(torch.frombuffer(own, dtype=torch.int64), non_blocking=True)
        self._sent = addresses  # those of the members, made anew where any of them has moved
        self._grads_aligned = _are_aligned(own)
        return capturing

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

    def step_(
        self,
        count: float,
        recipe: Recipe,
        scale: Scalar,
        factor: Scalar = 1.0,
        skip: Tensor | None = None,
        tell: bool = False,
    ) -> list[Told]:
        """The step of that count; of NaN, if they are counted on the device. What it did to each, if it is to
        tell."""
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
        # What live has beyond an average that rests changes too; to tell of one is to load it; and at a first
        # step, which may be one that moves none, they begin as live.
        if self._stored != torch.float32 or tell or count == 1:
            averages = self._averages
        teller = Teller(self._device, self._sizes, self._block) if tell else None
        few = self._few if self.leaves_sums(recipe) and self.elements and not recipe.capturable else None
        share = 0.0 if few is None else _share(recipe.betas[1], count, self.elements)
        multiplies = isinstance(factor, Tensor) or factor != 1
        how = (
            pull, averages, recipe.rounding if self._dtype == torch.bfloat16 else "nearest",
            recipe.gap == "lookahead" and pull != "none", self._parts if self.leaves_sums(recipe) else 0,
            tell, multiplies, skip is not None, on_device, self._grads_aligned,
            few is not None,
        )  # fmt: skip
        self._run(
            self._kernels.get(how) or self._step_kernel(how),
            (
                self._table, self._grads, self._chunks, multiple,
                self._number(factor) if multiplies else None, None if skip is None else self._number(skip),
                self._sums, *self._places_of_root(few, self._next_root),
                *(teller.arrays if teller is not None else (None, None, None)),
                table, ages, t, None if few is None else share, *numbers,
            ),
        )  # fmt: skip
        self._share = None
        if few is not None:
            self._share, self._root, self._next_root = share, self._next_root, self._root
        if self._on_host and averages and not torch.cuda.is_current_stream_capturing():
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(self._device))
        return [] if teller is None else teller.told()

    def _step_kernel(self, how: tuple[Any, ...]) -> Kernel:
        from paceline.optim import kernel

        pull, averages, rounding, lookahead, sums, tell, factor, skip, on_device, grads_aligned, root = how
        constants = {
            "OF": self._dtype, "GRAD": self._grad_dtype, "MOMENTS": self._moments,
            "MOMENTUM": self._momentum, "ROUNDING": rounding, "STORAGE": self._stored,
            "PULL": pull, "LOOKAHEAD": lookahead, "AVERAGES": averages, "SUMS": sums,
            **self._constants_of_root(root), "TELL": tell,
            "FACTOR": factor, "SKIP": skip, "ON_DEVICE": on_device, "ALIGNED": self._aligned,
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

    def sums_of_gradients(self) -> Tensor:
        """(2,) float64: the sum of squares, and 0 or NaN."""
        from paceline.optim.kernel_before import squares

        sums = torch.empty((2, self._programs), dtype=torch.float32, device=self._device)
        constants = {"GRAD": self._grad_dtype, "ALIGNED": self._grads_aligned, "BLOCK": self._block}
        made = self._kernel(("squares", self._grads_aligned), squares, self._programs, constants, self._warps)
        self._run(made, (self._table, self._grads, self._chunks, sums))
        return sums.sum(1, dtype=torch.float64)

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
