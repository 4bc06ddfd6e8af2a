"""RecurrentGemma checkpoints beside transformers' own class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

from edgelin.errors import EdgelinError
from edgelin.families.convert import convert, read_json

pytestmark = pytest.mark.full  # CI has the families that are met most, `make test-full` all


def model(**changes: Any) -> Any:
    """A tiny random model; two query heads a key head, and a window that tokens leave."""
    sizes = {
        "vocab_size": oracle.VOCABULARY, "hidden_size": 32, "intermediate_size": 80,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "lru_width": 40, "attention_window_size": 70, "attention_bias": True,
        "logits_soft_cap": 3.0, "tie_word_embeddings": False,
    }  # fmt: skip
    return oracle.randomise(RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**{**sizes, **changes})))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits(tmp_path: Path, dtype: torch.dtype) -> None:
    oracle.check_logits(model(), tmp_path / "m", dtype)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True, "lru_width": None},
        {"attention_bias": False, "num_key_value_heads": 1, "conv1d_width": 3},
        {"block_types": ["attention", "recurrent"], "rms_norm_eps": 1e-2, "logits_soft_cap": 0.5},
        {"rope_parameters": {"rope_theta": 50.0, "partial_rotary_factor": 0.25}},
        {"attention_window_size": 9, "num_key_value_heads": None},
    ],
    ids=str,
)
def test_switches(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = model(**changes)
    oracle.check_torch(theirs, oracle.save(theirs, tmp_path / "m"))


def test_names_of_older_configs(tmp_path: Path) -> None:
    """The keys of the published checkpoints."""
    theirs = model(block_types=["recurrent", "attention"])
    folder = oracle.save(theirs, tmp_path / "m")
    old = read_json(folder / "config.json")
    del old["rope_parameters"]
    old |= {
        "_block_types": old.pop("block_types"), "embeddings_scale_by_sqrt_dim": True,
        "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "head_dim": 8,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(old))
    oracle.check_torch(theirs, folder)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"query_pre_attn_scalar": 8}, "'query_pre_attn_scalar', which this family does not know"),
        ({"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ({"block_types": ["mamba"]}, "block_types has 'mamba'; supported: 'recurrent'"),
        ({"embeddings_scale_by_sqrt_dim": False}, "embeddings_scale_by_sqrt_dim is False"),
        ({"attention_bias": False}, r"holds model\.layers\.2\.temporal_block\.k_proj\.bias"),
        ({"num_attention_heads": 2, "head_dim": 16}, "decay_weight would have shape"),
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
