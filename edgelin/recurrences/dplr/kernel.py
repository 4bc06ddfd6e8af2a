"""Diagonal plus low rank recurrence on a GPU: Triton forward pass, chunks of 64 tokens.

With S the state before a chunk, G_i the log decays of a key summed up to token i of it (G_0 = 0)
and z_i = S_{i-1}^T a_i what token i reads, all z of a chunk solve a unit-triangular system:

    N_ab[i, j] = sum over keys of a_i e^{G_{i-1} - G_j} b_j   for j < i;   N_ak with k_j
    M_qb[i, j] = sum over keys of q_i e^{G_i - G_j} b_j       for j <= i;  M_qk with k_j
    (I - N_ab) z = a~ S + N_ak v                              a~_i = e^{G_{i-1}} a_i
    o = scale (q~ S + M_qb z + M_qk v)                        q~_i = e^{G_i} q_i
    S' = e^{G_64} S + b^T z + k^T v, with b and k decayed     by e^{G_64 - G_j}

Three launches:

    pairs    every chunk on its own: X - I with X = (I - N_ab)^-1, N_ak, M_qb, M_qk, and the rows
             q~, a~, b and k decayed to the ends of the chunk
    states   one chunk after the other, parallel over batch, heads and value blocks: z and S
    output   every chunk on its own: o

Decays may be of any size: e^{G_i - G_j} is split at the middle of the smallest aligned block of
2, 4, ... 64 tokens that holds both i and j, so no exponent is ever positive, and every exponent is
a sum over an interval of tokens, never a difference of sums. Such sums are products with 0/1 masks
on the tensor cores. Dots run in the dtype of the values and add up in float32; states, decays and
the inverse are float32. X is kept without its diagonal of ones, so that X r = r + (X - I) r rounds
only the second term. Rows past T load as zeros, which write and decay nothing.

Source: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence
Length", arXiv:2406.06484, section 3, for the transition of Peng et al. 2025, "RWKV-7",
arXiv:2503.14456, equation 16.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelin.recurrences import CHUNK
from edgelin.recurrences.delta.kernel import FLOOR, C, chunk_rows, put_tile, state_cells, tile
from edgelin.recurrences.linear.kernel_passes import _sums

LEVELS = tl.constexpr(CHUNK.bit_length() - 1)


@triton.jit
def log_decays(g, row, valid, start, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Clamped log decays `[64, BLOCK]`, float32; zeros outside."""
    return tl.maximum(tile(g, row, valid, start, WIDTH, BLOCK).to(tl.float32), FLOOR)


@triton.jit
def times(x, factor):
    """``x * factor`` in the dtype of ``x``."""
    return (x.to(tl.float32) * factor).to(x.dtype)


@triton.jit
def odd_half(i, level):
    """Whether token ``i`` is in the second half of its block of 2^(level + 1) tokens."""
    return ((i >> level) & 1) == 1


@triton.jit
def middle(i, level):
    """Last token of the first half of this block."""
    return ((i >> level) | 1) * (1 << level) - 1


@triton.jit
def paired(i, j, level):
    """Pairs whose decay is split at this level: i in the odd half of a block, j in the even one."""
    same = (i >> (level + 1)) == (j >> (level + 1))
    return same & odd_half(i, level) & ((j >> level) & 1 == 0)


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
def unit_lower_inverse(lower, INVERSE: tl.constexpr):
    """(I - ``lower``)^-1 by masked block recursion: X <- X + X L_s X for blocks of 2, 4, ... 64."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    x = tl.where(i == j, 1.0, 0.0) + tl.where(paired(i, j, 0), lower, 0.0)
    for level in range(1, LEVELS):
        quarter = tl.where(paired(i, j, level), lower, 0.0)
        step = tl.dot(quarter, x, input_precision=INVERSE)
        x += tl.dot(x, step, input_precision=INVERSE)
    return x


@triton.jit(do_not_specialize=["T"])
def pairs_kernel(q, k, a, b, g, inverse, n_ak, m_qb, m_qk, q_in, a_in, b_out, k_out, total, T, H,
                 K: tl.constexpr, BK: tl.constexpr, INVERSE: tl.constexpr,
                 PT: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """What pairs of tokens of one chunk do to each other, and the rows decayed to its ends."""
    chunks = tl.cdiv(T, C)
    bh, n = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    row, valid = chunk_rows(bh, n, T, H)
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    ab = tl.zeros([C, C], dtype=tl.float32)
    ak = tl.zeros([C, C], dtype=tl.float32)
    qb = tl.zeros([C, C], dtype=tl.float32)
    qk = tl.zeros([C, C], dtype=tl.float32)
    for start in range(0, K, BK):
        queries = tile(q, row, valid, start, K, BK)
        keys = tile(k, row, valid, start, K, BK)
        reads = tile(a, row, valid, start, K, BK)
        adds = tile(b, row, valid, start, K, BK)
        steps = log_decays(g, row, valid, start, K, BK)
        before = tl.exp(_sums(j <= i, steps, PT, PARTS))
        put_tile(q_in, queries.to(tl.float32) * before, row, valid, start, K, BK)
        before = tl.exp(_sums(j < i, steps, PT, PARTS))
        put_tile(a_in, reads.to(tl.float32) * before, row, valid, start, K, BK)
        after = tl.exp(_sums(j > i, steps, PT, PARTS))
        put_tile(b_out, adds.to(tl.float32) * after, row, valid, start, K, BK)
        put_tile(k_out, keys.to(tl.float32) * after, row, valid, start, K, BK)
        column = start + tl.arange(0, BK)
        whole = tl.exp(tl.sum(steps, axis=0))
        tl.store(total + tl.program_id(0).to(tl.int64) * K + column, whole, mask=column < K)
        same = tl.sum(queries.to(tl.float32) * adds.to(tl.float32), axis=1)
        qb += tl.where(i == j, same[:, None], 0.0)
        same = tl.sum(queries.to(tl.float32) * keys.to(tl.float32), axis=1)
        qk += tl.where(i == j, same[:, None], 0.0)
        for level in range(0, LEVELS):
            factor = tl.exp(_sums(interval(i, j, level), steps, PT, PARTS))
            near = tl.exp(_sums(read_interval(i, j, level), steps, PT, PARTS))
            here = paired(i, j, level)
            left, right = times(reads, near), tl.trans(times(adds, factor))
            ab += tl.where(here, tl.dot(left, right, input_precision="ieee"), 0.0)
            other = tl.trans(times(keys, factor))
            ak += tl.where(here, tl.dot(left, other, input_precision="ieee"), 0.0)
            left = times(queries, factor)
            qb += tl.where(here, tl.dot(left, right, input_precision="ieee"), 0.0)
            qk += tl.where(here, tl.dot(left, other, input_precision="ieee"), 0.0)
    put_tile(n_ak, ak, row, valid, 0, C, C)
    put_tile(m_qb, qb, row, valid, 0, C, C)
    put_tile(m_qk, qk, row, valid, 0, C, C)
    x = unit_lower_inverse(ab, INVERSE)
    put_tile(inverse, tl.where(i == j, 0.0, x), row, valid, 0, C, C)


@triton.jit
def total_decay(total, index, K: tl.constexpr, BK: tl.constexpr):
    """Decay of every key over the whole of chunk number ``index``, `[BK]`."""
    key = tl.arange(0, BK)
    return tl.load(total + index * K + key, mask=key < K, other=0.0)


@triton.jit(do_not_specialize=["T"])
def states_kernel(v, inverse, n_ak, a_in, b_out, k_out, total, state, states, reads, final, T, H,
                  K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
                  BV: tl.constexpr):  # fmt: skip
    """Pass a block of state columns through all chunks; keep each chunk's state and z."""
    bh = tl.program_id(0)
    v_start = tl.program_id(1) * BV
    chunks = tl.cdiv(T, C)
    cells, inside = state_cells(bh, 0, v_start, K, V, BK, BV)
    current = tl.load(state + cells, mask=inside, other=0.0).to(tl.float32)
    for n in range(0, chunks):
        row, valid = chunk_rows(bh, n, T, H)
        index = bh.to(tl.int64) * chunks + n
        kept, inside = state_cells(index, 0, v_start, K, V, BK, BV)
        start = current.to(v.dtype.element_ty)
        tl.store(states + kept, start, mask=inside)
        values = tile(v, row, valid, v_start, V, BV)
        old = tl.dot(tile(n_ak, row, valid, 0, C, C), values, input_precision="ieee")
        old = tl.dot(tile(a_in, row, valid, 0, K, BK), start, old, input_precision="ieee")
        x = tile(inverse, row, valid, 0, C, C)
        z = tl.dot(x, old.to(x.dtype), old, input_precision="ieee")
        put_tile(reads, z, row, valid, v_start, V, BV)
        current *= total_decay(total, index, K, BK)[:, None]
        adds = tl.trans(tile(b_out, row, valid, 0, K, BK))
        current = tl.dot(adds, z.to(x.dtype), current, input_precision="ieee")
        keys = tl.trans(tile(k_out, row, valid, 0, K, BK))
        current = tl.dot(keys, values, current, input_precision="ieee")
    tl.store(final + cells, current, mask=inside)


@triton.jit(do_not_specialize=["T"])
def output_kernel(v, m_qb, m_qk, q_in, states, reads, o, scale, T, H,
                  K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
                  BV: tl.constexpr):  # fmt: skip
    """Outputs of one chunk, one block of value columns."""
    chunks = tl.cdiv(T, C)
    bh, n = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    v_start = tl.program_id(1) * BV
    row, valid = chunk_rows(bh, n, T, H)
    out = tl.zeros([C, BV], dtype=tl.float32)
    for start in range(0, K, BK):
        queries = tile(q_in, row, valid, start, K, BK)
        cells, inside = state_cells(tl.program_id(0), start, v_start, K, V, BK, BV)
        block = tl.load(states + cells, mask=inside, other=0.0)
        out = tl.dot(queries, block, out, input_precision="ieee")
    z = tile(reads, row, valid, v_start, V, BV)
    out = tl.dot(tile(m_qb, row, valid, 0, C, C), z, out, input_precision="ieee")
    values = tile(v, row, valid, v_start, V, BV)
    out = tl.dot(tile(m_qk, row, valid, 0, C, C), values, out, input_precision="ieee")
    put_tile(o, scale * out, row, valid, v_start, V, BV)


class Blocks(NamedTuple):
    """Block sizes and dot precisions by dtype and widths; a fixed choice, nothing is tuned."""

    key: int  # whole key width, padded to a power of two
    key_part: int  # block of a loop or a grid over the key width
    value_part: int  # block of a loop or a grid over the value width
    state_value: int  # block of state columns that one program carries along
    inverse_precision: str
    masks: dict[str, Any]  # how products with 0/1 masks are made
    warps: int  # of the kernels that hold one state block or one output block

    @classmethod
    def choose(cls, k: Tensor, v: Tensor) -> Blocks:
        """For keys ``k`` `[B, T, H, K]` and values ``v`` `[B, T, H, V]`."""
        full = v.dtype == torch.float32
        # bfloat16 tiles are never narrower than one tensor-core tile of 64
        least, part = (16, 32) if full else (64, 64)
        key = max(least, triton.next_power_of_2(k.shape[-1]))
        value = max(least, triton.next_power_of_2(v.shape[-1]))
        return cls(
            key=key,
            key_part=min(key, part),
            value_part=min(value, part),
            # without tensor cores a dot keeps both operands in registers
            state_value=min(value, (16 if key > 64 else 32) if full else 64),
            # three tf32 products on tensor cores are exact enough beside bfloat16 inputs
            inverse_precision="ieee" if full else "tf32x3",
            # Triton's interpreter multiplies bfloat16 wrongly: on the CPU masks are float32
            masks={"PT": tl.bfloat16 if v.is_cuda else tl.float32, "PARTS": 3 if full else 2},
            warps=8 if full else 4,
        )


class Inputs(NamedTuple):
    """Contiguous inputs, all but the decay and the state in the dtype of the values."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    g: Tensor
    state: Tensor

    @classmethod
    def prepare(cls, *tensors: Tensor) -> Inputs:
        """Bring the arguments of the op, in this order, into the form that the kernels take."""
        given = cls(*tensors)
        q, k, a, b = (x.to(given.v.dtype) for x in (given.q, given.k, given.a, given.b))
        made = (q, k, given.v, a, b, given.g, given.state)
        return cls(*(x.contiguous() for x in made))


class Carried(NamedTuple):
    """What the chunks compute before the outputs."""

    inverse: Tensor  # X - I [B, T, H, 64], row of the token; so are the next three
    n_ak: Tensor
    m_qb: Tensor
    m_qk: Tensor
    q_in: Tensor  # q~ [B, T, H, K]
    a_in: Tensor  # a~ [B, T, H, K]
    b_out: Tensor  # b decayed to the end of the chunk [B, T, H, K]
    k_out: Tensor  # k decayed to the end of the chunk [B, T, H, K]
    total: Tensor  # e^{G_64} [B, H, N, K]
    states: Tensor  # before each chunk [B, H, N, K, V]
    reads: Tensor  # z [B, T, H, V]
    final: Tensor  # [B, H, K, V]


def carry(x: Inputs, blocks: Blocks) -> Carried:
    """Run the first two kernels."""
    batch, time, heads, width = x.v.shape
    key = x.k.shape[-1]
    chunks = triton.cdiv(time, CHUNK)
    matrices = [x.v.new_empty(batch, time, heads, CHUNK) for _ in range(4)]
    rows = [torch.empty_like(x.k) for _ in range(4)]
    total = x.g.new_empty(batch, heads, chunks, key)
    states = x.v.new_empty(batch, heads, chunks, key, width)
    reads, final = torch.empty_like(x.v), torch.empty_like(x.state)
    pairs_kernel[(batch * heads * chunks,)](
        x.q, x.k, x.a, x.b, x.g, *matrices, *rows, total, time, heads,
        K=key, BK=blocks.key_part, INVERSE=blocks.inverse_precision, **blocks.masks,
        num_warps=8, num_stages=1,
    )  # fmt: skip
    inverse, n_ak, m_qb, m_qk = matrices
    q_in, a_in, b_out, k_out = rows
    states_kernel[(batch * heads, triton.cdiv(width, blocks.state_value))](
        x.v, inverse, n_ak, a_in, b_out, k_out, total, x.state, states, reads, final, time, heads,
        K=key, V=width, BK=blocks.key, BV=blocks.state_value,
        num_warps=blocks.warps, num_stages=1,
    )  # fmt: skip
    return Carried(
        inverse, n_ak, m_qb, m_qk, q_in, a_in, b_out, k_out, total, states, reads, final
    )  # fmt: skip


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    state: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Outputs `[B, T, H, V]` and the new state `[B, H, K, V]`; float32 or bfloat16 values."""
    with torch.cuda.device_of(v):
        x = Inputs.prepare(q, k, v, a, b, g, state)
        blocks = Blocks.choose(x.k, x.v)
        carried = carry(x, blocks)
        batch, time, heads, width = v.shape
        o = torch.empty_like(x.v)
        grid = (batch * heads * triton.cdiv(time, CHUNK), triton.cdiv(width, blocks.value_part))
        output_kernel[grid](
            x.v, carried.m_qb, carried.m_qk, carried.q_in, carried.states, carried.reads, o,
            scale, time, heads,
            K=x.k.shape[-1], V=width, BK=blocks.key_part, BV=blocks.value_part,
            num_warps=blocks.warps, num_stages=1,
        )  # fmt: skip
    return o, carried.final
