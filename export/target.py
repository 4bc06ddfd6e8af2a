"""Where a bundle is put: what may be replaced, and renaming the finished folder into place.

Only what an export made, or an empty folder, is ever removed. That is checked before the work and
again at the rename, because a target can appear or change meanwhile.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from edgelin.checkpoint import CHAT_TEMPLATE
from edgelin.errors import EdgelinError
from edgelin.export.genai import FILE_NAME as GENAI_NAME
from edgelin.export.golden import FILE_NAME as GOLDEN_NAME
from edgelin.export.report import JSON_NAME, PLOT_NAME, TEXT_NAME
from edgelin.runtimes.capsules import FOLDER as CAPSULES
from edgelin.runtimes.manifest import FILE_NAME as MANIFEST_NAME
from edgelin.runtimes.manifest import Manifest

COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    CHAT_TEMPLATE,
)
_CONTENT = {
    *COPIED,
    MANIFEST_NAME,
    GENAI_NAME,
    GOLDEN_NAME,
    JSON_NAME,
    TEXT_NAME,
    PLOT_NAME,
    "onnx",
    CAPSULES,
}


def failed(out: Path) -> Path:
    """Where a bundle goes that missed a gate."""
    return out.with_name(f"{out.name}.failed")


def find(checkpoint: Path, out: Path, *, force: bool) -> Path:
    """The absolute path that ``out`` leads to, links followed, if a bundle may be put there.

    Raises:
        EdgelinError: Something stands there that must not be replaced, or it is the checkpoint.
    """
    target, source = Path(os.path.realpath(out)), Path(os.path.realpath(checkpoint))
    if not target.name:
        raise EdgelinError(f"--out {out} is no name for a folder; choose another --out")
    if target == source or target in source.parents or source in target.parents:
        raise EdgelinError(
            f"--out {out} and the checkpoint {checkpoint} must not lie in each other; "
            f"choose another --out"
        )
    if target.is_symlink():
        raise EdgelinError(f"--out {out} is a link to itself; choose another --out")
    if target.exists() and not force:
        raise EdgelinError(f"{out} exists; choose another --out, or replace it with --force")
    _check_replaceable(target)
    _check_replaceable(failed(target))
    return target


def capsules(target: Path) -> list[str]:
    """Names of the capsules of a bundle that stands there: states of the model that goes."""
    try:
        return list(Manifest.read(target).capsules)
    except EdgelinError:  # nothing, or a damaged bundle, which is replaced too
        return []


def put(folder: Path, target: Path, *, force: bool) -> None:
    """Rename ``folder`` to ``target``; what stood there goes only when the new one is in place.

    Raises:
        EdgelinError: ``target`` appeared meanwhile, or is nothing that an export made.
    """
    if not (force and os.path.lexists(target)):
        _rename(folder, target)
        return
    _check_replaceable(target)
    old = folder.with_name(f"{folder.name}.old")
    try:
        target.rename(old)
        _rename(folder, target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    finally:
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)


def _rename(folder: Path, target: Path) -> None:
    """Rename a folder; the system refuses that onto anything but an empty folder."""
    try:
        folder.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise EdgelinError(
            f"{target} was made by another program during the export; choose another --out, or "
            f"export again with --force"
        ) from error


def _check_replaceable(target: Path) -> None:
    """Refuse what is neither absent, nor an empty folder, nor what an export made."""
    if not os.path.lexists(target):
        return
    todo = "move it away or choose another --out"
    if target.is_symlink() or not target.is_dir():
        raise EdgelinError(f"{target} is no folder, and only a bundle is replaced; {todo}")
    names = {path.name for path in target.iterdir()}
    if names and not names & {MANIFEST_NAME, TEXT_NAME}:
        raise EdgelinError(
            f"{target} is no bundle (no {MANIFEST_NAME} in it), and only a bundle is replaced; "
            f"{todo}"
        )
    if foreign := sorted(names - _CONTENT):
        raise EdgelinError(
            f"{target} holds {foreign[0]}, which no export wrote and would be lost; {todo}"
        )
