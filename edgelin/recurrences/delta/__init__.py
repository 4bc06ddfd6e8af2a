"""Delta rule (DeltaNet) and gated delta rule (Gated DeltaNet, Kimi Delta Attention).

    S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - (e^{g_t} S_{t-1})^T k_t)^T
    o_t = scale * S_t^T q_t

S is the matrix state, k the key under which the value v is written, beta the share of the old
value that is overwritten (0 keeps it, 1 replaces it, 2 mirrors it), g the log decay (absent in
DeltaNet, one a head in Gated DeltaNet, one a key in KDA, where e^{g_t} is Diag(e^{g_t}) and
multiplies the rows of S) and q the query. Keys usually come with unit length; nothing here needs
it.

Sources: Schlag et al. 2021, "Linear Transformers Are Secretly Fast Weight Programmers", eq. 23-25;
Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length";
Yang et al. 2024, "Gated Delta Networks", eq. 10; Kimi Team 2025, "Kimi Linear", arXiv:2510.26692,
eq. 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from edgelin.recurrences import keeping, packed, widths
from edgelin.recurrences.delta import chunked
from edgelin.recurrences.exporting import is_exporting
from edgelin.recurrences.lengths import masked


def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    state: Tensor,
    *,
    scale: float = 1.0,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the (gated) delta rule over a stretch of tokens.

    With a decay a key the token's transition, (I - beta k k^T) Diag(e^g), is a diagonal plus a
    product of two vectors: the forms of :mod:`edgelin.recurrences.dplr` compute that exactly.

    Args:
        q: Queries `[B, T, G, K]`; each of the G heads serves H / G heads of values in a row.
        k: Keys `[B, T, G, K]`.
        v: Values `[B, T, H, V]`.
        beta: Writing strengths `[B, T, H]`.
        g: Log decays `[B, T, H]` or `[B, T, H, K]`, clamped from below at -90, or None for no
            decay.
        state: State before the first token `[B, H, K, V]`, float32 (float64 with float64 values).
        scale: Factor of the outputs.
        lengths: Steps that each row really has ``[B]``, or None: all; see
            :mod:`edgelin.recurrences.lengths`.
        cu_seqlens: Ends of N sequences packed one after the other into the only row ``[N + 1]``,
            ``state`` then has N rows. None: every row is one sequence. See
            :mod:`edgelin.recurrences.packed`.

    Returns:
        Outputs `[B, T, H, V]` in the dtype of ``v`` and the state after the last token.
    """
    if cu_seqlens is not None:

        def call(*inputs: Any) -> tuple[Tensor, Tensor]:
            """Strengths and decays of zero leave the state as it is: no lengths."""
            return delta(*inputs[:-1], scale=scale)

        return packed.run(call, (q, k, v, beta, g), state, cu_seqlens, lengths)
    beta, g = masked(beta, lengths), None if g is None else masked(g, lengths)
    if not is_exporting():
        q, k = by_value_head(q, k, v)

    def run(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        if is_exporting() or not torch.is_grad_enabled():
            o, last = torch.ops.edgelin.delta(q, k, v, beta, g, state, scale)
        else:
            o, last, _ = torch.ops.edgelin.delta_keeping(q, k, v, beta, g, state, scale)
        return o, last

    return widths.run_fitting(run, q, k, v, g, state)


def by_value_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q and k `[B, T, G, K]` repeated for the H heads of ``v``: `[B, T, H, K]`."""
    heads, groups = v.shape[2], k.shape[2]
    if heads == groups:
        return q, k
    spread = (-1, -1, -1, heads // groups, -1)
    q, k = (x.unsqueeze(3).expand(spread).flatten(2, 3) for x in (q, k))
    return q, k


def _by_key(g: Tensor | None) -> TypeGuard[Tensor]:
    """Whether every key has a decay of its own."""
    return g is not None and g.dim() == 4


@torch.library.custom_op("edgelin::delta", mutates_args=())
def _delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Kernel on CUDA tensors, chunked form elsewhere."""
    q, k = by_value_head(q, k, v)  # a traced model still has them by key head
    return _run(q, k, v, beta, g, state, scale)[:2]


@torch.library.custom_op("edgelin::delta_keeping", mutates_args=())
def _delta_keeping(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The same and what the backward pass of the kernels goes on from; nothing on a CPU."""
    return _run(q, k, v, beta, g, state, scale)


def _run(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, state: Tensor, scale: float
) -> tuple[Tensor, Tensor, list[Tensor]]:
    if v.is_cuda and _by_key(g):
        from edgelin.recurrences.dplr import kernel as dplr_kernel

        o, last, carried = dplr_kernel.delta_forward(q, k, v, beta, g, state, scale)
        return o, last, carried.distinct()
    if v.is_cuda:
        from edgelin.recurrences.delta import kernel

        o, last, kept = kernel.forward(q, k, v, beta, g, state, scale)
        return o, last, list(kept)
    return *chunked.forward(q, k, v, beta, g, state, scale), []


@torch.library.custom_op("edgelin::delta_backward", mutates_args=())
def _delta_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    do: Tensor,
    dstate: Tensor,
    kept: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, beta, g (empty without g) and state.

    ``kept`` is from ``delta_keeping``; where it is empty, all but the inputs is computed again.
    """
    if v.is_cuda and _by_key(g):
        from edgelin.recurrences.dplr import kernel as dplr_kernel
        from edgelin.recurrences.dplr import kernel_backward as dplr_backward

        carried = dplr_kernel.Carried.of(kept) if kept else None
        return dplr_backward.delta_backward(q, k, v, beta, g, state, scale, do, dstate, carried)
    if v.is_cuda:
        from edgelin.recurrences.delta import kernel, kernel_backward

        made = kernel.Carried(*kept) if kept else None
        return kernel_backward.backward(q, k, v, beta, g, state, scale, do, dstate, made)
    return chunked.backward(q, k, v, beta, g, state, scale, do, dstate)


@_delta.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), state.new_empty(state.shape)


@_delta_keeping.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    outputs = v.new_empty(v.shape), state.new_empty(state.shape)
    if v.is_cuda and _by_key(g):
        from edgelin.recurrences.dplr import kernel as dplr_kernel

        tied = dplr_kernel.Inputs.prepare(q, k, v, g, state, beta=beta)
        return *outputs, dplr_kernel.allocate(tied).distinct()
    if v.is_cuda:
        from edgelin.recurrences.delta import kernel

        return *outputs, list(kernel.allocate(kernel.Inputs.prepare(q, k, v, beta, g, state)))
    return *outputs, []


@_delta_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    do: Tensor,
    dstate: Tensor,
    kept: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dg = state.new_empty(0) if g is None else g.new_empty(g.shape)
    q_, k_, v_, beta_, state_ = (x.new_empty(x.shape) for x in (q, k, v, beta, state))
    return q_, k_, v_, beta_, dg, state_


def _gradients(
    ctx: Any, do: Tensor | None, dstate: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    """Gradients in the order of the op's inputs."""
    q, k, v, beta, g, state, *kept = ctx.saved_tensors
    do, dstate = keeping.or_zeros(do, v), keeping.or_zeros(dstate, state)
    found = torch.ops.edgelin.delta_backward(
        q, k, v, beta, g, state, ctx.scale, do, dstate, kept
    )  # fmt: skip
    dq, dk, dv, dbeta, dg, ds = found
    return dq, dk, dv, dbeta, None if g is None else dg, ds, None


_delta.register_autograd(_gradients, setup_context=keeping.save)
_delta_keeping.register_autograd(_gradients, setup_context=keeping.save)
