"""Delta rule on a GPU: Triton kernels of the backward pass.

With the letters of ``kernel.py``, r = beta (v - e^G k S) so that u = X r, P = D * q k^T, and dS'
the gradient of the state after a chunk:

    du = scale P^T do + e^{G_64 - G} k dS'      dr = X^T du       dL = -dr u^T below the diagonal
    dS = e^{G_64} dS' + scale (e^G q)^T do - (beta e^G k)^T dr
    dP = scale do u^T, on and below the diagonal

Four launches, from what the first two of the forward pass left:

    local     every chunk on its own: scale P^T do
    reverse   from the last chunk to the first: dr and each chunk's dS'
    scores    every chunk on its own: dv, D * dP, beta D * dL and their shares of dbeta and dG
    keys      every chunk on its own: dq, dk, dbeta, dg

dL uses dX = du r^T, hence -X^T dX X^T = -dr u^T: the gradient through the inverse needs no product
of three matrices. Products that are needed transposed are computed or loaded that way: Triton
before 3.7.1 may miscompile a dot whose first operand is a transposed dot result (Hopper).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelin.recurrences.delta.kernel import (
    FLOOR,
    Carried,
    Inputs,
    Shape,
    carry,
    decay_matrix,
    decay_sums,
    factor,
    factors,
    plan,
    put_tile,
    state_cells,
    tile,
    total_decay,
)
from edgelin.recurrences.delta.kernel_chunks import C, chunk_rows, own_chunk, own_sequence
from edgelin.recurrences.launches import Launch, planned


@triton.jit(do_not_specialize=["T"])
def local_kernel(q, k, g, do, du, spans, scale, T, H,
                 K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                 HAS_G: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """Gradient of the writes through the outputs of their own chunk."""
    bh, first, end = own_chunk(spans, T, H, PACKED)
    v_start = tl.program_id(1) * BV
    row, valid = chunk_rows(bh, first, end, T, H)
    scores = tl.zeros([C, C], dtype=tl.float32)
    for start in range(0, K, BK):
        queries = tile(q, row, valid, start, K, BK)
        keys = tile(k, row, valid, start, K, BK)
        scores = tl.dot(keys, tl.trans(queries), scores, input_precision="ieee")
    sums = decay_sums(g, row, valid, HAS_G, WIDE)
    position = tl.arange(0, C)
    exponent = (sums[None, :] - sums[:, None]).to(tl.float32)
    later = position[None, :] >= position[:, None]
    scores *= scale * tl.exp(tl.where(later, exponent, float("-inf")))
    outer = tile(do, row, valid, v_start, V, BV)
    out = tl.dot(scores.to(outer.dtype), outer, input_precision="ieee")
    put_tile(du, out, row, valid, v_start, V, BV)


@triton.jit(do_not_specialize=["T"])
def reverse_kernel(q, k, beta, inverse, prefix, suffix, do, du, dfinal, dstates, dr, dstate,
                   order, scale, T, H,
                   K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                   HAS_G: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """Pass the gradient of a block of state columns back through all chunks."""
    index, bh, chunks, number, begin, end = own_sequence(order, T, H, PACKED)
    v_start = tl.program_id(1) * BV
    cells, inside = state_cells(index, 0, v_start, K, V, BK, BV)
    current = tl.load(dfinal + cells, mask=inside, other=0.0).to(tl.float32)
    first = begin + tl.maximum(chunks - 1, 0) * C
    strength, before, after, whole = factors(beta, prefix, suffix, bh, first, end, T, H, HAS_G, BK)
    row, valid = chunk_rows(bh, first, end, T, H)
    local = tile(du, row, valid, v_start, V, BV)
    for step in range(0, chunks):
        n = chunks - 1 - step
        row, valid = chunk_rows(bh, begin + n * C, end, T, H)
        # a chunk ahead: the way from memory would add to every chunk's time
        first = begin + tl.maximum(n - 1, 0) * C
        strength_1, before_1, after_1, whole_1 = factors(
            beta, prefix, suffix, bh, first, end, T, H, HAS_G, BK
        )
        row_1, valid_1 = chunk_rows(bh, first, end, T, H)
        local_1 = tile(du, row_1, valid_1, v_start, V, BV)
        kept, inside = state_cells(number + n, 0, v_start, K, V, BK, BV)
        read = current.to(q.dtype.element_ty)
        tl.store(dstates + kept, read, mask=inside)
        keys = tile(k, row, valid, 0, K, BK)
        write = tl.dot(keys, read, input_precision="ieee")
        write = after[:, None] * write
        write += local.to(tl.float32)
        x = tile(inverse, row, valid, 0, C, C)
        solved = tl.dot(tl.trans(x), write.to(x.dtype), write, input_precision="ieee")
        put_tile(dr, solved, row, valid, v_start, V, BV)
        outer = tile(do, row, valid, v_start, V, BV).to(tl.float32)
        outer = ((scale * before)[:, None] * outer).to(read.dtype)
        solved = ((-strength * before)[:, None] * solved).to(read.dtype)
        queries = tile(q, row, valid, 0, K, BK)
        current *= whole[:, None]
        current = tl.dot(tl.trans(queries), outer, current, input_precision="ieee")
        current = tl.dot(tl.trans(keys), solved, current, input_precision="ieee")
        strength, before, after, whole = strength_1, before_1, after_1, whole_1
        local = local_1
    tl.store(dstate + cells, current, mask=inside)


@triton.jit(do_not_specialize=["T"])
def scores_kernel(q, k, v, beta, g, writes, do, dr, dv, dscores, dlower, strengths, dsums,
                  spans, scale, T, H,
                  K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                  HAS_G: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """dv, the gradients of q k^T and k k^T, and what they give to beta and G."""
    bh, first, end = own_chunk(spans, T, H, PACKED)
    row, valid = chunk_rows(bh, first, end, T, H)
    strength = tl.load(beta + row, mask=valid, other=0.0).to(tl.float32)
    dp = tl.zeros([C, C], dtype=tl.float32)
    dl = tl.zeros([C, C], dtype=tl.float32)
    db = tl.zeros([C], dtype=tl.float32)
    for start in range(0, V, BV):
        new = tl.trans(tile(writes, row, valid, start, V, BV))
        outer = tile(do, row, valid, start, V, BV)
        solved = tile(dr, row, valid, start, V, BV)
        dp = tl.dot(outer, new, dp, input_precision="ieee")
        dl = tl.dot(solved, new, dl, input_precision="ieee")
        solved = solved.to(tl.float32)
        values = tile(v, row, valid, start, V, BV).to(tl.float32)
        put_tile(dv, strength[:, None] * solved, row, valid, start, V, BV)
        db += tl.sum(solved * values, axis=1)
    gram = tl.zeros([C, C], dtype=tl.float32)
    scores = tl.zeros([C, C], dtype=tl.float32)
    for start in range(0, K, BK):
        keys = tile(k, row, valid, start, K, BK)
        queries = tile(q, row, valid, start, K, BK)
        gram = tl.dot(keys, tl.trans(keys), gram, input_precision="ieee")
        scores = tl.dot(queries, tl.trans(keys), scores, input_precision="ieee")
    decay = decay_matrix(decay_sums(g, row, valid, HAS_G, WIDE))
    position = tl.arange(0, C)
    below = position[:, None] > position[None, :]
    dp *= scale * decay
    dl = tl.where(below, -dl * decay, 0.0)
    db += tl.sum(dl * gram, axis=1)
    dl *= strength[:, None]
    put_tile(dscores, dp, row, valid, 0, C, C)
    put_tile(dlower, dl, row, valid, 0, C, C)
    tl.store(strengths + row, db, mask=valid)
    if HAS_G:
        # the diagonal has no decay: left out, since it would only cancel
        both = tl.where(below, dp * scores + dl * gram, 0.0)
        tl.store(dsums + row, tl.sum(both, axis=1) - tl.sum(both, axis=0), mask=valid)


@triton.jit(do_not_specialize=["T"])
def keys_kernel(q, k, beta, g, prefix, suffix, states, writes, do, dr, dstates,
                dscores, dlower, strengths, dsums, dq, dk, dbeta, dg, spans, scale, T, H,
                K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                HAS_G: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """dq and dk, one block of key columns after the other; then dbeta and dg are whole."""
    bh, first, end = own_chunk(spans, T, H, PACKED)
    row, valid = chunk_rows(bh, first, end, T, H)
    before = factor(prefix, row, valid, HAS_G)
    after = factor(suffix, row, valid, HAS_G)
    strength = tl.load(beta + row, mask=valid, other=0.0).to(tl.float32)
    through_read = tl.zeros([C], dtype=tl.float32)
    through_erase = tl.zeros([C], dtype=tl.float32)
    through_write = tl.zeros([C], dtype=tl.float32)
    through_state = 0.0
    for k_start in range(0, K, BK):
        read = tl.zeros([C, BK], dtype=tl.float32)
        erase = tl.zeros([C, BK], dtype=tl.float32)
        write = tl.zeros([C, BK], dtype=tl.float32)
        for v_start in range(0, V, BV):
            cells, inside = state_cells(tl.program_id(0), k_start, v_start, K, V, BK, BV)
            state = tl.load(states + cells, mask=inside, other=0.0)
            dstate = tl.load(dstates + cells, mask=inside, other=0.0)
            outer = tile(do, row, valid, v_start, V, BV)
            new = tile(writes, row, valid, v_start, V, BV)
            solved = tile(dr, row, valid, v_start, V, BV)
            read = tl.dot(outer, tl.trans(state), read, input_precision="ieee")
            erase = tl.dot(solved, tl.trans(state), erase, input_precision="ieee")
            write = tl.dot(new, tl.trans(dstate), write, input_precision="ieee")
            if HAS_G:
                through_state += tl.sum(state.to(tl.float32) * dstate.to(tl.float32))
        queries = tile(q, row, valid, k_start, K, BK)
        keys = tile(k, row, valid, k_start, K, BK)
        read *= (scale * before)[:, None]
        erase *= before[:, None]
        write *= after[:, None]
        keys32 = keys.to(tl.float32)
        through_read += tl.sum(read * queries.to(tl.float32), axis=1)
        through_erase += tl.sum(erase * keys32, axis=1)
        through_write += tl.sum(write * keys32, axis=1)
        dp = tile(dscores, row, valid, 0, C, C)
        dl = tile(dlower, row, valid, 0, C, C)
        read = tl.dot(dp, keys, read, input_precision="ieee")
        put_tile(dq, read, row, valid, k_start, K, BK)
        write -= strength[:, None] * erase
        write = tl.dot(tl.trans(dp), queries, write, input_precision="ieee")
        write = tl.dot(tl.trans(dl), keys, write, input_precision="ieee")
        write = tl.dot(dl, keys, write, input_precision="ieee")
        put_tile(dk, write, row, valid, k_start, K, BK)
    share = tl.load(strengths + row, mask=valid, other=0.0)
    tl.store(dbeta + row, share - through_erase, mask=valid)
    if HAS_G:
        sums = tl.load(dsums + row, mask=valid, other=0.0)
        sums += through_read - strength * through_erase
        # G_i holds every g up to i; a suffix every g after i; the whole decay all of them
        steps = tl.cumsum(sums, axis=0, reverse=True)
        steps += tl.cumsum(through_write, axis=0) - through_write
        steps += total_decay(prefix, bh, first, end, T, H, HAS_G, 1) * through_state
        clamped = tl.load(g + row, mask=valid, other=0.0).to(tl.float32) < FLOOR
        tl.store(dg + row, tl.where(clamped, 0.0, steps), mask=valid)


@planned
def _local(shape: Shape, scale: float) -> Launch:
    return plan(local_kernel, "local", shape, scale)


@planned
def _reverse(shape: Shape, scale: float) -> Launch:
    return plan(reverse_kernel, "reverse", shape, scale)


@planned
def _scores(shape: Shape, scale: float) -> Launch:
    return plan(scores_kernel, "scores", shape, scale)


@planned
def _keys(shape: Shape, scale: float) -> Launch:
    return plan(keys_kernel, "keys", shape, scale)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    do: Tensor,
    dfinal: Tensor,
    carried: Carried | None = None,
    ends: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, beta, g (empty without g) and state; shapes as in the forward pass.

    ``carried`` comes from the forward pass; without it the first two kernels run again. ``ends`` as
    there.
    """
    x = Inputs.prepare(q, k, v, beta, g, state, ends)
    inverse, prefix, suffix, states, writes = carried or carry(x)[0]
    do, dfinal = do.to(v.dtype).contiguous(), dfinal.contiguous()
    du, dr = torch.empty_like(x.v), torch.empty_like(x.v)
    dstates, dstate = torch.empty_like(states), torch.empty_like(x.state)
    _local(x.shape, scale)(x.q, x.k, x.g, do, du, x.spans)
    _reverse(x.shape, scale)(
        x.q, x.k, x.beta, inverse, prefix, suffix, do, du, dfinal, dstates, dr, dstate, x.order
    )
    dq, dk, dv = torch.empty_like(x.q), torch.empty_like(x.k), du  # du was read
    dscores, dlower = torch.empty_like(inverse), torch.empty_like(inverse)
    strengths, dbeta = (x.v.new_empty(x.v.shape[:3], dtype=torch.float32) for _ in range(2))
    dsums, dg = torch.empty_like(prefix), torch.empty_like(prefix)
    shares = (dscores, dlower, strengths, dsums)
    _scores(x.shape, scale)(x.q, x.k, x.v, x.beta, x.g, writes, do, dr, dv, *shares, x.spans)
    _keys(x.shape, scale)(
        x.q, x.k, x.beta, x.g, prefix, suffix, states, writes, do, dr, dstates, *shares,
        dq, dk, dbeta, dg, x.spans,
    )  # fmt: skip
    dg = dg if x.shape.has_g else state.new_empty(0)
    return dq.to(q.dtype), dk.to(k.dtype), dv, dbeta.to(beta.dtype), dg, dstate
