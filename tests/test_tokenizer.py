"""Byte-level BPE: exact round trips, and pieces that encode like the whole text."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from edgelin import tokenizer as subject
from edgelin.errors import EdgelinError

WORDS = [
    "the",
    "river",
    "don't",
    "Zürich",
    "—",
    "雪",
    "\t",
    " ",
    "\n",
    "\n\n",
    "  ",
    "<b>",
    "7",
    ".",
]
HARD = "a\n\n<|end|>\n\nb <|end|>c  \n d<|end|><|end|> <e \u0085x\x1cy"


def _text(size: int) -> str:
    pick = random.Random(0)
    words = [pick.choice(WORDS) + pick.choice(["", " ", " ", "\n"]) for _ in range(size)]
    return "".join(words) + HARD + "".join(words)


@pytest.fixture(scope="module")
def trained() -> subject.Tokenizer:
    return subject.train([_text(2000)], 400)


def _encode(tokenizer: subject.Tokenizer, texts: list[str]) -> list[int]:
    return [int(i) for part in subject.encode(tokenizer, texts) for i in part]


@pytest.mark.parametrize("block", [1, 7, 100_000])
@pytest.mark.parametrize("piece", [1, 5, 1 << 16])
def test_pieces_encode_like_the_whole(
    trained: subject.Tokenizer, monkeypatch: pytest.MonkeyPatch, block: int, piece: int
) -> None:
    monkeypatch.setattr(subject, "_PIECE", piece)
    text = _text(400)
    ids = _encode(trained, [text[i : i + block] for i in range(0, len(text), block)])
    assert ids == trained.encode(text, add_special_tokens=False).ids
    assert trained.decode(ids, skip_special_tokens=False) == text
    assert ids.count(0) == text.count("<|end|>") == 4


def test_end_is_token_0_and_every_byte_has_a_token(trained: subject.Tokenizer) -> None:
    assert subject.end_token_id(trained) == 0
    text = "".join(map(chr, range(1, 0x800))) + "\U0001f600"
    assert trained.decode(trained.encode(text).ids, skip_special_tokens=False) == text


def test_training_is_repeatable_and_samples_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_SAMPLE", 1000)
    kept = subject._sample(str(i) * 40 for i in range(100, 200))
    assert [piece[:3] for piece in kept] == [str(i) for i in range(100, 200, 16)]
    text = _text(2000)
    assert subject.train([text], 300).to_str() == subject.train([text[:9], text[9:]], 300).to_str()


def test_foreign_tokenizer_is_cut_only_between_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_PIECE", 1)
    foreign = tokenizers.Tokenizer(models.WordLevel({"</s>": 3, "a": 1, "▁b": 2}, unk_token="a"))
    foreign.pre_tokenizer = pre_tokenizers.Metaspace()
    assert _encode(foreign, ["a b b<|en", "d|>b b"]) == [1, 2, 2, 3, 2, 2]


def test_errors_take_one_line(tmp_path: Path) -> None:
    with pytest.raises(EdgelinError, match=r"^there is no tokenizer .*x\.json; a tokenizer\.json"):
        subject.load(tmp_path / "x.json")
    (tmp_path / "x.json").write_bytes(b"\xff{}")
    with pytest.raises(EdgelinError, match=r"^.*x\.json is no tokenizer\.json: .+$") as error:
        subject.load(tmp_path / "x.json")
    assert "\n" not in str(error.value)
    with pytest.raises(EdgelinError, match="vocab_size >= 257, not 256"):
        subject.train(["a"], 256)
    with pytest.raises(EdgelinError, match="no end-of-document token"):
        subject.end_token_id(tokenizers.Tokenizer(models.BPE()))


def test_ids_are_int64(trained: subject.Tokenizer) -> None:
    assert next(iter(subject.encode(trained, ["a"]))).dtype == np.int64
