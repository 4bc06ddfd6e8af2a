"""Linear attention without the causal order: every token sees the whole sequence.

    o_i = scale * q_i^T sum_j k_j v_j^T / (scale * q_i . sum_j k_j + eps)

with q and k behind their feature map. There is no state: a call is a whole sequence, as in an
encoder, and costs O(T K V), for which two matrix products are the best form on every device.

Source: Katharopoulos et al. 2020, "Transformers are RNNs", arXiv:2006.16236, equations 4 to 6
(before the causal mask of section 3.3); eps as in its authors' code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelin.recurrences.chunks import compute_dtype, outside_autocast


def bidirectional(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    scale: float = 1.0,
    normalize: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Attend to all tokens of a sequence at once.

    Args:
        q: Queries ``[B, T, H, K]``, behind the feature map; not negative if ``normalize``.
        k: Keys ``[B, T, H, K]``, likewise.
        v: Values ``[B, T, H, V]``.
        mask: Which tokens are there ``[B, T]``, bool; no token sees the others. None: all.
        scale: Factor of q.
        normalize: Divide by the sum of the weights.
        eps: Added to that sum.

    Returns:
        ``o`` ``[B, T, H, V]`` in the dtype of ``v``; what stands at tokens that are not there is
        finite and of no use. Sums are float32, or float64 if any input is.
    """
    _check(q, k, v, mask)
    dtype = compute_dtype(q, k, v)
    with outside_autocast(q.device.type):
        queries, keys, values = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
        queries = queries * scale  # after the cast: a bfloat16 product would be rounded
        if mask is not None:
            absent = ~mask[:, None, :, None]
            # Both: the product of a zero key with an infinite value would be NaN.
            keys, values = (x.masked_fill(absent, 0.0) for x in (keys, values))
        o = queries @ (keys.mT @ values)
        if normalize:
            o = o / (queries @ keys.sum(2)[..., None] + eps)
        return o.transpose(1, 2).to(v.dtype)


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    """Raise ValueError where the sizes do not fit together."""
    if q.dim() != 4 or q.shape[2:] != k.shape[2:] or v.dim() != 4 or v.shape[2] != k.shape[2]:
        shapes = [tuple(x.shape) for x in (q, k, v)]
        raise ValueError(f"q, k, v are {shapes}, need [B, T, H, K] twice and [B, T, H, V]")
    if mask is not None and (mask.dim() != 2 or mask.dtype != torch.bool):
        raise ValueError(f"mask is {tuple(mask.shape)} of {mask.dtype}, need bool [B, T]")
