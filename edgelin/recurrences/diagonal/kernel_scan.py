"""What all kernels of the diagonal recurrence share: work as segments of time, and their scan."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelin.recurrences import MIN_LOG_DECAY
from edgelin.recurrences.launches import Launch, cdiv, planned

# How weights vary: not at all, a token for all channels alike, a token and channel.
CONSTANT, SHARED, EACH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_FLOOR = tl.constexpr(MIN_LOG_DECAY)


@triton.jit
def _place(item, D, NS, BD: tl.constexpr):
    """Channel block, segment and batch row of a piece of work."""
    blocks = tl.cdiv(D, BD)
    rest = item // blocks
    return item % blocks, rest % NS, rest // NS


@triton.jit
def _scan(
    initial, ends, products, starts, NS, SIZE,
    P: tl.constexpr, REV: tl.constexpr, BU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """State before every segment; with REV after it, going back through conjugate products.

    BU segments are loaded together, so that their loads wait for memory at the same time; a row of
    such a tile lies in the registers of one thread, and picking it costs no traffic.
    """
    i_e, i_b = tl.program_id(0), tl.program_id(1)
    line = i_e * BLOCK + tl.arange(0, BLOCK)
    u = tl.arange(0, BU)[:, None]
    h_r = tl.load(initial + i_b.to(tl.int64) * P * SIZE + line, mask=line < SIZE, other=0.0)
    if P == 2:
        second = initial + (i_b.to(tl.int64) * P + 1) * SIZE
        h_i = tl.load(second + line, mask=line < SIZE, other=0.0)
    for j in range(0, tl.cdiv(NS, BU)):
        i = j * BU + u
        live = (i < NS) & (line < SIZE)[None, :]
        if REV:
            i = NS - 1 - i
        at = (i_b.to(tl.int64) * NS + i) * P * SIZE + line[None, :]
        e_r = tl.load(ends + at, mask=live, other=0.0)
        p_r = tl.load(products + at, mask=live, other=0.0)
        s_r = tl.zeros([BU, BLOCK], dtype=tl.float32)
        if P == 2:
            e_i = tl.load(ends + at + SIZE, mask=live, other=0.0)
            p_i = tl.load(products + at + SIZE, mask=live, other=0.0)
            if REV:
                p_i = -p_i
            s_i = tl.zeros([BU, BLOCK], dtype=tl.float32)
        for row in tl.static_range(BU):
            s_r = tl.where(u == row, h_r[None, :], s_r)
            q_r = _pick(p_r, u == row)
            if P == 2:
                s_i = tl.where(u == row, h_i[None, :], s_i)
                q_i = _pick(p_i, u == row)
                h_r, h_i = q_r * h_r - q_i * h_i, q_r * h_i + q_i * h_r
                h_i += _pick(e_i, u == row)
            else:
                h_r = q_r * h_r
            h_r += _pick(e_r, u == row)
        tl.store(starts + at, s_r, mask=live)
        if P == 2:
            tl.store(starts + at + SIZE, s_i, mask=live)


@triton.jit
def _pick(tile, row):
    """The row of a tile at which the mask ``row`` holds."""
    return tl.sum(tl.where(row, tile, 0.0), axis=0)


def scan(initial: Tensor, ends: Tensor, products: Tensor, *, reverse: bool) -> Tensor:
    """State ``[B, NS, P, N, D]`` that enters every segment, from the first or the last one on."""
    batch, count, planes, states, channels = ends.shape
    starts = torch.empty_like(ends)
    _scan_of(batch, count, planes, states * channels, reverse)(initial, ends, products, starts)
    return starts


@planned
def _scan_of(batch: int, count: int, planes: int, size: int, reverse: bool) -> Launch:
    return Launch(
        _scan, (cdiv(size, 128), batch), count, size,
        P=planes, REV=reverse, BU=8, BLOCK=128, num_warps=1,
    )  # fmt: skip
