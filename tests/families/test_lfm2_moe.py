"""LFM2 checkpoints with experts beside transformers' own class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Lfm2MoeConfig, Lfm2MoeForCausalLM

from edgelin.errors import EdgelinError
from edgelin.families.convert import convert, read_json


def model(**changes: Any) -> Any:
    """A tiny random model, its first layer without experts; a bias that changes the choice."""
    sizes = {
        "vocab_size": oracle.VOCABULARY, "hidden_size": 32, "intermediate_size": 44,
        "moe_intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5, "tie_word_embeddings": False,
    }  # fmt: skip
    made = oracle.randomise(Lfm2MoeForCausalLM(Lfm2MoeConfig(**{**sizes, **changes})))
    for name, buffer in made.named_buffers():
        if name.endswith("expert_bias"):
            buffer.normal_(std=0.3)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits(tmp_path: Path, dtype: torch.dtype) -> None:
    theirs = oracle.rounded(model(conv_bias=True), dtype)
    folder = oracle.save(theirs, tmp_path / "m", dtype)
    if dtype != torch.float32:  # published files keep the bias in float32
        kept = {k: b for k, b in theirs.named_buffers() if k.endswith("expert_bias")}
        assert set(kept) < set(load_file(folder / "model.safetensors"))
        oracle.add_tensors(folder, kept)
    ours = oracle.check_torch(theirs, folder)
    if dtype == torch.float32:
        oracle.check_graphs(theirs, ours)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
        {"use_expert_bias": False, "num_experts_per_tok": 1},
        {"num_dense_layers": 0, "num_experts_per_tok": 6},
        {"num_dense_layers": 3, "norm_eps": 1e-2},
    ],
    ids=str,
)
def test_switches(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = model(**changes)
    oracle.check_torch(theirs, oracle.save(theirs, tmp_path / "m"))


def test_experts_in_one_tensor_and_older_keys(tmp_path: Path) -> None:
    theirs = model(rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    folder = oracle.save(theirs, tmp_path / "m")
    path = folder / "model.safetensors"
    own = {k: v.detach() for k, v in theirs.named_parameters() if ".experts." in k}
    kept = {k: v for k, v in load_file(path).items() if ".experts." not in k}
    assert len(own) == 4
    save_file({**kept, **own}, path, metadata={"format": "pt"})
    old = read_json(folder / "config.json")
    del old["rope_parameters"]
    old |= {"rope_theta": 500.0, "tie_embedding": old.pop("tie_word_embeddings")}
    (folder / "config.json").write_text(json.dumps(old))
    oracle.check_torch(theirs, folder)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"n_group": 2}, "'n_group', which this family does not know"),
        ({"num_dense_layers": 2}, r"lacks the tensor model\.layers\.1\.feed_forward\.w1\.weight"),
        ({"num_experts": 5}, r"router.weight would have shape|expert_bias would have shape"),
        ({"num_experts": 7}, r"lacks the tensor .*experts\.6\.w1|would have shape"),
        ({"num_experts_per_tok": 7}, "experts_per_token is 7; there are only num_experts = 6"),
        ({"use_expert_bias": False}, r"holds model\.layers\.1\.feed_forward\.expert_bias"),
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


def test_a_stray_tensor_is_refused(tmp_path: Path) -> None:
    folder = oracle.save(model(), tmp_path / "m")
    stray = {"model.layers.1.feed_forward.shared.w1.weight": torch.ones(4, 32)}
    oracle.add_tensors(folder, stray)
    with pytest.raises(EdgelinError, match=r"holds model\.layers\.1\.feed_forward\.shared"):
        convert(folder, tmp_path / "own")
