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
from edgelin.recurrences.linear.kernel_plan import OUTPUT


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


@planned
def _divide(rows: int, width: int, eps: float, floored: bool) -> Launch:
    """Of ``divide``."""
    block_v = power_of_2(width)
    block_t = max(1, 8192 // block_v)
    return Launch(
        divide, (cdiv(rows, block_t),), rows, eps,
        V=width, BT=block_t, BV=block_v, FLOORED=floored, num_warps=4,
    )  # fmt: skip


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
    z = torch.empty_like(normalizer)
    floor = sums if floor is None else floor.contiguous()
    starts, columns = walk.starts(OUTPUT, state, normalizer)
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
    dq, dk, dv, dg, dstart, dinitial = gradients(
        walk, (state, normalizer), (dstate, dnormalizer), states, dn
    )
    return dq.to(q.dtype), dk.to(k.dtype), dv, dg, dstart, dinitial, dfloor
