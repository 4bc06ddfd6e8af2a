"""Write a graph as ``<name>.onnx`` and its weights as ``<name>.onnx_data`` beside it.

Weights of more than ``SHARD_BYTES`` go on in ``<name>.onnx_data_1`` and so on, since browsers and
some file systems take no larger file; only a tensor that is larger itself makes a larger file.

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

SHARD_BYTES = 1900 << 20  # below 2 GB, however these are counted
_PAGE = 1 << 16
_ALIGNMENT = 16
_INLINE_BELOW = 1 << 10


def save(model: ir.Model, path: Path, shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Write the graph and its data files.

    Args:
        model: Graph with its weights in memory; not changed.
        path: Where the ``.onnx`` file goes; data files have ``_data``, ``_data_1``, ... appended.
        shard_bytes: Largest size of a data file.

    Returns:
        The files written.
    """
    large = [v for v in model.graph.initializers.values() if _is_large(v)]
    # Largest first: the padding before a page-aligned tensor then stays below one page in all.
    large.sort(key=lambda value: -_tensor(value).nbytes)
    kept = {value.name: _tensor(value) for value in large}
    try:
        with _Shards(path, shard_bytes) as shards:
            for value in large:
                value.const_value = _external(value, *shards.place(_tensor(value)))
                release()
        path.write_bytes(ir.serde.serialize_model(model).SerializeToString(deterministic=True))
    finally:
        for value in large:
            value.const_value = kept[value.name]
    return [path, *shards.paths]


class _Shards:
    """The data files of a graph as they grow."""

    def __init__(self, graph: Path, limit: int) -> None:
        self.paths: list[Path] = []
        self._graph, self._limit = graph, limit
        self._places: dict[bytes, tuple[str, int, int]] = {}
        self._open_next()

    def __enter__(self) -> _Shards:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def place(self, tensor: ir.TensorProtocol) -> tuple[str, int, int]:
        """File, offset and length of the bytes of a tensor, written unless they stand there."""
        raw = _bytes(tensor)
        key = hashlib.sha256(raw).digest()
        if key not in self._places:
            step = _PAGE if len(raw) >= _PAGE else _ALIGNMENT
            start = -(-self._file.tell() // step) * step
            if start and start + len(raw) > self._limit:
                self._file.close()
                self._open_next()
                start = 0
            self._file.write(bytes(start - self._file.tell()))
            self._file.write(raw)
            self._places[key] = (self.paths[-1].name, start, len(raw))
        return self._places[key]

    def _open_next(self) -> None:
        """Begin a file."""
        end = f"_{len(self.paths)}" if self.paths else ""
        self.paths.append(self._graph.with_name(f"{self._graph.name}_data{end}"))
        self._file = self.paths[-1].open("wb")


def external_tensors(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, offset and length of every tensor that a written graph keeps in data files."""
    model = onnx.load(str(path), load_external_data=False)
    for tensor in model.graph.initializer:
        places = {entry.key: entry.value for entry in tensor.external_data}
        if places:
            yield tensor.name, int(places["offset"]), int(places["length"])


def _is_large(value: ir.Value) -> bool:
    """Whether an initializer goes into the data file; overridable ones stay in the graph."""
    return not value.is_graph_input() and _tensor(value).nbytes >= _INLINE_BELOW


def _bytes(tensor: ir.TensorProtocol) -> memoryview:
    """The bytes of a tensor as they are stored; numpy would give each 4-bit number a byte."""
    if tensor.dtype.bitwidth < 8:
        return memoryview(tensor.tobytes())
    return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data


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
