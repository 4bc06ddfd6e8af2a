"""Experts in bundles: rounded ones, what verify sees of them, and which runtime they need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from export_models import VOCAB, session
from onnx_ir import Value

from edgelin import checkpoint, tokenizer
from edgelin.config import ModelConfig
from edgelin.errors import EdgelinError
from edgelin.export import notices, passes, profiles
from edgelin.export.bundle import export_checkpoint
from edgelin.export.profiles import PROFILES
from edgelin.export.quantise.nodes import quantise
from edgelin.export.quantise.recipe import RECIPES, Recipe
from edgelin.export.trace import trace
from edgelin.export.verify import compare as verifying
from edgelin.export.verify.weights import check_weights, read_weights, rounded_weights
from edgelin.model import SequenceModel
from edgelin.runtimes.manifest import Manifest

GATE_UP, DOWN = (f"blocks.0.mlp.experts.{name}_proj" for name in ("gate_up", "down"))


def make_model(**changes: Any) -> SequenceModel:
    """One layer of a recurrence, followed by experts whose bias changes the choice."""
    torch.manual_seed(0)
    moe = {
        "type": "moe", "num_experts": 6, "experts_per_token": 2, "shared_size": 40,
        "intermediate_size": 64, "router": "sigmoid", "expert_bias": True, **changes,
    }  # fmt: skip
    gdn = {"type": "gated_deltanet", "num_heads": 2, "key_dim": 16, "value_dim": 24}
    config = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=0,
        layers=("gdn",),
        mlps=("moe",),
        mixers={"gdn": gdn, "moe": moe},
    )
    model = SequenceModel(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "mlp" in name:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.get_buffer("blocks.0.mlp.expert_bias").normal_(std=0.2)
    return model


def save(folder: Path, **changes: Any) -> Path:
    """The model as a checkpoint."""
    text = tokenizer.train(["a small text of a few words and more words " * 20], VOCAB)
    checkpoint.save(folder, make_model(**changes), text.to_str())
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("experts") / "model")


@pytest.fixture(scope="module")
def traced() -> ir.Model:
    return trace(make_model())


@pytest.mark.parametrize(
    "profile, variants", [("fused", ("int8", "int4")), ("plain", ("none", "int4"))]
)
def test_bundles_are_the_checkpoint(
    saved: Path, tmp_path: Path, profile: str, variants: tuple[str, ...]
) -> None:
    out = tmp_path / "bundle"
    export_checkpoint(saved, out, quantise=variants, profile=profile)
    assert Manifest.read(out).min_onnxruntime == "1.31.0"
    verifying.verify(out, saved)
    for bits in (int(name.removeprefix("int")) for name in variants if name != "none"):
        graph = ir.load(out / "onnx" / f"model_q{bits}.onnx")
        (node,) = (node for node in graph.graph if node.op_type == "QMoE")
        assert node.attributes.get_int("expert_weight_bits") == bits
        names = set(graph.graph.initializers)
        assert {GATE_UP, DOWN}.isdisjoint(names)
        assert {"blocks.0.mlp.router.weight", "blocks.0.mlp.expert_bias"} <= names
        assert not any(name.startswith("blocks.0.mlp.shared.up") for name in names)


def test_portable_experts_are_refused_at_once(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(EdgelinError, match="no portable form"):
        export_checkpoint(saved, tmp_path / "bundle", quantise=("portable",))
    assert not list(tmp_path.iterdir())


def test_bundles_of_experts_without_a_gate_are_the_checkpoint(tmp_path: Path) -> None:
    """Their kernel has a gate, which reads the same rows: the file has them twice."""
    saved, out = save(tmp_path / "m", gated=False, latent_size=64), tmp_path / "bundle"
    export_checkpoint(saved, out, quantise=("none", "int4"))
    verifying.verify(out, saved)
    path, up = out / "onnx" / "model_q4.onnx", GATE_UP.replace("gate_up", "up")
    graph, weights = ir.load(path), read_weights(saved)
    (node,) = (node for node in graph.graph if node.op_type == "QMoE")
    assert node.inputs[2].name.startswith(up)
    assert list(node.inputs[2].shape) == [6, 128, 32]
    assert rounded_weights(path, weights)[up].shape == (6, 64, 64)
    codes = node.inputs[2].const_value.numpy().copy()
    codes[3, 7, 5] ^= 1  # one of a pair
    node.inputs[2].const_value = ir.Tensor(codes, name=node.inputs[2].name)
    ir.save(graph, path.with_name("changed.onnx"))
    with pytest.raises(EdgelinError, match=f"not the checkpoint's weights: {up};"):
        check_weights(path.with_name("changed.onnx"), weights, list)


def test_float_bundles_need_no_newer_runtime() -> None:
    for profile in PROFILES.values():
        alone = profile.min_onnxruntime(quantised=False, experts=True)
        assert alone == profile.min_onnxruntime(quantised=False)
        both = profile.min_onnxruntime(quantised=True, experts=True)
        assert profiles._numbers(both) >= (1, 31, 0)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_graphs_compute_with_the_rounded_experts(traced: ir.Model, name: str, gated: bool) -> None:
    model = make_model(gated=gated)
    graph, recipe = traced.clone() if gated else trace(model), RECIPES[name]
    assert recipe is not None
    passes.lower(graph, PROFILES["fused"])
    outcome = quantise(graph, recipe)
    passes.finish(graph, PROFILES["fused"])
    assert outcome.matrices[DOWN]["bits"] == recipe.bits
    with torch.no_grad():
        for parameter, rounded in outcome.rounded.items():
            own = model.get_parameter(parameter)
            own.copy_(torch.from_numpy(rounded.values(own.shape[-1])).view_as(own))
    ids = torch.arange(2 * 30).view(2, 30)
    specs, states = model.state_specs(), model.initial_state(2)
    feeds = {spec.input_name: states[spec.name].numpy() for spec in specs}
    feeds |= {"input_ids": ids.numpy(), "num_logits_to_keep": np.array(0)}
    got, wanted = session(graph).run(None, feeds)[0], model(ids)[0].detach().numpy()
    # Activations are rounded to int8 too, and some token may so reach another expert.
    assert np.sqrt(np.square(got - wanted).mean()) < 0.03 * wanted.std()


def test_rows_that_blocks_do_not_fill_stay_float() -> None:
    model = make_model(intermediate_size=40)
    traced = trace(model)
    for profile in ("fused", "plain"):
        graph = traced.clone()
        passes.lower(graph, PROFILES[profile])
        outcome = quantise(graph, Recipe.of(4, roles={"embedding": 8}))
        passes.finish(graph, PROFILES[profile])
        assert {GATE_UP, DOWN} <= set(graph.graph.initializers)
        assert not {GATE_UP, DOWN} & set(outcome.matrices)
        (line,) = notices.float_experts("model_q4", model, outcome.matrices)
        assert "model_q4: 1 of 1 layers keep float experts, such as blocks.0.mlp.experts" in line
    assert notices.float_experts("model_q4", model, [GATE_UP, DOWN]) == []


@pytest.mark.parametrize("suffix", ["q4_rows", "scales", "zero_points"])
@pytest.mark.parametrize("parameter", [GATE_UP, DOWN])
def test_other_weights_are_named(
    traced: ir.Model, saved: Path, tmp_path: Path, parameter: str, suffix: str
) -> None:
    graph, weights = traced.clone(), read_weights(saved)
    passes.lower(graph, PROFILES["plain"])
    quantise(graph, Recipe.of(4, roles={"embedding": 8}))
    passes.finish(graph, PROFILES["plain"])
    path = tmp_path / "model.onnx"
    ir.save(graph, path)
    check_weights(path, weights, list)
    values = rounded_weights(path, weights)[parameter]
    assert values.shape == weights[parameter].shape
    assert 0 < np.abs(values - weights[parameter]).max() < 0.1
    _change(graph.graph.initializers[f"{parameter}_{suffix}"])
    ir.save(graph, path)
    with pytest.raises(EdgelinError, match=f"not the checkpoint's weights: {parameter};"):
        check_weights(path, weights, list)


def _change(value: Value) -> None:
    """Another content, in one expert only."""
    assert value.const_value is not None
    array: Any = value.const_value.numpy().copy()
    array[4] = array[4] ^ 1 if array.dtype == np.uint8 else -array[4]
    value.const_value = ir.Tensor(array, name=value.name)
