"""What the ONNX forms of several recurrences share: decays of a chunk and the fused operator.

With g the log decay of a head, a chunk needs exp of three sums over tokens l: from its start to i,
over j < l <= i, and after j to its end. Each is summed over its interval as such, since a
difference of running sums loses the small ones and exp(-G_j) overflows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from edgelin.recurrences import MIN_LOG_DECAY
from edgelin.recurrences.graph import Graph


def floored(graph: Graph, g: ir.Value | None) -> ir.Value:
    """g, not below the floor that every form shares."""
    return graph.op("Max", [g, graph.const(MIN_LOG_DECAY)])  # type: ignore[no-any-return]


def causal(graph: Graph) -> ir.Value:
    """Lower-triangular ones ``[T, T]``."""
    size = graph.chunk
    ends = [[t, t] for t in range(size + 1)]
    return graph.shared(
        "causal", lambda: graph.cut_to_time(np.tril(np.ones((size, size))), ends, (0, 1))
    )


def head_decays(graph: Graph, g: ir.Value | None) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """exp of G_i ``[B, H, T, 1]``, G_i - G_j ``[B, H, T, T]``, G_T - G_j ``[B, H, 1, T]``, G_T.

    ``g`` is ``[B, T, H]``. One product with the causal mask gives every sum.
    """
    after, mask, sizes = _head_tables(graph)
    g = graph.op("Transpose", [floored(graph, g)], perm=[0, 2, 1])
    terms = graph.op("Mul", [graph.op("Unsqueeze", [g, graph.ints(3)]), after])
    sums = graph.op("MatMul", [causal(graph), terms])
    decays = graph.op("Exp", [graph.op("Add", [sums, mask])])
    before, between = graph.op("Split", [decays, sizes], outputs=2, axis=3)
    last = [graph.op("Gather", [x, graph.ints(-1)], axis=2) for x in (between, before)]
    return before, between, last[0], last[1]


def linear_attention(
    graph: Graph, inputs: Sequence[ir.Value | None], *, heads: int, rule: str, scale: float
) -> tuple[ir.Value, ir.Value]:
    """Append com.microsoft LinearAttention with as many key as query heads.

    The operator decays token by token, so g needs no floor: below -90 exp(g) adds nothing anyway.

    Args:
        graph: Receives the node.
        inputs: q, k ``[B, T, H K]``, v ``[B, T, H V]``, state ``[B, H, K, V]``, then g, None or
            left out, and beta where the rule has one.
        heads: H.
        rule: "linear", "gated", "delta" or "gated_delta".
        scale: Factor of the output, > 0.

    Returns:
        The output ``[B, T, H V]`` and the state after the last token.
    """
    if scale <= 0:
        raise ValueError(f"scale is {scale}, need > 0: the operator reads 0 as its default")
    o, final = graph.op(
        "LinearAttention",
        inputs,
        outputs=2,
        domain="com.microsoft",
        q_num_heads=heads,
        kv_num_heads=heads,
        update_rule=rule,
        scale=float(scale),
    )
    return o, final


def matrix_attention(
    graph: Graph,
    qkv: tuple[ir.Value, ir.Value, ir.Value],
    state: ir.Value,
    gates: Sequence[ir.Value | None],
    *,
    sizes: tuple[int, int, int],
    rule: str,
    scale: float,
) -> tuple[ir.Value, ir.Value]:
    """:func:`linear_attention` of values with an axis of heads.

    Args:
        graph: Receives the nodes.
        qkv: q, k ``[B, T, H, K]`` and v ``[B, T, H, V]``.
        state: ``[B, H, K, V]``.
        gates: What follows the state, packed already.
        sizes: H, K and V.
        rule: As there.
        scale: As there.

    Returns:
        The output ``[B, T, H, V]`` and the state after the last token.
    """
    heads, key_dim, value_dim = sizes
    keys, values = graph.ints(0, 0, heads * key_dim), graph.ints(0, 0, heads * value_dim)
    packed = [graph.op("Reshape", pair) for pair in zip(qkv, (keys, keys, values), strict=True)]
    inputs = [*packed, state, *gates]
    o, final = linear_attention(graph, inputs, heads=heads, rule=rule, scale=scale)
    return graph.op("Reshape", [o, graph.ints(0, 0, heads, value_dim)]), final


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

    return graph.shared("head decays", build)
