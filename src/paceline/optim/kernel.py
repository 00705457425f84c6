"""The update as one Triton kernel: `pace_step_` of rule.py for all tensors of a device, in one launch.

A table has a row of addresses for each tensor; a list of chunks says which part of which tensor a program
does.
Only the last chunk of a tensor is masked, so that all others load and store 16 bytes at a time.
"""

import triton
import triton.language as tl

COLUMNS = tl.constexpr(8)
"""Of the table: live, both moments, average, returned, elements, scales of average and of returned.
Gradients move, and have a table of their own."""
NUMBERS = tl.constexpr(16)
"""Of a row of `numbers`: those of onepass.Numbers, and whether it is a first step."""


@triton.jit
def load(
    address, first, offsets, count,
    OF: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """KEPT: what is loaded is the last to leave the GPU's second cache; "", or "evict_last" to say so."""
    start = address.to(tl.pointer_type(OF)) + first
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    if MASKED:
        inside = offsets < count - first
        return tl.load(start + offsets, mask=inside, other=0, eviction_policy=KEPT).to(tl.float32)
    return tl.load(start + offsets, eviction_policy=KEPT).to(tl.float32)


@triton.jit
def _store(
    address, first, offsets, count, value, OF: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr
):
    start = address.to(tl.pointer_type(OF)) + first
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    if MASKED:
        tl.store(start + offsets, value.to(OF), mask=offsets < count - first)
    else:
        tl.store(start + offsets, value.to(OF))


# --- How averages are kept: storage.py says it, and what follows is the same ---------------

BLOCK_OF_SCALE = tl.constexpr(128)
LARGEST_BFLOAT16 = tl.constexpr(3.3895313892515355e38)
LARGEST = tl.constexpr(3.4028234663852886e38)
NOT_FINITE = tl.constexpr(0x7F800000)  # the least bits of a magnitude that is not


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _noise(first, offsets, t, SALT: tl.constexpr):
    return _mix((first + offsets).to(tl.uint32) ^ _mix((2 * t.to(tl.int64) + SALT).to(tl.uint32)))


@triton.jit
def _at_random(value, noise):
    """A value that bfloat16 can hold, above or below."""
    bits = (value.to(tl.uint32, bitcast=True) + (noise & 0xFFFF)) & 0xFFFF0000
    # What is finite stays so; a NaN or Inf, whose bits may have wrapped, stays as it is.
    largest = tl.where(value < 0.0, -LARGEST_BFLOAT16, LARGEST_BFLOAT16)
    rounded = tl.where((bits & NOT_FINITE) == NOT_FINITE, largest, bits.to(tl.float32, bitcast=True))
    finite = (value.to(tl.uint32, bitcast=True) & NOT_FINITE) != NOT_FINITE
    return tl.where(finite, rounded, value)


@triton.jit
def _average_of(
    live, address, scale_at, first, offsets, count,
    STORAGE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr, KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The average beside these live weights."""
    kept = load(address, first, offsets, count, STORAGE, ALIGNED, MASKED, KEPT)
    if tl.float32 == STORAGE:
        return kept
    if tl.int8 == STORAGE:
        blocks: tl.constexpr = BLOCK // BLOCK_OF_SCALE
        which = first // BLOCK_OF_SCALE + tl.arange(0, blocks)
        start = scale_at.to(tl.pointer_type(tl.float32))
        scale = tl.load(start + which, mask=which * BLOCK_OF_SCALE < count, other=0.0)
        kept = tl.reshape(tl.reshape(kept, (blocks, BLOCK_OF_SCALE)) * scale[:, None], (BLOCK,))
    return live - kept


@triton.jit
def _keep_average(
    average, live, address, scale_at, first, offsets, count, t,
    SALT: tl.constexpr, STORAGE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store an average beside these live weights, as they are stored."""
    if tl.float32 == STORAGE:
        _store(address, first, offsets, count, average, STORAGE, ALIGNED, MASKED)
    else:
        residual = live - average
        if MASKED:
            residual = tl.where(offsets < count - first, residual, 0.0)
        noise = _noise(first, offsets, t, SALT)
        if tl.bfloat16 == STORAGE:
            code = _at_random(residual, noise)
        else:
            blocks: tl.constexpr = BLOCK // BLOCK_OF_SCALE
            rows = tl.reshape(residual, (blocks, BLOCK_OF_SCALE))
            # As integers magnitudes have the order that they have as numbers, and a NaN is above them all.
            most = tl.max(rows.to(tl.uint32, bitcast=True) & 0x7FFFFFFF, axis=1)
            scale = tl.div_rn(most.to(tl.float32, bitcast=True), tl.full((blocks,), 127.0, tl.float32))
            scale = tl.where(most >= NOT_FINITE, float("nan"), scale)
            per_scale = tl.where(scale > 0.0, tl.div_rn(tl.full((blocks,), 1.0, tl.float32), scale), 0.0)
            which = first // BLOCK_OF_SCALE + tl.arange(0, blocks)
            start = scale_at.to(tl.pointer_type(tl.float32))
            tl.store(start + which, scale, mask=which * BLOCK_OF_SCALE < count)
            chance = (noise >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
            chance = tl.reshape(chance, (blocks, BLOCK_OF_SCALE))
            steps = tl.fma(rows, tl.broadcast_to(per_scale[:, None], rows.shape), chance)
            # Whatever the code of a block that is not finite is, its scale makes a NaN of it.
            code = tl.reshape(tl.minimum(tl.maximum(tl.floor(steps), -127.0), 127.0), (BLOCK,))
        _store(address, first, offsets, count, code, STORAGE, ALIGNED, MASKED)


@triton.jit
def _moved(average, live, keep, move):
    """0 times an infinite average would be NaN, and so would an infinite weight in one that rests."""
    moved = tl.where(keep == 0.0, live, tl.fma(average, keep, live * move))
    return tl.where(move == 0.0, average, moved)


# --- The step ---------------------------------------------------------------------------------------


@triton.jit
def _advance(
    row, grad_at, first, count, scale, sums, t,
    sign, shrink, new_m, old_v, new_v, root_factor, eps, step_size, numerator,
    rate, limit, keep, move, keep_returned, move_returned, fresh,
    OF: tl.constexpr, GRAD: tl.constexpr, MOMENTS: tl.constexpr, MOMENTUM: tl.constexpr,
    STORAGE: tl.constexpr, PULL: tl.constexpr, LOOKAHEAD: tl.constexpr,
    AVERAGES: tl.constexpr, SUMS: tl.constexpr,
    ALIGNED: tl.constexpr, GRAD_ALIGNED: tl.constexpr, MASKED: tl.constexpr, KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.arange(0, BLOCK)
    live_at, m_at, v_at = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    before = load(live_at, first, offsets, count, OF, ALIGNED, MASKED, KEPT)
    grad = sign * load(grad_at, first, offsets, count, GRAD, GRAD_ALIGNED, MASKED, KEPT)
    m = grad
    if MOMENTUM:
        m = load(m_at, first, offsets, count, MOMENTS, ALIGNED, MASKED, KEPT)
    v = load(v_at, first, offsets, count, MOMENTS, ALIGNED, MASKED, KEPT)
    if AVERAGES > 0:
        at, scale_at = tl.load(row + 3), tl.load(row + 6)
        average = _average_of(
            before, at, scale_at, first, offsets, count, STORAGE, ALIGNED, MASKED, KEPT, BLOCK
        )
        average = tl.where(fresh != 0.0, before, average)
    if AVERAGES > 1:
        at, scale_at = tl.load(row + 4), tl.load(row + 7)
        returned = _average_of(
            before, at, scale_at, first, offsets, count, STORAGE, ALIGNED, MASKED, KEPT, BLOCK
        )
        returned = tl.where(fresh != 0.0, before, returned)

    if MOMENTUM:
        m = tl.fma(grad - m, new_m, m)
    v = tl.fma(v, old_v, grad * grad * new_v)
    # To two units in the last place, of what is small beside a weight; exact, it would outlast the loads.
    inverse = 1.0 / tl.fma(tl.sqrt(v), root_factor, eps)
    # All that moves a weight is added up before it is added to it: one rounding of the weight.
    way = tl.fma(m * inverse, step_size, -before * shrink)

    if LOOKAHEAD:
        average = _moved(average, before + way, keep, move)
    if PULL != "none":
        ratio = numerator
        if PULL == "over":
            # Finite, as 0 times infinity would be NaN where v has overflowed.
            ratio = tl.minimum(numerator * tl.load(scale), LARGEST) * inverse
        gain = ratio * rate
        # Not a minimum, which would make of a NaN the limit.
        gain = tl.where(gain > limit, limit, gain)
        way_there = average - ((before + way) if LOOKAHEAD else before)
        way = tl.fma(gain, way_there, way)
    # Averages are of the weights as they are stored.
    live = (before + way).to(OF).to(tl.float32)
    _store(live_at, first, offsets, count, live, OF, ALIGNED, MASKED)
    if MOMENTUM:
        _store(m_at, first, offsets, count, m, MOMENTS, ALIGNED, MASKED)
    _store(v_at, first, offsets, count, v, MOMENTS, ALIGNED, MASKED)
    if SUMS > 0:
        store_sums(sums, v, first, offsets, count, MOMENTS, MASKED, SUMS, BLOCK)
    if AVERAGES > 0:
        if not LOOKAHEAD:
            average = _moved(average, live, keep, move)
        _keep_average(
            average, live, tl.load(row + 3), tl.load(row + 6), first, offsets, count, t,
            0, STORAGE, ALIGNED, MASKED, BLOCK,
        )  # fmt: skip
    if AVERAGES > 1:
        returned = _moved(returned, live, keep_returned, move_returned)
        _keep_average(
            returned, live, tl.load(row + 4), tl.load(row + 7), first, offsets, count, t,
            1, STORAGE, ALIGNED, MASKED, BLOCK,
        )  # fmt: skip


@triton.jit
def store_sums(
    sums, v, first, offsets, count,
    MOMENTS: tl.constexpr, MASKED: tl.constexpr, SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of the elements of a program, or of each of as many parts of them."""
    v = v.to(MOMENTS).to(tl.float32)  # as it is stored, and as `add_up` will find it
    if MASKED:
        v = tl.where(offsets < count - first, v, 0.0)
    if SUMS == 1:
        tl.store(sums, tl.sum(v))
    else:
        tl.store(sums + tl.arange(0, SUMS), tl.sum(tl.reshape(v, (SUMS, BLOCK // SUMS)), axis=1))


@triton.jit
def energies(parts, starts, tensors, PARTS: tl.constexpr):
    """The sum of the parts of each tensor; `starts` says which is the first of each."""
    first, last = tl.load(starts + tensors), tl.load(starts + tensors + 1)
    own = first[:, None] + tl.arange(0, PARTS)[None, :]
    # Past the first cache, which does not hear of what other programs write.
    found = tl.load(parts + own, mask=own < last[:, None], other=0.0, cache_modifier=".cg")
    return tl.sum(found.to(tl.float64), axis=1)


@triton.jit
def spared(energy):
    """0 of tensors that have a NaN or Inf, or whose sum is below 0."""
    return tl.where((energy - energy == 0.0) & (energy > 0.0), energy, 0.0)


@triton.jit
def leave_root(sums, starts, arrived, share, root, TENSORS: tl.constexpr, PARTS: tl.constexpr):
    """The root of the sum over all tensors, times `share`: by the program that is the last to have left its
    sums. `arrived` is how many have; 0 before and after."""
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        energy = energies(sums, starts, tl.arange(0, TENSORS), PARTS)
        tl.store(root, tl.sqrt(tl.sum(spared(energy)) * share).to(tl.float32))
        tl.store(arrived, 0)


@triton.jit(do_not_specialize=["scale", "t"])  # which are not always as torch allocates
def step(
    table,  # (tensors, COLUMNS) int64
    grads,  # (tensors,) int64: addresses
    chunks,  # (programs, 2) int64: a tensor, and the first of the elements of it that are a program's
    scale,  # () float32, for gain="scaled"; otherwise 1
    sums,  # (programs, SUMS) float32: of the second moments of each chunk
    starts, arrived, root,  # as in `leave_root`, if ROOT
    numbers,  # (tensors, NUMBERS) float32, instead of those that follow if ON_DEVICE
    ages,  # (tensors,) int64, instead of t if ON_DEVICE
    t,  # int64, the count of this step
    share,  # as in `leave_root`
    sign, shrink, new_m, old_v, new_v, root_factor, eps, step_size, numerator, rate, limit,
    keep, move, keep_returned, move_returned, fresh,
    OF: tl.constexpr,  # dtype of live
    GRAD: tl.constexpr,  # dtype of the gradient
    MOMENTS: tl.constexpr,  # dtype of moments
    MOMENTUM: tl.constexpr,  # whether there is a first moment
    STORAGE: tl.constexpr,  # dtype of averages: float32, or that of residuals
    PULL: tl.constexpr,  # "none", "uniform", or "over": a number over √v̂ + ε
    LOOKAHEAD: tl.constexpr,
    AVERAGES: tl.constexpr,  # how many of them move
    SUMS: tl.constexpr,  # of how many parts of a chunk to add up second moments; 0: of none
    ROOT: tl.constexpr,  # whether they are few, and their root is left too
    TENSORS: tl.constexpr,
    PARTS: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    ALIGNED: tl.constexpr,  # all addresses of the table are multiples of 16 bytes
    GRAD_ALIGNED: tl.constexpr,
    KEPT: tl.constexpr,  # as in `load`
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    tensor, first = tl.load(chunks + 2 * program), tl.load(chunks + 2 * program + 1)
    row = table + tensor * COLUMNS
    grad_at, count = tl.load(grads + tensor), tl.load(row + 5)
    if ON_DEVICE:
        t = tl.load(ages + tensor)
        own = numbers + tensor * NUMBERS
        sign, shrink, new_m = tl.load(own), tl.load(own + 1), tl.load(own + 2)
        old_v, new_v, root_factor = tl.load(own + 3), tl.load(own + 4), tl.load(own + 5)
        eps, step_size, numerator = tl.load(own + 6), tl.load(own + 7), tl.load(own + 8)
        rate, limit, keep, move = tl.load(own + 9), tl.load(own + 10), tl.load(own + 11), tl.load(own + 12)
        keep_returned, move_returned, fresh = tl.load(own + 13), tl.load(own + 14), tl.load(own + 15)
    if first + BLOCK <= count:
        _advance(
            row, grad_at, first, count, scale, sums + program * SUMS, t,
            sign, shrink, new_m, old_v, new_v, root_factor, eps, step_size, numerator,
            rate, limit, keep, move, keep_returned, move_returned, fresh,
            OF, GRAD, MOMENTS, MOMENTUM, STORAGE, PULL, LOOKAHEAD, AVERAGES, SUMS,
            ALIGNED, GRAD_ALIGNED, False, KEPT, BLOCK,
        )  # fmt: skip
    else:
        _advance(
            row, grad_at, first, count, scale, sums + program * SUMS, t,
            sign, shrink, new_m, old_v, new_v, root_factor, eps, step_size, numerator,
            rate, limit, keep, move, keep_returned, move_returned, fresh,
            OF, GRAD, MOMENTS, MOMENTUM, STORAGE, PULL, LOOKAHEAD, AVERAGES, SUMS,
            ALIGNED, GRAD_ALIGNED, True, KEPT, BLOCK,
        )  # fmt: skip
    if ROOT:
        leave_root(sums, starts, arrived, share, root, TENSORS, PARTS)
