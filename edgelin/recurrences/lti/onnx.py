"""The LTI recurrence in ONNX with standard operators, T = 1 .. chunk in one call.

    y_i = sum_{j <= i} C A^{i-j} B x_j + C A^{i+1} h ;  h' = A^T h + sum_j A^{T-1-j} B x_j

A, B and C must be initializers: their tables C A^l B, C A^{l+1} and A^l B are worked out in float64
and stored. A^T = A^{8 (T div 8)} A^{T mod 8} comes out of two small tables of matrices: one of all
64 would be several times as large, one of A^1, A^2, A^4 .. needs a product a binary digit.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgelin.recurrences.graph import Graph
from edgelin.recurrences.toeplitz_graph import mix

_DIGIT = 8


def plain(
    graph: Graph,
    x: ir.Value,
    a: ir.Value,
    b: ir.Value,
    c: ir.Value,
    state: ir.Value,
    *,
    channels: int,
    state_dim: int,
) -> tuple[ir.Value, ir.Value]:
    """Write the one-chunk form: T from 1 to ``graph.chunk``, a larger T fails in the runtime.

    Args:
        graph: Node builder.
        x: ``[B, T, D]``.
        a: Discrete transition ``[D, N, N]``, an initializer, as ``b`` and ``c``.
        b: ``[D, N]``.
        c: ``[D, N]``.
        state: ``[B, D, N]``.
        channels: D.
        state_dim: N.

    Returns:
        ``y`` ``[B, T, D]`` and the state after the last token.

    Raises:
        ValueError: A weight is computed in the graph.
    """
    op, chunk = graph.op, graph.chunk
    transition, write, read = (_content(v) for v in (a, b, c))
    powers = _powers(transition, _DIGIT)
    writes, reads = [write[..., None]], [read[:, None] @ transition]
    for _ in range(chunk - 1):
        writes.append(transition @ writes[-1])
        reads.append(reads[-1] @ transition)
    columns, rows = np.stack(writes)[..., 0], np.stack(reads)[:, :, 0]
    taps = np.concatenate([(read * columns).sum(-1), np.zeros((1, channels))])[None]
    y, written = mix(
        graph,
        x,
        graph.const(taps),
        (graph.const(rows), graph.const(columns)),
        state,
        (channels, state_dim),
    )
    h = op("Unsqueeze", [state, graph.ints(3)])
    eights, ones = graph.shared("lti_digits", lambda: _digits(graph))
    for digit, table in (
        (ones, powers[:-1]),
        (eights, _powers(powers[-1], chunk // _DIGIT)),
    ):
        h = op("MatMul", [op("Gather", [graph.const(table), digit]), h])
    return y, op("Add", [op("Squeeze", [h, graph.ints(3)]), written])


fused = plain  # no fused operator has a dense transition


def _digits(graph: Graph) -> tuple[ir.Value, ir.Value]:
    """T div 8 and T mod 8 as scalars."""
    time = np.arange(graph.chunk + 1)
    return graph.by_time(time // _DIGIT), graph.by_time(time % _DIGIT)


def _powers(matrix: NDArray[np.float64], most: int) -> NDArray[np.float64]:
    """``[most + 1, D, N, N]``: powers 0 .. most."""
    powers = [np.broadcast_to(np.eye(matrix.shape[-1]), matrix.shape)]
    for _ in range(most):
        powers.append(powers[-1] @ matrix)
    return np.stack(powers)


def _content(value: ir.Value) -> NDArray[np.float64]:
    """An initializer in float64."""
    if value.const_value is None:
        raise ValueError(f"{value.name} is computed; trace a step form, whose weights are constant")
    return value.const_value.numpy().astype(np.float64)
