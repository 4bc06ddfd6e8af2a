"""What the ONNX forms of several recurrences share: decays of a chunk, the inverse of a
unit-triangular matrix, the shifts of a log-step scan, and the fused operator.

With g the log decay of a head or a key, a chunk needs exp of three sums over tokens l: from its
start to i, over j < l <= i, and after j to its end. Each is summed over its interval as such, since
a difference of running sums loses the small ones and exp(-G_j) overflows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from edgelin.recurrences import MIN_LOG_DECAY
from edgelin.recurrences.graph import Graph


def floored(graph: Graph, g: ir.Value | None) -> ir.Value:
    """g, not below the floor that every form shares."""
    return graph.op("Max", [g, graph.const(MIN_LOG_DECAY)])  # type: ignore[no-any-return]


def causal(graph: Graph, *, exclusive: bool = False) -> ir.Value:
    """Lower-triangular ones ``[T, T]``; exclusive: zeros on the diagonal."""
    size = graph.chunk
    ends = [[t, t] for t in range(size + 1)]
    mask = np.tril(np.ones((size, size)), -1 if exclusive else 0)
    return graph.shared(("causal", exclusive), lambda: graph.cut_to_time(mask, ends, (0, 1)))


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
    graph: Graph,
    inputs: Sequence[ir.Value | None],
    *,
    heads: int,
    rule: str,
    scale: float,
    key_heads: int | None = None,
) -> tuple[ir.Value, ir.Value]:
    """Append com.microsoft LinearAttention.

    The operator decays token by token, so g needs no floor: below -90 exp(g) adds nothing anyway.

    Args:
        graph: Receives the node.
        inputs: q, k ``[B, T, G K]``, v ``[B, T, H V]``, state ``[B, H, K, V]``, then g, None or
            left out, and beta where the rule has one.
        heads: H.
        rule: "linear", "gated", "delta" or "gated_delta".
        scale: Factor of the output, > 0.
        key_heads: Heads G of q and k, a divisor of H (the standard operator takes no fewer than H);
            None: H.

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
        q_num_heads=key_heads or heads,
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
    key_heads: int | None = None,
) -> tuple[ir.Value, ir.Value]:
    """:func:`linear_attention` of values with an axis of heads.

    Args:
        graph: Receives the nodes.
        qkv: q, k ``[B, T, G, K]`` and v ``[B, T, H, V]``.
        state: ``[B, H, K, V]``.
        gates: What follows the state, packed already.
        sizes: H, K and V.
        rule: As there.
        scale: As there.
        key_heads: As there.

    Returns:
        The output ``[B, T, H, V]`` and the state after the last token.
    """
    heads, key_dim, value_dim = sizes
    keys, values = (
        graph.ints(0, 0, (key_heads or heads) * key_dim),
        graph.ints(0, 0, heads * value_dim),
    )
    packed = [graph.op("Reshape", pair) for pair in zip(qkv, (keys, keys, values), strict=True)]
    inputs = [*packed, state, *gates]
    o, final = linear_attention(
        graph, inputs, heads=heads, rule=rule, scale=scale, key_heads=key_heads
    )
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


def key_decays(
    graph: Graph,
    rows: Sequence[ir.Value | None],
    columns: Sequence[ir.Value | None],
    g: ir.Value | None,
    *,
    heads: int,
    key_dim: int,
    exclusive: Sequence[bool] = (False,),
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """Products of rows and columns with a decay for every key (``chunks.key_products``).

    Args:
        graph: Receives the nodes.
        rows: What reads the state, one or two of ``[B, T, H, K]``.
        columns: What was written, as many.
        g: Log decays ``[B, T, H, K]``.
        heads: H.
        key_dim: K.
        exclusive: Whether a row reads the state before its token, one a row.

    Returns:
        With n rows: the products ``[B, H, n T, n T]``, the rows decayed from the chunk's start
        ``[B, H, n T, K]``, the columns decayed to its end ``[B, H, K, n T]`` and the decay of the
        chunk ``[B, H, K, 1]``. The tokens of the first row (column) come before the second's.
    """
    count = len(rows)
    intervals, pairs, sizes = _key_tables(graph, tuple(exclusive))
    packed = graph.ints(0, 1, -1, heads * key_dim)

    def interleaved(parts: Sequence[ir.Value | None]) -> ir.Value:
        """``[B, 1, n T, H*K]``, token by token."""
        joined = parts[0] if count == 1 else graph.op("Concat", parts, axis=2)
        return graph.op("Reshape", [joined, packed])  # type: ignore[no-any-return]

    reads, writes = interleaved(rows), interleaved(columns)
    g = graph.op("Reshape", [floored(graph, g), packed])
    decays = graph.op("Exp", [graph.op("MatMul", [intervals, g])])
    before, after, factors = graph.op("Split", [decays, sizes], outputs=3, axis=1)

    def decayed(x: ir.Value, factor: ir.Value, levels: bool, keys_first: bool) -> ir.Value:
        """Times the factor: ``[B, L, H, n T, K]``, without L where there is one level."""
        lead = [0, 0] if levels else [0]
        token = [0 if levels else -1] if count == 1 else [-1, count]
        product = graph.op("Mul", [x, factor])
        apart = graph.op("Reshape", [product, graph.ints(*lead, *token, heads, key_dim)])
        start, n = len(lead), len(lead) + len(token)
        tokens = [*range(start, n)][::-1]  # a row's tokens after the other's
        order = [n, n + 1, *tokens] if keys_first else [n, *tokens, n + 1]
        turned: ir.Value = graph.op("Transpose", [apart], perm=[*range(start), *order])
        if count == 1:
            return turned
        flat = [0, 0, -1] if keys_first else [0, -1, key_dim]
        return graph.op("Reshape", [turned, graph.ints(*lead, *flat)])  # type: ignore[no-any-return]

    scores = graph.op(
        "MatMul", [decayed(reads, factors, True, False), decayed(writes, factors, True, True)]
    )
    masked = graph.op("Mul", [scores, pairs])
    within = graph.op("ReduceSum", [masked, graph.ints(1)], keepdims=0)
    if exclusive[0]:
        last = graph.op("Exp", [graph.op("ReduceSum", [g, graph.ints(2)])])
    else:
        last = graph.op("Gather", [before, graph.ints(-count)], axis=2)
    total = graph.op("Reshape", [last, graph.ints(0, heads, key_dim, 1)])
    rows_in = decayed(reads, before, False, False)
    return within, rows_in, decayed(writes, after, False, True), total


def _key_tables(graph: Graph, exclusive: tuple[bool, ...]) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Interval masks ``[2 + L, n T, T]``, pair masks ``[L, 1, n T, n T]``, the sizes 1, 1 and L.

    Intervals: up to each token, after each token, and for every level (``chunks.key_products``;
    the first is the diagonal) from a token to the middle of its block. L grows with log2 of T.
    An exclusive row's intervals to the left leave the token out.
    """
    size, count = graph.chunk, len(exclusive)
    i, j = np.arange(size)[:, None], np.arange(size)[None, :]
    steps = [2**level for level in range(_levels(size))]
    halves = [((i // s) % 2 == 1, i // (2 * s) * 2 * s + s - 1) for s in steps]

    def table(up_to: Any) -> Any:
        """The intervals of one row."""
        levels = [
            np.where(odd, (j > middle) & up_to, (j > i) & (j <= middle)) for odd, middle in halves
        ]
        return np.stack([up_to, j > i, np.zeros((size, size), bool), *levels])

    tables = np.stack([table(j < i if out else j <= i) for out in exclusive], axis=2)
    counts = [1 + _levels(t) for t in range(size + 1)]

    def build() -> tuple[ir.Value, ir.Value, ir.Value]:
        """The three tables, before every layer."""
        ends = [[levels + 2, count * t, t] for t, levels in enumerate(counts)]
        rows = [_pair_masks(graph, out, counts) for out in exclusive]
        if count > 1:
            rows = [graph.op("Concat", [row] * count, axis=3) for row in rows]
        return (
            graph.cut_to_time(tables.reshape(-1, count * size, size), ends, (0, 1, 2)),
            rows[0] if count == 1 else graph.op("Concat", rows, axis=2),
            graph.by_time([[1, 1, levels] for levels in counts]),
        )

    return graph.shared(("key decays", exclusive), build)


def _pair_masks(graph: Graph, exclusive: bool, counts: list[int]) -> ir.Value:
    """The pairs of tokens of every level ``[L, 1, T, T]``; exclusive: none on the diagonal."""
    size = graph.chunk
    i, j = np.arange(size)[:, None], np.arange(size)[None, :]
    pairs = [(i == j) & (not exclusive)]
    for s in (2**level for level in range(_levels(size))):
        odd = (i // s) % 2 == 1
        pairs.append((i // (2 * s) == j // (2 * s)) & odd & ((j // s) % 2 == 0))
    ends = [[levels, t, t] for t, levels in enumerate(counts)]
    return graph.cut_to_time(np.stack(pairs)[:, None], ends, (0, 2, 3))


def _levels(size: int) -> int:
    """How often blocks double until one holds ``size`` tokens."""
    return max(0, size - 1).bit_length()


def unit_lower_inverse(graph: Graph, lower: ir.Value, *, sign: int) -> ir.Value:
    """Inverse of I + ``sign`` times the part of ``lower`` ``[B, H, T, T]`` below the diagonal.

    The block recursion of ``chunks.unit_lower_inverse``; every level runs at every T, since a
    graph cannot leave one out.
    """
    eye, quarters = _quarters(graph, sign)
    count = _levels(graph.chunk)
    split = graph.op(
        "Split",
        [graph.op("Mul", [lower, quarters])],
        outputs=count,
        axis=0,
        num_outputs=count,
    )
    inverse = graph.op("Add", [eye, split[0]])
    for quarter in split[1:]:
        step = graph.op("MatMul", [inverse, graph.op("MatMul", [quarter, inverse])])
        inverse = graph.op("Add", [inverse, step])
    return graph.op("Squeeze", [inverse, graph.ints(0)])  # type: ignore[no-any-return]


def _quarters(graph: Graph, sign: int) -> tuple[ir.Value, ir.Value]:
    """The identity ``[T, T]`` and -sign times the lower left quarters of every block size.

    Quarters ``[L, 1, 1, T, T]``: blocks of 2, 4, ... tokens; together all cells below the diagonal.
    """
    size = graph.chunk
    i, j = np.arange(size)[:, None], np.arange(size)[None, :]
    levels = [
        -float(sign) * ((i // (2 * s) == j // (2 * s)) & (i // s > j // s))
        for s in (2**level for level in range(_levels(size)))
    ]
    ends = [[t, t] for t in range(size + 1)]
    return graph.shared(
        ("quarters", sign),
        lambda: (
            graph.cut_to_time(np.eye(size), ends, (0, 1)),
            graph.cut_to_time(np.stack(levels)[:, None, None], ends, (3, 4)),
        ),
    )


def scan_tables(graph: Graph) -> tuple[list[ir.Value], ir.Value]:
    """For every shift s = 1, 2, 4, ... the times max(t - s, 0), and pads by T - 1 at the end."""
    chunk = graph.chunk
    steps = np.arange(chunk)

    def build() -> tuple[list[ir.Value], ir.Value]:
        """The tables, before every layer."""
        ends = graph.by_time(np.arange(chunk + 1)[:, None])
        tables = [np.maximum(steps - 2**level, 0) for level in range(_levels(chunk))]
        pads = np.zeros((chunk + 1, 2), np.int64)
        pads[1:, 1] = steps
        shifts = [
            graph.op("Slice", [graph.const(table, np.int64), graph.ints(0), ends])
            for table in tables
        ]
        return shifts, graph.by_time(pads)

    return graph.shared("scan", build)
