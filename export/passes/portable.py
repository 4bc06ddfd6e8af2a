"""Rounded matrices in standard operators: for runtimes without a kernel for MatMulNBits.

    W[n, k] = scale[n, k // block] * (q[n, k] - zero[n, k // block]);  y = x W^T

MatMulNBits becomes MatMul by W, GatherBlockQuantized the same arithmetic on the rows that were
looked up. W is computed from constants by operators that every runtime folds when it loads a graph,
so that a step costs what one of a float graph costs, with the download of a rounded one.
Activations stay float: chunks equal steps, and all machines agree as they do on a float graph.
onnxruntime's WASM build takes a MatMulNBits apart at every token, which is about ten times as slow;
its int8 products cost 1.4 times the float ones.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgelin.errors import EdgelinError
from edgelin.export.passes.edit import add_constant, constant, drop_unused, replace

_VENDOR = "com.microsoft"


def make_portable(model: ir.Model) -> bool:
    """Write every rounded matrix in standard operators.

    Raises:
        EdgelinError: The graph has rounded experts, whose product no standard operator computes.
    """
    changed, weights = False, _Weights(model)
    for node in list(model.graph):
        if node.domain != _VENDOR:
            continue
        if node.op_type == "QMoE":
            raise EdgelinError("layers of experts have no portable form; leave --portable out")
        if node.op_type == "MatMulNBits":
            weights.product(node)
            changed = True
        elif node.op_type == "GatherBlockQuantized":
            weights.lookup(node)
            changed = True
    drop_unused(model)
    return changed


class _Weights:
    """The nodes of one graph that compute weights; a matrix that is read twice is computed once."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self._computed: dict[str, ir.Value] = {}

    def product(self, node: ir.Node) -> None:
        """MatMulNBits becomes MatMul, and an Add where it has a bias."""
        x, codes = node.inputs[:2]
        bias = node.inputs[5] if len(node.inputs) > 5 else None
        name = codes.name or "" if codes is not None else ""
        new: list[ir.Node] = []
        if name not in self._computed:
            new += self._matrix(node)
            self._computed[name] = new[-1].outputs[0]
        new.append(ir.node("MatMul", [x, self._computed[name]]))
        if bias is not None:
            new.append(ir.node("Add", [new[-1].outputs[0], bias]))
        replace(self.model, node, new, new[-1].outputs)

    def lookup(self, node: ir.Node) -> None:
        """GatherBlockQuantized becomes Gather of codes and scales, and their product."""
        codes, indices, scales, *zeros = node.inputs
        bits, size = node.attributes.get_int("bits", 4), node.attributes.get_int("block_size", 0)
        rows = constant(codes)
        assert rows is not None
        width = rows.shape[1] * 8 // bits
        nodes = _Nodes(self.model)
        found = nodes.add("Gather", codes, indices)
        scale = nodes.add("Gather", scales, indices)
        zero = nodes.add("Gather", zeros[0], indices) if zeros and zeros[0] is not None else None
        nodes.values(nodes.cells(found, bits, rank=3), scale, zero, (bits, size, width), rank=3)
        replace(self.model, node, nodes.made, nodes.made[-1].outputs)

    def _matrix(self, node: ir.Node) -> list[ir.Node]:
        """Nodes that compute W^T `[K, N]` of a MatMulNBits; the last one gives it."""
        codes, scales = node.inputs[1:3]
        zeros = node.inputs[3] if len(node.inputs) > 3 else None
        bits, size, width = (node.attributes.get_int(key, 0) for key in ("bits", "block_size", "K"))
        nodes = _Nodes(self.model)
        flat = nodes.add("Reshape", codes, nodes.integers("rows_and_the_rest", [0, -1]))
        cells = nodes.cells(flat, bits, rank=2)
        nodes.values(cells, scales, zeros, (bits, size, width), rank=2)
        nodes.add("Transpose", nodes.made[-1].outputs[0], perm=[1, 0])
        return nodes.made


class _Nodes:
    """New nodes in order."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.made: list[ir.Node] = []

    def add(self, op_type: str, *inputs: ir.Value | None, **attributes: object) -> ir.Value:
        """Append a node of one output."""
        self.made.append(ir.node(op_type, inputs, attributes=attributes))  # type: ignore[arg-type]
        return self.made[-1].outputs[0]

    def integers(self, name: str, values: list[int]) -> ir.Value:
        """A constant of shapes and indices."""
        return add_constant(self.model, f"portable_{name}", np.array(values, np.int64))

    def number(self, value: int, dtype: type[np.generic]) -> ir.Value:
        """A scalar constant."""
        name = f"portable_{np.dtype(dtype).name}_{value}"
        return add_constant(self.model, name, np.array(value, dtype))

    def cells(self, packed: ir.Value, bits: int, *, rank: int) -> ir.Value:
        """One code a cell; of two in a byte the low half comes first."""
        if bits == 8:
            return packed
        last = self.integers("last", [-1])
        low = self.add("BitwiseAnd", packed, self.number(15, np.uint8))
        high = self.add("BitShift", packed, self.number(4, np.uint8), direction="RIGHT")
        halves = [self.add("Unsqueeze", half, last) for half in (low, high)]
        both = self.add("Concat", *halves, axis=-1)
        shape = self.integers(f"rank_{rank}", [0] * (rank - 1) + [-1])
        return self.add("Reshape", both, shape)

    def values(
        self,
        cells: ir.Value,
        scales: ir.Value | None,
        zeros: ir.Value | None,
        sizes: tuple[int, int, int],
        *,
        rank: int,
    ) -> ir.Value:
        """``scale * (cell - zero)`` of the first ``width`` cells of the last axis.

        Args:
            cells: uint8 `[..., cells]`.
            scales: float32 `[..., blocks]`.
            zeros: Packed zero points `[..., bytes]`; None: in the middle.
            sizes: bits, block size and width.
            rank: Number of axes.
        """
        bits, size, width = sizes
        ends = [self.integers(f"at_{n}", [n]) for n in (0, width)]
        axis = self.integers("last", [-1])
        kept = self.add("Slice", cells, *ends, axis)
        block_of = self.integers(f"blocks_{width}_{size}", [k // size for k in range(width)])
        middle: ir.Value = self.number(1 << (bits - 1), np.float32)
        if zeros is not None:
            spread = self.add("Gather", self.cells(zeros, bits, rank=rank), block_of, axis=-1)
            middle = self.add("Cast", spread, to=ir.DataType.FLOAT.value)
        steps = self.add("Sub", self.add("Cast", kept, to=ir.DataType.FLOAT.value), middle)
        return self.add("Mul", steps, self.add("Gather", scales, block_of, axis=-1))
