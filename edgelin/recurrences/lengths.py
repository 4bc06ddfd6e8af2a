"""Calls whose rows are of different lengths: what stands behind the end of a row is left out.

A call carries T positions of every row; ``lengths`` ``[B]`` says how many of them a row really has,
from 0 to T. Everything is causal, so the outputs of a row's own positions need nothing; the states
do. A recurrence gets inputs that neither write nor decay behind the end, and whatever keeps the
last inputs takes those before the end.
"""

from __future__ import annotations

import torch
from torch import Tensor


def masked(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Zeros behind the end of every row.

    Args:
        x: ``[B, T, ...]``.
        lengths: ``[B]`` int64; None: all rows are full, and ``x`` is returned as it is.
    """
    if lengths is None:
        return x
    behind = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
    return x.masked_fill(behind[(..., *[None] * (x.dim() - 2))], 0.0)


def last(history: Tensor, lengths: Tensor, count: int) -> Tensor:
    """The last ``count`` inputs before the end of every row ``[B, count, ...]``.

    Args:
        history: The ``count`` inputs before the call, then its own, ``[B, count + T, ...]``.
        lengths: ``[B]`` int64.
        count: How many are kept.
    """
    at = lengths[:, None] + torch.arange(count, device=history.device)
    at = at[(..., *[None] * (history.dim() - 2))]
    return history.gather(1, at.expand(-1, -1, *history.shape[2:]))
