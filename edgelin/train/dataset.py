"""Sequences of features with answers, from .npz files: what they hold, and batches of windows.

A file has ``x`` float32 ``[n, F]``, the frames of all sequences one after another; ``lengths``
int64 ``[sequences]``; and ``y``, the answers: int64 classes, or float32 with an axis ``[outputs]``
more for a regression. Head ``sequence``: an answer a sequence. Head ``step``: an answer a frame,
where the class -1 says that none is wanted.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgelin.config import FeatureConfig
from edgelin.errors import EdgelinError

Array = np.ndarray[Any, Any]
_KEYS = ("x", "lengths", "y")


@dataclass(frozen=True)
class Dataset:
    """Sequences of features and their answers.

    Args:
        x: Frames of all sequences ``[n, F]`` float32.
        y: Answers: of every sequence (head ``sequence``) or frame (head ``step``), int64 classes
            ``[...]`` or float32 ``[..., outputs]``.
        lengths: Frames of every sequence ``[sequences]`` int64.
        features: What the answers are.
    """

    x: torch.Tensor
    y: torch.Tensor
    lengths: Array
    features: FeatureConfig

    def to(self, device: torch.device) -> Dataset:
        """The same with frames and answers on a device."""
        return Dataset(self.x.to(device), self.y.to(device), self.lengths, self.features)

    def windows(
        self, sequences: Array, offsets: Array, lengths: Array
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A batch of windows, padded at the right to the longest by their last frame.

        Args:
            sequences: Index of every window's sequence ``[B]``.
            offsets: Its first frame in that sequence ``[B]``.
            lengths: Its frames ``[B]``.

        Returns:
            Features ``[B, T, F]``; answers ``[B, T]`` or ``[B, T, outputs]``; and which of them are
            wanted ``[B, T]`` bool: those of the window's frames, or of its last one.
        """
        steps = np.arange(lengths.max())
        last = lengths[:, None] - 1
        starts = np.cumsum(self.lengths) - self.lengths
        index = (starts[sequences] + offsets)[:, None] + np.minimum(steps, last)
        frames = torch.from_numpy(index).to(self.x.device)
        if self.features.head == "sequence":
            of = torch.from_numpy(np.repeat(sequences[:, None], len(steps), 1))
            wanted = torch.from_numpy(steps == last).to(self.x.device)
            return self.x[frames], self.y[of.to(self.x.device)], wanted
        answers = self.y[frames]
        wanted = torch.from_numpy(steps <= last).to(self.x.device)
        if self.features.task == "classification":
            wanted = wanted & (answers >= 0)
        return self.x[frames], answers, wanted


def load(paths: Sequence[str | Path], features: FeatureConfig) -> Dataset:
    """Read .npz files as one dataset on the CPU.

    Args:
        paths: The files; their sequences follow one another.
        features: What they must fit.

    Raises:
        EdgelinError: A file cannot be read, lacks an array, or an array does not fit.
    """
    parts = [_read(Path(path), features) for path in paths]
    x, lengths, y = (np.concatenate([part[i] for part in parts]) for i in range(len(_KEYS)))
    if features.task == "classification" and not (y >= 0).any():
        raise EdgelinError(f"{paths[0]}: y is -1 everywhere; give at least one frame a class")
    return Dataset(torch.from_numpy(x), torch.from_numpy(y), lengths, features)


def _read(path: Path, features: FeatureConfig) -> tuple[Array, Array, Array]:
    """The checked arrays of a file."""
    try:
        with path.open("rb") as raw:  # numpy leaves a damaged file open that it opened itself
            file = np.load(raw, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise EdgelinError(f"{path} is no .npz file; write it by numpy.savez")
            for key in _KEYS:
                if key not in file:
                    raise EdgelinError(
                        f"{path} lacks the array {key!r}; it has: {', '.join(sorted(file))}"
                    )
            x, lengths, y = (file[key] for key in _KEYS)
    except OSError as error:
        reason = error.strerror or error
        raise EdgelinError(f"cannot read the features {path}: {reason}") from error
    except (ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise EdgelinError(
            f"{path} is no readable .npz file ({error}); write it by numpy.savez, without objects"
        ) from error
    _check_frames(path, x, lengths, features.size)
    _check_answers(path, y, len(lengths), len(x), features)
    return x, lengths, y


def _check_frames(path: Path, x: Array, lengths: Array, size: int) -> None:
    """``x`` and ``lengths`` fit each other and the model."""
    _check_type(path, "x", x, np.float32)
    if x.ndim != 2:
        raise EdgelinError(f"{path}: x has shape {list(x.shape)}; [frames, {size}] is needed")
    if x.shape[1] != size:
        raise EdgelinError(
            f"{path}: x has {x.shape[1]} features a frame, model.features.size is {size}; "
            f"set it to {x.shape[1]}"
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
