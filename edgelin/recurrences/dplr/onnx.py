"""ONNX forms of the diagonal plus low rank recurrence (equation in the package's docstring).

`plain` is the one-chunk form in standard operators (opset 21): the formulas of ``chunked.py`` for a
single chunk of T = 1 to `graph.chunk` tokens, T read at run time; a longer call fails inside the
runtime. `fused` is the same: com.microsoft LinearAttention reads and writes under one key, and no
other operator knows a transition with two vectors.
"""

from __future__ import annotations

import onnx_ir as ir

from edgelin.recurrences.decay_graph import key_decays, unit_lower_inverse
from edgelin.recurrences.graph import Graph


def plain(
    graph: Graph,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    a: ir.Value,
    b: ir.Value,
    g: ir.Value | None,
    state: ir.Value,
    *,
    heads: int,
    key_dim: int,
    scale: float,
) -> tuple[ir.Value, ir.Value]:
    """Append the one-chunk form.

    Args:
        graph: Receives the nodes.
        q: Queries ``[B, T, H, K]``, float32.
        k: Keys ``[B, T, H, K]``.
        v: Values ``[B, T, H, V]``.
        a: What each token reads from the state before it ``[B, T, H, K]``.
        b: Where it adds what it read ``[B, T, H, K]``.
        g: Log decays ``[B, T, H, K]``.
        state: ``[B, H, K, V]``.
        heads: H.
        key_dim: K.
        scale: Factor of the output, > 0.

    Returns:
        The output ``[B, T, H, V]`` and the state after the last token.
    """
    if scale != 1.0:
        q = graph.op("Mul", [q, graph.const(scale)])
    # queries over a, b beside k: one product reads the state for both rows
    within, rows, columns, total = key_decays(
        graph, [q, a], [b, k], g, heads=heads, key_dim=key_dim, exclusive=[False, True]
    )
    scores, solved = _halves(graph, within, axis=2)
    a_b, a_k = _halves(graph, solved, axis=3)
    read, seen = _halves(graph, graph.op("MatMul", [rows, state]), axis=2)
    v = graph.op("Transpose", [v], perm=[0, 2, 1, 3])
    seen = graph.op("Add", [seen, graph.op("MatMul", [a_k, v])])
    z = graph.op("MatMul", [unit_lower_inverse(graph, a_b, sign=-1), seen])
    writes = graph.op("Concat", [z, v], axis=2)
    o = graph.op("Add", [read, graph.op("MatMul", [scores, writes])])
    kept = graph.op("Mul", [state, total])
    final = graph.op("Add", [kept, graph.op("MatMul", [columns, writes])])
    return graph.op("Transpose", [o], perm=[0, 2, 1, 3]), final


fused = plain


def _halves(graph: Graph, x: ir.Value, axis: int) -> tuple[ir.Value, ir.Value]:
    """The two halves along an axis."""
    first, second = graph.op("Split", [x], outputs=2, axis=axis, num_outputs=2)
    return first, second
