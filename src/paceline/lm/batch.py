"""Samples to train on, their order, and batches of them."""

import hashlib
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORED = -100  # a target that takes no part in the loss

Numbers = NDArray[np.int64]


class Batch(NamedTuple):
    """Samples of equal length, stacked."""

    tokens: Tensor  # (batch, length) int64
    targets: Tensor  # (batch, length) int64: the next token, or IGNORED
    positions: Tensor | None  # (batch, length) int64: place of each token in its example; None: 0, 1, 2, …

    def to(self, device: torch.device) -> "Batch":
        """Return a copy on another device. The copy may still be under way."""
        return self._each(lambda part: part.to(device, non_blocking=True))

    def pinned(self) -> "Batch":
        """Return a copy in pinned memory, from which a GPU copies without the CPU."""
        return self._each(Tensor.pin_memory)

    def at(self, places: range) -> "Batch":
        """Return the samples in these rows."""
        return self._each(lambda part: part[places.start : places.stop])

    def without_targets(self) -> "Batch":
        """Return a batch of the same tokens without targets, so that its loss is 0."""
        return self._replace(targets=torch.full_like(self.targets, IGNORED))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        positions = None if self.positions is None else change(self.positions)
        return Batch(change(self.tokens), change(self.targets), positions)

    def target_count(self) -> int:
        """Return how many targets take part in the loss."""
        return int((self.targets != IGNORED).sum())

    def digest(self, before: str) -> str:
        """Return a digest of these tokens and targets and of the digest of all batches before them."""
        # The checksum is as fast as memory. The hash is slow, and gets only the checksums.
        sums = [zlib.crc32(np.ascontiguousarray(part.numpy()).data) for part in (self.tokens, self.targets)]
        return hashlib.blake2b(f"{before} {sums}".encode(), digest_size=8).hexdigest()


class Samples(Protocol):
    """Sequences of equal length, numbered from 0."""

    @property
    def fingerprint(self) -> str:
        """The sha256 of all that the samples depend on."""

    @property
    def vocabulary(self) -> int:
        """The size of the vocabulary: all token ids are below it."""

    @property
    def length(self) -> int:
        """The number of tokens in a sample."""

    def __len__(self) -> int: ...

    def batch(self, numbers: Sequence[int] | Numbers) -> Batch:
        """Return the samples of these numbers, in this order."""


# --- Order ----------------------------------------------------------------------------------------


def numbers_at(step: int, *, batch_size: int, samples: int, seed: int) -> Numbers:
    """Return the numbers of the samples of a step.

    It is a pure function, so that a run can resume at any step with the same order. Epochs are shuffled
    separately, and every sample comes once in each. A batch may end one epoch and begin the next.

    >>> numbers_at(0, batch_size=3, samples=5, seed=0), numbers_at(1, batch_size=3, samples=5, seed=0)
    (array([2, 0, 4]), array([1, 3, 4]))
    """
    places = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)
    epochs, places = places // samples, places % samples
    numbers = np.empty_like(places)
    for epoch in np.unique(epochs):
        there = epochs == epoch
        numbers[there] = _shuffled(places[there], samples, seed, int(epoch))
    return numbers


_ROUNDS = 6


def _shuffled(places: Numbers, size: int, seed: int, epoch: int) -> Numbers:
    """Return the sample number at each of these places of an epoch: a permutation of range(size).

    A Feistel network permutes all numbers with an even count of bits. A result outside of the range is
    permuted again until it is inside.
    """
    # No table takes memory, and the order does not change with a library's random generator.
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    keys = _mixed(np.arange(_ROUNDS, dtype=np.uint64) + np.uint64(_ROUNDS * epoch) + _mixed_seed(seed))
    values = places.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        left, right = values[outside] >> np.uint64(half), values[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right + key) & mask)
        values[outside] = (left << np.uint64(half)) | right
        outside = values >= size
    return values.astype(np.int64)


def _mixed_seed(seed: int) -> np.uint64:
    return np.uint64(_mixed(np.array([seed % 2**64], dtype=np.uint64))[0])


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each number (the finalizer of SplitMix64)."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


# --- Loading --------------------------------------------------------------------------------------


def load_batches(
    samples: Samples, numbers: Callable[[int], Numbers], steps: range, *, pinned: bool
) -> Iterator[Batch]:
    """Yield the batches of these steps, in order.

    Arguments:
        samples: what batches are made of.
        numbers: returns the sample numbers of a step.
        steps: the steps to read.
        pinned: return batches in pinned memory, and read one batch ahead while the GPU works.
    """
    if not pinned:
        yield from (samples.batch(numbers(step)) for step in steps)
        return
    with ThreadPoolExecutor(1) as reader:
        ahead: deque[Future[Batch]] = deque()
        for step in steps:
            ahead.append(reader.submit(lambda step=step: samples.batch(numbers(step)).pinned()))  # type: ignore[misc]
            if len(ahead) == 2:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


class First:
    """The first `count` of other samples."""

    def __init__(self, samples: Samples, count: int) -> None:
        self._samples, self._count = samples, min(count, len(samples))
        self.fingerprint = f"{samples.fingerprint}[:{self._count}]"
        self.vocabulary, self.length = samples.vocabulary, samples.length

    def __len__(self) -> int:
        return self._count

    def batch(self, numbers: Sequence[int] | Numbers) -> Batch:
        """Return the samples of these numbers, in this order."""
        return self._samples.batch(numbers)
