"""The update as one Triton kernel: `pace_step_` of rule.py for all tensors of a device, in one launch.

A table has a row of addresses for each tensor; a list of chunks says which part of which tensor a program
does.
Only the last chunk of a tensor is masked, so that all others load and store 16 bytes at a time.
"""

import triton
import triton.language as tl

COLUMNS = tl.constexpr(7)
"""Of the table: live, gradient, both moments, average, returned, elements."""


@triton.jit
def _load(address, first, offsets, count, OF: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr):
    start = address.to(tl.pointer_type(OF)) + first
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    if MASKED:
        return tl.load(start + offsets, mask=offsets < count - first, other=0).to(tl.float32)
    return tl.load(start + offsets).to(tl.float32)


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


@triton.jit
def _moved(average, live, keep, move):
    """0 times an infinite average would be NaN."""
    return tl.where(keep == 0.0, live, average * keep + live * move)


@triton.jit
def _advance(
    row, first, count, scale, sign, decay, new_m, old_v, new_v, root_factor, eps, step_size, numerator,
    rate, limit, keep, move, keep_returned, move_returned,
    OF: tl.constexpr, PULL: tl.constexpr, LOOKAHEAD: tl.constexpr, AVERAGES: tl.constexpr,
    ALIGNED: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.arange(0, BLOCK)
    live_at, m_at, v_at = tl.load(row), tl.load(row + 2), tl.load(row + 3)
    before = _load(live_at, first, offsets, count, OF, ALIGNED, MASKED)
    grad = sign * _load(tl.load(row + 1), first, offsets, count, OF, ALIGNED, MASKED)
    m = _load(m_at, first, offsets, count, OF, ALIGNED, MASKED)
    v = _load(v_at, first, offsets, count, OF, ALIGNED, MASKED)
    if AVERAGES > 0:
        average_at = tl.load(row + 4)
        average = _load(average_at, first, offsets, count, tl.float32, ALIGNED, MASKED)
    if AVERAGES > 1:
        returned_at = tl.load(row + 5)
        returned = _load(returned_at, first, offsets, count, tl.float32, ALIGNED, MASKED)

    m += (grad - m) * new_m
    v = v * old_v + grad * grad * new_v
    denominator = tl.sqrt_rn(v) * root_factor + eps
    live = before * decay + tl.div_rn(m, denominator) * step_size

    if LOOKAHEAD:
        average = _moved(average, live, keep, move)
    if PULL != "none":
        if PULL == "uniform":
            gain = numerator * rate
        else:
            gain = tl.div_rn(numerator * tl.load(scale), denominator) * rate
        # Not a minimum, which would make of a NaN the limit.
        gain = tl.where(gain > limit, limit, gain)
        live += gain * (average - (live if LOOKAHEAD else before))
    # The averages are of the weights as they are stored.
    live = live.to(OF).to(tl.float32)
    _store(live_at, first, offsets, count, live, OF, ALIGNED, MASKED)
    _store(m_at, first, offsets, count, m, OF, ALIGNED, MASKED)
    _store(v_at, first, offsets, count, v, OF, ALIGNED, MASKED)
    if AVERAGES > 0:
        if not LOOKAHEAD:
            average = _moved(average, live, keep, move)
        _store(average_at, first, offsets, count, average, tl.float32, ALIGNED, MASKED)
    if AVERAGES > 1:
        returned = _moved(returned, live, keep_returned, move_returned)
        _store(returned_at, first, offsets, count, returned, tl.float32, ALIGNED, MASKED)


@triton.jit
def step(
    table,  # (tensors, COLUMNS) int64
    chunks,  # (programs, 2) int64: a tensor, and the first of the elements of it that are a program's
    scale,  # () float32, for gain="scaled"; otherwise 1
    sign, decay, new_m, old_v, new_v, root_factor, eps, step_size, numerator, rate, limit,
    keep, move, keep_returned, move_returned,
    OF: tl.constexpr,  # dtype of live, gradient and moments
    PULL: tl.constexpr,  # "none", "uniform", or "over": a number over √v̂ + ε
    LOOKAHEAD: tl.constexpr,
    AVERAGES: tl.constexpr,  # how many of them move
    ALIGNED: tl.constexpr,  # all addresses are multiples of 16 bytes
    BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = chunks + 2 * tl.program_id(0).to(tl.int64)
    row, first = table + tl.load(chunk) * COLUMNS, tl.load(chunk + 1)
    count = tl.load(row + 6)
    if first + BLOCK <= count:
        _advance(
            row, first, count, scale, sign, decay, new_m, old_v, new_v, root_factor, eps, step_size,
            numerator, rate, limit, keep, move, keep_returned, move_returned,
            OF, PULL, LOOKAHEAD, AVERAGES, ALIGNED, False, BLOCK,
        )  # fmt: skip
    else:
        _advance(
            row, first, count, scale, sign, decay, new_m, old_v, new_v, root_factor, eps, step_size,
            numerator, rate, limit, keep, move, keep_returned, move_returned,
            OF, PULL, LOOKAHEAD, AVERAGES, ALIGNED, True, BLOCK,
        )  # fmt: skip
