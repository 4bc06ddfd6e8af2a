"""What the Triton kernels of the recurrences share: tiles, decays, and sums of decays.

Sums of decays over intervals of a chunk are products with 0/1 masks on the tensor cores, the decay
split into two or three bfloat16 parts: they are exact to 16 or 24 bits. exp(G_i - G_j) may be split
at the middle of the chunk, m: where |G_i - G_m| stays below REACH for all tokens and keys, exp(G_i
- G_m) and exp(G_m - G_j) are numbers, whatever their signs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edgelin.recurrences import MIN_LOG_DECAY

LOG2E = tl.constexpr(1.4426950408889634)
NONE, HEAD, KEY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FLOOR = tl.constexpr(MIN_LOG_DECAY)
REACH, SHORT_REACH = tl.constexpr(64.0), tl.constexpr(16.0)  # float32: sums stay exact to 1e-6


@triton.jit
def load_rows(p, rows, cols, live, H: tl.constexpr, D: tl.constexpr):
    """Load a `[BT, BD]` tile of a `[B, T, H, D]` tensor; zeros where not live."""
    return tl.load(
        p + rows[:, None] * (H * D) + cols[None, :],
        mask=live[:, None] & (cols[None, :] < D),
        other=0.0,
    )


@triton.jit
def store_rows(p, tile, rows, cols, live, H: tl.constexpr, D: tl.constexpr):
    """Store a `[BT, BD]` tile of a `[B, T, H, D]` tensor where live."""
    p_tile = p + rows[:, None] * (H * D) + cols[None, :]
    tl.store(p_tile, tile.to(p.dtype.element_ty), mask=live[:, None] & (cols[None, :] < D))


@triton.jit
def upper(x):
    """float32 cut off after the 8 bits of a bfloat16, as float32: faster than to convert twice."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def nearest(x):
    """float32 rounded to a bfloat16 (of two as near the larger one), likewise."""
    return upper((x.to(tl.int32, bitcast=True) + 32768).to(tl.float32, bitcast=True))


@triton.jit
def _sums(mask, g, PT: tl.constexpr, PARTS: tl.constexpr):
    """``mask @ g`` for a 0/1 mask `[BT, BT]` and float32 g `[BT, N]`, exact to PARTS * 8 bits."""
    return _weighted_sums(tl.where(mask, 1.0, 0.0), g, PT, PARTS)


@triton.jit
def _weighted_sums(weights, g, PT: tl.constexpr, PARTS: tl.constexpr):
    """``weights @ g`` for weights of 0, 1 and -1 `[BT, BT]`, likewise."""
    weights = weights.to(PT)
    part = upper(g)
    total = tl.dot(weights, part.to(PT), input_precision="ieee")
    for _ in tl.static_range(PARTS - 1):
        g = g - part
        part = upper(g)
        total = tl.dot(weights, part.to(PT), total, input_precision="ieee")
    return total


@triton.jit
def from_middle(g, row, col, BT: tl.constexpr, PT: tl.constexpr, PARTS: tl.constexpr):
    """G_i - G_m `[BT, N]`, m the last token of the first half, and the sums of both halves."""
    up = tl.where((col <= row) & (col >= BT // 2), 1.0, 0.0)
    sums = _weighted_sums(up - tl.where((col > row) & (col < BT // 2), 1.0, 0.0), g, PT, PARTS)
    first = tl.sum(tl.where(row < BT // 2, g, 0.0), axis=0)
    second = tl.sum(tl.where(row >= BT // 2, g, 0.0), axis=0)
    return sums, first, second


@triton.jit
def half_reach(g, row, BT: tl.constexpr):
    """The most that a key decays in one half of a chunk, as a positive number."""
    first = tl.sum(tl.where(row < BT // 2, g, 0.0), axis=0)
    second = tl.sum(tl.where(row >= BT // 2, g, 0.0), axis=0)
    return tl.max(-tl.minimum(first, second), axis=0)
