"""States that are read seldom, in a bundle that updates states in their own buffers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import edgelin
from edgelin import checkpoint, tokenizer
from edgelin.config import ModelConfig
from edgelin.export import bundle as bundles
from edgelin.export.bundle import export_checkpoint
from edgelin.model import SequenceModel

BLOCK = 4096


def test_a_full_block_moves_though_states_are_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps over the end of a block; z of the first layer is a sum over tokens that is known."""
    monkeypatch.setattr(bundles, "measure", lambda bundle, key: {})
    torch.manual_seed(0)
    table = {"num_heads": 1, "key_dim": 4, "value_dim": 6, "compensated": True}
    config = ModelConfig(
        vocab_size=300,
        hidden_size=8,
        intermediate_size=8,
        layers=("m",),
        mixers={"m": {"type": "linear_attention", **table}},
    )
    model = SequenceModel(config)
    checkpoint.save(tmp_path / "model", model, tokenizer.train(["a few words"], 300).to_str())
    export_checkpoint(tmp_path / "model", tmp_path / "out")
    stream = edgelin.load(tmp_path / "out", threads=1).stream()
    ids = np.random.default_rng(0).integers(0, 300, BLOCK + 5)
    stream.feed(ids[: BLOCK - 5])
    for token in ids[BLOCK - 5 :]:
        stream.feed([token])
    weights = {k: v.detach().double().numpy() for k, v in model.state_dict().items()}
    x = weights["embedding.weight"][ids]
    x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + config.rms_norm_eps)
    keys = (
        x * weights["blocks.0.mixer_norm.weight"] @ weights["blocks.0.mixer.qkv_proj.weight"][4:8].T
    )
    features = np.where(keys > 0, keys + 1, np.exp(keys))
    states = stream.states()
    wanted = features[:BLOCK].sum(0), features[BLOCK:].sum(0)
    for name, z in zip(("normalizer.0", "normalizer_recent.0"), wanted, strict=True):
        np.testing.assert_allclose(states[name][0, 0], z, rtol=1e-5)
