"""Rounded matrices in standard operators, against the same codes taken apart by loops in numpy."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from click.testing import CliRunner
from export_models import VOCAB, make_model, random_state
from numpy.typing import NDArray

import edgelin
from edgelin.cli import main
from edgelin.errors import EdgelinError
from edgelin.export import passes
from edgelin.export.bundle import export_checkpoint
from edgelin.export.passes.portable import make_portable
from edgelin.export.profiles import PROFILES
from edgelin.export.quantise.nodes import quantise
from edgelin.export.quantise.recipe import RECIPES
from edgelin.export.trace import trace
from edgelin.export.verify.compare import verify
from edgelin.runtimes.manifest import Manifest, file_records

RNG = np.random.default_rng(0)


def _codes(rows: int, blocks: int, size: int, bits: int) -> NDArray[np.uint8]:
    """Packed random codes `[rows, blocks, bytes]`."""
    return RNG.integers(0, 256, (rows, blocks, size * bits // 8)).astype(np.uint8)


def _matrix(
    codes: NDArray[Any], scales: NDArray[Any], zeros: NDArray[Any] | None, bits: int, width: int
) -> NDArray[np.float64]:
    """What codes stand for, a cell at a time."""
    rows = len(codes)
    size = codes.shape[2] * 8 // bits
    found = np.zeros((rows, width))
    for n in range(rows):
        for k in range(width):
            block, at = divmod(k, size)
            code, zero = codes[n, block, at * bits // 8], 1 << (bits - 1)
            if bits == 4:
                code = code >> 4 if at % 2 else code & 15
            if zeros is not None:
                byte = zeros[n, block // 2]
                zero = byte >> 4 if block % 2 else byte & 15
            found[n, k] = scales[n, block] * (float(code) - float(zero))
    return found


@pytest.mark.parametrize(
    ("bits", "width", "size", "asymmetric", "bias"),
    [(4, 96, 32, True, False), (4, 80, 32, True, True), (4, 32, 32, False, False),
     (8, 96, 32, False, True), (8, 48, 32, False, False)],
)  # fmt: skip
def test_product(bits: int, width: int, size: int, asymmetric: bool, bias: bool) -> None:
    rows, blocks = 6, -(-width // size)
    codes = _codes(rows, blocks, size, bits)
    scales = RNG.standard_normal((rows, blocks)).astype(np.float32)
    zeros = RNG.integers(0, 256, (rows, -(-blocks // 2))).astype(np.uint8) if asymmetric else None
    added = RNG.standard_normal(rows).astype(np.float32)
    inputs = ["x", f"w_q{bits}", "w_scales"]
    if asymmetric or bias:
        inputs.append("w_zeros" if asymmetric else "")
    if bias:
        inputs += ["", "added"]
    node = onnx.helper.make_node(
        "MatMulNBits", inputs, ["y"], domain="com.microsoft",
        K=width, N=rows, bits=bits, block_size=size, accuracy_level=4,
    )  # fmt: skip
    stored = {f"w_q{bits}": codes, "w_scales": scales, "w_zeros": zeros, "added": added}
    graph = _graph(node, {k: v for k, v in stored.items() if v is not None and k in inputs},
                   ("x", onnx.TensorProto.FLOAT, ["batch", "time", width]))  # fmt: skip
    assert make_portable(graph)
    assert all(not node.domain for node in graph.graph)
    x = RNG.standard_normal((2, 3, width)).astype(np.float32)
    (y,) = session(graph).run(None, {"x": x})
    wanted = x.astype(np.float64) @ _matrix(codes, scales, zeros, bits, width).T
    wanted += added if bias else 0
    assert np.abs(y - wanted).max() < 1e-6 * np.abs(wanted).max()


@pytest.mark.parametrize("width", [64, 48])
def test_lookup(width: int) -> None:
    rows, size, bits = 9, 32, 8
    codes = _codes(rows, 2, size, bits)
    scales = RNG.standard_normal((rows, 2)).astype(np.float32)
    node = onnx.helper.make_node(
        "GatherBlockQuantized", ["w_q8_rows", "ids", "w_scales"], ["y"], domain="com.microsoft",
        gather_axis=0, quantize_axis=1, block_size=size, bits=bits,
    )  # fmt: skip
    stored = {"w_q8_rows": codes.reshape(rows, -1)[:, :width], "w_scales": scales}
    graph = _graph(node, stored, ("ids", onnx.TensorProto.INT64, ["batch", "time"]))
    assert make_portable(graph)
    ids = np.array([[8, 0, 3], [1, 1, 7]])
    (y,) = session(graph).run(None, {"ids": ids})
    wanted = _matrix(codes, scales, None, bits, width)[ids]
    assert np.abs(y - wanted).max() < 1e-6 * np.abs(wanted).max()


def test_steps_equal_chunks_where_activations_are_rounded_no_more() -> None:
    model = make_model(("gdn", "linear"))
    graph = trace(model)
    passes.lower(graph, PROFILES["plain"])
    quantise(graph, RECIPES["int4"])
    passes.finish(graph, PROFILES["plain"])
    make_portable(graph)
    assert {node.domain for node in graph.graph} == {""}
    run, first = session(graph), random_state(model, 1)
    names = [value.name for value in graph.graph.inputs]
    ids = RNG.integers(0, VOCAB, (1, 63))

    def feed(ids: NDArray[Any], states: list[Any]) -> list[Any]:
        return list(run.run(None, dict(zip(names, [ids, *states], strict=False))))

    chunk = feed(ids, list(first.values()))
    step: list[Any] = [None, *first.values()]
    for t in range(63):
        step = feed(ids[:, t : t + 1], step[1:])
    for one, other in zip(chunk, step, strict=True):
        assert np.abs(one - other).max() <= 1e-5 * max(1.0, np.abs(one).max())


def test_rounded_experts_are_refused() -> None:
    node = onnx.helper.make_node("QMoE", ["x"], ["y"], domain="com.microsoft")
    graph = _graph(node, {}, ("x", onnx.TensorProto.FLOAT, ["batch", "time", 8]))
    with pytest.raises(EdgelinError, match="experts have no portable form"):
        make_portable(graph)


def test_option_adds_a_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def export(*paths: Path, **options: Any) -> Any:
        asked.append(options["quantise"])
        return SimpleNamespace(summary=lambda: "done")

    monkeypatch.setattr("edgelin.export.bundle.export_checkpoint", export)
    for words in ([], ["--portable"], ["--portable", "--quantize", "int8"]):
        result = CliRunner().invoke(main, ["export", "model", *words])
        assert result.exit_code == 0, result.output
    assert asked == [("none",), ("none", "portable"), ("int8", "portable")]


def test_bundle(small_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    export_checkpoint(small_checkpoint, out, quantise=("none", "int4", "portable"))
    manifest = Manifest.read(out)
    assert manifest.default_variant == "model_q4"
    operators = {
        name: v.quantisation and v.quantisation["operator"] for name, v in manifest.variants.items()
    }
    assert operators == {
        "model": None,
        "model_q4": "MatMulNBits",
        "model_quantized": "DequantizeLinear",
    }
    sizes = {
        name: v.files[f"{v.file}_data"].bytes for name, v in manifest.variants.items()
    }  # the weights are those of int4
    assert sizes["model_quantized"] <= 1.2 * sizes["model_q4"] < sizes["model"] / 2
    stream = edgelin.load(out, variant="model_quantized", threads=1).stream()
    assert stream.feed([5, 6, 7]).shape == (VOCAB,)
    assert verify(out, small_checkpoint).passed


def test_verify_finds_a_changed_code(small_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    export_checkpoint(small_checkpoint, out, quantise=("portable",))
    graph = out / "onnx" / "model_quantized.onnx"
    data = graph.with_name(f"{graph.name}_data")
    content = bytearray(data.read_bytes())
    content[100] ^= 0xFF
    data.write_bytes(content)
    manifest = Manifest.read(out)
    variant = manifest.variants["model_quantized"]
    files = file_records(out, variant.files)
    changed = {"model_quantized": dataclasses.replace(variant, files=files)}
    dataclasses.replace(manifest, variants=changed).write(out)
    with pytest.raises(EdgelinError, match="not the checkpoint's weights"):
        verify(out, small_checkpoint)


def session(graph: ir.Model) -> onnxruntime.InferenceSession:
    """Load a graph as runners do."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    content = ir.serde.serialize_model(graph).SerializeToString()
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def _graph(
    node: onnx.NodeProto, stored: dict[str, NDArray[Any]], source: tuple[str, int, list[Any]]
) -> ir.Model:
    """A graph of one node."""
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    initializers = [onnx.numpy_helper.from_array(value, name) for name, value in stored.items()]
    graph = onnx.helper.make_graph(
        [node], "one", [onnx.helper.make_tensor_value_info(*source)], [result], initializers
    )
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    return ir.serde.deserialize_model(
        onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9)
    )
