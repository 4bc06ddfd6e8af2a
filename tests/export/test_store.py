"""The data file: alignment, sharing, and what a reader gets back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from edgelin.export import store

SIZES = {"page": 1 << 14, "more": 30_001, "mid": 3000, "odd": 301, "small": 255}  # floats


def _model() -> ir.Model:
    random = np.random.default_rng(0)
    arrays = {n: random.standard_normal(size).astype(np.float32) for n, size in SIZES.items()}
    arrays["again"] = arrays["more"].reshape(-1, 1)
    values = []
    for name, array in arrays.items():
        values.append(
            ir.Value(
                name=name,
                shape=ir.Shape(array.shape),
                type=ir.TensorType(ir.DataType.FLOAT),
                const_value=ir.Tensor(array, name=name),
            )
        )
    nodes = [ir.node("Identity", [value]) for value in values]
    outputs = [node.outputs[0] for node in nodes]
    for value in outputs:
        value.type = ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(
        [], outputs, nodes=nodes, initializers=values, opset_imports={"": 21}, name="weights"
    )
    return ir.Model(graph, ir_version=9)


def test_written_weights_come_back(tmp_path: Path) -> None:
    model = _model()
    path = tmp_path / "model.onnx"
    assert store.save(model, path) == [path, tmp_path / "model.onnx_data"]
    read = onnx.load(str(path))
    for tensor in read.graph.initializer:
        kept = model.graph.initializers[tensor.name].const_value
        assert isinstance(kept, ir.Tensor)  # the model in memory is as it was
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), kept.numpy())


def test_large_tensors_start_at_pages_and_equal_ones_are_one(tmp_path: Path) -> None:
    store.save(_model(), tmp_path / "model.onnx")
    places = {name: (offset, length) for name, offset, length in
              store.external_tensors(tmp_path / "model.onnx")}  # fmt: skip
    assert set(places) == {"page", "more", "again", "mid", "odd"}
    assert places["again"] == places["more"]
    for name in ("page", "more"):
        assert places[name][0] % (1 << 16) == 0
    for name in ("mid", "odd"):
        assert places[name][0] % 16 == 0
    assert (tmp_path / "model.onnx_data").stat().st_size < (1 << 16) * 3 + 3000 * 4 + 301 * 4 + 64


@pytest.mark.parametrize("limit", [1, 130_000, 300_000])
def test_shards(tmp_path: Path, limit: int) -> None:
    """No file is larger than the limit, unless one tensor is; onnxruntime reads them all."""
    model = _model()
    path, *shards = store.save(model, tmp_path / "model.onnx", limit)
    names = ["model.onnx_data", *(f"model.onnx_data_{i}" for i in range(1, len(shards)))]
    assert [shard.name for shard in shards] == names
    assert sorted(tmp_path.iterdir()) == sorted([path, *shards])
    sizes = [shard.stat().st_size for shard in shards]
    assert len(shards) == {1: 4, 130_000: 2, 300_000: 1}[limit]
    assert all(size <= limit for size in sizes) or limit == 1
    assert sum(sizes) < (1 << 16) * 3 + 3000 * 4 + 301 * 4 + 64
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for name, found in zip(SIZES | {"again": 0}, session.run(None, {}), strict=True):
        wanted = model.graph.initializers[name].const_value
        assert wanted is not None
        np.testing.assert_array_equal(found, wanted.numpy())


def test_a_failed_write_leaves_the_model_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model()

    def fail(*args: object) -> None:
        raise OSError("disk")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="disk"):
        store.save(model, tmp_path / "model.onnx")
    assert all(isinstance(v.const_value, ir.Tensor) for v in model.graph.initializers.values())
