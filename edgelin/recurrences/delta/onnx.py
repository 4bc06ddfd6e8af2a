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
    floored,
    head_decays,
    matrix_attention,
    unit_lower_inverse,
)
from edgelin.recurrences.dplr import onnx as dplr_onnx
from edgelin.recurrences.graph import Graph

Decay = Literal["none", "head", "key"]


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
    key_heads: int | None = None,
) -> tuple[ir.Value, ir.Value]:
    """Append the one-chunk form.

    Args:
        graph: Receives the nodes.
        q: Queries ``[B, T, G, K]``, float32.
        k: Keys ``[B, T, G, K]``.
        v: Values ``[B, T, H, V]``.
        beta: Writing strengths ``[B, T, H]``.
        g: Log decays, None, ``[B, T, H]`` or ``[B, T, H, K]`` as ``decay`` says.
        state: ``[B, H, K, V]``.
        heads: H.
        key_dim: K.
        value_dim: V.
        decay: What g is.
        scale: Factor of the output, > 0.
        key_heads: G, a divisor of H; None: H.

    Returns:
        The output ``[B, T, H, V]`` and the state after the last token.
    """
    if key_heads is not None and key_heads != heads:
        places = graph.ints(*(h * key_heads // heads for h in range(heads)))
        q, k = (graph.op("Gather", [x, places], axis=2) for x in (q, k))
    if decay == "key":
        write, a, b = _low_rank(graph, k, beta, g)
        return dplr_onnx.plain(
            graph, q, write, v, a, b, g, state, heads=heads, key_dim=key_dim, scale=scale
        )
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
    key_heads: int | None = None,
) -> tuple[ir.Value, ir.Value]:
    """Append com.microsoft LinearAttention; arguments and results as in :func:`plain`."""
    if decay == "key":
        g = graph.op("Reshape", [g, graph.ints(0, 0, heads * key_dim)])
    return matrix_attention(
        graph,
        (q, k, v),
        state,
        [None if decay == "none" else g, beta],
        sizes=(heads, key_dim, value_dim),
        rule="delta" if decay == "none" else "gated_delta",
        scale=scale,
        key_heads=key_heads,
    )


def _low_rank(
    graph: Graph, k: ir.Value, beta: ir.Value, g: ir.Value | None
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """k, a and b of the recurrence ``dplr`` (``chunked.low_rank``)."""
    write = graph.op("Mul", [k, graph.op("Unsqueeze", [beta, graph.ints(3)])])
    read = graph.op("Mul", [graph.op("Exp", [floored(graph, g)]), k])
    return write, read, graph.op("Neg", [write])


def _halves(graph: Graph, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The rows of the keys and those of the queries."""
    first, second = graph.op("Split", [x], outputs=2, axis=2, num_outputs=2)
    return first, second
