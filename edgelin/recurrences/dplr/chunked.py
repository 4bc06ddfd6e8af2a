"""Chunk-parallel torch form of the diagonal plus low rank recurrence, any device.

With S the state before a chunk, G_i the sum of the log decays up to token i of it, and products
whose decay is inside the sum over keys,

    A_xy[i, j] = sum_k x_ik y_jk exp(G_ik - G_jk)           j <= i, for x = q
    A_xy[i, j] = sum_k x_ik y_jk exp(G_{i-1,k} - G_jk)      j < i,  for x = a

what the tokens read, z_i = a_i^T S_{i-1}, solves a unit-triangular system, and the rest follows:

    (I - A_ab) z = (a exp(G_{i-1})) S + A_ak v
    o  = scale * ((q exp(G_i)) S + A_qb z + A_qk v)
    S' = exp(G_last) S + (b exp(G_last - G))^T z + (k exp(G_last - G))^T v

Source: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence
Length", arXiv:2406.06484, section 3, with rows a and columns b of their own and the decay of a
key. As in the delta rule, the inverse goes up in blocks and every difference of sums is an
interval's own sum: repeated tokens and hard resets lose nothing.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from edgelin.recurrences import CHUNK, MIN_LOG_DECAY
from edgelin.recurrences.chunks import (
    compute_dtype,
    full_precision,
    join,
    key_products,
    split,
    triangle,
    unit_lower_inverse,
)


@full_precision
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
    """Outputs `[B, T, H, V]` in the dtype of ``v`` and the new state; differentiable."""
    time, dtype = v.shape[1], compute_dtype(v, state)
    size = min(CHUNK, time)
    g = g.clamp(min=MIN_LOG_DECAY)
    q, k, v_, a, b, g = (split(x.to(dtype), size) for x in (q, k, v, a, b, g))
    a_b, a_k = (key_products(a, x, g, exclusive=True) for x in (b, k))
    q_b, q_k = (key_products(q, x, g) for x in (b, k))
    inverse = unit_lower_inverse(-a_b)
    lower = triangle(size, g)
    before, upto, after = (mask @ g for mask in (lower.tril(-1), lower, lower.mT.triu(1)))
    a, q = a * before.exp(), q * upto.exp()
    b, k = ((x * after.exp()).mT for x in (b, k))
    total = upto[..., -1, :, None].exp()
    # what the state before the chunk has no part in, for all chunks at once
    read, written, output = a_k @ v_, k @ v_, q_k @ v_

    current = state.to(dtype)
    outputs = []
    for n in range(q.shape[2]):
        z = inverse[:, :, n] @ (a[:, :, n] @ current + read[:, :, n])
        outputs.append(q[:, :, n] @ current + q_b[:, :, n] @ z + output[:, :, n])
        current = total[:, :, n] * current + b[:, :, n] @ z + written[:, :, n]
    o = join(torch.stack(outputs, dim=2), time)
    return (scale * o).to(v.dtype).contiguous(), current.to(state.dtype).contiguous()


@full_precision
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    state: Tensor,
    scale: float,
    do: Tensor,
    dstate: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, a, b, g and state, through a second forward."""

    # vjp, since autograd.grad records nothing inside a custom op
    gradients = torch.func.vjp(partial(forward, scale=scale), q, k, v, a, b, g, state)[1]
    dq, dk, dv, da, db, dg, ds = (x.contiguous() for x in gradients((do, dstate)))
    return dq, dk, dv, da, db, dg, ds
