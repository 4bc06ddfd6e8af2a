"""The linear recurrence without decay over streams of any length: sums on two levels.

S_t = S_{t-1} + k_t v_t^T grows with t, and a float32 sum of size s loses what is below 6e-8 s: one
that took a token at a time is off by about 6e-8 sqrt(t) of itself where errors average out, and
stands still once its increments are smaller than that (with increments near 1, after 16.8 million
tokens). So the tokens since the last multiple of ``BLOCK`` have a sum of their own:

    S_t = C_t + R_t ;   R_t = sum of k_i v_i^T over the tokens i of the block of BLOCK that t is in
    o_t = scale * (C_t + R_t)^T q_t

and when a block is full, R moves into C and starts from zero. C takes one increment, BLOCK times as
large, in BLOCK tokens: 6e-8 sqrt(t / BLOCK), and it stands still after 6.9e10 tokens. Where blocks
end depends on the position alone, so that both states are the same numbers for any split into
calls. (Blocked summation; Higham, "Accuracy and stability of numerical algorithms" (2002), 4.2.)

This wraps :func:`edgelin.recurrences.linear.linear` from a state of zeros, in all its forms: the
kernels, the chunked form and the graphs of every profile sum a call, and only what is carried from
call to call has two levels. A training sequence is one call, so its sums are the ordinary ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelin.recurrences.chunks import outside_autocast
from edgelin.recurrences.lengths import masked
from edgelin.recurrences.linear import linear

BLOCK = 4096


def two_level(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    recent: Tensor,
    position: Tensor,
    *,
    scale: float = 1.0,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the recurrence over a sequence, of any length from 1.

    Args:
        q: Queries ``[B, T, H, K]``, float32 or bfloat16 (float64 on CPU).
        k: Keys ``[B, T, H, K]``.
        v: Values ``[B, T, H, V]``.
        state: C before the first token ``[B, H, K, V]``, float32.
        recent: R before the first token, as ``state``.
        position: Tokens read before ``[B]``, int64.
        scale: Factor of the output.
        lengths: Steps that each row really has ``[B]``, or None: all.

    Returns:
        ``o`` ``[B, T, H, V]`` in the dtype of ``v``, C and R after the last token.
    """
    k = masked(k, lengths)
    time = k.shape[1] if lengths is None else lengths
    within, total = linear(q, k, v, None, torch.zeros_like(state), scale=scale)
    # The first step of this call in the block that the next token falls into; none before 0.
    first = time - (position + time) % BLOCK
    in_block = torch.arange(k.shape[1], device=k.device) >= first[:, None]
    dtype = state.dtype
    with outside_autocast(q.device.type):
        before = torch.einsum("bthk,bhkv->bthv", q.to(dtype), state + recent)
        kept = k.to(dtype) * in_block[..., None, None]
        own = torch.einsum("bthk,bthv->bhkv", kept, v.to(dtype))
        full = (first > 0)[:, None, None, None]
        own = torch.where(full, own, total)
        # R is read here alone, full or not: a runtime that updates states in place tries out
        # whether it may, and a read that only a full block has would escape it.
        finished = recent + (total - own)
        recent = torch.where(full, 0.0, finished) + own
        state = torch.where(full, state + finished, state)
        o = within + scale * before
    return o.to(v.dtype), state, recent
