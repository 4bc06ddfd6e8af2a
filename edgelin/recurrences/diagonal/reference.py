"""Sequential form of the diagonal recurrence: the truth that every other form is tested against.

h_t = Λ_t h_{t-1} + b_t x_t ;  y_t = Re(sum_n c_t h_t), one token after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelin.recurrences import MIN_LOG_DECAY


def forward(
    x: Tensor, b: Tensor, c: Tensor, g: Tensor, theta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence token by token in the dtype of ``state`` (float64 included).

    Args:
        x: Inputs ``[B, T, D]``.
        b: Input weights ``[D, N]`` or ``[B, T, D or 1, N]``; complex: one more axis of 2.
        c: Output weights, likewise.
        g: Log magnitude of Λ ``[D, N]`` or ``[B, T, D or 1, N]``.
        theta: Angle of Λ in the shape of ``g``, or None.
        state: ``[B, D, N]``, complex ``[B, D, N, 2]``.

    Returns:
        ``y`` ``[B, T, D]`` and the final state, both in the dtype of ``state``.
    """
    x, b, c, g = (v.to(state.dtype) for v in (x, b, c, g))
    transition = g.clamp(min=MIN_LOG_DECAY).exp()
    h = state
    if theta is not None:
        angle = theta.to(state.dtype)
        transition = torch.complex(transition * angle.cos(), transition * angle.sin())
        b, c, h = (torch.view_as_complex(v.contiguous()) for v in (b, c, state))
    outputs = []
    for t in range(x.shape[1]):
        h = _at(transition, t) * h + _at(b, t) * x[:, t, :, None]
        y = (_at(c, t) * h).sum(-1)
        outputs.append(y if theta is None else y.real)
    return torch.stack(outputs, dim=1), h if theta is None else torch.view_as_real(h)


def _at(weights: Tensor, t: int) -> Tensor:
    """Weights of one token: themselves where they are constant."""
    return weights if weights.dim() == 2 else weights[:, t]
