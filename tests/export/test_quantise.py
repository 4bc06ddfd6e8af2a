"""Rounding against brute force, and the packed layouts against onnxruntime's own operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from export_models import session

from edgelin.errors import EdgelinError
from edgelin.export.quantise import rounding
from edgelin.export.quantise.gptq import gptq
from edgelin.export.quantise.nodes import quantise, round_to_nearest
from edgelin.export.quantise.recipe import RECIPES, Format, Recipe
from edgelin.export.quantise.rounding import round_matrix
from edgelin.export.verify.weights import check_weights

WIDTH, ROWS = 80, 12  # no multiple of the block of 32


def _matrix(seed: int = 0, width: int = WIDTH) -> np.ndarray[Any, np.dtype[np.float32]]:
    random = np.random.default_rng(seed)
    return (0.02 * random.standard_t(5, (ROWS, width)) + 0.005).astype(np.float32)


def _plain_rounding(rows: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """Symmetric rounding by the largest weight of each block, one weight at a time."""
    result = np.zeros(rows.shape)
    half = 1 << (bits - 1)
    for i, row in enumerate(rows.astype(np.float64)):
        for start in range(0, len(row), 32):
            block = row[start : start + 32]
            scale = -block[np.abs(block).argmax()] / half
            codes = [min(max(round(w / scale), -half), half - 1) for w in block]
            result[i, start : start + 32] = [code * scale for code in codes]
    return result


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_beats_the_largest_weight_rule(bits: int, symmetric: bool) -> None:
    rows = _matrix()
    got = round_matrix(rows, bits, 32, symmetric=symmetric).values(WIDTH)
    plain = np.linalg.norm(_plain_rounding(rows, bits) - rows)
    assert np.linalg.norm(got - rows) < plain
    step = np.abs(rows).max() / (1 << (bits - 1))
    assert np.abs(got - rows).max() < 1.5 * step


def _least_error(block: np.ndarray[Any, Any], bits: int, symmetric: bool) -> float:
    """The squared error of the best candidate, a weight at a time in float64."""
    levels, middle = (1 << bits) - 1, 1 << (bits - 1)
    low, high = min(block.min(), 0.0), max(block.max(), 0.0)
    full = -(high if high > -low else low) / middle if symmetric else (high - low) / levels
    found = []
    for shrink in {4: np.linspace(1.0, 0.68, 9), 8: np.linspace(1.0, 0.94, 4)}[bits]:
        zero = middle if symmetric else min(max(round(-low / (full * shrink)), 0), levels)
        steps = [min(max(round(w / (full * shrink) + zero), 0), levels) - zero for w in block]
        best = sum(k * w for k, w in zip(steps, block, strict=True)) / sum(k * k for k in steps)
        found.append(sum((k * best - w) ** 2 for k, w in zip(steps, block, strict=True)))
    return min(found)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_search(bits: int, symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best candidate of every block, in pieces of any size."""
    rows = _matrix(width=96)
    found = round_matrix(rows, bits, 32, symmetric=symmetric)
    errors = np.square(found.values(96).astype(np.float64) - rows).reshape(ROWS, 3, 32).sum(-1)
    blocks = rows.astype(np.float64).reshape(ROWS, 3, 32)
    wanted = [[_least_error(block, bits, symmetric) for block in row] for row in blocks]
    np.testing.assert_allclose(errors, wanted, rtol=1e-3)
    monkeypatch.setattr(rounding, "_AT_ONCE", 200)  # two rows
    again = round_matrix(rows, bits, 32, symmetric=symmetric)
    assert again.codes.tobytes() == found.codes.tobytes()
    assert again.scales.tobytes() == found.scales.tobytes()


def test_zeros_and_constants_survive() -> None:
    rows = np.zeros((3, 64), np.float32)
    rows[1] = 0.25
    rows[2, 5] = -3e-39
    for bits in (4, 8):
        for symmetric in (True, False):
            got = round_matrix(rows, bits, 32, symmetric=symmetric).values(64)
            assert np.isfinite(got).all()
            np.testing.assert_allclose(got, rows, atol=1e-3)


def _value(name: str, shape: list[Any], dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def _weight(name: str, array: np.ndarray[Any, Any]) -> ir.Value:
    value = _value(name, list(array.shape))
    value.const_value = ir.Tensor(array, name=name)
    return value


def _model(
    width: int = WIDTH,
) -> tuple[ir.Model, dict[str, np.ndarray[Any, np.dtype[np.float32]]]]:
    """Embedding and head of one matrix, a projection with a bias, and one that stays float."""
    table, up, gate = (_matrix(seed, width) for seed in (1, 2, 3))
    bias = np.arange(ROWS, dtype=np.float32)
    ids = _value("ids", ["batch", "time"], ir.DataType.INT64)
    x = _value("x", ["batch", "time", width])
    weights = {
        "embedding.weight": table,
        "up.weight": np.ascontiguousarray(up.T),
        "up.bias": bias,
        "beta_decay_proj.weight": np.ascontiguousarray(gate.T),
    }
    values = {name: _weight(name, array) for name, array in weights.items()}
    embedded = ir.node("Gather", [values["embedding.weight"], ids])
    head = ir.node("tied_head", [x, values["embedding.weight"]], domain="edgelin")
    product = ir.node("MatMul", [x, values["up.weight"]])
    added = ir.node("Add", [product.outputs[0], values["up.bias"]])
    kept = ir.node("MatMul", [x, values["beta_decay_proj.weight"]])
    nodes = [embedded, head, product, added, kept]
    outputs = []
    for name, node in (("e", embedded), ("h", head), ("u", added), ("k", kept)):
        node.outputs[0].name, node.outputs[0].type = name, ir.TensorType(ir.DataType.FLOAT)
        outputs.append(node.outputs[0])
    graph = ir.Graph(
        [ids, x],
        outputs,
        nodes=nodes,
        initializers=list(values.values()),
        opset_imports={"": 21, "com.microsoft": 1},
        name="test",
    )
    return ir.Model(graph, ir_version=9), {"table": table, "up": up, "gate": gate, "bias": bias}


@pytest.mark.parametrize(
    ("bits", "width", "size"), [(4, 80, 32), (4, 2048, 256), (8, 80, 32), (8, 1024, 128)]
)
def test_graph_computes_with_the_rounded_matrices(bits: int, width: int, size: int) -> None:
    model, weights = _model(width)
    outcome = quantise(model, Recipe.of(bits, block_size=size))
    assert {n.attributes.get_int("block_size", size) for n in model.graph} == {size}
    assert sorted(outcome.rounded) == ["embedding.weight", "up.weight"]
    assert [n.op_type for n in model.graph] == [
        "GatherBlockQuantized",
        "MatMulNBits",
        "MatMulNBits",
        "MatMul",
    ]
    random = np.random.default_rng(4)
    x = random.standard_normal((2, 3, width)).astype(np.float32)
    ids = random.integers(0, ROWS, (2, 3))
    e, h, u, k = session(model).run(None, {"ids": ids, "x": x})
    table = outcome.rounded["embedding.weight"].values(width)
    up = outcome.rounded["up.weight"].values(width)
    np.testing.assert_allclose(e, table[ids], atol=1e-6)
    np.testing.assert_allclose(k, x @ weights["gate"].T, atol=1e-5)
    # accuracy_level 4 rounds x to int8 too: 1 % of the largest product.
    for got, wanted in ((h, x @ table.T), (u, x @ up.T + weights["bias"])):
        assert np.abs(got - wanted).max() < 0.02 * np.abs(x @ up.T).max()


@pytest.mark.parametrize(
    ("bits", "widths", "size"),
    [
        (4, (1024,), 32),
        (8, (1024,), 128),
        (8, (1536,), 128),
        (8, (576,), 64),
        (8, (384,), 32),
        (8, (96,), 32),
        (8, (80,), 32),
        (8, (2048, 1088), 64),
        (8, (2048, 512), 64),
    ],
)
def test_blocks_fill_the_rows(bits: int, widths: tuple[int, ...], size: int) -> None:
    assert Recipe.of(bits).block(bits, *widths) == size


@pytest.mark.parametrize(
    ("width", "size"), [(1024, 256), (2816, 256), (576, 64), (384, 64), (96, 32)]
)
def test_fast_blocks_of_four_bits(width: int, size: int) -> None:
    recipe = RECIPES["int4-fast"]
    assert recipe is not None and recipe.block(4, width) == size


def test_recipe_words_are_whole_words() -> None:
    model, _ = _model()
    names = {"beta_decay_proj.weight": "width.weight", "up.weight": "dt_proj.weight"}
    for value in model.graph.initializers.values():
        value.name = names.get(value.name or "", value.name)
    outcome = quantise(model, Recipe.of(4, roles={"embedding": 8}))
    assert sorted(outcome.rounded) == ["embedding.weight", "width.weight"]
    assert outcome.matrices["embedding.weight"]["bits"] == 8


def test_codes_that_a_text_decided_are_told_from_other_weights(tmp_path: Path) -> None:
    model, own = _model()
    weights = {
        "embedding.weight": own["table"],
        "up.weight": own["up"],
        "up.bias": own["bias"],
        "beta_decay_proj.weight": own["gate"],
    }
    x = np.random.default_rng(5).standard_normal((300, 7)) @ np.ones((7, WIDTH))
    x += 0.1 * np.random.default_rng(6).standard_normal(x.shape)
    nearest = round_to_nearest(own["up"], Format(4, 32))
    codes = nearest.codes.copy()
    rounded = gptq(own["up"], torch.from_numpy(x.T @ x), nearest)
    assert (rounded.codes != codes).mean() > 0.02
    quantise(model, Recipe.of(4), rounded={"up.weight": rounded})
    path = tmp_path / "model.onnx"
    ir.save(model, path)
    check_weights(path, weights, list, most_codes=1)
    with pytest.raises(EdgelinError, match=r"not the checkpoint's weights: up\.weight;"):
        check_weights(path, weights, list)
    value = model.graph.initializers["up.weight_q4"]
    assert value.const_value is not None
    packed = value.const_value.numpy().copy()
    packed[3, 1, 4] = (packed[3, 1, 4] & 0xF0) | ((packed[3, 1, 4] + 5) & 0x0F)
    value.const_value = ir.Tensor(packed, name=value.name)
    ir.save(model, path)
    with pytest.raises(EdgelinError, match=r"not the checkpoint's weights: up\.weight;"):
        check_weights(path, weights, list, most_codes=1)
