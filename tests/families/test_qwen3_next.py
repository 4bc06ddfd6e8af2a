"""Qwen3-Next checkpoints beside transformers' own class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from edgelin.errors import EdgelinError
from edgelin.families.convert import convert

pytestmark = pytest.mark.full  # CI has the families that are met most, `make test-full` all

SIZES = {
    "vocab_size": oracle.VOCABULARY, "hidden_size": 32, "intermediate_size": 40,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_conv_kernel_dim": 3, "full_attention_interval": 2,
    "num_experts": 0,
}  # fmt: skip
EXPERTS = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}  # fmt: skip
# The norm behind the recurrence makes noise of small outputs, in the oracle's chunks too.
SCALE = 0.5


def model(**changes: Any) -> Any:
    """A tiny random model: a layer of Gated DeltaNet, then one of attention."""
    config = Qwen3NextConfig(**{**SIZES, **changes})
    return oracle.randomise(Qwen3NextForCausalLM(config), scale=SCALE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits(tmp_path: Path, dtype: torch.dtype) -> None:
    theirs = oracle.rounded(model(), dtype)
    folder = oracle.save(theirs, tmp_path / "m", dtype)
    oracle.add_tensors(folder, {"mtp.fc.weight": torch.ones(2)})
    ours = oracle.check_torch(theirs, folder)
    if dtype == torch.float32:
        oracle.check_graphs(theirs, ours)


def test_graphs_with_experts(tmp_path: Path) -> None:
    theirs = model(**EXPERTS)
    ours = oracle.check_torch(theirs, oracle.save(theirs, tmp_path / "m"))
    oracle.check_graphs(theirs, ours)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "tie_word_embeddings": True, "linear_num_value_heads": 2},
        {**EXPERTS, "mlp_only_layers": [0, 1]},
        {**EXPERTS, "decoder_sparse_step": 3},
        {**EXPERTS, "decoder_sparse_step": 2, "norm_topk_prob": False},
        {**EXPERTS, "mlp_only_layers": [1]},
    ],
    ids=str,
)
def test_switches(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = model(**changes)
    oracle.check_torch(theirs, oracle.save(theirs, tmp_path / "m"))


def test_older_spellings(tmp_path: Path) -> None:
    theirs = model(rope_parameters={"rope_type": "default", "rope_theta": 1e7})
    folder = oracle.save(theirs, tmp_path / "m")
    old = {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "full_attention_interval": 2}
    oracle.rewrite(folder, without=("rope_parameters", "layer_types"), **old)
    oracle.check_torch(theirs, folder)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({**EXPERTS}, r"lacks the tensor model\.layers\.0\.mlp\.gate\.weight"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu', 'swish'"),
        ({"expert_gain": 8}, "has 'expert_gain', which this family does not know"),
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
    stray = {"model.layers.1.mlp.gate.weight": torch.ones(5, 32)}
    oracle.add_tensors(folder, stray)
    with pytest.raises(EdgelinError, match=r"holds model\.layers\.1\.mlp\.gate\.weight"):
        convert(folder, tmp_path / "own")
