"""The recurrence over packed sequences on a GPU: the kernels themselves know where each ends.

Elsewhere sequences are padded to batches (``recurrences/packed.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from edgelin.recurrences.operator import Operator


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    state: Tensor,
    scale: float,
    ends: Sequence[int],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Outputs `[1, T, H, V]`, states `[N, H, K, V]` and what the backward pass goes on from."""
    from edgelin.recurrences.dplr import kernel

    o, last, carried = kernel.forward(q, k, v, a, b, g, state, scale, tuple(ends))
    return o, last, carried.distinct()


def allocate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    state: Tensor,
    scale: float,
    ends: Sequence[int],
) -> list[Tensor]:
    """Memory for what is kept."""
    from edgelin.recurrences.dplr import kernel, kernel_inputs

    made = kernel_inputs.Inputs.prepare(q, k, v, g, state, pair=(a, b), ends=tuple(ends))
    return kernel.allocate(made).distinct()


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    state: Tensor,
    scale: float,
    ends: Sequence[int],
    do: Tensor,
    dstate: Tensor,
    kept: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, a, b, g and state.

    Where ``kept`` is empty, all but the inputs is computed again.
    """
    from edgelin.recurrences.dplr import kernel, kernel_backward

    carried = kernel.Carried.of(kept) if kept else None
    return kernel_backward.backward(
        q, k, v, a, b, g, state, scale, do, dstate, carried, tuple(ends)
    )


run = Operator("dplr_packed", forward, backward, ("v", "state"), allocate)
