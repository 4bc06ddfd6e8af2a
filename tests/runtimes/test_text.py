"""Decoding token by token: whole characters only, nothing lost, stop strings cut out."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from edgelin.errors import EdgelinError
from edgelin.runtimes.text import TextCodec, TextDecoder, TextTail, flush

TEXT = "Grüße 日本語 🙂🙃 e\u0301 \U0001f468\u200d\U0001f469 end"


@pytest.fixture(scope="module")
def codec(tiny: Any) -> TextCodec:
    return TextCodec(tiny.path / "tokenizer.json", tiny.vocab_size)


def test_text_comes_back(codec: TextCodec) -> None:
    tail = TextTail()
    decoder = TextDecoder(codec, tail)
    ids = codec.encode(TEXT)
    pieces = [decoder.push(token) for token in ids]
    assert "".join(pieces) == TEXT and tail == TextTail()
    assert "\ufffd" not in "".join(pieces)
    assert "" in pieces  # some tokens end inside a character


def test_equals_the_tokenizers_library_on_any_tokens(codec: TextCodec) -> None:
    source = random.Random(0)
    for _ in range(100):
        ids = [source.randrange(1, 300) for _ in range(30)]
        tail = TextTail()
        decoder = TextDecoder(codec, tail)
        text = "".join(decoder.push(token) for token in ids) + flush(tail)
        # The library writes one U+FFFD for a run of broken bytes, or several: compare the rest.
        assert text.replace("\ufffd", "") == codec.tokenizer.decode(ids).replace("\ufffd", "")
        raw = b"".join(codec.token_bytes(token) for token in ids)
        assert text == raw.decode("utf-8", "replace")


def test_special_tokens_are_not_shown(codec: TextCodec) -> None:
    assert codec.token_bytes(0) == b"" and codec.source_bytes(0) == b"<|end|>"
    assert codec.token_bytes(10**6) == b""


def test_goes_on_in_the_middle_of_a_character(codec: TextCodec) -> None:
    ids = codec.encode(TEXT)
    for cut in range(len(ids)):
        tail = TextTail()
        first = TextDecoder(codec, tail)
        text = "".join(first.push(token) for token in ids[:cut])
        second = TextDecoder(codec, TextTail(tail.pending, tail.held))
        assert text + "".join(second.push(token) for token in ids[cut:]) == TEXT


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["end"], TEXT[: TEXT.index("end")]),
        (["日本語"], TEXT[: TEXT.index("日")]),
        (["\U0001f643"], TEXT[: TEXT.index("\U0001f643")]),
        (["zzz", "本"], TEXT[: TEXT.index("本")]),
        (["語 🙂", "本語 🙂🙃"], TEXT[: TEXT.index("語")]),
        (["ß", "rüß"], TEXT[: TEXT.index("rüß")]),
        (["endless"], TEXT),
        ([TEXT], ""),
    ],
)
def test_stop_strings(codec: TextCodec, stop: list[str], expected: str) -> None:
    tail = TextTail()
    decoder = TextDecoder(codec, tail, stop)
    shown = ""
    for token in codec.encode(TEXT):
        shown += decoder.push(token)
        assert expected.startswith(shown)
        if decoder.stopped:
            break
    assert decoder.stopped == (expected != TEXT)
    assert shown + flush(tail) == expected


def test_held_text_is_released_when_the_stop_string_does_not_come(codec: TextCodec) -> None:
    tail = TextTail()
    decoder = TextDecoder(codec, tail, ["aab"])
    shown = [decoder.push(token) for letter in "aaaac" for token in codec.encode(letter)]
    assert shown == ["", "", "a", "a", "aac"] and tail.held == ""


def test_incomplete_character_becomes_a_replacement(codec: TextCodec) -> None:
    tail = TextTail()
    decoder = TextDecoder(codec, tail)
    first, *_ = codec.encode("🙂")
    assert decoder.push(first) == "" or len(codec.encode("🙂")) == 1
    assert flush(TextTail(b"\xf0\x9f", "ab")) == "ab\ufffd"


def test_bytes_of_a_surrogate_are_not_waited_for(codec: TextCodec) -> None:
    """As in every decoder of WHATWG's rules, so that runners in all languages show the same."""
    byte = {codec.token_bytes(token): token for token in range(1, 300)}
    tail = TextTail()
    decoder = TextDecoder(codec, tail)
    pieces = [decoder.push(byte[bytes([value])]) for value in (0xED, 0xA0, 0x80, 0xED, 0x9F, 0xBF)]
    assert pieces == ["", "\ufffd\ufffd", "\ufffd", "", "", "\ud7ff"]
    assert tail == TextTail()


def test_metaspace_with_byte_fallback(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "▁": 1, "▁Hello": 2, "<0xE6>": 3, "<0x97>": 4, "<0xA5>": 5, "x": 6}
    model = tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    decoder = TextDecoder(TextCodec(tmp_path / "tokenizer.json", 7), TextTail())
    assert [decoder.push(i) for i in (2, 3, 4, 5, 6, 1)] == [" Hello", "", "", "日", "x", " "]


def test_unknown_decoder_is_refused(tmp_path: Path) -> None:
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a")).save(str(tmp_path / "t.json"))
    with pytest.raises(EdgelinError, match="ByteFallback or Metaspace is needed"):
        TextCodec(tmp_path / "t.json", 10)


def test_tokenizer_of_another_model_is_refused(tiny: Any) -> None:
    with pytest.raises(EdgelinError, match=r"has token id 299, the model only 0 \.\. 298"):
        TextCodec(tiny.path / "tokenizer.json", 299)
