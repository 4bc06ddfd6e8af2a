"""The linear recurrence over packed sequences on a GPU: its kernels know where each one ends.

Elsewhere, and where a token reads before its own write, sequences are padded to batches
(``recurrences/packed.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from edgelin.recurrences.operator import Operator


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    ends: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Outputs ``[1, T, H, V]`` and states ``[N, H, K, V]``."""
    from edgelin.recurrences.linear import kernel

    return kernel.forward(q, k, v, g, state, scale, ends)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    ends: Sequence[int],
    do: Tensor,
    dstate: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g (empty without g) and state."""
    from edgelin.recurrences.linear import kernel_backward

    return kernel_backward.backward(q, k, v, g, state, scale, do, dstate, ends)


def normalized_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    normalizer: Tensor,
    floor: Tensor | None,
    scale: float,
    eps: float,
    ends: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """With the normaliser; it keeps n of :mod:`kernel_normalizer`."""
    from edgelin.recurrences.linear import kernel_normalizer

    return kernel_normalizer.forward(q, k, v, g, state, normalizer, floor, scale, eps, ends)


def normalized_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    normalizer: Tensor,
    floor: Tensor | None,
    scale: float,
    eps: float,
    ends: Sequence[int],
    do: Tensor,
    dstate: Tensor,
    dnormalizer: Tensor,
    kept: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, state, normaliser and floor, empty for what is None."""
    from edgelin.recurrences.linear import kernel_normalizer

    inputs, ups = (q, k, v, g, state, normalizer, floor), (do, dstate, dnormalizer)
    return kernel_normalizer.backward(*inputs, scale, eps, *ups, kept, ends)


def allocate(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> list[Tensor]:
    """Memory for n."""
    return [torch.empty(v.shape[:3], dtype=torch.float32, device=v.device)]


run = Operator("linear_packed", forward, backward, outputs=("v", "state"))
run_normalized = Operator(
    "linear_packed_normalized", normalized_forward, normalized_backward,
    outputs=("v", "state", "normalizer"), allocate=allocate, reads=(0,),
)  # fmt: skip
