"""Triton kernels that start the passes of the linear recurrence: states before segments of time.

`segment` computes what each segment adds to the state, and `scan` turns that into the state before
each. Letters and modes are those of ``kernel_passes.py``. In packed rows the segment behind which,
backwards before which, there is none adds nothing that a pass begins with, and is left out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edgelin.recurrences.linear.kernel_decays import FLOOR, HEAD, KEY, NONE, load_rows
from edgelin.recurrences.linear.kernel_places import number_of, place


@triton.jit
def halves(p, row, n, o_y, T, Y: tl.constexpr, BT: tl.constexpr, STEP: tl.constexpr):
    """Log decays `[BY]` of keys over half of chunk ``n``; zero for chunks behind the end."""
    mask = (o_y < Y) & (n < tl.cdiv(T, BT))
    return tl.load(p + (row + n * STEP) * Y + o_y, mask=mask, other=0.0)


@triton.jit
def head_decays(g, token, o_t, live, H: tl.constexpr, REV: tl.constexpr, WIDE: tl.constexpr):
    """G `[BT]` of a head, factors of what a row reads and adds, and the decay of the whole."""
    steps = tl.maximum(tl.load(g + token + o_t * H, mask=live, other=0.0).to(tl.float32), FLOOR)
    sums = tl.cumsum(steps.to(WIDE), axis=0)
    total = tl.sum(steps.to(WIDE), axis=0)
    up, down = tl.exp(sums.to(tl.float32)), tl.exp((total - sums).to(tl.float32))
    total = tl.exp(total.to(tl.float32))
    if REV:
        return sums, down, up, total
    else:
        return sums, up, down, total


@triton.jit
def segment(
    x, y, g, enter, leave, far, h, total, places, T, chunks,
    H: tl.constexpr, HY: tl.constexpr, X: tl.constexpr, Y: tl.constexpr,
    BX: tl.constexpr, BY: tl.constexpr, BT: tl.constexpr,
    MODE: tl.constexpr, REV: tl.constexpr, PACKED: tl.constexpr,
    DT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """What a segment adds to the state, into ``h`` `[B*H, N + 1, X, Y]`, and by which factor
    ``total`` `[B*H, N, Y]` it multiplies it."""
    i_o = tl.program_id(2)
    _n, i_h, i_r, i_s, before, T, first, count, row = place(places, T, chunks, H, BT, PACKED)
    if MODE == KEY:
        if tl.load(far + number_of(i_r, i_s, tl.num_programs(1), H, PACKED)) != 0:
            return
    step: tl.constexpr = H if PACKED else 1
    o_t = tl.arange(0, BT)
    blocks: tl.constexpr = (Y + BY - 1) // BY
    o_x = i_o // blocks * BX + tl.arange(0, BX)
    o_y = i_o % blocks * BY + tl.arange(0, BY)
    state = tl.zeros([BX, BY], dtype=tl.float32)
    decay = tl.full([BY], 1.0, dtype=tl.float32)
    for c in range(0, count):
        n = first + (count - 1 - c if REV else c)
        live = n * BT + o_t < T
        token = (before + n * BT) * H + i_h
        shared = token if H == HY else token // H
        b_x = load_rows(x + token * X, o_t, o_x, live, H, X).to(DT)
        b_y = load_rows(y + shared * Y, o_t, o_y, live, HY, Y).to(DT)
        if MODE == HEAD:
            _, _, adds, whole = head_decays(g, token, o_t, live, H, REV, WIDE)
            b_y = (b_y.to(tl.float32) * adds[:, None]).to(DT)
            state *= whole
            decay *= whole
        if MODE == KEY:
            entering = tl.exp(halves(enter, row, n, o_y, T, Y, BT, step))
            state *= entering[None, :]
            decay *= entering
        state = tl.dot(tl.trans(b_x), b_y, state, input_precision="ieee")
        if MODE == KEY:
            leaving = tl.exp(halves(leave, row, n, o_y, T, Y, BT, step))
            state *= leaving[None, :]
            decay *= leaving
    put_segment(h, total, state, decay, i_r, i_s, i_o < blocks, o_x, o_y, H, X, Y, PACKED)


@triton.jit
def put_segment(h, total, state, decay, i_r, i_s, is_first, o_x, o_y,
                H: tl.constexpr, X: tl.constexpr, Y: tl.constexpr,
                PACKED: tl.constexpr):  # fmt: skip
    """Store what a segment does; of the decay, the first block of X stands for all."""
    segments = tl.num_programs(1)
    p_h = h + number_of(i_r, i_s, segments + 1, H, PACKED) * (X * Y)
    in_state = (o_x[:, None] < X) & (o_y[None, :] < Y)
    tl.store(p_h + o_x[:, None] * Y + o_y[None, :], state, mask=in_state)
    if is_first:
        p_total = total + number_of(i_r, i_s, segments, H, PACKED) * Y
        tl.store(p_total + o_y, decay, mask=o_y < Y)


@triton.jit(do_not_specialize=["N"])
def scan(
    h, total, initial, sequences, N, h_scale,
    H: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, BLOCK: tl.constexpr,
    MODE: tl.constexpr, REV: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Replace what segments add by the state before each, from ``initial`` `[B, H, Y, X]` on.

    Forwards the state after the last is left at N, backwards the first one at N. Packed, that is
    the slot of the segment that was left out, and slots of a sequence are H states apart, not 1.
    """
    i_bh, i_e = tl.program_id(0).to(tl.int64), tl.program_id(1)
    apart: tl.constexpr = H if PACKED else 1
    if PACKED:
        p = sequences + i_bh // H * 2
        N = tl.load(p + 1) - 1
        at = (tl.load(p).to(tl.int64) + (1 if REV else 0)) * H + i_bh % H
        total_at, last = at, -1 if REV else N
    else:
        at, total_at, last = i_bh * (N + 1), i_bh * N, N
    o = i_e * BLOCK + tl.arange(0, BLOCK)
    live = o < X * Y
    state = tl.load(initial + i_bh * (X * Y) + o % Y * X + o // Y, mask=live, other=0.0)
    state = state.to(tl.float32) * h_scale
    for step in range(0, N):
        n = N - 1 - step if REV else step
        p_h = h + (at + n * apart) * (X * Y) + o
        increment = tl.load(p_h, mask=live, other=0.0)
        tl.store(p_h, state, mask=live)
        if MODE != NONE:
            state *= tl.load(total + (total_at + n * apart) * Y + o % Y, mask=live, other=0.0)
        state += increment
    tl.store(h + (at + last * apart) * (X * Y) + o, state, mask=live)
