"""Learning-rate schedule by steps and by time."""

from __future__ import annotations

import math

import pytest

from edgelin.config import OptimConfig
from edgelin.train.schedule import learning_rate, progress


def test_cosine_by_steps() -> None:
    optim = OptimConfig(1, 1, steps=100, learning_rate=1.0, min_learning_rate=0.2, warmup_steps=10)
    assert learning_rate(optim, 0, 1e9) == pytest.approx(0.1)
    assert learning_rate(optim, 9, 0) == pytest.approx(0.2 + 0.4 * (1 + math.cos(0.09 * math.pi)))
    assert learning_rate(optim, 50, 0) == pytest.approx(0.6)
    assert learning_rate(optim, 100, 0) == learning_rate(optim, 120, 0) == pytest.approx(0.2)


def test_time_gives_a_full_cosine() -> None:
    optim = OptimConfig(1, 1, max_seconds=20.0, learning_rate=1.0, min_learning_rate=0.0)
    assert learning_rate(optim, 1000, 10.0) == pytest.approx(0.5)
    assert learning_rate(optim, 1000, 30.0) == pytest.approx(0.0)
    assert progress(optim, 10**9, 5.0) == 0.25


def test_the_first_end_counts() -> None:
    optim = OptimConfig(1, 1, steps=10, max_seconds=20.0)
    assert progress(optim, 5, 1.0) == 0.5
    assert progress(optim, 5, 15.0) == 0.75
    assert progress(optim, 11, 1.0) == 1.0
