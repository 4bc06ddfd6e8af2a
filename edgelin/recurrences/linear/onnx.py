"""ONNX forms of the linear recurrence (equation in the package's docstring).

`plain` is the one-chunk form in standard operators (opset 21): the formulas of ``chunked.py`` for a
single chunk of T = 1 to `graph.chunk` tokens, T read at run time; a longer call fails inside the
runtime. `fused` is one com.microsoft LinearAttention node, for any T.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import onnx_ir as ir

from edgelin.recurrences.decay_graph import causal, floored, head_decays, matrix_attention
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

    Returns:
        The output ``[B, T, H, V]`` and the state after the last token.
    """
    if scale != 1.0:
        q = graph.op("Mul", [q, graph.const(scale)])
    v = graph.op("Transpose", [v], perm=[0, 2, 1, 3])
    if decay == "key":
        within, q_in, k_out, total = _by_key(graph, q, k, g, heads, key_dim)
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
            within = graph.op("Mul", [within, causal(graph)])
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
) -> tuple[ir.Value, ir.Value]:
    """Append com.microsoft LinearAttention; arguments and results as in :func:`plain`."""
    if decay == "key":
        g = graph.op("Reshape", [g, graph.ints(0, 0, heads * key_dim)])
    return matrix_attention(
        graph,
        (q, k, v),
        state,
        [] if decay == "none" else [g],
        sizes=(heads, key_dim, value_dim),
        rule="linear" if decay == "none" else "gated",
        scale=scale,
    )


def _key_tables(graph: Graph) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Interval masks ``[2 + L, T, T]``, pair masks ``[L, 1, T, T]``, and the sizes 1, 1 and L.

    Intervals: up to each token, after each token, and for every level (``chunked._per_key``; the
    first is the diagonal) from a token to the middle of its block. L grows with log2 of T.
    """
    size = graph.chunk
    i, j = np.arange(size)[:, None], np.arange(size)[None, :]
    intervals, pairs = [j <= i, j > i, np.zeros((size, size), bool)], [i == j]
    for s in (2**level for level in range(_levels(size))):
        odd, middle = (i // s) % 2 == 1, i // (2 * s) * 2 * s + s - 1
        intervals.append(np.where(odd, (j > middle) & (j <= i), (j > i) & (j <= middle)))
        pairs.append((i // (2 * s) == j // (2 * s)) & odd & ((j // s) % 2 == 0))
    counts = [1 + _levels(t) for t in range(size + 1)]

    def build() -> tuple[ir.Value, ir.Value, ir.Value]:
        """The three tables, before every layer."""
        ends = [[count + 2, t, t] for t, count in enumerate(counts)]
        pair_ends = [[count, t, t] for t, count in enumerate(counts)]
        return (
            graph.cut_to_time(np.stack(intervals), ends, (0, 1, 2)),
            graph.cut_to_time(np.stack(pairs)[:, None], pair_ends, (0, 2, 3)),
            graph.by_time([[1, 1, count] for count in counts]),
        )

    return graph.shared("linear.key", build)


def _levels(size: int) -> int:
    """How often blocks double until one holds ``size`` tokens."""
    return max(0, size - 1).bit_length()


def _by_key(
    graph: Graph, q: ir.Value, k: ir.Value, g: ir.Value | None, heads: int, key_dim: int
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """A ``[B, H, T, T]``, decayed q ``[B, H, T, K]`` and k ``[B, H, K, T]``, exp of G_T."""
    intervals, pairs, sizes = _key_tables(graph)
    packed = graph.ints(0, 1, -1, heads * key_dim)
    q, k, g = (graph.op("Reshape", [x, packed]) for x in (q, k, floored(graph, g)))
    decays = graph.op("Exp", [graph.op("MatMul", [intervals, g])])
    before, after, factors = graph.op("Split", [decays, sizes], outputs=3, axis=1)

    levels, heads_apart = graph.ints(0, 0, 0, heads, key_dim), graph.ints(0, -1, heads, key_dim)

    def decayed(x: ir.Value, factor: ir.Value, shape: ir.Value, perm: list[int]) -> ir.Value:
        """``[B, 1, T, H*K]`` times the factor, reshaped and transposed."""
        product = graph.op("Mul", [x, factor])
        result: ir.Value = graph.op("Transpose", [graph.op("Reshape", [product, shape])], perm=perm)
        return result

    scores = graph.op(
        "MatMul",
        [
            decayed(q, factors, levels, [0, 1, 3, 2, 4]),
            decayed(k, factors, levels, [0, 1, 3, 4, 2]),
        ],
    )
    masked = graph.op("Mul", [scores, pairs])
    within = graph.op("ReduceSum", [masked, graph.ints(1)], keepdims=0)
    last = graph.op("Gather", [before, graph.ints(-1)], axis=2)
    total = graph.op("Reshape", [last, graph.ints(0, heads, key_dim, 1)])
    q_in = decayed(q, before, heads_apart, [0, 2, 1, 3])
    return within, q_in, decayed(k, after, heads_apart, [0, 2, 3, 1]), total
