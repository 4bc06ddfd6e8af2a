"""Diagonal plus low rank recurrence: RWKV-7's generalised delta rule.

    S_t = Diag(e^{g_t}) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T
    o_t = scale * S_t^T q_t

S is the matrix state, k the key under which the value v is written, q the query, g the log decay
of every key (row of S). The transition of a token is diagonal plus rank one: a is the direction
that is read from the state *before* the token, b the one under which what was read is added again
(b = -a with |a| = 1 removes it). a = e^g k, b = -beta k and a write of beta k v^T is the delta
rule with a decay for every key (Kimi Delta Attention); a and b are independent in RWKV-7.

Sources: Peng et al. 2025, "RWKV-7 Goose with Expressive Dynamic State Evolution",
arXiv:2503.14456, equations 16 and 17; Yang et al. 2024, "Parallelizing Linear Transformers with
the Delta Rule over Sequence Length", arXiv:2406.06484, section 3 (the chunk form).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from edgelin.recurrences import packed, widths
from edgelin.recurrences.arguments import Arguments
from edgelin.recurrences.dplr import chunked, on_gpu
from edgelin.recurrences.lengths import masked
from edgelin.recurrences.operator import Operator

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
_ARGUMENTS = Arguments(
    ("g", "state"), v="BTHV", q="BTHK", k="BTHK", a="BTHK", b="BTHK", g="BTHK", state="RHKV"
)


def dplr(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    state: Tensor,
    *,
    scale: float = 1.0,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over a stretch of tokens, of any length from 1.

    Args:
        q: Queries `[B, T, H, K]`, float32 or bfloat16 (float64 on CPU).
        k: Keys `[B, T, H, K]`.
        v: Values `[B, T, H, V]`.
        a: What each token reads from the state before it `[B, T, H, K]`.
        b: Where it adds what it read `[B, T, H, K]`.
        g: Log decays `[B, T, H, K]`, float32, <= 0; below -90 they count as -90.
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
    _ARGUMENTS.check(cu_seqlens, v=v, q=q, k=k, a=a, b=b, g=g, state=state, lengths=lengths)
    if cu_seqlens is not None and v.is_cuda:
        packed.refuse_both(cu_seqlens, lengths)
        return _packed(q, k, v, a, b, g, state, scale, cu_seqlens)
    if cu_seqlens is not None:

        def call(*inputs: Any) -> tuple[Tensor, Tensor]:
            """Keys, b and decays of zero leave the state as it is: no lengths."""
            return dplr(*inputs[:-1], scale=scale)

        return packed.run(call, (q, k, v, a, b, g), state, cu_seqlens, lengths)
    k, b, g = (masked(x, lengths) for x in (k, b, g))
    return _fitting(_dplr, q, k, v, a, b, g, state, scale)


def _fitting(
    op: Operator, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor, state: Tensor,
    *numbers: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the op at widths that fit its kernels."""

    def run(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """With a and b as wide as the keys have become."""
        more = k.shape[-1] - a.shape[-1]
        pair = [F.pad(x, (0, more)) if more else x for x in (a, b)]
        o, last = op(q, k, v, *pair, g, state, *numbers)
        return o, last

    return widths.run_fitting(run, q, k, v, g, state)


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    state: Tensor,
    scale: float,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:
    """Kernels that read packed rows."""
    ends = packed.ends_of(cu_seqlens, [q, k, v, a, b, g], [state])
    return _fitting(on_gpu.run_packed, q, k, v, a, b, g, state, scale, ends)


_packed = torch.compiler.disable(_packed, reason="Python reads the lengths of packed sequences")


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    state: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Kernel on CUDA tensors, chunked form elsewhere, which keeps nothing."""
    if v.is_cuda:
        return on_gpu.forward(q, k, v, a, b, g, state, scale, None)
    return *chunked.forward(q, k, v, a, b, g, state, scale), []


def _allocate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    state: Tensor,
    scale: float,
) -> list[Tensor]:
    """Memory for what is kept."""
    return on_gpu.allocate(q, k, v, a, b, g, state, scale, None) if v.is_cuda else []


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    state: Tensor,
    scale: float,
    do: Tensor,
    dstate: Tensor,
    kept: Sequence[Tensor],
) -> Gradients:
    """Gradients of q, k, v, a, b, g and state.

    Where ``kept`` is empty, all but the inputs is computed again.
    """
    if v.is_cuda:
        return on_gpu.backward(q, k, v, a, b, g, state, scale, None, do, dstate, kept)
    return chunked.backward(q, k, v, a, b, g, state, scale, do, dstate)


_dplr = Operator("dplr", _forward, _backward, ("v", "state"), _allocate)
