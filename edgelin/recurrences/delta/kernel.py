"""Delta rule on a GPU: Triton kernels of the forward pass, chunks of 64 tokens.

The equations are those of ``chunked.py``. Three launches:

    invert   every chunk on its own: X - I with X = (I + L)^-1; e^G and e^{G_64 - G}
    states   one chunk after the other, parallel over batch, heads and value blocks:
             u = X beta (v - e^G k S);  S <- e^{G_64} S + k^T (e^{G_64 - G} u)
    output   every chunk on its own: o = scale (e^G q S + (D * q k^T) u)

Dots run in the dtype of the values (bfloat16 on tensor cores, float32 in full precision) and add up
in float32; states, decays and the inverse are float32. X is kept without its diagonal of ones, so
that X r = r + (X - I) r rounds only the second term. Rows past T load as zeros, which write and
decay nothing.

Source: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence
Length", section 3; "Gated Delta Networks", section 3.3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelin.recurrences import CHUNK, MIN_LOG_DECAY
from edgelin.recurrences.delta.kernel_chunks import (
    C,
    chunk_rows,
    chunks_of,
    own_chunk,
    own_sequence,
)
from edgelin.recurrences.delta.kernel_inverse import unit_lower_inverse
from edgelin.recurrences.launches import Choice, Launch, cdiv, choose, planned, power_of_2

FLOOR = tl.constexpr(MIN_LOG_DECAY)
WARPS = ("num_warps", "num_stages")
Sizes = tuple[int, int, int, int, int]  # B, T, H, K, V


@triton.jit
def tile(pointer, row, valid, start, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Columns ``start`` to ``start + BLOCK`` of these rows, zeros outside."""
    column = start + tl.arange(0, BLOCK)
    mask = valid[:, None] & (column < WIDTH)[None, :]
    return tl.load(pointer + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)


@triton.jit
def put_tile(pointer, value, row, valid, start, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store what :func:`tile` loads."""
    column = start + tl.arange(0, BLOCK)
    mask = valid[:, None] & (column < WIDTH)[None, :]
    value = value.to(pointer.dtype.element_ty)
    tl.store(pointer + row[:, None] * WIDTH + column[None, :], value, mask=mask)


@triton.jit
def state_cells(index, k_start, v_start, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
                BV: tl.constexpr):  # fmt: skip
    """Offsets `[BK, BV]` into state number ``index`` of a `[..., K, V]` tensor, and their mask."""
    row = k_start + tl.arange(0, BK)
    column = v_start + tl.arange(0, BV)
    cells = index.to(tl.int64) * (K * V) + row[:, None] * V + column[None, :]
    return cells, (row < K)[:, None] & (column < V)[None, :]


@triton.jit
def decay_sums(g, row, valid, HAS_G: tl.constexpr, WIDE: tl.constexpr):
    """G `[64]`; in float64 differences stay exact after a reset of -90 a token.

    Those of float32 sums are exact enough beside bfloat16 scores.
    """
    if HAS_G:
        steps = tl.maximum(tl.load(g + row, mask=valid, other=0.0).to(tl.float32), FLOOR)
        return tl.cumsum(steps.to(WIDE), axis=0)
    else:
        return tl.zeros([C], dtype=WIDE)


@triton.jit
def decay_matrix(sums):
    """D `[64, 64]`: e^{G_i - G_j} for i >= j, else 0."""
    position = tl.arange(0, C)
    exponent = (sums[:, None] - sums[None, :]).to(tl.float32)
    return tl.exp(tl.where(position[:, None] >= position[None, :], exponent, float("-inf")))


@triton.jit
def factor(values, row, valid, HAS_G: tl.constexpr):
    """A stored decay factor `[64]`, or ones."""
    if HAS_G:
        return tl.load(values + row, mask=valid, other=0.0)
    else:
        return tl.full([C], 1.0, dtype=tl.float32)


@triton.jit
def total_decay(prefix, bh, first, end, T, H, HAS_G: tl.constexpr, ROWS: tl.constexpr):
    """Decay over the whole chunk `[ROWS]`: the prefix of its last token.

    No scalar, since the compiler would wait for it where it is asked for.
    """
    if HAS_G:
        last = tl.minimum(first + C, end) - 1 + tl.zeros([ROWS], dtype=tl.int32)
        cell = ((bh // H).to(tl.int64) * T + last) * H + bh % H
        return tl.load(prefix + cell, mask=last >= first, other=1.0)
    else:
        return tl.full([ROWS], 1.0, dtype=tl.float32)


@triton.jit
def factors(beta, prefix, suffix, bh, first, end, T, H, HAS_G: tl.constexpr, ROWS: tl.constexpr):
    """Of the chunk from token ``first`` on: beta, e^G, e^{G_64 - G} `[64]`; e^{G_64} `[ROWS]`."""
    row, valid = chunk_rows(bh, first, end, T, H)
    strength = tl.load(beta + row, mask=valid, other=0.0).to(tl.float32)
    before, after = factor(prefix, row, valid, HAS_G), factor(suffix, row, valid, HAS_G)
    return strength, before, after, total_decay(prefix, bh, first, end, T, H, HAS_G, ROWS)


@triton.jit(do_not_specialize=["T"])
def invert_kernel(k, beta, g, inverse, prefix, suffix, spans, T, H,
                  K: tl.constexpr, BK: tl.constexpr, HAS_G: tl.constexpr, WIDE: tl.constexpr,
                  INVERSE: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """X - I of one chunk by masked block recursion, and its decay factors."""
    bh, first, end = own_chunk(spans, T, H, PACKED)
    row, valid = chunk_rows(bh, first, end, T, H)
    gram = tl.zeros([C, C], dtype=tl.float32)
    for start in range(0, K, BK):
        keys = tile(k, row, valid, start, K, BK)
        gram = tl.dot(keys, tl.trans(keys), gram, input_precision="ieee")
    sums = decay_sums(g, row, valid, HAS_G, WIDE)
    strength = tl.load(beta + row, mask=valid, other=0.0).to(tl.float32)

    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    lower = tl.where(i > j, strength[:, None] * decay_matrix(sums) * gram, 0.0)
    x = unit_lower_inverse(-lower, INVERSE)
    put_tile(inverse, tl.where(i == j, 0.0, x), row, valid, 0, C, C)
    if HAS_G:
        # summed from the end: the last token of a chunk loses nothing
        later = valid & (tl.arange(0, C) < C - 1) & (first + tl.arange(0, C) + 1 < end)
        steps = tl.maximum(tl.load(g + row + H, mask=later, other=0.0).to(tl.float32), FLOOR)
        tl.store(prefix + row, tl.exp(sums.to(tl.float32)), mask=valid)
        tl.store(suffix + row, tl.exp(tl.cumsum(steps, axis=0, reverse=True)), mask=valid)


@triton.jit(do_not_specialize=["T"])
def states_kernel(k, v, beta, inverse, prefix, suffix, state, states, writes, final, order, T, H,
                  K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                  HAS_G: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """Pass a block of state columns through all chunks; keep each chunk's state and writes."""
    index, bh, chunks, number, begin, end = own_sequence(order, T, H, PACKED)
    v_start = tl.program_id(1) * BV
    cells, inside = state_cells(index, 0, v_start, K, V, BK, BV)
    current = tl.load(state + cells, mask=inside, other=0.0).to(tl.float32)
    strength, before, after, whole = factors(beta, prefix, suffix, bh, begin, end, T, H, HAS_G, BK)
    for n in range(0, chunks):
        first = begin + n * C
        row, valid = chunk_rows(bh, first, end, T, H)
        # a chunk ahead: the way from memory would add to every chunk's time
        following = tl.minimum(n + 1, chunks - 1)
        strength_1, before_1, after_1, whole_1 = factors(
            beta, prefix, suffix, bh, begin + following * C, end, T, H, HAS_G, BK
        )
        kept, inside = state_cells(number + n, 0, v_start, K, V, BK, BV)
        read = current.to(v.dtype.element_ty)
        tl.store(states + kept, read, mask=inside)
        keys = tile(k, row, valid, 0, K, BK)
        old = tl.dot(keys, read, input_precision="ieee")
        values = tile(v, row, valid, v_start, V, BV).to(tl.float32)
        values = strength[:, None] * (values - before[:, None] * old)
        x = tile(inverse, row, valid, 0, C, C)
        new = tl.dot(x, values.to(x.dtype), values, input_precision="ieee")
        put_tile(writes, new, row, valid, v_start, V, BV)
        current *= whole[:, None]
        new = (after[:, None] * new).to(keys.dtype)
        current = tl.dot(tl.trans(keys), new, current, input_precision="ieee")
        strength, before, after, whole = strength_1, before_1, after_1, whole_1
    tl.store(final + cells, current, mask=inside)


@triton.jit(do_not_specialize=["T"])
def output_kernel(q, k, g, states, writes, o, spans, scale, T, H,
                  K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                  HAS_G: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """Outputs of one chunk, one block of value columns."""
    bh, first, end = own_chunk(spans, T, H, PACKED)
    v_start = tl.program_id(1) * BV
    row, valid = chunk_rows(bh, first, end, T, H)
    scores = tl.zeros([C, C], dtype=tl.float32)
    out = tl.zeros([C, BV], dtype=tl.float32)
    for start in range(0, K, BK):
        queries = tile(q, row, valid, start, K, BK)
        keys = tile(k, row, valid, start, K, BK)
        cells, inside = state_cells(tl.program_id(0), start, v_start, K, V, BK, BV)
        block = tl.load(states + cells, mask=inside, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), scores, input_precision="ieee")
        out = tl.dot(queries, block, out, input_precision="ieee")
    sums = decay_sums(g, row, valid, HAS_G, WIDE)
    new = tile(writes, row, valid, v_start, V, BV)
    scores = (scores * decay_matrix(sums)).to(new.dtype)
    out *= tl.exp(sums.to(tl.float32))[:, None]
    out = tl.dot(scores, new, out, input_precision="ieee")
    put_tile(o, scale * out, row, valid, v_start, V, BV)


class Shape(NamedTuple):
    """What launches depend on. Packed rows are as a batch of as many chunks."""

    batch: int  # packed: rows that its sequences would fill
    time: int  # packed: 64 x all chunks
    heads: int
    key: int
    value: int
    has_g: bool
    full: bool  # float32, not bfloat16
    on_gpu: bool
    sequences: int  # packed; 0: a batch


class Inputs(NamedTuple):
    """Contiguous inputs, q, k and v in one dtype; beta stands for g and k for the tables of packed
    rows where there are none."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor
    state: Tensor
    spans: Tensor
    order: Tensor
    shape: Shape

    @classmethod
    def prepare(
        cls, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, state: Tensor,
        ends: tuple[int, ...] | None = None,
    ) -> Inputs:  # fmt: skip
        """Bring the arguments of the op into the form that the kernels take."""
        full = v.dtype == torch.float32
        (heads, value), key = v.shape[2:], k.shape[3]
        q, k = q.to(v.dtype).contiguous(), k.to(v.dtype).contiguous()
        v, beta, state = v.contiguous(), beta.contiguous(), state.contiguous()
        sequences, time, batch, spans, order = chunks_of(ends, k)
        shape = Shape(batch, time, heads, key, value, g is not None, full, v.is_cuda, sequences)
        g = beta if g is None else g.contiguous()
        return cls(q, k, v, beta, g, state, spans, order, shape)


def choice(kernel: str, shape: Shape) -> Choice:
    """Blocks of keys and values (BK, BV) and warps of a kernel.

    ``states`` and ``reverse`` carry BV columns of the state along and take all keys at once.
    """
    rows, full = shape.batch * shape.heads, shape.full
    key, value = (max(16, power_of_2(width)) for width in (shape.key, shape.value))
    part = 32 if full else 64
    # wide columns save reads of the keys; narrow ones make programs when there are few
    columns = 32 if key > 128 or rows * shape.value < 128 * 64 else 64
    if full:  # without tensor cores a dot keeps both operands in registers
        columns = 16 if key > 64 else 32
    serial = kernel in ("states", "reverse")
    rule = {
        "BK": key if serial else min(key, part),
        "BV": min(value, columns if serial else part),
        "num_warps": 8 if full else 4,
        "num_stages": 1 if full else 2,
    }
    if full:
        return rule
    many = "" if rows >= 64 else " few"  # rows that are passed through in parallel
    gates = "gated " if shape.has_g else ""
    widths = f"{shape.key}x{shape.value}"
    return choose(f"delta {gates}{kernel} {widths}{many if serial else ''}", rule)


def launch_of(
    kernel: Any, name: str, sizes: Sizes, sequences: int, constants: dict[str, Any], *scale: float
) -> Launch:
    """A launch of a kernel over chunks, blocks of value columns or both, as its name asks for.

    ``constants`` holds what kernels of one kind need together; each takes its own. Where there are
    ``sequences``, they are packed into one row.
    """
    batch, time, heads, key, value = sizes
    if sequences:
        batch = 1
    chunks, blocks = batch * heads * cdiv(time, CHUNK), cdiv(value, constants["BV"])
    grid: tuple[int, ...] = (chunks,)
    if name in ("states", "reverse"):
        grid = ((sequences or batch) * heads, blocks)
    elif name in ("output", "local"):
        grid = (chunks, blocks)
    elif name == "split":
        grid = (chunks, cdiv(key, constants["BK"]))
    constants = {"K": key, "V": value, "PACKED": sequences > 0, **constants}
    own = {n: x for n, x in constants.items() if n in (*kernel.arg_names, *WARPS)}
    return Launch(kernel, grid, *scale, time, heads, **own)


def plan(kernel: Any, name: str, shape: Shape, *scale: float) -> Launch:
    """A launch of a kernel of the delta rule."""
    constants = {
        "HAS_G": shape.has_g,
        # what decays are summed in
        "WIDE": tl.float64 if shape.full else tl.float32,
        # three products of bfloat16 parts are exact enough beside bfloat16 inputs
        "INVERSE": "ieee" if shape.full or not shape.on_gpu else "bf16x3",
    }
    constants |= choice(name, shape)
    return launch_of(kernel, name, shape[:5], shape.sequences, constants, *scale)


@planned
def _invert(shape: Shape) -> Launch:
    return plan(invert_kernel, "invert", shape)


@planned
def _states(shape: Shape) -> Launch:
    return plan(states_kernel, "states", shape)


@planned
def _output(shape: Shape, scale: float) -> Launch:
    return plan(output_kernel, "output", shape, scale)


class Carried(NamedTuple):
    """What the chunks compute before the outputs; N chunks a row, packed of all sequences."""

    inverse: Tensor  # X - I [B, T, H, 64], row of the token
    prefix: Tensor  # e^G [B, T, H]
    suffix: Tensor  # e^{G_64 - G} [B, T, H]
    states: Tensor  # before each chunk [B, H, N, K, V]
    writes: Tensor  # u [B, T, H, V]


def allocate(x: Inputs) -> Carried:
    """Memory for it."""
    batch, time, heads, value = x.v.shape
    # without decay nobody reads the factors
    factors = (batch, time, heads) if x.shape.has_g else (1,)
    return Carried(
        inverse=x.v.new_empty((batch, time, heads, CHUNK)),
        prefix=x.v.new_empty(factors, dtype=torch.float32),
        suffix=x.v.new_empty(factors, dtype=torch.float32),
        states=x.v.new_empty((batch, heads, cdiv(x.shape.time, CHUNK), x.shape.key, value)),
        writes=torch.empty_like(x.v),
    )


def carry(x: Inputs) -> tuple[Carried, Tensor]:
    """Run the first two kernels; also the last state `[B, H, K, V]`."""
    made, final = allocate(x), torch.empty_like(x.state)
    factors = (made.inverse, made.prefix, made.suffix)
    _invert(x.shape)(x.k, x.beta, x.g, *factors, x.spans)
    _states(x.shape)(x.k, x.v, x.beta, *factors, x.state, made.states, made.writes, final, x.order)
    return made, final


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    ends: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor, Carried]:
    """Outputs `[B, T, H, V]`, the new state `[B, H, K, V]` and what the backward pass goes on from.

    Values are float32 or bfloat16. ``ends``: where sequences packed into the only row end, 0 first;
    each has a state.
    """
    x = Inputs.prepare(q, k, v, beta, g, state, ends)
    carried, final = carry(x)
    o = torch.empty_like(x.v)
    _output(x.shape, scale)(x.q, x.k, x.g, carried.states, carried.writes, o, x.spans)
    return o, final, carried
