"""The inverse of a chunk's unit-triangular matrix, in a Triton kernel.

Block recursion over levels (``chunks.unit_lower_inverse``): at level s, pairs of tokens lie in the
odd and the even half of one aligned block of 2^(s + 1) tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edgelin.recurrences import CHUNK

C = tl.constexpr(CHUNK)
LEVELS = tl.constexpr(CHUNK.bit_length() - 1)


@triton.jit
def odd_half(i, level):
    """Whether token ``i`` is in the second half of its block of 2^(level + 1) tokens."""
    return ((i >> level) & 1) == 1


@triton.jit
def paired(i, j, level):
    """Pairs whose decay is split at this level: i in the odd half of a block, j in the even one."""
    same = (i >> (level + 1)) == (j >> (level + 1))
    return same & odd_half(i, level) & ((j >> level) & 1 == 0)


@triton.jit
def unit_lower_inverse(lower, INVERSE: tl.constexpr):
    """(I - ``lower``)^-1 by masked block recursion: X <- X + X L_s X for blocks of 2, 4, ... 64.

    Blocks of up to 16 are multiplied as what they are, four on the diagonal.
    """
    SMALL: tl.constexpr = "tf32x3" if INVERSE == "bf16x3" else INVERSE
    n, m = tl.arange(0, 4)[:, None, None, None], tl.arange(0, 4)[None, None, :, None]
    small = tl.sum(tl.where(n == m, tl.reshape(lower, [4, 16, 4, 16]), 0.0), axis=2)
    i, j = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    x = tl.where(i == j, 1.0, 0.0) + tl.where(paired(i, j, 0), small, 0.0)
    for level in range(1, 4):
        quarter = tl.where(paired(i, j, level), small, 0.0)
        step = tl.dot(quarter, x, input_precision=SMALL)
        x += tl.dot(x, step, input_precision=SMALL)
    spread = tl.where(n == m, tl.expand_dims(x, 2), 0.0)
    x = tl.reshape(spread, [C, C])
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    for level in range(4, LEVELS):
        quarter = tl.where(paired(i, j, level), lower, 0.0)
        step = tl.dot(quarter, x, input_precision=INVERSE)
        x += tl.dot(x, step, input_precision=INVERSE)
    return x
