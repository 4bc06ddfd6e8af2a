"""Diagonal plus low rank recurrence on a GPU: Triton forward pass, chunks of 64 tokens.

With S the state before a chunk, G_i the log decays of a key summed up to token i of it (G_0 = 0)
and z_i = S_{i-1}^T a_i what token i reads, all z of a chunk solve a unit-triangular system:

    N_ab[i, j] = sum over keys of a_i e^{G_{i-1} - G_j} b_j   for j < i;   N_ak with k_j
    M_qb[i, j] = sum over keys of q_i e^{G_i - G_j} b_j       for j <= i;  M_qk with k_j
    z = W S + U        with X = (I - N_ab)^-1,  W = X a~,  U = X N_ak v,  a~_i = e^{G_{i-1}} a_i
    o = scale (q~ S + M_qb z + M_qk v)                        q~_i = e^{G_i} q_i
    S' = e^{G_64} S + b^T z + k^T v, with b and k decayed     by e^{G_64 - G_j}

Four launches:

    pairs    every chunk on its own: X - I, N_ak, M_qb, M_qk, W, U, and the rows q~, b and k decayed
             to the ends of the chunk; once for chunks of mild decays and once for the others
    states   one chunk after the other, parallel over batch, heads and value blocks: z and S
    output   every chunk on its own: o

The delta rule with a decay a key is the same with fewer products (``TIED``): a is -k, read after
its token's decay, b is beta k, and z is what is written, v minus what was read, so that U = X v and
no k stands beside b.

Decays may be of any size. Where they are mild, e^{G_i - G_j} is split at the middle of the chunk
(``linear/kernel_decays.py``). Where one is not, it is split at the middle of the smallest aligned
block of 2, 4, ... 64 tokens that holds both i and j, so that no exponent is ever positive, and
every exponent is a sum over an interval of tokens, never a difference of sums. Such sums are
products with 0/1 masks on the tensor cores. Dots run in the dtype of the values and add up in
float32; states, decays and the inverse are float32. X is kept without its diagonal of ones, so that
X r = r + (X - I) r rounds only the second term. Rows past T load as zeros, which write and decay
nothing.

Source: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence
Length", arXiv:2406.06484, section 3, for the transition of Peng et al. 2025, "RWKV-7",
arXiv:2503.14456, equation 16, and of Kimi Team 2025, "Kimi Linear", arXiv:2510.26692, equation 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelin.recurrences import CHUNK
from edgelin.recurrences.delta.kernel import put_tile, state_cells, tile
from edgelin.recurrences.delta.kernel_chunks import C, chunk_rows, own_chunk, own_sequence
from edgelin.recurrences.delta.kernel_inverse import unit_lower_inverse
from edgelin.recurrences.dplr.kernel_decays import (
    far_products,
    log_decays,
    near_products,
    times,
)
from edgelin.recurrences.dplr.kernel_inputs import Inputs, Shape, plan
from edgelin.recurrences.launches import Launch, cdiv, planned
from edgelin.recurrences.linear.kernel_decays import (
    REACH,
    SHORT_REACH,
    _sums,
    from_middle,
    half_reach,
)


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


@triton.jit
def decays_far(g, row, valid, K: tl.constexpr, BK: tl.constexpr):
    """Whether a key decays too far in half a chunk to split its decays at the middle."""
    reach = 0.0
    for start in range(0, K, BK):
        steps = log_decays(g, row, valid, start, K, BK)
        reach = tl.maximum(reach, half_reach(steps, tl.arange(0, C)[:, None], C))
    return reach


@triton.jit
def put_solved(k, v, a, g, ak, x, u, w, row, valid, i, j,
               K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
               TIED: tl.constexpr, PT: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Store U and W."""
    for start in range(0, V, BV):
        values = tile(v, row, valid, start, V, BV)
        if TIED:
            old = values.to(tl.float32)
        else:
            old = tl.dot(ak.to(values.dtype), values, input_precision="ieee")
        put_tile(u, tl.dot(x, old.to(x.dtype), old, input_precision="ieee"), row, valid, start,
                 V, BV)  # fmt: skip
    for start in range(0, K, BK):
        steps = log_decays(g, row, valid, start, K, BK)
        if TIED:
            read = -tile(k, row, valid, start, K, BK).to(tl.float32)
            read *= tl.exp(_sums(j <= i, steps, PT, PARTS))
        else:
            read = tile(a, row, valid, start, K, BK).to(tl.float32)
            read *= tl.exp(_sums(j < i, steps, PT, PARTS))
        put_tile(w, tl.dot(x, read.to(x.dtype), read, input_precision="ieee"), row, valid, start,
                 K, BK)  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def pairs_kernel(q, k, v, a, b, beta, g, far, inverse, n_ak, m_qb, m_qk, w, u, q_in, b_out, k_out,
                 total, spans, T, H, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
                 BV: tl.constexpr, TIED: tl.constexpr, FAR: tl.constexpr, INVERSE: tl.constexpr,
                 PT: tl.constexpr, PARTS: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """What pairs of tokens of one chunk do to each other, and the rows decayed to its ends."""
    bh, first, end = own_chunk(spans, T, H, PACKED)
    row, valid = chunk_rows(bh, first, end, T, H)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if FAR:
        if tl.load(far + tl.program_id(0)) == 0:
            return
    else:
        is_far = decays_far(g, row, valid, K, BK) >= (REACH if PARTS == 2 else SHORT_REACH)
        tl.store(far + tl.program_id(0), is_far.to(tl.int32))
        if is_far:
            return
    ab = tl.zeros([C, C], dtype=tl.float32)
    ak, qb, qk = ab, ab, ab
    for start in range(0, K, BK):
        queries, reads, adds, keys = load_rows(q, k, a, b, beta, row, valid, start, K, BK, TIED)
        steps = log_decays(g, row, valid, start, K, BK)
        if FAR:
            before = tl.exp(_sums(j <= i, steps, PT, PARTS))
            after = tl.exp(_sums(j > i, steps, PT, PARTS))
            ab, ak, qb, qk = far_products(
                ab, ak, qb, qk, queries, reads, adds, keys, steps, i, j, TIED, PT, PARTS
            )
        else:
            sums, early, late = from_middle(steps, i, j, C, PT, PARTS)
            up, down = tl.exp(sums), tl.exp(-sums)
            before, after = up * tl.exp(early)[None, :], down * tl.exp(late)[None, :]
            near = up if TIED else tl.exp(sums - steps)
            ab, ak, qb, qk = near_products(
                ab, ak, qb, qk, queries, reads, adds, keys, up, near, down, i, j, TIED
            )
        put_tile(q_in, queries.to(tl.float32) * before, row, valid, start, K, BK)
        put_tile(b_out, adds.to(tl.float32) * after, row, valid, start, K, BK)
        if not TIED:
            put_tile(k_out, keys.to(tl.float32) * after, row, valid, start, K, BK)
        column = start + tl.arange(0, BK)
        whole = tl.exp(tl.sum(steps, axis=0))
        tl.store(total + tl.program_id(0).to(tl.int64) * K + column, whole, mask=column < K)
    put_tile(m_qb, qb, row, valid, 0, C, C)
    x = tl.where(i == j, 0.0, unit_lower_inverse(ab, INVERSE)).to(v.dtype.element_ty)
    put_tile(inverse, x, row, valid, 0, C, C)
    if not TIED:
        put_tile(m_qk, qk, row, valid, 0, C, C)
        put_tile(n_ak, ak, row, valid, 0, C, C)
    put_solved(k, v, a, g, ak, x, u, w, row, valid, i, j, K, V, BK, BV, TIED, PT, PARTS)


@triton.jit
def total_decay(total, index, K: tl.constexpr, BK: tl.constexpr):
    """Decay of every key over the whole of chunk number ``index``, `[BK]`."""
    key = tl.arange(0, BK)
    return tl.load(total + index * K + key, mask=key < K, other=0.0)


@triton.jit(do_not_specialize=["T"])
def states_kernel(v, w, u, b_out, k_out, total, state, states, reads, final, order, T, H,
                  K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                  TIED: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """Pass a block of state columns through all chunks; keep each chunk's state and z."""
    which, bh, chunks, number, begin, end = own_sequence(order, T, H, PACKED)
    v_start = tl.program_id(1) * BV
    cells, inside = state_cells(which, 0, v_start, K, V, BK, BV)
    current = tl.load(state + cells, mask=inside, other=0.0).to(tl.float32)
    for n in range(0, chunks):
        row, valid = chunk_rows(bh, begin + n * C, end, T, H)
        index = number + n
        kept, inside = state_cells(index, 0, v_start, K, V, BK, BV)
        start = current.to(v.dtype.element_ty)
        tl.store(states + kept, start, mask=inside)
        z = tile(u, row, valid, v_start, V, BV).to(tl.float32)
        z = tl.dot(tile(w, row, valid, 0, K, BK), start, z, input_precision="ieee")
        put_tile(reads, z, row, valid, v_start, V, BV)
        current *= total_decay(total, index, K, BK)[:, None]
        adds = tl.trans(tile(b_out, row, valid, 0, K, BK))
        current = tl.dot(adds, z.to(start.dtype), current, input_precision="ieee")
        if not TIED:
            keys = tl.trans(tile(k_out, row, valid, 0, K, BK))
            values = tile(v, row, valid, v_start, V, BV)
            current = tl.dot(keys, values, current, input_precision="ieee")
    tl.store(final + cells, current, mask=inside)


@triton.jit(do_not_specialize=["T"])
def output_kernel(v, m_qb, m_qk, q_in, states, reads, o, spans, scale, T, H,
                  K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                  TIED: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """Outputs of one chunk, one block of value columns."""
    bh, first, end = own_chunk(spans, T, H, PACKED)
    v_start = tl.program_id(1) * BV
    row, valid = chunk_rows(bh, first, end, T, H)
    out = tl.zeros([C, BV], dtype=tl.float32)
    for start in range(0, K, BK):
        queries = tile(q_in, row, valid, start, K, BK)
        cells, inside = state_cells(tl.program_id(0), start, v_start, K, V, BK, BV)
        block = tl.load(states + cells, mask=inside, other=0.0)
        out = tl.dot(queries, block, out, input_precision="ieee")
    z = tile(reads, row, valid, v_start, V, BV)
    out = tl.dot(tile(m_qb, row, valid, 0, C, C), z, out, input_precision="ieee")
    if not TIED:
        values = tile(v, row, valid, v_start, V, BV)
        out = tl.dot(tile(m_qk, row, valid, 0, C, C), values, out, input_precision="ieee")
    put_tile(o, scale * out, row, valid, v_start, V, BV)


@planned
def _pairs(shape: Shape, far: bool) -> Launch:
    return plan(pairs_kernel, "pairs", shape, far=far)


@planned
def _states(shape: Shape) -> Launch:
    return plan(states_kernel, "states", shape)


@planned
def _output(shape: Shape, scale: float) -> Launch:
    return plan(output_kernel, "output", shape, scale)


class Carried(NamedTuple):
    """What the chunks compute before the outputs; N chunks a row, packed of all sequences.

    Tied: n_ak, m_qk and k_out are not there.
    """

    far: Tensor  # whether decays of a chunk are too strong to split at its middle [B * H * N]
    inverse: Tensor  # X - I [B, T, H, 64], row of the token; so are the next three
    n_ak: Tensor
    m_qb: Tensor
    m_qk: Tensor
    w: Tensor  # W [B, T, H, K]
    q_in: Tensor  # q~ [B, T, H, K]
    b_out: Tensor  # b decayed to the end of the chunk [B, T, H, K]
    k_out: Tensor  # k decayed to the end of the chunk [B, T, H, K]
    total: Tensor  # e^{G_64} [B, H, N, K]
    states: Tensor  # before each chunk [B, H, N, K, V]
    reads: Tensor  # z [B, T, H, V]

    def distinct(self) -> list[Tensor]:
        """All of them once."""
        return list({id(x): x for x in self}.values())

    @classmethod
    def of(cls, distinct: Sequence[Tensor]) -> Carried:
        """From :meth:`distinct`; fewer than all is tied."""
        if len(distinct) == len(cls._fields):
            return cls(*distinct)
        far, inverse, m_qb, w, q_in, b_out, *rest = distinct
        return cls(far, inverse, m_qb, m_qb, m_qb, w, q_in, b_out, b_out, *rest)


def allocate(x: Inputs) -> Carried:
    """Memory for it."""
    (batch, time, heads, value), key, tied = x.v.shape, x.shape.key, x.shape.tied
    chunks = cdiv(x.shape.time, CHUNK)
    inverse, m_qb = (x.v.new_empty((batch, time, heads, CHUNK)) for _ in range(2))
    n_ak, m_qk = (m_qb if tied else torch.empty_like(m_qb) for _ in range(2))
    w, q_in, b_out = (torch.empty_like(x.k) for _ in range(3))
    k_out = b_out if tied else torch.empty_like(x.k)
    total = x.g.new_empty((batch, heads, chunks, key), dtype=torch.float32)
    states = x.v.new_empty((batch, heads, chunks, key, value))
    far = x.g.new_empty(batch * heads * chunks, dtype=torch.int32)
    reads = torch.empty_like(x.v)
    return Carried(far, inverse, n_ak, m_qb, m_qk, w, q_in, b_out, k_out, total, states, reads)


def carry(x: Inputs) -> tuple[Carried, Tensor]:
    """Run ``pairs`` and ``states``; also the last state `[B, H, K, V]`."""
    made, final = allocate(x), torch.empty_like(x.state)
    for far in (False, True):
        _pairs(x.shape, far)(
            x.q, x.k, x.v, x.a, x.b, x.beta, x.g, made.far, made.inverse, made.n_ak, made.m_qb,
            made.m_qk, made.w, made.reads, made.q_in, made.b_out, made.k_out, made.total,
            x.spans,
        )  # fmt: skip
    # z takes the place of U
    _states(x.shape)(
        x.v, made.w, made.reads, made.b_out, made.k_out, made.total, x.state, made.states,
        made.reads, final, x.order,
    )  # fmt: skip
    return made, final


def outputs(x: Inputs, scale: float) -> tuple[Tensor, Tensor, Carried]:
    """All kernels."""
    made, final = carry(x)
    o = torch.empty_like(x.v)
    _output(x.shape, scale)(
        x.v, made.m_qb, made.m_qk, made.q_in, made.states, made.reads, o, x.spans
    )
    return o, final, made


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    state: Tensor,
    scale: float,
    ends: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor, Carried]:
    """Outputs `[B, T, H, V]`, the new state `[B, H, K, V]` and what the backward pass goes on from.

    Values are float32 or bfloat16. ``ends``: where sequences packed into the only row end, 0 first;
    each has a state.
    """
    return outputs(Inputs.prepare(q, k, v, g, state, pair=(a, b), ends=ends), scale)


def delta_forward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor, scale: float,
    ends: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor, Carried]:  # fmt: skip
    """The same for the delta rule with a decay a key, g `[B, T, H, K]`."""
    return outputs(Inputs.prepare(q, k, v, g, state, beta=beta, ends=ends), scale)
