"""Reading UTF-8 text of a user: plain, .xz or .gz files, and standard input."""

from __future__ import annotations

import gzip
import lzma
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

from edgelin.errors import EdgelinError

_DECOMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".xz": lzma.decompress,
    ".gz": gzip.decompress,
}


def read_text(source: str) -> str:
    """The text of a file, or of standard input for ``-``.

    Raises:
        EdgelinError: The file is missing, damaged, or not UTF-8 (with the byte offset).
    """
    if not source:
        raise EdgelinError(
            "the file name is empty; give a UTF-8 text file, or - for standard input"
        )
    if source == "-" and sys.stdin is None:
        raise EdgelinError("standard input is closed; give a UTF-8 text file")
    name = "standard input" if source == "-" else source
    suffix = Path(source).suffix
    try:
        raw = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        content = _DECOMPRESS[suffix](raw) if suffix in _DECOMPRESS else raw
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise EdgelinError(
            f"{name} is not UTF-8: invalid byte 0x{error.object[error.start]:02x} at offset "
            f"{error.start}; convert it first, for instance with iconv"
        ) from error
    except (lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise EdgelinError(f"{name} is damaged: {error}") from error
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = getattr(error, "strerror", None) or error
        raise EdgelinError(f"{name!r} cannot be read: {reason}") from error
