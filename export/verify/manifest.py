"""Compare what a bundle says of itself with its files and with the checkpoint it was made from.

The manifest carries its own digest, so that what changed by accident is found when it is read; here
stands what is left: a file too large to hash at every start, and a bundle that was put together of
parts that belong to different models.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from edgelin import checkpoint as checkpoints
from edgelin.errors import EdgelinError
from edgelin.export import contract
from edgelin.export.profiles import find
from edgelin.export.step_form import load
from edgelin.export.target import COPIED
from edgelin.runtimes.manifest import Manifest
from edgelin.runtimes.tokenizer_record import TokenizerRecord

_KEYS = ("input", "output", "states", "tokenizer", "opset", "max_time")


def check_same_model(manifest: Manifest, checkpoint: Path, given: Path) -> None:
    """Refuse a checkpoint, given under another name, that the bundle was not made from."""
    checkpoints.read_config(checkpoint)
    found = contract.model_hash(checkpoint)
    if found != manifest.model_hash:
        raise EdgelinError(
            f"{given} is another model ({found[:12]}) than the bundle's "
            f"({manifest.model_hash[:12]}); give the checkpoint that was exported"
        )


def _told(part: object) -> object:
    """A part as it counts: the ids that end a text are a set, in which the manifest repeats one."""
    if isinstance(part, TokenizerRecord):
        return dataclasses.replace(part, eos_token_ids=tuple(sorted(part.ends)))
    return part


def check_contract(manifest: Manifest, bundle: Path, checkpoint: Path, given: Path) -> None:
    """Refuse a bundle whose contract or copied files an export of the checkpoint does not write.

    Args:
        manifest: The bundle's.
        bundle: Its folder.
        checkpoint: As it was exported.
        given: What the user calls it.

    Raises:
        EdgelinError: The first part that differs.
    """
    wanted = contract.manifest(
        checkpoint,
        load(checkpoint),
        profile=find(manifest.profile),
        min_onnxruntime=manifest.min_onnxruntime,
        default_variant=manifest.default_variant,
        lengths=manifest.lengths is not None,
    )
    for key in _KEYS:
        if _told(getattr(manifest, key)) != _told(getattr(wanted, key)):
            raise EdgelinError(
                f"{bundle / 'edgelin.json'}: {key} is not that of {given}; "
                "export the checkpoint again"
            )
    for name in COPIED:
        copy, own = (
            path.read_bytes() if path.is_file() else None
            for path in (bundle / name, checkpoint / name)
        )
        if copy != own:
            raise EdgelinError(
                f"{bundle / name} is not that of {given}; export the checkpoint again"
            )
