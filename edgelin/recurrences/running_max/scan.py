"""Parallel torch form of the running maximum, any device: a log-step scan over time.

With shifts s = 1, 2, 4, ... (Hillis and Steele 1986), m_t the maximum and G_t the sum of g over the
last s tokens:

    m_t <- max(m_t, m_{t-s} + G_t) ;  G_t <- G_t + G_{t-s}

Sums are taken over their intervals: in float32, the maximum of x_j - (g_1 + ... + g_j) would lose
the digits of x in a long sequence. Backwards, with k_t = 1 where the decayed maximum won and 0
where x did, the same scan runs e_t = dm_t + k_{t+1} e_{t+1}; dx = (1 - k) e and dg = k e.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward(x: Tensor, g: Tensor, state: Tensor) -> Tensor:
    """m ``[B, T, C]`` for x and g ``[B, T, C]`` and m before them ``[B, C]``."""
    m = x.clone(memory_format=torch.contiguous_format)
    m[:, 0] = torch.maximum(x[:, 0], state + g[:, 0])
    s, time = 1, x.shape[1]
    while s < time:
        m[:, s:] = torch.maximum(m[:, s:], m[:, :-s] + g[:, s:])
        g = torch.cat([g[:, :s], g[:, s:] + g[:, :-s]], dim=1)
        s *= 2
    return m


def backward(x: Tensor, m: Tensor, dm: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, g and state.

    Args:
        x: ``[B, T, C]``.
        m: What :func:`forward` gave for it.
        dm: Gradient of m.
        dstate: Gradient of the last m ``[B, C]``.
    """
    kept = (x < m).to(dm.dtype)
    e = dm.clone(memory_format=torch.contiguous_format)
    e[:, -1] += dstate
    k = torch.cat([kept[:, 1:], torch.zeros_like(kept[:, :1])], dim=1)
    s, time = 1, x.shape[1]
    while s < time:
        e[:, :-s] += k[:, :-s] * e[:, s:]
        k = torch.cat([k[:, :-s] * k[:, s:], torch.zeros_like(k[:, -s:])], dim=1)
        s *= 2
    dg = kept * e
    return e - dg, dg, dg[:, 0].clone()
