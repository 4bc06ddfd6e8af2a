"""What the chunk-parallel torch forms share: dtype, cutting, per-key decay, triangular inverse."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from edgelin.recurrences.exporting import is_exporting

P = ParamSpec("P")
R = TypeVar("R")


def full_precision(form: Callable[P, R]) -> Callable[P, R]:
    """Run a form outside autocast, which would turn its products to bfloat16."""

    @functools.wraps(form)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return form(*args, **kwargs)

    return run


def outside_autocast(device: str) -> contextlib.AbstractContextManager[None]:
    """No autocast: it would round products to bfloat16. Never on in an export."""
    if is_exporting():
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any tensor is, else float32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def split(x: Tensor, size: int) -> Tensor:
    """``[B, T, H, ...]`` to chunks ``[B, H, N, size, ...]``, zeros after the last token.

    A token of zeros writes nothing and decays nothing.
    """
    missing = -x.shape[1] % size
    if missing:
        x = pad(x, (*[0] * 2 * (x.ndim - 2), 0, missing))
    chunks: Tensor = x.unflatten(1, (-1, size)).movedim(3, 1)
    return chunks


def join(x: Tensor, time: int) -> Tensor:
    """The inverse of :func:`split`: ``[B, T, H, ...]``."""
    return x.flatten(2, 3).transpose(1, 2)[:, :time]


def triangle(size: int, like: Tensor) -> Tensor:
    """Lower-triangular ones ``[size, size]``: as a matrix product, a running sum."""
    return torch.ones(size, size, dtype=like.dtype, device=like.device).tril()


def key_products(rows: Tensor, columns: Tensor, g: Tensor, *, exclusive: bool = False) -> Tensor:
    """``[..., C, C]`` of sum_k rows_ik columns_jk exp(G_ik - G_jk) for j <= i, else zero.

    At level s the mask is the pairs whose tokens lie in the odd and the even half of one aligned
    block of 2s. With r the last token of the even half, exp(G_i - G_j) is
    exp(G_i - G_r) exp(G_r - G_j): both exponents are sums over intervals, so never positive.

    Args:
        rows: What reads, ``[..., C, K]``.
        columns: What was written, ``[..., C, K]``.
        g: Log decays ``[..., C, K]``, of which G_i is the sum up to token i.
        exclusive: Read before the token: exp(G_{i-1} - G_j) for j < i, else zero.
    """
    size = rows.shape[-2]
    i = torch.arange(size, device=g.device)[:, None]
    j = i.T
    products = torch.diag_embed((rows * columns).sum(-1))
    if exclusive:
        products = torch.zeros_like(products)
    s = 1
    while s < size:
        odd, last_even = (i // s) % 2 == 1, i // (2 * s) * 2 * s + s - 1
        up_to = j < i if exclusive else j <= i
        interval = torch.where(odd, (j > last_even) & up_to, (j > i) & (j <= last_even))
        factor = (interval.to(g.dtype) @ g).exp()
        pairs = (i // (2 * s) == j // (2 * s)) & odd & ((j // s) % 2 == 0)
        products = products + ((rows * factor) @ (columns * factor).mT) * pairs
        s *= 2
    return products


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """Inverse of I + ``lower``, a strictly lower triangular `[..., N, N]`.

    Blocks of 2s come from blocks of s: X <- X - X L_s X, where L_s holds the lower left
    quarters of the 2s blocks. Exact to rounding also where the powers of L overflow.
    """
    size = lower.shape[-1]
    row = torch.arange(size, device=lower.device)[:, None]
    column = row.mT
    inverse = torch.eye(size, dtype=lower.dtype, device=lower.device).expand(lower.shape)
    block = 1
    while block < size:
        same = row // (2 * block) == column // (2 * block)
        quarter = same & (row // block > column // block)
        level = lower * quarter
        # blocks of one token: X is still the identity
        inverse = inverse - (level if block == 1 else inverse @ (level @ inverse))
        block *= 2
    return inverse
