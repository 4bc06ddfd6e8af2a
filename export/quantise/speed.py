"""How long a product with a matrix takes in a format, on this machine.

A device reads every weight once a token, from memory: so as many copies of a matrix are multiplied
in turn as no cache holds.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import helper

from edgelin.export.quantise.nodes import Matrices
from edgelin.export.quantise.recipe import Format
from edgelin.export.quantise.sensitivity import size
from edgelin.runtimes.session import default_threads

_CACHES = 48 << 20  # bytes
_MOST_COPIES = 64
_RUNS = 15
_FLOAT = onnx.TensorProto.FLOAT


class Timer:
    """Measures each shape once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, Format | None], float] = {}

    def milliseconds(self, own: Matrices, chosen: Format | None) -> float:
        """Time of multiplying one vector with matrices; lookups take none."""
        if not own.multiplies:
            return 0.0
        total = 0.0
        for rows, width in own.shapes:
            key = (rows, width, chosen)
            if key not in self._known:
                copies = max(1, min(_MOST_COPIES, _CACHES // size(own, chosen)))
                self._known[key] = _run(_graph(rows, width, chosen, copies), width) / copies
            total += self._known[key]
        return total


def _graph(rows: int, width: int, chosen: Format | None, copies: int) -> bytes:
    """A model that multiplies its input with so many matrices."""
    random = np.random.default_rng(0)
    weights: list[onnx.TensorProto] = []
    nodes: list[onnx.NodeProto] = []
    kind, domain = ("MatMul", "") if chosen is None else ("MatMulNBits", "com.microsoft")
    attributes: dict[str, int] = {}
    if chosen is not None:
        attributes = {
            "K": width,
            "N": rows,
            "bits": chosen.bits,
            "block_size": chosen.block_size,
            "accuracy_level": 4,
        }
    for i in range(copies):
        arrays = _arrays(rows, width, chosen, random)
        names = [f"{key}_{i}" for key in range(len(arrays))]
        weights += map(onnx.numpy_helper.from_array, arrays, names)
        nodes.append(helper.make_node(kind, ["x", *names], [f"y_{i}"], domain=domain, **attributes))
    outputs = [helper.make_tensor_value_info(f"y_{i}", _FLOAT, [1, rows]) for i in range(copies)]
    x = helper.make_tensor_value_info("x", _FLOAT, [1, width])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "products", [x], outputs, weights)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    content: bytes = model.SerializeToString()
    return content


def _arrays(
    rows: int, width: int, chosen: Format | None, random: np.random.Generator
) -> list[NDArray[Any]]:
    """A matrix as its kernel reads it."""
    if chosen is None:
        return [random.standard_normal((width, rows), np.float32)]
    blocks, packed = -(-width // chosen.block_size), chosen.block_size * chosen.bits // 8
    codes = random.integers(0, 255, (rows, blocks, packed), np.uint8)
    scales = random.random((rows, blocks), np.float32)
    zeros = [random.integers(0, 255, (rows, -(-blocks // 2)), np.uint8)]
    return [codes, scales.reshape(rows, blocks), *(zeros if chosen.bits == 4 else [])]


def _run(model: bytes, width: int) -> float:
    """Median time of a graph, in ms."""
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = default_threads()
    session = onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
    feeds, times = {"x": np.ones((1, width), np.float32)}, []
    for _ in range(_RUNS):
        start = perf_counter()
        session.run(None, feeds)
        times.append(perf_counter() - start)
    return 1000 * median(times)
