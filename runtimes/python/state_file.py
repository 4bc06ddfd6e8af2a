"""State files: a stream on disk, as safetensors, so that it goes on later or elsewhere.

Tensors: every state of the manifest under its ``name``, stored as :mod:`state_codec` says (the
scales of an int8 one under ``name.scale``), and the last ``logits`` [batch, vocab] or ``outputs``
[batch, size], always float32. Metadata (all strings): ``edgelin_state`` (format), ``model_hash``,
``variant``, ``position``, ``sha256`` of all the rest (see :func:`_hash`), and for text ``recent``
(JSON list of token ids) and ``text`` (JSON: hex of pending bytes, held text).
"""

from __future__ import annotations

import codecs
import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from edgelin import __version__
from edgelin.errors import EdgelinError
from edgelin.files import replacing
from edgelin.runtimes import checks, state_codec
from edgelin.runtimes.manifest import Manifest
from edgelin.runtimes.sampler import WINDOW
from edgelin.runtimes.signature import Tokens
from edgelin.runtimes.text import TextTail

FORMAT = "1"
_SCALE = ".scale"
_ANSWERS = ("logits", "outputs")
# Other numbers than a state can have are told with the name of the tensor.
_CODES = ("F64", "F32", "F16", "I64", "I32", "I8")
_SHORTER = (np.dtype(np.float16), np.dtype(np.int8))

_log = logging.getLogger("edgelin")


@dataclass
class TextPart:
    """What a stream of text keeps besides its tensors.

    Args:
        recent: The last tokens, oldest first.
        tail: Generated text that has not been shown.
    """

    recent: list[int]
    tail: TextTail


@dataclass
class SavedStream:
    """Content of a state file.

    Args:
        model_hash: Hash of the model that made it.
        variant: Variant that made it.
        position: Tokens or steps read.
        text: Of a stream of text; None for one of features.
        tensors: Name of a state or of the model's output to array, as it steps: float32 or int64.
        stored: Name to the dtype that the file has, where it is another.
    """

    model_hash: str
    variant: str
    position: int
    text: TextPart | None
    tensors: dict[str, NDArray[Any]]
    stored: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Resting:
    """A saved stream in memory, its tensors as a file would store them.

    Args:
        saved: All but its tensors.
        tensors: Name to what a file would hold, scales included.
    """

    saved: SavedStream
    tensors: dict[str, NDArray[Any]]

    @classmethod
    def of(cls, saved: SavedStream, dtype: str) -> Resting:
        """Lay a stream to rest.

        Args:
            saved: As it stands; with ``"float32"`` its arrays are kept, and not copied.
            dtype: As of :func:`write`.

        Raises:
            EdgelinError: A state is not finite, or there is no such dtype.
        """
        tensors = _encoded(saved.tensors, state_codec.check(dtype))
        return cls(replace(saved, tensors={}), tensors)

    @property
    def position(self) -> int:
        """Tokens or steps read."""
        return self.saved.position

    @property
    def nbytes(self) -> int:
        """Size of the tensors."""
        return sum(array.nbytes for array in self.tensors.values())

    def wake(self) -> SavedStream:
        """As the stream goes on: in float32."""
        return replace(self.saved, tensors=_decoded(self.tensors), stored=_stored(self.tensors))


def write(path: Path, saved: SavedStream, *, dtype: str = "float32") -> None:
    """Write a state file; an older one stays whole until the new one is complete.

    Args:
        path: The file.
        saved: Its content.
        dtype: How float32 states are stored, one of :data:`state_codec.DTYPES`.

    Raises:
        EdgelinError: The file cannot be written, or a state is not finite.
    """
    tensors = _encoded(saved.tensors, state_codec.check(dtype))
    metadata = {
        "edgelin_state": FORMAT,
        "model_hash": saved.model_hash,
        "variant": saved.variant,
        "position": str(saved.position),
    }
    if saved.text is not None:
        tail = saved.text.tail
        metadata["recent"] = json.dumps(saved.text.recent)
        metadata["text"] = json.dumps({"pending": tail.pending.hex(), "held": tail.held})
    metadata["sha256"] = _hash(metadata, tensors)
    checks.target(path)
    try:
        with replacing(path) as part, part.open("wb") as file:
            file.write(safetensors.numpy.save(tensors, metadata))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise EdgelinError(f"{path} cannot be written: {error.strerror or error}") from error


def read(path: Path) -> SavedStream:
    """Read a state file.

    Raises:
        EdgelinError: It is missing, damaged, or not a state file.
    """
    metadata, found = _content(path)
    if metadata.get("sha256") != _hash(metadata, found):
        raise EdgelinError(f"{path} is damaged: its content differs from its hash; save it again")
    try:
        position = _position(metadata["position"])
        return SavedStream(
            model_hash=_word(metadata, "model_hash"),
            variant=_word(metadata, "variant"),
            position=position,
            text=_text(metadata, position),
            tensors=_decoded(found),
            stored=_stored(found),
        )
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise EdgelinError(f"{path} is damaged: odd metadata ({error}); save it again") from error


def _content(path: Path) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Metadata and tensors of a state file of our format, which is told before tensors are read."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no plain file")  # opening a pipe would wait for ever
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            _check_format(path, metadata.get("edgelin_state"))
            for name in file.keys():  # noqa: SIM118
                if (code := file.get_slice(name).get_dtype()) not in _CODES:
                    raise ValueError(f"a tensor is {code}")
            return metadata, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise EdgelinError(f"there is no state file {path}") from None
    except (safetensors.SafetensorError, OSError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise EdgelinError(
            f"{path} is damaged or no state file ({reason}); save it again"
        ) from error


def _check_format(path: Path, found: str | None) -> None:
    """Refuse what this edgelin does not read."""
    if found is None:
        raise EdgelinError(
            f"{path} is no edgelin state file of format {FORMAT}; make one with --save-state"
        )
    if found != FORMAT:
        raise EdgelinError(
            f"{path} has format {found[:20]!r}; this edgelin {__version__} reads format {FORMAT}: "
            "save it again, or install the edgelin that wrote it"
        )


def _encoded(tensors: Mapping[str, NDArray[Any]], dtype: str) -> dict[str, NDArray[Any]]:
    """The tensors of a file."""
    found = {}
    for name, array in tensors.items():
        if not np.isfinite(array).all():
            raise EdgelinError(f"{name} is not finite, so the stream cannot be saved; reset it")
        stored = state_codec.encode(array, "float32" if name in _ANSWERS else dtype)
        found[name] = stored.values
        if stored.scale is not None:
            found[name + _SCALE] = stored.scale
    return found


def _decoded(tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The tensors as they step; one whose scales do not fit stays, and is refused later."""
    found = dict(tensors)
    for name, array in tensors.items():
        if array.dtype not in _SHORTER or name in _ANSWERS:
            continue
        scale = None
        if array.dtype == np.int8:
            scale = tensors.get(name + _SCALE)
            shape = (*array.shape[:-1], 1)
            if scale is None or scale.dtype != np.float32 or scale.shape != shape:
                continue
            del found[name + _SCALE]
        with np.errstate(over="ignore", invalid="ignore"):
            found[name] = state_codec.decode(state_codec.Encoded(array, scale))
    return found


def _stored(tensors: Mapping[str, NDArray[Any]]) -> dict[str, str]:
    """The dtypes of those that are not stored as they step."""
    return {name: str(a.dtype) for name, a in tensors.items() if a.dtype in _SHORTER}


def check(
    saved: SavedStream, where: str | Path, manifest: Manifest, *, variant: str, batch: int
) -> None:
    """Refuse what another model saved, or what this one cannot have; warn of another variant.

    Args:
        saved: What is to be loaded.
        where: Its name in the errors.
        manifest: Of the bundle that is to go on from it.
        variant: The variant that does.
        batch: Rows that it has.

    Raises:
        EdgelinError: It is of another model, or of another batch size, or damaged.
    """
    if saved.model_hash != manifest.model_hash:
        raise EdgelinError(
            f"{where} was saved by another model ({saved.model_hash[:12]}, this one is "
            f"{manifest.model_hash[:12]}); a state only fits the model that made it"
        )
    wanted = {s.name: (s.sized(saved.position), s.dtype) for s in manifest.states}
    wanted[manifest.output.name] = ((manifest.output.size,), "float32")
    _check_tensors(saved, where, wanted, batch)
    counters = [spec.name for spec in manifest.states if spec.kind == "position"]
    if any((saved.tensors[name] != saved.position).any() for name in counters):
        raise EdgelinError(f"{where} is damaged: its positions disagree; save it again")
    if isinstance(manifest.input, Tokens) != (saved.text is not None):
        raise EdgelinError(f"{where} is damaged: it is not of {manifest.input.kind}; save it again")
    recent = [] if saved.text is None else saved.text.recent
    if any(not 0 <= token < manifest.output.size for token in recent):
        raise EdgelinError(f"{where} is damaged: a recent id is out of range; save it again")
    if saved.variant != variant:
        _log.warning(
            "Warning: %s was saved by variant %s and goes on with %s; the outputs may differ",
            where, saved.variant, variant,
        )  # fmt: skip


def _check_tensors(
    saved: SavedStream, where: str | Path, wanted: Mapping[str, Any], batch: int
) -> None:
    """Refuse other tensors than the wanted ones (name to sizes and dtype), and NaN in them."""
    for name, (sizes, dtype) in wanted.items():
        found, shape = saved.tensors.get(name), (batch, *sizes)
        if found is None or found.shape != shape or found.dtype != dtype:
            have = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
            raise EdgelinError(
                f"{where}: tensor {name} is {have}, {dtype} {list(shape)} is needed; "
                "the file is of another batch size or damaged"
            )
        if not np.isfinite(found).all():
            raise EdgelinError(f"{where} is damaged: {name} is not finite; save it again")
    if extra := sorted(saved.tensors.keys() - wanted):
        raise EdgelinError(
            f"{where} holds {extra[0]!r}, which this model does not have; "
            "the file is damaged, save it again"
        )


def _word(metadata: Mapping[str, str], key: str) -> str:
    """A value that can be shown on a line."""
    if not metadata[key].isprintable():
        raise ValueError(f"{key} is {metadata[key][:30]!r}")
    return metadata[key]


def _position(text: str) -> int:
    """The number of tokens read, which fits an int64; a saved stream has read one at least."""
    if not re.fullmatch(r"[1-9][0-9]{0,18}", text) or int(text) >= 2**63:
        raise ValueError(f"position is {text[:30]!r}")
    return int(text)


def _text(metadata: dict[str, str], position: int) -> TextPart | None:
    """What belongs to a stream of text, which has either both keys or none."""
    if not {"recent", "text"} & metadata.keys():
        return None
    recent = _recent(metadata["recent"], min(position, WINDOW))
    return TextPart(recent, _tail(metadata["text"]))


def _recent(text: str, count: int) -> list[int]:
    """The last ``count`` token ids."""
    tokens = json.loads(text)
    if not isinstance(tokens, list) or len(tokens) != count:
        raise ValueError(f"recent is no list of {count} ids")
    if any(type(token) is not int for token in tokens):
        raise ValueError("recent holds what is no integer")
    return tokens


def _tail(text: str) -> TextTail:
    """Valid held text, and bytes that only begin a character."""
    stored = json.loads(text)
    pending, held = bytes.fromhex(stored["pending"]), stored["held"]
    if not isinstance(held, str) or codecs.getincrementaldecoder("utf-8")().decode(pending):
        raise ValueError("text holds no beginning of a character or of a stop string")
    held.encode()  # refuses unpaired surrogates
    return TextTail(pending, held)


def _hash(metadata: dict[str, str], tensors: dict[str, NDArray[Any]]) -> str:
    """sha256 of all metadata but itself, then of the tensors' little-endian bytes, by name.

    A key and its value are UTF-8, each followed by a zero byte.
    """
    total = hashlib.sha256()
    for key in sorted(metadata.keys() - {"sha256"}):
        total.update(f"{key}\0{metadata[key]}\0".encode())
    for name in sorted(tensors):
        total.update(np.ascontiguousarray(tensors[name]).data)
    return total.hexdigest()
