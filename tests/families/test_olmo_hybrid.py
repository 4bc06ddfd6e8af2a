"""OLMo Hybrid checkpoints beside transformers' own class."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

from edgelin.errors import EdgelinError
from edgelin.families.convert import convert

pytestmark = pytest.mark.full  # CI has the families that are met most, `make test-full` all

NO_POSITIONS = {"rope_theta": None}
SIZES = {
    "vocab_size": oracle.VOCABULARY, "hidden_size": 32, "intermediate_size": 40,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_conv_kernel_dim": 3, "pad_token_id": None,
    "eos_token_id": 0, "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": NO_POSITIONS,
}  # fmt: skip


def model(**changes: Any) -> Any:
    """A tiny random model: a layer of Gated DeltaNet, then one of attention."""
    config = OlmoHybridConfig(**{**SIZES, **changes})
    return oracle.randomise(OlmoHybridForCausalLM(config), scale=0.5)


def store(path: Path, tensors: dict[str, Any]) -> None:
    """Write a file of tensors."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, path, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits(tmp_path: Path, dtype: torch.dtype) -> None:
    oracle.check_logits(model(), tmp_path / "m", dtype)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4},
        {"linear_allow_neg_eigval": False, "rope_parameters": {"rope_theta": 5e5}},
        {"rms_norm_eps": 0.01, "linear_num_value_heads": 2, "head_dim": 6},
    ],
    ids=str,
)
def test_switches(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = model(**changes)
    oracle.check_torch(theirs, oracle.save(theirs, tmp_path / "m"))


def test_published_names(tmp_path: Path) -> None:
    """Norms under their names in the code, and convolutions cut between q, k and v."""
    theirs = model()
    folder = oracle.save(theirs, tmp_path / "m")
    path = folder / "model.safetensors"
    tensors, names = load_file(path), dict(theirs.named_parameters())
    for name in [name for name in tensors if "layer_norm" in name or "conv1d" in name]:
        del tensors[name]
    tensors |= {name: names[name].detach() for name in names if "layernorm" in name}
    conv = names["model.layers.0.linear_attn.conv1d.weight"].detach()
    for letter, part in zip("qkv", conv.split([16, 16, 48]), strict=True):
        tensors[f"model.layers.0.linear_attn.{letter}_conv1d.weight"] = part
    store(path, tensors)
    # The defaults of the class, which a config need not repeat.
    oracle.rewrite(folder, without=("rope_parameters", "attention_bias"), rope_theta=None)
    oracle.check_torch(theirs, folder)


def test_defaults(tmp_path: Path) -> None:
    without = ("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
               "linear_num_value_heads", "layer_types", "num_key_value_heads",
               "linear_conv_kernel_dim")  # fmt: skip
    theirs = model(**{**dict.fromkeys(without), "linear_conv_kernel_dim": 4})
    folder = oracle.save(theirs, tmp_path / "m")
    oracle.rewrite(folder, without=without)
    oracle.check_torch(theirs, folder)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"rope_parameters": None},
            r'has no rope_theta.*set rope_parameters to {"rope_theta": nul',
        ),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters has no rope_theta"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"rope_parameters": {"rope_theta": None, "factor": 2}}, "rope_parameters has 'factor'"),
        ({"linear_use_gate": False}, "linear_use_gate is False; supported: True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu', 'swish'"),
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "has 'sliding_attention'"),
        ({"linear_gain": 2}, "has 'linear_gain', which this family does not know"),
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
    path, stray = folder / "model.safetensors", "model.layers.0.linear_attn.q_conv1d.bias"
    store(path, {**load_file(path), stray: torch.ones(16)})
    with pytest.raises(EdgelinError, match=f"holds {re.escape(stray)}"):
        convert(folder, tmp_path / "own")
