"""Mamba and Falcon-Mamba checkpoints beside transformers' own classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from transformers import FalconMambaConfig, FalconMambaForCausalLM, MambaConfig, MambaForCausalLM

from edgelin.errors import EdgelinError
from edgelin.families.convert import convert

CLASSES: Any = {
    "mamba": (MambaConfig, MambaForCausalLM),
    "falcon_mamba": (FalconMambaConfig, FalconMambaForCausalLM),
}


def model(family: str, **changes: Any) -> Any:
    """A tiny random model."""
    sizes = {
        "vocab_size": oracle.VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2,
        "state_size": 6, "use_bias": True, "tie_word_embeddings": False,
    }  # fmt: skip
    configs, models = CLASSES[family]
    return oracle.randomise(models(configs(**{**sizes, **changes})))


def change(folder: Path, **changes: Any) -> Path:
    """Set keys of a config."""
    oracle.rewrite(folder, **changes)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", CLASSES)
def test_logits(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    oracle.check_logits(model(family), tmp_path / "m", dtype)


@pytest.mark.parametrize(
    "family, changes",
    [
        ("mamba", {"tie_word_embeddings": True, "use_bias": False}),
        ("mamba", {"use_conv_bias": False, "conv_kernel": 3}),
        ("mamba", {"time_step_rank": 5, "expand": 3, "layer_norm_epsilon": 1e-2}),
        ("falcon_mamba", {"mixer_rms_eps": 1e-2, "tie_word_embeddings": True}),
        ("falcon_mamba", {"expand": 16, "intermediate_size": 48}),
    ],
    ids=str,
)
def test_switches(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    theirs = model(family, **changes)
    oracle.check_torch(theirs, oracle.save(theirs, tmp_path / "m"))


@pytest.mark.parametrize("tied", [True, False])
def test_original_layout(tmp_path: Path, tied: bool) -> None:
    """As ``mamba-130m``: no model_type, a pickle, another name of the embedding, padded words."""
    theirs = model("mamba", use_bias=False, time_step_rank=3, tie_word_embeddings=tied)
    folder = oracle.save(theirs, tmp_path / "m")
    (folder / "model.safetensors").unlink()
    weights = {k.replace("embeddings.", "embedding."): t for k, t in theirs.state_dict().items()}
    torch.save(weights, folder / "pytorch_model.bin")
    config = {
        "d_model": 32, "n_layer": 2, "vocab_size": 113, "ssm_cfg": {"d_state": 6, "dt_rank": 3},
        "rms_norm": True, "residual_in_fp32": True, "fused_add_norm": True,
        "pad_vocab_size_multiple": 8, "tie_embeddings": tied,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    oracle.check_torch(theirs, folder)
    with pytest.raises(EdgelinError, match="ssm_cfg has 'headdim'"):
        convert(change(folder, ssm_cfg={"d_state": 6, "headdim": 4}), tmp_path / "own")


def test_original_layout_with_layer_norms(tmp_path: Path) -> None:
    """``rms_norm`` false, which the original code can do and transformers cannot."""
    theirs = model("mamba", use_bias=False, tie_word_embeddings=True)
    for block in theirs.backbone.layers:
        block.norm = torch.nn.LayerNorm(32, eps=1e-5)
    theirs.backbone.norm_f = torch.nn.LayerNorm(32, eps=1e-5)
    oracle.randomise(theirs)
    folder = oracle.save(theirs, tmp_path / "m")
    config = {"d_model": 32, "n_layer": 2, "vocab_size": oracle.VOCABULARY, "rms_norm": False}
    (folder / "config.json").write_text(json.dumps({**config, "ssm_cfg": {"d_state": 6}}))
    oracle.check_torch(theirs, folder)


def test_keys_that_conversions_of_the_original_left(tmp_path: Path) -> None:
    """As ``mamba-130m-hf``."""
    theirs = model("mamba", use_bias=False)
    folder = oracle.save(theirs, tmp_path / "m")
    left = {"d_model": 32, "d_inner": 64, "n_layer": 2, "ssm_cfg": {}, "rms_norm": True}
    change(folder, fused_add_norm=True, pad_vocab_size_multiple=8, **left)
    oracle.check_torch(theirs, folder)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"norm_before_gate": True}, "'norm_before_gate', which this family does not know"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu', 'swish'"),
        ({"d_inner": 128}, "d_inner is 128; supported: 64"),
        ({"use_bias": False}, r"holds backbone\.layers\.0\.mixer\.in_proj\.bias"),
        ({"num_hidden_layers": 1}, r"holds backbone\.layers\.1\.mixer\.A_log"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_not_understood_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = change(oracle.save(model("mamba"), tmp_path / "m"), **changes)
    with pytest.raises(EdgelinError, match=message):
        convert(folder, tmp_path / "own")
