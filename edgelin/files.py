"""Whole files and folders only: writing beside a target and renaming, and hashes."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from edgelin.errors import EdgelinError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path to write to; the file takes the place of ``path`` if all went well.

    A link stays one: the file that it leads to is replaced. A device or pipe is never replaced:
    the finished content is copied into it. An existing file keeps its mode.

    Raises:
        OSError: The file cannot be written; ``path`` is as before.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if mode is not None and not stat.S_ISREG(mode):
        with _copying_into(path) as part:
            yield part
        return
    target = Path(os.path.realpath(path))
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.touch()  # here, because some libraries make files that only the owner can read
        mode = stat.S_IMODE(part.stat().st_mode if mode is None else mode)
        yield part
        part.chmod(mode)
        _flush_to_disk(part)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def staging(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` that is gone afterwards, unless it was renamed.

    Raises:
        EdgelinError: It, or something in it, cannot be written.
    """
    folder = out.with_name(f".{out.name}.{secrets.token_hex(4)}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        yield folder
    except OSError as error:
        space = "free some space or " if error.errno in _NO_SPACE else ""
        reason = error.strerror or str(error)
        raise EdgelinError(
            f"{out} cannot be written: {reason}; {space}choose another --out"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _copying_into(device: Path) -> Iterator[Path]:
    """Give a path to write to, wherever writers like; its content then goes to ``device``."""
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "part"
        part.touch()
        yield part
        with part.open("rb") as source, device.open("wb", buffering=0) as sink:
            shutil.copyfileobj(source, sink)


def _flush_to_disk(path: Path) -> None:
    """Have the content on the disk before the name: a crash then leaves the old or the new file."""
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def sha256(path: str | Path) -> str:
    """Hash of a file, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
