"""Bits per byte beside a plain float64 computation over the whole text."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from edgelin.config import RunConfig
from edgelin.errors import EdgelinError
from edgelin.model import SequenceModel
from edgelin.train.data import Corpus, prepare
from edgelin.train.evaluate import Windows, streamed_bits_per_byte


@pytest.fixture
def corpus(config: RunConfig, tmp_path: Path) -> Corpus:
    return prepare(config, tmp_path / "out")


@pytest.fixture
def model(config: RunConfig) -> SequenceModel:
    torch.manual_seed(0)
    model = SequenceModel(config.model)
    for parameter in model.parameters():
        parameter.data.mul_(3)  # far from uniform predictions
    return model.train()


def _bits(model: SequenceModel, ids: list[int]) -> float:
    """Bits of ids[1:], token by token through the double-precision step."""
    model = model.double().eval()
    state, bits = None, 0.0
    with torch.no_grad():
        for here, after in itertools.pairwise(ids):
            logits, state = model(torch.tensor([[here]]), state)
            bits -= float(logits[0, 0].log_softmax(-1)[after]) / math.log(2)
    model.float()
    return bits


@pytest.mark.parametrize("chunk", [1, 37, 64, 10_000])
def test_streamed_equals_steps(model: SequenceModel, corpus: Corpus, text: str, chunk: int) -> None:
    text = text[:700]
    ids = corpus.tokenizer.encode(text, add_special_tokens=False).ids
    got = streamed_bits_per_byte(model, corpus.tokenizer, text, chunk=chunk)
    assert model.training
    model.eval()
    assert got == pytest.approx(_bits(model, [0, *ids]) / len(text.encode()), rel=1e-5)


def test_files_are_streams_of_their_own(
    model: SequenceModel, corpus: Corpus, tmp_path: Path
) -> None:
    texts = ["the old man", "a river — saw it"]
    bits = size = 0.0
    paths = []
    for i, text in enumerate(texts):
        paths.append(tmp_path / f"{i}.txt")
        paths[-1].write_text(text, encoding="utf-8")
        bits += _bits(model, [0, *corpus.tokenizer.encode(text).ids])
        size += len(text.encode())
    got = streamed_bits_per_byte(model, corpus.tokenizer, *paths)
    assert got == pytest.approx(bits / size, rel=1e-5)


def test_windows_are_measured_from_an_empty_state(model: SequenceModel, corpus: Corpus) -> None:
    tokens = np.array(corpus.train[:100])
    windows = Windows(tokens, corpus.tokenizer, length=20, budget=70, device=torch.device("cpu"))
    starts = [0, 39, 79]
    rows = [tokens[s : s + 21].tolist() for s in starts]
    size = sum(
        len(corpus.tokenizer.decode(row[1:], skip_special_tokens=False).encode()) for row in rows
    )
    got = windows.bits_per_byte(model)
    assert model.training
    assert got == pytest.approx(sum(_bits(model, row) for row in rows) / size, rel=1e-5)


def test_short_and_empty_texts(model: SequenceModel, corpus: Corpus) -> None:
    cpu = torch.device("cpu")
    windows = Windows(corpus.train[:3], corpus.tokenizer, length=20, budget=70, device=cpu)
    assert windows.bits_per_byte(model) > 0
    with pytest.raises(EdgelinError, match=r"^data\.valid holds no text"):
        Windows(corpus.train[:1], corpus.tokenizer, length=20, budget=70, device=cpu)
    with pytest.raises(EdgelinError, match="no text to measure"):
        streamed_bits_per_byte(model, corpus.tokenizer, "")
