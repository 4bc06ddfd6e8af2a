"""What a run says while it goes: means over the last steps, and lines beside a progress bar."""

from __future__ import annotations

import sys
import time

import torch
from tqdm import tqdm


class Meter:
    """Means of loss and gradient norm, and tokens per second, since the last reading.

    Args:
        tokens_per_step: Tokens that a step reads.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens = tokens_per_step
        self._sums: torch.Tensor | None = None
        self._steps = 0
        self._since = time.perf_counter()

    def add(self, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """Take one step in; nothing waits for the device."""
        values = torch.stack([loss.float(), norm.float()])
        self._sums = values if self._sums is None else self._sums + values
        self._steps += 1

    def pause(self, seconds: float) -> None:
        """Leave out time that was not spent training."""
        self._since += seconds

    def read(self) -> tuple[float, float, float] | None:
        """Loss, gradient norm, tokens per second; None if no step was taken."""
        if self._sums is None:
            return None
        loss, norm = (self._sums / self._steps).tolist()
        now = time.perf_counter()
        speed = self._steps * self._tokens / max(now - self._since, 1e-9)
        self._sums, self._steps, self._since = None, 0, now
        return loss, norm, speed


def tell(message: str) -> None:
    """Say something on stderr without breaking a progress bar."""
    tqdm.write(message, file=sys.stderr)
