"""Widths that the GPU kernels are given: bfloat16 keys and values come in multiples of 64.

Narrower bfloat16 tiles are wrong on Hopper with Triton 3.6, though the interpreter and the
compiler accept them: at K = 20, V = 36 the delta rule's dk was off by its own size, and at V = 1
the linear recurrence with decay read outside its tensors. Zero columns change no result. Of more
than 256 keys, which feature maps may make, the linear recurrence takes 256 at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

WIDTH = 64
MOST_KEYS = 256

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


def run_by_keys(
    run: Recurrence, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the linear recurrence over ``MOST_KEYS`` keys at a time.

    Every key has a row of the state to itself, and what the queries read there adds up. Arguments
    and results as of :func:`run_padded`.
    """
    pieces = [x.split(MOST_KEYS, dim=-1) for x in (q, k)]
    states = state.split(MOST_KEYS, dim=2)
    by_key = g is not None and g.dim() == 4
    decays = g.split(MOST_KEYS, dim=-1) if g is not None and by_key else [g] * len(states)
    done = [run(a, b, v, c, s) for a, b, c, s in zip(*pieces, decays, states, strict=True)]
    total = sum(o.to(state.dtype) for o, _ in done)
    assert isinstance(total, Tensor)
    return total.to(v.dtype), torch.cat([s for _, s in done], dim=2)
