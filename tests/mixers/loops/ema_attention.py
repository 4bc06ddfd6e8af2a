"""Loop of the mixer ``ema_attention``."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops import linear_attention
from loops.common import LINEAR, Arrays, matrix, sigmoid

BASE = {"type": "ema_attention", **LINEAR}
CASES: dict[str, dict[str, Any]] = {
    "ema_attention": BASE,
    "ema_attention, fixed, taylor": {**BASE, "decay": 0.9, "feature_map": "taylor"},
    "ema_attention, rms": {**BASE, "normalize": "rms"},
}


def loop(m: Any, x: np.ndarray, state: Arrays, position: np.ndarray) -> Any:
    fixed = m.config.decay
    heads = m.config.num_heads
    a = sigmoid(matrix(m, "decay_logit")) if fixed is None else np.full(heads, fixed)
    return linear_attention.loop(m, x, state, position, decay=a)
