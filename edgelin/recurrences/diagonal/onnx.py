"""The diagonal recurrence in ONNX, with standard operators or com.microsoft LinearAttention.

h_t = Λ_t h_{t-1} + b_t x_t ;  y_t = Re(sum_n c_t h_t), T = 1 .. chunk in one call.

Constant weights: with P the table of powers Λ^0 .. Λ^chunk (made of weights only, so that a runtime
computes it once, at load),

    y_i = sum_{j <= i} Re(sum_n c Λ^{i-j} b) x_j + Re(sum_n Λ^i (c Λ h))
    h'  = Λ^T h + b sum_j Λ^{T-1-j} x_j

Selective weights: the log-step scan of ``chunked.py``. Shifts are gathers along time whose first
entries repeat; the transition that multiplies them is zero there, and stays zero as products form.

A complex number is two values here: two tensors, halves of an axis in P, planes of a new first axis
in the scan.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgelin.recurrences.decay_graph import floored, linear_attention, scan_tables
from edgelin.recurrences.graph import Graph
from edgelin.recurrences.toeplitz_graph import mix


def plain(
    graph: Graph,
    x: ir.Value,
    b: ir.Value,
    c: ir.Value,
    g: ir.Value,
    theta: ir.Value | None,
    state: ir.Value,
    *,
    channels: int,
    state_dim: int,
) -> tuple[ir.Value, ir.Value]:
    """Write the one-chunk form: T from 1 to ``graph.chunk``, a larger T fails in the runtime.

    Args:
        graph: Node builder.
        x: ``[B, T, D]``.
        b: ``[D, N]`` or ``[B, T, D or 1, N]``, complex with a last axis of 2; its rank is read off
            the value's shape, as for ``c`` and ``g``.
        c: As ``b``.
        g: ``[D, N]`` or ``[B, T, D or 1, N]``.
        theta: As ``g``, or None.
        state: ``[B, D, N]``, complex ``[B, D, N, 2]``.
        channels: D.
        state_dim: N.

    Returns:
        ``y`` ``[B, T, D]`` and the state after the last token.
    """
    if _is_selective(b, c, g):
        if theta is None:
            return _scan(graph, x, b, c, g, state)
        return _complex_scan(graph, x, b, c, g, theta, state)
    tables = _powers(graph, g, theta)
    if theta is None:
        return _constant(graph, x, b, c, tables, state, (channels, state_dim))
    return _complex_constant(graph, x, b, c, tables, state, (channels, 2 * state_dim))


def fused(
    graph: Graph,
    x: ir.Value,
    b: ir.Value,
    c: ir.Value,
    g: ir.Value,
    theta: ir.Value | None,
    state: ir.Value,
    *,
    channels: int,
    state_dim: int,
) -> tuple[ir.Value, ir.Value]:
    """Write com.microsoft LinearAttention where it pays; values as in :func:`plain`.

    Real selective weights: a gated recurrence of D heads with N keys and one value each, any T.
    Otherwise the same as :func:`plain`, with its limit on T. For constant weights LinearAttention
    would read keys, queries and decays ``[B, T, D, N]`` that all tokens share. A complex Λ is a
    gated recurrence only in a frame that turns with the summed angle, which float32 loses over a
    long call.
    """
    sizes = {"channels": channels, "state_dim": state_dim}
    if theta is not None or not _is_selective(b, c, g):
        return plain(graph, x, b, c, g, theta, state, **sizes)
    matrix = graph.op("Reshape", [state, graph.ints(0, channels, state_dim, 1)])
    key, query, decay = (_packed(graph, v, x, channels, state_dim) for v in (b, c, g))
    inputs = [query, key, x, matrix, decay]
    y, after = linear_attention(graph, inputs, heads=channels, rule="gated", scale=1.0)
    return y, graph.op("Reshape", [after, graph.ints(0, channels, state_dim)])


def _packed(
    graph: Graph, weights: ir.Value, x: ir.Value, channels: int, state_dim: int
) -> ir.Value:
    """Real weights as ``[B, T, D N]``; where they are constant, ``x`` has B and T."""
    op, size = graph.op, channels * state_dim
    if _rank(weights) == 2:
        full = op("Concat", [op("Shape", [x], end=2), graph.ints(size)], axis=0)
        return op("Expand", [op("Reshape", [weights, graph.ints(size)]), full])  # type: ignore[no-any-return]
    if weights.shape is not None and weights.shape[2] != channels:
        weights = op("Expand", [weights, graph.ints(1, 1, channels, 1)])
    return op("Reshape", [weights, graph.ints(0, 0, size)])  # type: ignore[no-any-return]


def _is_selective(*weights: ir.Value) -> bool:
    """Whether any weight depends on the token: then it has 4 axes, or 5 with pairs."""
    return any(_rank(v) > 3 for v in weights)


def _rank(value: ir.Value) -> int:
    """Number of axes; the tracer knows it for every value."""
    if value.shape is None:
        raise ValueError(f"shape of {value.name} is not known")
    return value.shape.rank()


# ---- constant weights


# Λ^l [chunk + 1, D, N], complex [chunk + 1, D, 2 N]: real parts, then imaginary ones; and a part of
# 0 or 1 [chunk + 1, D, N] of it with the rest, in the shape of Λ^l.
Tables = tuple[ir.Value, ir.Value, ir.Value]


def _powers(graph: Graph, g: ir.Value, theta: ir.Value | None) -> Tables:
    """Λ^l, whole and in two parts.

    In float64: the angle l theta reaches hundreds of turns, of which float32 keeps four digits. Cos
    and Sin then are float32, because onnxruntime < 1.32 has no others. Near 1, float32 would give
    a decay of 1e-3 a token an error of 3e-5, so that the state keeps 1 h and adds (Λ^l - 1) h.
    """
    op, double, single = graph.op, ir.DataType.DOUBLE, ir.DataType.FLOAT
    steps = graph.const(np.arange(graph.chunk + 1).reshape(-1, 1, 1), np.float64)

    def times_steps(v: ir.Value) -> ir.Value:
        return op("Mul", [op("Cast", [v], to=double), steps])  # type: ignore[no-any-return]

    exact = op("Exp", [times_steps(floored(graph, g))])
    magnitude = op("Cast", [exact], to=single)
    less_one = op("Cast", [op("Sub", [exact, graph.const(1, np.float64)])], to=single)
    real = magnitude
    if theta is not None:
        turn = graph.const(2 * np.pi, np.float64)
        angle = op("Cast", [op("Mod", [times_steps(theta), turn], fmod=1)], to=single)
        real, imag = (op("Mul", [magnitude, op(part, [angle])]) for part in ("Cos", "Sin"))
        half = op("Sin", [op("Mul", [angle, graph.const(0.5)])])
        less_one = op("Mul", [less_one, op("Cos", [angle])])
        less_one = op("Sub", [less_one, op("Mul", [graph.const(2), op("Mul", [half, half])])])
    near = op("Greater", [real, graph.const(0.5)])  # elsewhere Λ^l - 1 would lose digits
    kept, rest = op("Cast", [near], to=single), op("Where", [near, less_one, real])
    if theta is None:
        return real, kept, rest
    powers, rest = (op("Concat", [re, imag], axis=2) for re in (real, rest))
    return powers, kept, rest


def _constant(
    graph: Graph,
    x: ir.Value,
    b: ir.Value,
    c: ir.Value,
    tables: Tables,
    state: ir.Value,
    sizes: tuple[int, int],
) -> tuple[ir.Value, ir.Value]:
    """Constant real weights."""
    op = graph.op
    powers = tables[0]
    first = op("Gather", [powers, graph.const(1, np.int64)])
    one, rest = (op("Gather", [table, graph.time_scalar()]) for table in tables[1:])
    read = op("Mul", [state, op("Mul", [c, first])])
    taps = _taps(graph, powers, op("Mul", [b, c]))
    y, written = mix(graph, x, taps, (powers, powers), read, sizes)
    change = op("Add", [op("Mul", [state, rest]), op("Mul", [written, b])])
    return y, op("Add", [op("Mul", [state, one]), change])


def _complex_constant(
    graph: Graph,
    x: ir.Value,
    b: ir.Value,
    c: ir.Value,
    tables: Tables,
    state: ir.Value,
    sizes: tuple[int, int],
) -> tuple[ir.Value, ir.Value]:
    """Constant complex weights. Re(p q) is the sum of p times (re, -im) of q."""
    op = graph.op
    powers = tables[0]
    h, b_pair, c_pair = (_unstack(graph, v) for v in (state, b, c))
    first = _halves(graph, op("Gather", [powers, graph.const(1, np.int64)]), 1)
    one, rest = (op("Gather", [table, graph.time_scalar()]) for table in tables[1:])
    real, imag = _times(graph, b_pair, c_pair)
    taps = _taps(graph, powers, op("Concat", [real, op("Neg", [imag])], axis=1))
    real, imag = _times(graph, c_pair, first)
    straight = op("Mul", [op("Concat", h, axis=2), op("Concat", [real, op("Neg", [real])], axis=1)])
    crossed = op("Mul", [op("Concat", h[::-1], axis=2), op("Concat", [imag, imag], axis=1)])
    read = op("Sub", [straight, crossed])
    y, written = mix(graph, x, taps, (powers, powers), read, sizes)
    turned = _times(graph, _halves(graph, rest, 1), h)
    added = _times(graph, b_pair, _halves(graph, written, 2))
    change = [op("Add", [k, v]) for k, v in zip(turned, added, strict=True)]
    after = [op("Add", [op("Mul", [v, one]), d]) for v, d in zip(h, change, strict=True)]
    return y, op("Concat", [op("Unsqueeze", [v, graph.ints(3)]) for v in after], axis=3)


Pair = tuple[ir.Value, ir.Value]


def _unstack(graph: Graph, pairs: ir.Value) -> Pair:
    """Real and imaginary parts off the last axis."""
    axis = graph.ints(_rank(pairs) - 1)
    cut = [graph.op("Slice", [pairs, graph.ints(i), graph.ints(i + 1), axis]) for i in (0, 1)]
    real, imag = (graph.op("Squeeze", [v, axis]) for v in cut)
    return real, imag


def _halves(graph: Graph, v: ir.Value, axis: int) -> Pair:
    """Real and imaginary parts, one after the other on an axis."""
    return graph.op("Split", [v], outputs=2, axis=axis, num_outputs=2)  # type: ignore[no-any-return]


def _times(graph: Graph, p: Pair, q: Pair) -> Pair:
    """Complex product."""
    op = graph.op
    real = op("Sub", [op("Mul", [p[0], q[0]]), op("Mul", [p[1], q[1]])])
    return real, op("Add", [op("Mul", [p[0], q[1]]), op("Mul", [p[1], q[0]])])


def _taps(graph: Graph, powers: ir.Value, weights: ir.Value) -> ir.Value:
    """Re(sum_n Λ^l b c) ``[1, chunk + 1, D]``; the last row is 0, for j > i."""
    op = graph.op
    sums = op("ReduceSum", [op("Mul", [powers, weights]), graph.ints(2)], keepdims=0)
    mask = np.ones((1, graph.chunk + 1, 1))
    mask[:, -1] = 0
    return op("Mul", [sums, graph.const(mask)])  # type: ignore[no-any-return]


# ---- selective weights


def _shifts(graph: Graph) -> tuple[list[ir.Value], ir.Value, ir.Value]:
    """Those of ``scan_tables``, and a 0 at the first token."""
    shifts, pads = scan_tables(graph)
    steps = np.arange(graph.chunk)
    ends = graph.by_time(np.arange(graph.chunk + 1)[:, None])
    later = graph.op(
        "Slice", [graph.const((steps > 0).reshape(-1, 1, 1)), graph.ints(0), ends, graph.ints(0)]
    )
    return shifts, later, pads


def _scan(
    graph: Graph, x: ir.Value, b: ir.Value, c: ir.Value, g: ir.Value, state: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Selective real weights."""
    op = graph.op
    shifts, later, pads = graph.shared("diagonal_shifts", lambda: _shifts(graph))
    transition = op("Exp", [floored(graph, g)])
    first = transition
    if _rank(g) == 4:
        first = op("Gather", [transition, graph.ints(0)], axis=1)
    carried = op("Mul", [first, op("Unsqueeze", [state, graph.ints(1)])])
    u = op("Mul", [b, op("Unsqueeze", [x, graph.ints(3)])])
    u = op("Add", [u, op("Pad", [carried, pads, None, graph.ints(1)])])
    a = op("Mul", [transition, later])
    if _rank(g) == 2:
        a = op("Unsqueeze", [a, graph.ints(0)])
    for i, shift in enumerate(shifts):
        u = op("Add", [u, op("Mul", [a, op("Gather", [u, shift], axis=1)])])
        if i + 1 < len(shifts):
            a = op("Mul", [a, op("Gather", [a, shift], axis=1)])
    y = op("ReduceSum", [op("Mul", [c, u]), graph.ints(3)], keepdims=0)
    return y, op("Gather", [u, graph.const(-1, np.int64)], axis=1)


def _complex_scan(
    graph: Graph,
    x: ir.Value,
    b: ir.Value,
    c: ir.Value,
    g: ir.Value,
    theta: ir.Value,
    state: ir.Value,
) -> tuple[ir.Value, ir.Value]:
    """Selective complex weights; planes (re, im) on a first axis: ``[2, B, T, D, N]``."""
    op = graph.op
    shifts, later, pads = graph.shared("diagonal_shifts", lambda: _shifts(graph))
    transition = _transition_planes(graph, g, theta)
    first = transition
    if _rank(g) == 4:
        first = op("Gather", [transition, graph.ints(0)], axis=2)
    start = op("Transpose", [state], perm=[3, 0, 1, 2])
    carried = _times_planes(graph, first, op("Unsqueeze", [start, graph.ints(2)]))
    u = op("Mul", [_planes(graph, b), op("Unsqueeze", [x, graph.ints(3)])])
    u = op("Add", [u, op("Pad", [carried, pads, None, graph.ints(2)])])
    a = op("Mul", [transition, later])
    for i, shift in enumerate(shifts):
        u = op("Add", [u, _times_planes(graph, a, op("Gather", [u, shift], axis=2))])
        if i + 1 < len(shifts):
            a = _times_planes(graph, a, op("Gather", [a, shift], axis=2))
    conjugate = graph.const(np.reshape([1, -1], (2, 1, 1, 1, 1)))
    read = op("Mul", [_planes(graph, c), conjugate])
    y = op("ReduceSum", [op("Mul", [read, u]), graph.ints(0, 4)], keepdims=0)
    last = op("Gather", [u, graph.const(-1, np.int64)], axis=2)
    return y, op("Transpose", [last], perm=[1, 2, 3, 0])


def _transition_planes(graph: Graph, g: ir.Value, theta: ir.Value) -> ir.Value:
    """Λ ``[2, B or 1, T or 1, D or 1, N]``."""
    op = graph.op
    magnitude = op("Exp", [floored(graph, g)])
    axes = graph.ints(0) if _rank(g) == 4 else graph.ints(0, 1, 2)
    planes = [
        op("Unsqueeze", [op("Mul", [magnitude, op(turn, [theta])]), axes])
        for turn in ("Cos", "Sin")
    ]
    return op("Concat", planes, axis=0)  # type: ignore[no-any-return]


def _planes(graph: Graph, pairs: ir.Value) -> ir.Value:
    """Weights with (re, im) on the last axis as ``[2, B or 1, T or 1, D or 1, N]``."""
    op = graph.op
    if _rank(pairs) == 5:
        return op("Transpose", [pairs], perm=[4, 0, 1, 2, 3])  # type: ignore[no-any-return]
    planes = op("Transpose", [pairs], perm=[2, 0, 1])
    return op("Unsqueeze", [planes, graph.ints(1, 2)])  # type: ignore[no-any-return]


def _times_planes(graph: Graph, p: ir.Value, q: ir.Value) -> ir.Value:
    """Complex product of planes on the first axis."""
    op = graph.op
    real = op("Gather", [p, graph.ints(0)], axis=0)
    sign = graph.const(np.reshape([-1, 1], (2, 1, 1, 1, 1)))
    imag = op("Mul", [op("Gather", [p, graph.ints(1)], axis=0), sign])
    turned = op("Gather", [q, graph.ints(1, 0)], axis=0)
    return op("Add", [op("Mul", [real, q]), op("Mul", [imag, turned])])  # type: ignore[no-any-return]
