"""Experts as ONNX nodes, of which none computes an expert that no token of the call chose.

*plain*: the matrices of the chosen experts are gathered, and every token of the call is multiplied
with each of them, most with a weight of zero: no more work than needed for one token, and for more
at most E / k times that, in the memory that the matrices of one layer take. *fused*: com.microsoft
MoE, which multiplies only what is needed and copies nothing. *quantised*: com.microsoft QMoE, the
same with rounded matrices, in every profile: to take rounded matrices apart before multiplying
takes 50 times as long.

The kernels route by themselves, with a normalised softmax over the k largest logits. They do what
any router wants if the logits are log w for the chosen and very small for the others, and the
result is multiplied with the sum of the weights w.

They have no square of ReLU. Without a gate float experts are *plain* in every profile, and QMoE
reads every row of ``up`` twice, as its gate and as what is gated: silu with a steep slope is ReLU,
and relu(u) u = relu(u)^2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from edgelin.recurrences.graph import Graph

_LEAST = 1e-38  # a weight may be zero, its logarithm must not
_NEVER = -1e30  # the logit of an expert that was not chosen
_STEEP = 1e6  # u sigmoid(1e6 u) u is off relu(u)^2 by less than 1e-12
_OPERATOR: dict[str, Any] = {
    "domain": "com.microsoft",
    "activation_type": "swiglu",
    "activation_alpha": 1.0,
    "activation_beta": 0.0,
    "swiglu_fusion": 1,  # rows of gate and up alternate
    "normalize_routing_weights": 1,
}


def plain(
    graph: Graph,
    x: ir.Value,
    chosen: ir.Value,
    weights: ir.Value,
    inwards: ir.Value,
    down: ir.Value,
    *,
    shape: ir.Value,
    sizes: tuple[int, int, int, int],
    gated: bool,
) -> ir.Value:
    """Standard operators; any number of tokens.

    Args:
        graph: Collects the nodes.
        x: `[B, T, H]` float32.
        chosen: `[B, T, k]` int64.
        weights: `[B, T, k]` float32.
        inwards: `[E, 2 I, H]`, rows of gate and up in turn, or `[E, I, H]`.
        down: `[E, H, I]`.
        shape: int64 `[2]`, B and T of the call.
        sizes: E, k, H and I.
        gated: Which of the two.

    Returns:
        `[B, T, H]`.
    """
    experts, _, hidden, inner = sizes
    used = graph.op("Unique", [graph.op("Reshape", [chosen, graph.ints(-1)])], sorted=1)
    # Every token is a column: what MatMul reads first is then a matrix as it is stored.
    columns = graph.op("Transpose", [_rows(graph, x, hidden)], perm=[1, 0])
    product = graph.op("MatMul", [graph.op("Gather", [inwards, used]), columns])
    if gated:
        both = graph.op("Reshape", [product, graph.ints(0, inner, 2, -1)])
        gate, up = graph.op("Split", [both], outputs=2, axis=2, num_outputs=2)
        gate = graph.op("Mul", [gate, graph.op("Sigmoid", [gate])])
        product = graph.op("Squeeze", [graph.op("Mul", [gate, up]), graph.ints(2)])
    else:
        product = graph.op("Relu", [product])
        product = graph.op("Mul", [product, product])
    by_expert = _rows(graph, _scattered(graph, 0.0, chosen, weights, shape, experts), experts)
    by_expert = graph.op("Transpose", [graph.op("Gather", [by_expert, used], axis=1)], perm=[1, 0])
    product = graph.op("Mul", [product, graph.op("Unsqueeze", [by_expert, graph.ints(1)])])
    y = graph.op("MatMul", [graph.op("Gather", [down, used]), product])
    y = graph.op("ReduceSum", [y, graph.ints(0)], keepdims=0)
    y = graph.op("Transpose", [y], perm=[1, 0])
    back = graph.op("Concat", [shape, graph.ints(hidden)], axis=0)
    return graph.op("Reshape", [y, back])  # type: ignore[no-any-return]


def fused(
    graph: Graph,
    x: ir.Value,
    chosen: ir.Value,
    weights: ir.Value,
    gate_up: ir.Value,
    down: ir.Value,
    *,
    shape: ir.Value,
    sizes: tuple[int, int, int, int],
) -> ir.Value:
    """One com.microsoft MoE of gated experts; arguments and result as of :func:`plain`."""
    logits = _logits(graph, chosen, weights, shape, sizes[0])
    y = graph.op("MoE", [x, logits, gate_up, None, down], k=sizes[1], **_OPERATOR)
    return _times_sum(graph, y, weights)


def quantised(
    graph: Graph,
    x: ir.Value,
    chosen: ir.Value,
    weights: ir.Value,
    *stored: ir.Value | None,
    shape: ir.Value,
    sizes: tuple[int, int, int, int],
    gated: bool,
    bits: int,
    block_size: int,
    accuracy_level: int,
) -> ir.Value:
    """One com.microsoft QMoE; other arguments and the result as of :func:`plain`.

    Args:
        graph: Collects the nodes.
        x: `[B, T, H]` float32.
        chosen: `[B, T, k]` int64.
        weights: `[B, T, k]` float32.
        stored: Codes, scales and zero points (or None) of the matrices `[E, 2 I, H]`, every row
            twice without a gate, then of ``down``.
        shape: int64 `[2]`, B and T of the call.
        sizes: E, k, H and I.
        gated: Whether the experts are.
        bits: Of a code.
        block_size: Weights that share a scale.
        accuracy_level: 4: activations are rounded to int8.
    """
    logits = _logits(graph, chosen, weights, shape, sizes[0])
    inwards, outwards = stored[:3], stored[3:]
    inputs = [x, logits, *inwards[:2], None, *outwards[:2]]
    if inwards[2] is not None:
        inputs += [*[None] * 4, inwards[2], outwards[2]]
    y = graph.op(
        "QMoE",
        inputs,
        k=sizes[1],
        expert_weight_bits=bits,
        block_size=block_size,
        accuracy_level=accuracy_level,
        **(_OPERATOR if gated else _OPERATOR | {"activation_alpha": _STEEP}),
    )
    return _times_sum(graph, y, weights)


def _logits(
    graph: Graph, chosen: ir.Value, weights: ir.Value, shape: ir.Value, experts: int
) -> ir.Value:
    """`[B T, E]`: what the kernels' router turns into the weights of the chosen."""
    logs = graph.op("Log", [graph.op("Max", [weights, graph.const(_LEAST)])])
    return _rows(graph, _scattered(graph, _NEVER, chosen, logs, shape, experts), experts)


def _times_sum(graph: Graph, y: ir.Value, weights: ir.Value) -> ir.Value:
    """The kernels' result with the sum that the weights had."""
    total = graph.op("ReduceSum", [weights, graph.ints(-1)], keepdims=1)
    return graph.op("Mul", [y, total])  # type: ignore[no-any-return]


def _scattered(
    graph: Graph, fill: float, chosen: ir.Value, values: ir.Value, shape: ir.Value, experts: int
) -> ir.Value:
    """`[B, T, E]`: the values at the chosen experts, ``fill`` at the others."""

    def filled() -> ir.Value:
        whole = graph.op("Concat", [shape, graph.ints(experts)], axis=0)
        value = ir.tensor(np.array([fill], np.float32))
        return graph.op("ConstantOfShape", [whole], value=value)  # type: ignore[no-any-return]

    empty = graph.shared(("experts", fill, experts), filled)
    return graph.op("ScatterElements", [empty, chosen, values], axis=-1)  # type: ignore[no-any-return]


def _rows(graph: Graph, x: ir.Value, width: int) -> ir.Value:
    """`[B, T, width]` with a row a token."""
    return graph.op("Reshape", [x, graph.ints(-1, width)])  # type: ignore[no-any-return]
