"""Linear recurrence on a GPU: block sizes and launches of the kernels in ``kernel_passes.py``.

The output and every gradient are one kernel each, run over segments of time in parallel from the
state before each segment (segment scan; equations in ``chunked.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelin.recurrences.launches import Choice, choose
from edgelin.recurrences.linear import kernel_passes
from edgelin.recurrences.linear.kernel_passes import HEAD, KEY, NONE

SEGMENT = 256  # shortest segment in tokens: below, passing states costs more than it gains
PROGRAMS = 512  # programs that fill a large GPU; more segments than that take are not made


@dataclass(frozen=True)
class Pass:
    """What ``kernel_passes.attend`` computes (see its module docstring)."""

    name: str
    inner: bool
    reverse: bool


OUTPUT, DQ = Pass("o", inner=True, reverse=False), Pass("dq", inner=False, reverse=False)
DV, DK = Pass("dv", inner=True, reverse=True), Pass("dk", inner=False, reverse=True)


def mode_of(g: Tensor | None) -> tl.constexpr:
    """NONE, HEAD or KEY."""
    return NONE if g is None else HEAD if g.dim() == 3 else KEY


def launch_of(kind: Pass, mode: tl.constexpr, half: bool, width_x: int, width_y: int) -> Choice:
    """Tokens of a chunk (BT), width of a block of outputs (BLOCK), tokens of a segment, warps.

    By a rule read off the compiler's register counts: larger tiles spill, above all in float32.
    """
    contracted, width = (width_y, width_x) if kind.inner else (width_x, width_y)
    whole = whole_of(contracted)
    cells = 8192 if mode != NONE or not half else 16384
    block = max(16, min(triton.next_power_of_2(width), cells // whole))
    few = half and mode == NONE and whole * block <= 4096
    rule = {
        "BT": 64 if half else 16,
        "BLOCK": block,
        "SEGMENT": SEGMENT,
        "num_warps": 4 if few else 8,
        "num_stages": 2 if half and mode != KEY and max(block, whole) <= 128 else 1,
    }
    if not half:
        return rule
    chosen = choose(f"linear {_NAMES[mode.value]} {kind.name} {width_x}x{width_y}", rule)
    if kind is DK and mode == HEAD:  # both add to one sum a block of K
        return chosen | {"BLOCK": launch_of(DQ, mode, half, width_x, width_y)["BLOCK"]}
    return chosen


_NAMES = {NONE.value: "none", HEAD.value: "head", KEY.value: "key"}


def whole_of(width: int) -> int:
    """Block over a side that is not cut."""
    return int(max(16, triton.next_power_of_2(width)))


def attend(
    kind: Pass,
    rows: tuple[Tensor, Tensor, Tensor],
    g: Tensor | None,
    initial: Tensor,
    *,
    half: bool,
    scale: float,
    weigh: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Run one pass over time.

    Args:
        kind: Which pass.
        rows: a, x ``[B, T, H, X]`` and y ``[B, T, H, Y]``, contiguous; a has the width of y in an
            inner pass, of x in an outer one.
        g: Log decay ``[B, T, H]``, ``[B, T, H, Y]`` or None, contiguous.
        initial: ``[B, H, Y, X]`` float32, contiguous: the state, or backwards its gradient.
        half: Whether matrix products are bfloat16 (else float32).
        scale: Factor of the output; backwards it multiplies what the pass adds to the state too.
        weigh: For an outer pass: q (backwards k) and the tensor that takes the products with the
            result, ``[B, T, H, Y]`` or, with a decay a head, ``[blocks, B, T, H]``.

    Returns:
        The result, with the width of x (outer: y), and the state after the pass, like ``initial``.
    """
    a, x, y = rows
    (batch, time, heads, width_x), width_y = x.shape, y.shape[3]
    mode = mode_of(g)
    chosen = launch_of(kind, mode, half, width_x, width_y)
    block_t, block = chosen["BT"], chosen["BLOCK"]
    blocks = triton.cdiv(width_x if kind.inner else width_y, block)
    block_x, block_y = (block, whole_of(width_y)) if kind.inner else (whole_of(width_x), block)
    launch = {
        "BT": block_t,
        "MODE": mode,
        "REV": kind.reverse,
        # Triton's interpreter multiplies bfloat16 wrongly: on the CPU products are float32.
        "DT": tl.bfloat16 if half and x.is_cuda else tl.float32,
        "PT": tl.bfloat16 if x.is_cuda else tl.float32,
        "PARTS": 2 if half else 3,
        "num_warps": chosen["num_warps"],
        "num_stages": chosen["num_stages"],
    }
    segments = _segments(time, batch * heads * blocks, chosen["SEGMENT"])
    chunks = triton.cdiv(triton.cdiv(time, block_t), segments)
    segments = triton.cdiv(time, chunks * block_t)
    h_scale = 1.0 / scale if kind.reverse else 1.0
    size = width_x * width_y
    start, strides = initial, (size, 0, 1, width_x)
    if segments > 1:
        start = _states(x, y, g, initial, h_scale, segments, chunks, launch)
        h_scale, strides = 1.0, (segments * size, size, width_y, 1)
    like = x if kind.inner else y
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    final = torch.empty(initial.shape, dtype=torch.float32, device=like.device)
    factor, weights = weigh if weigh is not None else (out, out)
    kernel_passes.attend[(batch * heads, segments, blocks)](
        a, x, y, x if g is None else g, start, out, final, factor, weights,
        time, chunks, h_scale, scale, *strides, batch * time * heads,
        H=heads, X=width_x, Y=width_y, BX=block_x, BY=block_y,
        INNER=kind.inner, WEIGH=weigh is not None, LEVELS=block_t.bit_length() - 1, **launch,
    )  # fmt: skip
    return out, final


def _segments(time: int, programs: int, least: int) -> int:
    """How many segments fill the GPU, when each has at least ``least`` tokens."""
    return max(1, min(time // least, -(-PROGRAMS // programs)))


def _states(
    x: Tensor,
    y: Tensor,
    g: Tensor | None,
    initial: Tensor,
    h_scale: float,
    segments: int,
    chunks: int,
    launch: dict[str, Any],
) -> Tensor:
    """The state before each segment ``[B*H, segments, X, Y]``."""
    (batch, time, heads, width_x), width_y = x.shape, y.shape[3]
    block_x, block_y = (max(16, min(triton.next_power_of_2(w), 64)) for w in (width_x, width_y))
    rows = batch * heads
    h = torch.empty((rows, segments, width_x, width_y), dtype=torch.float32, device=x.device)
    total = torch.empty((rows, segments, width_y), dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(width_x, block_x) * triton.cdiv(width_y, block_y)
    kernel_passes.segment[(rows, segments, tiles)](
        x, y, x if g is None else g, h, total, time, chunks,
        H=heads, X=width_x, Y=width_y, BX=block_x, BY=block_y, **launch | {"num_warps": 4},
    )  # fmt: skip
    kernel_passes.scan[(rows, triton.cdiv(width_x * width_y, 1024))](
        h, total, initial, segments, h_scale,
        X=width_x, Y=width_y, BLOCK=1024, MODE=launch["MODE"], num_warps=4,
    )  # fmt: skip
    return h


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The recurrence on a GPU: shapes as in ``chunked.forward``, K and V up to 256, scale > 0."""
    q, k, v, state = (x.contiguous() for x in (q, k, v, state))
    g = None if g is None else g.contiguous()
    return attend(OUTPUT, (q, v, k), g, state, half=is_half(q, k, v), scale=scale)


def is_half(*tensors: Tensor) -> bool:
    """Whether all are bfloat16: only then matrix products are."""
    return all(x.dtype == torch.bfloat16 for x in tensors)
