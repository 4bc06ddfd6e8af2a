"""Diagonal plus low rank recurrence on a GPU: Triton backward pass.

With the letters of ``kernel.py``, r = a~ S + N_ak v so that z = X r, and dS' the gradient of the
state after a chunk:

    dz = scale M_qb^T do + b dS'      dr = X^T dz                  (b, k decayed to the end)
    dS = e^{G_64} dS' + scale q~^T do + a~^T dr
    dv = scale M_qk^T do + N_ak^T dr + k dS'
    dM_qb = scale do z^T    dM_qk = scale do v^T    dN_ab = dr z^T    dN_ak = dr v^T

dN_ab needs no product of three matrices, since X^T dz = dr and X r = z. Five launches: the first
two kernels of the forward pass again (nothing but the inputs is kept), then

    reverse   from the last chunk to the first: dr and each chunk's dS'
    scores    every chunk on its own: dv and the gradients of the four matrices
    keys      every chunk and block of keys on its own: dq, dk, da, db, dg

The gradient of a decay is a sum over the intervals of tokens that it lies in. Every decay factor
gives its share to the tokens of its own interval (the forward masks transposed), so that no two
large terms cancel and the gradient of a tiny factor is tiny. Products that are needed transposed
are computed or loaded that way: Triton before 3.7.1 may miscompile a dot whose first operand is a
transposed dot result (Hopper).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelin.recurrences import CHUNK
from edgelin.recurrences.delta.kernel import FLOOR, C, chunk_rows, put_tile, state_cells, tile
from edgelin.recurrences.dplr.kernel import (
    LEVELS,
    Blocks,
    Carried,
    Inputs,
    carry,
    interval,
    log_decays,
    paired,
    read_interval,
    times,
    total_decay,
)
from edgelin.recurrences.linear.kernel_passes import _sums


@triton.jit(do_not_specialize=["T"])
def reverse_kernel(inverse, m_qb, q_in, a_in, b_out, total, do, dfinal, dstates, dr, dstate,
                   scale, T, H,
                   K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
                   BV: tl.constexpr):  # fmt: skip
    """Pass the gradient of a block of state columns back through all chunks."""
    bh = tl.program_id(0)
    v_start = tl.program_id(1) * BV
    chunks = tl.cdiv(T, C)
    cells, inside = state_cells(bh, 0, v_start, K, V, BK, BV)
    current = tl.load(dfinal + cells, mask=inside, other=0.0).to(tl.float32)
    for step in range(0, chunks):
        n = chunks - 1 - step
        row, valid = chunk_rows(bh, n, T, H)
        index = bh.to(tl.int64) * chunks + n
        kept, inside = state_cells(index, 0, v_start, K, V, BK, BV)
        end = current.to(do.dtype.element_ty)
        tl.store(dstates + kept, end, mask=inside)
        outer = times(tile(do, row, valid, v_start, V, BV), scale)
        x = tile(m_qb, row, valid, 0, C, C)
        dz = tl.dot(tl.trans(x), outer, input_precision="ieee")
        dz = tl.dot(tile(b_out, row, valid, 0, K, BK), end, dz, input_precision="ieee")
        x = tile(inverse, row, valid, 0, C, C)
        solved = tl.dot(tl.trans(x), dz.to(x.dtype), dz, input_precision="ieee")
        put_tile(dr, solved, row, valid, v_start, V, BV)
        current *= total_decay(total, index, K, BK)[:, None]
        queries = tl.trans(tile(q_in, row, valid, 0, K, BK))
        current = tl.dot(queries, outer, current, input_precision="ieee")
        reads = tl.trans(tile(a_in, row, valid, 0, K, BK))
        current = tl.dot(reads, solved.to(x.dtype), current, input_precision="ieee")
    tl.store(dstate + cells, current, mask=inside)


@triton.jit(do_not_specialize=["T"])
def scores_kernel(v, n_ak, m_qk, k_out, reads, dstates, do, dr, dv, dn_ab, dn_ak, dm_qb, dm_qk,
                  scale, T, H,
                  K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
                  BV: tl.constexpr):  # fmt: skip
    """dv and the gradients of the four matrices of a chunk, unmasked."""
    chunks = tl.cdiv(T, C)
    bh, n = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    row, valid = chunk_rows(bh, n, T, H)
    ab = tl.zeros([C, C], dtype=tl.float32)
    ak = tl.zeros([C, C], dtype=tl.float32)
    qb = tl.zeros([C, C], dtype=tl.float32)
    qk = tl.zeros([C, C], dtype=tl.float32)
    for v_start in range(0, V, BV):
        outer = times(tile(do, row, valid, v_start, V, BV), scale)
        solved = tile(dr, row, valid, v_start, V, BV)
        scores = tl.trans(tile(m_qk, row, valid, 0, C, C))
        out = tl.dot(scores, outer, input_precision="ieee")
        scores = tl.trans(tile(n_ak, row, valid, 0, C, C))
        out = tl.dot(scores, solved, out, input_precision="ieee")
        for k_start in range(0, K, BK):
            keys = tile(k_out, row, valid, k_start, K, BK)
            cells, inside = state_cells(tl.program_id(0), k_start, v_start, K, V, BK, BV)
            block = tl.load(dstates + cells, mask=inside, other=0.0)
            out = tl.dot(keys, block, out, input_precision="ieee")
        put_tile(dv, out, row, valid, v_start, V, BV)
        z = tl.trans(tile(reads, row, valid, v_start, V, BV))
        values = tl.trans(tile(v, row, valid, v_start, V, BV))
        ab = tl.dot(solved, z, ab, input_precision="ieee")
        ak = tl.dot(solved, values, ak, input_precision="ieee")
        qb = tl.dot(outer, z, qb, input_precision="ieee")
        qk = tl.dot(outer, values, qk, input_precision="ieee")
    put_tile(dn_ab, ab, row, valid, 0, C, C)
    put_tile(dn_ak, ak, row, valid, 0, C, C)
    put_tile(dm_qb, qb, row, valid, 0, C, C)
    put_tile(dm_qk, qk, row, valid, 0, C, C)


@triton.jit
def masked(x, mask):
    """``x`` where the mask is set, else zero, in its own dtype."""
    return tl.where(mask, x.to(tl.float32), 0.0).to(x.dtype)


@triton.jit
def diagonal(x, i, j):
    """The diagonal of ``x`` `[64, 64]` as a column `[64, 1]`, float32."""
    return tl.sum(tl.where(i == j, x.to(tl.float32), 0.0), axis=1)[:, None]


@triton.jit
def end_terms(states, dstates, reads, v, do, dr, row, valid, start,
              K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """What reaches q, a, b, k and the whole decay through the states at both ends of the chunk."""
    to_q = tl.zeros([C, BK], dtype=tl.float32)
    to_a = tl.zeros([C, BK], dtype=tl.float32)
    to_b = tl.zeros([C, BK], dtype=tl.float32)
    to_k = tl.zeros([C, BK], dtype=tl.float32)
    through = tl.zeros([BK], dtype=tl.float32)
    for v_start in range(0, V, BV):
        cells, inside = state_cells(tl.program_id(0), start, v_start, K, V, BK, BV)
        first = tl.load(states + cells, mask=inside, other=0.0)
        last = tl.load(dstates + cells, mask=inside, other=0.0)
        through += tl.sum(first.to(tl.float32) * last.to(tl.float32), axis=1)
        first, last = tl.trans(first), tl.trans(last)
        outer = tile(do, row, valid, v_start, V, BV)
        to_q = tl.dot(outer, first, to_q, input_precision="ieee")
        to_a = tl.dot(tile(dr, row, valid, v_start, V, BV), first, to_a, input_precision="ieee")
        to_b = tl.dot(tile(reads, row, valid, v_start, V, BV), last, to_b, input_precision="ieee")
        to_k = tl.dot(tile(v, row, valid, v_start, V, BV), last, to_k, input_precision="ieee")
    return to_q, to_a, to_b, to_k, through


@triton.jit
def end_decay(share, share_q, share_a, through, steps, i, j,
              PT: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Gradient of the log decays through the states at both ends of the chunk."""
    decay = _sums(i > j, share, PT, PARTS)
    decay += _sums(i <= j, share_q, PT, PARTS)
    decay += _sums(i < j, share_a, PT, PARTS)
    return decay + (through * tl.exp(tl.sum(steps, axis=0)))[None, :]


@triton.jit(do_not_specialize=["T"])
def keys_kernel(q, k, v, a, b, g, states, reads, dstates, do, dr, dn_ab, dn_ak, dm_qb, dm_qk,
                dq, dk, da, db, dg, scale, T, H,
                K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                PT: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Gradients of q, k, a, b and g in one chunk and one block of keys."""
    chunks = tl.cdiv(T, C)
    bh, n = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    start = tl.program_id(1) * BK
    row, valid = chunk_rows(bh, n, T, H)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    to_q, to_a, to_b, to_k, through = end_terms(
        states, dstates, reads, v, do, dr, row, valid, start, K, V, BK, BV
    )
    queries = tile(q, row, valid, start, K, BK)
    keys = tile(k, row, valid, start, K, BK)
    sources = tile(a, row, valid, start, K, BK)
    adds = tile(b, row, valid, start, K, BK)
    steps = log_decays(g, row, valid, start, K, BK)
    to_q *= scale * tl.exp(_sums(j <= i, steps, PT, PARTS))
    to_a *= tl.exp(_sums(j < i, steps, PT, PARTS))
    after = tl.exp(_sums(j > i, steps, PT, PARTS))
    to_b *= after
    to_k *= after
    share = to_b * adds.to(tl.float32) + to_k * keys.to(tl.float32)
    share_q, share_a = to_q * queries.to(tl.float32), to_a * sources.to(tl.float32)
    decay = end_decay(share, share_q, share_a, through, steps, i, j, PT, PARTS)
    # a token with itself: no decay
    ab = tile(dn_ab, row, valid, 0, C, C)
    ak = tile(dn_ak, row, valid, 0, C, C)
    qb = tile(dm_qb, row, valid, 0, C, C)
    qk = tile(dm_qk, row, valid, 0, C, C)
    to_q += diagonal(qb, i, j) * adds.to(tl.float32) + diagonal(qk, i, j) * keys.to(tl.float32)
    to_b += diagonal(qb, i, j) * queries.to(tl.float32)
    to_k += diagonal(qk, i, j) * queries.to(tl.float32)
    for level in range(0, LEVELS):
        factor = tl.exp(_sums(interval(i, j, level), steps, PT, PARTS))
        near = tl.exp(_sums(read_interval(i, j, level), steps, PT, PARTS))
        here = paired(i, j, level)
        add, key = times(adds, factor), times(keys, factor)
        part = tl.dot(masked(qb, here), add, input_precision="ieee")
        part = factor * tl.dot(masked(qk, here), key, part, input_precision="ieee")
        to_q += part
        share = part * queries.to(tl.float32)
        part = tl.dot(masked(ab, here), add, input_precision="ieee")
        part = near * tl.dot(masked(ak, here), key, part, input_precision="ieee")
        to_a += part
        decay += _sums(read_interval(j, i, level), part * sources.to(tl.float32), PT, PARTS)
        query, source = times(queries, factor), times(sources, near)
        part = tl.dot(tl.trans(masked(qb, here)), query, input_precision="ieee")
        part = tl.dot(tl.trans(masked(ab, here)), source, part, input_precision="ieee")
        part *= factor
        to_b += part
        share += part * adds.to(tl.float32)
        part = tl.dot(tl.trans(masked(qk, here)), query, input_precision="ieee")
        part = tl.dot(tl.trans(masked(ak, here)), source, part, input_precision="ieee")
        part *= factor
        to_k += part
        share += part * keys.to(tl.float32)
        decay += _sums(interval(j, i, level), share, PT, PARTS)
    put_tile(dq, to_q, row, valid, start, K, BK)
    put_tile(da, to_a, row, valid, start, K, BK)
    put_tile(db, to_b, row, valid, start, K, BK)
    put_tile(dk, to_k, row, valid, start, K, BK)
    kept = tile(g, row, valid, start, K, BK).to(tl.float32) >= FLOOR
    put_tile(dg, tl.where(kept, decay, 0.0), row, valid, start, K, BK)


class Solved(NamedTuple):
    """What the pass from the last chunk to the first leaves behind."""

    dr: Tensor  # [B, T, H, V]
    dstates: Tensor  # after each chunk [B, H, N, K, V]
    dstate: Tensor  # before the first token [B, H, K, V]


def _reverse(
    x: Inputs, carried: Carried, blocks: Blocks, scale: float, do: Tensor, dfinal: Tensor
) -> Solved:
    """Run the kernel ``reverse``."""
    batch, time, heads, width = x.v.shape
    dr = torch.empty_like(x.v)
    dstates, dstate = torch.empty_like(carried.states), torch.empty_like(x.state)
    reverse_kernel[(batch * heads, triton.cdiv(width, blocks.state_value))](
        carried.inverse, carried.m_qb, carried.q_in, carried.a_in, carried.b_out, carried.total,
        do, dfinal, dstates, dr, dstate, scale, time, heads,
        K=x.k.shape[-1], V=width, BK=blocks.key, BV=blocks.state_value,
        num_warps=blocks.warps, num_stages=1,
    )  # fmt: skip
    return Solved(dr, dstates, dstate)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    state: Tensor,
    scale: float,
    do: Tensor,
    dstate: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, a, b, g (float32) and state; shapes as in the forward pass."""
    with torch.cuda.device_of(v):
        x = Inputs.prepare(q, k, v, a, b, g, state)
        blocks = Blocks.choose(x.k, x.v)
        carried = carry(x, blocks)
        do, dstate = do.to(v.dtype).contiguous(), dstate.contiguous()
        solved = _reverse(x, carried, blocks, scale, do, dstate)
        batch, time, heads, width = v.shape
        key = x.k.shape[-1]
        sizes = {"K": key, "V": width, "BK": blocks.key_part, "BV": blocks.value_part,
                 "num_warps": 8, "num_stages": 1}  # fmt: skip
        dv, dg = torch.empty_like(x.v), torch.empty_like(x.g)
        matrices = [torch.empty_like(carried.inverse) for _ in range(4)]
        chunks = batch * heads * triton.cdiv(time, CHUNK)
        scores_kernel[(chunks,)](
            x.v, carried.n_ak, carried.m_qk, carried.k_out, carried.reads, solved.dstates, do,
            solved.dr, dv, *matrices, scale, time, heads, **sizes,
        )  # fmt: skip
        dq, dk, da, db = (torch.empty_like(x.k) for _ in range(4))
        keys_kernel[(chunks, triton.cdiv(key, blocks.key_part))](
            x.q, x.k, x.v, x.a, x.b, x.g, carried.states, carried.reads, solved.dstates, do,
            solved.dr, *matrices, dq, dk, da, db, dg, scale, time, heads, **sizes, **blocks.masks,
        )  # fmt: skip
    dq, dk, da, db = (d.to(t.dtype) for d, t in zip((dq, dk, da, db), (q, k, a, b), strict=True))
    return dq, dk, dv, da, db, dg, solved.dstate
