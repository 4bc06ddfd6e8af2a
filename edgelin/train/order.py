"""Which tokens a step reads: a pure function of (seed, step), so that a resumed run goes on equal.

Shuffled windows: epoch e cuts the tokens into windows of ``sequence_length`` from an offset of its
own and visits them in a permutation of its own. Carried state: the tokens are a ring that each
epoch enters at an offset of its own; row b of the batch reads its own stretch of it from left to
right, so that the recurrent state of one step is the right start of the next.
"""

from __future__ import annotations

import numpy as np
import torch

from edgelin.config import OptimConfig
from edgelin.errors import EdgelinError


class Order:
    """The batches of a run.

    Args:
        tokens: Training tokens ``[n]``, int32, on the device that trains.
        optim: Gives batch size and sequence length.
        seed: Of the run.
        carry_state: Contiguous rows instead of shuffled windows.
    """

    def __init__(
        self, tokens: torch.Tensor, optim: OptimConfig, seed: int, *, carry_state: bool
    ) -> None:
        self._tokens = tokens
        self._batch, self._length = optim.batch_size, optim.sequence_length
        self._seed, self._carry = seed, carry_state
        rows = len(tokens) // self._length - 1  # one window is lost to the offset
        self.steps_per_epoch = rows // self._batch
        if self.steps_per_epoch < 1:
            need = (self._batch + 1) * self._length
            raise EdgelinError(
                f"data.train holds {len(tokens)} tokens, one batch needs {need}; lower "
                f"optim.batch_size or optim.sequence_length, or give more text"
            )
        self._span = torch.arange(self._length + 1, device=tokens.device)
        self._epoch = -1
        self._starts = np.empty(0, dtype=np.int64)

    def starts(self, step: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """First token of every row of a step, ``[batch] int64``."""
        epoch, within = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._starts = epoch, self._epoch_starts(epoch)
        if self._carry:
            return (self._starts + within * self._length) % len(self._tokens)
        return self._starts[within * self._batch : (within + 1) * self._batch]

    def begins(self, step: int) -> bool:
        """Whether the rows of a step do not continue those of the step before."""
        return not self._carry or step % self.steps_per_epoch == 0

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of a step, each ``[batch, sequence_length] int64``."""
        starts = torch.from_numpy(self.starts(step).copy())
        if self._tokens.is_cuda:  # a pinned copy does not wait for the GPU
            starts = starts.pin_memory().to(self._tokens.device, non_blocking=True)
        rows = self._tokens[(starts[:, None] + self._span) % len(self._tokens)].long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def _epoch_starts(self, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        generator = np.random.default_rng([self._seed, epoch])
        if self._carry:
            stretch = self.steps_per_epoch * self._length
            return generator.integers(len(self._tokens)) + stretch * np.arange(self._batch)
        count = len(self._tokens) // self._length - 1
        offset = generator.integers(self._length)
        return offset + self._length * generator.permutation(count)
