"""Bits per byte and KL against sums over a float64 loop."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import edgelin
from edgelin.errors import EdgelinError
from edgelin.runtimes.evaluate import evaluate, evaluate_checkpoint
from edgelin.runtimes.text import TextCodec

TEXT = "The old mill of Köln.<|end|>A quiet 日 river 🙂 runs past; naïve café 0123\n" * 2


def _ids(tiny: Any) -> list[int]:
    return TextCodec(tiny.path / "tokenizer.json", tiny.vocab_size).encode(TEXT)


def _log_p(tiny: Any, ids: list[int]) -> NDArray[np.float64]:
    """Log probabilities of the token after each of ``ids``, by the reference."""
    logits, _ = tiny.reference(ids)
    peak = logits.max(-1, keepdims=True)
    return np.asarray(logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True)))


def test_bits_per_byte(tiny: Any) -> None:
    ids = _ids(tiny)
    assert 0 in ids and len(ids) % 8 != 0  # an end token, and a chunk that is not full
    rows = _log_p(tiny, [0, *ids[:-1]])
    bits = -sum(rows[t, token] for t, token in enumerate(ids)) / np.log(2) / len(TEXT.encode())
    found = evaluate(edgelin.load(tiny.path, threads=1), TEXT)
    assert found.tokens == len(ids) and found.bytes == len(TEXT.encode())
    assert found.bits_per_byte == pytest.approx(bits, rel=1e-5)
    assert found.kl_nat is None


@pytest.mark.parametrize("count", [1, 8, 9, 20])
def test_max_tokens(tiny: Any, count: int) -> None:
    ids = _ids(tiny)[:count]
    codec = TextCodec(tiny.path / "tokenizer.json", tiny.vocab_size)
    size = sum(len(codec.source_bytes(token)) for token in ids)
    rows = _log_p(tiny, [0, *ids[:-1]])
    bits = -sum(rows[t, token] for t, token in enumerate(ids)) / np.log(2) / size
    found = evaluate(edgelin.load(tiny.path, threads=1), TEXT, max_tokens=count)
    assert (found.tokens, found.bytes) == (count, size)
    assert found.bits_per_byte == pytest.approx(bits, rel=1e-5)


def test_against_another_model(tiny: Any, build: Callable[..., Any], tmp_path: Path) -> None:
    other = build(tmp_path / "other", seed=1)
    ids = _ids(tiny)
    p, q = (_log_p(model, [0, *ids[:-1]]) for model in (tiny, other))
    kl = (np.exp(q) * (q - p)).sum(-1).mean()
    agreement = (p.argmax(-1) == q.argmax(-1)).mean()
    bundles = [edgelin.load(model.path, threads=1) for model in (tiny, other)]
    found = evaluate(bundles[0], TEXT, against=bundles[1])
    assert found.kl_nat == pytest.approx(kl, rel=1e-5)
    assert found.top1_agreement == pytest.approx(agreement)
    alone = evaluate(bundles[1], TEXT).bits_per_byte
    assert found.against_bits_per_byte == pytest.approx(alone, rel=1e-12)
    same = evaluate(bundles[0], TEXT, against=bundles[0])
    assert same.kl_nat == 0 and same.top1_agreement == 1


def test_refusals(tiny: Any) -> None:
    bundle = edgelin.load(tiny.path, threads=1)
    with pytest.raises(EdgelinError, match="the text is empty"):
        evaluate(bundle, "")
    with pytest.raises(EdgelinError, match="max_tokens is 0"):
        evaluate(bundle, TEXT, max_tokens=0)
    other = edgelin.load(tiny.path, threads=1)
    other.text.tokenizer.add_tokens(["extra"])
    with pytest.raises(EdgelinError, match="have different tokenizers"):
        evaluate(bundle, TEXT, against=other)


def test_checkpoint_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [n for n in sys.modules if n.startswith(("edgelin.checkpoint", "edgelin.train"))]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(
        EdgelinError, match=r"which needs torch .* pip install \"edgelin\[train\]\""
    ):
        evaluate_checkpoint(tmp_path, TEXT)
