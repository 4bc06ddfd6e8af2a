"""ONNX forms of the linear recurrence (equation in the package's docstring).

`plain` is the one-chunk form in standard operators (opset 21): the formulas of ``chunked.py`` for a
single chunk of T = 1 to `graph.chunk` tokens, T read at run time; a longer call fails inside the
runtime. `fused` is one com.microsoft LinearAttention node, for any T. That operator reads after the
write, so its exclusive form runs T + 1 tokens (``delayed.py``).
"""

from __future__ import annotations

from typing import Literal

import onnx_ir as ir

from edgelin.recurrences.decay_graph import causal, head_decays, key_decays, matrix_attention
from edgelin.recurrences.graph import Graph

Decay = Literal["none", "head", "key"]


def plain(
    graph: Graph,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    g: ir.Value | None,
    state: ir.Value,
    *,
    heads: int,
    key_dim: int,
    value_dim: int,
    decay: Decay,
    scale: float,
    exclusive: bool = False,
) -> tuple[ir.Value, ir.Value]:
    """Append the one-chunk form.

    Args:
        graph: Receives the nodes.
        q: Queries ``[B, T, H, K]``, float32.
        k: Keys ``[B, T, H, K]``.
        v: Values ``[B, T, H, V]``.
        g: Log decay, None, ``[B, T, H]`` or ``[B, T, H, K]`` as ``decay`` says.
        state: ``[B, H, K, V]``.
        heads: H.
        key_dim: K.
        value_dim: V.
        decay: What g is.
        scale: Factor of the output, > 0.
        exclusive: Whether a token reads the state before its own decay and write.

    Returns:
        The output ``[B, T, H, V]`` and the state after the last token.
    """
    if scale != 1.0:
        q = graph.op("Mul", [q, graph.const(scale)])
    v = graph.op("Transpose", [v], perm=[0, 2, 1, 3])
    if decay == "head" and exclusive:
        # No mixer has this pair, so it gets no tables of its own: the same decay for every key.
        each = graph.op("Unsqueeze", [g, graph.ints(3)])
        g = graph.op("Expand", [each, graph.ints(1, 1, 1, key_dim)])
        decay = "key"
    if decay == "key":
        within, q_in, k_out, total = key_decays(
            graph, [q], [k], g, heads=heads, key_dim=key_dim, exclusive=[exclusive]
        )
    else:
        q_in = graph.op("Transpose", [q], perm=[0, 2, 1, 3])
        k_out = graph.op("Transpose", [k], perm=[0, 2, 3, 1])
        within, total = graph.op("MatMul", [q_in, k_out]), None
        if decay == "head":
            before, between, after, total = head_decays(graph, g)
            within = graph.op("Mul", [within, between])
            q_in = graph.op("Mul", [q_in, before])
            k_out = graph.op("Mul", [k_out, after])
        else:
            within = graph.op("Mul", [within, causal(graph, exclusive=exclusive)])
    o = graph.op("Add", [graph.op("MatMul", [q_in, state]), graph.op("MatMul", [within, v])])
    kept = state if total is None else graph.op("Mul", [state, total])
    final = graph.op("Add", [kept, graph.op("MatMul", [k_out, v])])
    return graph.op("Transpose", [o], perm=[0, 2, 1, 3]), final


def fused(
    graph: Graph,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    g: ir.Value | None,
    state: ir.Value,
    *,
    heads: int,
    key_dim: int,
    value_dim: int,
    decay: Decay,
    scale: float,
    exclusive: bool = False,
) -> tuple[ir.Value, ir.Value]:
    """Append com.microsoft LinearAttention; arguments and results as in :func:`plain`."""
    if decay == "key":
        g = graph.op("Reshape", [g, graph.ints(0, 0, heads * key_dim)])
    if exclusive:
        q = graph.op("Pad", [q, graph.ints(0, 0, 0, 0, 0, 1, 0, 0)])
        k, v = (graph.op("Pad", [x, graph.ints(0, 1, 0, 0, 0, 0, 0, 0)]) for x in (k, v))
        g = None if decay == "none" else graph.op("Pad", [g, graph.ints(0, 1, 0, 0, 0, 0)])
    o, final = matrix_attention(
        graph,
        (q, k, v),
        state,
        [] if decay == "none" else [g],
        sizes=(heads, key_dim, value_dim),
        rule="linear" if decay == "none" else "gated",
        scale=scale,
    )
    if exclusive:
        o = graph.op("Slice", [o, graph.ints(0), graph.ints(-1), graph.ints(1)])
    return o, final
