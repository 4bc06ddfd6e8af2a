"""ONNX forms of the linear recurrence (equation in the package's docstring).

`plain` is the one-chunk form in standard operators (opset 21): the formulas of ``chunked.py`` for a
single chunk of T = 1 to `graph.chunk` tokens, T read at run time; a longer call fails inside the
runtime. `fused` is one com.microsoft LinearAttention node, for any T.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import onnx_ir as ir

from edgelin.recurrences import MIN_LOG_DECAY
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
            before, between, after, total = _head_decays(graph, g)
            within = graph.op("Mul", [within, between])
            q_in = graph.op("Mul", [q_in, before])
            k_out = graph.op("Mul", [k_out, after])
        else:
            within = graph.op("Mul", [within, _causal(graph)])
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
    """Append com.microsoft LinearAttention; arguments and results as in :func:`plain`.

    The operator decays token by token, so g needs no floor: below -90 exp(g) adds nothing anyway.
    """
    if scale <= 0:
        raise ValueError(f"scale is {scale}, need > 0: the operator reads 0 as its default")
    keys, values = graph.ints(0, 0, heads * key_dim), graph.ints(0, 0, heads * value_dim)
    inputs = [graph.op("Reshape", [x, keys]) for x in (q, k)]
    inputs += [graph.op("Reshape", [v, values]), state]
    if decay != "none":
        inputs.append(graph.op("Reshape", [g, keys]) if decay == "key" else g)
    o, final = graph.op(
        "LinearAttention",
        inputs,
        outputs=2,
        domain="com.microsoft",
        q_num_heads=heads,
        kv_num_heads=heads,
        update_rule="linear" if decay == "none" else "gated",
        scale=float(scale),
    )
    return graph.op("Reshape", [o, graph.ints(0, 0, heads, value_dim)]), final


def _causal(graph: Graph) -> ir.Value:
    """Lower-triangular ones ``[T, T]``."""
    size = graph.chunk
    ends = [[t, t] for t in range(size + 1)]
    return graph.shared(
        "linear.causal",
        lambda: graph.cut_to_time(np.tril(np.ones((size, size))), ends, (0, 1)),
    )


def _head_tables(graph: Graph) -> tuple[ir.Value, ir.Value, ir.Value]:
    """``[T, T+1]`` l > j after a column of ones, its exponent mask, and the sizes 1 and T."""
    size = graph.chunk
    ones = np.ones((size, size))
    after = np.concatenate([ones[:, :1], np.tril(ones, -1)], axis=1)
    future = np.where(np.tril(ones) > 0, 0.0, -np.inf)
    mask = np.concatenate([0.0 * ones[:, :1], future], axis=1)
    ends = [[t, t + 1] for t in range(size + 1)]

    def build() -> tuple[ir.Value, ir.Value, ir.Value]:
        """The three tables, before every layer."""
        sizes = graph.op("Concat", [graph.ints(1), graph.time], axis=0)
        return graph.cut_to_time(after, ends, (0, 1)), graph.cut_to_time(mask, ends, (0, 1)), sizes

    return graph.shared("linear.head", build)


def _head_decays(graph: Graph, g: ir.Value | None) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """exp of G_i ``[B, H, T, 1]``, G_i - G_j ``[B, H, T, T]``, G_T - G_j ``[B, H, 1, T]``, G_T.

    One product with the causal mask gives every sum over an interval as such.
    """
    after, mask, sizes = _head_tables(graph)
    g = graph.op("Transpose", [_floored(graph, g)], perm=[0, 2, 1])
    terms = graph.op("Mul", [graph.op("Unsqueeze", [g, graph.ints(3)]), after])
    sums = graph.op("MatMul", [_causal(graph), terms])
    decays = graph.op("Exp", [graph.op("Add", [sums, mask])])
    before, between = graph.op("Split", [decays, sizes], outputs=2, axis=3)
    last = [graph.op("Gather", [x, graph.ints(-1)], axis=2) for x in (between, before)]
    return before, between, last[0], last[1]


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
    q, k, g = (graph.op("Reshape", [x, packed]) for x in (q, k, _floored(graph, g)))
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


def _floored(graph: Graph, g: ir.Value | None) -> ir.Value:
    """g, not below the floor that every form shares."""
    return graph.op("Max", [g, graph.const(MIN_LOG_DECAY)])  # type: ignore[no-any-return]
