"""Mamba-2 checkpoints beside transformers' own class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM


def model(**changes: Any) -> Any:
    """A tiny random model; heads share B and C in two groups."""
    sizes = {
        "vocab_size": oracle.VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4,
        "head_dim": 16, "state_size": 8, "n_groups": 2, "expand": 2, "chunk_size": 16,
        "layer_norm_epsilon": 1e-5,
    }  # fmt: skip
    return oracle.randomise(Mamba2ForCausalLM(Mamba2Config(**{**sizes, **changes})))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    theirs = model(tie_word_embeddings=tied).to(dtype).float()
    ours = oracle.check_torch(theirs, oracle.save(theirs, tmp_path / "m", dtype))
    if dtype == torch.float32 and not tied:
        oracle.check_graphs(theirs, ours)
