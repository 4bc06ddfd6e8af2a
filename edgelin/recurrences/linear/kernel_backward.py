"""Gradients of the linear recurrence on a GPU, by the passes of ``kernel.py``.

With dS the gradient of the state, dS_{t-1} = exp(g_t) (dS_t + scale * q_{t-1} do_{t-1}^T) backwards
in time from the final state's gradient:

    dq_t = scale * S_t do_t ;  dk_t = dS_t v_t ;  dv_t = dS_t^T k_t
    dg_t = sum over s >= t of (q_s dq_s - k_s dk_s) + sum over V of S_T dS_T

(Yang et al. 2024, arXiv:2312.06635, section 4.3 and appendix C), summed over keys for a decay a
head. The products are taken from float32 dq and dk, before these are rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelin.recurrences import MIN_LOG_DECAY
from edgelin.recurrences.linear import kernel


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    do: Tensor,
    dstate: Tensor,
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

    Returns:
        dq, dk, dv, dg (float32; empty without g), and the gradient of the initial state.
    """
    q, k, v, state, do, dstate = (x.contiguous() for x in (q, k, v, state, do, dstate))
    g = None if g is None else g.contiguous()
    half = kernel.is_half(q, k, v, do)
    weights = _weights(q, v, g, half)

    def run(
        kind: kernel.Pass,
        rows: tuple[Tensor, Tensor, Tensor],
        start: Tensor,
        m: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One pass; ``m`` is what the result is multiplied with for dg."""
        weigh = None if m is None or weights is None else (m, weights)
        return kernel.attend(kind, rows, g, start, half=half, scale=scale, weigh=weigh)

    dq, final = run(kernel.DQ, (do, v, k), state, q)
    dk, dinitial = run(kernel.DK, (v, do, q), dstate, k)
    dv, _ = run(kernel.DV, (k, do, q), dstate)
    dq, dk = dq.to(q.dtype), dk.to(k.dtype)
    if g is None or weights is None:
        return dq, dk, dv, torch.zeros(0, device=q.device), dinitial
    first = (
        g.select(1, 0)
        .float()
        .clamp(min=MIN_LOG_DECAY)
        .exp()
        .reshape(*g.shape[:1], g.shape[2], -1, 1)
    )
    return dq, dk, dv, _decay_gradient(weights, g, final * dstate), dinitial * first


def _weights(q: Tensor, v: Tensor, g: Tensor | None, half: bool) -> Tensor | None:
    """Where the passes leave q dq - k dk, last token first.

    ``[B, T, H, K]``, or a sum a block of K for each head.
    """
    if g is None:
        return None
    if g.dim() == 4:
        return torch.empty(q.shape, dtype=torch.float32, device=q.device)
    # both passes have to cut K alike
    launch = kernel.launch_of(kernel.DQ, kernel.mode_of(g), half, v.shape[3], q.shape[3])
    shape = (-(-q.shape[3] // launch["BLOCK"]), *q.shape[:3])
    return torch.empty(shape, dtype=torch.float32, device=q.device)


def _decay_gradient(weights: Tensor, g: Tensor, last: Tensor) -> Tensor:
    """dg from the products of the passes and ``last`` = S_T dS_T ``[B, H, K, V]``."""
    if g.dim() == 3:
        weights, ends = weights.sum(0), last.sum((2, 3))
    else:
        ends = last.sum(3)
    weights.select(1, 0).add_(ends)
    dg = torch.cumsum(weights, 1).flip(1)
    return dg.masked_fill_(g < MIN_LOG_DECAY, 0.0)
