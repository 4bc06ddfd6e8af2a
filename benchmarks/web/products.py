"""Write the graphs that ``products.mjs`` compares: 24 products of one vector by matrices of 8.7 M
weights in all, as an exporter for WebAssembly could write them.

    python benchmarks/web/products.py FOLDER

``float`` is also what int4 weights in DequantizeLinear become when they are loaded; ``tensor`` and
``fused`` round a call's activations with one scale, as onnxruntime's dynamic quantisation does, so
that a chunk gives other numbers than its steps; ``row`` gives every step its own scale.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx_ir as ir

_SHAPES = ((256, 1408), (1408, 256)) * 12
_VENDOR = "com.microsoft"


class _Graph:
    """A graph in the making."""

    def __init__(self) -> None:
        self.x = self.last = ir.val("x", ir.DataType.FLOAT, [1, "time", 256])
        self.nodes: list[ir.Node] = []
        self.constants: list[ir.Value] = []

    def constant(self, array: np.ndarray) -> ir.Value:
        """An initializer."""
        name = f"c{len(self.constants)}"
        self.constants.append(ir.Value(name=name, const_value=ir.tensor(array, name=name)))
        return self.constants[-1]

    def node(
        self, kind: str, *inputs: ir.Value, outputs: int = 1, domain: str = "", **settings: int
    ) -> ir.Value:
        """The first output of a new node."""
        made = ir.node(kind, inputs, attributes=settings, domain=domain, num_outputs=outputs)
        for number, value in enumerate(made.outputs):
            value.name = f"v{len(self.nodes)}_{number}"
        self.nodes.append(made)
        return made.outputs[0]

    def save(self, path: Path) -> None:
        """Write the file."""
        self.last.type, self.last.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([1, None, 256])
        graph = ir.Graph(
            [self.x], [self.last], nodes=self.nodes, initializers=self.constants,
            opset_imports={"": 21, _VENDOR: 1}, name="products",
        )  # fmt: skip
        ir.save(ir.Model(graph, ir_version=9), path)


def multiply(graph: _Graph, kind: str, weight: np.ndarray) -> ir.Value:
    """The last value times a matrix `[K, N]`, in one of the forms."""
    x = graph.last
    if kind == "float":
        return graph.node("MatMul", x, graph.constant(weight))
    per_column = kind != "fused"
    scale = (np.abs(weight).max(axis=0 if per_column else None) / 127).astype(np.float32)
    codes = graph.constant(np.clip(np.round(weight / scale) + 128, 0, 255).astype(np.uint8))
    scales, middle = graph.constant(scale), graph.constant(np.uint8(128))
    if kind == "fused":
        return graph.node("DynamicQuantizeMatMul", x, codes, scales, middle, domain=_VENDOR)
    if kind == "tensor":
        graph.node("DynamicQuantizeLinear", x, outputs=3)
        rounded, step, zero = graph.nodes[-1].outputs
    else:
        axes = graph.constant(np.array([-1]))
        largest = graph.node("ReduceMax", graph.node("Abs", x), axes)
        step = graph.node("Mul", largest, graph.constant(np.float32(1 / 127)))
        turned = graph.node("Round", graph.node("Div", x, step))
        moved = graph.node("Add", turned, graph.constant(np.float32(128)))
        rounded, zero = graph.node("Cast", moved, to=int(ir.DataType.UINT8)), middle
    product = graph.node("MatMulInteger", rounded, codes, zero, middle)
    number = graph.node("Cast", product, to=int(ir.DataType.FLOAT))
    return graph.node("Mul", number, graph.node("Mul", scales, step))


def main() -> None:
    """Write all forms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for kind in ("float", "tensor", "fused", "row"):
        random, graph = np.random.default_rng(0), _Graph()
        for shape in _SHAPES:
            weight = random.standard_normal(shape, np.float32) / np.float32(shape[0] ** 0.5)
            graph.last = multiply(graph, kind, weight)
        graph.save(folder / f"{kind}.onnx")


if __name__ == "__main__":
    main()
