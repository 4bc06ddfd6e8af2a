"""Write every ``edgelin::experts`` node with the operators of a profile.

It is the last to be lowered, so that quantisation can still give it rounded matrices: then the node
has codes, scales and zero points in the place of each of its two matrices, and attributes that say
how they are stored.
"""

from __future__ import annotations

import functools
from typing import Any

import onnx_ir as ir

from edgelin.experts import onnx
from edgelin.export.passes.edit import drop_unused, replace
from edgelin.recurrences.graph import Graph

OP_TYPE, DOMAIN = "experts", "edgelin"
# Codes, scales and zero points of gate_up and down among the inputs of QMoE.
PLACES = ((2, 3, 11), (5, 6, 12))


def experts_nodes(model: ir.Model) -> list[ir.Node]:
    """The nodes that still are opaque."""
    return [n for n in model.graph if n.domain == DOMAIN and n.op_type == OP_TYPE]


def lower_experts(model: ir.Model, *, fused: bool) -> bool:
    """Replace the opaque nodes.

    Args:
        model: Lowered graph; changed in place.
        fused: Whether com.microsoft operators may compute float experts.
    """
    nodes = experts_nodes(model)
    if not nodes:
        return False
    shape = ir.node("Shape", [model.graph.inputs[0]], attributes={"end": 2})
    graph = Graph(prefix="edgelin_experts")
    for node in nodes:
        start = len(graph.nodes)
        y = _written(graph, node, shape.outputs[0], fused=fused)
        replace(model, node, graph.nodes[start:], [y])
    for value in graph.initializers.values():
        model.graph.register_initializer(value)
    model.graph.insert_before(model.graph[0], [shape, *graph.preamble])
    drop_unused(model)
    return True


def _written(graph: Graph, node: ir.Node, shape: ir.Value, *, fused: bool) -> ir.Value:
    """The nodes of one layer's experts."""
    x, chosen, weights, *matrices = node.inputs
    (experts, rows), (_, hidden) = (_shape(m)[:2] for m in matrices[:: len(matrices) // 2])
    gated, rounded = bool(node.attributes.get_int("gated")), "bits" in node.attributes
    inner = rows // 2 if gated or rounded else rows
    sizes = (experts, _shape(chosen)[-1], hidden, inner)
    form: Any = functools.partial(onnx.plain, gated=gated)
    if rounded:
        stored = ("bits", "block_size", "accuracy_level")
        rounding: dict[str, Any] = {name: node.attributes.get_int(name) for name in stored}
        form = functools.partial(onnx.quantised, gated=gated, **rounding)
    elif fused and gated:
        form = onnx.fused
    y: ir.Value = form(graph, x, chosen, weights, *matrices, shape=shape, sizes=sizes)
    return y


def _shape(value: ir.Value | None) -> list[int]:
    """Sizes, symbolic ones as -1."""
    assert value is not None and value.shape is not None
    return [size if isinstance(size, int) else -1 for size in value.shape]
