"""Sequences of features with answers, as .npz files hold them; needs numpy alone.

A file has ``x`` float32 ``[n, F]``, the frames of all sequences one after another; ``lengths``
int64 ``[sequences]``; and ``y``, the answers: int64 classes, or float32 with an axis ``[outputs]``
more for a regression. Head ``sequence``: an answer a sequence. Head ``step``: an answer a frame,
where the class -1 says that none is wanted.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgelin.config import FeatureConfig
from edgelin.errors import EdgelinError

Array = NDArray[Any]
# What numpy.load raises of a damaged file; RuntimeError: a bit of it says that it is encrypted, or
# compressed in a way that zipfile has not.
DAMAGED = (ValueError, EOFError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class Sequences:
    """Content of an .npz.

    Args:
        x: Frames of all sequences ``[n, F]`` float32.
        lengths: Frames of every sequence ``[sequences]`` int64.
        y: Answers, see above; None: they were not read.
    """

    x: Array
    lengths: Array
    y: Array | None = None

    def __iter__(self) -> Iterator[Array]:
        """Every sequence `[T, F]`."""
        return iter(np.split(self.x, np.cumsum(self.lengths)[:-1]))


def read_sequences(path: Path, features: FeatureConfig, *, scored: bool = True) -> Sequences:
    """Read an ``.npz`` for a model.

    Args:
        path: The file.
        features: What the model reads and answers.
        scored: Whether the answers are needed.

    Raises:
        EdgelinError: The file cannot be read, lacks an array, or an array does not fit.
    """
    arrays = load_arrays(path, ".npz")
    keys = ("x", "lengths", "y") if scored else ("x", "lengths")
    for key in keys:
        if key not in arrays:
            raise EdgelinError(
                f"{path} lacks the array {key!r}; it has: {', '.join(sorted(arrays))}"
            )
    x, lengths = arrays["x"], arrays["lengths"]
    _check_frames(path, x, lengths, features.size)
    if not scored:
        return Sequences(x, lengths)
    _check_answers(path, arrays["y"], len(lengths), len(x), features)
    return Sequences(x, lengths, arrays["y"])


def load_arrays(path: Path, suffix: str) -> dict[str, Array]:
    """Read the arrays of a file of numpy's.

    Args:
        path: The file.
        suffix: ``".npz"`` or ``".npy"``, what it must be whatever its name is.

    Returns:
        Arrays by name; the one of an ``.npy`` has the empty name.

    Raises:
        EdgelinError: The file cannot be read, or is no such file.
    """
    writer = "savez" if suffix == ".npz" else "save"
    problem = f"write it by numpy.{writer}, without objects"
    try:
        with path.open("rb") as file:  # numpy leaves it open when it refuses the content
            found = np.load(file, allow_pickle=False)
            if not isinstance(found, np.lib.npyio.NpzFile):
                arrays = {"": found}
            else:
                with found:
                    arrays = {name: found[name] for name in found.files}
    except OSError as error:
        reason = error.strerror or error
        raise EdgelinError(f"cannot read the features {path}: {reason}") from error
    except DAMAGED as error:
        reason = " ".join(str(error).split())
        raise EdgelinError(f"{path} is no readable {suffix} file ({reason}); {problem}") from error
    if ("" in arrays) != (suffix == ".npy"):
        raise EdgelinError(f"{path} is no {suffix} file; write it by numpy.{writer}")
    return arrays


def _check_frames(path: Path, x: Array, lengths: Array, size: int) -> None:
    """``x`` and ``lengths`` fit each other and the model."""
    _check_type(path, "x", x, np.float32)
    if x.ndim != 2:
        raise EdgelinError(f"{path}: x has shape {list(x.shape)}; [frames, {size}] is needed")
    if x.shape[1] != size:
        raise EdgelinError(
            f"{path}: x has {x.shape[1]} features a frame, the model reads {size} "
            f"(model.features.size); take the data that it was made for"
        )
    _check_finite(path, "x", x)
    _check_type(path, "lengths", lengths, np.int64)
    if lengths.ndim != 1 or not len(lengths):
        raise EdgelinError(
            f"{path}: lengths has shape {list(lengths.shape)}; [sequences] is needed, at least one"
        )
    if lengths.min() < 1:
        where = int(lengths.argmin())
        raise EdgelinError(
            f"{path}: lengths[{where}] is {lengths[where]}; a sequence has at least 1 frame"
        )
    if lengths.sum() != len(x):
        raise EdgelinError(f"{path}: lengths add up to {lengths.sum()}, x has {len(x)} frames")


def _check_answers(
    path: Path, y: Array, sequences: int, frames: int, features: FeatureConfig
) -> None:
    """``y`` has an answer for every sequence or frame, in range."""
    step = features.head == "step"
    shape = [frames if step else sequences]
    if features.task == "regression":
        _check_type(path, "y", y, np.float32)
        shape.append(features.outputs)
    else:
        _check_type(path, "y", y, np.int64)
    if list(y.shape) != shape:
        raise EdgelinError(
            f"{path}: y has shape {list(y.shape)}; {features.task} with head {features.head!r} "
            f"needs {shape}"
        )
    if features.task == "regression":
        _check_finite(path, "y", y)
        return
    least = -1 if step else 0
    wrong = np.flatnonzero((y < least) | (y >= features.outputs))
    if len(wrong):
        raise EdgelinError(
            f"{path}: y[{wrong[0]}] is {y[wrong[0]]}; classes are {least} to "
            f"{features.outputs - 1} with model.features.outputs = {features.outputs}"
        )


def _check_type(path: Path, name: str, array: Array, dtype: type[np.generic]) -> None:
    if array.dtype != dtype:
        raise EdgelinError(
            f"{path}: {name} is {array.dtype}; {np.dtype(dtype)} is needed: convert it by astype"
        )


def _check_finite(path: Path, name: str, array: Array) -> None:
    wrong = np.argwhere(~np.isfinite(array))
    if len(wrong):
        place = ", ".join(str(int(i)) for i in wrong[0])
        raise EdgelinError(
            f"{path}: {name}[{place}] is {array[tuple(wrong[0])]}; only finite numbers are allowed"
        )


__all__ = ["Sequences", "load_arrays", "read_sequences"]
