"""Triton kernel of the elementwise non-linear recurrence: z_t = f(a * z_{t-1} + u_t).

A program holds the states of a block of channels of one batch row in registers and walks through
time. The steps depend on each other, so only rows and channels run in parallel; the inputs of
``UNROLL`` tokens are loaded together, so that a step does not wait for memory.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelin.recurrences.launches import Launch, cdiv, planned

CODES = {"identity": 0, "tanh": 1, "relu": 2, "sigmoid": 3}
BLOCK = 32  # channels of a program: a small one, since there are as few programs as channels
UNROLL = 8


@triton.jit
def activate(x, F: tl.constexpr):
    """f of the code F; no exponential here is above 1."""
    if F == 1:
        low = tl.exp(-2.0 * tl.abs(x))
        far = tl.where(x < 0, -1.0, 1.0) * (1.0 - low) / (1.0 + low)
        # Near 0 that difference cancels; the series to x^9 is off by 1e-9 where it ends.
        q = x * x
        series = 1.0 - q * (1 / 3 - q * (2 / 15 - q * (17 / 315 - q * (62 / 2835))))
        x = tl.where(tl.abs(x) < 0.2, x * series, far)
    elif F == 2:
        x = tl.maximum(x, 0.0)
    elif F == 3:
        low = tl.exp(-tl.abs(x))
        x = tl.where(x < 0, low, 1.0) / (1.0 + low)
    return x


@triton.jit
def pick(tile, row):
    """The row of a tile at which the mask ``row`` holds."""
    return tl.sum(tl.where(row, tile, 0.0), axis=0)


@triton.jit
def _forward(
    u, weight, initial, z, after, T, D,
    F: tl.constexpr, BD: tl.constexpr, BU: tl.constexpr,
):  # fmt: skip
    """z of a block of channels of one row, and its last state."""
    i_b = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    r = tl.arange(0, BU)[:, None]
    a = tl.load(weight + d, mask=d < D, other=0.0)
    s = tl.load(initial + i_b * D + d, mask=d < D, other=0.0)
    for start in range(0, T, BU):
        live = (start + r < T) & (d < D)[None, :]
        at = (i_b * T + start + r) * D + d[None, :]
        x = tl.load(u + at, mask=live, other=0.0).to(tl.float32)
        out = tl.zeros([BU, BD], dtype=tl.float32)
        for row in tl.static_range(BU):
            new = activate(a * s + pick(x, r == row), F)
            s = tl.where(start + row < T, new, s)
            out = tl.where(r == row, s[None, :], out)
        tl.store(z + at, out.to(z.dtype.element_ty), mask=live)
    tl.store(after + i_b * D + d, s, mask=d < D)


def forward(u: Tensor, weight: Tensor, state: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Run the recurrence on a GPU.

    Args:
        u: ``[B, T, D]``, float32 or bfloat16.
        weight: a ``[D]``.
        state: ``[B, D]``, float32.
        activation: Name of f.

    Returns:
        ``z`` ``[B, T, D]`` in the dtype of ``u`` and the final state, float32.
    """
    return run(u, weight, state, activation, u.dtype)


def run(
    u: Tensor, weight: Tensor, state: Tensor, activation: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As :func:`forward`, with z in ``dtype``."""
    initial = state.float().contiguous()
    z, after = torch.empty(u.shape, dtype=dtype, device=u.device), torch.empty_like(initial)
    _launch(tuple(u.shape), activation)(
        u.contiguous(), weight.float().contiguous(), initial, z, after
    )
    return z, after


@planned
def _launch(shape: tuple[int, ...], activation: str) -> Launch:
    return launch_of(_forward, shape, activation)


def launch_of(kernel: Any, shape: tuple[int, ...], activation: str) -> Launch:
    """A launch of a kernel for inputs of a shape."""
    batch, time, channels = shape
    return Launch(
        kernel, (cdiv(channels, BLOCK), batch), time, channels,
        F=CODES[activation], BD=BLOCK, BU=UNROLL, num_warps=1,
    )  # fmt: skip
