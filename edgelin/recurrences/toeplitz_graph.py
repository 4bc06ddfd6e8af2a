"""The one-chunk form of a recurrence with constant weights in ONNX, T = 1 .. chunk in one call.

Tables of what a token does l tokens later are given, made of weights alone:

    y_i = sum_{j <= i} taps_{i-j} x_j + reads_i . h ;  written = sum_j writes_{T-1-j} x_j
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgelin.recurrences.graph import Graph


def mix(
    graph: Graph,
    x: ir.Value,
    taps: ir.Value,
    tables: tuple[ir.Value, ir.Value],
    read: ir.Value,
    sizes: tuple[int, int],
) -> tuple[ir.Value, ir.Value]:
    """Write y without what the caller adds, and the sum over time that makes the new state.

    Products, then sums: a MatMul of D small matrices takes 3 times as long at T = 1. The sum over
    time is a product with ones, because onnxruntime's ReduceSum over it is 10 times slower.

    Args:
        graph: Node builder.
        x: ``[B, T, D]``.
        taps: ``[1, chunk + 1, D]`` (a matrix would be quantised as an embedding); the last row is
            0, for j > i.
        tables: reads and writes, each ``[chunk or more, D, width]``; may be one value.
        read: What the rows of reads are multiplied with, ``[B, D, width]``.
        sizes: D and width.

    Returns:
        ``y`` ``[B, T, D]`` and ``written`` ``[B, D, width]``.
    """
    op = graph.op
    channels, width = sizes
    lags, backward, ones, ends = graph.shared("lags", lambda: _lags(graph))
    cut = {
        table: op("Slice", [table, graph.ints(0), ends, graph.ints(0)])
        for table in dict.fromkeys(tables)
    }
    reads, writes = (cut[table] for table in tables)
    carried = op("Mul", [reads, op("Unsqueeze", [read, graph.ints(1)])])
    carried = op("ReduceSum", [carried, graph.ints(3)], keepdims=0)
    toeplitz = op("Gather", [taps, lags], axis=1)  # [1, T, T, D]
    within = op("Mul", [toeplitz, op("Unsqueeze", [x, graph.ints(1)])])
    within = op("ReduceSum", [within, graph.ints(2)], keepdims=0)
    latest_first = op("Gather", [x, backward], axis=1)
    written = op("Mul", [writes, op("Unsqueeze", [latest_first, graph.ints(3)])])
    flat = op("Reshape", [written, graph.ints(0, 0, channels * width)])
    written = op("Reshape", [op("MatMul", [ones, flat]), graph.ints(0, channels, width)])
    return op("Add", [within, carried]), written


def _lags(graph: Graph) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """Rows of the taps ``[T, T]``, the times T - 1 .. 0, ones ``[1, T]``, and T as ``[1]``."""
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
    ones = graph.cut_to_time(np.ones((1, chunk)), by_time[:, None], (1,))
    return square, backward, ones, ends
