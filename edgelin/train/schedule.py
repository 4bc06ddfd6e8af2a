"""Learning rate: linear warm-up by steps, then a cosine by steps or by elapsed time."""

from __future__ import annotations

import math

from edgelin.config import OptimConfig


def progress(optim: OptimConfig, step: int, elapsed: float) -> float:
    """Part of the run that is done, 0 to 1: the larger of steps and seconds, as far as set."""
    parts = [0.0]
    if optim.steps is not None:
        parts.append(step / optim.steps)
    if optim.max_seconds is not None:
        parts.append(elapsed / optim.max_seconds)
    return min(1.0, max(parts))


def learning_rate(optim: OptimConfig, step: int, elapsed: float) -> float:
    """Rate of the step after ``step`` done ones, ``elapsed`` seconds into the run."""
    cosine = 0.5 * (1 + math.cos(math.pi * progress(optim, step, elapsed)))
    rate = optim.min_learning_rate + (optim.learning_rate - optim.min_learning_rate) * cosine
    return rate * min(1.0, (step + 1) / max(1, optim.warmup_steps))
