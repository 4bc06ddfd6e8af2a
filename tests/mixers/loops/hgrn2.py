"""Loop of the mixer ``hgrn2``."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops.common import EPS, LINEAR, Arrays, heads_of, matrix, memory, sigmoid

CASES: dict[str, dict[str, Any]] = {
    "hgrn2": {"type": "hgrn2", **LINEAR},
    "hgrn2, lower bound": {"type": "hgrn2", **LINEAR, "lower_bound": 0.4, "norm_eps": 0.1},
}


def loop(m: Any, x: np.ndarray, state: Arrays, _: np.ndarray) -> Any:
    c = m.config
    q, v = np.split(x @ matrix(m, "qv_proj.weight").T, [c.num_heads * c.key_dim], axis=-1)
    bound = sigmoid(matrix(m, "lower_bound_logit")) if c.lower_bound else 0.0
    forget = bound + (1 - bound) * sigmoid(x @ matrix(m, "decay_proj.weight").T)
    parts = (q * sigmoid(q), 1 - forget, v, forget)
    q, k, v, decay = (heads_of(a, c.num_heads) for a in parts)
    o, s = memory(q / c.key_dim**0.5, k, v, decay, state["recurrent.3"])
    o = o.reshape(*o.shape[:2], -1)
    o = o / np.sqrt((o**2).mean(-1, keepdims=True) + (c.norm_eps or EPS)) * matrix(m, "norm.weight")
    return o @ matrix(m, "out_proj.weight").T, {"recurrent.3": s}
