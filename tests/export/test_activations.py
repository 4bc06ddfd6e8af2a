"""The gate of quantised graphs: right for a deep model whose rounded activations add up, and shut
for any other fault."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import export_models
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from edgelin import checkpoint, tokenizer
from edgelin.config import ModelConfig
from edgelin.errors import EdgelinError
from edgelin.export import bundle as bundles
from edgelin.export import golden
from edgelin.export import report as reports
from edgelin.export.activations import float_activations, round_activations
from edgelin.export.bundle import export_checkpoint
from edgelin.export.quantise.nodes import quantise
from edgelin.export.trace import trace
from edgelin.export.verify import compare as verifying
from edgelin.export.verify.report import Comparison
from edgelin.model import SequenceModel
from edgelin.runtimes.manifest import Manifest, Variant, file_records

LAYERS = 8


def deep(layers: int) -> SequenceModel:
    """Random weights so large that every layer multiplies what came into it."""
    torch.manual_seed(0)
    gdn = {"type": "gated_deltanet", "num_heads": 2, "key_dim": 16, "value_dim": 16}
    config = ModelConfig(
        vocab_size=export_models.VOCAB,
        hidden_size=40,  # the last block of a row is not full
        intermediate_size=64,
        layers=("gdn",) * layers,
        mixers={"gdn": gdn},
    )
    model = SequenceModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "conv" not in name:
                parameter.normal_(std=3 * parameter.shape[1] ** -0.5)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("deep") / "model"
    text = tokenizer.train(["a small text of a few words and more words " * 20], 300)
    checkpoint.save(out, deep(LAYERS), text.to_str())
    return out


@pytest.fixture(scope="module")
def traced(folder: Path) -> ir.Model:
    return trace(checkpoint.load(folder)[0])


@pytest.fixture
def export(
    folder: Path, traced: ir.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Any]:
    """The int8 or int4 variant of the report of an export."""
    monkeypatch.setattr(bundles, "trace", lambda model, **options: traced.clone())

    def run(bits: str) -> Any:
        report = export_checkpoint(folder, tmp_path / "out", quantise=(bits,), force=True)
        (variant,) = report.variants.values()
        return variant

    return run


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_rounded_activations_may_add_up(export: Callable[[str], Any], bits: str) -> None:
    found = export(bits)
    assert found.graph.outputs_rms > 0.1
    assert found.rounded_activations.outputs_rms == pytest.approx(found.graph.outputs_rms, rel=0.2)
    assert found.float_activations.outputs_rms < 1e-4
    assert found.float_activations.states is None


def _edited(edit: Callable[[Any], None], name: str) -> Callable[..., Any]:
    """Rounding that changes an initializer of the graph afterwards."""
    right = quantise

    def wrong(graph: ir.Model, *args: Any, **options: Any) -> Any:
        outcome = right(graph, *args, **options)
        value = graph.graph.initializers[name]
        assert value.const_value is not None
        array = value.const_value.numpy().copy()
        edit(array)
        value.const_value = ir.Tensor(array, name=name)
        return outcome

    return wrong


def _one_scale(array: Any) -> None:
    array[7, 0] *= 1.5


def _one_code(array: Any) -> None:
    array.reshape(-1)[5] ^= 0x40


def _swap(array: Any) -> None:
    array[[0, 1]] = array[[1, 0]]


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("blocks.0.mixer.out_proj.weight_scales", _one_scale),
        ("blocks.7.mlp.down_proj.weight_scales", _one_scale),
        ("blocks.5.mlp.down_proj.weight_q8", _one_code),
        ("blocks.7.mlp.down_proj.weight_q8", _swap),
        ("blocks.3.mixer.beta_decay_proj.weight", _swap),
        ("embedding.weight_q8", _swap),
    ],
)
def test_a_wrong_weight_fails(
    export: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, name: str, edit: Any
) -> None:
    monkeypatch.setattr(bundles, "quantise_graph", _edited(edit, name))
    with pytest.raises(EdgelinError, match=r"model_q8: outputs with float activations are off by"):
        export("int8")


def test_float32_sets_the_limit(
    export: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the limit is below what float32 does to the model, and for no other fault."""
    monkeypatch.setattr(reports, "_LIMIT", 1e-7)
    monkeypatch.setattr(reports, "_WORST", 1e-6)
    found = export("int8")
    noise = found.float32.outputs_rms
    assert noise > 1e-6 and found.float_activations.outputs_rms < 3 * noise
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "own weights, torch in float32" in text
    for name, edit in (
        ("blocks.5.mlp.down_proj.weight_q8", _one_code),
        ("blocks.0.mixer.out_proj.weight_scales", _one_scale),
    ):
        monkeypatch.setattr(bundles, "quantise_graph", _edited(edit, name))
        with pytest.raises(EdgelinError, match=r"outputs with float activations are off by"):
            export("int8")


def _errors(rms: float, worst: float) -> golden.Errors:
    return golden.Errors(worst, worst / 2, rms, 1.0, 0.0, 1.0, True)


@pytest.mark.parametrize(
    ("error", "float32", "near"),
    [
        ((9e-5, 9e-4), None, True),
        ((1.1e-4, 5e-4), None, False),
        ((1.1e-4, 5e-4), (7e-5, 4e-4), True),
        ((1.1e-4, 5e-4), (2e-5, 4e-4), False),  # float32 does not explain it
        ((9e-5, 2e-3), (5e-5, 1e-3), True),
        ((9e-5, 2e-3), (5e-5, 3e-4), False),
        ((0.02, 0.05), (0.1, 0.3), False),  # nothing could be told apart
        ((float("nan"), 0.0), (1e-5, 1e-4), False),
    ],
)
def test_limits_beside_float32(error: Any, float32: Any, near: bool) -> None:
    noise = None if float32 is None else _errors(*float32)
    assert reports.is_near(_errors(*error), noise) == near


def test_a_wrong_kernel_fails(export: Callable[[str], Any], monkeypatch: Any) -> None:
    """What only the arithmetic with rounded activations gets wrong."""
    right = golden.replay

    def wrong(*args: Any) -> golden.Stream:
        stream = right(*args)
        noise = np.random.default_rng(0).standard_normal(stream.outputs.shape)
        return dataclasses.replace(
            stream, outputs=stream.outputs + 0.7 * stream.outputs.std() * noise
        )

    monkeypatch.setattr(golden, "replay", wrong)
    with pytest.raises(EdgelinError, match=r"off by .* which rounded activations do not explain"):
        export("int8")


@pytest.fixture
def verified(
    folder: Path, traced: ir.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[Comparison]]:
    """The comparisons of an int8 bundle, whose graph was edited, with its checkpoint."""
    monkeypatch.setattr(bundles, "trace", lambda model, **options: traced.clone())
    monkeypatch.setattr(verifying, "_qualities", lambda *args: None)

    def run(edit: Callable[[onnx.ModelProto], object] = lambda graph: None) -> list[Comparison]:
        out = tmp_path / "out"
        export_checkpoint(folder, out, quantise=("int8",), force=True)
        path = out / "onnx" / "model_q8.onnx"
        graph = onnx.load(str(path), load_external_data=False)
        edit(graph)
        path.write_bytes(graph.SerializeToString())
        manifest = Manifest.read(out)
        old = manifest.variants["model_q8"]
        records = file_records(out, old.files)
        manifest.variants["model_q8"] = Variant(old.file, records, old.quantisation)
        manifest.write(out)
        return verifying.verify(out, folder).comparisons

    return run


def test_verify_a_deep_model(verified: Callable[..., list[Comparison]]) -> None:
    found = {comparison.form: comparison for comparison in verified()}
    assert found["steps"].worst.error > 0.2
    assert found["chunks (float activations)"].worst.error < 1e-4
    assert all(comparison.passed for comparison in found.values())


def _other_epsilon(graph: onnx.ModelProto) -> None:
    """A constant that is no weight."""
    norm = next(n for n in graph.graph.node if n.op_type == "SimplifiedLayerNormalization")
    epsilon = next(a for a in norm.attribute if a.name == "epsilon")
    epsilon.f = 1e-3


FLOAT = ("steps (float activations)", "chunks (float activations)")


def test_verify_a_wrong_constant(verified: Callable[..., list[Comparison]]) -> None:
    """One that rounded activations hide."""
    found = {comparison.form: comparison for comparison in verified(_other_epsilon)}
    assert not any(found[form].passed for form in FLOAT)


def test_verify_where_float32_misses_the_limit(
    verified: Callable[..., list[Comparison]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of deeper models: what float32 does is allowed, and a fault is still none of that."""
    monkeypatch.setattr(verifying, "TOLERANCE", 1e-6)
    found = {comparison.form: comparison for comparison in verified()}
    for form in ("parallel (chunked)", "parallel (chunked), ragged", *FLOAT):
        assert found[form].worst.error > 1e-6
        assert found[form].passed and found[form].tolerance < 1e-3
    found = {comparison.form: comparison for comparison in verified(_other_epsilon)}
    assert found["parallel (chunked)"].passed
    assert not any(found[form].passed for form in FLOAT)


@pytest.mark.parametrize("width", [1, 32, 40, 96])
def test_round_activations(width: int) -> None:
    """Beside a loop over the blocks."""
    x = np.random.default_rng(width).standard_normal((3, 5, width)) * 10.0
    x[0, 0] = 0
    x[0, 1, :32] = 0
    wanted = np.zeros_like(x)
    for row, out in zip(x.reshape(-1, width), wanted.reshape(-1, width), strict=True):
        for start in range(0, width, 32):
            block = row[start : start + 32]
            scale = np.abs(block).max() / 127
            if scale:
                out[start : start + 32] = [scale * round(v / scale) for v in block.tolist()]
    found = round_activations(torch.from_numpy(x), 32)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12, atol=0)


def test_float_activations(tmp_path: Path) -> None:
    """One attribute is another; the file is gone afterwards."""
    node = onnx.helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft",
                                 bits=8, accuracy_level=4)  # fmt: skip
    graph = onnx.helper.make_graph([node], "g", [], [])
    path = tmp_path / "model_q8.onnx"
    path.write_bytes(onnx.helper.make_model(graph).SerializeToString())
    with float_activations(path) as other:
        (found,) = onnx.load(str(other)).graph.node
        assert {a.name: a.i for a in found.attribute} == {"bits": 8, "accuracy_level": 0}
        assert other.parent == path.parent and other != path
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
