"""Text in and out: encoding, decoding of tokens that split characters, stop strings."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgelin.errors import EdgelinError
from edgelin.tokenizer import BYTE_SYMBOLS, load


def check_unicode(text: str) -> None:
    """Refuse a text that has no UTF-8 form.

    Python reads a byte of a command line that is not UTF-8 as an unpaired surrogate.

    Raises:
        EdgelinError: The text holds an unpaired surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EdgelinError(
            f"the text is not valid Unicode: unpaired surrogate U+{ord(text[error.start]):04X} "
            f"(or a byte that is not UTF-8) at character {error.start}; remove or convert it"
        ) from None


class TextCodec:
    """Token ids from text, and the bytes of every token id.

    Bytes, not text, because a byte-level token may hold a part of a character.

    Args:
        path: A ``tokenizer.json`` whose decoder is ByteLevel, ByteFallback or Metaspace.
        vocab_size: Rows of the model's embedding; ids of the tokenizer must lie below it.

    Attributes:
        tokenizer: The ``tokenizers.Tokenizer``.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        self.tokenizer = load(path)
        description = json.loads(self.tokenizer.to_str())
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        largest = max(vocabulary.values(), default=-1)
        if largest >= vocab_size:
            raise EdgelinError(
                f"{path} has token id {largest}, the model only 0 .. {vocab_size - 1}; "
                "the tokenizer belongs to another model"
            )
        decoder = description["decoder"]
        if not any(_uses(decoder, kind) for kind in ("ByteLevel", "ByteFallback", "Metaspace")):
            raise EdgelinError(
                f"{path} has a decoder that is not known; ByteLevel, ByteFallback or Metaspace is "
                f"needed"
            )
        to_bytes = _byte_level if _uses(decoder, "ByteLevel") else _metaspace
        added = {entry["id"]: entry for entry in description["added_tokens"]}
        self._special = {id_ for id_, entry in added.items() if entry["special"]}
        self._bytes = {
            id_: token.encode() if id_ in added else to_bytes(token)
            for token, id_ in vocabulary.items()
        }

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: Any text.
            start: Whether a stream starts here, so that a begin token, if the tokenizer has one,
                comes first.

        Raises:
            EdgelinError: The text holds an unpaired surrogate.
        """
        check_unicode(text)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=start).ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text in which the names of special tokens are ordinary words."""
        self.tokenizer.encode_special_tokens = True
        try:
            return self.encode(text, start=False)
        finally:
            self.tokenizer.encode_special_tokens = False

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 bytes that a reader sees of a token: none for special tokens and unused ids."""
        return b"" if token in self._special else self.source_bytes(token)

    def source_bytes(self, token: int) -> bytes:
        """UTF-8 bytes of the text that a token stands for; ``<|end|>`` is seven."""
        return self._bytes.get(token, b"")


@dataclass
class TextTail:
    """What a stream has generated but not yet shown.

    Attributes:
        pending: First bytes of a character whose other bytes are still to come.
        held: Text that may turn out to be the beginning of a stop string.
    """

    pending: bytes = b""
    held: str = ""


class TextDecoder:
    """Turns generated tokens into text that can be shown at once.

    Args:
        codec: Bytes of the tokens.
        tail: What an earlier decoder left over; updated by every call.
        stop: Strings that end the text; they are not part of it.
    """

    def __init__(self, codec: TextCodec, tail: TextTail, stop: Sequence[str] = ()) -> None:
        self._codec = codec
        self._tail = tail
        self._stop = stop
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8.setstate((tail.pending, 0))
        self.stopped = False

    def push(self, token: int) -> str:
        """Take one token; returns the text that is certain now, perhaps none."""
        text = self._tail.held + self._utf8.decode(self._codec.token_bytes(token))
        if _SURROGATE.match(self._utf8.getstate()[0]):
            text += self._utf8.decode(b"", final=True)
        self._tail.pending = self._utf8.getstate()[0]
        cut = _first_of(text, self._stop)
        if cut is not None:
            self.stopped = True
            self._tail.held, self._tail.pending = "", b""
            return text[:cut]
        keep = _possible_start(text, self._stop)
        self._tail.held = text[len(text) - keep :]
        return text[: len(text) - keep]


# Two bytes of a surrogate, which no text can hold; Python's decoder alone waits for the third.
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]\Z")


def flush(tail: TextTail) -> str:
    """The held text, with U+FFFD for a character that will not be completed; empties the tail."""
    text = tail.held + tail.pending.decode("utf-8", "replace")
    tail.held, tail.pending = "", b""
    return text


def _first_of(text: str, stops: Iterable[str]) -> int | None:
    """Where the earliest stop string begins."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return min(found, default=None)


def _possible_start(text: str, stops: Iterable[str]) -> int:
    """Length of the longest end of ``text`` with which a stop string could begin."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest


def _uses(decoder: Any, kind: str) -> bool:
    """Whether a decoder of ``tokenizer.json`` is of a kind, or is a sequence with one of it."""
    if not isinstance(decoder, dict):
        return False
    return decoder.get("type") == kind or any(
        _uses(part, kind) for part in decoder.get("decoders", [])
    )


_ALPHABET = {symbol: byte for byte, symbol in BYTE_SYMBOLS.items()}


def _byte_level(token: str) -> bytes:
    """Bytes of a ByteLevel token."""
    return bytes(_ALPHABET[character] for character in token)


def _metaspace(token: str) -> bytes:
    """Bytes of a Metaspace token, or of a byte-fallback token such as ``<0x0A>``."""
    byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()
