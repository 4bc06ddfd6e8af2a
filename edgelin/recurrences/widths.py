"""Widths that the GPU kernels are given: bfloat16 keys and values come in multiples of 64.

Narrower bfloat16 tiles are wrong on Hopper with Triton 3.6, though the interpreter and the
compiler accept them: at K = 20, V = 36 the delta rule's dk was off by its own size, and at V = 1
the linear recurrence with decay read outside its tensors. Zero columns change no result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

WIDTH = 64

Recurrence = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor]]


def needs_padding(k: Tensor, v: Tensor) -> bool:
    """Whether a call has to go through :func:`run_padded`."""
    narrow = bool(k.shape[-1] % WIDTH or v.shape[-1] % WIDTH)
    return v.is_cuda and v.dtype == torch.bfloat16 and narrow


def run_fitting(
    run: Recurrence, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run a recurrence, padded where the kernels need it; arguments as of :func:`run_padded`."""
    if needs_padding(k, v):
        return run_padded(run, q, k, v, g, state)
    return run(q, k, v, g, state)


def run_padded(
    run: Recurrence, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run a recurrence with keys and values padded by zeros.

    Args:
        run: Maps (q, k, v, g, state) to (o, state).
        q: `[B, T, H, K]`.
        k: `[B, T, H, K]`.
        v: `[B, T, H, V]`.
        g: Log decay, None, `[B, T, H]` or `[B, T, H, K]`.
        state: `[B, H, K, V]`.

    Returns:
        Outputs `[B, T, H, V]` and state `[B, H, K, V]`, as of the narrow call.
    """
    key, value = k.shape[-1], v.shape[-1]
    more_key, more_value = -key % WIDTH, -value % WIDTH
    if g is not None and g.dim() == 4:
        g = F.pad(g, (0, more_key))
    q, k, v = F.pad(q, (0, more_key)), F.pad(k, (0, more_key)), F.pad(v, (0, more_value))
    o, state = run(q, k, v, g, F.pad(state, (0, more_value, 0, more_key)))
    return o[..., :value].contiguous(), state[..., :key, :value].contiguous()
