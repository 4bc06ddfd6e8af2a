"""Byte-level BPE tokenizers (``tokenizer.json`` of the Hugging Face ``tokenizers`` library).

A text file holds documents separated by the literal ``<|end|>``, which is one token: the model
learns from it where a document ends, and generation stops at it.

Long texts are encoded in pieces, so that all cores work and memory stays constant. A piece is cut
before a space or newline that a visible character follows. There the GPT-2 word pattern of
byte-level BPE starts a new word anyway, so the tokens equal those of the whole text.

Source of the pattern: GPT-2, github.com/openai/gpt-2, src/encoder.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from edgelin.errors import EdgelinError

END = "<|end|>"
_END_NAMES = (
    END,
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|rwkv_tokenizer_end_of_text|>",
    "</s>",
    "<eos>",
    "[EOS]",
    "<|im_end|>",
)
_PIECE = 1 << 16  # characters: big enough to hide the cost of a call, small enough to share out
_BATCH = 128  # pieces handed to the thread pool at once
_SAMPLE = 48 << 20  # characters that BPE training reads at most
_WORD_START = re.compile(r"[ \n](?=[^\s<])")  # not before <|end|>: blanks next to it stay together
_DOCUMENT_START = re.compile(re.escape(END))

Tokenizer = Any  # tokenizers.Tokenizer, which carries no types


def _byte_symbols() -> dict[int, str]:
    """Every byte to the printable character by which GPT-2's byte-level BPE writes it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {byte: chr(256 + index) for index, byte in enumerate(others)}
    return {byte: chr(byte) for byte in printable} | shifted


BYTE_SYMBOLS = _byte_symbols()


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE; ``<|end|>`` is token 0 and every byte has a token.

    Args:
        texts: Blocks of text in order, cut anywhere. A regular sample of them is used when they
            hold more than about 50 million characters.
        vocab_size: Tokens at most; fewer when the text is too short to fill it.

    Raises:
        EdgelinError: ``vocab_size`` is below 257 (256 bytes and ``<|end|>``).
    """
    if vocab_size < 257:
        raise EdgelinError(f"a byte-level BPE needs vocab_size >= 257, not {vocab_size}")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = (piece for piece in _sample(_pieces(texts, _WORD_START)) if piece != END)
    tokenizer.train_from_iterator(words, trainer)
    return tokenizer


def load(path: str | Path) -> Tokenizer:
    """Read a ``tokenizer.json``.

    Raises:
        EdgelinError: The file is missing or no tokenizer.
    """
    path = Path(path)
    if not path.is_file():
        raise EdgelinError(f"there is no tokenizer {path}; a tokenizer.json is needed")
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise EdgelinError(
            f"{path} cannot be read: {error.strerror}; a tokenizer.json is needed"
        ) from error
    return parse(text, path)


def parse(text: str, path: str | Path) -> Tokenizer:
    """Make the tokenizer of the content of a ``tokenizer.json``; ``path`` is named in errors.

    Raises:
        EdgelinError: The text is no tokenizer.
    """
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        reason = str(error).splitlines()[0]
        raise EdgelinError(f"{path} is no tokenizer.json: {reason}") from error


def largest_id(tokenizer: Tokenizer) -> int:
    """The largest token id, added tokens included; -1 when there is none."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def end_token_id(tokenizer: Tokenizer, known: Sequence[int] = ()) -> int:
    """Id of the token that ends a document: ``<|end|>``, or a foreign tokenizer's equivalent.

    Args:
        tokenizer: The tokenizer.
        known: Ids that end a generation; the first is taken where no name is known.

    Raises:
        EdgelinError: The tokenizer has none of the known ones.
    """
    for name in _END_NAMES:
        number = tokenizer.token_to_id(name)
        if number is not None:
            return int(number)
    if known:
        return known[0]
    raise EdgelinError(
        f"the tokenizer has no end-of-document token; one of {', '.join(_END_NAMES)}"
    )


def end_ids(folder: Path) -> list[int]:
    """Ids that end a generation, of a checkpoint's ``generation_config.json``; perhaps none.

    Raises:
        EdgelinError: The file is damaged.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        return [int(i) for i in (found if isinstance(found, list) else [found]) if i is not None]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise EdgelinError(f"{path} cannot be read: {error}; copy the checkpoint again") from error


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[np.ndarray[Any, Any]]:
    """Encode a stream of text on all cores.

    Args:
        tokenizer: Any tokenizer with an end-of-document token.
        texts: Blocks of one text in order, cut anywhere.

    Yields:
        Token ids ``[n] int64``; concatenated they are the tokens of the whole text, with the end
        token for every ``<|end|>``.
    """
    end = np.array([end_token_id(tokenizer)])
    pieces = _pieces(texts, _WORD_START if _is_byte_level(tokenizer) else _DOCUMENT_START)
    while batch := list(islice(pieces, _BATCH)):
        words = [piece for piece in batch if piece != END]
        encoded = iter(tokenizer.encode_batch_fast(words, add_special_tokens=False))
        parts = [end if piece == END else next(encoded).ids for piece in batch]
        yield np.concatenate([np.asarray(ids, dtype=np.int64) for ids in parts])


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether words are found by the GPT-2 pattern alone, so that `_WORD_START` is safe."""
    spec = json.loads(tokenizer.to_str())
    before = spec["pre_tokenizer"] or {}
    plain = before.get("type") == "ByteLevel" and before.get("use_regex", True)
    return plain and not before["add_prefix_space"] and spec["normalizer"] is None


def _pieces(texts: Iterable[str], cut: re.Pattern[str]) -> Iterator[str]:
    """Regroup blocks into pieces of at least `_PIECE` characters; ``<|end|>`` comes alone."""
    buffer = ""
    for text in texts:
        buffer += text
        start = 0
        while found := cut.search(buffer, start + _PIECE):
            yield from _documents(buffer[start : found.start()])
            start = found.start()
        buffer = buffer[start:]
    yield from _documents(buffer)


def _documents(text: str) -> Iterator[str]:
    """Split at ``<|end|>``, keeping it; empty parts are left out."""
    for i, part in enumerate(text.split(END)):
        if i:
            yield END
        if part:
            yield part


def _sample(pieces: Iterable[str]) -> list[str]:
    """Every n-th piece, n the least power of two that keeps the sum below `_SAMPLE`."""
    kept: list[str] = []
    stride, size = 1, 0
    for i, piece in enumerate(pieces):
        if i % stride:
            continue
        kept.append(piece)
        size += len(piece)
        if size > _SAMPLE:
            kept, stride = kept[::2], stride * 2
            size = sum(map(len, kept))
    return kept
