"""Loop of the mixer ``attention``."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops.common import Arrays, heads_of, matrix, turned

CASES: dict[str, dict[str, Any]] = {
    f"attention, window {window}": {
        "type": "attention",
        "num_heads": 4,
        "num_kv_heads": heads,
        "head_dim": 6,
        "window": window,
    }
    for window, heads in ((7, 2), (64, 2), (100, 4))
}


def loop(m: Any, x: np.ndarray, state: Arrays, position: np.ndarray) -> Any:
    c = m.config
    qkv = heads_of(x @ matrix(m, "qkv_proj.weight").T, c.num_heads + 2 * c.num_kv_heads)
    tokens = position[:, None] + np.arange(x.shape[1])
    theta = c.rope_theta ** (-np.arange(0, c.head_dim, 2) / c.head_dim)
    q, k, v = np.split(qkv, np.cumsum([c.num_heads, c.num_kv_heads]), axis=2)
    q, k = turned(q, tokens, theta), turned(k, tokens, theta)
    key, value = state["key.3"].copy(), state["value.3"].copy()
    outputs = np.zeros((*x.shape[:2], c.num_heads, c.head_dim))
    for b, start in enumerate(position):
        ring = range(max(0, start - c.window), start)
        seen_k = [key[b, :, p % c.window] for p in ring]
        seen_v = [value[b, :, p % c.window] for p in ring]
        for t in range(x.shape[1]):
            seen_k.append(k[b, t])
            seen_v.append(v[b, t])
            for h in range(c.num_heads):
                own = h // (c.num_heads // c.num_kv_heads)
                keys = np.stack(seen_k[-c.window :])[:, own]
                scores = np.exp(keys @ q[b, t, h] / c.head_dim**0.5)
                values = np.stack(seen_v[-c.window :])[:, own]
                outputs[b, t, h] = scores @ values / scores.sum()
            slot = (start + t) % c.window
            key[b, :, slot], value[b, :, slot] = k[b, t], v[b, t]
    y = outputs.reshape(*x.shape[:2], -1) @ matrix(m, "out_proj.weight").T
    return y, {"key.3": key, "value.3": value}
