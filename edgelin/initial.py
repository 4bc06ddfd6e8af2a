"""Initial values that several mixers share."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def softplus_inverse(y: Tensor) -> Tensor:
    """x with softplus(x) = y > 0, without cancellation at small y."""
    return y + torch.log(-torch.expm1(-y))


def step_bias(size: int) -> Tensor:
    """Biases `[size]` under a softplus whose steps dt are log-uniform in [0.001, 0.1].

    As the published code of Mamba (Gu and Dao 2023, arXiv:2312.00752, section 3.6) draws them.
    """
    dt = torch.empty(size).uniform_(math.log(1e-3), math.log(1e-1)).exp()
    return softplus_inverse(dt)


def places(like: Tensor) -> Tensor:
    """0 at the first number of ``like`` to 1 at the last, in equal steps, flat, on its device."""
    n = like.numel()
    return torch.arange(n, device=like.device) / max(1, n - 1)


__all__ = ["places", "softplus_inverse", "step_bias"]
