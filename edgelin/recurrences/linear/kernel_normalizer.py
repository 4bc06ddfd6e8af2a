"""Linear recurrence with its normaliser on a GPU: one more column of values, all ones.

With z the state of that column, n_t = scale * z_t . q_t and o_t = numerator_t / d_t, where d is
n + eps or, with a floor, max(|n|, floor) + eps (``linear``):

    gradient of the numerator   do_t / d_t, which takes the place of do_t in all passes
    gradient of n_t             dn_t = -do_t . o_t / d_t, times the sign of n_t where the floor is
                                below it, 0 where it is not (that is the floor's then)

dq and dk gain what the column gives, as any other: dn_t z_t, and the gradient of z summed backwards
from dn_t q_t. The passes of ``kernel_passes.py`` take it along (NORM), in float32 throughout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelin.recurrences.launches import Launch, cdiv, planned, power_of_2
from edgelin.recurrences.linear import kernel
from edgelin.recurrences.linear.kernel_backward import gradients
from edgelin.recurrences.linear.kernel_decays import HEAD, load_rows
from edgelin.recurrences.linear.kernel_places import ends_row, number_of, place
from edgelin.recurrences.linear.kernel_plan import DK, OUTPUT, Plan, whole_of
from edgelin.recurrences.linear.kernel_segments import head_decays


@triton.jit
def divide(
    o, do, column, floor, shared, gradient, dfloor, T, eps,
    V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, FLOORED: tl.constexpr,
):  # fmt: skip
    """Gradient through o = numerator / denominator, of rows of `[B * T * H, V]`: of the numerator
    into ``shared``, of the sums in ``column`` (q . z) into ``gradient``, and of the floor."""
    row, o_v = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, BV)
    live = row < T
    sums = tl.load(column + row, mask=live, other=1.0)
    least = tl.load(floor + row, mask=live, other=0.0) if FLOORED else 0.0
    below = sums
    if FLOORED:
        below = tl.maximum(tl.abs(sums), least)
    below += eps
    cells = row.to(tl.int64)[:, None] * V + o_v[None, :]
    mask = live[:, None] & (o_v < V)[None, :]
    up = tl.load(do + cells, mask=mask, other=0.0).to(tl.float32) / below[:, None]
    tl.store(shared + cells, up.to(shared.dtype.element_ty), mask=mask)
    down = -tl.sum(up * tl.load(o + cells, mask=mask, other=0.0).to(tl.float32), axis=1)
    if FLOORED:
        above = tl.abs(sums) > least
        tl.store(dfloor + row, tl.where(above, 0.0, down), mask=live)
        down = tl.where(above, tl.where(sums < 0, -down, down), 0.0)
    tl.store(gradient + row, down, mask=live)


@triton.jit
def segment(
    column, y, sums, h, total, places, T, chunks,
    H: tl.constexpr, HY: tl.constexpr, Y: tl.constexpr, BY: tl.constexpr, BT: tl.constexpr,
    MODE: tl.constexpr, REV: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """What a segment adds to the state of the column, of ones or backwards ``column``, into ``h``
    `[B*H, N, Y]`, and by which factor ``total`` `[B*H, N, Y]` it multiplies it."""
    pid = tl.program_id(0)
    _n, i_h, i_r, i_s, before, T, first, count, row = place(pid, places, T, chunks, H, BT, PACKED)
    if not PACKED:
        if ends_row(i_s, first, count, T, BT, REV, PACKED):
            return
    step: tl.constexpr = H if PACKED else 1
    o_t, o_y = tl.arange(0, BT), tl.arange(0, BY)
    z, decay = tl.zeros([BY], dtype=tl.float32), tl.full([BY], 1.0, dtype=tl.float32)
    for c in range(0, count):
        n = first + (count - 1 - c if REV else c)
        live = n * BT + o_t < T
        token = (before + n * BT) * H + i_h
        shared = token if H == HY else token // H
        rows = load_rows(y + shared * Y, o_t, o_y, live, HY, Y).to(tl.float32)
        if REV:
            rows *= tl.load(column + token + o_t * H, mask=live, other=0.0)[:, None]
        if MODE == HEAD:
            _, _, adds, whole = head_decays(sums, row + n * step, o_t, BT, REV)
            rows *= adds[:, None]
            z *= whole
            decay *= whole
        z += tl.sum(rows, axis=0)
    segments = tl.num_programs(1)
    p = number_of(i_r, i_s, segments, H, PACKED) * Y + o_y
    tl.store(h + p, z, mask=o_y < Y)
    tl.store(total + p, decay, mask=o_y < Y)


@planned
def _segment(plan: Plan, reverse: bool) -> Launch:
    """Of ``segment``."""
    shape = plan.shape
    return Launch(
        segment, (plan.rows, plan.segments), shape.time, plan.chunks,
        H=shape.heads, HY=shape.key_heads, Y=shape.key, BY=whole_of(shape.key),
        BT=plan.block_t, MODE=shape.mode, REV=reverse, PACKED=plan.packed,
        num_warps=4,
    )  # fmt: skip


@planned
def _divide(rows: int, width: int, eps: float, floored: bool) -> Launch:
    """Of ``divide``."""
    block_v = power_of_2(width)
    block_t = max(1, 8192 // block_v)
    return Launch(
        divide, (cdiv(rows, block_t),), rows, eps,
        V=width, BT=block_t, BV=block_v, FLOORED=floored, num_warps=4,
    )  # fmt: skip


def _starts(walk: kernel.Walk, initial: Tensor, column: Tensor | None = None) -> Tensor:
    """As ``Walk.starts`` for the column's state: of ones, or of ``column`` backwards."""
    plan, places, reverse = walk.plan, walk.places, column is not None
    if plan.single:
        return initial
    y = walk.tensors["q" if reverse else "k"]
    h = initial.new_empty((*places.parts, plan.shape.key))
    total = initial.new_empty((*places.parts, plan.shape.key))
    table, programs = places.adding[reverse]
    column = total if column is None else column
    _segment(plan, reverse)(column, y, walk.halves(reverse)[0], h, total, table, programs=programs)
    table, programs = places.sequences
    plan.scan(DK if reverse else OUTPUT, 1)(h, total, initial, table, programs=programs)
    return h


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    normalizer: Tensor,
    floor: Tensor | None,
    scale: float,
    eps: float,
    ends: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The recurrence, shapes as of ``linear``: no decay or one a head, K and V up to 256.

    Returns:
        o, the last state and normaliser, and what the backward pass needs beside o: n
        ``[B, T, H]``, and with several segments the states and normalisers before them.
    """
    walk = kernel.walk((q, k, v, g), scale, None, 1 if floor is None else 2, eps, ends)
    sums = normalizer.new_empty(v.shape[:3])
    z, initial = torch.empty_like(normalizer), normalizer.contiguous()
    floor = sums if floor is None else floor.contiguous()
    columns, starts = _starts(walk, initial), walk.starts(OUTPUT, state.contiguous())
    column = kernel.Column(sums, columns, columns, columns, z, floor)
    o, final = walk.attend(OUTPUT, starts, column=column)
    return o, final, z, [sums] if walk.plan.single else [sums, starts, columns]


def allocate(q: Tensor, k: Tensor, v: Tensor, ends: Sequence[int] | None = None) -> list[Tensor]:
    """Memory for what :func:`forward` keeps."""
    sums = torch.empty(v.shape[:3], dtype=torch.float32, device=v.device)
    starts = kernel.allocate(q, k, v, ends)
    return [sums, *starts, *(x.new_empty((*x.shape[:2], k.shape[3])) for x in starts)]


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    normalizer: Tensor,
    floor: Tensor | None,
    scale: float,
    eps: float,
    do: Tensor,
    dstate: Tensor,
    dnormalizer: Tensor,
    kept: Sequence[Tensor],
    ends: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g (empty without g), state, normaliser and floor (likewise).

    ``kept`` is o and what else the forward pass keeps.
    """
    o, sums, *states = kept
    shared, dn = torch.empty_like(o), torch.empty_like(sums)
    dfloor = dn.new_empty(0) if floor is None else torch.empty_like(sums)
    least = sums if floor is None else floor.contiguous()
    _divide(sums.numel(), v.shape[-1], eps, floor is not None)(
        o, do.contiguous(), sums, least, shared, dn, dn if floor is None else dfloor
    )
    walk = kernel.walk((q, k, v, g), scale, shared, 1, eps, ends)
    before = states[1] if states else _starts(walk, normalizer.contiguous())
    after = _starts(walk, dnormalizer.contiguous(), dn)
    last, dinitial = torch.empty_like(normalizer), torch.empty_like(normalizer)
    columns = (
        kernel.Column(dn, before, before, before, last, dn),
        kernel.Column(dn, after, before, last, dinitial, dn),
    )
    dq, dk, dv, dg, dstart = gradients(walk, state, dstate, states, columns)
    return dq.to(q.dtype), dk.to(k.dtype), dv, dg, dstart, dinitial, dfloor
