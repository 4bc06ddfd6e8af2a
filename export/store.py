"""Write a graph as ``<name>.onnx`` and its weights as ``<name>.onnx_data`` beside it.

External data is what lets a runtime map the weights instead of copying them. Tensors of 64 KiB and
more start at multiples of 64 KiB (the allocation granularity of Windows' file mappings), smaller
ones at multiples of 16 bytes, and those below 1 KiB stay in the graph file. Tensors with the same
bytes are stored once, whatever their shapes: so a tied embedding is one block of the file, read in
two shapes by the lookup and by the head.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from edgelin.mapped import release

_PAGE = 1 << 16
_ALIGNMENT = 16
_INLINE_BELOW = 1 << 10


def save(model: ir.Model, path: Path) -> list[Path]:
    """Write the graph and its data file.

    Args:
        model: Graph with its weights in memory; not changed.
        path: Where the ``.onnx`` file goes; the data file has ``_data`` appended.

    Returns:
        The files written.
    """
    data = path.with_name(f"{path.name}_data")
    large = [v for v in model.graph.initializers.values() if _is_large(v)]
    # Largest first: the padding before a page-aligned tensor then stays below one page in all.
    large.sort(key=lambda value: -_tensor(value).nbytes)
    kept = {value.name: _tensor(value) for value in large}
    places: dict[bytes, tuple[int, int]] = {}
    try:
        with data.open("wb") as file:
            for value in large:
                raw = np.ascontiguousarray(_tensor(value).numpy()).reshape(-1).view(np.uint8).data
                key = hashlib.sha256(raw).digest()
                if key not in places:
                    step = _PAGE if len(raw) >= _PAGE else _ALIGNMENT
                    file.write(bytes(-file.tell() % step))
                    places[key] = (file.tell(), len(raw))
                    file.write(raw)
                release()
                offset, length = places[key]
                value.const_value = _external(value, data.name, offset, length)
        path.write_bytes(ir.serde.serialize_model(model).SerializeToString(deterministic=True))
    finally:
        for value in large:
            value.const_value = kept[value.name]
    return [path, data]


def external_tensors(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, offset and length of every tensor that a written graph keeps in its data file."""
    model = onnx.load(str(path), load_external_data=False)
    for tensor in model.graph.initializer:
        places = {entry.key: entry.value for entry in tensor.external_data}
        if places:
            yield tensor.name, int(places["offset"]), int(places["length"])


def _is_large(value: ir.Value) -> bool:
    """Whether an initializer goes into the data file; overridable ones stay in the graph."""
    return not value.is_graph_input() and _tensor(value).nbytes >= _INLINE_BELOW


def _tensor(value: ir.Value) -> ir.TensorProtocol:
    """Content of an initializer."""
    assert value.const_value is not None
    return value.const_value


def _external(value: ir.Value, location: str, offset: int, length: int) -> ir.ExternalTensor:
    """A tensor that lies in the data file."""
    shape = ir.Shape(_tensor(value).numpy().shape)
    return ir.ExternalTensor(
        location, offset, length, _tensor(value).dtype, shape=shape, name=value.name or ""
    )
