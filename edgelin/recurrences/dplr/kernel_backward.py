"""Diagonal plus low rank recurrence on a GPU: Triton backward pass.

With the letters of ``kernel.py``, r = a~ S + N_ak v so that z = X r, and dS' the gradient of the
state after a chunk:

    dz = scale M_qb^T do + b dS'      dr = X^T dz                  (b, k decayed to the end)
    dS = e^{G_64} dS' + scale q~^T do + W^T dz
    dv = scale M_qk^T do + N_ak^T dr + k dS'                       (tied: dv = dr)
    dM_qb = scale do z^T    dM_qk = scale do v^T    dN_ab = dr z^T    dN_ak = dr v^T

dN_ab needs no product of three matrices, since X^T dz = dr and X r = z. Four kernels, from what
the forward pass left:

    reverse     from the last chunk to the first: dz, and each chunk's dS' times e^{G_64 - G_m}, the
                half that rows of b and k lack (strong decays: dS')
    scores      every chunk on its own: dr, dv and the gradients of the four matrices
    left        every chunk on its own: dq, da and their share of dg
    right       every chunk on its own: db, dk and the rest of dg

``left`` and ``right`` are launched for chunks of mild decays and again for the others; every chunk
is computed by one of them. Products that are needed transposed are computed or loaded that way:
Triton before 3.7.1 may miscompile a dot whose first operand is a transposed dot result (Hopper).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelin.recurrences.delta.kernel import FLOOR, put_tile, state_cells, tile
from edgelin.recurrences.delta.kernel_chunks import C, chunk_rows, own_chunk, own_sequence
from edgelin.recurrences.dplr.kernel import Carried, carry, chunk_decays
from edgelin.recurrences.dplr.kernel_gradients import (
    far_left,
    far_right,
    left_terms,
    near_left,
    near_right,
    right_terms,
)
from edgelin.recurrences.dplr.kernel_inputs import Inputs, Shape, plan
from edgelin.recurrences.dplr.kernel_split import load_rows, log_decays, times
from edgelin.recurrences.launches import Launch, planned


@triton.jit(do_not_specialize=["T"])
def reverse_kernel(m_qb, q_in, w, b_out, decays, do, dfinal, dstates, dz, dstate, order,
                   scale, T, H,
                   K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                   PACKED: tl.constexpr):  # fmt: skip
    """Pass the gradient of a block of state columns back through all chunks."""
    which, bh, chunks, number, begin, end = own_sequence(order, T, H, PACKED)
    v_start = tl.program_id(1) * BV
    cells, inside = state_cells(which, 0, v_start, K, V, BK, BV)
    current = tl.load(dfinal + cells, mask=inside, other=0.0).to(tl.float32)
    early, late, whole = chunk_decays(decays, number + chunks - 1, chunks > 0, K, BK)
    for step in range(0, chunks):
        n = chunks - 1 - step
        row, valid = chunk_rows(bh, begin + n * C, end, T, H)
        index = number + n
        early_1, late_1, whole_1 = chunk_decays(decays, index - 1, n > 0, K, BK)
        kept, inside = state_cells(index, 0, v_start, K, V, BK, BV)
        read = (late * current).to(do.dtype.element_ty)
        tl.store(dstates + kept, read, mask=inside)
        outer = times(tile(do, row, valid, v_start, V, BV), scale)
        x = tile(m_qb, row, valid, 0, C, C)
        write = tl.dot(tl.trans(x), outer, input_precision="ieee")
        write = tl.dot(tile(b_out, row, valid, 0, K, BK), read, write, input_precision="ieee")
        put_tile(dz, write, row, valid, v_start, V, BV)
        queries = tl.trans(tile(q_in, row, valid, 0, K, BK))
        added = tl.dot(queries, outer, input_precision="ieee")
        solved = tl.trans(tile(w, row, valid, 0, K, BK))
        added = tl.dot(solved, write.to(x.dtype), added, input_precision="ieee")
        current = whole * current + early * added
        early, late, whole = early_1, late_1, whole_1
    tl.store(dstate + cells, current, mask=inside)


@triton.jit(do_not_specialize=["T"])
def scores_kernel(v, inverse, n_ak, m_qk, k_out, reads, dstates, do, dz, dv,
                  dn_ab, dn_ak, dm_qb, dm_qk, spans, scale, T, H,
                  K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                  TIED: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """dv, dr in the place of dz, and the gradients of the four matrices of a chunk."""
    bh, first, end = own_chunk(spans, T, H, PACKED)
    row, valid = chunk_rows(bh, first, end, T, H)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    ab = tl.zeros([C, C], dtype=tl.float32)
    ak, qb, qk = ab, ab, ab
    for v_start in range(0, V, BV):
        write = tile(dz, row, valid, v_start, V, BV)
        x = tl.trans(tile(inverse, row, valid, 0, C, C))
        solved = tl.dot(x, write, write.to(tl.float32), input_precision="ieee").to(write.dtype)
        put_tile(dz, solved, row, valid, v_start, V, BV)
        outer = tile(do, row, valid, v_start, V, BV)
        z = tl.trans(tile(reads, row, valid, v_start, V, BV))
        ab = tl.dot(solved, z, ab, input_precision="ieee")
        qb = tl.dot(outer, z, qb, input_precision="ieee")
        if TIED:
            put_tile(dv, solved, row, valid, v_start, V, BV)
        else:
            scores = tl.trans(tile(m_qk, row, valid, 0, C, C))
            out = scale * tl.dot(scores, outer, input_precision="ieee")
            scores = tl.trans(tile(n_ak, row, valid, 0, C, C))
            out = tl.dot(scores, solved, out, input_precision="ieee")
            for k_start in range(0, K, BK):
                keys = tile(k_out, row, valid, k_start, K, BK)
                cells, inside = state_cells(tl.program_id(0), k_start, v_start, K, V, BK, BV)
                block = tl.load(dstates + cells, mask=inside, other=0.0)
                out = tl.dot(keys, block, out, input_precision="ieee")
            put_tile(dv, out, row, valid, v_start, V, BV)
            values = tl.trans(tile(v, row, valid, v_start, V, BV))
            ak = tl.dot(solved, values, ak, input_precision="ieee")
            qk = tl.dot(outer, values, qk, input_precision="ieee")
    put_tile(dn_ab, tl.where(j < i, ab, 0.0), row, valid, 0, C, C)
    put_tile(dm_qb, tl.where(j <= i, scale * qb, 0.0), row, valid, 0, C, C)
    if not TIED:
        put_tile(dn_ak, tl.where(j < i, ak, 0.0), row, valid, 0, C, C)
        put_tile(dm_qk, tl.where(j <= i, scale * qk, 0.0), row, valid, 0, C, C)


@triton.jit
def load_matrices(dn_ab, dn_ak, dm_qb, dm_qk, row, valid):
    """The gradients of the four matrices `[64, 64]`."""
    ab, ak = tile(dn_ab, row, valid, 0, C, C), tile(dn_ak, row, valid, 0, C, C)
    return ab, ak, tile(dm_qb, row, valid, 0, C, C), tile(dm_qk, row, valid, 0, C, C)


@triton.jit(do_not_specialize=["T"])
def left_kernel(q, k, a, b, beta, g, far, q_in, a_in, b_out, k_out, ups, decays,
                states, dstates, do, dr, dn_ab, dn_ak, dm_qb, dm_qk,
                dq, da, dg, spans, scale, T, H,
                K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                TIED: tl.constexpr, FAR: tl.constexpr, PACKED: tl.constexpr,
                PT: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """dq, da and their share of dg in one chunk, if its decays are as FAR says."""
    if (tl.load(far + tl.program_id(0)) != 0) != FAR:
        return
    bh, first, end = own_chunk(spans, T, H, PACKED)
    row, valid = chunk_rows(bh, first, end, T, H)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    for start in range(0, K, BK):
        to_q, to_a, through = left_terms(
            states, dstates, do, dr, row, valid, scale, start, K, V, BK, BV
        )
        ab, ak, qb, qk = load_matrices(dn_ab, dn_ak, dm_qb, dm_qk, row, valid)
        if FAR:
            queries, sources, adds, keys = load_rows(
                q, k, a, b, beta, row, valid, start, K, BK, TIED
            )
            steps = log_decays(g, row, valid, start, K, BK)
            through *= tl.exp(tl.sum(steps, axis=0))
            to_q, to_a, share = far_left(
                to_q, to_a, ab, ak, qb, qk, queries, sources, adds, keys, steps, i, j,
                TIED, PT, PARTS,
            )  # fmt: skip
        else:
            to_q, to_a, share = near_left(
                to_q, to_a, ab, ak, qb, qk, q_in, a_in, b_out, k_out, ups, decays,
                row, valid, start, H, i, j, K, BK, TIED, PT, PARTS,
            )  # fmt: skip
        put_tile(dq, to_q, row, valid, start, K, BK)
        put_tile(da, to_a, row, valid, start, K, BK)
        put_tile(dg, share + through[None, :], row, valid, start, K, BK)


@triton.jit(do_not_specialize=["T"])
def right_kernel(q, k, v, a, b, beta, g, far, q_in, a_in, b_out, k_out, ups,
                 reads, dstates, dn_ab, dn_ak, dm_qb, dm_qk,
                 da, dk, db, dbeta, dg, spans, T, H,
                 K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                 TIED: tl.constexpr, FAR: tl.constexpr, PACKED: tl.constexpr,
                 PT: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """dk, db and the rest of dg; tied: of k as read and as written, and dbeta."""
    if (tl.load(far + tl.program_id(0)) != 0) != FAR:
        return
    bh, first, end = own_chunk(spans, T, H, PACKED)
    row, valid = chunk_rows(bh, first, end, T, H)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    strengths = tl.zeros([C], dtype=tl.float32)
    for start in range(0, K, BK):
        to_b, to_k = right_terms(dstates, reads, v, row, valid, start, K, V, BK, BV, TIED)
        ab, ak, qb, qk = load_matrices(dn_ab, dn_ak, dm_qb, dm_qk, row, valid)
        ab, ak, qb, qk = tl.trans(ab), tl.trans(ak), tl.trans(qb), tl.trans(qk)
        if FAR:
            queries, sources, adds, keys = load_rows(
                q, k, a, b, beta, row, valid, start, K, BK, TIED
            )
            steps = log_decays(g, row, valid, start, K, BK)
            to_b, to_k, share = far_right(
                to_b, to_k, ab, ak, qb, qk, queries, sources, adds, keys, steps, i, j,
                TIED, PT, PARTS,
            )  # fmt: skip
        else:
            to_b, to_k, share = near_right(
                to_b, to_k, ab, ak, qb, qk, q_in, a_in, b_out, k_out, ups,
                row, valid, start, i, j, K, BK, TIED, PT, PARTS,
            )  # fmt: skip
        if TIED:
            strength = tl.load(beta + row, mask=valid, other=0.0).to(tl.float32)
            keys = tile(k, row, valid, start, K, BK).to(tl.float32)
            strengths += tl.sum(keys * to_b, axis=1)
            to_k = strength[:, None] * to_b - tile(da, row, valid, start, K, BK).to(tl.float32)
        else:
            put_tile(db, to_b, row, valid, start, K, BK)
        put_tile(dk, to_k, row, valid, start, K, BK)
        share += tile(dg, row, valid, start, K, BK).to(tl.float32)
        if FAR:  # no mild decay is as strong as the floor
            kept = tile(g, row, valid, start, K, BK).to(tl.float32) >= FLOOR
            share = tl.where(kept, share, 0.0)
        put_tile(dg, share, row, valid, start, K, BK)
    if TIED:
        tl.store(dbeta + row, strengths, mask=valid)


@planned
def _reverse(shape: Shape, scale: float) -> Launch:
    return plan(reverse_kernel, "reverse", shape, scale)


@planned
def _scores(shape: Shape, scale: float) -> Launch:
    return plan(scores_kernel, "scores", shape, scale)


@planned
def _left(shape: Shape, scale: float, far: bool) -> Launch:
    return plan(left_kernel, "left", shape, scale, far=far)


@planned
def _right(shape: Shape, far: bool) -> Launch:
    return plan(right_kernel, "right", shape, far=far)


def gradients(
    x: Inputs, scale: float, do: Tensor, dfinal: Tensor, carried: Carried | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, da, db, dbeta, dg and that of the state; tied: da and db are of no use to the
    caller, else dbeta is.

    ``carried`` comes from the forward pass; without it all launches of the forward
    pass but that of ``output`` run again.
    """
    made, tied = carried or carry(x)[0], x.shape.tied
    do, dfinal = do.to(x.v.dtype).contiguous(), dfinal.contiguous()
    dz, dstates, dinitial = (torch.empty_like(y) for y in (x.v, made.states, x.state))
    _reverse(x.shape, scale)(
        made.m_qb, made.q_in, made.w, made.b_out, made.decays, do, dfinal, dstates, dz, dinitial,
        x.order,
    )  # fmt: skip
    dq, dk, dv, dg = (torch.empty_like(y) for y in (x.q, x.k, x.v, x.g))
    da, db = torch.empty_like(x.a), dq if tied else torch.empty_like(x.b)
    dbeta = torch.empty_like(x.beta) if tied else dq
    dn_ab, dm_qb = (torch.empty_like(made.m_qb) for _ in range(2))
    dn_ak, dm_qk = (dn_ab if tied else torch.empty_like(dn_ab) for _ in range(2))
    matrices = (dn_ab, dn_ak, dm_qb, dm_qk)
    rows = (made.far, *made[6:11])
    _scores(x.shape, scale)(
        x.v, made.inverse, made.n_ak, made.m_qk, made.k_out, made.reads, dstates, do, dz, dv,
        *matrices, x.spans,
    )  # fmt: skip
    for far in (False, True):
        _left(x.shape, scale, far)(
            x.q, x.k, x.a, x.b, x.beta, x.g, *rows, made.decays, made.states, dstates, do, dz,
            *matrices, dq, da, dg, x.spans,
        )  # fmt: skip
        _right(x.shape, far)(
            x.q, x.k, x.v, x.a, x.b, x.beta, x.g, *rows, made.reads, dstates, *matrices,
            da, dk, db, dbeta, dg, x.spans,
        )  # fmt: skip
    return dq, dk, dv, da, db, dbeta, dg, dinitial


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
    carried: Carried | None = None,
    ends: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, a, b, g (float32) and state; shapes as in the forward pass."""
    x = Inputs.prepare(q, k, v, g, state, pair=(a, b), ends=ends)
    dq, dk, dv, da, db, _, dg, dinitial = gradients(x, scale, do, dstate, carried)
    dq, dk, da, db = (d.to(t.dtype) for d, t in zip((dq, dk, da, db), (q, k, a, b), strict=True))
    return dq, dk, dv, da, db, dg, dinitial


def delta_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    state: Tensor,
    scale: float,
    do: Tensor,
    dstate: Tensor,
    carried: Carried | None = None,
    ends: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the delta rule with a decay a key: q, k, v, beta, g and state."""
    x = Inputs.prepare(q, k, v, g, state, beta=beta, ends=ends)
    dq, dk, dv, _, _, dbeta, dg, dinitial = gradients(x, scale, do, dstate, carried)
    return dq.to(q.dtype), dk.to(k.dtype), dv, dbeta, dg, dinitial
