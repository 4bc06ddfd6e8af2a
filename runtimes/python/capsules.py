"""Capsules: states in which streams of a bundle can begin, so that no prompt is read twice.

A capsule is a state file (see :mod:`edgelin.runtimes.state_file`) made by reading a prompt once. It
lies anywhere, or in the bundle under a name, where the manifest records its file and hash. The
manifest may name one in which streams begin unless told otherwise. Capsules belong to the model
that made them: a new export of the bundle begins without any.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from edgelin.errors import EdgelinError
from edgelin.runtimes import chat, checks, state_file
from edgelin.runtimes.manifest import Capsule, FileRecord, Manifest, file_problem
from edgelin.runtimes.state_file import SavedStream

if TYPE_CHECKING:
    from edgelin.runtimes.session import Bundle
    from edgelin.runtimes.stream import Stream

FOLDER = "capsules"
NONE = "none"  # the name of beginning before the first token


def read_prompt(bundle: Bundle, text: str, *, as_system: bool = False) -> Stream:
    """A stream that has read a prompt from the very beginning.

    Args:
        bundle: A model of text.
        text: The prompt.
        as_system: Whether it is what a chat model is told before the first turn, in its format.

    Raises:
        EdgelinError: The text is empty, or the model has no place for it.
    """
    ids = chat.opening(bundle, text) if as_system else bundle.text.encode(text)
    if not text or not ids:
        raise EdgelinError("the prompt is empty; give text of at least one character")
    stream = bundle.stream(capsule=NONE)
    stream.feed(ids)
    return stream


def check_name(name: str) -> str:
    """A name that a capsule can have.

    Raises:
        EdgelinError: It cannot.
    """
    good = re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", name) is not None and name != NONE
    allowed = f"1 to 64 of a-z, 0-9, - and _, a letter or digit first, and not {NONE!r}"
    checks.require(good, "the capsule's name", name, allowed)
    return name


def find(bundle: Bundle, name: str | None) -> SavedStream | None:
    """What a capsule holds; None where a stream begins before the first token.

    Args:
        bundle: The model.
        name: As of :meth:`Bundle.stream`.

    Raises:
        EdgelinError: There is no such capsule, or its file is damaged.
    """
    name = bundle.manifest.default_capsule if name is None else name
    if name is None or name == NONE:
        return None
    return read(bundle.path, bundle.manifest, name, variant=bundle.variant)


def read(folder: Path, manifest: Manifest, name: str, *, variant: str | None) -> SavedStream:
    """What a capsule of a bundle folder holds, for a variant or just to look at.

    Raises:
        EdgelinError: There is no such capsule, or its file is damaged.
    """
    capsule = manifest.capsules.get(name)
    if capsule is None:
        have = ", ".join([*manifest.capsules, NONE])
        raise EdgelinError(f"{folder} has no capsule {name!r}; allowed: {have}")
    path = folder / capsule.file
    problem = file_problem(path, capsule.record)
    if problem:
        raise EdgelinError(f"{path} {problem}; make the capsule again with `edgelin prompt`")
    saved = state_file.read(path)
    state_file.check(saved, path, manifest, variant=variant or saved.variant, batch=1)
    return saved


def add(bundle: Bundle, name: str, saved: SavedStream, *, default: bool, dtype: str) -> Manifest:
    """Write a capsule into the bundle folder; its files then are the old or the new ones, whole.

    The name of the file has its hash in it: a capsule of the same name is only removed when the
    manifest names the new one.

    Args:
        bundle: The model.
        name: Name of the capsule.
        saved: A stream of one row.
        default: Whether streams begin there unless told otherwise.
        dtype: How states are stored.

    Returns:
        The manifest as it is now.

    Raises:
        EdgelinError: The name is not allowed, the stream is of several rows or of another model,
            or the folder cannot be written.
    """
    check_name(name)
    state_file.check(saved, "the stream", bundle.manifest, variant=bundle.variant, batch=1)
    with _changing(bundle.path) as manifest:
        if manifest.model_hash != bundle.manifest.model_hash:
            raise EdgelinError(f"{bundle.path} was exported again from another model; open it anew")
        folder = bundle.path / FOLDER
        folder.mkdir(exist_ok=True)
        part = folder / f".{name}.{os.getpid()}.part"
        try:
            state_file.write(part, saved, dtype=dtype)
            record = FileRecord.of(part)
            capsule = Capsule(f"{FOLDER}/{name}-{record.sha256[:8]}.state", record)
            os.replace(part, bundle.path / capsule.file)
        finally:
            part.unlink(missing_ok=True)
        chosen = name if default else manifest.default_capsule
        return _written(bundle.path, manifest, {**manifest.capsules, name: capsule}, chosen)


def remove(folder: Path, name: str) -> None:
    """Take a capsule out of the bundle; if it was the default one, there is none then.

    Raises:
        EdgelinError: There is no such capsule, or the folder cannot be written.
    """
    with _changing(folder) as manifest:
        if name not in manifest.capsules:
            have = ", ".join(manifest.capsules) or "none"
            raise EdgelinError(f"{folder} has no capsule {name!r}; it has: {have}")
        rest = {key: capsule for key, capsule in manifest.capsules.items() if key != name}
        chosen = None if manifest.default_capsule == name else manifest.default_capsule
        _written(folder, manifest, rest, chosen)


def _written(
    folder: Path, old: Manifest, capsules: dict[str, Capsule], default: str | None
) -> Manifest:
    """Write a manifest with other capsules, and remove the files that are in none then."""
    new = dataclasses.replace(old, capsules=capsules, default_capsule=default)
    try:
        new.write(folder)
    except BaseException:
        _drop(folder, new, kept=old)
        raise
    _drop(folder, old, kept=new)
    return new


def _drop(folder: Path, manifest: Manifest, *, kept: Manifest) -> None:
    """Remove the capsules' files of one manifest that another does not name."""
    names = {capsule.file for capsule in kept.capsules.values()}
    for capsule in manifest.capsules.values():
        if capsule.file not in names:
            (folder / capsule.file).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # others are in it
        (folder / FOLDER).rmdir()


@contextlib.contextmanager
def _changing(folder: Path) -> Iterator[Manifest]:
    """The manifest on disk, which nobody else changes meanwhile (where the system has locks)."""
    try:
        with _locked(folder):
            yield Manifest.read(folder)
    except OSError as error:
        reason = error.strerror or str(error)
        raise EdgelinError(f"{folder} cannot be changed: {reason}") from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait for others that change a bundle, and have them wait."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
