"""Triton kernels of the diagonal recurrence with one real state a channel and a decay a token.

That is HGRN, RG-LRU, minGRU and RWKV-4: N = 1, a selective real Λ for each channel, constant c, b
constant or one a token and channel. Nothing but memory bounds them, so they read as little as
possible, and early. A thread holds channels; a program takes BD channels through a segment of time
in tiles of BT tokens and asks for the next tile before it works on this one. Segments are only as
many as it takes to fill a GPU: with one, ``_outputs`` reads every input once, and that is all.

Forward, where there are several segments: ``_totals`` runs every one from a zero state, ``scan``
makes the states before them, ``_outputs`` runs them again. Backward: ``_totals`` also keeps the
state before every tile and, of several segments, what a segment hands back to the one before it.
``_gradients`` goes back tile by tile; from the state before a tile it makes those within.
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


@triton.jit(do_not_specialize=["T", "NS", "S", "MARKS"])
def _totals(
    x, dy, g, b, c, initial, ends, products, adjoints, marks, T, NS, S, MARKS,
    D: tl.constexpr, BM: tl.constexpr, BACK: tl.constexpr, ONE: tl.constexpr,
    MT: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Last state of a segment that starts from zero, and the product of its decays.

    With BACK also that state and product every MT tokens, MARKS cells apart, and the gradient of
    the state before the segment when nothing comes from after it. ONE segment a row starts from the
    initial state, and the states every MT tokens are all that counts.
    """
    i_d, i_s, i_b = _place(tl.program_id(0), D, NS, BD)
    d = i_d * BD + tl.arange(0, BD)
    first = i_b.to(tl.int64) * T + i_s * S
    count = tl.minimum(S, T - i_s * S)
    if not BACK:  # nobody asks for the end of the last segment
        count = tl.where(i_s == NS - 1, 0, count)
    at = (i_b.to(tl.int64) * NS + i_s) * D + d
    mark = marks + ((i_b.to(tl.int64) * NS + i_s) * (S // MT) - BT // MT) * D + d
    k = tl.zeros([BD], dtype=tl.float32)
    h, p = k, k + 1.0
    if ONE:
        h = tl.load(initial + at, mask=d < D, other=0.0)
    weight = tl.load(c + d, mask=d < D, other=0.0).to(tl.float32)
    v, w, u, e = (
        _nothing(x, d, D, EACH, BT),
        _nothing(g, d, D, EACH, BT),
        _nothing(b, d, D, BM, BT),
        _nothing(dy, d, D, EACH, BT),
    )
    for j in range(-BT, count, BT):
        row, left = first + j + BT, count - j - BT
        next_v, next_w = _tile(x, row, left, d, D, BT), _tile(g, row, left, d, D, BT)
        next_u, next_e = u, e
        if BM == EACH:
            next_u = _tile(b, row, left, d, D, BT)
        if BACK and not ONE:
            next_e = _tile(dy, row, left, d, D, BT)
        for i in tl.static_range(BT):
            if BACK and i % MT == 0:
                live = (d < D) & (j >= 0) & (j + i < count)
                tl.store(mark, h, mask=live)
                if not ONE:
                    tl.store(mark + MARKS, p, mask=live)
                mark += D
            a = tl.exp(tl.maximum(w[i], _FLOOR))
            h = a * h + u[i].to(tl.float32) * v[i].to(tl.float32)
            p = a * p
            if BACK and not ONE:
                k += p * (weight * e[i].to(tl.float32))
        v, w, u, e = next_v, next_w, next_u, next_e
    if not ONE:
        tl.store(ends + at, h, mask=d < D)
        tl.store(products + at, p, mask=d < D)
        if BACK:
            tl.store(adjoints + at, k, mask=d < D)


@triton.jit(do_not_specialize=["T", "NS", "S"])
def _outputs(
    x, g, b, c, starts, y, after, T, NS, S,
    D: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """y of a segment from the state before it; the last segment writes the final state."""
    i_d, i_s, i_b = _place(tl.program_id(0), D, NS, BD)
    d = i_d * BD + tl.arange(0, BD)
    first = i_b.to(tl.int64) * T + i_s * S
    count = tl.minimum(S, T - i_s * S)
    v, w, u = _nothing(x, d, D, EACH, BT), _nothing(g, d, D, EACH, BT), _nothing(b, d, D, BM, BT)
    weight = tl.load(c + d, mask=d < D, other=0.0).to(tl.float32)
    h = tl.load(starts + (i_b.to(tl.int64) * NS + i_s) * D + d, mask=d < D, other=0.0)
    for j in range(-BT, count, BT):
        row, left = first + j + BT, count - j - BT
        next_v, next_w = _tile(x, row, left, d, D, BT), _tile(g, row, left, d, D, BT)
        next_u = u
        if BM == EACH:
            next_u = _tile(b, row, left, d, D, BT)
        cell, live = y + (first + j) * D + d, (d < D) & (j >= 0)
        for i in tl.static_range(BT):
            a = tl.exp(tl.maximum(w[i], _FLOOR))
            h = a * h + u[i].to(tl.float32) * v[i].to(tl.float32)
            out = (weight * h).to(y.dtype.element_ty)
            tl.store(cell + i * D, out, mask=live & (i < count - j))
        v, w, u = next_v, next_w, next_u
    if i_s == NS - 1:
        tl.store(after + i_b.to(tl.int64) * D + d, h, mask=d < D)


@triton.jit(do_not_specialize=["T", "NS", "S", "MARKS"])
def _gradients(
    x, dy, g, b, c, marks, starts, adjoints, dx, dg, db, sums, dinitial, T, NS, S, MARKS,
    D: tl.constexpr, BM: tl.constexpr, ONE: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
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
    mark = marks + ((i_b.to(tl.int64) * NS + i_s) * (S // BT) + tiles) * D + d
    h = tl.zeros([BD], dtype=tl.float32)
    p = h
    start = tl.load(starts + at, mask=d < D, other=0.0)
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
        if not ONE:
            h += p * start
            p = tl.load(mark + MARKS, mask=(d < D) & (j > 0), other=0.0)
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
    chosen, kernel = (
        _choice(name),
        {"outputs": _outputs, "gradients": _gradients}.get(name, _totals),
    )
    numbers = [shape.time, segments, length]
    constants: dict[str, Any] = {
        "D": shape.channels,
        "BM": (EACH if shape.each else CONSTANT).value,
        "BACK": pass_ == "gradients",
        "ONE": segments == 1,
        "MT": _choice("gradients")["BT"],
        **chosen,
    }
    if name == "totals":  # whole steps between states that are kept
        constants["BT"] = max(constants["BT"], constants["MT"])
    if name != "outputs":
        numbers.append(shape.batch * segments * length // constants["MT"] * shape.channels)
    names = (*kernel.arg_names, "num_warps")
    grid = (cdiv(shape.channels, chosen["BD"]) * segments * shape.batch,)
    return Launch(kernel, grid, *numbers, **{n: v for n, v in constants.items() if n in names})


class Inputs(NamedTuple):
    """Contiguous inputs: x ``[B, T, D]``, g ``[B, T, D, 1]``, b, c ``[D, 1]`` and the state."""

    x: Tensor
    g: Tensor
    b: Tensor
    c: Tensor
    state: Tensor
    shape: Shape

    @classmethod
    def prepare(cls, x: Tensor, b: Tensor, c: Tensor, g: Tensor, state: Tensor) -> Inputs:
        """g and the state in float32."""
        batch, time, channels = x.shape
        shape = Shape(batch, time, channels, b.dim() == 4)
        x, g, b = x.contiguous(), g.float().contiguous(), b.contiguous()
        return cls(x, g, b, c.contiguous(), state.float().contiguous(), shape)

    def per_segment(self, segments: int) -> Tensor:
        """Room for a state of every segment, as ``scan`` takes them."""
        return self.state.new_empty(self.shape.batch, segments, 1, 1, self.shape.channels)


def fits(b: Tensor, c: Tensor, g: Tensor, theta: Tensor | None, state: Tensor) -> bool:
    """Whether inputs are such ones; others are for ``kernel.py``."""
    each = (state.shape[1], 1)
    selective = g.dim() == 4 and g.shape[2:] == each
    return theta is None and selective and b.shape[-2:] == each and c.shape == each


def forward(x: Tensor, b: Tensor, c: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """``y`` in the dtype of ``x`` and the final state, float32, as ``kernel.forward``."""
    given = Inputs.prepare(x, b, c, g, state)
    x, g, b, c, starts, shape = given
    segments, _ = _cut(shape, "outputs")
    if segments > 1:
        ends, products = given.per_segment(segments), given.per_segment(segments)
        totals = _launch(shape, "totals", "outputs")
        totals(x, x, g, b, c, given.state, ends, products, ends, ends)
        starts = scan(given.state, ends, products, reverse=False)
    y, after = torch.empty_like(x), torch.empty_like(given.state)
    _launch(shape, "outputs", "outputs")(x, g, b, c, starts, y, after)
    return y, after.to(state.dtype)


def backward(
    x: Tensor, b: Tensor, c: Tensor, g: Tensor, state: Tensor, dy: Tensor, dstate: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients as ``kernel_backward.backward`` gives them."""
    given = Inputs.prepare(x, b, c, g, state)
    dy, adjoints, shape = dy.contiguous(), dstate.float().contiguous(), given.shape
    segments, length = _cut(shape, "gradients")
    ends, products, handed = (given.per_segment(segments) for _ in range(3))
    tiles = segments * length // _choice("gradients")["BT"]
    marks = ends.new_empty(1 if segments == 1 else 2, shape.batch, tiles, shape.channels)
    inputs = (given.x, dy, given.g, given.b, given.c)
    totals = _launch(shape, "totals", "gradients")
    totals(*inputs, given.state, ends, products, handed, marks)
    starts = given.state
    if segments > 1:
        starts = scan(starts, ends, products, reverse=False)
        adjoints = scan(adjoints, handed, products, reverse=True)
    dx, dg, db, dinitial = (torch.empty_like(v) for v in (*given[:3], given.state))
    sums = marks.new_empty(shape.batch * segments, 2, shape.channels, 1)
    gradients = _launch(shape, "gradients", "gradients")
    gradients(*inputs, marks, starts, adjoints, dx, dg, db, sums, dinitial)
    sum_b, sum_c = sums.sum(0) if len(sums) > 1 else sums[0]
    db = db if shape.each else sum_b.to(b.dtype)
    return dx, db, sum_c.to(c.dtype), dg.to(g.dtype), g.new_empty(0), dinitial.to(state.dtype)
