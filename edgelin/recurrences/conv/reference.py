"""Short convolution, one token at a time: the truth that every other form is compared with."""

from __future__ import annotations

import torch
from torch import Tensor


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    *,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results as :func:`edgelin.recurrences.conv.short_convolution`."""
    outputs = []
    for t in range(x.shape[1]):
        window = torch.cat([state, x[:, t, :, None]], dim=2)
        y = torch.einsum("bcw,cw->bc", window, weight)
        if bias is not None:
            y = y + bias
        if activation == "silu":
            y = y * torch.sigmoid(y)
        outputs.append(y)
        state = window[:, :, 1:]
    return torch.stack(outputs, dim=1), state
