"""Diagonal plus low rank recurrence on a GPU: Triton forward pass, chunks of 64 tokens.

With S the state before a chunk, G_i the log decays of a key summed up to token i of it (G_0 = 0)
and z_i = S_{i-1}^T a_i what token i reads, all z of a chunk solve a unit-triangular system:

    N_ab[i, j] = sum over keys of a_i e^{G_{i-1} - G_j} b_j   for j < i;   N_ak with k_j
    M_qb[i, j] = sum over keys of q_i e^{G_i - G_j} b_j       for j <= i;  M_qk with k_j
    z = W S + U        with X = (I - N_ab)^-1,  W = X a~,  U = X N_ak v,  a~_i = e^{G_{i-1}} a_i
    o = scale (q~ S + M_qb z + M_qk v)                        q~_i = e^{G_i} q_i
    S' = e^{G_64} S + b^T z + k^T v, with b and k decayed     by e^{G_64 - G_j}

Four kernels:

    split    every block of keys of a chunk on its own: q, a, b and k with their decays (below), and
             the decays of the chunk (``kernel_split.py``)
    pairs    every chunk on its own: X - I, N_ak, M_qb, M_qk, W, U
    states   one chunk after the other, parallel over batch, heads and value blocks: z and S
    output   every chunk on its own: o

The first two are launched twice: ``split`` marks the chunks whose decays are not mild, which are
left to its second launch; ``pairs`` has one launch for each kind.

The delta rule with a decay a key is the same with fewer products (``TIED``): a is -k, read after
its token's decay, b is beta k, and z is what is written, v minus what was read, so that U = X v and
no k stands beside b.

Decays may be of any size. Where they are mild (no key loses e^-64 in one half, in float32 e^-16),
e^{G_i - G_j} is split at the middle of the chunk, m = 32 (``linear/kernel_decays.py``): rows of q
hold e^{G_i - G_m}, those of a e^{G_{i-1} - G_m} (tied: as q) and those of b and k e^{G_m - G_j}, so
that products of rows are all that the matrices need, and states are kept with the half of the chunk
that is missing, e^{G_m} S and backwards e^{G_64 - G_m} dS'. Where a decay is not mild, rows hold
the decays to the ends of the chunk and states are kept as they are; the matrices split e^{G_i -
G_j} at the middle of the smallest aligned block of 2, 4, ... 64 tokens that holds both i and j, so
that no exponent is ever positive, and every exponent is a sum over an interval of tokens, never a
difference of sums. Such sums are products with 0/1 masks on the tensor cores. Dots run in the dtype
of the values and add up in float32; the state that is carried and sums of decays are float32, and
what is kept has the dtype of the values. X is kept without its diagonal of ones, so that X r = r +
(X - I) r rounds only the second term. Rows past T load as zeros, which write and decay nothing.

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
from edgelin.recurrences.dplr.kernel_decays import far_products
from edgelin.recurrences.dplr.kernel_inputs import Inputs, Shape, plan
from edgelin.recurrences.dplr.kernel_split import load_rows, log_decays, split_kernel
from edgelin.recurrences.launches import Launch, cdiv, planned


@triton.jit
def put_solved(v, a_in, ak, x, u, w, row, valid,
               K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
               TIED: tl.constexpr):  # fmt: skip
    """Store U and W."""
    for start in range(0, V, BV):
        values = tile(v, row, valid, start, V, BV)
        if TIED:
            old = values.to(tl.float32)
        else:
            old = tl.dot(ak.to(values.dtype), values, input_precision="ieee")
        new = tl.dot(x, old.to(x.dtype), old, input_precision="ieee")
        put_tile(u, new, row, valid, start, V, BV)
    for start in range(0, K, BK):
        reads = tile(a_in, row, valid, start, K, BK)
        new = tl.dot(x, reads, reads.to(tl.float32), input_precision="ieee")
        put_tile(w, new, row, valid, start, K, BK)


@triton.jit
def near_products(ab, ak, qb, qk, q_in, a_in, b_out, k_out, row, valid, start,
                  K: tl.constexpr, BK: tl.constexpr, TIED: tl.constexpr):  # fmt: skip
    """What a block of keys adds to the matrices, its decays split at the middle of the chunk."""
    queries, reads = tile(q_in, row, valid, start, K, BK), tile(a_in, row, valid, start, K, BK)
    adds = tl.trans(tile(b_out, row, valid, start, K, BK))
    ab = tl.dot(reads, adds, ab, input_precision="ieee")
    qb = tl.dot(queries, adds, qb, input_precision="ieee")
    if not TIED:
        keys = tl.trans(tile(k_out, row, valid, start, K, BK))
        ak = tl.dot(reads, keys, ak, input_precision="ieee")
        qk = tl.dot(queries, keys, qk, input_precision="ieee")
    return ab, ak, qb, qk


@triton.jit(do_not_specialize=["T"])
def pairs_kernel(q, k, v, a, b, beta, g, far, q_in, a_in, b_out, k_out, inverse, n_ak, m_qb, m_qk,
                 w, u, spans, T, H, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
                 BV: tl.constexpr, TIED: tl.constexpr, FAR: tl.constexpr, INVERSE: tl.constexpr,
                 PT: tl.constexpr, PARTS: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """What pairs of tokens of one chunk do to each other, if its decays are as FAR says."""
    if (tl.load(far + tl.program_id(0)) != 0) != FAR:
        return
    bh, first, end = own_chunk(spans, T, H, PACKED)
    row, valid = chunk_rows(bh, first, end, T, H)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    ab = tl.zeros([C, C], dtype=tl.float32)
    ak, qb, qk = ab, ab, ab
    for start in range(0, K, BK):
        if FAR:
            queries, reads, adds, keys = load_rows(q, k, a, b, beta, row, valid, start, K, BK, TIED)
            steps = log_decays(g, row, valid, start, K, BK)
            ab, ak, qb, qk = far_products(
                ab, ak, qb, qk, queries, reads, adds, keys, steps, i, j, TIED, PT, PARTS
            )
        else:
            ab, ak, qb, qk = near_products(
                ab, ak, qb, qk, q_in, a_in, b_out, k_out, row, valid, start, K, BK, TIED
            )
    put_tile(m_qb, tl.where(j <= i, qb, 0.0), row, valid, 0, C, C)
    ab, ak = tl.where(j < i, ab, 0.0), tl.where(j < i, ak, 0.0)
    x = tl.where(i == j, 0.0, unit_lower_inverse(ab, INVERSE)).to(v.dtype.element_ty)
    put_tile(inverse, x, row, valid, 0, C, C)
    if not TIED:
        put_tile(m_qk, tl.where(j <= i, qk, 0.0), row, valid, 0, C, C)
        put_tile(n_ak, ak, row, valid, 0, C, C)
    put_solved(v, a_in, ak, x, u, w, row, valid, K, V, BK, BV, TIED)


@triton.jit
def chunk_decays(decays, index, is_there, K: tl.constexpr, BK: tl.constexpr):
    """Of chunk number ``index``, decays of keys `[BK, 1]` that rows and states lack, before its
    middle and after it; and over all of it."""
    key = tl.arange(0, BK)[:, None]
    p, mask = decays + index * (3 * K) + key, (key < K) & is_there
    early = tl.load(p, mask=mask, other=0.0)
    return early, tl.load(p + K, mask=mask, other=0.0), tl.load(p + 2 * K, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["T"])
def states_kernel(v, w, u, b_out, k_out, decays, state, states, reads, final, order, T, H,
                  K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                  TIED: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """Pass a block of state columns through all chunks; keep each chunk's state and z."""
    which, bh, chunks, number, begin, end = own_sequence(order, T, H, PACKED)
    v_start = tl.program_id(1) * BV
    cells, inside = state_cells(which, 0, v_start, K, V, BK, BV)
    current = tl.load(state + cells, mask=inside, other=0.0).to(tl.float32)
    early, late, whole = chunk_decays(decays, number, chunks > 0, K, BK)
    row, valid = chunk_rows(bh, begin, end, T, H)
    old = tile(u, row, valid, v_start, V, BV)
    for n in range(0, chunks):
        row, valid = chunk_rows(bh, begin + n * C, end, T, H)
        index = number + n
        # a chunk ahead: the way from memory would add to every chunk's time
        early_1, late_1, whole_1 = chunk_decays(decays, index + 1, n + 1 < chunks, K, BK)
        row_1, valid_1 = chunk_rows(bh, begin + (n + 1) * C, end, T, H)
        old_1 = tile(u, row_1, valid_1, v_start, V, BV)
        kept, inside = state_cells(index, 0, v_start, K, V, BK, BV)
        start = (early * current).to(v.dtype.element_ty)
        tl.store(states + kept, start, mask=inside)
        rows = tile(w, row, valid, 0, K, BK)
        z = tl.dot(rows, start, old.to(tl.float32), input_precision="ieee")
        put_tile(reads, z, row, valid, v_start, V, BV)
        adds = tl.trans(tile(b_out, row, valid, 0, K, BK))
        added = tl.dot(adds, z.to(start.dtype), input_precision="ieee")
        if not TIED:
            keys = tl.trans(tile(k_out, row, valid, 0, K, BK))
            values = tile(v, row, valid, v_start, V, BV)
            added = tl.dot(keys, values, added, input_precision="ieee")
        current = whole * current + late * added
        early, late, whole, old = early_1, late_1, whole_1, old_1
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
def _split(shape: Shape, far: bool) -> Launch:
    return plan(split_kernel, "split", shape, far=far)


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
    w: Tensor  # X a_in [B, T, H, K]: W but for the decay before the middle
    q_in: Tensor  # q and a with the decays behind the middle of the chunk, far: behind its begin
    a_in: Tensor
    b_out: Tensor  # b and k with those up to the middle, far: up to the end
    k_out: Tensor
    ups: Tensor  # decays in q_in, which dq and da lack and db and dk have too many of; far: not set
    decays: Tensor  # before the middle, after it, and whole [B, H, N, 3, K]; far: 1, 1, whole
    states: Tensor  # before each chunk, times the first of these [B, H, N, K, V]
    reads: Tensor  # z [B, T, H, V]; between ``pairs`` and ``states`` U

    def distinct(self) -> list[Tensor]:
        """All of them once."""
        return list({id(x): x for x in self}.values())

    @classmethod
    def of(cls, distinct: Sequence[Tensor]) -> Carried:
        """From :meth:`distinct`; fewer than all is tied."""
        if len(distinct) == len(cls._fields):
            return cls(*distinct)
        far, inverse, m_qb, w, q_in, a_in, b_out, *rest = distinct
        return cls(far, inverse, m_qb, m_qb, m_qb, w, q_in, a_in, b_out, b_out, *rest)


def allocate(x: Inputs) -> Carried:
    """Memory for it."""
    (batch, time, heads, value), key, tied = x.v.shape, x.shape.key, x.shape.tied
    chunks = cdiv(x.shape.time, CHUNK)
    inverse, m_qb = (x.v.new_empty((batch, time, heads, CHUNK)) for _ in range(2))
    n_ak, m_qk = (m_qb if tied else torch.empty_like(m_qb) for _ in range(2))
    w, q_in, a_in, b_out, ups = (torch.empty_like(x.k) for _ in range(5))
    k_out = b_out if tied else torch.empty_like(x.k)
    decays = x.g.new_empty((batch, heads, chunks, 3, key), dtype=torch.float32)
    states = x.v.new_empty((batch, heads, chunks, key, value))
    far = x.g.new_zeros(batch * heads * chunks, dtype=torch.int32)
    return Carried(
        far, inverse, n_ak, m_qb, m_qk, w, q_in, a_in, b_out, k_out, ups, decays, states,
        torch.empty_like(x.v),
    )  # fmt: skip


def carry(x: Inputs) -> tuple[Carried, Tensor]:
    """Run ``split``, ``pairs`` and ``states``; also the last state `[B, H, K, V]`."""
    made, final = allocate(x), torch.empty_like(x.state)
    rows = made[6:10]
    for far in (False, True):
        _split(x.shape, far)(
            x.q, x.k, x.a, x.b, x.beta, x.g, made.far, *rows, made.ups, made.decays, x.spans
        )
        _pairs(x.shape, far)(
            x.q, x.k, x.v, x.a, x.b, x.beta, x.g, made.far, *rows, made.inverse, made.n_ak,
            made.m_qb, made.m_qk, made.w, made.reads, x.spans,
        )  # fmt: skip
    # z takes the place of U
    _states(x.shape)(
        x.v, made.w, made.reads, made.b_out, made.k_out, made.decays, x.state, made.states,
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
