"""The recurrence on a GPU, of a batch or of sequences packed into one row.

Kernels are imported where they run: Triton may be missing elsewhere. They know themselves where
each packed sequence ends (``ends`` of ``packed.ends_of``). Elsewhere sequences are padded
to batches (``recurrences/packed.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from edgelin.recurrences import packed
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
    ends: Sequence[int] | None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Outputs, last states (packed `[N, H, K, V]`) and what the backward pass goes on from."""
    from edgelin.recurrences.dplr import kernel

    o, last, carried = kernel.forward(q, k, v, a, b, g, state, scale, packed.fixed(ends))
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
    ends: Sequence[int] | None,
) -> list[Tensor]:
    """Memory for what is kept."""
    from edgelin.recurrences.dplr import kernel, kernel_inputs

    made = kernel_inputs.Inputs.prepare(q, k, v, g, state, pair=(a, b), ends=packed.fixed(ends))
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
    ends: Sequence[int] | None,
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
        q, k, v, a, b, g, state, scale, do, dstate, carried, packed.fixed(ends)
    )


run_packed = Operator("dplr_packed", forward, backward, ("v", "state"), allocate)
