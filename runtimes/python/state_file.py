"""State files: a stream on disk, as safetensors, so that it goes on later or elsewhere.

Tensors: every state of the manifest under its ``name``, and ``logits`` [batch, vocab]. Metadata
(all strings): ``edgelin_state`` (format), ``model_hash``, ``variant``, ``position``, ``recent``
(JSON list of token ids), ``text`` (JSON: hex of pending bytes, held text), ``sha256`` of the
tensors' bytes in the order of their names.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from edgelin.errors import EdgelinError
from edgelin.files import replacing
from edgelin.runtimes.text import TextTail

FORMAT = "1"
LOGITS = "logits"


@dataclass
class SavedStream:
    """Content of a state file.

    Args:
        model_hash: Hash of the model that made it.
        variant: Variant that made it.
        position: Tokens read.
        recent: The last tokens, oldest first.
        tail: Generated text that has not been shown.
        tensors: State name, and ``logits``, to array.
    """

    model_hash: str
    variant: str
    position: int
    recent: list[int]
    tail: TextTail
    tensors: dict[str, NDArray[Any]]


def write(path: Path, saved: SavedStream) -> None:
    """Write a state file; an older one stays whole until the new one is complete."""
    metadata = {
        "edgelin_state": FORMAT,
        "model_hash": saved.model_hash,
        "variant": saved.variant,
        "position": str(saved.position),
        "recent": json.dumps(saved.recent),
        "text": json.dumps({"pending": saved.tail.pending.hex(), "held": saved.tail.held}),
        "sha256": _hash(saved.tensors),
    }
    try:
        with replacing(path) as part, part.open("wb") as file:
            file.write(safetensors.numpy.save(saved.tensors, metadata))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise EdgelinError(f"{path} cannot be written: {error.strerror}") from error


def read(path: Path) -> SavedStream:
    """Read a state file.

    Raises:
        EdgelinError: It is missing, damaged, or not a state file.
    """
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise EdgelinError(f"there is no state file {path}") from None
    except (safetensors.SafetensorError, OSError) as error:
        raise EdgelinError(
            f"{path} is damaged or no state file ({error}); save it again"
        ) from error
    if metadata.get("edgelin_state") != FORMAT:
        raise EdgelinError(
            f"{path} is no edgelin state file of format {FORMAT}; make one with --save-state"
        )
    if metadata.get("sha256") != _hash(tensors):
        raise EdgelinError(f"{path} is damaged: its tensors differ from their hash; save it again")
    try:
        text = json.loads(metadata["text"])
        return SavedStream(
            model_hash=metadata["model_hash"],
            variant=metadata["variant"],
            position=int(metadata["position"]),
            recent=[int(token) for token in json.loads(metadata["recent"])],
            tail=TextTail(bytes.fromhex(text["pending"]), str(text["held"])),
            tensors=tensors,
        )
    except (KeyError, ValueError, TypeError) as error:
        raise EdgelinError(f"{path} is damaged: odd metadata ({error}); save it again") from error


def _hash(tensors: dict[str, NDArray[Any]]) -> str:
    """sha256 of the tensors' little-endian bytes in the order of their names."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(np.ascontiguousarray(tensors[name]).tobytes())
    return total.hexdigest()
