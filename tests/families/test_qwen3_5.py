"""Qwen3.5 checkpoints beside transformers' own classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5TextConfig,
)

from edgelin.errors import EdgelinError
from edgelin.families.convert import convert

SIZES = {
    "vocab_size": oracle.VOCABULARY, "hidden_size": 32, "intermediate_size": 40,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_conv_kernel_dim": 3, "full_attention_interval": 2,
    "attention_bias": True,
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
    "patch_size": 2, "num_position_embeddings": 16,
}  # fmt: skip
# The norm behind the recurrence makes noise of small outputs, in the oracle's chunks too.
SCALE = 0.5


def model(**changes: Any) -> Any:
    """A tiny random model: two layers of Gated DeltaNet with a layer of attention between."""
    config = Qwen3_5TextConfig(**{**SIZES, **changes})
    return oracle.randomise(Qwen3_5ForCausalLM(config), scale=SCALE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits(tmp_path: Path, dtype: torch.dtype) -> None:
    oracle.check_logits(model(), tmp_path / "m", dtype)


ROPE = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": False, "tie_word_embeddings": True},
        {"linear_num_value_heads": 2, "num_key_value_heads": 4, "rms_norm_eps": 0.01},
        {"rope_parameters": {**ROPE, "mrope_interleaved": True, "mrope_section": [2, 1, 1]}},
    ],
    ids=str,
)
def test_switches(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = model(**changes)
    oracle.check_torch(theirs, oracle.save(theirs, tmp_path / "m"))


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_text_and_pictures(tmp_path: Path, tied: bool) -> None:
    """As published: the text model inside, with a tower and a head for further tokens beside it."""
    config = Qwen3_5Config(text_config=SIZES, vision_config=VISION, tie_word_embeddings=tied)
    theirs = oracle.randomise(Qwen3_5ForConditionalGeneration(config), scale=SCALE)
    folder = oracle.save(theirs, tmp_path / "m")
    text = json.loads((folder / "config.json").read_text())["text_config"]
    published = {
        "attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False, "output_gate_type": "swish",
    }  # fmt: skip
    oracle.rewrite(folder, text_config={**text, **published})
    oracle.add_tensors(folder, {"mtp.fc.weight": torch.ones(2)})
    oracle.check_torch(theirs, folder)


@pytest.mark.parametrize("together", [False, True])
def test_experts(tmp_path: Path, together: bool) -> None:
    """The experts of a layer in one tensor, as published, or each on its own."""
    sizes = {
        **SIZES, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20, "num_hidden_layers": 2,
    }  # fmt: skip
    del sizes["intermediate_size"]
    config = Qwen3_5MoeConfig(text_config=sizes, vision_config=VISION)
    theirs = oracle.randomise(Qwen3_5MoeForConditionalGeneration(config), scale=SCALE)
    folder = oracle.save(theirs, tmp_path / "m")
    path = folder / "model.safetensors"
    if together:
        own = {k: v.detach() for k, v in theirs.named_parameters() if ".mlp.experts." in k}
        kept = {k: v for k, v in load_file(path).items() if ".mlp.experts." not in k}
        save_file({**kept, **own}, path, metadata={"format": "pt"})
    oracle.check_torch(theirs, folder)


@pytest.mark.parametrize("share", [0.5, None])
def test_older_spellings(tmp_path: Path, share: float | None) -> None:
    theirs = model(rope_parameters={**ROPE, "partial_rotary_factor": share or 0.25})
    folder = oracle.save(theirs, tmp_path / "m")
    old: dict[str, Any] = {"rope_theta": 1e6, "full_attention_interval": 2}
    if share is not None:
        old["partial_rotary_factor"] = share
    oracle.rewrite(folder, without=("rope_parameters", "layer_types"), **old)
    oracle.check_torch(theirs, folder)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"attn_output_gate": False}, "attn_output_gate is False; supported: True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu', 'swish'"),
        ({"num_expert": 8}, "has 'num_expert', which this family does not know"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False; supported: True"),
        ({"rope_parameters": {**ROPE, "rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"rope_parameters": {**ROPE, "factor": 4.0}}, "rope_parameters has 'factor'"),
        ({"layer_types": ["linear_attention", "sliding_attention", "linear_attention"]}, "layer_t"),
        ({"tie_word_embeddings": True}, "lm_head.weight is not model.embed_tokens.weight"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = oracle.save(model(), tmp_path / "m")
    oracle.rewrite(folder, **changes)
    with pytest.raises(EdgelinError, match=message):
        convert(folder, tmp_path / "own")


def test_a_stray_tensor_is_refused(tmp_path: Path) -> None:
    folder = oracle.save(model(), tmp_path / "m")
    stray = {"model.layers.0.linear_attn.conv1d.bias": torch.ones(80)}
    oracle.add_tensors(folder, stray)
    with pytest.raises(EdgelinError, match=r"holds model\.layers\.0\.linear_attn\.conv1d\.bias"):
        convert(folder, tmp_path / "own")
