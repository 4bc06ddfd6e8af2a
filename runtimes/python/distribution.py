"""Distances between the answers of two models, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Log-probabilities along the last axis."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def divergence(p_logits: NDArray[Any], q_logits: NDArray[Any]) -> NDArray[np.float64]:
    """Kullback-Leibler divergence of softmax(q) from softmax(p), in nat, along the last axis."""
    p, q = log_softmax(p_logits), log_softmax(q_logits)
    return np.asarray((np.exp(p) * (p - q)).sum(-1))


def deviation(wanted: NDArray[Any], found: NDArray[Any]) -> float:
    """rms(found - wanted) / rms(wanted - mean(wanted)) of answers [N, size], the mean over N."""
    wanted = wanted.astype(np.float64)
    spread = np.square(wanted - wanted.mean(0)).mean()
    error = np.square(found.astype(np.float64) - wanted).mean()
    return float(np.sqrt(error / max(float(spread), np.finfo(np.float64).tiny)))
