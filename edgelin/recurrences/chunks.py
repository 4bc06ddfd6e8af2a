"""What the chunk-parallel torch forms share: the dtype that they compute in, and cutting."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

P = ParamSpec("P")
R = TypeVar("R")


def full_precision(form: Callable[P, R]) -> Callable[P, R]:
    """Run a form on the CPU outside autocast, which would turn its products to bfloat16."""

    @functools.wraps(form)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.autocast("cpu", enabled=False):
            return form(*args, **kwargs)

    return run


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
