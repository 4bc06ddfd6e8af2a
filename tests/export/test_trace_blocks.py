"""A trace with blocks that are traced once is the trace of every block, node for node."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import onnx_ir as ir
import pytest
import torch
from export_models import make_model
from torch import nn

from edgelin.export import trace_blocks
from edgelin.export.trace import trace
from edgelin.model import SequenceModel


def meaning(graph: ir.Model, weights: Container[str]) -> dict[str, int]:
    """Every output as a hash of what it is computed from: operators, attributes, weights."""
    known: dict[int, int] = {}

    def of(value: ir.Value | None) -> int:
        if value is None:
            return 0
        if id(value) in known:
            return known[id(value)]
        if value.const_value is not None:
            array = value.const_value.numpy()
            name = value.name if value.name in weights else ""  # others are the trace's own
            return hash((name, str(array.dtype), array.shape, array.tobytes()))
        return hash(("input", value.name, str(value.dtype), str(value.shape)))

    for node in graph.graph:
        attributes = tuple(sorted((n, str(a.value)) for n, a in node.attributes.items()))
        inputs = tuple(map(of, node.inputs))
        if node.op_type == "Shape" and (shape := node.inputs[0].shape) is not None:  # type: ignore[union-attr]
            start, end = (node.attributes.get_int(n, 0) for n in ("start", "end"))
            inputs, attributes = (hash(str(shape[start:end])),), ()  # of whichever tensor
        for index, value in enumerate(node.outputs):
            known[id(value)] = hash((node.domain, node.op_type, attributes, inputs, index))
    return {value.name or "": of(value) for value in graph.graph.outputs}


def every_block(model: SequenceModel, monkeypatch: pytest.MonkeyPatch, **options: Any) -> ir.Model:
    """The trace without a block that stands for others."""
    with monkeypatch.context() as patch:
        patch.setattr(trace_blocks, "kinds", lambda model: [])
        return trace(model, **options)


@pytest.mark.parametrize(
    ("layers", "options"),
    [(("full",) * 3, {}), (("ssm",) * 3, {"lengths": True})],
)
def test_same_graph(
    layers: tuple[str, ...], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(layers, tied="full" in layers)
    assert len(trace_blocks.kinds(model)) == len(set(layers))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = trace(model, **options)
    weights = model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in before.items())
    assert all("forward" not in vars(block) for block in model.blocks)
    wanted = every_block(model, monkeypatch, **options)
    assert meaning(found, weights) == meaning(wanted, weights)
    assert not found.functions and "edgelin.blocks" not in found.opset_imports
    assert set(found.graph.inputs[0].shape or ()) == set(wanted.graph.inputs[0].shape or ())


def test_blocks_that_differ_are_no_kind() -> None:
    def count(model: SequenceModel) -> list[int]:
        return [len(kind.blocks) for kind in trace_blocks.kinds(model)]

    model = make_model(("gdn",) * 4)
    assert count(model) == [4]
    model.blocks[1].mlp_norm.eps = 0.5  # type: ignore[union-attr]
    assert count(model) == [3]
    model.blocks[2].mixer.out_proj.bias = nn.Parameter(torch.ones(32))  # type: ignore[union-attr]
    assert count(model) == []
    kinds = trace_blocks.kinds(make_model(("gdn", "linear") * 3))
    assert [[specs[0].layer for specs in kind.specs] for kind in kinds] == [[0, 2, 4], [1, 3, 5]]
