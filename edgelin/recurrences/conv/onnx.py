"""Short convolution as ONNX nodes.

*plain*: a sum of shifted products, not a Conv: onnxruntime's depthwise Conv of one dimension takes
8 times as long at 1,152 channels and T = 1. *fused*: com.microsoft CausalConvWithState
(onnxruntime >= 1.25.1) without its activation: the kernel takes one exponential after another, and
with QuickGelu behind it instead, a 374M model's chunk takes 0.83 of the time and a step 0.96.
Attributes at their default are left out, because older runtimes refuse names that they do not know;
so is ``channels_last``, which came later.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgelin.recurrences.graph import Graph

_END = int(np.iinfo(np.int64).max)


def plain(
    graph: Graph,
    x: ir.Value,
    weight: ir.Value,
    bias: ir.Value | None,
    state: ir.Value,
    *,
    channels: int,
    width: int,
    activation: str | None,
) -> tuple[ir.Value, ir.Value]:
    """Standard operators; any T.

    Args:
        graph: Collects the nodes.
        x: `[B, T, C]` float32.
        weight: `[C, W]`.
        bias: `[C]` or None.
        state: `[B, C, W - 1]`.
        channels: C.
        width: W, at least 2.
        activation: None or ``"silu"``.

    Returns:
        y `[B, T, C]` and the new state.
    """
    past = graph.op("Transpose", [state], perm=[0, 2, 1])
    history = graph.op("Concat", [past, x], axis=1)
    y = graph.op("Mul", [x, _taps(graph, weight, width - 1)])
    for i, end in enumerate(graph.shared(("conv ends", width), lambda: _ends(graph, width))):
        view = graph.op("Slice", [history, graph.ints(i), end, graph.ints(1)])
        y = graph.op("Add", [y, graph.op("Mul", [view, _taps(graph, weight, i)])])
    if bias is not None:
        y = graph.op("Add", [y, bias])
    y = _activated(graph, y, activation)
    tail = graph.op("Slice", [history, graph.time, graph.ints(_END), graph.ints(1)])
    return y, graph.op("Transpose", [tail], perm=[0, 2, 1])


def _ends(graph: Graph, width: int) -> list[ir.Value]:
    """T + i for every tap but the newest: where its view of the history ends."""
    assert graph.time is not None
    later = [graph.op("Add", [graph.time, graph.ints(i)]) for i in range(1, width - 1)]
    return [graph.time, *later]


def _taps(graph: Graph, weight: ir.Value, i: int) -> ir.Value:
    """Tap i of every channel, `[C]`; the runtime folds it when it loads the model."""
    taps: ir.Value = graph.op("Gather", [weight, graph.const(i, np.int64)], axis=1)
    return taps


def fused(
    graph: Graph,
    x: ir.Value,
    weight: ir.Value,
    bias: ir.Value | None,
    state: ir.Value,
    *,
    channels: int,
    width: int,
    activation: str | None,
) -> tuple[ir.Value, ir.Value]:
    """One com.microsoft node between two Transposes; arguments and results as :func:`plain`."""
    taps = graph.op("Unsqueeze", [weight, graph.ints(1)])
    y, tail = graph.op(
        "CausalConvWithState",
        [graph.op("Transpose", [x], perm=[0, 2, 1]), taps, bias, state],
        outputs=2,
        domain="com.microsoft",
    )
    return _activated(graph, graph.op("Transpose", [y], perm=[0, 2, 1]), activation), tail


def _activated(graph: Graph, y: ir.Value, activation: str | None) -> ir.Value:
    """``y``, or silu of it."""
    if activation != "silu":
        return y
    return graph.op("Mul", [y, graph.op("Sigmoid", [y])])  # type: ignore[no-any-return]
