"""ONNX forms of the (gated) delta rule (equation in the package's docstring).

`plain` is the one-chunk form in standard operators (opset 21): the formulas of ``chunked.py`` for a
single chunk of T = 1 to `graph.chunk` tokens, T read at run time; a longer call fails inside the
runtime. `fused` is one com.microsoft LinearAttention node, for any T.
"""

from __future__ import annotations

from typing import Literal

import onnx_ir as ir

from edgelin.recurrences.decay_graph import (
    causal,
    head_decays,
    matrix_attention,
    unit_lower_inverse,
)
from edgelin.recurrences.graph import Graph

Decay = Literal["none", "head"]


def plain(
    graph: Graph,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    beta: ir.Value,
    g: ir.Value | None,
    state: ir.Value,
    *,
    heads: int,
    key_dim: int,
    value_dim: int,
    decay: Decay,
    scale: float,
) -> tuple[ir.Value, ir.Value]:
    """Append the one-chunk form.

    Args:
        graph: Receives the nodes.
        q: Queries ``[B, T, H, K]``, float32.
        k: Keys ``[B, T, H, K]``.
        v: Values ``[B, T, H, V]``.
        beta: Writing strengths ``[B, T, H]``.
        g: Log decays ``[B, T, H]``, or None.
        state: ``[B, H, K, V]``.
        heads: H.
        key_dim: K.
        value_dim: V.
        decay: "head" with g, else "none".
        scale: Factor of the output, > 0.

    Returns:
        The output ``[B, T, H, V]`` and the state after the last token.
    """
    if scale != 1.0:
        q = graph.op("Mul", [q, graph.const(scale)])
    # keys over queries: one product reads the state for both
    rows = graph.op("Transpose", [graph.op("Concat", [k, q], axis=1)], perm=[0, 2, 1, 3])
    columns = graph.op("Transpose", [k], perm=[0, 2, 3, 1])
    gram, scores = _halves(graph, graph.op("MatMul", [rows, columns]))
    erase, read = _halves(graph, graph.op("MatMul", [rows, state]))
    kept = state
    if decay == "head":
        before, between, after, total = head_decays(graph, g)
        gram, scores = (graph.op("Mul", [x, between]) for x in (gram, scores))
        erase, read = (graph.op("Mul", [x, before]) for x in (erase, read))
        columns = graph.op("Mul", [columns, after])
        kept = graph.op("Mul", [state, total])
    else:
        scores = graph.op("Mul", [scores, causal(graph)])
    beta = graph.op("Transpose", [beta], perm=[0, 2, 1])
    beta = graph.op("Unsqueeze", [beta, graph.ints(3)])
    inverse = unit_lower_inverse(graph, graph.op("Mul", [gram, beta]), sign=1)
    v = graph.op("Transpose", [v], perm=[0, 2, 1, 3])
    missing = graph.op("Mul", [graph.op("Sub", [v, erase]), beta])
    writes = graph.op("MatMul", [inverse, missing])
    o = graph.op("Add", [read, graph.op("MatMul", [scores, writes])])
    final = graph.op("Add", [kept, graph.op("MatMul", [columns, writes])])
    return graph.op("Transpose", [o], perm=[0, 2, 1, 3]), final


def fused(
    graph: Graph,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    beta: ir.Value,
    g: ir.Value | None,
    state: ir.Value,
    *,
    heads: int,
    key_dim: int,
    value_dim: int,
    decay: Decay,
    scale: float,
) -> tuple[ir.Value, ir.Value]:
    """Append com.microsoft LinearAttention; arguments and results as in :func:`plain`."""
    return matrix_attention(
        graph,
        (q, k, v),
        state,
        [g if decay == "head" else None, beta],
        sizes=(heads, key_dim, value_dim),
        rule="gated_delta" if decay == "head" else "delta",
        scale=scale,
    )


def _halves(graph: Graph, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The rows of the keys and those of the queries."""
    first, second = graph.op("Split", [x], outputs=2, axis=2, num_outputs=2)
    return first, second
