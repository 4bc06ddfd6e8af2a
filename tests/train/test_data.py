"""Reading text files, and the cache of their tokens."""

from __future__ import annotations

import dataclasses
import gzip
import lzma
from pathlib import Path

import numpy as np
import pytest

from edgelin.config import RunConfig
from edgelin.errors import EdgelinError
from edgelin.train import data


@pytest.mark.parametrize("suffix", ["", ".xz", ".gz"])
@pytest.mark.parametrize("block", [1, 2, 3, 1 << 20])
def test_reads_all_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, block: int
) -> None:
    monkeypatch.setattr(data, "_BLOCK", block)
    text, path = "Zürich — 雪 \U0001f600 ", tmp_path / f"t.txt{suffix}"
    raw = text.encode()
    path.write_bytes({"": bytes, ".xz": lzma.compress, ".gz": gzip.compress}[suffix](raw))
    assert "".join(data.read_text(path)) == text


@pytest.mark.parametrize("block", [1, 2, 3, 1 << 20])
@pytest.mark.parametrize("tail", [b"\xff rest", b"\xe2\x82", b"\xe2\x82A"])
def test_names_the_offset_of_a_bad_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, tail: bytes
) -> None:
    monkeypatch.setattr(data, "_BLOCK", block)
    path = tmp_path / "t.txt"
    path.write_bytes("aé—".encode() + tail)
    with pytest.raises(EdgelinError) as error:
        list(data.read_text(path))
    assert str(error.value) == f"{path} is not UTF-8: invalid byte at offset 6; convert it first"


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(EdgelinError, match=r"^cannot read the text .*none\.txt: No such file"):
        list(data.read_text(tmp_path / "none.txt"))
    packed = lzma.compress(b"x" * 1000)
    for name, content in {
        "cut.xz": packed[:-20],
        "no.xz": b"plain text",
        "no.gz": b"plain",
        "cut.gz": gzip.compress(b"x" * 100)[:-9],
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(EdgelinError, match=f"^.*{name} is damaged: "):
            list(data.read_text(tmp_path / name))


def test_tokens_come_from_the_cache_until_a_file_changes(
    config: RunConfig, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = data.prepare(config, tmp_path / "out")
    assert first.train.dtype == np.uint16
    ids = [0, *first.tokenizer.encode(text, add_special_tokens=False).ids]
    assert first.train.tolist() == ids
    assert not list((tmp_path / "out").rglob(".*"))

    def refuse(*args: object) -> None:
        raise AssertionError("encoded again")

    monkeypatch.setattr(data, "_encoded", refuse)
    again = data.prepare(config, tmp_path / "out")
    assert again.key == first.key
    assert again.train.tolist() == ids
    Path(config.data.train[0]).write_text("other " * 300, encoding="utf-8")
    with pytest.raises(AssertionError, match="encoded again"):
        data.prepare(config, tmp_path / "out")


def test_files_are_joined_by_the_end_token(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab ", encoding="utf-8")
    (tmp_path / "b.txt").write_text(" c", encoding="utf-8")
    names = (str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))
    both = dataclasses.replace(config, data=dataclasses.replace(config.data, train=names))
    corpus = data.prepare(both, tmp_path / "out")
    text = corpus.tokenizer.decode(corpus.train.tolist(), skip_special_tokens=False)
    assert text == "<|end|>ab <|end|> c"


def test_given_tokenizer_must_fit_the_model(config: RunConfig, tmp_path: Path) -> None:
    corpus = data.prepare(config, tmp_path / "one")
    path = tmp_path / "tokenizer.json"
    corpus.tokenizer.save(str(path))
    given = dataclasses.replace(config.data, tokenizer=str(path))
    other = data.prepare(dataclasses.replace(config, data=given), tmp_path / "two")
    assert other.key == corpus.key
    model = dataclasses.replace(config.model, vocab_size=280)
    with pytest.raises(EdgelinError) as error:
        data.prepare(dataclasses.replace(config, data=given, model=model), tmp_path / "three")
    assert str(error.value) == (
        "the tokenizer has 300 tokens, model.vocab_size is 280; "
        "set model.vocab_size to at least 300"
    )


def test_missing_text_is_named(config: RunConfig, tmp_path: Path) -> None:
    gone = dataclasses.replace(config.data, train=(str(tmp_path / "gone.txt"),))
    with pytest.raises(EdgelinError, match=r"^cannot read the text .*gone\.txt: No such file"):
        data.prepare(dataclasses.replace(config, data=gone), tmp_path / "out")


@pytest.mark.parametrize("damage", [b"", b"half", None])
def test_a_damaged_cache_is_made_again(
    config: RunConfig, tmp_path: Path, damage: bytes | None
) -> None:
    first = data.prepare(config, tmp_path)
    tokens = np.array(first.train)
    for file in (tmp_path / "cache").iterdir():
        if damage is not None:
            file.write_bytes(damage)
        elif file.suffix == ".npy":
            np.save(file, np.full(5, 60000, np.uint16))  # ids that the tokenizer has not
    again = data.prepare(config, tmp_path)
    assert np.array_equal(again.train, tokens)
    assert again.key == first.key
