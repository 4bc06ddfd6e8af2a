"""Granite 4.0 checkpoints beside transformers' own class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

from edgelin.errors import EdgelinError
from edgelin.families.convert import convert, read_json

EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 24}
MULTIPLIERS = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.4,
    "logits_scaling": 1.7,
}  # fmt: skip


def model(**changes: Any) -> Any:
    """A tiny random model with all multipliers; two groups, two query heads a key head."""
    sizes = {
        "vocab_size": oracle.VOCABULARY, "hidden_size": 32, "intermediate_size": 9,
        "shared_intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_local_experts": 0, "num_experts_per_tok": 0,
        "layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_n_groups": 2,
        "mamba_d_state": 8, "mamba_chunk_size": 16, **MULTIPLIERS,
    }  # fmt: skip
    config = GraniteMoeHybridConfig(**{**sizes, **changes})
    return oracle.randomise(GraniteMoeHybridForCausalLM(config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits(tmp_path: Path, dtype: torch.dtype) -> None:
    oracle.check_logits(model(mamba_proj_bias=True, attention_bias=True), tmp_path / "m", dtype)


def test_graphs_with_experts(tmp_path: Path) -> None:
    theirs = model(**EXPERTS)
    ours = oracle.check_torch(theirs, oracle.save(theirs, tmp_path / "m"))
    oracle.check_graphs(theirs, ours)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True, "mamba_n_groups": 1},
        {"position_embedding_type": "rope", "rms_norm_eps": 1e-2},
        {"position_embedding_type": "nope", "mamba_conv_bias": False, "mamba_d_conv": 3},
        {"layer_types": ["attention"] * 2, "position_embedding_type": "rope"},
        {"layer_types": None, "time_step_limit": (0.5, 1.5)},
        {**EXPERTS, "num_experts_per_tok": 5, "tie_word_embeddings": True},
        dict.fromkeys(MULTIPLIERS, 1.0),
    ],
    ids=str,
)
def test_switches(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = model(**changes)
    oracle.check_torch(theirs, oracle.save(theirs, tmp_path / "m"))


def test_keys_of_the_first_configs(tmp_path: Path) -> None:
    """What configs have that an older transformers wrote."""
    theirs = model(
        position_embedding_type="rope", rope_parameters={"rope_type": "default", "rope_theta": 99.0}
    )
    folder = oracle.save(theirs, tmp_path / "m")
    old = read_json(folder / "config.json")
    del old["rope_parameters"], old["time_step_limit"]
    old |= {
        "rope_theta": 99.0, "rope_scaling": None, "layer_types": ["mamba", "attention"],
        "mamba_d_head": "auto", "normalization_function": "rmsnorm", "init_method": "mup",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(old))
    oracle.check_torch(theirs, folder)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mamba_expand": 3}, "mamba_n_heads = 4 heads of mamba_d_head = 16 are not the 96"),
        ({"value_multiplier": 2.0}, "'value_multiplier', which this family does not know"),
        (EXPERTS, r"lacks the tensor model\.layers\.0\.block_sparse_moe\.router"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'; supported"),
        ({"normalization_function": "layernorm"}, "normalization_function is 'layernorm'"),
        ({"layer_types": ["mamba", "mamba2"]}, "layer_types has 'mamba2'"),
        ({"mamba_proj_bias": False}, r"holds model\.layers\.0\.mamba\.in_proj\.bias"),
        ({"attention_bias": False}, r"holds model\.layers\.1\.self_attn\.k_proj\.bias"),
        ({"mamba_n_groups": 1}, r"conv_weight would have shape|in_proj.weight would have shape"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_not_understood_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = oracle.save(model(mamba_proj_bias=True, attention_bias=True), tmp_path / "m")
    oracle.rewrite(folder, **changes)
    with pytest.raises(EdgelinError, match=message):
        convert(folder, tmp_path / "own")
