"""Falcon-H1 checkpoints beside transformers' own class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from transformers import FalconH1Config, FalconH1ForCausalLM

from edgelin.errors import EdgelinError
from edgelin.families.convert import convert, read_json

MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 3.0, "lm_head_multiplier": 0.6, "key_multiplier": 1.3,
    "attention_in_multiplier": 0.8, "attention_out_multiplier": 1.2, "ssm_in_multiplier": 1.4,
    "ssm_out_multiplier": 0.7, "ssm_multipliers": [1.1, 0.9, 1.3, 0.8, 1.2],
    "mlp_multipliers": [1.5, 0.6],
}  # fmt: skip
NEUTRAL = {k: [1.0] * len(v) if isinstance(v, list) else 1.0 for k, v in MULTIPLIERS.items()}


def model(**changes: Any) -> Any:
    """A tiny random model with all multipliers; two groups, two query heads a key head."""
    sizes = {
        "vocab_size": oracle.VOCABULARY, "hidden_size": 32, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "mamba_d_ssm": 48, "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 8,
        "mamba_chunk_size": 16, **MULTIPLIERS,
    }  # fmt: skip
    config = FalconH1Config(**{**sizes, **changes})
    return oracle.randomise(FalconH1ForCausalLM(config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits(tmp_path: Path, dtype: torch.dtype) -> None:
    changes = {"mamba_proj_bias": True, "projectors_bias": True, "attention_bias": True}
    oracle.check_logits(model(**changes), tmp_path / "m", dtype)


@pytest.mark.parametrize(
    "changes",
    [
        NEUTRAL,
        {"tie_word_embeddings": True, "mamba_n_groups": 1},
        {"mamba_rms_norm": True, "mamba_norm_before_gate": True, "rms_norm_eps": 1e-2},
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "projectors_bias": True},
        {"mamba_d_ssm": None, "mamba_conv_bias": False, "mamba_d_conv": 3, "mamba_proj_bias": True},
        {"time_step_limit": (0.5, 1.5), "head_dim": 12},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e11}},
    ],
    ids=str,
)
def test_switches(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = model(**changes)
    oracle.check_torch(theirs, oracle.save(theirs, tmp_path / "m"))


def test_keys_of_the_first_configs(tmp_path: Path) -> None:
    """What configs have that an older transformers wrote."""
    theirs = model(rope_parameters={"rope_type": "default", "rope_theta": 1e11})
    folder = oracle.save(theirs, tmp_path / "m")
    old = read_json(folder / "config.json")
    del old["rope_parameters"], old["time_step_limit"]
    old |= {
        "rope_theta": 1e11, "rope_scaling": None, "mamba_d_head": "auto", "mamba_use_mlp": True,
        "attn_layer_indices": None, "mlp_expansion_factor": 8, "time_step_min": 0.001,
        "time_step_max": 0.1, "time_step_floor": 0.0001, "time_step_rank": "auto",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(old))
    oracle.check_torch(theirs, folder)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mamba_d_ssm": 64}, "mamba_n_heads = 4 heads of mamba_d_head = 12 are not the 64"),
        ({"query_multiplier": 2.0}, "'query_multiplier', which this family does not know"),
        ({"mlp_bias": True}, "mlp_bias is True; supported: False"),
        ({"mamba_use_mlp": False}, "mamba_use_mlp is False; supported: True"),
        ({"attn_layer_indices": [0]}, r"attn_layer_indices is \[0\]; supported: \[0, 1\]"),
        ({"projectors_bias": False}, r"holds model\.layers\.0\.mamba\.out_proj\.bias"),
        ({"mamba_rms_norm": True}, r"lacks the tensor model\.layers\.0\.mamba\.norm\.weight"),
        ({"mamba_n_groups": 1}, r"in_proj\.weight has 132 rows, the config makes it 116"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_not_understood_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = oracle.save(model(projectors_bias=True), tmp_path / "m")
    oracle.rewrite(folder, **changes)
    with pytest.raises(EdgelinError, match=message):
        convert(folder, tmp_path / "own")
