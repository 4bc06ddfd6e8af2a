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
from typing import Any

import torch
from torch import Tensor

from edgelin.recurrences import packed, widths
from edgelin.recurrences.arguments import Arguments
from edgelin.recurrences.delta import chunked, on_gpu
from edgelin.recurrences.exporting import is_exporting
from edgelin.recurrences.lengths import masked
from edgelin.recurrences.operator import Operator

_ARGUMENTS = Arguments(
    ("g", "state"), v="BTHV", q="BTGK", k="BTGK", beta="BTH", g="BTH|BTHK", state="RHKV"
)


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
        q: Queries `[B, T, G, K]`, float32 or bfloat16 (float64 on CPU), as all that is not said to
            be float32; each of the G heads serves H / G heads of values in a row.
        k: Keys `[B, T, G, K]`.
        v: Values `[B, T, H, V]`.
        beta: Writing strengths `[B, T, H]`.
        g: Log decays `[B, T, H]` or `[B, T, H, K]`, float32, <= 0, or None for no decay; below -90
            they count as -90.
        state: State before the first token `[B, H, K, V]`, float32 (float64 on CPU).
        scale: Factor of the outputs.
        lengths: Steps that each row really has ``[B]``, or None: all; see
            :mod:`edgelin.recurrences.lengths`.
        cu_seqlens: Ends of N sequences packed one after the other into the only row ``[N + 1]``,
            ``state`` then has N rows. None: every row is one sequence. See
            :mod:`edgelin.recurrences.packed`.

    Returns:
        Outputs `[B, T, H, V]` in the dtype of ``v`` and the state after the last token.

    Raises:
        ValueError: Tensors do not fit together; see :mod:`edgelin.recurrences.arguments`.
    """
    _ARGUMENTS.check(cu_seqlens, v=v, q=q, k=k, beta=beta, g=g, state=state, lengths=lengths)
    if not is_exporting() and v.shape[2] % k.shape[2]:
        raise ValueError(f"v has H = {v.shape[2]} heads, need a multiple of G = {k.shape[2]} of k")
    if cu_seqlens is not None and v.is_cuda:
        packed.refuse_both(cu_seqlens, lengths)
        return _packed(q, k, v, beta, g, state, scale, cu_seqlens)
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
        o, last = _delta(q, k, v, beta, g, state, scale)
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


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:
    """Kernels that read packed rows."""
    steps = [x for x in (q, k, v, beta, g) if x is not None]
    ends = packed.ends_of(cu_seqlens, steps, [state])
    q, k = by_value_head(q, k, v)

    def run(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        o, last = on_gpu.run_packed(q, k, v, beta, g, state, scale, ends)
        return o, last

    return widths.run_fitting(run, q, k, v, g, state)


_packed = torch.compiler.disable(_packed, reason="Python reads the lengths of packed sequences")


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Kernel on CUDA tensors, chunked form elsewhere, which keeps nothing."""
    q, k = by_value_head(q, k, v)  # a traced model still has them by key head
    if v.is_cuda:
        return on_gpu.forward(q, k, v, beta, g, state, scale, None)
    return *chunked.forward(q, k, v, beta, g, state, scale), []


def _allocate(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, state: Tensor, scale: float
) -> list[Tensor]:
    """Memory for what is kept."""
    return on_gpu.allocate(q, k, v, beta, g, state, scale, None) if v.is_cuda else []


def _backward(
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

    Where ``kept`` is empty, all but the inputs is computed again.
    """
    if v.is_cuda:
        return on_gpu.backward(q, k, v, beta, g, state, scale, None, do, dstate, kept)
    return chunked.backward(q, k, v, beta, g, state, scale, do, dstate)


_delta = Operator("delta", _forward, _backward, ("v", "state"), _allocate)
