"""Delta rule in chunks of 64 tokens (WY / UT form), plain torch, any device.

With S the state before a chunk, G_i the decay summed up to token i of it and
D_ij = e^{G_i - G_j} for i >= j, the writes u of the chunk solve a unit-triangular system:

    (I + L) u = beta (v - e^G k S)          L_ij = beta_i D_ij (k_i . k_j) for i > j
    o = scale (e^G q S + (D * q k^T) u)     S' = e^{G_64} S + (e^{G_64 - G} k)^T u

Source: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence
Length", section 3, with the decay of "Gated Delta Networks", section 3.3. Two things differ from
the papers because they lose the answer on repeated tokens and on hard resets: the inverse of
I + L goes up in blocks of 1, 2, 4, ... (no power series of L), and every G_i - G_j is summed on
its own (no difference of cumulated sums, no e^{-G}).
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelin.recurrences import CHUNK, MIN_LOG_DECAY
from edgelin.recurrences.chunks import (
    compute_dtype,
    full_precision,
    join,
    split,
    unit_lower_inverse,
)
from edgelin.recurrences.dplr import chunked as dplr_chunked


@full_precision
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Outputs `[B, T, H, V]` in the dtype of ``v`` and the new state; differentiable."""
    dtype = compute_dtype(v, state)
    if g is not None and g.dim() == 4:
        write, a, b = low_rank(k.to(dtype), beta, g)
        return dplr_chunked.forward(q, write, v, a, b, g, state, scale)
    time = v.shape[1]
    size = min(CHUNK, time)
    g = beta.new_zeros(beta.shape) if g is None else g.clamp(min=MIN_LOG_DECAY)
    q, k, v_, beta, g = (split(x.to(dtype), size) for x in (q, k, v, beta, g))
    prefix, decay = _decays(g)
    gram = k @ k.mT
    inverse = unit_lower_inverse(beta[..., None] * (decay * gram).tril(-1))
    scores = q @ k.mT * decay
    read, erase = prefix * q, prefix * k
    write = (decay[..., -1, :, None] * k).mT
    total = prefix[..., -1:, :]

    current = state.to(dtype)
    outputs = []
    for n in range(q.shape[2]):
        old = erase[:, :, n] @ current
        new = inverse[:, :, n] @ (beta[:, :, n, :, None] * (v_[:, :, n] - old))
        outputs.append(read[:, :, n] @ current + scores[:, :, n] @ new)
        current = total[:, :, n] * current + write[:, :, n] @ new
    o = join(torch.stack(outputs, dim=2), time)
    return (scale * o).to(v.dtype).contiguous(), current.to(state.dtype).contiguous()


@full_precision
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    do: Tensor,
    dstate: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, beta, g (empty without g) and state, through a second forward."""

    def run(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor, *decay: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Forward over the tensors that have gradients."""
        return forward(q, k, v, beta, decay[0] if decay else None, state, scale)

    decay = () if g is None else (g,)
    # vjp, since autograd.grad records nothing inside a custom op
    gradients = torch.func.vjp(run, q, k, v, beta, state, *decay)[1]
    dq, dk, dv, dbeta, ds, *dg = (x.contiguous() for x in gradients((do, dstate)))
    return dq, dk, dv, dbeta, dg[0] if dg else state.new_empty(0), ds


def low_rank(k: Tensor, beta: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The delta rule with a decay a key as arguments k, a and b of the recurrence ``dplr``.

    With D = Diag(e^g): D S + beta k (v - (D S)^T k)^T = D S - beta k (D k)^T S + beta k v^T, since
    D is symmetric. So a = D k reads, b = -beta k removes, and beta k is the key of the write.

    Args:
        k: Keys `[B, T, H, K]`, whose dtype the results have.
        beta: Writing strengths `[B, T, H]`.
        g: Log decays `[B, T, H, K]`.
    """
    write = (beta[..., None] * k).to(k.dtype)
    read = (g.clamp(min=MIN_LOG_DECAY).exp() * k).to(k.dtype)
    return write, read, -write


def _decays(g: Tensor) -> tuple[Tensor, Tensor]:
    """e^{G_i} as `[..., N, 1]` and e^{G_i - G_j}, zero above the diagonal, as `[..., N, N]`."""
    size = g.shape[-1]
    ones = torch.ones(size, size, dtype=g.dtype, device=g.device).tril()
    # summed token by token over j < l <= i: a reset of -90 leaves no rounding in later sums
    sums = ones @ (g[..., None] * ones.tril(-1))
    return g.cumsum(-1).exp()[..., None], sums.exp().tril()
