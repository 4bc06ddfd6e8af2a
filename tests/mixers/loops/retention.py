"""Loop of the mixer ``retention``."""

from __future__ import annotations

from typing import Any

import numpy as np

from loops.common import LINEAR, Arrays, gated_output, heads_of, matrix, memory, turned

CASES: dict[str, dict[str, Any]] = {
    "retention": {"type": "retention", **LINEAR},
    "retention, rope": {"type": "retention", **LINEAR, "rope": True},
}


def loop(m: Any, x: np.ndarray, state: Arrays, position: np.ndarray) -> Any:
    c = m.config
    sizes = [c.num_heads * c.key_dim] * 2 + [c.num_heads * c.value_dim]
    parts = np.split(x @ matrix(m, "qkv_gate_proj.weight").T, np.cumsum(sizes), axis=-1)
    q, k, v, gate = (heads_of(a, c.num_heads) for a in parts)
    tokens = position[:, None] + np.arange(x.shape[1])
    theta = 10000.0 ** -np.linspace(0, 1, c.key_dim // 2, endpoint=not c.rope)
    q, k = turned(q, tokens, theta), turned(k, tokens, theta)
    gamma = 1 - 2.0 ** (-5 - np.arange(c.num_heads))
    decay = np.broadcast_to(gamma[:, None], (*x.shape[:2], c.num_heads, 1))
    o, s = memory(q / c.key_dim**0.5, k, v, decay, state["recurrent.3"])
    return gated_output(m, o, gate), {"recurrent.3": s}
