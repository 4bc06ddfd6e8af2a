"""The diagonal recurrence in ONNX, with standard operators or com.microsoft LinearAttention.

h_t = Λ_t h_{t-1} + b_t x_t ;  y_t = Re(sum_n c_t h_t), T = 1 .. chunk in one call.

Constant weights: with P the table of powers Λ^0 .. Λ^chunk (made of weights only, so that a runtime
computes it once, at load),

    y_i = sum_{j <= i} Re(sum_n c Λ^{i-j} b) x_j + Re(sum_n Λ^i (c Λ h))
    h'  = Λ^T h + b sum_j Λ^{T-1-j} x_j

Selective weights: the log-step scan of ``chunked.py``. Shifts are gathers along time whose first
entries repeat; the transition that multiplies them is zero there, and stays zero as products form.

A complex number is two planes; P and h hold (re, im) pairs on the last axis, the scan stacks them
on a new first axis.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgelin.recurrences import MIN_LOG_DECAY
from edgelin.recurrences.graph import Graph


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
    width = state_dim if theta is None else 2 * state_dim
    powers = _powers(graph, g, theta, channels, width)
    if theta is None:
        return _constant(graph, x, b, c, powers, state, channels=channels, width=width)
    return _complex_constant(graph, x, b, c, powers, state, channels=channels, width=width)


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
    full = graph.op("Concat", [graph.op("Shape", [x]), graph.ints(state_dim)], axis=0)

    def packed(weights: ir.Value) -> ir.Value:
        everywhere = graph.op("Expand", [weights, full])
        return graph.op("Reshape", [everywhere, graph.ints(0, 0, channels * state_dim)])  # type: ignore[no-any-return]

    y, after = graph.op(
        "LinearAttention",
        [
            packed(c),
            packed(b),
            x,
            graph.op("Reshape", [state, graph.ints(0, channels, state_dim, 1)]),
            packed(_clamped(graph, g)),
        ],
        outputs=2,
        domain="com.microsoft",
        q_num_heads=channels,
        kv_num_heads=channels,
        update_rule="gated",
        scale=1.0,
    )
    return y, graph.op("Reshape", [after, graph.ints(0, channels, state_dim)])


def _is_selective(*weights: ir.Value) -> bool:
    """Whether any weight depends on the token: then it has 4 axes, or 5 with pairs."""
    return any(_rank(v) > 3 for v in weights)


def _rank(value: ir.Value) -> int:
    """Number of axes; the tracer knows it for every value."""
    if value.shape is None:
        raise ValueError(f"shape of {value.name} is not known")
    return value.shape.rank()


def _clamped(graph: Graph, g: ir.Value) -> ir.Value:
    """g, at least MIN_LOG_DECAY."""
    return graph.op("Max", [g, graph.const(MIN_LOG_DECAY)])  # type: ignore[no-any-return]


# ---- constant weights


def _powers(
    graph: Graph, g: ir.Value, theta: ir.Value | None, channels: int, width: int
) -> ir.Value:
    """Λ^l ``[D, chunk + 1, N]``, complex ``[D, chunk + 1, 2 N]`` with (re, im) side by side.

    In float64: the angle l theta reaches hundreds of turns, of which float32 keeps four digits. Cos
    and Sin then are float32, because onnxruntime < 1.32 has no others.
    """
    op, double, single = graph.op, ir.DataType.DOUBLE, ir.DataType.FLOAT
    steps = graph.const(np.arange(graph.chunk + 1).reshape(-1, 1), np.float64)

    def times_steps(v: ir.Value) -> ir.Value:
        wide = op("Cast", [op("Unsqueeze", [v, graph.ints(1)])], to=double)
        return op("Mul", [wide, steps])  # type: ignore[no-any-return]

    magnitude = op("Exp", [times_steps(_clamped(graph, g))])
    if theta is None:
        return op("Cast", [magnitude], to=single)  # type: ignore[no-any-return]
    turn = graph.const(2 * np.pi, np.float64)
    angle = op("Cast", [op("Mod", [times_steps(theta), turn], fmod=1)], to=single)
    magnitude = op("Cast", [magnitude], to=single)
    planes = [
        op("Unsqueeze", [op("Mul", [magnitude, op(part, [angle])]), graph.ints(3)])
        for part in ("Cos", "Sin")
    ]
    pairs = op("Concat", planes, axis=3)
    return op("Reshape", [pairs, graph.ints(channels, -1, width)])  # type: ignore[no-any-return]


def _constant(
    graph: Graph,
    x: ir.Value,
    b: ir.Value,
    c: ir.Value,
    powers: ir.Value,
    state: ir.Value,
    *,
    channels: int,
    width: int,
) -> tuple[ir.Value, ir.Value]:
    """Constant real weights."""
    op = graph.op
    first = op("Gather", [powers, graph.const(1, np.int64)], axis=1)
    last = op("Gather", [powers, graph.time_scalar()], axis=1)
    taps = _taps(graph, powers, op("Mul", [b, c]))
    read = op("Mul", [state, op("Mul", [c, first])])
    y, written = _mix(graph, x, powers, taps, read, (channels, width))
    write = op("Reshape", [written, graph.ints(0, channels, width)])
    kept = op("Mul", [state, last])
    return y, op("Add", [kept, op("Mul", [write, b])])


def _complex_constant(
    graph: Graph,
    x: ir.Value,
    b: ir.Value,
    c: ir.Value,
    powers: ir.Value,
    state: ir.Value,
    *,
    channels: int,
    width: int,
) -> tuple[ir.Value, ir.Value]:
    """Constant complex weights; pairs are (re, im) on a last axis of 2."""
    op = graph.op
    pair = graph.ints(channels, width // 2, 2)

    def power(index: ir.Value) -> ir.Value:
        row = op("Gather", [powers, index], axis=1)
        return op("Reshape", [row, pair])  # type: ignore[no-any-return]

    conjugate = graph.const([1, -1])
    product = op("Mul", [_times(graph, b, c), conjugate])
    taps = _taps(graph, powers, op("Reshape", [product, graph.ints(channels, width)]))
    # Re(p q) is the sum over the pair of p times the conjugate of q.
    weights = _times(graph, c, power(graph.const(1, np.int64)))
    read = op("Mul", [_times(graph, weights, state), conjugate])
    y, written = _mix(graph, x, powers, taps, read, (channels, width))
    write = op("Reshape", [written, graph.ints(0, channels, width // 2, 2)])
    kept = _times(graph, power(graph.time_scalar()), state)
    return y, op("Add", [kept, _times(graph, b, write)])


def _times(graph: Graph, p: ir.Value, q: ir.Value) -> ir.Value:
    """Complex product of pairs; what depends on p alone is left to constant folding."""
    op = graph.op
    real = op("Gather", [p, graph.ints(0, 0)], axis=-1)
    imag = op("Mul", [op("Gather", [p, graph.ints(1, 1)], axis=-1), graph.const([-1, 1])])
    turned = op("Gather", [q, graph.ints(1, 0)], axis=-1)
    return op("Add", [op("Mul", [real, q]), op("Mul", [imag, turned])])  # type: ignore[no-any-return]


def _taps(graph: Graph, powers: ir.Value, weights: ir.Value) -> ir.Value:
    """Re(sum_n Λ^l b c) ``[chunk + 1, D]``; the last row is 0, for j > i."""
    op = graph.op
    whole = op("Mul", [powers, op("Unsqueeze", [weights, graph.ints(1)])])
    sums = op("ReduceSum", [whole, graph.ints(-1)], keepdims=0)
    mask = np.ones((graph.chunk + 1, 1))
    mask[-1] = 0
    return op("Mul", [op("Transpose", [sums], perm=[1, 0]), graph.const(mask)])  # type: ignore[no-any-return]


def _mix(
    graph: Graph,
    x: ir.Value,
    powers: ir.Value,
    taps: ir.Value,
    read: ir.Value,
    sizes: tuple[int, int],
) -> tuple[ir.Value, ir.Value]:
    """y ``[B, T, D]`` and sum_j Λ^{T-1-j} x_j ``[B, D, 1, width]``; ``read`` is c Λ h."""
    op = graph.op
    channels, width = sizes
    lags, backward, ends = graph.shared("diagonal_lags", lambda: _lags(graph))
    table = op("Slice", [powers, graph.ints(0), ends, graph.ints(1)])
    column = op("Reshape", [read, graph.ints(0, channels, width, 1)])
    carried = op("Squeeze", [op("MatMul", [table, column]), graph.ints(3)])
    toeplitz = op("Gather", [taps, lags], axis=0)  # [T, T, D]
    products = op("Mul", [toeplitz, op("Unsqueeze", [x, graph.ints(1)])])
    within = op("ReduceSum", [products, graph.ints(2)], keepdims=0)
    y = op("Add", [within, op("Transpose", [carried], perm=[0, 2, 1])])
    latest_first = op("Transpose", [op("Gather", [x, backward], axis=1)], perm=[0, 2, 1])
    row = op("Unsqueeze", [latest_first, graph.ints(2)])
    return y, op("MatMul", [row, table])


def _lags(graph: Graph) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Rows of the taps ``[T, T]``, the times T - 1 .. 0, and T as ``[1]``."""
    chunk = graph.chunk
    steps = np.arange(chunk)
    lags = steps[:, None] - steps
    lags[lags < 0] = chunk
    by_time = np.arange(chunk + 1)
    ends = graph.by_time(by_time[:, None])
    square = graph.op(
        "Slice",
        [
            graph.const(lags, np.int64),
            graph.ints(0, 0),
            graph.by_time(np.stack([by_time, by_time], axis=1)),
        ],
    )
    backward = graph.op(
        "Slice",
        [
            graph.const(steps[::-1], np.int64),
            graph.by_time(chunk - by_time[:, None]),
            graph.ints(chunk),
        ],
    )
    return square, backward, ends


# ---- selective weights


def _shifts(graph: Graph) -> tuple[list[ir.Value], ir.Value, ir.Value]:
    """For every shift s the times max(t - s, 0); a 0 at the first token; pads up to T - 1."""
    chunk = graph.chunk
    steps = np.arange(chunk)
    ends = graph.by_time(np.arange(chunk + 1)[:, None])
    shifts, s = [], 1
    while s < chunk:
        table = graph.const(np.maximum(steps - s, 0), np.int64)
        shifts.append(graph.op("Slice", [table, graph.ints(0), ends]))
        s *= 2
    later = graph.op(
        "Slice", [graph.const((steps > 0).reshape(-1, 1, 1)), graph.ints(0), ends, graph.ints(0)]
    )
    pads = np.zeros((chunk + 1, 2), np.int64)
    pads[1:, 1] = steps
    return shifts, later, graph.by_time(pads)


def _scan(
    graph: Graph, x: ir.Value, b: ir.Value, c: ir.Value, g: ir.Value, state: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Selective real weights."""
    op = graph.op
    shifts, later, pads = graph.shared("diagonal_shifts", lambda: _shifts(graph))
    transition = op("Exp", [_clamped(graph, g)])
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
    magnitude = op("Exp", [_clamped(graph, g)])
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
