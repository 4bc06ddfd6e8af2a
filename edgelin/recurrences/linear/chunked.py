"""Chunk-parallel torch form of the linear recurrence, any device, differentiable by autograd.

With S the state before a chunk, G_i the sum of the log decays up to token i of it and A masked to
j <= i:

    A_ij = sum_k q_ik k_jk exp(G_ik - G_jk)
    o_i  = scale * ((q_i exp(G_i))^T S + sum_j A_ij v_j)
    S'   = exp(G_last) S + sum_j k_j exp(G_last - G_j) v_j^T

Exclusive, where a token reads the state before its own decay and write, G_i in the first two lines
is G_{i-1}, and the mask j < i.

(Yang et al. 2024, "Gated linear attention", arXiv:2312.06635, equations 5 and 6.) Every exponent is
a sum of log decays over an interval, taken as such: exp(G_i) exp(-G_j) overflows, and a float32
difference of two running sums loses the small ones.
"""

from __future__ import annotations

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
)


@full_precision
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    exclusive: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence in chunks; arithmetic is float32, or float64 if any input is.

    Args:
        q: Queries ``[B, T, H, K]``.
        k: Keys ``[B, T, H, K]``.
        v: Values ``[B, T, H, V]``.
        g: Log decay, None, ``[B, T, H]`` or ``[B, T, H, K]``; below -90 it counts as -90.
        state: ``[B, H, K, V]``.
        scale: Factor of the output.
        exclusive: Whether a token reads the state before its own decay and write.

    Returns:
        ``o`` ``[B, T, H, V]`` in the dtype of ``v`` and the final state in the dtype of ``state``.
    """
    time, dtype = q.shape[1], compute_dtype(q, k, v, state)
    chunk = min(CHUNK, time)
    qc, kc, vc = (split(x.to(dtype), chunk) for x in (q, k, v))
    if g is None:
        within = (qc @ kc.mT).tril(-1 if exclusive else 0)
        q_in, k_out, total = qc, kc, None
    else:
        gc = split(g.to(dtype).clamp(min=MIN_LOG_DECAY).reshape(*q.shape[:3], -1), chunk)
        decayed = _per_head if g.dim() == 3 else _per_key
        within, q_in, k_out, total = decayed(qc, kc, gc, exclusive)
    current = state.to(dtype)
    before = []
    for n, increment in enumerate((k_out.mT @ vc).unbind(2)):
        before.append(current)
        current = increment + (current if total is None else total[:, :, n] * current)
    o = within @ vc + q_in @ torch.stack(before, dim=2)
    return join(scale * o, time).to(v.dtype), current.to(state.dtype)


def _per_head(
    q: Tensor, k: Tensor, g: Tensor, exclusive: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A, decayed q and k, and the chunk's decay ``[B, H, N, 1, 1]`` for g ``[B, H, N, C, 1]``."""
    lower = triangle(q.shape[-2], g)
    after = lower.tril(-1)  # [l, j] = l > j
    seen = after if exclusive else lower
    sums = seen @ (g * after)  # [i, j] = sum of g_l over j < l <= i (exclusive: l < i)
    decay = sums.masked_fill(seen == 0, -torch.inf).exp()
    suffix = after.mT @ g  # over the tokens after each
    total = g.sum(-2, keepdim=True).exp()
    return (q @ k.mT) * decay, q * (seen @ g).exp(), k * suffix.exp(), total


def _per_key(
    q: Tensor, k: Tensor, g: Tensor, exclusive: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A, decayed q and k, and the chunk's decay ``[B, H, N, K, 1]`` for g ``[B, H, N, C, K]``."""
    lower = triangle(q.shape[-2], g)
    prefix = (lower.tril(-1) if exclusive else lower) @ g
    suffix = lower.mT.triu(1) @ g  # over the tokens after each
    within = key_products(q, k, g, exclusive=exclusive)
    return within, q * prefix.exp(), k * suffix.exp(), g.sum(-2).exp()[..., None]
