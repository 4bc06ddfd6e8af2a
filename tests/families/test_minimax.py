"""MiniMax-Text-01 checkpoints beside transformers' own class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from transformers import MiniMaxConfig, MiniMaxForCausalLM

from edgelin.errors import EdgelinError
from edgelin.families.convert import convert

pytestmark = pytest.mark.full  # CI has the families that are met most, `make test-full` all

FACTORS = {
    f"{kind}_{name}_factor": value
    for kind, values in {
        "full_attn": (3.5, 0.9), "linear_attn": (2.0, 1.3), "mlp": (-1.7, 0.8),
    }.items()
    for name, value in zip(("alpha", "beta"), values, strict=True)
}  # fmt: skip
SLOPES = "model.layers.1.self_attn.slope_rate"


def model(**changes: Any) -> Any:
    """A tiny random model with all factors; three kinds of layers, two query heads a key head."""
    sizes = {
        "vocab_size": oracle.VOCABULARY, "hidden_size": 32, "intermediate_size": 24,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 6, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 16,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"], **FACTORS,
    }  # fmt: skip
    config = MiniMaxConfig(**{**sizes, **changes})
    return oracle.randomise(MiniMaxForCausalLM(config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits(tmp_path: Path, dtype: torch.dtype) -> None:
    oracle.check_logits(model(), tmp_path / "m", dtype)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True, "rms_norm_eps": 1e-2, "head_dim": None},
        {"layer_types": None, "num_experts_per_tok": 1, **dict.fromkeys(FACTORS, 1)},
        {"sliding_window": 9, "num_attention_heads": 3, "num_key_value_heads": 1},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "block_size": 256},
        {"num_hidden_layers": 1, "layer_types": ["linear_attention"], "num_local_experts": 2},
    ],
    ids=str,
)
def test_switches(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = model(**changes)
    oracle.check_torch(theirs, oracle.save(theirs, tmp_path / "m"))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"shared_intermediate_size": 8}, "'shared_intermediate_size', which this family does not"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rotary_dim": 4}, "4 of the 6 numbers of a head are rotated; supported: all"),
        ({"mlp_alpha_factor": 0}, "mlp_alpha_factor is 0"),
        ({"layer_types": ["linear_attention"] * 3}, "lacks the tensor .*2.self_attn.qkv_proj"),
        ({"layer_types": ["mamba"] * 3}, "layer_types has 'mamba'"),
        ({"num_local_experts": 3}, r"router\.weight would have shape \[4, 32\], the config .* \[3"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_not_understood_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = oracle.save(model(), tmp_path / "m")
    oracle.rewrite(folder, **changes)
    with pytest.raises(EdgelinError, match=message):
        convert(folder, tmp_path / "own")


@pytest.mark.parametrize(
    "name, tensor, message",
    [
        (SLOPES, torch.rand(4, 1, 1), "slope_rate is not the decay of a layer of its index"),
        ("model.layers.0.self_attn.other", torch.ones(2), "other, which its config does not"),
    ],
    ids=["slopes", "stray"],
)
def test_odd_tensors_are_refused(
    tmp_path: Path, name: str, tensor: torch.Tensor, message: str
) -> None:
    folder = oracle.save(model(), tmp_path / "m")
    oracle.add_tensors(folder, {name: tensor})
    with pytest.raises(EdgelinError, match=message):
        convert(folder, tmp_path / "own")
