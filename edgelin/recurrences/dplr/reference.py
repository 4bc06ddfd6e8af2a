"""Diagonal plus low rank recurrence token by token: what every other form is compared with.

    S_t = Diag(e^{g_t}) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T ;  o_t = scale * S_t^T q_t

Source: Peng et al. 2025, "RWKV-7", arXiv:2503.14456, equations 16 and 17.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelin.recurrences import MIN_LOG_DECAY


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    state: Tensor,
    *,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Sequential form; shapes as in :func:`edgelin.recurrences.dplr.dplr`.

    All tensors are expected in one floating dtype, in which everything is computed.
    """
    decay = g.clamp(min=MIN_LOG_DECAY).exp()
    outputs = []
    for t in range(q.shape[1]):
        read = torch.einsum("bhkv,bhk->bhv", state, a[:, t])
        state = decay[:, t, :, :, None] * state
        state = state + torch.einsum("bhk,bhv->bhkv", b[:, t], read)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        outputs.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, dim=1), state
