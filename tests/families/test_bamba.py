"""Bamba checkpoints beside transformers' own class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from transformers import BambaConfig, BambaForCausalLM

from edgelin.errors import EdgelinError
from edgelin.families.convert import convert, read_json

pytestmark = pytest.mark.full  # CI has the families that are met most, `make test-full` all


def model(**changes: Any) -> Any:
    """A tiny random model; two groups, two query heads a key head."""
    sizes = {
        "vocab_size": oracle.VOCABULARY, "hidden_size": 32, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    }  # fmt: skip
    return oracle.randomise(BambaForCausalLM(BambaConfig(**{**sizes, **changes})))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits(tmp_path: Path, dtype: torch.dtype) -> None:
    oracle.check_logits(model(mamba_proj_bias=True, attention_bias=True), tmp_path / "m", dtype)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True, "mamba_n_groups": 1},
        {"attn_layer_indices": [0, 1], "rms_norm_eps": 1e-2},
        {"attn_layer_indices": None, "time_step_limit": (0.5, 1.5)},
        {"mamba_conv_bias": False, "mamba_d_conv": 3},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    ],
    ids=str,
)
def test_switches(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = model(**changes)
    oracle.check_torch(theirs, oracle.save(theirs, tmp_path / "m"))


def test_keys_of_the_first_configs(tmp_path: Path) -> None:
    """What configs have that an older transformers wrote."""
    theirs = model(rope_parameters={"rope_type": "default", "rope_theta": 99.0})
    folder = oracle.save(theirs, tmp_path / "m")
    old = read_json(folder / "config.json")
    del old["rope_parameters"], old["time_step_limit"]
    old |= {
        "rope_theta": 99.0, "rope_scaling": None, "attn_rotary_emb": 4, "mamba_d_head": "auto",
        "partial_rotary_factor": 0.5, "z_loss_coefficient": 1e-4,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(old))
    oracle.check_torch(theirs, folder)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_experts": 4}, "'num_experts', which this family does not know"),
        ({"mlp_bias": True}, "mlp_bias is True; supported: False"),
        ({"attn_rotary_emb": 8}, "attn_rotary_emb is 8; supported: 4"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported"),
        ({"attn_layer_indices": [0]}, r"lacks the tensor model\.layers\.0\.self_attn"),
        ({"mamba_proj_bias": False}, r"holds model\.layers\.0\.mamba\.in_proj\.bias"),
        ({"tie_word_embeddings": True}, r"lm_head\.weight is not model\.embed_tokens\.weight"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_not_understood_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = oracle.save(model(mamba_proj_bias=True), tmp_path / "m")
    oracle.rewrite(folder, **changes)
    with pytest.raises(EdgelinError, match=message):
        convert(folder, tmp_path / "own")
