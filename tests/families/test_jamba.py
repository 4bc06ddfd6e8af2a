"""Jamba checkpoints beside transformers' own class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from transformers import JambaConfig, JambaForCausalLM

from edgelin.errors import EdgelinError
from edgelin.families.convert import convert

pytestmark = pytest.mark.full  # CI has the families that are met most, `make test-full` all


def model(**changes: Any) -> Any:
    """A tiny random model; the second layer is attention, two query heads a key head."""
    sizes = {
        "vocab_size": oracle.VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_experts": 1, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 6,
        "mamba_proj_bias": True, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    return oracle.randomise(JambaForCausalLM(JambaConfig(**{**sizes, **changes})))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits(tmp_path: Path, dtype: torch.dtype) -> None:
    oracle.check_logits(model(), tmp_path / "m", dtype)


def test_graphs_with_experts(tmp_path: Path) -> None:
    theirs = model(num_experts=4, num_experts_per_tok=2)
    ours = oracle.check_torch(theirs, oracle.save(theirs, tmp_path / "m"))
    oracle.check_graphs(theirs, ours)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True, "mamba_proj_bias": False, "mamba_conv_bias": False},
        {"mamba_dt_rank": 5, "mamba_expand": 3, "mamba_d_conv": 3},
        {"rms_norm_eps": 1e-2, "num_key_value_heads": 4},
        {"attn_layer_period": 2, "attn_layer_offset": 0, "num_key_value_heads": 1},
        {"num_experts": 4, "expert_layer_period": 9, "expert_layer_offset": 8},  # of 3 layers
        {"num_experts": 3, "expert_layer_period": 1, "expert_layer_offset": 0},
        {"num_experts": 5, "num_experts_per_tok": 1, "expert_layer_offset": 0},
    ],
    ids=str,
)
def test_switches(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = model(**changes)
    oracle.check_torch(theirs, oracle.save(theirs, tmp_path / "m"))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sliding_window": 8}, "'sliding_window', which this family does not know"),
        ({"num_experts": 4}, r"lacks the tensor model\.layers\.1\.feed_forward\.router"),
        ({"mamba_inner_layernorms": False}, "mamba_inner_layernorms is False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attn_layer_offset": 2}, r"lacks the tensor model\.layers\.1\.mamba\.in_proj"),
        ({"mamba_proj_bias": False}, r"holds model\.layers\.0\.mamba\.in_proj\.bias"),
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
