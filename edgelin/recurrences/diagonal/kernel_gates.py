"""Triton kernels of the diagonal recurrence with one real state a channel and a decay a token.

That is HGRN, RG-LRU, minGRU and RWKV-4: N = 1, a selective real Λ for each channel, constant c, b
constant or one a token and channel. Nothing but memory bounds them, so they read as little as
possible, and early. A thread holds channels; a program takes BD channels through a segment of time
in tiles of BT tokens and asks for the next tile before it works on this one. Segments are only as
many as it takes to fill a GPU: with one, ``_outputs`` reads every input once, and that is all.

With one segment a row, ``_outputs`` runs it, and keeps a state every MT tokens; ``_gradients`` goes
back tile by tile, and makes the states within from those kept. Several are run from zero before, by
``_totals``, and ``scan`` tells what enters each: a state forwards, its gradient backwards.
``_totals`` stops where nothing of the remaining tokens would be left at the other end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelin.recurrences.diagonal.kernel_scan import _FLOOR, CONSTANT, EACH, _place, scan
from edgelin.recurrences.launches import Choice, Launch, cdiv, choose, planned

SEGMENT = 64  # tokens: segments are multiples of it, and it of BT
_GONE = tl.constexpr(1e-37)  # the least product of decays that counts, about float32's least
# lanes: channels of all segments of all rows, 4 warps of them on each of 132 multiprocessors
RULES: dict[str, Choice] = {
    "outputs": {"lanes": 16384, "BT": 32, "BD": 64, "num_warps": 2},
    "gradients": {"lanes": 16384, "BT": 16, "BD": 64, "num_warps": 2},
    "totals": {"BT": 32, "BD": 64, "num_warps": 2},
}


@triton.jit
def _tile(p, row, left, d, D: tl.constexpr, BT: tl.constexpr):
    """BT tokens from ``row`` on, of which ``left`` are there, zeros for the others."""
    cell = p + row * D + d
    rows = ()
    for i in tl.static_range(BT):
        value = tl.load(cell + i * D, mask=(d < D) & (i < left), other=0.0)
        rows += (value,)  # type: ignore[assignment]
    return rows


@triton.jit
def _nothing(p, d, D: tl.constexpr, MODE: tl.constexpr, BT: tl.constexpr):
    """A tile of zeros in the dtype of p; where p is CONSTANT, of its only row."""
    row = tl.zeros_like(d).to(p.dtype.element_ty)
    if MODE == CONSTANT:
        row = tl.load(p + d, mask=d < D, other=0.0)
    rows = ()
    for _ in tl.static_range(BT):
        rows += (row,)  # type: ignore[assignment]
    return rows


@triton.jit(do_not_specialize=["T", "NS", "S"])
def _totals(
    x, g, b, ends, products, T, NS, S,
    D: tl.constexpr, BM: tl.constexpr, BACK: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Last state of a segment that starts from zero, and the product of its decays.

    Tokens are summed from the last one back, as far as the product of decays counts: where they are
    fast, that is a few tiles. BACK: dy and c stand for x and b, and it is the gradient of the state
    before the segment when nothing comes from after it, from the first token on.
    """
    i_d, i_s, i_b = _place(tl.program_id(0), D, NS, BD)
    d = i_d * BD + tl.arange(0, BD)
    first = i_b.to(tl.int64) * T + i_s * S
    # nobody asks what leaves the row
    count = tl.where(i_s == (0 if BACK else NS - 1), 0, tl.minimum(S, T - i_s * S))
    h = tl.zeros([BD], dtype=tl.float32)
    p = tl.where(d < D, h + 1.0, 0.0)
    v, w, u = _nothing(x, d, D, EACH, BT), _nothing(g, d, D, EACH, BT), _nothing(b, d, D, BM, BT)
    j = 0 if BACK else (tl.cdiv(count, BT) - 1) * BT  # the tile that comes next
    left = tl.where(j < 0, 0, count - j)
    going = True
    while going:
        next_v, next_w = _tile(x, first + j, left, d, D, BT), _tile(g, first + j, left, d, D, BT)
        next_u = u
        if BM == EACH:
            next_u = _tile(b, first + j, left, d, D, BT)
        for i in tl.static_range(
            0 if BACK else BT - 1, BT if BACK else -1, 1 if BACK else -1
        ):  # fmt: skip
            a = tl.exp(tl.maximum(w[i], _FLOOR))
            put = u[i].to(tl.float32) * v[i].to(tl.float32)
            if BACK:
                p = a * p
                h += p * put
            else:
                h += p * put
                p = a * p
        v, w, u = next_v, next_w, next_u
        going = (left > 0) & (tl.max(p, axis=0) > _GONE)
        j += BT if BACK else -BT
        left = tl.where(j < 0, 0, count - j)
    cell = (i_b.to(tl.int64) * NS + i_s) * D + d
    tl.store(ends + cell, h, mask=d < D)
    tl.store(products + cell, p, mask=d < D)


@triton.jit(do_not_specialize=["T", "NS", "S"])
def _outputs(
    x, g, b, c, starts, y, after, marks, T, NS, S,
    D: tl.constexpr, BM: tl.constexpr, MT: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """y of a segment from the state before it, and the state every MT tokens; the last segment
    writes the final state."""
    i_d, i_s, i_b = _place(tl.program_id(0), D, NS, BD)
    d = i_d * BD + tl.arange(0, BD)
    first = i_b.to(tl.int64) * T + i_s * S
    count = tl.minimum(S, T - i_s * S)
    v, w, u = _nothing(x, d, D, EACH, BT), _nothing(g, d, D, EACH, BT), _nothing(b, d, D, BM, BT)
    weight = tl.load(c + d, mask=d < D, other=0.0).to(tl.float32)
    h = tl.load(starts + (i_b.to(tl.int64) * NS + i_s) * D + d, mask=d < D, other=0.0)
    mark = marks + (i_b.to(tl.int64) * tl.cdiv(T, MT) + i_s * (S // MT) - BT // MT) * D + d
    for j in range(-BT, count, BT):
        row, left = first + j + BT, count - j - BT
        next_v, next_w = _tile(x, row, left, d, D, BT), _tile(g, row, left, d, D, BT)
        next_u = u
        if BM == EACH:
            next_u = _tile(b, row, left, d, D, BT)
        cell = y + (first + j) * D + d
        for i in tl.static_range(BT):
            live = (d < D) & (j >= 0) & (i < count - j)
            if i % MT == 0:
                tl.store(mark, h, mask=live)
                mark += D
            a = tl.exp(tl.maximum(w[i], _FLOOR))
            h = a * h + u[i].to(tl.float32) * v[i].to(tl.float32)
            out = (weight * h).to(y.dtype.element_ty)
            tl.store(cell + i * D, out, mask=live)
        v, w, u = next_v, next_w, next_u
    if i_s == NS - 1:
        tl.store(after + i_b.to(tl.int64) * D + d, h, mask=d < D)


@triton.jit(do_not_specialize=["T", "NS", "S"])
def _gradients(
    x, dy, g, b, c, marks, adjoints, dx, dg, db, sums, dinitial, T, NS, S,
    D: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """All gradients of a segment, those of constant b and c as sums over it, ``[2, D]``."""
    i_d, i_s, i_b = _place(tl.program_id(0), D, NS, BD)
    d = i_d * BD + tl.arange(0, BD)
    first = i_b.to(tl.int64) * T + i_s * S
    count = tl.minimum(S, T - i_s * S)
    at = (i_b.to(tl.int64) * NS + i_s) * D + d
    tiles = tl.cdiv(count, BT)
    v, w, u, e = (
        _nothing(x, d, D, EACH, BT),
        _nothing(g, d, D, EACH, BT),
        _nothing(b, d, D, BM, BT),
        _nothing(dy, d, D, EACH, BT),
    )
    mark = marks + (i_b.to(tl.int64) * tl.cdiv(T, BT) + i_s * (S // BT) + tiles) * D + d
    h = tl.zeros([BD], dtype=tl.float32)
    k = tl.load(adjoints + at, mask=d < D, other=0.0)
    weight = tl.load(c + d, mask=d < D, other=0.0).to(tl.float32)
    sum_b = tl.zeros([BD], dtype=tl.float32)
    sum_c = sum_b
    for j in range(tiles * BT, -BT, -BT):
        row, left = first + j - BT, tl.where(j > 0, count - j + BT, 0)
        next_v, next_w = _tile(x, row, left, d, D, BT), _tile(g, row, left, d, D, BT)
        next_e, next_u = _tile(dy, row, left, d, D, BT), u
        if BM == EACH:
            next_u = _tile(b, row, left, d, D, BT)
        mark -= D
        next_h = tl.load(mark, mask=(d < D) & (j > 0), other=0.0)
        decays, kept = (), ()
        for i in tl.static_range(BT):
            a = tl.exp(tl.maximum(w[i], _FLOOR))
            h = a * h
            decays += (a,)  # type: ignore[assignment]
            kept += (tl.where(w[i] >= _FLOOR, h, 0.0),)  # type: ignore[assignment]
            h += u[i].to(tl.float32) * v[i].to(tl.float32)
            sum_c += h * e[i].to(tl.float32)
        cell = (first + j) * D + d
        for i in tl.static_range(BT - 1, -1, -1):
            live = (d < D) & (i < count - j)
            l = k + weight * e[i].to(tl.float32)
            k = decays[i] * l
            out = (u[i].to(tl.float32) * l).to(dx.dtype.element_ty)
            tl.store(dx + cell + i * D, out, mask=live)
            tl.store(dg + cell + i * D, l * kept[i], mask=live)
            write = l * v[i].to(tl.float32)
            if BM == EACH:
                tl.store(db + cell + i * D, write.to(db.dtype.element_ty), mask=live)
            else:
                sum_b += write
        v, w, e, u, h = next_v, next_w, next_e, next_u, next_h
    part = (i_b.to(tl.int64) * NS + i_s) * 2 * D + d
    tl.store(sums + part, sum_b, mask=d < D)
    tl.store(sums + part + D, sum_c, mask=d < D)
    if i_s == 0:
        tl.store(dinitial + i_b.to(tl.int64) * D + d, k, mask=d < D)


class Shape(NamedTuple):
    """What launches depend on; ``each``: whether b varies."""

    batch: int
    time: int
    channels: int
    each: bool

    @classmethod
    def of(cls, x: Tensor, b: Tensor) -> Shape:
        """The shape of a call."""
        batch, time, channels = x.shape
        return cls(batch, time, channels, b.dim() == 4)


@planned
def _cut(shape: Shape, name: str) -> tuple[int, int]:
    """Segments of a row and their tokens, as the kernel ``outputs`` or ``gradients`` wants them."""
    wanted = _choice(name)["lanes"] // (shape.batch * shape.channels)
    length = SEGMENT * cdiv(shape.time, SEGMENT * max(1, wanted))
    return cdiv(shape.time, length), length


def _choice(name: str) -> Choice:
    """How a kernel is launched."""
    return choose(f"diagonal gates {name}", RULES[name])


@planned
def _launch(shape: Shape, name: str, pass_: str) -> Launch:
    """A launch of a kernel over channel blocks of all segments, in the pass that cuts them."""
    segments, length = _cut(shape, pass_)
    chosen = _choice(name)
    kernel = {"outputs": _outputs, "gradients": _gradients, "totals": _totals}[name]
    constants: dict[str, Any] = {
        "D": shape.channels,
        "BM": (EACH if shape.each else CONSTANT).value,
        "MT": _choice("gradients")["BT"],
        **chosen,
    }
    if name == "totals" and pass_ == "gradients":
        constants |= {"BM": CONSTANT.value, "BACK": True}
    elif name == "totals":
        constants["BACK"] = False
    elif name == "outputs":  # whole steps between states that are kept
        constants["BT"] = max(constants["BT"], constants["MT"])
    names = (*kernel.arg_names, "num_warps")
    grid = (cdiv(shape.channels, chosen["BD"]) * segments * shape.batch,)
    wanted = {n: v for n, v in constants.items() if n in names}
    return Launch(kernel, grid, shape.time, segments, length, **wanted)


def fits(b: Tensor, c: Tensor, g: Tensor, theta: Tensor | None, state: Tensor) -> bool:
    """Whether inputs are such ones; others are for ``kernel.py``."""
    each = (state.shape[1], 1)
    selective = g.dim() == 4 and g.shape[2:] == each
    return theta is None and selective and b.shape[-2:] == each and c.shape == each


def allocate(x: Tensor) -> Tensor:
    """Memory for the states that are kept, of tokens 0, MT, 2 MT, ..., float32."""
    batch, time, channels = x.shape
    kept = cdiv(time, _choice("gradients")["BT"])
    return x.new_empty((batch, kept, channels), dtype=torch.float32)


def _entering(shape: Shape, pass_: str, x: Tensor, g: Tensor, b: Tensor, first: Tensor) -> Tensor:
    """What enters every segment of a pass; ``first`` ``[B, D, 1]`` what enters its first one."""
    segments, _ = _cut(shape, pass_)
    if segments == 1:
        return first
    ends, products = (first.new_empty(shape.batch, segments, 1, 1, shape.channels) for _ in "ep")
    _launch(shape, "totals", pass_)(x, g, b, ends, products)
    return scan(first, ends, products, reverse=pass_ == "gradients")


def forward(
    x: Tensor, b: Tensor, c: Tensor, g: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``y`` in the dtype of ``x``, the final state, float32, and the states that are kept."""
    shape, dtype = Shape.of(x, b), state.dtype
    x, g, b, c, state = (v.contiguous() for v in (x, g.float(), b, c, state.float()))
    starts = _entering(shape, "outputs", x, g, b, state)
    y, after, marks = torch.empty_like(x), torch.empty_like(state), allocate(x)
    _launch(shape, "outputs", "outputs")(x, g, b, c, starts, y, after, marks)
    return y, after.to(dtype), marks


def backward(
    given: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    dy: Tensor,
    dstate: Tensor,
    marks: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients as ``kernel_backward.backward`` gives them.

    Args:
        given: x, b, c, g and state, as ``forward`` took them.
        dy: Gradient of ``y``.
        dstate: Gradient of the final state.
        marks: The states that ``forward`` kept.
    """
    shape = Shape.of(*given[:2])
    dtypes = [v.dtype for v in given]
    x, b, c, g = (v.contiguous() for v in given[:4])
    dy, g, last = dy.contiguous(), g.float(), dstate.float().contiguous()
    adjoints = _entering(shape, "gradients", dy, g, c, last)
    dx, dg, db, dinitial = (torch.empty_like(v) for v in (x, g, b, last))
    segments, _ = _cut(shape, "gradients")
    sums = marks.new_empty(shape.batch * segments, 2, shape.channels, 1)
    gradients = _launch(shape, "gradients", "gradients")
    gradients(x, dy, g, b, c, marks, adjoints, dx, dg, db, sums, dinitial)
    sum_b, sum_c = sums.sum(0) if len(sums) > 1 else sums[0]
    found = (dx, db if shape.each else sum_b, sum_c, dg, dinitial)
    dx, db, dc, dg, dinitial = (v.to(dtype) for v, dtype in zip(found, dtypes, strict=True))
    return dx, db, dc, dg, g.new_empty(0), dinitial
