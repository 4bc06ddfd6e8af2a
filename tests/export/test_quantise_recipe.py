"""Bits by role: names, refusals and what the manifest says."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from edgelin.config import FeatureConfig, ModelConfig
from edgelin.errors import EdgelinError
from edgelin.export.quantise.plan import Calibration
from edgelin.export.quantise.recipe import RECIPES, VARIANTS, find_recipes, role_of

CONFIG = ModelConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    layers=("a",),
    mixers={"a": {"type": "linear_attention", "num_heads": 2, "key_dim": 16, "value_dim": 16}},
)


@pytest.mark.parametrize(
    ("parameter", "role"),
    [
        ("embedding.weight", "embedding"),
        ("head.weight", "head"),
        ("blocks.3.mixer.out_proj.weight", "mixer"),
        ("blocks.3.side.out_proj.weight", "mixer"),
        ("blocks.3.mlp.down_proj.weight", "mlp"),
        ("blocks.3.mixer.beta_decay_proj.weight", "gates"),
        ("blocks.3.mixer.dt_proj.weight", "gates"),
        ("blocks.3.mixer.x_proj.weight", "gates"),
        ("blocks.3.mlp.router.weight", "router"),
        ("blocks.3.mixer.conv_weight", "conv"),
        ("blocks.3.mixer_norm.weight", "norm"),
        ("blocks.3.mixer.qkv_gate_proj.weight", "mixer"),
    ],
)
def test_roles_of_names(parameter: str, role: str) -> None:
    assert role_of(parameter) == role


def test_what_is_sensitive_stays_float_unless_told() -> None:
    recipe = RECIPES["int4"]
    assert recipe is not None
    assert recipe.format("a", "gates", [64]) is recipe.format("a", "conv", [64]) is None
    told = recipe.for_model(CONFIG, ["gates=int8", "mlp=float"])
    found = told.format("a", "gates", [64])
    assert found is not None and found.bits == 8
    assert told.format("a", "mlp", [64]) is None and told.format("a", "norm", [64]) is None


def test_the_manifest_names_every_role() -> None:
    recipe = RECIPES["int4"]
    assert recipe is not None
    entry = recipe.for_model(CONFIG).as_dict(4)
    assert entry["roles"] == {
        "embedding": "int8",
        "head": "int8",
        "mixer": "int8",
        "mlp": "int4",
        "experts": "int4",
        **dict.fromkeys(("gates", "router", "conv", "norm", "decay", "state"), "float"),
    }
    assert (entry["bits"], entry["block_size"], entry["method"]) == (4, 32, "nearest")


def test_a_tied_matrix_has_one_format() -> None:
    recipe = RECIPES["int4"]
    assert recipe is not None
    assert recipe.for_model(CONFIG, ["head=int4"]).roles["embedding"] == 4
    apart = dataclasses.replace(CONFIG, tie_word_embeddings=False)
    assert recipe.for_model(apart, ["head=int8"]).roles["embedding"] == 8
    assert recipe.for_model(apart).roles["head"] == 4
    with pytest.raises(EdgelinError, match="they are one matrix; give one of them"):
        recipe.for_model(CONFIG, ["head=int4", "embedding=int8"])


def test_models_of_features_and_of_mixers() -> None:
    recipe = RECIPES["int4"]
    assert recipe is not None
    features = ModelConfig(
        hidden_size=32,
        intermediate_size=0,
        layers=("a",),
        mixers=CONFIG.mixers,
        features=FeatureConfig(5, 3),
    )
    roles = recipe.for_model(features, mixers_only=True).roles
    assert (roles["embedding"], roles["head"], roles["mixer"]) == (32, 32, 4)


@pytest.mark.parametrize(("width", "size"), [(32, 32), (1023, 32), (1024, 128)])
def test_narrow_models_share_scales_among_few(width: int, size: int) -> None:
    recipe = RECIPES["int8"]
    assert recipe is not None
    chosen = recipe.for_model(dataclasses.replace(CONFIG, hidden_size=width))
    assert chosen.block(8, 4096) == size


@pytest.mark.parametrize(
    ("names", "roles", "message"),
    [
        (("int5",), (), "--quantize is 'int5'; allowed: none, int8,"),
        (("auto",), (), "give --calibrate FILE"),
        (("int4",), ("heads=int4",), "--role is 'heads=int4'; give ROLE=BITS with one of emb"),
        (("int4",), ("head=int5",), "--role is 'head=int5'"),
        (("int4",), ("head",), "--role is 'head'"),
        (("int4",), ("conv=int8",), "--role conv=int8: .* always float; leave it out"),
        (("int4",), ("head=int4", "head=int8"), "--role gives head bits twice; keep one of them"),
        (("none",), ("head=int4",), "are about rounded weights; give --quantize int4"),
    ],
)
def test_refusals(names: Any, roles: Any, message: str) -> None:
    with pytest.raises(EdgelinError, match=message):
        find_recipes(names, roles)


def test_a_recipe_that_rounds_nothing_is_refused() -> None:
    recipe = RECIPES["int8"]
    assert recipe is not None
    roles = [f"{role}=float" for role in ("embedding", "mixer", "mlp", "experts")]
    with pytest.raises(EdgelinError, match="keeps every matrix float; give --quantize none"):
        recipe.for_model(CONFIG, roles)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"method": "awq"}, "--method is 'awq'; allowed: nearest, gptq"),
        ({"minimise": "heat"}, "--minimise is 'heat'; allowed: size, time"),
        ({"budget": -0.1}, "--budget is -0.1; give a positive number"),
        ({"budget_kl": float("nan")}, "--budget-kl is nan; give a positive number"),
        ({"budget_top1": 1.0}, "--budget-top1 is 1; give the least share of first choices"),
    ],
)
def test_wrong_choices_about_a_text(choice: Any, message: str) -> None:
    with pytest.raises(EdgelinError, match=message):
        Calibration("text", **choice)


def test_every_recipe_has_a_name_for_its_files() -> None:
    assert VARIANTS.keys() == RECIPES.keys()
    assert len(set(VARIANTS.values())) == len(VARIANTS)
