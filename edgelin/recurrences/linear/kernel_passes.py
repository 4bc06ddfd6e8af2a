"""Triton kernels of the linear recurrence: the pass over a segment, and what starts it.

Time is cut into segments. When there are several, `segment` computes what each adds to the state,
`scan` turns that into the state before each segment, and `attend` runs over all segments in
parallel, chunk by chunk (equations in ``chunked.py``).

One kernel serves the output and all gradients. With rows y (width Y, the side that decays) and x
(width X), the state is H = sum of x_t y_t^T, decayed along Y, and a row a_i reads it:

    inner (a along Y): out_i = sum_j (a_i . exp(G_i - G_j) y_j) x_j    o, and dv backwards in time
    outer (a along X): out_i = sum_j (a_i . x_j) exp(G_i - G_j) y_j    dq, and dk backwards in time

Per head, log decays are summed in float64, whose differences are exact enough. Per key, sums over
intervals are products with 0/1 masks on the tensor cores, the decay split into bfloat16 parts so
that they are exact. There exp(G_i - G_j) is split at the middle of the chunk, m: where |G_i - G_m|
stays below REACH for all tokens and keys, exp(G_i - G_m) and exp(G_m - G_j) are numbers, whatever
their signs, and A is one product. A chunk that decays faster is built level by level
(``chunked.py``), where no exponent is ever positive.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edgelin.recurrences import MIN_LOG_DECAY

NONE, HEAD, KEY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_FLOOR = tl.constexpr(MIN_LOG_DECAY)
REACH, SHORT_REACH = tl.constexpr(64.0), tl.constexpr(16.0)  # float32: sums stay exact to 1e-6


@triton.jit
def _rows(p, rows, cols, live, H: tl.constexpr, D: tl.constexpr):
    """Load a `[BT, BD]` tile of a `[B, T, H, D]` tensor; zeros where not live."""
    return tl.load(
        p + rows[:, None] * (H * D) + cols[None, :],
        mask=live[:, None] & (cols[None, :] < D),
        other=0.0,
    )


@triton.jit
def _store(p, tile, rows, cols, live, H: tl.constexpr, D: tl.constexpr):
    """Store a `[BT, BD]` tile of a `[B, T, H, D]` tensor where live."""
    p_tile = p + rows[:, None] * (H * D) + cols[None, :]
    tl.store(p_tile, tile.to(p.dtype.element_ty), mask=live[:, None] & (cols[None, :] < D))


@triton.jit
def _weigh(p, weight, live, REV: tl.constexpr):
    """For the decay's gradient: dq stores q dq, dk (backwards) subtracts k dk from it."""
    if REV:
        weight = tl.load(p, mask=live, other=0.0) - weight
    tl.store(p, weight, mask=live)


@triton.jit
def _key_decays(g, token, rows, cols, pos, T, H: tl.constexpr, Y: tl.constexpr, REV: tl.constexpr):
    """Load log decays `[BT, BY]`; backwards in time a token takes the decay of the one after it."""
    if REV:
        live = (pos < T) & (pos >= 1)
        p = g + (token + H) * Y
    else:
        live = pos < T
        p = g + token * Y
    return tl.maximum(_rows(p, rows, cols, live, H, Y).to(tl.float32), _FLOOR)


@triton.jit
def _head_decays(g, token, rows, pos, T, H: tl.constexpr, REV: tl.constexpr):
    """Load log decays `[BT]` of a head; backwards as in `_key_decays`."""
    if REV:
        live = (pos < T) & (pos >= 1)
        p = g + token + H
    else:
        live = pos < T
        p = g + token
    return tl.maximum(tl.load(p + rows * H, mask=live, other=0.0).to(tl.float32), _FLOOR)


@triton.jit
def _sums(mask, g, PT: tl.constexpr, PARTS: tl.constexpr):
    """``mask @ g`` for a 0/1 mask `[BT, BT]` and float32 g `[BT, N]`, exact to PARTS * 8 bits."""
    return _weighted_sums(tl.where(mask, 1.0, 0.0), g, PT, PARTS)


@triton.jit
def _weighted_sums(weights, g, PT: tl.constexpr, PARTS: tl.constexpr):
    """``weights @ g`` for weights of 0, 1 and -1 `[BT, BT]`, likewise."""
    weights = weights.to(PT)
    part = g.to(tl.bfloat16)
    total = tl.dot(weights, part.to(PT), input_precision="ieee")
    for _ in tl.static_range(PARTS - 1):
        g = g - part.to(tl.float32)
        part = g.to(tl.bfloat16)
        total = tl.dot(weights, part.to(PT), total, input_precision="ieee")
    return total


@triton.jit
def from_middle(g, row, col, BT: tl.constexpr, PT: tl.constexpr, PARTS: tl.constexpr):
    """G_i - G_m `[BT, N]`, m the last token of the first half, and the sums of both halves."""
    up = tl.where((col <= row) & (col >= BT // 2), 1.0, 0.0)
    sums = _weighted_sums(up - tl.where((col > row) & (col < BT // 2), 1.0, 0.0), g, PT, PARTS)
    first = tl.sum(tl.where(row < BT // 2, g, 0.0), axis=0)
    second = tl.sum(tl.where(row >= BT // 2, g, 0.0), axis=0)
    return sums, first, second


@triton.jit
def half_reach(g, row, BT: tl.constexpr):
    """The most that a key decays in one half of a chunk, as a positive number."""
    first = tl.sum(tl.where(row < BT // 2, g, 0.0), axis=0)
    second = tl.sum(tl.where(row >= BT // 2, g, 0.0), axis=0)
    return tl.max(-tl.minimum(first, second), axis=0)


@triton.jit
def _near_step_by_key(
    b_a, b_x, b_y, sums, first, second, state, row, col, INNER: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Outputs of a chunk with a decay a key, split at its middle, and the state after it."""
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
def _differences(sums):
    """G_i - G_j `[BT, BT]` of float64 sums `[BT]`, to the precision of float32.

    Heads and tails are subtracted apart: close heads exactly, so that nothing cancels.
    """
    head = sums.to(tl.float32)
    tail = (sums - head.to(tl.float64)).to(tl.float32)
    return (head[:, None] - head[None, :]) + (tail[:, None] - tail[None, :])


@triton.jit
def _read(
    b_a, b_x, b_y, b_g, state, row, col,
    MODE: tl.constexpr, INNER: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Outputs `[BT, BX or BY]` of a chunk without decay, or with one a head (b_g `[BT]`)."""
    if INNER:
        acc = tl.dot(b_a, tl.trans(state.to(DT)), input_precision="ieee")
        scores = tl.dot(b_a, tl.trans(b_y), input_precision="ieee")
    else:
        acc = tl.dot(b_a, state.to(DT), input_precision="ieee")
        scores = tl.dot(b_a, tl.trans(b_x), input_precision="ieee")
    if MODE == HEAD:
        sums = tl.cumsum(b_g.to(tl.float64), axis=0)
        acc = acc * tl.exp(sums.to(tl.float32))[:, None]
        exponent = tl.where(col <= row, _differences(sums), float("-inf"))
        scores = scores * tl.exp(exponent)
    scores = tl.where(col <= row, scores, 0.0).to(DT)
    if INNER:
        acc = tl.dot(scores, b_x, acc, input_precision="ieee")
    else:
        acc = tl.dot(scores, b_y, acc, input_precision="ieee")
    return acc


@triton.jit
def _read_by_key(
    b_a, b_x, b_y, b_g, state, row, col,
    BT: tl.constexpr, INNER: tl.constexpr, DT: tl.constexpr, PT: tl.constexpr, PARTS: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Outputs `[BT, BX or BY]` of a chunk with a decay a key (b_g `[BT, BY]`)."""
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
def _advance(
    state, b_x, b_y, b_g, row, col,
    MODE: tl.constexpr, DT: tl.constexpr, PT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The state `[BX, BY]` after a chunk."""
    if MODE == HEAD:
        total = tl.sum(b_g.to(tl.float64), axis=0)
        after = tl.exp((total - tl.cumsum(b_g.to(tl.float64), axis=0)).to(tl.float32))
        b_y = (b_y.to(tl.float32) * after[:, None]).to(DT)
        state = state * tl.exp(total.to(tl.float32))
    if MODE == KEY:
        after = tl.exp(_sums(col > row, b_g, PT, PARTS))
        b_y = (b_y.to(tl.float32) * after).to(DT)
        state = state * tl.exp(tl.sum(b_g, axis=0))[None, :]
    return tl.dot(tl.trans(b_x), b_y, state, input_precision="ieee")


@triton.jit
def _step_by_key(
    b_a, b_x, b_y, b_g, state, row, col,
    BT: tl.constexpr, INNER: tl.constexpr, DT: tl.constexpr, PT: tl.constexpr, PARTS: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Outputs of a chunk with a decay a key, and the state after it, the shorter way that holds."""
    if half_reach(b_g, row, BT) < (REACH if PARTS == 2 else SHORT_REACH):
        sums, first, second = from_middle(b_g, row, col, BT, PT, PARTS)
        acc, state = _near_step_by_key(
            b_a, b_x, b_y, sums, first, second, state, row, col, INNER, DT
        )
    else:
        acc = _read_by_key(b_a, b_x, b_y, b_g, state, row, col, BT, INNER, DT, PT, PARTS, LEVELS)
        state = _advance(state, b_x, b_y, b_g, row, col, KEY, DT, PT, PARTS)
    return acc, state


@triton.jit
def attend(
    a, x, y, g, h, out, final, m, w, T, chunks, h_scale, out_scale, s_b, s_s, s_x, s_y, s_w,
    H: tl.constexpr, X: tl.constexpr, Y: tl.constexpr,
    BX: tl.constexpr, BY: tl.constexpr, BT: tl.constexpr,
    MODE: tl.constexpr, INNER: tl.constexpr, REV: tl.constexpr, WEIGH: tl.constexpr,
    DT: tl.constexpr, PT: tl.constexpr, PARTS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Outputs of one segment of one head, for one block of the output's width."""
    i_bh, i_s, i_o = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, i_h = i_bh // H, i_bh % H
    o_t = tl.arange(0, BT)
    o_x, o_y = tl.arange(0, BX), tl.arange(0, BY)
    if INNER:
        o_x += i_o * BX
    else:
        o_y += i_o * BY
    row, col = o_t[:, None], o_t[None, :]
    in_state = (o_x[:, None] < X) & (o_y[None, :] < Y)
    p_h = h + i_bh.to(tl.int64) * s_b + i_s.to(tl.int64) * s_s
    state = tl.load(p_h + o_x[:, None] * s_x + o_y[None, :] * s_y, mask=in_state, other=0.0)
    state = state.to(tl.float32) * h_scale
    for c in range(0, chunks):
        start = (i_s * chunks + c) * BT
        pos = start + o_t
        live = pos < T
        if REV:
            first = T - 1 - start
            rows = -o_t
        else:
            first = start
            rows = o_t
        token = (b.to(tl.int64) * T + first) * H + i_h
        b_x = _rows(x + token * X, rows, o_x, live, H, X).to(DT)
        b_y = _rows(y + token * Y, rows, o_y, live, H, Y).to(DT)
        if INNER:
            b_a = _rows(a + token * Y, rows, o_y, live, H, Y).to(DT)
        else:
            b_a = _rows(a + token * X, rows, o_x, live, H, X).to(DT)
        if MODE == KEY:
            b_g = _key_decays(g, token, rows, o_y, pos, T, H, Y, REV)
            acc, state = _step_by_key(
                b_a, b_x, b_y, b_g, state, row, col, BT, INNER, DT, PT, PARTS, LEVELS
            )
        else:
            b_g = o_t
            if MODE == HEAD:
                b_g = _head_decays(g, token, rows, pos, T, H, REV)
            acc = _read(b_a, b_x, b_y, b_g, state, row, col, MODE, INNER, DT)
            state = _advance(state, b_x, b_y, b_g, row, col, MODE, DT, PT, PARTS)
        acc = acc * out_scale
        if INNER:
            _store(out + token * X, acc, rows, o_x, live, H, X)
        else:
            _store(out + token * Y, acc, rows, o_y, live, H, Y)
            if WEIGH:
                weight = acc * _rows(m + token * Y, rows, o_y, live, H, Y).to(tl.float32)
                last = (b.to(tl.int64) * T + T - 1 - first) * H + i_h  # w runs backwards in time
                if MODE == KEY:
                    p_w = w + last * Y - rows[:, None] * (H * Y) + o_y[None, :]
                    _weigh(p_w, weight, live[:, None] & (o_y[None, :] < Y), REV)
                else:
                    p_w = w + i_o.to(tl.int64) * s_w + last - rows * H
                    _weigh(p_w, tl.sum(weight, axis=1), live, REV)
    if i_s == tl.num_programs(1) - 1:
        if REV:
            state = state * out_scale
        p_final = final + i_bh.to(tl.int64) * (X * Y) + o_x[:, None] + o_y[None, :] * X
        tl.store(p_final, state, mask=in_state)


@triton.jit
def segment(
    x, y, g, h, total, T, chunks,
    H: tl.constexpr, X: tl.constexpr, Y: tl.constexpr,
    BX: tl.constexpr, BY: tl.constexpr, BT: tl.constexpr,
    MODE: tl.constexpr, REV: tl.constexpr, DT: tl.constexpr, PT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """What a segment adds to the state, ``h`` `[B*H, N, X, Y]`, and its log decay `[B*H, N, Y]`."""
    i_bh, i_s, i_o = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, i_h = i_bh // H, i_bh % H
    o_t = tl.arange(0, BT)
    blocks: tl.constexpr = (Y + BY - 1) // BY
    o_x = i_o // blocks * BX + tl.arange(0, BX)
    o_y = i_o % blocks * BY + tl.arange(0, BY)
    row, col = o_t[:, None], o_t[None, :]
    state = tl.zeros([BX, BY], dtype=tl.float32)
    log_decay = tl.zeros([BY], dtype=tl.float32)
    for c in range(0, chunks):
        start = (i_s * chunks + c) * BT
        pos = start + o_t
        live = pos < T
        if REV:
            first = T - 1 - start
            rows = -o_t
        else:
            first = start
            rows = o_t
        token = (b.to(tl.int64) * T + first) * H + i_h
        b_x = _rows(x + token * X, rows, o_x, live, H, X).to(DT)
        b_y = _rows(y + token * Y, rows, o_y, live, H, Y).to(DT)
        b_g = o_t
        if MODE == KEY:
            b_g = _key_decays(g, token, rows, o_y, pos, T, H, Y, REV)
            log_decay += tl.sum(b_g, axis=0)
        if MODE == HEAD:
            b_g = _head_decays(g, token, rows, pos, T, H, REV)
            log_decay += tl.sum(b_g, axis=0)
        state = _advance(state, b_x, b_y, b_g, row, col, MODE, DT, PT, PARTS)
    i_n = i_bh.to(tl.int64) * tl.num_programs(1) + i_s
    p_h = h + i_n * (X * Y) + o_x[:, None] * Y + o_y[None, :]
    tl.store(p_h, state, mask=(o_x[:, None] < X) & (o_y[None, :] < Y))
    if MODE != NONE and i_o < blocks:  # the first block of X stands for all
        tl.store(total + i_n * Y + o_y, log_decay, mask=o_y < Y)


@triton.jit
def scan(
    h, total, initial, N, h_scale,
    X: tl.constexpr, Y: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Replace what segments add by the state before each, from ``initial`` `[B, H, Y, X]` on."""
    i_bh, i_e = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o = i_e * BLOCK + tl.arange(0, BLOCK)
    live = o < X * Y
    state = tl.load(initial + i_bh * (X * Y) + o % Y * X + o // Y, mask=live, other=0.0)
    state = state.to(tl.float32) * h_scale
    for n in range(0, N):
        p_h = h + (i_bh * N + n) * (X * Y) + o
        increment = tl.load(p_h, mask=live, other=0.0)
        tl.store(p_h, state, mask=live)
        if MODE != NONE:
            state *= tl.exp(tl.load(total + (i_bh * N + n) * Y + o % Y, mask=live, other=0.0))
        state += increment
