"""Triton kernels of the linear recurrence with a decay a key of any size.

They take float32, and the segments of a bfloat16 call in which a key decays too fast for
``kernel_passes.py`` (see there for what a pass is). exp(G_i - G_j) is split at the middle of the
chunk where that holds, and level by level (``chunked.py``) where not: then no exponent is ever
positive. Backwards in time rows run from the last token of a segment to its first; a token takes
the decay of the one after it, so that the decay of the segment's first token comes at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edgelin.recurrences.linear.kernel_decays import (
    FLOOR,
    REACH,
    SHORT_REACH,
    _sums,
    from_middle,
    half_reach,
    load_rows,
    store_rows,
)
from edgelin.recurrences.linear.kernel_passes import end_product, load_state, put_last, sum_back
from edgelin.recurrences.linear.kernel_places import ends_row, number_of, place
from edgelin.recurrences.linear.kernel_segments import put_segment


@triton.jit
def _near_step(
    b_a, b_x, b_y, sums, first, second, state, row, col, INNER: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Outputs of a chunk, split at its middle, and the state after it."""
    factor = tl.exp(sums)
    f_y = b_y.to(tl.float32) * tl.exp(-sums)
    if INNER:
        f_a = b_a.to(tl.float32) * factor
        read = (f_a * tl.exp(first)[None, :]).to(DT)
        acc = tl.dot(read, tl.trans(state.to(DT)), input_precision="ieee")
        scores = tl.dot(f_a.to(DT), tl.trans(f_y.to(DT)), input_precision="ieee")
        scores = tl.where(col <= row, scores, 0.0).to(DT)
        acc = tl.dot(scores, b_x, acc, input_precision="ieee")
    else:
        scores = tl.dot(b_a, tl.trans(b_x), input_precision="ieee")
        scores = tl.where(col <= row, scores, 0.0).to(DT)
        acc = tl.dot(b_a, state.to(DT), input_precision="ieee") * tl.exp(first)[None, :]
        acc = tl.dot(scores, f_y.to(DT), acc, input_precision="ieee") * factor
    f_y = (f_y * tl.exp(second)[None, :]).to(DT)
    state = tl.dot(
        tl.trans(b_x), f_y, state * tl.exp(first + second)[None, :], input_precision="ieee"
    )
    return acc, state


@triton.jit
def _far_read(
    b_a, b_x, b_y, b_g, state, row, col,
    BT: tl.constexpr, INNER: tl.constexpr, DT: tl.constexpr, PT: tl.constexpr, PARTS: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Outputs `[BT, BX or BY]` of a chunk, level by level."""
    before = tl.exp(_sums(col <= row, b_g, PT, PARTS))
    if INNER:
        read = (b_a.to(tl.float32) * before).to(DT)
        acc = tl.dot(read, tl.trans(state.to(DT)), input_precision="ieee")
        same = tl.sum(b_a.to(tl.float32) * b_y.to(tl.float32), axis=1)
        acc += same[:, None] * b_x.to(tl.float32)
        scores = tl.zeros([BT, BT], dtype=tl.float32)
    else:
        acc = tl.dot(b_a, state.to(DT), input_precision="ieee") * before
        same = tl.sum(b_a.to(tl.float32) * b_x.to(tl.float32), axis=1)
        acc += same[:, None] * b_y.to(tl.float32)
        scores = tl.dot(b_a, tl.trans(b_x), input_precision="ieee")
    for level in range(0, LEVELS):
        s = 1 << level  # halves of the aligned blocks of 2 s tokens
        odd = (row // s) % 2 == 1
        middle = row // (2 * s) * (2 * s) + s - 1
        interval = tl.where(odd, (col > middle) & (col <= row), (col > row) & (col <= middle))
        factor = tl.exp(_sums(interval, b_g, PT, PARTS))
        pairs = (row // (2 * s) == col // (2 * s)) & odd & ((col // s) % 2 == 0)
        f_y = (b_y.to(tl.float32) * factor).to(DT)
        if INNER:
            f_a = (b_a.to(tl.float32) * factor).to(DT)
            part = tl.dot(f_a, tl.trans(f_y), input_precision="ieee")
            scores += tl.where(pairs, part, 0.0)
        else:
            part = tl.where(pairs, scores, 0.0).to(DT)
            acc += tl.dot(part, f_y, input_precision="ieee") * factor
    if INNER:
        acc = tl.dot(scores.to(DT), b_x, acc, input_precision="ieee")
    return acc


@triton.jit
def _advance(state, b_x, b_y, b_g, row, col, DT: tl.constexpr, PT: tl.constexpr,
             PARTS: tl.constexpr):  # fmt: skip
    """The state `[BX, BY]` after a chunk."""
    after = tl.exp(_sums(col > row, b_g, PT, PARTS))
    b_y = (b_y.to(tl.float32) * after).to(DT)
    state = state * tl.exp(tl.sum(b_g, axis=0))[None, :]
    return tl.dot(tl.trans(b_x), b_y, state, input_precision="ieee")


@triton.jit
def _step(
    b_a, b_x, b_y, b_g, state, row, col,
    BT: tl.constexpr, INNER: tl.constexpr, DT: tl.constexpr, PT: tl.constexpr, PARTS: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Outputs of a chunk and the state after it, the shorter way that holds."""
    if half_reach(b_g, row, BT) < (REACH if PARTS == 2 else SHORT_REACH):
        sums, first, second = from_middle(b_g, row, col, BT, PT, PARTS)
        acc, state = _near_step(b_a, b_x, b_y, sums, first, second, state, row, col, INNER, DT)
    else:
        acc = _far_read(b_a, b_x, b_y, b_g, state, row, col, BT, INNER, DT, PT, PARTS, LEVELS)
        state = _advance(state, b_x, b_y, b_g, row, col, DT, PT, PARTS)
    return acc, state


@triton.jit
def _chunk(start, end, c, o_t, BT: tl.constexpr, REV: tl.constexpr):
    """First token of a chunk of the segment [start, end), its rows from there, and which live."""
    if REV:
        return end - 1 - c * BT, -o_t, end - 1 - c * BT - o_t >= start
    else:
        return start + c * BT, o_t, start + c * BT + o_t < end


@triton.jit
def _decays(g, token, rows, cols, live, c, H: tl.constexpr, Y: tl.constexpr, REV: tl.constexpr):
    """Log decays `[BT, BY]` of the rows; backwards those of the tokens after."""
    if REV:
        live = live & (rows - c < 0)  # not the first row of the first chunk
        g += H * Y
    return tl.maximum(load_rows(g + token * Y, rows, cols, live, H, Y).to(tl.float32), FLOOR)


@triton.jit
def _first_decay(g, token, i_h, cols, lives, H: tl.constexpr, Y: tl.constexpr):
    """The log decay `[BY]` of the first token of a segment, if it has any."""
    p = g + (token * H + i_h) * Y + cols
    return tl.maximum(tl.load(p, mask=(cols < Y) & lives, other=0.0).to(tl.float32), FLOOR)


@triton.jit
def attend(
    a, x, y, g, far, h, ends, last, out, final, m, w, places, T, chunks, h_scale, out_scale,
    s_b, s_s, s_x, s_y,
    H: tl.constexpr, X: tl.constexpr, Y: tl.constexpr,
    BX: tl.constexpr, BY: tl.constexpr, BT: tl.constexpr,
    ALL: tl.constexpr, INNER: tl.constexpr, REV: tl.constexpr, WEIGH: tl.constexpr,
    PACKED: tl.constexpr,
    DT: tl.constexpr, PT: tl.constexpr, PARTS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Outputs of one segment of one head, for one block of the output's width."""
    blocks: tl.constexpr = (X + BX - 1) // BX if INNER else (Y + BY - 1) // BY
    pid, i_o = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    i_n, i_h, i_r, i_s, before, T, chunk, count, _row = place(pid, places, T, chunks, H, BT, PACKED)
    if not ALL:
        if tl.load(far + number_of(i_r, i_s, tl.num_programs(1), H, PACKED)) == 0:
            return
    o_t = tl.arange(0, BT)
    o_x, o_y = tl.arange(0, BX), tl.arange(0, BY)
    if INNER:
        o_x += i_o * BX
    else:
        o_y += i_o * BY
    row, col = o_t[:, None], o_t[None, :]
    cells = i_r.to(tl.int64) * s_b + i_s.to(tl.int64) * s_s + o_x[:, None] * s_x
    cells += o_y[None, :] * s_y
    state = load_state(h + cells, o_x, o_y, X, Y) * h_scale
    carry = tl.zeros([BY], dtype=tl.float32)
    if WEIGH and REV:
        is_last = ends_row(i_s, chunk, count, T, BT, False, PACKED)
        carry = end_product(ends, last, i_n, is_last, cells + s_s, o_x, o_y, state, out_scale, X, Y)
    start = chunk * BT
    stop = tl.minimum(start + count * BT, T)
    for c in range(0, count):
        first, rows, live = _chunk(start, stop, c, o_t, BT, REV)
        token = (before + first) * H + i_h
        b_x = load_rows(x + token * X, rows, o_x, live, H, X).to(DT)
        b_y = load_rows(y + token * Y, rows, o_y, live, H, Y).to(DT)
        if INNER:
            b_a = load_rows(a + token * Y, rows, o_y, live, H, Y).to(DT)
        else:
            b_a = load_rows(a + token * X, rows, o_x, live, H, X).to(DT)
        b_g = _decays(g, token, rows, o_y, live, c, H, Y, REV)
        acc, state = _step(b_a, b_x, b_y, b_g, state, row, col, BT, INNER, DT, PT, PARTS, LEVELS)
        acc = acc * out_scale
        if INNER:
            store_rows(out + token * X, acc, rows, o_x, live, H, X)
        else:
            store_rows(out + token * Y, acc, rows, o_y, live, H, Y)
            if WEIGH:
                weight = acc * load_rows(m + token * Y, rows, o_y, live, H, Y).to(tl.float32)
                if REV:
                    weight, carry = sum_back(
                        w + token * Y, weight, carry, col <= row, rows, o_y, live, H, Y, PT, PARTS
                    )
                    own = load_rows(g + token * Y, rows, o_y, live, H, Y).to(tl.float32)
                    weight = tl.where(own >= FLOOR, weight, 0.0)
                store_rows(w + token * Y, weight, rows, o_y, live, H, Y)
    if ends_row(i_s, chunk, count, T, BT, REV, PACKED):
        if REV:
            decay = _first_decay(g, before + start, i_h, o_y, start < T, H, Y)
            state *= tl.exp(decay)[None, :] * out_scale
        put_last(final, state, i_n, o_x, o_y, X, Y)


@triton.jit
def segment(
    x, y, g, far, h, total, places, T, chunks,
    H: tl.constexpr, X: tl.constexpr, Y: tl.constexpr,
    BX: tl.constexpr, BY: tl.constexpr, BT: tl.constexpr,
    ALL: tl.constexpr, REV: tl.constexpr, PACKED: tl.constexpr,
    DT: tl.constexpr, PT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """What a segment adds to the state and by which factor it multiplies it."""
    blocks: tl.constexpr = (Y + BY - 1) // BY
    tiles: tl.constexpr = (X + BX - 1) // BX * blocks
    pid, i_o = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    _n, i_h, i_r, i_s, before, T, chunk, count, _row = place(pid, places, T, chunks, H, BT, PACKED)
    if not PACKED:
        if ends_row(i_s, chunk, count, T, BT, REV, PACKED):
            return
    if not ALL:
        if tl.load(far + number_of(i_r, i_s, tl.num_programs(1), H, PACKED)) == 0:
            return
    o_t = tl.arange(0, BT)
    o_x = i_o // blocks * BX + tl.arange(0, BX)
    o_y = i_o % blocks * BY + tl.arange(0, BY)
    row, col = o_t[:, None], o_t[None, :]
    state = tl.zeros([BX, BY], dtype=tl.float32)
    log_decay = tl.zeros([BY], dtype=tl.float32)
    start = chunk * BT
    stop = tl.minimum(start + count * BT, T)
    for c in range(0, count):
        first, rows, live = _chunk(start, stop, c, o_t, BT, REV)
        token = (before + first) * H + i_h
        b_x = load_rows(x + token * X, rows, o_x, live, H, X).to(DT)
        b_y = load_rows(y + token * Y, rows, o_y, live, H, Y).to(DT)
        b_g = _decays(g, token, rows, o_y, live, c, H, Y, REV)
        log_decay += tl.sum(b_g, axis=0)
        state = _advance(state, b_x, b_y, b_g, row, col, DT, PT, PARTS)
    if REV:
        last = _first_decay(g, before + start, i_h, o_y, start < T, H, Y)
        state *= tl.exp(last)[None, :]
        log_decay += last
    decay, is_first = tl.exp(log_decay), i_o < blocks
    put_segment(h, total, state, decay, i_r, i_s, is_first, o_x, o_y, H, X, Y, PACKED)
