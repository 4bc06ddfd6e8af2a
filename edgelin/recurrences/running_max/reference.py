"""Sequential form of the running maximum, the truth: m_t = max(m_{t-1} + g_t, x_t)."""

from __future__ import annotations

import torch
from torch import Tensor


def forward(x: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run the recurrence token by token.

    Args:
        x: Exponents ``[B, T, C]``.
        g: Log decay ``[B, T, C]``.
        state: ``[B, C]``.

    Returns:
        m ``[B, T, C]`` and the last of them.
    """
    found = []
    for t in range(x.shape[1]):
        state = torch.maximum(state + g[:, t], x[:, t])
        found.append(state)
    return torch.stack(found, dim=1), state
