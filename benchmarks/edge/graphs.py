"""What an exported graph is made of: its nodes, and a graph of its quantised matrices alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

MATRIX = "MatMulNBits"
_LOOKUPS = ("Gather", "GatherBlockQuantized")


def node_counts(path: Path) -> Counter[str]:
    """How often each operator occurs in a graph file."""
    return Counter(node.op_type for node in _read(path).graph.node)


def matrices_alone(path: Path, out: Path) -> None:
    """Write a graph of the same MatMulNBits nodes, and no others, over the same data file.

    Every node reads one of the inputs ``x_K`` `[1, 1, K]` and its product is an output, so that
    nothing is left out or done twice; what is left of a step is the cost of everything else.

    Args:
        path: Quantised graph.
        out: Where to write; in the folder of ``path``, because the data file is named there.
    """
    graph = _read(path).graph
    nodes, inputs, outputs, used = [], {}, [], set()
    for index, node in enumerate(n for n in graph.node if n.op_type == MATRIX):
        sizes = {a.name: a.i for a in node.attribute if a.name in "KN"}
        source, product = f"x_{sizes['K']}", f"y_{index}"
        inputs[source] = _tensor(source, sizes["K"])
        outputs.append(_tensor(product, sizes["N"]))
        alone = onnx.NodeProto()
        alone.CopyFrom(node)
        alone.input[0], alone.output[0] = source, product
        used.update(alone.input[1:])
        nodes.append(alone)
    initializers = [tensor for tensor in graph.initializer if tensor.name in used]
    matrices = helper.make_graph(nodes, "matrices", list(inputs.values()), outputs, initializers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(matrices, opset_imports=opsets, ir_version=9)
    out.write_bytes(model.SerializeToString())


def weight_bytes(path: Path) -> int:
    """Bytes of the weights that every step reads: all but tables of which it reads a row."""
    graph = _read(path).graph
    read = {name for n in graph.node if n.op_type not in _LOOKUPS for name in n.input}
    return sum(
        math.prod(tensor.dims) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        for tensor in graph.initializer
        if tensor.name in read
    )


def runner(session: Any) -> Callable[[], object]:
    """A function that runs a graph of known shapes on random inputs, into the same outputs."""
    random, binding, kept = np.random.default_rng(0), session.io_binding(), []
    for bind, values in (
        (binding.bind_input, session.get_inputs()),
        (binding.bind_output, session.get_outputs()),
    ):
        for value in values:
            array = random.standard_normal(value.shape, np.float32)
            kept.append(array)
            bind(value.name, "cpu", 0, np.float32, array.shape, array.ctypes.data)

    def run() -> object:
        session.run_with_iobinding(binding)
        return kept  # alive as long as the function

    return run


def _read(path: Path) -> onnx.ModelProto:
    """A graph file without the data file's content."""
    return onnx.load(str(path), load_external_data=False)


def _tensor(name: str, width: int) -> onnx.ValueInfoProto:
    """One row of floats."""
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, width])
