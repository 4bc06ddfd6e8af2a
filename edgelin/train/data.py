"""Text files to token arrays: streamed reading, encoding, and a cache keyed by content."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import lzma
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from edgelin import tokenizer as tokenizers
from edgelin.config import RunConfig
from edgelin.errors import EdgelinError
from edgelin.files import replacing, sha256

_BLOCK = 1 << 20
_COMPRESSED = (".xz", ".gz")

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Corpus:
    """What a run reads.

    Args:
        tokenizer: The tokenizer of the run.
        train: Token ids to train on, ``[n]`` uint16 or uint32; starts with the end token.
        valid: Held-out token ids likewise, or None.
        key: Hash of the training tokens' origin (files and tokenizer).
    """

    tokenizer: tokenizers.Tokenizer
    train: Array
    valid: Array | None
    key: str


def read_text(path: str | Path) -> Iterator[str]:
    """Yield the text of a UTF-8 file (plain, .xz or .gz) in blocks.

    Raises:
        EdgelinError: The file is missing, damaged, or not UTF-8 (with the byte offset).
    """
    path = Path(path)
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    try:
        with _open(path) as file:
            while block := file.read(_BLOCK):
                pending = len(decoder.getstate()[0])
                yield _decode(decoder, block, path, offset - pending)
                offset += len(block)
    except (lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise EdgelinError(f"{path} is damaged: {error}") from error
    except OSError as error:
        raise EdgelinError(f"cannot read the text {path}: {error.strerror}") from error
    pending = len(decoder.getstate()[0])
    _decode(decoder, b"", path, offset - pending, final=True)


def _open(path: Path) -> IO[bytes]:
    """Open a file for reading bytes, decompressed."""
    if path.suffix == ".xz":
        return cast(IO[bytes], lzma.open(path))
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path))
    return path.open("rb")


def _decode(decoder: Any, block: bytes, path: Path, start: int, *, final: bool = False) -> str:
    """Decode one block; ``start`` is the file offset of the decoder's first pending byte."""
    try:
        return str(decoder.decode(block, final))
    except UnicodeDecodeError as error:
        raise EdgelinError(
            f"{path} is not UTF-8: invalid byte at offset {start + error.start}"
            f"{' of the decompressed text' if path.suffix in _COMPRESSED else ''}; convert it first"
        ) from error


def prepare(config: RunConfig, out: Path) -> Corpus:
    """Get the tokenizer of a run (read or trained) and its encoded texts (from the cache or new).

    Args:
        config: The run; ``config.model.vocab_size`` sizes a tokenizer that is trained here.
        out: Output folder; its ``tokenizer.json``, if there, is the run's.
    """
    cache = Path(config.data.cache) if config.data.cache else out / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    texts = [_hash_file(path) for path in config.data.train]
    vocab_size = config.model.vocab_size
    own = out / "tokenizer.json"
    trained = cache / f"tokenizer-{_hash(*texts, str(vocab_size))}.json"
    if own.is_file():
        tokenizer = tokenizers.load(own)
    elif config.data.tokenizer:
        tokenizer = tokenizers.load(config.data.tokenizer)
    elif (found := _cached_tokenizer(trained)) is not None:
        tokenizer = found
    else:
        blocks = (block for path in config.data.train for block in read_text(path))
        tokenizer = tokenizers.train(blocks, vocab_size)
        with replacing(trained) as part:
            part.write_text(tokenizer.to_str(), encoding="utf-8")
    size = tokenizers.largest_id(tokenizer) + 1
    if size > vocab_size:
        raise EdgelinError(
            f"the tokenizer has {size} tokens, model.vocab_size is {vocab_size}; "
            f"set model.vocab_size to at least {size}"
        )
    train, key = _tokens(config.data.train, texts, tokenizer, cache)
    valid = None
    if config.data.valid:
        hashes = [_hash_file(path) for path in config.data.valid]
        valid, _ = _tokens(config.data.valid, hashes, tokenizer, cache)
    return Corpus(tokenizer, train, valid, key)


def _cached_tokenizer(path: Path) -> tokenizers.Tokenizer | None:
    """A tokenizer that an earlier run trained; None where there is none or it is damaged."""
    try:
        return tokenizers.load(path) if path.is_file() else None
    except EdgelinError:
        return None


def _tokens(
    paths: Sequence[str], hashes: Sequence[str], tokenizer: tokenizers.Tokenizer, cache: Path
) -> tuple[Array, str]:
    """The tokens of all files, the end token before each, memory-mapped from the cache."""
    key = _hash(*hashes, tokenizer.to_str())
    file = cache / f"tokens-{key}.npy"
    size = tokenizers.largest_id(tokenizer) + 1
    if not _is_whole(file, size):
        dtype = np.uint16 if size <= 1 << 16 else np.uint32
        with replacing(file) as part:
            _write_array(part, np.dtype(dtype), _encoded(paths, tokenizer))
    return cast(Array, np.load(file, mmap_mode="r")), key


def _is_whole(file: Path, size: int) -> bool:
    """Whether a cached array is there and holds ids below ``size``; a damaged one is made again."""
    try:
        tokens = np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return False
    whole = tokens.ndim == 1 and tokens.dtype.kind == "u" and tokens.size > 0
    return bool(whole and tokens.max() < size)


def _encoded(paths: Sequence[str], tokenizer: tokenizers.Tokenizer) -> Iterator[Array]:
    for path in paths:
        yield np.array([tokenizers.end_token_id(tokenizer)])
        yield from tokenizers.encode(tokenizer, read_text(path))


def _write_array(path: Path, dtype: np.dtype[Any], parts: Iterator[Array]) -> None:
    """Write a one-dimensional .npy whose length is known only at the end."""

    def header(file: IO[bytes], length: int) -> None:
        description = {"descr": dtype.str, "fortran_order": False, "shape": (length,)}
        np.lib.format.write_array_header_1_0(file, description)  # type: ignore[arg-type]

    length = 0
    with path.open("wb") as file:
        header(file, 0)
        body = file.tell()
        for part in parts:
            length += len(part)
            file.write(part.astype(dtype).tobytes())
        file.seek(0)
        header(file, length)  # numpy pads the header so that a longer length fits in place
        if file.tell() != body:
            raise RuntimeError("the header of a .npy file changed its size")


def _hash_file(path: str) -> str:
    try:
        return sha256(path)
    except OSError as error:
        raise EdgelinError(f"cannot read the text {path}: {error.strerror}") from error


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
