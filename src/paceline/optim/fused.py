"""The update on a GPU in one pass over memory: one launch of kernel.py for all tensors of a kind."""

import math
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from paceline.optim.members import Members, is_plain
from paceline.optim.moments import finite_sum
from paceline.optim.onepass import (
    NOT_ALIKE,
    NOT_PLAIN,
    Numbers,
    averages_that_move,
    lie_alike,
    numbers_of,
    numbers_on_device,
    row_of,
)
from paceline.optim.recipe import Recipe
from paceline.optim.rule import NUMERATORS, Scalar, Slot, at_count
from paceline.optim.sharded import mesh_of
from paceline.optim.state import scale_key

TILES = {torch.float32: (512, 2), torch.bfloat16: (512, 4), torch.int8: (512, 4)}
"""Storage of averages → elements and warps of a program, as they are fastest on an H200."""

WIDTH = 8192
"""Sums of chunks that are added at a time: one program does it for a tensor, and should not take long."""

SPARES = 8
"""How many captures there may be between two steps that are not captured."""

STORED = (torch.float32, torch.bfloat16, torch.int8)
"""Averages, or residuals."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refusal(slot: Slot) -> str | None:
    """Why a parameter cannot take this path, in words that follow its name; None if it can."""
    live = slot.live
    if mesh_of(live) is not None:
        return "is sharded over several ranks, which fused=True does not support"
    if live.dtype not in DTYPES:
        return f"is {live.dtype}; fused=True on a GPU is for float32, bfloat16 and float16"
    if slot.average.dtype not in STORED or not slot.exp_avg.dtype == slot.exp_avg_sq.dtype == live.dtype:
        return f"is {live.dtype} and its state is of another precision than PACE gave it"
    if not lie_alike(slot):
        return NOT_ALIKE
    if not is_plain(slot.grad):
        return NOT_PLAIN
    if find_spec("triton") is None:
        return f"is on {live.device}, where fused=True needs Triton, which is not installed; leave fused out"
    return None


def fused_step_(members: Members, recipe: Recipe, scale: Scalar = 1.0) -> None:
    """One step for all members, in place, whose counts are advanced already; `scale` as in `pace_step_`."""
    counts = _counts(members, recipe.capturable)
    for launch in _launches(members, counts):
        if launch.set_gradients(members.addresses):
            members.memo.setdefault("captured", []).append(launch)
        launch.step_(counts[launch.places[0]], recipe, scale)


def energy_of(members: Members, beta2: float, capturable: bool) -> Tensor | None:
    """The sum of v̂ over all members, without those with a NaN or Inf; None if none has stepped."""
    counts = _counts(members, capturable)
    total: Tensor | None = None
    for launch in _launches(members, counts):
        count = launch.counts_on_device() if capturable else counts[launch.places[0]]
        if isinstance(count, Tensor) or count > 0:
            part = finite_sum(launch.second_moments(anew=capturable) / (1 - beta2**count))
            total = part if total is None else total + part.to(total)
    return total


def _counts(members: Members, capturable: bool) -> list[float]:
    """How old each is; unknown to the host, and the same for all, if they are counted on the device."""
    return [math.nan] * len(members.rests) if capturable else members.counts()


def _launches(members: Members, counts: list[float]) -> "list[_Launch]":
    """One for all tensors of a device, a precision and an age."""
    first = counts[0]
    same = math.isnan(first) or counts.count(first) == len(counts)
    younger = [] if same else [first - count for count in counts]
    if members.memo.get("younger") != younger:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            raise RuntimeError(
                "take one step before you capture: with fused=True the first step, and the first after a "
                "change of parameters or state, tells the device where they are"
            )
        alike: dict[object, list[int]] = {}
        for i, (slot, count) in enumerate(zip(members.rests, counts, strict=True)):
            if slot.live.numel():
                kind = slot.live.device, slot.live.dtype, slot.average.dtype, _is_aligned(slot)
                key = (*kind, None if same else count)
                alike.setdefault(key, []).append(i)
        members.memo["younger"] = younger
        members.memo["launches"] = [_Launch(members, places) for places in alike.values()]
    launches: list[_Launch] = members.memo["launches"]
    return launches


def _is_aligned(slot: Slot) -> bool:
    return all(array.data_ptr() % 16 == 0 for array in slot[:6] if array is not None)


class _Launch:
    """Tensors that one launch advances, and where they are: of one device, precision, storage and age."""

    def __init__(self, members: Members, places: list[int]) -> None:
        self.places = places
        """Which of the members they are."""
        self._slots = [members.rests[i] for i in places]
        live = self._slots[0].live
        self._device, self._dtype, self._stored = live.device, live.dtype, self._slots[0].average.dtype
        self._block, self._warps = TILES[self._stored]
        self._aligned = _is_aligned(self._slots[0])
        self._sizes = tuple(slot.live.numel() for slot in self._slots)
        rows = []
        for slot, i in zip(self._slots, places, strict=True):
            scales = (members.states[i].get(scale_key(name)) for name in ("average", "returned"))
            addresses = (0 if scale is None else scale.data_ptr() for scale in scales)
            row = row_of(slot)
            rows.append((row[0], *row[2:], *addresses))
        self._table = torch.tensor(rows, dtype=torch.int64).to(self._device)
        self._chunks = _chunks(self._device, self._sizes, self._block)
        self._starts = _starts(self._device, self._sizes, self._block)
        self._sums = torch.empty(len(self._chunks), device=self._device)
        self._grads = torch.zeros(len(places), dtype=torch.int64, device=self._device)
        self._sent: list[int] = []
        self._grads_aligned = False
        self._one = torch.ones((), device=self._device)
        # Pinned memory for captures: there before one begins, and for as long as it is replayed.
        self._spares = list[Tensor]()
        self._captured = dict[tuple[int, ...], Tensor]()
        self._versions: list[int] | None = None

    def set_gradients(self, addresses: list[int]) -> bool:
        """Where they are at this step; those of all members. Whether that was captured."""
        own = addresses if len(addresses) == len(self.places) else [addresses[i] for i in self.places]
        capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing:  # what is replayed is the copy, so that what is copied has to stay
            self._grads.copy_(self._pinned(own), non_blocking=True)
        # They often come back to where they were, with nothing to send; but a replay sends those of its own.
        elif own != self._sent or self._captured:
            self._grads.copy_(torch.tensor(own, dtype=torch.int64), non_blocking=True)
        self._sent = list(own)
        self._grads_aligned = all(address % 16 == 0 for address in own)
        return capturing

    def _pinned(self, addresses: list[int]) -> Tensor:
        """Addresses in memory that stays as it is."""
        key = tuple(addresses)
        if key not in self._captured:
            if not self._spares:
                raise RuntimeError(
                    f"more than {SPARES} captures of a fused step since the last that was not captured: take "
                    "such a step between"
                )
            self._captured[key] = self._spares.pop().copy_(torch.tensor(addresses, dtype=torch.int64))
        return self._captured[key]

    def counts_on_device(self) -> Tensor:
        """How old each is, (tensors,) float64."""
        return torch.stack([slot.step for slot in self._slots])

    def step_(self, count: float, recipe: Recipe, scale: Scalar) -> None:
        """The step of that count; of NaN, if they are counted on the device."""
        from paceline.optim import kernel

        on_device = recipe.capturable or (isinstance(recipe.lr, Tensor) and recipe.lr.is_cuda)
        numbers: list[Scalar] = [0.0] * (len(Numbers._fields) + 1)
        table, ages, t = self._one, self._grads, 0
        if recipe.capturable and self._device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            while len(self._spares) < SPARES:
                self._spares.append(torch.empty(len(self.places), dtype=torch.int64, pin_memory=True))
        if on_device:
            counts = torch.full((len(self.places),), count, dtype=torch.float64, device=self._device)
            counts = self.counts_on_device() if recipe.capturable else counts
            table, ages = numbers_on_device(counts, recipe), counts.to(torch.int64)
            at = at_count(counts, recipe)
        else:
            at, t = at_count(count, recipe), int(count)
            numbers = [*numbers_of(at, recipe, 1.0), float(count == 1)]
        pull = "none" if at.pulling is False else "over" if recipe.gain in NUMERATORS else "uniform"
        factor = self._one
        if recipe.gain == "scaled" and pull != "none":
            # It stays on the device: to read it would be to wait for all that was asked of the device before.
            factor = scale if isinstance(scale, Tensor) else torch.full((), scale, device=self._device)
            factor = factor.to(self._device, torch.float32)
        averages = averages_that_move(self._slots, at)
        if self._stored != torch.float32:  # what live has beyond an average that rests changes too
            averages = 1 if self._slots[0].returned is None else 2
        sums = recipe.gain == "scaled" and recipe.pullback_strength != 0
        with torch.cuda.device(self._device if self._device.type == "cuda" else -1):
            kernel.step[(len(self._chunks),)](
                self._table, self._grads, self._chunks, factor, self._sums, table, ages, t, *numbers,
                OF=_type(self._dtype), GRAD=_type(self._dtype), STORAGE=_type(self._stored), PULL=pull,
                LOOKAHEAD=recipe.gap == "lookahead" and pull != "none",
                AVERAGES=averages, SUMS=sums, ON_DEVICE=on_device,
                ALIGNED=self._aligned, GRAD_ALIGNED=self._grads_aligned, BLOCK=self._block,
                num_warps=self._warps, enable_fp_fusion=False,
            )  # fmt: skip
        self._versions = self._versions_now() if sums else None

    def second_moments(self, anew: bool) -> Tensor:
        """The sum of the second moments of each: as the last step found it, or anew, to the same bits."""
        from paceline.optim import kernel

        found = torch.empty(len(self.places), dtype=torch.float64, device=self._device)
        with torch.cuda.device(self._device if self._device.type == "cuda" else -1):
            if anew or self._versions is None or self._versions != self._versions_now():
                kernel.add_up[(len(self._chunks),)](
                    self._table, self._chunks, self._sums, OF=_type(self._dtype), ALIGNED=self._aligned,
                    BLOCK=self._block, num_warps=self._warps, enable_fp_fusion=False,
                )  # fmt: skip
            starts = self._starts
            kernel.totals[(len(self.places),)](self._sums, starts, found, WIDTH=WIDTH, num_warps=16)
        return found

    def _versions_now(self) -> list[int]:
        """By which to see that nobody else changed a second moment; of the kernel torch does not know."""
        return [slot.exp_avg_sq._version for slot in self._slots]


def _type(dtype: torch.dtype) -> Any:
    """A dtype as Triton calls it."""
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))


# What does not depend on addresses is kept by its contents, and found again by another launch.


@lru_cache(maxsize=64)
def _chunks(device: torch.device, sizes: tuple[int, ...], block: int) -> Tensor:
    """A row for each program: a tensor, and its first element."""
    counts = torch.tensor([-(-size // block) for size in sizes], dtype=torch.int64)
    tensors = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    places = torch.arange(len(tensors)) - (counts.cumsum(0) - counts)[tensors]
    return torch.stack([tensors, places * block], dim=1).to(device)


@lru_cache(maxsize=64)
def _starts(device: torch.device, sizes: tuple[int, ...], block: int) -> Tensor:
    """The first chunk of each tensor, and the end of the last."""
    counts = torch.tensor([0, *[-(-size // block) for size in sizes]], dtype=torch.int64)
    return counts.cumsum(0).to(device)
