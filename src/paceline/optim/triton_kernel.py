"""The update as Triton kernels: `pace_step_` of rule.py for all tensors of a kind, in one pass over memory.

`advance` counts the step of each tensor on the device and writes its numbers; `step` moves weights, moments
and averages. A table has a row of addresses for each tensor, and a list of chunks says which part of which
tensor a program of `step` takes. Only the last chunk of a tensor is masked, so that all others move 16 bytes
at a time.
"""

import torch
import triton
import triton.language as tl

TILES = {
    (torch.float32, 1): (1024, 4),
    (torch.float32, 2): (1024, 4),
    (torch.bfloat16, 1): (256, 2),
    (torch.bfloat16, 2): (512, 4),
    (torch.int8, 1): (256, 2),
    (torch.int8, 2): (512, 2),
}
"""Storage of averages and how many there are → elements and warps of a program, as measured on an H200."""

# Columns of the table, int64: addresses, and the number of elements.
(
    LIVE, EXP_AVG, EXP_AVG_SQ, AVERAGE, RETURNED, AVERAGE_SCALE, RETURNED_SCALE, COUNT, SIZE, COLUMNS,
) = map(tl.constexpr, range(10))  # fmt: skip

# The settings, float64. fused.py writes them in this order.
(
    LR, STEP, WEIGHT_DECAY, BETA1, BETA2, EPS, STRENGTH, OVER_ROOT, POWER, RETURN_POWER, SLOPE, DELAY,
    LEAST_RATE, EVERY, PULL_EVERY, MAX_GAIN, SIGN, GROW,
) = map(tl.constexpr, range(18))  # fmt: skip

# Numbers of a step that `advance` writes for each tensor, float32.
SHRINK, ROOT_FACTOR, STEP_SIZE, NUMERATOR, KEEP, KEEP_RETURNED, IS_FIRST, NUMBERS = map(
    tl.constexpr, range(8)
)

BLOCK_OF_SCALE = tl.constexpr(128)
LARGEST_BFLOAT16 = tl.constexpr(3.3895313892515355e38)
LARGEST = tl.constexpr(3.4028234663852886e38)
NOT_FINITE = tl.constexpr(0x7F800000)  # the least bits of a magnitude that is not


# --- The numbers of a step ------------------------------------------------------------------------------


@triton.jit
def _rate(t, power, settings):
    """Return the rate of an average at step t."""
    delay = tl.load(settings + DELAY)
    late = tl.where(t > delay, t - delay, 0.0)
    rate = tl.exp(-power * tl.log(1.0 + tl.load(settings + SLOPE) * late))
    least = tl.load(settings + LEAST_RATE)
    return tl.where(rate < least, least, rate)


@triton.jit
def _to_the_power(beta, t):
    """Return beta^t; 0 where beta is 0."""
    return tl.where(beta > 0.0, tl.exp(t * tl.log(tl.where(beta > 0.0, beta, 1.0))), 0.0)


@triton.jit
def _is_due(t, every):
    """Return whether something that happens at every n-th step happens at step t."""
    return t - tl.floor(t / every) * every == 0.0


@triton.jit
def advance(table, settings, numbers, tensors, PROGRAM: tl.constexpr):
    """Count a step of each tensor, and write the numbers of that step."""
    which = tl.program_id(0) * PROGRAM + tl.arange(0, PROGRAM)
    inside = which < tensors
    count_at = tl.load(table + which * COLUMNS + COUNT, mask=inside, other=0).to(tl.pointer_type(tl.float64))
    t = tl.load(count_at, mask=inside, other=0.0) + 1.0
    tl.store(count_at, t, mask=inside)

    lr = tl.load(settings + LR)
    scaled = lr * tl.load(settings + STEP)
    rate = _rate(t, tl.load(settings + POWER), settings)
    return_rate = _rate(t, tl.load(settings + RETURN_POWER), settings)
    averaging = _is_due(t, tl.load(settings + EVERY))
    # Where the rate is 0 nothing may move. A strength of inf is LARGEST here, so that it times 0 is no NaN.
    strength = tl.where(scaled != 0.0, tl.load(settings + STRENGTH), 0.0)
    grow = tl.load(settings + GROW)
    left = tl.where(t < grow, 1.0 - t / tl.where(grow > 0.0, grow, 1.0), 0.0)
    strength = strength * (1.0 - left) / (1.0 + strength * left)
    numerator = tl.where(_is_due(t, tl.load(settings + PULL_EVERY)), strength * rate, 0.0)
    numerator *= tl.where(tl.load(settings + OVER_ROOT) != 0.0, lr, 1.0)
    numerator = tl.where(numerator > LARGEST, LARGEST, numerator)
    correction = 1.0 - _to_the_power(tl.load(settings + BETA1), t)
    root_correction = tl.sqrt(1.0 - _to_the_power(tl.load(settings + BETA2), t))

    row = numbers + which * NUMBERS
    tl.store(row + SHRINK, scaled * tl.load(settings + WEIGHT_DECAY), mask=inside)
    tl.store(row + ROOT_FACTOR, 1.0 / root_correction, mask=inside)
    tl.store(row + STEP_SIZE, -scaled / correction, mask=inside)
    tl.store(row + NUMERATOR, numerator, mask=inside)
    tl.store(row + KEEP, tl.where(averaging, 1.0 - rate, 1.0), mask=inside)
    tl.store(row + KEEP_RETURNED, tl.where(averaging, 1.0 - return_rate, 1.0), mask=inside)
    tl.store(row + IS_FIRST, tl.where(t == 1.0, 1.0, 0.0), mask=inside)


# --- Memory: `part` is the first element of a chunk, the elements after it, and how many a tensor has ----


@triton.jit
def _start(address, first, OF: tl.constexpr, ALIGNED: tl.constexpr):
    start = address.to(tl.pointer_type(OF)) + first
    return tl.multiple_of(start, 16) if ALIGNED else start


@triton.jit
def _load(address, part, OF: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr):
    first, offsets, count = part
    start = _start(address, first, OF, ALIGNED)
    if MASKED:
        return tl.load(start + offsets, mask=offsets < count - first, other=0).to(tl.float32)
    return tl.load(start + offsets).to(tl.float32)


@triton.jit
def _store(address, part, value, OF: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr):
    first, offsets, count = part
    start = _start(address, first, OF, ALIGNED)
    if MASKED:
        tl.store(start + offsets, value.to(OF), mask=offsets < count - first)
    else:
        tl.store(start + offsets, value.to(OF))


# --- Averages in their storage: what storage.py says ------------------------------------------------------


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _round_to_bfloat16(value, noise):
    """Return one of the two neighbours in bfloat16."""
    bits = (value.to(tl.uint32, bitcast=True) + (noise & 0xFFFF)) & 0xFFFF0000
    # What is finite stays so; a NaN or Inf, whose bits may have wrapped, stays as it is.
    largest = tl.where(value < 0.0, -LARGEST_BFLOAT16, LARGEST_BFLOAT16)
    rounded = tl.where((bits & NOT_FINITE) == NOT_FINITE, largest, bits.to(tl.float32, bitcast=True))
    finite = (value.to(tl.uint32, bitcast=True) & NOT_FINITE) != NOT_FINITE
    return tl.where(finite, rounded, value)


@triton.jit
def _round_to_int8(rows, noise):
    """Return the codes of blocks, which are the rows, and their scales."""
    # As integers magnitudes have the order that they have as numbers, and a NaN is above them all.
    most = tl.max(rows.to(tl.uint32, bitcast=True) & 0x7FFFFFFF, axis=1)
    scale = tl.div_rn(most.to(tl.float32, bitcast=True), tl.full(most.shape, 127.0, tl.float32))
    scale = tl.where(most >= NOT_FINITE, float("nan"), scale)
    per_scale = tl.where(scale > 0.0, tl.div_rn(tl.full(most.shape, 1.0, tl.float32), scale), 0.0)
    chance = (noise >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
    steps = tl.fma(rows, tl.broadcast_to(per_scale[:, None], rows.shape), tl.reshape(chance, rows.shape))
    # Whatever the code of a block that is not finite is, its scale makes a NaN of it.
    return tl.minimum(tl.maximum(tl.floor(steps), -127.0), 127.0), scale


@triton.jit
def _home(row, t, NUMBER: tl.constexpr):
    """Return where average 0 or 1 and its scales are, and the seed of its noise at step t."""
    seed = _mix((2 * t + NUMBER).to(tl.uint32))
    return tl.load(row + AVERAGE + NUMBER), tl.load(row + AVERAGE_SCALE + NUMBER), seed


@triton.jit
def _scales_at(address, part, BLOCKS: tl.constexpr):
    """Return the addresses of a chunk's scales, and which of them exist."""
    first, _, count = part
    which = first // BLOCK_OF_SCALE + tl.arange(0, BLOCKS)
    return address.to(tl.pointer_type(tl.float32)) + which, which * BLOCK_OF_SCALE < count


@triton.jit
def _average_of(
    live, home, own, part, STORAGE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Return an average next to these live weights; at the first step it is live."""
    address, scale_at, _ = home
    kept = _load(address, part, STORAGE, ALIGNED, MASKED)
    if tl.int8 == STORAGE:
        blocks: tl.constexpr = kept.shape[0] // BLOCK_OF_SCALE
        start, exist = _scales_at(scale_at, part, blocks)
        scale = tl.load(start, mask=exist, other=0.0)
        kept = tl.reshape(tl.reshape(kept, (blocks, BLOCK_OF_SCALE)) * scale[:, None], kept.shape)
    average = kept if tl.float32 == STORAGE else live - kept
    return tl.where(tl.load(own + IS_FIRST) != 0.0, live, average)


@triton.jit
def _keep_average(
    average, live, home, part, STORAGE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Store an average next to these live weights, as they are stored."""
    address, scale_at, seed = home
    code = average
    if tl.float32 != STORAGE:
        first, offsets, count = part
        residual = live - average
        if MASKED:
            residual = tl.where(offsets < count - first, residual, 0.0)
        noise = _mix((first + offsets).to(tl.uint32) ^ seed)
        if tl.bfloat16 == STORAGE:
            code = _round_to_bfloat16(residual, noise)
        else:
            blocks: tl.constexpr = residual.shape[0] // BLOCK_OF_SCALE
            codes, scale = _round_to_int8(tl.reshape(residual, (blocks, BLOCK_OF_SCALE)), noise)
            start, exist = _scales_at(scale_at, part, blocks)
            tl.store(start, scale, mask=exist)
            code = tl.reshape(codes, residual.shape)
    _store(address, part, code, STORAGE, ALIGNED, MASKED)


@triton.jit
def _moved(average, live, keep):
    """Return a moved average: 0 times an infinite one, or a resting one plus 0 times Inf, would be NaN."""
    move = 1.0 - keep  # in float32, so that both sum to exactly 1, as in `shares` of rule.py
    moved = tl.where(keep == 0.0, live, tl.fma(average, keep, live * move))
    return tl.where(move == 0.0, average, moved)


# --- The step ---------------------------------------------------------------------------------------------


@triton.jit
def _adamw(live, grad, m, v, settings, own):
    """Return the moments, 1/(√v̂ + ε), and what AdamW adds to the weights."""
    beta1, beta2 = tl.load(settings + BETA1), tl.load(settings + BETA2)
    grad *= tl.load(settings + SIGN).to(tl.float32)
    m = tl.fma(grad - m, (1.0 - beta1).to(tl.float32), m)
    v = tl.fma(v, beta2.to(tl.float32), grad * grad * (1.0 - beta2).to(tl.float32))
    root = tl.fma(tl.sqrt(v), tl.load(own + ROOT_FACTOR), tl.load(settings + EPS).to(tl.float32))
    inverse = 1.0 / root
    return m, v, inverse, tl.fma(m * inverse, tl.load(own + STEP_SIZE), -live * tl.load(own + SHRINK))


@triton.jit
def _step(
    row, grad_at, settings, own, part,
    OF: tl.constexpr, GRAD: tl.constexpr, STORAGE: tl.constexpr, AVERAGES: tl.constexpr,
    PULL: tl.constexpr, GAP_BEFORE: tl.constexpr, AVERAGE_FIRST: tl.constexpr,
    ALIGNED: tl.constexpr, GRAD_ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    live_at, m_at, v_at = tl.load(row + LIVE), tl.load(row + EXP_AVG), tl.load(row + EXP_AVG_SQ)
    t = tl.load(tl.load(row + COUNT).to(tl.pointer_type(tl.float64))).to(tl.int64)
    home = _home(row, t, 0)
    before = _load(live_at, part, OF, ALIGNED, MASKED)
    grad = _load(grad_at, part, GRAD, GRAD_ALIGNED, MASKED)
    m, v = _load(m_at, part, OF, ALIGNED, MASKED), _load(v_at, part, OF, ALIGNED, MASKED)
    average = _average_of(before, home, own, part, STORAGE, ALIGNED, MASKED)
    gap = average - before

    # All that moves a weight is added up before it is added to it: one rounding of the weight.
    m, v, inverse, way = _adamw(before, grad, m, v, settings, own)
    keep = tl.load(own + KEEP)
    if AVERAGE_FIRST:
        average = _moved(average, before + way, keep)
    if PULL != "none":
        if not GAP_BEFORE:
            gap = average - (before + way)
        gain, limit = tl.load(own + NUMERATOR), tl.load(settings + MAX_GAIN).to(tl.float32)
        if PULL == "over":
            gain = gain * inverse
        gain = tl.where(gain > limit, limit, gain)  # not a minimum, which would make of a NaN the limit
        way = tl.fma(gain, gap, way)
    live = (before + way).to(OF).to(tl.float32)  # averages are of the weights as they are stored
    if not AVERAGE_FIRST:
        average = _moved(average, live, keep)
    _store(live_at, part, live, OF, ALIGNED, MASKED)
    _store(m_at, part, m, OF, ALIGNED, MASKED)
    _store(v_at, part, v, OF, ALIGNED, MASKED)
    _keep_average(average, live, home, part, STORAGE, ALIGNED, MASKED)
    if AVERAGES > 1:
        home = _home(row, t, 1)
        average = _average_of(before, home, own, part, STORAGE, ALIGNED, MASKED)
        average = _moved(average, live, tl.load(own + KEEP_RETURNED))
        _keep_average(average, live, home, part, STORAGE, ALIGNED, MASKED)


@triton.jit
def step(
    table,  # (tensors, COLUMNS)
    grads,  # (tensors,) int64: addresses
    chunks,  # (programs, 2) int64: a tensor, and the first of its elements that are a program's
    settings,
    numbers,  # (tensors, NUMBERS), from `advance`
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
    grad_at, count = tl.load(grads + tensor), tl.load(row + SIZE)
    part = (first, tl.arange(0, BLOCK), count)
    if first + BLOCK <= count:
        _step(
            row, grad_at, settings, own, part, OF, GRAD, STORAGE, AVERAGES,
            PULL, GAP_BEFORE, AVERAGE_FIRST, ALIGNED, GRAD_ALIGNED, False,
        )  # fmt: skip
    else:
        _step(
            row, grad_at, settings, own, part, OF, GRAD, STORAGE, AVERAGES,
            PULL, GAP_BEFORE, AVERAGE_FIRST, ALIGNED, GRAD_ALIGNED, True,
        )  # fmt: skip
