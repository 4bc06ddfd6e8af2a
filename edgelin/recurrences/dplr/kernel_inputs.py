"""Inputs of the DPLR recurrence as its kernels take them, and how each kernel is launched."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from edgelin.recurrences.delta.kernel import launch_of
from edgelin.recurrences.delta.kernel_chunks import chunks_of
from edgelin.recurrences.launches import Choice, Launch, choose, power_of_2


class Shape(NamedTuple):
    """What launches depend on. Packed rows are as a batch of as many chunks."""

    batch: int  # packed: rows that its sequences would fill
    time: int  # packed: 64 x all chunks
    heads: int
    key: int
    value: int
    tied: bool
    full: bool  # float32, not bfloat16
    on_gpu: bool
    sequences: int  # packed; 0: a batch


class Inputs(NamedTuple):
    """Contiguous inputs, all but beta, the decay and the state in the dtype of the values."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    beta: Tensor
    g: Tensor
    state: Tensor
    spans: Tensor  # the tables of packed rows, or k
    order: Tensor
    shape: Shape

    @classmethod
    def prepare(
        cls, q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor,
        *, pair: tuple[Tensor, Tensor] | None = None, beta: Tensor | None = None,
        ends: tuple[int, ...] | None = None,
    ) -> Inputs:  # fmt: skip
        """Bring arguments into the form that the kernels take: ``pair`` is a and b, or beta."""
        (heads, value), key, kind = v.shape[2:], k.shape[3], v.dtype
        q, k, v = q.to(kind).contiguous(), k.to(kind).contiguous(), v.contiguous()
        a, b = (x.to(kind).contiguous() for x in pair) if pair else (k, k)
        beta = q if beta is None else beta.contiguous()
        sequences, time, batch, spans, order = chunks_of(ends, k)
        shape = Shape(
            batch, time, heads, key, value, pair is None, kind == torch.float32, v.is_cuda,
            sequences,
        )  # fmt: skip
        return cls(q, k, v, a, b, beta, g.contiguous(), state.contiguous(), spans, order, shape)


def choice(kernel: str, shape: Shape) -> Choice:
    """Blocks of keys and values (BK, BV) and warps of a kernel.

    By the rule no tile in bfloat16 is narrower than one of the tensor cores, 64; without tensor
    cores a dot keeps both operands in registers.
    """
    full = shape.full
    least, part = (16, 32) if full else (64, 64)
    whole, width = (max(least, power_of_2(size)) for size in (shape.key, shape.value))
    serial = kernel in ("states", "reverse")
    rule = {
        "BK": whole if serial else min(whole, part),
        "BV": min(width, part if not (full and serial) else 16 if whole > 64 else 32),
        "num_warps": 4 if serial and not full else 8,
        "num_stages": 2 if serial and not full else 1,
    }
    if full:
        return rule
    # rows are passed through in parallel
    few = " few" if serial and shape.batch * shape.heads < 64 else ""
    kind = "kda" if shape.tied else "dplr"
    return choose(f"{kind} {kernel} {shape.key}x{shape.value}{few}", rule)


def plan(kernel: Any, name: str, shape: Shape, *scale: float, far: bool = False) -> Launch:
    """A launch of a kernel; ``far``: over the chunks whose decays are too strong to split."""
    constants = {
        "TIED": shape.tied,
        "FAR": far,
        # Masks that sum decays. Triton's interpreter multiplies bfloat16 wrongly.
        "PT": tl.bfloat16 if shape.on_gpu else tl.float32,
        "PARTS": 3 if shape.full else 2,
        # three products of bfloat16 parts are exact enough beside bfloat16 inputs
        "INVERSE": "ieee" if shape.full or not shape.on_gpu else "bf16x3",
    }
    constants |= choice(name, shape)
    if far:  # which is rare, and was wrong on Hopper with loads ahead
        constants["num_stages"] = 1
    return launch_of(kernel, name, shape[:5], shape.sequences, constants, *scale)
