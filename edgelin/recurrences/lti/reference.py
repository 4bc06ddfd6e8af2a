"""Sequential form of the LTI recurrence: the truth that every other form is tested against.

h_t = A h_{t-1} + B x_t ;  y_t = C h_t, one token after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward(x: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run the recurrence token by token in the dtype of ``state`` (float64 included).

    Args:
        x: Inputs ``[B, T, D]``.
        a: Transition ``[D, N, N]``.
        b: Input weights ``[D, N]``.
        c: Output weights ``[D, N]``.
        state: ``[B, D, N]``.

    Returns:
        ``y`` ``[B, T, D]`` and the final state, both in the dtype of ``state``.
    """
    x, a, b, c = (v.to(state.dtype) for v in (x, a, b, c))
    h, outputs = state, []
    for t in range(x.shape[1]):
        h = (a @ h[..., None])[..., 0] + b * x[:, t, :, None]
        outputs.append((c * h).sum(-1))
    return torch.stack(outputs, dim=1), h
