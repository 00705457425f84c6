"""The update as Triton kernels: `pace_step_` of rule.py for all tensors of a kind, in one pass over memory.

`advance` counts the step of each tensor on the device and writes its numbers; `step` moves weights, moments
and averages. A table has a row of addresses for each tensor, and a list of chunks says which part of which
tensor a program of `step` takes. Only the last chunk of a tensor is masked, so that all others move 16 bytes
at a time.
"""

import triton
import triton.language as tl

COLUMNS = tl.constexpr(9)
"""Of the table: live, exp_avg, exp_avg_sq, average, returned, scale of average, scale of returned, count,
size."""
SETTINGS = tl.constexpr(20)
"""Of the settings, float64: lr, step, weight_decay, beta1, beta2, eps, strength, over_root, power,
return_power, slope, delay, least_rate, every, pull_every, max_gain, sign; fused.py writes them in this
order."""
NUMBERS = tl.constexpr(12)
"""Of a row that `advance` writes, float32: shrink, root_factor, step_size, numerator, limit, keep, move,
keep_returned, move_returned, fresh, and two of no use."""

BLOCK_OF_SCALE = tl.constexpr(128)
LARGEST_BFLOAT16 = tl.constexpr(3.3895313892515355e38)
LARGEST = tl.constexpr(3.4028234663852886e38)
NOT_FINITE = tl.constexpr(0x7F800000)  # the least bits of a magnitude that is not


# --- The numbers of a step
# ------------------------------------------------------------------------------------


@triton.jit
def _rate(t, power, slope, delay, least_rate):
    """Return the rate of an average at step t."""
    late = tl.where(t > delay, t - delay, 0.0)
    rate = tl.exp(-power * tl.log(1.0 + slope * late))
    return tl.where(rate < least_rate, least_rate, rate)


@triton.jit
def advance(table, settings, numbers, tensors, PROGRAM: tl.constexpr):
    """Count a step of each tensor, and write the numbers of that step."""
    which = tl.program_id(0) * PROGRAM + tl.arange(0, PROGRAM)
    inside = which < tensors
    count_at = tl.load(table + which * COLUMNS + 7, mask=inside, other=0).to(tl.pointer_type(tl.float64))
    t = tl.load(count_at, mask=inside, other=0.0) + 1.0
    tl.store(count_at, t, mask=inside)

    plain_lr, weight_decay = tl.load(settings), tl.load(settings + 2)
    lr = plain_lr * tl.load(settings + 1)
    beta1, beta2 = tl.load(settings + 3), tl.load(settings + 4)
    slope, delay, least = tl.load(settings + 10), tl.load(settings + 11), tl.load(settings + 12)
    rate = _rate(t, tl.load(settings + 8), slope, delay, least)
    return_rate = _rate(t, tl.load(settings + 9), slope, delay, least)
    every, pull_every = tl.load(settings + 13), tl.load(settings + 14)
    averaging = t - tl.floor(t / every) * every == 0.0
    pulling = tl.where(t - tl.floor(t / pull_every) * pull_every == 0.0, tl.where(lr == 0.0, 0.0, 1.0), 0.0)
    strength = tl.load(settings + 6)
    # A strength of inf is LARGEST here, so that it times 0 is no NaN.
    numerator = tl.where(pulling != 0.0, strength * rate, 0.0) * tl.where(
        tl.load(settings + 7) != 0.0, plain_lr, 1.0
    )
    numerator = tl.where(numerator > LARGEST, LARGEST, numerator)

    decayed1 = tl.where(beta1 > 0.0, tl.exp(t * tl.log(tl.where(beta1 > 0.0, beta1, 1.0))), 0.0)
    decayed2 = tl.where(beta2 > 0.0, tl.exp(t * tl.log(tl.where(beta2 > 0.0, beta2, 1.0))), 0.0)
    # Rounded so that both shares sum to exactly 1, as in `shares` of rule.py.
    keep = tl.where(averaging, 1.0 - rate, 1.0).to(tl.float32)
    keep_returned = tl.where(averaging, 1.0 - return_rate, 1.0).to(tl.float32)
    row = numbers + which * NUMBERS
    tl.store(row, (lr * weight_decay).to(tl.float32) + 0.0 * t.to(tl.float32), mask=inside)
    tl.store(row + 1, (1.0 / tl.sqrt(1.0 - decayed2)).to(tl.float32), mask=inside)
    tl.store(row + 2, (-lr / (1.0 - decayed1)).to(tl.float32), mask=inside)
    tl.store(row + 3, numerator.to(tl.float32), mask=inside)
    tl.store(row + 4, tl.load(settings + 15).to(tl.float32) + 0.0 * t.to(tl.float32), mask=inside)
    tl.store(row + 5, keep, mask=inside)
    tl.store(row + 6, 1.0 - keep, mask=inside)
    tl.store(row + 7, keep_returned, mask=inside)
    tl.store(row + 8, 1.0 - keep_returned, mask=inside)
    tl.store(row + 9, tl.where(t == 1.0, 1.0, 0.0).to(tl.float32), mask=inside)


# --- Memory
# ---------------------------------------------------------------------------------------------------


@triton.jit
def _load(
    address, first, offsets, count, OF: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    start = address.to(tl.pointer_type(OF)) + first
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    if MASKED:
        return tl.load(start + offsets, mask=offsets < count - first, other=0).to(tl.float32)
    return tl.load(start + offsets).to(tl.float32)


@triton.jit
def _store(
    address, first, offsets, count, value, OF: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    start = address.to(tl.pointer_type(OF)) + first
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    if MASKED:
        tl.store(start + offsets, value.to(OF), mask=offsets < count - first)
    else:
        tl.store(start + offsets, value.to(OF))


# --- Averages in their storage: what storage.py says
# ------------------------------------------------------------


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _round_at_random(value, noise):
    """Return one of the two neighbours in bfloat16."""
    bits = (value.to(tl.uint32, bitcast=True) + (noise & 0xFFFF)) & 0xFFFF0000
    # What is finite stays so; a NaN or Inf, whose bits may have wrapped, stays as it is.
    largest = tl.where(value < 0.0, -LARGEST_BFLOAT16, LARGEST_BFLOAT16)
    rounded = tl.where((bits & NOT_FINITE) == NOT_FINITE, largest, bits.to(tl.float32, bitcast=True))
    finite = (value.to(tl.uint32, bitcast=True) & NOT_FINITE) != NOT_FINITE
    return tl.where(finite, rounded, value)


@triton.jit
def _average_of(
    live, address, scale_at, first, offsets, count,
    STORAGE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the average next to these live weights."""
    kept = _load(address, first, offsets, count, STORAGE, ALIGNED, MASKED)
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
    """Store an average next to these live weights, as they are stored."""
    if tl.float32 == STORAGE:
        _store(address, first, offsets, count, average, STORAGE, ALIGNED, MASKED)
    else:
        residual = live - average
        if MASKED:
            residual = tl.where(offsets < count - first, residual, 0.0)
        seed = _mix((2 * t + SALT).to(tl.uint32))
        noise = _mix((first + offsets).to(tl.uint32) ^ seed)
        if tl.bfloat16 == STORAGE:
            code = _round_at_random(residual, noise)
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
    """Return a moved average. 0 times an infinite one would be NaN, and so would a resting one next to
    Inf."""
    moved = tl.where(keep == 0.0, live, tl.fma(average, keep, live * move))
    return tl.where(move == 0.0, average, moved)


# --- The step
# -------------------------------------------------------------------------------------------------


@triton.jit
def _step(
    row, grad_at, settings, own, first, count,
    OF: tl.constexpr, GRAD: tl.constexpr, STORAGE: tl.constexpr, AVERAGES: tl.constexpr,
    PULL: tl.constexpr, GAP_BEFORE: tl.constexpr, AVERAGE_FIRST: tl.constexpr,
    ALIGNED: tl.constexpr, GRAD_ALIGNED: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.arange(0, BLOCK)
    live_at, m_at, v_at = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    average_at, average_scale = tl.load(row + 3), tl.load(row + 5)
    t = tl.load(tl.load(row + 7).to(tl.pointer_type(tl.float64))).to(tl.int64)
    shrink, root_factor, step_size = tl.load(own), tl.load(own + 1), tl.load(own + 2)
    new_m = (1.0 - tl.load(settings + 3)).to(tl.float32)
    old_v, new_v = tl.load(settings + 4).to(tl.float32), (1.0 - tl.load(settings + 4)).to(tl.float32)
    eps, sign = tl.load(settings + 5).to(tl.float32), tl.load(settings + 16).to(tl.float32)
    fresh = tl.load(own + 9)

    before = _load(live_at, first, offsets, count, OF, ALIGNED, MASKED)
    grad = sign * _load(grad_at, first, offsets, count, GRAD, GRAD_ALIGNED, MASKED)
    m = _load(m_at, first, offsets, count, OF, ALIGNED, MASKED)
    v = _load(v_at, first, offsets, count, OF, ALIGNED, MASKED)
    average = _average_of(
        before, average_at, average_scale, first, offsets, count, STORAGE, ALIGNED, MASKED, BLOCK
    )
    average = tl.where(fresh != 0.0, before, average)

    m = tl.fma(grad - m, new_m, m)
    v = tl.fma(v, old_v, grad * grad * new_v)
    inverse = 1.0 / tl.fma(tl.sqrt(v), root_factor, eps)
    # All that moves a weight is added up before it is added to it: one rounding of the weight.
    way = tl.fma(m * inverse, step_size, -before * shrink)
    old = average
    if AVERAGE_FIRST:
        average = _moved(average, before + way, tl.load(own + 5), tl.load(own + 6))
    if PULL != "none":
        gain = tl.load(own + 3)
        limit = tl.load(own + 4)
        if PULL == "over":
            gain = gain * inverse
            gain = tl.where(gain > limit, limit, gain)  # not a minimum, which would make of a NaN the limit
        else:
            gain = tl.where(gain > limit, limit, gain)
        gap = old - before if GAP_BEFORE else average - (before + way)
        way = tl.fma(gain, gap, way)
    live = (before + way).to(OF).to(tl.float32)  # averages are of the weights as they are stored
    _store(live_at, first, offsets, count, live, OF, ALIGNED, MASKED)
    _store(m_at, first, offsets, count, m, OF, ALIGNED, MASKED)
    _store(v_at, first, offsets, count, v, OF, ALIGNED, MASKED)
    if not AVERAGE_FIRST:
        average = _moved(average, live, tl.load(own + 5), tl.load(own + 6))
    _keep_average(
        average, live, average_at, average_scale, first, offsets, count, t,
        0, STORAGE, ALIGNED, MASKED, BLOCK,
    )  # fmt: skip
    if AVERAGES > 1:
        returned_at, returned_scale = tl.load(row + 4), tl.load(row + 6)
        returned = _average_of(
            before, returned_at, returned_scale, first, offsets, count, STORAGE, ALIGNED, MASKED, BLOCK
        )
        returned = tl.where(fresh != 0.0, before, returned)
        returned = _moved(returned, live, tl.load(own + 7), tl.load(own + 8))
        _keep_average(
            returned, live, returned_at, returned_scale, first, offsets, count, t,
            1, STORAGE, ALIGNED, MASKED, BLOCK,
        )  # fmt: skip


@triton.jit
def step(
    table,  # (tensors, COLUMNS) int64
    grads,  # (tensors,) int64: addresses
    chunks,  # (programs, 2) int64: a tensor, and the first of its elements that are a program's
    settings,  # (SETTINGS,) float64
    numbers,  # (tensors, NUMBERS) float32, from `advance`
    OF: tl.constexpr,  # dtype of live and moments
    GRAD: tl.constexpr,  # dtype of the gradient
    STORAGE: tl.constexpr,  # dtype of averages: float32, or that of residuals
    AVERAGES: tl.constexpr,  # how many there are
    PULL: tl.constexpr,  # "none", "uniform", or "over": a number over √v̂ + ε
    GAP_BEFORE: tl.constexpr,
    AVERAGE_FIRST: tl.constexpr,
    ALIGNED: tl.constexpr,  # all addresses of the table are multiples of 16 bytes
    GRAD_ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Take the step of one chunk."""
    program = tl.program_id(0).to(tl.int64)
    tensor, first = tl.load(chunks + 2 * program), tl.load(chunks + 2 * program + 1)
    row, own = table + tensor * COLUMNS, numbers + tensor * NUMBERS
    grad_at, count = tl.load(grads + tensor), tl.load(row + 8)
    if first + BLOCK <= count:
        _step(
            row, grad_at, settings, own, first, count, OF, GRAD, STORAGE, AVERAGES,
            PULL, GAP_BEFORE, AVERAGE_FIRST, ALIGNED, GRAD_ALIGNED, False, BLOCK,
        )  # fmt: skip
    else:
        _step(
            row, grad_at, settings, own, first, count, OF, GRAD, STORAGE, AVERAGES,
            PULL, GAP_BEFORE, AVERAGE_FIRST, ALIGNED, GRAD_ALIGNED, True, BLOCK,
        )  # fmt: skip
