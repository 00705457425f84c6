"""The order of samples: a permutation an epoch, the same from any step on, as good as random."""

from dataclasses import dataclass
from functools import partial
from itertools import permutations

import numpy as np
import pytest
import torch

from paceline.lm.batch import Batch, load_batches, numbers_at

pytestmark = pytest.mark.slow

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65, 100, 255, 256, 257, 1000, 4096, 4097]


def epoch(number, samples, seed=0):
    """The samples of an epoch, in order."""
    return numbers_at(number, batch_size=samples, samples=samples, seed=seed)


@pytest.mark.parametrize("samples", SIZES)
@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 + 5])
def test_every_sample_comes_once_an_epoch(samples, seed):
    for number in (0, 1, 2, 1000):
        assert sorted(epoch(number, samples, seed)) == list(range(samples))


@pytest.mark.parametrize(
    "samples, batch_size", [(1, 1), (1, 3), (2, 3), (3, 2), (10, 3), (10, 10), (10, 25), (1000, 7)]
)
def test_batches_cut_the_same_order_anywhere(samples, batch_size):
    steps = 3 * samples // batch_size + 2
    cut = np.concatenate(
        [numbers_at(s, batch_size=batch_size, samples=samples, seed=5) for s in range(steps)]
    )
    whole = np.concatenate([epoch(number, samples, 5) for number in range(len(cut) // samples + 1)])
    assert cut.dtype == np.int64
    assert cut.tolist() == whole[: len(cut)].tolist()


def test_far_away_steps_cost_no_more():
    numbers = numbers_at(10**12, batch_size=8, samples=10**9, seed=1)
    assert len(set(numbers.tolist())) == 8 and 0 <= numbers.min() <= numbers.max() < 10**9
    assert numbers.tolist() == numbers_at(10**12, batch_size=8, samples=10**9, seed=1).tolist()


def test_the_order_is_written_down():
    """So that no release, machine or version of numpy changes the order of a run that goes on."""
    assert epoch(0, 12, seed=1).tolist() == [10, 2, 11, 7, 3, 4, 8, 9, 5, 0, 6, 1]
    assert epoch(3, 12, seed=7).tolist() == [7, 8, 10, 9, 0, 11, 4, 6, 1, 2, 3, 5]
    assert numbers_at(123_456, batch_size=4, samples=10**6, seed=42).tolist() == [
        206427,
        789252,
        475369,
        786617,
    ]


# --- As good as random ----------------------------------------------------------------------------


def same_places(one, other):
    return int((one == other).sum())


@pytest.mark.parametrize("samples", [100, 1000, 4097])
def test_epochs_and_seeds_have_nothing_in_common(samples):
    """Two random orders agree in about one place (Poisson), and no order is another one shifted."""
    orders = [epoch(number, samples, seed) for number in range(4) for seed in range(4)] + [np.arange(samples)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert same_places(one, other) <= 9
            shifts = np.bincount((one - other) % samples, minlength=samples)
            assert shifts.max() <= 15


def test_small_orders_take_every_form():
    for samples in (2, 3, 4):
        seen = {}
        for number in range(1200):
            order = tuple(epoch(number, samples, seed=3).tolist())
            seen[order] = seen.get(order, 0) + 1
        forms = list(permutations(range(samples)))
        assert sorted(seen) == forms
        expected = 1200 / len(forms)
        assert max(abs(times - expected) for times in seen.values()) < 6 * expected**0.5


@pytest.mark.parametrize("samples", [100, 1000, 3000])
def test_every_place_takes_every_part_of_the_data(samples):
    """Mean and correlation of what stands at a place, over 400 epochs, within 6 standard deviations."""
    orders = np.stack([epoch(number, samples, seed=11) for number in range(400)]) / (samples - 1) - 0.5
    deviation = (1 / 12 / 400) ** 0.5
    assert np.abs(orders.mean(axis=0)).max() < 6 * deviation
    neighbours = (orders[:, 1:] * orders[:, :-1]).mean(axis=0) * 12
    assert np.abs(neighbours).max() < 6 / 400**0.5
    places = np.linspace(-0.5, 0.5, samples)
    assert np.abs((orders * places).mean(axis=1) * 12).max() < 6 / samples**0.5
    across = (orders[1:] * orders[:-1]).mean(axis=1) * 12
    assert np.abs(across).max() < 6 / samples**0.5


# --- Going on -------------------------------------------------------------------------------------


@dataclass
class Counted:
    """Sample i is the numbers from 100 i on."""

    samples: int
    length: int = 4
    vocabulary: int = 10**6
    fingerprint: str = "counted"

    def __len__(self):
        return self.samples

    def batch(self, numbers):
        tokens = torch.tensor(np.asarray(numbers))[:, None] * 100 + torch.arange(self.length)
        return Batch(tokens, tokens + 1, None)


def batches(steps, samples=203, batch_size=4):
    numbers = partial(numbers_at, batch_size=batch_size, samples=samples, seed=9)
    return list(load_batches(Counted(samples), numbers, steps, pinned=False))


def test_a_run_goes_on_with_the_next_batches_wherever_it_stopped():
    """50 stops in epochs 0 to 3, 20 batches after each (row F8 of the fault matrix)."""
    whole = batches(range(4 * 203 // 4 + 20))
    stops = np.random.default_rng(0).integers(0, len(whole) - 20, 50)
    assert {int(stop) * 4 // 203 for stop in stops} == {0, 1, 2, 3}
    for stop in stops:
        for one, other in zip(batches(range(stop, stop + 20)), whole[stop:], strict=False):
            assert torch.equal(one.tokens, other.tokens) and torch.equal(one.targets, other.targets)


def test_the_loader_leaves_the_random_numbers_of_the_run_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    batches(range(4))
    assert torch.equal(torch.rand(3), expected)
