"""Delta rule token by token: the truth that every other form is compared with.

    S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - (e^{g_t} S_{t-1})^T k_t)^T ;  o_t = scale * S_t^T q_t

Source: Yang et al. 2024, "Gated Delta Networks", eq. 10 (Schlag et al. 2021, eq. 23-25, without g;
Kimi Team 2025, arXiv:2510.26692, eq. 1, with a g for every key).
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelin.recurrences import MIN_LOG_DECAY


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    state: Tensor,
    *,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Sequential form; shapes as in :func:`edgelin.recurrences.delta.delta`.

    All tensors are expected in one floating dtype, in which everything is computed.
    """
    outputs = []
    for t in range(q.shape[1]):
        if g is not None:
            decay = g[:, t].clamp(min=MIN_LOG_DECAY).exp()[..., None]
            state = state * (decay if g.dim() == 4 else decay[..., None])
        old = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        new = beta[:, t, :, None] * (v[:, t] - old)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], new)
        outputs.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, dim=1), state
