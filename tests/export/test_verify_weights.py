"""``verify --checkpoint`` holds every weight of a bundle to the checkpoint's."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from edgelin.errors import EdgelinError
from edgelin.export import store
from edgelin.export.bundle import export_checkpoint
from edgelin.export.verify import compare as verifying
from edgelin.export.verify.weights import check_weights, computed_constants, read_weights
from edgelin.runtimes import load
from edgelin.runtimes.manifest import Manifest, Variant, file_records

VARIANTS = ("model", "model_q8", "model_q4")
DOWN, EMBEDDING = "blocks.1.mlp.down_proj.weight", "embedding.weight"


@pytest.fixture(scope="module")
def bundle(small_checkpoint: Path) -> Path:
    out = small_checkpoint.with_name("weights_bundle")
    export_checkpoint(small_checkpoint, out, quantise=("none", "int8", "int4"))
    return out


def _edited(bundle: Path, out: Path, variant: str, name: str, edit: Callable[[Any], Any]) -> Path:
    """A copy whose initializer ``name`` is another, with right hashes."""
    shutil.copytree(bundle, out)
    graph = out / "onnx" / f"{variant}.onnx"
    model = ir.load(graph)
    for value in model.graph.initializers.values():
        assert value.const_value is not None
        array = value.const_value.numpy().copy()
        if value.name == name:
            edit(array)
        value.const_value = ir.Tensor(array, name=value.name)
    assert name in model.graph.initializers
    store.save(model, graph)
    manifest = Manifest.read(out)
    old = manifest.variants[variant]
    records = file_records(out, old.files)
    manifest.variants[variant] = Variant(old.file, records, old.quantisation)
    manifest.write(out)
    return out


@pytest.mark.parametrize("variant", VARIANTS)
def test_exported_weights_pass(bundle: Path, small_checkpoint: Path, variant: str) -> None:
    check_weights(bundle / "onnx" / f"{variant}.onnx", read_weights(small_checkpoint), list)


def _one_code(array: Any) -> None:
    array.reshape(-1)[5] ^= 0x80


def _one_step(array: Any) -> None:
    array.reshape(-1)[5] ^= 1


def _one_row(array: Any) -> None:
    array[3] ^= 0x88


def _negate(array: Any) -> None:
    array[3] *= -1


def _nan(array: Any) -> None:
    array.reshape(-1)[3] = np.nan


def _next_float(array: Any) -> None:
    array.reshape(-1)[0] = np.nextafter(array.reshape(-1)[0], np.float32(9))


@pytest.mark.parametrize(
    ("variant", "name", "edit"),
    [
        ("model_q8", f"{DOWN}_q8", _one_code),
        ("model_q8", f"{DOWN}_q8", _one_step),
        ("model_q8", f"{DOWN}_scales", _negate),
        ("model_q8", f"{DOWN}_scales", _nan),
        ("model_q8", f"{EMBEDDING}_q8", _one_row),
        ("model_q8", f"{EMBEDDING}_q8_rows", _one_row),
        ("model_q8", f"{EMBEDDING}_scales", _negate),
        ("model_q4", f"{DOWN}_q4", _one_code),
        ("model_q4", f"{DOWN}_q4", _one_step),
        ("model_q4", f"{DOWN}_q4", _one_row),
        ("model_q4", f"{DOWN}_scales", _negate),
        ("model_q4", f"{DOWN}_zero_points", _one_step),
        ("model_q4", "norm.weight", _next_float),
        ("model_q4", "blocks.0.mixer.beta_decay_proj.weight", _next_float),
        ("model", DOWN, _next_float),
    ],
)
def test_other_weights_are_named(
    bundle: Path, small_checkpoint: Path, tmp_path: Path, variant: str, name: str, edit: Any
) -> None:
    copy = _edited(bundle, tmp_path / "copy", variant, name, edit)
    parameter = name.partition("weight")[0] + "weight"
    with pytest.raises(EdgelinError, match=f"not the checkpoint's weights: {parameter};"):
        verifying.verify(copy, small_checkpoint)


@pytest.mark.parametrize("parameter", ["A_log", "conv_weight"])
def test_folded_parameters_are_held_too(
    bundle: Path, small_checkpoint: Path, parameter: str
) -> None:
    """Those that stand in the graph as another constant, under another name."""
    weights = read_weights(small_checkpoint)
    name = f"blocks.0.mixer.{parameter}"
    weights[name] = weights[name] * np.float32(1.01)
    with pytest.raises(EdgelinError, match=name):
        check_weights(bundle / "onnx" / "model_q4.onnx", weights, lambda: [np.full(3, 7.0)])


def test_computed_parameters_are_held_too(tmp_path: Path) -> None:
    """A diagonal recurrence's complex decay is computed from two parameters, out of their sight."""
    import export_models

    from edgelin import checkpoint, tokenizer

    folder = tmp_path / "ssm"
    text = tokenizer.train(["a small text of a few words " * 20], export_models.VOCAB)
    checkpoint.save(folder, export_models.make_model(("ssm",)), text.to_str())
    export_checkpoint(folder, tmp_path / "bundle", quantise=("int8",))
    graph, weights = tmp_path / "bundle" / "onnx" / "model_q8.onnx", read_weights(folder)
    constants = computed_constants(folder, "fused")
    check_weights(graph, weights, lambda: constants)
    assert len(constants) > 1
    constants[-1] = constants[-1] * 1.001 + 0.001
    with pytest.raises(EdgelinError, match=r"blocks\.0\.mixer\.A_"):
        check_weights(graph, weights, lambda: constants)


def test_what_is_not_finite_is_named(bundle: Path, tmp_path: Path) -> None:
    """A weight of a token that only the text which the model writes may hold."""

    def spoil(array: Any) -> None:
        array[3:] = np.nan

    copy = _edited(bundle, tmp_path / "copy", "model", EMBEDDING, spoil)
    with pytest.raises(EdgelinError, match=r"not finite|off by inf"):
        verifying.verify(copy)
    opened = load(copy, variant="model")
    with pytest.raises(EdgelinError, match=r"copy model: .* is not finite"):
        verifying._qualities(
            {"model": opened, "model_q8": load(copy, variant="model_q8")}, None, None,
            verifying.Verification("", None),
        )  # fmt: skip
