"""Mamba-2 checkpoints beside transformers' own class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated

from edgelin.errors import EdgelinError
from edgelin.families.convert import convert

ORIGINAL = {
    "d_model": 32, "d_intermediate": 0, "n_layer": 2, "vocab_size": 117, "attn_layer_idx": [],
    "ssm_cfg": {"layer": "Mamba2", "d_state": 8, "headdim": 16, "ngroups": 2}, "attn_cfg": {},
    "rms_norm": True, "residual_in_fp32": True, "fused_add_norm": True,
    "pad_vocab_size_multiple": 8, "tie_embeddings": True,
}  # fmt: skip


def model(**changes: Any) -> Any:
    """A tiny random model; heads share B and C in two groups."""
    sizes = {
        "vocab_size": oracle.VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4,
        "head_dim": 16, "state_size": 8, "n_groups": 2, "expand": 2, "chunk_size": 16,
        "layer_norm_epsilon": 1e-5,
    }  # fmt: skip
    return oracle.randomise(Mamba2ForCausalLM(Mamba2Config(**{**sizes, **changes})))


def original(theirs: Any, folder: Path, **changes: Any) -> Path:
    """A folder as the authors of Mamba-2 publish it."""
    oracle.save(theirs, folder)
    (folder / "model.safetensors").unlink()
    (folder / "config.json").write_text(json.dumps({**ORIGINAL, **changes}))
    values = theirs.state_dict()
    values["backbone.embedding.weight"] = values.pop("backbone.embeddings.weight")
    torch.save(values, folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits(tmp_path: Path, dtype: torch.dtype) -> None:
    oracle.check_logits(model(use_bias=True), tmp_path / "m", dtype)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True, "n_groups": 1},
        {"use_conv_bias": False, "conv_kernel": 3, "layer_norm_epsilon": 1e-2},
        {"time_step_limit": (0.3, 1.0)},  # the step of transformers ignores it, the full pass not
        {"time_step_limit": (0.7, float("inf")), "n_groups": 4},
    ],
    ids=str,
)
def test_switches(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = model(**changes)
    oracle.check_torch(theirs, oracle.save(theirs, tmp_path / "m"))


def test_limits_of_the_step_are_in_the_graphs(tmp_path: Path) -> None:
    theirs = model(time_step_limit=(0.3, 1.0))
    ours = oracle.check_torch(theirs, oracle.save(theirs, tmp_path / "m"))
    oracle.check_graphs(theirs, ours)


def test_infinity_as_the_hub_spells_it(tmp_path: Path) -> None:
    theirs = model()
    folder = oracle.save(theirs, tmp_path / "m")
    oracle.rewrite(folder, time_step_limit=[0.0, float("inf")])
    assert "[0.0, Infinity]" in (folder / "config.json").read_text()
    oracle.check_torch(theirs, folder)


def test_the_original_layout(tmp_path: Path) -> None:
    theirs = model(tie_word_embeddings=True)
    oracle.check_torch(theirs, original(theirs, tmp_path / "m"))


def test_the_original_layout_with_its_options(tmp_path: Path) -> None:
    theirs = model(use_bias=True, use_conv_bias=False, time_step_limit=(0.3, 1.0))
    for layer in theirs.backbone.layers:  # what transformers' class does not offer
        layer.norm = torch.nn.LayerNorm(32, eps=1e-5)
        layer.mixer.norm = FalconH1RMSNormGated(64, eps=1e-5, n_groups=2, norm_before_gate=True)
    theirs.backbone.norm_f = torch.nn.LayerNorm(32, eps=1e-5)
    oracle.randomise(theirs)
    mixer = ORIGINAL["ssm_cfg"] | {"bias": True, "conv_bias": False, "dt_limit": [0.3, 1.0]}
    mixer |= {"norm_before_gate": True, "chunk_size": 64}
    changes = {"ssm_cfg": mixer, "tie_embeddings": False, "rms_norm": False}
    folder = original(theirs, tmp_path / "m", **changes)
    oracle.check_torch(theirs, folder)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"residual_scale": 2.0}, "'residual_scale', which this family does not know"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; supported: 'silu', 'swish'"),
        ({"expand": 4}, "expand is 4; supported: 2"),
        ({"use_bias": False}, r"holds backbone\.layers\.0\.mixer\.in_proj\.bias"),
        ({"tie_word_embeddings": False}, r"lacks the tensor lm_head\.weight"),
        ({"model_type": None}, "has no model_type, which no family reads; supported: .*mamba2"),
        ({"model_type": "mamba9"}, "is of model_type 'mamba9', which no family reads"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_not_understood_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = oracle.save(model(use_bias=True, tie_word_embeddings=True), tmp_path / "m")
    oracle.rewrite(folder, **changes)
    with pytest.raises(EdgelinError, match=message):
        convert(folder, tmp_path / "own")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"d_intermediate": 64}, "d_intermediate is 64; supported: 0"),
        ({"attn_layer_idx": [1]}, r"attn_layer_idx is \[1\]; supported: \[\]"),
        ({"ssm_cfg": {"layer": "Mamba2", "d_ssm": 48}}, "ssm_cfg: d_ssm is 48; supported: 64"),
        ({"ssm_cfg": {"layer": "Mamba2", "gate": 1}}, "ssm_cfg has 'gate', which this family"),
        ({"ssm_cfg": {"layer": "Mamba2", "D_has_hdim": True}}, "D_has_hdim is True; supported"),
        ({"rms_norm": False}, r"lacks the tensor backbone\.layers\.0\.norm\.bias"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_the_original_has_besides_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = original(model(tie_word_embeddings=True), tmp_path / "m", **changes)
    with pytest.raises(EdgelinError, match=message):
        convert(folder, tmp_path / "own")
