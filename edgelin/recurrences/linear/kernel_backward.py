"""Gradients of the linear recurrence on a GPU, by the passes of ``kernel.py``.

With dS the gradient of the state, dS_{t-1} = exp(g_t) dS_t + ... backwards in time from the final
state's gradient, where dS_t holds scale * q_t do_t^T:

    dq_t = scale * S_t do_t ;  dk_t = dS_t v_t ;  dv_t = dS_t^T k_t
    dg_t = sum over s >= t of (q_s dq_s - k_s dk_s) + sum over V of S_T dS_T

(Yang et al. 2024, arXiv:2312.06635, section 4.3 and appendix C), summed over keys for a decay a
head. The products are taken from float32 dq and dk, before these are rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edgelin.recurrences.launches import cdiv
from edgelin.recurrences.linear import kernel
from edgelin.recurrences.linear.kernel_plan import DK, DQ, DV, HEAD


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    do: Tensor,
    dstate: Tensor,
    kept: Sequence[Tensor] = (),
    ends: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the inputs.

    Args:
        q: As all inputs of ``kernel.forward``.
        k: See q.
        v: See q.
        g: See q.
        state: See q.
        scale: See q.
        do: Gradient of the output ``[B, T, H, V]``.
        dstate: Gradient of the final state ``[B, H, K, V]``, float32.
        kept: From the forward pass, else computed again.
        ends: See q.

    Returns:
        dq, dk, dv, dg (float32; empty without g), and the gradient of the initial state.
    """
    walk = kernel.walk((q, k, v, g), scale, do, ends=ends)
    dq, dk, dv, dg, dinitial, _ = gradients(walk, (state, state), (dstate, dstate), kept)
    return dq.to(q.dtype), dk.to(k.dtype), dv, dg, dinitial


def gradients(
    walk: kernel.Walk,
    initial: tuple[Tensor, Tensor],
    dfinal: tuple[Tensor, Tensor],
    kept: Sequence[Tensor] = (),
    dn: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same by the passes of a walk, of the state and, with ``dn``, of the normaliser.

    Args:
        walk: With q, k, v and do.
        initial: State and normaliser before the first token; without dn the second is not read.
        dfinal: Gradients of the last ones, likewise.
        kept: From the forward pass: both before the segments.
        dn: Gradient of the sums ``[B, T, H]`` (``kernel_normalizer``).
    """
    weights = _weights(walk)
    before, z_before = (kept[0], kept[-1]) if kept else walk.starts(DQ, *initial)
    after, z_after = walk.starts(DK, *dfinal, dn)
    columns: tuple[kernel.Column | None, ...] = (None, None)
    last = dinitial = dfinal[1]
    if dn is not None:
        last, dinitial = (torch.empty_like(initial[1]) for _ in range(2))
        columns = (
            kernel.Column(dn, z_before, z_before, z_before, last, dn),
            kernel.Column(dn, z_after, z_before, last, dinitial, dn),
        )
    dq, final = walk.attend(DQ, before, weights, column=columns[0])
    dk, dstart = walk.attend(DK, after, weights, (before, final), column=columns[1])
    dv, _ = walk.attend(DV, after, final=final)  # which the pass before has read
    dg = dq.new_empty(0, dtype=torch.float32) if weights is None else weights
    if walk.plan.shape.mode == HEAD:
        dg = dg[0] if len(dg) == 1 else dg.sum(0)
    return dq, dk, dv, dg, dstart, dinitial


def _weights(walk: kernel.Walk) -> Tensor | None:
    """Where the passes leave dg; with a decay a head, a part of it for each block of K."""
    if walk.g is None:
        return None
    shape = [*walk.g.shape]
    if walk.g.dim() == 3:
        shape = [cdiv(walk.plan.shape.key, walk.plan.rule(DQ)["BLOCK"]), *shape]
    return torch.empty(shape, dtype=torch.float32, device=walk.g.device)
