"""The output head that shares the embedding matrix ``[vocab, width]``: one copy in the file.

``fuse_tied_head`` reads the matrix transposed inside com.microsoft FusedMatMul; ``plain_tied_head``
writes Transpose and MatMul, which a runtime folds when it loads the graph.
"""

from __future__ import annotations

import onnx_ir as ir

from edgelin.export.passes.edit import replace

OP_TYPE, DOMAIN = "tied_head", "edgelin"


def fuse_tied_head(model: ir.Model) -> bool:
    """Lower ``edgelin::tied_head(x, embedding)`` to one node."""
    heads = tied_heads(model)
    for node in heads:
        new = ir.node("FusedMatMul", node.inputs, attributes={"transB": 1}, domain="com.microsoft")
        replace(model, node, [new], new.outputs)
    return bool(heads)


def plain_tied_head(model: ir.Model) -> bool:
    """Lower ``edgelin::tied_head(x, embedding)`` to Transpose and MatMul."""
    heads = tied_heads(model)
    for node in heads:
        turned = ir.node("Transpose", [node.inputs[1]], attributes={"perm": [1, 0]})
        new = ir.node("MatMul", [node.inputs[0], turned.outputs[0]])
        replace(model, node, [turned, new], new.outputs)
    return bool(heads)


def tied_heads(model: ir.Model) -> list[ir.Node]:
    """The head nodes that still are opaque."""
    return [n for n in model.graph if n.domain == DOMAIN and n.op_type == OP_TYPE]
