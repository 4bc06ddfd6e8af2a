"""The matrices of a chunk whose decays are not mild, for the kernels of this recurrence.

Decays are split level by level, as ``chunks.key_products`` does it: at level s, pairs
of tokens lie in the odd and the even half of one aligned block of 2^(s + 1) tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edgelin.recurrences.delta.kernel_inverse import LEVELS, odd_half, paired
from edgelin.recurrences.dplr.kernel_split import times
from edgelin.recurrences.linear.kernel_decays import _sums


@triton.jit
def middle(i, level):
    """Last token of the first half of this block."""
    return ((i >> level) | 1) * (1 << level) - 1


@triton.jit
def interval(i, l, level):
    """Tokens l whose decay lies between i and the middle: up to i itself, or after i (b, k)."""
    m = middle(i, level)
    return tl.where(odd_half(i, level), (l > m) & (l <= i), (l > i) & (l <= m))


@triton.jit
def read_interval(i, l, level):
    """The same for a, which reads the state before the decay of its own token."""
    return odd_half(i, level) & (l > middle(i, level)) & (l < i)


@triton.jit
def far_products(ab, ak, qb, qk, queries, reads, adds, keys, steps, i, j,
                 TIED: tl.constexpr, PT: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """What a block of keys adds to the matrices, for decays of any size, level by level."""
    same = tl.sum(queries.to(tl.float32) * adds.to(tl.float32), axis=1)
    qb += tl.where(i == j, same[:, None], 0.0)
    same = tl.sum(queries.to(tl.float32) * keys.to(tl.float32), axis=1)
    qk += tl.where(i == j, same[:, None], 0.0)
    for level in range(0, LEVELS):
        factor = tl.exp(_sums(interval(i, j, level), steps, PT, PARTS))
        near = factor
        if not TIED:
            near = tl.exp(_sums(read_interval(i, j, level), steps, PT, PARTS))
        here = paired(i, j, level)
        left, right = times(reads, near), tl.trans(times(adds, factor))
        ab += tl.where(here, tl.dot(left, right, input_precision="ieee"), 0.0)
        asking = times(queries, factor)
        qb += tl.where(here, tl.dot(asking, right, input_precision="ieee"), 0.0)
        if not TIED:
            right = tl.trans(times(keys, factor))
            ak += tl.where(here, tl.dot(left, right, input_precision="ieee"), 0.0)
            qk += tl.where(here, tl.dot(asking, right, input_precision="ieee"), 0.0)
    return ab, ak, qb, qk
