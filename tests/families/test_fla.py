"""Checkpoints of fla's research models beside the code of its layers in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import oracle
import oracle_fla_models as fla
import pytest
import torch
from oracle_fla import check

from edgelin.errors import EdgelinError
from edgelin.families.convert import convert

ATTENTION = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True}
WINDOW = {"layers": [0], "num_heads": 2, "window_size": 64, "rope_theta": 500.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in fla.MIXERS},
    "gla, key heads for two, no affine": (
        "gla", {"num_kv_heads": 2, "elementwise_affine": False, "fuse_norm": False},
    ),
    "gla, hybrid, tied": ("gla", {"attn": [ATTENTION, WINDOW], "tie_word_embeddings": True}),
    "retnet, key heads for two": ("retnet", {"num_kv_heads": 2, "fuse_norm": False}),
    "delta_net, gate, beta to 2": ("delta_net", {"use_gate": True, "allow_neg_eigval": True}),
    "gated_deltanet, no gate, value heads, beta to 2": (
        "gated_deltanet",
        {"use_gate": False, "num_heads": 2, "num_v_heads": 4, "allow_neg_eigval": True},
    ),
    "kda, bound, value heads": (
        "kda", {"safe_gate": True, "lower_bound": -5.0, "num_heads": 2, "num_v_heads": 4},
    ),
    "hgrn2, no bounds, no affine": (
        "hgrn2",
        {
            "use_lower_bound": False, "elementwise_affine": False, "expand_ratio": None,
            "num_heads": 2,
        },
    ),
    "hgrn2, hybrid": ("hgrn2", {"attn": {**ATTENTION, "qkv_bias": False}}),
    "linear_attn, tied map, key heads for two": (
        "linear_attn",
        {"tie_feature_map_qk": True, "num_kv_heads": 2, "elementwise_affine": False},
    ),
    **{
        f"linear_attn, {name}": ("linear_attn", {"feature_map": name})
        for name in ("elu", "identity", "relu", "t2r")
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, tmp_path: Path) -> None:
    kind, changes = CASES[case]
    theirs = fla.model(kind, **changes)
    check(theirs, theirs.save(tmp_path / "m"))


@pytest.mark.parametrize("kind", ["kda", "hgrn2", "linear_attn"])
def test_graphs(kind: str, tmp_path: Path) -> None:
    theirs = fla.model(kind)
    folder = theirs.save(tmp_path / "m", torch.bfloat16)
    oracle.check_graphs(theirs, check(theirs, folder))


def test_before_2025_one_matrix_held_gate_and_up(tmp_path: Path) -> None:
    theirs = fla.model("gla", hidden_ratio=9, intermediate_size=None)
    for i in range(fla.LAYERS):  # 9 streams of 32 make a width of 256
        names = [f"model.layers.{i}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
        parts = [np.resize(theirs.weights[n], (256, 32)) / 4 for n in names]
        theirs.weights |= dict(zip(names, [*parts[:2], parts[2].T.copy()], strict=True))

    def fused(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        made = {}
        for name, array in weights.items():
            if "gate_proj" in name:
                array = np.concatenate([array, weights[name.replace("gate", "up")]])
            if "up_proj" not in name:
                made[name] = array
        return made

    theirs.rename = fused
    check(theirs, theirs.save(tmp_path / "m"))


@pytest.mark.parametrize(
    "kind, change, words",
    [
        ("gla", {"feature_map": "relu"}, "feature_map is 'relu'"),
        ("gla", {"clamp_min": -1.0}, "clamp_min is -1.0"),
        ("retnet", {"use_short_conv": True}, "use_short_conv is True"),
        ("delta_net", {"qk_norm": "sum"}, "qk_norm is 'sum'"),
        ("gated_deltanet", {"output_gate_activation": "sigmoid"}, "output_gate_activation"),
        ("kda", {"attnres_block_size": 4}, "attnres_block_size is 4"),
        ("hgrn2", {"hidden_act": "powlu"}, "hidden_act is 'powlu'"),
        ("linear_attn", {"feature_map": "dpfp"}, "feature_map is 'dpfp'"),
        ("linear_attn", {"norm_feature_map": True}, "norm_feature_map is True"),
        ("gla", {"attn": {"layers": [3], "num_heads": 2}}, "3 twice, or outside"),
        ("gla", {"attn": {"layers": [1], "num_heads": 2, "qk_norm": True}}, "'qk_norm'"),
        ("gla", {"gate_logit_normalizer": 8}, "'gate_logit_normalizer'"),
    ],
)
def test_refuses_what_it_does_not_compute(
    kind: str, change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    theirs = fla.model(kind)
    assert theirs.config is not None
    theirs.config |= change
    with pytest.raises(EdgelinError, match=words):
        convert(theirs.save(tmp_path / "m"), tmp_path / "own")


def test_refuses_a_tensor_that_it_does_not_use(tmp_path: Path) -> None:
    theirs = fla.model("gla")
    theirs.weights["model.layers.1.attn.q_conv1d.weight"] = np.ones((16, 1, 4))
    with pytest.raises(EdgelinError, match=r"q_conv1d.*does not account for"):
        convert(theirs.save(tmp_path / "m"), tmp_path / "own")
