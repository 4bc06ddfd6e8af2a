"""Write every ``edgelin::`` recurrence node with the ONNX operators of a profile.

The translations live beside the recurrences (``edgelin/recurrences/*/onnx.py``); this pass reads
the sizes from the traced shapes, calls them with one node builder for the whole graph, so that
masks and tables are made once, and puts that shared preamble before the first layer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from edgelin.export.passes.edit import drop_unused, replace
from edgelin.recurrences import CHUNK
from edgelin.recurrences.graph import Graph

DOMAIN = "edgelin"


def lower_recurrences(model: ir.Model, form: str) -> bool:
    """Replace the opaque nodes.

    Args:
        model: Traced graph; changed in place.
        form: ``"plain"`` or ``"fused"``: which function of the ``onnx.py`` files to call.
    """
    targets = [n for n in model.graph if n.domain == DOMAIN and n.op_type in _ARGUMENTS]
    if not targets:
        return False
    time = ir.node("Shape", [model.graph.inputs[0]], attributes={"start": 1, "end": 2})
    graph = Graph(time.outputs[0], CHUNK)
    for node in targets:
        folder, arguments = _ARGUMENTS[node.op_type]
        module = importlib.import_module(f"edgelin.recurrences.{folder}.onnx")
        start = len(graph.nodes)
        outputs = getattr(module, form)(graph, *node.inputs, **arguments(node))
        replace(model, node, graph.nodes[start:], outputs)
    for value in graph.initializers.values():
        model.graph.register_initializer(value)
    model.graph.insert_before(model.graph[0], [time, *graph.preamble])
    drop_unused(model)
    return True


def _shape(node: ir.Node, index: int) -> list[int]:
    """Sizes of an input behind batch, symbolic axes as -1."""
    value = node.inputs[index]
    assert value is not None and value.shape is not None
    return [size if isinstance(size, int) else -1 for size in value.shape]


def _matrix(node: ir.Node, gate: int) -> dict[str, Any]:
    """Arguments that the matrix-state recurrences share; ``gate`` is the index of g."""
    _, heads, key_dim, value_dim = _shape(node, len(node.inputs) - 1)
    decay = "none"
    if node.inputs[gate] is not None:
        decay = "head" if len(_shape(node, gate)) == 3 else "key"
    scale = node.attributes.get_float("scale")
    return {
        "heads": heads,
        "key_dim": key_dim,
        "value_dim": value_dim,
        "decay": decay,
        "scale": scale,
    }


def _linear(node: ir.Node) -> dict[str, Any]:
    """Arguments of the linear recurrence."""
    return {**_matrix(node, 3), "exclusive": bool(node.attributes.get_int("exclusive", 0))}


def _delta(node: ir.Node) -> dict[str, Any]:
    """Arguments of the delta rule."""
    return {**_matrix(node, 4), "key_heads": _shape(node, 0)[2]}


def _low_rank(node: ir.Node) -> dict[str, Any]:
    """Arguments of the diagonal plus low rank recurrence."""
    matrix = _matrix(node, 5)
    return {name: matrix[name] for name in ("heads", "key_dim", "scale")}


def _convolution(node: ir.Node) -> dict[str, Any]:
    """Arguments of the short convolution."""
    channels, width = _shape(node, 1)
    name = node.attributes.get_string("activation")
    return {
        "channels": channels,
        "width": width,
        "activation": None if name == "none" else name,
    }


def _channels(node: ir.Node) -> dict[str, Any]:
    """Arguments of the recurrences with N states a channel; the state is the last input."""
    _, channels, size = _shape(node, len(node.inputs) - 1)[:3]
    return {"channels": channels, "state_dim": size}


def _elman(node: ir.Node) -> dict[str, Any]:
    """Arguments of the non-linear recurrence."""
    weight = _shape(node, 1)
    return {
        "channels": weight[-1],
        "full": len(weight) == 2,
        "activation": node.attributes.get_string("activation"),
    }


# Operator -> folder of its onnx.py and the function that reads the keyword arguments off a node.
_ARGUMENTS: dict[str, tuple[str, Callable[[ir.Node], dict[str, Any]]]] = {
    "linear": ("linear", _linear),
    "delta": ("delta", _delta),
    "dplr": ("dplr", _low_rank),
    "diagonal": ("diagonal", _channels),
    "lti": ("lti", _channels),
    "rnn": ("rnn", _elman),
    "running_max": ("running_max", lambda node: {}),
    "short_convolution": ("conv", _convolution),
}
OPERATORS = tuple(_ARGUMENTS)
