"""Chunk-parallel torch form of the linear recurrence, any device, differentiable by autograd.

With S the state before a chunk, G_i the sum of the log decays up to token i of it and A masked to
j <= i:

    A_ij = sum_k q_ik k_jk exp(G_ik - G_jk)
    o_i  = scale * ((q_i exp(G_i))^T S + sum_j A_ij v_j)
    S'   = exp(G_last) S + sum_j k_j exp(G_last - G_j) v_j^T

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
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence in chunks; arithmetic is float32, or float64 if any input is.

    Args:
        q: Queries ``[B, T, H, K]``.
        k: Keys ``[B, T, H, K]``.
        v: Values ``[B, T, H, V]``.
        g: Log decay, None, ``[B, T, H]`` or ``[B, T, H, K]``; below -90 it counts as -90.
        state: ``[B, H, K, V]``.
        scale: Factor of the output.

    Returns:
        ``o`` ``[B, T, H, V]`` in the dtype of ``v`` and the final state in the dtype of ``state``.
    """
    time, dtype = q.shape[1], compute_dtype(q, k, v, state)
    chunk = min(CHUNK, time)
    qc, kc, vc = (split(x.to(dtype), chunk) for x in (q, k, v))
    if g is None:
        within = (qc @ kc.mT).tril()
        q_in, k_out, total = qc, kc, None
    else:
        gc = split(g.to(dtype).clamp(min=MIN_LOG_DECAY).reshape(*q.shape[:3], -1), chunk)
        decayed = _per_head if g.dim() == 3 else _per_key
        within, q_in, k_out, total = decayed(qc, kc, gc)
    current = state.to(dtype)
    before = []
    for n, increment in enumerate((k_out.mT @ vc).unbind(2)):
        before.append(current)
        current = increment + (current if total is None else total[:, :, n] * current)
    o = within @ vc + q_in @ torch.stack(before, dim=2)
    return join(scale * o, time).to(v.dtype), current.to(state.dtype)


def _per_head(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A, decayed q and k, and the chunk's decay ``[B, H, N, 1, 1]`` for g ``[B, H, N, C, 1]``."""
    lower = triangle(q.shape[-2], g)
    after = lower.tril(-1)  # [l, j] = l > j
    sums = lower @ (g * after)  # [i, j] = sum of g_l over j < l <= i
    decay = sums.masked_fill(lower == 0, -torch.inf).exp()
    prefix = lower @ g
    q_in = q * prefix.exp()
    k_out = k * decay[..., -1, :, None]
    return (q @ k.mT) * decay, q_in, k_out, prefix[..., -1:, :].exp()


def _per_key(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A, decayed q and k, and the chunk's decay ``[B, H, N, K, 1]`` for g ``[B, H, N, C, K]``."""
    lower = triangle(q.shape[-2], g)
    prefix = lower @ g
    suffix = lower.mT.triu(1) @ g  # over the tokens after each
    total = prefix[..., -1, :, None].exp()
    return key_products(q, k, g), q * prefix.exp(), k * suffix.exp(), total
