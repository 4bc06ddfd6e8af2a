"""Rounded matrices in standard operators: for runtimes without a kernel for MatMulNBits.

    W[k, n] = scale[k // block, n] * (q[k, n] - zero[k // block, n]);  y = x W

MatMulNBits becomes MatMul by a DequantizeLinear of constants, GatherBlockQuantized the same
arithmetic on the rows that were looked up. With the session option ``disable_quant_qdq``,
onnxruntime computes W when it loads the graph: a step then costs what one of a float graph costs,
the file has the size of a rounded one, and activations stay float, so that chunks equal steps and
all machines agree as they do on a float graph. Its WASM build takes a MatMulNBits apart at every
token, about ten times as slow; int8 products there cost 1.4 times the float ones.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edgelin.errors import EdgelinError
from edgelin.export.passes.edit import add_constant, constant, drop_unused, replace

NO_EXPERTS = "layers of experts have no portable form; leave --portable out"
_VENDOR = "com.microsoft"

Codes = npt.NDArray[np.uint8]


def make_portable(model: ir.Model) -> bool:
    """Write every rounded matrix in standard operators.

    Raises:
        EdgelinError: The graph has rounded experts, whose product no standard operator computes.
    """
    nodes = [node for node in model.graph if node.domain == _VENDOR]
    if any(node.op_type == "QMoE" for node in nodes):
        raise EdgelinError(NO_EXPERTS)
    looked_up = {_name(node.inputs[0]) for node in nodes if node.op_type == "GatherBlockQuantized"}
    changed = False
    for node in nodes:
        if node.op_type == "MatMulNBits":
            stem = _name(node.inputs[1])
            tied = any(name.removesuffix("_rows") == stem for name in looked_up)
            _product(model, node, tied=tied)
            changed = True
        elif node.op_type == "GatherBlockQuantized":
            _lookup(model, node)
            changed = True
    drop_unused(model)
    return changed


def _product(model: ir.Model, node: ir.Node, *, tied: bool) -> None:
    """MatMulNBits becomes MatMul, and an Add where it has a bias.

    A matrix that rows are also looked up in is stored as these rows, and turned when it is loaded.
    """
    inputs = [*node.inputs, *[None] * 6][:6]
    x, codes, scales, zeros, _, bias = inputs
    bits, size, width = (node.attributes.get_int(key, 0) for key in ("bits", "block_size", "K"))
    stem = _stem(_name(codes))
    rows = _cells(_array(codes), bits)[:, :width]
    parts = _parts(rows, _array(scales), None if zeros is None else _array(zeros), bits)
    turned = parts if tied else [np.ascontiguousarray(part.T) for part in parts]
    stored = _store(model, stem, turned, bits)
    weight = ir.node("DequantizeLinear", stored, attributes={"axis": int(tied), "block_size": size})
    new = [weight]
    if tied:
        new.append(ir.node("Transpose", [weight.outputs[0]], attributes={"perm": [1, 0]}))
    new.append(ir.node("MatMul", [x, new[-1].outputs[0]]))
    if bias is not None:
        new.append(ir.node("Add", [new[-1].outputs[0], bias]))
    replace(model, node, new, new[-1].outputs)


def _lookup(model: ir.Model, node: ir.Node) -> None:
    """GatherBlockQuantized becomes Gather of codes and scales, and DequantizeLinear of these."""
    codes, indices, scales, *zeros = node.inputs
    bits, size = node.attributes.get_int("bits", 4), node.attributes.get_int("block_size", 0)
    if bits != 8 or zeros:
        raise EdgelinError(f"an embedding of {bits} bits has no portable form; choose int8 for it")
    parts = _parts(_array(codes), _array(scales), None, bits)
    stored = _store(model, _stem(_name(codes)), parts, bits)
    found = [ir.node("Gather", [value, indices]) for value in stored]
    product = ir.node(
        "DequantizeLinear",
        [one.outputs[0] for one in found],
        attributes={"axis": 2, "block_size": size},
    )
    replace(model, node, [*found, product], product.outputs)


def _parts(
    rows: Codes, scales: npt.NDArray[Any], zeros: Codes | None, bits: int
) -> list[npt.NDArray[Any]]:
    """Codes `[N, K]`, scales `[N, blocks]` and zero points, in the types of DequantizeLinear."""
    scales = scales.reshape(len(rows), -1).astype(np.float32)
    if zeros is not None:
        cells = _cells(zeros, bits)[:, : scales.shape[1]]
        return [rows.astype(_UNSIGNED[bits]), scales, cells.astype(_UNSIGNED[bits])]
    middle = 1 << (bits - 1)
    return [(rows.astype(np.int16) - middle).astype(_SIGNED[bits]), scales]


_SIGNED: dict[int, Any] = {4: ml_dtypes.int4, 8: np.int8}
_UNSIGNED: dict[int, Any] = {4: ml_dtypes.uint4, 8: np.uint8}


def _store(model: ir.Model, stem: str, parts: list[npt.NDArray[Any]], bits: int) -> list[ir.Value]:
    """Initializers; their names are not those that a MatMulNBits reads."""
    names = [f"{stem}_dq{bits}", f"{stem}_dq_scales", f"{stem}_dq_zero_points"]
    return [add_constant(model, name, part) for name, part in zip(names, parts, strict=False)]


def _cells(packed: Codes, bits: int) -> Codes:
    """`[N, bytes]` to one code a cell; for 4 bits the low half of a byte comes first."""
    flat = packed.reshape(len(packed), -1)
    if bits == 8:
        return flat
    return np.stack([flat & 15, flat >> 4], axis=-1).reshape(len(flat), -1)


def _stem(name: str) -> str:
    """Name of the parameter whose codes these are."""
    return name.removesuffix("_rows").removesuffix("_q4").removesuffix("_q8")


def _name(value: ir.Value | None) -> str:
    """Name of a value."""
    return "" if value is None else value.name or ""


def _array(value: ir.Value | None) -> npt.NDArray[Any]:
    """Content of a constant."""
    found = constant(value)
    assert found is not None
    return found
