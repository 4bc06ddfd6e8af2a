"""LFM2 checkpoints beside transformers' own class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM

from edgelin.errors import EdgelinError
from edgelin.families.convert import convert, read_json

ATTENTION = ["conv", "full_attention", "conv"]


def model(**changes: Any) -> Any:
    """A tiny random model; two query heads a key head."""
    sizes = {
        "vocab_size": oracle.VOCABULARY, "hidden_size": 32, "intermediate_size": 60,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "block_multiple_of": 8, "layer_types": ATTENTION, "tie_word_embeddings": False,
    }  # fmt: skip
    return oracle.randomise(Lfm2ForCausalLM(Lfm2Config(**{**sizes, **changes})))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits(tmp_path: Path, dtype: torch.dtype) -> None:
    oracle.check_logits(model(conv_bias=True), tmp_path / "m", dtype)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"block_auto_adjust_ff_dim": False},
        {"block_ffn_dim_multiplier": 1.3, "block_multiple_of": 16},
        {"conv_L_cache": 5, "norm_eps": 1e-2},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
        {"layer_types": None, "full_attn_idxs": [0, 2]},
        {"layer_types": ["conv"] * 3, "conv_bias": True},
    ],
    ids=str,
)
def test_switches(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = model(**changes)
    oracle.check_torch(theirs, oracle.save(theirs, tmp_path / "m"))


def test_names_of_older_configs(tmp_path: Path) -> None:
    """The keys of the first published checkpoints, which say the same."""
    theirs = model(rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    folder = oracle.save(theirs, tmp_path / "m")
    old = read_json(folder / "config.json")
    del old["rope_parameters"], old["layer_types"]
    old |= {
        "block_ff_dim": old.pop("intermediate_size"), "block_dim": 32, "conv_dim": 32,
        "conv_dim_out": 32, "block_mlp_init_scale": 1.0, "block_out_init_scale": 1.0,
        "block_norm_eps": 1e-5, "block_use_swiglu": True, "block_use_xavier_init": True,
        "conv_use_xavier_init": True, "full_attn_idxs": [1], "num_heads": 4, "use_pos_enc": True,
        "rope_theta": 500.0, "rope_scaling": None, "theta": 500.0,
        "tie_embedding": old.pop("tie_word_embeddings"),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(old))
    oracle.check_torch(theirs, folder)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden_activation": "relu"}, "'hidden_activation', which this family does not know"),
        ({"conv_dim": 64}, "conv_dim is 64; supported: 32"),
        ({"block_use_swiglu": False}, "block_use_swiglu is False; supported: True"),
        ({"layer_types": ["conv", "sliding_attention", "conv"]}, "layer_types has 'sliding_att"),
        ({"layer_types": ["conv"]}, "layer_types has 1 words for num_hidden_layers = 3"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is 'yarn'"),
        ({"conv_bias": False}, r"holds model\.layers\.0\.conv\.conv\.bias"),
        ({"layer_types": ["conv"] * 3}, r"lacks the tensor model\.layers\.1\.conv\.conv\.weight"),
        ({"intermediate_size": 96}, "gate_up_proj.weight would have shape"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_not_understood_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = oracle.save(model(conv_bias=True), tmp_path / "m")
    oracle.rewrite(folder, **changes)
    with pytest.raises(EdgelinError, match=message):
        convert(folder, tmp_path / "own")
