"""Gradients of one chunk of the diagonal plus low rank recurrence, for ``kernel_backward.py``.

The left side is what reads (q, a), the right side what was written (b, k). A term that a pair of
tokens shares is a product of left factor, right factor and a gradient of one of the four matrices.

Near: decays are split at the middle of the chunk, and rows hold them. Gradients come in as those of
these rows and go out as those of q, a, b and k. The gradient of a log decay,

    dg_t = sum over i >= t of q_i dq_i + a_i da_i - b_i db_i - k_i dk_i   (a, not tied: i > t)
           + what goes through the state behind the chunk,

is taken from the numbers that were multiplied, so that what cancels does so up to float32 sums.
Far: every factor of a level gives its share to the tokens of its own interval (the forward masks
transposed), so that no two large terms cancel and the gradient of a tiny factor is tiny.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edgelin.recurrences.delta.kernel import state_cells, tile
from edgelin.recurrences.delta.kernel_chunks import C
from edgelin.recurrences.delta.kernel_inverse import LEVELS, paired
from edgelin.recurrences.dplr.kernel_decays import interval, read_interval
from edgelin.recurrences.dplr.kernel_split import times
from edgelin.recurrences.linear.kernel_decays import _sums


@triton.jit
def left_terms(states, dstates, do, dr, row, valid, scale, start,
               K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """What reaches q, a and the whole decay through the states."""
    to_q = tl.zeros([C, BK], dtype=tl.float32)
    to_a = to_q
    through = tl.zeros([BK], dtype=tl.float32)
    for v_start in range(0, V, BV):
        cells, inside = state_cells(tl.program_id(0), start, v_start, K, V, BK, BV)
        state = tl.load(states + cells, mask=inside, other=0.0)
        dstate = tl.load(dstates + cells, mask=inside, other=0.0)
        through += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=1)
        state = tl.trans(state)
        to_q = tl.dot(tile(do, row, valid, v_start, V, BV), state, to_q, input_precision="ieee")
        to_a = tl.dot(tile(dr, row, valid, v_start, V, BV), state, to_a, input_precision="ieee")
    return scale * to_q, to_a, through


@triton.jit
def right_terms(dstates, reads, v, row, valid, start,
                K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                TIED: tl.constexpr):  # fmt: skip
    """What reaches b and k through the state after the chunk."""
    to_b = tl.zeros([C, BK], dtype=tl.float32)
    to_k = to_b
    for v_start in range(0, V, BV):
        cells, inside = state_cells(tl.program_id(0), start, v_start, K, V, BK, BV)
        state = tl.trans(tl.load(dstates + cells, mask=inside, other=0.0))
        to_b = tl.dot(tile(reads, row, valid, v_start, V, BV), state, to_b, input_precision="ieee")
        if not TIED:
            to_k = tl.dot(tile(v, row, valid, v_start, V, BV), state, to_k, input_precision="ieee")
    return to_b, to_k


@triton.jit
def before_own(ups, decays, row, valid, start, i, H, K: tl.constexpr, BK: tl.constexpr):
    """Decays in the rows of a `[64, BK]`: those of q one token earlier."""
    earlier = tile(ups, row - H, valid & (tl.arange(0, C) > 0), start, K, BK).to(tl.float32)
    key = start + tl.arange(0, BK)
    p = decays + tl.program_id(0).to(tl.int64) * (3 * K) + key
    begin = 1.0 / tl.load(p, mask=key < K, other=1.0)
    return tl.where(i > 0, earlier, begin[None, :])


@triton.jit
def near_left(to_q, to_a, ab, ak, qb, qk, q_in, a_in, b_out, k_out, ups, decays,
              row, valid, start, H, i, j, K: tl.constexpr, BK: tl.constexpr,
              TIED: tl.constexpr, PT: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Gradients of q and a, and what they give to dg."""
    adds = tile(b_out, row, valid, start, K, BK)
    to_q = tl.dot(qb, adds, to_q, input_precision="ieee")
    to_a = tl.dot(ab, adds, to_a, input_precision="ieee")
    if not TIED:
        keys = tile(k_out, row, valid, start, K, BK)
        to_q = tl.dot(qk, keys, to_q, input_precision="ieee")
        to_a = tl.dot(ak, keys, to_a, input_precision="ieee")
    early = to_a * tile(a_in, row, valid, start, K, BK).to(tl.float32)
    share = to_q * tile(q_in, row, valid, start, K, BK).to(tl.float32) + early
    decay = _sums(i <= j, share, PT, PARTS)
    up = tile(ups, row, valid, start, K, BK).to(tl.float32)
    if TIED:
        return to_q * up, to_a * up, decay
    else:  # a reads before the decay of its own token
        near = before_own(ups, decays, row, valid, start, i, H, K, BK)
        return to_q * up, to_a * near, decay - early


@triton.jit
def near_right(to_b, to_k, ab, ak, qb, qk, q_in, a_in, b_out, k_out, ups,
               row, valid, start, i, j, K: tl.constexpr, BK: tl.constexpr,
               TIED: tl.constexpr, PT: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Gradients of b and k, and what they give to dg."""
    queries, reads = tile(q_in, row, valid, start, K, BK), tile(a_in, row, valid, start, K, BK)
    adds = tile(b_out, row, valid, start, K, BK).to(tl.float32)
    share = to_b * adds
    # Sums of their own: added onto what `share` is made of, Triton 3.6 lets them into it (Hopper).
    part = tl.dot(qb, queries, input_precision="ieee")
    to_b += tl.dot(ab, reads, part, input_precision="ieee")
    decay = to_b * adds
    if not TIED:
        keys = tile(k_out, row, valid, start, K, BK).to(tl.float32)
        share += to_k * keys
        part = tl.dot(qk, queries, input_precision="ieee")
        to_k += tl.dot(ak, reads, part, input_precision="ieee")
        decay += to_k * keys
    # what goes through the state after the chunk also holds the decays up to its end
    decay = tl.sum(share, axis=0)[None, :] - _sums(i <= j, decay, PT, PARTS)
    up = tile(ups, row, valid, start, K, BK).to(tl.float32)
    up = tl.where(up > 0, up, 1.0)  # outside of the tensor
    return to_b / up, to_k / up, decay


@triton.jit
def masked(x, mask):
    """``x`` where the mask is set, else zero, in its own dtype."""
    return tl.where(mask, x.to(tl.float32), 0.0).to(x.dtype)


@triton.jit
def diagonal(x, i, j):
    """The diagonal of ``x`` `[64, 64]` as a column `[64, 1]`, float32."""
    return tl.sum(tl.where(i == j, x.to(tl.float32), 0.0), axis=1)[:, None]


@triton.jit
def far_left(to_q, to_a, ab, ak, qb, qk, queries, reads, adds, keys, steps, i, j,
             TIED: tl.constexpr, PT: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """As ``near_left``, for decays of any size."""
    queries, reads = queries.to(tl.float32), reads.to(tl.float32)
    to_q *= tl.exp(_sums(j <= i, steps, PT, PARTS))
    decay = _sums(i <= j, to_q * queries, PT, PARTS)
    if TIED:
        to_a *= tl.exp(_sums(j <= i, steps, PT, PARTS))
        decay += _sums(i <= j, to_a * reads, PT, PARTS)
    else:
        to_a *= tl.exp(_sums(j < i, steps, PT, PARTS))
        decay += _sums(i < j, to_a * reads, PT, PARTS)
        to_q += diagonal(qk, i, j) * keys.to(tl.float32)
    # a token with itself: no decay
    to_q += diagonal(qb, i, j) * adds.to(tl.float32)
    for level in range(0, LEVELS):
        factor = tl.exp(_sums(interval(i, j, level), steps, PT, PARTS))
        here = paired(i, j, level)
        add = times(adds, factor)
        part_q = tl.dot(masked(qb, here), add, input_precision="ieee")
        part_a = tl.dot(masked(ab, here), add, input_precision="ieee")
        if TIED:
            part_a *= factor
            part_q *= factor
            share = part_q * queries + part_a * reads
        else:
            add = times(keys, factor)
            part_q = tl.dot(masked(qk, here), add, part_q, input_precision="ieee") * factor
            part_a = tl.dot(masked(ak, here), add, part_a, input_precision="ieee")
            part_a *= tl.exp(_sums(read_interval(i, j, level), steps, PT, PARTS))
            share = part_q * queries
            decay += _sums(read_interval(j, i, level), part_a * reads, PT, PARTS)
        decay += _sums(interval(j, i, level), share, PT, PARTS)
        to_q += part_q
        to_a += part_a
    return to_q, to_a, decay


@triton.jit
def far_right(to_b, to_k, ab, ak, qb, qk, queries, reads, adds, keys, steps, i, j,
              TIED: tl.constexpr, PT: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """As ``near_right``, for decays of any size."""
    adds, keys = adds.to(tl.float32), keys.to(tl.float32)
    after = tl.exp(_sums(j > i, steps, PT, PARTS))
    to_b *= after
    share = to_b * adds
    to_b += diagonal(qb, i, j) * queries.to(tl.float32)
    if not TIED:
        to_k *= after
        share += to_k * keys
        to_k += diagonal(qk, i, j) * queries.to(tl.float32)
    decay = _sums(i > j, share, PT, PARTS)
    for level in range(0, LEVELS):
        factor = tl.exp(_sums(interval(i, j, level), steps, PT, PARTS))
        there = paired(j, i, level)
        near = factor
        if not TIED:
            near = tl.exp(_sums(read_interval(i, j, level), steps, PT, PARTS))
        query, read = times(queries, factor), times(reads, near)
        part = tl.dot(masked(qb, there), query, input_precision="ieee")
        part = factor * tl.dot(masked(ab, there), read, part, input_precision="ieee")
        to_b += part
        share = part * adds
        if not TIED:
            part = tl.dot(masked(qk, there), query, input_precision="ieee")
            part = factor * tl.dot(masked(ak, there), read, part, input_precision="ieee")
            to_k += part
            share += part * keys
        decay += _sums(interval(j, i, level), share, PT, PARTS)
    return to_b, to_k, decay
