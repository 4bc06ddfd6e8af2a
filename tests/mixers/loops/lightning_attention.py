"""Loop of the mixer ``lightning_attention``."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops.common import EPS, LINEAR, Arrays, heads_of, linear, matrix, memory, sigmoid

BASE = {"type": "lightning_attention", **LINEAR}
CASES: dict[str, dict[str, Any]] = {
    "lightning_attention": BASE,
    "lightning_attention, slower, own eps": {**BASE, "decay_scale": 0.3, "norm_eps": 0.2},
}


def loop(m: Any, x: np.ndarray, state: Arrays, _: np.ndarray) -> Any:
    c = m.config
    keys, values = c.num_heads * c.key_dim, c.num_heads * c.value_dim
    qkv, gate = np.split(linear(m, "qkv_gate_proj", x), [2 * keys + values], axis=-1)
    parts = np.split(qkv * sigmoid(qkv), [keys, 2 * keys], axis=-1)
    q, k, v = (heads_of(part, c.num_heads) for part in parts)
    slopes = [c.decay_scale * 0.5 ** (8 * (h + 1) / c.num_heads) for h in range(c.num_heads)]
    decay = np.broadcast_to(np.exp(-np.array(slopes))[:, None], (*x.shape[:2], c.num_heads, 1))
    o, s = memory(q, k, v, decay, state["recurrent.3"])
    o = o.reshape(*x.shape[:2], values)
    o = o / np.sqrt((o**2).mean(-1, keepdims=True) + (c.norm_eps or EPS)) * matrix(m, "norm.weight")
    return linear(m, "out_proj", o * sigmoid(gate)), {"recurrent.3": s}
