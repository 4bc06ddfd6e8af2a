"""Rows of a chunk with their decays, for the other kernels of this recurrence (``kernel.py``)."""

from __future__ import annotations

import triton
import triton.language as tl

from edgelin.recurrences.delta.kernel import FLOOR, put_tile, tile
from edgelin.recurrences.delta.kernel_chunks import C, chunk_rows, own_chunk
from edgelin.recurrences.linear.kernel_decays import (
    REACH,
    SHORT_REACH,
    _sums,
    from_middle,
    half_reach,
)


@triton.jit
def times(x, factor):
    """``x * factor`` in the dtype of ``x``."""
    return (x.to(tl.float32) * factor).to(x.dtype)


@triton.jit
def log_decays(g, row, valid, start, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Clamped log decays `[64, BLOCK]`, float32; zeros outside."""
    return tl.maximum(tile(g, row, valid, start, WIDTH, BLOCK).to(tl.float32), FLOOR)


@triton.jit
def load_rows(q, k, a, b, beta, row, valid, start, K: tl.constexpr, BK: tl.constexpr,
              TIED: tl.constexpr):  # fmt: skip
    """q, a, b and k `[64, BK]`; tied: q, -k, beta k, and beta k again."""
    queries = tile(q, row, valid, start, K, BK)
    keys = tile(k, row, valid, start, K, BK)
    if TIED:
        strength = tl.load(beta + row, mask=valid, other=0.0).to(tl.float32)
        reads, adds = times(keys, -1.0), times(keys, strength[:, None])
        keys = adds
    else:
        reads, adds = tile(a, row, valid, start, K, BK), tile(b, row, valid, start, K, BK)
    return queries, reads, adds, keys


@triton.jit(do_not_specialize=["T"])
def split_kernel(q, k, a, b, beta, g, far, q_in, a_in, b_out, k_out, ups, decays, spans, T, H,
                 K: tl.constexpr, BK: tl.constexpr, TIED: tl.constexpr, FAR: tl.constexpr,
                 PT: tl.constexpr, PARTS: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """For a block of keys of a chunk q, a, b and k with their decays, ``ups``, and the chunk's
    decays before its middle, which states lack, after it, which b and k lack, and whole `[3, K]`.

    Marks a chunk in ``far`` where its decays cannot be split at the middle; with FAR such chunks
    are done once more, all keys of them.
    """
    mark = far + tl.program_id(0)
    if FAR:
        if tl.load(mark) == 0:
            return
    bh, first, end = own_chunk(spans, T, H, PACKED)
    row, valid = chunk_rows(bh, first, end, T, H)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    start = tl.program_id(1) * BK
    steps = log_decays(g, row, valid, start, K, BK)
    if FAR:
        up, down = _sums(j <= i, steps, PT, PARTS), tl.exp(_sums(j > i, steps, PT, PARTS))
        before = up if TIED else _sums(j < i, steps, PT, PARTS)
        whole = tl.sum(steps, axis=0)
        early, late = tl.zeros_like(whole), tl.zeros_like(whole)
        up = tl.exp(up)
    else:
        if half_reach(steps, i, C) >= (REACH if PARTS == 2 else SHORT_REACH):
            tl.atomic_max(mark, 1)
            return
        sums, early, late = from_middle(steps, i, j, C, PT, PARTS)
        before, whole = sums - steps, early + late
        up, down = tl.exp(sums), tl.exp(-sums)
        put_tile(ups, up, row, valid, start, K, BK)
    before = up if TIED else tl.exp(before)
    queries, reads, adds, keys = load_rows(q, k, a, b, beta, row, valid, start, K, BK, TIED)
    put_tile(q_in, queries.to(tl.float32) * up, row, valid, start, K, BK)
    put_tile(a_in, reads.to(tl.float32) * before, row, valid, start, K, BK)
    put_tile(b_out, adds.to(tl.float32) * down, row, valid, start, K, BK)
    if not TIED:
        put_tile(k_out, keys.to(tl.float32) * down, row, valid, start, K, BK)
    key = start + tl.arange(0, BK)
    p = decays + tl.program_id(0).to(tl.int64) * (3 * K) + key
    tl.store(p, tl.exp(early), mask=key < K)
    tl.store(p + K, tl.exp(late), mask=key < K)
    tl.store(p + 2 * K, tl.exp(whole), mask=key < K)
