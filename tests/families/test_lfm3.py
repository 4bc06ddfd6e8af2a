"""LFM3 checkpoints beside transformers' own class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from transformers import Lfm3Config, Lfm3ForCausalLM

from edgelin.errors import EdgelinError
from edgelin.families.convert import convert

pytestmark = pytest.mark.full  # CI has the families that are met most, `make test-full` all

ROTATIONS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {
        "rope_type": "proportional", "rope_theta": 400.0, "partial_rotary_factor": 0.4
    },
}  # fmt: skip


def model(**changes: Any) -> Any:
    """A tiny random model with all kinds of layers; two query heads a key head."""
    sizes = {
        "vocab_size": oracle.VOCABULARY, "hidden_size": 32, "intermediate_size": 40,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
        "layer_types": ["conv", "sliding_attention", "full_attention"], "sliding_window": 70,
        "attention_bias": True, "conv_bias": True, "tie_word_embeddings": False,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return oracle.randomise(Lfm3ForCausalLM(Lfm3Config(**{**sizes, **changes})))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits(tmp_path: Path, dtype: torch.dtype) -> None:
    oracle.check_logits(model(), tmp_path / "m", dtype)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True, "conv_L_cache": 3, "conv_bias": False},
        {"use_sandwich_norm": False, "use_attention_gate": False},
        {"attention_bias": False, "sliding_window": 7, "norm_eps": 1e-2},
        {"rope_parameters": ROTATIONS},
        {"layer_types": None, "num_hidden_layers": 5},
    ],
    ids=str,
)
def test_switches(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = model(**changes)
    oracle.check_torch(theirs, oracle.save(theirs, tmp_path / "m"))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"block_ff_dim": 8}, "'block_ff_dim', which this family does not know"),
        ({"layer_types": ["conv", "full_attention", "mamba"]}, "layer_types has 'mamba'"),
        ({"rope_parameters": {"full_attention": {}}}, "lacks the key 'sliding_attention'"),
        (
            {"rope_parameters": {**ROTATIONS, "full_attention": {"rope_type": "yarn"}}},
            "rope_parameters: full_attention: rope_type is 'yarn'",
        ),
        ({"use_attention_gate": False}, r"holds model\.layers\.1\.self_attn\.gate_proj"),
        ({"use_sandwich_norm": False}, r"holds model\.layers\.0\.post_ffn_norm"),
        ({"conv_L_cache": 3}, "conv_weight would have shape"),
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
