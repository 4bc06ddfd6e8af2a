"""Traps of quantised arithmetic that others fell into, each with what it does and our guard.

- Signed int8 weights with dynamically quantised activations saturate on CPUs with AVX2 but without
  VNNI, and a scale for a whole call lets one loud token drown the others, so that a chunk differs
  from its steps. Guard: no such operator in any graph; MatMulNBits has a scale a block and token.
- A model whose activations are rounded too cannot be compared at 1e-5, and one compared at 1e-2
  hides a fault. Guard: the same graph with float activations at 1e-5, with rounded ones by KL.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import export_models
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgelin.export import passes
from edgelin.export.bundle import export_checkpoint
from edgelin.export.profiles import PROFILES
from edgelin.export.quantise.nodes import quantise, round_to_nearest
from edgelin.export.quantise.recipe import RECIPES, Format
from edgelin.export.trace import trace

# Operators whose activations are rounded with one scale a call, or whose weights are signed.
DYNAMIC = {
    "DynamicQuantizeLinear",
    "DynamicQuantizeMatMul",
    "DynamicQuantizeLSTM",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "ConvInteger",
    "QLinearMatMul",
    "QLinearConv",
    "QGemm",
    "QAttention",
    "QuantizeLinear",
}
K, N = 256, 96


@pytest.fixture(scope="module")
def traced() -> ir.Model:
    return trace(export_models.make_model(("gdn", "attention"), tied=False))


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", ["int8", "int4", "int4-fast"])
def test_no_graph_has_dynamic_scales_or_signed_codes(
    traced: ir.Model, profile: str, name: str
) -> None:
    graph, recipe = traced.clone(), RECIPES[name]
    assert recipe is not None
    passes.lower(graph, PROFILES[profile])
    outcome = quantise(graph, recipe)
    passes.finish(graph, PROFILES[profile])
    assert outcome.rounded
    assert not DYNAMIC & {node.op_type for node in graph.graph}
    stored = {value.dtype for value in graph.graph.initializers.values()}
    assert ir.DataType.UINT8 in stored and ir.DataType.INT8 not in stored


def _product(rows: np.ndarray[Any, Any], *, dynamic: bool) -> onnxruntime.InferenceSession:
    """``y = x W^T`` in int8: with MatMulNBits, or with one scale for all of x."""
    if dynamic:
        scale = np.abs(rows).max() / 127
        codes = np.rint(rows.T / scale).astype(np.int8)
        arrays = {"w": codes, "s": np.array([scale], np.float32)}
        node = helper.make_node(
            "DynamicQuantizeMatMul", ["x", "w", "s"], ["y"], domain="com.microsoft"
        )
    else:
        rounded = round_to_nearest(rows, Format(8, 32))
        arrays = {"w": rounded.packed(), "s": rounded.scales}
        node = helper.make_node(
            "MatMulNBits",
            ["x", "w", "s"],
            ["y"],
            domain="com.microsoft",
            K=K,
            N=N,
            bits=8,
            block_size=32,
            accuracy_level=4,
        )
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", K])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["T", N])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    return onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )


def _errors(session: onnxruntime.InferenceSession, x: Any, rows: Any) -> Any:
    """Error of each token relative to its own product, in one call."""
    wanted = x.astype(np.float64) @ rows.T.astype(np.float64)
    error = np.linalg.norm(session.run(None, {"x": x})[0] - wanted, axis=1)
    return error / np.linalg.norm(wanted, axis=1)


def test_weights_at_the_ends_of_the_range_do_not_saturate() -> None:
    """Sums of pairs of products above 2^15: where signed codes lose up to a fifth."""
    random = np.random.default_rng(0)
    rows = random.choice([-127, 127], (N, K)).astype(np.float32) / 100
    x = np.sign(rows[:3]) * random.uniform(0.9, 1, (3, K)).astype(np.float32)
    assert _errors(_product(rows, dynamic=False), x.astype(np.float32), rows).max() < 0.01


def test_a_loud_token_does_not_drown_its_neighbours() -> None:
    random = np.random.default_rng(1)
    rows = random.standard_normal((N, K)).astype(np.float32)
    x = random.standard_normal((9, K)).astype(np.float32)
    x[4] *= 1000
    ours, theirs = (_product(rows, dynamic=dynamic) for dynamic in (False, True))
    assert _errors(ours, x, rows).max() < 0.02
    assert _errors(theirs, x, rows).max() > 0.5  # the trap is there
    chunk = ours.run(None, {"x": x})[0]
    steps = np.concatenate([ours.run(None, {"x": x[t : t + 1]})[0] for t in range(len(x))])
    np.testing.assert_allclose(chunk, steps, rtol=1e-5, atol=1e-4)


def test_int4_is_exact_with_float_activations_and_near_by_kl_with_rounded_ones(
    small_checkpoint: Path, tmp_path: Path
) -> None:
    report = export_checkpoint(small_checkpoint, tmp_path / "out", quantise=("int4",))
    (found,) = report.variants.values()
    assert found.float_activations is not None and found.graph.kl is not None
    assert found.float_activations.outputs_rms < 1e-5
    assert found.graph.outputs_rms > 1e-4  # level 4 is another arithmetic
    assert found.graph.kl < 1e-3
