"""What is found on the device before a step, by small kernels: sums over a whole model, and the numbers of a
step that is counted there."""

import triton
import triton.language as tl

from paceline.optim.kernel import COLUMNS, LARGEST, NUMBERS, energies, leave_root, load, spared, store_sums


@triton.jit
def add_up(
    table, chunks, sums, starts, arrived, root, share,
    MOMENTS: tl.constexpr, SUMS: tl.constexpr, ROOT: tl.constexpr, TENSORS: tl.constexpr,
    PARTS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The `sums`, and the `root`, that `step` would have left, to the bit, of second moments that it did not
    write."""
    program = tl.program_id(0).to(tl.int64)
    tensor, first = tl.load(chunks + 2 * program), tl.load(chunks + 2 * program + 1)
    row, offsets = table + tensor * COLUMNS, tl.arange(0, BLOCK)
    count = tl.load(row + 5)
    v = load(tl.load(row + 2), first, offsets, count, MOMENTS, ALIGNED, True, "")
    store_sums(sums + program * SUMS, v, first, offsets, count, MOMENTS, True, SUMS, BLOCK)
    if ROOT:
        leave_root(sums, starts, arrived, share, root, TENSORS, PARTS)


@triton.jit
def mean(
    sums,  # float32: of chunks, or of parts of them
    segments,  # (programs, 2) int64: the first sum of each, and that after its last, at most WIDTH further on
    found,  # (programs,) float64: the total of each
    done,  # () int32: how many have found theirs; 0 before and after
    starts,  # (BLOCKS · TENSORS + 1,) int64: the first segment of each tensor; beyond the last there are none
    counts,  # (tensors,) int64: addresses of float64, how old each is, if ON_DEVICE
    log_beta2: tl.float64,
    share: tl.float64,  # what a sum counts, before it is corrected if ON_DEVICE
    result,  # () float32
    ON_DEVICE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    TENSORS: tl.constexpr,  # that are done at a time
    SEGMENTS: tl.constexpr,  # that a tensor may have
):  # fmt: skip
    """The root of the sum over all tensors, without those with a NaN or Inf, or whose sum is below 0."""
    segment = tl.program_id(0)
    places = tl.load(segments + 2 * segment) + tl.arange(0, WIDTH)
    inside = places < tl.load(segments + 2 * segment + 1)
    tl.store(found + segment, tl.sum(tl.load(sums + places, mask=inside, other=0.0).to(tl.float64)))
    tl.debug_barrier()
    # Whoever is the last adds up what all have found, in an order that does not depend on who that is.
    if tl.atomic_add(done, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        total = tl.zeros((TENSORS,), tl.float64)
        for block in range(BLOCKS):
            tensors = block * TENSORS + tl.arange(0, TENSORS)
            energy = energies(found, starts, tensors, SEGMENTS)
            if ON_DEVICE:
                there = tl.load(starts + tensors) < tl.load(starts + tensors + 1)
                energy /= 1.0 - tl.exp(log_beta2 * _ages(counts, tensors, there))
            total += spared(energy)
        tl.store(result, tl.sqrt(tl.sum(total) * share).to(tl.float32))
        tl.store(done, 0)


@triton.jit
def _ages(counts, tensors, there):
    """How old tensors are, which is counted in float64; 1 where there are none."""
    at = tl.load(counts + tensors, mask=there, other=0).to(tl.pointer_type(tl.float64))
    return tl.load(at, mask=there, other=1.0)


@triton.jit(do_not_specialize=["lr_at", "tensors", "every"])  # one kernel for all of them
def numbers(
    counts,  # (tensors,) int64: addresses of float64, how old each is, if ON_DEVICE; otherwise `count`
    lr_at,  # () of dtype LR: instead of lr, if it is on the device
    table,  # (tensors, NUMBERS) float32: what is found
    ages,  # (tensors,) int64: how old each is
    tensors,
    every,  # averages move at steps that are multiples of it
    count: tl.float64,
    sign: tl.float64, lr: tl.float64, weight_decay: tl.float64, beta1: tl.float64, log_beta1: tl.float64,
    beta2: tl.float64, log_beta2: tl.float64, eps: tl.float64, strength: tl.float64, limit: tl.float64,
    power: tl.float64, return_power: tl.float64, offset: tl.float64, scale: tl.float64,
    ON_DEVICE: tl.constexpr,
    LR: tl.constexpr,  # its dtype there; None: it is not
    OVER: tl.constexpr,  # the pull is a number over √v̂ + ε
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Those of onepass.Numbers, and whether it is a first step: a row for each tensor."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = places < tensors
    zeros = tl.zeros((BLOCK,), tl.float64)
    t = zeros + count
    if ON_DEVICE:
        t = _ages(counts, places, there)
    tl.store(ages + places, t.to(tl.int64), mask=there)
    eta = zeros + lr
    if LR is not None:
        eta = zeros + tl.load(lr_at).to(tl.float64)
    moving = t.to(tl.int64) % every == 0
    numerator = zeros + strength
    if OVER:
        numerator = eta * strength
    numerator = tl.where(moving & (eta != 0.0), numerator, 0.0)
    rate, keep = _rate_and_keep(t, power, offset, scale, moving)
    _, keep_returned = _rate_and_keep(t, return_power, offset, scale, moving)

    row = table + places * NUMBERS
    tl.store(row, (zeros + sign).to(tl.float32), mask=there)
    tl.store(row + 1, (eta * weight_decay).to(tl.float32), mask=there)
    tl.store(row + 2, (zeros + (1.0 - beta1)).to(tl.float32), mask=there)
    tl.store(row + 3, (zeros + beta2).to(tl.float32), mask=there)
    tl.store(row + 4, (zeros + (1.0 - beta2)).to(tl.float32), mask=there)
    tl.store(row + 5, (1.0 / tl.sqrt(1.0 - tl.exp(log_beta2 * t))).to(tl.float32), mask=there)
    tl.store(row + 6, (zeros + eps).to(tl.float32), mask=there)
    tl.store(row + 7, (-eta / (1.0 - tl.exp(log_beta1 * t))).to(tl.float32), mask=there)
    tl.store(row + 8, tl.minimum(numerator, LARGEST).to(tl.float32), mask=there)
    tl.store(row + 9, rate.to(tl.float32), mask=there)
    tl.store(row + 10, (zeros + limit).to(tl.float32), mask=there)
    tl.store(row + 11, keep, mask=there)
    tl.store(row + 12, 1.0 - keep, mask=there)
    tl.store(row + 13, keep_returned, mask=there)
    tl.store(row + 14, 1.0 - keep_returned, mask=there)
    tl.store(row + 15, (t == 1.0).to(tl.float32), mask=there)


@triton.jit
def _rate_and_keep(t, power, offset, scale, moving):
    """`averaging_rate` of rule.py, 0 where averages rest, and 1 less it in float32, as `shares` has it."""
    rate = tl.where(power == 0.0, 1.0, tl.exp(-power * tl.log(offset + scale * t)))  # also where that is inf
    rate = tl.where(moving, rate, 0.0)
    return rate, (1.0 - rate).to(tl.float32)
