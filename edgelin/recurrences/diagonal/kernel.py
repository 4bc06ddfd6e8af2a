"""Triton kernels of the diagonal recurrence, forward: a scan over segments of time.

``_segment`` runs every segment from a zero state and keeps its last state and the product of its
transitions; ``scan`` turns these into the state before each segment; ``_outputs`` runs all
segments again from there. A program holds ``[BN, BD]`` states of BD channels in registers, channels
along the lanes, and walks through its segment token by token.

Inside the kernels weights and states are planes (real, or re and im) with channels last, a real Λ
as its logarithm:
``[P, N, D]`` where they are constant, ``[B, T, P, N, D or 1]`` where they are selective.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelin.recurrences import MIN_LOG_DECAY
from edgelin.recurrences.diagonal import kernel_gates
from edgelin.recurrences.diagonal.kernel_scan import _FLOOR, CONSTANT, EACH, SHARED, _place, scan
from edgelin.recurrences.launches import Launch, cdiv, planned, power_of_2

SEGMENT = 64  # tokens of a segment
LONG_SEGMENT = 256  # passes fewer states, where the programs are enough to fill a GPU
PROGRAMS = 4096  # that fill it


@triton.jit
def _load(p, row, plane, n, d, N, D, P: tl.constexpr, MODE: tl.constexpr):
    """One plane of a weight at a token ``[BN, BD]``, ``[BN, 1]`` where channels share it."""
    if MODE == CONSTANT:
        value = tl.load(p + (plane * N + n) * D + d, mask=(n < N) & (d < D), other=0.0)
    elif MODE == SHARED:
        value = tl.load(p + (row * P + plane) * N + n, mask=n < N, other=0.0)
    else:
        value = tl.load(p + ((row * P + plane) * N + n) * D + d, mask=(n < N) & (d < D), other=0.0)
    return value.to(tl.float32)


@triton.jit
def _transition(p, row, n, d, N, D, P: tl.constexpr, MODE: tl.constexpr):
    """Λ of a token, real and imaginary part; a real one comes as its logarithm, twice."""
    real = _load(p, row, 0, n, d, N, D, P, MODE)
    if P == 2:
        return real, _load(p, row, 1, n, d, N, D, P, MODE)
    real = tl.exp(tl.maximum(real, _FLOOR))
    return real, real


@triton.jit
def _segment(
    x, a, b, ends, products, T, D, N, NS,
    P: tl.constexpr, AM: tl.constexpr, BM: tl.constexpr,
    S: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Last state of a segment that starts from zero, and the product of its transitions."""
    i_d, i_s, i_b = _place(tl.program_id(0), D, NS, BD)
    n = tl.arange(0, BN)[:, None]
    d = (i_d * BD + tl.arange(0, BD))[None, :]
    live = (n < N) & (d < D)
    first = i_b.to(tl.int64) * T + i_s * S
    h_r = tl.zeros([BN, BD], dtype=tl.float32)
    p_r = tl.zeros([BN, BD], dtype=tl.float32) + 1.0
    if P == 2:
        h_i = tl.zeros([BN, BD], dtype=tl.float32)
        p_i = tl.zeros([BN, BD], dtype=tl.float32)
    if AM == CONSTANT:
        a_r, a_i = _transition(a, first, n, d, N, D, P, AM)
    if BM == CONSTANT:
        b_r = _load(b, first, 0, n, d, N, D, P, BM)
        if P == 2:
            b_i = _load(b, first, 1, n, d, N, D, P, BM)
    for i in range(0, tl.minimum(S, T - i_s * S)):
        row = first + i
        v = tl.load(x + row * D + d, mask=d < D, other=0.0).to(tl.float32)
        if AM != CONSTANT:
            a_r, a_i = _transition(a, row, n, d, N, D, P, AM)
        if BM != CONSTANT:
            b_r = _load(b, row, 0, n, d, N, D, P, BM)
            if P == 2:
                b_i = _load(b, row, 1, n, d, N, D, P, BM)
        if P == 2:
            h_r, h_i = a_r * h_r - a_i * h_i + b_r * v, a_r * h_i + a_i * h_r + b_i * v
            p_r, p_i = a_r * p_r - a_i * p_i, a_r * p_i + a_i * p_r
        else:
            h_r = a_r * h_r + b_r * v
            p_r = a_r * p_r
    at = (i_b.to(tl.int64) * NS + i_s) * P * N * D + n * D + d
    tl.store(ends + at, h_r, mask=live)
    tl.store(products + at, p_r, mask=live)
    if P == 2:
        tl.store(ends + at + N * D, h_i, mask=live)
        tl.store(products + at + N * D, p_i, mask=live)


@triton.jit
def _outputs(
    x, a, b, c, starts, y, after, T, D, N, NS,
    P: tl.constexpr, AM: tl.constexpr, BM: tl.constexpr, CM: tl.constexpr,
    S: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """y of a segment from the state before it; the last segment writes the final state."""
    i_d, i_s, i_b = _place(tl.program_id(0), D, NS, BD)
    n = tl.arange(0, BN)[:, None]
    d_line = i_d * BD + tl.arange(0, BD)
    d = d_line[None, :]
    live = (n < N) & (d < D)
    first = i_b.to(tl.int64) * T + i_s * S
    at = (i_b.to(tl.int64) * NS + i_s) * P * N * D + n * D + d
    h_r = tl.load(starts + at, mask=live, other=0.0)
    if P == 2:
        h_i = tl.load(starts + at + N * D, mask=live, other=0.0)
    if AM == CONSTANT:
        a_r, a_i = _transition(a, first, n, d, N, D, P, AM)
    if BM == CONSTANT:
        b_r = _load(b, first, 0, n, d, N, D, P, BM)
        if P == 2:
            b_i = _load(b, first, 1, n, d, N, D, P, BM)
    if CM == CONSTANT:
        c_r = _load(c, first, 0, n, d, N, D, P, CM)
        if P == 2:
            c_i = _load(c, first, 1, n, d, N, D, P, CM)
    for i in range(0, tl.minimum(S, T - i_s * S)):
        row = first + i
        v = tl.load(x + row * D + d, mask=d < D, other=0.0).to(tl.float32)
        if AM != CONSTANT:
            a_r, a_i = _transition(a, row, n, d, N, D, P, AM)
        if BM != CONSTANT:
            b_r = _load(b, row, 0, n, d, N, D, P, BM)
            if P == 2:
                b_i = _load(b, row, 1, n, d, N, D, P, BM)
        if CM != CONSTANT:
            c_r = _load(c, row, 0, n, d, N, D, P, CM)
            if P == 2:
                c_i = _load(c, row, 1, n, d, N, D, P, CM)
        if P == 2:
            h_r, h_i = a_r * h_r - a_i * h_i + b_r * v, a_r * h_i + a_i * h_r + b_i * v
            out = tl.sum(c_r * h_r - c_i * h_i, axis=0)
        else:
            h_r = a_r * h_r + b_r * v
            out = tl.sum(c_r * h_r, axis=0)
        tl.store(y + row * D + d_line, out.to(y.dtype.element_ty), mask=d_line < D)
    if i_s == NS - 1:
        at = i_b.to(tl.int64) * P * N * D + n * D + d
        tl.store(after + at, h_r, mask=live)
        if P == 2:
            tl.store(after + at + N * D, h_i, mask=live)


class Shape(NamedTuple):
    """What launches depend on."""

    batch: int
    time: int
    channels: int
    states: int
    planes: int  # 1 for real, 2 for complex weights
    modes: tuple[int, int, int]  # CONSTANT, SHARED or EACH for Λ, b and c
    segment: int  # tokens of a segment
    block: int  # channels of a program

    @property
    def segments(self) -> int:
        """Of a row."""
        return cdiv(self.time, self.segment)

    @property
    def blocks(self) -> int:
        """Channel blocks."""
        return cdiv(self.channels, self.block)

    @property
    def programs(self) -> int:
        """Channel blocks of all segments of all rows."""
        return self.blocks * self.segments * self.batch

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """T, D, N and the number of segments, which all kernels take."""
        return self.time, self.channels, self.states, self.segments

    def tile(self, states_a_thread: int) -> dict[str, int]:
        """Launch arguments that fix the tile of a program."""
        rows = power_of_2(self.states)
        elements = rows * self.block * self.planes
        warps = max(1, self.block // 32, elements // (32 * states_a_thread))
        return {
            "P": self.planes, "S": self.segment, "BN": rows, "BD": self.block,
            "num_warps": min(warps, 8),
        }  # fmt: skip


class Problem(NamedTuple):
    """Inputs as the kernels take them, and the sizes."""

    x: Tensor  # [B, T, D]
    weights: tuple[Tensor, Tensor, Tensor]  # Λ, b and c in planes
    state: Tensor  # [B, P, N, D] float32
    shape: Shape


def prepare(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    g: Tensor,
    theta: Tensor | None,
    state: Tensor,
    *,
    elements: int,
    longest: int,
) -> Problem:
    """Lay the inputs out in planes; about ``elements`` states a program, ``longest`` segments."""
    transition = g.float()
    if theta is not None:
        transition, angle = transition.clamp(min=MIN_LOG_DECAY).exp(), theta.float()
        transition = torch.stack([transition * angle.cos(), transition * angle.sin()], dim=-1)
    weights = [transition, b, c]
    (batch, time, channels), size = x.shape, state.shape[2]
    rows = power_of_2(size)
    block = min(max(elements // rows, 16), 128, power_of_2(channels))
    work = batch * cdiv(channels, block) * cdiv(time, longest)
    segment = min(SEGMENT, longest) if work < PROGRAMS else longest
    initial = planar(state.float(), 1)
    a_mode, b_mode, c_mode = (_mode(v, channels) for v in weights)
    planes = 1 if theta is None else 2
    return Problem(
        x.contiguous(),
        tuple(planar(v, _lead(v)) for v in weights),  # type: ignore[arg-type]
        initial if theta is not None else initial[:, None],
        Shape(batch, time, channels, size, planes, (a_mode, b_mode, c_mode), segment, block),
    )


def _lead(weights: Tensor) -> int:
    """Axes before the channels: batch and time where the weights are selective."""
    return 2 if weights.dim() > 3 else 0


def _mode(weights: Tensor, channels: int) -> int:
    """How the weights vary."""
    if weights.dim() <= 3:
        return int(CONSTANT.value)
    return int(EACH.value if weights.shape[2] == channels else SHARED.value)


def planar(v: Tensor, lead: int) -> Tensor:
    """Reverse the axes after ``lead``: ``[D, N, 2]`` to ``[2, N, D]`` and back; contiguous."""
    return v.permute(*range(lead), *reversed(range(lead, v.dim()))).contiguous()


def forward(
    x: Tensor, b: Tensor, c: Tensor, g: Tensor, theta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Run the recurrence; shapes as in :func:`edgelin.recurrences.diagonal.diagonal`.

    Args:
        x: float32 or bfloat16.
        b: float32 or bfloat16.
        c: float32 or bfloat16.
        g: float32.
        theta: float32 or None.
        state: float32.

    Returns:
        ``y`` in the dtype of ``x``, the final state, float32, and what backward wants kept.
    """
    if kernel_gates.fits(b, c, g, theta, state):
        y, after, marks = kernel_gates.forward(x, b, c, g, state)
        return y, after, [marks]
    problem = prepare(x, b, c, g, theta, state, elements=512, longest=LONG_SEGMENT)
    starts = problem.state[:, None]
    if problem.shape.segments > 1:
        ends, products = segments(problem)
        starts = scan(problem.state, ends, products, reverse=False)
    y, after = torch.empty_like(problem.x), torch.empty_like(problem.state)
    _outputs_of(problem.shape)(problem.x, *problem.weights, starts.contiguous(), y, after)
    return y, planar(after if theta is not None else after[:, 0], 1).to(state.dtype), []


def allocate(
    x: Tensor, b: Tensor, c: Tensor, g: Tensor, theta: Tensor | None, state: Tensor
) -> list[Tensor]:
    """Memory for what ``forward`` keeps."""
    return [kernel_gates.allocate(x)] if kernel_gates.fits(b, c, g, theta, state) else []


def segments(problem: Problem) -> tuple[Tensor, Tensor]:
    """Last state and product of transitions of every segment, ``[B, NS, P, N, D]``."""
    batch, *rest = problem.state.shape
    ends = problem.state.new_empty(batch, problem.shape.segments, *rest)
    products = torch.empty_like(ends)
    _segments_of(problem.shape)(problem.x, *problem.weights[:2], ends, products)
    return ends, products


@planned
def _outputs_of(shape: Shape) -> Launch:
    a, b, c = shape.modes
    return Launch(_outputs, (shape.programs,), *shape.sizes, AM=a, BM=b, CM=c, **shape.tile(32))


@planned
def _segments_of(shape: Shape) -> Launch:
    a, b, _ = shape.modes
    return Launch(_segment, (shape.programs,), *shape.sizes, AM=a, BM=b, **shape.tile(32))
