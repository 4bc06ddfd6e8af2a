"""Activations of a quantised graph, which its kernels round to 8 bits.

At accuracy_level 4, MatMulNBits and QMoE round what they multiply a matrix with, as many numbers
along the last axis at a time as share a scale in the matrix:

    s = max|x| / 127,   x' = s round(x / s)

That is half a percent of every product, and how far it goes from there depends on the model: 0.013
of the logits of a trained one of 8 layers, 0.45 of those of 24 layers with random weights. No fixed
limit tells it from a fault. So a quantised graph is asked two questions, and both answers are exact
for any depth and any scale of the logits:

- :func:`float_activations`: is it the model with the rounded weights, when the same nodes over the
  same file of weights leave their activations float (accuracy_level 0)? As near as a float graph.
- :class:`RoundedActivations`: is it as far from that model as rounded activations must be? They are
  rounded in the float64 model too; this is the same noise, drawn twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_LARGEST = 127
_WIDTH = 8192
_ATTRIBUTE = "accuracy_level"


@contextlib.contextmanager
def float_activations(graph: Path) -> Iterator[Path]:
    """A quantised graph with float activations, over the same weights; the file is temporary.

    Open it without prepacking: with packed weights, QMoE of 8 bits rounds at any level. The kernels
    then take the whole matrix apart, so that the rows of a wide one, such as the output head, are
    given to several nodes.
    """
    model = onnx.load(str(graph), load_external_data=False)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes = [part for node in model.graph.node for part in _narrow(node, stored)]
    for node in nodes:
        for attribute in node.attribute:
            if attribute.name == _ATTRIBUTE:
                attribute.i = 0
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(stored.values())
    path = graph.with_name(f"{graph.stem}_float_activations.onnx")
    try:
        path.write_bytes(model.SerializeToString())
        yield path
    finally:
        path.unlink(missing_ok=True)


def _narrow(node: onnx.NodeProto, stored: dict[str, onnx.TensorProto]) -> list[onnx.NodeProto]:
    """A MatMulNBits, cut into some of at most ``_WIDTH`` rows whose results are concatenated."""
    rows = next((a.i for a in node.attribute if a.name == "N"), 0)
    inputs = [name for name in node.input[1:] if name]
    if rows <= _WIDTH or not all(stored[name].external_data for name in inputs):
        return [node]
    parts = []
    for start in range(0, rows, _WIDTH):
        count = min(_WIDTH, rows - start)
        part = onnx.NodeProto()
        part.CopyFrom(node)
        part.name, part.output[0] = "", f"{node.output[0]}_{start}"
        for attribute in part.attribute:
            if attribute.name == "N":
                attribute.i = count
        for i, name in enumerate(node.input):
            if i and name:
                part.input[i] = f"{name}_{start}"
                stored[part.input[i]] = _cut(stored[name], start, count, part.input[i])
        parts.append(part)
    outputs = [part.output[0] for part in parts]
    return [*parts, onnx.helper.make_node("Concat", outputs, list(node.output), axis=-1)]


def _cut(tensor: onnx.TensorProto, start: int, count: int, name: str) -> onnx.TensorProto:
    """Some rows of a tensor in a file of weights."""
    part = onnx.TensorProto()
    part.CopyFrom(tensor)
    part.name, part.dims[0] = name, count
    places = {entry.key: entry for entry in part.external_data}
    row = int(places["length"].value) // tensor.dims[0]
    places["offset"].value = str(int(places["offset"].value) + start * row)
    places["length"].value = str(count * row)
    return part


class RoundedActivations(TorchFunctionMode):
    """Rounds what a model in torch multiplies some of its matrices with.

    Args:
        matrices: The parameters, each with the numbers that share a scale; others keep exact
            activations.
    """

    def __init__(self, matrices: Sequence[tuple[Tensor, int]]) -> None:
        super().__init__()
        self._matrices = matrices

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        size = self._block_size(args[1]) if func is F.linear else None
        if size is not None:
            args = (round_activations(args[0], size), *args[1:])
        return func(*args, **(kwargs or {}))

    def _block_size(self, weight: Tensor) -> int | None:
        """That of the matrix that a weight is, or that an expert has a part of; None: of none."""
        place = weight.untyped_storage().data_ptr()
        sizes = (n for matrix, n in self._matrices if matrix.untyped_storage().data_ptr() == place)
        return next(sizes, None)


def round_activations(x: Tensor, block_size: int) -> Tensor:
    """`[..., K]` as the kernels multiply with it."""
    width = x.shape[-1]
    blocks = F.pad(x, (0, -width % block_size)).unflatten(-1, (-1, block_size))
    scale = blocks.abs().amax(-1, keepdim=True) / _LARGEST
    steps = (blocks / scale.where(scale > 0, 1)).round()
    rounded: Tensor = (scale * steps).flatten(-2)[..., :width]
    return rounded
