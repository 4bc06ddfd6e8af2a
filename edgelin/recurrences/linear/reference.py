"""Sequential form of the linear recurrence: the truth that every other form is tested against.

S_t = exp(g_t) S_{t-1} + k_t v_t^T ;  o_t = scale * S_t^T q_t, one token after the other; exclusive:
o_t = scale * S_{t-1}^T q_t.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelin.recurrences import MIN_LOG_DECAY


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    exclusive: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence token by token in the dtype of ``state`` (float64 included).

    Args:
        q: Queries ``[B, T, H, K]``.
        k: Keys ``[B, T, H, K]``.
        v: Values ``[B, T, H, V]``.
        g: Log decay, None, ``[B, T, H]`` or ``[B, T, H, K]``.
        state: ``[B, H, K, V]``.
        scale: Factor of the output.
        exclusive: Whether a token reads the state before its own decay and write.

    Returns:
        ``o`` ``[B, T, H, V]`` and the final state, both in the dtype of ``state``.
    """
    q, k, v = (x.to(state.dtype) for x in (q, k, v))
    if g is not None:
        decay = g.to(state.dtype).clamp(min=MIN_LOG_DECAY).exp()
        decay = decay[..., None] if g.dim() == 3 else decay
    outputs = []
    for t in range(q.shape[1]):
        before = state
        if g is not None:
            state = decay[:, t, :, :, None] * state
        state = state + k[:, t, :, :, None] * v[:, t, :, None, :]
        read = before if exclusive else state
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], read))
    return torch.stack(outputs, dim=1), state
