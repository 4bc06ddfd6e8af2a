"""Triton kernels that start the passes of the linear recurrence: states before segments of time.

`split` and `head_sums` prepare decays (see ``kernel_passes.py``), `segment` computes what each
segment adds to the state, and `scan` turns that into the state before each. Letters and modes are
those of ``kernel_passes.py``. The segment behind which, backwards before which, there is none adds
nothing that a pass begins with, and is left out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edgelin.recurrences.linear.kernel_decays import (
    FLOOR,
    HEAD,
    KEY,
    LOG2E,
    NONE,
    REACH,
    from_middle,
    half_reach,
    load_rows,
    store_rows,
)
from edgelin.recurrences.linear.kernel_places import ends_row, number_of, place, place_of_chunk


@triton.jit(do_not_specialize=["T", "per_segment"])
def split(
    q, k, g, q_split, k_split, exponents, first, second, far, spans, T, per_segment,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, PACKED: tl.constexpr,
    EXPONENTS: tl.constexpr, PT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Queries and keys with the decays to and from the middle of a chunk, ``exponents`` G_i - G_m
    in bits (which gradients need), the log decays of both halves `[B*H, N, K]`, and marks on the
    segments that are ``far``."""
    blocks: tl.constexpr = (K + BK - 1) // BK
    pid, i_k = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    i_h, token, left, mark, number = place_of_chunk(pid, spans, T, per_segment, H, BT, PACKED)
    o_t, o_k = tl.arange(0, BT), i_k * BK + tl.arange(0, BK)
    row, col = o_t[:, None], o_t[None, :]
    live = o_t < left
    p = (token * H + i_h) * K
    steps = tl.maximum(load_rows(g + p, o_t, o_k, live, H, K).to(tl.float32), FLOOR)
    if half_reach(steps, row, BT) >= REACH:
        tl.atomic_max(far + mark, 1)
    sums, early, late = from_middle(steps, row, col, BT, PT, PARTS)
    sums = tl.minimum(tl.maximum(sums, -REACH), REACH)  # of no use where far, but a number
    rows = load_rows(q + p, o_t, o_k, live, H, K).to(tl.float32) * tl.exp(sums)
    store_rows(q_split + p, rows, o_t, o_k, live, H, K)
    rows = load_rows(k + p, o_t, o_k, live, H, K).to(tl.float32) * tl.exp(-sums)
    store_rows(k_split + p, rows, o_t, o_k, live, H, K)
    if EXPONENTS:
        store_rows(exponents + p, sums * LOG2E, o_t, o_k, live, H, K)
    p_half = number.to(tl.int64) * K + o_k
    tl.store(first + p_half, early, mask=o_k < K)
    tl.store(second + p_half, late, mask=o_k < K)


@triton.jit
def halves(p, row, n, o_y, T, Y: tl.constexpr, BT: tl.constexpr, STEP: tl.constexpr):
    """Log decays `[BY]` of keys over half of chunk ``n``; zero for chunks behind the end."""
    mask = (o_y < Y) & (n < tl.cdiv(T, BT))
    return tl.load(p + (row + n * STEP) * Y + o_y, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["T"])
def head_sums(
    g, sums, spans, T,
    H: tl.constexpr, BH: tl.constexpr, BT: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """G in bits, sums of the log decays of heads from the first token of a chunk on: `[B*H, N, BT]`
    for N chunks of a row, packed `[N, H, BT]`. Rows behind the last token have the last one's.

    Made once, since every chunk of every pass would wait for them.
    """
    chunk, chunks = tl.program_id(0), tl.cdiv(T, BT)
    o_t, o_h = tl.arange(0, BT)[:, None], tl.program_id(1) * BH + tl.arange(0, BH)[None, :]
    if PACKED:
        token, left = tl.load(spans + chunk * 3).to(tl.int64), tl.load(spans + chunk * 3 + 1)
        row = chunk.to(tl.int64) * H + o_h
    else:
        b, n = (chunk // chunks).to(tl.int64), chunk % chunks
        token, left = b * T + n * BT, T - n * BT
        row = (b * H + o_h) * chunks + n
    live = (o_t < left) & (o_h < H)
    steps = tl.load(g + (token + o_t) * H + o_h, mask=live, other=0.0).to(tl.float32)
    steps = tl.maximum(steps, FLOOR).to(sums.dtype.element_ty) * LOG2E
    tl.store(sums + row * BT + o_t, tl.cumsum(steps, axis=0), mask=o_h < H)


@triton.jit
def head_decays(sums, row, o_t, BT: tl.constexpr, REV: tl.constexpr):
    """G `[BT]` of a head's chunk in bits, factors of what a row reads and adds, and the whole's."""
    p = sums + row * BT
    sums, total = tl.load(p + o_t), tl.load(p + (BT - 1))
    up, down = tl.exp2(sums.to(tl.float32)), tl.exp2((total - sums).to(tl.float32))
    total = tl.exp2(total.to(tl.float32))
    if REV:
        return sums, down, up, total
    else:
        return sums, up, down, total


@triton.jit
def segment(
    x, y, enter, leave, far, column, h, h_z, total, places, T, chunks,
    H: tl.constexpr, HY: tl.constexpr, X: tl.constexpr, Y: tl.constexpr,
    BX: tl.constexpr, BY: tl.constexpr, BT: tl.constexpr,
    MODE: tl.constexpr, REV: tl.constexpr, NORM: tl.constexpr, PACKED: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """What a segment adds to the state, into ``h`` `[B*H, N, X, Y]`, and by which factor
    ``total`` `[B*H, N, Y]` it multiplies it. With NORM there is one more column of x, of ones,
    backwards ``column``, whose state is left in ``h_z`` `[B*H, N, Y]`."""
    blocks: tl.constexpr = (Y + BY - 1) // BY
    tiles: tl.constexpr = (X + BX - 1) // BX * blocks
    pid, i_o = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    _n, i_h, i_r, i_s, before, T, first, count, row = place(pid, places, T, chunks, H, BT, PACKED)
    if not PACKED:
        if ends_row(i_s, first, count, T, BT, REV, PACKED):
            return
    if MODE == KEY:
        if tl.load(far + number_of(i_r, i_s, tl.num_programs(1), H, PACKED)) != 0:
            return
    step: tl.constexpr = H if PACKED else 1
    o_t = tl.arange(0, BT)
    o_x = i_o // blocks * BX + tl.arange(0, BX)
    o_y = i_o % blocks * BY + tl.arange(0, BY)
    state = tl.zeros([BX, BY], dtype=tl.float32)
    decay, leaving = tl.full([BY], 1.0, dtype=tl.float32), tl.zeros([BY], dtype=tl.float32)
    z = tl.zeros_like(leaving)
    for c in range(0, count):
        n = first + (count - 1 - c if REV else c)
        live = n * BT + o_t < T
        token = (before + n * BT) * H + i_h
        shared = token if H == HY else token // H
        b_x = load_rows(x + token * X, o_t, o_x, live, H, X).to(DT)
        b_y = load_rows(y + shared * Y, o_t, o_y, live, HY, Y).to(DT)
        if MODE == HEAD:
            _, _, adds, whole = head_decays(enter, row + n * step, o_t, BT, REV)
            added = b_y.to(tl.float32) * adds[:, None]
            b_y = added.to(DT)
            state *= whole
            decay *= whole
            z *= whole
        elif NORM:
            added = b_y.to(tl.float32)
        if NORM and REV:
            added *= tl.load(column + token + o_t * H, mask=live, other=0.0)[:, None]
        if NORM:
            z += tl.sum(added, axis=0)
        if MODE == KEY:
            between = tl.exp(leaving + halves(enter, row, n, o_y, T, Y, BT, step))
            state *= between[None, :]
            decay *= between
            leaving = halves(leave, row, n, o_y, T, Y, BT, step)
        state = tl.dot(tl.trans(b_x), b_y, state, input_precision="ieee")
    if MODE == KEY:
        state *= tl.exp(leaving)[None, :]
        decay *= tl.exp(leaving)
    put_segment(h, total, state, decay, i_r, i_s, i_o < blocks, o_x, o_y, H, X, Y, PACKED)
    if NORM:
        p_z = h_z + number_of(i_r, i_s, tl.num_programs(1), H, PACKED) * Y
        tl.store(p_z + o_y, z, mask=(o_y < Y) & (i_o < blocks))


@triton.jit
def put_segment(h, total, state, decay, i_r, i_s, is_first, o_x, o_y,
                H: tl.constexpr, X: tl.constexpr, Y: tl.constexpr,
                PACKED: tl.constexpr):  # fmt: skip
    """Store what a segment does; of the decay, the first block of X stands for all."""
    segments = tl.num_programs(1)
    p_h = h + number_of(i_r, i_s, segments, H, PACKED) * (X * Y)
    in_state = (o_x[:, None] < X) & (o_y[None, :] < Y)
    tl.store(p_h + o_x[:, None] * Y + o_y[None, :], state, mask=in_state)
    if is_first:
        p_total = total + number_of(i_r, i_s, segments, H, PACKED) * Y
        tl.store(p_total + o_y, decay, mask=o_y < Y)


@triton.jit
def _read(h, total, step, at, N, cells, inside, o_y, S: tl.constexpr, Y: tl.constexpr,
          apart: tl.constexpr, MODE: tl.constexpr, REV: tl.constexpr):  # fmt: skip
    """Number of the segment that comes after ``step`` others, what it adds and its decay."""
    n, is_asked = at + (N - 1 - step if REV else step) * apart, step + 1 < N
    added = tl.load(h + n * S + cells, mask=inside & is_asked, other=0.0)
    decay = tl.full([o_y.shape[0]], 1.0, dtype=tl.float32)
    if MODE != NONE:
        decay = tl.load(total + n * Y + o_y, mask=(o_y < Y) & is_asked, other=0.0)
    return n, added, decay


@triton.jit
def _advance(h, state, n, added, decay, cells, lives, S: tl.constexpr, MODE: tl.constexpr):
    """Store the state before a segment; the one after it."""
    tl.store(h + n * S + cells, state, mask=lives)
    if MODE != NONE:
        state *= decay[None, :]
    return state + added


@triton.jit(do_not_specialize=["N"])
def scan(
    h, total, initial, sequences, N, h_scale,
    H: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
    MODE: tl.constexpr, REV: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Replace what segments add by the state before each, from ``initial`` `[B, H, Y, X]` on.

    Packed, the numbers of a sequence's segments are H apart, not 1. Four segments are read before
    one is written: each read waits for the memory.
    """
    blocks: tl.constexpr = (Y + BY - 1) // BY
    tiles: tl.constexpr = (X + BX - 1) // BX * blocks
    i_bh, i_o = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    S: tl.constexpr = X * Y
    apart: tl.constexpr = H if PACKED else 1
    if PACKED:
        p = sequences + i_bh // H * 2
        N, at = tl.load(p + 1), tl.load(p).to(tl.int64) * H + i_bh % H
    else:
        at = i_bh * N
    o_x, o_y = i_o // blocks * BX + tl.arange(0, BX), i_o % blocks * BY + tl.arange(0, BY)
    cells, inside = o_x[:, None] * Y + o_y[None, :], (o_x[:, None] < X) & (o_y[None, :] < Y)
    p_initial = initial + i_bh * S + o_x[:, None] + o_y[None, :] * X
    state = tl.load(p_initial, mask=inside, other=0.0).to(tl.float32) * h_scale
    for i in range(0, N, 4):
        a, first, one = _read(h, total, i, at, N, cells, inside, o_y, S, Y, apart, MODE, REV)
        b, second, two = _read(h, total, i + 1, at, N, cells, inside, o_y, S, Y, apart, MODE, REV)
        c, third, three = _read(h, total, i + 2, at, N, cells, inside, o_y, S, Y, apart, MODE, REV)
        d, fourth, four = _read(h, total, i + 3, at, N, cells, inside, o_y, S, Y, apart, MODE, REV)
        state = _advance(h, state, a, first, one, cells, inside, S, MODE)
        state = _advance(h, state, b, second, two, cells, inside & (i + 1 < N), S, MODE)
        state = _advance(h, state, c, third, three, cells, inside & (i + 2 < N), S, MODE)
        state = _advance(h, state, d, fourth, four, cells, inside & (i + 3 < N), S, MODE)
