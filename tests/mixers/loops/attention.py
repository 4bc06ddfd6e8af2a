"""Loop of the mixer ``attention``."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops.common import EPS, Arrays, heads_of, matrix, turned

_SIZES = {"type": "attention", "num_heads": 4, "head_dim": 6}
_OPTIONS = {"rotary_dim": 2, "qk_norm": True, "gate": True, "bias": True, "out_bias": True}
CASES: dict[str, dict[str, Any]] = {
    name: {**_SIZES, **table}
    for name, table in {
        "attention, window 7": {"window": 7, "num_kv_heads": 2},
        "attention, window 7, 4 sinks": {"window": 7, "sinks": 4, "num_kv_heads": 4},
        "attention, window 64": {"window": 64, "num_kv_heads": 2},
        "attention, window 100": {"window": 100, "num_kv_heads": 4},
        "attention, window 80, 5 sinks": {"window": 80, "sinks": 5, "num_kv_heads": 2, **_OPTIONS},
        "attention, all tokens": {"window": 0, "num_kv_heads": 2, "rope_theta": 500.0},
        "attention, all tokens, options": {"window": 0, "num_kv_heads": 4, **_OPTIONS},
        "attention, all tokens, joint norm": {
            "window": 0,
            "num_kv_heads": 2,
            "joint_qk_norm": True,
            "gate": True,
        },
        "attention, all tokens, no rotation": {
            "window": 0,
            "num_kv_heads": 1,
            "rotary_dim": 0,
            "head_gate": True,
        },
    }.items()
}


def loop(m: Any, x: np.ndarray, state: Arrays, position: np.ndarray) -> Any:
    c = m.config
    query, key, value, gate = _projected(m, x, position)
    outputs = np.zeros((*x.shape[:2], c.num_heads, c.head_dim))
    after = {name: [row.copy() for row in array] for name, array in state.items()}
    for b, start in enumerate(position):
        row = [(after["key.3"][b], key[b]), (after["value.3"][b], value[b])]
        if not c.window:
            row = [(old, new.swapaxes(0, 1)) for old, new in row]
            row = [(np.concatenate([old, new], axis=1), new) for old, new in row]
        for t in range(x.shape[1]):
            now = start + t
            if c.window:
                for slots, new in row:
                    slots[:, _slot(c, now)] = new[t]
                seen = {_slot(c, p) for p in range(max(0, now - c.window + 1), now + 1)}
                seen = sorted(seen | set(range(min(c.sinks, now + 1))))
            else:
                seen = list(range(state["key.3"].shape[2] + t + 1))
            for h in range(c.num_heads):
                keys, values = (slots[h * c.num_kv_heads // c.num_heads] for slots, _ in row)
                scores = keys[seen] @ query[b, t, h] / c.head_dim**0.5
                scores = np.exp(scores - scores.max())
                outputs[b, t, h] = scores @ values[seen] / scores.sum()
        after["key.3"][b], after["value.3"][b] = (slots for slots, _ in row)
    if c.head_gate:
        gate = gate / (1 + np.exp(-x @ matrix(m, "gate_proj.weight").T))[..., None]
    y = (outputs * gate).reshape(*x.shape[:2], -1) @ matrix(m, "out_proj.weight").T
    y = y + (matrix(m, "out_proj.bias") if c.out_bias else 0)
    return y, {name: np.stack(rows) for name, rows in after.items()}


def _slot(c: Any, token: int) -> int:
    """Where a position lies in a ring with sinks."""
    return token if token < c.sinks else c.sinks + (token - c.sinks) % c.window


def _projected(m: Any, x: np.ndarray, position: np.ndarray) -> list[np.ndarray]:
    """Rotated queries and keys, values, and gates (or 1), each `[B, T, heads, D]`."""
    c = m.config
    counts = [c.num_heads, c.num_kv_heads, c.num_kv_heads, c.num_heads]
    counts = counts if c.gate else counts[:3]
    rows = x @ matrix(m, "qkv_proj.weight").T + (matrix(m, "qkv_proj.bias") if c.bias else 0)
    parts = np.split(heads_of(rows, sum(counts)), np.cumsum(counts)[:-1], axis=2)
    tokens = position[:, None] + np.arange(x.shape[1])
    size = c.head_dim if c.rotary_dim is None else c.rotary_dim
    theta = float(c.rope_theta) ** (-np.arange(0, size, 2) / max(size, 1))
    for i, name in enumerate(("q_norm.weight", "k_norm.weight")):
        if c.qk_norm:
            mean = (parts[i] ** 2).mean(-1, keepdims=True)
            parts[i] = parts[i] / np.sqrt(mean + EPS) * matrix(m, name)
        if c.joint_qk_norm:
            mean = (parts[i] ** 2).mean((-2, -1), keepdims=True)
            weight = matrix(m, name).reshape(counts[i], c.head_dim)
            parts[i] = parts[i] / np.sqrt(mean + EPS) * weight
        turning = turned(parts[i][..., :size], tokens, theta)
        parts[i] = np.concatenate([turning, parts[i][..., size:]], axis=-1)
    return [*parts[:3], 1 / (1 + np.exp(-parts[3])) if c.gate else np.ones(1)]
