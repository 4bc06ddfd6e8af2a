"""The delta rule on a GPU, of a batch or of sequences packed into one row.

Kernels are imported where they run: Triton may be missing elsewhere. They know themselves where
each packed sequence ends (``ends`` of ``packed.ends_of``). Elsewhere sequences are padded
to batches (``recurrences/packed.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from torch import Tensor

from edgelin.recurrences import packed
from edgelin.recurrences.operator import Operator


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    ends: Sequence[int] | None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Outputs, last states (packed `[N, H, K, V]`) and what the backward pass goes on from."""
    if _by_key(g):
        from edgelin.recurrences.dplr import kernel as dplr_kernel

        made = dplr_kernel.delta_forward(q, k, v, beta, g, state, scale, packed.fixed(ends))
        return *made[:2], made[2].distinct()
    from edgelin.recurrences.delta import kernel

    o, last, kept = kernel.forward(q, k, v, beta, g, state, scale, packed.fixed(ends))
    return o, last, list(kept)


def allocate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    ends: Sequence[int] | None,
) -> list[Tensor]:
    """Memory for what is kept."""
    if _by_key(g):
        from edgelin.recurrences.dplr import kernel as dplr_kernel
        from edgelin.recurrences.dplr import kernel_inputs

        tied = kernel_inputs.Inputs.prepare(q, k, v, g, state, beta=beta, ends=packed.fixed(ends))
        return dplr_kernel.allocate(tied).distinct()
    from edgelin.recurrences.delta import kernel

    return list(kernel.allocate(kernel.Inputs.prepare(q, k, v, beta, g, state, packed.fixed(ends))))


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    ends: Sequence[int] | None,
    do: Tensor,
    dstate: Tensor,
    kept: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, beta, g (empty without g) and state.

    Where ``kept`` is empty, all but the inputs is computed again.
    """
    inputs, ups = (q, k, v, beta), (do, dstate)
    if _by_key(g):
        from edgelin.recurrences.dplr import kernel as dplr_kernel
        from edgelin.recurrences.dplr import kernel_backward as dplr_backward

        carried = dplr_kernel.Carried.of(kept) if kept else None
        return dplr_backward.delta_backward(
            *inputs, g, state, scale, *ups, carried, packed.fixed(ends)
        )
    from edgelin.recurrences.delta import kernel, kernel_backward

    made = kernel.Carried(*kept) if kept else None
    return kernel_backward.backward(*inputs, g, state, scale, *ups, made, packed.fixed(ends))


def _by_key(g: Tensor | None) -> TypeGuard[Tensor]:
    """Whether every key has a decay of its own."""
    return g is not None and g.dim() == 4


run_packed = Operator("delta_packed", forward, backward, ("v", "state"), allocate)
