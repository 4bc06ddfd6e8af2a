"""Triton kernels of the linear recurrence: the pass over a segment, and what starts it.

Time is cut into segments. When there are several, `_segment` computes what each adds to the state,
`_scan` turns that into the state before each segment, and `_attend` runs over all segments in
parallel, chunk by chunk (equations in ``chunked.py``).

One kernel serves the output and all gradients. With rows y (width Y, the side that decays) and x
(width X), the state is H = sum of x_t y_t^T, decayed along Y, and a row a_i reads it:

    inner (a along Y): out_i = sum_j (a_i . exp(G_i - G_j) y_j) x_j    o, and dv backwards in time
    outer (a along X): out_i = sum_j (a_i . x_j) exp(G_i - G_j) y_j    dq, and dk backwards in time

Sums of log decays over intervals are products with 0/1 masks on the tensor cores, the decay split
into bfloat16 parts so that they are exact; per key, A is built level by level (``chunked.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelin.recurrences import MIN_LOG_DECAY

SEGMENT = 256  # shortest segment in tokens: below, passing states costs more than it gains
PROGRAMS = 512  # programs that fill a large GPU; more segments than that take are not made

NONE, HEAD, KEY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_FLOOR = tl.constexpr(MIN_LOG_DECAY)


@triton.jit
def _rows(p, rows, cols, live, H: tl.constexpr, D: tl.constexpr):
    """Load a `[BT, BD]` tile of a `[B, T, H, D]` tensor; zeros where not live."""
    return tl.load(
        p + rows[:, None] * (H * D) + cols[None, :],
        mask=live[:, None] & (cols[None, :] < D),
        other=0.0,
    )


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
    zeros_ones = tl.where(mask, 1.0, 0.0).to(PT)
    part = g.to(tl.bfloat16)
    total = tl.dot(zeros_ones, part.to(PT), input_precision="ieee")
    for _ in tl.static_range(PARTS - 1):
        g = g - part.to(tl.float32)
        part = g.to(tl.bfloat16)
        total = tl.dot(zeros_ones, part.to(PT), total, input_precision="ieee")
    return total


@triton.jit
def _read(
    b_a, b_x, b_y, b_g, state, row, col,
    MODE: tl.constexpr, INNER: tl.constexpr,
    DT: tl.constexpr, PT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Outputs `[BT, BX or BY]` of a chunk without decay, or with one a head (b_g `[BT]`)."""
    if INNER:
        acc = tl.dot(b_a, tl.trans(state.to(DT)), input_precision="ieee")
        scores = tl.dot(b_a, tl.trans(b_y), input_precision="ieee")
    else:
        acc = tl.dot(b_a, state.to(DT), input_precision="ieee")
        scores = tl.dot(b_a, tl.trans(b_x), input_precision="ieee")
    if MODE == HEAD:
        before = tl.sum(tl.where(col <= row, b_g[None, :], 0.0), axis=1)
        acc = acc * tl.exp(before)[:, None]
        sums = _sums(col <= row, tl.where(row > col, b_g[:, None], 0.0), PT, PARTS)
        scores = scores * tl.exp(sums)
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
    for level in tl.static_range(LEVELS):
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
        after = tl.exp(tl.sum(tl.where(col > row, b_g[None, :], 0.0), axis=1))
        b_y = (b_y.to(tl.float32) * after[:, None]).to(DT)
        state = state * tl.exp(tl.sum(b_g, axis=0))
    if MODE == KEY:
        after = tl.exp(_sums(col > row, b_g, PT, PARTS))
        b_y = (b_y.to(tl.float32) * after).to(DT)
        state = state * tl.exp(tl.sum(b_g, axis=0))[None, :]
    return tl.dot(tl.trans(b_x), b_y, state, input_precision="ieee")


@triton.jit
def _attend(
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
            acc = _read_by_key(
                b_a, b_x, b_y, b_g, state, row, col, BT, INNER, DT, PT, PARTS, LEVELS
            )
        else:
            b_g = o_t
            if MODE == HEAD:
                b_g = _head_decays(g, token, rows, pos, T, H, REV)
            acc = _read(b_a, b_x, b_y, b_g, state, row, col, MODE, INNER, DT, PT, PARTS)
        state = _advance(state, b_x, b_y, b_g, row, col, MODE, DT, PT, PARTS)
        acc = acc * out_scale
        if INNER:
            p_out = out + token * X + rows[:, None] * (H * X) + o_x[None, :]
            tl.store(p_out, acc.to(out.dtype.element_ty), mask=live[:, None] & (o_x[None, :] < X))
        else:
            in_out = live[:, None] & (o_y[None, :] < Y)
            p_out = out + token * Y + rows[:, None] * (H * Y) + o_y[None, :]
            tl.store(p_out, acc.to(out.dtype.element_ty), mask=in_out)
            if WEIGH:
                # For the decay's gradient: dq stores q dq, dk (backwards) subtracts k dk from it.
                weight = acc * _rows(m + token * Y, rows, o_y, live, H, Y).to(tl.float32)
                if MODE == KEY:
                    p_w = w + token * Y + rows[:, None] * (H * Y) + o_y[None, :]
                else:
                    p_w = w + i_o.to(tl.int64) * s_w + token + rows * H
                    weight = tl.sum(weight, axis=1)
                    in_out = live
                if REV:
                    weight = tl.load(p_w, mask=in_out, other=0.0) - weight
                tl.store(p_w, weight, mask=in_out)
    if i_s == tl.num_programs(1) - 1:
        if REV:
            state = state * out_scale
        p_final = final + i_bh.to(tl.int64) * (X * Y) + o_x[:, None] + o_y[None, :] * X
        tl.store(p_final, state, mask=in_state)


@triton.jit
def _segment(
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
def _scan(
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


@dataclass(frozen=True)
class Pass:
    """What `_attend` computes (see the module docstring)."""

    inner: bool
    reverse: bool


OUTPUT, DQ = Pass(inner=True, reverse=False), Pass(inner=False, reverse=False)
DV, DK = Pass(inner=True, reverse=True), Pass(inner=False, reverse=True)


def mode_of(g: Tensor | None) -> tl.constexpr:
    """NONE, HEAD or KEY."""
    return NONE if g is None else HEAD if g.dim() == 3 else KEY


def blocks_of(contracted: int, width: int, half: bool) -> tuple[int, int, int]:
    """Block over the contracted side (whole), block over the output's width, and their number."""
    whole = max(16, triton.next_power_of_2(contracted))
    block = max(16, min(triton.next_power_of_2(width), (16384 if half else 8192) // whole))
    return whole, block, triton.cdiv(width, block)


def attend(
    kind: Pass,
    rows: tuple[Tensor, Tensor, Tensor],
    g: Tensor | None,
    initial: Tensor,
    *,
    half: bool,
    scale: float,
    weigh: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Run one pass over time.

    Args:
        kind: Which pass.
        rows: a, x ``[B, T, H, X]`` and y ``[B, T, H, Y]``, contiguous; a has the width of y in an
            inner pass, of x in an outer one.
        g: Log decay ``[B, T, H]``, ``[B, T, H, Y]`` or None, contiguous.
        initial: ``[B, H, Y, X]`` float32, contiguous: the state, or backwards its gradient.
        half: Whether matrix products are bfloat16 (else float32).
        scale: Factor of the output; backwards it multiplies what the pass adds to the state too.
        weigh: For an outer pass: q (backwards k) and the tensor that takes the products with the
            result, ``[B, T, H, Y]`` or, with a decay a head, ``[blocks, B, T, H]``.

    Returns:
        The result, with the width of x (outer: y), and the state after the pass, like ``initial``.
    """
    a, x, y = rows
    (batch, time, heads, width_x), width_y = x.shape, y.shape[3]
    mode = mode_of(g)
    if kind.inner:
        block_y, block_x, blocks = blocks_of(width_y, width_x, half)
    else:
        block_x, block_y, blocks = blocks_of(width_x, width_y, half)
    # Read off the compiler's register counts: larger tiles spill, above all in float32.
    block_t = 16 if not half else 32 if mode == KEY else 64
    few = half and mode == NONE and block_x * block_y <= 4096
    launch = {
        "BT": block_t,
        "MODE": mode,
        "REV": kind.reverse,
        # Triton's interpreter multiplies bfloat16 wrongly: on the CPU products are float32.
        "DT": tl.bfloat16 if half and x.is_cuda else tl.float32,
        "PT": tl.bfloat16 if x.is_cuda else tl.float32,
        "PARTS": 2 if half else 3,
        "num_warps": 4 if few else 8,
        "num_stages": 2 if half and max(block_x, block_y) <= 128 else 1,
    }
    segments = _segments(time, batch * heads * blocks)
    chunks = triton.cdiv(triton.cdiv(time, block_t), segments)
    segments = triton.cdiv(time, chunks * block_t)
    h_scale = 1.0 / scale if kind.reverse else 1.0
    size = width_x * width_y
    start, strides = initial, (size, 0, 1, width_x)
    if segments > 1:
        start = _states(x, y, g, initial, h_scale, segments, chunks, launch)
        h_scale, strides = 1.0, (segments * size, size, width_y, 1)
    like = x if kind.inner else y
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    final = torch.empty(initial.shape, dtype=torch.float32, device=like.device)
    factor, weights = weigh if weigh is not None else (out, out)
    _attend[(batch * heads, segments, blocks)](
        a, x, y, x if g is None else g, start, out, final, factor, weights,
        time, chunks, h_scale, scale, *strides, batch * time * heads,
        H=heads, X=width_x, Y=width_y, BX=block_x, BY=block_y,
        INNER=kind.inner, WEIGH=weigh is not None, LEVELS=block_t.bit_length() - 1, **launch,
    )  # fmt: skip
    return out, final


def _segments(time: int, programs: int) -> int:
    """How many segments fill the GPU, when each has at least SEGMENT tokens."""
    return max(1, min(time // SEGMENT, -(-PROGRAMS // programs)))


def _states(
    x: Tensor,
    y: Tensor,
    g: Tensor | None,
    initial: Tensor,
    h_scale: float,
    segments: int,
    chunks: int,
    launch: dict[str, Any],
) -> Tensor:
    """The state before each segment ``[B*H, segments, X, Y]``."""
    (batch, time, heads, width_x), width_y = x.shape, y.shape[3]
    block_x, block_y = (max(16, min(triton.next_power_of_2(w), 64)) for w in (width_x, width_y))
    rows = batch * heads
    h = torch.empty((rows, segments, width_x, width_y), dtype=torch.float32, device=x.device)
    total = torch.empty((rows, segments, width_y), dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(width_x, block_x) * triton.cdiv(width_y, block_y)
    _segment[(rows, segments, tiles)](
        x, y, x if g is None else g, h, total, time, chunks,
        H=heads, X=width_x, Y=width_y, BX=block_x, BY=block_y, **launch | {"num_warps": 4},
    )  # fmt: skip
    _scan[(rows, triton.cdiv(width_x * width_y, 1024))](
        h, total, initial, segments, h_scale,
        X=width_x, Y=width_y, BLOCK=1024, MODE=launch["MODE"], num_warps=4,
    )  # fmt: skip
    return h


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The recurrence on a GPU: shapes as in ``chunked.forward``, K and V up to 256, scale > 0."""
    q, k, v, state = (x.contiguous() for x in (q, k, v, state))
    g = None if g is None else g.contiguous()
    return attend(OUTPUT, (q, v, k), g, state, half=is_half(q, k, v), scale=scale)


def is_half(*tensors: Tensor) -> bool:
    """Whether all are bfloat16: only then matrix products are."""
    return all(x.dtype == torch.bfloat16 for x in tensors)
