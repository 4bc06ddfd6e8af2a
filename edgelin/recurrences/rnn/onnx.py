"""The non-linear recurrence in ONNX: one standard RNN node (opset 14), which serves any T.

The operator computes f(x_t W^T + h_{t-1} R^T), time first. Here W is the identity and R is W^T, or
a diagonal matrix. So an elementwise step costs D^2, as a full one does, which the operator has no
way around; no other standard operator repeats a step without a subgraph.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from edgelin.recurrences.graph import Graph

# Affine with its defaults is x in ONNX's text; onnxruntime wants them written.
_ACTIVATIONS: dict[str, dict[str, Any]] = {
    "identity": {
        "activations": ["Affine"],
        "activation_alpha": [1.0],
        "activation_beta": [0.0],
    },
    "tanh": {"activations": ["Tanh"]},
    "relu": {"activations": ["Relu"]},
    "sigmoid": {"activations": ["Sigmoid"]},
}


def plain(
    graph: Graph,
    u: ir.Value,
    weight: ir.Value,
    state: ir.Value,
    *,
    channels: int,
    full: bool,
    activation: str,
) -> tuple[ir.Value, ir.Value]:
    """Append the RNN node and what lays its tensors out.

    Args:
        graph: Receives the nodes.
        u: ``[B, T, D]``, float32.
        weight: a ``[D]`` or W ``[D, D]``.
        state: ``[B, D]``.
        channels: D.
        full: Whether the weight is a matrix.
        activation: Name of f.

    Returns:
        ``z`` ``[B, T, D]`` and the state after the last token.
    """
    identity = np.eye(channels)
    if full:
        turned = graph.op("Transpose", [weight], perm=[1, 0])
        matrix = graph.op("Unsqueeze", [turned, graph.ints(0)])
    else:
        matrix = graph.op("Mul", [weight, graph.const(identity[None])])
    x = graph.op("Transpose", [u], perm=[1, 0, 2])
    initial = graph.op("Unsqueeze", [state, graph.ints(0)])
    z, after = graph.op(
        "RNN",
        [x, graph.const(identity[None]), matrix, None, None, initial],
        outputs=2,
        hidden_size=channels,
        **_ACTIVATIONS[activation],
    )
    z = graph.op("Transpose", [graph.op("Squeeze", [z, graph.ints(1)])], perm=[1, 0, 2])
    return z, graph.op("Squeeze", [after, graph.ints(0)])


fused = plain  # no com.microsoft operator has this recurrence
