"""Sequential form of the non-linear recurrence, which is also how it trains on a CPU.

z_t = f(a * z_{t-1} + u_t) or f(z_{t-1} W + u_t), one token after the other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
}


def forward(u: Tensor, weight: Tensor, state: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Run the recurrence token by token in the dtype of ``state`` (float64 included).

    Args:
        u: Inputs ``[B, T, D]``.
        weight: a ``[D]`` or W ``[D, D]``.
        state: ``[B, D]``.
        activation: Name of f.

    Returns:
        ``z`` ``[B, T, D]`` and the final state, both in the dtype of ``state``.
    """
    f, weight = ACTIVATIONS[activation], weight.to(state.dtype)
    outputs = []
    for x in u.to(state.dtype).unbind(1):
        state = f(x + (state * weight if weight.dim() == 1 else state @ weight))
        outputs.append(state)
    return torch.stack(outputs, dim=1), state
