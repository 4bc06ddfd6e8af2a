"""Sequences of features with answers, from .npz files, and batches of windows of them.

:mod:`edgelin.sequences` says what a file holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgelin.config import FeatureConfig
from edgelin.errors import EdgelinError
from edgelin.sequences import read_sequences

Array = np.ndarray[Any, Any]


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
    parts = [read_sequences(Path(path), features) for path in paths]
    x, lengths, y = (
        np.concatenate([getattr(part, key) for part in parts]) for key in ("x", "lengths", "y")
    )
    if features.task == "classification" and not (y >= 0).any():
        raise EdgelinError(f"{paths[0]}: y is -1 everywhere; give at least one frame a class")
    return Dataset(torch.from_numpy(x), torch.from_numpy(y), lengths, features)
