"""The linear recurrence over packed sequences, and with its normaliser, on a GPU.

The kernels know where each packed sequence ends. Elsewhere, and where a token reads before its own
write, sequences are padded to batches (``recurrences/packed.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Outputs ``[1, T, H, V]``, states ``[N, H, K, V]``, and what is kept."""
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
    kept: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g (empty without g) and state."""
    from edgelin.recurrences.linear import kernel_backward

    return kernel_backward.backward(q, k, v, g, state, scale, do, dstate, kept, ends)


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
    ends: Sequence[int] | None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """With the normaliser, packed or (``ends`` is None) a batch.

    It keeps what :mod:`kernel_normalizer` says.
    """
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
    ends: Sequence[int] | None,
    do: Tensor,
    dstate: Tensor,
    dnormalizer: Tensor,
    kept: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, state, normaliser and floor, empty for what is None."""
    from edgelin.recurrences.linear import kernel_normalizer

    inputs, ups = (q, k, v, g, state, normalizer, floor), (do, dstate, dnormalizer)
    return kernel_normalizer.backward(*inputs, scale, eps, *ups, kept, ends)


def allocate(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    """Memory for what :func:`forward` keeps."""
    from edgelin.recurrences.linear import kernel

    return kernel.allocate(q, k, v, rest[-1])


def allocate_normalized(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    """The same with the normaliser."""
    from edgelin.recurrences.linear import kernel_normalizer

    return kernel_normalizer.allocate(q, k, v, rest[-1])


run_packed = Operator("linear_packed", forward, backward, outputs=("v", "state"), allocate=allocate)
run_normalized = Operator(
    "linear_normalized", normalized_forward, normalized_backward,
    outputs=("v", "state", "normalizer"), allocate=allocate_normalized, reads=(0,),
)  # fmt: skip
