"""Triton kernels of the diagonal recurrence, backward.

With k_t the gradient of h_t that comes from later tokens, conj the complex conjugate and dy real,

    l_t = k_t + conj(c_t) dy_t           gradient of h_t
    k_{t-1} = conj(Λ_t) l_t
    dx_t = Re(sum_n conj(b_t) l_t) ;  db_t = l_t x_t ;  dc_t = conj(h_t) dy_t
    dg_t + i dtheta_t = l_t conj(Λ_t h_{t-1})

k is a recurrence of its own, backwards in time: ``_adjoint`` and ``scan`` give it at every
segment's end. ``_gradients`` then runs each segment forwards, which leaves its states in a scratch
buffer that the program reuses for its next segment, and backwards. Gradients of constant weights
are sums a segment, those of shared weights sums a channel block; torch adds these up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelin.recurrences import MIN_LOG_DECAY
from edgelin.recurrences.diagonal import kernel_gates
from edgelin.recurrences.diagonal.kernel import (
    SEGMENT,
    Shape,
    _load,
    _transition,
    planar,
    prepare,
    segments,
)
from edgelin.recurrences.diagonal.kernel_scan import _FLOOR, CONSTANT, EACH, SHARED, _place, scan
from edgelin.recurrences.launches import Launch, planned

PROGRAMS = 1056  # 8 on each of 132 multiprocessors: the scratch buffers stay small


@triton.jit
def _adjoint(
    dy, a, c, ends, T, D, N, NS,
    P: tl.constexpr, AM: tl.constexpr, CM: tl.constexpr,
    S: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """k before a segment when nothing comes from after it."""
    i_d, i_s, i_b = _place(tl.program_id(0), D, NS, BD)
    n = tl.arange(0, BN)[:, None]
    d = (i_d * BD + tl.arange(0, BD))[None, :]
    live = (n < N) & (d < D)
    first = i_b.to(tl.int64) * T + i_s * S
    count = tl.minimum(S, T - i_s * S)
    k_r = tl.zeros([BN, BD], dtype=tl.float32)
    if P == 2:
        k_i = tl.zeros([BN, BD], dtype=tl.float32)
    if AM == CONSTANT:
        a_r, a_i = _transition(a, first, n, d, N, D, P, AM)
    if CM == CONSTANT:
        c_r = _load(c, first, 0, n, d, N, D, P, CM)
        if P == 2:
            c_i = _load(c, first, 1, n, d, N, D, P, CM)
    for j in range(0, count):
        row = first + (count - 1 - j)
        dv = tl.load(dy + row * D + d, mask=d < D, other=0.0).to(tl.float32)
        if AM != CONSTANT:
            a_r, a_i = _transition(a, row, n, d, N, D, P, AM)
        if CM != CONSTANT:
            c_r = _load(c, row, 0, n, d, N, D, P, CM)
            if P == 2:
                c_i = _load(c, row, 1, n, d, N, D, P, CM)
        l_r = k_r + c_r * dv
        if P == 2:
            l_i = k_i - c_i * dv
            k_r = a_r * l_r + a_i * l_i
            k_i = a_r * l_i - a_i * l_r
        else:
            k_r = a_r * l_r
    at = (i_b.to(tl.int64) * NS + i_s) * P * N * D + n * D + d
    tl.store(ends + at, k_r, mask=live)
    if P == 2:
        tl.store(ends + at + N * D, k_i, mask=live)


@triton.jit
def _emit(
    p, value, row, plane, n, d, i_d, rows, N, D,
    P: tl.constexpr, MODE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Store a token's gradient of a selective weight: whole, or summed over a channel block."""
    if MODE == SHARED:
        line = tl.arange(0, BN)
        at = ((i_d.to(tl.int64) * rows + row) * P + plane) * N + line
        tl.store(p + at, tl.sum(value, axis=1), mask=line < N)
    if MODE == EACH:
        at = ((row * P + plane) * N + n) * D + d
        tl.store(p + at, value, mask=(n < N) & (d < D))


@triton.jit
def _load_planes(p, row, n, d, N, D, P: tl.constexpr, MODE: tl.constexpr):
    """A weight of one token: real and imaginary part, or the real one twice."""
    real = _load(p, row, 0, n, d, N, D, P, MODE)
    imaginary = real
    if P == 2:
        imaginary = _load(p, row, 1, n, d, N, D, P, MODE)
    return real, imaginary


@triton.jit
def _read(p, at, plane, live, P: tl.constexpr):
    """A state, likewise; its parts are ``plane`` cells apart."""
    real = tl.load(p + at, mask=live, other=0.0)
    imaginary = real
    if P == 2:
        imaginary = tl.load(p + at + plane, mask=live, other=0.0)
    return real, imaginary


@triton.jit
def _write(p, at, plane, real, imaginary, live, P: tl.constexpr):
    """Inverse of :func:`_read`."""
    tl.store(p + at, real, mask=live)
    if P == 2:
        tl.store(p + at + plane, imaginary, mask=live)


@triton.jit
def _forwards(
    x, a, b, h_r, h_i, own, first, count, n, d, local, N, D,
    P: tl.constexpr, AM: tl.constexpr, BM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Run a segment and leave the state before each token at ``own``."""
    if AM == CONSTANT:
        a_r, a_i = _transition(a, first, n, d, N, D, P, AM)
    if BM == CONSTANT:
        b_r = _load(b, first, 0, n, d, N, D, P, BM)
        if P == 2:
            b_i = _load(b, first, 1, n, d, N, D, P, BM)
    for i in range(0, count):
        row = first + i
        v = tl.load(x + row * D + d, mask=d < D, other=0.0).to(tl.float32)
        if AM != CONSTANT:
            a_r, a_i = _transition(a, row, n, d, N, D, P, AM)
        if BM != CONSTANT:
            b_r = _load(b, row, 0, n, d, N, D, P, BM)
            if P == 2:
                b_i = _load(b, row, 1, n, d, N, D, P, BM)
        tl.store(own + i * P * TILE + local, h_r)
        if P == 2:
            tl.store(own + (i * P + 1) * TILE + local, h_i)
            h_r, h_i = a_r * h_r - a_i * h_i + b_r * v, a_r * h_i + a_i * h_r + b_i * v
        else:
            h_r = a_r * h_r + b_r * v


@triton.jit
def _above_floor(step, a, row, n, d, N, D, MODE: tl.constexpr):
    """The gradient of a log decay, zero where it was clamped."""
    return tl.where(_load(a, row, 0, n, d, N, D, 1, MODE) >= _FLOOR, step, 0.0)


@triton.jit
def _gradients(
    x, dy, a, b, c, starts, adjoints, scratch, dx, da, db, dc, dinitial, T, D, N, NS, ITEMS, ROWS,
    P: tl.constexpr, AM: tl.constexpr, BM: tl.constexpr, CM: tl.constexpr,
    S: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """All gradients, segment by segment; every program takes each num_programs-th one."""
    n = tl.arange(0, BN)[:, None]
    local = n * BD + tl.arange(0, BD)[None, :]
    own = scratch + tl.program_id(0).to(tl.int64) * (S * P * BN * BD)
    for turn in range(0, tl.cdiv(ITEMS - tl.program_id(0), tl.num_programs(0))):
        item = tl.program_id(0) + turn * tl.num_programs(0)
        i_d, i_s, i_b = _place(item, D, NS, BD)
        d_line = i_d * BD + tl.arange(0, BD)
        d = d_line[None, :]
        live = (n < N) & (d < D)
        first = i_b.to(tl.int64) * T + i_s * S
        count = tl.minimum(S, T - i_s * S)
        at = (i_b.to(tl.int64) * NS + i_s) * P * N * D + n * D + d
        k_r, k_i = _read(adjoints, at, N * D, live, P)
        s_r, s_i = _read(starts, at, N * D, live, P)
        _forwards(x, a, b, s_r, s_i, own, first, count, n, d, local, N, D, P, AM, BM, BN * BD)
        tl.debug_barrier()  # threads may read what others wrote
        zero = tl.zeros([BN, BD], dtype=tl.float32)
        da_r, da_i, db_r, db_i, dc_r, dc_i = zero, zero, zero, zero, zero, zero
        for j in range(0, count):
            i = count - 1 - j
            row = first + i
            v = tl.load(x + row * D + d, mask=d < D, other=0.0).to(tl.float32)
            dv = tl.load(dy + row * D + d, mask=d < D, other=0.0).to(tl.float32)
            h_r, h_i = _read(own + i * P * BN * BD, local, BN * BD, live, P)
            a_r, a_i = _transition(a, row, n, d, N, D, P, AM)
            b_r, b_i = _load_planes(b, row, n, d, N, D, P, BM)
            c_r, c_i = _load_planes(c, row, n, d, N, D, P, CM)
            l_r = k_r + c_r * dv
            if P == 2:
                l_i = k_i - c_i * dv
                h_r, h_i = a_r * h_r - a_i * h_i, a_r * h_i + a_i * h_r
                step_r, step_i = l_r * h_r + l_i * h_i, l_i * h_r - l_r * h_i
                read_r, read_i = (h_r + b_r * v) * dv, -(h_i + b_i * v) * dv
                write_r, write_i = l_r * v, l_i * v
                out = tl.sum(b_r * l_r + b_i * l_i, axis=0)
                k_r, k_i = a_r * l_r + a_i * l_i, a_r * l_i - a_i * l_r
                da_i, db_i, dc_i = da_i + step_i, db_i + write_i, dc_i + read_i
                _emit(da, step_i, row, 1, n, d, i_d, ROWS, N, D, P, AM, BN)
                _emit(db, write_i, row, 1, n, d, i_d, ROWS, N, D, P, BM, BN)
                _emit(dc, read_i, row, 1, n, d, i_d, ROWS, N, D, P, CM, BN)
            else:
                h_r, write_r = a_r * h_r, l_r * v
                read_r = (h_r + b_r * v) * dv
                step_r = _above_floor(l_r * h_r, a, row, n, d, N, D, AM)
                out, k_r = tl.sum(b_r * l_r, axis=0), a_r * l_r
            da_r, db_r, dc_r = da_r + step_r, db_r + write_r, dc_r + read_r
            _emit(da, step_r, row, 0, n, d, i_d, ROWS, N, D, P, AM, BN)
            _emit(db, write_r, row, 0, n, d, i_d, ROWS, N, D, P, BM, BN)
            _emit(dc, read_r, row, 0, n, d, i_d, ROWS, N, D, P, CM, BN)
            tl.store(dx + row * D + d_line, out.to(dx.dtype.element_ty), mask=d_line < D)
        if AM == CONSTANT:
            _write(da, at, N * D, da_r, da_i, live, P)
        if BM == CONSTANT:
            _write(db, at, N * D, db_r, db_i, live, P)
        if CM == CONSTANT:
            _write(dc, at, N * D, dc_r, dc_i, live, P)
        if i_s == 0:
            at = i_b.to(tl.int64) * P * N * D + n * D + d
            _write(dinitial, at, N * D, k_r, k_i, live, P)
        tl.debug_barrier()  # the next segment overwrites the scratch buffer


def backward(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    g: Tensor,
    theta: Tensor | None,
    state: Tensor,
    dy: Tensor,
    dstate: Tensor,
    kept: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, b, c, g, theta (empty for None) and state, in their dtypes and shapes.

    Args:
        x: Inputs, and all others as ``forward`` took them.
        b: Input weights.
        c: Output weights.
        g: Log magnitude of Λ.
        theta: Angle of Λ, or None.
        state: State before the first token.
        dy: Gradient of ``y``.
        dstate: Gradient of the final state.
        kept: What ``forward`` kept; nothing: it is computed again.
    """
    if kernel_gates.fits(b, c, g, theta, state):
        given = (x, b, c, g, state)
        marks = kept[0] if kept else kernel_gates.forward(*given)[2]
        return kernel_gates.backward(given, dy, dstate, marks)
    problem = prepare(x, b, c, g, theta, state, elements=256, longest=SEGMENT)
    dy, shape = dy.contiguous(), problem.shape
    last = planar(dstate.float(), 1).reshape(problem.state.shape)
    starts, adjoints = problem.state[:, None], last[:, None]
    if shape.segments > 1:
        ends, products = segments(problem)
        starts = scan(problem.state, ends, products, reverse=False)
        _adjoints_of(shape)(dy, problem.weights[0], problem.weights[2], ends)
        adjoints = scan(last, ends, products, reverse=True)
    dx, dinitial = torch.empty_like(problem.x), torch.empty_like(problem.state)
    parts = [problem.state.new_empty(_part(shape, mode)) for mode in shape.modes]
    tile, programs = shape.tile(16), min(shape.programs, PROGRAMS)
    scratch = starts.new_empty(programs, shape.segment, shape.planes, tile["BN"], tile["BD"])
    _gradients_of(shape, programs)(
        problem.x, dy, *problem.weights, starts.contiguous(), adjoints.contiguous(), scratch,
        dx, *parts, dinitial,
    )  # fmt: skip
    pairs = zip(shape.modes, parts, strict=True)
    exponent, db, dc = (_total(shape, mode, part) for mode, part in pairs)
    return _result(dx, db, dc, exponent, dinitial, (b, c, g, theta, state))


@planned
def _adjoints_of(shape: Shape) -> Launch:
    a, _, c = shape.modes
    return Launch(_adjoint, (shape.programs,), *shape.sizes, AM=a, CM=c, **shape.tile(16))


@planned
def _gradients_of(shape: Shape, programs: int) -> Launch:
    a, b, c = shape.modes
    return Launch(
        _gradients, (programs,), *shape.sizes, shape.programs, shape.batch * shape.time,
        AM=a, BM=b, CM=c, **shape.tile(16),
    )  # fmt: skip


def _part(shape: Shape, mode: int) -> tuple[int, ...]:
    """Sizes of the gradient of a weight as ``_gradients`` leaves it, before the sum."""
    batch, time, channels, states, planes = shape[:5]
    return {
        CONSTANT.value: (batch * shape.segments, planes, states, channels),
        SHARED.value: (shape.blocks, batch, time, planes, states, 1),
        EACH.value: (1, batch, time, planes, states, channels),
    }[mode]


def _total(shape: Shape, mode: int, part: Tensor) -> Tensor:
    """The gradient of a weight in its own layout, from the sums of the programs."""
    whole = part.sum(0) if len(part) > 1 else part.squeeze(0)
    natural = planar(whole, 0 if mode == CONSTANT.value else 2)
    return (natural if shape.planes == 2 else natural[..., 0]).contiguous()


def _result(
    dx: Tensor,
    db: Tensor,
    dc: Tensor,
    exponent: Tensor,
    dinitial: Tensor,
    given: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients in the dtypes of b, c, g, theta and state."""
    b, c, g, theta, state = given
    dtheta = g.new_empty(0)
    if theta is not None:
        exponent, turn = exponent.unbind(-1)
        dtheta = turn.to(theta.dtype).contiguous()
        exponent = torch.where(g >= MIN_LOG_DECAY, exponent, 0.0)
    else:
        dinitial = dinitial.select(1, 0)
    dg = exponent.to(g.dtype)
    return dx, db.to(b.dtype), dc.to(c.dtype), dg, dtheta, planar(dinitial, 1).to(state.dtype)
