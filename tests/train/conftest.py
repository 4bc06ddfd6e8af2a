"""A text and a run small enough to train in a test."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from edgelin.config import RunConfig, from_dict


@pytest.fixture
def text() -> str:
    """About 12 kB of English-like documents."""
    pick = random.Random(1)
    words = [
        "the",
        "a",
        "river",
        "house",
        "old",
        "man",
        "—",
        "sea",
        "don't",
        "walked",
        "to",
        "and",
        "saw",
        "it",
        "of",
    ]
    lines = (" ".join(pick.choices(words, k=9)) for _ in range(300))
    return "".join(line + pick.choice([".\n", ".\n\n", "<|end|>"]) for line in lines)


@pytest.fixture
def run(tmp_path: Path, text: str) -> dict[str, Any]:
    """The values of a run of 10 steps on that text, with dropout and held-out text."""
    (tmp_path / "train.txt").write_text(text, encoding="utf-8")
    (tmp_path / "valid.txt").write_text(text[:1500], encoding="utf-8")
    mixer = {"type": "gated_deltanet", "num_heads": 1, "key_dim": 8, "value_dim": 12}
    return {
        "model": {
            "vocab_size": 300,
            "hidden_size": 16,
            "intermediate_size": 24,
            "layers": ["gdn"],
            "mixers": {"gdn": mixer},
            "dropout": 0.2,
        },
        "data": {"train": [str(tmp_path / "train.txt")], "valid": [str(tmp_path / "valid.txt")]},
        "optim": {"steps": 10, "batch_size": 3, "sequence_length": 20, "warmup_steps": 3},
        "eval_every": 4,
        "eval_tokens": 200,
        "save_every": 4,
        "log_every": 3,
    }


@pytest.fixture
def config(run: dict[str, Any]) -> RunConfig:
    """The same as a config."""
    return from_dict(RunConfig, run)
